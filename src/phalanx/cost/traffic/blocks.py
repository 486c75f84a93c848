"""Bytes that a rank sends for activations, of one micro-batch there and back: a view of the messages of phalanx.blocks.

What is computed again is sent again, up to the last result that the backward pass asks for: torch's checkpoint stops
there.
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
    """Returns the traffic after the embedding where the `first` stage is here, and from the final norm to the loss
    where the `last` is. No payload of these depends on the vocabulary."""
    operators = [*([embedding(place, 1)] if first else []), *(head(place, 1) if last else [])]
    return _traffic(place, operators, "none")


@cache
def block_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> Table:
    """Returns the traffic of one block; of what experts exchange, that which does not depend on the tokens."""
    return _traffic(place, block(place, kind), recompute)


@cache
def row_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> Table:
    """Returns the traffic of one row that leaves a rank for another on its way to an expert or back: each is sent by
    its gradient once more, and once more where blocks are computed again."""
    table = Table()
    messages = [each for operator in block(place, kind) for each in operator.messages if each.copies]
    for message in messages:
        row = message._replace(elements=place.model.d_model)
        table.note("ep", message.collective, place.bytes_of(row) * message.times(recompute) / len(messages))
    return table


def balanced_rows(place: Place) -> float:
    """Returns the rows that a rank sends to other ranks, to experts and back, in a block with experts: all that the
    capacity leaves room for, and without one as many to every rank."""
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
