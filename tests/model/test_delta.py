"""Gated delta nets: chunks equal the recurrence, documents equal themselves alone, and a cache changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.model import DeltaNet, ModelConfig
from phalanx.model import recurrent
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.recurrent import convolved, delta_rule, kernel_text, load_kernel, mix
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer

MODEL = ModelConfig(
    n_layers=4,
    d_model=16,
    n_heads=2,
    seq_len=24,
    vocab_size=20,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    attention="delta,delta,delta,gated_heads",
    delta=DeltaNet(n_heads=4, key_heads=2, key_head_dim=3, head_dim=5),
)


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, fading: Tensor, beta: Tensor) -> Tensor:
    """The three equations of the module, token by token."""
    state, outputs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[2]):
        state = fading[:, :, t, None, None].exp() * state
        held = (state * k[:, :, t, :, None]).sum(-2)
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - held)).unsqueeze(-2)
        outputs.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(outputs, 2)


def drawn(seq: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seq)
    q, k, v = (torch.randn(2, 3, seq, size, generator=generator, dtype=torch.float64) for size in (4, 4, 6))
    fading, beta = (torch.randn(2, 3, seq, generator=generator, dtype=torch.float64) for _ in range(2))
    return q, F.normalize(k, dim=-1), v, -F.softplus(fading), beta.sigmoid()


@pytest.mark.parametrize(("seq", "chunk"), [(1, 64), (7, 64), (16, 4), (17, 4), (130, 64)])
def test_chunks_equal_the_recurrence(seq: int, chunk: int) -> None:
    inputs = drawn(seq)
    torch.testing.assert_close(delta_rule(*inputs, chunk=chunk), by_recurrence(*inputs), rtol=1e-10, atol=1e-10)


def test_documents_begin_anew() -> None:
    inputs, numbers = drawn(21), torch.tensor([[0] * 3 + [1] * 9 + [2] * 1 + [3] * 8, [4] * 12 + [5] * 9])
    together = delta_rule(*inputs, numbers, chunk=4)
    x, taps = inputs[2], torch.arange(3 * 6 * 4, dtype=torch.float64).view(3, 6, 4)
    smooth = convolved(x, taps, numbers)
    for row, row_numbers in enumerate(numbers):
        for number in row_numbers.unique():
            at = row_numbers == number
            alone = by_recurrence(*(each[row : row + 1, :, at] for each in inputs))
            torch.testing.assert_close(together[row : row + 1, :, at], alone, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(smooth[row : row + 1, :, at], convolved(x[row : row + 1, :, at], taps))


@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_changes_nothing(ragged: bool) -> None:
    model = Transformer(MODEL).double().eval()
    initialise(model, MODEL, 1)
    tokens = torch.randint(20, (2, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = Cache(16)
        if ragged:  # the second sequence begins two columns later
            cache.starts = [0, 2]
        parts = [model(tokens[:, first:last], cache=cache) for first, last in ((0, 6), (6, 7), (7, 11))]
        expected = model(tokens)
        if ragged:
            expected[1, 2:] = model(tokens[1:, 2:])[0]
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1, 2:], expected[1, 2:], rtol=1e-9, atol=1e-9)


def test_documents_of_a_model_are_separate() -> None:
    model = Transformer(MODEL).double()
    initialise(model, MODEL, 1)
    tokens = torch.randint(20, (1, 24), generator=torch.Generator().manual_seed(3))
    places = torch.cat((torch.arange(10), torch.arange(14)))
    numbers = Documents(torch.tensor([[0] * 10 + [1] * 14]))
    both = model(tokens, documents=numbers, positions=places)
    torch.testing.assert_close(both[:, :10], model(tokens[:, :10]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(both[:, 10:], model(tokens[:, 10:]), rtol=1e-9, atol=1e-9)


def test_rates_and_steps_are_spread_over_the_heads() -> None:
    model = Transformer(replace(MODEL, n_layers=1))
    initialise(model, MODEL, 1)
    attention = model.blocks["0"].attn
    torch.testing.assert_close(attention.decay.exp(), torch.tensor([1.0, 6.0, 11.0, 16.0]))
    steps = torch.tensor([0.1, 0.1 * 0.01 ** (1 / 3), 0.1 * 0.01 ** (2 / 3), 0.001])
    torch.testing.assert_close(F.softplus(attention.dt_bias), steps)


CALLS: list[dict[str, Any]] = []


def fake_kernel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, **options: Any
) -> tuple[Tensor, None]:
    """What fla-core 0.6 computes with these arguments, by the recurrence in fp32: tokens before heads, and documents
    as one sequence."""
    CALLS.append({"shape": tuple(q.shape), "dtype": q.dtype, "g": g.dtype, **options})
    assert options.pop("use_qk_l2norm_in_kernel") is True
    bounds, on_cpu = (options.pop(name, None) for name in ("cu_seqlens", "cu_seqlens_cpu"))
    assert not options
    assert (bounds is None) == (on_cpu is None)
    q, k = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    heads = [x.float().transpose(1, 2) for x in (q * scale, k, v, g, beta)]
    if bounds is None:
        return by_recurrence(*heads).transpose(1, 2).to(v.dtype), None
    assert len(v) == 1
    assert bounds.dtype == torch.int64
    lengths = bounds.diff().tolist()
    parts = zip(*(x.split(lengths, 2) for x in heads), strict=True)
    return torch.cat([by_recurrence(*part) for part in parts], 2).transpose(1, 2).to(v.dtype), None


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the place of fla-core's, on this device."""
    module = ModuleType("fla.ops.gated_delta_rule")
    vars(module)["chunk_gated_delta_rule"] = fake_kernel
    for name, each in {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(recurrent, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(recurrent.metadata, "version", lambda _: "0.6.0")
    load_kernel.cache_clear()
    CALLS.clear()
    yield
    load_kernel.cache_clear()


def mixed(documents: Documents | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The outputs of 4 heads on 2 key heads, and the gradients of all inputs."""
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 2, 21, 8), (2, 4, 21, 7), (2, 4, 3), (2, 4, 3), (4, 5, 3), (4,), (4,)
    keys, values, *taps, decay, steps = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    )
    o = mix(keys, values, (*taps, decay, steps), documents)
    inputs = keys, values, *taps, decay, steps
    return o, *torch.autograd.grad(o.float().square().sum(), inputs)


@pytest.mark.parametrize("in_documents", [False, True])
def test_the_kernel_gets_what_it_takes_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, fla: None, in_documents: bool
) -> None:
    documents = Documents(torch.tensor([[0] * 3 + [1] * 18, [2] * 12 + [3] * 9])) if in_documents else None
    found = mixed(documents, torch.bfloat16)
    (call,) = CALLS
    assert call["shape"] == ((1, 42, 4, 4) if in_documents else (2, 21, 4, 4))
    assert (call["dtype"], call["g"]) == (torch.bfloat16, torch.float32)
    if in_documents:
        assert call["cu_seqlens"].tolist() == [0, 3, 21, 33, 42]
    monkeypatch.setattr(recurrent, "KERNEL_DEVICES", ())
    for one, other in zip(found, mixed(documents, torch.bfloat16), strict=True):
        assert (one - other).float().norm() <= 0.03 * other.float().norm()
    assert len(CALLS) == 1


def test_what_computes_is_said(monkeypatch: pytest.MonkeyPatch, fla: None) -> None:
    here = torch.device("cpu")
    assert kernel_text(here, torch.bfloat16, 128) == "kernels of fla-core 0.6.0"
    assert kernel_text(here, torch.float32, 128) == "plain torch (cpu, float32, keys of 128)"
    assert kernel_text(here, torch.bfloat16, 512) == "plain torch (cpu, bfloat16, keys of 512)"
    mixed(None, torch.float32)
    assert not CALLS
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    load_kernel.cache_clear()
    assert "phalanx[fla] has the kernels" in kernel_text(here, torch.bfloat16, 128)
    mixed(None, torch.bfloat16)
    assert not CALLS
