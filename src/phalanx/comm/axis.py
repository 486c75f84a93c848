"""The collectives along one axis of the mesh. Training communicates only here, so this is where traffic is counted.

CPU tensors of ranks on one machine travel through memory that they share (comm/shared.py), others through the backend.
On gloo three collectives are composed of other calls than the backend's own, which copies more than necessary (2
ranks, 43 MiB on two cores: reduce-scatter 66 ms, here 42; all-gather 61 ms, here 26; `python -m benchmarks.axis`).
These and shared memory sum in rank order, so that a sum does not depend on the position of a value in a buffer.

`StagedAxis` is for tensors on a GPU whose process group is gloo's. NCCL takes one rank per GPU; where several share
one, as in `phalanx verify --device cuda` with a single GPU, messages are copied to the host, sent, and copied back.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.agree import gather_json
from phalanx.comm.calls import CallLog, ObservedCall, reduction
from phalanx.comm.shared import SharedGroup, Taken, share
from phalanx.cost.communication import Collective, sent_bytes
from phalanx.launch.watchdog.heartbeat import Call
from phalanx.units import counted, gib


@dataclass
class LedgerEntry:
    """One collective on one axis."""

    calls: int = 0
    sent: float = 0.0
    """Bytes sent by this rank, by the formula of the bandwidth-optimal algorithm."""


class Ledger:
    """Counts the bytes that one rank has sent."""

    def __init__(self) -> None:
        self.entries: defaultdict[tuple[str, Collective], LedgerEntry] = defaultdict(LedgerEntry)
        self.counts = True
        self.lock = threading.Lock()  # a parameter server answers each replica in a thread

    def add(self, axis: str, collective: Collective, payload: int, ranks: int) -> None:
        """Records a call over a whole tensor of `payload` bytes."""
        self.note(axis, collective, sent_bytes(collective, payload, ranks))

    def note(self, axis: str, collective: Collective, sent: float) -> None:
        """Records a call that sends `sent` bytes."""
        if not self.counts:
            return
        with self.lock:
            entry = self.entries[axis, collective]
            entry.calls += 1
            entry.sent += sent

    def clear(self) -> None:
        """Resets all counts."""
        self.entries.clear()

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Pauses counting in a `with` block: validations and checkpoints are not part of a step's traffic."""
        before, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = before

    def traffic(self, steps: int = 1) -> dict[str, dict[str, float]]:
        """Returns bytes sent per step, {axis: {collective: bytes}}, as `phalanx predict --json` names them."""
        table: dict[str, dict[str, float]] = {}
        for (axis, collective), entry in sorted(self.entries.items()):
            table.setdefault(axis, {})[collective] = entry.sent / steps
        return table

    def lines(self, steps: int) -> list[str]:
        """Returns a log line per axis: bytes and calls per step."""
        lines = []
        for axis in dict.fromkeys(axis for axis, _ in sorted(self.entries)):
            parts = []
            for (of, collective), entry in sorted(self.entries.items()):
                if of == axis:
                    sent, calls = gib(int(entry.sent / steps)), counted(entry.calls / steps, "call")
                    parts.append(f"{collective.replace('_', '-')} {sent} in {calls}")
            lines.append(f"{axis}: {', '.join(parts)}")
        return lines


LATENCY_BOUND_BYTES = 64 * 1024
"""Bytes up to which gloo's latency is all that counts: an all-reduce then gathers everything and adds locally."""
DIRECT_RANKS = 16
"""Ranks from which on gloo's own all-gather beats one message a pair."""
IN_CACHE = 2**15
"""Elements that several ranks' values are summed at a time."""

# torch 2.13 renamed these two.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Returns once the result is available."""
        ...


class _Then:
    """Waits for backend calls, then does the rest of the work; records both in `call`."""

    def __init__(self, works: Sequence[Any], call: Call | None = None, rest: Callable[[], Any] | None = None):
        self.works, self.call, self.rest = works, call, rest
        if isinstance(call, ObservedCall):
            call.launched()

    def wait(self) -> None:
        if self.call is not None:
            self.call.waits()
        for work in self.works:
            work.wait()
        if self.call is not None:
            self.call.done()
        if self.rest is not None:
            self.rest()
            if isinstance(self.call, ObservedCall):
                self.call.settled()
        self.works, self.call, self.rest = (), None, None


class Axis:
    """One axis of the mesh as seen by one rank. With one rank, every collective is the identity and counts nothing.

    Collectives are asynchronous; the result is available after `.wait()`. Tensors are contiguous. All ranks of the axis
    must make the same calls in the same order.
    """

    def __init__(
        self,
        name: str,
        size: int = 1,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        ledger: Ledger | None = None,
    ):
        self.name, self.size, self.rank, self.group = name, size, rank, group
        self.ledger = ledger or Ledger()
        self.calls = CallLog(name, group)
        self.gloo = group is not None and not self.calls.device_backend
        self.shared: SharedGroup | None = None

    def __repr__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"

    def share(self) -> Self:
        """Sends through shared memory from now on if all ranks are on this machine. All of them must call it."""
        if self.group is not None and self.gloo:
            self.shared = share(self.group)
        return self

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """Replaces `x` by the sum (or, by `op`, the maximum) over the ranks, in place."""
        if self.size == 1:
            return _Then(())
        self.count("all_reduce", x)
        call = self.calls.begin("all_reduce" if op == dist.ReduceOp.SUM else reduction(op), x)
        if self.shared is not None:
            every = self._put(x)
            return _Then(_others(every), call, lambda: _total(every, x, x, op))
        if self.gloo and x.nbytes <= LATENCY_BOUND_BYTES and self.size < DIRECT_RANKS:
            every = x.new_empty(self.size, x.numel())
            every[self.rank].copy_(x.flatten())
            return _Then(self._exchange(every), call, lambda: x.copy_(_reduce(every, op).view_as(x)))
        return _Then([dist.all_reduce(x, op, group=self.group, async_op=True)], call)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        """Sets `part` to this rank's part of the sum of all ranks' `whole`: (n,) and (size × n,).

        `part` may be a view of its own place in `whole`; the rest of `whole` is undefined afterwards."""
        if self.size == 1:
            part.copy_(whole)
            return _Then(())
        self.count("reduce_scatter", whole)
        call = self.calls.begin("reduce_scatter", whole)
        if not self.gloo:
            return _Then([_reduce_scatter(part, whole, group=self.group, async_op=True)], call)
        if self.shared is not None:
            rows = whole.reshape(self.size, *part.shape)
            taken = self._trade(list(rows.unbind()))
            return _Then(_others(taken), call, lambda: _total(taken, rows[self.rank], part))
        received = torch.empty_like(whole)
        work = dist.all_to_all_single(received, whole, group=self.group, async_op=True)
        return _Then([work], call, lambda: torch.sum(received.view(self.size, -1), dim=0, out=part))

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Sets `whole` to all ranks' parts in rank order: (size × n,) from (n,).

        `part` may be a view of its own place in `whole`."""
        call = None
        if self.size > 1:
            self.count("all_gather", whole)
            call = self.calls.begin("all_gather", whole)
        mine = whole.view(self.size, -1)[self.rank].view_as(part)
        if mine.data_ptr() != part.data_ptr() and (self.gloo or self.size == 1):
            mine.copy_(part)
        if self.size == 1:
            return _Then(())
        if self.shared is not None:
            every = self._put(part)
            rows = whole.view(self.size, *part.shape)
            return _Then(_others(every), call, lambda: _copy(every, rows.unbind()))
        if not self.gloo or self.size >= DIRECT_RANKS:
            return _Then([_all_gather(whole, part, group=self.group, async_op=True)], call)
        return _Then(self._exchange(whole.view(self.size, -1)), call)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Sets `x` to the value of the axis's rank `source`."""
        if self.size == 1:
            return _Then(())
        self.count("broadcast", x)
        call = self.calls.begin("broadcast", x, root=source)
        if self.shared is not None:
            number = self.shared.begin()
            if self.rank == source:
                self.shared.put(number, x)
                return _Then((), call)
            return self._arrival(self.shared.take(number, source), x, call)
        return _Then([dist.broadcast(x, group=self.group, group_src=source, async_op=True)], call)

    def send(self, x: Tensor, target: int) -> None:
        """Sends `x` to the axis's rank `target`. Returns once `x` may be changed."""
        self.start_send(x, target).wait()

    def receive(self, x: Tensor, source: int) -> None:
        """Receives into `x` from the axis's rank `source`. Returns once it has arrived."""
        self.start_receive(x, source).wait()

    def start_send(self, x: Tensor, target: int) -> Pending:
        """Starts sending `x` to the axis's rank `target`. Messages to one rank keep their order."""
        self.count("send", x)
        call = self.calls.send(x, target)
        if self.shared is not None:
            self.shared.send(x, target)
            return _Then((), call)
        return _Then([dist.isend(x, group=self.group, group_dst=target)], call)

    def start_receive(self, x: Tensor, source: int) -> Pending:
        """Starts receiving into `x` from the axis's rank `source`. Messages from one rank keep their order."""
        call = self.calls.receive(x, source)
        if self.shared is not None:
            return self._arrival(self.shared.receive(source), x, call)
        return _Then([dist.irecv(x, group=self.group, group_src=source)], call)

    def rotate(self, received: Tensor, x: Tensor) -> Pending:
        """Sends `x` to the next rank of the ring and receives into `received` from the previous one."""
        self.count("send", x)
        call = self.calls.begin("rotate", x)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.shared is not None:
            self.shared.send(x, after)
            return self._arrival(self.shared.receive(before), received, call)
        # On NCCL two separate messages between two ranks would wait for each other.
        pair = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        return _Then(dist.batch_isend_irecv(pair), call)

    def shift(self, received: Tensor, x: Tensor, hops: int) -> Pending:
        """Sends `x` to the rank `hops` after this one (negative: before it), and receives into `received` from the rank
        as far on the other side. Sizes may differ between ranks; empty tensors are not sent."""
        if x.numel():
            self.count("send", x)
        call = self.calls.begin("shift", x, root=hops % self.size)
        there, back = (self.rank + hops) % self.size, (self.rank - hops) % self.size
        if self.shared is not None:
            if x.numel():
                self.shared.send(x, there)
            return self._arrival(self.shared.receive(back), received, call) if received.numel() else _Then((), call)
        pair = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensor, peer in ((dist.isend, x, there), (dist.irecv, received, back))
            if tensor.numel()
        ]
        return _Then(dist.batch_isend_irecv(pair) if pair else (), call)

    def all_to_all(
        self,
        received: Tensor,
        x: Tensor,
        received_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Sends the first `sizes[0]` rows of `x` to rank 0, the next ones to rank 1 and so on; `received` gets the
        other ranks' rows in rank order, `received_sizes` rows each. Without sizes all parts are equal."""
        if self.size == 1:
            received.copy_(x)
            return _Then(())
        stays = x.nbytes // self.size if sizes is None else x[: sizes[self.rank]].nbytes
        self.ledger.note(self.name, "all_to_all", x.nbytes - stays)
        call = self.calls.begin("all_to_all", x)
        if self.shared is not None:
            rows = x.split(list(sizes)) if sizes is not None else x.chunk(self.size)
            places = received.split(list(received_sizes)) if received_sizes is not None else received.chunk(self.size)
            arrived = self._trade(rows, places)
            places[self.rank].copy_(rows[self.rank])
            return _Then(_others(arrived), call, lambda: _copy(arrived, places))
        given, taken = (None if s is None else list(s) for s in (sizes, received_sizes))
        return _Then([dist.all_to_all_single(received, x, taken, given, group=self.group, async_op=True)], call)

    def gather_json(self, mine: Any) -> list[Any]:
        """Returns a small value (JSON-able) of every rank, in rank order; not counted."""
        return gather_json(mine, self.group) if self.size > 1 else [mine]

    def _put(self, x: Tensor) -> list[Taken | None]:
        """Gives all ranks `x`. Returns what each of the others gives, in rank order."""
        assert self.shared is not None, "asked before"
        number = self.shared.begin()
        self.shared.put(number, x)
        return [self.shared.take(number, rank) if rank != self.rank else None for rank in range(self.size)]

    def _trade(self, rows: Sequence[Tensor], places: Sequence[Tensor] | None = None) -> list[Taken | None]:
        """Gives each rank its row, and takes what it has for this one, in rank order; nothing where that is empty."""
        assert self.shared is not None, "asked before"
        found: list[Taken | None] = []
        for rank, (row, place) in enumerate(zip(rows, places or rows, strict=True)):
            if rank != self.rank and row.numel():
                self.shared.send(row, rank)
            found.append(self.shared.receive(rank) if rank != self.rank and place.numel() else None)
        return found

    def _arrival(self, taken: Taken, x: Tensor, call: Call | None) -> Pending:
        return _Then([taken], call, lambda: taken.copy_to(x))

    def _exchange(self, rows: Tensor) -> list[Any]:
        """Sends every rank's own row of `rows` (size, n) to all others."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.isend(rows[self.rank], group=self.group, group_dst=other) for other in others]
        works += [dist.irecv(rows[other], group=self.group, group_src=other) for other in others]
        return works

    def count(self, collective: Collective, whole: Tensor) -> None:
        """Records a collective over this axis. The collectives of this class record themselves."""
        self.ledger.add(self.name, collective, whole.nbytes, self.size)


def _reduce(rows: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if op == dist.ReduceOp.MAX:
        return rows.amax(dim=0)
    if op == dist.ReduceOp.SUM:
        return rows.sum(dim=0)
    raise ValueError(f"no reduction {op} here: SUM or MAX")


def _others(every: Sequence[Taken | None]) -> list[Taken]:
    return [taken for taken in every if taken is not None]


def _copy(every: Sequence[Taken | None], places: Sequence[Tensor]) -> None:
    for taken, place in zip(every, places, strict=True):
        if taken is not None:
            taken.copy_to(place)


@torch.no_grad()
def _total(
    every: Sequence[Taken | None], own: Tensor, out: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Sets `out` to the sum (or maximum) of all ranks' values, in rank order: the same bits on every rank."""
    if not out.is_contiguous():
        total = torch.empty_like(out, memory_format=torch.contiguous_format)
        _total(every, own, total, op)
        out.copy_(total)
        return
    rows = [own.reshape(-1) if taken is None else taken.flat(own) for taken in every]
    out = out.view(-1)
    if len(rows) == 2 and op == dist.ReduceOp.SUM:
        torch.add(*rows, out=out)
    else:  # in parts that stay in the cache
        for place, *parts in zip(out.split(IN_CACHE), *(row.split(IN_CACHE) for row in rows), strict=True):
            place.copy_(_reduce(torch.stack(parts), op))
    for taken in _others(every):
        taken.done()


class _CopyBack:
    """Waits for a collective on host tensors, then copies the first one to `target`. Keeps all alive."""

    def __init__(self, pending: Pending, target: Tensor | None, hosts: Sequence[Tensor]):
        self.pending, self.target, self.hosts = pending, target, hosts

    def wait(self) -> Any:
        self.pending.wait()
        if self.target is not None:
            self.target.copy_(self.hosts[0])
            self.target = None


def _room_on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _staged(method: Callable[..., Pending], ends: str) -> Callable[..., Pending]:
    """Returns a method of Axis with host memory in place of its tensors. `ends` names the argument that gets the result
    and the one that is sent: the same, two, or only one of them."""
    signature, (result, sent) = inspect.signature(method), ends.split()

    @wraps(method)
    def staged(*args: Any, **options: Any) -> Pending:
        given = signature.bind(*args, **options)
        target, source = given.arguments.get(result), given.arguments.get(sent)
        hosts = list[Tensor]()
        if source is not None:
            hosts.append(_room_on_host(source).copy_(source))  # waits for the device
            given.arguments[sent] = hosts[0]
        if target is not None and result != sent:
            hosts.insert(0, _room_on_host(target))
            given.arguments[result] = hosts[0]
        return _CopyBack(method(*given.args, **given.kwargs), target, hosts)

    return staged


class StagedAxis(Axis):
    """An `Axis` of gloo for tensors on any device. Calls and results are those of `Axis`."""

    all_reduce = _staged(Axis.all_reduce, "x x")
    broadcast = _staged(Axis.broadcast, "x x")
    start_send = _staged(Axis.start_send, "- x")
    start_receive = _staged(Axis.start_receive, "x -")
    reduce_scatter = _staged(Axis.reduce_scatter, "part whole")
    all_gather = _staged(Axis.all_gather, "whole part")
    rotate = _staged(Axis.rotate, "received x")
    shift = _staged(Axis.shift, "received x")
    all_to_all = _staged(Axis.all_to_all, "received x")
