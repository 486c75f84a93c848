"""Ulysses: ranks exchange their part of the tokens of all heads for all tokens of their part of the heads, and back
(Jacobs et al. 2023). In between, attention is that of one device with fewer heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.model.layers import uncompiled


@uncompiled
def to_heads(x: Tensor, ulysses: Axis, slices: int = 1) -> Tensor:
    """Maps (batch, heads, tokens, size) of all heads to (batch, heads / ranks, tokens × ranks, size), the ranks' tokens
    in rank order; those of a sequence in `slices` slice by slice. If there are fewer key heads than ranks, a head goes
    to several ranks."""
    if x.shape[1] < ulysses.size:
        x = x.repeat_interleave(ulysses.size // x.shape[1], dim=1)
    return _ExchangeHeads.apply(x, ulysses, slices, True)  # pyright: ignore[reportReturnType]


@uncompiled
def to_tokens(x: Tensor, ulysses: Axis) -> Tensor:
    """Maps (batch, heads / ranks, tokens × ranks, size) back to (batch, heads, tokens, size)."""
    return _ExchangeHeads.apply(x, ulysses, 1, False)  # pyright: ignore[reportReturnType]


class _ExchangeHeads(torch.autograd.Function):
    """An all-to-all whose gradient is the reverse one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ulysses: Axis, slices: int, heads: bool) -> Tensor:
        ctx.exchange = ulysses, slices, heads
        return (_gather_tokens if heads else _gather_heads)(x, ulysses, slices)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        ulysses, slices, heads = ctx.exchange
        return (_gather_heads if heads else _gather_tokens)(grad_outputs[0], ulysses, slices), None, None, None


# What travels is (ranks, batch, slices, tokens, heads, size): attention's kernels keep the heads of a token together,
# so that with one sequence a share of all tokens is sent from where it stands, and read where it arrives.


def _gather_tokens(x: Tensor, ulysses: Axis, slices: int) -> Tensor:
    parts = x.unflatten(1, (ulysses.size, -1)).unflatten(3, (slices, -1)).permute(1, 0, 3, 4, 2, 5)
    received = _exchanged(parts, ulysses)
    return received.permute(1, 2, 0, 3, 4, 5).flatten(1, 3).transpose(1, 2)


def _gather_heads(x: Tensor, ulysses: Axis, slices: int) -> Tensor:
    parts = x.unflatten(2, (slices, ulysses.size, -1)).permute(3, 0, 2, 4, 1, 5)
    received = _exchanged(parts, ulysses)
    return received.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2).transpose(1, 2)


def _exchanged(parts: Tensor, ulysses: Axis) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    ulysses.all_to_all(received, parts).wait()
    return received
