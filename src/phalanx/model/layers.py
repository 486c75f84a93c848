"""The layers of a block: linear layers whose product a layout may replace, norms, the MLP, and rotary positions.

Rotary embedding (Su et al. 2021) has linear, Llama 3.1, YaRN and LongRoPE frequency scaling. Pairs of elements half a
head apart are rotated together, the convention of Hugging Face's Llama; Meta's own checkpoints pair neighbours and need
their query and key rows permuted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig


def rotary_frequencies(model: ModelConfig, device: torch.device, *, windowed: bool = False) -> Tensor:
    """Returns radians per position of each rotated pair, (rotary_size / 2,), in float64; `windowed`: in layers with a
    window."""
    size = model.rotary_size
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=device) / size
    if windowed and model.window_rope_theta:
        return model.window_rope_theta**-exponents
    frequencies = model.rope_theta**-exponents
    if model.rotary_pairs < 1:
        frequencies = frequencies.masked_fill(torch.arange(size // 2, device=device) >= model.turned_pairs, 0)
    scaling = model.rope_scaling
    if scaling.factor == 1:
        return frequencies
    if scaling.kind == "longrope":
        divisors = scaling.long if model.seq_len > scaling.original_seq_len else scaling.short
        return frequencies / torch.tensor(divisors, dtype=torch.float64, device=device)
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "yarn":
        return torch.lerp(stretched, frequencies, _kept_by_yarn(model, device))
    # Llama 3.1: keep frequencies above high_freq_factor turns within the original context, stretch those
    # below low_freq_factor turns, and interpolate in between (meta-llama/llama-models, apply_scaling).
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(stretched, frequencies, kept.clamp(0, 1))


def _kept_by_yarn(model: ModelConfig, device: torch.device) -> Tensor:
    """Returns how much of each pair's own frequency YaRN keeps, from 1 to 0, (rotary_size / 2,): linear in the pair's
    number, between those that turn beta_fast and beta_slow times within the original context (Peng et al. 2023,
    section 3.2, as its released code)."""
    scaling, size = model.rope_scaling, model.rotary_size

    def pair_of(turns: float) -> float:
        return size * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float64, device=device)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)


def rotary_magnitude(model: ModelConfig, *, windowed: bool = False) -> float:
    """Returns the factor of rotated queries and keys; `windowed`: in layers with a window. YaRN's default is that of
    Peng et al. 2023, section 3.4, LongRoPE's that of Abdin et al. 2024 (Phi-3)."""
    scaling = model.rope_scaling
    if scaling.kind not in ("yarn", "longrope") or scaling.factor == 1 or (windowed and model.window_rope_theta):
        return 1.0
    if scaling.kind == "longrope":
        return scaling.magnitude or math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_seq_len))
    return scaling.magnitude or 0.1 * math.log(scaling.factor) + 1


def rotary_table(model: ModelConfig, positions: Tensor, dtype: torch.dtype, *, windowed: bool = False) -> Tensor:
    """Returns cosines and sines of `positions` (seq,): (2, seq, 1, rotary_size / 2), in at least float32; of positions
    (batch, seq): (2, batch, seq, 1, rotary_size / 2). `windowed`: those of layers with a window. Where queries grow,
    the table of queries stands before that of keys: 4 in place of 2.

    It is computed in each forward pass: the cost is negligible, and a table in a buffer would be lost when leaving the
    meta device and rounded by a cast to bfloat16."""
    angles = positions.double().unsqueeze(-1) * rotary_frequencies(model, positions.device, windowed=windowed)
    table = torch.stack((angles.cos(), angles.sin())).unsqueeze(-2)
    magnitude = rotary_magnitude(model, windowed=windowed)
    if magnitude != 1:
        table *= magnitude
    if model.query_growth.rate and not model.nope_every:
        table = torch.cat((table * query_growth(model, positions), table))
    return table.to(torch.promote_types(dtype, torch.float32))


def query_growth(model: ModelConfig, positions: Tensor) -> Tensor:
    """Returns the factors of queries at `positions` (seq,) or (batch, seq), in float64: (1, seq, 1, 1), or (1, batch,
    seq, 1, 1)."""
    growth = model.query_growth
    times = ((positions + growth.first) // growth.length).double()
    return (1 + growth.rate * times.log1p())[None, ..., None, None]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates queries or keys `x` (batch, seq, heads, head_size) to their positions: the first rotary_size elements of
    each head."""
    cos, sin = table
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, cos, sin)
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The same in three kernels, and the way back in three: the rotation by the negative angles. Whole heads meet the
    cosines, because halves of them are several times slower on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad_outputs[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    rest = [cos.new_ones(*cos.shape[:-1], x.shape[-1] - 2 * pairs)] if x.shape[-1] > 2 * pairs else []
    out = x * torch.cat((cos, cos, *rest), dim=-1)
    first, second = slice(pairs), slice(pairs, 2 * pairs)
    out[..., first].addcmul_(x[..., second], sin, value=-1)
    out[..., second].addcmul_(x[..., first], sin)
    return out.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's. On a CPU torch has no kernel of it: there its steps, and what autograd makes of them, take several times
    as long as those of a layer norm, and keep a copy of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., width) to the same shape."""
        own = x.is_cpu and x.dtype in (torch.float32, torch.float64) and self.eps is not None
        if own and not torch.compiler.is_compiling():
            return _RootMeanSquare.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RootMeanSquare(torch.autograd.Function):
    """x weight / √(mean x² + eps). Its gradient is that of a layer norm but for the mean of the gradient, which that
    one subtracts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        root = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        normed = x * root
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, root = ctx.saved_tensors
        (gradient,), width = grad_outputs, x.shape[-1]
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, [width], torch.zeros_like(root), root, weight, None, wanted
        )
        if of_x is not None:
            mean = gradient.sum(-1) if weight is None else gradient.reshape(-1, width) @ weight
            of_x.addcmul_(mean.view_as(root), root, value=1 / width)
        return of_x, of_weight, None


_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNCOMPILED: list[Callable[..., Any]] = []


def uncompiled(function: _Function) -> _Function:
    """Decorates what torch.compile must not trace: collectives, gradients that are put off, random masks, and what
    differs between layers. A compiled graph ends before it and the next begins after it, the same ones in all layers.
    """
    _UNCOMPILED.append(function)
    # Where torch looks for its own wrapper: without a compiler there is none, and torch._dynamo is not imported.
    function.__dict__["__dynamo_disable"] = function
    return torch._disable_dynamo(function)  # pyrefly: ignore[bad-return]


def prepare_compiler() -> None:
    """Makes torch.compile stop at what is `uncompiled`. Call it before any compiled function."""
    for function in _UNCOMPILED:
        function.__dict__.pop("__dynamo_disable", None)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Does what Module.to_empty does to a module on the meta device, without the import of sympy that torch needs there
    for tensors like others."""
    module._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))


Multiply = Callable[..., Tensor]
"""x weightᵀ + bias as F.linear computes it: (x, weight, bias=None)."""


class Linear(nn.Linear):
    """x weightᵀ + bias through `multiply`, which a layout may replace by a product with other kernels; with an adapter
    also its output (Hu et al. 2022, section 4.1)."""

    multiply: Multiply = staticmethod(F.linear)

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__(in_features, out_features, bias, **options)
        self.lora_a: Linear | None = None
        self.lora_b: Linear | None = None
        """The adapter, (rank, inputs) and (outputs, rank), if there is one."""
        self.lora_scale = 1.0

    def reset_parameters(self) -> None:
        """Draws no values on the meta device, where that takes half the time in which a model is built."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def add_adapter(self, rank: int, scale: float) -> None:
        """Adds an adapter, whose output is multiplied by `scale`."""
        self.lora_a = Linear(self.in_features, rank, bias=False)
        self.lora_b = Linear(rank, self.out_features, bias=False)
        self.lora_scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        return self.adapt(self.multiply(input, self.weight, self.bias), input)

    def adapt(self, output: Tensor, input: Tensor) -> Tensor:
        """Returns `output` (..., outputs) and the adapter's output for `input` (..., inputs), if there is one."""
        return output if self.lora_a is None else self.expand(output, self.lora_a(input))

    def expand(self, output: Tensor, compressed: Tensor) -> Tensor:
        """Returns `output` (..., outputs) and the adapter's for `compressed` (..., rank), the result of `lora_a`."""
        assert self.lora_b is not None, "only a layer with an adapter compresses"
        return output + self.lora_b(compressed * self.lora_scale)


Project = Callable[[Sequence[Linear], Tensor], tuple[Tensor, ...]]
"""Applies linear layers to the same input: (layers, input) to one output each."""


def project(layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Applies each of `layers` to `x` (..., inputs): (..., outputs) each."""
    return tuple([layer(x) for layer in layers])


Run = Callable[..., Tensor]
"""Calls a computation with its inputs: (computation, *inputs)."""


RunCheap = Callable[..., Any]
"""Calls a computation of a tensor or a tuple of tensors with its inputs: recompute=products repeats it."""


def run(compute: Callable[..., Any], *inputs: Any) -> Any:
    """Returns `compute(*inputs)`."""
    return compute(*inputs)


class Activation:
    """The nonlinearity of an MLP: GELU, exact or in its tanh form, or a gate of SiLU (SwiGLU), of GELU (GeGLU), or of a
    clamped SiLU."""

    def __init__(self, model: ModelConfig):
        self.kind = model.activation
        self.gelu = "none" if model.activation == "gelu" else "tanh"

    def __call__(self, wide: Tensor, gate: Tensor | None = None) -> Tensor:
        """Applies it to the hidden activations, with those of the gate if there is one; the shape stays the same."""
        if gate is None:
            return F.gelu(wide, approximate=self.gelu)
        if self.kind == "swiglu_clamped":
            return _ClampedGate.apply(wide, gate)
        return self.gated(gate, wide)

    def gated(self, gate: Tensor, factor: Tensor) -> Tensor:
        """Returns the product of the activated `gate` with `factor`, in the shape of both."""
        return (F.silu(gate) if self.kind == "swiglu" else F.gelu(gate, approximate=self.gelu)) * factor


CLAMP, SHARPNESS = 7.0, 1.702
"""CLAMP limits the inputs of the clamped gate; SHARPNESS is the factor inside its sigmoid (gpt-oss, Agarwal et
al. 2025, section 2.2, and its code)."""


class _ClampedGate(torch.autograd.Function):
    """(up + 1) gate σ(1.702 gate), where the gate is at most 7 and up lies within ±7. It saves its two inputs and
    computes the rest again, in two buffers: autograd alone would save six tensors of this size."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(up, gate)
        below = gate.clamp(max=CLAMP)
        gated = (SHARPNESS * below).sigmoid_().mul_(below)
        del below
        return up.clamp(-CLAMP, CLAMP).add_(1).mul_(gated)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        up, gate = ctx.saved_tensors
        (gradient,) = grad_outputs
        # gate σ(1.702 gate) is silu(1.702 gate) / 1.702, and its derivative that of the SiLU.
        sharp = gate.clamp(max=CLAMP).mul_(SHARPNESS)
        of_gate = up.clamp(-CLAMP, CLAMP).add_(1).mul_(gradient)
        torch.ops.aten.silu_backward(of_gate, sharp, grad_input=of_gate)
        of_up = F.silu(sharp, inplace=True).mul_(1 / SHARPNESS).mul_(gradient)
        # The gradients of the clamps, which are zero from ±7 on.
        torch.ops.aten.hardtanh_backward(of_gate, gate, -math.inf, CLAMP, grad_input=of_gate)
        torch.ops.aten.hardtanh_backward(of_up, up, -CLAMP, CLAMP, grad_input=of_up)
        return of_up, of_gate


class _SoftCap(torch.autograd.Function):
    """cap tanh(x / cap). It saves its result alone, from which the derivative follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        y = (x / cap).tanh_().mul_(cap)
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return (y / ctx.cap).square_().neg_().add_(1).mul_(grad_outputs[0]), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns cap tanh(x / cap), in the shape of `x` (Gemma 2, Gemma Team 2024, section 2)."""
    return _SoftCap.apply(x, cap)


class MLP(nn.Module):
    """Two matrices around a GELU, or three with a gate (SwiGLU and others, Shazeer 2020), of hidden size `width`: by
    default the model's. A layout may replace `project`, which applies the matrices that read the input,
    `run_cheap`, which calls the activation, and `run_hidden`, which calls `hidden`."""

    project: Project = staticmethod(project)
    run_cheap: RunCheap = staticmethod(run)
    run_hidden: Run = staticmethod(run)

    def __init__(self, model: ModelConfig, width: int | None = None):
        super().__init__()
        width = width or model.ff_size
        self.activate = Activation(model)
        self.up = Linear(model.d_model, width, bias=model.bias)
        gated = model.gated
        self.gate = Linear(model.d_model, width, bias=model.bias) if gated else None
        self.down = Linear(width, model.d_model, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the MLP, (..., d_model) to the same shape."""
        return self.down(self.run_hidden(self.hidden, x))

    def hidden(self, x: Tensor) -> Tensor:
        """Returns what the last matrix reads, (..., width)."""
        return self.run_cheap(self.activate, *self.widen(x))

    def widen(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the hidden activations, and the gate's if there is one, each (..., width)."""
        return self.project((self.up,) if self.gate is None else (self.up, self.gate), x)


def dense(model: ModelConfig, *_: object) -> MLP:
    """Returns the MLP of a block."""
    return MLP(model)


def double(model: ModelConfig, *_: object) -> MLP:
    """Returns an MLP of twice the width."""
    return MLP(model, 2 * model.ff_size)


class LayerInputs(nn.Module):
    """The projection of the model's embedding for the tables of all layers (model.layer_embedding)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.layers, self.scale = model.n_layers, model.d_model**-0.5
        self.project = Linear(model.d_model, model.n_layers * model.layer_embedding, bias=False)
        self.norm = make_norm(model, model.layer_embedding)

    def forward(self, x: Tensor) -> Tensor:
        """Maps the first block's input (batch, seq, d_model) to (batch, seq, layers × layer_embedding)."""
        return self.norm((self.project(x) * self.scale).unflatten(-1, (self.layers, -1))).flatten(2)


class LayerInput(nn.Module):
    """A layer's own embedding of the tokens, to be added to the residual stream. A layout may replace `run_cheap`,
    which calls the activation, and `table`."""

    run_cheap: RunCheap = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        size = model.layer_embedding
        self.part = slice(layer * size, (layer + 1) * size)
        self.activate, self.scale = Activation(model), size**0.5
        self.table = nn.Embedding(model.vocab_size, size)
        self.gate = Linear(model.d_model, size, bias=False)
        self.out = Linear(size, model.d_model, bias=False)
        self.norm = make_norm(model)

    def forward(self, x: Tensor, tokens: Tensor, projected: Tensor) -> Tensor:
        """Returns what is added to `x` (batch, seq, d_model), of `tokens` (batch, seq), of which tensor ranks may have
        more, and of the output of `LayerInputs`."""
        own = (self.own(projected) + self.table(tokens) * self.scale) * 0.5**0.5
        return self.norm(self.out(self.run_cheap(self.activate.gated, self.gate(x), own)))

    @uncompiled
    def own(self, projected: Tensor) -> Tensor:
        """Returns the part of the projections that is this layer's, (batch, seq, layer_embedding)."""
        return projected[..., self.part]


class Rescale(nn.Module):
    """The product of a block's output with a number, which is not trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, seq, d_model) to the same shape."""
        return x * self.weight


def make_norm(model: ModelConfig, width: int = 0, eps: float = 0.0) -> nn.Module:
    """Returns the model's normalisation over `width` elements, by default d_model, with its own `eps` if given."""
    width, eps = width or model.d_model, eps or model.norm_eps
    if model.norm == "rmsnorm":
        return RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=model.bias)
