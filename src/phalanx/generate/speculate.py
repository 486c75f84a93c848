"""Speculative decoding: a small assistant proposes tokens, the model checks all of them in one pass.

The rule of acceptance keeps the model's distribution exactly, whatever the assistant proposes (Leviathan et al. 2023,
section 2.3 and appendix A.1; Chen et al. 2023, algorithm 2 and theorem 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.generate.draws import draw


def acceptance(model: Tensor, assistant: Tensor) -> Tensor:
    """Returns the probability with which each token is accepted once it is proposed, min(1, p / q), (..., vocab), from
    the probabilities p of the model and q of the assistant. A token that is never proposed has 1."""
    return torch.where(assistant > 0, model / assistant, 1.0).clamp(max=1)


def residual(model: Tensor, assistant: Tensor) -> Tensor:
    """Returns the probabilities from which a token is drawn in place of a rejected one: max(0, p - q), normalised,
    (..., vocab). Where p is q, nothing is rejected; the result is p then."""
    rest = (model - assistant).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, model)


def accept(model: Tensor, assistant: Tensor, proposed: Sequence[int], generator: torch.Generator) -> list[int]:
    """Returns the next tokens: the proposed ones up to the first that is rejected, and one more, which the model draws.

    `model` (proposed + 1, vocab) are the model's probabilities after none, one, ... all of the `proposed` tokens,
    `assistant` (proposed, vocab) those from which these were drawn."""
    chances = acceptance(model[:-1], assistant)
    for place, token in enumerate(proposed):
        chance = float(chances[place, token])
        if chance < 1 and float(torch.rand((), dtype=torch.float64, generator=generator)) >= chance:
            return [*proposed[:place], draw(residual(model[place], assistant[place]), generator)]
    return [*proposed, draw(model[-1], generator)]


def expected_tokens(alpha: float, drafts: int) -> float:
    """Returns the tokens per pass of the model, where each of `drafts` tokens is accepted with probability `alpha`
    (Leviathan et al. 2023, equation 1)."""
    return drafts + 1.0 if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)


def expected_speedup(alpha: float, drafts: int, cost: float) -> float:
    """Returns how many times faster text becomes, where a step of the assistant takes `cost` times that of the model
    and checking `drafts` + 1 tokens as long as computing one (Leviathan et al. 2023, theorem 3.8)."""
    return expected_tokens(alpha, drafts) / (drafts * cost + 1)


def require_match(model: ModelConfig, vocab: int, assistant_vocab: int, same_tokenizer: bool, drafts: int) -> None:
    """Raises JobError, with everything that is in the way, unless an assistant can propose tokens to a model."""
    problems = []
    if drafts < 1:
        problems.append(f"draft_tokens={drafts}: the assistant must propose at least 1 token")
    if vocab != assistant_vocab:
        problems.append(
            f"the assistant's vocabulary has {assistant_vocab:,} tokens, the model's {vocab:,}: an assistant needs the "
            "model's vocabulary, so train it with the same tokenizer"
        )
    elif not same_tokenizer:
        problems.append(
            f"the tokenizers of model and assistant differ, although both have {vocab:,} tokens: the same number would "
            "stand for another text"
        )
    if model.moe.capacity:
        problems.append(
            f"model.moe.capacity={model.moe.capacity:g} drops tokens by how many come together, so a model that "
            "checks several tokens at once gives another text; nearest legal: no assistant"
        )
    if problems:
        raise JobError(problems)
