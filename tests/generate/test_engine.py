"""Texts that are generated together against each alone, and against one forward pass per token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generate.texts import alone, by_engine, greedy, requests
from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, STRUCTURE_KINDS, build, tokens
from phalanx.config.model import ModelConfig
from phalanx.generate.decoder import Decoder
from phalanx.generate.engine import Engine, GenerationRequest
from phalanx.generate.sampling import Sampling

ALL = {**{name: KINDS[name] for name in ("gpt2", "llama")}, **MOE_AND_MLA, **ATTENTION_KINDS, **STRUCTURE_KINDS}
every_kind = pytest.mark.parametrize("model", ALL.values(), ids=list(ALL))


def prompts_of(model: ModelConfig, *lengths: int) -> list[list[int]]:
    """Below, at and beyond the context length of 12, after which the model sees the last 12 tokens."""
    return [tokens(model, 1, length, seed=length)[0].tolist() for length in lengths or (1, 7, 12, 15)]


@every_kind
def test_texts_together_are_those_of_each_alone(model: ModelConfig):
    """The second reaches the context's end; the third waits until one of them has ended, and begins beyond it."""
    decoder, prompts = Decoder.whole(build(model)), prompts_of(model, 3, 10, 14)
    options = {"max_new_tokens": 4, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}
    assert by_engine(Engine(decoder, max_batch=2), prompts, **options) == alone(decoder, prompts, **options)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_texts_are_those_of_one_forward_pass_per_token(kind: str):
    model = build(KINDS[kind])
    prompts = prompts_of(KINDS[kind])
    expected = [greedy(model, prompt, 7) for prompt in prompts]
    assert by_engine(Engine(Decoder.whole(model)), prompts, max_new_tokens=7, temperature=0) == expected


def test_texts_of_different_options_share_a_batch():
    decoder, prompts = Decoder.whole(build(KINDS["llama"])), prompts_of(KINDS["llama"])
    options = [Sampling(n, temperature, seed=n) for n, temperature in ((3, 0.0), (9, 1.0), (0, 1.0), (6, 0.5))]
    texts = [GenerationRequest(prompt, sampling) for prompt, sampling in zip(prompts, options, strict=True)]
    Engine(decoder).run(texts)
    for text, prompt, sampling in zip(texts, prompts, options, strict=True):
        single = GenerationRequest(prompt, sampling)
        Engine(decoder).run([single])
        assert (text.tokens, text.finish) == (single.tokens, "length")
        assert len(text.new_tokens) == sampling.max_new_tokens


def test_samples_of_a_prompt_are_different_texts_from_one_pass():
    engine = Engine(Decoder.whole(build(KINDS["gpt2"])))
    texts = [GenerationRequest([5, 3], Sampling(6, 2.0, sample=sample)) for sample in range(3)]
    engine.run(texts)
    assert len({tuple(text.tokens) for text in texts}) == 3
    assert engine.stats.prompt_tokens == 2
    assert texts[0].tokens == alone(engine.decoder, [[5, 3]], max_new_tokens=6, temperature=2.0)[0]


def test_a_text_ends_at_its_end_token_and_where_its_owner_says():
    decoder = Decoder.whole(build(KINDS["llama"]))
    [whole] = alone(decoder, [[4, 2]], max_new_tokens=9, temperature=1.0)
    end = whole[5]
    place = whole.index(end, 2)
    by_token = GenerationRequest([4, 2], Sampling(9), ends=[end])
    by_owner = GenerationRequest([4, 2], Sampling(9), on_token=lambda token: token == end)
    Engine(decoder).run([by_token, by_owner])
    assert (by_token.tokens, by_token.finish) == (whole[:place], "stop")
    assert (by_owner.tokens, by_owner.finish) == (whole[: place + 1], "stop")


def test_requests_join_and_leave_while_others_run():
    decoder, prompts = Decoder.whole(build(KINDS["llama"])), prompts_of(KINDS["llama"])
    expected = alone(decoder, prompts, max_new_tokens=9)
    engine, ended = Engine(decoder, max_batch=2), []
    texts = requests(prompts, max_new_tokens=9)
    leaver = GenerationRequest([1], Sampling(100), on_end=lambda: ended.append("leaver"))
    engine.submit(leaver)
    engine.step()
    engine.submit(texts[0])
    engine.step()
    leaver.cancel()
    for text in texts[1:]:
        engine.submit(text)
    while engine.step():
        pass
    assert [text.tokens for text in texts] == expected
    assert (leaver.finish, len(leaver.new_tokens), ended) == ("cancelled", 3, ["leaver"])


def test_aborting_ends_the_running_and_the_waiting():
    engine = Engine(Decoder.whole(build(KINDS["gpt2"])), max_batch=1)
    texts = requests([[1], [2]], max_new_tokens=50)
    for text in texts:
        engine.submit(text)
    engine.step()
    engine.abort()
    assert [text.finish for text in texts] == ["cancelled", "cancelled"]
    assert not engine.step()


def test_the_longest_context_has_its_own_room():
    """Texts of a model with a long context do not reserve all of it."""
    model = replace(KINDS["llama"], seq_len=100_000)
    decoder = Decoder.whole(build(model))
    Engine(decoder).run(requests([[1, 2, 3]], max_new_tokens=1))
    engine = Engine(decoder)
    [text] = requests([[1, 2, 3]], max_new_tokens=5)
    engine.submit(text)
    engine.step()
    [(keys, _), *_] = decoder.batches["plain"]._layers.values()
    assert keys.shape[2] < 1000
