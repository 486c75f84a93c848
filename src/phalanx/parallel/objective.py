"""The model with its loss: tokens and targets in, the sum of the loss over valid tokens out."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.model.loss import cross_entropy_sum
from phalanx.model.noise import Noise
from phalanx.model.transformer import Transformer


class Objective(nn.Module):
    """What DDP and its kin wrap: logits stay inside, one scalar comes out."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, noise: Noise | None = None) -> Tensor:
        """Loss summed over valid targets, in nats. tokens and targets: (micro_batch, seq_len)."""
        return cross_entropy_sum(self.model(tokens, noise=noise), targets)
