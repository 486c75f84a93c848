from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.moe import GroupedLinear


def layer(n: int, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> GroupedLinear:
    generator = torch.Generator().manual_seed(n + inputs)
    grouped = GroupedLinear(n, inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in grouped.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return grouped.to(dtype)


def ends_of(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def one_by_one(grouped: GroupedLinear, x: Tensor, sizes: list[int]) -> Tensor:
    parts = []
    for expert, rows in enumerate(x.split(sizes)):
        y = rows @ grouped.weight[expert].t()
        parts.append(y if grouped.bias is None else y + grouped.bias_factor * grouped.bias[expert])
    return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    shape=st.sampled_from([(8, 12), (12, 8), (5, 7), (16, 6)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    bias=st.booleans(),
    equal=st.booleans(),
    surplus=st.integers(0, 3),
)
def test_each_group_of_rows_meets_its_own_matrix(
    sizes: list[int], shape: tuple[int, int], dtype: torch.dtype, bias: bool, equal: bool, surplus: int
):
    """In one kernel, in a loop or as a batched product: rows aligned or not, experts without rows, and rows after the
    last expert's, whose values have no effect."""
    sizes, surplus = ([sizes[0]] * len(sizes), 0) if equal else (sizes, surplus)
    grouped = layer(len(sizes), *shape, dtype, bias=bias)
    x = torch.randn(sum(sizes), shape[0], dtype=dtype, requires_grad=True)
    inputs = [x, *grouped.parameters()]
    gradient = torch.randn(sum(sizes), shape[1], dtype=dtype)
    of_nobody = torch.full((surplus, shape[0]), torch.nan, dtype=dtype)
    found = grouped(torch.cat([x, of_nobody]), None if equal else ends_of(*sizes))[: sum(sizes)]
    expected = one_by_one(grouped, x, sizes)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **tolerance)
    for one, other in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_expert_without_rows_gets_a_gradient_of_zeros(dtype: torch.dtype):
    grouped = layer(3, 8, 8, dtype)
    # A sum's gradient is one number, expanded: torch's grouped product does not take it as it is.
    grouped(torch.ones(4, 8, dtype=dtype), ends_of(1, 0, 3)).sum().backward()
    assert torch.equal(grouped.weight.grad[1], torch.zeros(8, 8, dtype=dtype))
    assert torch.equal(grouped.weight.grad[2], torch.full((8, 8), 3, dtype=dtype))
    assert torch.equal(grouped.bias.grad, torch.tensor([1, 0, 3], dtype=dtype)[:, None].expand(3, 8))


def test_without_any_rows_all_gradients_are_zeros():
    for dtype in (torch.float64, torch.float32):
        grouped = layer(3, 8, 8, dtype)
        grouped(torch.ones(0, 8, dtype=dtype), ends_of(0, 0, 0)).sum().backward()
        assert not grouped.weight.grad.any()
        assert not grouped.bias.grad.any()


def test_parts_of_the_inputs_add_up_with_one_bias():
    whole, x, sizes = layer(3, 8, 4, torch.float64), torch.randn(6, 8, dtype=torch.float64), [1, 2, 3]
    total = torch.zeros(6, 4, dtype=torch.float64)
    for rank in range(2):
        part = layer(3, 8, 4, torch.float64)
        part.weight = torch.nn.Parameter(part.weight.chunk(2, 2)[rank])
        part.bias_factor = 1.0 if rank == 0 else 0.0
        total += part(x.chunk(2, 1)[rank].contiguous(), ends_of(*sizes))
    torch.testing.assert_close(total, whole(x, ends_of(*sizes)), rtol=1e-12, atol=1e-12)


def test_a_view_that_is_not_aligned_is_multiplied_too():
    """As a bucket of parameters may hold it."""
    grouped = layer(2, 8, 8, torch.float32, bias=False)
    flat = torch.empty(1 + grouped.weight.numel())
    flat[1:] = grouped.weight.detach().flatten()
    moved = layer(2, 8, 8, torch.float32, bias=False)
    moved.weight = torch.nn.Parameter(flat[1:].view(2, 8, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(moved(x, ends_of(2, 3)), grouped(x, ends_of(2, 3)))
