"""Makes the torch module of a block's sub-layer from its kind, and compares it with the kind's description."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from phalanx.blocks import residual as lora
from phalanx.blocks.kinds import AttentionKind, FeedForwardKind, SublayerKind
from phalanx.blocks.operator import Half, Place
from phalanx.blocks.parameters import Shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import ExtensionError
from phalanx.model.attention import CoreAttention
from phalanx.model.experts import GroupedLinear
from phalanx.model.layers import Linear
from phalanx.registry import Registry


def make_sublayer(
    table: Registry[AttentionKind] | Registry[FeedForwardKind], name: str, model: ModelConfig, layer: int, *more: object
) -> nn.Module:
    """Returns the module of the kind `name` for block `layer`; `more` are further arguments of what makes it.

    Raises ExtensionError if there is none, or if it is not the one that the kind describes."""
    kind = table[name]
    made: nn.Module = table.code(name, "module")(model, layer, *more)
    problems = [*_other_parameters(kind, model, made), *_other_modules(kind, made)]
    if problems := problems or list(_add_adapters(kind, model, made)):
        raise ExtensionError([f"{table.kind} {name!r}: {problem}" for problem in problems])
    return made


def _add_adapters(kind: SublayerKind, model: ModelConfig, made: nn.Module) -> Iterator[str]:
    """Gives the linear layers that are targets their adapters. Yields those that are no linear layers."""
    half: Half = "attention" if isinstance(kind, AttentionKind) else "feed_forward"
    for name in dict.fromkeys(lora.targets(Place(model), half, kind.operators(Place(model)))):
        layer = made.get_submodule(name.removeprefix(f"{kind.name_in_block}."))
        if isinstance(layer, Linear | GroupedLinear):
            layer.add_adapter(model.lora.rank, model.lora.scale)
        else:
            yield f"model.lora: {name} of its module must be a Linear of phalanx.model.layers to have an adapter"


def _other_parameters(kind: SublayerKind, model: ModelConfig, made: nn.Module) -> Iterator[str]:
    """Yields the differences between the weights of a description and the parameters of a module."""
    operators, prefix = kind.operators(Place(model)), kind.name_in_block
    described: Shapes = {weight.name: weight.shape for operator in operators for weight in operator.weights}
    held: Shapes = {f"{prefix}.{name}": tuple(parameter.shape) for name, parameter in made.named_parameters()}
    yield from (f"its module lacks the weight {name} {described[name]}" for name in described if name not in held)
    yield from (f"its operators lack the parameter {name} {held[name]}" for name in held if name not in described)
    for name in described:
        if name in held and held[name] != described[name]:
            yield f"{name} is {described[name]} in its operators and {held[name]} in its module"
    if described == held and list(described) != list(held):
        yield f"its operators have the weights in the order {', '.join(described)}, its module {', '.join(held)}"


def _other_modules(kind: SublayerKind, made: nn.Module) -> Iterator[str]:
    """Yields the submodules that a kind names and a module does not have so."""
    named = dict(made.named_modules())
    if kind.connection.reads and not hasattr(made, "project"):
        yield f"its module applies {', '.join(kind.connection.reads)}, which read the input, without a `project`"
    for name in (*kind.connection.reads, *kind.connection.writes):
        if not isinstance(named.get(name), Linear | GroupedLinear | None):
            yield f"{name} of its module must be a Linear of phalanx.model.layers, is {type(named[name]).__name__}"
    if isinstance(kind, AttentionKind):
        cores = [name for name, module in named.items() if isinstance(module, CoreAttention)]
        if sorted(cores) != sorted(kind.cores):
            yield f"it states the cores {list(kind.cores)}, its module has {cores}"
