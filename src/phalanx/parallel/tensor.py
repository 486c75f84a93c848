"""Tensor and sequence parallelism: every matrix is cut over the tp axis, activations stay plain local tensors.

A block communicates where its input is read and where its output is written (Shoeybi et al. 2019, section 3). In plain
tensor parallelism every rank has the whole residual stream: nothing before the block, an all-reduce after it, and the
reverse in the backward pass. With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) a rank has only its
part of the tokens between the matrices: an all-gather before and a reduce-scatter after, with the same bytes.

A rank's part is a run of the micro-batch's tokens in the order (sample, position), stored in the shape (batch, seq /
tp, d_model): operations on single tokens (norms, residuals, dropout) are unaffected, and gathering the parts is one
copy-free all-gather for any batch. Where the halves of a micro-batch compute in turn it is a run of each half's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.blocks.kinds import FEED_FORWARD, Connection
from phalanx.blocks.residual import A
from phalanx.comm.axis import Axis, Pending
from phalanx.model.layers import MLP, Linear, Multiply, uncompiled
from phalanx.model.moe import GroupedLinear, MixtureOfExperts
from phalanx.model.seeding import halves_of
from phalanx.model.transformer import Block, Embedding, PositionEmbedding, Transformer
from phalanx.parallel.linear import DeferredWeightGrads, gradient_of_input, gradient_of_weight, linear_of
from phalanx.partition.derived import Mode
from phalanx.partition.tensor_slices import TensorSlice, slice_of


@dataclass(frozen=True)
class NormAllHeads:
    """Applies RMS norms over all tensor ranks' heads. It is the `norm_all_heads` of attention."""

    tp: Axis

    @uncompiled
    def __call__(self, q_norm: nn.Module, k_norm: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Maps queries (batch, seq, heads here × head_size) and keys in the same form to their normed ones."""
        assert isinstance(q_norm, nn.RMSNorm)
        assert isinstance(k_norm, nn.RMSNorm)
        whole = q_norm.normalized_shape[0], k_norm.normalized_shape[0]
        return _RMSNorms.apply(q, k, q_norm.weight, k_norm.weight, self.tp, whole, q_norm.eps)


@dataclass(frozen=True)
class SumHeads:
    """Sums over all tensor ranks' heads, in place and without a gradient. It is the `sum_heads` of an attention whose
    indexer learns from all heads."""

    tp: Axis

    def __call__(self, x: Tensor) -> None:
        """Sums `x`."""
        self.tp.all_reduce(x).wait()


class _RMSNorms(torch.autograd.Function):
    """The norms of queries and of keys: (batch, seq, width here) each, to the same shapes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, tp: Axis, whole: tuple[int, int], eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.tp, ctx.whole = tp, whole
        ctx.copies = tuple(tp.size * x.shape[-1] // size for x, size in zip((q, k), whole, strict=True))
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = _summed(tp, [x.to(wide).square().sum(-1) / copies for x, copies in zip((q, k), ctx.copies, strict=True)])
        factors = [(total / size + eps).rsqrt().unsqueeze(-1) for total, size in zip(sums, whole, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *factors)
        normed_q, normed_k = ((x.to(wide) * factor).to(x.dtype) for x, factor in zip((q, k), factors, strict=True))
        return normed_q * q_weight, normed_k * k_weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        q, k, *others = ctx.saved_tensors
        weights, factors = others[:2], others[2:]
        wide = factors[0].dtype
        gradients = [(g * weight).to(wide) for g, weight in zip(grad_outputs, weights, strict=True)]
        # Of a key head with copies each rank has a part of the gradient, which add up in this sum too.
        products = [(g * x.to(wide)).sum(-1) for g, x in zip(gradients, (q, k), strict=True)]
        sums = _summed(ctx.tp, products)
        of_inputs, of_weights = [], []
        for number, x in enumerate((q, k)):
            factor, size = factors[number], ctx.whole[number] * ctx.copies[number]
            of_squares = x.to(wide) * factor**3 * (sums[number] / size).unsqueeze(-1)
            of_inputs.append((gradients[number] * factor - of_squares).to(x.dtype))
            of_weights.append((grad_outputs[number] * (x.to(wide) * factor).to(x.dtype)).flatten(0, -2).sum(0))
        return *of_inputs, *of_weights, None, None, None


def _summed(tp: Axis, parts: list[Tensor]) -> Tensor:
    """Returns the sums over the tensor ranks of some numbers per token, (numbers, batch, seq), in one message."""
    together = torch.stack(parts)
    tp.all_reduce(together).wait()
    return together


@dataclass(frozen=True)
class AllPending:
    """Several collectives in flight."""

    each: Sequence[Pending]

    def wait(self) -> None:
        """Waits for all."""
        for pending in self.each:
            pending.wait()


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel cut of one model's layers, and the communication between its ranks."""

    tp: Axis
    sequence: bool = False
    """True if residual stream, norms and dropout use parts of the tokens."""
    regather: bool = False
    """With `sequence`: saves only this rank's part of a gathered input, and gathers it again in the backward pass."""
    deferred: DeferredWeightGrads | None = None
    """Takes weight gradients that bypass autograd."""
    folds: bool = False
    """With `sequence`: each rank routes its own tokens to whole experts, so that only shared experts are cut."""
    halved: int = 0
    """With `sequence`: sequences of a batch of whose halves each rank has parts (halves_of)."""

    def local_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of `x` (batch, seq, ...): (batch, seq / tp, ...)."""
        parts = (x[half].flatten(0, 1).chunk(self.tp.size)[self.tp.rank] for half in halves_of(len(x), self.halved))
        return torch.cat([*parts]).unflatten(0, (len(x), x.shape[1] // self.tp.size))

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """Starts gathering token parts (batch, seq / tp, d_model). Returns all tokens, (batch, seq, d_model), and the
        pending collective."""
        *batch, seq, width = x.shape
        whole, x = x.new_empty(*batch, seq * self.tp.size, width), x.contiguous()
        return whole, self._by_halves(self.tp.all_gather, whole, x)

    def _by_halves(self, collective: Callable[[Tensor, Tensor], Pending], to: Tensor, x: Tensor) -> Pending:
        """Starts a collective from `x` to another tensor, or one for each half of both."""
        if x.dim() < 3 or len(halves := halves_of(len(x), self.halved)) == 1:
            return collective(to.view(-1), x.view(-1))
        return AllPending([collective(to[half].view(-1), x[half].view(-1)) for half in halves])

    def constant(self, weight: Tensor) -> Tensor:
        """Returns the weight as seen by autograd: detached where `deferred` takes its gradient."""
        return weight if self.deferred is None else weight.detach()

    def weight_gradient(self, multiply: Multiply, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """Returns the gradient of a weight, or None where `deferred` has taken it, or if the weight is frozen."""
        if not weight.requires_grad:
            return None
        if self.deferred is None:
            return gradient_of_weight(multiply, gradient, x)
        return self.deferred.take(weight, multiply, gradient, x)

    def start_reduce(self, x: Tensor) -> tuple[Tensor, Any]:
        """Starts summing all ranks' `x` (batch, seq, d_model), perhaps in place. Returns the sum's part on the residual
        stream here, and the pending collective."""
        x = x.contiguous()
        if not self.sequence:
            return x, self.tp.all_reduce(x)
        *batch, seq, width = x.shape
        share = x.new_empty(*batch, seq // self.tp.size, width)
        return share, self._by_halves(self.tp.reduce_scatter, share, x)

    @uncompiled
    def gathered(self, x: Tensor) -> Tensor:
        """Returns all tokens (batch, seq, d_model) of `x`, this rank's part of them."""
        return _GatherTokens.apply(x, self)

    @uncompiled
    def reduced(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks of `x` (batch, seq, d_model), onto the residual stream."""
        return _ReduceTokens.apply(x, self)

    @uncompiled
    def gather_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gathers all tokens for a module's first input: a forward pre-hook."""
        x, *others = inputs
        return self.gathered(x), *others

    @uncompiled
    def reduce_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Sums the ranks' outputs of a module: a forward hook."""
        return self.reduced(output)

    def run_halves(self, halves: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
        """Runs the halves of a parallel block between one exchange off the residual stream and one onto it.

        Every rank normalises all tokens for its own heads and columns, so its norms have parts of their gradients. Had
        each half its own exchange, as many bytes again would be sent."""
        return self.reduced(halves(self.gathered(x), *others))


def cut_parameters(model: Transformer, tp: Axis, *, folds: bool = False) -> dict[str, tuple[TensorSlice, ...]]:
    """Replaces every parameter of `model` (on the meta device) by one of this rank's shape; `folds`: layout.folds.

    Returns, by name, the tensor slice of each tensor rank."""
    tensor_slices = {}
    for name, parameter in list(model.named_parameters()):
        tensor_slices[name] = tuple(
            slice_of(name, tuple(parameter.shape), model.config, tp.size, rank, folds=folds) for rank in range(tp.size)
        )
        owner, _, leaf = name.rpartition(".")
        cut = torch.empty(tensor_slices[name][tp.rank].shape, dtype=parameter.dtype, device="meta")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    return tensor_slices


def connect(model: Transformer, parallel: TensorParallel, recomputes: Mapping[str, Mode] = {}) -> set[nn.Module]:
    """Replaces the layers of `model`, whose parameters are cut, by layers that communicate. What a block repeats by its
    mode of `recomputes` gathers its inputs then, and saves them in any case. Returns the linear layers whose weight
    gradients are computed here."""
    made: set[nn.Module] = set()
    for layer, block in model.blocks.items():
        assert isinstance(block, Block), "nothing wraps blocks before this"
        made |= _connect_block(block, parallel, recomputes.get(layer, "none"))
    if isinstance(model.embed, nn.Embedding):  # a pipeline stage may have none
        model.embed = ParallelEmbedding(model.embed, parallel)
    if isinstance(model.positions, PositionEmbedding):
        model.positions = ParallelPositions(model.positions, parallel)
    model.gather = parallel.gathered
    model.routing.share = 1 if parallel.folds else 1 / parallel.tp.size
    return made


def _connect_block(block: Block, parallel: TensorParallel, recompute: Mode) -> set[nn.Module]:
    """Replaces one block's layers, as their kinds say. A parallel block communicates around both halves."""
    keeping = replace(parallel, regather=False)
    if block.layer_input is not None:
        block.layer_input.table = ParallelEmbedding(block.layer_input.table, parallel)
    for _, half in block.sublayers():
        if hasattr(half, "norm_all_heads"):
            half.norm_all_heads = NormAllHeads(parallel.tp)  # pyrefly: ignore[bad-argument-type]
        for core in half.modules():
            if hasattr(core, "sum_heads"):
                core.sum_heads = SumHeads(parallel.tp)  # pyrefly: ignore[bad-argument-type]
    if not block.parallel:
        return set().union(
            *(
                _connect_half(
                    half,
                    connection,
                    keeping if recompute == "full" or (recompute == "mlp" and isinstance(half, MLP)) else parallel,
                )
                for half, connection in _connected(block, parallel)
            )
        )
    block.run_halves = parallel.run_halves
    for kind, half in block.sublayers():
        _add_biases_once(half, kind.connection, parallel)
    return set()


def _connected(block: Block, parallel: TensorParallel) -> Iterator[tuple[nn.Module, Connection]]:
    """Yields the parts of a block whose matrices are cut, with their connections."""
    for kind, half in block.sublayers():
        if not (parallel.folds and isinstance(half, MixtureOfExperts)):
            yield half, kind.connection
        elif half.shared is not None:
            yield half.shared, FEED_FORWARD["dense"].connection


def _connect_half(half: nn.Module, connection: Connection, parallel: TensorParallel) -> set[nn.Module]:
    """Replaces the layers of attention or of a feed-forward layer. Where no linear layer reads the input or writes the
    output alone, hooks on the whole module communicate, and every rank computes everything between: compressions,
    routers."""
    named, made = dict(half.named_modules()), set[nn.Module]()
    if connection.reads:
        half.project = ColumnParallel(parallel)  # pyrefly: ignore[bad-argument-type]
        # The adapters' A read the input with their matrices.
        made |= {named[name] for read in connection.reads for name in (read, f"{read}.{A}") if name in named}
    else:
        half.register_forward_pre_hook(parallel.gather_input)
    if len(connection.writes) == 1:
        (name,) = connection.writes
        plain = named[name]
        assert isinstance(plain, Linear), "compared with the kind when the module was made"
        half.set_submodule(name, RowParallelLinear.of(plain, parallel))
        made.add(half.get_submodule(name))
    else:
        half.register_forward_hook(parallel.reduce_output)
        _add_biases_once(half, connection, parallel)
    return made


def _add_biases_once(half: nn.Module, connection: Connection, parallel: TensorParallel) -> None:
    """Makes one rank add the biases in the output of `half`, which the ranks then sum."""
    named = dict(half.named_modules())
    for name in connection.writes:
        last = named.get(name)
        if isinstance(last, GroupedLinear):
            last.bias_factor = float(parallel.tp.rank == 0)
        elif isinstance(last, Linear) and last.bias is not None:
            half.set_submodule(name, FirstRankBias.of(last, parallel))


@dataclass(frozen=True)
class ColumnParallel:
    """Applies linear layers to one input; each rank computes some of the output columns. It is the `project` of
    attention and MLP."""

    parallel: TensorParallel

    @uncompiled
    def __call__(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        """Maps (batch, seq, d_model), or this rank's part of it, to (batch, seq, outputs / tp) for each layer."""
        compressing = [layer.lora_a for layer in layers if layer.lora_a is not None]
        every = [*layers, *compressing]
        weights = [layer.weight for layer in every]
        parameters = [p for layer in every for p in (self.parallel.constant(layer.weight), layer.bias)]
        outputs: tuple[Tensor, ...] = _Columns.apply(x, self.parallel, layers[0].multiply, weights, *parameters)
        # Every rank has the whole A x, whose gradient here is the part from this rank's rows of B.
        compressed = iter(outputs[len(layers) :])
        pairs = zip(layers, outputs, strict=False)
        return tuple([y if layer.lora_a is None else layer.expand(y, next(compressed)) for layer, y in pairs])


class RowParallelLinear(Linear):
    """A linear layer in which every rank has some of the inputs. The bias is added once, after the sum."""

    parallel: TensorParallel

    @classmethod
    def of(cls, plain: Linear, parallel: TensorParallel) -> RowParallelLinear:
        """Returns the parallel form of `plain`, with this rank's parameters."""
        layer = linear_of(cls, plain)
        layer.parallel = parallel
        return layer

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Maps (batch, seq, inputs / tp) to (batch, seq, outputs), or to this rank's part of its tokens."""
        if self.weight.requires_grad:
            y = _Rows.apply(input, self.parallel, self.multiply, [self.weight], self.parallel.constant(self.weight))
        else:  # one sum for the frozen matrix and its adapter, of which each rank has the whole B
            y = self.parallel.reduced(self.adapt(self.multiply(input, self.weight), input))
        return y if self.bias is None else y + self.bias


class FirstRankBias(RowParallelLinear):
    """A linear layer in which every rank has some of the inputs, and whose caller sums the outputs: the first rank's
    output includes the bias."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Maps (batch, seq, inputs / tp) to this rank's summand of (batch, seq, outputs)."""
        assert self.bias is not None, "only layers with a bias are exchanged"
        y = self.multiply(input, self.weight) + self.bias * float(self.parallel.tp.rank == 0)
        return self.adapt(y, input)


def look_up(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """Returns the rows of `tokens` (batch, seq) that are among those of `weight`, which begin with row `first` of the
    vocabulary, and zeros for the rest: (batch, seq, d_model)."""
    local = tokens - first
    mine = (local >= 0) & (local < len(weight))
    return nn.functional.embedding(local.where(mine, 0), weight) * mine.unsqueeze(-1)


class ParallelEmbedding(Embedding):
    """An embedding in which every rank has some of the rows."""

    def __init__(self, plain: nn.Embedding, parallel: TensorParallel):
        super().__init__(plain.num_embeddings, plain.embedding_dim, device="meta")
        self.weight, self.parallel = plain.weight, parallel

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Maps tokens (batch, seq) to (batch, seq, d_model), or to this rank's part of it."""
        return self.parallel.reduced(look_up(input, self.weight, self.parallel.tp.rank * len(self.weight)))


class ParallelPositions(PositionEmbedding):
    """Learned positions of the tokens on this rank's residual stream."""

    def __init__(self, plain: PositionEmbedding, parallel: TensorParallel):
        super().__init__(plain.num_embeddings, plain.embedding_dim, device="meta")
        self.weight, self.parallel = plain.weight, parallel

    def forward(self, input: Tensor, shape: torch.Size) -> Tensor:
        """Maps positions (seq,) of tokens of `shape` (batch, seq) to (batch, seq, d_model), or to this rank's part."""
        places = input.expand(shape)
        return super().forward(self.parallel.local_tokens(places) if self.parallel.sequence else places, shape)


class _Columns(torch.autograd.Function):
    """Applies linear layers to one input: (batch, seq, d_model), or parts of it, to (batch, seq, outputs / tp) each."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parallel: TensorParallel,
        multiply: Multiply,
        owners: Sequence[Tensor],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.multiply = parallel, multiply
        weights, biases = parameters[::2], parameters[1::2]
        whole = x
        if parallel.sequence:
            whole, work = parallel.gather(x)
            work.wait()
        # Frozen weights have no gradients, for which alone the input is needed.
        ctx.trains = any(owner.requires_grad for owner in owners)
        ctx.save_for_backward((x if parallel.regather else whole) if ctx.trains else None, *weights)
        ctx.owners = owners
        ctx.biased = [bias is not None and bias.requires_grad for bias in biases]
        return tuple(multiply(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        parallel: TensorParallel = ctx.parallel
        whole, *weights = ctx.saved_tensors
        gathering = None
        if parallel.sequence and parallel.regather and ctx.trains:
            whole, gathering = parallel.gather(whole)
        gradient = gradient_of_input(ctx.multiply, grad_outputs[0], weights[0])
        for g, weight in zip(grad_outputs[1:], weights[1:], strict=True):
            gradient += gradient_of_input(ctx.multiply, g, weight)
        gradient, leaving = parallel.start_reduce(gradient)  # in flight while the weights' gradients are computed
        if gathering is not None:
            gathering.wait()
        of_parameters: list[Tensor | None] = []
        for g, weight, biased in zip(grad_outputs, ctx.owners, ctx.biased, strict=True):
            of_parameters += [
                parallel.weight_gradient(ctx.multiply, g, whole, weight),
                g.flatten(0, -2).sum(0) if biased else None,
            ]
        leaving.wait()
        return gradient, None, None, None, *of_parameters


class _Rows(torch.autograd.Function):
    """Applies a linear layer to this rank's inputs: (batch, seq, inputs / tp) to (batch, seq, d_model), or a part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parallel: TensorParallel, multiply: Multiply, owner: Sequence[Tensor], weight: Tensor
    ) -> Tensor:
        ctx.parallel, ctx.multiply, ctx.owner = parallel, multiply, owner
        ctx.save_for_backward(x, weight)
        y, work = parallel.start_reduce(multiply(x, weight))
        work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = _all_tokens(ctx.parallel, grad_outputs[0])
        of_x = gradient_of_input(ctx.multiply, gradient, weight)
        return of_x, None, None, None, ctx.parallel.weight_gradient(ctx.multiply, gradient, x, *ctx.owner)


class _ReduceTokens(torch.autograd.Function):
    """Sums over the ranks, onto the residual stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return _summed_tokens(parallel, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return _all_tokens(ctx.parallel, grad_outputs[0]), None


class _GatherTokens(torch.autograd.Function):
    """Gathers all tokens from the residual stream on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return _all_tokens(parallel, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return _summed_tokens(ctx.parallel, grad_outputs[0]), None


def _summed_tokens(parallel: TensorParallel, x: Tensor) -> Tensor:
    total, work = parallel.start_reduce(x if parallel.sequence else x.clone())
    work.wait()
    return total


def _all_tokens(parallel: TensorParallel, x: Tensor) -> Tensor:
    if not parallel.sequence:
        return x.view_as(x)
    whole, work = parallel.gather(x)
    work.wait()
    return whole
