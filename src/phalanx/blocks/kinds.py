"""The kinds of blocks of a model: a model is a sequence of kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

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
    """What tells one block from another: names in ATTENTION and FEED_FORWARD."""

    attention: str
    feed_forward: str


@lru_cache(maxsize=1024)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Returns the kind of every layer."""
    core = "latent" if model.mla.kv_rank else "heads"
    return tuple(
        BlockKind(core, "experts" if model.is_moe_layer(layer) else "dense") for layer in range(model.n_layers)
    )


@lru_cache(maxsize=20_000)
def block(place: Place, kind: BlockKind) -> tuple[Operator, ...]:
    """Returns the operators of a block in the order of its forward pass."""
    return (
        norm(place, "attn_norm"),
        *ATTENTION[kind.attention](place),
        residual(place, "attn"),
        norm(place, "mlp_norm"),
        *FEED_FORWARD[kind.feed_forward](place),
        residual(place, "mlp"),
    )
