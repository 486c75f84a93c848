"""The model with its loss: tokens and targets in, the sum of the loss over valid tokens out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class ChunkedObjective(Objective):
    """The same, with the logits of `chunk` tokens at a time: they are computed, summed up and dropped, and computed
    again in the backward pass. 8k tokens of a 128k vocabulary take 4 GiB of logits in fp32; a chunk of 512, 1/16 of it.
    """

    def __init__(self, model: Transformer, chunk: int):
        super().__init__(model)
        self.chunk = chunk

    def forward(self, tokens: Tensor, targets: Tensor, noise: Noise | None = None) -> Tensor:
        hidden = self.model.hidden(tokens, noise=noise).flatten(0, 1).split(self.chunk)
        parts = []
        for x, target in zip(hidden, targets.flatten().split(self.chunk), strict=True):
            parts.append(checkpoint(self._loss, x, target, use_reentrant=False, preserve_rng_state=False))
        return torch.stack(parts).sum()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(self.model.logits(x), targets)
