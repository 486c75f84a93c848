"""Tensor and sequence parallelism: every matrix is cut over the tp axis, activations stay plain local tensors.

A block needs communication where its input is read and where its output is written (Shoeybi et al. 2019, section 3). In
plain tensor parallelism every rank has the whole residual stream: nothing on the way in, an all-reduce on the way out,
and the other way round in the backward pass. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) a rank
has only its share of the tokens between the matrices: an all-gather on the way in and a reduce-scatter on the way out,
which are the same bytes.

A rank's share is a run of the micro-batch's tokens in the order (sample, position), kept in the shape
(batch, seq / tp, d_model): what works on single tokens (norms, residuals, dropout) does not mind, and gathering the
shares is one copy-free all-gather for any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis
from phalanx.model.attention import Attention
from phalanx.model.latent import LatentAttention
from phalanx.model.layers import MLP, Linear, Multiply
from phalanx.model.moe import MixtureOfExperts
from phalanx.model.noise import Noise, dropout
from phalanx.model.transformer import Transformer
from phalanx.parallel.linear import DeferredWeightGrads, gradient_of_input, gradient_of_weight
from phalanx.partition.tensor_slices import TensorSlice, piece


@dataclass(frozen=True)
class TensorParallel:
    """How the layers of one model are cut."""

    tp: Axis
    sequence: bool = False
    """Residual stream, norms and dropout on shares of the tokens."""
    regather: bool = False
    """With `sequence`: keep only the share of a gathered input, and gather it again in the backward pass."""
    later: DeferredWeightGrads | None = None
    """Takes the gradients of weights, where they do not go the way of autograd."""

    def share(self, x: Tensor) -> Tensor:
        """This rank's tokens of `x` (batch, seq, ...): (batch, seq / tp, ...)."""
        batch, seq = x.shape[:2]
        tokens = x.flatten(0, 1).chunk(self.tp.size)[self.tp.rank]
        return tokens.unflatten(0, (batch, seq // self.tp.size))

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """All ranks' tokens, (batch, seq, d_model) from shares (batch, seq / tp, d_model), and what to wait for."""
        batch, seq, width = x.shape
        whole = x.new_empty(batch, seq * self.tp.size, width)
        return whole, self.tp.all_gather(whole.view(-1), x.contiguous().view(-1))

    def sum_shares(self, x: Tensor) -> tuple[Tensor, Any]:
        """This rank's tokens of the sum of all ranks' `x` (batch, seq, d_model), and what to wait for."""
        batch, seq, width = x.shape
        share = x.new_empty(batch, seq // self.tp.size, width)
        return share, self.tp.reduce_scatter(share.view(-1), x.contiguous().view(-1))

    def constant(self, weight: Tensor) -> Tensor:
        """A weight as autograd is to see it: where `later` takes its gradient, without one."""
        return weight if self.later is None else weight.detach()

    def of_weight(self, multiply: Multiply, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """The gradient of a weight, or None where `later` has taken it."""
        if self.later is None:
            return gradient_of_weight(multiply, gradient, x)
        return self.later.take(weight, multiply, gradient, x)

    def leave(self, x: Tensor) -> tuple[Tensor, Any]:
        """What the residual stream here has of the sum of all ranks' `x` (perhaps in place), and what to wait for."""
        if self.sequence:
            return self.sum_shares(x)
        x = x.contiguous()
        return x, self.tp.all_reduce(x)


def cut_parameters(model: Transformer, tp: Axis) -> dict[str, tuple[TensorSlice, ...]]:
    """Replace every parameter of `model` (on the meta device) by one of the shape that this rank holds.

    Returns, by name, what each tensor rank holds."""
    pieces = {}
    for name, parameter in list(model.named_parameters()):
        pieces[name] = tuple(piece(name, tuple(parameter.shape), model.model, tp.size, rank) for rank in range(tp.size))
        owner, _, leaf = name.rpartition(".")
        cut = torch.empty(pieces[name][tp.rank].shape, dtype=parameter.dtype, device="meta")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(cut))
    return pieces


def connect(model: Transformer, how: TensorParallel, keeps: Collection[str] = ()) -> set[nn.Module]:
    """Have the layers of `model`, whose parameters are cut, communicate. The blocks in `keeps` gather nothing again.
    Returns the linear layers whose products are made here.

    Latent attention and experts do so around the whole of it, where their input is read and where their output is
    written: what lies between, routers as well, is computed by every rank."""
    apart = {module.shared for module in model.modules() if isinstance(module, MixtureOfExperts)}
    taken: set[nn.Module] = set()
    around, kept = how, replace(how, regather=False)
    for name, module in model.named_modules():
        how = kept if name.startswith("blocks.") and name.split(".")[1] in keeps else around
        if isinstance(module, Attention):
            module.qkv = partial(_columns, (module.wq, module.wk, module.wv), how)
            taken |= {module.wq, module.wk, module.wv}
        elif isinstance(module, LatentAttention):
            module.forward = partial(_entering, module.forward, how)
        elif isinstance(module, MixtureOfExperts):
            module.forward = partial(_around, module.forward, how)
            module.experts.down.bias_factor = float(how.tp.rank == 0)
            if module.shared is not None and module.shared.down.bias is not None:
                module.shared.down.forward = partial(_biased_once, module.shared.down, how)
        elif isinstance(module, MLP) and module not in apart:
            layers = [w for w in (module.up, module.gate) if w is not None]
            module.widen = partial(_columns, layers, how)
            module.down.forward = partial(_rows, module.down, how)
            taken |= {*layers, module.down}
        if isinstance(module, (Attention, LatentAttention)):
            module.wo.forward = partial(_rows, module.wo, how)
            taken.add(module.wo)
    model.embed.forward = partial(_embed, model.embed, around.tp)
    model.embed_tokens = partial(_embed_tokens, model, around)
    model.normed = partial(_normed, model, around)
    model.routing.share = 1 / around.tp.size
    return taken


def _columns(layers: Sequence[Linear], how: TensorParallel, x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of layers that read one input, each this rank's columns of it."""
    weights = [layer.weight for layer in layers]
    parameters = [p for layer in layers for p in (how.constant(layer.weight), layer.bias)]
    return _Columns.apply(x, how, layers[0].multiply, weights, *parameters)  # pyright: ignore[reportReturnType]


def _rows(layer: Linear, how: TensorParallel, input: Tensor) -> Tensor:
    """The output of a layer that every rank has some inputs of. The bias is added once, after the sum."""
    y = _Rows.apply(input, how, layer.multiply, [layer.weight], how.constant(layer.weight))
    return y if layer.bias is None else y + layer.bias


def _entering(forward: Callable[..., Tensor], how: TensorParallel, x: Tensor, *others: Any, **named: Any) -> Tensor:
    """A module that reads the residual stream and writes by itself."""
    return forward(_GatherTokens.apply(x, how), *others, **named)


def _around(forward: Callable[..., Tensor], how: TensorParallel, x: Tensor) -> Tensor:
    """A module that reads the residual stream, and of which each rank has a summand of what is written."""
    return _ReduceTokens.apply(forward(_GatherTokens.apply(x, how)), how)  # pyright: ignore[reportReturnType]


def _biased_once(layer: Linear, how: TensorParallel, input: Tensor) -> Tensor:
    """A summand of a linear layer's output: the first rank's has the bias in it."""
    assert layer.bias is not None, "asked before"
    return layer.multiply(input, layer.weight) + layer.bias * float(how.tp.rank == 0)


def _embed(embed: nn.Embedding, tp: Axis, input: Tensor) -> Tensor:
    """Rows of the embedding for the tokens that this rank holds, zero for the others."""
    local = input - tp.rank * embed.weight.shape[0]
    mine = (local >= 0) & (local < embed.weight.shape[0])
    return nn.functional.embedding(local.where(mine, 0), embed.weight) * mine.unsqueeze(-1)


def _embed_tokens(
    model: Transformer, how: TensorParallel, tokens: Tensor, positions: Tensor, noise: Noise | None
) -> Tensor:
    x = _ReduceTokens.apply(model.embed(tokens), how)
    if model.positions is not None:
        places = positions.expand(tokens.shape)
        x = x + model.positions(how.share(places) if how.sequence else places)
    return dropout(x, model.model.dropout, noise, "embed")


def _normed(model: Transformer, how: TensorParallel, x: Tensor) -> Tensor:
    return _GatherTokens.apply(model.final_norm(x), how)


class _Columns(torch.autograd.Function):
    """Linear layers on one input: (batch, seq, d_model), or shares of it, to (batch, seq, outputs / tp) each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        how: TensorParallel,
        multiply: Multiply,
        owners: Sequence[Tensor],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.how, ctx.multiply = how, multiply
        weights, biases = parameters[::2], parameters[1::2]
        whole = x
        if how.sequence:
            whole, work = how.gather(x)
            work.wait()
        ctx.save_for_backward(x if how.regather else whole, *weights)
        ctx.owners = owners
        ctx.biased = [bias is not None for bias in biases]
        return tuple(multiply(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        how: TensorParallel = ctx.how
        whole, *weights = ctx.saved_tensors
        gathering = None
        if how.sequence and how.regather:
            whole, gathering = how.gather(whole)
        gradient = gradient_of_input(ctx.multiply, grad_outputs[0], weights[0])
        for g, weight in zip(grad_outputs[1:], weights[1:], strict=True):
            gradient += gradient_of_input(ctx.multiply, g, weight)
        gradient, leaving = how.leave(gradient)  # it travels while the weights' gradients are computed
        if gathering is not None:
            gathering.wait()
        found: list[Tensor | None] = []
        for g, weight, biased in zip(grad_outputs, ctx.owners, ctx.biased, strict=True):
            found += [how.of_weight(ctx.multiply, g, whole, weight), g.flatten(0, -2).sum(0) if biased else None]
        leaving.wait()
        return gradient, None, None, None, *found


class _Rows(torch.autograd.Function):
    """A linear layer on this rank's inputs: (batch, seq, inputs / tp) to (batch, seq, d_model), or a share of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, how: TensorParallel, multiply: Multiply, owner: Sequence[Tensor], weight: Tensor
    ) -> Tensor:
        ctx.how, ctx.multiply, ctx.owner = how, multiply, owner
        ctx.save_for_backward(x, weight)
        y, work = how.leave(multiply(x, weight))
        work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = _entered(ctx.how, grad_outputs[0])
        of_x = gradient_of_input(ctx.multiply, gradient, weight)
        return of_x, None, None, None, ctx.how.of_weight(ctx.multiply, gradient, x, *ctx.owner)


class _ReduceTokens(torch.autograd.Function):
    """Onto the residual stream: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        ctx.how = how
        y, work = how.leave(x.clone() if not how.sequence else x)
        work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return _entered(ctx.how, grad_outputs[0]), None


class _GatherTokens(torch.autograd.Function):
    """Off the residual stream: every rank gets all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TensorParallel) -> Tensor:
        ctx.how = how
        return _entered(how, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        how: TensorParallel = ctx.how
        gradient, work = how.leave(grad_outputs[0] if how.sequence else grad_outputs[0].clone())
        work.wait()
        return gradient, None


def _entered(how: TensorParallel, x: Tensor) -> Tensor:
    """All tokens of what is on the residual stream."""
    if not how.sequence:
        return x.view_as(x)
    whole, work = how.gather(x)
    work.wait()
    return whole
