"""The update rules and AdamW: equal to torch's or to the paper's formulas, in one pass, and in 8-bit codes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.steps import micro_batches
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from phalanx.optimizers.catalogue import OPTIMIZERS, optimizer_costs
from phalanx.parallel.mesh import build
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.precision import LossScale
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.optimizers import rule
from phalanx.train.optimizers.narrow import table
from phalanx.train.optimizers.rule import one_pass_of
from phalanx.train.step import StepInputs, Stepper
from train.measured_memory import tensors_in

# The update rules: equal to torch's or to the paper's formulas, in one pass, and in 8-bit codes.


# The update rules on one process: equal to torch's or to the paper's formulas.

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
    found, exact = trained(dataclasses.replace(CONFIG, state="8bit")), trained(CONFIG)
    for name, start in drawn(0).items():
        moved, wanted = found[name] - start, exact[name] - start
        assert (moved - wanted).norm() < (1e-6 if name == "norm.weight" else 0.05) * wanted.norm(), name
    assert not torch.equal(found["mlp.down.weight"], exact["mlp.down.weight"])


# One pass over the optimizer's state: equal to separate passes in fp32, bytes moved as the facts say, and nothing
# that waits for the device.

ODD_SHAPES = {"embed.weight": (40, 130), "norm.weight": (128,), "mlp.down.weight": (128, 512)}
ELEMENTS = sum(torch.Size(shape).numel() for shape in ODD_SHAPES.values())
CONFIGS = {
    "adamw": Optimizer(lr=1e-2, clip=0.5),
    "lion": Optimizer(name="lion", lr=1e-2, betas=(0.9, 0.99), clip=0.5),
    "sgd": Optimizer(name="sgd", lr=1e-2, momentum=0.9, clip=0.5),
}
SEVERAL_KERNELS = {
    "adamw 8bit": Optimizer(state="8bit", lr=1e-2, clip=0.5),
    "muon": Optimizer(name="muon", lr=1e-2, clip=0.5),
}
UNMOVED = ("detach", "split", "new_empty")
HOST_READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")


def draw(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in ODD_SHAPES.items()}


def optimizer_of(config: Optimizer, dtype: torch.dtype) -> ShardedOptimizer:
    values = draw(0, dtype)
    return ShardedOptimizer(
        [ParameterShard(n, (TensorSlice(ODD_SHAPES[n]),), 0, 0, v.requires_grad_()) for n, v in values.items()], config
    )


def step(optimizer: ShardedOptimizer, number: int, factor: float = 1.0, bad: Tensor | None = None) -> None:
    for shard in optimizer.shards:
        shard.gradient = draw(number, shard.value.dtype)[shard.name] * factor
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
            shard.gradient = draw(number, torch.bfloat16)[shard.name].float()
            assert other.gradient is None
        wide.step(1e-2, wide.square_norm().sqrt())
    for key, tensor in state(wide).items():
        kind, _, parameter = key.partition("/")
        own = state(narrow)["master/" + parameter if kind == "value" else key]
        torch.testing.assert_close(own, tensor, rtol=2e-6, atol=1e-7)
    for shard in narrow.shards:
        assert torch.equal(shard.value, narrow.masters[shard.name].bfloat16())


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(CONFIGS, [torch.bfloat16, torch.float32, torch.float64], strict=True))
)
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
        shard.gradient = draw(2, torch.bfloat16)[shard.name]
    gradients = [shard.gradient for shard in optimizer.shards]
    with Moved([*gradients, *state(optimizer).values()]) as moved:
        square = optimizer.square_norm()
    assert moved.bytes == 2 * ELEMENTS, "the norm reads gradients in their own type"
    with Moved([*gradients, *state(optimizer).values()]) as moved:
        optimizer.step(1e-2, square.sqrt())
    assert moved.bytes == OPTIMIZERS[name].moved(CONFIGS[name], "", ()) * ELEMENTS


def moved_in_a_step(ranks: Any, line: str, optimizer: str) -> float:
    """Bytes that the one pass of a rank moves per element of its shards, in the second step of a job."""
    layout = parse(line)
    train = Train(precision="bf16", global_batch=2 * layout.data_ranks, cpu_linear="mkl")
    job = Job(model=TINY, layout=layout, optimizer=Optimizer(name=optimizer), train=train)
    mesh = build(layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), 13)
    own = one_pass_of(stepper.optimizer.rule)
    assert own is not None
    update, bytes_moved, elements = own.step, list[int](), list[int]()

    def counted() -> None:
        held = [p for group in own.param_groups for p in group["params"] if p.grad is not None]
        tensors = [t for p in held for t in (p, p.grad, own.copies.get(p), *own.state[p].values()) if t is not None]
        with Moved(tensors) as moved:
            update()
        bytes_moved.append(moved.bytes)
        elements.append(sum(p.numel() for p in held))

    own.step = counted
    for step in range(2):
        batches, valid = micro_batches(job, step, mesh.data_rank, 13)
        bytes_moved.clear()
        elements.clear()
        stepper.step(StepInputs(batches, step, valid, 1e-3))
    return sum(bytes_moved) / sum(elements)


TINY = ModelConfig(n_layers=1, d_model=32, n_heads=2, seq_len=8)
LAYOUTS = (
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=3",
    "dp_shard=2,offload=optimizer",
)


@pytest.mark.parametrize("name", [*CONFIGS, "muon"])
@pytest.mark.parametrize("line", LAYOUTS)
def test_so_does_a_step_of_every_layout(ranks, line, name):
    expected = OPTIMIZERS[name if name in CONFIGS else "adamw"].moved(Optimizer(name=name), "", ())
    assert ranks(moved_in_a_step, 2, line, name) == [expected] * 2


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
        shard.value.grad = draw(2, torch.float32)[shard.name]
    optimizer.rule.step()  # makes the state
    with AllMoved() as moved:
        optimizer.rule.step()
    assert optimizer_costs(CONFIGS["lion"], ModelConfig(vocab_size=1), 4).moved_on_cpu * ELEMENTS == moved.bytes


# Block-wise 8-bit codes: the nearest value of the table, exact scales, and no second moment that vanishes.

CPU = torch.device("cpu")


def blocks(seed: int, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
    """Blocks of values over many decades, with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 64, generator=generator, dtype=torch.float64)
    x *= torch.exp(4 * torch.randn(20, 64, generator=generator, dtype=torch.float64))
    x[torch.rand(20, 64, generator=generator) < 0.1] = 0
    return (x if signed else x.abs()).to(dtype)


def coded(x: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales, and the values that they stand for."""
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), x.new_zeros(len(x))
    known = table(CPU, x.dtype, signed=signed)
    known.quantise(x, codes, scales)
    return codes, scales, known.dequantise(codes, scales)


@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_every_element_becomes_the_nearest_value_of_the_table(seed, dtype, signed):
    x, known = blocks(seed, dtype, signed=signed), table(CPU, dtype, signed=signed)
    _, scales, found = coded(x, signed=signed)
    assert torch.equal(scales, x.abs().amax(1))
    nearest = (x.abs().unsqueeze(-1) / scales.view(-1, 1, 1) - known.values[: 128 if signed else 256]).abs().amin(-1)
    rounded_up = 0 if signed else (x > 0) & (found == known.values[1] * scales.view(-1, 1))
    error = (x - found).abs() / scales.view(-1, 1)
    assert ((error <= nearest * (1 + 1e-5) + 1e-7) | rounded_up.bool() if not signed else error <= nearest + 1e-7).all()


@given(st.integers(0, 10**6), st.booleans())
def test_what_codes_stand_for_has_the_same_codes(seed, signed):
    codes, scales, found = coded(blocks(seed, torch.float32, signed=signed), signed=signed)
    again, same_scales, _ = coded(found, signed=signed)
    assert torch.equal(again, codes)
    assert torch.equal(same_scales, scales)


@pytest.mark.parametrize("signed", [True, False])
def test_no_cell_of_the_lookup_has_two_bounds(signed):
    values = table(CPU, torch.float32, signed=signed).values[: 128 if signed else 256]
    bounds = (values[1:] + values[:-1]) / 2
    cells = bounds.view(torch.int32) >> 16
    assert len(cells.unique()) == len(cells) == (127 if signed else 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_change_exactly_above_the_bounds_between_values(dtype, signed):
    """In the numbers next to each bound, where a look-up by cells could be wrong."""
    values = table(CPU, dtype, signed=signed).values[: 128 if signed else 256]
    bounds = (values[1:] + values[:-1]) / 2
    if not signed:
        bounds[0] = 0
    one = bounds.new_ones(1)
    below, above = (torch.nextafter(bounds, bounds.new_tensor(end)) for end in (0.0, 1.0))
    for x, more in ((below, 0), (bounds, 0), (above, 1)):
        expected = torch.arange(len(bounds)) + more
        assert torch.equal(coded(torch.cat([x, one]).view(1, -1), signed=signed)[0][0, :-1].int(), expected.int())
        if signed:
            negative = coded(-torch.cat([x, one]).view(1, -1), signed=signed)[0][0, :-1].int()
            assert torch.equal(negative, (expected + 128).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_an_element_that_is_not_finite_shows_in_its_blocks_scale_alone(dtype, bad):
    x = blocks(0, dtype, signed=True)
    x[3, 5] = bad
    _, scales, found = coded(x, signed=True)
    assert scales.isfinite().tolist() == [block != 3 for block in range(len(x))]
    assert found.isfinite().all(1).tolist() == scales.isfinite().tolist()


def test_a_second_moment_never_becomes_zero():
    x = torch.tensor([[1.0, 1e-12, 0.0, 1e-30]])
    _, _, found = coded(x, signed=False)
    assert found[0, 0] == 1
    assert found[0, 1] > 0
    assert found[0, 2] == 0
    assert found[0, 3] > 0


@pytest.mark.parametrize("x", [torch.zeros(2, 8), torch.full((2, 8), 1e-42)])
def test_blocks_without_a_usable_scale_are_zero(x):
    codes, _, found = coded(x, signed=True)
    assert not codes.any()
    assert not found.any()


# AdamW: equal to torch's, decay groups, master weights, clipping, state.

ADAMW = Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)


def model(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def adamw(module: nn.Module, config: Optimizer = ADAMW) -> ShardedOptimizer:
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
        optimizer.step(ADAMW.lr, norm(optimizer, scale))
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
    reference = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=0.1)
    for step in range(4):
        backward(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), ADAMW.clip)
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
    optimizer = ShardedOptimizer([copied, empty], ADAMW)
    copied.gradient, empty.gradient = torch.full((3,), 2.0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    assert optimizer.square_norm() == 0
    optimizer.step(1e-2, torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(copied.value.detach(), torch.full((3,), 0.99, dtype=torch.float64))
    assert {kind: t["w"].shape for kind, t in optimizer.state_tensors().items()} == {
        "exp_avg": (0,),
        "exp_avg_sq": (0,),
    }
    alone = ShardedOptimizer([empty], ADAMW)
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
