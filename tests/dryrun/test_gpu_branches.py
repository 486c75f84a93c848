"""Every technique on a GPU that is not there: `make rehearsal` runs all cases, and counts the statements for GPUs."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dryrun.gpu_lines import running, statements
from phalanx.checkpoint.parts import Snapshot
from phalanx.config.cluster import DEVICE_TYPES, Cluster
from phalanx.config.clusters import ACCELERATORS, DEVICES
from phalanx.config.job import Data, GuardOptions, Job, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE
from phalanx.dryrun.rehearse import device_type_of, distinct_ranks, rehearse
from phalanx.dryrun.world import pretended
from phalanx.errors import JobError, RunError
from phalanx.launch.process_group import backend_of
from phalanx.launch.ranks import SINGLE
from phalanx.machine.calibration import look_up
from phalanx.train import device as devices
from phalanx.train.agreement import program_facts
from phalanx.train.step import free_bytes
from train.runs import optimizer_of

ALL = "PHALANX_REHEARSAL" in os.environ
VOCAB = 64
GPT = ModelConfig(n_layers=2, d_model=128, n_heads=4, seq_len=64, vocab_size=VOCAB)
LLAMA = replace(GPT, n_kv_heads=2, norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False)
MIXTURE = MoE(n_experts=8, top_k=2, d_ff=32, n_shared=1, aux_loss=0.01, z_loss=0.001)
GROUPED = MoE(n_experts=8, top_k=2, d_ff=32, n_shared=1, router="sigmoid", bias_balanced=True, n_groups=2, top_groups=1)
MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "dropout": replace(GPT, dropout=0.1),
    "experts": replace(LLAMA, moe=MIXTURE),
    "capacity": replace(LLAMA, moe=MoE(n_experts=8, top_k=2, d_ff=32, capacity=1.25)),
    "balanced": replace(LLAMA, moe=GROUPED),
    "latent": replace(LLAMA, n_kv_heads=0, mla=MLA(48, 32, rope_head_dim=8, nope_head_dim=8, v_head_dim=32)),
    "windows": replace(LLAMA, window=16, full_every=2),
    "sinks": replace(LLAMA, sinks=True, window=16),
    "caps": replace(LLAMA, attention_softcap=30.0, logit_softcap=30.0),
    "adapters": replace(LLAMA, lora=LoRA(rank=4)),
    "norms": replace(LLAMA, qk_norm="head", norm_place="both", qkv_bias=True),
    "parallel": replace(GPT, parallel_block=True),
}
DOCUMENTS = Data(document_mask=True)
PAIRS = Data(corpus="preferences", path="x.jsonl")
CHATS = Data(corpus="chat", path="x.jsonl", packing=True, document_mask=True)
Case = tuple[str, str, dict[str, Any]]
"""A model, a layout's line, and what differs from a job in bf16 on H100s."""

FEW: list[Case] = [
    ("experts", "dp_shard=4,ep=2,zero=3,accumulation=2", {}),
    ("gpt", "pp=2,offload=all,accumulation=2", {"precision": "fp16"}),
    ("sinks", "tp=2,sp=true,cp=2", {"data": DOCUMENTS, "global_batch": 1}),  # a ring has many blocks per document
    ("dropout", "dp_shard=2,zero=2", {"optimizer": "adamw state=8bit"}),
    ("adapters", "tp=2,dp_shard=2,zero=1", {"data": PAIRS}),
    ("latent", "pp=2,schedule=zb_h1,accumulation=2", {"chip": "b200"}),
    ("llama", "dp_replicate=2,sync=diloco,sync_every=1", {"optimizer": "sgd"}),
    ("experts", "dp_shard=2,zero=3,offload=all,recompute=full", {"chip": "max1550-tile"}),
    ("sinks", "cp=2", {"data": DOCUMENTS, "global_batch": 1, "chip": "mi300x"}),
]
MORE: list[Case] = [
    ("llama", "dp_shard=2,zero=3,offload=all,recompute=full", {}),
    *(("llama", "dp_replicate=1", {"precision": name}) for name in ("fp64", "fp32", "fp16")),
    *(("llama", "dp_replicate=1", {"precision": "fp8", "fp8_scaling": way}) for way in ("rowwise", "tensorwise")),
    *(("llama", "dp_replicate=1", {"precision": "fp8", "chip": chip}) for chip in ("mi300x", "l40s")),
    ("llama", "dp_replicate=1", {"precision": "fp8", "fp8_scaling": "mxfp8", "chip": "b200"}),
    *(
        ("experts", "tp=2,sp=true,zero=1", {"precision": "fp8", "fp8_scaling": way, "chip": "b200"})
        for way in ("rowwise", "tensorwise", "mxfp8")
    ),
    ("llama", "dp_shard=2,zero=2", {"gradients": "fp32"}),
    ("llama", "dp_replicate=1", {"deterministic": True}),
    *(("llama", "dp_shard=2,zero=1", {"optimizer": name}) for name in ("sgd", "lion", "muon", "adamw state=8bit")),
    *(("llama", "dp_shard=2,zero=2,offload=optimizer", {"optimizer": name}) for name in ("sgd", "lion", "muon")),
    *(("llama", f"recompute={how}", {}) for how in ("products", "mlp", "selective", "full", "0.5")),
    *(
        ("llama", f"zero=3,dp_shard=2,recompute=full,offload={what}", {})
        for what in ("optimizer", "activations", "parameters+optimizer")
    ),
    ("llama", "dp_replicate=2,offload=all", {}),
    ("llama", "zero=3,dp_shard=2,offload=activations,offload_blocks=1", {}),
    *(("llama", f"zero={stage},dp_shard=2,dp_replicate=2,accumulation=2", {}) for stage in (1, 2, 3)),
    ("llama", "zero=3,dp_shard=2,accumulation=2,accumulate=sharded", {}),
    ("llama", "zero=3,dp_shard=2,accumulation=2,reshard=false", {}),
    ("llama", "zero=3,dp_shard=2,prefetch=2", {}),
    ("llama", "zero=3,dp_shard=4,hpz=2,quantise_weights=int8,quantise_gradients=int4", {}),
    ("llama", "zero=3,dp_shard=4,quantise_weights=fp8", {}),
    ("llama", "dp_replicate=2,compression=int8", {}),
    ("llama", "zero=3,dp_shard=2,dp_replicate=2,compression=powersgd,compression_rank=1", {}),
    ("llama", "tiles=2,tile=mlp+attention,zero=3,dp_shard=2", {}),
    ("llama", "loss_chunk=16,tp=2", {}),
    ("llama", "tp=2,sp=true,sp_regather=true", {}),
    *((model, "cp=4,cp_ulysses=2", {}) for model in ("llama", "windows", "latent")),
    ("gpt", "cp=2", {"precision": "fp32"}),
    *(("llama", line, {"data": DOCUMENTS}) for line in ("dp_replicate=1", "cp=2", "cp=2,cp_ulysses=2")),
    *((model, "dp_replicate=1", {"data": DOCUMENTS, "precision": "fp32"}) for model in ("llama", "windows")),
    *((model, "dp_replicate=1", {}) for model in ("windows", "caps", "norms", "capacity", "balanced")),
    *(("latent", "dp_replicate=1", {"chip": chip, "data": DOCUMENTS}) for chip in ("a100-80gb", "b200")),
    ("latent", "dp_replicate=1", {"chip": "a100-80gb"}),
    ("dropout", "tp=2,sp=true,cp=2,recompute=full", {}),
    *(
        ("llama", f"pp=2,schedule={name},accumulation=4", {"layers": 4})
        for name in ("naive", "gpipe", "interleaved_1f1b", "looped_bfs", "zb_h2", "zb_v", "v_half", "dualpipe_v")
    ),
    *(
        ("llama", f"pp=2,schedule={name},accumulation=4", {"layers": 4})
        for name in ("dualpipe", "terapipe", "pipedream")
    ),
    ("experts", "pp=2,tp=2,sp=true,schedule=zb_h1,accumulation=2", {}),
    ("llama", "pp=2,dp_shard=2,zero=3,accumulation=2", {}),
    *(("experts", line, {}) for line in ("dp_shard=2,ep=2,zero=1", "dp_shard=2,ep=2,zero=2,tp=2,sp=true")),
    *(("experts", "dp_replicate=1", {"precision": name}) for name in ("fp32", "fp16")),
    ("balanced", "dp_shard=2,ep=2,zero=3,offload=all", {}),
    ("adapters", "dp_shard=2,zero=3,offload=optimizer", {}),
    ("adapters", "cp=2", {"data": PAIRS}),
    ("llama", "dp_shard=2,zero=2", {"data": CHATS}),
    ("parallel", "tp=2", {}),
    ("llama", "dp_replicate=2,sync=local_sgd,sync_every=1", {}),
    ("gpt", "dp_replicate=1", {"precision": "fp16", "chip": "v100-16gb"}),
    ("llama", "tp=2,cp=2,dp_shard=2", {"chip": "mi300x"}),
]
OTHERS: list[Case] = [
    (name, line, {**more, "chip": chip})
    for chip in ("max1550-tile", "mi300x")
    for name, line, more in FEW + MORE
    if more.get("precision") != "fp8"
]
"""The same on GPUs of other makers."""


def named(case: Case) -> str:
    name, line, more = case
    kinds = {key: value.corpus if isinstance(value, Data) else value for key, value in more.items()}
    return "-".join([name, line, *(f"{key}={value}" for key, value in kinds.items())])


def job_of(case: Case) -> Job:
    name, line, more = case
    model, layout = MODELS[name], parse(line)
    own = {key: value for key, value in more.items() if key not in ("layers", "data", "optimizer", "chip")}
    options = {"precision": "bf16", "eval_every": 1, "global_batch": 4 * layout.data_ranks, **own}
    return Job(
        model=replace(model, n_layers=more.get("layers", model.n_layers)),
        layout=layout,
        data=more.get("data", Data()),
        optimizer=optimizer_of(more.get("optimizer", "adamw")),
        train=Train(**options),
        guard=GuardOptions(every=1),
        cluster=Cluster(accelerator=ACCELERATORS[more.get("chip", "h100-80gb")]),
    )


def rehearse_all(case: Case) -> None:
    job = job_of(case)
    device_type = device_type_of(job)
    assert device_type == ("xpu" if job.cluster.accelerator.name.startswith("max") else "cuda")
    for rank in distinct_ranks(job):
        found = rehearse(job, rank, VOCAB, device_type)
        assert found.peak > 0
        assert job.layout.offload == "none" or found.host_peak_bytes > 2**14
        assert {each["operator"] for each in found.by_operator}.isdisjoint({"_linear_pointwise"})  # oneDNN's, of CPUs


@pytest.fixture(scope="module", autouse=True)
def _after_another_gpu() -> None:
    """Makes torch believe that its GPU has begun, as after tests that pretend one: it then asks for its number."""
    with mock.patch("torch.cuda._lazy_init"), suppress(RuntimeError, NotImplementedError):
        torch.empty(1, device="cuda")


@pytest.mark.parametrize("case", FEW, ids=named)
def test_a_technique_runs_on_a_gpu_that_is_not_there(case):
    rehearse_all(case)


@pytest.mark.parametrize(("name", "way"), [("experts", "rowwise"), ("llama", "mxfp8")])
def test_products_in_fp8_have_the_flops_of_those_in_bf16(name, way):
    chip = "b200" if way == "mxfp8" else "h200"
    jobs = [
        job_of((name, "dp_replicate=1", {"chip": chip, **more}))
        for more in ({"precision": "fp8", "fp8_scaling": way}, {})
    ]
    narrow, wide = (rehearse(job, 0, VOCAB, "cuda") for job in jobs)
    if name == "experts":  # zeros fill the rows of a weight's gradient up
        rows = 4 * LLAMA.seq_len * MIXTURE.top_k
        wide.flops["experts"] *= (3 * rows + 16 * MIXTURE.n_experts) / (3 * rows)
    assert narrow.flops == wide.flops


UNREACHED = {
    "parallel/apply.py: apply_compile": "torch compiles for real tensors only",
    "parallel/apply.py: apply_data_parallel": "refuses threads, which a rehearsal refuses before",
    "train/optimizers/rule.py: ElementwiseRule.update": "a kernel that Triton compiles",
    "train/optimizers/narrow.py: NarrowUpdate.update": "a kernel that Triton compiles",
    "train/profile/report.py: of_step": "times of a GPU's kernels",
    "train/profile/window.py: StepProfile._start_tracing": "torch's profiler of a GPU",
    "train/profile/window.py: StepProfile._snapshot": "torch's record of a GPU's memory",
    "train/start.py: log_start": "a line of a run's log",
}
"""Functions with statements for GPUs that no rehearsal runs, and why."""


def ask_the_device() -> None:
    """Makes the calls to torch.accelerator that a run makes outside its steps."""
    for chip, wanted in (("h100-80gb", "cuda"), ("mi300x", "rocm"), ("max1550-tile", "xpu")):
        _ask(Cluster(accelerator=ACCELERATORS[chip], devices_per_node=8), wanted)


def _ask(cluster: Cluster, wanted: Any) -> None:
    device = torch.device(DEVICE_TYPES[wanted], 0)
    assert device_type_of(Job(cluster=cluster)) == device_type_of(Job(cluster=Cluster(device=wanted))) == device.type
    with pretended(0, 1, device, cluster, str) as dry:
        assert devices.choose("auto", 0) == devices.choose(wanted, 0) == device
        for rank in (None, 8):
            with pytest.raises(RunError, match="rank"):
                devices.choose(wanted, rank)
        with mock.patch("torch.accelerator.device_count", int), pytest.raises(RunError, match=f"{wanted}.* has 0 "):
            devices.choose(wanted, 0)
        for other in {"rocm", "xpu"} - {wanted}:
            with pytest.raises(RunError, match=f"cluster.device={other}, but this machine has 0 "):
                devices.choose(other, 0)
        assert backend_of(SINGLE, device) == f"cpu:gloo,{device.type}:{'xccl' if wanted == 'xpu' else 'nccl'}"
        assert look_up(device, 1).cores
        assert devices.memory_limit(device, 1) == round(cluster.accelerator.memory_gib * 2**30)
        assert 0 < devices.peak_memory(device) < free_bytes(device)
        assert devices.peak_flops(cluster, device, torch.bfloat16, 8).flops == cluster.accelerator.bf16_tflops * 1e12
        assert devices.peak_flops(cluster, device, torch.float64, 8).flops == 0
        assert program_facts(device)["accelerator"] == DEVICES[cluster.accelerator.name].reported_as[0]
        with FakeTensorMode(allow_non_fake_inputs=True), dry.counting():
            snapshot = Snapshot(device)
            snapshot.take([torch.empty(8, device=device)])
            snapshot.begin()
            snapshot.wait(0)


REFUSED = [
    ("h100-80gb", "mxfp8", "Blackwell"),
    ("a100-80gb", "rowwise", "no products in fp8"),
    ("mi250x-gcd", "rowwise", "no products in fp8"),
    ("max1550-tile", "rowwise", "no products in fp8"),
]
"""A device, a scaling of fp8 that it does not have, and the reason."""


@pytest.mark.skipif(not ALL, reason="rehearses every technique: make rehearsal")
@pytest.mark.timeout(0)
def test_every_statement_for_gpus_runs_or_has_a_reason():
    wanted, failed = statements(), list[str]()
    with running(wanted) as ran:
        for case in (*FEW, *MORE, *OTHERS):
            try:
                rehearse_all(case)
            except Exception as error:  # all cases, in one report
                failed.append(f"{named(case)}: {type(error).__name__}: {str(error)[:300]}")
        ask_the_device()
        for chip, way, why in REFUSED:
            with pytest.raises(JobError, match=why):
                rehearse_all(("llama", "dp_replicate=1", {"precision": "fp8", "fp8_scaling": way, "chip": chip}))
    missing = Counter[str]()
    for path, lines in wanted.items():
        missing.update(f"{path}: {function}" for line, function in lines.items() if (path, line) not in ran)
    total = sum(map(len, wanted.values()))
    print(f"{total - missing.total()} of {total} statements for GPUs ran in {len(FEW) + len(MORE) + len(OTHERS)} cases")
    assert not failed, "\n".join(failed)
    assert set(missing) == set(UNREACHED), "\n".join(f"{place} ({count})" for place, count in missing.items())


def test_a_run_asks_a_gpu_that_is_not_there():
    ask_the_device()


def test_the_page_names_what_no_rehearsal_runs():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    assert [place for place in UNREACHED if f"`{place.split(': ')[1]}`" not in page] == []


def test_the_page_of_devices_counts_what_is_rehearsed():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "device-support.md").read_text(encoding="utf-8")
    assert f"{len(FEW) + len(MORE)} jobs" in page
    assert f"{len(OTHERS) // 2} of them" in page
