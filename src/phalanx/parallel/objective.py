"""The model with its loss: tokens and targets in, the sum of the loss over valid tokens out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.config.job import IGNORE
from phalanx.model.transformer import Transformer
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.preferences import PairLoss
from phalanx.parallel.slices import Earlier
from phalanx.parallel.stages import Stage
from phalanx.parallel.tiled_vocabulary import TiledHead, recomputed_loss
from phalanx.parallel.vocabulary import ChunkedLoss, CrossEntropy


class Objective(nn.Module):
    """The module that data parallelism wraps: logits stay inside, one scalar comes out."""

    def __init__(self, model: Transformer, loss: CrossEntropy, pairs: PairLoss | None = None, chunk: int = 0):
        """With `chunk`, that many tokens have logits at a time."""
        super().__init__()
        self.model, self.loss, self.pairs = model, loss, pairs
        self.chunked = ChunkedLoss(loss, chunk) if chunk else None

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
        loss = self.of_hidden(model.normed(x).flatten(0, 1), micro.targets.flatten(), shared=stage is not None)
        if self.pairs is None:
            return loss.sum()
        losses = loss.view_as(micro.targets).double().sum(dim=1)
        return losses if earlier is not None else self.pairs(losses, micro)

    def of_hidden(self, x: Tensor, targets: Tensor, *, shared: bool) -> Tensor:
        """Returns the losses of `targets` (tokens,), or their sum, from the head's input `x` (tokens, d_model).
        `shared`: other losses may be waiting for their backward pass."""
        head, embedding = self.model.head, self.model.embed.weight if self.model.config.tied else None
        if isinstance(head, TiledHead):
            return head(x, targets)
        if self.chunked is None:
            return self.loss(head(x, embedding), targets)
        weight = head.weight if embedding is None else embedding
        assert weight is not None, "a tied head needs the embedding's weight"
        if self.pairs is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return self.chunked(x, head.multiply, weight, targets, shared=shared)
        # The loss of a pair scales the gradients of all its tokens, and is known only at their end.
        return recomputed_loss(x, head.multiply, weight, targets, self.loss, self.chunked.chunk)

    def counted(self, micro: MicroTensors) -> Tensor:
        """Returns what the mean loss is divided by, of a micro-batch and in fp64: its valid tokens here, or its pairs'
        share."""
        return (micro.targets != IGNORE).sum().double() if self.pairs is None else self.pairs.counted(micro)
