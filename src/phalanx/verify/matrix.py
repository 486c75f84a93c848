"""The layouts that are compared with one process where nobody names any. A new technique gets its lines here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from phalanx.job.fields import leaves
from phalanx.job.layout import AXES, Layout

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
    # compositions
    "dp_replicate=2,tp=2,sp=true,accumulation=2",
    "dp_shard=2,tp=2,zero=1,sp=true",
    "dp_shard=2,tp=2,zero=2,accumulation=2,recompute=selective",
    "dp_shard=2,tp=2,zero=3,sp=true,sp_regather=true,reshard=false",
    "dp_replicate=2,dp_shard=2,tp=2,zero=3,sp=true,recompute=full,loss_chunk=24",
)
"""Each technique alone and in company, in lines of at most 8 ranks."""

CHOICES = {"sp": (False, True), "zero": (1, 2, 3), "recompute": ("none", "selective", "full")}
"""What `full` combines with every product of the axes, where it means anything."""


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


def reduced(layout: Layout, max_ranks: int) -> Layout:
    """The same techniques on fewer ranks: the largest degree is divided by its smallest factor until it fits.

    Every axis keeps at least 2 ranks while that is possible. Of equal degrees the one that comes first in the mesh goes
    first.
    """
    while layout.processes > max_ranks:
        axis = max(AXES, key=lambda name: getattr(layout, name))
        degree = getattr(layout, axis)
        factor = next(f for f in range(2, degree + 1) if degree % f == 0)
        layout = replace(layout, **{axis: degree // factor})
    return layout


def without(layout: Layout, paths: set[str]) -> Layout:
    """The layout with some of its fields, such as "layout.pp", as they are by default."""
    default = Layout()
    return replace(layout, **{name: getattr(default, name) for name in leaves(Layout) if f"layout.{name}" in paths})
