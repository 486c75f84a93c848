"""Every pipeline schedule by name: what it takes, and what is wrong with numbers that it does not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.schedule.dualpipe import dualpipe
from phalanx.schedule.interleaved import interleaved_1f1b, looped_bfs
from phalanx.schedule.pipedream import pipedream
from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simple import gpipe, naive, one_f_one_b
from phalanx.schedule.terapipe import terapipe
from phalanx.schedule.vshape import dualpipe_v, v_half, zb_v
from phalanx.schedule.zero_bubble import zb_h1, zb_h2

MANY = 1_000_000
"""More stages a rank than any model has layers."""


@dataclass(frozen=True)
class Entry:
    """A schedule and what it takes."""

    build: Callable[..., Schedule]
    title: str
    """One line for `phalanx schedule list`."""
    source: str
    """Paper and section."""
    chunks: tuple[int, int] = (1, 1)
    """Least and most stages a rank; the least where nothing else is asked for."""
    directions: int = 1
    """Ways through the ranks, each with a copy of every stage."""
    slices: int = 1
    """Slices of a sequence where nothing else is asked for; 1: it takes whole sequences only."""
    steps: int = 1
    """Optimizer steps without a flush where nothing else is asked for; 1: it flushes at the end of every step."""
    splits: bool = False
    """Whether backward passes come in halves, I and W."""

    @property
    def sliced(self) -> bool:
        """Whether it cuts sequences into slices."""
        return self.slices > 1


SCHEDULES = {
    "naive": Entry(naive, "one micro-batch at a time, all the way there and back", "Huang et al. 2019, figure 2b"),
    "gpipe": Entry(gpipe, "all forward passes, then all backward passes", "Huang et al. 2019, section 2.2"),
    "1f1b": Entry(
        one_f_one_b, "forward and backward passes in turn: fewer activations", "Narayanan et al. 2021, section 2.2"
    ),
    "interleaved_1f1b": Entry(
        interleaved_1f1b,
        "1f1b with several stages per rank: smaller bubble",
        "Narayanan et al. 2021, section 2.2",
        (2, MANY),
    ),
    "looped_bfs": Entry(
        looped_bfs, "several stages per rank, all micro-batches through each", "Lamy-Poirier 2022, section 4", (2, MANY)
    ),
    "zb_h1": Entry(
        zb_h1, "1f1b with split backward passes: a third of its bubble", "Qi et al. 2023, section 2.1", splits=True
    ),
    "zb_h2": Entry(zb_h2, "no bubble, for twice the activations of 1f1b", "Qi et al. 2023, section 2.2", splits=True),
    "zb_v": Entry(
        zb_v, "no bubble with the activations of 1f1b: stages in a V", "Qi et al. 2023, section 6", (2, 2), splits=True
    ),
    "v_half": Entry(
        v_half, "half of 1f1b's activations for half of its bubble", "Qi et al. 2024, section 3", (2, 2), splits=True
    ),
    "dualpipe_v": Entry(
        dualpipe_v, "half of dualpipe's ranks as a V: one copy of the stages", "DeepSeek-AI 2025", (2, 2), splits=True
    ),
    "dualpipe": Entry(
        dualpipe,
        "micro-batches from both ends, forward passes beside backward ones",
        "DeepSeek-AI 2024, section 3.2.1",
        (2, 2),
        directions=2,
        splits=True,
    ),
    "terapipe": Entry(terapipe, "1f1b over slices of the sequences", "Li et al. 2021, section 3.2", slices=4),
    "pipedream": Entry(
        pipedream, "1f1b without a flush, weights one step old (2BW)", "Narayanan et al. 2020, section 3.1", steps=2
    ),
}

_ALSO_CALLED = {
    "afab": "gpipe",
    "fthenb": "gpipe",
    "pipedreamflush": "1f1b",
    "interleaved": "interleaved_1f1b",
    "vpp": "interleaved_1f1b",
    "breadthfirst": "looped_bfs",
    "zerobubble": "zb_h1",
    "interleavedzerobubble": "zb_h1",
    "zb1p": "zb_h1",
    "zb2p": "zb_h2",
    "zbvzerobubble": "zb_v",
    "2bw": "pipedream",
    "pipedream2bw": "pipedream",
}
"""What others call the schedules, in small letters and digits."""


def problems(name: str, ranks: int, micro_batches: int, chunks: int = 0, slices: int = 0, steps: int = 0) -> list[str]:
    """All that is wrong with a choice of schedule, in plain words. 0 chunks, slices or steps: the schedule's own."""
    if name not in SCHEDULES:
        meant = likely(name)
        hint = f"; did you mean {meant}?" if meant else ""
        return [f"no schedule {name!r}{hint} (known: {', '.join(SCHEDULES)})"]
    return list(_problems(name, ranks, micro_batches, chunks, slices, steps))


def likely(name: str) -> str | None:
    """The schedule that a name means that is none: mistyped, or as others call it (`Interleaved1F1B`)."""
    plain = {_plain(known): known for known in SCHEDULES} | _ALSO_CALLED
    close = nearest(_plain(name), plain)
    return plain[close] if close else None


def chunks_of(name: str, chunks: int = 0) -> int:
    """Stages a rank: `chunks`, or where it is 0 the schedule's own number."""
    return chunks or SCHEDULES[name].chunks[0]


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
    if entry.chunks[0] < entry.chunks[1]:
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
