"""Cross-entropy with the vocabulary cut over the tensor ranks: no rank ever has all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.data import IGNORE


def cross_entropy_sum(logits: Tensor, targets: Tensor, *, tp: Axis, vocab: int) -> Tensor:
    """Returns the sum over valid tokens of -log p(target), in nats, the same scalar on every rank of `tp`.

    `logits` (..., padded vocabulary / tp) are this rank's; `targets` (...) with IGNORE where a position does not count.
    Rows beyond `vocab` are padding: their probability is zero. Two numbers per token are communicated (Shoeybi et al.
    2019, section 3)."""
    return cross_entropy(logits, targets, tp=tp, vocab=vocab).sum()


def cross_entropy(logits: Tensor, targets: Tensor, *, tp: Axis, vocab: int) -> Tensor:
    """Returns -log p(target) of every token, 0 where a position does not count: the shape of `targets`. Arguments are
    those of `cross_entropy_sum`."""
    losses = _Loss.apply(logits.flatten(0, -2), targets.flatten(), tp, vocab)
    return losses.view_as(targets)  # pyright: ignore[reportAttributeAccessIssue,reportOptionalMemberAccess]


def merged_loss(sums: Tensor, chosen: Tensor, targets: Tensor, *, tp: Axis) -> Tensor:
    """Returns -log p(target) of every token, 0 where a position does not count, from parts of the vocabulary (tiles of
    each rank of `tp`): `sums` (tiles, tokens) are the logarithms of their sums of exp(logit), `chosen` (tiles, tokens)
    the target's logit or 0, `targets` (tokens,). As many numbers are communicated as in `cross_entropy`."""
    return _Merged.apply(sums, chosen, targets, tp)  # pyright: ignore[reportReturnType]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, chosen: Tensor, targets: Tensor, tp: Axis) -> Tensor:
        top = sums.amax(dim=0)
        tp.all_reduce(top, dist.ReduceOp.MAX).wait()
        shares = (sums - top).exp_()
        totals = torch.stack((shares.sum(dim=0), chosen.sum(dim=0)))
        tp.all_reduce(totals).wait()
        shares /= totals[0]
        valid = targets != IGNORE
        ctx.save_for_backward(shares, valid)
        return (totals[0].log() + top - totals[1]).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        shares, valid = ctx.saved_tensors
        gradient = grad_outputs[0] * valid
        return shares * gradient, -gradient.expand_as(shares), None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Axis, vocab: int) -> Tensor:
        ctx.dtype = logits.dtype
        rows = logits.shape[1]
        first = tp.rank * rows
        # One copy, which becomes the probabilities.
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        scores[:, max(0, vocab - first) :] = float("-inf")
        top = scores.amax(dim=-1)
        tp.all_reduce(top, dist.ReduceOp.MAX).wait()
        scores -= top.unsqueeze(-1)
        mine = (targets >= first) & (targets < first + rows)
        local = (targets - first).where(mine, 0).unsqueeze(-1)
        chosen = scores.gather(-1, local).squeeze(-1).where(mine, 0)
        probabilities = scores.exp_()
        sums = torch.stack((probabilities.sum(dim=-1), chosen))
        tp.all_reduce(sums).wait()
        probabilities /= sums[0].unsqueeze(-1)
        valid = targets != IGNORE
        ctx.save_for_backward(probabilities, local, mine, valid)
        return (sums[0].log() - sums[1]).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        probabilities, local, mine, valid = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, local, -mine.to(probabilities.dtype).unsqueeze(-1))
        gradient *= (grad_outputs[0] * valid).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None
