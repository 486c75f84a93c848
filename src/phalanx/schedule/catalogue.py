"""Every pipeline schedule by name with its facts, and what is wrong with numbers that it does not take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.schedule.dualpipe import dualpipe
from phalanx.schedule.entry import MANY, ScheduleEntry
from phalanx.schedule.interleaved import interleaved_1f1b, looped_bfs
from phalanx.schedule.pipedream import pipedream
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simple import gpipe, naive, one_f_one_b
from phalanx.schedule.size import Size, too_large
from phalanx.schedule.terapipe import terapipe
from phalanx.schedule.vshape import dualpipe_v, v_half, zb_v
from phalanx.schedule.zero_bubble import zb_h1, zb_h2


def _until_back(p: int, m: int, v: int, r: int) -> int:
    """Activations of one stage per rank, whose first micro-batch is back after P - r forward passes."""
    return min(m, p - r)


def _all(p: int, m: int, v: int, r: int) -> int:
    return m * v


def _one(p: int, m: int, v: int, r: int) -> int:
    return 1


def _ramps(p: int, m: Any, v: int, forward: Any) -> float:
    """Filling and draining take P - 1 passes of a stage, forward and backward."""
    return (p - 1) / v


def _way_in(p: int, m: Any, v: int, forward: Any) -> Any:
    """The last rank waits until the first micro-batch has come through a stage of each rank before it."""
    return (p - 1) * forward / v


def _no_idle_time(p: int, m: Any, v: int, forward: Any) -> float:
    return 0.0


def _always(p: int, m: Any) -> bool:
    return True


SCHEDULES = {
    "naive": ScheduleEntry(
        naive,
        "one micro-batch at a time, all the way there and back",
        "Huang et al. 2019, figure 2b",
        in_flight=_one,
        idle=lambda p, m, v, forward: (p - 1) * m,
        idle_is_exact=_always,
        searched=False,
    ),
    "gpipe": ScheduleEntry(
        gpipe,
        "all forward passes, then all backward passes",
        "Huang et al. 2019, section 2.2",
        in_flight=_all,
        all_in_flight=True,
        idle=_ramps,
        idle_is_exact=_always,
        searched=False,
        also_called=("afab", "fthenb"),
    ),
    "1f1b": ScheduleEntry(
        one_f_one_b,
        "forward and backward passes in turn: fewer activations",
        "Narayanan et al. 2021, section 2.2",
        in_flight=_until_back,
        idle=_ramps,
        idle_is_exact=_always,
        searched=True,
        seeds=True,
        usual=True,
        also_called=("pipedreamflush",),
    ),
    "interleaved_1f1b": ScheduleEntry(
        interleaved_1f1b,
        "1f1b with several stages per rank: less bubble",
        "Narayanan et al. 2021, section 2.2",
        chunks=(2, MANY),
        interleaves="1f1b",
        in_flight=lambda p, m, v, r: (v - 1) * min(m, p) + min(m, 2 * (p - 1 - r) + 1),
        idle=_ramps,
        idle_is_exact=lambda p, m: m % p == 0,
        searched=True,
        usual=True,
        also_called=("interleaved", "vpp", "1f1bi"),
    ),
    "looped_bfs": ScheduleEntry(
        looped_bfs,
        "several stages per rank, all micro-batches through each",
        "Lamy-Poirier 2022, section 4",
        chunks=(2, MANY),
        interleaves="gpipe",
        in_flight=_all,
        all_in_flight=True,
        idle=_ramps,
        idle_is_exact=lambda p, m: m >= p,
        searched=False,
        also_called=("breadthfirst",),
    ),
    "zb_h1": ScheduleEntry(
        zb_h1,
        "1f1b with split backward passes: a third of its bubble",
        "Qi et al. 2023, section 2.1",
        splits=True,
        in_flight=_until_back,
        idle=_way_in,
        searched=True,
        also_called=("zerobubble", "interleavedzerobubble", "zb1p"),
    ),
    "zb_h2": ScheduleEntry(
        zb_h2,
        "no bubble, for twice the activations of 1f1b",
        "Qi et al. 2023, section 2.2",
        splits=True,
        in_flight=lambda p, m, v, r: min(m, 2 * (p - r) - 1),
        idle=_way_in,
        searched=True,
        also_called=("zb2p",),
    ),
    "zb_v": ScheduleEntry(
        zb_v,
        "no bubble with the activations of 1f1b: stages in a V",
        "Qi et al. 2023, section 6",
        chunks=(2, 2),
        placement="V",
        splits=True,
        in_flight=lambda p, m, v, r: min(m + 1, 2 * p),
        idle=_way_in,
        searched=True,
        seeds=True,
        also_called=("zbvzerobubble",),
    ),
    "v_half": ScheduleEntry(
        v_half,
        "half of 1f1b's activations for half of its bubble",
        "Qi et al. 2024, section 3",
        chunks=(2, 2),
        placement="V",
        splits=True,
        in_flight=lambda p, m, v, r: min(m + 1, 2 * (p // 2 + 1)),
        idle=_way_in,
        searched=True,
        seeds=True,
    ),
    "dualpipe_v": ScheduleEntry(
        dualpipe_v,
        "half of dualpipe's ranks as a V: one copy of the stages",
        "DeepSeek-AI 2025",
        chunks=(2, 2),
        placement="V",
        splits=True,
        in_flight=lambda p, m, v, r: min(m + 1, 2 * p + 1),
        idle=_way_in,
        searched=True,
    ),
    "dualpipe": ScheduleEntry(
        dualpipe,
        "micro-batches from both ends, forward passes beside backward ones",
        "DeepSeek-AI 2024, section 3.2.1",
        chunks=(2, 2),
        placement="both ways",
        splits=True,
        in_flight=lambda p, m, v, r: min(m // 2 + 1, p),
        idle=_no_idle_time,
        searched=True,
    ),
    "terapipe": ScheduleEntry(
        terapipe,
        "1f1b over slices of the sequences",
        "Li et al. 2021, section 3.2",
        slices=4,
        in_flight=_one,
        idle=_no_idle_time,
        searched=False,
    ),
    "pipedream": ScheduleEntry(
        pipedream,
        "1f1b without a flush, weights one step old (2BW)",
        "Narayanan et al. 2020, section 3.1",
        steps=2,
        in_flight=_until_back,
        idle=_no_idle_time,
        searched=False,
        also_called=("2bw", "pipedream2bw"),
    ),
}
"""By name. The planner does not search those with the bubble of another and more activations (naive, gpipe,
looped_bfs), those that train something else (pipedream), and those that need slices (terapipe)."""


def problems(
    name: str, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0, *, sized: bool = True
) -> list[str]:
    """All that is wrong with a choice of schedule, in plain words, known before anything is built. 0 chunks, slices or
    steps: the schedule's own. Not `sized`: whether it is too large is not asked."""
    try:
        entry = entry_of(name)
    except JobError as unknown:
        return unknown.problems
    found = list(_problems(name, ranks, micro_batches, chunks, slices, steps))
    if sized and not found:
        size = Size(ranks, micro_batches, chunks_of(name, chunks), slices or entry.slices, steps or entry.steps)
        found += filter(None, [too_large(name, entry, size)])
    return found


def entry_of(name: str) -> ScheduleEntry:
    """The facts of the schedule `name`. Raises JobError with the likely name where there is none."""
    if name not in SCHEDULES:
        meant = likely(name)
        hint = f"; did you mean {meant}?" if meant else ""
        raise JobError(f"no schedule {name!r}{hint} (known: {', '.join(SCHEDULES)})")
    return SCHEDULES[name]


def likely(name: str) -> str | None:
    """The schedule that a name means that is none: mistyped, or as others call it (`Interleaved1F1B`)."""
    plain = {_plain(known): known for known in SCHEDULES}
    plain |= {other: known for known, entry in SCHEDULES.items() for other in entry.also_called}
    close = nearest(_plain(name), plain)
    return plain[close] if close else None


def chunks_of(name: str, chunks: int = 0) -> int:
    """Returns the stages per rank: `chunks`, or where it is 0 the schedule's own number, 1 for one in a file."""
    return chunks or (SCHEDULES[name].chunks[0] if name in SCHEDULES else 1)


def stages(name: str, ranks: int, chunks: int = 0) -> int:
    """How many stages the model is cut into."""
    return ranks * chunks_of(name, chunks) // SCHEDULES[name].directions


@lru_cache(8)
def build(name: str, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0) -> Schedule:
    """The schedule `name` for `micro_batches` micro-batches a step. 0 chunks, slices or steps: the schedule's own.
    The last ones are kept: one schedule is asked for again and again, and some take as long to build as to run.

    Raises JobError with all that is wrong with the choice."""
    if wrong := problems(name, ranks, micro_batches, chunks, slices, steps):
        raise JobError(wrong)
    entry = SCHEDULES[name]
    taken = dict[str, int]()
    if entry.takes_chunks:
        taken["chunks"] = chunks_of(name, chunks)
    if entry.sliced:
        taken["slices"] = slices or entry.slices
    if entry.steps > 1:
        taken["steps"] = steps or entry.steps
    return entry.build(ranks, micro_batches, **taken)


def _problems(name: str, ranks: int, micro_batches: int, chunks: int, slices: int, steps: int) -> Iterator[str]:
    entry = SCHEDULES[name]
    if ranks < 1:
        yield f"{name}: {ranks} ranks; nearest legal: 1"
    if micro_batches < 1:
        yield f"{name}: {micro_batches} micro-batches; nearest legal: 1"
    if ranks > 1 and 1 <= micro_batches < entry.directions:
        yield (
            f"{name}: {micro_batches} micro-batches do not go {entry.directions} ways, and the copies of the stages on "
            f"one would have no gradients; nearest legal: {entry.directions} micro-batches, or schedule 1f1b"
        )
    least, most = entry.chunks
    if not least <= chunks_of(name, chunks) <= most:
        takes = f"{least} or more" if most == MANY else str(least)
        yield f"{name}: chunks {chunks}, it has {takes} stages per rank; nearest legal: {least}"
    if slices < 0:
        yield f"{name}: slices {slices}; nearest legal: 1"
    elif slices > 1 and not entry.sliced:
        sliced = [other for other in SCHEDULES if SCHEDULES[other].sliced]
        yield f"{name}: slices {slices}, it takes whole sequences; nearest legal: 1, or schedule {', '.join(sliced)}"
    if steps < 0:
        yield f"{name}: steps {steps}; nearest legal: 1"
    elif steps > 1 and entry.steps == 1:
        endless = [other for other in SCHEDULES if SCHEDULES[other].steps > 1]
        yield f"{name}: steps {steps}, it flushes after each; nearest legal: 1, or schedule {', '.join(endless)}"
    if entry.steps > 1 and 1 <= micro_batches < ranks:
        yield (
            f"{name}: {micro_batches} micro-batches < {ranks} ranks, and two versions of the weights would not "
            f"do; nearest legal: {ranks} micro-batches, or {micro_batches} ranks"
        )


def _plain(name: str) -> str:
    """Small letters and digits alone."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
