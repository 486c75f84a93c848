"""oneDNN's linear layers compute what torch's do, forward and backward, and are used where they should be."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.job.model import Model
from phalanx.model.init import initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.linear import linear, onednn_is_faster, use_onednn

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
    shape = Model(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, seq_len=16, tied=tied, activation="swiglu")
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
