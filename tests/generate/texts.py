"""Texts by an engine, and by one forward pass per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import Engine, GenerationRequest
from phalanx.generate.sampling import Sampling
from phalanx.model.transformer import Transformer


def requests(prompts: Sequence[Sequence[int]], **options: Any) -> list[GenerationRequest]:
    return [GenerationRequest(list(prompt), Sampling(**options)) for prompt in prompts]


def by_engine(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Prompts with their new tokens, generated together."""
    texts = requests(prompts, **options)
    engine.run(texts)
    assert {text.finish for text in texts} <= {"length"}
    return [text.tokens for text in texts]


def alone(decoder: Decoder, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The same texts, each by an engine of its own."""
    return [by_engine(Engine(decoder), [prompt], **options)[0] for prompt in prompts]


@torch.inference_mode()
def greedy(model: Transformer, prompt: Sequence[int], new: int) -> list[int]:
    """The text by a forward pass over the last seq_len tokens for each new one."""
    text = torch.tensor([list(prompt)])
    for _ in range(new):
        best = model(text[:, -model.config.seq_len :])[:, -1].argmax(dim=-1)
        text = torch.cat((text, best[:, None]), dim=1)
    return text[0].tolist()


def generate(model: Transformer, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
    """Continues prompts (batch, prompt): (batch, prompt + new)."""
    return torch.tensor(by_engine(Engine(Decoder.whole(model)), prompts.tolist(), **options))
