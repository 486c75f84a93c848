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

from collections import Counter, defaultdict
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
    FollowedStates,
    OperationRecorder,
    Parts,
    Piece,
    RecordedOperation,
    SumFinding,
    joined,
    moved,
    run_together,
)
from phalanx.dryrun.rehearse import problems as rehearsal_problems
from phalanx.dryrun.rehearse import rehearse
from phalanx.gc import gc_paused
from phalanx.parallel import apply
from phalanx.parallel import mesh as meshes
from phalanx.partition.derived import overlaps, solve, stashes
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
    with (
        gc_paused(),
        # The backend's own collectives, not those that are composed on gloo.
        mock.patch.object(Axis, "gloo", property(lambda _: False, lambda *_: None), create=True),
        mock.patch.object(apply, "initialise_part"),  # parameters are equal by what they are
    ):
        for rank in range(layout.processes):
            recorders.append(OperationRecorder(rank, micros, apart))
            rehearse(job, rank, vocab_size, "cpu", steps, recorders[-1])
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
        parts, pairs, runs = Parts(dict), set[Any](), list[_NeighbourRanks]()
        for rank, other in ((a, b) for a in world for b in world if a < b) if size > 1 else ():
            apart = places[other][axis] - places[rank][axis]
            if {**places[rank], axis: 0} != {**places[other], axis: 0}:
                continue
            if _hold_alike(events[rank], events[other]) if axis == "pp" else apart == 1:
                own = layout.sync != "bsp" and axis == layout.replica_axis
                runs.append(_NeighbourRanks((rank, other), axis, axis == "pp", own, parts, pairs))
        proof.pairs += len(runs)
        yield from _follow_pairs([(run, run.run(*(events[rank] for rank in run.ranks))) for run in runs])
    of_replicas = defaultdict[int, list[int]](list)
    for rank in world:
        of_replicas[0 if layout.sync == "bsp" else places[rank][layout.replica_axis]].append(rank)
    parts = Parts(dict)
    everything = [
        FollowedProgram(rank, stage, _united(recorders[of] for of in ranks), parts)
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


def _follow_pairs(pairs: Sequence[tuple[_NeighbourRanks, Iterator[None]]]) -> Iterator[SumFinding]:
    """Runs pairs of programs together; yields what is found."""
    run_together(pairs)
    sent, received = Counter[Any](), Counter[Any]()
    for run, _ in pairs:
        yield from run.findings
        for (name, ends), count in run.counts.items():
            if name == "message":
                (sent if ends[0] == run.ranks else received)[ends] = count
    for ends in sent | received:
        if sent[ends] != received[ends]:
            why = f"stages send {counted(sent[ends], 'message')}, of which {received[ends]} are received"
            what = f"messages to ranks {ends[1][0]} and {ends[1][1]}"
            yield SumFinding(pairs[0][0].axis, ends[0], what, why)


class _NeighbourRanks(FollowedStates):
    """Two neighbours' programs: of one stage, or of two that hold the same parameter."""

    def __init__(self, ranks: tuple[int, int], axis: str, stages: bool, own: bool, parts: Parts, pairs: set[Any]):
        """`stages`: they are of two stages. `own`: gradients differ on purpose, until replicas synchronise. `pairs` are
        those that run together."""
        super().__init__(ranks, ranks, axis, parts)
        self.stages, self.own, self.pairs = stages, own, pairs
        pairs.add(ranks)
        self.same: dict[int, int] = {}
        """By storage of the other rank, that of this one."""

    def run(self, mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation]) -> Iterator[None]:
        """Follows both programs; stops while what is read has not arrived."""
        for event, other in _aligned(mine, theirs, self.ranks if self.stages else ()):
            if event is not None:
                yield from self.await_at((*event.reads, *event.writes))
            self.done += 1
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
        self.same.setdefault(other.storage, at.storage)
        return at.shape != other.shape or not self._same_place(at, other) or bool(self.states.of(at))

    def _step(self, event: RecordedOperation, other: RecordedOperation) -> None:
        if not event.group and not event.fresh:
            return self._check(event, other)
        for at, beside in zip(event.writes, other.writes, strict=True):
            self.same[beside.storage] = at.storage
        if event.group:
            return self._collective(event, other)
        constants = event.constants != other.constants
        differ = [self._reads(a, b) for a, b in zip(event.reads, other.reads, strict=True)]
        if event.name == "copy_":
            differ[0] = False  # what it writes
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
            for at, beside, differs in zip(event.reads, other.reads, differ, strict=True):
                size = at.last - at.first
                aligned = self._same_place(at, beside) or not differs
                states = self.states.pieces(at)
                pieces += moved(states, here - at.first) if aligned else [(here, here + size, True)]
                here += size
            if here == first.last:
                self.states.put(first, [p for p in pieces if p[0] < p[1]])
                return None
        for at in event.writes:
            self.states.write(at, constants or any(differ))
        return None

    def _same_place(self, at: BytesOf, beside: BytesOf) -> bool:
        there = self.same.get(beside.storage), beside.first, beside.last
        return at.storage >= 0 and there == (at.storage, at.first, at.last)

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
            if not source.dense or source.last - source.first != size or not self._same_place(source, beside):
                return False
            pieces.append(moved(self.states.pieces(source), at.first - source.first))
        self.states.put(at, joined(pieces))
        return True

    def _check(self, event: RecordedOperation, other: RecordedOperation) -> None:
        (at,), (beside,) = event.reads, other.reads
        kind, _, name = event.name.partition(" ")
        self.same[beside.storage] = at.storage
        if kind in ("parameter", "shard", "master"):
            self.states.write(at, event.constants != other.constants)
        elif kind == "gradient" and self.own:
            return
        elif event.constants == other.constants and bool(self.states.of(at)) and not (self.stages and kind == "final"):
            what = event.name if kind != "final" else f"{name} after a step"
            self.find(what, "both ranks hold it, and it differs: a sum is missing")

    def _collective(self, event: RecordedOperation, other: RecordedOperation) -> None:
        inside = self.ranks[1] in event.group
        name = event.name
        if name == "c10d.barrier":
            return None
        differs = any(self._reads(a, b) for a, b in zip(event.reads, other.reads, strict=True))
        sums = name in ("c10d.allreduce_", "c10d._reduce_scatter_base_")
        if inside and sums and not differs and "MAX" not in event.constants:
            what = f"{name[5:].strip('_')} of {list(event.reads[0].shape)}"
            self.find(what, "all ranks hold what it sums: it is counted twice", event.where)
        apart = not all(map(self._same_place, event.reads, other.reads))
        ends = tuple(zip(event.group, other.group, strict=True))
        if event.peer >= 0 and (event.peer, other.peer) in self.pairs:
            ends = self.ranks, (event.peer, other.peer)
            return self.meet(event, "message", ends if name == "c10d.send" else ends[::-1], apart)
        if name in ("c10d._allgather_base_", "c10d._reduce_scatter_base_") and self.pairs >= {*ends}:
            return self.meet(event, name, ends, apart)
        for at in event.writes:
            if name in ("c10d.allreduce_", "c10d.votes"):
                if inside:
                    self.states.write(at, False)
            elif name in ("c10d._allgather_base_", "c10d.broadcast_"):
                self.states.write(at, not inside and differs)
            else:
                self.states.write(at, inside or differs or event.peer >= 0)
        return None


def _aligned(
    mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation], stages: tuple[int, ...]
) -> Iterator[tuple[Any, Any]]:
    """Yields the events of two programs in pairs; None where only one of them has it. Those of two `stages` share
    checks and collectives alone: whatever else they compute, differs. Others have the same collectives in the same
    order, whatever they compute between them; but one of them may sum over tensor ranks what the other's shard lacks.
    """
    if stages:
        keys = (
            [_key_between_stages(each, stages, n, rank) for n, each in enumerate(of)]
            for rank, of in enumerate((mine, theirs))
        )
        yield from _matched(mine, theirs, *keys)
        return
    calls = [[n for n, each in enumerate(of) if each.group] for of in (mine, theirs)]
    keys = [
        [(of[n].name, of[n].where, len(of[n].group)) for n in at] for of, at in zip((mine, theirs), calls, strict=True)
    ]
    if [name for name, *_ in keys[0]] != [name for name, *_ in keys[1]]:
        blocks = SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
        calls = [[calls[k][block[k] + n] for block in blocks for n in range(block.size)] for k in (0, 1)]
    a, b = 0, 0
    for i, j in (*zip(*calls, strict=True), (len(mine), len(theirs))):
        between = mine[a:i], theirs[b:j]
        yield from _matched(*between, *([each.key for each in of] for of in between))
        yield from zip(mine[i : i + 1], theirs[j : j + 1], strict=True)
        a, b = i + 1, j + 1


def _matched(
    mine: Sequence[RecordedOperation], theirs: Sequence[RecordedOperation], a: Sequence[Any], b: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """Yields events in pairs by their keys `a` and `b`."""
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
