"""A world of ranks and devices that are not there, for one rank of which the real program runs in this process.

Tensors are torch's fake ones: they have a shape, a type and a device, but no elements. Collectives return at once. A
step reads few values (where documents begin, how many tokens each expert has, the loss), so small storages that are
computed from known values keep theirs. Where values are not known, tokens are divided evenly among experts, the loss is
zero, and other ranks hold what this one does. A program that reads any other value cannot be rehearsed, and says so.

Results are made like those of an equal operation before: sizes, types and aliases. torch's fake tensors have such a
cache, too, which takes ten times as long: it also serves symbolic sizes.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.blocks.feed_forward import tokens_reaching
from phalanx.comm import calls
from phalanx.config.cluster import Cluster
from phalanx.config.dispatchers import DISPATCHERS
from phalanx.dryrun.gpu import NamedDevices, device_of_torch, pretended_gpu
from phalanx.dryrun.operations import FAKE, RealTensors, flops_of, result_without_data
from phalanx.errors import JobError
from phalanx.launch.process_group import shutdown
from phalanx.launch.watchdog import heartbeat
from phalanx.parallel import expert
from phalanx.parallel.offload import is_on_host

aten = torch.ops.aten
MOST = 2**16
"""Most results that are remembered."""
LARGE_FLOATS = 2**18
"""Bytes of floats from which nothing reads their elements."""
_NAMESPACES = {"aten", "fsdp"}
_BY_OFFSET = {aten.as_strided.default, aten.view.dtype}
"""Operations whose result lies at a place that is no fixed distance from their argument's."""
_NOT_KEPT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
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
    """list or tuple of those `made`, None among them; of other types it is the only one, or nothing."""
    made: tuple[_Made | None, ...]
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
        or not _NOT_KEPT.isdisjoint(func.tags)
        or any(type(x) not in (FakeTensor, type(None)) for x in made)
    ):
        return
    tensors = [x for x in made if x is not None]
    places = {id(x): place for place, x in enumerate(given)}
    storages = {x.untyped_storage()._cdata: place for place, x in enumerate(given)}
    parts: list[_Made | None] = []
    for x in made:
        if x is None:
            parts.append(x)
            continue
        source = places.get(id(x), storages.get(x.untyped_storage()._cdata, -1))
        offset = x.storage_offset() - (given[source].storage_offset() if source >= 0 else 0)
        attributes = {name: value for name, value in vars(x).items() if name != "fake_mode"}
        parts.append(_Made(source, id(x) in places, x.shape, x.stride(), offset, x.dtype, x.fake_device, attributes))
    written: list[int] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            each = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [places[id(x)] for x in tree_leaves(each) if isinstance(x, Tensor)]
    is_large = any(x.is_floating_point() and x.nbytes > LARGE_FLOATS for x in tensors)
    found = Remembered(func._overloadpacket.__name__, flops, kind, tuple(parts), is_large, tuple(written))
    again = make(found, given, tensors[0].fake_mode) if tensors else made
    again = [again] if kind is FakeTensor else again or ()
    if all(map(_is_like, made, again)):
        results[key] = found


def _is_like(one: Any, other: Any) -> bool:
    if one is other or one is None:
        return one is other
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
        for part in found.made:
            if part is None or part.is_source:
                results.append(part and given[part.source])
                continue
            source, _, shape, stride, offset, dtype, device, attributes = part
            suits = source < 0 or given[source].is_inference() or not torch.is_inference_mode_enabled()
            with nullcontext() if suits else torch.inference_mode(mode=False):  # a view is of its source's mode
                if source < 0:
                    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                else:
                    first, storage = given[source].storage_offset() + offset, given[source].untyped_storage()
                    meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, first, shape, stride)
                x = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
            torch._C._set_throw_on_mutable_data_ptr(x)
            vars(x).update(attributes, fake_mode=mode)
            results.append(x)
    return found.kind(results) if found.kind in (list, tuple) else results[0] if results else None


KNOWN_BYTES, KNOWN_AT_START = 2**26, 2**14
"""Size of the largest storage whose values are kept: the guard's table of what other ranks hold is one. Less while the
model is built, whose elements are drawn from integers, and where they are no integers (LARGE_FLOATS)."""
_UNWRITTEN = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
"""Operations whose result has no elements yet; integers are written before they are read."""
_IN_PLACE = {aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr}
"""Operations without a result that torch's fake tensors do not have."""
DEVICE_OF = torch.ops.prim.device.default
_DEPENDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(eq=False)
class Allocation:
    """A storage that an operation made."""

    size: int
    """Bytes now."""
    on_host: bool
    operator: str
    """The operation that made it."""
    phase: str
    """The phase of the run in which it was made."""
    module: str
    """The module of the model whose pass ran; empty outside of any."""
    part: str = ""
    """Its part of the memory, once that is known: parameters, gradients, optimizer or communication."""
    end: Any = None
    """The reference that notices when the storage ends."""


@dataclass(frozen=True)
class MemoryChange:
    """A change of memory."""

    allocation: Allocation
    change: int
    """Bytes more, or less."""
    phase: str
    at: int
    """Nanoseconds of the clock of calls."""


class DryWorld(TorchDispatchMode):
    """Runs operations on fake tensors in its `with` block, and records storages, FLOPs and small values."""

    def __init__(self, phase: Callable[[], str], device: str, results: dict[Any, Remembered]):
        super().__init__()
        self.phase = phase
        """Returns what the rank is doing."""
        self.device = device
        """The type of its device."""
        self.named = NamedDevices(torch.device(device, 0)) if device != "cpu" else None
        self.results = results
        """By what operations are given, what they return."""
        self.live: dict[int, Allocation] = {}
        """By storage."""
        self.events: list[MemoryChange] = []
        """Every change of memory, in order."""
        self.flops: defaultdict[str, float] = defaultdict(float)
        """By operation."""
        self.known_bytes = KNOWN_AT_START
        self.values: dict[int, torch.UntypedStorage] = {}
        """By storage, its elements."""
        self.reduction: Any = dist.ReduceOp.SUM
        """The operation of the latest all-reduce."""
        self.sent: dict[tuple[torch.Size, torch.dtype], Tensor | None] = {}
        """The elements of the latest message of each shape and type: another rank sends the same."""

    # Memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and keeping torch.compile out of each operation takes time

    def allocation(self, x: Tensor) -> Allocation | None:
        """Returns the storage of a tensor of this rank."""
        local = x.to_local() if isinstance(x, DTensor) else x
        return self.live.get(local.untyped_storage()._cdata)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Records that a storage was resized without an operation, as FSDP2 does."""
        if made := self.live.get(storage._cdata):
            self._change(made, size - made.size)

    def _meet(self, x: Tensor, operator: str) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        on_host = is_on_host() if self.device == "cpu" else x.device.type == "cpu"
        made = self.live[key] = Allocation(0, on_host, operator, self.phase(), heartbeat.module())
        self._change(made, storage.nbytes())
        made.end = weakref.ref(storage, lambda _: self._forget(key))

    def _change(self, made: Allocation, change: int) -> None:
        made.size += change
        self.events.append(MemoryChange(made, change, self.phase(), calls.now()))

    def _forget(self, key: int) -> None:
        self.values.pop(key, None)
        gone = self.live.pop(key)
        self._change(gone, -gone.size)

    def mark(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Says what tensors are, unless that is known."""
        for x in tensors:
            if (made := self.allocation(x)) and made.part in ("", "communication"):
                made.part = part

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Runs operations here in the `with` block, and counts."""
        with self.named.noting() if self.named else nullcontext(), self:
            yield

    # Values

    def elements(self, x: Tensor) -> Tensor | None:
        """Returns the elements of a tensor, as a view of its storage's; None if they are not known."""
        kept = self.values.get(x.untyped_storage()._cdata)
        if kept is None:
            return None
        with RealTensors():
            return torch.empty(0, dtype=x.dtype).set_(kept, x.storage_offset(), x.shape, x.stride())

    def know(self, x: Tensor, elements: Tensor | None) -> None:
        """Keeps the elements of a tensor, or forgets those of its storage."""
        storage = x.untyped_storage()
        if elements is None or storage.nbytes() > (LARGE_FLOATS if x.is_floating_point() else self.known_bytes):
            self.values.pop(storage._cdata, None)
            return
        with RealTensors():
            if (kept := self.values.get(storage._cdata)) is None:
                kept = self.values[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            torch.empty(0, dtype=x.dtype).set_(kept, x.storage_offset(), x.shape, x.stride()).copy_(elements)

    def _computed(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Returns the result of an operation on known elements; None if it has others, or is random, or large."""
        if any(x.untyped_storage()._cdata not in self.values for x in given):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            return None
        most = self.known_bytes // 8
        if (dtype := kwargs.get("dtype")) and dtype.is_floating_point:
            most = min(most, LARGE_FLOATS // 8)
        if not given and _largest(args) > most:
            return None
        plain, options = tree_map(lambda x: self.elements(x) if isinstance(x, Tensor) else x, (args, kwargs))
        if "device" in options:
            options["device"] = torch.device("cpu")
        with RealTensors():
            out = func(*plain, **options)
            if func in _UNWRITTEN:
                return None if out.dtype.is_floating_point else out.zero_()
            return out

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in tree_leaves(written):
                    if isinstance(x, Tensor):
                        self.know(x, None)

    def _read(self, x: Tensor) -> Any:
        """Returns the element that the host reads. Raises JobError if it is not known."""
        if (known := self.elements(x)) is not None:
            with RealTensors():
                return known.item()
        if x.dtype.is_floating_point:
            return 0.0  # a finite loss, and no request of another rank
        raise self.refusal("item", f"it reads an element of {x.dtype}, which depends on data that a rehearsal lacks")

    def refusal(self, operation: str, why: str) -> JobError:
        """Returns the error for a program that a rehearsal cannot run: the operation, where it is, and what to do."""
        module = heartbeat.module()
        return JobError(
            f"this job cannot be rehearsed: operation {operation} in {module or 'no module'} ({self.phase()}): {why}; "
            "`phalanx predict` has the figures by formula, `phalanx verify` runs the layout on real ranks"
        )

    def numpy(self, x: Tensor) -> Any:
        """Returns an array of elements that the host reads. Raises JobError if they are not known."""
        if (known := self.elements(x)) is None:
            raise self.refusal("numpy", f"it reads {x.numel()} elements of {x.dtype}, which depend on data")
        with RealTensors():
            return known.numpy()

    def _none_of(self, numbers: Tensor) -> Tensor | None:
        """Returns what unknown flags select of a list of known numbers, as of tensors that differ between replicas:
        nothing, as other ranks hold what this one does."""
        if numbers.dim() != 1 or (known := self.elements(numbers)) is None:
            return None
        with RealTensors():
            return known[:0].clone()

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of_torch(args[0])
        with torch._C.DisableTorchFunction():  # what follows is no call of the program's
            return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if DTensor in types:
            return NotImplemented  # what counts are the local tensors inside
        if func is DEVICE_OF:
            return args[0].device
        kwargs = dict(kwargs) if kwargs else {}
        kwargs.pop("pin_memory", None)
        if func.namespace == "fsdp":  # whole parameters, and gradients in the form in which they are sent
            self.mark("communication", _tensors(kwargs.get("out")))
        device = kwargs.get("device")
        key, given = described(func, args, kwargs)
        if (device.type == "meta" if device is not None else given and key is None) and all(
            type(x) in (Tensor, Parameter) and x.is_meta for x in given
        ):
            with RealTensors():  # a model without memory is on no device
                return func(*args, **kwargs)
        if (mode := torch._C._get_dispatch_mode(FAKE)) is None:  # torch computes something of its own
            return func(*args, **kwargs)
        if self.named and device is not None and (meant := self.named.meant(device, given)) is not device:
            kwargs["device"] = meant
            key, given = described(func, args, kwargs)
        if found := self.results.get(key):
            elements = None
            if not found.is_large and all(x.untyped_storage()._cdata in self.values for x in given):
                elements = self._computed(func, args, kwargs, given)
            if elements is None:
                for place in found.written:
                    self.know(given[place], None)
            out = make(found, given, mode)
            self._note(found.operator, found.flops, out, elements)
            return out
        if any(type(x) is not FakeTensor for x in given):
            args, kwargs = tree_map(self._faked, (args, kwargs))
            given = described(func, args, kwargs)[1]
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func.namespace == "profiler":
            with RealTensors():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        if func in _IN_PLACE:
            return self._forget_written(func, args, kwargs)
        if func is aten._pin_memory.default:
            func = aten.clone.default
        return self._run_first(func, args, kwargs, given, key)

    def _run_first(self, func: Any, args: Any, kwargs: Any, given: list[Any], key: Any) -> Any:
        """Runs an operation on fake tensors whose result is not remembered."""
        elements, assumed = self._computed(func, args, kwargs, given), None
        if (
            elements is None
            and func is aten.index.Tensor
            and [getattr(x, "dtype", None) for x in args[1]] == [torch.bool]
        ):
            elements = self._none_of(args[0])
        sized = elements is not None and not _DEPENDS.isdisjoint(func.tags)  # by its elements
        out = tree_map(lambda x: _like(x, given[0].device), elements) if sized else None
        if elements is None and (assumed := result_without_data(func, args, kwargs)):
            out, elements = assumed
        if out is None:
            try:
                out = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                raise self.refusal(str(func), f"its result depends on data ({type(error).__name__})") from None
        if elements is None and func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        self._note(func._overloadpacket.__name__, flops, out, elements)
        if assumed is None and key is not None and described(func, args, kwargs)[0] == key:
            remember(self.results, key, args, kwargs, given, out, flops)
        return out

    def _note(self, operator: str, flops: float, out: Any, elements: Any) -> None:
        """Records what an operation made and computed."""
        made = (out,) if isinstance(out, Tensor) else out if type(out) in (list, tuple) else _tensors(out)
        for x in made:
            if isinstance(x, Tensor) and x.device.type != "meta":
                self._meet(x, operator)
        if elements is not None:
            for x, known in zip(_tensors(out), _tensors(elements), strict=True):
                if x.untyped_storage()._cdata not in self.values:
                    self.know(x, known)
        if flops:
            self.flops[operator] += flops

    def _faked(self, x: Any) -> Any:
        """Returns a fake tensor for one of the host that was made without an operation, as from numpy."""
        if not isinstance(x, Tensor) or isinstance(x, (FakeTensor, DTensor)) or x.is_meta:
            return x
        fake = torch._C._get_dispatch_mode(FAKE).from_tensor(x)
        self._meet(fake, "numpy")
        if x.untyped_storage().nbytes() <= self.known_bytes:
            self.values.setdefault(fake.untyped_storage()._cdata, x.untyped_storage())
        return fake

    # Collectives

    def _collective(self, func: Any, args: Any) -> Any:
        """Ends a collective at once. Every other rank has what this one has."""
        name = func._overloadpacket.__name__
        group = next(ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and _is_group(x))
        size, rank = group.size(), group.rank()
        tensors = [_tensors(x) for x in args]
        for x in tensors[0]:
            if name != "send" and (made := self.allocation(x)) and not made.part:
                made.part = "communication"
        with RealTensors():
            self._exchange(name, args, tensors, size, rank)
        work = FakeWork().boxed()
        returns = func._schema.returns
        return work if len(returns) == 1 else (args[0], work)

    def _exchange(self, name: str, args: Any, tensors: list[list[Tensor]], size: int, rank: int) -> None:
        """Puts the elements that a collective leaves where they are known."""
        match name:
            case "broadcast_" | "barrier":
                pass
            case "allreduce_":
                for x in tensors[0]:
                    known = self.elements(x)
                    times = size if self.reduction == dist.ReduceOp.SUM else 1
                    self.know(x, None if known is None else known.clone() * times)
            case "send":
                (x,) = tensors[0]
                known = self.elements(x)
                self.sent[x.shape, x.dtype] = None if known is None else known.clone()
            case "recv_":
                (x,) = tensors[0]
                self.know(x, self.sent.get((x.shape, x.dtype)))
            case "_allgather_base_":
                (whole,), (part,) = tensors[:2]
                known = self.elements(part)
                self.know(whole, None if known is None else torch.cat([known.reshape(-1)] * size).view(whole.shape))
            case "_reduce_scatter_base_":
                (part,), (whole,) = tensors[:2]
                known = self.elements(whole)
                self.know(part, None if known is None else known.reshape(size, -1)[rank].view(part.shape) * size)
            case "alltoall_base_":
                (into,), (x,) = tensors[:2]
                known = None if args[4] else self.elements(x)
                mine = None if known is None else known.reshape(size, -1)[rank]
                self.know(into, None if mine is None else torch.cat([mine] * size).view(into.shape))
            case _:
                for x in tensors[0]:
                    self.know(x, None)


def _like(x: Any, device: torch.device) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _largest(args: Any) -> float:
    """Returns the most elements that a factory with these arguments can make."""
    if args and isinstance(args[0], (list, tuple)):
        return math.prod(args[0])
    return max((abs(x) for x in args if isinstance(x, (int, float)) and math.isfinite(x)), default=0)


def _is_group(x: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(x._type())


def _address(x: FakeTensor) -> int:
    """Returns an address that differs between storages, and follows places within one."""
    return (x.untyped_storage()._cdata << 16) + int(x.storage_offset()) * x.element_size()


_CACHING_ROOMS = tuple(f"phalanx.{room}." for room in ("comm", "model", "optimizers", "parallel", "train"))


def _forget_cached() -> None:
    """Empties the caches of functions that may hold tensors: real ones do not count as memory of a rehearsal, and fake
    ones have no elements for what this process does afterwards."""
    heartbeat.enter_module("")
    for name, module in list(sys.modules.items()):
        if name.startswith(_CACHING_ROOMS):
            for each in list(vars(module).values()):
                if hasattr(each, "cache_clear"):
                    each.cache_clear()


def _evenly_reached(ends: Tensor, chosen: Tensor, n: int) -> Tensor:
    """Returns the number of tokens with experts on each of several ranks, if their choices are any of all `n`."""
    return ends.new_full((len(ends),), tokens_reaching(len(chosen), n, chosen.shape[1], len(ends))).long()


@contextmanager
def pretended(
    rank: int, world: int, device: torch.device, cluster: Cluster, phase: Callable[[], str]
) -> Iterator[DryWorld]:
    """Makes this process rank `rank` of `world` on a device of `cluster` in the `with` block: process groups whose
    other members are not there. In its `counting` tensors have no elements."""
    dry = DryWorld(phase, device.type, remembered_on(device.type, cluster.accelerator.name))
    own = dist.get_default_backend_for_device(device)
    backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    plain: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        dry.resize(storage, size)
        return result

    all_reduce = dist.all_reduce

    def noting_reduction(x: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        dry.reduction = op
        return all_reduce(x, op, *args, **kwargs)

    with ExitStack() as held:
        _forget_cached()
        held.callback(_forget_cached)
        if device.type != "cpu":
            held.enter_context(pretended_gpu(cluster, device.type))
        options = FakeProcessGroup.Options()  # pyrefly: ignore[missing-argument]
        dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world, pg_options=options)
        held.callback(shutdown)
        for target, name, stand_in in (
            (dist.distributed_c10d, "_set_pg_timeout", lambda *_: None),
            (dist, "get_backend", lambda _=None: backend),
            (dist, "all_reduce", noting_reduction),
            (torch.UntypedStorage, "resize_", resize),
            (expert, "dispatcher", lambda name, _: DISPATCHERS.code(DISPATCHERS[name].sends, "make")),
            (expert, "_reached", _evenly_reached),
            (FakeTensor, "data_ptr", _address),
            (FakeTensor, "numpy", lambda x, **_: dry.numpy(x)),
            # Modules that are moved get new parameters instead of new memory under the old ones.
            (torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True),
        ):
            held.enter_context(mock.patch.object(target, name, stand_in))
        yield dry
