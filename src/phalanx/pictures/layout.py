"""A picture of a layout: which rank holds which part of a block's matrices, and the bytes of state per rank under each
ZeRO stage and with each optimizer (`phalanx predict JOB --svg FILE --picture layout`).

It is drawn from the arithmetic that training uses (partition/tensor_slices.py, cost/memory/state.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes, block_shapes, parameter_shapes, vocabulary
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.optimizer import Optimizer
from phalanx.cost.memory.state import WIDTHS, StateBytes, state_bytes
from phalanx.optimizers.catalogue import OPTIMIZERS, entry_of
from phalanx.partition.buckets import granular_cut
from phalanx.partition.stages import even
from phalanx.partition.tensor_slices import TensorSlice, in_buckets, slice_of
from phalanx.pictures.elements import COLOURS, NEUTRAL, box, document, heading, text
from phalanx.units import gib

_PARTS = {"parameters": COLOURS[0], "gradients": COLOURS[4], "optimizer": COLOURS[2]}
_WIDTH, _MARGIN, _LARGEST = 900, 24, 150


def svg(job: Job, vocab_size: int) -> str:
    """Returns the picture of `job`'s layout, with a vocabulary of `vocab_size` tokens, as an SVG document."""
    model, layout = job.model, job.layout
    vocab = vocabulary(model, vocab_size)
    drawn, bottom = _matrices(_drawn(model, vocab), job, vocab)
    title = f"State per rank, {job.train.precision}, by "
    stages, bottom = _bars(f"{title}stage", list(_stages(job, vocab)), bottom + 60)
    optimizers, bottom = _bars(f"{title}optimizer, in this layout", list(_optimizers(job, vocab)), bottom + 10)
    legend, height = _legend(bottom)
    title = f"layout {layout.line()}: {layout.world} ranks"
    caption = (text(_MARGIN, 46 + 16 * number, line) for number, line in enumerate(_caption(job)))
    return document(
        title, _WIDTH, height, [heading(_MARGIN, 26, title), *caption, *drawn, *stages, *optimizers, *legend]
    )


def _drawn(model: ModelConfig, vocab: int) -> Shapes:
    """Returns the embedding, the matrices of the first block, and those of the first block with experts."""
    found = {"embed.weight": parameter_shapes(model, vocab)["embed.weight"]}
    experts = next((layer for layer, kind in enumerate(block_kinds(model)) if kind.routed), 0)
    for layer in sorted({0, experts}):
        for name, shape in block_shapes(model, layer).items():
            if name.endswith(".weight") and len(shape) > 1 and (layer == 0 or name.startswith("moe.")):
                found[f"blocks.{layer}.{name}"] = shape
    return found


def _caption(job: Job) -> list[str]:
    layout = job.layout
    lines = ["The embedding and the matrices of the first block, outputs downwards (long sides are cut short)."]
    if job.model.moe.n_experts:
        dealt = f", distributed over {layout.ep} ep ranks, one shade each" if layout.ep > 1 else ""
        lines.append(f"In the matrices of experts each row is an expert{dealt}.")
    if layout.tp > 1:
        lines[0] += " Colours are tensor ranks."
    if layout.pp > 1:
        lines.append(f"Below: the first of {layout.pp} pipeline ranks with equal numbers of layers.")
    if layout.shard_ranks > 1:
        of = "dp_shard" if layout.cp == 1 else "dp_shard × cp"
        what = ("optimizer state", "gradients and optimizer state", "parameters, gradients and optimizer state")
        lines.append(f"Shades are the {what[layout.zero - 1]} of the {of} ranks.")
    return lines


def _matrices(matrices: dict[str, tuple[int, ...]], job: Job, vocab: int) -> tuple[list[str], int]:
    """Returns every matrix as a rectangle of its proportions, and the lower end."""
    model, layout = job.model, job.layout
    shards = _shards(job, vocab)
    scale = _LARGEST / max(model.d_model, model.ff_size, model.n_heads * model.head_size)
    parts, x, top, lowest = [], _MARGIN, max(100, 62 + 16 * len(_caption(job))), 0
    for name, whole in matrices.items():
        height, width = (max(6, min(side * scale, _LARGEST)) for side in whole[-2:])
        if is_expert(name):
            height, width = _LARGEST * 2 / 3, max(height, width)
        if x + width > _WIDTH - _MARGIN:
            x, top = _MARGIN, lowest + 40
        label = ".".join(name.removesuffix(".weight").split(".")[2 if name.startswith("blocks.") else 0 :])
        parts.append(text(x, top - 6, label))
        for rank in range(layout.tp):
            held = slice_of(name, whole, model, layout.tp, rank)
            if held.first:
                parts += _share(held, shards[name], rank, (x, top, width, height))
        parts.append(_box(x, top, width, height, "none", stroke=True))
        x += int(max(width, 7.5 * len(label))) + 22
        lowest = max(lowest, top + int(height))
    return parts, lowest


def _shards(job: Job, vocab: int) -> dict[str, list[float]]:
    """Returns, by parameter, the end of the share of each dp_shard (× cp) rank in a tensor rank's slice, as a fraction
    of its rows: rank r keeps the rows between the r-th number and the one before it. For experts, the end of each ep
    rank's."""
    layout, ranks = job.layout, job.layout.shard_ranks
    whole = parameter_shapes(job.model, vocab)
    shapes = {name: slice_of(name, shape, job.model, layout.tp, 0).shape for name, shape in whole.items()}
    if layout.zero == 3 or ranks == 1:
        counts = {name: prod(shape[:2]) if len(shape) == 3 else shape[0] for name, shape in shapes.items()}
        rows = {name: (count, -(-count // ranks)) for name, count in counts.items()}
        found = {name: [min(1, each * (r + 1) / n) for r in range(ranks)] for name, (n, each) in rows.items()}
        return found | _dealt_out(shapes, layout)
    names, found = list(shapes)[::-1], {}
    sizes = [prod(shapes[name]) for name in names]
    width = WIDTHS[job.train.precision]
    granularity = entry_of(job.optimizer.name).granularity
    for group in in_buckets([size * width for size in sizes], layout.bucket_mb * 2**20):
        named = [(names[place], shapes[names[place]]) for place in group]
        starts, each = granular_cut(granularity, [sizes[place] for place in group], named, ranks)
        for place, start in zip(group, starts, strict=True):
            ends = [(each * (r + 1) - start) / sizes[place] for r in range(ranks)]
            found[names[place]] = [min(1, max(0, end)) for end in ends]
    return found | _dealt_out(shapes, layout)


def _dealt_out(names: Iterable[str], layout: Layout) -> dict[str, list[float]]:
    ends = [(rank + 1) / layout.ep for rank in range(layout.ep)]
    return {name: ends for name in names if layout.ep > 1 and is_expert(name)}


def _share(
    held: TensorSlice, ends: Sequence[float], rank: int, box: tuple[float, float, float, float]
) -> Iterator[str]:
    """Yields a tensor rank's slice of a matrix, in shades for the ranks that keep its rows."""
    x, y, width, height = box
    if held.dim is not None and len(held.whole) == 3:  # experts, whose matrices may be cut on either side
        x, width = x + width * held.start / held.whole[held.dim], width * held.real / held.whole[held.dim]
    elif held.dim == 0:
        y, height = y + height * held.start / held.whole[0], height * held.real / held.whole[0]
    elif held.dim == 1:
        x, width = x + width * held.start / held.whole[1], width * held.real / held.whole[1]
    for shard, (start, end) in enumerate(pairwise([0, *ends])):
        opacity = 1 - 0.75 * shard / len(ends)
        if end > start:
            colour = COLOURS[rank % len(COLOURS)]
            yield _box(x, y + start * height, width, (end - start) * height, colour, opacity=opacity)


def _bars(title: str, rows: Sequence[tuple[str, StateBytes]], top: int) -> tuple[list[str], int]:
    """Returns bars of the bytes of state per rank, by name, and their lower end."""
    widest = max(state.total for _, state in rows)
    parts = [text(_MARGIN, top, title, "font-weight='600'")]
    for number, (name, state) in enumerate(rows):
        y = top + 16 + 30 * number
        parts.append(text(_MARGIN, y + 14, name))
        values = dataclasses.astuple(state)
        starts = [0, *accumulate(values)]
        for colour, value, start in zip(_PARTS.values(), values, starts[:-1], strict=True):
            parts.append(_box(150 + 560 * start / widest, y, 560 * value / widest, 20, colour))
        parts.append(text(160 + 560 * state.total / widest, y + 14, gib(state.total)))
    return parts, top + 34 + 30 * len(rows)


def _legend(top: int) -> tuple[list[str], int]:
    """Returns the colours of the bars, and their lower end."""
    parts = []
    for number, (name, colour) in enumerate(_PARTS.items()):
        parts += [_box(150 + 130 * number, top - 10, 12, 12, colour), text(168 + 130 * number, top, name)]
    return parts, top + _MARGIN


def _stages(job: Job, vocab: int) -> Iterator[tuple[str, StateBytes]]:
    """Yields the state without dp_shard, and with each ZeRO stage."""
    layout = job.layout
    ranks = layout.shard_ranks
    alone = dataclasses.replace(layout, dp_shard=1, cp=1, cp_ulysses=1, ep=1)
    whole = "replicated" if layout.ep == 1 else "replicated, ep=1"
    stages = [(whole, dataclasses.replace(alone, dp_replicate=layout.dp_replicate * ranks))]
    if ranks > 1:
        stages += [(f"ZeRO-{zero}, N={ranks}", dataclasses.replace(layout, zero=zero)) for zero in (1, 2, 3)]
    for name, stage in stages:
        yield name + _mark(stage == layout), _state(job, vocab, stage, job.optimizer)


def _optimizers(job: Job, vocab: int) -> Iterator[tuple[str, StateBytes]]:
    """Yields the state with each optimizer, in the job's layout."""
    for name in OPTIMIZERS:
        own = job.optimizer if name == job.optimizer.name else Optimizer(name=name)
        yield name + _mark(own is job.optimizer), _state(job, vocab, job.layout, own)


def _mark(chosen: bool) -> str:
    return " ◂" if chosen else ""


def _state(job: Job, vocab: int, layout: Layout, optimizer: Optimizer) -> StateBytes:
    held = even(job.model.n_layers, layout.pp)[:1] if layout.pp > 1 else None
    return state_bytes(job.model, layout, job.train.precision, job.train.gradients, vocab, held, optimizer)


def _box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1, stroke: bool = False) -> str:
    line = f" stroke='{NEUTRAL}'" if stroke else ""
    shade = f" fill-opacity='{opacity:.2f}'" if opacity < 1 else ""
    return box(x, y, width, height, f"fill='{fill}'{shade}{line}")
