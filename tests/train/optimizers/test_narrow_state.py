"""Moments in bf16 and 8 bits, and parameters in bf16 without a copy in fp32: rounding, resuming into other states, and
what training reaches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from covering import also_whole
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizers import narrow
from train.optimizers.test_update_rules import Moved, draw, optimizer_of, state, step
from train.runs import change, losses, stop, train, weights
from train.runs import optimizer_of as named

# Rounding to bf16.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_stochastic_rounding_is_exact(dtype):
    """At 1 + 2^-9, a quarter of the way from 1 to the next number of bf16."""
    x = torch.full((100_000,), 1 + 2**-9, dtype=dtype)
    found = narrow.rounded(x, narrow.noise(len(x), [7, 0, 0, 0, 0], x.device) & 0xFFFF)
    assert found.unique().tolist() == [1, 1 + 2**-7]
    assert found.mean().item() == pytest.approx(1 + 2**-9, abs=5 * 2**-7 * (3 / 16 / len(x)) ** 0.5)
    on_grid = torch.randn(1000).bfloat16().to(dtype)
    assert torch.equal(narrow.rounded(on_grid, torch.full((1000,), 0xFFFF, dtype=torch.int32)), on_grid)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_random_bits_belong_to_places_in_the_whole_parameter(dim):
    whole = narrow.noise(48, [5, 0, 0, 0, 0], torch.device("cpu")).view(6, 8)
    part = TensorSlice((6, 8)) if dim is None else TensorSlice((6, 8), dim, 2, 2)
    shard = ParameterShard("w", (part,), 0, 3, torch.zeros(part.shape).view(-1)[3:])
    found = narrow.noise(len(shard.value), [5, *shard.place_numbers(0)], torch.device("cpu"))
    own = whole if dim is None else whole.narrow(dim, 2, 2)
    assert torch.equal(found, own.reshape(-1)[3:])
    far = 2**31 - 4  # where places begin to need more than 32 bits
    both = [narrow.noise(8, [5, first, 0, 0, 0], torch.device("cpu")) for first in (far, far + 4)]
    assert torch.equal(both[0][4:], both[1][:4])


NARROW = ["adamw state=bf16", "adamw state=bf16 master=none", "sgd master=none rounding=kahan", "lion state=bf16"]


@pytest.mark.parametrize("words", [*NARROW, "adamw state=8bit master=none", "lion state=8bit"])
def test_a_bad_step_changes_nothing_and_a_good_one_moves_what_the_facts_say(words):
    config = named(words, lr=1e-2, clip=0.5)
    optimizer = optimizer_of(config, torch.bfloat16)
    step(optimizer, 1)
    before = {key: tensor.clone() for key, tensor in state(optimizer).items()}
    step(optimizer, 2, torch.nan, torch.tensor(True))
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(optimizer).items())
    for shard in optimizer.shards:
        shard.gradient = draw(2, torch.bfloat16)[shard.name]
    norm = optimizer.square_norm().sqrt()
    gradients = [master.grad for master in optimizer.masters.values() if master.grad is not None]
    with Moved([*gradients, *state(optimizer).values()]) as moved:
        optimizer.step(1e-2, norm)
    if config.state != "8bit":
        elements = sum(shard.value.numel() for shard in optimizer.shards)
        assert moved.bytes == optimizer_facts(config) * elements


@pytest.mark.parametrize(
    ("words", "dtype"),
    [(NARROW[1], torch.bfloat16), (NARROW[2], torch.bfloat16), *also_whole((NARROW[0], torch.float64))],
)
def test_the_kernel_that_is_compiled_computes_what_chunks_do(monkeypatch, words, dtype):
    config = named(words, lr=1e-2, clip=0.5)
    chunked, whole = optimizer_of(config, dtype), optimizer_of(config, dtype)
    monkeypatch.setitem(narrow.CHUNK, "cpu", 1000)
    for number in range(1, 3):
        step(chunked, number)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernel = torch.compile(lambda call, *rest: call(*rest), dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(narrow, "compiles", lambda parameter: True)
    monkeypatch.setattr(narrow, "_compiled", lambda: kernel)
    for number in range(1, 3):
        step(whole, number, bad=torch.tensor(False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "for parameters of all sizes"
    before = {key: tensor.clone() for key, tensor in state(whole).items()}
    step(whole, 3, torch.nan, torch.tensor(True))
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(whole).items())
    for key, tensor in state(chunked).items():
        equal = before[key] == tensor  # but for numbers that a last bit takes across a border of rounding
        assert equal.float().mean() > 0.99 or torch.allclose(before[key], tensor, rtol=2e-6, atol=1e-7), key


def optimizer_facts(config: Optimizer) -> float:
    from phalanx.config.model import ModelConfig
    from phalanx.optimizers.catalogue import optimizer_costs

    return optimizer_costs(config, ModelConfig(vocab_size=1), 2).moved


# Checkpoints go on in other states and layouts.

CHAIN = ("state=fp32", "state=bf16", "state=8bit", "state=bf16", "state=fp32")
LAYOUTS = (
    "dp_shard=2,zero=1,bucket_mb=0.1",
    "dp_shard=2,tp=2",
    "dp_shard=3,zero=2,bucket_mb=0.1",
    "tp=2",
    "dp_shard=2",
)


def moved_through(ranks, job: Job, name: str, states: tuple[str, ...], layouts: tuple[str, ...]) -> Job:
    """Trains two steps in each of the states, each in its layout. Returns the last job."""
    job = change(job, "run", name=name)
    for number, (words, line) in enumerate(zip(states, layouts, strict=True)):
        layout = layout_line.parse(line) if line else dataclasses.replace(job.layout, **vars(Job().layout))
        job = dataclasses.replace(job, optimizer=named(f"adamw {words}", lr=1e-2), layout=layout)
        if number < len(states) - 1:
            stop(ranks, job, 2 * number + 2)
        else:
            ranks(train, layout.processes, job)
    return job


def test_a_run_goes_on_in_other_states_and_layouts_as_one_process_does(ranks, job):
    job = change(change(job, "model", d_model=128, n_heads=4), "train", steps=10)
    alone = moved_through(ranks, job, "alone", CHAIN, ("",) * 5)
    spread = moved_through(ranks, job, "spread", CHAIN, LAYOUTS)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-9)
    expected, found = weights(alone), weights(spread)
    assert expected.keys() == found.keys()
    assert not any("scale" in name for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


def test_masters_come_and_go(ranks, job):
    """The masters of the third part are the parameters with what rounding had cut off them, and the other way round."""
    job = change(change(job, "model", d_model=128, n_heads=4), "train", steps=8, precision="bf16")
    states = ("", "master=none rounding=kahan", "", "state=8bit master=none")
    moved = moved_through(ranks, job, "moved", states, ("", "dp_shard=2,zero=1", "tp=2", "dp_shard=2"))
    straight = change(dataclasses.replace(job, optimizer=named("adamw", lr=1e-2)), "run", name="straight")
    ranks(train, 1, straight)
    assert losses(moved)[:6] == pytest.approx(losses(straight)[:6], rel=3e-3)
    kinds = {name.partition("/")[0] for name in weights(moved) if "/" in name}
    assert kinds == {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"}


# What training reaches.


def test_without_stochastic_rounding_or_compensation_bf16_stalls():
    """A weight at 1 that goes down by 1/1000 a step, 500 times: a rounding to the nearest keeps it at 1."""
    ends = {}
    for words in (
        "adamw",
        *(f"adamw state=bf16 master=none rounding={how}" for how in ("stochastic", "kahan", "nearest")),
    ):
        value = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
        shard = ParameterShard("w", (TensorSlice((4096,)),), 0, 0, value)
        optimizer = narrow_optimizer(shard, named(words, weight_decay=0.0, betas=(0.9, 0.999), clip=0.0))
        for _ in range(500):
            shard.gradient = torch.ones(4096, dtype=torch.bfloat16)
            optimizer.step(1e-3, optimizer.square_norm().sqrt())
        ends[words.rpartition("=")[2]] = value.detach().float().mean().item()
    assert ends["nearest"] == 1
    assert ends["adamw"] == pytest.approx(0.5, abs=2**-9)
    assert ends["stochastic"] == pytest.approx(0.5, abs=0.01)
    assert ends["kahan"] == pytest.approx(0.5, abs=0.01)


def narrow_optimizer(shard: ParameterShard, config: Optimizer):
    from phalanx.train.optimizer import ShardedOptimizer

    return ShardedOptimizer([shard], config, seed=1)


def test_a_model_in_bf16_learns_as_with_masters_unless_it_rounds_to_the_nearest(ranks, job, tmp_path):
    """The loss of 60 steps stays within 0.01 of that with masters; rounded to the nearest it is 0.05 behind."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    job = change(job, "model", n_layers=1, d_model=32, n_heads=2, seq_len=32, init_std=0.1)
    job = change(job, "data", corpus="text", path=str(tmp_path / "text.txt"))
    job = change(job, "train", steps=60, precision="bf16", global_batch=8, eval_samples=0)
    ends = {}
    for words in (
        "master=fp32",
        *(f"state=bf16 master=none rounding={how}" for how in ("stochastic", "kahan", "nearest")),
    ):
        name = words.rpartition("=")[2]
        optimizer = named(f"adamw {words} schedule=constant", lr=3e-4, betas=(0.9, 0.999))
        ranks(train, 1, change(dataclasses.replace(job, optimizer=optimizer), "run", name=name))
        ends[name] = losses(change(job, "run", name=name))[-1]
    assert ends["stochastic"] == pytest.approx(ends["fp32"], abs=0.01)
    assert ends["kahan"] == pytest.approx(ends["fp32"], abs=0.01)
    assert ends["nearest"] > ends["fp32"] + 0.05
