"""Gated delta nets: chunks equal the recurrence, documents equal themselves alone, and a cache changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.model import DeltaNet, ModelConfig
from phalanx.model.cache import Cache
from phalanx.model.documents import Documents
from phalanx.model.recurrent import convolved, delta_rule
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
