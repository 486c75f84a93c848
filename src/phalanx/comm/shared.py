"""Messages between ranks of one machine through memory that they share, without sockets in between.

Every rank has an outbox for each process group: a file in memory (memfd) without a name, which its peers map. It copies
what it sends there, announces it in a slot, and goes on; a reader waits for the slot, takes the bytes where they lie,
and acknowledges them in a cell of its own, after which the writer uses the room again. Nothing waits for a peer to
wait, too: no order of waits can block.

    head of an outbox: bell | slots of collectives | slots of messages to rank 0 | to rank 1 | …
    slot: the call's number, the offset of its bytes, and a cell for each reader

Each word has one writer, and x86-64 keeps the order of stores, so no atomic instruction is needed. A rank that
waits sleeps on the bell by futex(2); where there is a core for every rank, it first looks at the slot some times.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import blocking
from phalanx.launch.lifeline import boot_id
from phalanx.launch.meeting import connections

SOCKETS = "PHALANX_SOCKETS"
"""An environment variable: where it is set, ranks of one machine talk as those of several do."""
CAPACITY = 2**36
"""Bytes of address space of an outbox. It takes memory for what is in flight only."""
SLOTS = 1024
"""Calls of one kind that may be in flight."""
LOOKS = 300
"""Looks at a slot before a rank sleeps: tens of microseconds."""
SLEEP_S = 0.1
"""After so long a sleep a rank looks whether its peers live."""
_FUTEX, _WAIT, _WAKE, _EVERYONE = 202, 0, 1, 2**31 - 1
_BELL, _LEFT, _FIRST_SLOT = 0, 1, 8  # indices of words

_libc = ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLEEP = ctypes.byref(_Time(0, int(SLEEP_S * 1e9)))


class _Outbox:
    """The memory in which one rank of `ranks` writes, mapped."""

    def __init__(self, descriptor: int, ranks: int):
        self._memory = mmap.mmap(descriptor, CAPACITY)
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self.ranks = ranks
        words = _FIRST_SLOT + SLOTS * (2 + ranks) + ranks * SLOTS * 3
        self.head = -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        self.words = memoryview(self._memory)[: self.head].cast("Q")
        self._bell = ctypes.byref(ctypes.c_uint32.from_buffer(self._memory))

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns `count` elements from an offset on."""
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def slot(self, number: int, reader: int | None = None) -> int:
        """Returns the first word of a collective's slot, or of that of a message to one reader."""
        if reader is None:
            return _FIRST_SLOT + number % SLOTS * (2 + self.ranks)
        return _FIRST_SLOT + SLOTS * (2 + self.ranks) + (reader * SLOTS + number % SLOTS) * 3

    def ring(self) -> None:
        self.words[_BELL] += 1
        _libc.syscall(_FUTEX, self._bell, _WAKE, _EVERYONE)

    def sleep(self, bell: int) -> None:
        """Sleeps until the bell has rung since it showed `bell`, or SLEEP_S."""
        _libc.syscall(_FUTEX, self._bell, _WAIT, ctypes.c_uint32(bell & 0xFFFFFFFF), _SLEEP)


class _InFlight(NamedTuple):
    """Bytes of the outbox that not all readers have read."""

    start: int
    end: int
    number: int
    slot: int
    cells: Sequence[int]
    """A word for each reader, who writes the call's number there."""


class Taken:
    """The message of a peer to this rank in one call."""

    def __init__(self, group: SharedGroup, source: int, slot: int, number: int, cell: int):
        self._group, self._source, self._slot, self._number, self._cell = group, source, slot, number, cell

    def wait(self) -> None:
        """Returns once it is there. Raises RuntimeError if the peer has gone, or does not come in time."""
        self._group.until(self._source, self._slot, self._number)

    def flat(self, like: Tensor) -> Tensor:
        """Returns as many elements of the type of `like` as it has, in the peer's memory until `done`."""
        outbox = self._group.outboxes[self._source]
        return outbox.tensor(outbox.words[self._slot + 1], like.numel(), like.dtype)

    def done(self) -> None:
        """Gives the room back to the peer."""
        self._group.outboxes[self._source].words[self._cell] = self._number

    def copy_to(self, target: Tensor) -> None:
        """Copies it to `target`, and gives the room back."""
        values = self.flat(target)
        # A view of the peer's memory would count as memory of this rank where that is measured.
        if target.is_contiguous():
            target.detach().view(-1).copy_(values)
        else:
            target.detach().copy_(values.view(target.shape))
        self.done()


class SharedGroup:
    """The outboxes of a group's ranks as one of them has them. Tensors are on the CPU."""

    def __init__(self, group: dist.ProcessGroup, outboxes: Sequence[_Outbox], peers: Sequence[int], looks: int):
        self.rank, self.outboxes = group.rank(), outboxes
        self.mine = outboxes[self.rank]
        self._group, self._peers, self._looks = group, peers, looks
        self._collectives = 0
        self._sent, self._received = [0] * len(outboxes), [0] * len(outboxes)
        self._in_flight: list[_InFlight] = []
        self._lock = threading.Lock()
        connections.add(self)
        finalize(self, _close, peers)

    def begin(self) -> int:
        """Returns the number of the next collective. All ranks call it in the same order."""
        self._collectives += 1
        return self._collectives

    def put(self, number: int, x: Tensor) -> None:
        """Gives all other ranks `x` in a collective; it may then be changed."""
        slot = self.mine.slot(number)
        self._put(x, number, slot, [slot + 2 + reader for reader in range(len(self.outboxes)) if reader != self.rank])

    def take(self, number: int, source: int) -> Taken:
        """Returns what another rank gives in a collective."""
        slot = self.mine.slot(number)
        return Taken(self, source, slot, number, slot + 2 + self.rank)

    def send(self, x: Tensor, target: int) -> None:
        """Gives one rank a message; `x` may then be changed. Messages to one rank keep their order."""
        self._sent[target] += 1
        slot = self.mine.slot(self._sent[target], target)
        self._put(x, self._sent[target], slot, [slot + 2])

    def receive(self, source: int) -> Taken:
        """Returns the next message of a rank to this one."""
        self._received[source] += 1
        slot = self.mine.slot(self._received[source], self.rank)
        return Taken(self, source, slot, self._received[source], slot + 2)

    def leave(self) -> None:
        """Makes the waits of peers for this rank fail, as if its process had ended."""
        self.mine.words[_LEFT] = 1
        self.mine.ring()

    def until(self, source: int, slot: int, number: int) -> None:
        """Returns once a rank has written `number` in a slot of its outbox. Raises RuntimeError as `Taken.wait`."""
        outbox = self.outboxes[source]
        words = outbox.words
        for _ in range(self._looks):
            if words[slot] == number:
                return
        ends = time.monotonic() + self._timeout_s()
        while True:
            bell = words[_BELL]
            if words[slot] == number:
                return
            outbox.sleep(bell)
            if words[slot] != number:
                self._check(source, ends)

    def _check(self, source: int, ends: float) -> None:
        """Raises RuntimeError, in the words of sockets, if the peer has gone or the time is over."""
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(self._peers[source], select.POLLIN)
        if self.outboxes[source].words[_LEFT] or ended.poll(0):
            raise RuntimeError(f"Connection closed by peer: rank {source} of the group has ended")
        if time.monotonic() > ends:
            raise RuntimeError(f"Timed out waiting {self._timeout_s():g} s for rank {source} of the group")

    def _timeout_s(self) -> float:
        return self._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def _put(self, x: Tensor, number: int, slot: int, cells: Sequence[int]) -> None:
        with self._lock:
            start = self._room(x.nbytes, slot)
            self._in_flight.append(_InFlight(start, start + x.nbytes, number, slot, cells))
            self._in_flight.sort()
        self.mine.tensor(start, x.numel(), x.dtype).copy_(x.detach().reshape(-1))
        self.mine.words[slot + 1] = start
        self.mine.words[slot] = number
        with self._lock:  # no ring of another thread is lost
            self.mine.ring()

    def _room(self, length: int, slot: int) -> int:
        """Returns the first offset at which `length` bytes are free, once the slot is free."""
        words, ends = self.mine.words, time.monotonic() + self._timeout_s()
        while True:
            self._in_flight = [
                each for each in self._in_flight if any(words[cell] != each.number for cell in each.cells)
            ]
            start = self.mine.head
            for each in self._in_flight:
                if each.start - start >= length:
                    break
                start = max(start, -(-each.end // 64) * 64)
            if start + length <= CAPACITY and all(each.slot != slot for each in self._in_flight):
                return start
            for peer in range(len(self.outboxes)):
                if peer != self.rank:
                    self._check(peer, ends)
            time.sleep(0.001)


def share(group: dist.ProcessGroup) -> SharedGroup | None:
    """Returns the memory that the ranks of a group of gloo share; None for another, if they are on several machines,
    or if one of them cannot share any. All ranks of the group must call it."""
    if not isinstance(group._get_backend(torch.device("cpu")), getattr(dist, "ProcessGroupGloo", ())):
        return None
    own = _create()
    said = _gather([_here(), os.getpid(), -1 if own is None else own], group)
    found: SharedGroup | None = None
    peers = list[int]()
    places, pids, descriptors = zip(*said, strict=True)
    if len({*places}) == 1 and len({*pids}) == len(pids) and min(descriptors) >= 0:
        with suppress(OSError, ValueError):  # ValueError: no address space
            outboxes = [_map(pid, descriptor, len(pids)) for pid, descriptor in zip(pids, descriptors, strict=True)]
            for pid in pids:  # can be read once a process has ended
                peers.append(os.pidfd_open(pid))
            spins = dist.get_world_size() <= len(os.sched_getaffinity(0))
            found = SharedGroup(group, outboxes, peers, LOOKS if spins else 1)
    agreed = all(found for (found,) in _gather([int(found is not None)], group))  # and have mapped this rank's
    if own is not None:
        os.close(own)
    if found is None:
        _close(peers)
    return found if agreed else None


def _here() -> int:
    """Returns a number that processes have in common which see the same memory, processes and network."""
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    text = f"{boot_id()} {socket.gethostname()} {spaces}"
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def _gather(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Returns the numbers of all ranks, in rank order."""
    values = torch.tensor(mine)
    every = [torch.empty_like(values) for _ in range(group.size())]
    blocking.all_gather(every, values, group)
    return [each.tolist() for each in every]


def _create() -> int | None:
    """Returns the descriptor of an empty outbox; None where there can be none."""
    if SOCKETS in os.environ or platform.machine() != "x86_64":
        return None
    try:
        descriptor = os.memfd_create("phalanx")
        os.ftruncate(descriptor, CAPACITY)
    except (OSError, AttributeError):
        return None
    return descriptor


def _map(pid: int, descriptor: int, ranks: int) -> _Outbox:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _Outbox(opened, ranks)
    finally:
        os.close(opened)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)
