"""Mixture of experts: a router sends each token to a few of many experts and adds up what they make of it.

What keeps experts evenly loaded is here too: an auxiliary loss, a balancing bias, a capacity. Each is defined a token
or a sequence at a time, so that it does not depend on how a batch is split over ranks or micro-batches.

Shapes: batch, seq (tokens of a sequence that are here), top_k (experts of a token), rows (tokens sent to experts, in
the order of experts), d_model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelConfig
from phalanx.model.experts import Experts, Sizes
from phalanx.model.layers import MLP, Linear

_Key = TypeVar("_Key")
_NOTING = threading.Lock()
"""Held while a backward pass notes what it found: threads of one process may run several at once."""


class Sequences(Protocol):
    """What routers need to know of whole sequences, where ranks hold parts of them. Nothing here has a gradient."""

    def sum(self, x: Tensor) -> Tensor:
        """`x`, added up over the ranks that hold parts of the same sequences."""
        ...

    def whole(self, x: Tensor) -> Tensor:
        """(batch, whole sequence, ...) in the order of positions, from the part here, (batch, seq, ...)."""
        ...

    def mine(self, x: Tensor) -> Tensor:
        """The part that is here of such a whole."""
        ...


class WholeSequences:
    """Sequences that are all here."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def whole(self, x: Tensor) -> Tensor:
        return x

    def mine(self, x: Tensor) -> Tensor:
        return x


@dataclass(eq=False)
class Routing:
    """What the routers of one model share: what the trainer tells them, and what backward passes note for it."""

    factor: float = 0.0
    """What a step's loss, summed over tokens, is multiplied by. The trainer sets it before each backward pass; the
    penalties, sums over tokens too, are multiplied by the same."""
    share: float = 1.0
    """Of the penalties' gradients, what this rank adds. Where n ranks all compute them and their gradients are added
    up, 1/n."""
    sequences: Sequences = field(default_factory=WholeSequences)
    loads: dict[int, Tensor] = field(default_factory=dict)
    """By layer, how many tokens chose each expert, (n_experts,) of int64, in the backward passes since `clear`."""
    penalties: dict[str, Tensor] = field(default_factory=dict)
    """"aux_loss" and "z_loss", coefficients included, summed over layers and tokens since `clear`, in fp64."""

    def clear(self) -> None:
        """Forget what was noted."""
        with _NOTING:
            self.loads, self.penalties = {}, {}

    def note(self, layer: int, load: Tensor, penalties: dict[str, Tensor]) -> None:
        """Add what one backward pass of one layer found."""
        with _NOTING:
            _add(self.loads, layer, load)
            for name, penalty in penalties.items():
                _add(self.penalties, name, penalty.double())


class Routes(NamedTuple):
    """Where tokens go."""

    chosen: Tensor
    """Each token's experts, (batch, seq, top_k) of int64."""
    gates: Tensor
    """What the outputs of those are multiplied by, likewise, in at least fp32."""


class Slots(NamedTuple):
    """Which row of the experts' input holds what."""

    choices: Tensor
    """The number of a choice among all, (batch × seq × top_k), for each row; that many for a row that is empty."""
    sizes: Sizes
    """Rows of each expert."""


class Router(Linear):
    """One logit an expert. A bias, where it has one, takes part in choosing only."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits (..., n_experts) of (..., d_model)."""
        return self.multiply(input, self.weight)


Dispatch = Callable[["MixtureOfExperts", Tensor, Sizes, Tensor], tuple[Tensor, Tensor | None]]
"""The outputs of a layer's routed and shared experts: (layer, rows, sizes, tokens), as `MixtureOfExperts.compute`."""


def compute_here(moe: MixtureOfExperts, rows: Tensor, sizes: Sizes, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply the experts of `moe`, all of which this rank holds."""
    return moe.experts(rows, sizes), None if moe.shared is None else moe.shared(tokens)


class MixtureOfExperts(nn.Module):
    """The mixture-of-experts layer of block `layer`: router, routed experts and, where there are any, the shared
    experts, as one MLP of their common width (DeepSeek-V3, section 2.1.2). A layout may exchange `dispatch`, which
    brings rows to their experts."""

    dispatch: Dispatch = staticmethod(compute_here)

    def __init__(self, model: ModelConfig, layer: int, routing: Routing):
        super().__init__()
        self.config, self.layer, self.routing = model, layer, routing
        moe = model.moe
        self.router = Router(model.d_model, moe.n_experts, bias=moe.bias_balanced)
        self.experts = Experts(model)
        self.shared = MLP(model, moe.n_shared * model.expert_ff_size) if moe.n_shared else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, d_model) to the same."""
        routes, tokens = self.route(x), x.flatten(0, 1)
        top_k, gates = self.config.moe.top_k, routes.gates.flatten()
        slots = self.slots(routes.chosen)
        padded = tokens
        if self.config.moe.capacity:
            # An empty row reads zeros, and what the expert makes of them goes to a token that does not exist.
            padded, gates = F.pad(tokens, (0, 0, 0, 1)), F.pad(gates, (0, 1))
        source = slots.choices // top_k
        routed, shared = self.compute(padded.index_select(0, source), slots.sizes, tokens)
        weighted = routed * gates.index_select(0, slots.choices).unsqueeze(1).to(routed.dtype)
        out = torch.zeros_like(padded, dtype=weighted.dtype).index_add(0, source, weighted)[: len(tokens)]
        return (out if shared is None else out + shared).view_as(x)

    def compute(self, rows: Tensor, sizes: Sizes, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the experts make of `rows` (rows, d_model), sorted by expert, and the shared experts of all `tokens`
        (batch × seq, d_model). Together, so that a layout that sends rows elsewhere can do so meanwhile."""
        return self.dispatch(self, rows, sizes, tokens)

    def route(self, x: Tensor) -> Routes:
        """The experts of each token of `x` (batch, seq, d_model), and their gates."""
        moe, bias = self.config.moe, self.router.bias
        logits = self.router(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.sigmoid() if moe.router == "sigmoid" else logits.softmax(-1)
        chosen = self._choose(scores.detach() if bias is None else scores.detach() + bias.detach())
        gates = scores.gather(-1, chosen)
        if moe.renormalise:
            gates = _normalised(gates)
        gates = gates * moe.route_scale
        if torch.is_grad_enabled():
            gates = self._account(logits, scores, chosen, gates)
        return Routes(chosen, gates)

    def _choose(self, scores: Tensor) -> Tensor:
        """The top_k experts by `scores` (batch, seq, n_experts), within the best groups where there are several."""
        moe = self.config.moe
        if moe.n_groups > 1:
            grouped = scores.unflatten(-1, (moe.n_groups, -1))
            of_group = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(of_group, dtype=torch.bool)
            kept.scatter_(-1, of_group.topk(moe.top_groups, -1).indices, value=True)
            scores = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(moe.top_k, -1).indices

    def _account(self, logits: Tensor, scores: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """The same gates, whose backward pass also puts in the penalties' gradients and notes them and the loads."""
        moe, counts = self.config.moe, _counts(chosen.flatten(1), self.config.moe.n_experts)
        penalties: dict[str, Tensor] = {}
        if moe.aux_loss:
            of_sequence = self.routing.sequences.sum(counts).to(scores.dtype)
            # How much more often than its even share each expert was chosen; all choices are top_k × whole sequence.
            excess = moe.n_experts * of_sequence / of_sequence.sum(1, keepdim=True)
            shares = _normalised(scores) if moe.router == "sigmoid" else scores
            penalties["aux_loss"] = moe.aux_loss * (excess * shares.sum(1)).sum()
        if moe.z_loss:
            penalties["z_loss"] = moe.z_loss * logits.logsumexp(-1).square().sum()
        noted = {name: penalty.detach() for name, penalty in penalties.items()}
        penalty = sum(penalties.values(), start=gates.new_zeros(()))
        note = _Note(self.routing, self.layer, counts.sum(0), noted)
        return _Account.apply(gates, penalty, self.router.bias, note)

    def slots(self, chosen: Tensor) -> Slots:
        """Rows for the choices (batch, seq, top_k): all of them, or those within the experts' capacity."""
        if self.config.moe.capacity:
            return self._within_capacity(chosen)
        flat = chosen.flatten()
        sizes = _counts(flat.unsqueeze(0), self.config.moe.n_experts)[0]
        return Slots(flat.argsort(stable=True), sizes)

    def _within_capacity(self, chosen: Tensor) -> Slots:
        """As many rows for each expert and sequence, whether filled or not, so that no size depends on the data."""
        moe, sequences = self.config.moe, self.routing.sequences
        batch, seq, _ = chosen.shape
        whole = sequences.whole(chosen)
        capacity = moe.most_tokens(whole.shape[1])
        kept = sequences.mine(_places(whole, torch.ones_like(whole), moe.n_experts)) < capacity
        rows = min(capacity, seq)
        sequence = torch.arange(batch, device=chosen.device)[:, None, None]
        row = (chosen * batch + sequence) * rows + _places(chosen, kept.long(), moe.n_experts)
        # What is not kept goes to one row more, which is then cut off.
        row = row.where(kept, moe.n_experts * batch * rows).flatten()
        choices = row.new_full((moe.n_experts * batch * rows + 1,), chosen.numel())
        choices.scatter_(0, row, torch.arange(chosen.numel(), device=chosen.device))
        return Slots(choices[:-1], [batch * rows] * moe.n_experts)


class _Note(NamedTuple):
    """What a layer's backward pass notes, and where."""

    routing: Routing
    layer: int
    load: Tensor
    penalties: dict[str, Tensor]


class _Account(torch.autograd.Function):
    """Gates, unchanged. On the way back the penalty gets its gradient, the balancing bias the load that its expert has
    too much, and the loads and penalties are noted: there and not on the way forward, which recomputation repeats."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, penalty: Tensor, bias: Tensor | None, note: _Note) -> Tensor:
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
    """How much more than the mean each expert's `load` (n_experts,) is: the gradient by which the bias falls or rises.

    In units that are a power of two, so that adding such numbers up rounds nothing in whatever order it is done, and
    small: `factor` being about 1 over a step's tokens, none is much above 1. Zero with factor 0."""
    n = len(load)
    unit = 2.0 ** (math.frexp(factor)[1] - n.bit_length()) if factor else 0.0
    return (n * load - load.sum()).double() * unit


def _normalised(scores: Tensor) -> Tensor:
    """The same, to a sum of 1 over the last dimension. Sigmoids may all be 0, and then stay so."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def _counts(chosen: Tensor, n: int) -> Tensor:
    """How often each of `n` experts is in each row of `chosen` (rows, choices): (rows, n)."""
    return chosen.new_zeros(len(chosen), n).scatter_add_(1, chosen, torch.ones_like(chosen))


def _places(chosen: Tensor, counted: Tensor, n: int) -> Tensor:
    """For each choice of `n` experts (batch, seq, top_k), how many of the tokens before it in its sequence chose the
    same expert, of the choices that are `counted` (1 or 0)."""
    of_expert = chosen.new_zeros(*chosen.shape[:2], n).scatter_(2, chosen, counted)
    return (of_expert.cumsum(1) - of_expert).gather(2, chosen)


def _add(sums: dict[_Key, Tensor], key: _Key, more: Tensor) -> None:
    sums[key] = sums[key] + more.to(sums[key].device) if key in sums else more
