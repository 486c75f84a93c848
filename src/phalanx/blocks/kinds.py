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
from phalanx.blocks.residual import norm, residual
from phalanx.config.model import ModelConfig

Part = Callable[[Place], Iterator[Operator]]
ATTENTION: Mapping[str, Part] = {"heads": attention, "latent": latent_attention}
"""Kinds of attention: multi-head, grouped and multi-query; multi-head latent."""
FEED_FORWARD: Mapping[str, Part] = {"dense": dense, "experts": experts}
"""Kinds of feed-forward layers."""


class BlockKind(NamedTuple):
    """The kind of a block: a name in ATTENTION and one in FEED_FORWARD, and the window of its attention."""

    attention: str
    feed_forward: str
    window: int = 0
    """Keys that a query sees at most; 0: all of the sequence."""


@lru_cache(maxsize=1024)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Returns the kind of every layer."""
    core = "latent" if model.mla.kv_rank else "heads"
    return tuple(
        BlockKind(core, "experts" if model.is_moe_layer(layer) else "dense", window if window < model.seq_len else 0)
        for layer, window in ((layer, model.window_of(layer)) for layer in range(model.n_layers))
    )


Half = Literal["attention", "feed_forward"]
HALVES: tuple[Half, ...] = ("attention", "feed_forward")
"""The halves of a block, each between a norm and a residual sum."""


def block(place: Place, kind: BlockKind) -> tuple[Operator, ...]:
    """Returns the operators of a block in the order of its forward pass."""
    return half_block(place, kind, "attention") + half_block(place, kind, "feed_forward")


def half_block(place: Place, kind: BlockKind, half: Half) -> tuple[Operator, ...]:
    """Returns the operators of one half of a block in the order of its forward pass."""
    if half == "attention":
        return _attention_half(place._replace(ep=1, window=kind.window), kind.attention)
    # Feed-forward layers do not depend on which context ranks form a ring.
    return _feed_forward_half(place._replace(ring=place.cp, ulysses=1, ring_rank=None), kind.feed_forward)


@lru_cache(maxsize=20_000)
def _attention_half(place: Place, attention: str) -> tuple[Operator, ...]:
    return norm(place, "attn_norm", first=True), *ATTENTION[attention](place), residual(place, "attn")


@lru_cache(maxsize=20_000)
def _feed_forward_half(place: Place, feed_forward: str) -> tuple[Operator, ...]:
    return norm(place, "mlp_norm"), *FEED_FORWARD[feed_forward](place), residual(place, "mlp")
