"""Results of operations on fake tensors, made like those of an equal operation before: sizes, types and aliases.

torch's fake tensors have such a cache, too, which takes ten times as long: it also serves symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
MOST = 2**16
"""Most results that are remembered."""
LARGE_FLOATS = 2**18
"""Bytes of floats from which nothing reads their elements."""
_NAMESPACES = {"aten", "fsdp"}
_BY_OFFSET = {aten.as_strided.default, aten.view.dtype}
"""Operations whose result lies at a place that is no fixed distance from their argument's."""
_DEPENDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class _Made(NamedTuple):
    """One tensor of a result."""

    source: int
    """The place, among the tensors given, of the one whose storage it shares; -1 for a new storage."""
    is_source: bool
    """Whether it is that tensor itself."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from its source's first one to its own."""
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]


class Remembered(NamedTuple):
    """The result of an operation."""

    operator: str
    flops: float
    kind: type
    """list or tuple of those `made`; of other types it is the only one, or nothing."""
    made: tuple[_Made, ...]
    is_large: bool
    """Whether it is made of so many floats that nothing reads them, such as rotary tables."""
    written: tuple[int, ...]
    """Places, among the tensors given, of those that it writes."""


def described(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """Returns what the result of an operation depends on, apart from elements, or None if it cannot be told, and the
    tensors among the arguments and lists of them."""
    key: list[Any] = [func, func in _BY_OFFSET]
    given: list[Any] = []
    known = _describe(args, key, given)
    if kwargs:
        key += kwargs
        known = _describe(kwargs.values(), key, given) and known
    return tuple(key) if known else None, given


def _describe(values: Iterable[Any], key: list[Any], given: list[Any]) -> bool:
    known = True
    for x in values:
        kind = type(x)
        if kind is FakeTensor:
            given.append(x)
            key += (x.shape, x.stride(), x.dtype, x._fake_device)
            if key[1]:
                key.append(x.storage_offset())
            if x.constant is not None:
                known = False
        elif kind in _PLAIN:
            key += (kind, x)
        elif kind is list or kind is tuple:
            key += (kind, len(x))
            known = _describe(x, key, given) and known
        else:
            known = False
            if isinstance(x, Tensor):
                given.append(x)
            elif isinstance(x, (list, tuple)):
                _describe(x, key, given)
    return known


@cache
def remembered_on(device: str, accelerator: str) -> dict[Any, Remembered]:
    """Returns the results on devices of a type and model, by what `described` returns."""
    return {}


def remember(
    results: dict[Any, Remembered], key: Any, args: Any, kwargs: Any, given: Any, out: Any, flops: float
) -> None:
    """Keeps the result of an operation for others of the same `key`, if it can be made again."""
    if len(results) >= MOST:
        results.clear()
    func, kind = key[0], type(out)
    made = list(out) if kind in (list, tuple) else [] if out is None else [out]
    if (
        func.namespace not in _NAMESPACES
        or not _DEPENDS.isdisjoint(func.tags)
        or any(type(x) is not FakeTensor for x in made)
    ):
        return
    places = {id(x): place for place, x in enumerate(given)}
    storages = {x.untyped_storage()._cdata: place for place, x in enumerate(given)}
    parts: list[_Made] = []
    for x in made:
        source = places.get(id(x), storages.get(x.untyped_storage()._cdata, -1))
        offset = x.storage_offset() - (given[source].storage_offset() if source >= 0 else 0)
        attributes = {name: value for name, value in vars(x).items() if name != "fake_mode"}
        parts.append(_Made(source, id(x) in places, x.shape, x.stride(), offset, x.dtype, x.fake_device, attributes))
    written: list[int] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            each = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [places[id(x)] for x in tree_leaves(each) if isinstance(x, Tensor)]
    is_large = any(x.is_floating_point() and x.nbytes > LARGE_FLOATS for x in made)
    found = Remembered(func._overloadpacket.__name__, flops, kind, tuple(parts), is_large, tuple(written))
    again = make(found, given, made[0].fake_mode) if made else None
    again = [again] if kind is FakeTensor else again or ()
    if all(map(_is_like, made, again)):
        results[key] = found


def _is_like(one: Any, other: Any) -> bool:
    if one is other:
        return True
    storages = [x.untyped_storage() for x in (one, other)]
    return (
        (one.shape, one.stride(), one.storage_offset(), one.dtype, one.layout, one.constant)
        == (other.shape, other.stride(), other.storage_offset(), other.dtype, other.layout, None)
        and torch._C._dispatch_key_set(one) == torch._C._dispatch_key_set(other)
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        and storages[0].nbytes() == storages[1].nbytes()
    )


def make(found: Remembered, given: Sequence[Any], mode: FakeTensorMode) -> Any:
    """Returns the result of an operation on the tensors given as it was found before."""
    results: list[Any] = []
    with torch._C._DisableTorchDispatch():
        for source, is_source, shape, stride, offset, dtype, device, attributes in found.made:
            if is_source:
                results.append(given[source])
                continue
            suits = source < 0 or given[source].is_inference() or not torch.is_inference_mode_enabled()
            with nullcontext() if suits else torch.inference_mode(mode=False):  # a view is of its source's mode
                if source < 0:
                    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                else:
                    first, storage = given[source].storage_offset() + offset, given[source].untyped_storage()
                    meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, first, shape, stride)
                x = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
            torch._C._set_throw_on_mutable_data_ptr(x)
            cast(dict[str, Any], vars(x)).update(attributes, fake_mode=mode)
            results.append(x)
    return found.kind(results) if found.kind in (list, tuple) else results[0] if results else None
