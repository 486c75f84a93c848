"""Perplexity and lm-eval's adapter against a plain reference in float64, and the context rule."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exchange.folders import begin_texts, write_folder
from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main
from phalanx.config.corpora import BUILT_IN
from phalanx.config.job import IGNORE, Data, Job, MixSource
from phalanx.config.layout import Layout
from phalanx.data.corpus import code_points
from phalanx.data.loader import TokenData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.data.template import ChatPrompts, ChatTemplate
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from phalanx.errors import DataError, JobError
from phalanx.evaluate import harness
from phalanx.evaluate.harness import MOST_NEW_TOKENS, Prompt, RequestScorer
from phalanx.evaluate.perplexity import Perplexity, score
from phalanx.evaluate.text import (
    ScoredConversations,
    ScoredText,
    ScoringOptions,
    batches,
    count,
    legal_stride,
    other_corpus,
    read_text,
    read_texts,
    windows,
)
from phalanx.exchange.import_run import import_folder
from phalanx.generate.decoder import Decoder
from phalanx.generate.load import load_run
from phalanx.model.transformer import Transformer
from phalanx.verify.exchange import InFloat64

# Perplexity in float64 against a plain reference that computes one token at a time, on one process and on several.


BYTES = {name: dataclasses.replace(KINDS[name], vocab_size=256) for name in ("gpt2", "llama")}
"""Models of bytes with a context of 12."""
TEXT = "the quick brown fox – jumps over the lazy dog, 42 times; and again."


def scored(ranks: Any, run: Path, scoring: ScoringOptions) -> Perplexity:
    text = ByteTokenizer().encode(TEXT)
    whole = ScoredText("text", "all", text, len(TEXT.encode()))
    (found,) = score(run, 0, scoring, torch.device("cpu"), lambda job, tokenizer: [whole])
    return found


def reference(model: Transformer, tokens: np.ndarray, context: int, stride: int) -> float:
    """The mean loss, one token at a time: token t is predicted from the beginning of the first window that reads the
    token before it, where windows begin at multiples of the stride."""
    total = 0.0
    with torch.no_grad():
        for t in range(1, len(tokens)):
            window = max(0, -(-(t - context) // stride))
            logits = model(torch.from_numpy(tokens[window * stride : t])[None])[0, -1]
            total -= logits.log_softmax(-1)[tokens[t]].item()
    return total / (len(tokens) - 1)


@pytest.mark.parametrize(("context", "stride"), [(0, 0), (0, 5), (7, 1)])
@pytest.mark.parametrize("kind", BYTES)
def test_the_loss_is_that_of_a_plain_reference(ranks, tmp_path, kind, context, stride):
    model = write_run(tmp_path, BYTES[kind])
    ByteTokenizer().save(tmp_path)
    tokens = ByteTokenizer().encode(TEXT)
    [found] = ranks(scored, 1, tmp_path, ScoringOptions(Layout(), 4, context, stride))
    assert found.loss == pytest.approx(reference(model, tokens, context or 12, stride or context or 12), rel=1e-9)
    assert (found.tokens, found.bytes) == (len(tokens) - 1, len(TEXT.encode()))
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / found.bytes / math.log(2))


def test_a_run_on_pairs_is_scored_on_tokens(ranks, tmp_path):
    """Not by the loss that compares the answers of a pair."""
    model = write_run(tmp_path, BYTES["llama"], Data(corpus="preferences", path="pairs.jsonl", template="raw"))
    ByteTokenizer().save(tmp_path)
    [found] = ranks(scored, 1, tmp_path, ScoringOptions(Layout(), 3))
    assert found.loss == pytest.approx(reference(model, ByteTokenizer().encode(TEXT), 12, 12), rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(pp=2), Layout(dp_shard=2), Layout(cp=2), Layout(dp_replicate=2), Layout(tp=2, pp=2, sp=True)],
    ids=Layout.line,
)
def test_every_layout_gives_the_loss_of_one_process(ranks, tmp_path, layout):
    write_run(tmp_path, BYTES["llama"])
    ByteTokenizer().save(tmp_path)
    [alone] = ranks(scored, 1, tmp_path, ScoringOptions(Layout(), 4, 0, 5))
    for found in ranks(scored, layout.world, tmp_path, ScoringOptions(layout, 2, 0, 5)):
        assert found.loss == pytest.approx(alone.loss, rel=1e-9)
        assert dataclasses.replace(found, loss=alone.loss) == alone


def conversations(ranks: Any, run: Path, data: Data) -> Perplexity:
    def read(job: Job, tokenizer: Tokenizer) -> list[ScoredText | ScoredConversations]:
        return read_texts(data, tokenizer, "val", job.model.seq_len)

    (found,) = score(run, 0, ScoringOptions(Layout(dp_shard=ranks.world), 2), torch.device("cpu"), read)
    return found


def test_conversations_are_scored_as_they_are_trained_on_their_answers(ranks, tmp_path):
    model = write_run(tmp_path, BYTES["llama"])
    ByteTokenizer().save(tmp_path)
    rows = [{"prompt": f"{n}?", "completion": "ab" * (n % 3 + 1)} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(
        corpus="chat",
        path=str(tmp_path / "rows.jsonl"),
        template="raw",
        tokenizer="byte",
        val_fraction=0.5,
        dir=str(tmp_path / "data"),
    )
    samples = open_split(prepare(data), "val", 12, data)
    every = np.arange(samples.sample_count)
    micro = samples.micro_batch(every, every)
    targets = torch.from_numpy(micro.targets)
    with torch.no_grad():
        logs = model(torch.from_numpy(micro.tokens)).log_softmax(-1)
    losses = -logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != IGNORE]
    for found in [*ranks(conversations, 1, tmp_path, data), *ranks(conversations, 2, tmp_path, data)]:
        assert found.loss == pytest.approx(losses.mean().item(), rel=1e-9)
        assert (found.tokens, found.bytes, found.bits_per_byte) == (len(losses), None, None)
    pairs = dataclasses.replace(data, corpus="preferences")
    with pytest.raises(DataError, match="holds pairs, which have no perplexity"):
        read_text(pairs, ByteTokenizer(), "val", 12)
    with pytest.raises(DataError, match="give --split train or --split val"):
        read_text(data, ByteTokenizer(), "all", 12)


def test_splits_are_the_tokens_of_the_shards_and_their_bytes_add_up(tmp_path):
    lines = [f'{{"body": "document {n}: naïve – {"x" * n}"}}' for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = Data(
        corpus="text", path=str(tmp_path / "a.jsonl"), text_field="body", dir=str(tmp_path / "data"), val_fraction=0.3
    )
    shards = prepare(data)
    tokenizer = CharTokenizer.load(shards)
    sizes = {}
    for split in ("train", "val"):
        text, stored = read_text(data, tokenizer, split, 4), TokenData(shards, split, 4)
        assert np.array_equal(text.tokens, stored.read(0, stored.tokens))
        sizes[split] = text.bytes
    whole = read_text(data, tokenizer, "all", 4)
    assert whole.bytes == sum(sizes.values()) == sum(len(json.loads(line)["body"].encode()) for line in lines)
    limited = read_text(data, tokenizer, "all", 4, limit_mb=100e-6)
    assert limited.bytes == 100
    assert np.array_equal(limited.tokens, whole.tokens[: len(limited.tokens)])
    assert code_points("x").size == 1


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", BYTES["gpt2"])
    ByteTokenizer().save(tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "run"


def test_runs_are_shown_side_by_side(run, capsys):
    assert main(["evaluate", "run", "run", "--files", "text.txt", "--stride", "3", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first == second
    assert (first["text"], first["split"], first["context"], first["stride"]) == ("text.txt", "all", 12, 3)
    assert first["tokens"] == len(TEXT.encode()) - 1
    assert main(["evaluate", "run", "run", "--files", "text.txt", "--stride", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    columns = ["run", "step", "text", "split", "tokens", "bytes", "loss/token", "perplexity", "loss/byte", "bits/byte"]
    assert out[0].split() == columns
    assert out[1] == out[2]
    assert out[1].split()[6] == f"{first['loss']:.4f}"
    assert out[3] == "windows of 12 tokens every 3; losses in nats"


@pytest.mark.parametrize("begin", [[0], [0, 5]])
def test_windows_of_an_imported_model_begin_as_its_tokenizer_begins_texts(tmp_path, capsys, begin):
    """As in transformers, where a text begins with <s>, and in llama.cpp, where every window does."""
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path / "theirs")
    begin_texts(tmp_path / "theirs", begin)
    import_folder([tmp_path / "theirs"], tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "theirs"), dtype=torch.float64)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "theirs" / "tokenizer.json"))
    argv = ["evaluate", str(tmp_path / "run"), "--files", str(tmp_path / "text.txt")]
    for text, stride in (("hello world", 0), (TEXT, 0), (TEXT, 7)):
        (tmp_path / "text.txt").write_text(text)
        assert main([*argv, "--stride", str(stride), "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["runs"]
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        assert ids[: len(begin)].tolist() == begin
        losses, done, step = [], len(begin) - 1, stride or 33 - len(begin)
        for start in range(0, len(ids), step):
            if (end := min(start + 32, len(ids) - 1)) <= done:
                break
            inputs = ids[start:end].clone()
            inputs[: len(begin)] = torch.tensor(begin)
            with torch.no_grad(), InFloat64():
                likely = theirs(inputs[None]).logits[0].log_softmax(-1)
            losses += [-likely[at - start - 1, ids[at]].item() for at in range(done + 1, end + 1)]
            done = end
        assert found["tokens"] == len(losses) == len(ids) - len(begin)
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
        assert found["begins_with"] == tokenizer.decode(begin)
    assert main([*argv, "--stride", "32"]) == (2 if begin[1:] else 0)
    found = capsys.readouterr()
    assert "every 32, each beginning with <|endoftext|>; losses" in found.out or "nearest legal: 31" in found.err


def test_every_mistake_is_told_at_once(run, capsys):
    assert main(["evaluate", "run", "--corpus", "stdlb", "--files", "x", "--batch-size", "0", "--strid", "3"]) == 2
    error = capsys.readouterr().err
    for problem in ("unknown option --strid; did you mean --stride?", "no corpus 'stdlb'; did you mean stdlib?"):
        assert problem in error
    assert "--corpus and --files both name a text" in error
    assert "--batch-size: must be at least 1, is 0" in error
    assert main(["evaluate", "none", "--files", "text.txt"]) == 2
    assert "no run in none" in capsys.readouterr().err
    assert main(["evaluate", "run", "--files", "absent.txt"]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    assert main(["evaluate", "run", "--files", "text.txt", "--layout", "tp=3"]) == 2
    assert "tp" in capsys.readouterr().err


def test_every_source_of_a_mixture_is_scored_for_itself(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 50)
    sources = tuple(MixSource(str(tmp_path / f"{name}.txt"), 1) for name in "ab")
    data = Data(corpus="mix", mix=sources, dir=str(tmp_path / "data"))
    tokenizer = CharTokenizer.load(prepare(data))
    found = read_texts(data, tokenizer, "val", 4)
    assert [(text.name, text.bytes) for text in found] == [(source.path, 35) for source in sources]
    assert other_corpus(data, "stdlib", None, "text") == Data(corpus="stdlib", dir=data.dir)


# The context rule: each token but the first is scored once, with the stated context.

SIZES = st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12)).filter(lambda each: each[2] <= each[1])


@given(SIZES)
def test_each_token_is_scored_once_with_the_context_that_the_stride_leaves(sizes):
    tokens, context, stride = sizes
    scored = {}
    found = list(windows(tokens, context, stride))
    for number, window in enumerate(found):
        assert window.start == number * stride
        assert window.length <= context
        for place in range(window.start + window.length - window.scored, window.start + window.length):
            assert place + 1 not in scored
            scored[place + 1] = place + 1 - window.start
    assert set(scored) == set(range(1, tokens))
    assert len(found) == count(tokens, context, stride)
    assert all(before >= min(token, context - stride + 1) for token, before in scored.items())


@given(SIZES, st.integers(1, 3), st.integers(1, 3))
def test_all_ranks_together_have_every_target_in_equally_many_batches(sizes, micro_batch, ranks):
    tokens, context, stride = sizes
    text = np.arange(tokens) + 5
    found = list(windows(tokens, context, stride))
    options = {"context": context, "micro_batch": micro_batch, "ranks": ranks}
    made = [list(batches(text, found, rank=rank, **options)) for rank in range(ranks)]
    assert len({len(each) for each in made}) == 1
    targets = [micro.targets[micro.targets != IGNORE] for each in made for micro in each]
    assert sorted(np.concatenate([*targets, np.empty(0, np.int64)]).tolist()) == text[1:].tolist()
    for micro in (micro for each in made for micro in each):
        scored = micro.targets != IGNORE
        assert np.array_equal(micro.tokens[scored] + 1, micro.targets[scored])


def test_documents_are_numbered_from_each_windows_first():
    text = np.array([3, 9, 9, 4, 9, 5, 9, 9, 6])  # separator 9 9
    found = list(windows(len(text), 4, 4))
    micro = next(batches(text, found, context=4, micro_batch=2, separator=(9, 9)))
    assert micro.documents is not None
    assert micro.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert next(batches(text, found, context=4, micro_batch=2)).documents is None


def test_illegal_windows_are_refused_with_the_nearest_legal_ones():
    assert legal_stride(0, 0, 16) == (16, 16)
    assert legal_stride(8, 2, 16) == (8, 2)
    with pytest.raises(JobError, match=r"1 ≤ --context 20 ≤ seq_len 16 does not hold; nearest legal: 16"):
        legal_stride(20, 0, 16)
    with pytest.raises(JobError, match=r"1 ≤ --stride 9 ≤ context 8 does not hold.*nearest legal: 8"):
        legal_stride(8, 9, 16)


# lm-eval's adapter: its requests against a plain reference in float64, and a task with a stand-in for the harness.

LLAMA = dataclasses.replace(KINDS["llama"], vocab_size=256)
"""A model of bytes with a context of 12."""
NEWLINE = ord("\n")


@pytest.fixture(scope="module")
def harness_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    write_run(path, LLAMA)
    ByteTokenizer().save(path)
    return path


def scorer_of(harness_run, batch_size: int) -> RequestScorer:
    loaded = load_run(harness_run, device="cpu")
    assert isinstance(loaded.decoder, Decoder)
    return RequestScorer(loaded.decoder, loaded.tokenizer, batch_size)


def logs(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0, -1].log_softmax(-1)


def test_likelihoods_are_those_of_a_plain_reference(harness_run):
    """Short, with spaces between, without a context, with one that is too long, and longer than the model's context."""
    scorer = scorer_of(harness_run, 2)
    pairs = [("ab", "cd"), ("ab ", "cd"), ("", "xyz"), ("a" * 30, "bc"), ("ab", "x" * 20), ("a", "b")]
    found = scorer.likelihoods(pairs)
    for (before, after), each in zip(pairs, found, strict=True):
        stripped = before.rstrip()
        tokens = list((before + after).encode()) if stripped else [NEWLINE, *(before + after).encode()]
        own = len(stripped) or 1
        value, greedy, end = 0.0, True, len(tokens)
        for place in range(own, len(tokens)):
            # Windows of 12 predictions, counted from the end.
            start = max(0, end - 13 - (end - 1 - place) // 12 * 12)
            chosen = logs(scorer.decoder.model, tokens[start:place])
            value += chosen[tokens[place]].item()
            greedy &= int(chosen.argmax()) == tokens[place]
        assert each.value == pytest.approx(value, rel=1e-9)
        assert each.greedy == greedy


def test_a_rolling_likelihood_covers_the_text_once(harness_run):
    scorer = scorer_of(harness_run, 3)
    texts = ["the quick brown fox jumps", "a", ""]
    for text, found in zip(texts, scorer.rolling(texts), strict=True):
        tokens = [NEWLINE, *text.encode()]
        value = sum(
            logs(scorer.decoder.model, tokens[(place - 1) // 12 * 12 : place])[tokens[place]].item()
            for place in range(1, len(tokens))
        )
        assert found == pytest.approx(value, rel=1e-9)


def test_a_greedy_answer_is_the_likeliest_one_and_ends_before_the_first_stop(harness_run):
    scorer = scorer_of(harness_run, 2)
    [whole] = scorer.continuations([Prompt("ab", [], 10)])
    assert "ab" + whole == load_run(harness_run, device="cpu").text("ab", max_new_tokens=10, temperature=0)
    stop = whole[3:5]
    cut, other, short = scorer.continuations(
        [Prompt("ab", ["no such", stop], 10), Prompt("xyz", [], 10), Prompt("", [], 4)]
    )
    assert cut == whole[: whole.index(stop)]
    assert "xyz" + other == load_run(harness_run, device="cpu").text("xyz", max_new_tokens=10, temperature=0)
    assert len(short) <= 4


def test_texts_and_contexts_of_an_imported_model_begin_as_its_tokenizer_begins_them(harness_run):
    plain = scorer_of(harness_run, 2)
    begun = scorer_of(harness_run, 2)
    begun.tokenizer.begin_ids = (7,)
    pairs = [("ab", "cd"), ("", "xyz")]
    assert begun.likelihoods(pairs) == plain.likelihoods([(f"\a{before}", after) for before, after in pairs])
    assert begun.rolling(["abc"]) == [plain.likelihoods([("\a", "abc")])[0].value]
    prompts = [Prompt("ab", [], 5), Prompt("", [], 5)]
    told = plain.continuations([dataclasses.replace(each, text=f"\a{each.text}") for each in prompts])
    assert begun.continuations(prompts) == told


def test_chat_contexts_are_the_templates_and_answers_end_where_its_own_do(harness_run):
    plain = scorer_of(harness_run, 2)
    source = BUILT_IN["chatml"].jinja
    chat = ChatPrompts(ChatTemplate(source, {}, "a test", trusted=True), plain.tokenizer)
    scorer = dataclasses.replace(plain, chat=chat)
    text = chat.text([{"role": "user", "content": "ab"}])
    assert text.endswith("<|im_start|>assistant\n")
    assert scorer.likelihoods([(text, "cd")]) == plain.likelihoods([(text, "cd")])
    [whole] = plain.continuations([Prompt(text, [], 8)])
    chat._end = whole[3:5]
    assert scorer.continuations([Prompt(text, ["no such"], 8)]) == [whole[: whole.index(whole[3:5])]]


class StandIn:
    """lm_eval as far as the adapter uses it: one task with one request of each kind."""

    def __init__(self, **options) -> None:
        self.all_tasks = ["mine"]

    @staticmethod
    def simple_evaluate(model, tasks, limit, **options):
        def request(*args):
            return [SimpleNamespace(args=args)]

        [(value, greedy)] = model.loglikelihood(request("ab", "cd"))
        [rolling] = model.loglikelihood_rolling(request("abc"))
        if options["apply_chat_template"]:
            assert model.chat_template(True) == BUILT_IN["chatml"].jinja
            before = model.apply_chat_template([{"role": "user", "content": "ab"}])
            assert before == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        [text] = model.generate_until(request("ab", {"until": "\n", "max_gen_toks": 3, "do_sample": False}))
        assert isinstance(greedy, bool)
        return {"results": {tasks[0]: {"alias": "x", "ll": value, "rolling": rolling, "length": len(text), "n": "N/A"}}}


@pytest.fixture
def stand_in(monkeypatch):
    for name, content in {
        "lm_eval": {"simple_evaluate": StandIn.simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": type("LM", (), {"__init__": lambda self: None})},
        "lm_eval.tasks": {"TaskManager": StandIn},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "find_spec", lambda name: object())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_task_runs_through_the_verb(harness_run, stand_in, capsys):
    assert main(["evaluate", str(harness_run), "--tasks", "mine", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"].values()
    assert found["mine"].keys() == {"ll", "rolling", "length"}
    expected = scorer_of(harness_run, 8)
    assert found["mine"]["ll"] == pytest.approx(expected.likelihoods([("ab", "cd")])[0].value, rel=1e-9)
    assert found["mine"]["rolling"] == pytest.approx(expected.rolling(["abc"])[0], rel=1e-9)
    assert main(["evaluate", str(harness_run), "--tasks", "mine"]) == 0
    assert f"{harness_run}  mine  ll: {found['mine']['ll']:.4f}" in capsys.readouterr().out


def test_tasks_are_asked_by_the_runs_chat_template(harness_run, stand_in, capsys, tmp_path):
    argv = ["evaluate", str(tmp_path / "chat"), "--tasks", "mine", "--chat", "--json"]
    shutil.copytree(harness_run, tmp_path / "chat")
    assert main(argv) == 2
    assert "has no chat template: train on data.corpus=chat" in capsys.readouterr().err
    (tmp_path / "chat/chat_template.jinja").write_text(BUILT_IN["chatml"].jinja)
    assert main(argv) == 0
    assert main(["evaluate", str(harness_run), "--chat"]) == 2
    assert "--chat is for tasks of lm-eval: name some with --tasks" in capsys.readouterr().err


def test_mistakes_about_tasks_are_told(harness_run, stand_in, capsys, monkeypatch):
    assert main(["evaluate", str(harness_run), "--tasks", "yours, minne,mine"]) == 2
    refusal = capsys.readouterr().err
    assert "lm-eval has no task yours (your own: --include-path FOLDER" in refusal
    assert "lm-eval has no task minne; did you mean mine?" in refusal
    assert main(["evaluate", str(harness_run), "--tasks", "mine", "--layout", "tp=2"]) == 2
    assert "--layout: tasks of lm-eval bring their own texts, and run on one process" in capsys.readouterr().err
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert main(["evaluate", str(harness_run), "--tasks", "mine"]) == 2
    assert 'needs lm-eval, not installed here: pip install "phalanx[lm-eval]"' in capsys.readouterr().err


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{before}"
doc_to_target: "{{{{after}}}}"
metric_list: [{{metric: {metric}}}]
{more}
"""


def test_the_harness_itself_runs_tasks_of_each_kind(harness_run, tmp_path, monkeypatch, capsys):
    """Where lm-eval is installed, without a network."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    likely, answer = (
        scorer_of(harness_run, 8).continuations([Prompt("ab", ["\n"], most)])[0] for most in (1, MOST_NEW_TOKENS)
    )
    rows = [{"before": "ab", "after": answer, "choices": [likely, "zz" + likely]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "choice": ("multiple_choice", "{{before}}", "acc", "doc_to_choice: choices"),
        "text": ("loglikelihood_rolling", "", "byte_perplexity", ""),
        "answer": (
            "generate_until",
            "{{before}}",
            "exact_match",
            'generation_kwargs: {until: ["\\n"]}',
        ),
    }
    for name, (kind, before, metric, more) in kinds.items():
        task = TASK.format(name=name, folder=tmp_path, kind=kind, before=before, metric=metric, more=more)
        task = task.replace('"{{after}}"', "0") if name == "choice" else task
        (tmp_path / f"{name}.yaml").write_text(task)
    argv = ["evaluate", str(harness_run), "--tasks", "choice, text,answer", "--include-path", str(tmp_path), "--json"]
    assert main(argv) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"].values()
    assert (found["choice"]["acc,none"], found["answer"]["exact_match,none"]) == (1.0, 1.0)
    [value] = scorer_of(harness_run, 8).rolling([answer])
    assert found["text"]["byte_perplexity,none"] == pytest.approx(math.exp(-value / len(answer.encode())))
