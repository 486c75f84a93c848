"""Which tensors of transformers hold which parameters of ours, for a model: a list of links that works in and out.

for link in links(model, family):
    ours = link.conversion.ours([read(name) for name in link.theirs], model)      # import
    theirs = link.conversion.theirs([read(name) for name in link.ours], model)    # export

A conversion takes a list of tensors to a list of tensors: parts, permutations, transposes, stacks, and a sum with a
constant. None of them rounds: a constant is added in fp64, in which an import keeps the sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import Shapes, parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError

_Convert = Callable[[Sequence[Tensor], ModelConfig], list[Tensor]]


@dataclass(frozen=True)
class Conversion:
    """A bijection between tensors of theirs and parameters of ours."""

    ours: _Convert
    """Returns the parameters of ours that tensors of theirs hold."""
    theirs: _Convert
    """The inverse."""
    widens: bool = False
    """Ours are fp64 after an import, whatever theirs are, since a sum has more digits than its parts."""


SAME = Conversion(lambda theirs, _: list(theirs), lambda ours, _: list(ours))
TRANSPOSED = Conversion(lambda theirs, _: [each.mT for each in theirs], lambda ours, _: [each.mT for each in ours])
"""Theirs is (inputs, outputs) in its last two dimensions, ours (outputs, inputs)."""
INTERLEAVED = Conversion(
    lambda theirs, _: [theirs[0][..., 0::2], theirs[0][..., 1::2]],
    lambda ours, _: [torch.stack(list(ours), dim=-1).flatten(-2)],
)
"""One tensor of theirs holds two of ours in turn along its last dimension: gate and up of gpt-oss."""
STACKED = Conversion(lambda theirs, _: [torch.stack(list(theirs))], lambda ours, _: list(ours[0].unbind()))
"""Ours is a stack of theirs along a first dimension: one tensor per expert."""


def then(first: Conversion, second: Conversion) -> Conversion:
    """Returns two conversions, in the order from theirs to ours."""
    return Conversion(
        lambda theirs, model: second.ours(first.ours(theirs, model), model),
        lambda ours, model: first.theirs(second.theirs(ours, model), model),
    )


def offset(constant: float) -> Conversion:
    """Returns the conversion to theirs plus a constant: Gemma's norms multiply by 1 + w."""
    return Conversion(
        lambda theirs, _: [each.double() + constant for each in theirs],
        lambda ours, _: [each.double() - constant for each in ours],
        widens=True,
    )


def equal_parts(parts: int, dim: int = 0) -> Conversion:
    """Returns the conversion of one tensor of theirs to so many equal parts of it, one after the other."""
    return Conversion(lambda theirs, _: list(theirs[0].chunk(parts, dim)), lambda ours, _: [torch.cat(list(ours), dim)])


OF_EACH_LAYER = Conversion(
    lambda theirs, model: list(theirs[0].chunk(model.n_layers, 1)), lambda ours, _: [torch.cat(list(ours), 1)]
)
"""One tensor of theirs holds columns of every layer in turn."""


def _split_rows(sizes: Callable[[ModelConfig], Sequence[int]], groups: Callable[[ModelConfig], int]) -> Conversion:
    """Returns the conversion of rows that are, for each of some groups, those of several of ours."""

    def ours(theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        parts = theirs[0].unflatten(0, (groups(model), -1)).split(list(sizes(model)), 1)
        return [part.flatten(0, 1) for part in parts]

    def theirs(ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        return [torch.cat([each.unflatten(0, (groups(model), -1)) for each in ours], 1).flatten(0, 1)]

    return Conversion(ours, theirs)


def _per_key_head(model: ModelConfig) -> tuple[int, int]:
    return model.delta.key_head_dim, model.delta.n_heads // model.delta.key_heads


def _of_all_heads(model: ModelConfig) -> tuple[int, int, int]:
    keys = model.delta.key_heads * model.delta.key_head_dim
    return keys, keys, model.delta.n_heads * model.delta.head_dim


HEADS_IN_A_ROW = _split_rows(
    lambda model: [number * model.head_size for number in (model.n_heads, model.kv_heads, model.kv_heads)], lambda _: 1
)
"""One tensor of theirs holds all queries' heads, then the keys' and the values' (Phi-3)."""
INPUTS_BY_KEY_HEAD = _split_rows(
    lambda model: [_per_key_head(model)[0]] * 2 + [_per_key_head(model)[1] * model.delta.head_dim] * 2,
    lambda model: model.delta.key_heads,
)
"""One tensor of theirs holds, for each key head, its query, its key, its values and their gates (Qwen3-Next)."""
GATES_BY_KEY_HEAD = _split_rows(lambda model: [_per_key_head(model)[1]] * 2, lambda model: model.delta.key_heads)
"""The same of the logits of β and the steps of the decay."""
INPUTS_IN_A_ROW = _split_rows(_of_all_heads, lambda _: 1)
"""One tensor of theirs holds all queries, then all keys and all values (Qwen 3.5)."""
CONVOLUTIONS = then(
    Conversion(
        lambda theirs, _: [each.squeeze(1) for each in theirs], lambda ours, _: [each.unsqueeze(1) for each in ours]
    ),
    INPUTS_IN_A_ROW,
)
"""The same of the taps of a convolution, (channels, 1, taps) in theirs."""


def per_head(parts: int = 3) -> Conversion:
    """Returns the conversion of rows that are, head by head, those of several of ours: GPT-NeoX's queries, keys and
    values."""

    def ours(theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        rows = theirs[0].unflatten(0, (model.n_heads, parts, -1))
        return [rows[:, part].flatten(0, 1) for part in range(parts)]

    def theirs(ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        return [torch.stack([each.unflatten(0, (model.n_heads, -1)) for each in ours], dim=1).flatten(0, 2)]

    return Conversion(ours, theirs)


def rotary_rows(whose: Literal["queries", "keys", "shared", "index", "index key"]) -> Conversion:
    """Returns the conversion of the rows that positions turn: neighbours are pairs in theirs (latent attention;
    llama.cpp's Llama), in ours pairs are half of the rows apart. The rows stand at the end of those of each head, in an
    indexer at the start; "shared" is one key for all heads."""

    def reordered(weight: Tensor, model: ModelConfig, reorder: Callable[[Tensor], Tensor]) -> list[Tensor]:
        of_index = {"index": model.sparse.index_heads, "index key": 1}
        heads = ({"queries": model.n_heads, "keys": model.kv_heads, "shared": 1} | of_index)[whose]
        rows = weight.unflatten(0, (heads, -1))
        plain = rows.shape[1] - model.rotary_size
        if whose in of_index:
            first, rest = rows.split([model.rotary_size, plain], 1)
            return [torch.cat((reorder(first), rest), dim=1).flatten(0, 1)]
        return [torch.cat((rows[:, :plain], reorder(rows[:, plain:])), dim=1).flatten(0, 1)]

    def halves_apart(rows: Tensor) -> Tensor:
        return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)

    def neighbours(rows: Tensor) -> Tensor:
        return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)

    return Conversion(
        lambda theirs, model: reordered(theirs[0], model, halves_apart),
        lambda ours, model: reordered(ours[0], model, neighbours),
    )


def _absorbed(ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
    sizes = (model.mla.nope_head_dim, model.mla.v_head_dim)
    keys, values = ours[0].unflatten(0, (model.n_heads, -1)).split(sizes, 1)
    return [keys.mT, values]


ABSORBED_KEYS = Conversion(lambda theirs, _: [torch.cat((theirs[0].mT, theirs[1]), dim=1).flatten(0, 1)], _absorbed)
"""Latent attention's matrix from the latent to keys and values, (heads × (key + value), rank) in ours, is two tensors
in llama.cpp's files: keys (heads, rank, key), transposed, and values (heads, value, rank)."""


@dataclass(frozen=True)
class WeightLink:
    """Parameters of ours, and the tensors of theirs that hold the same numbers: their names, or patterns of them, in
    which {} stands for the layer and * for every expert in turn."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion
    kind: str = ""
    """The kind of attention of the layers that it is for; empty: of any."""
    all_layers: bool = False
    """Whether it is one link for all layers, with as many parameters of ours."""


@dataclass(frozen=True)
class WeightFamily:
    """The weights of a model_type."""

    matches: tuple[WeightLink, ...]
    """By patterns."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Regular expressions of other spellings of their names in files, and what stands in their place."""
    unused: tuple[str, ...] = ()
    """Regular expressions of tensors that no parameter needs."""
    fused: tuple[WeightLink, ...] = ()
    """Those of experts that some files store in one tensor per layer, in place of those of `matches`."""
    next_token_layers: bool = False
    """Layers after the last one are modules for further tokens; a model without them (model.mtp) does not need them."""
    module_layer: str = ""
    """Where the blocks of such modules stand if not among the layers, from 0."""
    copies: tuple[tuple[str, str], ...] = ()
    """Parameters of ours that each module has a copy of, and the patterns of the copies. Some files leave them out."""

    def name_of(self, stored: str) -> str:
        """Returns the name that the table uses for a tensor of a file."""
        for pattern, plain in self.renamed:
            stored = re.sub(pattern, plain, stored)
        return stored

    def stored_in(self, names: Iterable[str]) -> WeightFamily:
        """Returns the family as files with tensors of these names store it."""
        ends = tuple(each.partition("{}")[2] for link in self.fused for each in link.theirs)
        if not ends or not any(name.endswith(ends) for name in names):
            return self
        return replace(self, matches=(*self.matches, *self.fused), fused=())

    def theirs_of(self, ours: str) -> tuple[str, ...]:
        """Returns the names in the table of the tensor that is equal to a parameter of ours; nothing without one."""
        return next((match.theirs for match in self.matches if match.ours == (ours,)), ())

    def needs(self, name: str, model: ModelConfig) -> bool:
        """Returns whether a tensor that no link names is an error: it is not if it is known to be without use."""
        if any(re.search(pattern, name) for pattern in self.unused):
            return False
        if model.tied and name in _HEADS:
            return False  # a copy of the embedding
        copied = any(name in link.theirs for link in self.copies_in(model))
        if copied or (self.module_layer and not model.mtp and name.startswith("mtp.")):
            return False
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        if layer and int(layer[1]) >= model.n_layers - model.shared_keys and re.search(r"\.self_attn\.[kv]_", name):
            return False  # of a layer that reads an earlier one's
        return not (self.next_token_layers and layer and int(layer[1]) >= model.n_layers)

    def copies_in(self, model: ModelConfig) -> Iterator[WeightLink]:
        """Yields the links of the copies that a model's modules for further tokens have."""
        for layer in range(model.main.n_layers, model.n_layers):
            for ours, copy in self.copies:
                yield equal("embed.weight" if model.tied else ours, copy.format(layer))


_HEADS = ("lm_head.weight", "embed_out.weight")


def equal(ours: str, theirs: str) -> WeightLink:
    """Returns the link of two equal tensors."""
    return WeightLink((ours,), (theirs,), SAME)


def links(model: ModelConfig, family: WeightFamily) -> Iterator[WeightLink]:
    """Yields the links of all parameters of a model, in the order of its modules. Raises JobError for parameters that
    the family does not have."""
    shapes = parameter_shapes(model)
    by_pattern = {(name, match.kind): match for match in family.matches for name in match.ours}
    kinds = block_kinds(model)
    missing = []
    for name in shapes:
        found = re.match(r"blocks\.(\d+)\.", name)
        layer, pattern = (found[1], f"blocks.{{}}.{name[found.end() :]}") if found else ("", name)
        kind = kinds[int(layer)].attention if layer else ""
        apart = family.module_layer if layer and kinds[int(layer)].predicts else ""
        number = int(layer) - model.main.n_layers if apart else layer
        match = by_pattern.get((pattern, kind)) or by_pattern.get((pattern, ""))
        if match is None:
            missing.append(name)
        elif pattern == match.ours[0] and not (match.all_layers and int(layer)):
            every = range(model.n_layers) if match.all_layers else [layer]
            ours = tuple(each.format(layer) for layer in every for each in match.ours)
            theirs = (
                (each.replace("model.layers.{}", apart) if apart else each).format(number).replace("*", str(expert))
                for each in match.theirs
                for expert in range(model.moe.n_experts if "*" in each else 1)
            )
            if name == "head.weight" and model.reward:
                theirs = ("score.weight",)
            yield WeightLink(ours, tuple(theirs), match.conversion)
    if missing:
        rest = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise JobError(f"parameters without a counterpart in transformers: {', '.join(missing[:3])}{rest}")


def shapes_of_theirs(link: WeightLink, model: ModelConfig, shapes: Shapes) -> Shapes:
    """Returns the shapes of the tensors of theirs, from `shapes`, those of all parameters of ours."""
    ours = [torch.empty(shapes[name], device="meta") for name in link.ours]
    theirs = link.conversion.theirs(ours, model)
    return {name: tuple(tensor.shape) for name, tensor in zip(link.theirs, theirs, strict=True)}
