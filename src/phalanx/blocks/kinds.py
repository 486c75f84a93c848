"""The kinds of blocks of a model: a model is a sequence of kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from phalanx.blocks.attention import attention, latent_attention
from phalanx.blocks.experts import experts
from phalanx.blocks.feed_forward import dense
from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place
from phalanx.blocks.residual import halves_sum, norm, residual
from phalanx.config.model import ModelConfig

Part = Callable[[Place], Iterator[Operator]]
ATTENTION: Mapping[str, Part] = {"heads": attention, "latent": latent_attention}
"""Kinds of attention: multi-head, grouped and multi-query; multi-head latent."""
FEED_FORWARD: Mapping[str, Part] = {"dense": dense, "experts": experts}
"""Kinds of feed-forward layers."""


class BlockKind(NamedTuple):
    """The kind of a block: a name in ATTENTION and one in FEED_FORWARD."""

    attention: str
    feed_forward: str


@lru_cache(maxsize=1024)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Returns the kind of every layer."""
    core = "latent" if model.mla.kv_rank else "heads"
    return tuple(
        BlockKind(core, "experts" if model.is_moe_layer(layer) else "dense") for layer in range(model.n_layers)
    )


Half = Literal["attention", "feed_forward"]
HALVES: tuple[Half, ...] = ("attention", "feed_forward")
"""The halves of a block, each with its norms, and a sum onto the residual stream after each or, in a parallel block,
after the second."""


def block(place: Place, kind: BlockKind) -> tuple[Operator, ...]:
    """Returns the operators of a block in the order of its forward pass."""
    return half_block(place, kind, "attention") + half_block(place, kind, "feed_forward")


def half_block(place: Place, kind: BlockKind, half: Half) -> tuple[Operator, ...]:
    """Returns the operators of one half of a block in the order of its forward pass."""
    if half == "attention":
        return _attention_half(place._replace(ep=1), kind.attention)
    # Feed-forward layers do not depend on which context ranks form a ring.
    return _feed_forward_half(place._replace(ring=place.cp, ulysses=1), kind.feed_forward)


@lru_cache(maxsize=20_000)
def _attention_half(place: Place, attention: str) -> tuple[Operator, ...]:
    return tuple(_between_norms(place, "attn", ATTENTION[attention](place), first=True))


@lru_cache(maxsize=20_000)
def _feed_forward_half(place: Place, feed_forward: str) -> tuple[Operator, ...]:
    return tuple(_between_norms(place, "mlp", FEED_FORWARD[feed_forward](place), first=False))


def _between_norms(place: Place, name: str, half: Iterator[Operator], *, first: bool) -> Iterator[Operator]:
    """Yields the operators of a half with its norms and, where it ends on the residual stream, the sum."""
    model = place.model
    if model.norms_inputs:
        yield norm(place, f"{name}_norm", first=first)
    yield from half
    if model.norms_outputs:
        yield norm(place, f"{name}_post_norm", first=first and not model.norms_inputs)
    if not model.parallel_block:
        yield residual(place, name)
    elif not first:
        yield halves_sum(place)
        yield residual(place, "block")
