from __future__ import annotations

import pytest
import torch

from generate.texts import generate
from model.kinds import KINDS, build, tokens
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import Engine, GenerationRequest, distribution
from phalanx.generate.sampling import Sampling

kinds = pytest.mark.parametrize("model", [KINDS["gpt2"], KINDS["llama"]], ids=["gpt2", "llama"])


@kinds
@pytest.mark.parametrize("prompt", [1, 5, 12, 15])
def test_greedy_text_equals_one_forward_pass_a_token(model: ModelConfig, prompt: int):
    """Below, at and beyond the context length of 12, where the model sees the last 12 tokens."""
    transformer, inputs = build(model), tokens(model, 3, prompt)
    expected = inputs
    for _ in range(10):
        best = transformer(expected[:, -model.seq_len :])[:, -1].argmax(dim=-1)
        expected = torch.cat((expected, best[:, None]), dim=1)
    assert torch.equal(generate(transformer, inputs, max_new_tokens=10, temperature=0), expected)


@kinds
def test_the_seed_decides_the_text(model: ModelConfig):
    transformer, inputs = build(model), tokens(model, 2, 4)
    texts = [generate(transformer, inputs, max_new_tokens=20, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert torch.equal(texts[2][:, :4], inputs)


def test_each_new_token_is_handed_on():
    seen: list[int] = []
    request = GenerationRequest([3, 1], Sampling(6), on_token=seen.append)
    Engine(Decoder.whole(build(KINDS["gpt2"]))).run([request])
    assert request.new_tokens == seen
    assert (len(seen), request.finish) == (6, "length")


def test_no_new_tokens_returns_the_prompt():
    transformer, inputs = build(KINDS["gpt2"]), tokens(KINDS["gpt2"], 2, 4)
    assert torch.equal(generate(transformer, inputs, max_new_tokens=0), inputs)


PROBABILITIES = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [0.4, 0.3, 0.2, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_p": 0.65}, [0.4, 0.3, 0, 0]),
        ({"top_p": 0.75}, [0.4, 0.3, 0.2, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0.4, 0.3, 0, 0]),  # of the three kept, two reach 0.7 / 0.9
    ],
)
def test_tokens_are_drawn_from_the_kept_probabilities(options: dict, weights: list[float]):
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    found = distribution(PROBABILITIES.log(), Sampling(1, **options))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_top_p_follows_the_order_of_probabilities_not_of_tokens():
    kept = distribution(PROBABILITIES.flip(0).log(), Sampling(1, top_p=0.65))
    torch.testing.assert_close(kept, torch.tensor([0, 0, 3 / 7, 4 / 7], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1: it must be 0 or more"),
        ({"temperature": -0.5}, "temperature=-0.5: it must be 0"),
        ({"top_k": -1}, "top_k=-1: it must be 0"),
        ({"top_p": 0.0}, "top_p=0.0: it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5: it must be above 0 and at most 1"),
        ({"temperature": float("nan")}, "temperature=nan: it must be 0"),
        ({"prompt": [3, 37]}, "tokens 3 to 37, but the model's are 0 to 36"),
        ({"prompt": []}, "the prompt is empty"),
    ],
)
def test_senseless_values_are_refused(options: dict, message: str):
    arguments = {"max_new_tokens": 1} | options
    request = GenerationRequest(arguments.pop("prompt", [1]), Sampling(**arguments))
    with pytest.raises(JobError, match=message):
        Engine(Decoder.whole(build(KINDS["gpt2"]))).run([request])
