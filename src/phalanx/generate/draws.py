"""Chooses the next token from logits, greedily or by sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.generate.sampling import Sampling
from phalanx.model.seeding import derive_seed


def generator_of(sampling: Sampling, role: str = "generate") -> torch.Generator:
    """Returns the random numbers of one text. They are drawn on the CPU, so that the text does not depend on the device
    that computes the logits."""
    key = (sampling.sample,) if sampling.sample else ()
    return torch.Generator().manual_seed(derive_seed(sampling.seed, role, *key))


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probabilities with which the next token is drawn, (..., vocab) in float64, from logits (..., vocab).
    At temperature 0 the likeliest token has all of it."""
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    logits = logits.double() / sampling.temperature
    if sampling.top_k:
        weakest = logits.topk(min(sampling.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter(-1, order, kept)
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    return probabilities


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """Returns a token drawn with `probabilities` (vocab,)."""
    return int(torch.multinomial(probabilities.cpu(), 1, generator=generator))


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Returns the next token from `logits` (vocab,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, sampling), generator)
