"""The catalogue of pipeline schedules: their facts by name, and the checks of the numbers that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.registry import Registry
from phalanx.schedule.generators import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_stash,
    terapipe,
    v_half,
    zb_h1,
    zb_h2,
    zb_v,
)
from phalanx.schedule.schedule import UNBOUNDED_CHUNKS, Schedule, ScheduleEntry, Size, too_large


def _until_first_gradient(p: int, m: int, v: int, r: int) -> int:
    """Returns the live activations of a rank with one stage; its first gradient arrives after P - r forward passes."""
    return min(m, p - r)


def _all_micro_batches(p: int, m: int, v: int, r: int) -> int:
    return m * v


def _one_activation(p: int, m: int, v: int, r: int) -> int:
    return 1


def _warm_up_and_drain(p: int, m: Any, v: int, forward: Any) -> float:
    """Returns the idle time of warm-up and drain: P - 1 passes of a stage, forward and backward."""
    return (p - 1) / v


def _warm_up(p: int, m: Any, v: int, forward: Any) -> Any:
    """Returns the warm-up of the last rank, until the first micro-batch has passed a stage of each rank before it."""
    return (p - 1) * forward / v


def _no_idle_time(p: int, m: Any, v: int, forward: Any) -> float:
    return 0.0


def _exact(p: int, m: Any) -> bool:
    return True


_OWN = {
    "naive": ScheduleEntry(
        naive,
        "one micro-batch at a time, all the way there and back",
        "Huang et al. 2019, figure 2b",
        in_flight=_one_activation,
        idle=lambda p, m, v, forward: (p - 1) * m,
        idle_is_exact=_exact,
        searched=False,
    ),
    "gpipe": ScheduleEntry(
        gpipe,
        "all forward passes, then all backward passes",
        "Huang et al. 2019, section 2.2",
        in_flight=_all_micro_batches,
        all_in_flight=True,
        idle=_warm_up_and_drain,
        idle_is_exact=_exact,
        searched=False,
        also_called=("afab", "fthenb"),
    ),
    "1f1b": ScheduleEntry(
        one_f_one_b,
        "forward and backward passes in turn: fewer activations",
        "Narayanan et al. 2021, section 2.2",
        in_flight=_until_first_gradient,
        idle=_warm_up_and_drain,
        idle_is_exact=_exact,
        searched=True,
        seeds=True,
        usual=True,
        also_called=("pipedreamflush",),
    ),
    "interleaved_1f1b": ScheduleEntry(
        interleaved_1f1b,
        "1f1b with several stages per rank: less bubble",
        "Narayanan et al. 2021, section 2.2",
        chunks=(2, UNBOUNDED_CHUNKS),
        interleaves="1f1b",
        in_flight=lambda p, m, v, r: (v - 1) * min(m, p) + min(m, 2 * (p - 1 - r) + 1),
        idle=_warm_up_and_drain,
        idle_is_exact=lambda p, m: m % p == 0,
        searched=True,
        usual=True,
        also_called=("interleaved", "vpp", "1f1bi"),
    ),
    "looped_bfs": ScheduleEntry(
        looped_bfs,
        "several stages per rank, all micro-batches through each",
        "Lamy-Poirier 2022, section 4",
        chunks=(2, UNBOUNDED_CHUNKS),
        interleaves="gpipe",
        in_flight=_all_micro_batches,
        all_in_flight=True,
        idle=_warm_up_and_drain,
        idle_is_exact=lambda p, m: m >= p,
        searched=False,
        also_called=("breadthfirst",),
    ),
    "zb_h1": ScheduleEntry(
        zb_h1,
        "1f1b with split backward passes: a third of its bubble",
        "Qi et al. 2023, section 2.1",
        splits=True,
        in_flight=_until_first_gradient,
        idle=_warm_up,
        searched=True,
        also_called=("zerobubble", "interleavedzerobubble", "zb1p"),
    ),
    "zb_h2": ScheduleEntry(
        zb_h2,
        "no bubble, for twice the activations of 1f1b",
        "Qi et al. 2023, section 2.2",
        splits=True,
        in_flight=lambda p, m, v, r: min(m, 2 * (p - r) - 1),
        idle=_warm_up,
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
        idle=_warm_up,
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
        idle=_warm_up,
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
        idle=_warm_up,
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
        in_flight=_one_activation,
        idle=_no_idle_time,
        searched=False,
    ),
    "pipedream": ScheduleEntry(
        pipedream,
        "1f1b without a flush, weights one step old (2BW)",
        "Narayanan et al. 2020, section 3.1",
        steps=2,
        in_flight=_until_first_gradient,
        idle=_no_idle_time,
        searched=False,
        also_called=("2bw", "pipedream2bw"),
    ),
    "pipedream_stash": ScheduleEntry(
        pipedream_stash,
        "1f1b with an update per micro-batch, and stashed weights",
        "Narayanan et al. 2019, section 3.3",
        stashes=True,
        in_flight=_until_first_gradient,
        idle=_warm_up_and_drain,
        idle_is_exact=_exact,
        searched=False,
        also_called=("weightstashing", "pipedream2019"),
    ),
}
"""The project's own schedules. The planner does not search those with the bubble of another one and more activations
(naive, gpipe, looped_bfs), those that train with older weights (pipedream, pipedream_stash), and one that needs slices
(terapipe)."""


def _entry_problems(name: str, entry: ScheduleEntry) -> Iterator[str]:
    """Yields the problems of an entry that is added."""
    others = {other: known for known, each in SCHEDULES.items() for other in (_plain(known), *each.also_called)}
    yield from (
        f"{called!r} already means {others[called]}"
        for called in (_plain(name), *entry.also_called)
        if called in others
    )
    if entry.interleaves and (entry.interleaves not in SCHEDULES or SCHEDULES[entry.interleaves].chunks != (1, 1)):
        yield f"interleaves {entry.interleaves!r} is no schedule with one stage per rank"
    from phalanx.schedule.probe import entry_problems  # most commands add nothing

    yield from entry_problems(name, entry)


SCHEDULES = Registry("schedule", _OWN, _entry_problems)
"""All schedules by name."""

FAMILIES = ("zerobubble", "interleavedzerobubble", "zb1p", "zb2p")
"""Names in `also_called` of several schedules, or of ones that a search makes: suggestions only."""


def problems(
    name: str, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0, *, sized: bool = True
) -> list[str]:
    """Returns every problem of a choice of schedule, without building it. For chunks, slices or steps 0 stands for the
    schedule's default. The number of actions is checked only if `sized`."""
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
    """Returns the entry of a schedule. Raises JobError with the most similar name if it is unknown."""
    if name not in SCHEDULES:
        meant = likely(name)
        hint = f"; did you mean {meant}?" if meant else ""
        raise JobError(f"no schedule {name!r}{hint} (known: {', '.join(SCHEDULES)})")
    return SCHEDULES[name]


def likely(name: str) -> str | None:
    """Returns the schedule that an unknown name means: mistyped, or from another framework (`Interleaved1F1B`)."""
    plain = {_plain(known): known for known in SCHEDULES}
    plain |= {other: known for known, entry in SCHEDULES.items() for other in entry.also_called}
    close = nearest(_plain(name), plain)
    return plain[close] if close else None


def named(name: str) -> str:
    """Returns the schedule that a name in another framework means without doubt (`1F1B`, `Interleaved1F1B`), or the
    name itself, which may be a file's."""
    if name in SCHEDULES:
        return name
    plain = {other: known for known, entry in SCHEDULES.items() for other in entry.also_called if other not in FAMILIES}
    plain |= {_plain(known): known for known in SCHEDULES}
    return plain.get(_plain(name), name)


def chunks_of(name: str, chunks: int = 0) -> int:
    """Returns the stages per rank: `chunks`, or if it is 0 the schedule's default, which is 1 for one in a file."""
    return chunks or (SCHEDULES[name].chunks[0] if name in SCHEDULES else 1)


def stages(name: str, ranks: int, chunks: int = 0) -> int:
    """Returns the number of stages of the pipeline."""
    return ranks * chunks_of(name, chunks) // SCHEDULES[name].directions


@lru_cache(64)
def build(name: str, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0) -> Schedule:
    """Builds a schedule for `micro_batches` micro-batches per step. For chunks, slices or steps 0 stands for the
    schedule's default. The latest are cached, because planner and simulator ask for the same ones repeatedly.
    Raises JobError with every problem of the choice."""
    if wrong := problems(name, ranks, micro_batches, chunks, slices, steps):
        raise JobError(wrong)
    return SCHEDULES[name].program(ranks, micro_batches, chunks, slices, steps)


def _problems(name: str, ranks: int, micro_batches: int, chunks: int, slices: int, steps: int) -> Iterator[str]:
    entry = SCHEDULES[name]
    if ranks < 1:
        yield f"{name}: {ranks} ranks; nearest legal: 1"
    if micro_batches < 1:
        yield f"{name}: {micro_batches} micro-batches; nearest legal: 1"
    if ranks > 1 and 1 <= micro_batches < entry.directions:
        yield (
            f"{name}: {micro_batches} micro-batches cannot be split over {entry.directions} directions: the stages of "
            f"one direction would get no gradients; nearest legal: {entry.directions} micro-batches, or schedule 1f1b"
        )
    least, most = entry.chunks
    if not least <= chunks_of(name, chunks) <= most:
        takes = f"{least} or more" if most == UNBOUNDED_CHUNKS else str(least)
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
            f"suffice; nearest legal: {ranks} micro-batches, or {micro_batches} ranks"
        )
    if ranks > 0 and micro_batches > 0 and (reason := entry.refuses(ranks, micro_batches, chunks_of(name, chunks))):
        yield f"{name}: {reason}"


def _plain(name: str) -> str:
    """Returns the lower-case letters and digits of a name."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
