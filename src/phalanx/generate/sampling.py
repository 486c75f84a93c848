"""How the tokens of a text are chosen. Imports no torch, so that wrong values are refused at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How many tokens are generated, and how each is chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keeps that many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keeps the fewest of the likeliest tokens whose probabilities reach it; 1: all (Holtzman et al. 2020)."""
    seed: int = 1337
    """The same seed gives the same text."""
    sample: int = 0
    """Number of the text among several of the same prompt and seed."""

    def problems(self) -> Iterator[str]:
        """Yields every value that makes no sense."""
        if self.max_new_tokens < 0:
            yield f"max_new_tokens={self.max_new_tokens}: it must be 0 or more"
        if not 0 <= self.temperature < float("inf"):
            yield f"temperature={self.temperature}: it must be 0 (the likeliest token) or more"
        if self.top_k < 0:
            yield f"top_k={self.top_k}: it must be 0 (all tokens) or more"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p}: it must be above 0 and at most 1 (all tokens)"


def prompt_problems(prompt: Sequence[int], vocab: int) -> Iterator[str]:
    """Yields what is wrong with a prompt's tokens."""
    if not len(prompt):
        yield "the prompt is empty; give at least one token"
    elif min(prompt) < 0 or max(prompt) >= vocab:
        yield (
            f"the prompt contains tokens {min(prompt)} to {max(prompt)}, but the model's are 0 to {vocab - 1}: encode "
            "it with the tokenizer that the model was trained with"
        )
