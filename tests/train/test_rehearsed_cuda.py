"""Training on a GPU that is not there (rehearsed_cuda.py) takes the same steps as on a CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map

from parallel.steps import micro_batches, steps, worst
from phalanx.config.job import Data, Job, ProfileOptions, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.parallel.mesh import build
from phalanx.train import loop
from phalanx.train.device import choose
from phalanx.train.optimizers import rule
from phalanx.train.profile import tracing
from phalanx.train.requests import StopRequest
from phalanx.train.step import StepInputs, Stepper
from rehearsed_cuda import CUDA, rehearsal
from train.runs import change, optimizer_of, require_same_weights, rows, train

VOCAB = 13
LLAMA = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    seq_len=16,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
)
MIXTURE = replace(LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=16, aux_loss=0.01, n_shared=1))
LATENT = replace(LLAMA, n_kv_heads=0, mla=MLA(kv_rank=8, rope_head_dim=4, nope_head_dim=8, v_head_dim=8))


def job_of(
    line: str = "dp_replicate=1", model: ModelConfig = LLAMA, data: Any = None, optimizer: str = "adamw", **train: Any
) -> Job:
    options: dict[str, Any] = {"steps": 3, "global_batch": 4, "precision": "fp32", **train}
    return Job(
        model=model,
        layout=parse(line),
        data=data or Data(),
        optimizer=optimizer_of(optimizer),
        train=Train(**options),
    )


def rehearsed(ranks: Any, job: Job, nccl: bool) -> Any:
    """What `steps` returns, computed on the GPU, with tensors on the CPU."""
    with pytest.MonkeyPatch.context() as patch, rehearsal(patch):
        if nccl:
            patch.setattr(torch.distributed, "get_backend", lambda *_: "nccl")
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, steps(ranks, job, VOCAB, 3, CUDA))


CASES = {
    "llama": job_of(),
    "llama in bf16": job_of(precision="bf16"),
    "llama in fp16, recomputed": job_of("recompute=full", precision="fp16"),
    "mixture in bf16": job_of(model=MIXTURE, precision="bf16"),
    "latent": job_of(model=LATENT, precision="fp64"),
    "dropout, loss in chunks": job_of("loss_chunk=8", model=replace(LLAMA, dropout=0.1)),
    "window": job_of(model=replace(LLAMA, window=4), precision="fp64"),
    "documents": job_of(data=Data(document_mask=True), precision="fp64"),
    "lion": job_of(optimizer="lion", precision="bf16"),
    "muon": job_of(optimizer="muon", precision="bf16"),
    "8-bit AdamW": job_of(optimizer="adamw state=8bit"),
    "offloaded optimizer": job_of("offload=optimizer", precision="bf16"),
    "offloaded optimizer and activations": job_of("offload=optimizer+activations"),
}
SPREAD = {  # with a group of NCCL's, or messages through host memory
    "ring": (job_of("cp=2,zero=2", precision="fp64"), True),
}
if "PHALANX_REHEARSAL" in os.environ:
    SPREAD |= {
        "zero 2, offloaded": (job_of("dp_shard=2,zero=2,offload=optimizer+activations", precision="bf16"), False),
        "ddp": (job_of("dp_replicate=2"), True),
        "zero 1": (job_of("dp_shard=2,zero=1", precision="bf16"), True),
        "tensors and sequences": (job_of("tp=2,sp=true"), True),
        "pipeline": (job_of("pp=2,schedule=zb_h1,accumulation=2"), False),
        # AdamW makes a step of the rounding noise of experts with few rows.
        "experts": (job_of("dp_shard=2,ep=2,zero=2", model=MIXTURE, optimizer="sgd"), True),
    }


def close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert worst(found[1], expected[1], 1e-2) < 1e-4
    assert worst(found[2], expected[2], 1e-2) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_takes_the_steps_of_a_cpu(case):
    alone: Any = SimpleNamespace(rank=0)
    close(rehearsed(alone, CASES[case], nccl=False), steps(alone, CASES[case], VOCAB, 3))


@pytest.mark.parametrize("case", SPREAD)
def test_gpus_take_the_steps_of_cpus(ranks, case):
    job, nccl = SPREAD[case]
    world = job.layout.processes
    close(ranks(rehearsed, world, job, nccl)[0], ranks(steps, world, job, VOCAB, 3)[0])


def test_a_launched_step_never_waits_for_the_host(monkeypatch):
    """The status of the step before arrives while the next one is computed; nothing else is read."""
    job = job_of(precision="bf16")
    with rehearsal(monkeypatch) as gpu:
        stepper = Stepper(job, build(job.layout, "cuda"), CUDA, VOCAB)
        seen, before, waits = [], None, 0
        for step in range(4):
            batches, valid = micro_batches(job, step, 0, VOCAB)
            waits = gpu.waits
            computed = stepper.compute(StepInputs(batches, step, valid, 1e-2))
            stepper.launch(computed)
            if before is not None:
                before.wait()
                seen.append((before.loss, before.grad_norm, before.requests))
            before = computed
            assert gpu.waits == waits
    assert len(seen) == gpu.event_waits == 3
    expected = steps(SimpleNamespace(rank=0), job, VOCAB, 3)[0]
    assert [(loss, norm) for loss, norm, _ in seen] == expected


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_one_kernel_updates_where_triton_is(monkeypatch, optimizer):
    """Its arguments are those of the function that is compiled, flat and on the GPU but for nothing."""
    job, alone = job_of(optimizer=optimizer, precision="bf16"), SimpleNamespace(rank=0)
    expected = steps(alone, job, VOCAB, 3)
    launches = []

    def kernel(formula, w, g, copy, state, scale, bad, numbers):
        assert {x.device for x in (w, g, copy, *state, scale, numbers)} == {CUDA}
        assert {x.stride() for x in (w, g, copy, *state)} == {(1,)}
        assert {x.numel() for x in (w, g, copy, *state)} == {w.numel()}
        assert (g.dtype, copy.dtype, w.dtype, numbers.dtype) == (torch.bfloat16, torch.bfloat16, *[torch.float32] * 2)
        launches.append(w.numel())
        rule.one_pass(formula, w, g, copy, state, scale, bad, numbers)

    monkeypatch.setattr(rule, "has_triton", lambda: True)
    monkeypatch.setattr(rule, "compiled", lambda: kernel)
    close(rehearsed(alone, job, nccl=False), expected)
    assert len(launches) == 3 * len(expected[2])


def test_a_whole_run_on_a_gpu_makes_the_curve_of_a_cpu(ranks, job, monkeypatch):
    """With deferred judging, checkpoints, validation, the profile and its memory report."""
    job = change(change(job, "train", precision="bf16", eval_every=4), "checkpoint", every=3)
    profiled = replace(job.train, profile=ProfileOptions(steps=(2, 3), memory=True))
    ranks(train, 1, change(job, "run", name="cpu"))
    ranks(train_rehearsed, 1, replace(job, train=profiled))
    require_same_weights(job, change(job, "run", name="cpu"))
    assert [row["step"] for row in rows(job, "validation")] == [4, 6]
    assert (Path(job.run.dir) / "run" / "traces" / "memory-rank_0.pickle").exists()


def train_rehearsed(ranks, job):
    with pytest.MonkeyPatch.context() as patch, rehearsal(patch):
        made = tracing.profile  # a build for CPUs cannot record a GPU's activities
        patch.setattr(
            tracing,
            "profile",
            lambda activities, **options: made(activities=activities & {ProfilerActivity.CPU}, **options),
        )
        device = choose("auto", 0)
        assert device == CUDA
        return loop.Trainer(job, ranks, device, StopRequest()).run()
