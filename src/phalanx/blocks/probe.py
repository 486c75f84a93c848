"""Compares the facts of a kind of layer with the operators that it yields for small models.

Predictions and the planner trust the operators. The torch module is compared with them when it is made
(model/transformer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.blocks.kind import AttentionKind, FeedForwardKind, SublayerKind
from phalanx.blocks.operator import Operator
from phalanx.blocks.place import Place
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.nearest import did_you_mean
from phalanx.registry import package_code

_PLAIN = ModelConfig(n_heads=4, n_kv_heads=2, positions="rope", activation="swiglu", bias=False)
_LATENT = MLA(kv_rank=8, q_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
NEEDS = {"mla.kv_rank": {"mla": _LATENT}, "moe.n_experts": {"moe": MoE(n_experts=4)}}
"""Fields that switch a part of a model on, and a small value of that part."""


def kind_problems(kind: SublayerKind) -> Iterator[str]:
    """Yields what contradicts the facts of a kind."""
    for path in kind.needs:
        if path not in NEEDS:
            yield f"needs: {path!r} switches no part of a model on{did_you_mean(path, NEEDS)} ({', '.join(NEEDS)} do)"
            return
    parts = {name: part for path in kind.needs for name, part in NEEDS[path].items()}
    place = Place(replace(_PLAIN, **parts), tp=2)
    with package_code("its operators failed for a small model with tp=2"):
        legal = not list(kind.problems(place.model))  # otherwise it goes with other models only
        found = list(_operator_problems(kind, place, tuple(kind.operators(place)))) if legal else []
    yield from found


def _operator_problems(kind: SublayerKind, place: Place, operators: tuple[Operator, ...]) -> Iterator[str]:
    weights = {weight.name: weight for operator in operators for weight in operator.weights}
    if not weights:
        yield "its operators have no weights"
    for name in weights:
        if not name.startswith(f"{kind.name_in_block}."):
            yield f"the name of the weight {name!r} must begin with {kind.name_in_block!r} and a dot"
    for names, cut in ((kind.connection.reads, "rows"), (kind.connection.writes, "columns")):
        for name in names:
            weight = weights.get(f"{kind.name_in_block}.{name}.weight")
            if weight and weight.cut != cut:
                yield f"{name} {'reads the input' if cut == 'rows' else 'writes the output'}: it must be cut by {cut}"
    if isinstance(kind, AttentionKind):
        cores = sum(operator.core is not None for operator in operators)
        if cores != len(kind.cores):
            yield f"it states {len(kind.cores)} cores, its operators have {cores}"
    if isinstance(kind, FeedForwardKind):
        if kind.width(place.model) < 1:
            yield f"width must be at least 1, is {kind.width(place.model)}"
        if kind.routed != any(weight.routed for weight in weights.values()):
            yield f"routed is {kind.routed}: so are not the names of its weights (moe.experts.…)"
    yield from _message_problems(place, operators)


def _message_problems(place: Place, operators: tuple[Operator, ...]) -> Iterator[str]:
    """Yields the problems of the messages off and onto the residual stream: one all-reduce of the stream in the
    backward pass and one in the forward pass."""
    sums = [
        message
        for operator in operators
        for message in operator.messages
        if message.axis == "tp" and message.collective == "all_reduce" and message.elements == place.hidden
    ]
    off, onto = sum(message.backward for message in sums), sum(message.forward for message in sums)
    for times, way, helper in ((off, "off", "enter"), (onto, "onto", "leave")):
        if times != 1:
            yield (
                f"its messages {way} the residual stream sum it {times:g} times over tensor ranks instead of once: "
                f"phalanx.blocks.residual.{helper} yields them"
            )
