"""Modules that tests export, each with example inputs. They return a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (each(y).view(b, s, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, size: int, width: int, layers: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.ModuleList(MixerBlock((size // 4) ** 2, width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), target)


class ConvNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.wide = nn.Conv2d(width, 4 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 4 * width)
        self.head = nn.Linear(4 * width, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.relu(self.norm(self.wide(self.depthwise(self.stem(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


class TwoTowers(nn.Module):
    def __init__(self, items: int, width: int):
        super().__init__()
        self.users, self.items = nn.Embedding(items, width), nn.Embedding(items, width)
        self.left = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.right = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, user: Tensor, item: Tensor, target: Tensor) -> Tensor:
        scores = self.left(self.users(user)) @ self.right(self.items(item)).transpose(0, 1)
        return F.cross_entropy(scores, target)


class MoE(nn.Module):
    """Top-1 routing with dense dispatch (GShard)."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / width)
        self.experts = experts

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        gates = F.softmax(self.router(x), -1)
        best, which = gates.topk(1, -1)
        mask = F.one_hot(which.squeeze(-1), self.experts).to(x.dtype) * best
        y = torch.einsum("bse,bsh->ebsh", mask, x)
        y = torch.einsum("ebsh,ehf->ebsf", y, self.up).relu()
        y = torch.einsum("ebsf,efh->ebsh", y, self.down)
        return F.mse_loss(x + torch.einsum("ebsh->bsh", y), target)


def examples(scale: int = 1) -> dict[str, Callable[[], Example]]:
    """Returns what makes each module with its inputs, `scale` times as wide as tests need."""

    def tokens(rows: int, *shape: int) -> Tensor:
        return torch.randint(rows, shape)

    def partly(targets: Tensor) -> Tensor:
        targets[0], targets[1, :3] = -100, -100  # parts of the batch ignore all, some or no targets
        return targets

    w = 16 * scale
    return {
        "gpt": lambda: (GPT(32 * scale, w, 4, 2), (tokens(32, 4, 8 * scale), partly(tokens(32, 4, 8 * scale)))),
        "mixer": lambda: (Mixer(16, w, 2), (torch.randn(4, 3, 16, 16), tokens(8, 4))),
        "conv": lambda: (ConvNet(w), (torch.randn(4, 3, 16, 16), tokens(8, 4))),
        "towers": lambda: (TwoTowers(64 * scale, w), (tokens(64, 8), tokens(64, 8), tokens(8, 8))),
        "moe": lambda: (MoE(w, 4), (torch.randn(4, 8, w), torch.randn(4, 8, w))),
    }


def gpt() -> Example:
    """A factory as `phalanx plan --graph graph_modules:gpt` takes it."""
    return examples()["gpt"]()
