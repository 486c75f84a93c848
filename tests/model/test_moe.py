"""Mixtures of experts: routing, balance, and how their rows move."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.functional import gelu, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from model.kinds import MOE_AND_MLA, build, tokens
from phalanx.config.model import ModelConfig, MoE
from phalanx.model import moe
from phalanx.model import moe as under_test
from phalanx.model.documents import Conversations
from phalanx.model.moe import GroupedLinear, MixtureOfExperts, Routing, Sequences
from phalanx.model.seeding import initialise
from train.measured_memory import tensors_in

_LLAMA = replace(MOE_AND_MLA["mixtral"], d_model=8)
_SIGMOID = MoE(
    n_experts=8, top_k=3, d_ff=8, n_shared=2, router="sigmoid", route_scale=2.5, n_groups=4, top_groups=2, aux_loss=0.3
)
LAYERS: dict[str, ModelConfig] = {
    "softmax": replace(_LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=8, aux_loss=0.2, z_loss=0.1)),
    "not renormalised": replace(_LLAMA, moe=MoE(n_experts=4, top_k=1, d_ff=8, renormalise=False, route_scale=1.5)),
    "with a bias": replace(_LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=8, bias_balanced=True, z_loss=0.1)),
    "sigmoid, groups, shared": replace(_LLAMA, moe=replace(_SIGMOID, bias_balanced=True)),
    "one expert a group": replace(_LLAMA, moe=replace(_SIGMOID, n_groups=8, top_groups=5)),
    "gelu and biases": replace(
        MOE_AND_MLA["gpt2 with experts"], d_model=8, moe=MoE(n_experts=3, d_ff=6, n_shared=1, aux_loss=0.1)
    ),
    "capacity": replace(_LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=8, capacity=1.0, aux_loss=0.2)),
    "little capacity": replace(_LLAMA, moe=replace(_SIGMOID, capacity=0.4, bias_balanced=True, z_loss=0.1)),
    "more capacity than tokens": replace(_LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=8, capacity=9.0)),
}
layers = pytest.mark.parametrize("model", LAYERS.values(), ids=LAYERS.keys())


def layer(
    model: ModelConfig, routing: Routing | None = None, dtype: torch.dtype = torch.float64
) -> under_test.MixtureOfExperts:
    """With weights large enough for a mistake to show."""
    made = under_test.MixtureOfExperts(model, 1, routing or Routing())
    initialise(nn.ModuleDict({"blocks": nn.ModuleDict({"1": nn.ModuleDict({"moe": made})})}), model, 1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.4)
    return made.to(dtype)


def inputs(batch: int = 3, seq: int = 10) -> Tensor:
    return torch.randn(batch, seq, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def gradients(made: under_test.MixtureOfExperts, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    named = dict(made.named_parameters())
    found = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True)
    return {
        name: torch.zeros_like(of) if gradient is None else gradient
        for (name, of), gradient in zip([("x", x), *named.items()], found, strict=True)
    }


@layers
@pytest.mark.parametrize("factor", [0.0, 0.37])
def test_outputs_and_gradients_equal_a_reference_written_in_loops(model: ModelConfig, factor: float):
    made, x = layer(model), inputs().requires_grad_()
    weights = torch.randn_like(x)
    expected, penalty, counts = reference(made, x)
    made.routing.factor = factor
    out = made(x)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    found = gradients(made, x, (out * weights).sum())
    wanted = gradients(made, x, (expected * weights).sum() + factor * sum(penalty.values()))
    bias = found.pop("router.bias", None)
    wanted.pop("router.bias", None)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    assert made.routing.loads[1].tolist() == counts
    assert sum(counts) == x.shape[0] * x.shape[1] * model.moe.top_k
    assert made.routing.penalties.keys() == penalty.keys()
    for name, value in penalty.items():
        torch.testing.assert_close(made.routing.penalties[name], value.detach(), rtol=1e-9, atol=1e-9)
    if bias is not None:
        mean = sum(counts) / len(counts)
        assert torch.equal(bias.sign(), torch.tensor([(c > mean) - (c < mean) for c in counts]) * bool(factor))


def reference(made: under_test.MixtureOfExperts, x: Tensor) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """What the layer makes of `x`, its penalties by name, and how many tokens chose each expert: token by token."""
    model, moe = made.config, made.config.moe
    per_group = moe.n_experts // moe.n_groups
    seq = x.shape[1]
    capacity = math.ceil(moe.capacity * seq * moe.top_k / moe.n_experts - 1e-9) if moe.capacity else seq
    aux, z, counts, out = x.new_zeros(()), x.new_zeros(()), [0] * moe.n_experts, []
    dropped = x.new_zeros(())
    for sequence in x:
        queue, shares = [0] * moe.n_experts, []
        for token in sequence:
            logits = made.router.weight @ token
            scores = logits.sigmoid() if moe.router == "sigmoid" else logits.exp() / logits.exp().sum()
            z = z + moe.z_loss * logits.exp().sum().log() ** 2
            shares.append(scores / scores.sum())
            ranked = (scores if made.router.bias is None else scores + made.router.bias).tolist()
            of_group = [
                sum(sorted(ranked[group * per_group : (group + 1) * per_group])[-2:]) for group in range(moe.n_groups)
            ]
            kept = sorted(range(moe.n_groups), key=of_group.__getitem__)[-moe.top_groups :]
            legal = [expert for expert in range(moe.n_experts) if expert // per_group in kept]
            chosen = sorted(legal, key=ranked.__getitem__)[-moe.top_k :]
            total = sum(scores[expert] for expert in chosen) if moe.renormalise else 1
            y = torch.zeros_like(token)
            for expert in chosen:
                if queue[expert] < capacity:
                    gate = scores[expert] / total * moe.route_scale
                    y = y + gate * mlp(model, made.experts, token, expert)
                queue[expert] += 1
            out.append(y if made.shared is None else y + mlp(model, made.shared, token, None))
        mean = torch.stack(shares).mean(0)
        for expert, count in enumerate(queue):
            counts[expert] += count
            dropped = dropped + max(0, count - capacity)
            aux = aux + seq * moe.aux_loss * moe.n_experts / (moe.top_k * seq) * count * mean[expert]
    penalties = {name: value for name, value in (("aux_loss", aux), ("z_loss", z)) if getattr(moe, name)}
    penalties |= {"dropped": dropped} if moe.capacity else {}
    return torch.stack(out).view_as(x), penalties, counts


def mlp(model: ModelConfig, part: torch.nn.Module, token: Tensor, expert: int | None) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        each = getattr(part, name)
        weight, bias = (p if p is None or expert is None else p[expert] for p in (each.weight, each.bias))
        return weight @ x if bias is None else weight @ x + bias

    wide = linear("up", token)
    if model.activation == "swiglu":
        return linear("down", silu(linear("gate", token)) * wide)
    return linear("down", gelu(wide, approximate="tanh"))


@layers
def test_lower_precision_stays_near(model: ModelConfig):
    """Through torch's grouped product."""
    exact, x = layer(model)(inputs()), inputs().float()
    found = layer(model, dtype=torch.float32)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@layers
def test_nothing_depends_on_how_the_batch_is_split(model: ModelConfig):
    whole, parts = layer(model), layer(model)
    for made in (whole, parts):
        made.routing.factor = 1 / 40
    x = inputs(4)
    whole(x).square().sum().backward()
    for part in x.split([1, 3]):
        parts(part).square().sum().backward()
    assert torch.equal(whole.routing.loads[1], parts.routing.loads[1])
    for name, penalty in whole.routing.penalties.items():
        torch.testing.assert_close(parts.routing.penalties[name], penalty, rtol=1e-12, atol=1e-12)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    if whole.router.bias is not None:
        assert torch.equal(whole.router.bias.grad, parts.router.bias.grad)


class _Half(Sequences):
    """One of two ranks that hold halves of sequences, told what the other holds."""

    def __init__(self, which: int, chosen: Tensor, counts: Tensor):
        self.chosen, self.which, self.summed = chosen, which, counts

    def sum(self, x: Tensor) -> Tensor:
        assert x.shape == self.summed.shape
        return self.summed

    def whole(self, x: Tensor) -> Tensor:
        assert torch.equal(x, self.mine(self.chosen))
        return self.chosen

    def mine(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[self.which]


@layers
def test_nothing_depends_on_how_sequences_are_split(model: ModelConfig):
    whole, x = layer(model, Routing(factor=1 / 40)), inputs()
    out = whole(x)
    out.square().sum().backward()
    chosen = whole.route(x).chosen
    routing = Routing(factor=1 / 40)
    part, outs = layer(model, routing), []
    for which, here in enumerate(x.chunk(2, 1)):
        counts = torch.stack([row.flatten().bincount(minlength=model.moe.n_experts) for row in chosen])
        routing.sequences = _Half(which, chosen, counts)
        outs.append(part(here))
        outs[-1].square().sum().backward()
    torch.testing.assert_close(torch.cat(outs, 1), out, rtol=1e-9, atol=1e-9)
    for (name, one), other in zip(whole.named_parameters(), part.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other[1].grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_share_of_the_penalties_gradients():
    x = inputs()
    found = []
    for share in (1.0, 0.25, 0.0):
        made = layer(LAYERS["softmax"], Routing(factor=2.0, share=share))
        made(x).sum().backward()
        found.append(made.router.weight.grad)
    torch.testing.assert_close(found[1] - found[2], (found[0] - found[2]) / 4, rtol=1e-9, atol=1e-9)
    assert (found[0] - found[2]).abs().max() > 1e-3


def test_the_bias_decides_who_is_chosen_but_not_with_what_gate():
    made, x = layer(LAYERS["with a bias"]), inputs()
    with torch.no_grad():
        made.router.bias.copy_(torch.tensor([0.0, 100.0, 100.0, 0.0]))
        routes = made.route(x)
        logits = made.router(x)
    assert routes.chosen.sort(-1).values.unique(dim=0).view(-1, 2).unique(dim=0).tolist() == [[1, 2]]
    scores = logits.softmax(-1).gather(-1, routes.chosen)
    torch.testing.assert_close(routes.gates, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("factor", [1 / 30, 1 / 4096, 65536 / 30, 0.75])
def test_the_bias_gradient_is_the_excess_load_times_a_power_of_two(factor: float):
    made = layer(LAYERS["with a bias"], Routing(factor=factor))
    made(inputs()).sum().backward()
    load = made.routing.loads[1]
    excess = 4 * load - 2 * 30
    unit = {(gradient / count).item() for gradient, count in zip(made.router.bias.grad, excess, strict=True) if count}
    (power,) = unit
    assert math.frexp(power)[0] == 0.5
    assert factor / 4 <= power * 4 <= 2 * factor


def test_equal_loads_leave_the_bias_alone():
    made = layer(LAYERS["with a bias"], Routing(factor=0.1))
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[:, :4] = torch.eye(4)
        made.router.bias.zero_()
    x = torch.zeros(1, 4, 8, dtype=torch.float64)
    x[0, :, :4] = torch.tensor([[2, 1, 0, 0], [0, 2, 1, 0], [0, 0, 2, 1], [1, 0, 0, 2]])
    made(x).sum().backward()
    assert made.routing.loads[1].tolist() == [2, 2, 2, 2]
    assert not made.router.bias.grad.any()


def test_scores_that_round_to_zero_make_no_nan():
    made = layer(LAYERS["sigmoid, groups, shared"], Routing(factor=1.0), torch.float32)
    with torch.no_grad():
        made.router.weight.fill_(-100.0)
    out = made(torch.ones(1, 3, 8))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


def test_recomputation_notes_once():
    model = MOE_AND_MLA["deepseek"]
    plain, recomputed, batch = build(model), build(model), tokens(model, 2, 10)
    for block in recomputed.blocks.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    for transformer in (plain, recomputed):
        transformer.routing.factor = 0.05
        transformer(batch).square().sum().backward()
    assert plain.routing.loads.keys() == recomputed.routing.loads.keys() == {1}  # layer 0 is dense
    assert torch.equal(plain.routing.loads[1], recomputed.routing.loads[1])
    assert plain.routing.penalties == recomputed.routing.penalties
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_nothing_is_noted_without_a_backward_pass():
    made = layer(LAYERS["softmax"])
    with torch.no_grad():
        made(inputs())
    made(inputs())
    assert made.routing.loads == {}
    assert made.routing.penalties == {}
    made(inputs()).sum().backward()
    assert made.routing.loads
    assert made.routing.penalties
    made.routing.clear()
    assert made.routing.loads == {}
    assert made.routing.penalties == {}


def test_several_threads_may_note_at_once():
    routing = Routing()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(400):
            pool.submit(routing.note, 3, torch.tensor([1, 2]), {"z_loss": torch.tensor(0.5)})
    assert routing.loads[3].tolist() == [400, 800]
    assert routing.penalties["z_loss"].item() == 200


def test_what_is_over_capacity_keeps_its_other_experts():
    """Four tokens that all choose experts 0 and 1, which take ceil(0.5 × 4 × 2 / 4) = 1 token each."""
    model = replace(_LLAMA, moe=MoE(n_experts=4, top_k=2, d_ff=8, capacity=0.5, n_shared=1))
    made = layer(model)
    x = inputs(1, 1).expand(2, 4, 8)
    slots = made.slots(made.route(x).chosen)
    assert slots.ends is None  # as many rows for every expert:
    assert len(slots.choices) == 4 * 2  # one for each sequence, filled or not
    assert sorted(slots.choices.tolist()) == [0, 1, 8, 9, 16, 16, 16, 16]  # of 16 choices the first tokens'
    out = made(x)
    torch.testing.assert_close(out[:, 1:], made.shared(x[:, 1:]), rtol=1e-12, atol=1e-12)
    assert (out[:, 0] - made.shared(x[:, 0])).abs().max() > 1e-3


@layers
def test_a_future_token_changes_no_past_output(model: ModelConfig):
    made, x = layer(model), inputs()
    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(made(x)[:, :6], made(changed)[:, :6], rtol=0, atol=1e-13)


LENGTHS = 4, 7, 1, 5
"""Tokens of some conversations."""


def _rows(*samples: tuple[int, ...], width: int) -> tuple[Tensor, Conversations]:
    """The inputs of the conversations of each sample one after another and then padding, (samples, width, 8), and their
    numbers."""
    each = inputs(1, sum(LENGTHS))[0].split(LENGTHS)
    x, numbers = torch.full((len(samples), width, 8), 3.0, dtype=torch.float64), torch.full((len(samples), width), -1)
    for row, sample in enumerate(samples):
        own = torch.cat([each[number] for number in sample])
        x[row, : len(own)] = own
        numbers[row, : len(own)] = torch.cat([torch.full((LENGTHS[n],), place) for place, n in enumerate(sample)])
    return x, Conversations(numbers, max(map(len, samples)))


@layers
@pytest.mark.parametrize("halved", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize(
    ("samples", "width"),
    [([(0,), (1,), (2,), (3,)], 8), ([(0,), (1,), (2,), (3,)], 32), ([(1, 3), (0, 2)], 12), ([(0, 1, 2, 3)], 40)],
    ids=["padded", "more padding", "packed", "one sample"],
)
def test_padding_and_packing_change_nothing(model: ModelConfig, samples, width: int, halved: bool):
    alone, together = layer(model, Routing(factor=1 / 40)), layer(model, Routing(factor=1 / 40))
    outs = [alone(x[None]) for x in inputs(1, sum(LENGTHS))[0].split(LENGTHS)]
    sum((out**2).sum() for out in outs).backward()

    x, conversations = _rows(*samples, width=width)
    found = []
    chosen = together.route(x).chosen
    for which, places in enumerate(torch.arange(width).chunk(2) if halved else [slice(None)]):
        here = conversations.at(places)
        if halved:
            together.routing.sequences = _Half(which, chosen, conversations.counts(chosen, model.moe.n_experts))
        found.append(together(x[:, places], here))
        (found[-1][here.real] ** 2).sum().backward()
    of_each = torch.cat(found, 1)[conversations.real].split([LENGTHS[n] for sample in samples for n in sample])
    for number, out in zip([n for sample in samples for n in sample], of_each, strict=True):
        torch.testing.assert_close(out, outs[number][0], rtol=1e-9, atol=1e-9)
    for (name, one), other in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)
    assert torch.equal(together.routing.loads[1], alone.routing.loads[1])
    for name, penalty in alone.routing.penalties.items():
        torch.testing.assert_close(together.routing.penalties[name], penalty, rtol=1e-12, atol=1e-12)


# Rows of a mixture of experts move by gathers alone, both ways, and the host waits for no count of them.

D_MODEL, TOKENS, TOP_K = 16, 32, 3
MODEL = ModelConfig(
    n_layers=1,
    d_model=D_MODEL,
    n_heads=2,
    seq_len=TOKENS // 2,
    activation="swiglu",
    bias=True,
    moe=MoE(n_experts=6, top_k=TOP_K, d_ff=24, n_shared=1, aux_loss=0.1, z_loss=0.1),
)
CAPACITY = replace(MODEL, moe=replace(MODEL.moe, capacity=1.0))


def backward_of(model: ModelConfig, dtype: torch.dtype, *, padded: bool) -> None:
    """Runs a layer forward and backward, with padding or without."""
    moe._capacities.cache_clear()
    torch.set_default_dtype(dtype)  # fake parameters cannot be converted
    try:
        layer = MixtureOfExperts(model, 0, Routing(factor=1.0))
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.randn(2, TOKENS // 2, D_MODEL, dtype=dtype, requires_grad=True)
    layer(x, Conversations(torch.zeros(2, TOKENS // 2).long(), 2) if padded else None).sum().backward()
    moe._capacities.cache_clear()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model", [MODEL, CAPACITY], ids=["dropless", "capacity"])
def test_the_host_reads_no_number_of_the_device(model, padded):
    """Tensors without values: whatever the host would read raises, as fp64's products do."""
    with FakeTensorMode():
        backward_of(model, torch.bfloat16, padded=padded)
    if not model.moe.capacity:
        with FakeTensorMode(), pytest.raises(DataDependentOutputException):
            backward_of(model, torch.float64, padded=padded)


class Moved(TorchDispatchMode):
    """Numbers that operations on rows of d_model read and write; a gather reads no more than it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tensors_in(each) if _is_rows(t)] for each in ((args, kwargs), result))
        if not func.is_view and (read or written):
            name = func._schema.name.removeprefix("aten::")
            self.names.add(name)
            taken = {
                "index_select": getattr(result, "numel", int),
                "_embedding_bag_forward_only": lambda: args[1].numel() * D_MODEL,
                "_embedding_bag_per_sample_weights_backward": lambda: 2 * args[2].numel() * D_MODEL,
            }
            self.numbers += taken.get(name, lambda: sum(t.numel() for t in read))() + sum(t.numel() for t in written)
        return result


def _is_rows(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[-1] == D_MODEL


def test_rows_are_gathered_both_ways():
    """Forward each row is read and written, and then read for its token's sum. Backward the sum's gradient is read
    for each row and written times its gate, both are read for the gate, and the rows' gradients are read for their
    tokens'."""
    layer = MixtureOfExperts(MODEL, 0, Routing(factor=1.0))
    tokens, gates = torch.randn(TOKENS, D_MODEL, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    chosen = torch.rand(2, TOKENS // 2, MODEL.moe.n_experts).topk(TOP_K).indices
    row, token = TOKENS * TOP_K * D_MODEL, TOKENS * D_MODEL
    with Moved() as moved:
        slots = layer.slots(chosen)
        rows = moe.SpreadTokens.apply(tokens, slots.choices, slots.rows, None, slots.kept)
        out = moe.Combine.apply(rows, gates, slots.choices, slots.rows)
    assert moved.numbers == 2 * row + row + token
    gradient = torch.ones_like(out)
    with Moved() as moved:
        torch.autograd.grad(out, (tokens, gates), gradient)
    assert moved.numbers == 2 * row + 2 * row + row + token


@pytest.mark.parametrize("model", [MODEL, CAPACITY], ids=["dropless", "capacity"])
def test_nothing_is_added_to_rows_by_index(model):
    with Moved() as moved:
        backward_of(model, torch.float32, padded=True)
    assert "index_select" in moved.names
    assert not any(word in name for name in moved.names for word in ("scatter", "index_add", "index_put"))


def single_layer(n: int, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> GroupedLinear:
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
    grouped = single_layer(len(sizes), *shape, dtype, bias=bias)
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
    grouped = single_layer(3, 8, 8, dtype)
    # A sum's gradient is one number, expanded: torch's grouped product does not take it as it is.
    grouped(torch.ones(4, 8, dtype=dtype), ends_of(1, 0, 3)).sum().backward()
    assert torch.equal(grouped.weight.grad[1], torch.zeros(8, 8, dtype=dtype))
    assert torch.equal(grouped.weight.grad[2], torch.full((8, 8), 3, dtype=dtype))
    assert torch.equal(grouped.bias.grad, torch.tensor([1, 0, 3], dtype=dtype)[:, None].expand(3, 8))


def test_without_any_rows_all_gradients_are_zeros():
    for dtype in (torch.float64, torch.float32):
        grouped = single_layer(3, 8, 8, dtype)
        grouped(torch.ones(0, 8, dtype=dtype), ends_of(0, 0, 0)).sum().backward()
        assert not grouped.weight.grad.any()
        assert not grouped.bias.grad.any()


def test_parts_of_the_inputs_add_up_with_one_bias():
    whole, x, sizes = single_layer(3, 8, 4, torch.float64), torch.randn(6, 8, dtype=torch.float64), [1, 2, 3]
    total = torch.zeros(6, 4, dtype=torch.float64)
    for rank in range(2):
        part = single_layer(3, 8, 4, torch.float64)
        part.weight = torch.nn.Parameter(part.weight.chunk(2, 2)[rank])
        part.bias_factor = 1.0 if rank == 0 else 0.0
        total += part(x.chunk(2, 1)[rank].contiguous(), ends_of(*sizes))
    torch.testing.assert_close(total, whole(x, ends_of(*sizes)), rtol=1e-12, atol=1e-12)


def test_a_view_that_is_not_aligned_is_multiplied_too():
    """As a bucket of parameters may hold it."""
    grouped = single_layer(2, 8, 8, torch.float32, bias=False)
    flat = torch.empty(1 + grouped.weight.numel())
    flat[1:] = grouped.weight.detach().flatten()
    moved = single_layer(2, 8, 8, torch.float32, bias=False)
    moved.weight = torch.nn.Parameter(flat[1:].view(2, 8, 8))
    x = torch.randn(5, 8)
    torch.testing.assert_close(moved(x, ends_of(2, 3)), grouped(x, ends_of(2, 3)))
