"""One pass over the optimizer's state: equal to separate passes in fp32, bytes moved as the facts say, and nothing that
waits for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config.job import Optimizer
from phalanx.config.model import ModelConfig
from phalanx.optimizers.catalogue import OPTIMIZERS, optimizer_costs
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.optimizers import rule
from train.measured_memory import tensors_in

SHAPES = {"embed.weight": (40, 130), "norm.weight": (128,), "mlp.down.weight": (128, 512)}
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
CONFIGS = {
    "adamw": Optimizer(lr=1e-2, clip=0.5),
    "lion": Optimizer(name="lion", lr=1e-2, betas=(0.9, 0.99), clip=0.5),
    "sgd": Optimizer(name="sgd", lr=1e-2, momentum=0.9, clip=0.5),
}
SEVERAL_KERNELS = {
    "adamw8bit": Optimizer(name="adamw8bit", lr=1e-2, clip=0.5),
    "muon": Optimizer(name="muon", lr=1e-2, clip=0.5),
}
UNMOVED = ("detach", "split", "new_empty")
HOST_READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def optimizer_of(config: Optimizer, dtype: torch.dtype) -> ShardedOptimizer:
    values = drawn(0, dtype)
    return ShardedOptimizer(
        [ParameterShard(n, (TensorSlice(SHAPES[n]),), 0, 0, v.requires_grad_()) for n, v in values.items()], config
    )


def step(optimizer: ShardedOptimizer, number: int, factor: float = 1.0, bad: Tensor | None = None) -> None:
    for shard in optimizer.shards:
        shard.gradient = drawn(number, shard.value.dtype)[shard.name] * factor
    optimizer.step(1e-2, optimizer.square_norm().sqrt(), bad)


def state(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    kinds = optimizer.state_tensors().items()
    values = {f"value/{shard.name}": shard.value.detach() for shard in optimizer.shards}
    return {f"{kind}/{name}": tensor for kind, named in kinds for name, tensor in named.items()} | values


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_in_bf16_give_what_their_copies_in_fp32_give(name):
    """The parameters in fp32 of the second optimizer are the masters of the first."""
    narrow, wide = optimizer_of(CONFIGS[name], torch.bfloat16), optimizer_of(CONFIGS[name], torch.float32)
    for shard, master in zip(wide.shards, narrow.masters.values(), strict=True):
        shard.value.data.copy_(master)
    for number in range(1, 4):
        step(narrow, number)
        for shard, other in zip(wide.shards, narrow.shards, strict=True):
            shard.gradient = drawn(number, torch.bfloat16)[shard.name].float()
            assert other.gradient is None
        wide.step(1e-2, wide.square_norm().sqrt())
    for key, tensor in state(wide).items():
        kind, _, parameter = key.partition("/")
        own = state(narrow)["master/" + parameter if kind == "value" else key]
        torch.testing.assert_close(own, tensor, rtol=2e-6, atol=1e-7)
    for shard in narrow.shards:
        assert torch.equal(shard.value, narrow.masters[shard.name].bfloat16())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_formula_that_is_compiled_is_that_of_chunks(monkeypatch, name, dtype):
    chunked, whole = optimizer_of(CONFIGS[name], dtype), optimizer_of(CONFIGS[name], dtype)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernel = torch.compile(rule.one_pass, dynamic=True, fullgraph=True, backend="aot_eager")

    def update(own: rule.ElementwiseRule, parameter: Tensor, shard: None, group: dict[str, Any]) -> None:
        tensors = [parameter, parameter.grad, own.copies.pop(parameter, None), *own._state(parameter)]
        w, g, narrow, *kept = (None if t is None else t.detach().view(-1) for t in tensors)
        numbers = torch.tensor(own.numbers(group), dtype=parameter.dtype)
        kernel(type(own).formula, w, g, narrow, kept, own.scale, own.bad, numbers)

    for number in range(1, 4):
        step(chunked, number)
    monkeypatch.setattr(rule.ElementwiseRule, "update", update)
    monkeypatch.setattr(rule.ElementwiseRule, "_is_ready", lambda *_: False)
    for number in range(1, 4):
        step(whole, number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "for matrices and vectors of all sizes"
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for key, tensor in state(chunked).items():
        if tensor.dtype != torch.bfloat16:
            torch.testing.assert_close(state(whole)[key], tensor, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("name", [*CONFIGS, *SEVERAL_KERNELS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_changes_while_a_step_is_marked_as_bad(name, dtype):
    optimizer = optimizer_of((CONFIGS | SEVERAL_KERNELS)[name], dtype)
    assert optimizer.skips
    step(optimizer, 1)
    before = copy.deepcopy(state(optimizer))
    step(optimizer, 2, torch.nan, torch.tensor(True))
    for key, tensor in state(optimizer).items():
        assert torch.equal(tensor, before[key]), key
    step(optimizer, 2, bad=torch.tensor(False))
    assert not any(torch.equal(tensor, before[key]) for key, tensor in state(optimizer).items())


class Moved(TorchDispatchMode):
    """Bytes of long-lived tensors that operations read and write. Parts that follow each other are in the cache while
    the operations of one part run: each counts once as read and once as written."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        self.cached: dict[int, tuple[tuple[int, int], set[str]]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in HOST_READS, f"{name} waits for the device"
        result = func(*args, **(kwargs or {}))
        if func.is_view or name in UNMOVED:
            return result
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(given):
                self.touch(
                    tensor, {"written"} if writes and name == "copy_" else {"read", "written"} if writes else {"read"}
                )
        return result

    def touch(self, tensor: Tensor, ways: set[str]) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.storages:
            return
        place = tensor.data_ptr(), tensor.nbytes
        if self.cached.get(key, (None,))[0] != place:
            self.cached[key] = place, set()
        seen = self.cached[key][1]
        self.bytes += len(ways - seen) * tensor.nbytes
        # What was written need not be read again.
        seen.update(ways, {"read"})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_moves_what_the_facts_say_and_waits_for_nothing(monkeypatch, name):
    monkeypatch.setitem(rule.CHUNK, "cpu", 1000)
    optimizer = optimizer_of(CONFIGS[name], torch.bfloat16)
    step(optimizer, 1)
    for shard in optimizer.shards:
        shard.gradient = drawn(2, torch.bfloat16)[shard.name]
    gradients = [shard.gradient for shard in optimizer.shards]
    with Moved([*gradients, *state(optimizer).values()]) as moved:
        square = optimizer.square_norm()
    assert moved.bytes == 2 * ELEMENTS, "the norm reads gradients in their own type"
    with Moved([*gradients, *state(optimizer).values()]) as moved:
        optimizer.step(1e-2, square.sqrt())
    assert moved.bytes == OPTIMIZERS[name].moved(CONFIGS[name], "", ()) * ELEMENTS


class AllMoved(TorchDispatchMode):
    """Bytes of all tensors that operations read and write, in the cache or not."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name.removeprefix("aten::") in UNMOVED:
            return result
        read = [tensor for given in args for tensor in tensors_in(given)]
        self.bytes += sum(tensor.nbytes for tensor in (*read, *tensors_in(result)))
        return result


def test_lion_moves_the_bytes_of_every_kernel_on_a_cpu():
    optimizer = optimizer_of(CONFIGS["lion"], torch.float32)
    for shard in optimizer.shards:
        shard.value.grad = drawn(2, torch.float32)[shard.name]
    optimizer.rule.step()  # makes the state
    with AllMoved() as moved:
        optimizer.rule.step()
    assert optimizer_costs(CONFIGS["lion"], ModelConfig(vocab_size=1), 4).moved_on_cpu * ELEMENTS == moved.bytes
