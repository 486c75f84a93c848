"""Bytes that a rank sends for activations, of one micro-batch there and back: through a block, and around the blocks.

Tensor parallelism: 4 all-reduces of the residual stream a block (Shoeybi et al. 2019, section 3), in sequence
parallelism each an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2). Context parallelism: keys
and values go round a ring forward, and again in the backward pass with their gradients (Liu et al. 2023); Ulysses
exchanges queries, keys, values and the output each way (Jacobs et al. 2023). Experts: rows go out and come back, twice
(Lepikhin et al. 2021).

What is computed again is sent again, up to the last result that the backward pass asks for: torch's checkpoint stops
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.traffic.table import Table

INDEX = 8
"""Bytes of a count or of an expert's number."""


@dataclass(frozen=True)
class Micro:
    """A micro-batch on one rank."""

    model: ModelConfig
    layout: Layout
    """What a block recomputes is what its `recompute` says."""
    sequences: int
    width: int
    """Bytes of an activation."""
    slices: int = 1
    """Parts in which its sequences travel a pipeline."""

    @property
    def tokens(self) -> int:
        """Of the sequences, here."""
        return self.sequences * self.model.seq_len // self.layout.cp

    @property
    def stream(self) -> int:
        """Bytes of the residual stream of these tokens, all tensor ranks' shares of it together."""
        return self.tokens * self.model.d_model * self.width

    @property
    def wide(self) -> int:
        """Bytes of a number in losses and in sums over attention."""
        return max(self.width, 4)

    @property
    def forwards(self) -> int:
        """How often blocks are computed."""
        return 2 if self.layout.recompute == "full" else 1

    @property
    def boundary(self) -> float:
        """Bytes of one message between two stages: of a slice of the sequences where they travel in slices."""
        return self.stream / self.slices / (self.layout.tp if self.layout.sp else 1)


def around_traffic(micro: Micro, *, first: bool, last: bool) -> Table:
    """After the embedding where the `first` stage is here, and from the final norm to the loss where the `last` is."""
    table, tp = Table(), micro.layout.tp
    if first:
        _leave(table, micro)
    if last:
        _enter(table, micro)
        # Of every token the largest logit, and the sum and the chosen one. In chunks, logits are computed twice.
        times = 2 if micro.layout.loss_chunk else 1
        table.add("tp", "all_reduce", 3 * micro.tokens * micro.wide, tp, times)
    return table


@cache
def block_traffic(micro: Micro, experts: bool) -> Table:
    """One block, dense or with experts; of what experts exchange, that which does not depend on the tokens."""
    table, model, layout = Table(), micro.model, micro.layout
    again = layout.sp_regather and layout.recompute != "full"
    regathers = again and not model.mla.kv_rank, again and not experts
    for regather in regathers:
        _enter(table, micro, micro.forwards)
        if regather:
            table.add("tp", "all_gather", micro.stream, layout.tp)
    _leave(table, micro, micro.forwards)
    # Nothing after a sum over experts is kept but the dropout's mask: else that sum is not repeated.
    _leave(table, micro, 1 if experts and not model.dropout else micro.forwards)
    _context(table, micro)
    if experts:
        _routing(table, micro)
    return table


def row_traffic(micro: Micro, rows: float) -> Table:
    """`rows` that leave a rank for others on their way to an expert or back: each is sent by its gradient once more,
    and once more where blocks are computed again."""
    table = Table()
    table.note("ep", "all_to_all", rows * micro.model.d_model * micro.width * (micro.forwards + 1))
    return table


def balanced_rows(micro: Micro) -> float:
    """Rows that a rank sends others, to experts and back, in a block with experts: all that the capacity leaves room
    for, and without one as many to every rank."""
    moe, ep = micro.model.moe, micro.layout.ep
    rows = micro.tokens * moe.top_k
    if moe.capacity:
        here = micro.model.seq_len // micro.layout.cp
        rows = moe.n_experts * micro.sequences * min(moe.most_tokens(micro.model.seq_len), here)
    return 2 * rows * (ep - 1) / ep


def _enter(table: Table, micro: Micro, forwards: int = 1) -> None:
    """Off the residual stream."""
    tp, stream = micro.layout.tp, micro.stream
    if micro.layout.sp:
        table.add("tp", "all_gather", stream, tp, forwards)
    table.add("tp", "reduce_scatter" if micro.layout.sp else "all_reduce", stream, tp)


def _leave(table: Table, micro: Micro, forwards: int = 1) -> None:
    """Onto the residual stream."""
    tp, stream = micro.layout.tp, micro.stream
    if micro.layout.sp:
        table.add("tp", "all_gather", stream, tp)
    table.add("tp", "reduce_scatter" if micro.layout.sp else "all_reduce", stream, tp, forwards)


def _context(table: Table, micro: Micro) -> None:
    """Attention of a block, where ranks hold parts of every sequence."""
    model, layout = micro.model, micro.layout
    ulysses = layout.cp_ulysses
    queries = model.n_heads // layout.tp
    keys = queries if model.mla.kv_rank else max(1, model.kv_heads // layout.tp)
    if ulysses > 1:
        keys = max(keys, ulysses)  # fewer heads than ranks go to several
    # With slices keys and values are those of all slices so far: of the first slice once for each there is.
    seen = micro.tokens // micro.slices * (micro.slices * (micro.slices + 1) // 2)
    keys_and_values = seen * keys * (model.head_size + model.v_head_size)
    forwards = 1 if layout.recompute == "none" else 2
    inputs = (micro.tokens * queries * model.head_size + keys_and_values) * micro.width
    output = micro.tokens * queries * model.v_head_size * micro.width
    table.add("cp", "all_to_all", inputs, ulysses, forwards + 1)
    # The last that attention keeps for its backward pass is what comes before this exchange.
    table.add("cp", "all_to_all", output, ulysses, micro.forwards + 1)
    hops = layout.ring - 1
    table.note("cp", "send", hops * keys_and_values * ((forwards + 1) * micro.width + micro.wide))


def _routing(table: Table, micro: Micro) -> None:
    """What routers tell each other."""
    moe, layout = micro.model.moe, micro.layout
    if moe.aux_loss:
        table.add("cp", "all_reduce", micro.sequences * moe.n_experts * INDEX, layout.cp, micro.forwards)
    if moe.capacity:
        chosen = layout.cp * micro.tokens * moe.top_k * INDEX
        table.add("cp", "all_gather", chosen, layout.cp, micro.forwards)
    else:
        sizes = layout.ep * moe.n_experts * INDEX
        table.add("ep", "all_gather", sizes, layout.ep, micro.forwards * micro.slices)
