"""The update rules on one process: equal to torch's or to the paper's formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from phalanx.config.job import Optimizer
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.optimizers import rule

SHAPES = {"embed.weight": (40, 128), "norm.weight": (128,), "mlp.down.weight": (128, 512)}
CONFIG = Optimizer(lr=1e-3, clip=0, weight_decay=0.1)


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(config: Optimizer, count: int = 4) -> dict[str, Tensor]:
    held = {name: tensor.requires_grad_() for name, tensor in drawn(0).items()}
    shards = [ParameterShard(name, (TensorSlice(SHAPES[name]),), 0, 0, value) for name, value in held.items()]
    optimizer = ShardedOptimizer(shards, config)
    for step in range(count):
        for shard in shards:
            shard.gradient = drawn(step + 1)[shard.name]
        optimizer.step(config.lr, optimizer.square_norm().sqrt())
    return {name: value.detach() for name, value in held.items()}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_sgd_is_torchs(momentum, nesterov):
    config = dataclasses.replace(CONFIG, name="sgd", momentum=momentum, nesterov=nesterov)
    held = drawn(0)
    groups = [
        {"params": [tensor.requires_grad_() for tensor in held.values() if tensor.ndim == 2], "weight_decay": 0.1},
        {"params": [held["norm.weight"].requires_grad_()], "weight_decay": 0},
    ]
    reference = torch.optim.SGD(groups, lr=config.lr, momentum=momentum, nesterov=nesterov)
    for step in range(4):
        for name, tensor in held.items():
            tensor.grad = drawn(step + 1)[name]
        reference.step()
    for name, tensor in trained(config).items():
        torch.testing.assert_close(tensor, held[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk", [2**16, 1000])
def test_lion_is_the_papers_algorithm(monkeypatch, chunk):
    monkeypatch.setitem(rule.CHUNK, "cpu", chunk)
    config, held = dataclasses.replace(CONFIG, name="lion", betas=(0.9, 0.99)), drawn(0)
    momenta = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(4):
        for name, w in held.items():
            g, m = drawn(step + 1)[name], momenta[name]
            decay = 0.1 if w.ndim == 2 else 0
            held[name] = w - config.lr * (torch.sign(0.9 * m + 0.1 * g) + decay * w)
            momenta[name] = 0.99 * m + 0.01 * g
    for name, tensor in trained(config).items():
        torch.testing.assert_close(tensor, held[name], rtol=1e-5, atol=1e-6)


def test_lion_does_not_move_by_noise():
    value = torch.zeros(4, requires_grad=True)
    shard = ParameterShard("blocks.0.attn.wk.bias", (TensorSlice((4,)),), 0, 0, value)
    optimizer = ShardedOptimizer([shard], dataclasses.replace(CONFIG, name="lion", eps=1e-8))
    shard.gradient = torch.tensor([1e-12, -1e-12, 0.0, 1.0])
    optimizer.step(1e-3, optimizer.square_norm().sqrt())
    assert value.tolist() == pytest.approx([0, 0, 0, -1e-3])


@pytest.mark.parametrize("chunk", [2**16, 4096])
def test_eight_bit_moments_move_weights_nearly_as_adamw(monkeypatch, chunk):
    monkeypatch.setitem(rule.CHUNK, "cpu", chunk)
    found, exact = trained(dataclasses.replace(CONFIG, name="adamw8bit")), trained(CONFIG)
    for name, start in drawn(0).items():
        moved, wanted = found[name] - start, exact[name] - start
        assert (moved - wanted).norm() < (1e-6 if name == "norm.weight" else 0.05) * wanted.norm(), name
    assert not torch.equal(found["mlp.down.weight"], exact["mlp.down.weight"])
