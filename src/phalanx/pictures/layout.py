"""A picture of a layout: which rank holds which part of a block's matrices and which experts, and the bytes of state
per rank under each ZeRO stage and with each optimizer (`phalanx predict JOB --svg FILE --picture layout`).

It is drawn from the arithmetic that training uses (partition/tensor_slices.py), and that predicts memory
(cost/rank_memory.py).
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes, block_shapes, parameter_shapes, vocabulary
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.breakdown import subject
from phalanx.cost.job_spec import framework_of
from phalanx.cost.spec import StepSpec
from phalanx.cost.state_formulas import state_bytes
from phalanx.optimizers.catalogue import OPTIMIZERS, granularity_of
from phalanx.partition.derived import PARAMETER_BYTES, Batch, bucket_bytes, even
from phalanx.partition.matrices import granular_cut
from phalanx.partition.tensor_slices import TensorSlice, experts_at, in_buckets, slice_of
from phalanx.pictures.elements import BOLD, COLOURS, NEUTRAL, box, document, heading, text
from phalanx.units import gib

_PARTS = {"parameters": COLOURS[0], "gradients": COLOURS[4], "optimizer": COLOURS[2]}
_WIDTH, _MARGIN, _LARGEST = 900, 24, 150
_WIDEST_EXPERTS = 120
_STAGES, _BAR_WIDTH = 196, 560  # left edge of the bars, and the longest in pixels
_MOST_EP = 16
"""Expert ranks in the table: of more, the first and the last."""
_MOST_COPIES = 4
"""Slots for copies that a line of the table draws."""
_MOST_RUNS = 4
"""Runs of ranks that a line of the table names."""
State = tuple[float, float, float]
"""Bytes of parameters, gradients and optimizer state."""


def svg(job: Job, vocab_size: int) -> str:
    """Returns the picture of `job`'s layout, with a vocabulary of `vocab_size` tokens, as an SVG document."""
    model, layout = job.model, job.layout
    vocab = vocabulary(model, vocab_size)
    drawn, bottom = _matrices(_drawn(model, vocab), job, vocab)
    if layout.ep > 1:
        experts, bottom = _experts(job, bottom + 42)
        drawn += experts
    title = f"State per rank, {job.train.precision}, by "
    stages, bottom = _bars(f"{title}stage", list(_stages(job, vocab)), bottom + 44)
    optimizers, bottom = _bars(f"{title}optimizer, in this layout", list(_optimizers(job, vocab)), bottom + 10)
    legend, height = _legend(bottom)
    title = subject(job, layout.world)
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
    lines = textwrap.wrap(f"layout {layout.line().replace(',', ', ')}", 130, break_on_hyphens=False)
    matrices = "The embedding and the matrices of the first block, outputs downwards (long sides are cut short)."
    lines.append(matrices + (" Colours are tensor ranks." if layout.tp > 1 else ""))
    if job.model.moe.n_experts:
        dealt = f", distributed over {layout.ep} ep ranks, one shade each" if layout.ep > 1 else ""
        lines.append(f"In the matrices of experts each row is an expert{dealt}.")
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
            height, width = _LARGEST * 2 / 3, min(_WIDEST_EXPERTS, max(height, width))
        label = ".".join(name.removesuffix(".weight").split(".")[2 if name.startswith("blocks.") else 0 :])
        across = int(max(width, 6.8 * len(label)))
        if x + across > _WIDTH - _MARGIN:
            x, top = _MARGIN, lowest + 40
        parts.append(text(x, top - 6, label))
        for rank in range(layout.tp):
            held = slice_of(name, whole, model, layout.tp, rank, folds=layout.folds)
            if held.first:
                parts += _share(held, shards[name], rank, (x, top, width, height))
        parts.append(_box(x, top, width, height, "none", stroke=True))
        x += across + 16
        lowest = max(lowest, top + int(height))
    return parts, lowest


def _experts(job: Job, top: float) -> tuple[list[str], float]:
    """Returns the table of the ep ranks: their shade, their experts, and the ranks of the first pipeline stage that
    have them; and its lower end."""
    layout, count = job.layout, job.model.moe.n_experts
    replicas = f", with dp_replicate {layout.dp_replicate} times" if layout.dp_replicate > 1 else ""
    cut = "" if layout.ep <= _MOST_EP else f" The last of {layout.ep} ep ranks follows the first {_MOST_EP - 1}."
    ranks = f"{layout.shard_ranks} dp_shard × cp ranks"
    if layout.folds:
        ranks = f"{layout.shard_ranks * layout.tp} dp_shard × cp × tp ranks"
    words = (
        f"{count // layout.ep} of {count} on each. An expert is on {layout.edp} of the "
        f"{ranks}, the dense part on all{replicas}.{cut}"
    )
    parts = [text(_MARGIN, top, "Experts by rank", BOLD), text(_MARGIN, top + 18, words)]
    if copies := layout.redundant_experts:
        top += 18
        parts.append(text(_MARGIN, top + 18, _copies(job)))
    shown = list(range(layout.ep)) if layout.ep <= _MOST_EP else [*range(_MOST_EP - 1), layout.ep - 1]
    lines = -(-len(shown) // 2)
    for place, rank in enumerate(shown):
        x, y = _MARGIN + place // lines * (_WIDTH / 2 - _MARGIN), top + 40 + 18 * (place % lines)
        shade, tensor = divmod(rank, layout.tp) if layout.folds else (rank, 0)
        colour, opacity = COLOURS[tensor % len(COLOURS)], _opacity(shade, layout.ep_shard)
        parts.append(_box(x, y - 10, 12, 12, colour, opacity=opacity))
        several = copies if copies <= _MOST_COPIES else 1
        dashed = f"fill='none' stroke='{NEUTRAL}' stroke-dasharray='3 2'"
        parts += [box(x + 17 * (slot + 1) + 0.5, y - 9.5, 11, 11, dashed) for slot in range(several)]
        if several < copies:
            parts.append(text(x + 34, y, f"× {copies}"))
        x += 17 * several + 36 * (several < copies)
        held = experts_at(count, layout, rank)
        experts = str(held[0]) if len(held) == 1 else f"{held[0]}–{held[-1]}"
        parts.append(text(x + 18, y, f"ep {rank}: experts {experts} on {_holders(layout, rank)}"))
    return parts, top + 40 + 18 * lines


def _copies(job: Job) -> str:
    """Says what slots for redundant experts are, with the bytes that their copies have in a layer."""
    model, layout, copies = job.model, job.layout, job.layout.redundant_experts
    layer = next(layer for layer, kind in enumerate(block_kinds(model)) if kind.routed)
    numbers = sum(prod(shape) for name, shape in block_shapes(model, layer).items() if is_expert(name))
    size = copies * numbers / model.moe.n_experts / (1 if layout.folds else layout.tp)
    size *= PARAMETER_BYTES[job.train.precision]
    slots = (
        "a slot for a copy of another rank's expert" if copies == 1 else f"{copies} slots for copies of others' experts"
    )
    return f"Dashed: {slots}, chosen in each forward pass of a layer: {gib(size)} per layer, without optimizer state."


def _holders(layout: Layout, ep_rank: int) -> str:
    """Names the ranks of the first pipeline stage with the coordinate `ep_rank`: neighbours along tp, unless each is a
    rank of ep, of every ep × tp ranks the same ones."""
    around, several = layout.ep_shard * layout.tp, 1 if layout.folds else layout.tp
    first = [start + ep_rank * several for start in range(0, layout.world // layout.pp, around)]
    runs = [str(rank) if several == 1 else f"{rank}–{rank + several - 1}" for rank in first]
    alone = len(runs) == 1 and several == 1
    if len(runs) <= _MOST_RUNS:
        return f"rank{'' if alone else 's'} {', '.join(runs)}"
    return f"ranks {', '.join(runs[: _MOST_RUNS - 1])}, … {runs[-1]} ({len(runs) * several} in all)"


def _opacity(place: int, ranks: int) -> float:
    """Returns the shade of a rank among those that share a matrix."""
    return 1 - 0.75 * place / ranks


def _shards(job: Job, vocab: int) -> dict[str, list[float]]:
    """Returns, by parameter, the end of the share of each dp_shard (× cp) rank in a tensor rank's slice, as a fraction
    of its rows: rank r keeps the rows between the r-th number and the one before it. For experts, the end of each ep
    rank's."""
    layout, ranks = job.layout, job.layout.shard_ranks
    whole = parameter_shapes(job.model, vocab)
    shapes = {
        name: slice_of(name, shape, job.model, layout.tp, 0, folds=layout.folds).shape for name, shape in whole.items()
    }
    if layout.zero == 3 or ranks == 1:
        counts = {name: prod(shape[:2]) if len(shape) == 3 else shape[0] for name, shape in shapes.items()}
        rows = {name: (count, -(-count // ranks)) for name, count in counts.items()}
        found = {name: [min(1, each * (r + 1) / n) for r in range(ranks)] for name, (n, each) in rows.items()}
        return found | _dealt_out(shapes, layout)
    names, found = list(shapes)[::-1], {}
    sizes = [prod(shapes[name]) for name in names]
    width = PARAMETER_BYTES[job.train.precision]
    granularity = granularity_of(job.optimizer)
    for group in in_buckets([size * width for size in sizes], bucket_bytes(layout)):
        named = [(names[place], shapes[names[place]]) for place in group]
        starts, each = granular_cut(granularity, [sizes[place] for place in group], named, ranks)
        for place, start in zip(group, starts, strict=True):
            ends = [(each * (r + 1) - start) / sizes[place] for r in range(ranks)]
            found[names[place]] = [min(1, max(0, end)) for end in ends]
    return found | _dealt_out(shapes, layout)


def _dealt_out(names: Iterable[str], layout: Layout) -> dict[str, list[float]]:
    ends = [(rank + 1) / layout.ep_shard for rank in range(layout.ep_shard)]
    return {name: ends for name in names if layout.ep > 1 and is_expert(name)}


def _share(
    held: TensorSlice, ends: Sequence[float], rank: int, box: tuple[float, float, float, float]
) -> Iterator[str]:
    """Yields a tensor rank's slice of a matrix, in shades for the ranks that keep its rows."""
    x, y, width, height = box
    if held.dim and len(held.whole) == 3:  # experts, whose matrices may be cut on either side
        x, width = x + width * held.start / held.whole[held.dim], width * held.real / held.whole[held.dim]
    elif held.dim == 0:
        y, height = y + height * held.start / held.whole[0], height * held.real / held.whole[0]
    elif held.dim == 1:
        x, width = x + width * held.start / held.whole[1], width * held.real / held.whole[1]
    for shard, (start, end) in enumerate(pairwise([0, *ends])):
        opacity = _opacity(shard, len(ends))
        if end > start:
            colour = COLOURS[rank % len(COLOURS)]
            yield _box(x, y + start * height, width, (end - start) * height, colour, opacity=opacity)


def _bars(title: str, rows: Sequence[tuple[str, State]], top: float) -> tuple[list[str], float]:
    """Returns bars of the bytes of state per rank, by name, and their lower end."""
    widest = max(sum(state) for _, state in rows)
    parts = [text(_MARGIN, top, title, BOLD)]
    for number, (name, state) in enumerate(rows):
        y = top + 16 + 30 * number
        parts.append(text(_MARGIN, y + 14, name))
        starts = [0, *accumulate(state)]
        for colour, value, start in zip(_PARTS.values(), state, starts[:-1], strict=True):
            x, width = _STAGES + _BAR_WIDTH * start / widest, _BAR_WIDTH * value / widest
            parts.append(_box(x, y, width, 20, colour))
        parts.append(text(_STAGES + 10 + _BAR_WIDTH * sum(state) / widest, y + 14, gib(sum(state))))
    return parts, top + 34 + 30 * len(rows)


def _legend(top: float) -> tuple[list[str], float]:
    """Returns the colours of the bars, and their lower end."""
    parts = []
    for number, (name, colour) in enumerate(_PARTS.items()):
        x = _STAGES + 130 * number
        parts += [_box(x, top - 10, 12, 12, colour), text(x + 18, top, name)]
    return parts, top + _MARGIN


def _stages(job: Job, vocab: int) -> Iterator[tuple[str, State]]:
    """Yields the state of ranks that share none, and with each ZeRO stage; with ep every rank has its experts only."""
    layout = job.layout
    ranks, ep = layout.shard_ranks, layout.ep
    alone = dataclasses.replace(layout, dp_replicate=layout.dp_replicate * ranks, dp_shard=1, cp=1, cp_ulysses=1)
    stages = [("replicated" if ep == 1 else f"replicated, ep={ep}", alone)]
    if ranks > 1:
        shares = f"N={ranks}" if ep == 1 else f"N={ranks}, experts {layout.edp}"
        stages += [(f"ZeRO-{zero}, {shares}", dataclasses.replace(layout, zero=zero)) for zero in (1, 2, 3)]
    for name, stage in stages:
        yield name + _mark(stage == layout), _state(job, vocab, stage, job.optimizer)


def _optimizers(job: Job, vocab: int) -> Iterator[tuple[str, State]]:
    """Yields the state with each optimizer, in the job's layout."""
    chosen = job.optimizer
    for name in OPTIMIZERS:
        own = chosen if name == chosen.name and not chosen.is_narrow else Optimizer(name=name)
        yield name + _mark(own is chosen), _state(job, vocab, job.layout, own)
    half = PARAMETER_BYTES[job.train.precision] < 4
    narrow = [Optimizer(state="bf16"), Optimizer(state="8bit"), *([Optimizer(state="bf16", master="none")] * half)]
    for own in narrow:
        mark = _mark((chosen.name, chosen.state, chosen.master) == (own.name, own.state, own.master))
        words = f"{own.name} {own.state}{', no master' if own.master == 'none' else ''}"
        yield words + mark, _state(job, vocab, job.layout, own)


def _mark(chosen: bool) -> str:
    return " ◂" if chosen else ""


def _state(job: Job, vocab: int, layout: Layout, optimizer: Optimizer) -> State:
    spec = StepSpec(
        model=dataclasses.replace(job.model, vocab_size=vocab),
        cluster=job.cluster,
        layout=dataclasses.replace(layout, offload=Layout.offload),
        batch=Batch(1, 1, 1, 1),
        width=PARAMETER_BYTES[job.train.precision],
        framework=framework_of(job),
        optimizer=optimizer,
    )
    return state_bytes(spec, even(job.model.n_layers, layout.pp)[0])


def _box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1, stroke: bool = False) -> str:
    line = f" stroke='{NEUTRAL}'" if stroke else ""
    shade = f" fill-opacity='{opacity:.2f}'" if opacity < 1 else ""
    return box(x, y, width, height, f"fill='{fill}'{shade}{line}")
