"""A GPT and its training loop as one writes them by hand: the reference for training.

    python -m benchmarks.gpu.plain_gpt --layers 12 --width 768 --heads 12 --batch 8 --steps 20 [--compile]

It shares no code with the framework: torch.nn modules, F.scaled_dot_product_attention, AdamW(fused=True), and on a GPU
fp32 parameters under torch.autocast(bf16). Prints one JSON document.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import loop


class Attention(nn.Module):
    """Causal self-attention, (batch, seq, width) to the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        shape = batch, seq, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """Attention and a GELU MLP four times as wide, each after a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.down(F.gelu(self.up(self.second_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT that maps (tokens, targets), each (batch, seq), to the mean loss. The head is the embedding's transpose."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, seq_len: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT(options.layers, options.width, options.heads, options.vocab, options.seq_len)
    model.to(options.device)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=loop.LR, betas=(0.9, 0.95), fused=True)


if __name__ == "__main__":
    loop.main(__doc__, make)
