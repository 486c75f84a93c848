"""oneDNN's linear layers compute what torch's do, forward and backward, and are used where they should be."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.model import ModelConfig
from phalanx.model.layers import Linear
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.linear import (
    DeferredWeightGrads,
    Product,
    defer_weight_grads,
    linear,
    onednn_is_faster,
    use_onednn,
)

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
