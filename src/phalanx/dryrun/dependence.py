"""Follows through the programs of all ranks which micro-batches of which data rank each tensor depends on.

A gradient depends on every micro-batch of every rank whose gradients are summed with it: else one is dropped,
overwritten, or not summed. A message between stages depends on one micro-batch, and before gradients are final only a
sum reads two. A gradient also is a source of its own for what is computed from it: the norm has each once, and with
clipping every parameter depends on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from phalanx.dryrun.recorder import (
    MESSAGE,
    BytesOf,
    FollowedStates,
    OperationRecorder,
    Parts,
    Piece,
    RecordedOperation,
    SumFinding,
    bits_of,
    moved,
    run_together,
)

ADDING = {"add", "add_", "_foreach_add_", "cat", "stack", "copy_"}
"""Operations that may join the gradients of several micro-batches."""


@dataclass
class _Shared:
    """State common to the programs of all ranks."""

    micros: int
    tokens: int
    norm: Literal["no", "sums", "clips"]
    versions: bool
    trained: set[str]
    """Names of parameters with gradients."""
    gradients: dict[str, int] = field(default_factory=dict)
    """By gradient, its bit."""
    updates: list[tuple[FollowedProgram, str, int]] = field(default_factory=list)
    """Parameters after an update, with their bits."""


class FollowedProgram(FollowedStates):
    """One rank's program. `expected` are the bits that each update depends on."""

    def __init__(self, rank: int, stage: int, expected: Sequence[int], parts: Parts):
        super().__init__((rank, rank), rank, "", parts)
        self.stage, self.expected = stage, expected
        self.parameters = set[int]()
        """Storages of parameters."""
        self.final = False

    def run(self, program: Sequence[RecordedOperation], shared: _Shared) -> Iterator[None]:
        """Follows the program; stops while what is read has not arrived."""
        self.shared = shared
        for event in program:
            yield from self.await_at((*event.reads, *event.writes))
            self.done += 1
            if event.group:
                self._collective(event)
            elif event.fresh:
                self._operation(event)
            else:
                self._check(event)

    def _operation(self, event: RecordedOperation) -> None:
        read = [at.bits | self.states.of(at) if at.storage >= 0 else at.bits for at in event.reads]
        if event.name in ("mul", "mul_") and len(read) == 1 and event.constants in ("[0]", "[0.0]", "[False]"):
            read = [0]  # what another rank counts
        bits = 0
        for number, each in enumerate(read):
            if not (event.name == "copy_" and number == 0):
                bits |= each
        if not self.final and event.name not in ADDING and (event.where or not self.shared.versions):
            apart = {each for at, each in zip(event.reads, read, strict=True) if at not in event.writes}
            several = {each for bits in apart if len(each := self.micros(bits)) == 1}
            if len(several) > 1:
                self.find(event.name, "it multiplies tensors of different micro-batches", event.where)
        if event.name == "cat" and sum(at.last - at.first for at in event.reads) == event.writes[0].last - (
            here := event.writes[0].first
        ):
            pieces = list[Piece]()
            for at in event.reads:
                pieces += moved(self.states.pieces(at), here - at.first)
                here += at.last - at.first
            if event.fresh[0]:
                self.states.ranges.pop(event.writes[0].storage, None)
            return self.states.put(event.writes[0], pieces)
        for at, fresh in zip(event.writes, event.fresh, strict=True):
            if fresh:
                self.states.ranges.pop(at.storage, None)
            # Later versions of weights do depend on earlier micro-batches.
            self.states.write(at, 0 if self.shared.versions and at.storage in self.parameters else bits)
        return None

    def micros(self, bits: int) -> frozenset[int]:
        """Returns the numbers of micro-batches."""
        most = max(self.expected).bit_length()
        return _numbers(bits & (1 << most) - 1, self.shared.micros)

    def _collective(self, event: RecordedOperation) -> None:
        if event.name == "c10d.barrier":
            return None
        if event.peer < 0:
            return self.meet(event, event.name, event.group)
        if event.name == "c10d.recv_":
            return self.meet(event, "message", (event.peer, self.rank))
        crosses = event.peer // self.stage != self.rank // self.stage
        if crosses and not self.final and len(self.micros(self.states.of(event.reads[0]))) > 1:
            self.find(MESSAGE, "it depends on several micro-batches", event.where, event.peer)
        return self.meet(event, "message", (self.rank, event.peer))

    def arrive(self, at: BytesOf, event: RecordedOperation, parts: Sequence[list[Piece]]) -> None:
        if event.name == "c10d.allreduce_" and self.final and "MAX" not in event.constants:
            self._judge_norm(event, parts)
        super().arrive(at, event, parts)

    def _judge_norm(self, event: RecordedOperation, parts: Sequence[list[Piece]]) -> None:
        """Judges a sum after gradients are final: a gradient that several ranks bring is counted twice."""
        if self.shared.norm == "no" or self.rank != event.group[0]:
            return
        before, twice = 0, 0
        for part in parts:
            twice |= before & bits_of(part)
            before |= bits_of(part)
        for name, bit in self.shared.gradients.items():
            if twice & bit:
                owners = [r for r, part in zip(event.group, parts, strict=True) if bits_of(part) & bit]
                crosses = owners[0] // self.stage != owners[-1] // self.stage
                why = f"several {'stages' if crosses else 'ranks'} count it"
                self.find(f"norm of gradients: {name.split(' | ')[0]}", why, event.where, owners[-1], "norm")

    def _check(self, event: RecordedOperation) -> None:
        (at,) = event.reads
        kind, _, name = event.name.partition(" ")
        if at.first == at.last:
            return
        if kind in ("parameter", "shard", "master"):
            self.parameters.add(at.storage)
        elif kind == "gradient":
            bits, expected = self.states.of(at), self.expected[int(event.where)]
            counts = event.constants.endswith(" | balances")  # of tokens; no norm has them
            if counts or ".attn.index." in name:  # an indexer's loss has no targets either
                expected &= self.shared.tokens
            if missing := expected & ~bits:
                self.find(event.name, f"it does not depend on {self._words(missing, expected)}")
            if not self.shared.versions and not counts:
                self.final = True
                bit = self.shared.gradients.setdefault(
                    event.constants, 1 << self._first_bit + len(self.shared.gradients)
                )
                self.states.put(at, [(first, last, bits | bit) for first, last, bits in self.states.pieces(at)])
        elif (parameter := name.removeprefix("parameter ")) in self.shared.trained:
            self.shared.updates.append((self, parameter, self.states.of(at)))

    @property
    def _first_bit(self) -> int:
        return max(self.expected).bit_length()

    def _words(self, missing: int, expected: int) -> str:
        lost = sorted(self.micros(missing))
        whole = self.micros(expected & missing) != self.micros(expected)
        of = "" if whole else " of another rank"
        return f"micro-batch {', '.join(map(str, lost))}{of}"


@cache
def _numbers(bits: int, micros: int) -> frozenset[int]:
    """Returns the micro-batches of bits of several sources."""
    return frozenset(place % micros for place in range(bits.bit_length()) if bits >> place & 1)


def follow(
    programs: Sequence[FollowedProgram],
    recorders: Sequence[OperationRecorder],
    norm: Literal["no", "sums", "clips"],
    versions: bool,
) -> list[SumFinding]:
    """Returns where the ranks of a step lose or mix micro-batches, or count a gradient twice or not at all in the
    norm. `versions`: later weights are in use while earlier micro-batches are under way, and the norm is not judged."""
    held = (each for recorder in recorders for each in recorder.events if each.name.startswith("gradient of "))
    names = {x.name.removeprefix("gradient of ") for x in held if not x.constants.endswith(" | balances")}
    shared = _Shared(recorders[0].micros, recorders[0].tokens, norm, versions, names)
    run_together([(each, each.run(of.events, shared)) for each, of in zip(programs, recorders, strict=True)])
    for program, parameter, bits in shared.updates if norm == "clips" else ():
        if missing := [name for name, bit in shared.gradients.items() if not bits & bit]:
            why = f"the update of {parameter} does not depend on it"
            program.find(f"norm of gradients: {missing[0].split(' | ')[0]}", why, axis="norm")
    return [found for program in programs for found in program.findings]
