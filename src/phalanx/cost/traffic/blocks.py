"""Bytes that a rank sends for activations of one micro-batch, forward and backward: a view of the messages of
phalanx.blocks.

Recomputation sends again, up to the last result that the backward pass needs: torch's checkpoint stops there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from phalanx.blocks.ends import embedding, head
from phalanx.blocks.experts import routed_rows
from phalanx.blocks.kinds import BlockKind, block
from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place
from phalanx.config.layout import Recompute
from phalanx.cost.traffic.table import Table


def around_traffic(place: Place, *, first: bool, last: bool) -> Table:
    """Returns the traffic after the embedding on the rank of the `first` stage, and from the final norm to the loss on
    that of the `last`. None of these payloads depends on the vocabulary."""
    operators = [*([embedding(place, 1)] if first else []), *(head(place, 1) if last else [])]
    return _traffic(place, operators, "none")


@cache
def block_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> Table:
    """Returns the traffic of one block, without the rows exchanged between experts."""
    return _traffic(place, block(place, kind), recompute)


@cache
def row_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> Table:
    """Returns the traffic of one row that a rank sends to an expert on another rank or back: sent once, once more for
    its gradient, and again if blocks are recomputed."""
    table = Table()
    messages = [each for operator in block(place, kind) for each in operator.messages if each.copies]
    for message in messages:
        row = message._replace(elements=place.model.d_model)
        table.note("ep", message.collective, place.bytes_of(row) * message.times(recompute) / len(messages))
    return table


def balanced_rows(place: Place) -> float:
    """Returns the rows that a rank sends to other ranks, to experts and back, in a block with experts: with a capacity
    every slot, without one the same number to every rank."""
    return 2 * routed_rows(place) * (place.ep - 1) / place.ep


def _traffic(place: Place, operators: Iterable[Operator], recompute: Recompute) -> Table:
    table = Table()
    for operator in operators:
        for message in operator.messages:
            ranks = place.ranks_of(message)
            if not message.copies and ranks > 1:
                table.add(
                    message.ledger_axis, message.collective, place.bytes_of(message), ranks, message.times(recompute)
                )
    return table
