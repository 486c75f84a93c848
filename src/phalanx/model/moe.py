"""Mixture of experts: a router sends each token to a few of many experts and combines their outputs.

Load balancing is here too: an auxiliary loss, a balancing bias, a capacity. Each is defined per token, or per sequence
and, where sequences hold conversations, per conversation: so that it does not depend on how a batch is split over ranks
or micro-batches, nor on packing. Padding counts nowhere.

Only in fp64, for which torch has no grouped product, does the host wait for the device to count an expert's rows.

Shapes: batch, seq (tokens of a sequence on this rank), top_k (experts per token), rows (tokens routed to experts, in
the order of experts), d_model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig, MoE
from phalanx.model.documents import Conversations
from phalanx.model.layers import MLP, Activation, Linear, Run, RunCheap, run, uncompiled

Ends = Tensor | None
"""The end of each expert's rows, (experts,) of int32, on the device; None if all have equally many. Rows after the last
end are nobody's: what they become is undefined."""


class Experts(nn.Module):
    """The routed experts: `up`, `down` and perhaps `gate`, as in an MLP, stacked along a leading dimension.

    The weights' shapes give the number of experts, so that a rank that holds only some of them runs the same code. A
    layout may replace `run_cheap`, which calls the activation, and `run_hidden`, which calls `hidden`."""

    run_cheap: RunCheap = staticmethod(run)
    run_hidden: Run = staticmethod(run)

    def __init__(self, model: ModelConfig):
        super().__init__()
        n, width = model.moe.n_experts, model.expert_ff_size
        self.activate = Activation(model)
        self.up = GroupedLinear(n, model.d_model, width, bias=model.bias)
        gated = model.gated
        self.gate = GroupedLinear(n, model.d_model, width, bias=model.bias) if gated else None
        self.down = GroupedLinear(n, width, model.d_model, bias=model.bias)

    def forward(self, rows: Tensor, ends: Ends) -> Tensor:
        """Applies the experts to rows (rows, d_model), sorted by expert; the output has the same shape."""
        return self.down(self.run_hidden(self.hidden, rows, ends), ends)

    def hidden(self, rows: Tensor, ends: Ends) -> Tensor:
        """Returns what the last matrices read, (rows, width)."""
        wide = self.up(rows, ends)
        gate = None if self.gate is None else self.gate(rows, ends)
        return self.run_cheap(self.activate, wide, gate)


class GroupedLinear(nn.Module):
    """A linear layer for each expert: weight (experts, outputs, inputs), bias (experts, outputs) or None."""

    bias_factor: float = 1.0
    """Multiplies the bias. If ranks hold parts of the inputs and their outputs are summed, one of them has 1 and the
    others 0."""

    product: Callable[[Ends, int], GroupedProduct]
    """Makes the product for rows that end so, and a number of experts."""

    take: Callable[[Tensor, GroupedProduct, Tensor, Tensor], None] | None = None
    """Takes the factors of the weight's gradient (weight, product, gradient of the output, rows) if autograd does
    not."""

    def __init__(self, n: int, inputs: int, outputs: int, *, bias: bool):
        super().__init__()
        self.product = GroupedProduct
        self.experts = n
        """Experts whose matrices are here."""
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(n, outputs)) if bias else None
        self.lora_a: GroupedLinear | None = None
        self.lora_b: GroupedLinear | None = None
        """The experts' adapters, if there are any, as those of a Linear."""
        self.lora_scale = 1.0

    def add_adapter(self, rank: int, scale: float) -> None:
        """Adds an adapter for each expert, whose output is multiplied by `scale`."""
        n, outputs, inputs = self.weight.shape
        self.lora_a = GroupedLinear(n, inputs, rank, bias=False)
        self.lora_b = GroupedLinear(n, rank, outputs, bias=False)
        self.lora_scale = scale

    @uncompiled
    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """Maps rows (rows, inputs), sorted by expert, to (rows, outputs)."""
        y = self._without_adapter(x, ends)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.lora_b(self.lora_a(x, ends) * self.lora_scale, ends)

    def _without_adapter(self, x: Tensor, ends: Ends) -> Tensor:
        # Where rows of all experts are sharded they have one dimension (parallel/fsdp.py).
        weight = self.weight.view(self.experts, -1, self.weight.shape[-1])
        product = self.product(ends, self.experts)
        if self.take is None or not self.weight.requires_grad:
            y: Tensor = _Product.apply(x, weight, product)
        else:
            # Detached: otherwise autograd would expect a gradient here.
            y = _Product.apply(x, weight.detach(), product, partial(self.take, self.weight))
        return y if self.bias is None else add_bias(y, self.bias * self.bias_factor, ends)


def add_bias(y: Tensor, bias: Tensor, ends: Ends) -> Tensor:
    """Returns rows `y` (rows, outputs), sorted by expert, with their experts' `bias` (experts, outputs)."""
    return _AddBias.apply(y, bias, GroupedProduct(ends, len(bias)))


@dataclass(frozen=True)
class GroupedProduct:
    """The product of each expert's rows and its weight, with the products of its backward pass: batched if every expert
    has the same number of rows, else in one kernel; in fp64 one after the other."""

    ends: Ends
    experts: int

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns (rows, outputs) from rows (rows, inputs) and weights (experts, outputs, inputs)."""
        if self.ends is None:
            y = x.new_empty(len(x), weight.shape[1])
            torch.bmm(self._each(x), weight.transpose(1, 2), out=self._each(y))
            return y
        if _one_kernel(x):
            return F.grouped_mm(_fit(x), _fit(weight).transpose(1, 2), offs=self.ends)[:, : weight.shape[1]]
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _rows(self.ends):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the rows from the gradient of the output, (rows, outputs)."""
        return self(gradient, weight.transpose(1, 2))

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the weights: zeros for experts without rows."""
        if self.ends is None:
            return torch.bmm(self._each(gradient).transpose(1, 2), self._each(x))
        outputs, inputs = gradient.shape[1], x.shape[1]
        if _one_kernel(x):
            found = F.grouped_mm(_fit(gradient).t(), _fit(x), offs=self.ends)
            return found[:, :outputs, :inputs]
        found = x.new_zeros(self.experts, outputs, inputs)
        for expert, rows in _rows(self.ends):
            torch.mm(gradient[rows].t(), x[rows], out=found[expert])
        return found

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Returns the sum of each expert's rows of `gradient`, (experts, outputs)."""
        if self.ends is None:
            return self._each(gradient).sum(1)
        # In the same order in every run, as an index_add on a GPU is not.
        rows = torch.arange(len(gradient), device=gradient.device, dtype=self.ends.dtype)
        return F.embedding_bag(rows, gradient, F.pad(self.ends, (1, 0)), mode="sum")[:-1]  # not rows of nobody

    def expert_of_rows(self, rows: int) -> Tensor:
        """Returns the expert of each row; the last one's for rows after the last end."""
        assert self.ends is not None, "equally many rows need none"
        number = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, number, right=True).clamp_(max=self.experts - 1)

    def _each(self, rows: Tensor) -> Tensor:
        return rows.view(self.experts, len(rows) // self.experts, rows.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        product: GroupedProduct,
        take: Callable[[GroupedProduct, Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        # Frozen weights have no gradient, for which alone the rows are needed.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] or take is not None else None, weight)
        ctx.product, ctx.take = product, take
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        product: GroupedProduct = ctx.product
        need_x, need_weight, *_ = ctx.needs_input_grad
        if ctx.take is not None:
            ctx.take(product, gradient, x)
        of_weight = product.weight_gradient(gradient, x) if need_weight else None
        return product.input_gradient(gradient, weight) if need_x else None, of_weight, None, None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, product: GroupedProduct) -> Tensor:
        ctx.product = product
        if product.ends is None:
            return (product._each(y) + bias.unsqueeze(1)).view_as(y)
        return y + bias.index_select(0, product.expert_of_rows(len(y)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        of_bias = ctx.product.bias_gradient(gradient.contiguous()) if ctx.needs_input_grad[1] else None
        return gradient, of_bias, None


_ALIGNMENT = 16
"""Alignment in bytes that torch's grouped product requires of every row of its factors. It requires none of the numbers
of rows: rows lie one after the other in both factors, also where they are what is summed over."""


def _one_kernel(x: Tensor) -> bool:
    """Returns whether torch multiplies all groups in one call: not in fp64, nor without rows."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and len(x) > 0


def _fit(factor: Tensor) -> Tensor:
    """Returns a factor (..., columns) as torch's grouped product takes it: with zeros in further columns, and for
    experts in further rows, where their bytes are not aligned."""
    unit = _ALIGNMENT // factor.element_size()
    more = [end for size in factor.shape[:0:-1] for end in (0, -size % unit)]
    if any(more):
        return F.pad(factor, more)
    lies_whole = factor.is_contiguous() or factor.transpose(-1, -2).is_contiguous()
    return (
        factor
        if lies_whole and not factor.storage_offset() % unit
        else factor.clone(memory_format=torch.contiguous_format)
    )


def _rows(ends: Tensor) -> list[tuple[int, slice]]:
    """Returns the experts with rows, and their rows. A program waits here for the device."""
    every = ends.tolist()
    pairs = enumerate(zip([0, *every], every, strict=False))
    return [(expert, slice(start, end)) for expert, (start, end) in pairs if start < end]


_Key = TypeVar("_Key")
_STATISTICS_LOCK = threading.Lock()
"""Held while a backward pass records statistics: threads of one process may run several at once."""


class Sequences:
    """Access to whole sequences for routers: here all of them are on this rank. A layout whose ranks hold parts of them
    has its own (parallel/context.py, parallel/expert.py). Nothing here has a gradient but `sums`."""

    def sum(self, x: Tensor) -> Tensor:
        """Returns `x` summed over the ranks that hold parts of the same sequences."""
        return x

    def counts(self, chosen: Tensor, n: int) -> Tensor:
        """Returns how often each of `n` experts is chosen by the local tokens of each sequence, (sequences, n)."""
        return _counts(chosen.flatten(1), n)

    def sums(self, x: Tensor) -> Tensor:
        """Returns `x` (batch, seq, n), which may have a gradient, summed over the local tokens of each sequence,
        (sequences, n)."""
        return x.sum(1)

    def whole(self, x: Tensor) -> Tensor:
        """Returns (batch, whole sequence, ...) in order of position, from the local part, (batch, seq, ...)."""
        return x

    def mine(self, x: Tensor) -> Tensor:
        """Returns the local part of such a whole."""
        return x

    def runs(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns local tokens (batch, seq, ...) as runs (runs, tokens, ...), and the most sequences a run meets on any
        rank."""
        return x, 1

    def here(self, conversations: Conversations) -> Conversations:
        """Returns the conversations with only the local tokens here, of those that attention has."""
        return conversations


class Statistics(NamedTuple):
    """What backward passes record."""

    loads: dict[int, Tensor]
    """By layer, the number of tokens that chose each expert, (n_experts,) of int64, without padding."""
    penalties: dict[str, Tensor]
    """"aux_loss" and "z_loss", coefficients included, summed over layers and tokens, in fp64; with a capacity
    "dropped", the number of choices without a row."""


@dataclass(eq=False)
class Routing:
    """The state that a model's routers share: inputs from the trainer, and statistics recorded by backward passes."""

    factor: float = 0.0
    """The factor of the penalties, which are summed over tokens: the loss scale / the tokens of a step's whole batch,
    without padding. The trainer sets it before each backward pass."""
    share: float = 1.0
    """This rank's fraction of the penalties' gradients: 1/n if n ranks all compute them and their gradients are
    summed."""
    sequences: Sequences = field(default_factory=Sequences)
    loads: dict[int, Tensor] = field(default_factory=dict)
    """The loads of `Statistics` in the backward passes since `clear`."""
    penalties: dict[str, Tensor] = field(default_factory=dict)
    """The penalties of `Statistics` in them."""

    def clear(self) -> None:
        """Forgets the recorded statistics."""
        self.take()

    def take(self) -> Statistics:
        """Returns the recorded statistics, and forgets them."""
        with _STATISTICS_LOCK:
            taken = Statistics(self.loads, self.penalties)
            self.loads, self.penalties = {}, {}
        return taken

    def add(self, statistics: Statistics) -> None:
        """Adds statistics that were taken."""
        with _STATISTICS_LOCK:
            for layer, load in statistics.loads.items():
                _add(self.loads, layer, load)
            for name, penalty in statistics.penalties.items():
                _add(self.penalties, name, penalty)

    def note(self, layer: int, load: Tensor, penalties: dict[str, Tensor]) -> None:
        """Adds the statistics of one layer's backward pass."""
        self.add(Statistics({layer: load}, {name: penalty.double() for name, penalty in penalties.items()}))


class Routes(NamedTuple):
    """The routing of tokens to experts."""

    chosen: Tensor
    """Each token's experts, (batch, seq, top_k) of int64."""
    gates: Tensor
    """The factors of those experts' outputs, in the same shape, in at least fp32."""
    slots: Slots
    """The rows of those choices."""


class Slots(NamedTuple):
    """The assignment of tokens to rows of the experts' input."""

    choices: Tensor
    """The index of each row's choice among all (batch × seq × top_k), (rows,); that total for an empty row."""
    rows: Tensor
    """The row of each choice, (batch × seq, top_k); any row for a choice that is dropped."""
    ends: Ends
    """The end of each expert's rows."""
    kept: Tensor | None
    """Whether each choice has a row of an expert, in the shape of `rows`; None if all have."""


class Router(Linear):
    """Computes one logit per expert. `bias`, if any, balances the load and affects only the choice of experts;
    `logit_bias`, if any, is trained and a part of the logits."""

    def __init__(self, model: ModelConfig):
        super().__init__(model.d_model, model.moe.n_experts, bias=model.moe.bias_balanced)
        self.logit_bias = nn.Parameter(torch.empty(model.moe.n_experts)) if model.moe.router_bias else None
        own = model.moe.own_norms
        self.input_scale = nn.Parameter(torch.empty(model.d_model)) if own else None
        self.gate_scale = nn.Parameter(torch.empty(model.moe.n_experts)) if own else None

    def forward(self, input: Tensor) -> Tensor:
        """Returns logits (..., n_experts) of (..., d_model)."""
        if self.input_scale is not None:
            input = input * (self.input_scale * self.in_features**-0.5)
        return self.multiply(input, self.weight, self.logit_bias)


class RoutedTokens(NamedTuple):
    """The tokens of a layer, with their experts."""

    tokens: Tensor
    """The input of the routed experts, (tokens, d_model)."""
    chosen: Tensor
    """Each token's experts, (tokens, top_k), by their numbers or, from `order` on, in the order of rows."""
    gates: Tensor
    """The factors of their outputs, or inputs, in the same shape and the tokens' type; 0 for a choice that is
    dropped."""
    slots: Slots


class ExpertFlight(Protocol):
    """Tokens on their way to their experts and back. Between the three calls other work may be done."""

    def compute(self) -> None:
        """Applies this rank's experts to what has arrived for them, and starts to send it back."""
        ...

    def finish(self) -> Tensor:
        """Returns each token's combined output, (tokens, d_model)."""
        ...


Dispatch = Callable[["MixtureOfExperts", RoutedTokens], ExpertFlight]
"""Starts to send a layer's tokens to their experts."""


class LocalExperts:
    """The `dispatch` of a rank that holds all experts: nothing is sent."""

    def __init__(self, moe: MixtureOfExperts, routed: RoutedTokens):
        self.out = moe.combine(moe.experts(moe.rows(routed), routed.slots.ends), routed)

    def compute(self) -> None:
        """Does nothing: it is done."""

    def finish(self) -> Tensor:
        """Returns the output, (tokens, d_model)."""
        return self.out


class MixtureOfExperts(nn.Module):
    """The mixture-of-experts layer of block `layer`: router, routed experts and, if any, the shared experts, as one MLP
    of their common width (DeepSeek-V3, section 2.1.2). A layout may replace `dispatch`, which brings tokens to their
    experts, `order`, which numbers experts in the order of their rows, and `run_cheap`, which calls what is cheap to
    repeat."""

    dispatch: Dispatch = LocalExperts
    order: Callable[[Tensor], Tensor] = staticmethod(lambda chosen: chosen)
    run_cheap: RunCheap = staticmethod(run)

    def __init__(self, model: ModelConfig, layer: int, routing: Routing):
        super().__init__()
        self.config, self.layer, self.routing = model, layer, routing
        moe = model.moe
        self.expert_scale, self.shared_scale = (
            nn.Parameter(torch.empty(model.d_model)) if moe.own_norms else None for _ in range(2)
        )
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = MLP(model, moe.n_shared * model.expert_ff_size) if moe.n_shared else None
        self.shared_gate = Linear(model.d_model, 1, bias=False) if moe.shared_gate and moe.n_shared else None

    def forward(self, x: Tensor, conversations: Conversations | None = None) -> Tensor:
        """Applies the layer, (batch, seq, d_model) to the same shape, or with norms of their own to the outputs of
        routed and shared experts in a row. Without `conversations` every sequence is one."""
        flight, of_shared = self.send(x, conversations)
        shared = None if self.shared is None else self.shared(of_shared)  # while tokens travel
        flight.compute()
        return self.joined(flight.finish(), shared, of_shared).unflatten(0, x.shape[:2])

    def send(self, x: Tensor, conversations: Conversations | None) -> tuple[ExpertFlight, Tensor]:
        """Routes the tokens of `x` (batch, seq, d_model) and starts to send them. Returns their flight, and what the
        shared experts read, (tokens, d_model)."""
        conversations = None if conversations is None else self.routing.sequences.here(conversations)
        routes, tokens = self.route(x, conversations), x.flatten(0, 1)
        of_shared = tokens if self.shared_scale is None else tokens * self.shared_scale
        tokens = tokens if self.expert_scale is None else tokens * self.expert_scale
        gates = routes.gates.flatten(0, 1).to(tokens.dtype)
        if routes.slots.kept is not None:
            gates = gates.where(routes.slots.kept, 0)
        routed = RoutedTokens(tokens, routes.chosen.flatten(0, 1), gates, routes.slots)
        return self.dispatch(self, routed), of_shared

    def rows(self, routed: RoutedTokens) -> Tensor:
        """Returns what experts read, (rows, d_model), sorted by expert."""
        slots, gates = routed.slots, routed.gates if self.config.moe.scale_inputs else None
        return self.run_cheap(SpreadTokens.apply, routed.tokens, slots.choices, slots.rows, gates, slots.kept)

    def combine(self, rows: Tensor, routed: RoutedTokens) -> Tensor:
        """Returns the sum of each token's `rows` (rows, d_model), as experts have computed them: (tokens, d_model)."""
        slots, gates = routed.slots, routed.gates
        if self.config.moe.scale_inputs:  # without biases the rows of dropped choices are zeros, but stand for others'
            gates = None if slots.kept is None else slots.kept.to(rows.dtype)
        return Combine.apply(rows, gates, slots.choices, slots.rows)

    def joined(self, routed: Tensor, shared: Tensor | None, of_shared: Tensor) -> Tensor:
        """Returns the sum of the outputs of routed and of `shared` experts, or with norms of their own both in a row;
        all are (tokens, d_model)."""
        if shared is None:
            return routed
        y: Tensor = shared if self.shared_gate is None else shared * self.shared_gate(of_shared).sigmoid()
        return torch.cat((routed, y), -1) if self.config.moe.own_norms else routed + y

    def route(self, x: Tensor, conversations: Conversations | None = None) -> Routes:
        """Returns the experts of each token of `x` (batch, seq, d_model), and their gates."""
        moe, bias = self.config.moe, self.router.bias
        logits = self.router(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.sigmoid() if moe.router == "sigmoid" else logits.softmax(-1)
        chosen = self._choose(scores.detach() if bias is None else scores.detach() + bias.detach())
        gates = scores.gather(-1, chosen)
        if moe.renormalise:
            gates = _normalised(gates)
        gates = gates * moe.route_scale
        if self.router.gate_scale is not None:
            gates = gates * self.router.gate_scale[chosen]
        routes = Routes(chosen, gates, self.slots(chosen, conversations))
        if torch.is_grad_enabled():
            gates = self._record_loads(logits, scores, routes, conversations)
        return routes._replace(gates=gates)

    def _choose(self, scores: Tensor) -> Tensor:
        """Returns the top_k experts by `scores` (batch, seq, n_experts), within the best groups if there are any."""
        moe = self.config.moe
        if moe.n_groups > 1:
            grouped = scores.unflatten(-1, (moe.n_groups, -1))
            of_group = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(of_group, dtype=torch.bool)
            kept.scatter_(-1, of_group.topk(moe.top_groups, -1).indices, value=True)
            scores = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(moe.top_k, -1).indices

    def _record_loads(
        self, logits: Tensor, scores: Tensor, routes: Routes, conversations: Conversations | None
    ) -> Tensor:
        """Returns the gates; their backward pass adds the penalties' gradients and records penalties and loads."""
        moe, (chosen, gates, slots) = self.config.moe, routes
        if conversations is None:
            counts = self.routing.sequences.counts(chosen, moe.n_experts)
        else:
            counts = conversations.counts(chosen, moe.n_experts)
        penalties: dict[str, Tensor] = {}
        if moe.aux_loss:
            of_each = self.routing.sequences.sum(counts).to(scores.dtype)
            # How much more often than its even share each expert was chosen; all choices are top_k × the tokens of a
            # whole sequence or conversation.
            excess = moe.n_experts * of_each / of_each.sum(1, keepdim=True).clamp_min(1)
            shares = _normalised(scores) if moe.router == "sigmoid" else scores
            summed = self.routing.sequences.sums(shares) if conversations is None else conversations.sums(shares)
            penalties["aux_loss"] = moe.aux_loss * (excess * summed).sum()
        if moe.z_loss:
            squares = logits.logsumexp(-1).square()
            penalties["z_loss"] = (
                moe.z_loss * (squares if conversations is None else squares * conversations.real).sum()
            )
        noted = {name: penalty.detach() for name, penalty in penalties.items()}
        if moe.capacity and slots.kept is not None:
            noted["dropped"] = counts.sum() - slots.kept.sum()
        penalty = sum(penalties.values(), start=gates.new_zeros(()))
        return self._recorded(gates, penalty, counts.sum(0), noted)

    @uncompiled
    def _recorded(self, gates: Tensor, penalty: Tensor, load: Tensor, noted: dict[str, Tensor]) -> Tensor:
        return _RecordLoads.apply(
            gates, penalty, self.router.bias, _LayerStatistics(self.routing, self.layer, load, noted)
        )

    def slots(self, chosen: Tensor, conversations: Conversations | None = None) -> Slots:
        """Returns the rows of the choices (batch, seq, top_k): all but padding's, or those within the experts'
        capacity."""
        if self.config.moe.capacity:
            return self._within_capacity(chosen, conversations)
        n, kept, chosen = self.config.moe.n_experts, None, self.order(chosen)
        if conversations is not None:
            kept = conversations.real.unsqueeze(-1).expand_as(chosen)
        return slots_of(chosen, n, kept)

    @uncompiled
    def _within_capacity(self, chosen: Tensor, conversations: Conversations | None) -> Slots:
        """Returns equally many rows per expert and run of tokens, filled or not, so that no size depends on the
        data."""
        moe, sequences = self.config.moe, self.routing.sequences
        whole = sequences.whole(chosen)
        most = moe.most_tokens(whole.shape[1])
        if conversations is None:
            within = _places(whole, torch.ones_like(whole), moe.n_experts) < most
        else:
            # Padding lies behind all conversations, so that its choices need not be left out of the count.
            before = _places(whole, torch.ones_like(whole), moe.n_experts, conversations.begins())
            capacities = _capacities(moe, whole.shape[1], whole.device)[conversations.lengths()]
            within = before < capacities.unsqueeze(-1)  # none of padding's
            most += conversations.most - 1  # each conversation's capacity is rounded up
        kept, _ = sequences.runs(sequences.mine(within))
        chosen, met = sequences.runs(chosen)
        runs, tokens, top_k = chosen.shape
        rows = min(met * most, tokens)
        run = torch.arange(runs, device=chosen.device)[:, None, None]
        row = (self.order(chosen) * runs + run) * rows + _places(chosen, kept.long(), moe.n_experts)
        # Dropped choices go to an extra row, which is then cut off.
        last = moe.n_experts * runs * rows
        choices = row.new_full((last + 1,), chosen.numel())
        places = torch.arange(chosen.numel(), device=chosen.device)
        choices.scatter_(0, row.where(kept, last).flatten(), places)
        return Slots(choices[:-1], row.where(kept, 0).view(-1, top_k), None, kept.reshape(-1, top_k))


def slots_of(chosen: Tensor, n: int, kept: Tensor | None) -> Slots:
    """Returns the rows of choices (..., choices) among `n` experts, or of those that are `kept`: in the order of the
    experts, and of the tokens."""
    if kept is not None:
        chosen = chosen.where(kept, n)  # behind the rows of all experts
        kept = kept.flatten(0, -2)
    experts, choices = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(n, device=chosen.device), right=True).int()
    rows = torch.empty_like(choices).scatter_(0, choices, torch.arange(len(choices), device=chosen.device))
    rows = rows.view(-1, chosen.shape[-1])
    if kept is not None:
        rows = rows.where(kept, 0)
        # That row is computed even if none is kept: it is multiplied by zero, which it must stay.
        ends = ends.maximum(F.pad(ends.new_ones(1), (n - 1, 0)))
    return Slots(choices, rows, ends, kept)


class _LayerStatistics(NamedTuple):
    """The statistics that a layer's backward pass records, with their destination."""

    routing: Routing
    layer: int
    load: Tensor
    penalties: dict[str, Tensor]


class _RecordLoads(torch.autograd.Function):
    """Returns the gates unchanged. Its backward pass gives the penalty its gradient and the balancing bias the excess
    load of its expert, and records loads and penalties: not in the forward pass, which recomputation repeats."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, penalty: Tensor, bias: Tensor | None, note: _LayerStatistics) -> Tensor:
        ctx.note = note
        ctx.of_penalty, ctx.of_bias = penalty.dtype, None if bias is None else bias.dtype
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        routing, layer, load, penalties = ctx.note
        routing.note(layer, load, penalties)
        of_penalty = torch.full((), routing.factor * routing.share, dtype=ctx.of_penalty, device=gradient.device)
        of_bias = None if ctx.of_bias is None else _excess(load, routing.factor).to(ctx.of_bias)
        return gradient, of_penalty, of_bias, None


def _excess(load: Tensor, factor: float) -> Tensor:
    """Returns by how much each expert's `load` (n_experts,) exceeds the mean: the gradient that moves the bias.

    The unit is a power of two, so that summing is exact in any order, and small: as `factor` is about 1 / a step's
    tokens, no value is much above 1. With factor 0 the result is zero."""
    n = len(load)
    unit = 2.0 ** (math.frexp(factor)[1] - n.bit_length()) if factor else 0.0
    return (n * load - load.sum()).double() * unit


def _normalised(scores: Tensor) -> Tensor:
    """Scales the scores to a sum of 1 over the last dimension. Sigmoids that are all 0 stay 0."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def _counts(chosen: Tensor, n: int) -> Tensor:
    """Returns how often each of `n` experts occurs in each row of `chosen` (rows, choices): (rows, n)."""
    return chosen.new_zeros(len(chosen), n).scatter_add_(1, chosen, torch.ones_like(chosen))


def _places(chosen: Tensor, counted: Tensor, n: int, begins: Tensor | None = None) -> Tensor:
    """Returns for each choice of `n` experts (batch, seq, top_k) how many earlier tokens of its sequence, or only those
    from place `begins` (batch, seq) on, chose the same expert, among the choices that are `counted` (1 or 0)."""
    of_expert = chosen.new_zeros(*chosen.shape[:2], n).scatter_(2, chosen, counted)
    earlier = of_expert.cumsum(1) - of_expert
    if begins is not None:
        earlier = earlier - earlier.gather(1, begins.unsqueeze(-1).expand_as(earlier))
    return earlier.gather(2, chosen)


@lru_cache
def _capacities(moe: MoE, seq_len: int, device: torch.device) -> Tensor:
    """Returns the most tokens that an expert takes of a conversation of 0 to `seq_len` tokens, (seq_len + 1,) int64."""
    return torch.tensor([moe.most_tokens(tokens) for tokens in range(seq_len + 1)], device=device)


class SpreadTokens(torch.autograd.Function):
    """Copies tokens (tokens, d_model) to the rows of their choices, (rows, d_model), times their `gates` (tokens,
    top_k) if there are any. The backward pass gathers the gradients of a token's rows, and sums them."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, choices: Tensor, rows: Tensor, gates: Tensor | None, kept: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(None if gates is None else tokens, rows, gates, kept)
        x = tokens.index_select(0, tokens_of(choices, rows))
        return x if gates is None else x.mul_(_gates_of(choices, gates))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (tokens, rows, gates, kept) = grad_outputs, ctx.saved_tensors
        factors = kept.to(gradient.dtype) if gates is None and kept is not None else gates
        of_gates = None if gates is None else _dots(tokens, gradient.contiguous(), rows)
        return _sums(gradient, rows, factors), None, None, of_gates, None


class Combine(torch.autograd.Function):
    """Sums the rows `routed` (rows, d_model) of each token's choices, times their gates (tokens, top_k) if there are
    any: (tokens, d_model). The backward pass gathers as well."""

    @staticmethod
    def forward(ctx: Any, routed: Tensor, gates: Tensor | None, choices: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(routed if ctx.needs_input_grad[1] else None, gates, choices, rows)
        ctx.rows = len(routed)
        return _sums(routed, rows, gates)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (routed, gates, choices, rows) = grad_outputs, ctx.saved_tensors
        choices = choices[: ctx.rows]  # fewer if padding was not sent to other ranks
        of_gates = None if routed is None else _dots(gradient.contiguous(), routed, rows)
        factors = None if gates is None else _gates_of(choices, gates)
        return _sums(gradient, tokens_of(choices, rows).unsqueeze(1), factors), of_gates, None, None


def _gates_of(choices: Tensor, gates: Tensor) -> Tensor:
    """Returns the gate of each of `choices`, of `gates` (tokens, top_k): (choices, 1), 0 for an empty row."""
    return F.pad(gates.flatten(), (0, 1)).index_select(0, choices).unsqueeze(1)


def tokens_of(choices: Tensor, rows: Tensor) -> Tensor:
    """Returns the token of each of the `choices` whose `rows` are (tokens, top_k); the last one for an empty row."""
    tokens, top_k = rows.shape
    return (choices // top_k).clamp_(max=tokens - 1)


def _sums(x: Tensor, rows: Tensor, factors: Tensor | None) -> Tensor:
    """Returns for each token the sum of its `rows` (tokens, top_k) of `x` (rows, d_model), times `factors` of the same
    shape: (tokens, d_model)."""
    if torch.compiler.is_compiling():  # in one kernel with its surroundings
        each = x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return (each if factors is None else each * factors.unsqueeze(-1)).sum(1)
    return F.embedding_bag(rows, x.contiguous(), mode="sum", per_sample_weights=factors)


def _dots(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Returns the dot products of each token's `x` (tokens, d_model) and its `rows` (tokens, top_k) of `y` (rows,
    d_model): (tokens, top_k)."""
    if torch.compiler.is_compiling():
        return (x.unsqueeze(1) * y.index_select(0, rows.flatten()).unflatten(0, rows.shape)).sum(-1)
    n, top_k = rows.numel(), rows.shape[1]
    begins, token = torch.arange(0, n, top_k, device=x.device), torch.arange(n, device=x.device) // top_k
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(x, y, rows.flatten(), begins, token, 0)
    return dots.view_as(rows)


def _add(sums: dict[_Key, Tensor], key: _Key, more: Tensor) -> None:
    sums[key] = sums[key] + more.to(sums[key].device) if key in sums else more
