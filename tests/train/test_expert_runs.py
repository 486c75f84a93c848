"""Whole runs with experts, on mixtures of sources, and on damaged data."""

import dataclasses
import json
import logging
import math
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covering import also_whole
from phalanx.config.job import Data, Job, MixSource
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.data import prepare as preparation
from phalanx.data.prepare import prepare
from phalanx.errors import DataError, JobError
from phalanx.launch.ranks import SINGLE
from phalanx.model.moe import Routing
from phalanx.parallel import mesh as meshes
from phalanx.pictures.experts import svg
from phalanx.train import agreement
from phalanx.train.callbacks import Done
from phalanx.train.metrics import ExpertLoads, balance_line
from phalanx.train.step import Step
from train.runs import change, losses, moves_between, resumes_bit_by_bit, rows, stop, train, weights

# Whole runs with experts, with parts of sequences on several ranks, and with documents that attention keeps apart.


DEEPSEEK = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=2,
    seq_len=16,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    dropout=0.1,
    moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=1, n_dense_layers=1, router="sigmoid", bias_balanced=True),
    mla=MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=6),
)


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout(dp_shard=2, ep=2), Layout(cp=2, tp=2, ep=2, zero=1), Layout()),
        (Layout(cp=2, cp_ulysses=2), Layout(dp_shard=4, ep=2, zero=2, bucket_mb=0.01), Layout(pp=2, accumulation=3)),
        *also_whole((Layout(dp_shard=4, ep=4), Layout(dp_replicate=2, dp_shard=2, ep=2))),
    ],
    ids=lambda layouts: " then ".join(each.line() for each in layouts),
)
def test_a_run_moves_between_layouts_of_experts(ranks, job, layouts):
    job = dataclasses.replace(job, model=DEEPSEEK)
    moves_between(ranks, job, layouts)
    assert any(tensor.abs().max() > 0 for name, tensor in weights(job).items() if name.endswith("router.bias"))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(dp_shard=2, ep=2, redundant_experts=1), "bf16"),
        (Layout(cp=2), "fp32"),
        *also_whole((Layout(dp_shard=2, ep=2), "bf16"), (Layout(dp_shard=2, tp=2, ep=2, zero=1, sp=True), "fp32")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_stopping_and_resuming_gives_the_same_bits(ranks, job, layout, precision):
    job = change(dataclasses.replace(job, model=DEEPSEEK, layout=layout), "train", precision=precision)
    resumes_bit_by_bit(ranks, job, 3)


def test_documents_that_attention_keeps_apart_give_a_curve_of_their_own_on_any_layout(ranks, job, tmp_path):
    texts = [f"{word} and {word} again, and no end of {word}" for word in ("cats", "dogs", "birds", "fish") * 60]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = Data(
        corpus="text",
        path=str(tmp_path / "text.jsonl"),
        dir=str(tmp_path / "data"),
        tokenizer="bpe",
        bpe_vocab=300,
        document_mask=True,
    )
    job = dataclasses.replace(job, data=data)
    ranks(train, 1, job)
    for number, layout in enumerate([Layout(cp=2), Layout(tp=2, sp=True), *also_whole(Layout(cp=2, cp_ulysses=2))]):
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"layout{number}")
        ranks(train, layout.processes, other)
        assert losses(other) == pytest.approx(losses(job), rel=1e-9)
        assert rows(other, "validation")[-1]["val_loss"] == pytest.approx(
            rows(job, "validation")[-1]["val_loss"], rel=1e-9
        )
    plain = change(change(job, "data", document_mask=False), "run", name="plain")
    ranks(train, 1, plain)
    assert losses(plain) != pytest.approx(losses(job), rel=1e-6)


# Loads of experts: the same numbers on any layout, none for a dense model.

EXPERTS = MoE(n_experts=4, top_k=2, d_ff=8, n_dense_layers=1, aux_loss=0.01, z_loss=0.001)
LAYOUTS = [
    Layout(accumulation=3, recompute="full"),
    Layout(dp_replicate=2, dp_shard=2, zero=1, ep=2, redundant_experts=1),
    Layout(dp_replicate=2, data_parallel="threads"),
    Layout(tp=2, sp=True),
    Layout(pp=2, dp_shard=2, ep=2, zero=2, schedule="zb_h1", accumulation=3),
    *also_whole(
        Layout(dp_shard=2, ep=2),
        Layout(dp_replicate=2, dp_shard=2, zero=1, ep=2),
        Layout(pp=2, tp=2, schedule="dualpipe", accumulation=2),
    ),
]


@pytest.fixture
def moe_job(job):
    """A dense layer and two with four experts each; lines after steps 1, 2, 4 and 5."""
    return change(change(job, "model", n_layers=3, moe=EXPERTS), "train", log_every=2, steps=5)


def test_the_loads_do_not_depend_on_the_layout(ranks, moe_job):
    ranks(train, 1, moe_job)
    expected = rows(moe_job, "experts")
    assert [(row["step"], row["steps"]) for row in expected] == [(1, 1), (2, 1), (4, 2), (5, 1)]
    for row in expected:
        assert list(row["loads"]) == ["1", "2"]
        assert all(sum(load) == row["steps"] * 12 * 16 * EXPERTS.top_k for load in row["loads"].values())
        # Even shares would make the balancing loss its coefficient in each of the two layers.
        assert 0.02 <= row["aux_loss"] < 0.04
        assert row["z_loss"] > 0
    for number, layout in enumerate(LAYOUTS):
        other = change(dataclasses.replace(moe_job, layout=layout), "run", name=f"layout{number}")
        ranks(train, layout.processes, other)
        assert same(rows(other, "experts"), expected), layout.line()
        assert rows(other, "traffic")[-1]["traffic_bytes"].get("world", {}) == traffic_of_steps(layout), layout.line()


def same(found, expected) -> bool:
    """Whether counts are equal, and sums in fp64 but for rounding."""
    keys = ("step", "steps", "loads", "max_violation", "worst_layer", "idle")
    sums = [[row[name] for name in ("aux_loss", "z_loss")] for row in found]
    return [[row[key] for key in keys] for row in found] == [[row[key] for key in keys] for row in expected] and all(
        values == pytest.approx([row[name] for name in ("aux_loss", "z_loss")], rel=1e-9)
        for values, row in zip(sums, expected, strict=True)
    )


def traffic_of_steps(layout: Layout) -> dict[str, float]:
    """Over all ranks, a step sends three numbers to everyone; loads are no part of it."""
    return {"all_reduce": 2 * 24 * (layout.processes - 1) / layout.processes} if layout.processes > 1 else {}


def test_a_resumed_run_goes_on_where_it_stopped(ranks, moe_job):
    ranks(train, 1, moe_job)
    broken = change(moe_job, "run", name="broken")
    stop(ranks, broken, 3)
    ranks(train, 1, broken)
    straight, found = rows(moe_job, "experts"), rows(broken, "experts")
    assert [(row["step"], row["steps"]) for row in found] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    both = [a + b for a, b in zip(found[2]["loads"]["1"], found[3]["loads"]["1"], strict=True)]
    assert both == straight[2]["loads"]["1"]


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        (Layout(dp_replicate=2, sync="local_sgd", sync_every=2), [(2, 2), (4, 2), (5, 1)]),
        (Layout(dp_replicate=2, sync="asp"), [(3, 3), (5, 2)]),
    ],
    ids=lambda value: value.sync if isinstance(value, Layout) else "",
)
def test_replicas_that_are_apart_are_counted_when_they_meet(ranks, moe_job, layout, steps):
    job = dataclasses.replace(change(moe_job, "train", eval_every=3), layout=layout)
    ranks(train, 2, job)
    found = rows(job, "experts")
    assert [(row["step"], row["steps"]) for row in found] == steps
    assert all(sum(row["loads"]["1"]) == row["steps"] * 12 * 16 * EXPERTS.top_k for row in found)


def test_a_pipeline_that_is_not_flushed_counts_each_step_once(ranks, moe_job):
    job = change(dataclasses.replace(moe_job, layout=Layout(pp=2, schedule="pipedream", accumulation=3)), "model")
    ranks(train, 2, job)
    found = rows(job, "experts")
    assert [(row["step"], row["steps"]) for row in found] == [(1, 1), (2, 1), (4, 2), (5, 1)]
    assert all(sum(load) == row["steps"] * 12 * 16 * 2 for row in found for load in row["loads"].values())


def stepper(job: Job, mesh: Any, routing: Routing) -> Any:
    return SimpleNamespace(job=job, mesh=mesh, routing=routing, device=torch.device("cpu"))


def test_a_dense_model_has_no_rows_no_picture_and_no_collective(job, caplog):
    with caplog.at_level(logging.INFO):
        train(SINGLE, change(job, "train", steps=2))
    assert not rows(job, "experts")
    assert not (Path(job.run.dir) / "run" / "experts.svg").exists()
    assert "experts" not in caplog.text

    class Nobody:
        def __getattr__(self, name):
            raise AssertionError(f"a dense model asks for {name}")

    nobody: Any = Nobody()
    loads = ExpertLoads(stepper(job, nobody, Routing()), nobody, nobody)
    loads.begin(0)
    loads.after_step(Done(1, Step(1.0, 1.0), last=True, stops=False))
    loads.conclude(1, {})


def test_a_row_is_what_the_routers_noted_and_is_then_forgotten(moe_job):
    routing = Routing()
    nobody: Any = None
    loads = ExpertLoads(stepper(moe_job, meshes.build(Layout(), "cpu"), routing), nobody, nobody)
    loads.begin(3)
    for _ in range(2):
        routing.note(1, torch.tensor([6, 1, 1, 0]), {"aux_loss": torch.tensor(0.5), "z_loss": torch.tensor(0.25)})
        routing.note(2, torch.tensor([2, 2, 2, 2]), {"aux_loss": torch.tensor(0.5), "z_loss": torch.tensor(0.25)})
    row = loads.collect(5)
    assert row == {
        "step": 5,
        "steps": 2,
        "loads": {1: [12, 2, 2, 0], 2: [4, 4, 4, 4]},
        "max_violation": 2.0,
        "worst_layer": 1,
        "idle": 1,
        "aux_loss": 0.25,
        "z_loss": 0.125,
    }
    assert not routing.loads
    assert not routing.penalties
    assert balance_line(row) == "experts: max_violation 2.00 (layer 1)  idle: 1  aux_loss: 0.2500  z_loss: 0.1250"


def test_a_run_leaves_its_picture_in_its_directory(moe_job):
    train(SINGLE, change(moe_job, "train", steps=2))
    folder = Path(moe_job.run.dir) / "run"
    drawn = svg("run", folder / "metrics.jsonl", "3 layers, 16 wide, on 1 rank")
    assert (folder / "experts.svg").read_text() == drawn


# Runs on a mixture of sources: resuming draws what an unbroken run draws, and the rows say what was drawn.


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
    resumes_bit_by_bit(ranks, job, 2, 5)
    drawn = [row["source_tokens"] for row in rows(job, "step")]
    assert [row["source_tokens"] for row in rows(change(job, "run", name="broken"), "step")] == drawn
    assert list(drawn[-1].values()) == [36 * 16, 22 * 16, 14 * 16]


def test_resuming_with_other_numbers_of_ranks_reads_the_same_samples(ranks, mixed):
    """Float64 sums of other groups differ in the last bits; what is read does not."""
    ranks(train, 1, mixed)
    moved = change(mixed, "run", name="moved")
    for number, layout in enumerate((Layout(dp_shard=2, zero=2), Layout(dp_replicate=3), Layout(tp=2))):
        moved = dataclasses.replace(moved, layout=layout)
        if number < 2:
            stop(ranks, moved, 2 * number + 2)
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
    stop(ranks, dataclasses.replace(moved, layout=Layout(dp_shard=2, zero=2)), 3)
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
    stop(ranks, moved, 2)
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
    stop(ranks, mixed, 2)
    other = change(mixed, "data", mix=tuple(dataclasses.replace(source, weight=1.0) for source in mixed.data.mix))
    with pytest.raises(JobError, match="checkpoint of another job .*\n  data.mix"):
        ranks(train, 1, other)


# Damaged token shards in whole runs: the run stops and names the block, or skips the same samples in any layout.

BLOCK = 256
"""Bytes: 128 tokens, 8 samples."""


@pytest.fixture
def nodes(job, tmp_path, monkeypatch):
    """A job whose shards, in small blocks, lie under the same relative path on two nodes: here and in `other`."""
    monkeypatch.setattr(preparation, "BLOCK_BYTES", BLOCK)
    monkeypatch.chdir(tmp_path)
    job = change(job, "data", dir="data")
    folder = prepare(job.data)
    shutil.copytree("data", "other/data")
    return job, folder, tmp_path / "other" / folder


def flip(folder: Path, block: int) -> None:
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[block * BLOCK + 5] ^= 1
    path.write_bytes(content)


def train_on_node(ranks, job, elsewhere: dict[int, str]):
    """Train; some ranks are on the node whose disk is in another folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "VERIFIED_BYTES", 0)  # as if the shards were larger
        if ranks.rank in elsewhere:
            patch.chdir(elsewhere[ranks.rank])
            patch.setattr(platform, "node", lambda: "other")
        return train(ranks, job)


def test_the_rank_that_reads_a_damaged_block_stops_the_run(ranks, nodes):
    job, _, other = nodes
    for block in range(30):
        flip(other, block)
    job = dataclasses.replace(job, layout=Layout(dp_replicate=2))
    with pytest.raises(
        DataError, match=r"train-00000\.bin: block \d+ \(from byte .* is damaged: .*phalanx data prepare"
    ):
        ranks(train_on_node, 2, job, {1: "other"})


SKIPPING = [Layout(dp_replicate=3), Layout(dp_replicate=2, pp=2, accumulation=2), *also_whole(Layout(tp=2))]


def test_skipped_samples_do_not_depend_on_the_layout_or_on_who_sees_the_damage(ranks, nodes):
    job, _, other = nodes
    job = change(job, "data", on_corruption="skip", skip_quota=20)
    job = change(job, "train", steps=25)  # 300 samples, more than an epoch
    whole = change(job, "run", name="whole")
    ranks(train_on_node, 1, whole, {})
    flip(other, 3)
    flip(other, 17)
    alone = change(job, "run", name="alone")
    ranks(train_on_node, 1, alone, {0: "other"})
    assert losses(alone) != losses(whole)
    for number, layout in enumerate(SKIPPING):
        # Only the last rank is on the node with the damage.
        several = change(dataclasses.replace(alone, layout=layout), "run", name=f"several{number}")
        ranks(train_on_node, layout.processes, several, {layout.processes - 1: "other"})
        assert losses(several) == pytest.approx(losses(alone), rel=1e-9)


def test_more_damage_than_the_quota_stops_all_ranks(ranks, nodes):
    job, _, other = nodes
    flip(other, 3)
    job = change(dataclasses.replace(job, layout=Layout(dp_replicate=2)), "data", on_corruption="skip", skip_quota=8)
    with pytest.raises(
        DataError, match=r"9 samples of split train are damaged, more than data\.skip_quota 8(.|\n)*block 3"
    ):
        ranks(train_on_node, 2, job, {1: "other"})
