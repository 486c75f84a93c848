"""Makes the torch module of a block's sub-layer from its kind, and compares it with the kind's description."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from torch import nn

from phalanx.blocks.kind import SublayerKind
from phalanx.blocks.parameters import Shapes
from phalanx.blocks.place import Place
from phalanx.config.model import ModelConfig
from phalanx.errors import ExtensionError


def make_sublayer(kind: SublayerKind, model: ModelConfig, layer: int, *more: object) -> nn.Module:
    """Returns the module of `kind` for block `layer`; `more` are further arguments of what makes it.

    Raises ExtensionError if there is no such module, or if its parameters are not those of the description."""
    package, _, name = kind.module.partition(":")
    try:
        make = getattr(import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ExtensionError(f"kind {kind.name!r}: its module {kind.module} is not there: {error}") from error
    made = make(model, layer, *more)
    operators = kind.operators(Place(model))
    described: Shapes = {weight.name: weight.shape for operator in operators for weight in operator.weights}
    held: Shapes = {f"{kind.place}.{name}": tuple(parameter.shape) for name, parameter in made.named_parameters()}
    if list(described.items()) != list(held.items()):
        raise ExtensionError([f"kind {kind.name!r}: {problem}" for problem in _differences(described, held)])
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
