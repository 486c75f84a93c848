"""Block-wise 8-bit codes: the nearest value of the table, exact scales, and no second moment that vanishes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.optimizers.adamw8bit import table

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
