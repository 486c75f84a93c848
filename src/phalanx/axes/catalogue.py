"""The table of axes: the project's own, and those of packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from phalanx.axes.axis import AxisEntry, problems
from phalanx.axes.context import CONTEXT
from phalanx.axes.experts import EXPERTS
from phalanx.axes.pipeline import PIPELINE
from phalanx.axes.tensor import TENSOR
from phalanx.blocks.operator import Collective
from phalanx.config.added import AXIS_OPTIONS, OptionsTable
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.techniques.adapters import freezing
from phalanx.techniques.catalogue import techniques_of
from phalanx.techniques.technique import Problem


def _data_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if layout.accumulate == "sharded" and layout.zero == 1:
        yield (
            "layout.accumulate",
            "sharded accumulation needs zero 2 or 3, zero is 1; nearest legal: accumulate=local, or zero=2",
        )
    if layout.accumulate == "sharded" and layout.shard_ranks == 1:
        yield (
            "layout.accumulate",
            f"dp_shard {layout.dp_shard} × cp {layout.cp} = 1 rank cannot shard gradients; nearest legal: "
            "accumulate=local, or dp_shard=2",
        )


REPLICATE = AxisEntry(
    "data-parallel replicas with whole copies",
    "Li et al. 2020",
    "samples",
    layouts=("dp_replicate=2", "dp_replicate=4,accumulation=2"),
    combined=("dp_replicate=2",),
)
SHARD = AxisEntry(
    "data-parallel ranks that share the state",
    "Rajbhandari et al. 2020; Zhao et al. 2023",
    "state",
    problems=_data_problems,
    layouts=(
        "dp_shard=2,zero=1,accumulation=2",
        "dp_shard=4,zero=2",
        "dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_shard=4,zero=3",
        "dp_shard=2,zero=3,reshard=false,accumulation=2",
        "dp_shard=2,zero=3,accumulate=sharded,accumulation=2,recompute=full",
        "dp_replicate=2,dp_shard=2,zero=1",
        "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_replicate=2,dp_shard=2,zero=3,accumulation=2",
    ),
    combined=("dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"),
)


OWN: Mapping[str, AxisEntry] = MappingProxyType(
    {
        "dp_replicate": REPLICATE,
        "dp_shard": SHARD,
        "cp": CONTEXT,
        "tp": TENSOR,
        "pp": PIPELINE,
        "ep": EXPERTS,
    }
)
"""The project's own axes."""


AXES_TABLE = OptionsTable("axis", dict(OWN), problems, AXIS_OPTIONS)


def axes_of(layout: Layout) -> Mapping[str, AxisEntry]:
    """Returns the axes that a layout may have by name: the project's own, and the packages' whose options it sets."""
    return OWN if not layout.axes.chosen else {**OWN, **{name: AXES_TABLE[name] for name, _ in layout.axes.chosen}}


def period(layout: Layout) -> int:
    """Returns the steps from one agreement of independent replicas to the next; 1 if every step sums gradients, or
    nobody waits (asp)."""
    if sizes := layout.axes.sizes:
        name = next(iter(sizes))
        return AXES_TABLE[name].every(getattr(layout.axes, name))
    return layout.sync_every if layout.sync in ("local_sgd", "diloco") else 1


def agreement(layout: Layout) -> tuple[float, tuple[tuple[Collective, float], ...]]:
    """Returns the share of an agreement of independent replicas that one step has, and its collectives with the
    multiples of the parameters' bytes."""
    sizes = layout.axes.sizes
    return 1 / period(layout), AXES_TABLE[next(iter(sizes))].messages if sizes else (("all_reduce", 1.0),)


def axis_problems(job: Job) -> Iterator[Problem]:
    """Yields what the axes of a layout cannot have."""
    # What tp cuts is said before what other axes cut of the rest.
    for name, axis in sorted(axes_of(job.layout).items(), key=lambda item: item[0] != "tp"):
        if name in OWN or name in job.layout.axes.sizes:
            yield from axis.problems(job)
    yield from _outside(job)


def added_problems(job: Job) -> Iterator[Problem]:
    """Yields a choice that is the planner's, where it knows no axis of a package."""
    if job.layout.auto and job.layout.axes.sizes:
        name = next(iter(job.layout.axes.sizes))
        yield (
            f"layout.axes.{name}.size",
            "the planner does not choose axes of packages; nearest legal: size 1, or a layout without auto",
        )


def _outside(job: Job) -> Iterator[Problem]:
    """Yields what replicas along an axis of a package cannot be combined with."""
    layout, sizes = job.layout, job.layout.axes.sizes
    for name, options in layout.axes.chosen:
        if options.size < 1:
            yield f"layout.axes.{name}.size", f"must be at least 1, is {options.size}"
        elif options.size == 1:
            yield f"layout.axes.{name}", "has no effect here: its options are for size above 1"
    if not sizes:
        return
    name, *others = sizes
    at, own = f"layout.axes.{name}.size", f"axis {name} of {sizes[name]} ranks"
    if others:
        yield at, f"one axis of a package at a time, are {' and '.join(sizes)}; nearest legal: {others[0]}'s size 1"
    if layout.sync != "bsp":
        yield "layout.sync", f"{layout.sync} and {own} would both have independent replicas; nearest legal: sync=bsp"
    if layout.data_parallel == "threads":
        yield "layout.data_parallel", f"threads share the parameters of {own}; nearest legal: data_parallel=ddp"
    if layout.offload != "none":
        yield "layout.offload", f"replicas along {own} agree on their device; nearest legal: offload=none"
    if job.model.freezes:
        path, legal = freezing(job.model)
        yield path, f"{own} averages all parameters, and most are frozen; nearest legal: {legal}"
    for other, technique in techniques_of(job).items():
        if other in ("preference", "policy") and technique.is_on(job):
            yield at, "a loss that compares sequences needs replicas that sum gradients; nearest legal: size 1"
    for path in ("train.eval_every", "checkpoint.every", "checkpoint.memory_every"):
        if (every := get(job, path)) % (steps := period(layout)):
            nearest = -(-every // steps) * steps
            yield path, f"{own} agrees every {steps} steps, and {every} is no multiple of it; nearest: {nearest}"
