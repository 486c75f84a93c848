"""Embedding and head in tiles: rows of the vocabulary, which ZeRO-3 gathers one tile after the other.

Each tile of the embedding looks up the tokens among its rows, and the results are added; all but one are zero, so the
sum is exact. A tile of the head computes its logits, reduces them to two numbers per token (the logarithm of the sum of
their exponentials, and the target's logit) and drops them; the backward pass computes them again. Merging those numbers
gives the loss (`vocabulary.merged_loss`). So neither a whole matrix nor the logits of the whole vocabulary exist at any
time; with `loss_chunk` those of one tile exist for that many tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.config.model import ModelConfig
from phalanx.model.layers import Multiply, soft_cap
from phalanx.model.transformer import Head
from phalanx.parallel.linear import gradient_of_input, gradient_of_weight
from phalanx.parallel.modules import Tile
from phalanx.parallel.tensor import ParallelEmbedding, ReduceOutput
from phalanx.parallel.vocabulary import CrossEntropy, merged_loss
from phalanx.partition.tensor_slices import TensorSlice


class EmbeddingTile(Tile):
    """Some rows of an embedding."""

    def __init__(self, part: TensorSlice, dtype: torch.dtype):
        super().__init__()
        self.first = part.start
        self.weight = nn.Parameter(torch.empty(part.shape, dtype=dtype, device="meta"))

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Adds the rows of `tokens` (batch, seq) that are here, and zeros for the rest, to `others` (batch, seq,
        d_model), or a scalar."""
        local = tokens - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        return others + F.embedding(local.where(mine, 0), self.weight) * mine.unsqueeze(-1)


class TiledEmbedding(nn.Module):
    """An embedding, each row of which is in one of its tiles."""

    def __init__(self, whole: nn.Embedding, parts: Sequence[TensorSlice]):
        """`parts` are the rows of each tile."""
        super().__init__()
        self.tiles = nn.ModuleList([EmbeddingTile(part, whole.weight.dtype) for part in parts])
        self.requires_grad_(whole.weight.requires_grad)
        self.reduce = ReduceOutput(whole.parallel) if isinstance(whole, ParallelEmbedding) else None
        """Sums the tensor ranks' outputs."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (batch, seq) to (batch, seq, d_model), or to this tensor rank's part of it."""
        # A chain of tiles with a gradient at its start: FSDP2 sends a tile's gradient when that of its input is there,
        # and where no input has one, only at the end of the backward pass.
        x = torch.zeros((), dtype=next(self.parameters()).dtype, device=tokens.device, requires_grad=True)
        for tile in self.tiles:
            x = tile(tokens, x)
        return x if self.reduce is None else self.reduce(self, (tokens,), x)


@dataclass(frozen=True)
class HeadRows:
    """Some rows of a head's matrix, by which logits are reduced and computed again in the backward pass."""

    first: int
    real: int
    """Rows before padding."""
    chunk: int
    """Tokens that have logits at once; 0: all."""
    cap: float
    """The logits' soft cap; 0: none."""

    def reduce(self, x: Tensor, multiply: Multiply, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logarithm of the sum of exp(logit) over the rows here, and the target's logit, 0 if it is not
        here, for each token: (tokens,) both, in fp32 or wider; from the head's input `x` (tokens, d_model), product and
        matrix, and `targets` (tokens,)."""
        return _Reduced.apply(x, weight, targets, self, multiply)  # pyright: ignore[reportReturnType]

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields the parts of tensors (tokens, ...) whose logits exist at once."""
        return zip(*(tensor.split(self.chunk or len(tensor)) for tensor in tensors), strict=True)

    def logits(self, x: Tensor, multiply: Multiply, weight: Tensor) -> Tensor:
        """Returns the logits (tokens, rows) of `x` (tokens, d_model)."""
        logits = multiply(x, weight)
        return soft_cap(logits, self.cap) if self.cap else logits

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the logits in fp32 or wider, padding at -inf; perhaps in place."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores[:, self.real :] = float("-inf")
        return scores

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns whether each target is among the rows here, and its row or 0: (tokens, 1) both."""
        local = (targets - self.first).unsqueeze(-1)
        mine = (local >= 0) & (local < self.real)
        return mine, local.where(mine, 0)


class HeadTile(Head, Tile):
    """Some rows of a head."""

    def __init__(self, model: ModelConfig, part: TensorSlice, chunk: int):
        """`chunk` tokens have logits at once; 0: all."""
        super().__init__(model, part.size)
        self.rows = HeadRows(part.start, part.real, chunk, model.logit_softcap)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls `HeadRows.reduce`."""
        assert self.weight is not None, "a tied head has no tiles"
        return self.rows.reduce(x, self.multiply, self.weight, targets)


def recomputed_loss(
    x: Tensor, multiply: Multiply, weight: Tensor, targets: Tensor, loss: CrossEntropy, chunk: int
) -> Tensor:
    """Returns -log p(target) of every token (tokens,), with logits of `chunk` tokens at a time, as a head in one tile:
    for losses whose derivatives are known when all tokens have theirs. Arguments are those of `ChunkedLoss`."""
    first = loss.tp.rank * len(weight)
    rows = HeadRows(first, min(max(0, loss.vocab - first), len(weight)), chunk, loss.cap)
    sums, chosen = rows.reduce(x, multiply, weight, targets)
    return merged_loss(sums.unsqueeze(0), chosen.unsqueeze(0), targets, tp=loss.tp)


class TiledHead(nn.Module):
    """A head, each row of which is in one of its tiles, with the loss."""

    def __init__(self, whole: Head, model: ModelConfig, parts: Sequence[TensorSlice], chunk: int, tp: Axis):
        """`parts` are the rows of each tile; `chunk` tokens have logits at once, 0: all."""
        super().__init__()
        with torch.device("meta"):
            self.tiles = nn.ModuleList([HeadTile(model, part, chunk) for part in parts])
        weight = next(whole.parameters())
        self.to(weight.dtype).requires_grad_(weight.requires_grad)
        self.tp = tp

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns -log p(target) of every token, in nats, 0 where a position does not count: the shape of `targets`
        (batch, seq); from `x` (batch, seq, d_model)."""
        hidden, flat = x.flatten(0, -2), targets.flatten()
        sums, chosen = zip(*(tile(hidden, flat) for tile in self.tiles), strict=True)
        return merged_loss(torch.stack(sums), torch.stack(chosen), flat, tp=self.tp).view_as(targets)


class _Reduced(torch.autograd.Function):
    """Reduces the logits of some rows: the backward pass computes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: HeadRows, multiply: Multiply
    ) -> tuple[Tensor, Tensor]:
        found = []
        for hidden, target in rows.chunks(x, targets):
            scores = rows.scores(rows.logits(hidden, multiply, weight))
            mine, local = rows.place(target)
            chosen = scores.gather(-1, local).where(mine, 0).squeeze(-1)
            # Padding alone has no finite maximum.
            top = scores.amax(dim=-1).clamp_(min=torch.finfo(scores.dtype).min)
            found.append((scores.sub_(top.unsqueeze(-1)).exp_().sum(dim=-1).log_().add_(top), chosen))
        sums, chosen = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(x, weight, targets, sums)
        ctx.rows, ctx.multiply = rows, multiply
        return sums, chosen

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, targets, sums = ctx.saved_tensors
        rows: HeadRows = ctx.rows
        of_x, of_weight = list[Tensor](), None
        for hidden, target, total, of_sum, of_chosen in rows.chunks(x, targets, sums, *grad_outputs):
            logits = rows.logits(hidden, ctx.multiply, weight)
            slope = 1 - (logits / rows.cap).square() if rows.cap else None
            scores = rows.scores(logits).sub_(total.clamp(min=torch.finfo(total.dtype).min).unsqueeze(-1)).exp_()
            del logits
            scores *= of_sum.unsqueeze(-1)
            mine, local = rows.place(target)
            scores.scatter_add_(-1, local, of_chosen.unsqueeze(-1).where(mine, 0))
            gradient = scores.to(x.dtype)
            del scores
            if slope is not None:
                gradient *= slope
            of_x.append(gradient_of_input(ctx.multiply, gradient, weight))
            if ctx.needs_input_grad[1]:
                of_chunk = gradient_of_weight(ctx.multiply, gradient, hidden)
                of_weight = of_chunk if of_weight is None else of_weight.add_(of_chunk)
        return of_x[0] if len(of_x) == 1 else torch.cat(of_x), of_weight, None, None, None
