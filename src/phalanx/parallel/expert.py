"""Expert parallelism: every rank holds some of the routed experts; tokens are dispatched to them and combined again.

A token's row goes to the rank that holds its expert, is processed there, and comes back (GShard, Lepikhin et al. 2021,
section 3): an all-to-all for dispatch and one for combine, and the same two reversed in the backward pass. The shared
experts, which need no communication, compute during dispatch; in the backward pass their gradients are computed while
those of the rows are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.blocks.feed_forward import sequences_met
from phalanx.comm.axis import Axis, Pending
from phalanx.config.cluster import DEVICE_WORDS
from phalanx.config.dispatchers import DISPATCHERS, absent
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.model.documents import Conversations, Documents
from phalanx.model.layers import uncompiled
from phalanx.model.moe import (
    Combine,
    Dispatch,
    Ends,
    ExpertFlight,
    GroupedLinear,
    MixtureOfExperts,
    RoutedTokens,
    Sequences,
    Slots,
    SpreadTokens,
    slots_of,
    tokens_of,
)
from phalanx.model.seeding import Noise, halves_of
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.linear import DeferredWeightGrads
from phalanx.parallel.tensor import TensorParallel
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


def dispatcher(name: str, device: torch.device) -> Callable[[Axis, Axis, Axis], Dispatch]:
    """Returns what makes the dispatcher `name`. Raises JobError if it does not run here, with the reason."""
    reason, kind = absent(name), DISPATCHERS[name].device
    if kind not in ("any", device.type):
        reason = f"runs on {DEVICE_WORDS[kind]}, this rank's device is {device}"
    if reason:
        raise JobError(f"layout.dispatch={name} {reason}; nearest legal: dispatch=tokens, or rows")
    return DISPATCHERS.code(name, "make")


def connect(model: nn.Module, dispatch: Dispatch, layout: Layout = ONE_RANK) -> None:
    """Makes the mixtures of experts in `model`, whose experts are cut over ranks, send tokens by `dispatch`."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.dispatch = dispatch
            if layout.folds and layout.ep_shard > 1:
                module.order = partial(in_order_of_ranks, module.config.moe.n_experts, layout)


def overlap_halves(
    model: Transformer, parallel: TensorParallel | None = None, deferred: DeferredWeightGrads | None = None
) -> None:
    """Makes blocks with experts compute both halves of a micro-batch in turn, in training. `deferred` takes the
    gradients of their weights, if their backward pass is split: one of each half."""
    for block in model.blocks.values():
        if isinstance(block, Block) and hasattr(block, "moe"):
            vars(block)["compute"] = OverlappedHalves(block, parallel)
            if deferred is not None:
                deferred.halved.append(block)


@dataclass(frozen=True)
class OverlappedHalves:
    """The `compute` of a block whose halves of the sequences overlap: while the tokens of one are on their way to
    experts or back, the other's attention or experts compute (DeepSeek-V3, section 3.2.1, within a block). Autograd
    runs the backward pass in the reverse order, so that it overlaps, too."""

    block: Block
    parallel: TensorParallel | None = None

    def __call__(
        self,
        x: Tensor,
        rotary: Tensor | None,
        noise: Noise | None,
        cache: Any,
        documents: Documents | None,
        conversations: Conversations | None,
        embedded: Tensor | None = None,
        *beside: Tensor,
    ) -> Tensor:
        """As Block.compute. Without gradients, where batches may differ between ranks, nothing overlaps."""
        block, moe = self.block, self.block.get_submodule("moe")
        assert isinstance(moe, MixtureOfExperts), "a block with experts"
        if len(x) == 1 or not torch.is_grad_enabled():
            return Block.compute(block, x, rotary, noise, cache, documents, conversations, embedded, *beside)
        x = x if block.join is None else block.join(x, embedded)
        flights = list[tuple[Tensor, ExpertFlight, Tensor]]()
        halves, parallel = halves_of(len(x), len(x)), self.parallel
        assert parallel is None or not parallel.sequence or len(x) == parallel.halved, "ranks have parts of both halves"
        # Where tensor ranks hold parts of each expert, they share the tokens around them.
        cut = None if parallel is None or parallel.folds else parallel
        noises = [noise and replace(noise, sample_ids=noise.sample_ids[half]) for half in halves]
        for half, own in zip(halves, noises, strict=True):
            turns = rotary if rotary is None or rotary.dim() == 4 else rotary[:, half]
            seen = None if documents is None else documents.part(half)
            counted = None if conversations is None else conversations.part(half)
            stream = block.attended(x[half], turns, own, cache, seen, counted)
            normed = block.mlp_norm(stream)
            flights.append((stream, *moe.send(normed if cut is None else cut.gathered(normed), counted)))
        shared = list[Tensor | None]()
        for _, flight, of_shared in flights:
            flight.compute()
            shared.append(None if moe.shared is None else moe.shared(of_shared))
        found = list[Tensor]()
        for (stream, flight, of_shared), of_all, half, own in zip(flights, shared, halves, noises, strict=True):
            y = moe.joined(flight.finish(), of_all, of_shared).unflatten(0, (len(stream), -1))
            y = y if cut is None else cut.reduced(y)
            tokens, projected = (each[half] for each in beside) if beside else (None, None)
            found.append(block.widened(stream, y, own, tokens, projected))
        return torch.cat(found)


class FoldedSequences(Sequences):
    """Access to whole sequences for the routers of tensor ranks that are ranks of ep: each routes a run of the tokens
    of all sequences of the micro-batch, in the order (sequence, position)."""

    def __init__(self, inside: Sequences, tp: Axis, halved: int = 0):
        self.inside, self.tp, self.halved = inside, tp, halved

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
        every, x = x.new_empty(len(x), self.tp.size * x.shape[1], *x.shape[2:]), x.detach().contiguous()
        for half in halves_of(len(x), self.halved):
            self.tp.all_gather(every[half].view(-1), x[half].view(-1)).wait()
        return self.inside.whole(every)

    @uncompiled
    def mine(self, x: Tensor) -> Tensor:
        return self._run(self.inside.mine(x))

    def runs(self, x: Tensor) -> tuple[Tensor, int]:
        seq, halves = x.shape[1] * self.tp.size, halves_of(len(x), self.halved)
        return x.flatten(0, 1).unsqueeze(0), sum(sequences_met(len(x[half]), seq, self.tp.size) for half in halves)

    def here(self, conversations: Conversations) -> Conversations:
        return conversations.those(self._run)

    def _run(self, x: Tensor) -> Tensor:
        """Returns the tokens here, (batch, seq / tp, ...), of those of all tensor ranks, (batch, seq, ...)."""
        halves, size, rank = halves_of(len(x), self.halved), self.tp.size, self.tp.rank
        return torch.cat([x[half].flatten(0, 1).chunk(size)[rank] for half in halves]).view(len(x), -1, *x.shape[2:])

    def _numbers(self, x: Tensor) -> Tensor:
        """Returns the number of the sequence of each token of `x` (batch, seq / tp, ...), (batch × seq / tp,)."""
        numbers = torch.arange(len(x), device=x.device).unsqueeze(1).expand(-1, x.shape[1] * self.tp.size)
        return self._run(numbers).flatten()


def lengths(ends: Tensor) -> Tensor:
    """Returns the lengths of runs that follow each other, of which these are the ends."""
    return ends.long().diff(prepend=ends.new_zeros(1))


def gather_counts(ep: Axis, counts: Tensor) -> Tensor:
    """Returns the numbers `counts` of every rank, (ranks, numbers)."""
    every = counts.new_empty(ep.size, len(counts))
    ep.all_gather(every.view(-1), counts).wait()
    return every


def _parts(sizes: Sequence[int], ep: int) -> list[int]:
    """Returns rows per rank, from rows per expert."""
    return [sum(sizes[expert] for expert in experts_of(len(sizes), ep, rank)) for rank in range(ep)]


def transposed(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the columns of a table of sizes."""
    return [list(column) for column in zip(*blocks, strict=True)]


def transpose_blocks(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """Reorders rows, given as blocks of `blocks` rows each, from row-major to column-major order of the blocks.

    Splitting and concatenating save nothing for the backward pass; an index would save itself."""
    if len(blocks) < 2 or (columns := len(blocks[0])) == 1:
        return rows
    parts = rows.split([size for line in blocks for size in line])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


@dataclass(frozen=True)
class RowExchange:
    """Sends a row per choice to the rank that holds its expert: a `dispatch` of mixtures of experts. One all-to-all
    among all ranks of `ep`, or, if `far` has several ranks, one inside each group of neighbours (`near`), and then one
    between the ranks at one place of every group (DeepSpeed-MoE, Rajbhandari et al. 2022; Tutel, Hwang et al. 2023):
    rows are sent twice, in fewer and larger messages between nodes."""

    ep: Axis
    near: Axis = ALONE
    far: Axis = ALONE

    def __call__(self, moe: MixtureOfExperts, routed: RoutedTokens) -> RowFlight:
        """Starts to send. Slots without ends are the same number on all ranks."""
        return self._start(moe, routed, moe.rows(routed))

    @uncompiled
    def _start(self, moe: MixtureOfExperts, routed: RoutedTokens, rows: Tensor) -> RowFlight:
        ep, n, ends = self.ep, moe.config.moe.n_experts, routed.slots.ends
        counts = torch.full((ep.size, n), len(rows) // n) if ends is None else gather_counts(ep, lengths(ends))
        # The host waits here for the device, once per layer and forward pass: an all-to-all needs to be told its sizes.
        table, mine = counts.tolist(), experts_of(n, ep.size, ep.rank)
        blocks = [line[mine.start : mine.stop] for line in table]
        out, back = self.paths([_parts(line, ep.size) for line in table])
        sent = sum(table[ep.rank])  # without those of padding
        here = None if ends is None else counts[:, mine.start : mine.stop].sum(0).cumsum(0).to(ends.dtype)
        return RowFlight(moe, routed, blocks, out, back, here, out.start(rows if sent == len(rows) else rows[:sent]))

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
        to_places, inside = [sum(line) for line in transposed(to)], [sum(line) for line in passing]
        across = [sum(line) for line in transposed(passing)]
        out = [_ExchangeRows(self.near, to_places, inside), _ExchangeRows(self.far, across, arriving)]
        back = [_ExchangeRows(self.far, arriving, across), _ExchangeRows(self.near, inside, to_places)]
        return RowPath(out, [to, passing, ()]), RowPath(back, [(), transposed(passing), transposed(to)])


@dataclass(eq=False)
class RowFlight:
    """Rows that RowExchange sends."""

    moe: MixtureOfExperts
    routed: RoutedTokens
    blocks: list[list[int]]
    """Rows from each rank for each expert here."""
    out: RowPath
    back: RowPath
    ends: Ends
    """The end of the rows of each expert here."""
    arriving: Tensor | None
    """The argument of `wait` of the path that the rows are on."""

    @uncompiled
    def compute(self) -> None:
        """Applies the experts to the rows that have arrived, and starts to send theirs back."""
        # Reusing the name frees the received rows before the experts run.
        received = transpose_blocks(self.out.wait(self.take()), self.blocks)
        computed = self.moe.experts(received, self.ends)
        self.arriving = self.back.start(transpose_blocks(computed, transposed(self.blocks)))

    def finish(self) -> Tensor:
        """Returns each token's combined output, (tokens, d_model)."""
        return self.moe.combine(self.arrived(), self.routed)

    @uncompiled
    def arrived(self) -> Tensor:
        """Returns the outputs of this rank's rows, (rows, d_model)."""
        return self.back.wait(self.take())

    def take(self) -> Tensor:
        """Returns what arrives, and leaves no reference to it."""
        arriving, self.arriving = self.arriving, None
        assert arriving is not None, "each way is waited for once"
        return arriving


@dataclass(frozen=True)
class TokenExchange:
    """Sends each token once to every rank with some of its experts, with its gates and the experts' numbers; what comes
    back is summed there already (DeepEP; DeepSeek-V3, section 3.2.2). A `dispatch` of mixtures of experts, and with
    other ways to send and to return that of a library."""

    ep: Axis
    copies: int = field(default=0, kw_only=True)
    """Experts on each rank that are copies of others' (parallel/redundant.py)."""

    def __call__(self, moe: MixtureOfExperts, routed: RoutedTokens) -> TokenFlight:
        """Starts to send."""
        chosen, n = chosen_of(moe, routed), moe.config.moe.n_experts
        return TokenFlight(moe, self, self.send(routed.tokens, chosen, routed.gates, n))

    @uncompiled
    def send(self, tokens: Tensor, chosen: Tensor, gates: Tensor, n: int) -> Any:
        """Starts to send `tokens` (tokens, d_model) to the ranks of their `chosen` ones among `n` experts, in the order
        of ranks, with their `gates`, both (tokens, top_k). A choice of expert n is none."""
        size, rank = self.ep.size, self.ep.rank
        ranks = (chosen // (n // size)).sort(-1).values
        first = ranks.diff(dim=-1, prepend=ranks.new_full((len(ranks), 1), -1)) != 0
        once = ranks.where(first, size).sort(-1).values[:, :size]
        slots = slots_of(once, size, once < size)
        experts = torch.searchsorted(chosen.flatten().sort().values, torch.arange(n, device=chosen.device), right=True)
        counts = torch.cat([_reached(slots.ends, chosen, n - size * self.copies), lengths(experts)])
        table = gather_counts(self.ep, counts).tolist()
        to, of = table[rank][:size], [line[rank] for line in table]
        sent, mine = sum(to), experts_of(n, size, rank)
        slots = slots._replace(choices=slots.choices[:sent])
        out = _ExchangeRows(self.ep, to, of)
        both = torch.cat((tokens, gates), -1)
        arriving = out.start(SpreadTokens.apply(both, slots.choices, slots.rows, None, slots.kept))
        numbers = _ExchangeRows(self.ep, to, of)
        names = numbers.start(chosen.index_select(0, tokens_of(slots.choices, slots.rows)).int())
        rows = sum(sum(line[size + mine.start : size + mine.stop]) for line in table)
        return TokensSent(slots, out, numbers, arriving, names, mine, rows)

    @uncompiled
    def arrive(self, sent: Any) -> RoutedTokens:
        """Returns the tokens that have arrived, with the numbers that their experts have here."""
        chosen = sent.numbers.wait(sent.names).long() - sent.mine.start
        tokens, gates = sent.out.wait(sent.take()).tensor_split((-chosen.shape[1],), -1)
        return arrived(tokens, chosen, gates, len(sent.mine), sent.rows)

    @uncompiled
    def send_back(self, outputs: Tensor, sent: Any) -> None:
        """Starts to return the outputs of the tokens that arrived, (tokens, d_model)."""
        sent.out = _ExchangeRows(self.ep, sent.out.received_rows, sent.out.sent_rows)
        sent.arriving = sent.out.start(outputs)

    @uncompiled
    def arrive_back(self, sent: Any) -> Tensor:
        """Returns the sums of each token's outputs, (tokens, d_model)."""
        rows, slots = sent.out.wait(sent.take()), sent.slots
        assert slots.kept is not None, "a token may have all its experts on one rank"
        return Combine.apply(rows, slots.kept.to(rows.dtype), slots.choices, slots.rows)


def chosen_of(moe: MixtureOfExperts, routed: RoutedTokens) -> Tensor:
    """Returns each token's experts in the order of ranks, (tokens, top_k): n_experts for a choice that is dropped."""
    chosen, kept = moe.order(routed.chosen), routed.slots.kept
    return chosen if kept is None else chosen.where(kept, moe.config.moe.n_experts)


def arrived(tokens: Tensor, chosen: Tensor, gates: Tensor, experts: int, rows: int) -> RoutedTokens:
    """Returns tokens that have arrived, with `rows` for this rank's `experts`: those `chosen` that are no number of
    these are other ranks'."""
    here = (chosen >= 0) & (chosen < experts)
    slots = slots_of(chosen, experts, here)
    assert slots.ends is not None, "experts have different numbers"
    # A token without experts, which stands for none at all, has a row.
    rows = max(rows, min(1, len(tokens)))
    slots = slots._replace(choices=slots.choices[:rows], ends=slots.ends.clamp(max=rows))
    return RoutedTokens(tokens, chosen, gates.where(here, 0), slots)


def token_exchange(ep: Axis, *_: Axis) -> TokenExchange:
    """Returns the dispatcher of tokens among all ranks of `ep` at once."""
    return TokenExchange(ep)


def _reached(ends: Ends, chosen: Tensor, n: int) -> Tensor:
    """Returns the number of tokens for each rank, of which `ends` are the ends. A rehearsal, whose routers choose
    nothing, puts a function of its own here, which needs the `chosen` ones among `n` experts."""
    assert ends is not None, "ranks have different numbers"
    return lengths(ends)


@dataclass
class TokensSent:
    """Tokens that TokenExchange has sent."""

    slots: Slots
    """The row of each token for each rank."""
    out: _ExchangeRows
    numbers: _ExchangeRows
    arriving: Tensor | None
    """The argument of `out.wait`, for tokens and gates."""
    names: Tensor
    """The argument of `numbers.wait`, for the experts' numbers."""
    mine: range
    """The experts here."""
    rows: int
    """Rows for them."""

    take = RowFlight.take


@dataclass(frozen=True)
class TokenFlight:
    """Tokens that TokenExchange sends."""

    moe: MixtureOfExperts
    exchange: TokenExchange
    sent: Any

    @uncompiled
    def compute(self) -> None:
        """Applies the experts to the tokens that have arrived, and starts to send their outputs back."""
        moe, here = self.moe, self.exchange.arrive(self.sent)
        rows = self.computed(moe.rows(here), here.slots.ends)
        self.exchange.send_back(MixtureOfExperts.combine(moe, rows, here), self.sent)

    def computed(self, rows: Tensor, ends: Ends) -> Tensor:
        """Returns the experts' outputs of their rows, (rows, d_model)."""
        return self.moe.experts(rows, ends)

    def finish(self) -> Tensor:
        """Returns each token's combined output, (tokens, d_model)."""
        return self.exchange.arrive_back(self.sent)


@dataclass
class RowPath:
    """All-to-alls of rows, one after the other."""

    hops: Sequence[_ExchangeRows]
    blocks: Sequence[Sequence[Sequence[int]]] = ((), ())
    """The blocks of rows that are transposed before each of them, and after the last; none where they lie in order."""

    def start(self, rows: Tensor) -> Tensor:
        """Starts sending rows. Returns what `wait` takes."""
        return self.hops[0].start(transpose_blocks(rows, self.blocks[0]))

    def wait(self, arriving: Tensor) -> Tensor:
        """Returns the rows that have come all the way."""
        for number, hop in enumerate(self.hops, 1):
            arriving = transpose_blocks(hop.wait(arriving), self.blocks[number])
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
        return _Start.apply(rows, self)

    def wait(self, arriving: Tensor) -> Tensor:
        """Returns the received rows."""
        return _Wait.apply(arriving, self)

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
