"""Cross-entropy over a vocabulary that is whole or cut over the tensor ranks, from logits or without any in memory.

A rank's logits become, in their own memory, the slopes of the loss: the backward pass of the loss only scales them. In
chunks of tokens the slopes of one chunk exist at a time: the forward pass multiplies them by the head's matrix and by
the hidden states at once, so that their gradients wait for the backward pass instead of logits, which nothing computes
again (Hsu et al. 2024, section 3.2, "FusedLinearCrossEntropy").

With label smoothing ε the loss is -(1 - ε) log p(target) - ε/V Σ log p (Szegedy et al. 2016, section 7): the score of
the target becomes (1 - ε) × its own + ε × the mean of all, so that tensor ranks and tiles send as many numbers as
without. Validation, which computes no gradients, is without it.

In tiles (rows of the vocabulary, which ZeRO-3 gathers one after the other) the embedding adds the results of its tiles,
all but one of them zero. A tile of the head reduces its logits to two numbers per token (the logarithm of the sum of
their exponentials, and the target's logit) and drops them; the backward pass computes them again, and `merged_loss`
gives the loss. So neither a whole matrix nor the logits of the whole vocabulary exist at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE
from phalanx.config.model import ModelConfig
from phalanx.model.layers import Multiply, soft_cap, uncompiled
from phalanx.model.transformer import Head
from phalanx.parallel.linear import Tile, gradient_of_input, gradient_of_weight
from phalanx.parallel.tensor import ParallelEmbedding, look_up
from phalanx.partition.tensor_slices import TensorSlice


def losses_and_slopes(
    logits: Tensor, targets: Tensor, tp: Axis, vocab: int, cap: float, sloped: bool, smoothing: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Returns -log p(target) of every token, in nats and in at least fp32, 0 where a position does not count, the same
    on every rank of `tp`, with label `smoothing`; and, if `sloped`, its derivatives by the logits.

    `logits` (tokens, padded vocabulary / tp) are this rank's, without the soft cap `cap`; the derivatives are written
    in their place. `targets` (tokens,) with IGNORE where a position does not count. Rows beyond `vocab` are padding:
    their probability is zero. Three numbers per token are communicated (Shoeybi et al. 2019, section 3)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.shape[1]
    first = tp.rank * rows
    # What widens in the kernel that computes needs no cast before it: a factor of some shape, the largest score.
    scores = logits.div_(cap).tanh_() * logits.new_full((1, 1), cap, dtype=wide) if cap else logits
    if vocab < first + rows:
        scores[:, max(0, vocab - first) :] = float("-inf")
    top = scores.amax(dim=-1, keepdim=True).to(wide)
    if tp.size > 1:
        _reduce(top, tp, dist.ReduceOp.MAX)
    scores = scores.sub_(top) if scores.dtype == wide else scores - top
    mine = ((targets >= first) & (targets < first + rows)).unsqueeze(-1)
    local = (targets.unsqueeze(-1) - first).where(mine, 0)
    chosen = scores.gather(-1, local).where(mine, 0)
    if smoothing:
        total = scores[:, : max(0, vocab - first)].sum(dim=-1, keepdim=True)
        chosen = (1 - smoothing) * chosen + smoothing / vocab * total
    sums = torch.cat((scores.exp_().sum(dim=-1, keepdim=True), chosen), dim=-1)
    if tp.size > 1:
        _reduce(sums, tp, dist.ReduceOp.SUM)
    total, chosen = sums.split(1, dim=-1)
    valid = (targets != IGNORE).unsqueeze(-1)
    losses = (total.log() - chosen).where(valid, 0)
    if not sloped:
        return losses.squeeze(-1), None
    factor = valid / total
    if smoothing:
        scores.mul_(factor).scatter_add_(-1, local, (smoothing - 1) * (mine & valid).to(wide))
        scores[:, : max(0, vocab - first)].sub_(valid.to(wide) * (smoothing / vocab))
        if cap:
            logits.square_().neg_().add_(1).mul_(scores)
        elif logits.dtype != wide:  # otherwise the scores are the logits' memory
            logits.copy_(scores)
        return losses.squeeze(-1), logits
    # Close to 1, the target's probability has too few digits for 1 to be subtracted.
    of_target = torch.expm1(-losses).where(mine, scores.gather(-1, local) * factor)
    if cap:
        scores.mul_(factor).scatter_(-1, local, of_target)
        logits.square_().neg_().add_(1).mul_(scores)
    else:
        torch.mul(scores, factor, out=logits)
        logits.scatter_(-1, local, of_target.to(logits.dtype))
    return losses.squeeze(-1), logits


@uncompiled
def _reduce(x: Tensor, tp: Axis, operation: dist.ReduceOp.RedOpType) -> None:
    tp.all_reduce(x, operation).wait()


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of tokens from hidden states or from logits, of whose columns each rank of `tp` has a part."""

    tp: Axis
    vocab: int
    """Tokens in the vocabulary: columns beyond are padding."""
    cap: float = 0.0
    """The logits' soft cap, which this loss applies; 0: none."""
    smoothing: float = 0.0
    """Label smoothing of losses that have gradients."""
    compute: Callable[..., tuple[Tensor, Tensor | None]] = losses_and_slopes
    """`losses_and_slopes`, perhaps compiled."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns -log p(target) of every token, 0 where a position does not count: the shape of `targets`. The logits
        (..., columns) are overwritten."""
        losses = _Loss.apply(logits.flatten(0, -2), targets.flatten(), self, torch.is_grad_enabled())
        return losses.view_as(targets)

    def parts(self, logits: Tensor, targets: Tensor, *, sloped: bool) -> tuple[Tensor, Tensor | None]:
        """Calls `compute`."""
        return self.compute(logits, targets, self.tp, self.vocab, self.cap, sloped, self.smoothing if sloped else 0.0)


@dataclass(frozen=True)
class ScoreLoss:
    """The scores of a reward model, whose head has one row, on the first rank of `tp`, and padding on the others."""

    tp: Axis

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns minus the score of every token that has a target, 0 elsewhere, in at least fp32: the shape of
        `targets`, the same on every rank of `tp`, each of which has the gradient of its own rows."""
        mine = (targets != IGNORE) & (self.tp.rank == 0)
        scores = logits[..., 0].to(torch.promote_types(logits.dtype, torch.float32)).where(mine, 0)
        if self.tp.size == 1:
            return -scores
        whole = scores.detach().clone()
        _reduce(whole, self.tp, dist.ReduceOp.SUM)
        return -(scores + (whole - scores.detach()))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: CrossEntropy, graded: bool) -> Tensor:
        losses, slopes = loss.parts(logits.detach(), targets, sloped=graded)
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(grad_outputs[0].unsqueeze(-1)), None, None, None


@dataclass
class ChunkedLoss:
    """The loss of tokens from the head's input, with logits of `chunk` tokens at a time."""

    loss: CrossEntropy
    chunk: int
    pending: ReferenceType[_HeadGradient] | None = field(default=None, repr=False)

    def __call__(self, x: Tensor, multiply: Multiply, weight: Tensor, targets: Tensor, *, shared: bool) -> Tensor:
        """Returns the sum of -log p(target) over valid tokens, or, where the matrix has no gradient, every token's loss
        (tokens,); from the head's input `x` (tokens, d_model), product and matrix (rows, d_model), and `targets`
        (tokens,).

        `shared`: micro-batches whose backward pass is still to come have one gradient of the matrix, which the last of
        these backward passes returns. All must have the same factor."""
        graded = torch.is_grad_enabled()
        gradient = None
        if graded and weight.requires_grad:
            gradient = self.pending() if shared and self.pending is not None else None
            gradient = gradient or _HeadGradient()
            gradient.waiting += 1
            self.pending = ref(gradient) if shared else None
        return _Chunked.apply(x, weight, targets, self, multiply, gradient, graded)


ROWS = 1024
"""Rows of a head's gradient that are computed at a time where the product does not add them itself."""


class _HeadGradient:
    """The gradient of a head's matrix by the losses of micro-batches whose backward pass is still to come."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.waiting = 0
        """The number of these micro-batches."""

    def add(self, multiply: Multiply, slopes: Tensor, x: Tensor) -> None:
        """Adds that of a chunk of tokens, from the `slopes` (tokens, rows) and the head's input (tokens, d_model)."""
        if self.value is None:
            self.value = gradient_of_weight(multiply, slopes, x)
        elif multiply is F.linear:
            self.value.addmm_(slopes.t(), x)
        else:  # a product that cannot add: of a few rows at a time, whose results need little room
            for rows, part in zip(self.value.split(ROWS), slopes.split(ROWS, dim=1), strict=True):
                rows.add_(gradient_of_weight(multiply, part, x))

    def take(self) -> Tensor | None:
        """Returns the gradient in the last of the backward passes, None in the others."""
        self.waiting -= 1
        if self.waiting:
            return None
        value, self.value = self.value, None
        return value


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        how: ChunkedLoss,
        multiply: Multiply,
        of_weight: _HeadGradient | None,
        graded: bool,
    ) -> Tensor:
        of_x = torch.empty_like(x) if graded else None
        found = list[Tensor]()
        for place in range(0, len(x), how.chunk):
            chunk = slice(place, place + how.chunk)
            losses, slopes = how.loss.parts(multiply(x[chunk], weight), targets[chunk], sloped=graded)
            found.append(losses)
            if slopes is None or of_x is None:
                continue
            of_x[chunk] = gradient_of_input(multiply, slopes, weight)
            if of_weight is not None:
                of_weight.add(multiply, slopes, x[chunk])
            del slopes  # before the next chunk has logits
        ctx.of_x, ctx.of_weight = of_x, of_weight
        losses = torch.cat(found)
        return losses if of_weight is None else losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        factor = grad_outputs[0].view(-1, 1)  # with dimensions, so that bf16 is multiplied by all its digits
        of_x, ctx.of_x = ctx.of_x, None
        of_weight = None if ctx.of_weight is None else ctx.of_weight.take()
        if of_weight is not None:
            of_weight.mul_(factor)
        return of_x.mul_(factor), of_weight, None, None, None, None, None


def merged_loss(sums: Tensor, chosen: Tensor, targets: Tensor, *, tp: Axis) -> Tensor:
    """Returns -log p(target) of every token, 0 where a position does not count, from parts of the vocabulary (tiles of
    each rank of `tp`): `sums` (tiles, tokens) are the logarithms of their sums of exp(logit), `chosen` (tiles, tokens)
    the target's logit or 0, `targets` (tokens,). `losses_and_slopes` communicates as many numbers."""
    return _Merged.apply(sums, chosen, targets, tp)


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


class EmbeddingTile(Tile):
    """Some rows of an embedding."""

    def __init__(self, part: TensorSlice, dtype: torch.dtype):
        super().__init__()
        self.first = part.start
        self.weight = nn.Parameter(torch.empty(part.shape, dtype=dtype, device="meta"))

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        """Adds the rows of `tokens` (batch, seq) that are here, and zeros for the rest, to `others` (batch, seq,
        d_model), or a scalar."""
        return others + look_up(tokens, self.weight, self.first)


class TiledEmbedding(nn.Module):
    """An embedding, each row of which is in one of its tiles."""

    def __init__(self, whole: nn.Embedding, parts: Sequence[TensorSlice]):
        """`parts` are the rows of each tile."""
        super().__init__()
        self.tiles = nn.ModuleList([EmbeddingTile(part, whole.weight.dtype) for part in parts])
        self.requires_grad_(whole.weight.requires_grad)
        self.reduce = whole.parallel.reduced if isinstance(whole, ParallelEmbedding) else None
        """Sums the tensor ranks' outputs."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (batch, seq) to (batch, seq, d_model), or to this tensor rank's part of it."""
        # A chain of tiles with a gradient at its start: FSDP2 sends a tile's gradient when that of its input is there,
        # and where no input has one, only at the end of the backward pass.
        x = torch.zeros((), dtype=next(self.parameters()).dtype, device=tokens.device, requires_grad=True)
        for tile in self.tiles:
            x = tile(tokens, x)
        return x if self.reduce is None else self.reduce(x)


@dataclass(frozen=True)
class HeadRows:
    """Some rows of a head's matrix, by which logits are reduced and computed again in the backward pass."""

    first: int
    real: int
    """Rows before padding."""
    chunk: int
    """Tokens that have logits at once; 0: all."""
    loss: CrossEntropy
    """The loss over all rows."""

    def reduce(self, x: Tensor, multiply: Multiply, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logarithm of the sum of exp(logit) over the rows here, and the target's logit, 0 if it is not
        here, or the smoothed target's, for each token: (tokens,) both, in fp32 or wider; from the head's input `x`
        (tokens, d_model), product and matrix, and `targets` (tokens,)."""
        smoothing = self.loss.smoothing if torch.is_grad_enabled() else 0.0
        return _Reduced.apply(x, weight, targets, self, multiply, smoothing)

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields the parts of tensors (tokens, ...) whose logits exist at once."""
        return zip(*(tensor.split(self.chunk or len(tensor)) for tensor in tensors), strict=True)

    def logits(self, x: Tensor, multiply: Multiply, weight: Tensor) -> Tensor:
        """Returns the logits (tokens, rows) of `x` (tokens, d_model)."""
        logits = multiply(x, weight)
        return soft_cap(logits, self.loss.cap) if self.loss.cap else logits

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

    def __init__(self, model: ModelConfig, part: TensorSlice, chunk: int, loss: CrossEntropy):
        """`chunk` tokens have logits at once; 0: all."""
        super().__init__(model, part.size)
        self.rows = HeadRows(part.start, part.real, chunk, loss)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override-param-name]
        """Calls `HeadRows.reduce`."""
        assert self.weight is not None, "a tied head has no tiles"
        return self.rows.reduce(x, self.multiply, self.weight, targets)


def recomputed_loss(
    x: Tensor, multiply: Multiply, weight: Tensor, targets: Tensor, loss: CrossEntropy, chunk: int
) -> Tensor:
    """Returns -log p(target) of every token (tokens,), with logits of `chunk` tokens at a time, as a head in one tile:
    for losses whose derivatives are known when all tokens have theirs. Arguments are those of `ChunkedLoss`."""
    first = loss.tp.rank * len(weight)
    rows = HeadRows(first, min(max(0, loss.vocab - first), len(weight)), chunk, loss)
    sums, chosen = rows.reduce(x, multiply, weight, targets)
    return merged_loss(sums.unsqueeze(0), chosen.unsqueeze(0), targets, tp=loss.tp)


class TiledHead(nn.Module):
    """A head, each row of which is in one of its tiles, with the loss."""

    def __init__(self, whole: Head, model: ModelConfig, parts: Sequence[TensorSlice], chunk: int, loss: CrossEntropy):
        """`parts` are the rows of each tile; `chunk` tokens have logits at once, 0: all."""
        super().__init__()
        with torch.device("meta"):
            self.tiles = nn.ModuleList([HeadTile(model, part, chunk, loss) for part in parts])
        weight = next(whole.parameters())
        self.to(weight.dtype).requires_grad_(weight.requires_grad)
        self.tp = loss.tp

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
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: HeadRows, multiply: Multiply, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        found = []
        for hidden, target in rows.chunks(x, targets):
            scores = rows.scores(rows.logits(hidden, multiply, weight))
            mine, local = rows.place(target)
            chosen = scores.gather(-1, local).where(mine, 0).squeeze(-1)
            if smoothing:
                total = scores[:, : rows.real].sum(dim=-1)
                chosen = (1 - smoothing) * chosen + smoothing / rows.loss.vocab * total
            # Padding alone has no finite maximum.
            top = scores.amax(dim=-1).clamp_(min=torch.finfo(scores.dtype).min)
            found.append((scores.sub_(top.unsqueeze(-1)).exp_().sum(dim=-1).log_().add_(top), chosen))
        sums, chosen = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(x, weight, targets, sums)
        ctx.rows, ctx.multiply, ctx.smoothing = rows, multiply, smoothing
        return sums, chosen

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, targets, sums = ctx.saved_tensors
        rows: HeadRows = ctx.rows
        cap, smoothing = rows.loss.cap, ctx.smoothing
        of_x, of_weight = list[Tensor](), None
        for hidden, target, total, of_sum, of_chosen in rows.chunks(x, targets, sums, *grad_outputs):
            logits = rows.logits(hidden, ctx.multiply, weight)
            slope = 1 - (logits / cap).square() if cap else None
            scores = rows.scores(logits).sub_(total.clamp(min=torch.finfo(total.dtype).min).unsqueeze(-1)).exp_()
            del logits
            scores *= of_sum.unsqueeze(-1)
            mine, local = rows.place(target)
            if smoothing:
                scores[:, : rows.real].add_(of_chosen.unsqueeze(-1) * (smoothing / rows.loss.vocab))
            of_target = of_chosen.unsqueeze(-1).where(mine, 0)
            scores.scatter_add_(-1, local, of_target * (1 - smoothing) if smoothing else of_target)
            gradient = scores.to(x.dtype)
            del scores
            if slope is not None:
                gradient *= slope
            of_x.append(gradient_of_input(ctx.multiply, gradient, weight))
            if ctx.needs_input_grad[1]:
                of_chunk = gradient_of_weight(ctx.multiply, gradient, hidden)
                of_weight = of_chunk if of_weight is None else of_weight.add_(of_chunk)
        return of_x[0] if len(of_x) == 1 else torch.cat(of_x), of_weight, None, None, None, None
