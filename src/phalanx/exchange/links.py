"""Which tensors of transformers hold which parameters of ours, for a model: a list of links that works in and out.

for link in links(model, family):
    ours = link.conversion.ours([read(name) for name in link.theirs], model)      # import
    theirs = link.conversion.theirs([read(name) for name in link.ours], model)    # export
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from phalanx.blocks.parameters import Shapes, parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.exchange.conversions import Conversion, Same


@dataclass(frozen=True)
class Match:
    """Patterns of names that hold the same numbers; {} stands for the layer, * for every expert in turn."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion


@dataclass(frozen=True)
class WeightLink:
    """Parameters of ours, and the tensors of theirs that hold the same numbers."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion


@dataclass(frozen=True)
class WeightFamily:
    """The weights of a model_type."""

    matches: tuple[Match, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expressions of other spellings of their names in files, and what stands in their place."""
    unused: tuple[str, ...] = ()
    """Regular expressions of tensors that no parameter needs."""
    next_token_layers: bool = False
    """Layers after the last one predict a second token; no parameter needs them."""

    def name_of(self, stored: str) -> str:
        """Returns the name that the table uses for a tensor of a file."""
        for pattern, plain in self.renamed:
            stored = re.sub(pattern, plain, stored)
        return stored

    def theirs_of(self, ours: str) -> tuple[str, ...]:
        """Returns the names in the table of the tensor that is equal to a parameter of ours; nothing without one."""
        return next((match.theirs for match in self.matches if match.ours == (ours,)), ())

    def needs(self, name: str, model: ModelConfig) -> bool:
        """Returns whether a tensor that no link names is an error: it is not if it is known to be without use."""
        if any(re.search(pattern, name) for pattern in self.unused):
            return False
        if model.tied and name in _HEADS:
            return False  # a copy of the embedding
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        return not (self.next_token_layers and layer and int(layer[1]) >= model.n_layers)


_HEADS = ("lm_head.weight", "embed_out.weight")


def equal(ours: str, theirs: str) -> Match:
    """Returns the match of two equal tensors."""
    return Match((ours,), (theirs,), Same())


def links(model: ModelConfig, family: WeightFamily) -> Iterator[WeightLink]:
    """Yields the links of all parameters of a model, in the order of its modules. Raises JobError for parameters that
    the family does not have."""
    shapes = parameter_shapes(model)
    by_pattern = {name: match for match in family.matches for name in match.ours}
    missing = []
    for name in shapes:
        layer, pattern = _pattern(name)
        match = by_pattern.get(pattern)
        if match is None:
            missing.append(name)
        elif pattern == match.ours[0]:
            ours = tuple(each.format(layer) for each in match.ours)
            theirs = (each.format(layer) for each in match.theirs)
            yield WeightLink(ours, tuple(_of_experts(theirs, model)), match.conversion)
    if missing:
        rest = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise JobError(f"parameters without a counterpart in transformers: {', '.join(missing[:3])}{rest}")


def shapes_of_theirs(link: WeightLink, model: ModelConfig, shapes: Shapes) -> Shapes:
    """Returns the shapes of the tensors of theirs, from `shapes`, those of all parameters of ours."""
    ours = [torch.empty(shapes[name], device="meta") for name in link.ours]
    theirs = link.conversion.theirs(ours, model)
    return {name: tuple(tensor.shape) for name, tensor in zip(link.theirs, theirs, strict=True)}


def by_theirs(model: ModelConfig, family: WeightFamily) -> Mapping[str, WeightLink]:
    """Returns the link of every tensor of theirs."""
    return {name: link for link in links(model, family) for name in link.theirs}


def _pattern(name: str) -> tuple[str, str]:
    """Returns the layer of a parameter, if it has one, and its pattern."""
    layer = re.match(r"blocks\.(\d+)\.", name)
    return (layer[1], f"blocks.{{}}.{name[layer.end() :]}") if layer else ("", name)


def _of_experts(names: Iterator[str], model: ModelConfig) -> Iterator[str]:
    for name in names:
        if "*" not in name:
            yield name
        else:
            yield from (name.replace("*", str(expert)) for expert in range(model.moe.n_experts))
