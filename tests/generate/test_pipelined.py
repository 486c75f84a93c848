"""Text by a pipeline, whose ranks hold some layers each, against text by one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generate.written import write_run
from model.kinds import KINDS, tokens
from phalanx.errors import JobError
from phalanx.generate.pipelined import load_part
from phalanx.generate.sampling import generate

THREE_LAYERS = {name: replace(model, n_layers=3) for name, model in KINDS.items()}
"""Learned positions and a tied head (gpt2), rope and a head of its own (llama), and each the other way round."""
OPTIONS = [
    {"max_new_tokens": 12, "temperature": 0},
    {"max_new_tokens": 12, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7},
]
"""With a prompt of 5 tokens more than the context length of 12, after which the model sees the last 12."""


def texts(ranks: Any, run: Path, prompt: torch.Tensor) -> tuple[list[str], list[torch.Tensor], bool]:
    part = load_part(run, 0, torch.device("cpu"), ranks.world)
    seen: list[torch.Tensor] = []
    found = [part.tokens(prompt, on_token=seen.append, **options) for options in OPTIONS]
    streamed = torch.equal(torch.stack(seen, dim=1), torch.cat([text[:, prompt.shape[1] :] for text in found], dim=1))
    return [name for name, _ in part.model.named_parameters()], found, streamed


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "gpt2 untied", "llama", "qwen 2"])
def test_a_pipeline_generates_the_text_of_one_process(ranks, tmp_path, kind: str, world: int):
    model = THREE_LAYERS[kind]
    whole = write_run(tmp_path, model)
    prompt = tokens(model, 2, 5)
    expected = [generate(whole, prompt, **options) for options in OPTIONS]
    for _, found, streamed in ranks(texts, world, tmp_path, prompt):
        assert all(torch.equal(text, other) for text, other in zip(found, expected, strict=True))
        assert streamed


def test_each_rank_holds_its_own_layers_alone(ranks, tmp_path):
    whole = write_run(tmp_path, THREE_LAYERS["gpt2"])
    held = [names for names, _, _ in ranks(texts, 3, tmp_path, torch.tensor([[1]]))]
    tied = {"embed.weight"}
    assert set(held[0]) & set(held[2]) == tied
    assert not set(held[1]) & set(held[0] + held[2])
    assert set().union(*held) == {name for name, _ in whole.named_parameters()}
    assert all({name.split(".")[1] for name in held[rank] if "blocks" in name} == {str(rank)} for rank in range(3))


def test_a_rank_without_a_layer_is_refused(ranks, tmp_path):
    write_run(tmp_path, KINDS["gpt2"])
    with pytest.raises(JobError, match=r"1 ≤ pp 3 ≤ n_layers 2 does not hold.*nearest legal: pp 2"):
        ranks(texts, 3, tmp_path, torch.tensor([[1]]))
