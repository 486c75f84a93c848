"""Redundant experts: each rank of ep has slots beside its own experts for copies of the fullest experts of others, with
which it shares their tokens (DeepSeek-V3, section 3.4; FasterMoE, He et al. 2022, section 4.2).

In each forward pass of a layer all ranks know how many tokens each has for each expert, and choose the same experts to
copy. Their owners send the weights, the copies' gradients go back in the backward pass, and the owners add them to
their own: so copies have neither optimizer state nor a place in checkpoints, and nothing depends on earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.comm.axis import Axis, Pending
from phalanx.model.layers import uncompiled
from phalanx.model.moe import Dispatch, Ends, Experts, GroupedLinear, GroupedProduct, MixtureOfExperts, RoutedTokens
from phalanx.parallel import expert
from phalanx.parallel.expert import RowExchange, RowFlight, TokenExchange, TokenFlight


class ExpertPlacement(NamedTuple):
    """The places of the experts of one layer in one forward pass. A rank's slots are its own experts', then copies'."""

    copied: list[list[int]]
    """The experts of which each rank has copies, in order."""
    table: list[list[int]]
    """The rows that each rank sends to each slot of all ranks, in order."""


def placed(counts: Sequence[Sequence[int]], copies: int) -> ExpertPlacement:
    """Returns the placement of `copies` on each rank, where rank a has `counts[a][e]` rows for expert e and ranks own
    equal runs of experts. The fullest rank hands rows of its fullest expert to the emptiest one, up to the mean of all,
    as long as that one has a slot. Slots that nobody needs are filled, too, without rows: messages have the same size
    in every pass."""
    ranks, n = len(counts), len(counts[0])
    own, owner = n // ranks, [e * ranks // n for e in range(n)]
    left = [sum(column) for column in zip(*counts, strict=True)]
    loads = [sum(left[rank * own : (rank + 1) * own]) for rank in range(ranks)]
    mean, handed = -(-sum(loads) // ranks), [dict[int, int]() for _ in range(ranks)]
    full = {rank for rank in range(ranks) if loads[rank] > mean}
    while full:
        fullest = max(sorted(full), key=loads.__getitem__)
        for rank in sorted((r for r in range(ranks) if loads[r] < mean), key=loads.__getitem__):
            there = handed[rank]
            mine = [e for e in range(fullest * own, (fullest + 1) * own) if left[e] and e not in there]
            if mine and len(there) < copies:
                break
        else:
            full.remove(fullest)
            continue
        chosen = max(mine, key=left.__getitem__)
        moved = there[chosen] = min(left[chosen], loads[fullest] - mean, mean - loads[rank])
        left[chosen] -= moved
        loads[fullest] -= moved
        loads[rank] += moved
        if loads[fullest] == mean:
            full.remove(fullest)
    for rank, there in enumerate(handed):
        others = ((rank + 1 + k % (ranks - 1)) % ranks * own + k // (ranks - 1) for k in range(n - own))
        while len(there) < copies:
            there.setdefault(next(others), 0)
    copied = [sorted(there) for there in handed]
    return ExpertPlacement(copied, _shared_out(counts, copied, handed, owner))


def _shared_out(
    counts: Sequence[Sequence[int]], copied: Sequence[Sequence[int]], handed: Sequence[dict[int, int]], owner: list[int]
) -> list[list[int]]:
    """Returns the rows of each rank for each slot: a copy gets the rows of its own rank first, then those of others,
    and those of the expert's owner last."""
    ranks, n, slots = len(counts), len(counts[0]), len(counts[0]) // len(counts) + len(copied[0])
    table, left = [[0] * (slots * ranks) for _ in counts], [[*line] for line in counts]
    wanted = [{**there} for there in handed]
    near = [(rank, e, [rank]) for rank, there in enumerate(copied) for e in there]
    far = [(r, e, [*(a for a in range(ranks) if a not in (r, owner[e])), owner[e]]) for r, e, _ in near]
    for rank, e, sources in (*near, *far):
        slot = (rank + 1) * slots - len(copied[rank]) + copied[rank].index(e)
        for source in sources:
            rows = min(wanted[rank][e], left[source][e])
            table[source][slot] += rows
            left[source][e] -= rows
            wanted[rank][e] -= rows
    for line, rest in zip(table, left, strict=True):
        for e in range(n):
            line[owner[e] * slots + e % (n // ranks)] = rest[e]
    return table


def connect(model: nn.Module, exchange: Dispatch, copies: int) -> Dispatch:
    """Makes the routed experts in `model` compute with `copies` of others on each rank: of rows in two parts, own and
    copies'. Returns their dispatcher, which sends as `exchange`."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            vars(module.experts)["forward"] = MethodType(_with_copies, module.experts)
    if isinstance(exchange, TokenExchange):
        return RedundantTokens(replace(exchange, copies=copies))
    assert isinstance(exchange, RowExchange), "packages' dispatchers are refused"
    return RedundantRows(exchange.ep, exchange.near, exchange.far, copies=copies)


@dataclass(frozen=True)
class RedundantRows(RowExchange):
    """Sends a row per choice to a rank that holds its expert or a copy of it: the `dispatch` of mixtures of experts
    with `copies` redundant experts on each rank."""

    copies: int = 0

    def __call__(self, moe: MixtureOfExperts, routed: RoutedTokens) -> RowFlight:
        """Starts to send."""
        routed, placement = self._placed(routed)
        return self._send(moe, routed, moe.rows(routed), placement)

    @uncompiled
    def _placed(self, routed: RoutedTokens) -> tuple[RoutedTokens, ExpertPlacement]:
        """Returns the tokens with their rows in the order of the slots."""
        slots = routed.slots
        assert slots.ends is not None, "experts have different numbers"
        # The host waits here for the device, as without copies.
        placement = placed(expert.gather_counts(self.ep, expert.lengths(slots.ends)).tolist(), self.copies)
        sizes = placement.table[self.ep.rank]
        rows, device = sum(sizes), slots.choices.device
        order = [*_by_expert(placement.copied, len(sizes) // self.ep.size)]
        before = dict(zip(order, accumulate((sizes[slot] for slot in order), initial=0), strict=False))
        shift = [after - before[slot] for slot, after in enumerate([0, *accumulate(sizes)][:-1])]
        each, by_expert = (
            torch.repeat_interleave(
                torch.tensor([shift[slot] for slot in slots_of], device=device),
                torch.tensor([sizes[slot] for slot in slots_of], device=device),
                output_size=rows,
            )
            for slots_of in (range(len(sizes)), order)
        )
        choices = slots.choices.clone()
        choices[:rows] = slots.choices[torch.arange(rows, device=device) - each]
        moved = slots._replace(choices=choices, rows=slots.rows + by_expert[slots.rows])
        return routed._replace(slots=moved), placement

    @uncompiled
    def _send(self, moe: MixtureOfExperts, routed: RoutedTokens, rows: Tensor, placement: ExpertPlacement) -> RowFlight:
        table, rank = placement.table, self.ep.rank
        slots = len(table[0]) // self.ep.size
        blocks = [line[rank * slots : (rank + 1) * slots] for line in table]
        out, back = self.paths([[sum(line[a : a + slots]) for a in range(0, len(line), slots)] for line in table])
        sizes, own = [sum(column) for column in zip(*blocks, strict=True)], slots - self.copies
        ends = [
            torch.tensor([*accumulate(part)], dtype=torch.int32, device=rows.device)
            for part in (sizes[:own], sizes[own:])
        ]
        shared = CopiedExperts(self.ep, own, placement.copied, *ends)
        sent = sum(table[rank])  # without those of padding
        arriving = out.start(rows if sent == len(rows) else rows[:sent])
        return CopiedFlight(moe, routed, blocks, out, back, None, arriving, shared)


@dataclass(frozen=True)
class RedundantTokens:
    """Sends each token once to every rank with some of its experts or copies of them, by an `exchange` with copies: the
    `dispatch` of mixtures of experts with redundant experts."""

    exchange: TokenExchange

    def __call__(self, moe: MixtureOfExperts, routed: RoutedTokens) -> CopiedTokens:
        """Starts to send."""
        return self._send(moe, routed, expert.chosen_of(moe, routed), moe.config.moe.n_experts)

    @uncompiled
    def _send(self, moe: MixtureOfExperts, routed: RoutedTokens, chosen: Tensor, n: int) -> CopiedTokens:
        exchange, ep = self.exchange, self.exchange.ep
        experts, choices = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(n, device=chosen.device), right=True)
        placement = placed(expert.gather_counts(ep, expert.lengths(ends)).tolist(), exchange.copies)
        sizes = placement.table[ep.rank]
        order = [*_by_expert(placement.copied, len(sizes) // ep.size)]
        slots, rows = (torch.tensor(each, device=chosen.device) for each in (order, [sizes[slot] for slot in order]))
        slots = torch.repeat_interleave(slots, rows, output_size=sum(sizes))
        # From here on slots stand for experts: the choices of each expert are shared out over its slots.
        chosen = torch.full_like(choices, len(sizes)).scatter_(0, choices[: len(slots)], slots).view_as(chosen)
        sent = exchange.send(routed.tokens, chosen, routed.gates, len(sizes))
        return CopiedTokens(moe, exchange, sent, placement)


def _by_expert(copied: Sequence[Sequence[int]], slots: int) -> Iterator[int]:
    """Yields all slots in the order of their experts: of each its owner's, then those of its copies."""
    own = slots - len(copied[0])
    copies = [(e, rank * slots + own + place) for rank, there in enumerate(copied) for place, e in enumerate(there)]
    owners = [(e, e // own * slots + e % own) for e in range(len(copied) * own)]
    yield from (slot for _, slot in sorted([*owners, *copies], key=lambda pair: pair[0]))


@dataclass(frozen=True)
class CopiedExperts:
    """This rank's part in the copies of one forward pass."""

    ep: Axis
    own: int
    """Experts of a rank."""
    copied: list[list[int]]
    """ExpertPlacement.copied."""
    ends: Tensor
    """The end of the rows of each of this rank's own experts."""
    copies_ends: Tensor
    """The end of the rows of each copy here, which are apart."""

    @property
    def sent(self) -> list[list[int]]:
        """The places among this rank's own experts of those that each rank gets."""
        first = self.ep.rank * self.own
        return [[e - first for e in there if 0 <= e - first < self.own] for there in self.copied]

    @property
    def received(self) -> list[int]:
        """The number of the copies here that each rank sends."""
        return [sum(e // self.own == rank for e in self.copied[self.ep.rank]) for rank in range(self.ep.size)]

    def fetch(self, weights: Tensor) -> tuple[Tensor, Pending]:
        """Starts to send this rank's experts among `weights` (experts, numbers) to the ranks with copies of them.
        Returns what gets the copies here, (copies, numbers)."""
        sent = self.sent
        copies = weights.new_empty(len(self.copied[0]), weights.shape[1])
        there = [weights[e] for of in sent for e in of]
        gone = torch.stack(there) if there else weights[:0]
        return copies, self.ep.all_to_all(copies, gone, self.received, [len(of) for of in sent])

    def give_back(self, gradients: Tensor) -> tuple[Tensor, Pending]:
        """Starts to send the `gradients` of the copies here (copies, numbers) to their owners. Returns what gets those
        of this rank's experts elsewhere, in the order of `sent`."""
        sizes = [len(of) for of in self.sent]
        arriving = gradients.new_empty(sum(sizes), gradients.shape[1])
        return arriving, self.ep.all_to_all(arriving, gradients, sizes, self.received)

    def joined(self, own: Sequence[Tensor | None], copies: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's experts, those of their copies elsewhere added; `copies` are of the
        copies here (copies, numbers). What has no gradient is None."""
        whole = [None if gradient is None else gradient.contiguous() for gradient in own]
        arriving = [None if gradient is None else self.give_back(gradient.contiguous()) for gradient in copies]
        places = [e for of in self.sent for e in of]
        for gradient, returned in zip(whole, arriving, strict=True):
            if gradient is None or returned is None:
                continue
            more, pending = returned
            pending.wait()
            rows = gradient.view(self.own, -1)
            for e, part in zip(places, more, strict=True):
                rows[e] += part
        return whole


class _Share(torch.autograd.Function):
    """Returns the weights of this rank's experts, each as it is, and then those of the copies here, (copies, numbers)
    of each. The backward pass adds the gradients of copies elsewhere to those of this rank's experts."""

    @staticmethod
    def forward(ctx: Any, shared: CopiedExperts, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        ctx.set_materialize_grads(False)  # a split backward pass takes weights' gradients another way
        copies = [shared.fetch(weight.view(shared.own, -1)) for weight in weights]
        for _, pending in copies:
            pending.wait()
        return *(weight.view_as(weight) for weight in weights), *(copy for copy, _ in copies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        own, copies = grad_outputs[: len(grad_outputs) // 2], grad_outputs[len(grad_outputs) // 2 :]
        return None, *ctx.shared.joined(own, copies)


@dataclass(frozen=True)
class _LaterGradient(GroupedProduct):
    """The gradient of the experts' weights of a `layer` in the second half of a split backward pass: that of this
    rank's experts, to which those of their copies elsewhere are added then."""

    shared: CopiedExperts
    layer: GroupedLinear
    factors: dict[int, tuple[GroupedProduct, Tensor, Tensor]]
    """Product, gradient of the output and rows: of own experts (0) and of copies here (1)."""

    def take(self, part: int, _: Tensor, *factors: Any) -> None:
        """Takes the factors of a part: GroupedLinear.take."""
        self.factors[part] = factors
        if len(self.factors) == 2 and self.layer.take is not None:
            self.layer.take(self.layer.weight, self, *self.factors[0][1:])

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of this rank's experts."""
        own, copies = (product.weight_gradient(*factors) for _, (product, *factors) in sorted(self.factors.items()))
        (found,) = self.shared.joined([own], [copies.flatten(1)])
        assert found is not None, "given"
        return found


class _StandIn:
    """A module that computes with other tensors than its own."""

    def __init__(self, module: nn.Module, **own: Any):
        self.module = module
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return MethodType(found.__func__, self) if getattr(found, "__self__", None) is self.module else found

    def __call__(self, *inputs: Any) -> Any:
        return type(self.module).forward(self, *inputs)


def _with_copies(experts: Experts, rows: tuple[Tensor, Tensor], shared: CopiedExperts) -> tuple[Tensor, Tensor]:
    """Applies this rank's experts and the copies here to their rows, (rows, d_model) each."""
    layers = {name: layer for name, layer in experts.named_children() if isinstance(layer, GroupedLinear)}
    named = [(name, kind) for name, layer in layers.items() for kind, _ in layer.named_parameters(recurse=False)]
    weights = _Share.apply(shared, *(getattr(layers[name], kind) for name, kind in named))
    found = list[Tensor]()
    later = {name: _LaterGradient(shared.ends, shared.own, shared, layer, {}) for name, layer in layers.items()}
    parts = (shared.own, rows[0], shared.ends), (len(shared.copied[0]), rows[1], shared.copies_ends)
    for place, (number, part, ends) in enumerate(parts):
        mine, weights = weights[: len(named)], weights[len(named) :]
        stands = dict[str, _StandIn]()
        for name, layer in layers.items():
            own = {kind: weight for (of, kind), weight in zip(named, mine, strict=True) if of == name}
            own["weight"] = own["weight"].view(number, -1, layer.weight.shape[-1])
            take = layer.take and partial(later[name].take, place)
            stands[name] = _StandIn(layer, experts=number, take=take, **own)
        found.append(_StandIn(experts, **stands)(part, ends))
    return found[0], found[1]


@dataclass(eq=False)
class CopiedFlight(RowFlight):
    """Rows that RedundantRows sends; `blocks` have those for each slot here."""

    shared: CopiedExperts

    @uncompiled
    def compute(self) -> None:
        """Applies the experts and copies here to the rows that have arrived, and starts to send theirs back."""
        own = sum(sum(line[: self.shared.own]) for line in self.blocks)
        # Reusing the name frees the received rows before the experts run.
        received = expert.transpose_blocks(self.out.wait(self.take()), self.blocks)
        computed = torch.cat(self.moe.experts((received[:own], received[own:]), self.shared))
        self.arriving = self.back.start(expert.transpose_blocks(computed, expert.transposed(self.blocks)))


@dataclass(frozen=True)
class CopiedTokens(TokenFlight):
    """Tokens that RedundantTokens sends."""

    placement: ExpertPlacement

    def computed(self, rows: Tensor, ends: Ends) -> Tensor:
        """Returns the outputs of experts and copies here of their rows, (rows, d_model)."""
        ep, (copied, table) = self.exchange.ep, self.placement
        slots = len(table[0]) // ep.size
        first, own = ep.rank * slots, slots - self.exchange.copies
        here = sum(sum(line[first : first + own]) for line in table)
        assert ends is not None, "experts have different numbers"
        shared = CopiedExperts(ep, own, copied, ends[:own], ends[own:] - here)
        return torch.cat(self.moe.experts((rows[:here], rows[here:]), shared))
