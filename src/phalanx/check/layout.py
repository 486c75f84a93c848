"""The problems of a layout: the degrees of the axes against the model, the devices and the batch."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.axes.catalogue import axis_problems
from phalanx.axes.tensor import tensor_problems
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.nearest import Misfit, divisors
from phalanx.optimizers.catalogue import OPTIMIZERS, granularity_of
from phalanx.optimizers.entry import block_of
from phalanx.partition import derived as batch
from phalanx.partition.tensor_slices import first_rank_tiles
from phalanx.techniques.catalogue import techniques_of
from phalanx.techniques.technique import Problem


def layout_problems(job: Job) -> Iterator[Problem]:
    """Yields each problem with its equation and the nearest legal choice."""
    layout = job.layout
    yield from axis_problems(job)
    yield from block_problems(job)
    for technique in techniques_of(job).values():
        yield from technique.layout_problems(job)
    yield from _world(layout, job.cluster.nodes, job.cluster.devices_per_node)
    yield from _batch(job)


def _world(layout: Layout, nodes: int, devices_per_node: int) -> Iterator[Problem]:
    outside = "".join(f"{name} {size} × " for name, size in layout.axes.sizes.items())
    product = (
        f"{outside}dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × cp {layout.cp} × tp {layout.tp} × "
        f"pp {layout.pp} = {layout.world}"
    )
    if not devices_per_node:
        if layout.world % nodes:
            yield "cluster.nodes", f"{product} devices are not divisible by nodes {nodes}"
        return
    devices = nodes * devices_per_node
    if layout.world != devices:
        others = layout.world // layout.dp_replicate
        fits = devices // others
        legal = (
            f"dp_replicate={fits} makes it {devices}"
            if fits and devices % others == 0
            else f"the axes without dp_replicate make {others}, which must divide {devices}"
        )
        yield (
            "layout",
            f"{product}, but the cluster has nodes {nodes} × devices {devices_per_node} = {devices}; {legal}; "
            "`phalanx plan` finds the best layout, layout=auto uses it",
        )


def _batch(job: Job) -> Iterator[Problem]:
    try:
        batch.solve(job.train.global_batch, job.layout)
    except ValueError as error:
        yield "train.global_batch", str(error)


def block_problems(job: Job) -> Iterator[Problem]:
    """Yields the tensor ranks, or the tiles, that cut the blocks over which an optimizer's state has a scale."""
    layout, model = job.layout, job.model
    if job.optimizer.name not in OPTIMIZERS or granularity_of(job.optimizer) != "block":
        return
    shapes = parameter_shapes(model, model.vocab_size or 1)
    for field, of_ranks in (("tp", Layout(tp=layout.tp)), ("tiles", layout)):
        parts = getattr(layout, field)
        for weight, _, held in first_rank_tiles(shapes, of_ranks, model) if parts > 1 else ():
            whole = held.whole
            block = block_of(whole)
            if block and held.dim == len(whole) - 1 and held.size % block:
                rest = whole[-1] // (layout.tp if field == "tiles" else 1)
                legal = [n for n in divisors(max(1, rest // block)) if n < parts]
                yield (
                    f"layout.{field}",
                    Misfit(
                        f"the optimizer's state has a scale per {block} elements of a row, and {field} {parts} cuts "
                        f"the rows of {weight} ({whole[-1]}) into parts of {held.size}",
                        parts,
                        {f"layout.{field}": legal},
                        ", or optimizer.state=bf16",
                    ),
                )
                break


def require_cut(model: ModelConfig, tp: int, pp: int) -> None:
    """Raises JobError, with everything that is in the way, unless tp × pp ranks can share a model that only computes
    forward."""
    problems = []
    if not 1 <= pp <= model.n_layers:
        problems.append(
            f"1 ≤ pp {pp} ≤ n_layers {model.n_layers} does not hold: each rank of a pipeline has at least one layer; "
            f"nearest legal: pp {min(max(pp, 1), model.n_layers)}"
        )
    if tp < 1:
        problems.append(f"tp {tp}: at least 1")
    else:
        problems += [message for _, message in tensor_problems(Job(model=model, layout=Layout(tp=tp)))]
    if problems:
        raise JobError(problems)
