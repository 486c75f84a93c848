"""Texts generated together and by several ranks, against one forward pass per token; text as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generate.texts import alone, by_engine, greedy, requests
from generate.written import write_run
from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, STRUCTURE_KINDS, build, tokens
from phalanx.comm.agree import broadcast_json
from phalanx.config.model import ModelConfig
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, NumberTokenizer, train_bpe
from phalanx.errors import JobError
from phalanx.generate.decoder import STOP, Decoder, follow
from phalanx.generate.engine import Engine, GenerationRequest
from phalanx.generate.load import find_on_ranks, load_run
from phalanx.generate.ranks import load_part
from phalanx.generate.sampling import Sampling
from phalanx.generate.text import OrderedOutput, TextStream

# Texts that are generated together against each alone, and against one forward pass per token.


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


# Text by tensor and pipeline ranks, which hold parts of a model each, against text by one process.

EVERY = {**KINDS, **MOE_AND_MLA, **ATTENTION_KINDS, **STRUCTURE_KINDS}
GREEDY = {"max_new_tokens": 9, "temperature": 0}
SAMPLED = {"max_new_tokens": 4, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}


def texts(
    ranks: Any,
    run: Path,
    prompts: list[list[int]],
    tp: int,
    pp: int,
    each: Sequence[dict] = (SAMPLED,),
    assistant: Path | None = None,
) -> tuple[list[str], int, list[list[list[int]]]]:
    """This rank's parameters, the heads in its cache, and on the first rank the texts with each of the options."""
    part = load_part(find_on_ranks(run, 0), torch.device("cpu"), tp, pp)
    found = []
    if ranks.rank:
        follow(part)
    else:
        leader = replace(part, leads=True)
        other = load_run(assistant).decoder if assistant else None
        try:
            leader.prefill("heads", [1], 1, last=True)
            found = [by_engine(Engine(leader, other), prompts, **options) for options in each]
        finally:
            broadcast_json(STOP)
    heads = {keys.shape[1] for cache in part.batches.values() for keys, _ in cache._layers.values()} or {0}
    return [name for name, _ in part.model.named_parameters()], max(heads), found


def expected(model: Any, prompts: list[list[int]], options: dict = SAMPLED) -> list[list[int]]:
    return alone(Decoder.whole(model), prompts, **options)


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        *(("gpt2", 1, 3), ("gpt2 untied", 1, 2), ("llama", 2, 2), ("qwen 2", 2, 1)),
        *((name, 2, 1) for name in (*MOE_AND_MLA, *ATTENTION_KINDS, *STRUCTURE_KINDS)),
    ],
)
def test_ranks_generate_the_texts_of_one_process(ranks, tmp_path, kind: str, tp: int, pp: int):
    model = replace(EVERY[kind], n_layers=3) if pp > 1 else EVERY[kind]
    """The second text ends beyond the context length of 12."""
    whole = write_run(tmp_path, model)
    prompts = [tokens(model, 1, length, seed=length)[0].tolist() for length in (2, 10)]
    (_, _, found), *others = ranks(texts, tp * pp, tmp_path, prompts, tp, pp)
    assert found == [expected(whole, prompts)]
    assert not any(texts for _, _, texts in others)


def test_tensor_ranks_cut_the_cache_and_take_an_assistant(ranks, tmp_path):
    model = KINDS["llama"]
    whole = write_run(tmp_path / "run", model)
    write_run(tmp_path / "small", replace(KINDS["gpt2"], n_layers=1))
    prompts = [[1, 2, 3], [4]]
    (_, heads, found), *_ = ranks(texts, 2, tmp_path / "run", prompts, 2, 1, (GREEDY, SAMPLED), tmp_path / "small")
    assert found[0] == expected(whole, prompts, GREEDY)
    assert [len(text) for text in found[1]] == [7, 5]
    assert heads == model.kv_heads // 2


def test_each_pipeline_rank_holds_its_own_layers_alone(ranks, tmp_path):
    whole = write_run(tmp_path, replace(KINDS["gpt2"], n_layers=3))
    held = [names for names, _, _ in ranks(texts, 3, tmp_path, [[1]], 1, 3)]
    tied = {"embed.weight"}
    assert set(held[0]) & set(held[2]) == tied
    assert not set(held[1]) & set(held[0] + held[2])
    assert set().union(*held) == {name for name, _ in whole.named_parameters()}
    assert all({name.split(".")[1] for name in held[rank] if "blocks" in name} == {str(rank)} for rank in range(3))


def test_ranks_that_cannot_share_the_model_are_refused(ranks, tmp_path):
    write_run(tmp_path, KINDS["gpt2"])
    with pytest.raises(JobError, match=r"1 ≤ pp 3 ≤ n_layers 2 does not hold(?s:.*)n_heads 4 / tp 3"):
        ranks(texts, 3, tmp_path, [[1]], 3, 3)


# Text from tokens as they come, against the text of all tokens.

BPE = train_bpe(["the quick brown fox über den Zaun, naïve 日本語 text " * 20], 300)
TOKENIZERS = [ByteTokenizer(), BPE, CharTokenizer("abc déf\n", unknown=True)]


def streamed(tokenizer, prompt, tokens, stop=()) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(tokenizer, prompt, stop), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream


@given(st.sampled_from(TOKENIZERS), st.text("abc déf日本🙂\n", min_size=1), st.text("abc déf日本🙂\n"))
def test_the_pieces_are_the_whole_text_and_whole_characters(tokenizer, prompt, text):
    ids = tokenizer.encode(text).tolist()
    pieces, stream = streamed(tokenizer, tokenizer.encode(prompt).tolist(), ids)
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)
    if tokenizer is not TOKENIZERS[2]:
        assert not any("\ufffd" in piece for piece in pieces)


def test_numbers_keep_the_blanks_between_them():
    pieces, _ = streamed(NumberTokenizer(40), [5, 0, 17], [4, 9, 33])
    assert "".join(pieces) == " 4 9 33"


def test_bytes_that_are_no_text_come_in_the_end():
    pieces, stream = streamed(ByteTokenizer(), [65], [0xF0, 0x9F])
    assert pieces[:2] == ["", ""]
    assert stream.text == "\ufffd"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2))
def test_nothing_of_a_stop_string_is_ever_shown(text, stop):
    tokenizer = ByteTokenizer()
    pieces, stream = streamed(tokenizer, [65], tokenizer.encode(text).tolist(), stop)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    first = min(ends, default=None)  # the text ends with the token that completes a stop string
    seen = text if first is None else text[:first]
    places = [seen.find(string) for string in stop if string in seen]
    assert "".join(pieces) == (seen[: min(places)] if places else seen)
    assert stream.stopped == bool(places)


def test_texts_come_in_order_and_the_first_at_once():
    written: list[str] = []
    output = OrderedOutput(written.append, ["A:", "B:", "C:"])
    output.give(1, "b")
    output.give(0, "a")
    assert "".join(written) == "A:a"
    output.end(1)
    output.give(2, "c")
    output.end(0)
    assert "".join(written) == "A:a\nB:b\nC:c"
    output.give(2, "d")
    output.interrupt()
    assert "".join(written) == "A:a\nB:b\nC:cd\n"
