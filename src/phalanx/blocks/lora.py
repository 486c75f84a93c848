"""Low-rank adapters beside frozen matrices (Hu et al. 2022, section 4.1): W x + alpha / rank · B (A x).

Tensor ranks cut an adapter with its matrix. Beside a matrix that is cut by rows A is whole, and each rank has its rows
of B; beside one that is cut by columns each rank has its columns of A, and B is whole: the ranks' products B (A x) are
summed with the matrix's own. So no message is added in a pass; of the adapter's whole matrix each rank computes a part
of the gradient, and the parts are summed once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from phalanx.blocks.operator import PLAIN, MemoryBound, Operator, SavedTensor, Weight
from phalanx.blocks.place import Half, Place
from phalanx.config.model import LoRA, ModelConfig

A, B = "lora_a", "lora_b"
"""The adapter's layers, inside the linear layer of their matrix."""
EVERY = "all"
"""The target that stands for every matrix."""


def is_adapter(name: str) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))


def frozen(model: ModelConfig, weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Returns weights outside the blocks, or of norms: frozen if the model has adapters."""
    return tuple(weight._replace(frozen=True) for weight in weights) if model.lora.rank else tuple(weights)


def layer_of(name: str) -> str:
    """Returns the name within its block of the layer that a weight belongs to: "moe.shared.up" of
    "moe.shared.up.weight"."""
    return name.rpartition(".")[0]


def names_of(layer: str) -> list[str]:
    """Returns the names by which targets may mean a layer: "moe.shared.up", "shared.up" and "up"."""
    parts = layer.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def can_adapt(weight: Weight) -> bool:
    """Returns whether a weight of a block's half may have an adapter: the matrix of any linear layer but a router."""
    return weight.is_matrix and not layer_of(weight.name).endswith("router")


def is_target(lora: LoRA, half: Half, layer: str) -> bool:
    """Returns whether a linear layer of a half of a block, such as "attn.wq" or "moe.shared.up", has an adapter."""
    return bool(lora.rank) and not {EVERY, half, *names_of(layer)}.isdisjoint(lora.names)


def saved_input(place: Place, half: Half, *layers: str) -> int:
    """Returns the bytes per element of the input of some linear layers that is saved for the gradients of their
    weights: none if they are frozen and have no adapters, which read the same."""
    lora = place.model.lora
    return place.read if not lora.rank or any(is_target(lora, half, layer) for layer in layers) else 0


def targets(place: Place, half: Half, operators: Iterable[Operator]) -> Iterator[str]:
    """Yields the linear layers with adapters among the operators of a half of a block, without adapters themselves."""
    for operator in operators:
        yield from (
            layer_of(weight.name) for weight in operator.weights if _has_adapter(place.model.lora, half, weight)
        )


def _has_adapter(lora: LoRA, half: Half, weight: Weight) -> bool:
    return can_adapt(weight) and is_target(lora, half, layer_of(weight.name))


def adapted(place: Place, half: Half, operators: Iterable[Operator]) -> Iterator[Operator]:
    """Yields the operators of a half of a block with their weights frozen, each followed by the adapters of those that
    are targets; without adapters the operators themselves."""
    lora = place.model.lora
    for operator in operators:
        if not lora.rank:
            yield operator
            continue
        yield replace(operator, weights=frozen(place.model, operator.weights))
        if found := [weight for weight in operator.weights if _has_adapter(lora, half, weight)]:
            yield from _adapters(place, operator, found)


def _adapters(place: Place, operator: Operator, matrices: list[Weight]) -> Iterator[Operator]:
    """Yields the product of an operator's input with the adapters' A, which all read the same, and those with B."""
    pairs = [_pair(weight, place.model.lora.rank) for weight in matrices]
    first = pairs[0][0]
    number = first.shape_on(place.tp, place.ep)[0] if first.routed else 1
    rows = operator.rows * number
    compressed = place.model.lora.rank * len(pairs)
    uneven = place.profile.imbalance if first.routed and place.ep > 1 else 1
    inputs = first.shape_on(place.tp, place.ep)[-1]
    yield Operator(
        f"{operator.name} {A}",
        tuple(a for a, _ in pairs),
        operator.rows,
        sixteen=True,
        # The factor, and the sum of the gradients of the input.
        memory_bound=(MemoryBound(A, 2 * rows * compressed, rows * (2 * compressed + 3 * inputs), number),),
        saved=(SavedTensor(A, uneven * rows / place.tokens * compressed * place.width, "whole"),),
    )
    for _, b in pairs:
        outputs = rows * b.shape_on(place.tp, place.ep)[-2]
        yield Operator(
            f"{operator.name} {B}",
            (b,),
            operator.rows,
            sixteen=True,
            memory_bound=(MemoryBound(B, 3 * outputs, 0),),
        )


def _pair(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Returns the adapter's two weights."""
    *stack, outputs, inputs = weight.shape
    layer = weight.name.removesuffix(".weight")
    a = b = PLAIN._replace(gradient=weight.gradient)
    if weight.cut == "rows":
        a, b = a._replace(gradient="partial"), b._replace(cut="rows", unit=weight.unit)
    elif weight.cut == "columns":
        a, b = a._replace(cut="columns"), b._replace(gradient="partial")
    return (
        a._replace(name=f"{layer}.{A}.weight", shape=(*stack, rank, inputs), initial="adapter"),
        b._replace(name=f"{layer}.{B}.weight", shape=(*stack, outputs, rank), initial="zeros"),
    )


def by_layer(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Returns weights in the order of the module tree: an adapter comes right after the matrix that it adapts."""
    places: dict[str, int] = {}
    return tuple(sorted(weights, key=lambda weight: places.setdefault(_adapted_layer(weight.name), len(places))))


def _adapted_layer(name: str) -> str:
    """Returns the linear layer of a weight, of an adapter's that of the matrix beside it."""
    owner = name.rpartition(".")[0]
    return owner.removesuffix(f".{A}").removesuffix(f".{B}")
