"""Makes the torch module of a block's sub-layer from its kind, and compares it with the kind's description."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from phalanx.blocks.kind import AttentionKind, FeedForwardKind
from phalanx.blocks.parameters import Shapes
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig
from phalanx.errors import ExtensionError
from phalanx.registry import Registry


def make_sublayer(
    table: Registry[AttentionKind] | Registry[FeedForwardKind], name: str, model: ModelConfig, layer: int, *more: object
) -> nn.Module:
    """Returns the module of the kind `name` for block `layer`; `more` are further arguments of what makes it.

    Raises ExtensionError if there is none, or if it is not the one that the kind describes."""
    kind = table[name]
    made = table.code(name, "module")(model, layer, *more)
    operators = kind.operators(Place(model))
    described: Shapes = {weight.name: weight.shape for operator in operators for weight in operator.weights}
    held: Shapes = {
        f"{kind.name_in_block}.{name}": tuple(parameter.shape) for name, parameter in made.named_parameters()
    }
    if list(described.items()) != list(held.items()):
        raise ExtensionError([f"{table.kind} {name!r}: {problem}" for problem in _differences(described, held)])
    return made


def _differences(described: Shapes, held: Shapes) -> Iterator[str]:
    """Yields the differences between a description's weights and a module's parameters."""
    yield from (f"its module lacks the weight {name} {described[name]}" for name in described if name not in held)
    yield from (f"its operators lack the parameter {name} {held[name]}" for name in held if name not in described)
    for name in described:
        if name in held and held[name] != described[name]:
            yield f"{name} is {described[name]} in its operators and {held[name]} in its module"
    if described == held:
        yield f"its operators have the weights in the order {', '.join(described)}, its module {', '.join(held)}"
