"""Expert parallelism: every rank holds some of the routed experts; tokens are dispatched to them and combined again.

A token's row goes to the rank that holds its expert, is processed there, and comes back (GShard, Lepikhin et al. 2021,
section 3): an all-to-all for dispatch and one for combine, and the same two reversed in the backward pass. The shared
experts, which need no communication, compute during dispatch; in the backward pass their gradients are computed while
those of the rows are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.blocks.feed_forward import sequences_met
from phalanx.comm.axis import Axis, Pending
from phalanx.config.layout import Layout
from phalanx.model.documents import Conversations
from phalanx.model.layers import uncompiled
from phalanx.model.moe import Ends, GroupedLinear, MixtureOfExperts, Sequences
from phalanx.partition.tensor_slices import experts_of, in_order_of_ranks

ONE_RANK, ALONE = Layout(), Axis("ep")


def cut_experts(model: nn.Module, ranks: int) -> None:
    """Replaces the parameters of routed experts in `model` (on the meta device), of which a tensor rank may have a part
    already, by those of one of `ranks` ranks.

    The layout has been checked: the number of experts is divisible by the ranks."""
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            for name, stack in list(module.named_parameters(recurse=False)):
                module.experts = stack.shape[0] // ranks
                held = torch.empty(module.experts, *stack.shape[1:], dtype=stack.dtype, device="meta")
                setattr(module, name, nn.Parameter(held, requires_grad=stack.requires_grad))


def connect(model: nn.Module, exchange: RowExchange, layout: Layout = ONE_RANK) -> None:
    """Makes the mixtures of experts in `model`, whose experts are cut over the ranks of `exchange`, exchange rows."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.dispatch = ExpertExchange(exchange)
            if layout.folds and layout.ep_shard > 1:
                module.order = partial(in_order_of_ranks, module.config.moe.n_experts, layout)


class FoldedSequences(Sequences):
    """Access to whole sequences for the routers of tensor ranks that are ranks of ep: each routes a run of the tokens
    of all sequences of the micro-batch, in the order (sequence, position)."""

    def __init__(self, inside: Sequences, tp: Axis):
        self.inside, self.tp = inside, tp

    @uncompiled
    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.tp.all_reduce(total).wait()
        return self.inside.sum(total)

    @uncompiled
    def counts(self, chosen: Tensor, n: int) -> Tensor:
        batch, numbers = len(chosen), self._numbers(chosen)
        places = (n * numbers.unsqueeze(-1) + chosen.flatten(0, 1)).flatten()
        return chosen.new_zeros(batch * n).scatter_add_(0, places, torch.ones_like(places)).view(batch, n)

    @uncompiled
    def sums(self, x: Tensor) -> Tensor:
        # A product adds in the same order in every run, as an index_add on a GPU does not.
        of_sequence = nn.functional.one_hot(self._numbers(x), len(x)).to(x.dtype)
        return of_sequence.t() @ x.flatten(0, 1)

    @uncompiled
    def whole(self, x: Tensor) -> Tensor:
        every = x.new_empty(self.tp.size * len(x), *x.shape[1:])
        self.tp.all_gather(every.view(-1), x.detach().contiguous().view(-1)).wait()
        return self.inside.whole(every.view(len(x), -1, *x.shape[2:]))

    @uncompiled
    def mine(self, x: Tensor) -> Tensor:
        return self._run(self.inside.mine(x))

    def runs(self, x: Tensor) -> tuple[Tensor, int]:
        return x.flatten(0, 1).unsqueeze(0), sequences_met(len(x), x.shape[1] * self.tp.size, self.tp.size)

    def here(self, conversations: Conversations) -> Conversations:
        return conversations.those(self._run)

    def _run(self, x: Tensor) -> Tensor:
        """Returns the tokens here, (batch, seq / tp, ...), of those of all tensor ranks, (batch, seq, ...)."""
        return x.flatten(0, 1).chunk(self.tp.size)[self.tp.rank].view(len(x), -1, *x.shape[2:])

    def _numbers(self, x: Tensor) -> Tensor:
        """Returns the number of the sequence of each token of `x` (batch, seq / tp, ...), (batch × seq / tp,)."""
        here, seq = x.shape[0] * x.shape[1], x.shape[1] * self.tp.size
        return torch.arange(self.tp.rank * here, (self.tp.rank + 1) * here, device=x.device) // seq


@dataclass(frozen=True)
class ExpertExchange:
    """Dispatches rows to the ranks that hold their experts, and combines: the `dispatch` of a mixture of experts."""

    exchange: RowExchange

    @uncompiled
    def __call__(self, moe: MixtureOfExperts, rows: Tensor, ends: Ends, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Applies the experts, wherever they are, to `rows` (rows, d_model), and the shared experts to `tokens`.

        `rows` are sorted by expert; `ends` of None is the same on all ranks."""
        ep = self.exchange.ep
        counts = _gather_counts(ep, rows, ends, moe.config.moe.n_experts)
        # The host waits here for the device, once per layer and forward pass: an all-to-all needs to be told its sizes.
        table = counts.tolist()
        mine = experts_of(len(table[0]), ep.size, ep.rank)
        by_rank = [line[mine.start : mine.stop] for line in table]
        by_expert = _transposed(by_rank)
        out, back = self.exchange.paths([_parts(line, ep.size) for line in table])

        sent = sum(table[ep.rank])  # without those of padding
        received = out.start(rows if sent == len(rows) else rows[:sent])
        shared = None if moe.shared is None else moe.shared(tokens)
        # Reusing the name frees the received rows before the experts run.
        received = _transpose_blocks(out.wait(received), by_rank)
        of_each = None if ends is None else counts[:, mine.start : mine.stop].sum(0).cumsum(0).to(ends.dtype)
        computed = moe.experts(received, of_each)
        return back.wait(back.start(_transpose_blocks(computed, by_expert))), shared


def _gather_counts(ep: Axis, rows: Tensor, ends: Ends, experts: int) -> Tensor:
    """Returns the number of rows that each rank has for each expert, (ranks, experts)."""
    if ends is None:
        return torch.full((ep.size, experts), len(rows) // experts)
    counts = ends.long().diff(prepend=ends.new_zeros(1))
    every = counts.new_empty(ep.size, experts)
    ep.all_gather(every.view(-1), counts).wait()
    return every


def _parts(sizes: Sequence[int], ep: int) -> list[int]:
    """Returns rows per rank, from rows per expert."""
    return [sum(sizes[expert] for expert in experts_of(len(sizes), ep, rank)) for rank in range(ep)]


def _transposed(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*blocks, strict=True)]


def _transpose_blocks(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """Reorders rows, given as blocks of `blocks` rows each, from row-major to column-major order of the blocks.

    Splitting and concatenating save nothing for the backward pass; an index would save itself."""
    if len(blocks) < 2 or (columns := len(blocks[0])) == 1:
        return rows
    parts = rows.split([size for line in blocks for size in line])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


@dataclass(frozen=True)
class RowExchange:
    """The way of rows to the ranks that hold their experts: one all-to-all among all ranks of `ep`, or, if `far` has
    several ranks, one inside each group of neighbours (`near`), and then one between the ranks at one place of every
    group (DeepSpeed-MoE, Rajbhandari et al. 2022; Tutel, Hwang et al. 2023): rows are sent twice, in fewer and larger
    messages between nodes. Another dispatch has other `paths`."""

    ep: Axis
    near: Axis = ALONE
    far: Axis = ALONE

    def paths(self, rows: Sequence[Sequence[int]]) -> tuple[RowPath, RowPath]:
        """Returns the way to the experts and the way back, if rank a has `rows[a][b]` rows for the experts of rank
        b."""
        mine, theirs = [*rows[self.ep.rank]], [line[self.ep.rank] for line in rows]
        if self.far.size == 1:
            return RowPath([_ExchangeRows(self.ep, mine, theirs)]), RowPath([_ExchangeRows(self.ep, theirs, mine)])
        near, place = self.near.size, self.near.rank
        group = range(self.ep.rank - place, self.ep.rank - place + near)
        to = [mine[start : start + near] for start in range(0, len(mine), near)]  # by group, then place
        passing = [[*rows[neighbour][place::near]] for neighbour in group]  # by neighbour, then group
        arriving = [sum(theirs[start : start + near]) for start in range(0, len(theirs), near)]
        to_places, inside = [sum(line) for line in _transposed(to)], [sum(line) for line in passing]
        across = [sum(line) for line in _transposed(passing)]
        out = [_ExchangeRows(self.near, to_places, inside), _ExchangeRows(self.far, across, arriving)]
        back = [_ExchangeRows(self.far, arriving, across), _ExchangeRows(self.near, inside, to_places)]
        return RowPath(out, [to, passing, ()]), RowPath(back, [(), _transposed(passing), _transposed(to)])


@dataclass
class RowPath:
    """All-to-alls of rows, one after the other."""

    hops: Sequence[_ExchangeRows]
    blocks: Sequence[Sequence[Sequence[int]]] = ((), ())
    """The blocks of rows that are transposed before each of them, and after the last; none where they lie in order."""

    def start(self, rows: Tensor) -> Tensor:
        """Starts sending rows. Returns what `wait` takes."""
        return self.hops[0].start(_transpose_blocks(rows, self.blocks[0]))

    def wait(self, arriving: Tensor) -> Tensor:
        """Returns the rows that have come all the way."""
        for number, hop in enumerate(self.hops, 1):
            arriving = _transpose_blocks(hop.wait(arriving), self.blocks[number])
            if number < len(self.hops):
                arriving = self.hops[number].start(arriving)
        return arriving


@dataclass
class _ExchangeRows:
    """One all-to-all of rows with separate start and wait, and the one of their gradients in the backward pass.

    Autograd runs ready nodes in reverse order of creation: operations between start and wait have their backward pass
    between the wait and the start."""

    ep: Axis
    sent_rows: list[int]
    """Rows sent to each rank."""
    received_rows: list[int]
    """Rows received from each rank."""
    in_flight: tuple[Tensor, Pending] | None = field(default=None, init=False)
    """The tensor that receives rows, or gradients of rows, and the collective to wait for."""

    def start(self, rows: Tensor) -> Tensor:
        """Starts sending. Returns the tensor (sum of `taken`, d_model) that holds the received rows after `wait`."""
        return _Start.apply(rows, self)  # pyright: ignore[reportReturnType]

    def wait(self, arriving: Tensor) -> Tensor:
        """Returns the received rows."""
        return _Wait.apply(arriving, self)  # pyright: ignore[reportReturnType]

    def begin(self, rows: Tensor, sent_rows: list[int], received_rows: list[int]) -> Tensor:
        """Starts sending rows, and returns the tensor that receives the others'."""
        arriving = rows.new_empty(sum(received_rows), *rows.shape[1:])
        self.in_flight = arriving, self.ep.all_to_all(arriving, rows.contiguous(), received_rows, sent_rows)
        return arriving

    def finish(self) -> Tensor:
        """Waits for the received rows and returns them."""
        assert self.in_flight is not None, "begun before"
        arriving, pending = self.in_flight
        self.in_flight = None
        pending.wait()
        return arriving


class _Start(torch.autograd.Function):
    """Starts sending rows; its backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _ExchangeRows) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sent_rows, exchange.received_rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    """Waits for rows; its backward pass starts sending their gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _ExchangeRows) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        exchange: _ExchangeRows = ctx.exchange
        exchange.begin(grad_outputs[0], exchange.received_rows, exchange.sent_rows)
        # Autograd expects gradients of the shape received here; those in flight wait for `_Start` in `exchange`.
        return grad_outputs[0], None
