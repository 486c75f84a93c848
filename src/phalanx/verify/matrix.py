"""The layouts that are compared with one process where nobody names any. A new technique gets its lines here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from phalanx.job.fields import leaves
from phalanx.job.layout import AXES, Layout
from phalanx.job.pipeline import is_file
from phalanx.schedule.catalogue import SCHEDULES

MATRIX = (
    # accumulation and recomputation alone
    "accumulation=2",
    "accumulation=2,recompute=full,loss_chunk=24",
    # whole copies of the model
    "dp_replicate=2",
    "dp_replicate=4,accumulation=2",
    "dp_replicate=2,accumulation=2,data_parallel=threads",
    # sharded state: optimizer, gradients, parameters
    "dp_shard=2,zero=1,accumulation=2",
    "dp_shard=4,zero=2",
    "dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
    "dp_shard=4,zero=3",
    "dp_shard=2,zero=3,reshard=false,accumulation=2",
    "dp_shard=2,zero=3,accumulate=sharded,accumulation=2,recompute=full",
    # sharded within groups, copied between them
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
    "dp_replicate=2,dp_shard=2,zero=3,accumulation=2",
    # cut matrices, and cut tokens between them
    "tp=2",
    "tp=4,accumulation=2,loss_chunk=24",
    "tp=2,sp=true,recompute=selective",
    "tp=2,sp=true,sp_regather=true,loss_chunk=24",
    "tp=4,sp=true,recompute=full",
    # layers cut into stages, by schedules of every kind
    "pp=2,accumulation=4",
    "pp=4,schedule=gpipe,accumulation=4",
    "pp=2,schedule=interleaved_1f1b,accumulation=4,recompute=selective",
    "pp=4,schedule=zb_h1,accumulation=8",
    "pp=2,schedule=zb_v,accumulation=4,recompute=full,loss_chunk=24",
    "pp=2,schedule=dualpipe,accumulation=4",
    "pp=2,schedule=terapipe,pp_slices=4,accumulation=2",
    "pp=3,schedule=pipedream,accumulation=4",
    # compositions
    "dp_replicate=2,pp=2,accumulation=4",
    "dp_shard=2,pp=2,zero=1,schedule=zb_h1,accumulation=4",
    "dp_shard=2,pp=2,zero=2,schedule=interleaved_1f1b,accumulation=4,accumulate=sharded",
    "dp_shard=2,pp=2,zero=3,schedule=zb_v,accumulation=4",
    "tp=2,pp=2,sp=true,schedule=zb_h1,accumulation=4",
    "dp_replicate=2,tp=2,pp=2,sp=true,accumulation=4,loss_chunk=24",
    "dp_replicate=2,tp=2,sp=true,accumulation=2",
    "dp_shard=2,tp=2,zero=1,sp=true",
    "dp_shard=2,tp=2,zero=2,accumulation=2,recompute=selective",
    "dp_shard=2,tp=2,zero=3,sp=true,sp_regather=true,reshard=false",
    "dp_replicate=2,dp_shard=2,tp=2,zero=3,sp=true,recompute=full,loss_chunk=24",
)
"""Each technique alone and in company, in lines of at most 8 ranks."""

CHOICES = {"sp": (False, True), "zero": (1, 2, 3), "recompute": ("none", "selective", "full")}
"""What `full` combines with every product of the axes, where it means anything."""

PIPELINES = (2, 3, 4)
"""Ranks of the pipelines that every schedule is compared with."""


def full(max_ranks: int) -> Iterator[Layout]:
    """Every product dp_replicate × dp_shard × tp of 2 to `max_ranks` ranks, in every form of CHOICES."""
    degrees = range(1, max_ranks + 1)
    for replicate, shard, tp in itertools.product(degrees, repeat=3):
        if not 2 <= replicate * shard * tp <= max_ranks:
            continue
        for sp, zero, recompute in itertools.product(*CHOICES.values()):
            if (sp and tp == 1) or (zero < 3 and shard == 1):
                continue  # the same as without
            yield Layout(dp_replicate=replicate, dp_shard=shard, tp=tp, sp=sp, zero=zero, recompute=recompute)


def schedules(max_ranks: int) -> Iterator[Layout]:
    """Every schedule on pipelines of P = 2, 3, 4 ranks, with P, 2 P and P + 1 micro-batches."""
    for name in SCHEDULES:
        for pp in (ranks for ranks in PIPELINES if ranks <= max_ranks):
            for micro_batches in (pp, 2 * pp, pp + 1):
                yield Layout(pp=pp, schedule=name, accumulation=micro_batches)


def reduced(layout: Layout, max_ranks: int) -> Layout:
    """The same techniques on fewer ranks: the largest degree is divided by its smallest factor until it fits.

    Every axis keeps at least 2 ranks while that is possible. Of equal degrees the one that comes first in the mesh goes
    first. A pipeline whose schedule is a file keeps its ranks; another one that gets fewer loses what was written for
    its stages.
    """
    fixed = {"pp"} if layout.pp > 1 and is_file(layout.schedule) else set[str]()
    while layout.processes > max_ranks:
        axis = max((name for name in AXES if name not in fixed), key=lambda name: getattr(layout, name))
        degree = getattr(layout, axis)
        if degree == 1:
            break
        factor = next(f for f in range(2, degree + 1) if degree % f == 0)
        layout = replace(layout, **{axis: degree // factor})
        if axis == "pp":
            layout = replace(layout, pp_cut="")
    return _tidy(layout)


def without(layout: Layout, paths: set[str]) -> Layout:
    """The layout with some of its fields, such as "layout.cp", as they are by default."""
    default = Layout()
    return _tidy(
        replace(layout, **{name: getattr(default, name) for name in leaves(Layout) if f"layout.{name}" in paths})
    )


def _tidy(layout: Layout) -> Layout:
    """Without a pipeline its settings mean nothing."""
    if layout.pp > 1:
        return layout
    default = Layout()
    names = ("schedule", "pp_chunks", "pp_slices", "pp_cut")
    return replace(layout, **{name: getattr(default, name) for name in names})
