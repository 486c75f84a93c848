"""A plain training program that shares no code with the project: torch and the papers' formulas, nothing else.

It defines what a run must compute, so it prefers the shortest form to the fastest: the whole batch at once instead of
micro-batches, the softmax of attention written out, every expert for every token. The model is a function of a
dictionary of weights by name; the names tell which layers have biases, gates, experts, learned positions or a head.

Shapes: batch, seq (tokens of a sequence), d (width of the residual stream), size (of a head), n (experts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor | None]
"""Tokens, targets (-100 where none counts) and each token's document or None, (batch, seq) each."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model that its weights do not show."""

    layers: int
    heads: int
    rms_norm: bool
    gelu: str = "none"
    eps: float = 1e-5
    theta: float = 10000.0
    window: int = 0
    top_k: int = 0
    sigmoid_router: bool = False
    renormalise: bool = True
    route_scale: float = 1.0
    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    steps: int
    lr: float
    warmup: int
    decay: str
    decay_fraction: float
    min_ratio: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class Result:
    """The results of a run: loss, gradient norm and learning rate by step, and the weights after the last."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: Weights


def train(start: Weights, shape: Shape, recipe: Recipe, batches: Sequence[Batch]) -> Result:
    """Trains a copy of `start` on `batches`, one per step, with AdamW (Loshchilov & Hutter 2019)."""
    w = {name: value.detach().clone() for name, value in start.items()}
    trained = {name: value.requires_grad_() for name, value in w.items() if not name.endswith("router.bias")}
    matrices = [value for name, value in trained.items() if name.endswith(".weight") and "norm" not in name]
    vectors = [value for name, value in trained.items() if not name.endswith(".weight") or "norm" in name]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, foreach=False)
    losses, norms, rates = [], [], []
    for step, (tokens, targets, documents) in enumerate(batches):
        logits, penalty, loads = forward(w, shape, tokens, documents)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # the mean over targets other than -100
        adam.zero_grad()
        (loss + penalty / (targets != -100).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), recipe.clip)))
        for group in adam.param_groups:
            group["lr"] = rate(step, recipe)
        adam.step()
        for name, load in loads.items():  # DeepSeek-V3, section 2.1.2
            w[name] += shape.bias_rate * (load.mean() - load).sign()
        losses.append(loss.item())
        rates.append(rate(step, recipe))
    return Result(losses, norms, rates, {name: value.detach() for name, value in w.items()})


def rate(step: int, recipe: Recipe) -> float:
    """A linear warm-up that ends with the peak, then the decay: half a cosine (Loshchilov & Hutter 2017), a line, or
    for "wsd" a line over the last part of the run (Hu et al. 2024)."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    start = recipe.steps * (1 - recipe.decay_fraction) if recipe.decay == "wsd" else recipe.warmup
    done = max(0.0, (step - start) / (recipe.steps - start))
    height = (1 + math.cos(math.pi * done)) / 2 if recipe.decay == "cosine" else 1 - done
    return recipe.lr * (recipe.min_ratio + (1 - recipe.min_ratio) * height)


def forward(w: Weights, s: Shape, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Weights]:
    """Logits (batch, seq, vocabulary), the routers' penalties summed over tokens, and by the name of each balancing
    bias the load of its experts, (n,)."""
    seq, loads, penalty = tokens.shape[1], {}, torch.zeros(())
    seen = torch.ones(seq, seq).tril().triu(1 - (s.window or seq)).bool()
    if documents is not None:
        seen = (seen & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)
    x = w["embed.weight"][tokens]
    if "positions.weight" in w:
        x = x + w["positions.weight"][:seq]
    for block in (f"blocks.{layer}" for layer in range(s.layers)):
        x = x + attention(normed(x, w, f"{block}.attn_norm", s), w, f"{block}.attn", s, seen)
        y = normed(x, w, f"{block}.mlp_norm", s)
        if f"{block}.moe.router.weight" in w:
            out, more, load = mixture(y, w, f"{block}.moe", s)
            x, penalty = x + out, penalty + more
            if f"{block}.moe.router.bias" in w:
                loads[f"{block}.moe.router.bias"] = load
        else:
            x = x + mlp(y, w, f"{block}.mlp", s)
    head = w["head.weight"] if "head.weight" in w else w["embed.weight"]
    return normed(x, w, "final_norm", s) @ head.T, penalty, loads


def attention(x: Tensor, w: Weights, name: str, s: Shape, seen: Tensor) -> Tensor:
    """Softmax attention where `seen`, with query heads in groups that share a key/value head (Ainslie et al. 2023)."""
    size = len(w[f"{name}.wq.weight"]) // s.heads
    q, k, v = (linear(x, w, f"{name}.{m}").unflatten(-1, (-1, size)).transpose(1, 2) for m in ("wq", "wk", "wv"))
    if "positions.weight" not in w:
        q, k = turned(q, s.theta), turned(k, s.theta)
    k, v = (heads.repeat_interleave(s.heads // heads.shape[1], dim=1) for heads in (k, v))
    scores = (q @ k.mT / math.sqrt(size)).masked_fill(~seen, -math.inf)
    return linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w, f"{name}.wo")


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions (Su et al. 2021) of (batch, heads, seq, size): elements i and i + size/2 are a complex number,
    multiplied by exp(i × position × theta^(-2i / size))."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), frequencies)
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((y.real, y.imag), dim=-1)


def mixture(x: Tensor, w: Weights, name: str, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """A mixture of experts (DeepSeek-V3, section 2.1.2), its penalties summed over tokens, and its experts' load."""
    logits = x @ w[f"{name}.router.weight"].T
    scores = logits.sigmoid() if s.sigmoid_router else logits.softmax(-1)
    n = scores.shape[-1]
    chosen = (scores + w.get(f"{name}.router.bias", 0)).topk(s.top_k).indices
    mask = F.one_hot(chosen, n).sum(-2).to(scores.dtype)
    gates = scores * mask
    if s.renormalise:
        gates = gates / gates.sum(-1, keepdim=True)
    out = mlp(x, w, f"{name}.shared", s) if f"{name}.shared.up.weight" in w else torch.zeros_like(x)
    for e in range(n):
        expert = {key: value[e] for key, value in w.items() if key.startswith(f"{name}.experts.")}
        out = out + s.route_scale * gates[..., e : e + 1] * mlp(x, expert, f"{name}.experts", s)
    # DeepSeek-V3, equations 17 to 20, times seq, so that it is a sum over tokens; ST-MoE, equation 5, likewise.
    often = mask.mean(1) * n / s.top_k
    share = scores / scores.sum(-1, keepdim=True)
    penalty = s.aux_loss * (often * share.sum(1)).sum() + s.z_loss * logits.logsumexp(-1).square().sum()
    return out, penalty, mask.sum((0, 1))


def mlp(x: Tensor, w: Weights, name: str, s: Shape) -> Tensor:
    """SwiGLU (Shazeer 2020) where there is a gate, else GELU."""
    wide = linear(x, w, f"{name}.up")
    gated = f"{name}.gate.weight" in w
    wide = F.silu(linear(x, w, f"{name}.gate")) * wide if gated else F.gelu(wide, approximate=s.gelu)
    return linear(wide, w, f"{name}.down")


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def normed(x: Tensor, w: Weights, name: str, s: Shape) -> Tensor:
    if s.rms_norm:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + s.eps) * w[f"{name}.weight"]
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), s.eps)
