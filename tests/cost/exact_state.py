"""The tests' oracle of a rank's state, counted tensor by tensor: bytes of parameters, gradients and optimizer state.

With bf16 and AdamW 2 + 2 + 12 bytes per parameter, of which the ZeRO stages divide the last, the last two, or all three
by the ranks (Rajbhandari et al. 2020, section 5). The tests of the memory of real ranks
(docs/explanation/memory.md) compare it with them, and with cost/rank_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import NamedTuple

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import weight_of
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.optimizers.catalogue import depends_on_shape, granularity_of, outer_bytes, state_bytes_of
from phalanx.optimizers.entry import Granularity, Shape
from phalanx.partition.derived import (
    PARAMETER_BYTES,
    bucket_bytes,
    flushes,
    is_copied,
    near_ranks,
    sent_as,
    shards_parameters,
    stage_shapes,
    stashes,
    wire_bytes,
)
from phalanx.partition.matrices import BucketCut, ShardRanges, granular_cut
from phalanx.partition.tensor_slices import first_rank_tiles, in_buckets

ADAMW = Optimizer()


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
    optimizer: Optimizer = ADAMW,
) -> StateBytes:
    """Returns the bytes on the fullest rank: exactly those of its tensors, padding included, with DiLoCo's anchor and
    momentum; without those of a parameter server, and without what averaging needs for a moment. A pipeline without a
    flush has two versions of the weights besides the optimizer's own, and gradients that wait for their step while the
    next ones arrive.

    `precision` and `gradients` are `train`'s, `vocab` the tokenizer's vocabulary size if the model leaves it open.
    `stages` are those of a pipeline rank, as runs of layers (phalanx.partition.cut.stages_of); None: the whole model.
    `optimizer` decides what is kept for each parameter. Raises JobError if the vocabulary size is not known."""
    held = _held_parameters(model, layout, vocab, [range(model.n_layers)] if stages is None else stages)
    width = PARAMETER_BYTES[precision]
    widths = width, 4 if gradients == "fp32" else width
    if layout.ep == 1:
        return _sharded(held, layout, *widths, optimizer)
    # Experts that ep distributes are sharded over fewer ranks.
    dense = [each for each in held if not is_expert(each.name)]
    experts = [
        each._replace(shape=(each.shape[0] // layout.ep, *each.shape[1:])) for each in held if is_expert(each.name)
    ]
    # At least one: where nothing is sharded, every rank still has its part of the experts only.
    fewer = replace(layout, dp_shard=max(1, layout.shard_ranks // layout.ep), cp=1)
    return _sum(_sharded(dense, layout, *widths, optimizer), _sharded(experts, fewer, *widths, optimizer))


def second_copy_bytes(
    model: ModelConfig,
    layout: Layout,
    precision: str = "fp32",
    vocab: int | None = None,
    stages: Iterable[range] | None = None,
) -> int:
    """Returns the bytes of the second copy of the parameters on a rank during the passes of a step (`layout.hpz`),
    padding included: exactly those of its tensors; 0 without a copy. Arguments are those of `state_bytes`."""
    if not is_copied(layout):
        return 0
    copied, width = 0, PARAMETER_BYTES[precision]
    for each in _held_parameters(model, layout, vocab, [range(model.n_layers)] if stages is None else stages):
        apart = is_expert(each.name) and layout.ep > 1
        shape = (each.shape[0] // layout.ep, *each.shape[1:]) if apart else each.shape
        ranks = layout.shard_ranks // (layout.ep if apart else 1)
        shares = ranks // near_ranks(layout, experts=apart)
        copied += shares * wire_bytes(_largest_share(shape, ranks), sent_as(shape, layout.quantise_weights), width)
    return copied


def checkpoint_bytes(model: ModelConfig, precision: str, vocab: int, optimizer: Optimizer = ADAMW) -> int:
    """Returns the bytes of the tensors of one checkpoint of `phalanx train`, whatever the layout: every parameter and
    its optimizer state once. State that a `layout.sync` other than bsp adds is not counted."""
    whole = state_bytes(model, Layout(), precision, vocab=vocab, optimizer=optimizer)
    return whole.parameters + whole.optimizer


class HeldState(NamedTuple):
    """A parameter, or one tile of it, as a tensor rank holds it before data ranks shard it."""

    name: str
    """Its name in the plain model."""
    whole: Shape
    """The shape of the whole parameter."""
    shape: Shape
    """The shape of what the rank holds."""
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient and no optimizer state."""

    @property
    def size(self) -> int:
        return prod(self.shape)


def _sharded(
    held: Sequence[HeldState], layout: Layout, width: int, gradient_width: int, optimizer: Optimizer
) -> StateBytes:
    """Returns the state of these parameters, sharded in the same way, with these bytes per element of a parameter and
    of a gradient. Frozen ones are in buckets of their own."""
    if any(each.frozen for each in held):
        trained, frozen = ([each for each in held if each.frozen == which] for which in (False, True))
        alone = _alike(frozen, layout, width, gradient_width, optimizer)
        return _sum(_alike(trained, layout, width, gradient_width, optimizer), replace(alone, gradients=0, optimizer=0))
    return _alike(held, layout, width, gradient_width, optimizer)


def _sum(*parts: StateBytes) -> StateBytes:
    return StateBytes(*(sum(kind) for kind in zip(*map(astuple, parts), strict=True)))


def _alike(
    held: Sequence[HeldState], layout: Layout, width: int, gradient_width: int, optimizer: Optimizer
) -> StateBytes:
    """Returns the state of parameters that are all trained, if there are any."""
    if not held:
        return StateBytes(0, 0, 0)
    ranks, sizes = layout.shard_ranks, [each.size for each in held]
    whole = [state_bytes_of(optimizer, each.name, each.whole, each.size, width) for each in held]

    outer = outer_bytes(layout, width)

    def state(elements: Sequence[int]) -> int:
        inner = sum(size * part // all_of_it for size, part, all_of_it in zip(whole, elements, sizes, strict=True))
        return inner + outer * sum(elements)

    if shards_parameters(layout):
        shares = [_largest_share(each.shape, ranks) for each in held]
        return StateBytes(sum(shares) * width, sum(shares) * width, state(shares))
    versions, waiting = (1 + stashes(layout), 1) if flushes(layout) else (3, 2)
    sums = layout.summed_replicas > 1 and layout.data_parallel == "ddp"
    if ranks == 1 and not sums:
        return StateBytes(sum(sizes) * width * versions, sum(sizes) * width * waiting, state(sizes))
    cuts = list(_cuts(held, layout, width, granularity_of(optimizer)))
    padded = sum(cut.each for _, cut in cuts) * ranks
    kept = padded // ranks if layout.zero == 2 and ranks > 1 else padded
    # Where all parameters need the same, the first rank has the most.
    fullest = max(state(_owned(cuts, sizes, rank)) for rank in range(ranks if depends_on_shape(optimizer) else 1))
    return StateBytes(padded * width * versions, kept * gradient_width * waiting, fullest)


def _largest_share(shape: Shape, ranks: int) -> int:
    """Returns the elements of a parameter on the fullest of `ranks` ranks: FSDP2 shards by rows, those of all experts'
    matrices together."""
    rows = prod(shape[:2]) if len(shape) == 3 else shape[0]
    return -(-rows // ranks) * (prod(shape) // rows)


def _cuts(
    held: Sequence[HeldState], layout: Layout, width: int, granularity: Granularity
) -> Iterator[tuple[list[int], BucketCut]]:
    """Yields the parameters of each flat bucket, as indices, and their places in it."""
    backwards = range(len(held))[::-1]
    for bucket in in_buckets([held[place].size * width for place in backwards], bucket_bytes(layout)):
        places = [backwards[number] for number in bucket]
        named = [(held[place].name, held[place].shape) for place in places]
        yield places, granular_cut(granularity, [held[place].size for place in places], named, layout.shard_ranks)


def _owned(cuts: Iterable[tuple[list[int], BucketCut]], sizes: Sequence[int], rank: int) -> list[int]:
    """Returns the elements of each parameter that a rank owns."""
    owned = [0] * len(sizes)
    for places, (starts, each) in cuts:
        for place, start in zip(places, starts, strict=True):
            owned[place] = ShardRanges(sizes[place], each, -start).held(rank)
    return owned


def _held_parameters(model: ModelConfig, layout: Layout, vocab: int | None, stages: Iterable[range]) -> list[HeldState]:
    """Returns what the first tensor rank, which holds at least as much as any other, has of every parameter of these
    stages (of every tile of a tiled one)."""
    shapes = stage_shapes(model, stages, vocab)
    return [
        HeldState(name, part.whole, part.shape, weight_of(model, name).frozen)
        for name, _, part in first_rank_tiles(shapes, layout, model)
    ]
