"""Generates tokens one after another from a model, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.model.cache import Cache
from phalanx.model.seeding import derive_seed
from phalanx.model.transformer import Transformer

Choose = Callable[[Tensor], Tensor]
"""Chooses new tokens (batch,) from logits (batch, vocab)."""
Follow = Callable[[Tensor, Cache | None, Choose], Tensor]
"""Computes the next tokens (batch,) from tokens (batch, seq) and the cache of earlier ones, if any, and the function
that chooses among the logits."""


@dataclass(frozen=True)
class Sampling:
    """The options of `generate`: how many tokens, and how each is chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337


def generate(
    model: Transformer,
    prompt_tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    seed: int = Sampling.seed,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Returns the prompts `prompt_tokens` (batch, prompt) with `max_new_tokens` more tokens: (batch, prompt + new).

    `temperature` divides the logits; 0 takes the likeliest token. `top_k` keeps that many of the likeliest tokens (0:
    all), `top_p` the fewest whose probabilities reach it (1: all; Holtzman et al. 2020). The same seed gives the same
    text. `on_token` is called with each new token, (batch,), as soon as it is known.

    Once the text is longer than the model's seq_len, the model sees its last seq_len tokens. Raises JobError on invalid
    values."""

    def follow(tokens: Tensor, cache: Cache | None, choose: Choose) -> Tensor:
        return choose(model(tokens, cache=cache)[:, -1])

    options = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    return extend(follow, prompt_tokens, model.config, model.embed.num_embeddings, options, on_token)


@torch.inference_mode()
def extend(
    follow: Follow,
    prompt_tokens: Tensor,
    model: ModelConfig,
    vocab: int,
    options: Sampling,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Returns the result of `generate` with `follow` as the model's forward pass, on one process or on several."""
    _check(prompt_tokens, vocab, options)
    # Drawn on the CPU: so the text does not depend on the device that computes the logits.
    generator = torch.Generator().manual_seed(derive_seed(options.seed, "generate"))

    def choose(logits: Tensor) -> Tensor:
        return next_token(logits, options.temperature, options.top_k, options.top_p, generator)

    tokens = prompt_tokens
    cache = Cache(model.seq_len)
    for _ in range(options.max_new_tokens):
        if tokens.shape[1] <= model.seq_len:
            new = follow(tokens[:, cache.length :], cache, choose)
        else:
            # The window slides: every token has a new position, which invalidates the cache.
            new = follow(tokens[:, -model.seq_len :], None, choose)
        tokens = torch.cat((tokens, new[:, None]), dim=1)
        if on_token:
            on_token(new)
    return tokens


def next_token(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """Returns one token per row of `logits` (batch, vocab): (batch,). The arguments are those of `generate`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double() / temperature
    if top_k:
        weakest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
    drawn = torch.multinomial(probabilities.cpu(), 1, generator=generator)
    return drawn[:, 0].to(logits.device)


def _check(prompt: Tensor, vocab: int, options: Sampling) -> None:
    problems = []
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        problems.append(f"the prompt has shape {tuple(prompt.shape)}: it needs (batch, tokens) with at least one token")
    elif prompt.min() < 0 or prompt.max() >= vocab:
        problems.append(
            f"the prompt contains tokens {int(prompt.min())} to {int(prompt.max())}, but the model's are 0 to "
            f"{vocab - 1}: encode it with the tokenizer that the model was trained with"
        )
    if options.max_new_tokens < 0:
        problems.append(f"max_new_tokens={options.max_new_tokens}: it must be 0 or more")
    if options.temperature < 0:
        problems.append(f"temperature={options.temperature}: it must be 0 (the likeliest token) or more")
    if options.top_k < 0:
        problems.append(f"top_k={options.top_k}: it must be 0 (all tokens) or more")
    if not 0 < options.top_p <= 1:
        problems.append(f"top_p={options.top_p}: it must be above 0 and at most 1 (all tokens)")
    if problems:
        raise JobError(problems)
