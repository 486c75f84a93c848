"""Runs on a mixture of sources: resuming draws what an unbroken run draws, and the rows say what was drawn."""

import dataclasses
import json
import math

import pytest
import torch

from phalanx.config.job import Data, MixSource
from phalanx.config.layout import Layout
from phalanx.errors import JobError, StoppedError
from train.runs import change, losses, rows, train, weights


@pytest.fixture
def mixed(job, tmp_path):
    """A job on three sources, twelve samples a step."""
    sources = []
    for name, weight in (("a", 5.0), ("b", 3.0), ("c", 2.0)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i * i % 97} " for i in range(900)))
        sources.append(MixSource(str(tmp_path / f"{name}.txt"), weight))
    return dataclasses.replace(job, data=Data(corpus="mix", mix=tuple(sources), dir=str(tmp_path / "data")))


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=2, bucket_mb=0.01)], ids=lambda layout: layout.line())
def test_resuming_gives_the_bits_of_an_unbroken_run(ranks, mixed, layout):
    job = dataclasses.replace(mixed, layout=layout)
    ranks(train, layout.processes, job)
    broken = change(job, "run", name="broken")
    for stop_at in (2, 5):
        with pytest.raises(StoppedError):
            ranks(train, layout.processes, broken, stop_at)
    ranks(train, layout.processes, broken)
    straight, resumed = weights(job), weights(broken)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert losses(broken) == losses(job)
    drawn = [row["source_tokens"] for row in rows(job, "step")]
    assert [row["source_tokens"] for row in rows(broken, "step")] == drawn
    assert list(drawn[-1].values()) == [36 * 16, 22 * 16, 14 * 16]


def test_resuming_with_other_numbers_of_ranks_reads_the_same_samples(ranks, mixed):
    """Float64 sums of other groups differ in the last bits; what is read does not."""
    ranks(train, 1, mixed)
    moved = change(mixed, "run", name="moved")
    for number, layout in enumerate((Layout(dp_shard=2, zero=2), Layout(dp_replicate=3), Layout(tp=2))):
        moved = dataclasses.replace(moved, layout=layout)
        if number < 2:
            with pytest.raises(StoppedError):
                ranks(train, layout.processes, moved, 2 * number + 2)
        else:
            ranks(train, layout.processes, moved)
    assert losses(moved) == pytest.approx(losses(mixed), rel=1e-9)
    tokens = [row["source_tokens"] for row in rows(mixed, "step")]
    assert [row["source_tokens"] for row in rows(moved, "step")] == tokens
    found, straight = weights(moved), weights(mixed)
    for name, tensor in straight.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


@pytest.fixture
def answered(job, tmp_path):
    """A job on conversations, questions and a text, packed."""
    for name in ("talk", "asked"):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for n in range(40):
                row = {"prompt": f"{n}" * (n % 3 + 1), "completion": name[: n % 4 + 1]}
                file.write(json.dumps(row) + "\n")
    (tmp_path / "text.txt").write_text("".join(f"{i * i % 97}\n" for i in range(900)))
    sources = (
        MixSource(str(tmp_path / "talk.jsonl"), 3.0),
        MixSource(str(tmp_path / "asked.jsonl"), 2.0),
        MixSource(str(tmp_path / "text.txt"), 1.0, corpus="text"),
    )
    data = Data(corpus="chat", mix=sources, template="raw", val_fraction=0.2, dir=str(tmp_path / "data"))
    model = dataclasses.replace(job.model, positions="rope")
    return dataclasses.replace(job, model=model, data=dataclasses.replace(data, packing=True, document_mask=True))


def test_conversations_are_resumed_by_other_numbers_of_ranks(ranks, answered):
    ranks(train, 1, answered)
    moved = change(answered, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 2, dataclasses.replace(moved, layout=Layout(dp_shard=2, zero=2)), 3)
    ranks(train, 3, dataclasses.replace(moved, layout=Layout(dp_replicate=3)))
    assert losses(moved) == pytest.approx(losses(answered), rel=1e-9)
    tokens = [row["source_tokens"] for row in rows(answered, "step")]
    assert [row["source_tokens"] for row in rows(moved, "step")] == tokens
    found, straight = weights(moved), weights(answered)
    for name, tensor in straight.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


def test_pairs_of_several_sources_are_compared_with_one_reference(ranks, answered, tmp_path):
    for name in ("p", "q"):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for n in range(30):
                file.write(json.dumps({"prompt": f"{n}", "chosen": name * (n % 3 + 1), "rejected": "no"}) + "\n")
    sources = tuple(MixSource(str(tmp_path / f"{name}.jsonl"), weight) for name, weight in (("p", 2.0), ("q", 1.0)))
    data = dataclasses.replace(answered.data, corpus="preferences", mix=sources, packing=False)
    job = dataclasses.replace(answered, data=data)
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    with pytest.raises(StoppedError):
        ranks(train, 1, moved, 2)
    ranks(train, 2, dataclasses.replace(moved, layout=Layout(dp_replicate=2)))
    assert losses(moved) == pytest.approx(losses(job), rel=1e-9)
    assert losses(job)[0] == pytest.approx(math.log(2))
    last = rows(job, "validation")[-1]
    mean = sum(w * loss for w, loss in zip((2 / 3, 1 / 3), last["source_losses"].values(), strict=True))
    assert last["val_loss"] == pytest.approx(mean, rel=1e-5)


def test_a_run_says_what_its_sources_are_and_how_each_validates(ranks, mixed):
    ranks(train, 1, mixed)
    (start,) = rows(mixed, "start")
    assert [source["weight"] for source in start["sources"]] == [0.5, 0.3, 0.2]
    last = rows(mixed, "validation")[-1]
    assert last["source_losses"].keys() == {source.path for source in mixed.data.mix}
    mean = sum(w * loss for w, loss in zip((0.5, 0.3, 0.2), last["source_losses"].values(), strict=True))
    assert last["val_loss"] == pytest.approx(mean, rel=1e-5)


def test_other_weights_and_too_few_epochs_are_refused(ranks, mixed):
    short = change(mixed, "data", mix=(*mixed.data.mix[:2], dataclasses.replace(mixed.data.mix[2], epochs=0.01)))
    with pytest.raises(JobError, match=r"data.mix: item 3 .* passes over its .* epochs is 0.01; nearest legal"):
        ranks(train, 1, short)
    with pytest.raises(StoppedError):
        ranks(train, 1, mixed, 2)
    other = change(mixed, "data", mix=tuple(dataclasses.replace(source, weight=1.0) for source in mixed.data.mix))
    with pytest.raises(JobError, match="checkpoint of another job .*\n  data.mix"):
        ranks(train, 1, other)
