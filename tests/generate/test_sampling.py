"""Sampling and speculative decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generate.texts import alone, by_engine, generate
from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, build, tokens
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import (
    Engine,
    GenerationRequest,
    accept,
    acceptance,
    distribution,
    expected_speedup,
    expected_tokens,
    require_match,
    residual,
)
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


# Speculative decoding: the same text where it is greedy, the same distribution where it is not.

LONG = 20
GREEDY_KINDS = {**{name: KINDS[name] for name in ("gpt2", "llama")}, **MOE_AND_MLA, **ATTENTION_KINDS}
WITHOUT_CAPACITY = {name: kind for name, kind in GREEDY_KINDS.items() if not kind.moe.capacity}


def near(model: ModelConfig, noise: float) -> tuple[Decoder, Decoder]:
    """A model, and an assistant that agrees with it more or less often."""
    whole, other = build(model), build(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=noise)
    return Decoder.whole(whole), Decoder.whole(other)


@pytest.mark.parametrize("kind", WITHOUT_CAPACITY)
def test_greedy_texts_are_those_of_the_model_alone(kind: str):
    """Three prompts, in batches of two; the longest reaches the context's end."""
    model = replace(WITHOUT_CAPACITY[kind], seq_len=LONG)
    decoder, assistant = near(model, 0.05)
    prompts = [tokens(model, 1, length, seed=length)[0].tolist() for length in (1, 6, 13)]
    engine = Engine(decoder, assistant, draft_tokens=3, max_batch=2)
    assert by_engine(engine, prompts, max_new_tokens=9, temperature=0) == alone(
        decoder, prompts, max_new_tokens=9, temperature=0
    )
    assert 0 < engine.stats.accepted < engine.stats.proposed


def test_many_greedy_texts_with_another_assistant_of_a_shorter_context():
    """Thirty prompts. The assistant's context ends first, and then the model's."""
    decoder = Decoder.whole(build(replace(KINDS["llama"], seq_len=30)))
    small = replace(KINDS["gpt2"], seq_len=20, n_layers=1)
    prompts = [tokens(small, 1, 1 + seed % 25, seed=seed)[0].tolist() for seed in range(30)]
    expected = alone(decoder, prompts, max_new_tokens=14, temperature=0)
    engine = Engine(decoder, Decoder.whole(build(small)), draft_tokens=5, max_batch=16)
    assert by_engine(engine, prompts, max_new_tokens=14, temperature=0) == expected


def test_an_assistant_that_is_the_model_is_always_right():
    decoder, assistant = near(replace(KINDS["llama"], seq_len=LONG), 0.0)
    engine = Engine(decoder, assistant, draft_tokens=4)
    by_engine(engine, [[1, 2], [3]], max_new_tokens=11, temperature=0)
    assert engine.stats.accepted == engine.stats.proposed
    assert engine.stats.summary()["tokens_per_pass"] == 5


probabilities = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.1)


@given(probabilities, probabilities)
def test_the_rule_keeps_the_models_distribution(model: list[float], assistant: list[float]):
    """In closed form: a token is proposed and accepted, or any is rejected and this one drawn in its place."""
    p, q = (torch.tensor(x, dtype=torch.float64) / sum(x) for x in (model, assistant))
    accepted = q * acceptance(p, q)
    rejected = 1 - accepted.sum()
    torch.testing.assert_close(accepted + rejected * residual(p, q), p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 0}])
def test_the_texts_of_a_round_have_the_models_distribution(options: dict):
    """Every text of three tokens over a vocabulary of three, enumerated: two proposed, accepted or not, and one more,
    continued by the model alone."""
    sampling, vocab, generator = Sampling(1, **options), 3, torch.Generator().manual_seed(1)
    logits = torch.randn(2, vocab**2 + vocab + 1, vocab, generator=generator, dtype=torch.float64)
    p, q = distribution(logits[0], sampling), distribution(logits[1], sampling)

    def place(text: tuple[int, ...]) -> int:
        return {0: 0, 1: 1 + sum(text), 2: 1 + vocab + sum(text[:1]) * vocab + sum(text[1:])}[len(text)]

    def alone_from(text: tuple[int, ...], chance: float) -> None:
        if len(text) == 3:
            found[text] = found.get(text, 0.0) + chance
            return
        for token in range(vocab):
            alone_from((*text, token), chance * float(p[place(text)][token]))

    def proposed_from(text: tuple[int, ...], chance: float) -> None:
        if len(text) == 2:
            alone_from(text, chance)
            return
        of_model, of_assistant = p[place(text)], q[place(text)]
        kept = of_assistant * acceptance(of_model, of_assistant)
        rejected = float(1 - kept.sum())
        for token in range(vocab):
            alone_from((*text, token), chance * rejected * float(residual(of_model, of_assistant)[token]))
            proposed_from((*text, token), chance * float(kept[token]))

    found: dict[tuple[int, ...], float] = {}
    proposed_from((), 1.0)
    expected = {
        text: float(p[0][text[0]] * p[place(text[:1])][text[1]] * p[place(text[:2])][text[2]])
        for text in itertools.product(range(vocab), repeat=3)
    }
    assert all(abs(found.get(text, 0.0) - chance) < 1e-12 for text, chance in expected.items())


def test_samples_of_the_rule_have_the_models_distribution():
    """The first two tokens of 4,000 rounds against the model, by chi-square."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    counts = torch.zeros(3, 4)
    rounds = 4_000
    for proposed in torch.multinomial(q[0], rounds, replacement=True, generator=generator).tolist():
        first, *rest = accept(p, q, [proposed], generator)
        counts[first, rest[0] if rest else 3] += 1
    # The second token comes with the first where that was accepted, with probability min(p, q) (else column 3).
    kept = torch.minimum(p[0], q[0])
    expected = torch.cat((kept[:, None] * p[1], (p[0] - kept)[:, None]), dim=1) * rounds
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 29.6  # 10 degrees of freedom, 0.1 %


def test_sampled_texts_have_the_models_distribution():
    """1,000 texts of two tokens by an engine, over a vocabulary of four, against the model's probabilities."""
    model = replace(KINDS["gpt2"], vocab_size=4, seq_len=16)
    decoder, assistant = near(model, 0.3)
    options = {"max_new_tokens": 3, "temperature": 0.9, "top_k": 3}
    texts = [GenerationRequest([1, 2], Sampling(**options, sample=sample)) for sample in range(1000)]
    engine = Engine(decoder, assistant, draft_tokens=2, max_batch=500)
    engine.run(texts)
    assert 0.2 < engine.stats.alpha < 0.98
    counts = torch.zeros(4, 4, 4)
    for text in texts:
        counts[*text.new_tokens] += 1
    expected = torch.zeros(4, 4, 4, dtype=torch.float64)
    sampling = Sampling(**options)

    def after(text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return distribution(decoder.model(torch.tensor([text]))[0, -1], sampling)

    for first, chance in enumerate(after([1, 2])):
        for second, then in enumerate(after([1, 2, first])):
            expected[first, second] = chance * then * after([1, 2, first, second])
    expected *= len(texts)
    assert not counts[expected == 0].any()
    large = expected >= 5
    chi_square = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    degrees = int(large.sum())
    assert chi_square < degrees + 3.5 * (2 * degrees) ** 0.5


def test_the_expected_tokens_are_the_papers():
    """Leviathan et al. 2023: equation 1 and theorem 3.8, against sums over where the first rejection is."""
    for alpha, drafts in ((0.0, 3), (0.5, 1), (0.8, 4), (1.0, 5)):
        by_sum = sum(alpha**n for n in range(drafts + 1))
        assert expected_tokens(alpha, drafts) == pytest.approx(by_sum)
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((KINDS["llama"], 37, 40, False, 4), "the assistant's vocabulary has 40 tokens, the model's 37"),
        ((KINDS["llama"], 37, 37, False, 4), "tokenizers of model and assistant differ"),
        ((KINDS["llama"], 37, 37, True, 0), "draft_tokens=0: the assistant must propose at least 1"),
    ],
)
def test_an_assistant_that_does_not_suit_is_refused(arguments: tuple, message: str):
    with pytest.raises(JobError, match=message):
        require_match(*arguments)


def test_a_mixture_with_a_capacity_takes_no_assistant():
    model = next(kind for kind in MOE_AND_MLA.values() if kind.moe.n_experts)
    model = replace(model, moe=replace(model.moe, capacity=1.5))
    with pytest.raises(JobError, match="drops tokens by how many come together"):
        require_match(model, 37, 37, True, 4)
