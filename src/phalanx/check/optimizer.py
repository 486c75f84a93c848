"""The problems of an optimizer: its name, options that it does not read, and layouts that its state cannot follow."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.nearest import Misfit, divisors
from phalanx.optimizers.blocks import block_of
from phalanx.optimizers.catalogue import OPTIMIZERS, entry_of
from phalanx.optimizers.facts import extra_options, unread
from phalanx.partition.tensor_slices import first_rank_tiles


def optimizer_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    config = job.optimizer
    try:
        entry = entry_of(config.name)
    except JobError as error:
        yield "optimizer.name", str(error)
        return
    for option in unread(config):
        readers = [name for name, other in OPTIMIZERS.items() if option in other.options]
        yield (
            f"optimizer.{option}",
            f"{config.name} does not read it, {' and '.join(readers) or 'no optimizer'} "
            f"{'do' if len(readers) > 1 else 'does'}; its own options: {', '.join(entry.options) or 'none'}",
        )
    try:
        extra_options(config)
    except ValueError as error:
        yield "optimizer.options", str(error)
    if "nesterov" in entry.options and config.nesterov and not config.momentum:
        yield "optimizer.nesterov", "Nesterov's momentum needs a momentum above 0; nearest legal: nesterov=false"
    layout = job.layout
    if entry.needs_whole_matrices and layout.sync == "asp" and layout.tp * layout.shard_ranks > 1:
        yield (
            "layout.sync",
            f"with asp each rank's server updates by itself, but {config.name} needs whole matrices of all "
            f"{layout.tp * layout.shard_ranks} ranks that share them; nearest legal: sync=bsp, or tp=1 and dp_shard=1",
        )


def block_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yields the tensor ranks, or the tiles, that cut the blocks over which an optimizer's state has a scale."""
    layout, model, name = job.layout, job.model, job.optimizer.name
    if name not in OPTIMIZERS or OPTIMIZERS[name].granularity != "block":
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
                        f"{name} has a scale per {block} elements of a row, and {field} {parts} cuts the rows of "
                        f"{weight} ({whole[-1]}) into parts of {held.size}",
                        parts,
                        {f"layout.{field}": legal},
                        ", or optimizer=adamw",
                    ),
                )
                break
