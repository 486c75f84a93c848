"""What is known of a pipeline schedule besides its program: all that checking, prediction and planning ask about it.

Facts are functions of P ranks, M micro-batches, V stages per rank (chunks) and rank r, in the letters of the papers.
Tests compare each with the schedule's own program (tests/schedule/test_facts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.schedule.schedule import Schedule

MANY = 1_000_000
"""More stages per rank than any model has layers."""


def never(ranks: int, micro_batches: Any) -> Any:
    """A closed form that is a lower bound only."""
    return False


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule, what it takes, and its facts."""

    build: Callable[..., Schedule]
    title: str
    """One line for `phalanx schedule list`."""
    source: str
    """Paper and section."""
    in_flight: Callable[[int, int, int, int], int]
    """Least activations of a stage that a rank holds at its fullest moment, from P, M, V and r: a lower bound on
    `Schedule.peak`."""
    idle: Callable[[int, Any, int, Any], Any]
    """Idle time of a step in times of one micro-batch through one rank (forward and backward), where ranks are alike
    and messages take no time, from P, M, V and the share of the forward pass in that time: a lower bound. M and the
    share may be numpy arrays of one shape."""
    searched: bool
    """Whether the planner tries it where the schedule is left open."""
    idle_is_exact: Callable[[int, Any], Any] = never
    """Whether the idle time is `idle` itself for P ranks and M micro-batches; M may be a numpy array."""
    all_in_flight: bool = False
    """Whether every micro-batch is in flight before the first backward pass, however many there are."""
    seeds: bool = False
    """Whether the planner's search begins with it: of the others one is seldom better by much."""
    usual: bool = False
    """Whether it is common practice, which the planner's report compares its choice with."""
    chunks: tuple[int, int] = (1, 1)
    """Least and most stages per rank; the least where nothing else is asked for."""
    most_searched_chunks: int = 8
    """Most stages per rank that the planner tries: each more adds messages and divides the bubble by less."""
    interleaves: str = ""
    """The schedule with one stage per rank whose form with several this is, if any."""
    placement: Literal["round robin", "V", "both ways"] = "round robin"
    """How stages lie on the ranks (placement.py)."""
    slices: int = 1
    """Slices of a sequence where nothing else is asked for; 1: it takes whole sequences only."""
    steps: int = 1
    """Optimizer steps without a flush where nothing else is asked for; 1: it flushes at the end of every step."""
    splits: bool = False
    """Whether backward passes come in halves, I and W."""
    also_called: tuple[str, ...] = ()
    """What others call it, in small letters and digits."""

    @property
    def directions(self) -> int:
        """Ways through the ranks, each with a copy of every stage."""
        return 2 if self.placement == "both ways" else 1

    @property
    def sliced(self) -> bool:
        """Whether it cuts sequences into slices."""
        return self.slices > 1

    @property
    def passes(self) -> int:
        """Actions of a stage per micro-batch: F and B, or F, I and W."""
        return 3 if self.splits else 2

    @property
    def takes_chunks(self) -> bool:
        """Whether the number of stages per rank is a choice."""
        return self.chunks[0] < self.chunks[1]

    @property
    def searched_chunks(self) -> range:
        """The numbers of stages per rank that the planner tries."""
        least, most = self.chunks
        return range(least, min(most, self.most_searched_chunks) + 1)

    def period(self, ranks: int) -> int:
        """Micro-batches after which its program repeats itself, once the pipeline is full."""
        return ranks * self.directions
