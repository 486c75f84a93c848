"""Replaces a plain model's modules by parallel ones of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from phalanx.model.layers import Linear

Plain = TypeVar("Plain", bound=nn.Module)
OneLinear = TypeVar("OneLinear", bound=Linear)


class Tile(nn.Module):
    """A part of a large matrix: a unit that ZeRO-3 gathers (parallel/tiling.py)."""


def replace_modules(model: nn.Module, kind: type[Plain], make: Callable[[Plain], nn.Module]) -> int:
    """Replaces every submodule of `model` of class `kind` by the result of `make`. Returns how many there were."""
    chosen = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    for name, module in chosen:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, make(module))
    return len(chosen)


def linear_of(kind: type[OneLinear], plain: Linear) -> OneLinear:
    """Returns a linear layer of class `kind` with the same parameters as `plain`, under the same names."""
    layer = kind(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
    layer.weight, layer.bias = plain.weight, plain.bias
    layer.lora_a, layer.lora_b, layer.lora_scale = plain.lora_a, plain.lora_b, plain.lora_scale
    return layer
