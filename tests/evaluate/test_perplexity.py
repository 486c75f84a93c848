"""Perplexity in float64 against a plain reference that computes one token at a time, on one process and on several."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main
from phalanx.config.job import IGNORE, Data, Job, MixSource
from phalanx.config.layout import Layout
from phalanx.data.corpus import code_points
from phalanx.data.loader import TokenData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from phalanx.errors import DataError
from phalanx.evaluate.perplexity import Perplexity, ScoringOptions, score
from phalanx.evaluate.text import ScoredConversations, ScoredText, other_corpus, read_text, read_texts
from phalanx.model.transformer import Transformer

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
