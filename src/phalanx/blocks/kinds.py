"""The kinds of blocks of a model: a model is a sequence of kinds. Installed packages add kinds as the project adds its
own: one object each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from phalanx.blocks.attention import attention, latent_attention
from phalanx.blocks.experts import experts
from phalanx.blocks.feed_forward import dense
from phalanx.blocks.kind import AttentionKind, Connection, FeedForwardKind, SublayerKind
from phalanx.blocks.lora import adapted
from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Half, Place
from phalanx.blocks.probe import kind_problems
from phalanx.blocks.problems import expert_problems, latent_problems
from phalanx.blocks.residual import norm, residual, sum_of_halves
from phalanx.blocks.shrink import fewer_experts, smaller_latents
from phalanx.config.model import MLA, ModelConfig, window_within
from phalanx.registry import Registry


def _problems(name: str, kind: SublayerKind) -> Iterator[str]:
    return kind_problems(kind)


ATTENTION: Registry[AttentionKind] = Registry(
    "attention",
    {
        "heads": AttentionKind(
            title="multi-head, grouped-query or multi-query attention",
            source="Vaswani et al. 2017, section 3.2; Ainslie et al. 2023",
            operators=attention,
            module="phalanx.model.attention:Attention",
            connection=Connection(reads=("wq", "wk", "wv"), writes=("wo",)),
            cores=("core",),
        ),
        "latent": AttentionKind(
            title="multi-head latent attention",
            source="DeepSeek-V2, section 2.1",
            operators=latent_attention,
            module="phalanx.model.attention:LatentAttention",
            connection=Connection(writes=("wo",)),
            cores=("core",),
            needs=("mla.kv_rank",),
            problems=latent_problems,
            shrink=smaller_latents,
        ),
    },
    _problems,
)
"""Kinds of attention, by name."""
FEED_FORWARD: Registry[FeedForwardKind] = Registry(
    "feed_forward",
    {
        "dense": FeedForwardKind(
            title="one MLP for all tokens, with or without a gate",
            source="Vaswani et al. 2017, section 3.3; Shazeer 2020",
            operators=dense,
            module="phalanx.model.layers:dense",
            connection=Connection(reads=("up", "gate"), writes=("down",)),
            width=lambda model: model.ff_size,
        ),
        "experts": FeedForwardKind(
            title="a mixture of experts",
            source="Shazeer et al. 2017; DeepSeek-V3, section 2.1.2",
            operators=experts,
            module="phalanx.model.moe:MixtureOfExperts",
            connection=Connection(writes=("experts.down", "shared.down")),
            needs=("moe.n_experts",),
            problems=expert_problems,
            shrink=fewer_experts,
            name_in_block="moe",
            width=lambda model: model.expert_ff_size,
            width_name="an expert's width",
            routed=True,
        ),
    },
    _problems,
)
"""Kinds of feed-forward layers, by name."""

TABLES: Mapping[Half, Registry[AttentionKind] | Registry[FeedForwardKind]] = {
    "attention": ATTENTION,
    "feed_forward": FEED_FORWARD,
}
"""The kinds of each half of a block."""
HALVES: tuple[Half, ...] = ("attention", "feed_forward")
"""The halves of a block, each with its norms, and a sum onto the residual stream after each or, in a parallel block,
after the second."""


class BlockKind(NamedTuple):
    """The kind of a block: a name in ATTENTION and one in FEED_FORWARD, and the window of its attention."""

    attention: str
    feed_forward: str
    window: int = 0
    """Keys that a query sees at most; 0: all of the sequence."""

    @property
    def routed(self) -> bool:
        """Whether it has routed experts."""
        return FEED_FORWARD[self.feed_forward].routed


def chosen_kinds(model: ModelConfig, half: Half) -> tuple[str, ...]:
    """Returns the names of the kinds of one half of a model's blocks, which repeat over its layers."""
    if pattern := getattr(model, half):
        return tuple(pattern.split(","))
    if half == "attention":
        return ("latent",) if model.mla.kv_rank else ("heads",)
    return ("experts",) if model.moe.n_experts else ("dense",)


@lru_cache(maxsize=1024)
def model_for(model: ModelConfig, attention: str) -> ModelConfig:
    """Returns the model as layers of a kind of attention see it. The sizes of heads belong to the kind: those of latent
    attention count in layers alone whose kind needs them."""
    if not model.mla.kv_rank or "mla.kv_rank" in ATTENTION[attention].needs:
        return model
    return replace(model, mla=MLA())


def attention_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns what `model_for` returns for the model's kinds of attention, each once; those in no table are left
    out."""
    names = (name for name in chosen_kinds(model, "attention") if name in ATTENTION)
    return tuple(dict.fromkeys(model_for(model, name) for name in names))


def model_kinds(model: ModelConfig) -> tuple[SublayerKind, ...]:
    """Returns the kinds of a model's sub-layers, each once. Raises KeyError for one that is in no table."""
    return tuple(TABLES[half][name] for half in HALVES for name in dict.fromkeys(chosen_kinds(model, half)))


@lru_cache(maxsize=1024)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Returns the kind of every layer. Raises KeyError for a kind that is in no table."""
    core, wide = chosen_kinds(model, "attention"), chosen_kinds(model, "feed_forward")
    kinds = []
    for layer in range(model.n_layers):
        window = window_within(model.window_of(layer), model.seq_len)
        kind = BlockKind(core[layer % len(core)], wide[layer % len(wide)], window)
        is_dense = kind.routed and layer < model.moe.n_dense_layers
        kinds.append(kind._replace(feed_forward="dense") if is_dense else kind)
    return tuple(kinds)


def block(place: Place, kind: BlockKind) -> tuple[Operator, ...]:
    """Returns the operators of a block in the order of its forward pass."""
    return half_block(place, kind, "attention") + half_block(place, kind, "feed_forward")


def half_block(place: Place, kind: BlockKind, half: Half) -> tuple[Operator, ...]:
    """Returns the operators of one half of a block in the order of its forward pass."""
    together = place.model.parallel_block
    if half == "attention":
        exchange = "enter" if together else "both"
        return _attention_half(place._replace(ep=1, window=kind.window, exchange=exchange), kind.attention)
    exchange = "leave" if together else "both"
    # Feed-forward layers do not depend on which context ranks form a ring.
    place = place._replace(ring=place.cp, ulysses=1, ring_rank=None, exchange=exchange)
    return _feed_forward_half(place, kind.feed_forward)


@lru_cache(maxsize=20_000)
def _attention_half(place: Place, attention: str) -> tuple[Operator, ...]:
    operators = ATTENTION[attention].operators(place._replace(model=model_for(place.model, attention)))
    half = _between_norms(place, "attn", operators, first=True)
    return tuple(adapted(place, "attention", half))


@lru_cache(maxsize=20_000)
def _feed_forward_half(place: Place, feed_forward: str) -> tuple[Operator, ...]:
    half = _between_norms(place, "mlp", FEED_FORWARD[feed_forward].operators(place), first=False)
    return tuple(adapted(place, "feed_forward", half))


def _between_norms(place: Place, name: str, half: Iterator[Operator], *, first: bool) -> Iterator[Operator]:
    """Yields the operators of a half with its norms and, where it ends on the residual stream, the sum."""
    model = place.model
    if model.parallel_block:
        yield from map(_of_all_tokens, (norm(place, f"{name}_norm", first=first), *half))
        if not first:
            yield from sum_of_halves(place)
        return
    if model.norms_inputs:
        yield norm(place, f"{name}_norm", first=first)
    yield from half
    if model.norms_outputs:
        yield norm(place, f"{name}_post_norm", first=first and not model.norms_inputs)
    yield residual(place, name)


def _of_all_tokens(operator: Operator) -> Operator:
    """Returns an operator of a parallel block, whose tensor ranks compute with all tokens, each for its own heads and
    columns: of a weight that every rank holds, norms' among them, a rank has a part of the gradient."""
    partial = (one._replace(gradient="partial") if one.gradient == "tokens" else one for one in operator.weights)
    return replace(operator, weights=tuple(partial))
