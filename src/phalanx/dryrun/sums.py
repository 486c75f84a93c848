"""Proves sums over ranks without numbers: which tensors are equal on all ranks, and which are not.

Every rank's real step is rehearsed in turn (dryrun/rehearse.py), and its operations are recorded. Two neighbours along
an axis then have the same operations; what they read of parameters and batches is equal or not by the layout. From
these states every operation's result follows: it is equal on both ranks if all that was read is, at the same place and
with the same constants. A sum over both ranks makes equal what was not; a part of it is not equal. Two rules follow:

- A gradient, or a parameter after the optimizer, that both ranks hold is equal on both: else a sum is missing.
- What is summed over an axis differs along it: else it is summed twice.

In a pipeline a received tensor is what the stage before sent. Each tensor also carries the micro-batches that it
depends on: a message depends on one, a gradient on all, and no operation but a sum reads two. After that each gradient
is counted once in the norm over all stages.

Nothing is compared with another program, and nothing depends on values: no rank has any. What it cannot tell: a sum of
wrong summands (a factor, a bias that is added before the sum, heads in another order), which `phalanx verify` finds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.loader import MicroBatch
from phalanx.dryrun.operations import RealTensors
from phalanx.dryrun.rehearse import problems as rehearsal_problems
from phalanx.dryrun.rehearse import rehearse
from phalanx.launch.watchdog import heartbeat
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.derived import gathers_parameters
from phalanx.train.step import Stepper
from phalanx.units import counted

aten = torch.ops.aten
PIECEWISE = {"copy_", "clone", "_to_copy", "add_", "add", "mul_", "div_", "mul", "div", "sub_", "detach", "zero_"}
"""Operations each of whose elements depends on those at the same place alone: parts of a buffer keep their states."""
SHOWN = 8
"""Findings of a layout that are printed."""
UNKNOWN = -2
"""Number of a storage of the other rank that this one does not have."""
LIMIT = 64
"""Most ranks whose programs are compared."""


class BytesOf(NamedTuple):
    """Where a tensor's elements lie."""

    storage: int
    """Number of the storage in its rank's program; -1 for one of the host, whose elements `content` tells."""
    first: int
    last: int
    dense: bool
    shape: tuple[int, ...]
    content: str = ""
    micro: int = 0
    """A bit per micro-batch whose tokens or targets they are."""


class RecordedOperation(NamedTuple):
    """An operation, a collective or a check of one rank's program."""

    name: str
    where: str
    constants: str
    reads: tuple[BytesOf, ...]
    writes: tuple[BytesOf, ...]
    group: tuple[int, ...] = ()
    """The ranks of a collective."""
    fresh: tuple[bool, ...] = ()
    """Which written storages the operation made."""
    peer: int = -1
    """The other rank of a message."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.where, len(self.reads), tuple(each.shape for each in self.writes)


class OperationRecorder(TorchDispatchMode):
    """Records the operations of a rank's program in its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RecordedOperation] = []
        self.numbers: dict[int, int] = {}
        self.storages = 0
        self.mesh: Mesh | None = None
        self.micros: dict[int, int] = {}
        """By address of a micro-batch's array, its bit."""

    def place(self, x: Tensor, fresh: bool = False) -> BytesOf:
        if type(x).__name__ != "FakeTensor":
            with RealTensors():
                micro = self.micros.get(x.untyped_storage().data_ptr(), 0)
                content = bytes(x.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
            return BytesOf(-1, 0, 0, True, tuple(x.shape), hashlib.sha256(content).hexdigest()[:16], micro)
        key = x.untyped_storage()._cdata
        if fresh or key not in self.numbers:
            self.numbers[key] = self.storages
            self.storages += 1
        size = x.element_size()
        first = int(x.storage_offset()) * size
        span = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        return BytesOf(self.numbers[key], first, first + span * size, span == x.numel(), tuple(x.shape))

    def check(self, name: str, shards: Iterable[tuple[str, Tensor]]) -> None:
        """Records tensors with what they are: on ranks where that is the same, they must be equal."""
        for what, x in shards:
            where = self.place(x.detach() if type(x).__name__ == "FakeTensor" else x)
            self.events.append(RecordedOperation(f"{name} {what.split(' | ')[0]}", "", what, (where,), (where,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        if any(x.is_meta for x in given):
            return func(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in given if type(x).__name__ == "FakeTensor"}
        reads = [self.place(x) for x in given]
        out = func(*args, **kwargs)
        constants, group = repr(list(_constants((args, kwargs)))), ()
        where = heartbeat.module()
        if func.namespace == "c10d":
            of = next(
                ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "Group" in str(x._type())
            )
            group = tuple(dist.get_process_group_ranks(of))
            peer = group[args[2]] if name in ("send", "recv_") else -1
            name = "c10d." + name
            lists = [[self.place(x) for x in _tensors(each)] for each in args]
            writes, reads = lists[0], lists[1] or lists[0]
            if name == "c10d.send":
                writes = []
            if name == "c10d.allreduce_" and not next(_tensors(args[0])).is_floating_point():
                name = "c10d.votes"  # flags of ranks are counted, and equal ones on purpose
            self.events.append(RecordedOperation(name, where, constants, tuple(reads), tuple(writes), group, (), peer))
            return out
        written = [
            x
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        made = [x for x in _tensors(out) if not any(x is y for y in written)]
        if not written and all(x.untyped_storage()._cdata in known for x in made if not x.is_meta):
            return out  # a view
        if any(x.is_meta for x in made):
            return out
        fresh = [False] * len(written) + [x.untyped_storage()._cdata not in known for x in made]
        seen: set[int] = set()
        writes = [self.place(x) for x in written]
        for x, new in zip(made, fresh[len(written) :], strict=True):
            key = x.untyped_storage()._cdata
            writes.append(self.place(x, new and key not in seen))
            seen.add(key)
        if writes:
            self.events.append(RecordedOperation(name, where, constants, tuple(reads), tuple(writes), (), tuple(fresh)))
        return out

    # What rehearse() tells

    def begins(self, stepper: Stepper) -> None:
        self.mesh = stepper.mesh
        optimizer = stepper.optimizer
        self.check("parameter", self._parameters(stepper))
        self.check("shard", [(_identity(f), f.value) for f in stepper.trained])
        self.check("master", [(_identity(f), optimizer.masters[f.name]) for f in optimizer.shards])

    def _parameters(self, stepper: Stepper) -> Iterator[tuple[str, Tensor]]:
        for shard in stepper.replica.local_parameters():
            yield _identity(shard), shard.value

    def reads(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.micros = {
            x.ctypes.data: 1 << n for n, each in enumerate(micro_batches) for x in (each.tokens, each.targets)
        }

    def gradients(self, stepper: Stepper) -> None:
        self.check(
            "gradient of", [(_identity(f), f.gradient) for f in stepper.replica.shards if f.gradient is not None]
        )

    def ends(self, stepper: Stepper) -> None:
        self.check("final parameter", self._parameters(stepper))


def _identity(shard: ParameterShard) -> str:
    part = shard.tensor_slice
    return f"{shard.name} | {part.dim} {part.start} {part.size} | {shard.start} {shard.value.numel()}"


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _constants(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _constants(each)
    elif isinstance(tree, dict):
        yield from _constants(list(tree.values()))
    elif isinstance(tree, (int, float, str, bool)):
        yield tree


class DifferingBytes:
    """Which bytes of a rank's storages differ from those of its neighbour."""

    def __init__(self) -> None:
        self.ranges: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)

    def pieces(self, at: BytesOf) -> list[tuple[int, int, bool]]:
        """Returns (first, last, differs) of the parts of a place, in order; what was never written is equal."""
        found, here = list[tuple[int, int, bool]](), at.first
        for start, end, differs in self.ranges[at.storage]:
            first, last = max(start, at.first), min(end, at.last)
            if first < last:
                if here < first:
                    found.append((here, first, False))
                found.append((first, last, differs))
                here = last
        return [*found, (here, at.last, False)] if here < at.last else found

    def differs(self, at: BytesOf) -> bool:
        return any(differs for _, _, differs in self.pieces(at))

    def write(self, at: BytesOf, differs: bool) -> None:
        if not at.dense:  # elements between them keep theirs
            differs = differs or self.differs(at)
        self.put(at, [(at.first, at.last, differs)])

    def put(self, at: BytesOf, pieces: Sequence[tuple[int, int, bool]]) -> None:
        kept = list[tuple[int, int, bool]]()
        for first, last, differs in self.ranges[at.storage]:
            if first < at.first:
                kept.append((first, min(last, at.first), differs))
            if last > at.last:
                kept.append((max(first, at.last), last, differs))
        self.ranges[at.storage] = sorted([*kept, *pieces])


@dataclass(frozen=True)
class SumFinding:
    """A sum that is missing or made twice."""

    axis: str
    ranks: tuple[int, int]
    what: str
    """The gradient, parameter or collective."""
    why: str
    module: str = ""

    def line(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.axis} (ranks {self.ranks[0]} and {self.ranks[1]}): {self.what}{where}: {self.why}"


@dataclass
class SumProof:
    """What was found of a layout's sums."""

    layout: str
    findings: list[SumFinding] = field(default_factory=list)
    pairs: int = 0
    """Neighbours that were compared."""
    not_judged: str = ""
    """Why the layout was left out; empty if it was not."""

    def as_dict(self) -> dict[str, Any]:
        """Returns its part of the document of `phalanx verify --static --json`."""
        found = [{**asdict(each), "ranks": list(each.ranks)} for each in self.findings]
        ok = not found and not self.not_judged
        return {"layout": self.layout, "pairs": self.pairs, "findings": found, "not_judged": self.not_judged, "ok": ok}

    def text(self) -> str:
        if self.not_judged:
            return f"{self.layout}: not judged: {self.not_judged}"
        judged = f"{counted(self.pairs, 'pair')} of ranks" if self.pairs else "micro-batches; no sums over ranks"
        lines = [f"{self.layout}: {judged}: {'FAIL' if self.findings else 'ok'}"]
        lines += [f"  {each.line()}" for each in self.findings[:SHOWN]]
        left = len(self.findings) - SHOWN
        return "\n".join([*lines, f"  and {left} more"] if left > 0 else lines)


def axes_between(layout: Layout, rank: int, other: int) -> str:
    """Returns the axis along which two ranks are neighbours."""
    sizes, here = meshes.place(layout, rank)
    _, there = meshes.place(layout, other)
    return ", ".join(axis for axis in sizes if here[axis] != there[axis])


def prove_sums(job: Job, vocab_size: int) -> SumProof:
    """Rehearses every rank of a job, and returns the sums that are missing or made twice, or why it cannot judge."""
    layout = job.layout
    proof = SumProof(layout.line(), not_judged="; ".join(problems(job)))
    if proof.not_judged:
        return proof
    events, every = list[list[RecordedOperation]](), 0
    # The backend's own collectives, not those that are composed on gloo.
    with mock.patch.object(Axis, "gloo", property(lambda _: False, lambda *_: None), create=True):
        for rank in range(layout.processes):
            recorder = OperationRecorder()
            rehearse(job, rank, vocab_size, "cpu", 1, recorder)
            events.append(recorder.events)
            for bit in recorder.micros.values():
                every |= bit
    found = dict[tuple[str, str], SumFinding]()
    stage = layout.processes // layout.pp
    for line in {line.stride: line for line in meshes.lines(layout).values() if line.size > 1}.values():
        pairs = [
            (rank, other)
            for rank in range(layout.processes)
            for other in range(rank + line.stride, layout.processes, line.stride)
            if line.place(other) - line.place(rank) == (other - rank) // line.stride
            and (_hold_alike(events[rank], events[other]) if line.stride == stage else other == rank + line.stride)
        ]
        messages = StageMessages(stage)
        runs = [_NeighbourRanks(pair, axes_between(layout, *pair), messages) for pair in pairs]
        proof.pairs += len(runs)
        for each in messages.follow([(run, run.run(*(events[rank] for rank in run.ranks))) for run in runs]):
            found.setdefault((each.axis, each.what), each)
    if layout.pp > 1:
        for each in _micro_batch_findings(events, stage, every):
            found.setdefault((each.axis, each.what), each)
    proof.findings = list(found.values())
    return proof


def problems(job: Job) -> Iterator[str]:
    """Yields why a job's sums cannot be judged."""
    layout = job.layout
    if layout.schedule.startswith("pipedream"):
        yield f"schedule={layout.schedule}: stages compute with several versions of the weights; 1f1b has the same sums"
    if gathers_parameters(layout):
        yield "zero=3: FSDP2's copies of parameters are not followed; zero=2 is"
    if layout.sync != "bsp":
        yield f"sync={layout.sync}: replicas differ on purpose"
    if layout.processes > LIMIT:
        yield f"{layout.processes} ranks: at most {LIMIT}; smaller axes have the same sums"
    yield from rehearsal_problems(job)


def _hold_alike(mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation]) -> bool:
    """Returns whether two stages hold the same parameter, such as a tied embedding."""
    held = [{x.constants for x in each if x.name.startswith("gradient of ")} for each in (mine, theirs)]
    return not held[0].isdisjoint(held[1])


class StageMessages:
    """The messages between the stages of a pipeline, as pairs of neighbours send and receive them."""

    def __init__(self, stage: int):
        self.stage = stage
        """Ranks per stage."""
        self.sent = defaultdict[tuple[Any, Any], list[tuple[tuple[int, ...], bool]]](list)
        """By pairs of senders and receivers, in order: the shape, and whether the senders' tensors differ."""
        self.received = defaultdict[tuple[Any, Any], int](int)

    def follow(self, runs: Sequence[tuple[_NeighbourRanks, Iterator[None]]]) -> Iterator[SumFinding]:
        """Runs pairs of programs, each until it reads a message that no other has sent yet; yields what is found."""
        running, before = list(runs), (-1, -1)
        while running and before != (now := (len(running), sum(map(len, self.sent.values())))):
            before = now
            running = [each for each in running if next(each[1], self) is not self]
        for run, _ in running:
            yield SumFinding(run.axis, run.ranks, "a message between stages", "it is read, and nobody sends it")
        for run, _ in runs:
            yield from run.findings
        for (senders, receivers), shapes in self.sent.items():
            if (count := self.received[senders, receivers]) != len(shapes):
                why = f"stages send {len(shapes)} messages, of which {count} are received"
                run = next(run for run, _ in runs if run.ranks == senders)
                yield SumFinding(run.axis, senders, f"messages to ranks {receivers[0]} and {receivers[1]}", why)


class _NeighbourRanks:
    """Two neighbours' programs: of one stage, or of two that hold the same parameter."""

    def __init__(self, ranks: tuple[int, int], axis: str, messages: StageMessages):
        self.ranks, self.axis, self.messages = ranks, axis, messages
        self.states, self.findings = DifferingBytes(), list[SumFinding]()
        self.same: dict[int, int] = {}
        """By storage of the other rank, that of this one."""
        self.sent: dict[tuple[int, ...], bool] = {}
        self.held = set[int]()
        """Storages of parameters."""
        self.stages = ranks[0] // messages.stage != ranks[1] // messages.stage
        """Whether they are of two stages."""
        self.coming = dict[int, tuple[BytesOf, tuple[Any, Any], int]]()
        """By storage, where a message of another stage arrives: that place, its ranks, and its number."""

    def run(self, mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation]) -> Iterator[None]:
        """Follows both programs; stops while a message that is read has not been sent."""
        for event, other in _aligned(mine, theirs, self.ranks if self.stages else ()):
            for at in event.reads if event is not None and event.name != "c10d.recv_" else ():
                if (message := self.coming.pop(at.storage, None)) is not None:
                    buffer, ranks, number = message
                    while len(self.messages.sent[ranks]) <= number:
                        yield
                    shape, differs = self.messages.sent[ranks][number]
                    if shape != buffer.shape:
                        why = f"a message of {list(shape)} is received as {list(buffer.shape)}"
                        self.findings.append(SumFinding(self.axis, self.ranks, "a message between stages", why))
                    self.states.write(buffer, differs)
            if event is None:
                for at, fresh in zip(other.writes, other.fresh or [False] * len(other.writes), strict=True):
                    known = self.same.get(at.storage, UNKNOWN)
                    if fresh or known == UNKNOWN:  # this rank has no such tensor
                        self.same[at.storage] = UNKNOWN
                    else:
                        self.states.write(at._replace(storage=known), True)
            elif other is None:
                for at, fresh in zip(event.writes, event.fresh or [False] * len(event.writes), strict=True):
                    self._fresh(at, fresh)
                    self.states.write(at, True)
            else:
                self._step(event, other)

    def _fresh(self, at: BytesOf, fresh: bool) -> None:
        if fresh:
            self.states.ranges.pop(at.storage, None)

    def _reads(self, at: BytesOf, other: BytesOf) -> bool:
        """Returns whether two ranks read something different."""
        if at.storage < 0 or other.storage < 0:
            return at.content != other.content
        if self.same.setdefault(other.storage, at.storage) != at.storage:
            return True
        return (at.first, at.last, at.shape) != (other.first, other.last, other.shape) or self.states.differs(at)

    def _step(self, event: RecordedOperation, other: RecordedOperation) -> None:
        if not event.group and not event.fresh:
            return self._check(event, other)
        for at, beside in zip(event.writes, other.writes, strict=True):
            self.same[beside.storage] = at.storage
        if event.group:
            return self._collective(event, other)
        constants = event.constants != other.constants
        joined = [self._reads(a, b) for a, b in zip(event.reads, other.reads, strict=True)]
        for at, fresh in zip(event.writes, event.fresh, strict=True):
            self._fresh(at, fresh)
        if event.name.startswith(("_foreach", "_fused")) and len(event.reads) % max(len(event.writes), 1) == 0:
            n = len(event.writes)
            for number, at in enumerate(event.writes):
                self.states.write(at, constants or any(joined[number::n]))
            return None
        (first, *others) = event.writes
        if event.name in PIECEWISE and not others and self._piecewise(event, other, first, constants):
            return None
        if event.name == "cat" and not others and first.dense and all(x.dense for x in event.reads):
            here = first.first
            pieces = list[tuple[int, int, bool]]()
            for at, differs in zip(event.reads, joined, strict=True):
                size = at.last - at.first
                moved = [(a - at.first + here, b - at.first + here, d) for a, b, d in self.states.pieces(at)]
                aligned = self._same_place(event, other, at) or not differs
                pieces += moved if aligned else [(here, here + size, True)]
                here += size
            if here == first.last:
                self.states.put(first, [p for p in pieces if p[0] < p[1]])
                return None
        for at in event.writes:
            self.states.write(at, constants or any(joined))
        return None

    def _same_place(self, event: RecordedOperation, other: RecordedOperation, at: BytesOf) -> bool:
        beside = other.reads[event.reads.index(at)]
        return at.storage >= 0 and (self.same.get(beside.storage), beside.first, beside.last) == (
            at.storage, at.first, at.last
        )  # fmt: skip

    def _piecewise(self, event: RecordedOperation, other: RecordedOperation, at: BytesOf, constants: bool) -> bool:
        """Writes the states of an operation on elements at the same places; False if it is not one here."""
        if constants or not at.dense or at.first == at.last:
            return False
        size, pieces = at.last - at.first, list[list[tuple[int, int, bool]]]()
        for source, beside in zip(event.reads, other.reads, strict=True):
            if event.name == "copy_" and source == at and len(event.reads) > 1 and source is event.reads[0]:
                continue
            if source.shape == () and not self._reads(source, beside):
                continue
            if not source.dense or source.last - source.first != size or not self._same_place(event, other, source):
                return False
            pieces.append([(a - source.first, b - source.first, d) for a, b, d in self.states.pieces(source)])
        borders = sorted({0, size, *(x for each in pieces for a, b, _ in each for x in (a, b))})
        found = list[tuple[int, int, bool]]()
        for a, b in pairwise(borders):
            differs = any(d for each in pieces for first, last, d in each if first <= a and b <= last)
            found.append((at.first + a, at.first + b, differs))
        self.states.put(at, found)
        return True

    def _check(self, event: RecordedOperation, other: RecordedOperation) -> None:
        (at,), (beside,) = event.reads, other.reads
        kind, _, name = event.name.partition(" ")
        self.same[beside.storage] = at.storage
        if kind in ("parameter", "shard", "master"):
            self.held.add(at.storage)
            self.states.put(at, [(at.first, at.last, event.constants != other.constants)])
        elif event.constants == other.constants and self.states.differs(at) and not (self.stages and kind == "final"):
            what = event.name if kind != "final" else f"{name} after a step"
            self.findings.append(
                SumFinding(self.axis, self.ranks, what, "both ranks hold it, and it differs: a sum is missing")
            )

    def _collective(self, event: RecordedOperation, other: RecordedOperation) -> None:
        inside = self.ranks[1] in event.group
        name = event.name
        if name == "c10d.barrier":
            return
        differs = any(self._reads(a, b) for a, b in zip(event.reads, other.reads, strict=True))
        if event.peer >= 0 and event.peer // self.messages.stage != self.ranks[0] // self.messages.stage:
            peers = event.peer, other.peer
            if name == "c10d.send":
                self.messages.sent[self.ranks, peers].append((event.reads[0].shape, differs))
            else:
                edge = peers, self.ranks
                self.coming[event.writes[0].storage] = event.writes[0], edge, self.messages.received[edge]
                self.messages.received[edge] += 1
            return
        if name == "c10d.send":
            self.sent[event.reads[0].shape] = differs
            return
        sums = name in ("c10d.allreduce_", "c10d._reduce_scatter_base_")
        if inside and sums and not differs and "MAX" not in event.constants:
            self.findings.append(
                SumFinding(self.axis, self.ranks, f"{name[5:].strip('_')} of {list(event.reads[0].shape)}",
                    "all ranks hold what it sums: it is counted twice", event.where)
            )  # fmt: skip
        for at in event.writes:
            if name in ("c10d.allreduce_", "c10d.votes"):
                if inside:
                    self.states.write(at, False)
            elif not inside and "base_" in name and "alltoall" not in name:
                self._apart(at, event, differs)
            elif name in ("c10d._allgather_base_", "c10d.broadcast_"):
                self.states.write(at, not inside and differs)
            elif name == "c10d.recv_":
                self.states.write(at, inside or self.sent.get(at.shape, differs))
            else:
                self.states.write(at, inside or differs)

    def _apart(self, at: BytesOf, event: RecordedOperation, differs: bool) -> None:
        """Writes the result of a reduce-scatter or an all-gather of two groups: this rank's part keeps the states
        of its place. What arrives of parameters is as what was there: each rank has its own proof."""
        source, position = event.reads[0], event.group.index(self.ranks[0])
        small = min(at.last - at.first, source.last - source.first)
        if not (at.dense and source.dense) or at.storage < 0 or source.storage < 0:
            return self.states.write(at, differs)
        gathers = "gather" in event.name
        if gathers and at.storage not in self.held:
            return self.states.write(at, differs)
        start = at.first + (position * small if gathers else 0)
        begin = source.first + (0 if gathers else position * small)
        pieces = self.states.pieces(source._replace(first=begin, last=begin + small))
        self.states.put(
            at._replace(first=start, last=start + small),
            [(a - begin + start, b - begin + start, d) for a, b, d in pieces],
        )
        return None


def _aligned(
    mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation], stages: tuple[int, ...]
) -> Iterator[tuple[Any, Any]]:
    """Yields the events of two programs in pairs; None where only one of them has it. Those of two `stages` share
    checks and collectives alone: whatever else they compute, differs."""
    if stages:
        a, b = (
            [_key_between_stages(each, stages, n, rank) for n, each in enumerate(of)]
            for rank, of in enumerate((mine, theirs))
        )
    else:
        a, b = [each.key for each in mine], [each.key for each in theirs]
    if a == b:
        yield from zip(mine, theirs, strict=True)
        return
    for what, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if what == "equal":
            yield from zip(mine[i:j], theirs[k:m], strict=True)
        else:
            yield from ((each, None) for each in mine[i:j])
            yield from ((None, each) for each in theirs[k:m])


def _key_between_stages(event: RecordedOperation, stages: tuple[int, ...], number: int, rank: int) -> tuple[Any, ...]:
    """Returns the key by which an event of a stage is found in another stage's program."""
    if event.group:
        shared = {*stages} <= {*event.group} and event.peer < 0
    else:
        shared = not event.fresh or event.name in PIECEWISE or event.name == "cat"
    return event.key[:1] + event.key[2:] if shared else (rank, number)


ADDING = {"add", "add_", "_foreach_add_", "cat", "stack", "copy_"}
"""Operations that may join the gradients of several micro-batches."""


class _StageProgram:
    """One rank's program of a pipeline, and the micro-batches that its tensors depend on: a bit each. In the norm of
    gradients, which begins once these are final, a bit per gradient instead."""

    def __init__(self, rank: int, stage: int, shared: dict[str, Any]):
        self.rank, self.stage = rank, stage
        self.sent: defaultdict[tuple[int, int], list[int]] = shared["sent"]
        self.sums: defaultdict[tuple[Any, ...], dict[int, int]] = shared["sums"]
        self.gradients: dict[str, int] = shared["gradients"]
        self.findings: list[SumFinding] = shared["findings"]
        self.masks = defaultdict[int, dict[tuple[int, int], int]](dict)
        self.coming = dict[int, tuple[BytesOf, tuple[int, int], int]]()
        self.counts = defaultdict[Any, int](int)
        self.final = False

    def depends(self, at: BytesOf) -> int:
        """Returns the bits of a place."""
        mask = at.micro
        for (first, last), bits in self.masks[at.storage].items() if at.storage >= 0 else ():
            if first < at.last and at.first < last:
                mask |= bits
        return mask

    def put(self, at: BytesOf, mask: int) -> None:
        """Writes the bits of a place; what it covers in part keeps its own."""
        ranges = self.masks[at.storage]
        for first, last in [each for each in ranges if at.dense and at.first <= each[0] and each[1] <= at.last]:
            del ranges[first, last]
        ranges[at.first, at.last] = ranges.get((at.first, at.last), 0) | mask

    def find(self, what: str, why: str, where: str = "", other: int | None = None) -> None:
        self.findings.append(SumFinding("pp", (self.rank, self.rank if other is None else other), what, why, where))

    def run(self, program: Sequence[RecordedOperation], every: int) -> Iterator[None]:
        """Follows the program; stops while a message that is read, or a part of a sum, is not there."""
        for event in program:
            if event.name == "c10d.recv_" and self._crosses(event.peer):
                edge = event.peer, self.rank
                self.coming[event.writes[0].storage] = event.writes[0], edge, self.counts[edge]
                self.counts[edge] += 1
                continue
            for at in event.reads:
                if at.storage in self.coming:
                    buffer, edge, number = self.coming.pop(at.storage)
                    while len(self.sent[edge]) <= number:
                        yield
                    self.put(buffer, self.sent[edge][number])
            if event.name.startswith("gradient of "):
                self._gradient(event, every)
                continue
            if not event.group and not event.fresh:
                continue  # another check
            read = [self.depends(at) for at in event.reads]
            mask = 0
            for number, each in enumerate(read):
                if not (event.name == "copy_" and number == 0):
                    mask |= each
            if event.name == "c10d.send" and self._crosses(event.peer):
                if mask.bit_count() > 1 and not self.final:
                    self.find(
                        "a message between stages", "it depends on several micro-batches", event.where, event.peer
                    )
                self.sent[self.rank, event.peer].append(mask)
            elif event.name in ("c10d.allreduce_", "c10d.votes") and any(map(self._crosses, event.group)):
                key = event.name, event.group, self.counts[event.name, event.group]
                self.counts[event.name, event.group] += 1
                self.sums[key][self.rank] = mask
                while len(self.sums[key]) < len(event.group):
                    yield
                mask = self._sum(event, self.sums[key])
            elif not self.final and event.name not in ADDING and not event.group:
                apart = {each for at, each in zip(event.reads, read, strict=True) if at not in event.writes}
                if len({each for each in apart if each.bit_count() == 1}) > 1:
                    self.find(event.name, "it multiplies tensors of different micro-batches", event.where)
            for at in event.writes:
                self.put(at, mask)

    def _crosses(self, rank: int) -> bool:
        return rank // self.stage != self.rank // self.stage

    def _gradient(self, event: RecordedOperation, every: int) -> None:
        (at,) = event.reads
        if at.first < at.last and (missing := every & ~self.depends(at)):
            lost = ", ".join(str(n) for n in range(missing.bit_length()) if missing >> n & 1)
            self.find(event.name, f"it does not depend on micro-batch {lost}")
        self.final = True
        bit = self.gradients.setdefault(event.constants, 1 << len(self.gradients) + every.bit_length())
        self.put(at, bit)

    def _sum(self, event: RecordedOperation, parts: dict[int, int]) -> int:
        """Returns the bits of a sum over stages; a gradient that several of them bring to a norm is counted twice."""
        mask, twice = 0, 0
        for each in parts.values():
            twice |= mask & each
            mask |= each
        if self.final and event.name == "c10d.allreduce_" and "MAX" not in event.constants:
            for name, bit in self.gradients.items():
                if twice & bit:
                    what = f"norm of gradients: {name.split(' | ')[0]}"
                    self.find(what, "several stages count it", event.where, max(parts))
        return mask


def _micro_batch_findings(events: Sequence[Sequence[RecordedOperation]], stage: int, every: int) -> list[SumFinding]:
    """Returns where the ranks of a pipeline lose or mix micro-batches, or count a gradient twice in the norm. `every`
    has the bits of all micro-batches."""
    findings = list[SumFinding]()
    shared = {"sent": defaultdict(list), "sums": defaultdict(dict), "gradients": {}, "findings": findings}
    programs = [_StageProgram(rank, stage, shared) for rank in range(len(events))]
    running = [(each, each.run(program, every)) for each, program in zip(programs, events, strict=True)]
    before = None
    while running and before != (
        now := (len(running), *(sum(map(len, shared[of].values())) for of in ("sent", "sums")))
    ):
        before = now
        running = [each for each in running if next(each[1], shared) is not shared]
    for program, _ in running:
        program.find("the program", "it waits for a message or a sum in which another rank takes no part")
    return findings
