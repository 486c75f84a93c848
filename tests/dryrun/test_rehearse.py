"""A rank's program rehearsed alone, next to the same program on real ranks: bytes sent, calls, FLOPs and memory."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx
from covering import WHOLE, also_whole, covering
from phalanx.blocks.parameters import count, train_flops_per_step
from phalanx.comm.calls import Recording, recorded
from phalanx.comm.shared import SOCKETS
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, LoRA, ModelConfig, MoE, SparseAttention
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.dryrun.operations import flops_of
from phalanx.dryrun.rehearse import PARTS, distinct_ranks, gradients_of, part_of, rehearse, watch_buffers
from phalanx.dryrun.world import Allocation
from phalanx.errors import JobError
from phalanx.launch.watchdog import heartbeat
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import is_on_host
from phalanx.train.step import StepInputs, Stepper
from phalanx.verify.measure import micro_batches
from train.measured_memory import state_memory, storages_of
from train.test_predicted_memory import Live, size_of

VOCAB = 64
LLAMA = ModelConfig(
    n_layers=2,
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
    "gpt": ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=64, vocab_size=VOCAB),
    "experts": replace(LLAMA, moe=MoE(n_experts=8, top_k=2, d_ff=32, n_shared=1)),
    "latent": replace(
        LLAMA, n_kv_heads=0, mla=MLA(q_rank=48, kv_rank=32, rope_head_dim=8, nope_head_dim=8, v_head_dim=16)
    ),
    "adapters": replace(LLAMA, lora=LoRA(rank=4)),
}
MICRO_BATCH = 1 if WHOLE else 2
"""Sequences per micro-batch: more micro-batches in `make chain`."""
LAYOUTS = [
    Layout(),
    Layout(recompute="full", micro_batch=2),
    Layout(recompute="products"),
    Layout(dp_replicate=2),
    *(Layout(dp_shard=2, zero=zero, micro_batch=MICRO_BATCH) for zero in (1, 2, 3)),
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


class LiveParts(Live):
    """The bytes of each part at the fullest moment, found as in a rehearsal."""

    def __init__(self, phase: Callable[[], str]):
        super().__init__()
        self.phase, self.allocations, self.fullest = phase, dict[int, Allocation](), list[tuple[Allocation, int]]()

    def add(self, key: int, ref: Any, size: int) -> None:
        super().add(key, ref, size)
        self.allocations[key] = Allocation(size, is_on_host(), "", self.phase(), heartbeat.module())

    def mark(self, part: str, tensors: Iterable[Tensor]) -> None:
        for key in storages_of(tensors):
            if (made := self.allocations.get(key)) and made.part in ("", "communication"):
                made.part = part

    def done(self, func: Any, given: list[Tensor]) -> None:
        name = func._overloadpacket.__name__
        if (func.namespace == "c10d" and name != "send") or name == "chunk_cat":
            own = given[:1] if func.namespace == "c10d" else given[-1:]
            own = [x for x in own if (made := self.allocations.get(x.untyped_storage()._cdata)) and not made.part]
            self.mark("communication", own)
        before = self.most
        super().done(func, given)
        if self.most > before:
            now = [(self.allocations[key], size_of(ref)) for key, ref in self.alive.items()]
            self.fullest = [*now, (Allocation(0, False, "", "", "", "communication"), self.filled)]


class NotingStepper(Stepper):
    """A Stepper that tells `live` which tensors are its gradients."""

    live: LiveParts | None = None

    def mark(self, part: str, tensors: Iterable[Tensor]) -> None:
        if self.live:
            self.live.mark(part, tensors)

    def status(self, *args: Any, **kwargs: Any) -> Any:
        self.mark("gradients", gradients_of(self.replica, self.optimizer))
        return super().status(*args, **kwargs)


def real(ranks, job: Job) -> dict[str, Any]:
    """The FLOPs of the second of three steps on this rank, the bytes sent and calls of the third, and the bytes of each
    part at the fullest moment of either, if they are fewer there."""
    recording, lives = Recording(), list[LiveParts]()
    with recorded(recording), pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKETS, "1")  # whose buffers are rehearsed, and which shared memory does without
        mesh = meshes.build(job.layout, "cpu")
        stepper = NotingStepper(job, mesh, torch.device("cpu"), VOCAB)
        watch_buffers(stepper.replica, stepper.mark)

        def take(step: int) -> None:
            micros, valid = micro_batches(job, VOCAB, mesh, step)
            stepper.step(StepInputs(micros, step, valid, 1e-3))

        take(0)
        state, counted = state_memory(stepper.replica, stepper.optimizer), Counting()
        for step in (1, 2):
            mesh.ledger.clear()
            recording.calls.clear()
            stepper.live = LiveParts(lambda: recording.phases[-1][1].label)
            lives.append(stepper.live)
            with stepper.live, nullcontext() if counted.flops else counted:
                take(step)
    calls = [(each.axis, each.collective, each.bytes) for each in recording.calls]
    parts = {**dict.fromkeys(PARTS, 0), **vars(state)}
    parts["optimizer"] *= job.layout.offload != "optimizer"
    for made, size in min(lives, key=lambda live: live.most).fullest:
        parts[part_of(made)] += size * (not made.on_host)
    return {"traffic": mesh.ledger.traffic(), "flops": sum(counted.flops.values()), "calls": calls, "parts": parts}


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
        rehearsed, parts = rehearse(job, rank, VOCAB, "cpu"), found[rank]["parts"]
        assert rehearsed.traffic_bytes == found[rank]["traffic"]
        assert sum(rehearsed.flops.values()) == found[rank]["flops"]
        assert [(each.axis, each.collective, each.bytes) for each in rehearsed.calls] == found[rank]["calls"]
        print(rank, *((part, parts[part], rehearsed.peak_bytes[part]) for part in PARTS))
        total = sum(parts.values())
        assert rehearsed.peak == pytest.approx(total, rel=0.03)
        # Indices that the guard made before the first step are among the rehearsed bytes alone.
        assert rehearsed.peak_bytes == pytest.approx(parts, rel=0.03, abs=max(0.005 * total, 2**13))


def test_tokens_are_divided_evenly_among_experts(ranks):
    """On real ranks routers decide: what they do together is what all rehearsed ones do."""
    job = job_of(MODELS["experts"], Layout(dp_shard=2, ep=2, zero=3))
    found = ranks(real, 2, job)
    rehearsed = [rehearse(job, rank, VOCAB, "cpu") for rank in range(2)]
    assert sum(sum(each.flops.values()) for each in rehearsed) == sum(of_rank["flops"] for of_rank in found)
    for each, of_rank in zip(rehearsed, found, strict=True):
        assert [(call.axis, call.collective) for call in each.calls] == [call[:2] for call in of_rank["calls"]]
        assert each.traffic_bytes["dp_shard"] == of_rank["traffic"]["dp_shard"]


@pytest.mark.parametrize(
    "layout", [*also_whole(Layout()), Layout(tp=2, sp=True), Layout(pp=2, micro_batch=MICRO_BATCH)], ids=named
)
def test_all_ranks_compute_what_the_formula_says(layout):
    job = job_of(LLAMA, layout)
    flops = sum(sum(rehearse(job, rank, VOCAB, "cpu").flops.values()) for rank in range(layout.world))
    assert flops == train_flops_per_step(LLAMA, 4)


def test_remembered_results_are_those_of_torch(monkeypatch):
    model, layout = MODELS["experts"], Layout(dp_shard=2, zero=3, micro_batch=2)
    job = job_of(model, layout) if WHOLE else job_of(replace(model, n_layers=1), replace(layout, micro_batch=0))
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


def test_a_second_copy_of_parameters_is_communication():
    plain, copied = (rehearse(job_of(LLAMA, Layout(dp_shard=4, hpz=hpz)), 0, VOCAB, "cpu").peak_bytes for hpz in (1, 2))
    assert copied == {**plain, "communication": copied["communication"]}
    half = 4 * count(LLAMA, VOCAB) / 2
    assert copied["communication"] - plain["communication"] == pytest.approx(half, rel=0.01)  # rows are padded


def test_gradients_leave_a_gpu_for_the_host():
    def communication(n_layers: int) -> float:
        layout = Layout(dp_shard=2, zero=3, offload="optimizer+parameters", recompute="full")
        return rehearse(job_of(replace(LLAMA, n_layers=n_layers), layout), 0, VOCAB, "cuda").peak_bytes["communication"]

    assert communication(4) == communication(3)


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
    root = Path(phalanx.__file__).parent
    for path in root.rglob("*.py"):
        room = path.relative_to(root).parts[0]
        if room in ("dryrun", "cli", "api.py"):
            continue
        source = path.read_text(encoding="utf-8")
        if "dryrun" not in source and "FakeTensor" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any("dryrun" in name or "FakeTensor" in name for name in (module, *names)), path
