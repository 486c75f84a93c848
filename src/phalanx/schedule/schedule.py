"""A pipeline schedule as data: for each rank the list of its actions, in order.

The layers of a model are cut into stages 0 to S - 1; each rank holds one or more. Sends and receives are not listed:
they follow from the placement of the stages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One action of a rank, written as `2F7`, or with a slice of the sequence as `2F7.1`."""

    kind: Kind
    """F: forward pass. B: backward pass. I and W: its halves (Qi et al. 2023, section 2), the gradients of the stage's
    input, which the stage before waits for, and those of its weights, which no other rank needs."""
    stage: int
    micro: int
    """Index of the micro-batch."""
    slice: int = 0
    """Index of the slice of the sequence; 0 if sequences are whole."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}" + (f".{self.slice}" if self.slice else "")


action_of: Callable[[tuple[Any, ...]], Action] = partial(tuple.__new__, Action)
"""Creates an action from the tuple of all its fields: a planner builds millions of them."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step (or, without a flush, in several steps)."""

    name: str
    placements: tuple[tuple[int, ...], ...]
    """For each direction, the rank that holds each stage. Only DualPipe has two directions: half of the micro-batches
    pass through the ranks in reverse, through second copies of the stages."""
    micro_batches: int
    programs: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""
    slices: int = 1
    """Slices that each sequence is cut into (TeraPipe: Li et al. 2021)."""
    steps: int = 1
    """Optimizer steps, each over an equal share of the micro-batches, that the program spans without a flush in between
    (PipeDream). 1: the optimizer runs when every micro-batch has returned."""

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def stages(self) -> int:
        return len(self.placements[0])

    @property
    def splits(self) -> bool:
        """Whether some backward passes are split into I and W."""
        return any(action.kind == "W" for program in self.programs for action in program)

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of ranks, sender and receiver, between which messages pass."""
        neighbours = {pair for placement in self.placements for pair in itertools.pairwise(placement)}
        return {pair for one, other in neighbours if one != other for pair in ((one, other), (other, one))}

    def direction(self, micro: int) -> int:
        """Returns the placement that a micro-batch uses: equal shares of them, in order."""
        return micro * len(self.placements) // self.micro_batches

    def rank_of(self, stage: int, micro: int) -> int:
        """Returns the rank that computes a stage for a micro-batch."""
        return self.placements[self.direction(micro)][stage]

    def forward_passes(self, rank: int) -> int:
        """Returns the number of a rank's forward passes: each micro-batch passes every stage of its direction, in
        slices."""
        passes = Counter(map(self.direction, range(self.micro_batches)))
        stages = (passes[way] * placement.count(rank) for way, placement in enumerate(self.placements))
        return self.slices * sum(stages)

    def stages_on(self, rank: int) -> list[int]:
        """Returns the stages of a rank, in order."""
        return sorted({stage for placement in self.placements for stage, at in enumerate(placement) if at == rank})

    def peak_live_activations(self, rank: int, weights: Sequence[float] | None = None) -> float:
        """Returns the peak live activations of a rank, each activation of stage s weighted by weights[s] (default 1),
        from its F to the end of its B, or of its W if the backward pass is split."""
        live = peak = 0.0
        for kind, stage, _, _ in self.programs[rank]:
            weight = 1 if weights is None else weights[stage]
            if kind == "F":
                live += weight
                peak = max(peak, live)
            elif kind != "I":
                live -= weight
        return peak

    def needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Yields the actions that must precede an action, on any rank: of each group, any one."""
        kind, stage, micro, part = action
        if kind == "F":
            if stage > 0:
                yield (Action("F", stage - 1, micro, part),)
            if part > 0:
                yield (Action("F", stage, micro, part - 1),)
        elif kind == "W":
            yield (Action("I", stage, micro, part),)
        else:
            yield (Action("F", stage, micro, part),)
            if stage < self.stages - 1:
                yield Action("B", stage + 1, micro, part), Action("I", stage + 1, micro, part)
            # Later slices attend to this one, so their gradients of its keys come first.
            if part < self.slices - 1:
                yield Action("B", stage, micro, part + 1), Action("I", stage, micro, part + 1)
