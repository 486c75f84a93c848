"""The messages of a parameter's state between data ranks: gradients that are summed, parameters that are gathered.

Each rank that shards the state ends with one share of the gradients, after a reduce-scatter, and begins with one share
of the parameters, before an all-gather; replicas sum their shares (Rajbhandari et al. 2020, sections 5 and 7; HSDP:
Zhao et al. 2023, section 3.2.2). The ZeRO stage and the schedule decide how often each is sent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from phalanx.blocks.operator import Collective


class StateMessage(NamedTuple):
    """One collective over the state."""

    number: Literal["parameter", "gradient"]
    collective: Collective
    among: Literal["shard", "replicas"]
    elements: Any
    """Elements of the whole tensor, as in phalanx.blocks.operator.Message: a number, or an array."""


def state_messages(share: Any, ranks: Any) -> tuple[StateMessage, StateMessage, StateMessage]:
    """Returns the messages of parameters of which each of `ranks` ranks has `share` elements, padding included: the
    all-gather of the parameters, the reduce-scatter of their gradients, and the replicas' sum."""
    return (
        StateMessage("parameter", "all_gather", "shard", share * ranks),
        StateMessage("gradient", "reduce_scatter", "shard", share * ranks),
        StateMessage("gradient", "all_reduce", "replicas", share),
    )
