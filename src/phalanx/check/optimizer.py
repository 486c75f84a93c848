"""The problems of an optimizer: its name, options that it does not read, and layouts that its state cannot follow."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.layout import Problem
from phalanx.config.job import Job
from phalanx.errors import JobError
from phalanx.nearest import divisors, nearest_of
from phalanx.optimizers.blocks import block_of
from phalanx.optimizers.catalogue import OPTIMIZERS, entry_of
from phalanx.optimizers.facts import extra_options, unread
from phalanx.partition.tensor_slices import slice_of


def optimizer_problems(job: Job) -> Iterator[Problem]:
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
    yield from _blocks(job) if entry.granularity == "block" else ()
    if config.name == "sgd" and config.nesterov and not config.momentum:
        yield "optimizer.nesterov", "Nesterov's momentum needs a momentum above 0; nearest legal: nesterov=false"


def _blocks(job: Job) -> Iterator[Problem]:
    """Yields the tensor-parallel degree that cuts blocks of rows."""
    tp, model = job.layout.tp, job.model
    for name, whole in parameter_shapes(model, model.vocab_size or 1).items() if tp > 1 else ():
        held, block = slice_of(name, whole, model, tp, 0), block_of(whole)
        if block and held.dim == len(whole) - 1 and held.size % block:
            legal = [ranks for ranks in divisors(whole[-1] // block) if ranks < tp]
            yield (
                "layout.tp",
                f"{job.optimizer.name} has a scale per {block} elements of a row, and tp {tp} cuts the rows of {name} "
                f"({whole[-1]}) into parts of {held.size}; nearest legal tp: {nearest_of(legal, tp)}, or "
                "optimizer=adamw",
            )
            return
