"""Local SGD and DiLoCo: equal to replicas simulated one after the other in one process, whatever a replica is."""

import dataclasses

import pytest
import torch

from parallel.steps import micro_batches
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.parallel.parameter_shards import wholes
from phalanx.train.step import StepInputs, Stepper

SHAPE = ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=13)
WIDE = dataclasses.replace(SHAPE, n_layers=1, d_model=32, d_ff=128)
"""Has a matrix of 4,096 elements in rows of 128: adamw8bit quantises its moments."""
VOCAB = 13
STEPS = 7
EVERY = 3
CPU = torch.device("cpu")


def job_of(layout: Layout, optimizer: str = "adamw") -> Job:
    train = Train(steps=STEPS, global_batch=8, precision="fp64")
    shape = SHAPE if optimizer == "adamw" else WIDE
    return Job(model=shape, layout=layout, optimizer=Optimizer(name=optimizer, clip=0.5), train=train)


def trained(ranks: Ranks, layout: Layout, optimizer: str = "adamw") -> tuple[dict[str, torch.Tensor], float]:
    """The parameters after STEPS steps, on rank 0, and the bytes that this rank sent to other replicas."""
    job = job_of(layout, optimizer)
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, CPU, VOCAB)
    mesh.ledger.clear()
    for step in range(STEPS):
        batches, valid = micro_batches(job, step, mesh.data_rank, VOCAB)
        stepper.step(StepInputs(batches, step, valid, 1e-2))
    sent = mesh.ledger.traffic()["dp_replicate"]["all_reduce"]
    shards = stepper.replica.shards
    values = {f.name: f.value for f in shards}
    return dict(wholes(shards, values, mesh, ranks.rank == 0)), sent


def simulated(layout: Layout, optimizer: str = "adamw") -> dict[str, torch.Tensor]:
    """The same by plain steppers of one process, a replica after the other, and sums written out."""
    job = job_of(Layout(dp_replicate=layout.dp_replicate), optimizer)
    alone = dataclasses.replace(job, layout=Layout())
    replicas = [Stepper(alone, meshes.build(Layout(), "cpu"), CPU, VOCAB) for _ in range(layout.dp_replicate)]
    anchor = {f.name: f.value.detach().clone() for f in replicas[0].replica.shards}
    momentum = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for step in range(STEPS):
        for number, stepper in enumerate(replicas):
            batches, valid = micro_batches(job, step, number, VOCAB)
            stepper.step(StepInputs(batches, step, valid // layout.dp_replicate, 1e-2))
        if (step + 1) % EVERY and step + 1 < STEPS:
            continue
        for shards in zip(*(stepper.replica.shards for stepper in replicas), strict=True):
            name = shards[0].name
            mean = torch.stack([f.value.detach() for f in shards]).mean(dim=0)
            if layout.sync == "diloco":
                gradient = anchor[name] - mean
                momentum[name] = 0.9 * momentum[name] + gradient
                mean = anchor[name] = anchor[name] - 0.7 * (gradient + 0.9 * momentum[name])
            with torch.no_grad():
                for shard in shards:
                    shard.value.copy_(mean)
    return {f.name: f.value.detach() for f in replicas[0].replica.shards}


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
@pytest.mark.parametrize(
    "inside", [{}, {"zero": 1, "dp_shard": 2}, {"zero": 2, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}, {"tp": 2}]
)
def test_replicas_that_agree_now_and_then_are_those_of_one_process(ranks, sync, inside):
    layout = Layout(dp_replicate=2, sync=sync, sync_every=EVERY, **inside)
    (found, sent), *_ = ranks(trained, layout.world, layout)
    expected = simulated(layout)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if not inside:
        parameters = 8 * sum(tensor.numel() for tensor in expected.values())
        assert sent == 3 * parameters, "steps 3, 6 and 7: an all-reduce of D bytes, 2 D (P - 1) / P = D for two"


def test_four_replicas_average(ranks):
    layout = Layout(dp_replicate=4, sync="local_sgd", sync_every=EVERY)
    torch.testing.assert_close(ranks(trained, 4, layout)[0][0], simulated(layout), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "sync", "inside"),
    [
        ("sgd", "local_sgd", {}),
        ("sgd", "diloco", {}),
        ("lion", "local_sgd", {"zero": 2, "dp_shard": 2}),
        ("lion", "diloco", {}),
        ("muon", "local_sgd", {"zero": 2, "dp_shard": 2}),
        ("muon", "diloco", {"tp": 2}),
        ("adamw8bit", "local_sgd", {"tp": 2}),
        ("adamw8bit", "diloco", {"zero": 3, "dp_shard": 2}),
    ],
)
def test_replicas_agree_with_every_optimizer(ranks, optimizer, sync, inside):
    """State stays local, whatever it is: also matrices' momentum, and codes of moments that parameters then leave."""
    layout = Layout(dp_replicate=2, sync=sync, sync_every=EVERY, **inside)
    (found, _), *_ = ranks(trained, layout.world, layout, optimizer)
    torch.testing.assert_close(found, simulated(layout, optimizer), rtol=1e-9, atol=1e-12)
