"""The gated delta net, a linear attention with a state of fixed size (Yang et al. 2025, arXiv 2412.06464; Qwen3-Next).

Each head keeps a matrix S from keys to values. A token fades it, corrects what it holds for the token's key towards the
token's value, and reads it with the token's query:

    S ← e^g S,   S ← S + β k (v − Sᵀk)ᵀ,   o = Sᵀq

Sequences pass in chunks (section 3.3): within one, tokens meet in matrix products and a triangular system; between
chunks the states pass. Everything between the projections is computed for each head by itself. On CUDA in half
precision the kernels of fla-core do that where it is installed; elsewhere plain torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.blocks.recurrent import DELTA_CHUNK
from phalanx.config.model import ModelConfig
from phalanx.model.attention import KeysAndValues, all_keys
from phalanx.model.documents import Documents
from phalanx.model.layers import Linear, Project, RMSNorm, project, uncompiled
from phalanx.model.seeding import Noise

UNIT_EPS = 1e-6
"""Added to the squared length of a query or key that gets length 1, as in flash-linear-attention."""

KERNEL_DEVICES = ("cuda",)
"""Types of devices on which the kernels of fla-core run here."""
WIDEST_KEY = 256
"""Size of the largest key that they take."""
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


@cache
def load_kernel() -> tuple[Kernel | None, str]:
    """Returns fla-core's gated delta rule, or None, and its version, or why there is none."""
    try:
        return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule, metadata.version("fla-core")
    except (ImportError, AttributeError, RuntimeError) as error:  # Triton finds no driver
        return None, str(error)


def kernel_for(device: torch.device, dtype: torch.dtype, key_size: int) -> Kernel | None:
    """Returns the kernel that computes gated delta rules there, or None where plain torch does."""
    return load_kernel()[0] if _fits(device, dtype, key_size) else None


def _fits(device: torch.device, dtype: torch.dtype, key_size: int) -> bool:
    return device.type in KERNEL_DEVICES and dtype in (torch.bfloat16, torch.float16) and key_size <= WIDEST_KEY


def kernel_text(device: torch.device, dtype: torch.dtype, key_size: int) -> str:
    """Returns what computes gated delta rules, for a log."""
    if not _fits(device, dtype, key_size):
        return f"plain torch ({device.type}, {str(dtype).removeprefix('torch.')}, keys of {key_size})"
    kernel, found = load_kernel()
    return f"kernels of fla-core {found}" if kernel else f"plain torch ({found}; phalanx[fla] has the kernels)"


Mix = Callable[[Tensor, Tensor, tuple[Tensor, ...], Documents | None], Tensor]
"""Computes `mix`: (keys, values, constants, documents)."""


class GatedDeltaNet(nn.Module):
    """A layer of gated delta nets. A layout may replace `project`, which applies the matrices that read the input, and
    `mix`, in which tokens meet."""

    project: Project = staticmethod(project)
    mix: Mix

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        delta, width = model.delta, model.d_model
        keys, values = delta.key_heads * delta.key_head_dim, delta.n_heads * delta.head_dim
        self.layer = layer
        self.key_size, self.value_size = delta.key_head_dim, delta.head_dim
        self.wq, self.wk = (Linear(width, keys, bias=False) for _ in "qk")
        self.wv, self.wz = (Linear(width, values, bias=False) for _ in "vz")
        self.wb, self.wa = (Linear(width, delta.n_heads, bias=False) for _ in "ba")
        self.conv_q, self.conv_k = (nn.Parameter(torch.empty(keys, delta.conv)) for _ in "qk")
        self.conv_v = nn.Parameter(torch.empty(values, delta.conv))
        self.decay, self.dt_bias = (nn.Parameter(torch.empty(delta.n_heads)) for _ in range(2))
        self.norm = RMSNorm(delta.head_dim, eps=model.norm_eps)
        self.wo = Linear(values, width, bias=False)
        self.mix = mix

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: KeysAndValues | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Computes the layer, (batch, seq, d_model) to the same shape. With a cache the states are computed again from
        the keys and values of all tokens."""
        q, k, v, z, b, a = self.project((self.wq, self.wk, self.wv, self.wz, self.wb, self.wa), x)
        q, k = (y.unflatten(-1, (-1, self.key_size)) for y in (q, k))
        v, z = (y.unflatten(-1, (-1, self.value_size)) for y in (v, z))
        keys = torch.cat((q, k), -1).transpose(1, 2)
        values = torch.cat((v, b.unsqueeze(-1), a.unsqueeze(-1)), -1).transpose(1, 2)
        if cache is not None:
            keys, values = all_keys(cache, self, keys, values)
        convolutions = (self.conv_q, self.key_size), (self.conv_k, self.key_size), (self.conv_v, self.value_size)
        taps = [conv.unflatten(0, (-1, size)) for conv, size in convolutions]
        o = self.mix(keys, values, (*taps, self.decay, self.dt_bias), documents)
        o = o[:, :, -z.shape[1] :].transpose(1, 2)
        return self.wo((self.norm(o) * F.silu(z)).flatten(2))


def mix(keys: Tensor, values: Tensor, constants: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
    """Returns the heads' outputs, (batch, heads, seq, size).

    Args:
        keys: queries and keys of each key head, one after the other, before their convolution, (batch, key heads, seq,
            2 × key size).
        values: values of each head before theirs, then the logit of β and the step of the decay, (batch, heads, seq,
            size + 2).
        constants: the taps of the convolutions of queries, keys and values, (heads, size, taps) each, the logarithm of
            each head's rate of decay, and what is added to its steps, (heads,) each.
        documents: those of the tokens, none of which reaches into another."""
    conv_q, conv_k, conv_v, decay, dt_bias = constants
    numbers = None if documents is None else documents.numbers
    q, k = keys.chunk(2, -1)
    v, b, a = values.split([values.shape[-1] - 2, 1, 1], -1)
    q, k, v = (F.silu(convolved(x, taps, numbers)) for x, taps in ((q, conv_q), (k, conv_k), (v, conv_v)))
    wide = torch.promote_types(v.dtype, torch.float32)
    # The rate and its logarithm span orders of magnitude.
    fading = -decay.to(wide).exp()[:, None] * F.softplus(a.squeeze(-1).to(wide) + dt_bias.to(wide)[:, None])
    beta, copies = b.squeeze(-1).to(wide).sigmoid(), v.shape[1] // q.shape[1]
    # Fake tensors, which a rehearsal computes with, are of a type of their own.
    kernel = kernel_for(v.device, v.dtype, q.shape[-1]) if type(v) is Tensor else None
    if kernel is None:
        q, k = (_unit(x.to(wide)) for x in (q, k))
    q, k = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (q, k))
    if kernel is not None:
        return by_kernel(kernel, q, k, v, fading, beta, documents)
    return delta_rule(q * q.shape[-1] ** -0.5, k, v.to(wide), fading, beta, numbers).to(v.dtype)


@uncompiled
def by_kernel(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, fading: Tensor, beta: Tensor, documents: Documents | None
) -> Tensor:
    """Returns the same as `delta_rule` of queries and keys before they get length 1, (batch, heads, seq, size) each.
    The kernel takes tokens before heads, and documents as one sequence with bounds."""
    batch, options = len(v), dict[str, Tensor]()
    inputs = [x.transpose(1, 2).contiguous() for x in (q, k, v, fading, beta)]
    if documents is not None:
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
        options = {"cu_seqlens": documents.bounds_there, "cu_seqlens_cpu": documents.bounds}
    o, _ = kernel(*inputs, scale=q.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True, **options)
    o = o if documents is None else o.squeeze(0).unflatten(0, (batch, -1))
    return o.transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def convolved(x: Tensor, taps: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Returns the causal convolution of each element of the heads of `x` (batch, heads, seq, size) over its last tokens
    with `taps` (heads, size, taps), of which the last is the token's own, within its document by `numbers` (batch,
    seq)."""
    width, seq = taps.shape[-1], x.shape[2]
    if numbers is None:
        channels = F.pad(x.transpose(2, 3).flatten(1, 2), (width - 1, 0))
        out = F.conv1d(channels, taps.flatten(0, 1).unsqueeze(1), groups=channels.shape[1])
        return out.unflatten(1, x.shape[1::2]).transpose(2, 3)
    total = x * taps[:, None, :, -1]
    for back in range(1, min(width, seq)):
        same = numbers[:, back:] == numbers[:, :-back]
        earlier = x[:, :, :-back] * same[:, None, :, None]
        total = total + F.pad(earlier, (0, 0, back, 0)) * taps[:, None, :, -1 - back]
    return total


@uncompiled
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fading: Tensor,
    beta: Tensor,
    numbers: Tensor | None = None,
    chunk: int = DELTA_CHUNK,
) -> Tensor:
    """Returns the outputs (batch, heads, seq, value size) of the gated delta rule, from states of zeros, for `q` and
    `k` (batch, heads, seq, key size) and `v`; `fading` is g and `beta` is β, (batch, heads, seq) each. Documents have
    `numbers` (batch, seq): each begins with a state of zeros.

    With G the sum of g within a chunk up to a token, the corrections U of its tokens solve (1 + A) U = β V − β e^G K S
    for the state S before it, with A = β e^(Gᵢ − Gⱼ) kᵢ·kⱼ for j < i."""
    seq = v.shape[2]
    chunk = min(chunk, seq)
    padding = -seq % chunk
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    fading, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk)) for x in (fading, beta))
    faded = fading.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    seen, enters, leaves, passes = causal, 1.0, 1.0, 1.0
    if numbers is not None:
        numbers = F.pad(numbers + 1, (0, padding)).unflatten(1, (-1, chunk)).unsqueeze(1)  # (batch, 1, chunks, chunk)
        before = F.pad(numbers[:, :, :-1, -1:], (0, 0, 1, 0), value=-1)
        seen = causal & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2))
        enters, leaves = (numbers == before), (numbers == numbers[..., -1:])
        passes = (before == numbers[..., -1:]).unsqueeze(-1).to(q.dtype)
    between = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(~seen, float("-inf")).exp()
    since = (faded.exp() * enters).unsqueeze(-1)
    system = (beta.unsqueeze(-1) * (k @ k.mT) * between).tril(-1)
    scaled = beta.unsqueeze(-1)
    # The diagonal is taken as ones.
    solved = torch.linalg.solve_triangular(
        system, torch.cat((scaled * v, scaled * since * k), -1), upper=False, unitriangular=True
    )
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT) * between
    reads, writes = q * since, k * ((faded[..., -1:] - faded).exp() * leaves).unsqueeze(-1)
    kept = faded[..., -1:].exp().unsqueeze(-1) * passes
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for number in range(v.shape[2]):
        corrections = own[:, :, number] - of_state[:, :, number] @ state
        outputs.append(reads[:, :, number] @ state + scores[:, :, number] @ corrections)
        state = kept[:, :, number] * state + writes[:, :, number].mT @ corrections
    return torch.cat(outputs, 2)[:, :, :seq]
