"""Attention whose output is gated by a sigmoid of the layer's input, element by element, before the output matrix (Qiu
et al. 2025, "Gated Attention for Large Language Models", section 2.2; Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from phalanx import extend
from phalanx.blocks.attention import ROWS, attention
from phalanx.blocks.operator import MemoryBound, Operator, Place, SavedTensor
from phalanx.blocks.residual import linear_weights


def operators(place: Place) -> Iterator[Operator]:
    """Yields the operators of grouped-query attention, and the gate: a fourth matrix that reads the input, cut by heads
    as the one of the queries is, a sigmoid, and a product with what attention returns."""
    model, queries = place.model, place.model.n_heads * place.model.head_size
    yield from attention(place)
    here = place.tokens * queries // place.tp
    yield Operator(
        "gate",
        linear_weights("attn.wg", queries, model.d_model, model.bias or model.qkv_bias, ROWS),
        place.tokens,
        # The sigmoid reads and writes, the product reads two and writes one.
        memory_bound=(MemoryBound("gate", forward=5 * here, backward=8 * here, kernels=2),),
        # The sigmoid's output and the product. Attention's output, the other factor, is saved with "wo".
        saved=(SavedTensor("gate", 2 * queries * place.width, "width"),),
    )


@cache
def module():
    """Returns the class of the torch module. It is made in a function, so that predictions never import torch."""
    from phalanx.model.attention import Attention
    from phalanx.model.layers import Linear

    class GatedAttention(Attention):
        def __init__(self, model, layer):
            super().__init__(model, layer)
            queries = model.n_heads * model.head_size
            self.wg = Linear(model.d_model, queries, bias=model.bias or model.qkv_bias)

        def forward(self, x, rotary, noise, cache, documents=None):
            *qkv, gate = self.project((self.wq, self.wk, self.wv, self.wg), x)
            return self.wo(self.attend(qkv, rotary, noise, cache, documents) * gate.sigmoid())

    return GatedAttention


def make(model, layer):
    """Makes the module of one layer."""
    return module()(model, layer)


def register() -> None:
    """The package's entry point."""
    extend.attention(
        "gated",
        extend.AttentionKind(
            title="grouped-query attention with a gated output",
            source="Qiu et al. 2025, section 2.2",
            operators=operators,
            module="gated:make",
            connection=extend.Connection(reads=("wq", "wk", "wv", "wg"), writes=("wo",)),
            cores=("core",),
        ),
    )
