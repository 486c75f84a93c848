"""Fine-tuning, preference tuning, and runs that start from other weights: the curve of one process in any layout."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_arrays

from checkpoint.trained import small_job
from covering import also_whole
from exchange.folders import LLAMA, begin_texts, write_folder, write_tensors
from phalanx.axes.catalogue import unbalanced
from phalanx.check.job import problems_of
from phalanx.check.load import load_words
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.manifest import job_of
from phalanx.config import overrides
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.corpora import BUILT_IN
from phalanx.config.job import IGNORE, Data, DpoOptions, Job, Optimizer, RunOptions, Train
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE, SparseAttention
from phalanx.cost.job_spec import stages
from phalanx.cost.traffic import step_traffic
from phalanx.data.loader import ShardData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.data.template import Renderer, find_template
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer
from phalanx.errors import CheckpointError, DataError, JobError
from phalanx.exchange.export import export
from phalanx.exchange.import_run import import_folder
from phalanx.model.transformer import Transformer
from phalanx.parallel import mesh as meshes
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import schedule_of
from phalanx.plan.space import _batches, plan_request
from phalanx.train import start
from phalanx.train.run_directory import REFERENCE, RunDirectory
from phalanx.train.start import keep_small_files, notices, open_start, vocabulary_of
from phalanx.train.step import Stepper
from train.runs import change, losses, require_same_weights, resumes_bit_by_bit, rows, stop, train, weights

# Fine-tuning on conversations: any layout makes the curve of one process, and a run goes on bit for bit.


CHAT = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, seq_len=64, positions="rope")
VOCAB = 28
"""Distinct characters of the sums in template alpaca."""
LAYOUTS = [
    "dp_shard=2,zero=3",
    "tp=2,sp=true,loss_chunk=5",
    "cp=2,cp_ulysses=2",
    "pp=2,cp=2,micro_batch=1",
    *also_whole("dp_replicate=2", "tp=2,sp=true", "pp=2,micro_batch=2", "cp=2", "dp_shard=2,tp=2,loss_chunk=5"),
]


def numbers(path, rows: int = 60) -> None:
    """Sums to answer: some prompts are long and have answers of one digit, so that steps differ in answers."""
    draw = random.Random(5)
    with path.open("w") as file:
        for _ in range(rows):
            terms = [draw.randrange(10) for _ in range(draw.choice([2, 2, 3, 9]))]
            row = {"prompt": "+".join(map(str, terms)) + "=", "completion": str(sum(terms)) * draw.choice([1, 1, 4])}
            file.write(json.dumps(row) + "\n")


def fine_tuning(folder) -> Job:
    """Sums, several to a sample, with the loss on their results."""
    numbers(folder / "sums.jsonl")
    packed = {"document_mask": True, "packing": True, "val_fraction": 0.2, "dir": str(folder / "data")}
    return replace(
        small_job(folder),
        model=CHAT,
        data=Data(corpus="chat", path=str(folder / "sums.jsonl"), template="alpaca", **packed),
        train=Train(steps=4, global_batch=8, precision="fp64", eval_samples=10),
    )


@pytest.fixture(scope="module")
def chat(ranks, tmp_path_factory) -> Job:
    """The job after a run on one process."""
    job = fine_tuning(tmp_path_factory.mktemp("chat"))
    ranks(train, 1, job, timeout=120)
    return job


@pytest.mark.parametrize("line", LAYOUTS)
def test_any_layout_makes_the_curve_of_one_process(ranks, chat, line):
    trained_like(ranks, chat, line)


def trained_like(ranks, one: Job, line: str) -> Job:
    """Returns a job after a run in a layout that is as that of `one` process, and sends what is predicted."""
    layout = parse(line)
    other = change(dataclasses.replace(one, layout=layout), "run", name=f"run-{line}")
    sent = ranks(train, layout.processes, other, timeout=200)[0]["traffic_bytes"]
    most = rows(other, "start")[0]["conversations"]
    predicted = predicted_traffic(other, most)
    if not unbalanced(other):  # documents decide which keys ranks send each other
        if layout.ring > 1:
            assert 0 < sent["cp"].pop("send") < predicted["cp"].pop("send").expected
        if exchanged := sent["cp"].pop("all_to_all", 0):
            skipped = [row["cp_skipped"] for row in rows(other, "step")]
            expected = predicted["cp"].pop("all_to_all").expected
            assert exchanged == pytest.approx(expected * (1 - sum(skipped) / len(skipped)), 1e-9)
    assert {axis: by for axis, by in sent.items() if any(by.values())} == {a: by for a, by in predicted.items() if by}
    assert curve(other) == pytest.approx(curve(one), rel=1e-9)
    found = weights(other)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=name)
    return other


def predicted_traffic(job, conversations: int) -> dict:
    """Returns the bytes per step that the cost model predicts for rank 0; it knows nothing of answers."""
    equation = batch.solve(job.train.global_batch, job.layout)
    stages = None
    if job.layout.pp > 1:
        count = schedule_of(job.layout, equation.accumulation).stages
        stages = stages_of(job.model, job.layout, count, VOCAB)
    of_job = {"precision": job.train.precision, "vocab": VOCAB, "stages": stages, "optimizer": job.optimizer}
    found = step_traffic(job.model, job.layout, equation, conversations=conversations, **of_job)
    return {axis: {name: pytest.approx(sent, 1e-13) for name, sent in by.items()} for axis, by in found.items()}


def curve(job) -> list[float]:
    """Loss and gradient norm of every step, then the validation losses."""
    steps = [value for row in rows(job, "step") for value in (row["loss"], row["grad_norm"])]
    return [*steps, *(row["val_loss"] for row in rows(job, "validation"))]


def test_a_run_goes_on_bit_for_bit_and_not_with_other_packing(ranks, chat):
    resumed = change(chat, "run", name="resumed")
    stop(ranks, resumed, 2)
    with pytest.raises(JobError, match=r"data.packing: True there, False here"):
        ranks(train, 1, change(resumed, "data", packing=False))
    ranks(train, 1, resumed)
    assert curve(resumed) == curve(chat)
    require_same_weights(resumed, chat)


def test_packed_documents_make_the_curve_of_one_process_and_go_on_bit_for_bit(ranks, tmp_path):
    lines = [f"{'la ' * (n * 7 % 29)}{n}" for n in range(300)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    job = fine_tuning(tmp_path)
    data = replace(job.data, corpus="text", path=str(tmp_path / "lines.txt"), tokenizer="byte", template="tokenizer")
    job = replace(job, data=data)
    assert problems_of(job) == []
    resumes_bit_by_bit(ranks, job, 2)
    assert 0 < rows(job, "step")[0]["padding"] < 0.2
    other = change(replace(job, layout=parse("pp=2,cp=2,micro_batch=1")), "run", name="other")
    ranks(train, 4, other)
    assert curve(other) == pytest.approx(curve(job), rel=1e-9)


def test_the_loss_is_the_mean_over_the_answers_of_the_step(ranks, chat):
    """Steps differ in their answers; a step's loss is that of the untrained model on exactly its answers."""
    data = open_split(prepare(chat.data), "train", chat.model.seq_len, chat.data)
    counts = [data.valid_tokens(8 * step, 8, chat.train.seed) for step in range(4)]
    assert len(set(counts)) > 1
    frozen = change(change(chat, "optimizer", lr=1e-30, weight_decay=0.0), "run", name="frozen")
    ranks(train, 1, frozen)
    [found] = ranks(answer_losses, 1, frozen)
    assert losses(frozen) == pytest.approx(found, rel=1e-12)


def answer_losses(ranks, job) -> list[float]:
    """The loss of each step from the initial model's logits of each conversation alone, without padding."""
    data = open_split(prepare(job.data), "train", job.model.seq_len, job.data)
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), data.vocab_size)
    model, found = stepper.replica.objective.model, []
    for step in range(job.train.steps):
        micro = data.micro_batch(data.order(8 * step, 8, job.train.seed), np.arange(8))
        total = count = 0
        for tokens, targets, documents in zip(micro.tokens, micro.targets, micro.documents, strict=True):
            for number in range(documents.max() + 1):
                own = torch.from_numpy(documents == number)
                logits = model(torch.from_numpy(tokens)[own][None])[0].detach()
                answers = torch.from_numpy(targets)[own]
                counted = answers != IGNORE  # nowhere in padding
                total += F.cross_entropy(logits[counted], answers[counted], reduction="sum").item()
                count += int(counted.sum())
        found.append(total / count)
    return found


EXPERTS = MoE(n_experts=4, top_k=2, d_ff=16, aux_loss=0.1, z_loss=0.01, capacity=1.25, bias_balanced=True)
WITH_EXPERTS = [
    "tp=2,sp=true,recompute=full",
    "dp_shard=2,tp=2,ep=2,zero=2",
    "pp=2,micro_batch=2,schedule=zb_h1",
    "cp=2,cp_ulysses=2,ep=2",
    "tp=2,sp=true,ep=2,etp=1",
    *also_whole("dp_replicate=2", "dp_shard=2,ep=2,zero=3", "cp=2", "cp=2,tp=2,sp=true,ep=4,etp=1"),
]


@pytest.fixture(scope="module")
def chat_with_experts(ranks, tmp_path_factory) -> Job:
    """The job of a mixture with penalties, balancing and a capacity, after a run on one process."""
    job = fine_tuning(tmp_path_factory.mktemp("experts"))
    job = dataclasses.replace(job, model=dataclasses.replace(CHAT, moe=EXPERTS))
    ranks(train, 1, job, timeout=120)
    return job


@pytest.mark.parametrize("line", WITH_EXPERTS)
def test_experts_count_no_padding_under_any_layout(ranks, chat_with_experts, line):
    other = trained_like(ranks, chat_with_experts, line)
    assert balance(other) == pytest.approx(balance(chat_with_experts), rel=1e-9)


def balance(job) -> list[float]:
    """The loads and penalties of the run."""
    return [
        value
        for row in rows(job, "experts")
        for value in (*(load for loads in row["loads"].values() for load in loads), row["aux_loss"], row["z_loss"])
    ]


def test_experts_and_indexers_learn_the_same_from_conversations_padded_and_packed(ranks, chat_with_experts):
    """One step of all conversations, in samples of several lengths, one each or several."""
    found, latents = [], MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
    of = {"mla": latents, "sparse": SparseAttention(top_k=16, index_heads=3, index_head_dim=4), "n_kv_heads": 0}
    for seq_len, packing in ((128, False), (320, False), (192, True)):
        job = change(change(chat_with_experts, "model", seq_len=seq_len, **of), "data", packing=packing)
        data = open_split(prepare(job.data), "train", seq_len, job.data)
        whole = change(job, "train", global_batch=data.sample_count, steps=1)
        whole = change(whole, "run", name=f"whole-{seq_len}-{packing}")
        [summary] = ranks(train, 1, whole, timeout=120)
        [step] = rows(whole, "step")
        assert step["padding"] == pytest.approx(1 - summary["tokens"] / summary["positions"])
        assert sum(rows(whole, "experts")[0]["loads"]["0"]) == EXPERTS.top_k * summary["tokens"]
        found.append([step["loss"], step["grad_norm"], rows(whole, "experts")[0]["index_loss"], *balance(whole)])
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert found[0] == pytest.approx(found[2], rel=1e-9)


# Preference tuning: any layout makes the curve of one process, tied to the model before the first step.

SMALL = ModelConfig(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, seq_len=64, positions="rope")
PAIR_LAYOUTS = [
    "dp_shard=2,zero=3",
    "cp=2,tp=2,loss_chunk=9",
    "pp=2,micro_batch=4,schedule=terapipe,pp_slices=2,cp=2",
    *also_whole("dp_replicate=2", "pp=2,micro_batch=2", "dp_shard=2,cp=2"),
]


@pytest.fixture
def preferences(job, tmp_path):
    draw = random.Random(2)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for _ in range(50):
            a, b = draw.randrange(30), draw.randrange(30)
            row = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": draw.choice(["?", "no idea", str(a)])}
            file.write(json.dumps(row) + "\n")
    data = Data(
        corpus="preferences",
        path=str(tmp_path / "pairs.jsonl"),
        template="alpaca",
        val_fraction=0.2,
        dir=str(tmp_path / "data"),
    )
    job = change(dataclasses.replace(job, model=SMALL, data=data), "train", global_batch=8, steps=4)
    return change(job, "guard", on_spike="off")


def test_pairs_in_any_layout_make_the_curve_of_one_process(ranks, preferences):
    [alone] = ranks(train, 1, preferences)
    assert alone["loss"] < losses(preferences)[0] == pytest.approx(0.6931471805599453, rel=1e-12)
    assert rows(preferences, "step")[0]["reward_margin"] == pytest.approx(0, abs=1e-12)
    assert rows(preferences, "validation")[-1]["val_reward_accuracy"] > 0.5
    expected, references = pair_curve(preferences), reference(preferences)
    for line in PAIR_LAYOUTS:
        layout = parse(line)
        other = change(dataclasses.replace(preferences, layout=layout), "run", name=f"run-{line}")
        assert not problems_of(other)
        summary = ranks(train, layout.processes, other)[0]
        assert pair_curve(other) == pytest.approx(expected, rel=1e-9, abs=1e-12), line
        assert summary["traffic_bytes"] == predicted(other), line
        for split, values in reference(other).items():
            assert values == pytest.approx(references[split], rel=1e-12), line


def pair_curve(job) -> list[float]:
    names = ("loss", "grad_norm", "reward_chosen", "reward_margin")
    steps = [row[name] for row in rows(job, "step") for name in names]
    # In the first step the model is the reference: the order of a pair is that of rounding.
    right = [row["reward_accuracy"] for row in rows(job, "step")[1:]]
    return [*steps, *right, *(row["val_loss"] for row in rows(job, "validation"))]


def reference(job) -> dict:
    return load_file(Path(job.run.dir) / job.run.name / REFERENCE)


def predicted(job) -> dict:
    model = dataclasses.replace(job.model, vocab_size=len(weights(job)["embed.weight"]))
    equation = batch.solve(job.train.global_batch, job.layout)
    return step_traffic(
        *(model, job.layout, equation),
        precision=job.train.precision,
        stages=stages(model, job.layout) or None,
        compared="pairs",
    )


REWARD_LAYOUTS = [
    "dp_shard=2,tp=2,sp=true",
    "pp=2,micro_batch=2,schedule=terapipe,pp_slices=2,cp=2",
    *also_whole("dp_replicate=2,cp=2"),
]


def test_a_reward_model_learns_alike_in_any_layout_and_is_that_of_transformers(ranks, preferences, tmp_path):
    """It starts from a language model whose head it does not take."""
    preferences = change(preferences, "model", norm="rmsnorm", activation="swiglu", bias=False)
    ranks(train, 1, preferences)
    start = str(Path(preferences.run.dir) / preferences.run.name)
    Path(start, "config.yaml").write_text("run: {}\n")
    job = change(change(preferences, "model", reward=True, tied=False, from_=start), "run", name="reward")
    job = change(job, "train", steps=2)
    assert not problems_of(job)
    ranks(train, 1, job)
    assert 0 <= rows(job, "validation")[-1]["val_reward_accuracy"] <= 1
    assert weights(job)["head.weight"].shape == (1, SMALL.d_model)
    expected = pair_curve(job)
    for line in REWARD_LAYOUTS:
        layout = parse(line)
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"reward-{line}")
        assert not problems_of(other)
        summary = ranks(train, layout.processes, other)[0]
        assert pair_curve(other) == pytest.approx(expected, rel=1e-9, abs=1e-12), line
        assert summary["traffic_bytes"] == predicted(other), line

    run, folder, again = Path(job.run.dir) / "reward", tmp_path / "hf", tmp_path / "again"
    with open_source(run) as source:
        assert export(source, folder).reward
    import_folder([folder], again)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    assert theirs.config.num_labels == 1
    data = open_split(prepare(job.data), "train", SMALL.seq_len, job.data, scored=True)
    micro = data.micro_batch(np.arange(4), np.arange(4))
    for path in (run, again):
        with open_source(path) as source:
            model = Transformer(job_of(source.manifest).model, len(weights(job)["embed.weight"])).double()
            for name, parameter in model.named_parameters():
                parameter.detach().copy_(source.read(name))
        for tokens, targets in zip(micro.tokens, micro.targets, strict=True):
            [last] = np.flatnonzero(targets == 0)
            text = torch.from_numpy(tokens[None, : last + 1])
            torch.testing.assert_close(model(text)[:, -1].detach(), theirs(text).logits.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("section", "values", "path"),
    [
        ("data", {"corpus": "stdlib", "path": "", "template": "tokenizer"}, "data.corpus"),
        ("model", {"tied": True}, "model.tied"),
        ("model", {"lora": LoRA(rank=2)}, "model.lora.rank"),
        ("layout", {"loss_chunk": 9}, "layout.loss_chunk"),
        ("train", {"dpo": DpoOptions(beta=0.5)}, "train.dpo.beta"),
    ],
)
def test_what_does_not_suit_a_reward_model_is_refused(preferences, section, values, path):
    job = change(preferences, "model", reward=True, tied=False)
    assert path in dict(problems_of(change(job, section, **values)))


def test_a_run_goes_on_with_the_same_reference(ranks, preferences):
    ranks(train, 1, preferences)
    resumed = change(preferences, "run", name="resumed")
    stop(ranks, resumed, 2)
    before = reference(resumed)
    (Path(resumed.run.dir) / "resumed" / REFERENCE).unlink()
    ranks(train, 1, resumed)
    assert {split: values.tolist() for split, values in reference(resumed).items()} == {
        split: values.tolist() for split, values in before.items()
    }
    assert pair_curve(resumed) == pair_curve(preferences)


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("micro_batch=3", "layout.micro_batch", "is 3 sequences, which cuts a pair of 2; nearest legal: 4 or 2"),
        ("dp_replicate=2,sync=local_sgd", "layout.sync", "needs sync=bsp"),
        ("dp_replicate=2,data_parallel=threads", "layout.data_parallel", "threads would cut pairs"),
    ],
)
def test_what_would_cut_pairs_is_refused(preferences, line, field, words):
    wrong = change(dataclasses.replace(preferences, layout=parse(line)), "train", global_batch=0)
    assert any(path == field and words in message for path, message in problems_of(wrong))


def test_options_of_pairs_are_refused_for_other_data(job):
    [(path, message)] = problems_of(change(job, "train", dpo=dataclasses.replace(job.train.dpo, beta=0.2)))
    assert path == "train.dpo.beta"
    assert "nearest legal: corpus=preferences" in message


def test_the_planner_keeps_pairs_together(preferences):
    job = dataclasses.replace(preferences, cluster=cluster_of("dgx-h100"))
    request = plan_request(change(job, "train", precision="bf16"), 64)
    assert [micro for micro, _ in _batches(request, request.global_batch, cp=1)] == [2, 4, 8]


# Runs that start from the weights of others, in any layout: parameters only, from step 0, once.

STARTS = [Layout(dp_shard=2, tp=2, zero=3, sp=True), Layout(dp_shard=2, pp=2, zero=1)]


def starting(job, source: Path):
    """The job with the shape of the weights that it starts from."""
    return dataclasses.replace(job, model=dataclasses.replace(LLAMA, from_=str(source)))


def exported(job) -> dict[str, torch.Tensor]:
    """Returns the tensors of a run as they are written for transformers."""
    run = RunDirectory.of(job).path
    with open_source(run) as source:
        export(source, run.with_name(f"{run.name}-hf"))
    return load_arrays(run.with_name(f"{run.name}-hf") / "model.safetensors")


def test_a_run_starts_from_weights_in_any_layout(ranks, job, tmp_path):
    write_folder(tmp_path / "theirs")
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    job = change(change(job, "train", steps=2, eval_samples=0), "checkpoint", every=1)
    alone = starting(job, tmp_path / "theirs")
    ranks(train, 1, alone)
    expected = exported(alone)
    for number, layout in enumerate(STARTS):
        spread = change(starting(job, tmp_path / "ours"), "run", name=f"spread{number}")
        ranks(train, layout.processes, dataclasses.replace(spread, layout=layout))
        assert losses(spread) == pytest.approx(losses(alone), rel=1e-9)
        found = exported(spread)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in expected.items())
    first = weights(alone)
    assert first["embed.weight"].shape == (LLAMA.vocab_size, LLAMA.d_model)  # 13 tokens, and rows for padding
    shutil.rmtree(tmp_path / "theirs")
    ranks(train, 1, change(alone, "train", steps=3))  # resumes without the weights
    assert len(losses(alone)) == 3


def test_master_weights_are_not_rounded(ranks, job, tmp_path):
    """A run in bf16 keeps the fp32 weights that it starts from, in the optimizer's copies."""
    model = write_folder(tmp_path / "theirs")
    still = change(change(job, "train", steps=1, eval_samples=0, precision="bf16"), "optimizer", lr=0.0)
    ranks(train, 1, starting(still, tmp_path / "theirs"))
    found = weights(still)["master/head.weight"]
    assert (found - model.get_parameter("head.weight").float()).abs().max() < 1e-7


def test_a_shape_that_differs_is_refused_with_both_values(ranks, job, tmp_path):
    write_folder(tmp_path / "theirs")
    wide = starting(job, tmp_path / "theirs")
    wide = dataclasses.replace(wide, model=dataclasses.replace(wide.model, d_ff=64))
    with pytest.raises(CheckpointError, match=r"mlp.down.weight is \(32, 48\) there and \(32, 64\) here"):
        ranks(train, 1, wide)


def test_the_job_takes_shape_and_tokenizer(tmp_path):
    write_folder(tmp_path / "theirs")
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    for source in (tmp_path / "theirs", tmp_path / "ours", tmp_path / "ours" / "checkpoints" / "step-000000"):
        loaded = load_words(overrides.parse([f"model.from={source}", "data.corpus=text", "data.path=x", "seq_len=16"]))
        job = loaded.job
        assert dataclasses.replace(job.model, from_="", seq_len=32) == LLAMA
        assert Path(job.data.tokenizer).name == "tokenizer.json"
        assert loaded.origins["model.d_model"] == f"model.from {source}"
        assert open_start(job.model).manifest.tensors.keys() > {"embed.weight"}


def test_a_field_of_config_json_is_left_out_on_purpose(tmp_path):
    write_folder(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(config.read_text().replace("{", '{"colour": "blue", ', 1))
    words = [f"model.from={tmp_path / 'theirs'}", "tokenizer=byte"]
    with pytest.raises(JobError, match=r"config.json:1: colour is not understood .*model.ignore_config=\[colour\]"):
        load_words(overrides.parse(words))
    job = load_words(overrides.parse([*words, "model.ignore_config=[colour]"])).job
    assert job.model.ignore_config == ("colour",)
    assert open_start(job.model).manifest.tensors.keys() > {"embed.weight"}
    assert not list(notices(job, Tokenizer.load(tmp_path / "theirs")))
    shape = load_words(overrides.parse([f"model=hf:{config}", "model.ignore_config=[colour]"])).job.model
    assert shape.n_layers == job.model.n_layers
    import_folder([tmp_path / "theirs"], tmp_path / "ours", ignore_config=("colour",))
    for wrong, message in {
        f"model.from={tmp_path / 'ours'}": "is a run: leave it out",
        "model=gpt2": "it is for a config.json",
    }.items():
        with pytest.raises(JobError, match=message):
            load_words(overrides.parse([wrong, "model.ignore_config=[colour]"]))


def test_a_tied_model_with_a_head_of_its_own_is_imported_first(tmp_path):
    tied = dataclasses.replace(LLAMA, tied=True)
    write_folder(tmp_path / "theirs", tied)
    theirs = load_arrays(tmp_path / "theirs" / "model.safetensors")
    write_tensors(
        tmp_path / "theirs", theirs | {"lm_head.weight": torch.ones_like(theirs["model.embed_tokens.weight"])}
    )
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding .* then model.from=RUN"):
        open_start(dataclasses.replace(tied, from_=str(tmp_path / "theirs")))


def test_what_fits_but_differs_is_told(tmp_path):
    write_folder(tmp_path / "theirs")
    words = [f"model.from={tmp_path / 'theirs'}", "model.rope_theta=500000", "tokenizer=byte"]
    job = load_words(overrides.parse(words)).job
    found = list(notices(job, ByteTokenizer()))
    assert "rope_theta is 10000.0" in found[0]
    assert "the tokenizer differs" in found[1]


def test_texts_that_begin_otherwise_than_those_of_the_tokenizer_are_told(tmp_path):
    write_folder(tmp_path / "theirs")
    begin_texts(tmp_path / "theirs")
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    said = []
    for words in (
        "corpus=stdlib",
        f"corpus=chat data.path=x data.template={tmp_path / 'own.jinja'}",
        "corpus=chat data.path=x template=llama3",
    ):
        job = load_words(overrides.parse([f"model.from={tmp_path / 'theirs'}", *words.split()])).job
        said.append([*notices(job, Tokenizer.load(tmp_path / "theirs"))])
    without = "texts begin without <|endoftext|>, with which the tokenizer's own begin"
    assert said == [[without], [f"{without}: write {{{{ bos_token }}}} first in a copy of data.template"], []]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_formats_of_this_project_begin_as_the_tokenizer_begins_texts(tmp_path: Path, name: str):
    write_folder(tmp_path / "theirs")
    data = dataclasses.replace(Data(), corpus="chat", template=name, tokenizer=str(tmp_path / "theirs"))
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with Renderer(find_template(data)) as renderer:
        before = renderer.prompt(chat[:1])
    begin_texts(tmp_path / "theirs")
    template = find_template(data)
    with Renderer(template) as renderer:
        assert renderer.prompt(chat[:1]) == "<|endoftext|>" + before.removeprefix("<|endoftext|>")
        text, is_answer = renderer.parts(chat)[0]
    assert text.rindex("<|endoftext|>") == 0
    assert not is_answer
    assert template.begins_with("<|endoftext|>")


def test_small_files_go_along_with_the_weights_unless_the_tokenizer_is_another(job, tmp_path):
    """An export of the run has the generation settings and the context of the imported model."""
    write_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"temperature": 0.6}')
    import_folder([tmp_path / "theirs"], tmp_path / "ours")
    own = Tokenizer.load(tmp_path / "ours")
    for source in (tmp_path / "theirs", tmp_path / "ours"):
        for tokenizer, names in ((ByteTokenizer(), []), (own, ["config.json", "generation_config.json"])):
            run = tmp_path / f"{source.name}-{len(names)}"
            run.mkdir()
            for _ in range(2):  # a run that resumes has them
                keep_small_files(starting(job, source), tokenizer, run)
            assert sorted(file.name for file in run.glob("hugging_face/*")) == names
    keep_small_files(starting(job, tmp_path / "gone"), own, tmp_path)
    assert not (tmp_path / "hugging_face").exists()


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(job, tmp_path):

    write_folder(tmp_path / "theirs")
    with pytest.raises(DataError, match=r"the tokenizer has 999 tokens, the embedding in .* has 300 rows"):
        vocabulary_of(starting(job, tmp_path / "theirs"), RunDirectory(tmp_path / "run"), 999)


def test_weights_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(JobError, match="there is no such folder; give a run's directory"):
        load_words(overrides.parse([f"model.from={tmp_path / 'nowhere'}"]))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(JobError, match=r"m.gguf is a GGUF file, which is imported first: .* --out runs/m"):
        load_words(overrides.parse([f"model.from={tmp_path / 'm.gguf'}"]))


def test_a_larger_vocabulary_is_padding_and_a_smaller_one_is_refused(tmp_path: Path) -> None:
    job, directory = Job(), RunDirectory(tmp_path / "run")

    def rows(**model: object) -> int:
        return vocabulary_of(dataclasses.replace(job, model=dataclasses.replace(job.model, **model)), directory, 256)

    assert rows() == 256
    assert rows(vocab_size=512) == 512
    assert rows(vocab_size=50257, preset="gpt2") == 256  # the preset's own tokenizer is another
    assert rows(vocab_size=50304, preset="gpt2") == 50304
    with pytest.raises(JobError, match="model.vocab_size is 200, and the tokenizer has 256 tokens"):
        rows(vocab_size=200)


# Runs with adapters that start from other weights, and runs that start from those of adapters.

SHARDED = Layout(dp_shard=2, zero=1)
ADAPTERS = LoRA(rank=2, alpha=3, targets="attention")


def test_adapters_begin_beside_weights_from_outside_and_are_merged_or_taken_over(ranks, job, tmp_path):
    base = write_folder(tmp_path / "theirs").state_dict()
    job = change(change(job, "train", steps=3, eval_samples=0, precision="bf16"), "checkpoint", every=0)
    adapted = change(job, "run", name="adapted")
    source = Path(job.run.dir) / "adapted"
    model = replace(LLAMA, from_=str(tmp_path / "theirs"), lora=ADAPTERS)
    ranks(train, 2, replace(adapted, model=model, layout=SHARDED))
    (source / "config.yaml").write_text("run: {}\n")  # which the command writes, not the ranks
    tuned = weights(adapted)
    for name, tensor in tuned.items():
        if "/" not in name and ".lora_" not in name:
            assert torch.equal(tensor, base[name].bfloat16()), name
    assert {name for name in tuned if name.startswith("master/")} == {
        f"master/{name}" for name in tuned if ".lora_" in name and "/" not in name
    }
    still = change(job, "optimizer", lr=0.0)
    again = change(change(still, "train", steps=1), "run", name="again")
    ranks(train, 1, replace(again, model=replace(model, from_=str(source))))
    taken = weights(again)
    assert all(torch.equal(taken[name], tensor) for name, tensor in tuned.items() if "/" not in name)
    merged = change(change(still, "train", steps=1), "run", name="merged")
    ranks(train, 1, replace(merged, model=replace(LLAMA, from_=str(source))))
    found = weights(merged)
    for name in (name for name in found if "/" not in name):
        expected, layer = tuned[name], name.removesuffix(".weight")
        if (a := tuned.get(f"{layer}.lora_a.weight")) is not None:
            product = tuned[f"{layer}.lora_b.weight"].float() @ a.float()
            expected = (expected.float() + 1.5 * product).bfloat16()
            assert product.any()
        assert torch.equal(found[name], expected), name


def test_adapters_beside_random_weights_are_told(caplog):
    start.begin(Job(model=ModelConfig(lora=ADAPTERS)), cast(Any, None), cast(Any, None), reports=True)
    assert "random weights, which stay as they are: model.from names trained ones" in caplog.text


def test_an_indexer_begins_beside_dense_weights_and_is_trained_alone_then_with_all(ranks, tmp_path: Path):
    """Dense, warm-up and sparse stage, each from the one before; the last on two ranks."""
    latents = MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
    model = replace(CHAT, n_kv_heads=0, mla=latents, norm="rmsnorm", bias=False, vocab_size=VOCAB, init_std=0.3)
    job = Job(
        model=model,
        cluster=Cluster(peak_tflops=1.0),
        data=Data(corpus="random", random_vocab=VOCAB, random_tokens=4096, dir=str(tmp_path / "data")),
        optimizer=Optimizer(lr=1e-2, warmup_steps=1),
        train=Train(steps=4, global_batch=4, precision="fp64"),
        run=RunOptions(name="dense", dir=str(tmp_path / "runs"), sample_tokens=0),
    )
    ranks(train, 1, job)
    for name in ("dense", "warm"):  # which the command writes, not the ranks
        (tmp_path / "runs" / name).mkdir(exist_ok=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("run: {}\n")
    index = SparseAttention(top_k=16, index_heads=3, index_head_dim=4, dense_warmup=True)
    warm = replace(model, sparse=index, from_=str(tmp_path / "runs" / "dense"))
    warming = change(replace(job, model=warm), "run", name="warm")
    ranks(train, 1, warming)
    before, after = (weights(each) for each in (job, warming))
    assert {name for name in before if name.startswith("blocks") and "/" not in name} <= after.keys()
    parameters = {name for name in before if "/" not in name}
    assert all(torch.equal(before[name], after[name]) for name in parameters)
    assert sum("attn.index" in name and "/" not in name for name in after) == 2 * 5
    learned = [row["index_loss"] for row in rows(warming, "indexer")]
    assert learned[-1] < learned[0]
    sparse = replace(warm, sparse=replace(index, dense_warmup=False), from_=str(tmp_path / "runs" / "warm"))
    last = change(replace(job, model=sparse, layout=Layout(tp=2)), "run", name="sparse")
    ranks(train, 2, last)
    assert not torch.equal(weights(last)["embed.weight"], after["embed.weight"])
    assert rows(last, "indexer")[-1]["index_loss"] > 0


@pytest.mark.parametrize(("asked", "there", "said"), [(9, 5, True), (9, 9, False), (256, 5, False)])
def test_a_validation_on_fewer_samples_than_asked_for_is_said(caplog, asked, there, said):
    """Nothing is said of the default number: most small data sets have fewer samples."""
    job = Job(train=Train(eval_samples=asked))
    data, val = (cast(ShardData, SimpleNamespace(sample_count=count)) for count in (100, there))
    with caplog.at_level("INFO"):
        start.log_start(job, torch.device("cpu"), batch.solve(job.train.global_batch, job.layout), data, 256, val)
    assert ("validation: 5 samples, the whole split, of train.eval_samples=9" in caplog.text) == said
