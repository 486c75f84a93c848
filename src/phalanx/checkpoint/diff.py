"""Compares the state of two runs tensor by tensor, whatever boxes and formats they are stored in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.checkpoint.manifest import StoredTensor, kind_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.model import ModelConfig
from phalanx.data.files import Progress, meter, silent

CHUNK_ELEMENTS = 2**20
"""Elements that are compared at a time."""
MISSING = "(missing)"
"""Stands for the value of a field that one side lacks."""


@dataclass(frozen=True)
class Values:
    """How the values of two tensors of one shape differ."""

    elements: int
    """Number of elements whose bits differ, or whose values do if the types differ."""
    max_abs: float
    """Largest |a - b|; infinity if one of the two is NaN."""
    max_rel: float
    """Largest |a - b| / max(|a|, |b|), between 0 and 2, or infinity as `max_abs`."""
    at: tuple[int, ...]
    """The indices of the largest |a - b|."""
    a: float
    b: float
    """The values there."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs: one side is None where it is missing; `values` is None unless the shapes are equal and
    any value differs."""

    name: str
    a: StoredTensor | None
    b: StoredTensor | None
    values: Values | None = None


@dataclass(frozen=True)
class FieldDifference:
    """A field of the metadata that differs."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class StateDifference:
    """All that differs between two states."""

    equal: int
    """Number of tensors that are bit-equal."""
    tensors: tuple[TensorDifference, ...]
    fields: tuple[FieldDifference, ...]

    @property
    def is_empty(self) -> bool:
        return not self.tensors and not self.fields


def compare(
    a: Reader, b: Reader, *, pattern: str = "*", fields: bool = True, progress: Progress = silent
) -> StateDifference:
    """Compares the tensors whose names match `pattern`, one at a time, and with `fields` step and metadata, as far as
    both have any. Raises DamagedCheckpointError if a file cannot be read."""
    left, right = a.manifest.tensors, b.manifest.tensors
    names = [name for name in (left | right) if fnmatchcase(name, pattern)]
    total = sum((left.get(name) or right[name]).nbytes for name in names)
    count = meter(progress, "comparing", total)
    equal, different = 0, []
    for name in names:
        mine, theirs = left.get(name), right.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            different.append(TensorDifference(name, mine, theirs))
        else:
            found = values(a.read(name), b.read(name))
            if found or mine.dtype != theirs.dtype:
                different.append(TensorDifference(name, mine, theirs, found))
            else:
                equal += 1
        count((mine or right[name]).nbytes)
    changed = _fields(a, b) if fields and a.manifest.meta and b.manifest.meta else ()
    return StateDifference(equal, tuple(different), tuple(changed))


def values(a: Tensor, b: Tensor) -> Values | None:
    """Returns how two tensors of one shape differ; None if they do not."""
    shape, a, b = a.shape, a.reshape(-1), b.reshape(-1)
    elements, largest, relative, place = 0, -1.0, 0.0, 0
    for start in range(0, a.numel(), CHUNK_ELEMENTS):
        x, y = a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]
        differ = _differ(x, y)
        if not differ.any():
            continue
        elements += int(differ.sum())
        x, y = x.double(), y.double()
        apart = (x - y).abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        apart[(x == y) | (x.isnan() & y.isnan())] = 0  # -0 and 0, or bits of a NaN
        ratio = torch.where(apart == 0, apart, apart / torch.maximum(x.abs(), y.abs()))
        relative = max(relative, float(ratio.nan_to_num_(nan=math.inf, posinf=math.inf).max()))
        apart[~differ] = -1
        if (most := float(apart.max())) > largest:
            largest, place = most, start + int(apart.argmax())
    if not elements:
        return None
    at = tuple(int(index) for index in np.unravel_index(place, tuple(shape))) if shape else ()
    return Values(elements, largest, relative, at, float(a[place]), float(b[place]))


def _differ(x: Tensor, y: Tensor) -> Tensor:
    """Returns by element whether the bits of two flat tensors differ, or the values if their types do."""
    if x.dtype != y.dtype:
        x, y = x.double(), y.double()
        return (x != y) & ~(x.isnan() & y.isnan())
    bits = (tensor.contiguous().view(torch.uint8).view(-1, tensor.element_size()) for tensor in (x, y))
    return torch.ne(*bits).any(dim=1)


def _fields(a: Reader, b: Reader) -> Iterator[FieldDifference]:
    left = {"step": a.manifest.step, **leaves(a.manifest.meta)}
    right = {"step": b.manifest.step, **leaves(b.manifest.meta)}
    for name in left | right:
        mine, theirs = left.get(name, MISSING), right.get(name, MISSING)
        if repr(mine) != repr(theirs):  # NaN equals NaN
            yield FieldDifference(name, mine, theirs)


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested objects by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def in_model_order(names: Iterable[str], model: ModelConfig) -> list[str]:
    """Sorts tensors of checkpoints: parameters in the model's order, then each kind of the optimizer's."""
    places = {name: at for at, name in enumerate(parameter_shapes(model, 1))}
    every = list(names)
    kinds = list(dict.fromkeys(["", *map(kind_of, every)]))
    return sorted(every, key=lambda n: (kinds.index(kind_of(n)), places.get(n.rpartition("/")[2], len(places))))
