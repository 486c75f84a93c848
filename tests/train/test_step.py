"""One step on every kind of layout: in which precision gradients are summed, and who is named where one is bad."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from parallel.steps import micro_batches
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import NotFiniteError
from phalanx.parallel.mesh import build
from phalanx.parallel.parameter_shards import wholes
from phalanx.train.step import StepInputs, Stepper

VOCAB = 13
JOB = Job(
    model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16),
    train=Train(steps=6, global_batch=12, precision="fp64"),
)
SHARDED = [
    Layout(dp_shard=2, zero=1, bucket_mb=0.01),
    Layout(dp_shard=2, zero=2, bucket_mb=0.01),
    Layout(dp_shard=2, zero=3),
    Layout(tp=2, sp=True),
    Layout(dp_shard=2, tp=2, zero=3),
]


def with_layout(layout: Layout, **train) -> Job:
    return dataclasses.replace(JOB, layout=layout, train=dataclasses.replace(JOB.train, **train))


def summed_gradients(ranks, job: Job):
    """The dtype in which this rank gets its gradients, and on rank 0 all of them, whole, in fp64."""
    mesh = build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
    stepper.gradients(batches, 0, valid)
    shards = stepper.replica.shards
    found = {f.name: f.gradient for f in shards if f.gradient is not None}
    whole = wholes(shards, found, mesh, ranks.rank == 0)
    return found["embed.weight"].dtype, {name: tensor.double() for name, tensor in whole}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector, relative to its length."""
    square = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    return (square / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5


def test_gradients_of_half_precision_may_be_summed_in_fp32(ranks):
    """Each micro-batch's gradient is rounded to bf16 once; the sum of them is then that of fp32."""
    expected = ranks(summed_gradients, 1, with_layout(Layout(), precision="fp64"))[0][1]
    for spread in (Layout(dp_replicate=2), *SHARDED[:3]):
        layout = dataclasses.replace(spread, accumulation=6)
        errors = {}
        for gradients, dtype in (("fp32", torch.float32), ("same", torch.bfloat16)):
            half = with_layout(layout, precision="bf16", gradients=gradients)
            found = ranks(summed_gradients, layout.processes, half)
            # FSDP2 sums in fp32 too, and then rounds each sum once to the parameters' precision.
            assert {each for each, _ in found} == {
                torch.bfloat16 if layout.dp_shard > 1 and layout.zero == 3 else dtype
            }
            errors[gradients] = error(found[0][1], expected)
        assert errors["fp32"] < errors["same"] < 0.1, layout.line()


@pytest.mark.parametrize("layout", SHARDED, ids=Layout.line)
def test_the_first_bad_parameter_is_named_by_all_ranks_alike(ranks, layout):
    """One value of one rank's share turns bad: the others hold nothing that is."""
    for name in ("blocks.1.mlp.down.weight", "final_norm.bias"):
        messages = ranks(one_bad_value, layout.processes, with_layout(layout), name)
        assert len(set(messages)) == 1
        assert messages[0].startswith("step 1: loss 2.")
        assert messages[0].endswith(f"gradient norm inf, first in {name}")


def one_bad_value(ranks, job: Job, name: str) -> str:
    """The message with which a step ends, where the last rank that counts a share of `name` finds an infinite gradient.
    Checks that no rank's parameters were changed by it."""
    mesh = build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    shard = next(f for f in stepper.replica.shards if f.name == name)
    holders = torch.zeros(mesh.axis("world").size)
    holders[ranks.rank] = float(shard.value.numel() > 0 and shard.tensor_slice.first)
    mesh.axis("world").all_reduce(holders).wait()
    real = stepper.optimizer.square_norm

    def square_norm(loss_scale: float = 1.0) -> torch.Tensor:
        if ranks.rank == holders.nonzero().max().item():
            assert shard.gradient is not None
            shard.gradient.view(-1)[-1] = math.inf
        return real(loss_scale)

    stepper.optimizer.square_norm = square_norm
    before = [f.value.detach().clone() for f in stepper.replica.shards]
    batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
    with pytest.raises(NotFiniteError) as caught:
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
    for shard, value in zip(stepper.replica.shards, before, strict=True):
        assert torch.equal(shard.value, value)
    return str(caught.value)
