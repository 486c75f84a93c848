"""The loss as a sum, without the division by the token count: only the trainer knows the global count of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.data import IGNORE


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum over valid tokens of -log p(target), in nats: a scalar of at least float32.

    `logits` (batch, seq, vocab), `targets` (batch, seq) with IGNORE where a position does not count."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns -log p(target) of every token, in nats, 0 where a position does not count: the shape of `targets`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets)


def valid_tokens(targets: Tensor) -> Tensor:
    """Returns the number of valid `targets` as an integer scalar tensor (on the device: no synchronisation)."""
    return (targets != IGNORE).sum()
