"""Products in 8 bits, and oneDNN's linear layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.test_compiled import FAMILIES
from phalanx.blocks.parameters import is_narrow
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.precision import Fp8Scaling
from phalanx.data.loader import MicroBatch
from phalanx.errors import JobError
from phalanx.model.attention_blocks import Scoring, Seen, attend, gradients
from phalanx.model.cpu_kernels import small_products
from phalanx.model.layers import Linear
from phalanx.model.moe import GroupedProduct
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel import mesh as meshes
from phalanx.parallel.linear import (
    DeferredWeightGrads,
    OwnProduct,
    Product,
    defer_weight_grads,
    gradient_of_input,
    gradient_of_weight,
    linear,
    onednn_is_faster,
    use_onednn,
    use_scaled,
)
from phalanx.parallel.scaled import ScaledGrouped, ScaledProduct, padded, rounded, rounded_by_expert, tiles
from phalanx.train.step import StepInputs, Stepper

# Products in 8 bits: how near they come, that they reach torch's kernel in the layout that it takes, and the training
# that they make.


VOCABULARY, STEPS = 48, 40
SCALINGS: tuple[Fp8Scaling, ...] = ("rowwise", "tensorwise", "mxfp8")
LLAMA = ModelConfig(
    n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, seq_len=32, norm="rmsnorm", activation="swiglu", positions="rope"
)


def three_products(multiply: OwnProduct, x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Returns the output of a layer, and the gradients of its input and its weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = multiply(x, weight)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], gradient)]


def factors(outlier: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns an input (2, 40, 96), a weight (48, 96) and a gradient of the output, of which one row is large."""
    generator = torch.Generator().manual_seed(3)
    x, weight, gradient = (torch.randn(*shape, generator=generator) for shape in ((2, 40, 96), (48, 96), (2, 40, 48)))
    x[0, 0] *= outlier
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def errors(scaling: Fp8Scaling, outlier: float = 1.0) -> list[float]:
    """Returns the relative errors, in norm, of the three products without the outlier's row."""
    exact = three_products(OwnProduct(torch.nn.functional.linear), *factors(outlier))
    found = three_products(OwnProduct(ScaledProduct(scaling, emulated=True)), *factors(outlier))
    parts = [(a.flatten(0, -2)[1:], b.flatten(0, -2)[1:]) for a, b in zip(found, exact, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in parts]


def test_errors_are_those_of_three_bits_of_mantissa_and_of_two_for_gradients_tensorwise():
    # A number is rounded by at most 2^-4 of itself with three bits, by 2^-3 with two, uniformly: over sqrt(3), for both
    # factors, and less for numbers just above a power of two.
    three, two = (2**-4 * 2**0.5 / 3**0.5, (2**-6 + 2**-8) ** 0.5 / 3**0.5)
    assert all(three / 3 < error < three for error in errors("rowwise"))
    output, *gradients = errors("tensorwise")
    assert three / 3 < output < three
    assert all(three < error < two for error in gradients) or all(two / 3 < error < two for error in gradients)


def test_a_row_of_outliers_costs_the_other_rows_nothing_with_scales_of_rows():
    assert errors("rowwise", 1e6)[0] == errors("rowwise")[0]
    assert errors("tensorwise", 1e6)[0] > 5 * errors("rowwise", 1e6)[0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_are_powers_of_two_and_rows_of_zeros_stay_zeros(scaling):
    product = ScaledProduct(scaling, emulated=True)
    x = torch.randn(6, 32) * torch.logspace(-30, 20, 6).unsqueeze(1)
    x[2] = 0
    narrow, scale = rounded(x, torch.float8_e4m3fn, scaling)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (narrow.float()[2] == 0).all()
    assert 224 <= narrow.float().abs().max() <= 448
    torch.testing.assert_close(product(x, torch.eye(32))[-1], x[-1], rtol=2**-4, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_does_not_become_finite(scaling, value):
    x = torch.ones(4, 32)
    x[1, 5] = value
    assert not ScaledProduct(scaling, emulated=True)(x, torch.ones(16, 32))[1].isfinite().any()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_part_of_the_inner_dimension_with_a_scale_of_its_own_changes_only_the_smallest_numbers(scaling):
    product = ScaledProduct(scaling, emulated=True)
    x, weight, _ = factors(dtype=torch.float64)
    x[..., 48:] /= 64
    whole = product(x, weight)
    parts = sum(product(x[..., part], weight[:, part]) for part in (slice(0, 48), slice(48, 96)))
    assert 0 < float((parts - whole).abs().max() / whole.abs().max()) < 1e-4
    exact = torch.nn.functional.linear(x, weight)
    assert float((whole - exact).abs().max() / exact.abs().max()) > 1e-2


@pytest.mark.parametrize("scaling", SCALINGS)
def test_numbers_with_scales_of_their_own_are_rounded_alike_in_a_part_and_otherwise_only_if_they_are_small(scaling):
    alike = ScaledProduct(scaling, emulated=True, elementwise=True)
    x, weight, _ = factors(dtype=torch.float64)
    whole = alike(x, weight)
    parts = alike(x[..., :48], weight[:, :48]) + alike(x[..., 48:], weight[:, 48:])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ScaledProduct(scaling, emulated=True)(x, weight), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])  # a CPU has no kernel for blocks
def test_the_kernel_computes_what_is_emulated(scaling):
    given = factors(dtype=torch.bfloat16)
    found = three_products(OwnProduct(ScaledProduct(scaling)), *given)
    emulated = three_products(OwnProduct(ScaledProduct(scaling, emulated=True)), *given)
    for ours, expected in zip(found, emulated, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("tokens", [40, 37])
def test_a_gpu_s_kernel_gets_factors_in_the_layout_that_it_takes(scaling, tokens, monkeypatch):
    """torch checks layouts, sizes and scales of tensors on a GPU, here of fake ones."""
    calls = list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.dtype, bool]]()
    real: Any = torch._scaled_mm

    def seen(a: Tensor, b: Tensor, *scales: Tensor, **options: Any):
        calls.append((tuple(a.shape), tuple(b.shape), a.dtype, b.dtype, options["use_fast_accum"]))
        return real(a, b, *scales, **options)

    monkeypatch.setattr(torch, "_scaled_mm", seen)
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((2, tokens, 96), (48, 96), (48,))
        )
        product = ScaledProduct(scaling)  # without autograd, which has no fake GPU
        y = product(x, weight, bias)
        of_x = gradient_of_input(OwnProduct(product), y, weight)
        of_weight = gradient_of_weight(OwnProduct(product), y, x)
    assert (y.shape, of_x.shape, of_weight.shape) == ((2, tokens, 48), x.shape, weight.shape)
    rows, whole, rowwise = 2 * tokens, -(-2 * tokens // 16) * 16, scaling == "rowwise"
    e4m3, of_gradient = torch.float8_e4m3fn, torch.float8_e4m3fn if rowwise else torch.float8_e5m2
    assert calls == [
        ((rows, 96), (96, 48), e4m3, e4m3, True),
        ((rows, 48), (48, 96), of_gradient, e4m3, rowwise),
        ((48, whole), (whole, 96), of_gradient, e4m3, rowwise),
    ]


def test_each_device_has_its_own_formats_or_is_refused(monkeypatch):
    def product(dtype: torch.dtype = torch.bfloat16, scaling: Fp8Scaling = "rowwise") -> ScaledProduct:
        return ScaledProduct.on(torch.device("cuda"), scaling, dtype)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert product() == ScaledProduct("rowwise", grouped=capability == (9, 0))
        if capability == (10, 0):
            assert product(scaling="mxfp8") == ScaledProduct("mxfp8", grouped=False)
        else:
            with pytest.raises(JobError, match="Blackwell.* and this is NVIDIA X; nearest legal: rowwise"):
                product(scaling="mxfp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(JobError, match="NVIDIA X has no products in fp8; nearest legal: bf16"):
        product()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    formats = {}
    for kind in ("gfx942:sramecc+", "gfx950"):
        own = SimpleNamespace(gcnArchName=kind)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, own=own: own)
        formats[kind] = product().formats[0]
    assert [*formats.values()] == [torch.float8_e4m3fnuz, torch.float8_e4m3fn]
    own = SimpleNamespace(gcnArchName="gfx90a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: own)
    with pytest.raises(JobError, match="has no products in fp8"):
        product()
    assert product(torch.float64) == ScaledProduct("rowwise", emulated=True, elementwise=True)


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 96), (48, 88)])
def test_matrices_whose_sizes_the_kernel_does_not_take_stay_in_their_own_type(outputs, inputs, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", None)
    x, weight, gradient = torch.randn(32, inputs), torch.randn(outputs, inputs), torch.randn(32, outputs)
    plain = three_products(OwnProduct(torch.nn.functional.linear), x, weight, gradient)
    torch.testing.assert_close(three_products(OwnProduct(ScaledProduct("rowwise")), x, weight, gradient), plain)


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_what_is_gathered_in_fp8_is_what_is_multiplied_in_it(model):
    with torch.device("meta"):
        made = Transformer(model, 48)
    taken, left = use_scaled(made, ScaledProduct("rowwise", emulated=True))
    multiplied = {f"{name}.weight" for name in [*taken, *left]}
    assert multiplied == {name for name, _ in made.named_parameters() if is_narrow(model, name)}


def test_only_linear_layers_of_blocks_take_it_and_experts_where_they_have_a_kernel_but_not_routers():
    model = Transformer(replace(LLAMA, moe=MoE(n_experts=4, n_shared=1)), 48)
    taken, left = use_scaled(model, ScaledProduct("rowwise"))
    names = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "moe.shared.up", "moe.shared.gate", "moe.shared.down")
    of_experts = ("moe.experts.up", "moe.experts.gate", "moe.experts.down")
    every, routed = ({f"blocks.{layer}.{name}" for layer in range(2) for name in some} for some in (names, of_experts))
    assert set(taken) == every | routed
    assert not left
    taken, left = use_scaled(model, ScaledProduct("rowwise", grouped=False))
    assert (set(taken), set(left)) == (every, routed)
    odd = Transformer(replace(LLAMA, d_ff=100), 48)
    assert use_scaled(odd, ScaledProduct("rowwise"))[1] == [
        f"blocks.{layer}.mlp.{name}" for layer in range(2) for name in ("up", "gate", "down")
    ]


# Experts.

ENDS = torch.tensor([5, 5, 20, 37], dtype=torch.int32)
"""Of four experts, the second of which has no rows; three rows are nobody's."""


def of_experts(
    dtype: torch.dtype, product: ScaledProduct | None, ends: Tensor | None = ENDS
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output, the gradient of the rows (those of experts) and that of the weights."""
    generator = torch.Generator().manual_seed(5)
    x, weight, gradient = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 48), (4, 32, 48), (40, 32))
    )
    if ends is not None:
        x[37:], gradient[37:] = torch.nan, torch.nan
    multiply = GroupedProduct(ends, 4) if product is None else ScaledGrouped(ends, 4, product)
    y, of_rows = multiply(x, weight), multiply.input_gradient(gradient, weight)
    return y[:37], of_rows[:37], multiply.weight_gradient(gradient, x)


@pytest.mark.parametrize("ends", [ENDS, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elementwise", [True, False])
def test_experts_multiply_as_near_as_linear_layers_and_rows_of_nobody_change_nothing(dtype, elementwise, ends):
    found = of_experts(dtype, ScaledProduct("mxfp8", emulated=True, elementwise=elementwise), ends)
    for ours, exact in zip(found, of_experts(dtype, None, ends), strict=True):
        assert (ours.shape, ours.dtype) == (exact.shape, dtype)
        assert 0.01 < float((ours - exact).norm() / exact.norm()) < 2**-4 * 2**0.5 / 3**0.5


def test_each_expert_scales_its_own_rows():
    alone = ScaledProduct("rowwise", emulated=True)
    x, gradient = torch.randn(40, 48), torch.randn(40, 32)
    plain = ScaledGrouped(ENDS, 4, alone).weight_gradient(gradient, x)
    for expert, (start, end) in enumerate(((0, 5), (5, 5), (5, 20), (20, 37))):
        own = alone.weight_gradient(gradient[start:end], x[start:end]) if end > start else torch.zeros(32, 48)
        torch.testing.assert_close(plain[expert], own, rtol=1e-5, atol=1e-5)


def test_rows_are_padded_to_16_of_each_expert_without_those_of_nobody():
    rows, ends = padded(torch.arange(1.0, 41).unsqueeze(1), ENDS)
    assert ends.tolist() == [16, 16, 32, 64]
    assert len(rows) == 112, "room for 15 more of each"
    found = [int(row) for row in rows.flatten()]
    assert found == [*range(1, 6), *[0] * 11, *range(6, 21), 0, *range(21, 38), *[0] * 15, *[0] * 48]


def test_no_tensor_in_fp32_is_as_large_as_the_rows():
    """In eager mode three of them, with a scale of its own for each number, were a fifth of a rank's peak memory."""
    sizes = list[int]()

    class Results(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.append(result.nbytes)
            return result

    rows = torch.randn(160, 64, dtype=torch.bfloat16)
    with Results():
        rounded_by_expert(rows, torch.tensor([80, 160], dtype=torch.int32), torch.float8_e4m3fn, "rowwise")
    assert max(sizes) == (160 + 2 * 16) * 64 * 2, "padded"


@pytest.mark.parametrize("given", [True, False])
def test_a_gpu_s_kernel_gets_experts_in_the_layout_that_it_takes(given, monkeypatch):
    calls = list[tuple[tuple[int, ...], ...]]()
    real: Any = torch._scaled_grouped_mm

    def seen(*factors: Tensor, **options: Any):
        calls.append(tuple(tuple(each.shape) for each in (*factors, options["offs"])))
        return real(*factors, **options)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", seen)
    with FakeTensorMode():
        x, weight, gradient = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((40, 48), (4, 32, 48), (40, 32))
        )
        ends = torch.empty(4, dtype=torch.int32, device="cuda") if given else None
        multiply = ScaledGrouped(ends, 4, ScaledProduct("rowwise"))
        assert multiply(x, weight).shape == gradient.shape
        assert multiply.input_gradient(gradient, weight).shape == x.shape
        assert multiply.weight_gradient(gradient, x).shape == weight.shape
    assert calls == [
        ((40, 48), (4, 48, 32), (40,), (4, 32), (4,)),
        ((40, 32), (4, 32, 48), (40,), (4, 48), (4,)),
        ((32, 112), (112, 48), (128,), (192,), (4,)),
    ]


# Blocks of 32.


@pytest.mark.parametrize("tokens", [40, 64])
def test_a_gpu_s_kernel_gets_blocks_in_the_layout_that_it_takes(tokens, monkeypatch):
    calls = list[tuple[tuple[int, ...], tuple[int, ...], int, int, torch.dtype]]()
    real = F.scaled_mm

    def seen(a: Tensor, b: Tensor, of_a: Tensor, _: Any, of_b: Tensor, *others: Any, **options: Any):
        calls.append((tuple(a.shape), tuple(b.shape), of_a.numel(), of_b.numel(), of_a.dtype))
        return real(a, b, of_a, _, of_b, *others, **options)

    monkeypatch.setattr(F, "scaled_mm", seen)
    product = ScaledProduct("mxfp8")
    with FakeTensorMode():
        x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((tokens, 96), (160, 96)))
        y = product(x, weight)
        assert gradient_of_input(OwnProduct(product), y, weight).shape == x.shape
        assert gradient_of_weight(OwnProduct(product), y, x).shape == weight.shape
    assert calls == [
        ((tokens, 96), (96, 160), 128 * 4, 256 * 4, torch.float8_e8m0fnu),
        ((tokens, 160), (160, 96), 128 * 8, 128 * 8, torch.float8_e8m0fnu),
        ((160, 64), (64, 96), 256 * 4, 128 * 4, torch.float8_e8m0fnu),
    ]


def test_scales_of_blocks_are_tiled_as_tensor_cores_read_them():
    rows, blocks = 130, 6
    scales = 2.0 ** ((torch.arange(rows).unsqueeze(1) * 7 + torch.arange(blocks)) % 100 - 50)
    found = tiles(scales).float().view(2, 2, 32, 4, 4)
    for row, block in ((0, 0), (33, 1), (127, 3), (129, 5), (64, 4)):
        assert found[row // 128, block // 4, row % 32, row % 128 // 32, block % 4] == scales[row, block]


def test_an_outlier_costs_precision_only_in_its_own_block():
    x, weight = torch.randn(4, 96), torch.eye(96)
    x[0, 0] = 1e6
    narrow, scales = rounded(x, torch.float8_e4m3fn, "mxfp8")
    assert (narrow.shape, scales.shape) == ((4, 96), (4, 3))
    y = ScaledProduct("mxfp8", emulated=True)(x, weight)
    torch.testing.assert_close(y[0, 32:], x[0, 32:], rtol=2**-4, atol=1e-2)


def losses(train: Train, count: int) -> list[float]:
    """Returns the loss of each step of a small model on sequences in which each token follows from the one before.
    All is in fp32 but for the factors of products in 8 bits."""
    job = Job(
        model=replace(LLAMA, n_layers=1),
        train=replace(train, global_batch=4),
        optimizer=Optimizer(lr=3e-3, warmup_steps=1),
    )
    stepper = Stepper(job, meshes.alone(), torch.device("cpu"), VOCABULARY, torch.float32)
    found = []
    for step in range(count):
        tokens = np.random.default_rng(step).integers(VOCABULARY, size=(4, LLAMA.seq_len + 1))
        for place in range(1, LLAMA.seq_len + 1):
            tokens[:, place] = (5 * tokens[:, place - 1] + 3) % VOCABULARY
        batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].copy(), np.arange(4))
        found.append(stepper.step(StepInputs([batch], step, 4 * LLAMA.seq_len, 3e-3)).loss)
    return found


def test_a_small_model_learns_as_fast_as_without():
    plain = losses(Train(precision="bf16"), STEPS)
    assert plain[-1] < plain[0] / 4, "it learns"
    for scaling in SCALINGS:
        found = losses(Train(precision="fp8", fp8_scaling=scaling), STEPS)
        assert found != plain
        assert found == pytest.approx(plain, rel=0.05), scaling
        assert sum(found) == pytest.approx(sum(plain), rel=0.01), scaling


# oneDNN's linear layers compute what torch's do, forward and backward, and are used where they should be.

size = st.integers(1, 33)


@settings(max_examples=25)
@given(size, size, size, st.booleans(), st.booleans())
def test_equals_torch(rows, inputs, outputs, with_bias, batched):
    generator = torch.Generator().manual_seed(rows * 1000 + inputs)
    shape = (2, rows, inputs) if batched else (rows, inputs)
    tensors = [torch.randn(*s, generator=generator) for s in (shape, (outputs, inputs), (outputs,))]
    x, weight, bias = (t.requires_grad_() for t in tensors)
    used = bias if with_bias else None
    results = []
    for product in (linear, F.linear):
        out = product(x, weight, used)
        gradients = torch.autograd.grad((out * out).sum(), [x, weight, *([bias] if with_bias else [])])
        results.append([out, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gives_the_same_logits_and_gradients(tied):
    shape = ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, seq_len=16, tied=tied, activation="swiglu")
    tokens = torch.arange(32).reshape(2, 16)
    results = []
    for onednn in (False, True):
        model = Transformer(shape, 40)
        initialise(model, shape, 1)
        if onednn:
            assert use_onednn(model) == 2 * 7 + 1
        logits = model(tokens)
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_by_small_products_is_torch_s():
    if (small := small_products()) is None:
        pytest.skip("this torch has no kernel for small products")
    generator, seen, own = torch.Generator().manual_seed(1), Seen(causal=True), Scoring(small=small)
    q, k, v, given = (torch.randn(2, 256, n, 32, generator=generator).transpose(1, 2) for n in (4, 2, 2, 4))
    assert own.by_products(q, k)
    assert not own.by_products(q[:, :, :65], k)
    expected = attend(q, k, v, seen)
    found = (*attend(q, k, v, seen, own), *gradients(given, q, k, v, *expected, seen, own))
    for a, b in zip((*expected, *gradients(given, q, k, v, *expected, seen)), found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_weight_gradient_without_a_transposed_copy_is_torch_s():
    if (small := small_products()) is None:
        pytest.skip("this torch has no kernel for small products")
    generator = torch.Generator().manual_seed(1)
    gradient, x, old = (torch.randn(*s, generator=generator) for s in ((576, 640), (576, 192), (640, 192)))
    expected = gradient.t() @ x
    torch.testing.assert_close(small.add_weight_gradient(gradient, x), expected, rtol=1e-4, atol=1e-4)
    found = small.add_weight_gradient(gradient, x, old.clone())
    torch.testing.assert_close(found, old + expected, rtol=1e-4, atol=1e-4)
    for rows, columns in ((575, 640), (64, 64)):  # a shape that need not recur, too few terms
        assert small.add_weight_gradient(gradient[:rows, :columns], x[:rows]) is None
    assert small.add_weight_gradient(torch.ones(1).expand(576, 640), x) is None


def test_only_fp32_on_a_cpu():
    assert not onednn_is_faster(torch.device("cuda"), torch.float32)
    assert not onednn_is_faster(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_collected_weight_gradients_are_autograd_s(put_off, tied, onednn):
    """Of two micro-batches, the second of which adds to the first."""
    shape = ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, seq_len=16, tied=tied, bias=True)
    dtype, tolerance = (torch.float32, 1e-4) if onednn else (torch.float64, 1e-12)
    results, arrived = [], []
    for collected in (False, True):
        model = Transformer(shape, 40).to(dtype)
        initialise(model, shape, 1)
        deferred, products = DeferredWeightGrads(), list[list[Product]]()
        if onednn:
            use_onednn(model)
        if collected:
            names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
            deferred.arrived = lambda weight, names=names: arrived.append(names[weight])
            defer_weight_grads(model.modules(), deferred)
        for micro in range(2):
            tokens = (torch.arange(32) * (3 + micro) % 40).reshape(2, 16)
            if put_off and collected:
                products.append([])
                deferred.products = products[-1]
            model(tokens).square().sum().backward()
            deferred.products = None
        if put_off and collected:
            assert all(m.weight.grad is None for m in model.modules() if isinstance(m, Linear))
            for put in products:
                deferred.add(put)
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(results[1][name], gradient, rtol=tolerance, atol=tolerance * scale)
    linears = 2 * (4 + 2) + 1
    assert len(arrived) == 2 * linears
    assert len(set(arrived)) == linears


def test_what_is_put_off_needs_what_was_read_and_the_gradient_of_what_was_written():
    x = torch.randn(3, 4, requires_grad=True)
    layer, deferred = Linear(4, 5, bias=True), DeferredWeightGrads()
    defer_weight_grads([layer], deferred)
    deferred.products = put = []
    layer(x).sum().backward()
    assert (layer.weight.grad, x.grad is None, layer.bias.grad is None) == (None, False, False)
    ((_, gradient, read, of),) = put
    assert of is layer.weight
    assert (gradient.shape, read.shape) == ((3, 5), (3, 4))
