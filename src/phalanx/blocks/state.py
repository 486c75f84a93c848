"""The messages of a parameter's state between data ranks: gradients that are summed, parameters that are gathered.

Each rank that shards the state ends with one share of the gradients, after a reduce-scatter, and begins with one share
of the parameters, before an all-gather; replicas sum their shares (Rajbhandari et al. 2020, sections 5 and 7; HSDP:
Zhao et al. 2023, section 3.2.2). With a second copy of the parameters inside the node, later gathers of a step stay
there (hpZ: Wang et al. 2023, "ZeRO++", section 3.2). The ZeRO stage and the schedule decide how often each is sent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from phalanx.blocks.operator import Collective

Purpose = Literal["gather", "regather", "reduce", "sum"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


class StateMessage(NamedTuple):
    """One collective over the state."""

    purpose: Purpose
    collective: Collective
    among: Literal["shard", "near", "across", "replicas"]
    """`near`: the ranks of `shard` that keep a second copy of the parameters, those of a node; `across`: the ranks at
    the same place of every node."""
    size: Any
    """Bytes of the whole tensor: a number, or an array."""


def state_messages(
    ranks: Any, *, gathered: Any, reduced: Any, summed: Any, near: Any = 0, coded: bool = False
) -> tuple[StateMessage, ...]:
    """Returns the messages of parameters that `ranks` ranks share: the all-gather of the parameters, the one by which
    they are gathered again in the same step, the reduce-scatter of their gradients, and the replicas' sum.

    `gathered`, `reduced` and `summed` are the bytes, padding included, in which one rank's share of the parameters is
    gathered, one of the gradients reduced, and one summed over replicas. `near`: the ranks that keep a second copy
    together, from which parameters are gathered again; 0 without one. `coded`: gradients are sent as codes, which no
    reduce-scatter sums: an all-to-all inside the node, if it is known, and one across nodes."""
    whole = reduced * ranks
    if not coded:
        reductions = [StateMessage("reduce", "reduce_scatter", "shard", whole)]
    elif near:
        inside = StateMessage("reduce", "all_to_all", "near", whole)
        reductions = [inside, StateMessage("reduce", "all_to_all", "across", whole / near)]
    else:
        reductions = [StateMessage("reduce", "all_to_all", "shard", whole)]
    return (
        StateMessage("gather", "all_gather", "shard", gathered * ranks),
        StateMessage("regather", "all_gather", "near" if near else "shard", gathered * ranks),
        *reductions,
        StateMessage("sum", "all_reduce", "replicas", summed),
    )
