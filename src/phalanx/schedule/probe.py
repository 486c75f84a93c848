"""Compares the facts of a schedule's entry with the programs that it builds.

The planner trusts the facts. So the project's own entries pass these checks on a large grid in the tests
(tests/schedule/test_facts.py), and an entry that is added on a small one, in some 30 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.errors import ExtensionError
from phalanx.registry import package_code
from phalanx.schedule.check import problems as program_problems
from phalanx.schedule.generators import placements
from phalanx.schedule.schedule import Schedule, ScheduleEntry
from phalanx.schedule.timing import time

SHARES = ((1 / 3, 1 / 3), (0.25, 0.375), (0.2, 0.2), (0.5, 0.1))
"""Shares of a micro-batch's time on one rank: the forward pass and the weight gradients."""
TOLERANCE = 1e-9
RANKS = (2, 3, 4)
"""Ranks of the pipelines that are built for an entry that is added."""
MOST_PROBED_CHUNKS = 3
MOST_PROGRAM_PROBLEMS = 5


class ProbedProgram(NamedTuple):
    """A program with the numbers that it was built for."""

    ranks: int
    micros: int
    chunks: int
    schedule: Schedule

    def __str__(self) -> str:
        stages = f", {self.chunks} stages per rank" if self.chunks > 1 else ""
        return f"{self.ranks} ranks, {self.micros} micro-batches{stages}"


def entry_problems(name: str, entry: ScheduleEntry) -> Iterator[str]:
    """Yields what is wrong with an entry: facts that contradict each other, or its own programs. Of every fact, the
    first contradiction."""
    if found := list(_plain_problems(entry)):
        yield from found
        return
    built: list[ProbedProgram] = []
    for numbers in _sizes(entry, RANKS):
        line = ProbedProgram(*numbers, Schedule(name, (), 0, ()))
        with package_code(f"{line}: build failed"):
            line = line._replace(schedule=entry.program(*numbers))
            wrong = _program_problems(name, entry, line)
        if wrong:
            yield from (f"{line}: {problem}" for problem in wrong[:MOST_PROGRAM_PROBLEMS])
            return
        built.append(line)
    if not built:
        yield "refuses: no pipeline of 2 to 4 ranks is left"
        return
    for ranks in {line.ranks for line in built}:
        if not any(line.micros <= 2 * line.ranks for line in built if line.ranks == ranks):
            yield f"refuses: {ranks} ranks take no number of micro-batches up to {2 * ranks}, but larger ones"
    for fact, contradictions in FACTS.items():
        try:
            with package_code(f"{fact} failed"):
                contradiction = next(contradictions(entry, built), "")
        except ExtensionError as error:
            contradiction = str(error)
        if contradiction:
            yield contradiction


def _plain_problems(entry: ScheduleEntry) -> Iterator[str]:
    """Yields contradictions that are seen without a program."""
    least, most = entry.chunks
    if not 1 <= least <= most:
        yield f"chunks {entry.chunks}: the fewest stages per rank, at least 1, come first, then the most"
    for number in ("slices", "steps", "most_searched_chunks"):
        if getattr(entry, number) < 1:
            yield f"{number} must be at least 1, is {getattr(entry, number)}"
    if not entry.searched and (entry.seeds or entry.usual):
        yield "seeds and usual are for schedules that are searched"
    if entry.searched and (entry.steps > 1 or entry.sliced):
        yield "searched: the planner tries only schedules of whole sequences with a flush after every step"
    if entry.searched and not entry.searched_chunks:
        yield f"most_searched_chunks {entry.most_searched_chunks} is less than the fewest stages per rank, {least}"
    if entry.interleaves and not entry.takes_chunks:
        yield "interleaves is for schedules whose number of stages per rank is a choice"
    if wrong := [other for other in entry.also_called if not (other.isalnum() and other == other.lower())]:
        yield f"also_called: {', '.join(wrong)} must be lower-case letters and digits"


def _sizes(entry: ScheduleEntry, ranks: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yields ranks, micro-batches and stages per rank that the entry accepts, for small pipelines."""
    least, most = entry.chunks
    for p in ranks:
        for chunks in range(least, min(most, max(least, MOST_PROBED_CHUNKS)) + 1):
            for m in sorted({1, 2, p, p + 1, 2 * p, 3 * p + 1}):
                if m >= entry.least_micro_batches(p) and not entry.refuses(p, m, chunks):
                    yield p, m, chunks


def _program_problems(name: str, entry: ScheduleEntry, line: ProbedProgram) -> list[str]:
    """Returns the problems of a program, and the numbers in which it is not the one that was asked for."""
    schedule = line.schedule
    if not isinstance(schedule, Schedule):
        return [f"build must return a Schedule, returned {type(schedule).__name__}"]
    stated = {
        "name": (schedule.name, name),
        "ranks": (schedule.ranks, line.ranks),
        "micro_batches": (schedule.micro_batches, line.micros * entry.steps),
        "slices": (schedule.slices, entry.slices),
        "steps": (schedule.steps, entry.steps),
    }
    wrong = [f"its {what} is {found!r}, not {asked!r}" for what, (found, asked) in stated.items() if found != asked]
    return wrong or program_problems(schedule)


def idle_time(schedule: Schedule, forward: float, weights: float) -> float:
    """Returns the time beyond the busiest rank's work, in times of one micro-batch through one rank, per optimizer
    step. `forward` and `weights` are the shares of the forward pass and of the weight gradients in that time."""
    each = max(sum(action.kind == "F" for action in program) for program in schedule.programs) / schedule.micro_batches
    seconds = {"F": forward, "B": 1 - forward, "I": 1 - forward - weights, "W": weights}
    timing = time(schedule, {kind: part / each for kind, part in seconds.items()})
    return (timing.duration - max(timing.work(rank) for rank in range(schedule.ranks))) / schedule.steps


def stage_places(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields programs whose stages do not lie on the ranks as `placement` says."""
    for line in built:
        stated = placements(entry.placement, line.ranks, line.chunks)
        if line.schedule.placements != stated:
            yield f"placement is {entry.placement!r}, but with {line} the stages lie on {line.schedule.placements}"


def split_passes(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields programs that split backward passes although `splits` is false, or whether none does although it is."""
    split = [line for line in built if line.schedule.splits]
    if split and not entry.splits:
        yield f"splits is False, but with {split[0]} backward passes are split into I and W"
    if entry.splits and not split:
        yield "splits is True, but no program has a W"


def fewest_activations(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields programs in which `in_flight` is no lower bound on a rank's peak of live activations, or a useless one: a
    schedule whose activations nobody stated would be planned as if it needed next to none."""
    for line in built:
        for rank in range(line.ranks):
            least = entry.in_flight(line.ranks, line.micros, line.chunks, rank)
            peak = line.schedule.peak_live_activations(rank) / line.schedule.slices
            if not 1 <= least <= peak:
                yield f"in_flight is {least} on rank {rank} with {line}; it must be 1 to {peak:g}, the program's peak"
            elif rank == 0 and not entry.sliced and line.schedule.micro_batches >= 2 * line.ranks and least <= peak / 2:
                yield f"in_flight is {least} on rank 0 with {line}, half of the program's peak {peak:g} or less"


def every_micro_batch(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields whether `all_in_flight` is not what the programs do."""
    every = all(
        line.schedule.peak_live_activations(rank) == line.chunks * line.micros
        for line in built
        for rank in range(line.ranks)
    )
    if every != entry.all_in_flight:
        yield f"all_in_flight is {entry.all_in_flight}, but the programs' peaks say {every}"


def least_idle_time(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields programs in which `idle` is no lower bound on the idle time, or is not exact although `idle_is_exact`."""
    for line in built:
        for forward, weights in SHARES:
            least = entry.idle(line.ranks, line.micros, line.chunks, forward)
            real = idle_time(line.schedule, forward, weights)
            at = f"with {line} and a forward pass of {forward:.3g}"
            if entry.idle_is_exact(line.ranks, line.micros):
                if abs(least - real) > TOLERANCE:
                    yield f"idle is {least:g} {at}, but idle_is_exact, and the program's is {real:g}"
            elif not 0 <= least <= real + TOLERANCE:
                yield f"idle is {least:g} {at}; it must be 0 to {real:g}, the program's"


def takes_arrays(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields whether `idle` or `idle_is_exact` gives other numbers for arrays of M than for each M."""
    import numpy as np  # a command that adds no schedule may not need it

    micros, shares = np.array([3, 4, 8]), np.array([0.2, 0.25, 0.3])
    idle, exact = np.zeros(3), np.zeros(3, bool)
    idle[:] = entry.idle(4, micros, entry.chunks[0], shares)
    exact[:] = entry.idle_is_exact(4, micros)
    for place, (m, share) in enumerate(zip(micros.tolist(), shares.tolist(), strict=True)):
        if idle[place] != entry.idle(4, m, entry.chunks[0], share):
            yield f"idle differs between M = {m} and an array with it: write it in operations of numpy"
        if exact[place] != entry.idle_is_exact(4, m):
            yield f"idle_is_exact differs between M = {m} and an array with it: write it in operations of numpy"


def periods(entry: ScheduleEntry, built: Sequence[ProbedProgram]) -> Iterator[str]:
    """Yields whether a full pipeline does not repeat itself: a period more of micro-batches must add the same time
    whenever it is added, and no activations."""
    ranks = 4
    period = entry.period(ranks)
    if reason := entry.refuses(ranks, 6 * period, entry.chunks[0]):
        yield f"refuses {6 * period} micro-batches on {ranks} ranks, a multiple of its period {period}: {reason}"
        return
    some = [entry.program(ranks, number * period, entry.chunks[0]) for number in (6, 7, 8)]
    ends = [[starts[-1] for starts in time(each).starts] for each in some]
    for rank, (first, second, third) in enumerate(zip(*ends, strict=True)):
        if abs((third - second) - (second - first)) > TOLERANCE:
            yield f"the program for {ranks} ranks does not repeat itself every {period} micro-batches (rank {rank})"
        elif not entry.all_in_flight and some[0].peak_live_activations(rank) < some[2].peak_live_activations(rank):
            yield f"activations of rank {rank} of {ranks} grow with the micro-batches, but not all are in flight"


FACTS: Mapping[str, Callable[[ScheduleEntry, Sequence[ProbedProgram]], Iterator[str]]] = {
    "placement": stage_places,
    "splits": split_passes,
    "in_flight": fewest_activations,
    "all_in_flight": every_micro_batch,
    "idle": least_idle_time,
    "idle for arrays": takes_arrays,
    "build": periods,
}
"""The comparisons of an entry's facts with its programs; each yields contradictions."""
