"""The order of simplicity, which decides between layouts that are equally fast, and its reasons in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from phalanx.config.layout import Layout
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import parse, parse_cut
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.units import counted

if TYPE_CHECKING:
    from phalanx.plan.plan import Candidate


class TieBand(NamedTuple):
    """Shares of a step time by which layouts may differ and count as equally fast."""

    kinds: float
    """By this share a layout with a step of another kind (Simplicity.steps) has to be faster than one without."""
    alike: float
    """Layouts of the same kind are equal within this share: they have most of their error in common."""


EQUAL = TieBand(0.001, 0.001)
"""The fastest layout, whatever it uses."""
TIED = TieBand(0.05, 0.02)
"""The model's own error. Two layouts of the same model, machine and batch are predicted 7 % (median of 912 published
pairs) more or less apart than they were measured, 3 % in the two sources with the least (docs/explanation/accuracy.md).
"""
LONG_SEQUENCE = 16_384
"""Tokens from which on a sequence is cut over context-parallel ranks as a matter of course."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


class Simplicity(NamedTuple):
    """The order of simplicity: of two layouts the simpler has the smaller first field that differs."""

    context: bool
    """Whether it cuts short sequences over context-parallel ranks."""
    schedule: int
    """0 without a pipeline and for 1F1B and interleaved 1F1B, 1 for schedules that split backward passes, 2 for those
    that place stages in another order besides (zb_v, dualpipe)."""
    scattered: bool
    """Whether recomputation by layer has more runs of layers than a person writes (`is_scattered`)."""
    uneven: int
    """1 if not all stages have as many layers, 2 if their cut is written, and one more for recomputation by layer."""
    axes: int
    """Number of axes with more than one rank."""
    settings: int
    """Settings of state, recomputation, schedule and context that differ from the default."""
    cut: int
    """Ranks over which the model is cut."""
    chunks: int
    zero: int

    @property
    def steps(self) -> int:
        """Steps away from common practice: context parallelism of short sequences, another schedule, a list of layers'
        recomputation."""
        return self.context + (self.schedule > 0) + self.scattered


def simplicity(spec: StepSpec) -> Simplicity:
    """Returns a layout's place in the order of simplicity."""
    layout, layers = spec.layout, spec.model.n_layers
    entry = SCHEDULES.get(layout.schedule)
    plain = layout.pp == 1 or (entry is not None and entry.usual)
    elsewhere = entry is None or entry.placement != "round robin"
    stages = layout.pp * max(1, layout.pp_chunks) if layout.pp > 1 else 1
    return Simplicity(
        context=layout.cp > 1 and spec.model.seq_len < LONG_SEQUENCE,
        schedule=0 if plain else 1 + elsewhere,
        scattered=is_scattered(layout),
        uneven=(2 if layout.pp_cut else layers % stages > 0) + bool(layout.recompute_cut),
        axes=sum(getattr(layout, axis) > 1 for axis in AXES),
        settings=(layout.pp > 1) * (layout.schedule != Layout.schedule)
        + (layout.recompute != "none")
        + (layout.shard_ranks > 1) * ((layout.accumulate == "sharded") + (layout.zero == 3 and not layout.reshard))
        + (layout.hpz > 1)
        + layout.folds
        + (layout.quantise_weights == "fp8")
        + (layout.ring > 1 and layout.cp_ulysses > 1),
        cut=layout.tp * layout.pp * layout.cp * layout.ep_shard,
        chunks=layout.pp_chunks,
        zero=layout.zero,
    )


RUNS = 2
"""Runs of layers up to which a recompute_cut is one decision: the first layers recompute, the rest do not."""


def is_scattered(layout: Layout) -> bool:
    """Returns whether a layout's recomputation by layer has more runs than `RUNS`."""
    return bool(layout.recompute_cut) and len(parse(layout.recompute_cut)) > RUNS


def ranked(candidates: Iterable[Candidate], band: TieBand = EQUAL) -> list[Candidate]:
    """Returns the choice first, then the others, fastest first. A layout of another kind has to win by `band.kinds` for
    each of its steps; of the layouts of the winner's kind that are within `band.alike` of it, and still win, the
    simplest is the choice."""
    left = sorted(candidates, key=lambda one: (one.seconds, simplicity(one.spec)))
    if not left:
        return left
    places = [simplicity(one.spec) for one in left]
    handicapped = [one.seconds * (1 + band.kinds) ** place.steps for one, place in zip(left, places, strict=True)]
    winner = min(range(len(left)), key=handicapped.__getitem__)
    steps = places[winner].steps
    rivals = [seconds for seconds, place in zip(handicapped, places, strict=True) if place.steps < steps]
    most = min([handicapped[winner] * (1 + band.alike), *rivals])
    ties = [n for n, place in enumerate(places) if place.steps == steps and handicapped[n] <= most]
    choice = min(ties, key=lambda n: (places[n], n))
    return [left[choice], *left[:choice], *left[choice + 1 :]]


def simpler_because(simple: StepSpec, other: StepSpec) -> str:
    """Says what makes a layout simpler than another, such as "1f1b instead of zb_v"; empty if it is not."""
    mine, theirs = simplicity(simple), simplicity(other)
    if mine >= theirs:
        return ""
    layout, instead = simple.layout, other.layout
    words = {
        "context": f"no context parallelism for sequences of {simple.model.seq_len:,} tokens",
        "schedule": f"{layout.schedule if layout.pp > 1 else 'no pipeline'} instead of {instead.schedule}",
        "scattered": "recomputation without a list of layers",
        "uneven": "equal stages" if mine.uneven == 0 else "fewer stages or layers that differ",
        "axes": f"{mine.axes} instead of {theirs.axes} axes",
        "settings": "fewer settings that differ from the default",
        "cut": f"the model cut over {mine.cut} ranks instead of {theirs.cut}",
        "chunks": f"{max(1, mine.chunks)} stages per rank instead of {max(1, theirs.chunks)}",
        "zero": f"zero {mine.zero} instead of {theirs.zero}",
    }
    return next(words[name] for name in Simplicity._fields if getattr(mine, name) != getattr(theirs, name))


def recompute_in_words(layout: Layout) -> str:
    """Describes recomputation by layer: "first 49 blocks full, rest none", or of more than `RUNS` runs their sums, "34
    blocks full, 14 none"."""
    runs = parse(layout.recompute_cut)
    if len(runs) == RUNS:
        return f"first {counted(runs[0].layers, 'block')} {runs[0].mode}, rest {runs[1].mode}"
    many = Counter[str]()
    for run in runs:
        many[run.mode] += run.layers
    (mode, first), *others = many.most_common()
    return ", ".join([f"{counted(first, 'block')} {mode}", *(f"{layers} {mode}" for mode, layers in others)])


def brief(layout: Layout) -> str:
    """Formats a layout in one line of a sentence, without the batch equation and lists of stages; a list of layers'
    recomputation is described."""
    short = replace(layout, micro_batch=0, accumulation=0, pp_cut="")
    if not layout.recompute_cut:
        return short.line().replace(",", " ")
    named = replace(short, recompute_cut="").line().replace(",", " ")
    return f"{named}; recomputation: {recompute_in_words(layout)}"


def stages_in_words(layout: Layout) -> str:
    """Describes a written cut: "stages 0-6 of 5 layers, 7 of 4"."""
    runs, start = [], 0
    for layers, run in groupby(parse_cut(layout.pp_cut)):
        end = start + len(list(run)) - 1
        runs.append(f"{start}{f'-{end}' if end > start else ''} of {layers}{' layers' if not runs else ''}")
        start = end + 1
    return f"stages {', '.join(runs)}"
