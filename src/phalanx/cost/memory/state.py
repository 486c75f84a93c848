"""Bytes of a rank's state by formula: parameters, gradients and optimizer state.

With bf16 and Adam 2 + 2 + 12 bytes per parameter, of which the ZeRO stages divide the last, the last two, or all three
by the ranks (Rajbhandari et al. 2020, section 5). Activations are in activations.py. Tests compare both with the memory
of real ranks (docs/memory.md); rank_memory.py adds them up over a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from math import prod

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import Shapes
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.pipeline import flushes
from phalanx.partition.stages import stage_shapes
from phalanx.partition.tensor_slices import in_buckets, slice_of, tile

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element, by `train.precision`."""
STATE_WIDTHS = {"fp64": 16, "fp32": 8, "bf16": 12, "fp16": 12}
"""Bytes of AdamW's state per parameter: two moments, and for half precisions an fp32 copy (all three in fp32)."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes of the persistent state, and of the gradients when the optimizer begins."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    model: ModelConfig,
    layout: Layout,
    precision: str = "fp32",
    gradients: str = "same",
    vocab: int | None = None,
    stages: Iterable[range] | None = None,
) -> StateBytes:
    """Returns the bytes on the fullest rank: exactly those of its tensors, padding included. State that a `layout.sync`
    other than bsp adds is not counted. A pipeline without a flush has two versions of the weights besides the
    optimizer's own, and gradients that wait for their step while the next ones arrive.

    `precision` and `gradients` are `train`'s, `vocab` the tokenizer's vocabulary size if the model leaves it open.
    `stages` are those of a pipeline rank, as runs of layers (phalanx.partition.cut.stages_of); None: the whole model.
    Raises JobError if the vocabulary size is not known."""
    shapes = _held_shapes(model, layout, vocab, [range(model.n_layers)] if stages is None else stages)
    width, state_width = WIDTHS[precision], STATE_WIDTHS[precision]
    gradient_width = 4 if gradients == "fp32" else width
    if layout.ep == 1:
        return _sharded(shapes, layout, width, gradient_width, state_width)
    # Experts that ep distributes are sharded over fewer ranks.
    dense = {name: shape for name, shape in shapes.items() if not is_expert(name)}
    experts = {name: (shape[0] // layout.ep, *shape[1:]) for name, shape in shapes.items() if is_expert(name)}
    fewer = replace(layout, dp_shard=layout.shard_ranks // layout.ep, cp=1)
    parts = [
        _sharded(dense, layout, width, gradient_width, state_width),
        _sharded(experts, fewer, width, gradient_width, state_width),
    ]
    return StateBytes(*(sum(kind) for kind in zip(*map(astuple, parts), strict=True)))


def checkpoint_bytes(model: ModelConfig, precision: str, vocab: int) -> int:
    """Returns the bytes of the tensors of one checkpoint of `phalanx train`, whatever the layout: every parameter and
    its optimizer state once. State that a `layout.sync` other than bsp adds is not counted."""
    whole = state_bytes(model, Layout(), precision, vocab=vocab)
    return whole.parameters + whole.optimizer


def _sharded(shapes: Shapes, layout: Layout, width: int, gradient_width: int, state_width: int) -> StateBytes:
    """Returns the state of parameters of these shapes, sharded in the same way, with these bytes per element."""
    ranks = layout.shard_ranks
    if ranks > 1 and layout.zero == 3:
        # FSDP2 shards by rows, those of all experts' matrices together; the fullest rank counts.
        rows = [prod(shape[:2]) if len(shape) == 3 else shape[0] for shape in shapes.values()]
        share = sum(-(-n // ranks) * (prod(shape) // n) for n, shape in zip(rows, shapes.values(), strict=True))
        return StateBytes(share * width, share * width, share * state_width)
    sizes = [prod(shape) for shape in shapes.values()]
    versions, waiting = (1, 1) if flushes(layout) else (3, 2)
    sums = layout.dp_replicate > 1 and layout.independent_replicas == 1 and layout.data_parallel == "ddp"
    if ranks == 1 and not sums:
        return StateBytes(sum(sizes) * width * versions, sum(sizes) * width * waiting, sum(sizes) * state_width)
    # Flat buckets, each padded to a multiple of the ranks.
    buckets = in_buckets([size * width for size in sizes][::-1], layout.bucket_mb * 2**20)
    shares = [-(-sum(sizes[::-1][place] for place in bucket) // ranks) for bucket in buckets]
    share, padded = sum(shares), sum(shares) * ranks
    kept = share if layout.zero == 2 and ranks > 1 else padded
    return StateBytes(padded * width * versions, kept * gradient_width * waiting, share * state_width)


def _held_shapes(model: ModelConfig, layout: Layout, vocab: int | None, stages: Iterable[range]) -> Shapes:
    """Returns the shape on the first tensor rank, which holds at least as much as any other, of every parameter of
    these stages (of every tile of a tiled one)."""
    shapes: Shapes = {}
    for name, whole in stage_shapes(model, stages, vocab).items():
        if layout.tp > 1:
            shapes[name] = slice_of(name, whole, model, layout.tp, 0).shape
        else:
            tiles = tile(name, whole, layout.tiles, model)
            shapes |= {f"{name}.{number}": part.shape for number, part in enumerate(tiles)}
    return shapes
