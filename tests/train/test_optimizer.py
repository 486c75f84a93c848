"""AdamW: equal to torch's, decay groups, master weights, clipping, state."""

import copy

import pytest
import torch
from torch import nn

from phalanx.config.job import Optimizer
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.precision import LossScale
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer

CONFIG = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)


def model(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def adamw(module: nn.Module, config: Optimizer = CONFIG) -> ShardedOptimizer:
    """Over shards that are whole parameters."""
    named = module.named_parameters()
    return ShardedOptimizer(
        [ParameterShard(name, (TensorSlice(tuple(p.shape)),), 0, 0, p) for name, p in named], config
    )


def backward(module: nn.Module, step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    (module(x.to(next(module.parameters()).dtype)).square().sum() * factor).backward()


def train(module: nn.Module, optimizer: ShardedOptimizer, steps, scale: float = 1.0) -> None:
    for step in steps:
        backward(module, step, scale)
        optimizer.step(CONFIG.lr, norm(optimizer, scale))
        module.zero_grad()


def norm(optimizer: ShardedOptimizer, scale: float = 1.0) -> torch.Tensor:
    """The gradients' norm, once the shards have what the backward pass left."""
    for shard in optimizer.shards:
        shard.gradient = shard.value.grad
    return optimizer.square_norm(scale).sqrt()


def test_equals_torch_with_decay_groups_and_clipping():
    ours, theirs = model(), model()
    train(ours, adamw(ours), range(4))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.1)
    for step in range(4):
        backward(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), CONFIG.clip)
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_saving_and_loading_changes_nothing(dtype):
    straight = model(dtype)
    train(straight, adamw(straight), range(6))
    first = model(dtype)
    optimizer = adamw(first)
    train(first, optimizer, range(3))
    tensors = copy.deepcopy(optimizer.state_tensors())
    second = copy.deepcopy(first)
    resumed = adamw(second)
    for kind, found in resumed.make_state(optimizer.updates).items():
        assert found.keys() == tensors[kind].keys()
        for name, tensor in found.items():
            tensor.copy_(tensors[kind][name])
    train(second, resumed, range(3, 6))
    assert resumed.updates == 6
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_master_weights_keep_updates_that_bf16_would_lose():
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = adamw(module, Optimizer(weight_decay=0.0))
    for _ in range(10):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step(1e-3, norm(optimizer))  # each update is a quarter of bf16's spacing below 1
    assert module.weight.item() == pytest.approx(0.99, abs=2e-3)
    assert optimizer.masters["weight"].item() == pytest.approx(0.99, abs=1e-5)


def test_loss_scale_does_not_change_the_update():
    plain, scaled = model(torch.float32), model(torch.float32)
    train(plain, adamw(plain), range(2))
    train(scaled, adamw(scaled), range(2), scale=1024.0)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_first_bad_gradient_is_named():
    module = model()
    optimizer = adamw(module)
    backward(module, 0)
    assert torch.isfinite(norm(optimizer))
    assert optimizer.first_bad_gradient() is None
    assert module[2].weight.grad is not None
    module[2].weight.grad[0, 0] = float("nan")
    assert not torch.isfinite(norm(optimizer))
    bad = optimizer.first_bad_gradient()
    assert bad is not None
    assert optimizer.shards[bad].name == "2.weight"


def test_empty_fragments_and_copies_count_nothing_and_break_nothing():
    """A rank whose shares of every parameter are empty still takes part; a copy on a second tensor rank moves alike,
    but its gradient is counted by the first."""
    vector = TensorSlice((3,), copies=2, first=False)
    copied = ParameterShard(
        "norm.weight", (vector, vector), 1, 0, torch.ones(3, dtype=torch.float64, requires_grad=True)
    )
    empty = ParameterShard("w", (TensorSlice((2, 2)),), 0, 4, torch.empty(0, dtype=torch.float64, requires_grad=True))
    optimizer = ShardedOptimizer([copied, empty], CONFIG)
    copied.gradient, empty.gradient = torch.full((3,), 2.0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    assert optimizer.square_norm() == 0
    optimizer.step(1e-2, torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(copied.value.detach(), torch.full((3,), 0.99, dtype=torch.float64))
    assert {kind: t["w"].shape for kind, t in optimizer.state_tensors().items()} == {
        "exp_avg": (0,),
        "exp_avg_sq": (0,),
    }
    alone = ShardedOptimizer([empty], CONFIG)
    alone.step(1e-2, torch.tensor(1.0, dtype=torch.float64))
    assert alone.updates == 1


def test_fp16_halves_its_scale_on_overflow_and_doubles_it_after_a_while():
    scale = LossScale(torch.float16, initial=4.0, patience=2)
    assert scale.overflow()
    assert scale.value == 2.0
    scale.fine()
    scale.fine()
    assert scale.value == 4.0
    restored = LossScale(torch.float16)
    restored.load_state(scale.state())
    assert restored.state() == scale.state()
    assert LossScale(torch.float16, initial=1.0).overflow() is False
    assert LossScale(torch.bfloat16).overflow() is False
