"""An optimizer on the host: equal to one on the device, its tensors counted, within a budget that it would exceed."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from parallel.steps import micro_batches, steps, worst
from phalanx.blocks.parameters import count
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import RunError
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import DeviceBudget
from phalanx.train.optimizers import rule
from phalanx.train.step import StepInputs, Stepper
from train.measured_memory import least_device_peak

VOCAB = 64
GPT = ModelConfig(n_layers=2, d_model=64, n_heads=4, seq_len=16)
DEEP = replace(GPT, n_layers=12, seq_len=8, vocab_size=VOCAB)
EXPERTS = replace(GPT, moe=MoE(n_experts=4, top_k=2, d_ff=32, n_shared=1))


def job_of(layout: Layout, model: ModelConfig = GPT, name: str = "adamw", **train: Any) -> Job:
    train = {"global_batch": 8, "precision": "fp64"} | train
    return Job(model=model, layout=layout, train=Train(**train), optimizer=Optimizer(name=name))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(micro_batch=2),
        Layout(dp_replicate=2, bucket_mb=0.1),
        Layout(dp_shard=2, zero=1, bucket_mb=0.1),
        Layout(dp_shard=2, zero=2, bucket_mb=0.1, micro_batch=2, accumulate="sharded"),
        Layout(dp_shard=2, zero=3, micro_batch=2),
        Layout(dp_replicate=2, dp_shard=2, zero=2, bucket_mb=0.1),
        Layout(dp_replicate=2, dp_shard=2, zero=3),
        Layout(dp_shard=2, tp=2, sp=True, zero=1, bucket_mb=0.1),
        Layout(pp=2, micro_batch=1, dp_shard=2, zero=2, bucket_mb=0.1),
        Layout(pp=2, micro_batch=1, schedule="zb_h1", dp_shard=2, zero=3),
        Layout(cp=2, zero=1, bucket_mb=0.1),
    ],
    ids=Layout.line,
)
def test_equals_one_process(ranks, layout):
    (shown, gradients, parameters), *_ = ranks(steps, layout.world, job_of(replace(layout, offload="optimizer")), VOCAB)
    ((one, expected_gradients, expected),) = ranks(steps, 1, job_of(Layout()), VOCAB)
    for found, alone in zip(shown, one, strict=True):
        assert found == pytest.approx(alone, rel=1e-9)
    assert worst(gradients, expected_gradients, 1e-7) < 1e-9
    assert worst(parameters, expected, 1e-2) < 1e-9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adamw8bit"])
def test_every_elementwise_optimizer_computes_the_same_bits(ranks, name, precision):
    layout, model = Layout(dp_shard=2, zero=1), replace(EXPERTS, vocab_size=VOCAB)
    job = job_of(layout, model, name, precision=precision)
    plain, offloaded = (
        ranks(steps, 2, replace(job, layout=replace(layout, offload=place)), VOCAB)[0]
        for place in ("none", "optimizer")
    )
    assert plain[0] == offloaded[0]
    for parameter, tensor in plain[2].items():
        assert torch.equal(offloaded[2][parameter], tensor), parameter


def counted(ranks, job: Job, limit: int, count: int = 2) -> tuple[int, int, dict[str, int], list[float]]:
    """Peaks of device and host, and copied bytes and losses of the first `count` steps, of a rank whose device has
    `limit` bytes. The chunks in which the host updates are as small beside this model as beside those that need it."""
    mesh = meshes.build(job.layout, "cpu")
    losses, copied = list[float](), list[dict[str, int]]()
    with mock.patch.dict(rule.CHUNK, cpu=2**10), DeviceBudget(limit).counting() as budget:
        stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)

        def take(step: int) -> None:
            batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
            losses.append(stepper.step(StepInputs(batches, step, valid, 1e-2)).loss)
            copied.append(dict(stepper.offloaded))

        peak = least_device_peak(budget, take, count)
    return peak, budget.host_peak, copied[count - 1], losses[:count]


def test_a_model_whose_state_is_four_times_the_budget_trains_as_without_one(ranks):
    job = job_of(Layout(recompute="full"), DEEP, precision="bf16", global_batch=2)
    state = 16 * count(DEEP, VOCAB)
    with pytest.raises(RunError, match=r"no memory for this rank's .* nearest remedy .*: layout.offload=optimizer"):
        ranks(counted, 1, job, state // 4)
    ((_, _, nothing, expected),) = ranks(counted, 1, job, 0)
    offloaded = replace(job, layout=replace(job.layout, offload="optimizer"))
    ((device, host, copied, losses),) = ranks(counted, 1, offloaded, state // 4)
    assert losses == expected
    assert not nothing
    assert device <= state // 4
    # Masters and moments, and gradients in bf16, whose memory the parameters use on their way back.
    assert host == pytest.approx(14 * count(DEEP, VOCAB), rel=0.01)
    assert copied == {"down": 2 * 2 * count(DEEP, VOCAB), "up": 2 * 2 * count(DEEP, VOCAB)}


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (Layout(recompute="full"), {}),
        (Layout(recompute="full", micro_batch=1), {}),
        (Layout(recompute="full"), {"precision": "fp32"}),
        (Layout(dp_replicate=2, bucket_mb=0.5, recompute="full"), {}),
        (Layout(dp_shard=2, zero=3, recompute="full"), {"precision": "fp32"}),
        (Layout(pp=2, micro_batch=1, recompute="full"), {}),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else " ".join(value.values()),
)
def test_memory_of_device_and_host_is_the_predicted_one(ranks, layout, train):
    """The device to 10 %, the host to 1 %: small buffers weigh more than in a model that needs offload."""
    layout = replace(layout, offload="optimizer")
    job = job_of(layout, DEEP, **({"precision": "bf16", "global_batch": 4} | train))
    expected = step_memory(rank_spec(job, VOCAB, "cpu"))
    for rank, (device, host, _, _) in enumerate(ranks(counted, layout.world, job, 0)):
        predicted = expected[rank // (layout.world // layout.pp)]
        print(layout.line(), rank, device, predicted.allocated, host, predicted.host, predicted)
        assert predicted.allocated == pytest.approx(device, rel=0.1)
        assert predicted.host == pytest.approx(host, rel=0.01)


def test_with_shards_it_does_in_float64(ranks):
    deeper = replace(DEEP, n_layers=24)
    job = job_of(Layout(dp_shard=2, recompute="full"), deeper, global_batch=2)
    state = 32 * count(deeper, VOCAB)
    offloaded = replace(job, layout=replace(job.layout, offload="optimizer"))
    found = ranks(counted, 2, offloaded, state // 4)
    ((_, _, _, expected),) = ranks(counted, 1, replace(job, layout=Layout()), 0)
    assert found[0][3] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(RunError):
        ranks(counted, 2, job, state // 4)
