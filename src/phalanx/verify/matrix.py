"""The layouts that are compared with one process by default. A new technique gets its lines here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from phalanx.config.layout import AXES, Layout
from phalanx.partition.derived import MODES, is_file, legal_hpz
from phalanx.schedule.catalogue import SCHEDULES

MATRIX = (
    # accumulation and recomputation alone
    "accumulation=2",
    "accumulation=2,recompute=full,loss_chunk=24",
    "recompute_cut=1*full+1*selective+1*products+1*none",
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
    "dp_shard=4,zero=3,hpz=2,accumulation=2",
    # layers in tiles
    "dp_shard=2,zero=3,tiles=2,tile=all,accumulation=2,recompute=products",
    "dp_shard=2,tp=2,zero=3,sp=true,tiles=2,tile=all,recompute=full",
    # sharded within groups, replicated between them
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
    "dp_replicate=2,dp_shard=2,zero=3,accumulation=2",
    # cut matrices, and cut tokens between them
    "tp=2",
    "tp=4,accumulation=2,loss_chunk=24",
    "tp=2,sp=true,recompute=selective",
    "tp=2,sp=true,sp_regather=true,recompute=products",
    "tp=2,sp=true,sp_regather=true,loss_chunk=24",
    "tp=4,sp=true,recompute=full",
    "tp=2,pp=2,accumulation=4,sp=true,sp_regather=true,recompute_cut=1*full+2*selective+1*none",
    # layers cut into stages, by schedules of every kind
    "pp=2,accumulation=4",
    "pp=4,schedule=gpipe,accumulation=4",
    "pp=2,schedule=interleaved_1f1b,accumulation=4,recompute=selective",
    "pp=4,schedule=zb_h1,accumulation=8",
    "pp=2,schedule=zb_v,accumulation=4,recompute=full,loss_chunk=24",
    "pp=2,schedule=dualpipe,accumulation=4",
    "pp=2,schedule=terapipe,pp_slices=4,accumulation=2",
    "pp=3,schedule=pipedream,accumulation=4",
    # parts of sequences: a ring, heads exchanged for tokens, both
    "cp=2",
    "cp=4",
    "cp=2,cp_ulysses=2",
    "cp=4,cp_ulysses=2",
    "cp=4,cp_ulysses=2,cp_inner=ring",
    "cp=2,recompute=selective,zero=1",
    "dp_replicate=2,dp_shard=2,cp=2",
    # expert parallelism, over ranks of dp_shard and of cp
    "dp_shard=2,ep=2",
    "dp_shard=4,ep=2,zero=1",
    "dp_shard=4,ep=2",
    "dp_shard=4,ep=4,zero=2",
    "cp=2,ep=2",
    # combined forms that covering.py does not have
    "dp_shard=2,pp=2,zero=2,schedule=interleaved_1f1b,accumulation=4,accumulate=sharded",
    "dp_shard=2,tp=2,zero=3,sp=true,sp_regather=true,reshard=false",
)
"""Each technique alone, in all its forms, in lines of at most 8 ranks; covering.py combines them."""

CHOICES = {"sp": (False, True), "zero": (1, 2, 3), "recompute": MODES}
"""Settings that `full` combines with every product of the axes, if they apply."""

CONTEXTS = (1, 2)
"""Context-parallel ranks in `full`."""

PIPELINES = (2, 3, 4)
"""Pipeline ranks for which every schedule is compared."""


def full(max_ranks: int) -> Iterator[Layout]:
    """Yields every product dp_replicate × dp_shard × cp × tp of 2 to `max_ranks` ranks, in every form of CHOICES."""
    degrees = range(1, max_ranks + 1)
    for replicate, shard, cp, tp in itertools.product(degrees, degrees, CONTEXTS, degrees):
        if not 2 <= replicate * shard * cp * tp <= max_ranks:
            continue
        for sp, zero, recompute in itertools.product(*CHOICES.values()):
            if (sp and tp == 1) or (zero < 3 and shard * cp == 1):
                continue  # the same as without
            yield Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, sp=sp, zero=zero, recompute=recompute)


def schedules(max_ranks: int) -> Iterator[Layout]:
    """Yields every schedule on pipelines of P = 2, 3, 4 ranks, with P, 2 P and P + 1 micro-batches."""
    for name in SCHEDULES:
        for pp in (ranks for ranks in PIPELINES if ranks <= max_ranks):
            for micro_batches in (pp, 2 * pp, pp + 1):
                yield Layout(pp=pp, schedule=name, accumulation=micro_batches)


def reduced(layout: Layout, max_ranks: int) -> Layout:
    """Returns the same techniques on fewer ranks: the largest degree is divided by its smallest factor until it fits.

    Every axis keeps at least 2 ranks while that is possible. Of equal degrees the one that comes first in the mesh is
    reduced first. A pipeline whose schedule is a file keeps its ranks; a smaller pipeline loses the settings written
    for its stages. Degrees that subdivide other axes (cp_ulysses, ep) shrink with them.
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


def _tidy(layout: Layout) -> Layout:
    """Returns the layout with cp_ulysses, ep and hpz that fit their axes, and without settings of absent techniques."""
    layout = replace(layout, cp_ulysses=gcd(layout.cp_ulysses, layout.cp), ep=gcd(layout.ep, layout.shard_ranks))
    layout = replace(layout, hpz=max(ranks for ranks in legal_hpz(layout) if ranks <= layout.hpz))
    without = ["cp_inner"] if layout.cp == 1 else []
    without += ["schedule", "pp_chunks", "pp_slices", "pp_cut"] if layout.pp == 1 else []
    without += ["accumulate"] if layout.shard_ranks == 1 else []
    return replace(layout, **{name: getattr(Layout(), name) for name in without})
