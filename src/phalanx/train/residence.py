"""Where an optimizer's state lives and its update runs: on the device, or on the host (ZeRO-Offload).

Offloaded, fp32 (or fp64) copies of the parameters and the optimizer's own tensors are in host memory (Ren et al. 2021,
section 4). Gradients come down as soon as they are final, the host's processors update part after part, and the new
parameters of one part go up while the next is updated.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd, lcm
from pathlib import Path

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.job import Optimizer
from phalanx.errors import JobError
from phalanx.launch.watchdog import heartbeat
from phalanx.optimizers.catalogue import state_tensors
from phalanx.optimizers.entry import MASTER
from phalanx.parallel.offload import ALIGNMENT, Host, StateFile, on_host, padded
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.precision import needs_master_weights
from phalanx.partition.derived import BUFFER_BYTES, BUFFERS
from phalanx.train.optimizers.rule import one_pass_of
from phalanx.units import counted, gib
from phalanx.units import seconds as as_time

PART_BYTES = 64 * 2**20
"""Bytes of master weights that the host updates before their parameters go up: small enough that the last part's copy,
which nothing hides, is short; large enough for many threads."""


class OnDevice:
    """State beside the parameters."""

    has_masters = True
    """Whether parameters in half precisions have a copy in fp32."""

    def memory(self) -> AbstractContextManager[None]:
        """Returns the context in which the optimizer's tensors are made."""
        return nullcontext()

    def master(self, shard: ParameterShard) -> Tensor:
        """Returns the tensor that the optimizer updates for a shard: a leaf, in its precision."""
        value = shard.value
        narrow = self.has_masters and needs_master_weights(value.dtype)
        return value.detach().float().requires_grad_() if narrow else value

    def kept(self, shard: ParameterShard) -> Mapping[str, Tensor]:
        """Returns the tensors that this residence keeps for a shard's state, by kind; none if the optimizer makes
        them."""
        return {}

    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes read from and written to files so far; nothing if there are none."""
        return {}

    def settle(self) -> None:
        """Waits until gradients are where the optimizer is."""

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Updates the masters of shards that have gradients, and then the shards."""
        step(rule, {master: shard.value.detach() for shard, master in pairs if master is not shard.value})

    def write(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Copies masters to their shards, where they are copies."""
        for shard, master in pairs:
            if master is not shard.value:
                shard.value.copy_(master)


class OnHost(OnDevice):
    """State in host memory; with `beside` the parameters are there, too."""

    def __init__(self, host: Host, *, beside: bool = False):
        self.host, self.beside = host, beside
        self.incoming: dict[str, Tensor] = {}
        """By shard, host memory for its gradient, in the gradient's type."""
        self.outgoing: dict[str, Tensor] = {}
        """By shard, host memory for the updated parameters in their own type, where masters have another."""

    def memory(self) -> AbstractContextManager[None]:
        return on_host()

    def master(self, shard: ParameterShard) -> Tensor:
        if self.beside:
            with on_host():
                return super().master(shard)
        value = shard.value.detach()
        master = self.host.empty(value, self.dtype(value))
        with on_host():
            return master.copy_(value).requires_grad_()

    def dtype(self, value: Tensor) -> torch.dtype:
        """Returns the type of the master of a parameter."""
        return torch.promote_types(value.dtype, torch.float32) if self.has_masters else value.dtype

    def move(self, shard: ParameterShard, gradient: Tensor) -> Tensor:
        """Starts copying a shard's final gradient to host memory, and returns the copy."""
        if self.beside and gradient.device.type != self.host.device.type:
            self.host.copied.down += gradient.nbytes  # FSDP2 has copied it
            return gradient
        if shard.name not in self.incoming:
            self.incoming[shard.name] = self.host.empty(gradient)
        self.host.down(gradient, self.incoming[shard.name])
        return self.incoming[shard.name]

    def settle(self) -> None:
        self.host.settle()

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        gradients = [master.grad for _, master in pairs]
        for _, master in pairs:
            master.grad = None
        for part in parts([master.nbytes for _, master in pairs]):
            for number in part:
                pairs[number][1].grad = gradients[number]
            updated = [pairs[number] for number in part]
            with on_host():
                step(
                    rule,
                    {master: copy for shard, master in updated if (copy := self.copy_of(shard, master)) is not None},
                )
            self.send(updated)
            for number in part:
                pairs[number][1].grad = None  # the rule leaves masters without a gradient as they are
        self.host.join()

    def copy_of(self, shard: ParameterShard, master: Tensor) -> Tensor | None:
        """Returns the host memory for a shard's updated parameters in their own type; None if it is the master's."""
        if self.beside:
            return None if master is shard.value else shard.value.detach()
        return None if master.dtype == shard.value.dtype else self._outgoing(shard)

    def write(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        for shard, master in pairs:
            if (copy := self.copy_of(shard, master)) is not None:
                copy.copy_(master.detach())
        self.send(pairs)

    def send(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        """Starts copying updated parameters to the device."""
        if self.beside:
            return
        for shard, master in pairs:
            copy = self.copy_of(shard, master)
            self.host.up(master.detach() if copy is None else copy, shard.value.detach())

    def _outgoing(self, shard: ParameterShard) -> Tensor:
        """Returns host memory for a shard's parameters: its gradient's, which the update has read, if the type fits."""
        incoming = self.incoming.get(shard.name)
        if incoming is not None and incoming.dtype == shard.value.dtype:
            return incoming
        if shard.name not in self.outgoing:
            self.outgoing[shard.name] = self.host.empty(shard.value)
        return self.outgoing[shard.name]


@torch.no_grad()
def step(rule: torch.optim.Optimizer, copies: dict[Tensor, Tensor]) -> None:
    """Runs a rule, and writes masters to their `copies`: in the same pass over memory where the rule can."""
    one_pass = one_pass_of(rule)
    if one_pass is not None:
        one_pass.copies = copies
    rule.step()
    while copies:
        master, copy = copies.popitem()
        copy.copy_(master)


def parts(sizes: Sequence[int]) -> Iterator[range]:
    """Yields consecutive runs of tensors, each but the last of at least PART_BYTES, from their sizes in bytes."""
    first = total = 0
    for number, size in enumerate(sizes):
        total += size
        if total >= PART_BYTES or number == len(sizes) - 1:
            yield range(first, number + 1)
            first, total = number + 1, 0


DTYPES = {1: torch.uint8, 2: torch.bfloat16}
"""Types of state with a stated number of bytes per element; the rest has the optimizer's precision."""


def state_shapes(
    config: Optimizer, shard: ParameterShard, precision: torch.dtype
) -> dict[str, tuple[torch.Size, torch.dtype, int]]:
    """Returns shape, type and elements per block of the state tensors of a shard, by kind, besides its master, which
    has the optimizer's `precision`: the shard's own shape, or (elements / block,)."""
    found = {}
    for kind in state_tensors(config, shard.whole_name, shard.tensor_slice.whole):
        numbers = shard.value.numel() // kind.block
        shape = shard.value.shape if kind.block == 1 else torch.Size([numbers])
        found[kind.kind] = shape, DTYPES[kind.bytes] if kind.bytes else precision, kind.block
    return found


def require_space(folder: Path, need: int, world: Axis) -> None:
    """Raises JobError on all ranks if a folder is missing or not writable, or if the ranks on a disk need more than it
    has. A collective of all ranks; each needs `need` bytes."""
    found = world.gather_json([platform.node(), *_disk(folder), need])
    problems: dict[str, None] = {}
    disks: dict[tuple[str, int], tuple[int, int]] = {}
    for host, device, free, problem, size in found:
        if problem:
            problems[f"layout.offload_to: {folder} on {host} {problem}"] = None
        disks[host, device] = free, disks.get((host, device), (0, 0))[1] + size
    for (host, device), (free, size) in disks.items():
        if device and size > free:
            problems[
                f"layout.offload_to: the disk of {folder} on {host} has {gib(free)} free, and its ranks' optimizer "
                f"state needs {gib(size)}: free some space, name a larger disk, or share the state among more ranks "
                "(zero=1, layout.dp_shard)"
            ] = None
    if problems:
        raise JobError(list(problems))


def _disk(folder: Path) -> tuple[int, int, str]:
    """Returns the number of a folder's disk, 0 without a usable folder, its free bytes, and what is wrong."""
    try:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist: make it, on a fast local disk"
            return 0, 0, what
        if not os.access(folder, os.W_OK | os.X_OK):
            return 0, 0, "cannot be written: name a folder of your own"
        space = os.statvfs(folder)
        return folder.stat().st_dev, space.f_bavail * space.f_frsize, ""
    except OSError as error:
        return 0, 0, f"cannot be used: {error.strerror or error}"


log = logging.getLogger(__name__)

MOST_WAITING = 0.5
"""Share of a step that its update may wait for the disk without a warning."""


@dataclass(frozen=True)
class Region:
    """The place of one tensor in the file, from `start` on."""

    start: int
    shape: torch.Size
    dtype: torch.dtype
    block: int
    """Elements of the shard per element of the tensor."""

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + padded(self.bytes)

    @property
    def unit(self) -> int:
        """Elements of the shard at multiples of which the tensor may be cut, so that each piece is aligned."""
        return ALIGNMENT // gcd(ALIGNMENT, self.dtype.itemsize) * self.block

    def cut(self, start: int, stop: int) -> Region:
        """Returns the place of elements `start` to `stop` - 1 of the shard, a flat tensor."""
        first, last = start // self.block, -(-stop // self.block)
        return Region(self.start + first * self.dtype.itemsize, torch.Size([last - first]), self.dtype, self.block)

    def view(self, memory: Tensor, first: int = 0) -> Tensor:
        """Returns the tensor as a view of bytes that begin at the file's byte `first`."""
        return memory[self.start - first :][: self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class FilePiece:
    """A shard, or the elements `start` to `stop` - 1 of one that is larger than a buffer."""

    shard: ParameterShard
    start: int
    stop: int
    regions: Mapping[str, Region]
    """By kind, with the master."""

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.shard.value.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the piece of a tensor of the shard's shape: flat, unless it is whole."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class FilePart:
    """Pieces that are in one buffer together: whole shards that follow each other in the file, or one piece."""

    pieces: tuple[FilePiece, ...]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last place of the consecutive bytes of the file, in the order in which they are in the buffer."""
        found: list[tuple[int, int]] = []
        for region in (region for piece in self.pieces for region in piece.regions.values()):
            if found and found[-1][1] == region.start:
                found[-1] = found[-1][0], region.stop
            else:
                found.append((region.start, region.stop))
        return found

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def views(self, buffer: Tensor) -> Iterator[tuple[FilePiece, dict[str, Tensor]]]:
        """Yields each piece with its tensors in a buffer, by kind."""
        place = 0
        for piece in self.pieces:
            found = {}
            for kind, region in piece.regions.items():
                found[kind] = region.view(buffer[place:], region.start)
                place += region.stop - region.start
            yield piece, found


class InFiles(OnHost):
    """State in a file of a local disk, gradients in host memory."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        config: Optimizer,
        shards: Sequence[ParameterShard],
        world: Axis,
        level: int,
        *,
        beside: bool = False,
    ):
        """Makes this rank's file, with room for the state of `shards`, and logs its size at `level`. A collective
        of all ranks. Raises JobError on all of them if the disks have too little space, OffloadError if the file cannot
        be made."""
        super().__init__(host, beside=beside)
        self.has_masters = config.master != "none"
        self.places: dict[str, dict[str, Region]] = {}
        """By shard, the place of each kind of tensor; of shards that the optimizer updates."""
        size, trained = 0, [shard for shard in shards if shard.value.numel() and not shard.balances]
        for shard in trained:
            precision = torch.promote_types(shard.value.dtype, torch.float32)
            shapes = {MASTER: (shard.value.shape, self.dtype(shard.value), 1), **state_shapes(config, shard, precision)}
            self.places[shard.name] = {}
            for kind, (shape, dtype, block) in shapes.items():
                region = self.places[shard.name][kind] = Region(size, shape, dtype, block)
                size = region.stop
        require_space(folder, size, world)
        self.parts = list(file_parts(trained, self.places))
        self.file = StateFile(folder, size)
        largest = max((part.bytes for part in self.parts), default=0)
        self.buffers = [self._buffer(largest) for _ in range(min(BUFFERS, len(self.parts)))]
        self._moved = {"read": 0, "written": 0}
        self.updates = 0
        """Updates so far."""
        self.waited = 0.0
        """Seconds for which the last update waited for the disk."""
        self.updated_at = 0.0
        self.warns = True
        self._tell_speed(size, level)

    def master(self, shard: ParameterShard) -> Tensor:
        if shard.name not in self.places:
            return super().master(shard)
        region, value = self.places[shard.name][MASTER], shard.value.detach().reshape(-1)
        most = len(self.buffers[0]) // (region.unit * region.dtype.itemsize) * region.unit
        for start in range(0, len(value), most):
            piece = region.cut(start, min(start + most, len(value)))
            piece.view(self.buffers[0], piece.start).copy_(value[start : start + most])
            self.file.write(self.buffers[0][: padded(piece.bytes)], piece.start)
        return region.view(self.file.mapped).requires_grad_()

    def kept(self, shard: ParameterShard) -> Mapping[str, Tensor]:
        places = self.places.get(shard.name, {})
        return {kind: region.view(self.file.mapped) for kind, region in places.items() if kind != MASTER}

    @property
    def moved(self) -> Mapping[str, int]:
        return self._moved

    def update(self, rule: torch.optim.Optimizer, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        began, self.waited = time.perf_counter(), 0.0
        masters = {shard.name: master for shard, master in pairs}
        gradients = {name: master.grad for name, master in masters.items() if master.grad is not None}
        for master in masters.values():
            master.grad = None
        updated = [part for part in self.parts if any(piece.shard.name in gradients for piece in part.pieces)]
        with ThreadPoolExecutor(1, "read ahead") as reader, ThreadPoolExecutor(1, "write behind") as writer:
            reads = deque(reader.submit(self.read, *each) for each in zip(updated, self.buffers, strict=False))
            writes: deque[Future[None]] = deque()
            for number, part in enumerate(updated):
                heartbeat.beat()
                buffer = self.buffers[number % BUFFERS]
                self._wait(reads.popleft())
                self._update(rule, part, buffer, masters, gradients)
                self.host.settle()  # copies to the device have left the buffer
                writes.append(writer.submit(self.write_back, part, buffer))
                if number + BUFFERS < len(updated):
                    reads.append(reader.submit(self.read, updated[number + BUFFERS], buffer, writes.popleft()))
            for written in writes:
                self._wait(written)
        self.write([pair for pair in pairs if pair[0].name not in self.places])
        self.host.join()
        self.updates += 1
        self._judge(began)

    def _update(
        self,
        rule: torch.optim.Optimizer,
        part: FilePart,
        buffer: Tensor,
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Runs the rule on a part in a buffer, and starts copying its parameters to the device."""
        bound = [(piece, masters[piece.shard.name], own) for piece, own in part.views(buffer)]
        bound = [each for each in bound if each[0].shard.name in gradients]
        before = [rule.state.pop(master, {}) for _, master, _ in bound]
        with on_host():
            for (piece, master, own), state in zip(bound, before, strict=True):
                # The rule knows a master by its identity: during the update its elements are the buffer's.
                master.data = own[MASTER]
                master.grad = piece.of(gradients[piece.shard.name])
                if state:
                    counters = {kind: value.clone() for kind, value in state.items() if kind not in own}
                    rule.state[master] = {kind: own.get(kind, counters.get(kind)) for kind in state}
            copies = {m: c for piece, m, _ in bound if (c := self._copy(piece, m)) is not None}
            if (one_pass := one_pass_of(rule)) is not None:
                one_pass.starts = {master: piece.start for piece, master, _ in bound}
            step(rule, copies)
        for (piece, master, own), state in zip(bound, before, strict=True):
            after, shard, master.grad = rule.state.pop(master), piece.shard, None
            self._up(piece, own[MASTER])
            master.data = self.places[shard.name][MASTER].view(self.file.mapped)
            if not state:  # the rule has made it, outside the buffer
                for kind in own.keys() - {MASTER}:
                    own[kind].copy_(after[kind].view(own[kind].shape))
            if piece.stop == shard.value.numel():
                rule.state[master] = {**after, **self.kept(shard)}
            elif state:
                rule.state[master] = state  # counters advance with the last piece

    def _copy(self, piece: FilePiece, master: Tensor) -> Tensor | None:
        """Returns the place of a piece's updated parameters in their own type; None if it is the buffer."""
        copy = self.copy_of(piece.shard, master)
        return None if copy is None else piece.of(copy)

    def _up(self, piece: FilePiece, master: Tensor) -> None:
        """Starts copying a piece's parameters, which the update has written, to the device."""
        if not self.beside:
            copy = self._copy(piece, master)
            self.host.up(master.detach() if copy is None else copy, piece.of(piece.shard.value.detach()))

    def read(self, part: FilePart, buffer: Tensor, after: Future[None] | None = None) -> None:
        """Reads a part of the file into a buffer, once a write out of the buffer is done. Raises OffloadError."""
        if after is not None:
            after.result()
        self._moved["read"] += _transfer(self.file.read, part, buffer)

    def write_back(self, part: FilePart, buffer: Tensor) -> None:
        """Writes a buffer to its part of the file. Raises OffloadError."""
        self._moved["written"] += _transfer(self.file.write, part, buffer)

    def _wait(self, transfer: Future[None]) -> None:
        began = time.perf_counter()
        transfer.result()
        self.waited += time.perf_counter() - began

    def _buffer(self, size: int) -> Tensor:
        whole = self.host.empty(torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="meta"))
        first = -whole.data_ptr() % ALIGNMENT
        return whole[first : first + size]

    def _tell_speed(self, size: int, level: int) -> None:
        """Measures the disk with one buffer, and logs what each step will take."""
        if not self.buffers:
            return
        rate = self.file.speed(self.buffers[0])
        way = "direct I/O" if self.file.is_direct else "through the page cache"
        log.log(
            level,
            "offload: %s of optimizer state per rank in files of %s (%s), %s of %s; at %.2f GB/s a step reads and "
            "writes it in %s",
            *(gib(size), self.file.folder, way, counted(len(self.buffers), "buffer"), gib(len(self.buffers[0]))),
            *(rate / 1e9, as_time(2 * size / rate)),
        )

    def _judge(self, began: float) -> None:
        """Warns, once, if steps mostly wait for the disk; the update began at `began`."""
        now, before = time.perf_counter(), self.updated_at
        self.updated_at = now
        if not (self.warns and before):
            return
        self.warns = False
        if self.waited > MOST_WAITING * (now - before):
            moved, computed = 2 * sum(part.bytes for part in self.parts), max(1e-9, now - began - self.waited)
            log.warning(
                "offload: a step of %s waits %s for the disk of %s, which reads and writes %s at %.2f GB/s; %.3g GB/s "
                "would hide it. A larger train.global_batch needs it less often, more layout.dp_shard less of it",
                *(as_time(now - before), as_time(self.waited), self.file.folder, gib(moved)),
                *(moved / (now - began) / 1e9, moved / computed / 1e9),
            )


def _transfer(move: Callable[[Tensor, int], None], part: FilePart, buffer: Tensor) -> int:
    """Moves the runs of a part between its file and a buffer, in which they follow each other. Returns their bytes."""
    place = 0
    for start, stop in part.runs:
        move(buffer[place : place + stop - start], start)
        place += stop - start
    return place


def file_parts(shards: Sequence[ParameterShard], places: Mapping[str, Mapping[str, Region]]) -> Iterator[FilePart]:
    """Yields the parts of a file: runs of whole shards that fit a buffer of BUFFER_BYTES together, and pieces of larger
    shards, each alone."""
    run: list[FilePiece] = []
    used = 0
    for shard in shards:
        regions, elements = places[shard.name], shard.value.numel()
        size = sum(region.stop - region.start for region in regions.values())
        if run and used + size > BUFFER_BYTES:
            yield FilePart(tuple(run))
            run, used = [], 0
        if size <= BUFFER_BYTES:
            run.append(FilePiece(shard, 0, elements, regions))
            used += size
            continue
        unit = lcm(*(region.unit for region in regions.values()))
        each = max(1, BUFFER_BYTES * elements // size // unit) * unit
        for start in range(0, elements, each):
            stop = min(start + each, elements)
            yield FilePart((FilePiece(shard, start, stop, {kind: r.cut(start, stop) for kind, r in regions.items()}),))
    if run:
        yield FilePart(tuple(run))
