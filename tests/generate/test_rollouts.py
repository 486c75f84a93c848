"""GRPO: one process equals any layout, from generation to the weights; what it refuses, resumes and rewards."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from covering import also_whole
from phalanx.check.job import problems_of
from phalanx.check.start import KEPT
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Checkpoint, Data, GrpoOptions, Job, Optimizer, RunOptions, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig, MoE
from phalanx.cost.generation import generation_bytes
from phalanx.cost.generation_time import generation
from phalanx.cost.held import contents
from phalanx.cost.job_spec import rank_spec, stages, step_spec
from phalanx.cost.prediction import predict
from phalanx.cost.rank_memory import step_memory
from phalanx.cost.traffic import step_traffic
from phalanx.data.conversations import PromptData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.dryrun.rehearse import distinct_ranks, rehearse
from phalanx.errors import JobError, RunError
from phalanx.generate import rollouts
from phalanx.generate.rollouts import reward_of
from phalanx.partition import derived as batch
from train.runs import change, require_same_weights, rows, stop, train, weights


def ones(prompt: str, completion: str, answer: str) -> float:
    """A reward that a model without training gets, too: a share of ones, and a little for the answer's length."""
    return completion.count("1") / 4 + (len(completion) == len(answer)) / 8


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    folder, draw = tmp_path_factory.mktemp("grpo"), random.Random(3)
    with (folder / "sums.jsonl").open("w") as file:
        for _ in range(40):
            terms = [draw.randrange(10) for _ in range(draw.choice([2, 2, 3, 5]))]
            file.write(json.dumps({"prompt": "+".join(map(str, terms)) + "=", "answer": sum(terms)}) + "\n")
    return Job(
        model=ModelConfig(n_layers=4, d_model=16, n_heads=4, n_kv_heads=2, seq_len=16, positions="rope"),
        cluster=Cluster(peak_tflops=1.0),
        data=Data(
            *("prompts", str(folder / "sums.jsonl")),
            template="raw",
            val_fraction=0.2,
            dir=str(folder / "data"),
        ),
        optimizer=Optimizer(lr=1e-2, warmup_steps=1),
        train=Train(
            steps=4,
            global_batch=16,
            precision="fp64",
            eval_samples=6,
            grpo=GrpoOptions(group=4, reward=f"{__name__}:ones", max_new_tokens=5, updates=2, clip=0.05, beta=0.1),
        ),
        checkpoint=Checkpoint(keep=0),
        run=RunOptions(name="run", dir=str(folder / "runs"), sample_tokens=0),
    )


@pytest.fixture(scope="module")
def alone(ranks, job) -> Job:
    """The job after a run on one process."""
    ranks(train, 1, job, timeout=120)
    return job


def curve(job: Job) -> list[float]:
    names = ("loss", "grad_norm", "reward", "reward_std", "zero_variance", "kl", "clip_fraction", "entropy", "length")
    steps = [row[name] for row in rows(job, "step") for name in names]
    return [*steps, *(row[name] for row in rows(job, "validation") for name in ("val_reward", "val_length"))]


def test_completions_are_learned_from(alone):
    first, *_, last = rows(alone, "step")
    assert 0 < first["reward"] < 1
    assert first["zero_variance"] < 1
    assert first["kl"] == pytest.approx(0, abs=1e-15)
    assert last["kl"] > 0
    assert first["clip_fraction"] == 0  # the policy that generated the batch
    assert last["clip_fraction"] > 0
    assert all(row["gap"] < 1e-12 for row in rows(alone, "step"))


def predicted(job: Job) -> dict:
    """Returns the bytes per step that the cost model predicts for rank 0, of the updates alone."""
    model = dataclasses.replace(job.model, vocab_size=len(weights(job)["embed.weight"]))
    equation, cut = batch.solve(job.train.global_batch, job.layout), stages(model, job.layout) or None
    found = step_traffic(model, job.layout, equation, precision="fp64", stages=cut, compared="completions")
    return {axis: {name: pytest.approx(sent, 1e-13) for name, sent in by.items()} for axis, by in found.items()}


@pytest.mark.parametrize(
    "line",
    [
        "dp_shard=2,zero=3",
        "tp=2,sp=true",
        "pp=2,cp=2,micro_batch=4,schedule=interleaved_1f1b,pp_chunks=2",
        *also_whole("dp_replicate=2,dp_shard=2,zero=1", "pp=2,micro_batch=2", "cp=2", "dp_shard=2,tp=2,loss_chunk=5"),
    ],
)
def test_any_layout_generates_and_trains_as_one_process(ranks, alone, line):
    layout = parse(line)
    other = change(dataclasses.replace(alone, layout=layout), "run", name=f"run-{line}")
    sent = ranks(train, layout.processes, other, timeout=200)[0]["traffic_bytes"]
    assert {axis: by for axis, by in sent.items() if any(by.values())} == predicted(other)
    assert curve(other) == pytest.approx(curve(alone), rel=1e-9, abs=1e-12)
    found = weights(other)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=name)


def test_a_temperature_is_that_of_the_drawn_and_of_the_trained_probabilities(ranks, alone):
    """The gap holds the two sides together; two ranks with vocabulary and pipeline cut equal one."""
    grpo = options(alone, temperature=0.5)
    cold = change(change(alone, "train", grpo=grpo, steps=2), "run", name="cold")
    ranks(train, 1, cold)
    assert all(row["gap"] < 1e-12 for row in rows(cold, "step"))
    assert rows(cold, "step")[0]["entropy"] < rows(alone, "step")[0]["entropy"]
    cut = change(dataclasses.replace(cold, layout=parse("tp=2,loss_chunk=5")), "run", name="cold-cut")
    ranks(train, 2, cut, timeout=200)
    assert curve(cut) == pytest.approx(curve(cold), rel=1e-9, abs=1e-12)
    capped = change(cold, "model", logit_softcap=5.0)
    assert "logit_softcap" in dict(problems_of(capped))["train.grpo.temperature"]


def test_a_run_resumes_bit_by_bit_between_batches(ranks, alone):
    """The request comes in the first update of a batch, and is met after its last."""
    broken = change(alone, "run", name="broken")
    stop(ranks, broken, 1, "stopped by a signal at step 2 of 4, with a checkpoint")
    ranks(train, 1, broken)
    require_same_weights(broken, alone)
    assert curve(broken) == curve(alone)
    [message] = ranks(failing, 1, change(broken, "train", steps=6, grpo=options(broken, updates=3)))
    assert "resumes after step 4, 1 updates into a batch of completions" in message


def test_completions_end_with_the_tokens_that_the_imported_model_names(ranks, job):
    """Here with any token: of training and validation alike, each has one."""
    ends = change(change(job, "run", name="ends"), "train", steps=2)
    kept = Path(job.run.dir) / "ends" / KEPT
    kept.mkdir(parents=True)
    (kept / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(256)]}))
    ranks(train, 1, ends)
    assert {row["length"] for row in rows(ends, "step")} == {1.0}
    assert {row["val_length"] for row in rows(ends, "validation")} == {1.0}


def options(job: Job, **values) -> GrpoOptions:
    return dataclasses.replace(job.train.grpo, **values)


def failing(ranks, job: Job) -> str:
    with pytest.raises((JobError, RunError)) as caught:
        train(ranks, job)
    return str(caught.value)


def test_generation_that_differs_from_training_stops_the_run(ranks, alone):
    """The bound is below rounding; the weights of the first step are those of the run that goes on."""
    strict = change(change(alone, "run", name="strict"), "train", grpo=options(alone, max_gap=1e-30))
    [message] = ranks(failing, 1, strict)
    assert "step 1: a token's log-probabilities in generation and in training differ by" in message
    assert "train.grpo.on_gap=warn goes on" in message
    warned = change(strict, "train", grpo=options(strict, on_gap="warn"))
    ranks(train, 1, warned)
    require_same_weights(warned, alone)


def test_the_reference_must_be_the_same_when_a_run_resumes(ranks, alone):
    for name in ("run", "broken"):
        (Path(alone.run.dir) / name / "config.yaml").write_text("run: {}\n")  # which the command writes, not the ranks
    tied = change(change(alone, "run", name="tied"), "model", from_=f"{alone.run.dir}/run")
    stop(ranks, tied, 1, "at step 2 of 4")
    [message] = ranks(failing, 1, change(tied, "model", from_=f"{alone.run.dir}/broken"))
    assert "its weights are not those that the run" in message


def wrong(prompt: str, completion: str, answer: str) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "expected"),
    [
        ("exact", " 12 ", "12", 1),
        ("exact", "012", "12", 0),
        ("number", "so 7, then 12.0", "12", 1),
        ("number", "it is 1,000", "1000", 1),
        ("number", "-1/2", "-0.5", 1),
        ("number", "1/0", "0", 0),
        ("number", "none", "12", 0),
        ("regex", "3 #### 12", "12", 1),
        ("regex", "#### 12 #### 13", "12", 0),
        ("regex", "12", "12", 0),
        (f"{__name__}:ones", "11", "12", 5 / 8),
    ],
)
def test_rewards(reward, completion, answer, expected):
    given = GrpoOptions(reward=reward, pattern="#### *([0-9]+)" if reward == "regex" else "")
    assert reward_of(given)("6+6=", completion, answer) == expected


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (f"{__name__}:wrong", "returned nan for '11', not a finite number"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        ("no.such:module", "No module named 'no'"),
        (f"{__name__}:random", "is no function"),
    ],
)
def test_a_reward_that_fails_is_named(place, words):
    with pytest.raises(JobError, match=f"train.grpo.reward {place}.*{words}"):
        reward_of(GrpoOptions(reward=place))("", "11", "")


@pytest.mark.parametrize(
    ("section", "values", "field", "words"),
    [
        (
            "train",
            {"global_batch": 18},
            "train.global_batch",
            "no multiple of train.grpo.group 4; nearest legal: 20 or 16",
        ),
        ("train", {"steps": 5}, "train.steps", "each of train.grpo.updates 2; nearest legal: 6"),
        ("checkpoint", {"every": 3}, "checkpoint.every", "nearest legal: 4"),
        ("model", {"dropout": 0.1}, "model.dropout", "training differ from generation"),
        ("layout", parse("dp_replicate=2,sync=local_sgd"), "layout.sync", "one policy"),
        ("layout", parse("pp=2,schedule=pipedream"), "layout.schedule", "nearest legal: schedule=1f1b"),
        ("guard", {"on_nan": "rewind"}, "guard.on_nan", "nearest legal: on_nan=stop"),
        ("grpo", {"reward": "exakt"}, "train.grpo.reward", "did you mean exact"),
        ("grpo", {"pattern": "x"}, "train.grpo.pattern", "give both, or neither"),
        ("grpo", {"reward": "regex", "pattern": "("}, "train.grpo.pattern", "no regular expression"),
        ("grpo", {"temperature": 0.0}, "train.grpo.temperature", "must be above 0"),
        ("grpo", {"max_new_tokens": 17}, "train.grpo.max_new_tokens", "ends at model.seq_len 16; nearest legal: 16"),
        ("grpo", {"clip_high": 0.01}, "train.grpo.clip_high", "is below clip"),
        ("data", {"packing": True, "document_mask": True}, "data.packing", "one sample; nearest legal: packing=False"),
        ("data", {"corpus": "chat"}, "train.grpo.group", "is for completions"),
    ],
)
def test_what_does_not_suit_completions_is_refused(job, section, values, field, words):
    if section == "grpo":
        section, values = "train", {"grpo": options(job, **values)}
    changed = change(job, section, **values) if isinstance(values, dict) else dataclasses.replace(job, layout=values)
    found = dict(problems_of(changed))
    assert words in found[field]


def test_prompts_are_read_with_their_answers(job, tmp_path):
    rows = [
        {"question": "2+2=", "answer": 4},
        {"question": [{"role": "user", "content": "1/4="}], "answer": 0.25},
        {"question": "what?", "answer": "a\nb"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = dataclasses.replace(
        job.data, path=str(tmp_path / "rows.jsonl"), columns=("question:prompt",), val_fraction=0.0, dir=str(tmp_path)
    )
    found = open_split(prepare(data), "train", 16, data)
    assert isinstance(found, PromptData)
    read = [found.prompt(sample) for sample in range(3)]
    assert [(found.tokenizer.decode(tokens), answer) for tokens, answer in read] == [
        ("2+2=", "4"),
        ("1/4=", "0.25"),
        ("what?", "a\nb"),
    ]


def test_advantages_and_weights_are_those_of_the_papers():
    """Groups of equal rewards teach nothing, whatever rounding leaves of their mean."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, *[0.1] * 4], dtype=torch.float64)
    found = rollouts.advantages_of(rewards, 4, scale="std")
    assert found[:4] == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert found[4:].tolist() == [0] * 4
    assert rollouts.advantages_of(rewards, 4, scale="none")[:4].tolist() == [0.75, *[-0.25] * 3]


@pytest.mark.parametrize("line", ["dp_shard=2,ep=2", *also_whole("dp_shard=4,ep=2,zero=3")])
def test_ranks_with_other_experts_generate_with_all_of_them(ranks, job, line):
    mixture = dataclasses.replace(job.model, n_layers=2, moe=MoE(n_experts=4, top_k=2, d_ff=16))
    short = change(dataclasses.replace(job, model=mixture), "train", steps=2)
    one = change(short, "run", name="experts")
    ranks(train, 1, one)
    layout = parse(line)
    other = change(dataclasses.replace(short, layout=layout), "run", name=line)
    ranks(train, layout.processes, other, timeout=200)
    assert curve(other) == pytest.approx(curve(one), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("line", "new"),
    [("pp=2,micro_batch=1", 400), *also_whole(("pp=2,micro_batch=1", 100), ("dp_shard=2,micro_batch=1", 400))],
)
def test_generation_is_predicted_and_rehearsed(job, line, new):
    """Memory at its fullest moment, the cache, equals the rehearsed program's; time grows with the new tokens alone."""
    layout, grpo = parse(line), dataclasses.replace(job.train.grpo, group=16, max_new_tokens=new)
    wide = dataclasses.replace(job.model, d_model=64, seq_len=512, vocab_size=32)
    long = change(
        dataclasses.replace(job, model=wide, layout=layout), "train", precision="fp32", global_batch=32, grpo=grpo
    )
    for rank in distinct_ranks(long):
        found, memory = rehearse(long, rank, 32, "cpu"), step_memory(rank_spec(long, 32, "cpu"))
        assert found.at == "data"
        fullest = memory[found.coordinates.get("pp", 0)]
        assert fullest.moment == "generation"
        assert fullest.allocated == pytest.approx(found.peak, rel=0.05)
    cluster = cluster_of("dgx-h100")
    specs = [step_spec(dataclasses.replace(long, cluster=cluster, train=one.train), 32) for one in (long, job)]
    made = [generation(spec) for spec in specs]
    assert made[0].cache == max(generation_bytes(specs[0], *of).cache for of in parts_of(specs[0]))
    assert made[0].decoding_s > new / 8 * made[1].decoding_s
    parts = predict(specs[0]).parts
    assert parts.generation == (made[0].prompts_s + made[0].decoding_s) / grpo.updates
    assert parts.total == pytest.approx(sum(seconds for _, seconds in parts.items()))


def parts_of(spec):
    return [(rank.of_kind.items(), (rank.embedding, rank.head)) for rank in contents(spec)]
