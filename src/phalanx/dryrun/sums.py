"""Proves sums over ranks without numbers: which tensors are equal on all ranks, and which are not.

Every rank's real step is rehearsed in turn (dryrun/rehearse.py), and its operations are recorded. Two neighbours along
an axis then have the same operations; what they read of parameters and batches is equal or not by the layout. From
these states every operation's result follows: it is equal on both ranks if all that was read is, at the same place and
with the same constants. A sum over both ranks makes equal what was not; a part of it is not equal. Two rules follow:

- A gradient, or a parameter after the optimizer, that both ranks hold is equal on both: else a sum is missing.
- What is summed over an axis differs along it: else it is summed twice.

In a pipeline a received tensor is what the stage before sent. What each gradient depends on over all ranks, and the
norm, dryrun/dependence.py follows.

Nothing is compared with another program, and nothing depends on values: no rank has any. What it cannot tell: a sum of
wrong summands (a factor, a bias that is added before the sum, heads in another order), which `phalanx verify` finds.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import reduce
from operator import or_
from typing import Any
from unittest import mock

from phalanx.comm.axis import Axis
from phalanx.config.job import Job
from phalanx.dryrun.dependence import FollowedProgram, follow
from phalanx.dryrun.recorder import (
    PIECEWISE,
    BytesOf,
    ByteStates,
    OperationRecorder,
    Piece,
    RecordedOperation,
    SumFinding,
    joined,
    moved,
)
from phalanx.dryrun.rehearse import problems as rehearsal_problems
from phalanx.dryrun.rehearse import rehearse
from phalanx.parallel import mesh as meshes
from phalanx.partition.derived import gathers_parameters, overlaps, solve, stashes
from phalanx.units import counted

SHOWN = 8
"""Findings of a layout that are printed."""
UNKNOWN = -2
"""Number of a storage of the other rank that this one does not have."""
LIMIT = 64
"""Most ranks whose programs are compared."""


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


def prove_sums(job: Job, vocab_size: int) -> SumProof:
    """Rehearses every rank of a job, and returns the sums that are missing or made twice, or why it cannot judge."""
    layout = job.layout
    proof = SumProof(layout.line(), not_judged="; ".join(problems(job)))
    if proof.not_judged:
        return proof
    recorders, steps, apart = list[OperationRecorder](), 3 if overlaps(layout) else 1, stashes(layout)
    micros = steps * solve(job.train.global_batch, layout).accumulation
    # The backend's own collectives, not those that are composed on gloo.
    with mock.patch.object(Axis, "gloo", property(lambda _: False, lambda *_: None), create=True):
        for rank in range(layout.processes):
            recorders.append(OperationRecorder(rank, micros, apart))
            rehearse(job, rank, vocab_size, "cpu", steps, recorders[-1])
            gc.freeze()  # or each rehearsal's end would go through all that is recorded
    gc.unfreeze()
    found = dict[tuple[str, str], SumFinding]()
    for each in _findings(job, recorders, proof):
        found.setdefault((each.axis, each.what), each)
    proof.findings = list(found.values())
    return proof


def _findings(job: Job, recorders: Sequence[OperationRecorder], proof: SumProof) -> Iterator[SumFinding]:
    """Yields what two neighbours along each axis have, what all ranks together have, and what each has alone."""
    layout, events = job.layout, [each.events for each in recorders]
    stage, world = layout.processes // layout.pp, range(layout.processes)
    places = [meshes.place(layout, rank)[1] for rank in world]
    for axis, size in meshes.place(layout, 0)[0].items() if layout.processes > 1 else ():
        messages, runs = StageMessages(stage), list[_NeighbourRanks]()
        for rank, other in ((a, b) for a in world for b in world if a < b) if size > 1 else ():
            apart = places[other][axis] - places[rank][axis]
            if {**places[rank], axis: 0} != {**places[other], axis: 0}:
                continue
            if _hold_alike(events[rank], events[other]) if axis == "pp" else apart == 1:
                own = layout.sync != "bsp" and axis == layout.replica_axis
                runs.append(_NeighbourRanks((rank, other), axis, messages, own))
        proof.pairs += len(runs)
        yield from messages.follow([(run, run.run(*(events[rank] for rank in run.ranks))) for run in runs])
    of_replicas = defaultdict[int, list[int]](list)
    for rank in world:
        of_replicas[0 if layout.sync == "bsp" else places[rank][layout.replica_axis]].append(rank)
    everything = [
        FollowedProgram(rank, stage, _united(recorders[of] for of in ranks))
        for ranks in of_replicas.values()
        for rank in ranks
    ]
    unflushed = overlaps(layout) or recorders[0].apart
    yield from follow(
        sorted(everything, key=lambda each: each.rank),
        recorders,
        norm="no" if unflushed or layout.sync != "bsp" else "clips" if job.optimizer.clip else "sums",
        versions=unflushed,
    )
    for each in recorders:
        yield from each.findings


def problems(job: Job) -> Iterator[str]:
    """Yields why a job's sums cannot be judged."""
    if gathers_parameters(job.layout) and job.layout.tp > 1 and job.model.mtp:
        yield "zero=3 with tp and model.mtp: modules for further tokens are not followed through FSDP2; zero=2 is"
    if job.layout.processes > LIMIT:
        yield f"{job.layout.processes} ranks: at most {LIMIT}; smaller axes have the same sums"
    yield from rehearsal_problems(job)


def _united(recorders: Iterator[OperationRecorder]) -> list[int]:
    """Returns by update what it should depend on, of ranks that sum their gradients."""
    return [reduce(or_, bits) for bits in zip(*(each.batches for each in recorders), strict=True)]


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

    def __init__(self, ranks: tuple[int, int], axis: str, messages: StageMessages, own: bool):
        """`own`: gradients differ on purpose, until replicas synchronise."""
        self.ranks, self.axis, self.messages, self.own = ranks, axis, messages, own
        self.states, self.findings = ByteStates(), list[SumFinding]()
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
        return (at.first, at.last, at.shape) != (other.first, other.last, other.shape) or bool(self.states.of(at))

    def _step(self, event: RecordedOperation, other: RecordedOperation) -> None:
        if not event.group and not event.fresh:
            return self._check(event, other)
        for at, beside in zip(event.writes, other.writes, strict=True):
            self.same[beside.storage] = at.storage
        if event.group:
            return self._collective(event, other)
        constants = event.constants != other.constants
        differ = [self._reads(a, b) for a, b in zip(event.reads, other.reads, strict=True)]
        for at, fresh in zip(event.writes, event.fresh, strict=True):
            self._fresh(at, fresh)
        if event.name.startswith(("_foreach", "_fused")) and len(event.reads) % max(len(event.writes), 1) == 0:
            n = len(event.writes)
            for number, at in enumerate(event.writes):
                self.states.write(at, constants or any(differ[number::n]))
            return None
        (first, *others) = event.writes
        if event.name in PIECEWISE and not others and self._piecewise(event, other, first, constants):
            return None
        if event.name == "cat" and not others and first.dense and all(x.dense for x in event.reads):
            here = first.first
            pieces = list[Piece]()
            for at, differs in zip(event.reads, differ, strict=True):
                size = at.last - at.first
                aligned = self._same_place(event, other, at) or not differs
                states = self.states.pieces(at)
                pieces += moved(states, here - at.first) if aligned else [(here, here + size, True)]
                here += size
            if here == first.last:
                self.states.put(first, [p for p in pieces if p[0] < p[1]])
                return None
        for at in event.writes:
            self.states.write(at, constants or any(differ))
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
        size, pieces = at.last - at.first, [[(at.first, at.last, 0)]]
        for source, beside in zip(event.reads, other.reads, strict=True):
            if event.name == "copy_" and source == at and len(event.reads) > 1 and source is event.reads[0]:
                continue
            if source.shape == () and not self._reads(source, beside):
                continue
            if not source.dense or source.last - source.first != size or not self._same_place(event, other, source):
                return False
            pieces.append(moved(self.states.pieces(source), at.first - source.first))
        self.states.put(at, joined(pieces))
        return True

    def _check(self, event: RecordedOperation, other: RecordedOperation) -> None:
        (at,), (beside,) = event.reads, other.reads
        kind, _, name = event.name.partition(" ")
        self.same[beside.storage] = at.storage
        if kind in ("parameter", "shard", "master"):
            self.held.add(at.storage)
            self.states.write(at, event.constants != other.constants)
        elif kind == "gradient" and self.own:
            return
        elif event.constants == other.constants and bool(self.states.of(at)) and not (self.stages and kind == "final"):
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
        self.states.put(at._replace(first=start, last=start + small), moved(pieces, start - begin))
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
