"""The model with its loss: tokens and targets in, the sum of the loss over valid tokens out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.model.loss import cross_entropy_sum, valid_tokens
from phalanx.model.transformer import Transformer
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.preferences import PairLoss
from phalanx.parallel.slices import Earlier
from phalanx.parallel.stages import Stage

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits (..., vocabulary) and targets (...) to the loss in nats: summed over valid targets, a scalar; or, for
pairs, of every target, (...)."""


class Objective(nn.Module):
    """The module that data parallelism wraps: logits stay inside, one scalar comes out."""

    def __init__(self, model: Transformer, loss: Loss = cross_entropy_sum, pairs: PairLoss | None = None):
        """With `pairs`, `loss` is that of every target."""
        super().__init__()
        self.model, self.loss, self.pairs = model, loss, pairs

    def forward(
        self, micro: MicroTensors, stage: Stage | None = None, x: Tensor | None = None, earlier: Earlier | None = None
    ) -> Tensor:
        """Returns the loss summed over valid targets, in nats; or over preference pairs.

        In a pipeline only `stage` is computed: from `x`, the previous stage's output, to the next one's input,
        (micro_batch, seq, d_model) both, or to the loss. `earlier` are the slices before these: then the
        loss of pairs, which needs whole sequences, is left to the caller: what it sums over slices is returned."""
        model = self.model
        positions = micro.positions
        if x is None:
            x = model.embed_tokens(micro.tokens, positions, micro.noise)
        layers = model.blocks if stage is None else stage.layers
        x = model.through(layers, x, positions, micro.noise, earlier, micro.documents, micro.conversations)
        if stage is not None and not stage.last:
            return x
        loss = self.of_hidden(model.normed(x), micro.targets)
        if self.pairs is None:
            return loss
        losses = loss.double().sum(dim=1)
        return losses if earlier is not None else self.pairs(losses, micro)

    def of_hidden(self, x: Tensor, targets: Tensor) -> Tensor:
        """Computes the loss from the head's input `x` (micro_batch, seq_len, d_model)."""
        return self.loss(self.model.logits(x), targets)

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns what the mean loss is divided by, of a micro-batch and in fp64: its valid tokens here, or its pairs'
        share."""
        return valid_tokens(micro.targets).double() if self.pairs is None else self.pairs.counted(micro)


class ChunkedObjective(Objective):
    """An objective that computes the logits of `chunk` tokens at a time, sums their losses, drops them, and recomputes
    them in the backward pass. 8k tokens of a 128k vocabulary take 4 GiB of logits in fp32; a chunk of 512, 1/16 of it.
    """

    def __init__(self, model: Transformer, chunk: int, loss: Loss = cross_entropy_sum, pairs: PairLoss | None = None):
        super().__init__(model, loss, pairs)
        self.chunk = chunk

    def of_hidden(self, x: Tensor, targets: Tensor) -> Tensor:
        parts = []
        for hidden, target in zip(x.flatten(0, 1).split(self.chunk), targets.flatten().split(self.chunk), strict=True):
            parts.append(checkpoint(super().of_hidden, hidden, target, use_reentrant=False, preserve_rng_state=False))
        return torch.stack(parts).sum() if self.pairs is None else torch.cat(parts).view_as(targets)


class TiledObjective(Objective):
    """An objective whose head runs in tiles and has the loss itself: no logits leave a tile."""

    def of_hidden(self, x: Tensor, targets: Tensor) -> Tensor:
        losses = self.model.head(x, targets)
        return losses.sum() if self.pairs is None else losses
