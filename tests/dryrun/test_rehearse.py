"""A rank's program rehearsed alone, next to the same program on real ranks: bytes sent, calls, FLOPs and memory."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from covering import covering
from phalanx.blocks.parameters import train_flops_per_step
from phalanx.comm.calls import Recording, recorded
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE, SparseAttention
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.dryrun.operations import flops_of
from phalanx.dryrun.rehearse import distinct_ranks, rehearse
from phalanx.errors import JobError
from phalanx.parallel import mesh as meshes
from phalanx.train.step import StepInputs, Stepper
from phalanx.verify.measure import micro_batches
from train.test_predicted_memory import stepped

VOCAB = 64
LLAMA = ModelConfig(
    n_layers=4,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    seq_len=64,
    vocab_size=VOCAB,
    positions="rope",
    activation="swiglu",
    bias=False,
    tied=False,
)
MODELS = {
    "llama": LLAMA,
    "gpt": ModelConfig(n_layers=4, d_model=64, n_heads=4, seq_len=64, vocab_size=VOCAB),
    "experts": replace(LLAMA, moe=MoE(n_experts=8, top_k=2, d_ff=32, n_shared=1)),
    "latent": replace(
        LLAMA, n_kv_heads=0, mla=MLA(q_rank=48, kv_rank=32, rope_head_dim=8, nope_head_dim=8, v_head_dim=16)
    ),
    "adapters": replace(LLAMA, lora=LoRA(rank=4)),
}
LAYOUTS = [
    Layout(),
    Layout(recompute="full", micro_batch=2),
    Layout(recompute="products"),
    Layout(dp_replicate=2),
    *(Layout(dp_shard=2, zero=zero, micro_batch=1) for zero in (1, 2, 3)),
    Layout(dp_replicate=2, dp_shard=2, zero=3),
    Layout(dp_replicate=2, compression="powersgd", compression_rank=2),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(cp=2, zero=1),
    Layout(cp=2, cp_ulysses=2),
    Layout(pp=2, micro_batch=1),
    Layout(pp=2, schedule="zb_h1", micro_batch=1),
    Layout(pp=2, dp_shard=2, tp=2, zero=2),
    Layout(dp_shard=2, hpz=2, zero=3),
    Layout(offload="optimizer"),
    Layout(tiles=2, loss_chunk=32),
]


def named(value: Any) -> str:
    return value.line() or "alone" if isinstance(value, Layout) else str(value)


class Counting(TorchDispatchMode):
    """FLOPs of a real step."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flops_of(func, args, kwargs or {}, out):
            self.flops[func._overloadpacket.__name__] += count
        return out


def real(ranks, job: Job) -> tuple[dict[str, dict[str, float]], float, list[tuple[str, str, int]]]:
    """The bytes sent, FLOPs and calls of the second of two steps on this rank."""
    recording = Recording()
    with recorded(recording):
        mesh = meshes.build(job.layout, "cpu")
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
        counted = Counting()
        for step in range(2):
            mesh.ledger.clear()
            recording.calls.clear()
            batches, valid = micro_batches(job, VOCAB, mesh, step)
            counted.flops.clear()
            with counted:
                stepper.step(StepInputs(batches, step, valid, 1e-3))
    calls = [(each.axis, each.collective, each.bytes) for each in recording.calls]
    return mesh.ledger.traffic(), sum(counted.flops.values()), calls


def job_of(model: ModelConfig, layout: Layout, **train: Any) -> Job:
    return Job(model=model, layout=layout, train=Train(global_batch=4 * layout.data_ranks, **train))


CASES = [*covering(product(MODELS, LAYOUTS), size=1), ("chosen keys", Layout(tp=2, cp=2, zero=1))]
CHOSEN = replace(MODELS["latent"], sparse=SparseAttention(top_k=16, index_heads=4, index_head_dim=16))
"""Not among all of MODELS: not every layout is legal for it."""


@pytest.mark.parametrize(("name", "layout"), CASES, ids=named)
def test_a_rehearsed_rank_does_what_a_real_one_does(ranks, name, layout):
    job = job_of(MODELS.get(name, CHOSEN), layout)
    found = ranks(real, layout.world, job)
    for rank in {0, layout.world - 1}:
        traffic, flops, calls = found[rank]
        rehearsed = rehearse(job, rank, VOCAB, "cpu")
        assert rehearsed.traffic_bytes == traffic
        assert sum(rehearsed.flops.values()) == flops
        assert [(each.axis, each.collective, each.bytes) for each in rehearsed.calls] == calls


def test_tokens_are_divided_evenly_among_experts(ranks):
    """On real ranks routers decide: what they do together is what all rehearsed ones do."""
    job = job_of(MODELS["experts"], Layout(dp_shard=2, ep=2, zero=3))
    found = ranks(real, 2, job)
    rehearsed = [rehearse(job, rank, VOCAB, "cpu") for rank in range(2)]
    assert sum(sum(each.flops.values()) for each in rehearsed) == sum(flops for _, flops, _ in found)
    for each, (traffic, _, calls) in zip(rehearsed, found, strict=True):
        assert [(call.axis, call.collective) for call in each.calls] == [call[:2] for call in calls]
        assert each.traffic_bytes["dp_shard"] == traffic["dp_shard"]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(pp=2, micro_batch=1)], ids=Layout.line)
def test_all_ranks_compute_what_the_formula_says(layout):
    job = job_of(LLAMA, layout)
    flops = sum(sum(rehearse(job, rank, VOCAB, "cpu").flops.values()) for rank in range(layout.world))
    assert flops == train_flops_per_step(LLAMA, 4)


MEMORY = [("llama", Layout()), ("experts", Layout(dp_shard=2, zero=3)), ("gpt", Layout(tp=2)), ("llama", Layout(pp=2))]


@pytest.mark.parametrize(("name", "layout"), MEMORY, ids=named)
def test_it_has_the_memory_of_a_real_one(ranks, name, layout):
    job = job_of(MODELS[name], layout)
    found = ranks(stepped, layout.world, job)
    for rank in {0, layout.world - 1}:
        assert rehearse(job, rank, VOCAB, "cpu").peak == pytest.approx(found[rank], rel=0.03)


def test_remembered_results_are_those_of_torch(monkeypatch):
    job = job_of(MODELS["experts"], Layout(dp_shard=2, zero=3, micro_batch=1))
    first, again = (rehearse(job, 1, VOCAB, "cuda").as_dict() for _ in range(2))
    monkeypatch.setattr("phalanx.dryrun.world.remember", lambda *_: None)
    monkeypatch.setattr("phalanx.dryrun.world.remembered_on", lambda *_: {})
    torchs = rehearse(job, 1, VOCAB, "cuda").as_dict()
    assert {**first, "seconds": 0} == {**again, "seconds": 0} == {**torchs, "seconds": 0}


def test_parameters_that_are_whole_for_a_moment_are_communication():
    found = rehearse(Job(model=LLAMA, layout=Layout(dp_shard=2), train=Train(global_batch=8)), 0, VOCAB, "cpu")
    whole = [each for each in found.by_operator if each["operator"] == "empty"]
    assert {each["part"] for each in whole} == {"communication"}
    outside = (2 * VOCAB + 1) * LLAMA.d_model  # embedding, head, and the norm before it
    assert sum(each["bytes"] for each in whole) > 4 * outside


def test_rehearsals_of_generation_follow_each_other():
    # Views of cached keys, which with FSDP are no tensors of inference mode.
    for layout in (Layout(), Layout(dp_shard=2)):
        data = Data(corpus="prompts", path="unread.jsonl")
        job = Job(model=LLAMA, layout=layout, data=data, train=Train(global_batch=8 * layout.data_ranks))
        predicted = step_memory(rank_spec(job, VOCAB, "cpu"))[0]
        assert rehearse(job, 0, VOCAB, "cpu").peak == pytest.approx(predicted.allocated, rel=0.03)


def test_any_number_of_ranks_costs_one():
    layout = Layout(dp_replicate=1024, dp_shard=16, tp=4, pp=2, zero=2, micro_batch=1)
    job = replace(job_of(LLAMA, layout), train=Train(global_batch=2 * layout.data_ranks))
    assert layout.world == 131_072
    assert distinct_ranks(job) == [0, 65_536]
    last = rehearse(job, layout.world - 1, VOCAB, "cpu")
    assert last.coordinates == {"pp": 1, "dp_replicate": 1023, "dp_shard": 15, "tp": 3}
    assert last.traffic_bytes["pp"]["send"] == 2 * 4 * 64 * 64  # the gradients of two micro-batches of one sequence


def test_what_cannot_be_rehearsed_is_named_all_at_once():
    layout = Layout(dp_replicate=2, sync="asp", offload="optimizer", offload_to="/tmp")
    with pytest.raises(JobError, match=r"(?s)sync=asp.*offload_to=/tmp"):
        rehearse(job_of(LLAMA, layout), 0, VOCAB, "cpu")


def test_no_technique_asks_whether_it_is_rehearsed():
    """Only the verb and the API know of rehearsals."""
    source = Path(phalanx.__file__).parent
    for path in source.rglob("*.py"):
        room = path.relative_to(source).parts[0]
        if room in ("dryrun", "cli", "api.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any("dryrun" in name or "FakeTensor" in name for name in (module, *names)), path
