"""Expert parallelism: a layer whose experts are dealt out equals the same layer in one process, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.blocks.operator import is_expert
from phalanx.comm.axis import Axis, Ledger, Pending
from phalanx.config.model import ModelConfig, MoE
from phalanx.model import moe as layers
from phalanx.model.transformer import Block
from phalanx.parallel.expert import OverlappedHalves, RowExchange, TokenExchange, connect, cut_experts
from phalanx.partition.tensor_slices import experts_of

assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)

BATCH, SEQ, WIDTH = 2, 5, 8
"""On each rank."""

SWIGLU = ModelConfig(
    n_layers=1, d_model=WIDTH, activation="swiglu", norm="rmsnorm", bias=False, moe=MoE(n_experts=8, top_k=2, d_ff=6)
)
SHARED = replace(SWIGLU, activation="gelu", bias=True, moe=MoE(n_experts=8, top_k=3, d_ff=4, n_shared=2))
BIASED = MoE(n_experts=8, top_k=2, d_ff=4, n_shared=1, router="sigmoid", bias_balanced=True)

CASES: dict[str, tuple[ModelConfig, bool]] = {
    "dropless": (SWIGLU, False),
    "dropless, shared experts and biases": (SHARED, False),
    "sigmoid and a balancing bias": (replace(SWIGLU, moe=BIASED), False),
    "capacity": (replace(SWIGLU, moe=replace(SWIGLU.moe, capacity=0.75)), False),
    "capacity, shared experts and biases": (replace(SHARED, moe=replace(SHARED.moe, capacity=1.25)), False),
    "scaled inputs": (replace(SWIGLU, moe=replace(SWIGLU.moe, scale_inputs=True)), False),
    "one expert a rank": (replace(SHARED, moe=replace(SHARED.moe, n_experts=4)), False),
    "all tokens to the first experts": (SHARED, True),
    "all tokens to the first experts, within capacity": (replace(SHARED, moe=replace(SHARED.moe, capacity=1.0)), True),
}
"""A model, and whether its router sends every token to the same few experts."""


def axis_of(ranks: Any) -> Axis:
    everyone = dist.distributed_c10d._get_default_group()
    return Axis("ep", ranks.world, ranks.rank, everyone, Ledger())


def whole_layer(model: ModelConfig, one_sided: bool, dtype: torch.dtype = torch.float64) -> layers.MixtureOfExperts:
    """The layer as one process has it, the same on every rank."""
    layer = layers.MixtureOfExperts(model, 0, layers.Routing(factor=0.25)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    if one_sided:
        layer.router.weight.data *= 0.01
        layer.router.weight.data[:, 0] = -torch.arange(model.moe.n_experts).to(dtype)
    return layer


def part_of(whole: layers.MixtureOfExperts, ep: Axis, exchange: Any = RowExchange) -> layers.MixtureOfExperts:
    """The same layer with this rank's experts."""
    dtype = whole.router.weight.dtype
    with torch.device("meta"):
        layer = layers.MixtureOfExperts(whole.config, 0, layers.Routing(factor=0.25)).to(dtype)
    cut_experts(layer, ep.size)
    layer.to_empty(device="cpu")
    for (name, parameter), (_, of) in zip(layer.named_parameters(), whole.named_parameters(), strict=True):
        parameter.data.copy_(held(name, of, ep).detach())
    connect(layer, exchange(ep))
    return layer


def held(name: str, whole: Tensor, ep: Axis) -> Tensor:
    if not is_expert(f"moe.{name}"):
        return whole
    mine = experts_of(len(whole), ep.size, ep.rank)
    return whole[mine.start : mine.stop]


def tokens_of_all(world: int) -> tuple[Tensor, Tensor]:
    """The ranks' inputs one after the other, whose first number is positive, and what multiplies the outputs."""
    generator = torch.Generator().manual_seed(world)
    x, weights = torch.randn(2, world * BATCH, SEQ, WIDTH, generator=generator, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 1
    return x, weights


def run(layer: nn.Module | Callable[..., Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and the input's gradient."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def sizes_of(rows: Tensor, ends: Tensor | None, experts: int) -> list[int]:
    """Rows of each expert."""
    return [len(rows) // experts] * experts if ends is None else ends.diff(prepend=ends.new_zeros(1)).tolist()


def watch_sizes(layer: layers.MixtureOfExperts) -> list[list[int]]:
    """What goes to the experts here, a list for each call."""
    seen: list[list[int]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, Any]) -> None:
        rows, ends = inputs
        seen.append(sizes_of(rows, ends, layer.experts.up.experts))
        assert sum(seen[-1]) == len(rows)

    layer.experts.register_forward_pre_hook(note)
    return seen


def compare_with_one_process(ranks: Any, exchange: Any) -> dict[str, list[int]]:
    """Compares every case; returns how many rows each expert here got."""
    ep = axis_of(ranks)
    x, weights = tokens_of_all(ranks.world)
    mine = slice(ranks.rank * BATCH, (ranks.rank + 1) * BATCH)
    loads = {}
    for case, (model, one_sided) in CASES.items():
        whole = whole_layer(model, one_sided)
        part = part_of(whole, ep, exchange)
        seen = watch_sizes(part)
        expected, of_x = run(whole, x, weights)
        y, gradient = run(part, x[mine], weights[mine])
        assert_close(y, expected[mine])
        assert_close(gradient, of_x[mine])
        for (name, parameter), of in zip(part.named_parameters(), whole.parameters(), strict=True):
            assert parameter.grad is not None, (case, name)
            assert of.grad is not None
            if not is_expert(f"moe.{name}"):
                dist.all_reduce(parameter.grad)
            assert_close(parameter.grad, held(name, of.grad, ep))
        for name, parameter in part.experts.named_parameters():
            assert parameter.grad is not None
            idle = torch.tensor(seen[0]) == 0
            assert not parameter.grad[idle].any(), (case, name)
        with torch.no_grad():
            assert torch.equal(part(x[mine]), y)
        loads[case] = seen[0]
    return loads


@pytest.mark.parametrize("exchange", [RowExchange, TokenExchange])
@pytest.mark.parametrize("world", [2, 4])
def test_experts_dealt_out_equal_one_process(ranks, world, exchange):
    """Outputs and every gradient, also where ranks get no rows at all and experts none."""
    loads = ranks(compare_with_one_process, world, exchange)
    one_sided = [size for load in loads for size in load["all tokens to the first experts"]]
    assert one_sided == [BATCH * SEQ * world] * SHARED.moe.top_k + [0] * (8 - SHARED.moe.top_k)
    if exchange is RowExchange:
        assert all(len(set(load["capacity"])) == 1 for load in loads)


def traffic(ranks: Any, capacity: float, recomputed: bool) -> tuple[dict[str, tuple[int, float]], float]:
    """Calls and bytes of every collective in a forward and backward pass, and bytes by counting rows."""
    ep = axis_of(ranks)
    x, weights = tokens_of_all(ranks.world)
    mine = slice(ranks.rank * BATCH, (ranks.rank + 1) * BATCH)
    model = replace(SHARED, moe=replace(SHARED.moe, capacity=capacity))
    part = part_of(whole_layer(model, one_sided=False), ep)
    plain = run(part, x[mine], weights[mine])
    gradients = {
        name: parameter.grad.clone() for name, parameter in part.named_parameters() if parameter.grad is not None
    }
    part.zero_grad()
    ep.ledger.clear()
    chosen: list[list[int]] = []
    dispatch = part.dispatch

    def noted(moe: layers.MixtureOfExperts, routed: layers.RoutedTokens) -> layers.ExpertFlight:
        chosen.append(sizes_of(routed.slots.choices, routed.slots.ends, model.moe.n_experts))
        return dispatch(moe, routed)

    part.dispatch = noted
    again = (lambda x: checkpoint(part, x, use_reentrant=False)) if recomputed else part
    assert all(torch.equal(a, b) for a, b in zip(run(again, x[mine], weights[mine]), plain, strict=True))
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name]), name
    calls = {kind: (entry.calls, entry.sent) for (_, kind), entry in ep.ledger.entries.items()}

    others = [e for rank in range(ep.size) if rank != ep.rank for e in experts_of(8, ep.size, rank)]
    here = experts_of(8, ep.size, ep.rank)
    every: list[list[int]] = ep.gather_json(chosen[0])
    away = sum(chosen[0][e] for e in others)
    arrived = sum(every[rank][e] for rank in range(ep.size) if rank != ep.rank for e in here)
    row = WIDTH * x.element_size()
    return calls, (away + arrived) * row


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_sends_rows_to_other_ranks_and_back_and_their_gradients(ranks, world, recomputed):
    """Two all-to-alls forward and two backward; forward again where it is recomputed. Sizes of experts are 8 bytes
    each; a capacity makes them known beforehand."""
    passes = 2 if recomputed else 1
    for calls, there_and_back in ranks(traffic, world, 0.0, recomputed):
        assert there_and_back > 0
        assert calls["all_to_all"] == (2 * passes + 2, (passes + 1) * there_and_back)
        assert calls["all_gather"] == (passes, passes * 8 * 8 * (world - 1))
        assert set(calls) == {"all_to_all", "all_gather"}
    for calls, there_and_back in ranks(traffic, world, 1.0, recomputed):
        assert calls == {"all_to_all": (2 * passes + 2, (passes + 1) * there_and_back)}


class WatchedAxis(Axis):
    """Notes when an all-to-all begins and when it is waited for."""

    events: list[str]

    def all_to_all(self, *args: Any, **kwargs: Any) -> Pending:
        self.events.append("start")
        return WatchedPending(super().all_to_all(*args, **kwargs), self.events)


class WatchedPending:
    def __init__(self, pending: Pending, events: list[str]):
        self.pending, self.events = pending, events

    def wait(self) -> None:
        self.pending.wait()
        self.events.append("wait")


def order_of_events(ranks: Any) -> tuple[list[str], list[str]]:
    """What happens one after the other in the forward pass and in the backward pass."""
    ep = WatchedAxis("ep", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())
    ep.events = []
    x, _ = tokens_of_all(ranks.world)
    part = part_of(whole_layer(SHARED, one_sided=False), ep)
    assert part.shared is not None
    for name, module in (("shared", part.shared), ("experts", part.experts)):
        module.register_forward_hook(lambda *_, name=name: ep.events.append(name))
        for parameter in module.parameters():
            parameter.register_hook(lambda _, name=name: ep.events.append(name))
    y = part(x[:BATCH].requires_grad_())
    forward = ep.events.copy()
    ep.events.clear()
    y.sum().backward()
    return forward, [event for event, _ in groupby(ep.events)]


def test_shared_experts_compute_while_rows_travel(ranks):
    for forward, backward in ranks(order_of_events, 2):
        assert forward == ["start", "shared", "wait", "experts", "start", "wait"]
        assert backward == ["start", "wait", "experts", "start", "shared", "wait"]


def order_in_halves(ranks: Any, exchange: Any) -> tuple[list[str], list[str]]:
    """What happens one after the other in both passes of a block whose halves overlap."""
    ep = WatchedAxis("ep", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())
    ep.events = []
    block = Block(replace(SHARED, n_heads=2, seq_len=SEQ), 0, layers.Routing())
    moe = block.get_submodule("moe")
    assert isinstance(moe, layers.MixtureOfExperts)
    assert moe.shared is not None
    cut_experts(block, ep.size)
    for part in moe.experts.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.zeros(parameter.shape)))
    connect(block, exchange(ep))
    for name, module in (("attention", block.attn), ("shared", moe.shared), ("experts", moe.experts)):
        module.register_forward_hook(lambda *_, name=name: ep.events.append(name))
        module.register_full_backward_hook(lambda *_, name=name: ep.events.append(name))
    y = OverlappedHalves(block)(torch.randn(2, SEQ, WIDTH).requires_grad_(), None, None, None, None, None)
    forward = len(ep.events)
    y.sum().backward()
    return ep.events[:forward], ep.events[forward:]


@pytest.mark.parametrize("exchange", [RowExchange, TokenExchange])
def test_one_half_of_a_micro_batch_computes_while_the_other_travels(ranks, exchange):
    """TokenExchange has the experts' numbers travel beside the tokens, which have no gradient."""
    start, wait = (["start"], ["wait"]) if exchange is RowExchange else (["start", "start"], ["wait", "wait"])
    half = ["experts", "start", "shared"]
    for forward, backward in ranks(order_in_halves, 2, exchange):
        assert forward == ["attention", *start, "attention", *start, *wait, *half, *wait, *half, "wait", "wait"]
        back = ["shared", "wait", "experts", "start"]
        assert backward == ["start", "start", *back, *back, "wait", "attention", "wait", "attention"]


def saved_outside_experts(ranks: Any) -> tuple[int, int]:
    """Tensors kept for the backward pass by the experts, routed and shared, and by what lies between."""
    ep = axis_of(ranks)
    part = part_of(whole_layer(SHARED, one_sided=False), ep)
    assert part.shared is not None
    inside, counts = [False], {True: 0, False: 0}
    for module in (part.experts, part.shared):
        module.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
        module.register_forward_hook(lambda *_: inside.__setitem__(0, False))

    def pack(x: Tensor) -> Tensor:
        counts[inside[0]] += 1
        return x

    rows = torch.randn(16, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        slots = layers.Slots(rows, rows, torch.arange(2, 18, 2).int(), None)
        flight = RowExchange(ep)._start(part, layers.RoutedTokens(rows, rows, rows, slots), rows)
        part.shared(rows)
        flight.compute()
        flight.arrived()
    return counts[True], counts[False]


def test_the_exchange_keeps_nothing_for_the_backward_pass(ranks):
    for inside, outside in ranks(saved_outside_experts, 2):
        assert inside > 0
        assert outside == 0


def half_precision(ranks: Any) -> None:
    x, weights = tokens_of_all(ranks.world)
    x, weights = x.bfloat16(), weights.bfloat16()
    mine = slice(ranks.rank * BATCH, (ranks.rank + 1) * BATCH)
    whole = whole_layer(SHARED, one_sided=False, dtype=torch.bfloat16)
    expected = run(whole, x, weights)
    for found, of_all in zip(run(part_of(whole, axis_of(ranks)), x[mine], weights[mine]), expected, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, of_all[mine], rtol=0.05, atol=0.05 * float(of_all.abs().max()))


def test_rows_travel_in_half_precision(ranks):
    ranks(half_precision, 2)


def test_a_rank_holds_its_run_of_experts_of_the_width_that_tensor_parallelism_left():
    with torch.device("meta"):
        layer = layers.MixtureOfExperts(SHARED, 0, layers.Routing()).bfloat16()
        layer.experts.up.weight = nn.Parameter(torch.empty(8, 2, WIDTH, dtype=torch.bfloat16))
    before = {name: parameter.shape for name, parameter in layer.named_parameters()}
    cut_experts(layer, 4)
    for name, parameter in layer.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype == torch.bfloat16
        experts = (2,) if is_expert(f"moe.{name}") else before[name][:1]
        assert parameter.shape == (*experts, *before[name][1:]), name
