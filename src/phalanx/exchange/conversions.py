"""Conversions between tensors of transformers and parameters of ours, each with its inverse.

A conversion takes a list of tensors to a list of tensors: parts, permutations, transposes, stacks, and a sum with a
constant. None of them rounds, except that a constant is added in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from phalanx.config.model import ModelConfig


class Conversion(Protocol):
    """A bijection between tensors of theirs and parameters of ours."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Returns the parameters of ours that tensors of theirs hold."""
        ...

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Returns the tensors of theirs: the inverse of `ours`."""
        ...


@dataclass(frozen=True)
class Same:
    """Equal tensors."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Returns them."""
        return list(theirs)

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Returns them."""
        return list(ours)


@dataclass(frozen=True)
class Then:
    """Several conversions, in the order from theirs to ours."""

    parts: tuple[Conversion, ...]

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Applies the parts in order."""
        tensors = list(theirs)
        for part in self.parts:
            tensors = part.ours(tensors, model)
        return tensors

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Applies the inverses in the opposite order."""
        tensors = list(ours)
        for part in reversed(self.parts):
            tensors = part.theirs(tensors, model)
        return tensors


@dataclass(frozen=True)
class Offset:
    """Ours is theirs plus a constant: Gemma's norms multiply by 1 + w."""

    constant: float

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Adds the constant."""
        return [_wide(tensor) + self.constant for tensor in theirs]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Subtracts it."""
        return [_wide(tensor) - self.constant for tensor in ours]


@dataclass(frozen=True)
class Transposed:
    """Theirs is (inputs, outputs) in its last two dimensions, ours (outputs, inputs)."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Transposes."""
        return [tensor.mT for tensor in theirs]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Transposes."""
        return [tensor.mT for tensor in ours]


@dataclass(frozen=True)
class EqualParts:
    """One tensor of theirs is as many equal parts of ours, one after the other along a dimension."""

    parts: int
    dim: int = 0

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Cuts."""
        return list(theirs[0].chunk(self.parts, self.dim))

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Joins."""
        return [torch.cat(list(ours), self.dim)]


@dataclass(frozen=True)
class Interleaved:
    """One tensor of theirs holds two of ours in turn along its last dimension: gate and up of gpt-oss."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Takes every second element."""
        return [theirs[0][..., 0::2], theirs[0][..., 1::2]]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Puts them in turn."""
        return [torch.stack(list(ours), dim=-1).flatten(-2)]


@dataclass(frozen=True)
class PerHead:
    """The rows of theirs are, head by head, those of several of ours: GPT-NeoX's queries, keys and values."""

    parts: int = 3

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Takes each part's rows of every head."""
        rows = theirs[0].unflatten(0, (model.n_heads, self.parts, -1))
        return [rows[:, part].flatten(0, 1) for part in range(self.parts)]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Joins them head by head."""
        heads = [tensor.unflatten(0, (model.n_heads, -1)) for tensor in ours]
        return [torch.stack(heads, dim=1).flatten(0, 2)]


@dataclass(frozen=True)
class Stacked:
    """Ours is a stack of theirs along a first dimension: one tensor per expert."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Stacks."""
        return [torch.stack(list(theirs))]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Takes the stack apart."""
        return list(ours[0].unbind())


@dataclass(frozen=True)
class RotaryRows:
    """The rows that positions turn: neighbours are pairs in theirs (latent attention; llama.cpp's Llama), in ours pairs
    are half of the rows apart. The rows stand at the end of each head's rows."""

    heads: Literal["queries", "keys", "shared"]
    """The heads of the matrix; "shared": one key for all heads."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Moves even rows before odd ones."""
        return [self._apply(theirs[0], model, _halves_apart)]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Puts them in turn again."""
        return [self._apply(ours[0], model, _neighbours)]

    def _apply(self, weight: Tensor, model: ModelConfig, reorder: _Reorder) -> Tensor:
        heads = {"queries": model.n_heads, "keys": model.kv_heads, "shared": 1}[self.heads]
        rows = weight.unflatten(0, (heads, -1))
        plain = rows.shape[1] - model.rotary_size
        return torch.cat((rows[:, :plain], reorder(rows[:, plain:])), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class AbsorbedKeys:
    """Latent attention's matrix from the latent to keys and values, (heads × (key + value), rank) in ours, is two
    tensors in llama.cpp's files: keys (heads, rank, key), transposed, and values (heads, value, rank)."""

    def ours(self, theirs: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Joins them head by head."""
        keys, values = theirs
        return [torch.cat((keys.mT, values), dim=1).flatten(0, 1)]

    def theirs(self, ours: Sequence[Tensor], model: ModelConfig) -> list[Tensor]:
        """Takes the matrix apart."""
        keys, values = (
            ours[0].unflatten(0, (model.n_heads, -1)).split((model.mla.nope_head_dim, model.mla.v_head_dim), 1)
        )
        return [keys.mT, values]


class _Reorder(Protocol):
    def __call__(self, rows: Tensor) -> Tensor: ...


def _halves_apart(rows: Tensor) -> Tensor:
    """Returns (heads, rows, ...) with even rows before odd ones."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def _neighbours(rows: Tensor) -> Tensor:
    """Returns (heads, rows, ...) with the two halves in turn."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
