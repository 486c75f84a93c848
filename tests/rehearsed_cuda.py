"""A GPU that is not there, so that the lines for one run in tests.

Tensors on it are CPU tensors of a class that calls itself `cuda:0`: Python reads that, torch's own code sees a CPU, and
the values are right. As on a GPU, an operation on tensors of both places is refused. Copies that need not have ended do
not end before something waits for them, and a copy on a stream of its own that did not wait for what it reads or
overwrites is refused, so that a forgotten wait shows as a wrong value or an error. Waits of the host are counted.
Attention kernels of GPUs that CPUs do not have are computed by the formula; what torch.compile makes is not tried.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo  # not on the GPU
import torch.nn.attention.varlen  # its operators, which are looked up below
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from phalanx.dryrun.gpu import HostGenerator, stand_ins

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NAME, MEMORY, CAPABILITY = "NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)
aten = torch.ops.aten
_BOTH = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten._index_put_impl_.default,
    aten.index_put_.default,
}
"""Operations that take tensors of both places."""
_WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
"""Operations whose result the host reads."""


class DeviceTensor(torch.Tensor):
    """A tensor on the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: CUDA)
    is_cuda = property(lambda _: True)
    is_cpu = property(lambda _: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _GPU[-1].run(func, args, kwargs or {})

    def get_device(self) -> int:
        return 0

    # torch's own code believes that these have nothing to do.
    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        places = [x.device if isinstance(x, Tensor) else x for x in (*args, kwargs.pop("device", None))]
        types = [x for x in args if isinstance(x, torch.dtype)] + [x.dtype for x in args if isinstance(x, Tensor)]
        place = next((torch.device(x) for x in places if isinstance(x, (str, torch.device))), CUDA)
        if types:
            kwargs["dtype"] = types[0]
        if place.type == "cpu":
            return aten._to_copy.default(self, device=place, **kwargs)
        return super().to(kwargs.pop("dtype", self.dtype), **kwargs)

    def cpu(self) -> Tensor:
        return self.to(CPU)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **options})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)


def on_device(x: Tensor) -> Tensor:
    """Returns a tensor on the GPU over the memory of `x`."""
    return torch.Tensor._make_subclass(DeviceTensor, x)


def values(x: Tensor) -> Tensor:
    """Returns the tensor of the CPU under `x`."""
    with torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(torch.Tensor, x)


def _probabilities(
    q: Tensor, k: Tensor, causal: bool, scale: float, left: int | None, lse: Tensor | None = None
) -> Any:
    """Returns probabilities (heads, queries, keys) and log-sum-exp of one sequence, whose queries and keys are (tokens,
    heads, size). The last query sees the last key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    keys = torch.arange(len(k))
    unseen = (keys > at) & causal | (keys < at - (len(k) if left is None or left < 0 else left))
    scores = scores.masked_fill(unseen, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp().nan_to_num(0.0), lse


def _sequences(
    cum_q: Tensor | None, cum_k: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> list[tuple[slice, slice]]:
    """Checks what flash attention asks for, and returns the places of queries and keys of each sequence."""
    assert q.dtype in (torch.float16, torch.bfloat16), "flash attention takes half precision"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256, "flash attention takes heads of one size up to 256"
    assert q.shape[-1] % 8 == 0, "flash attention takes heads of a multiple of 8"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the last dimension must be contiguous"
    if cum_q is None or cum_k is None:
        return []
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert int(cum_q[-1]) == len(q), "bounds end with the tokens"
    return [(slice(*a), slice(*b)) for a, b in zip(itertools.pairwise(cum_q), itertools.pairwise(cum_k), strict=True)]


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, p: float, causal: bool, _: bool,
    *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """torch's flash attention: (tokens, heads, size) with bounds, or (batch, seq, heads, size) without."""
    assert window_size_right == (None if window_size_left is None else 0 if causal else -1)
    places = _sequences(cum_q, cum_k, q, k, v)
    rows = [(q[a], k[b], v[b]) for a, b in places] or list(zip(q, k, v, strict=True))
    assert max(len(x) for x, _, _ in rows) <= max_q
    assert max(len(x) for _, x, _ in rows) <= max_k
    outputs, sums = [], []
    for a, b, c in rows:
        probabilities, lse = _probabilities(a, b, causal, scale, window_size_left)
        wide = c.repeat_interleave(a.shape[1] // c.shape[1], dim=1).float()
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, wide).to(q.dtype))
        sums.append(lse)
    nothing = torch.empty(2, dtype=torch.int64)
    join = (torch.cat(outputs), torch.cat(sums, 1)) if places else (torch.stack(outputs), torch.stack(sums))
    return *join, nothing, nothing[:0], nothing[:0]


def _flash_backward(
    given: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, p: float, causal: bool, _: Tensor, __: Tensor, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert window_size_right == (None if window_size_left is None else 0 if causal else -1)
    places = _sequences(cum_q, cum_k, q, k, v)
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for n, (a, b) in enumerate(places or [(slice(None), slice(None))] * len(q)):
        parts = [x[at] if places else x[n] for x, at in ((q, a), (k, b), (v, b), (o, a), (given, a))]
        of_q, of_k, of_v = (x[at] if places else x[n] for x, at in zip(found, (a, b, b), strict=True))
        own, keys, values_, out, d = (x.float() for x in parts)
        group = own.shape[1] // keys.shape[1]
        probabilities, _lse = _probabilities(
            own, keys, causal, scale, window_size_left, lse[:, a] if places else lse[n]
        )
        passed = torch.einsum("qhd,khd->hqk", d, values_.repeat_interleave(group, dim=1))
        of_scores = probabilities * (passed - (d * out).sum(-1).T[..., None]) * scale
        of_q += torch.einsum("hqk,khd->qhd", of_scores, keys.repeat_interleave(group, dim=1))
        of_k += torch.einsum("hqk,qhd->khd", of_scores, own).unflatten(1, (-1, group)).sum(2)
        of_v += torch.einsum("hqk,qhd->khd", probabilities, d).unflatten(1, (-1, group)).sum(2)
    return tuple(x.to(q.dtype) for x in found)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, causal: bool, scale: float,
    window: list[int], *_: Any,
) -> Any:  # fmt: skip
    """torch's varlen_attn, which says of a window that it is none of a causal mask."""
    of_window = {"window_size_left": window[0], "window_size_right": window[1]} if window[0] >= 0 else {}
    assert window[0] >= 0 or window[1] == (0 if causal else -1)
    return _flash_forward(q, k, v, cum_q, cum_k, max_q, max_k, 0.0, window[1] == 0, False, scale=scale, **of_window)[:3]


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.torch_attn._varlen_attn.default: _varlen,
    aten._flash_attention_backward.default: _flash_backward,
}
"""Operations that only GPUs have."""


class Stream:
    """A stream. The default one computes at once; in others copies wait until something waits for them."""

    def __init__(self, device: Any = None, **_: Any):
        self.device, self.device_index = CUDA, 0
        self.copies: list[Callable[[], Any]] = []
        self.ended = 0
        self.knows = 0
        """The number of the last operation of the default stream for which this one has waited."""

    def __enter__(self) -> Stream:
        self.before, _GPU[-1].current = _GPU[-1].current, self
        return self

    def __exit__(self, *_: Any) -> None:
        _GPU[-1].current = self.before

    def finish(self, until: int | None = None) -> None:
        while self.copies and (until is None or self.ended < until):
            self.ended += 1
            self.copies.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        other.finish()
        self.knows = max(self.knows, _GPU[-1].clock if other is _GPU[-1].default else other.knows)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.finish()
        self.knows = max(self.knows, event.knows)

    def synchronize(self) -> None:
        _GPU[-1].waits += 1
        self.finish()

    def query(self) -> bool:
        return not self.copies


class Event:
    """A mark in a stream."""

    def __init__(self, *_: Any, **__: Any):
        self.stream: Stream | None = None
        self.place = self.knows = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or _GPU[-1].current
        self.place = self.stream.ended + len(self.stream.copies)
        self.knows = _GPU[-1].clock if self.stream is _GPU[-1].default else self.stream.knows

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.finish(self.place)

    wait = finish

    def synchronize(self) -> None:
        _GPU[-1].event_waits += 1
        self.finish()

    def query(self) -> bool:
        return self.stream is None or self.stream.ended >= self.place

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Rehearsal:
    """The state of the GPU."""

    def __init__(self) -> None:
        self.default = Stream()
        self.current = self.default
        self.clock = self.waits = self.event_waits = 0
        self.written: dict[int, int] = {}
        """By address, the last operation of the default stream that wrote there."""
        self.pinned: dict[int, Any] = {}
        self.launched: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        """The kernels of GPUs that ran: name, arguments, options."""
        self.threads = threading.local()

    @property
    def calls(self) -> list[tuple[bool, bool]]:
        """The calls of torch's functions that Python code in this thread is in: whether each names a CPU, and whether
        tensors of the GPU are among its arguments."""
        return self.threads.__dict__.setdefault("calls", [])

    @calls.setter
    def calls(self, calls: list[tuple[bool, bool]]) -> None:
        self.threads.calls = calls

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Computes an operation on the CPU tensors under those of the GPU, and gives results their place."""
        device, pins = kwargs.get("device"), kwargs.pop("pin_memory", None)
        theirs: dict[int, Tensor] = {}
        places = set[bool]()

        def under(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if x.dim():
                places.add(isinstance(x, DeviceTensor))
            plain = values(x) if isinstance(x, DeviceTensor) else x
            theirs[id(plain)] = x
            return plain

        plain_args, plain_kwargs = tree_map(under, (args, kwargs))
        here = any(isinstance(x, DeviceTensor) for x in theirs.values())
        if len(places) == 2 and func not in _BOTH:
            shapes = [(tuple(x.shape), str(x.device)) for x in theirs.values()]
            raise RuntimeError(f"Expected all tensors to be on the same device, but found in {func}: {shapes}")
        kind = torch.device(device).type if device is not None else ""
        if kind == "cuda":
            plain_kwargs["device"] = CPU
        goes = here if not kind else kind == "cuda" or (kind == "cpu" and self._inferred(here))
        if func is aten.copy_.default and (kwargs.get("non_blocking") or args[2:3] == (True,)) and len(places) == 2:
            return self._copy(args[0], args[1])
        if (func in _WAITS and here) or (func is aten._to_copy.default and here and not goes):
            self.waits += 1
            self.default.finish()
        if func is aten.copy_.default and len(places) == 2:
            self.default.finish()
            self.waits += not goes
        if func in KERNELS and goes:
            self.launched.append((func._overloadpacket.__name__, args, kwargs))
            kernel = KERNELS[func]
            out = kernel(*plain_args, **plain_kwargs)
        else:
            out = func(*plain_args, **plain_kwargs)
        self.clock += 1

        def placed(x: Any) -> Any:
            if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
                return theirs.get(id(x), x)
            if goes:
                self.written[x.untyped_storage().data_ptr()] = self.clock
            if id(x) in theirs:
                return theirs[id(x)]
            if pins:
                self.pinned[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return on_device(x) if goes else x

        return tree_map(placed, out)

    def _inferred(self, here: bool) -> bool:
        """Returns whether a tensor is for the GPU though the operation names the CPU: torch's own code, for which these
        tensors are there, names it where Python code has not."""
        if self.calls:
            names_cpu, has_ours = self.calls[-1]
            return not names_cpu and (here or has_ours)
        return torch._C._current_graph_task_id() >= 0

    def _copy(self, into: Tensor, source: Tensor) -> Tensor:
        """Starts a copy between both places that ends when something waits for it."""
        to, of = values(into), values(source)
        device, host = (to, of) if isinstance(into, DeviceTensor) else (of, to)
        stream = self.current
        if stream is self.default:
            if device is to:
                stream.finish()
                to.copy_(of)
            else:
                of = of.clone()  # what the stream does afterwards comes after the copy
                stream.copies.append(lambda: to.copy_(of))
            return into
        assert host.untyped_storage().data_ptr() in self.pinned, "a copy beside the computation needs pinned memory"
        last = self.written.get(device.untyped_storage().data_ptr(), 0)
        assert last <= stream.knows, "a copy did not wait for the computation before it"
        stream.copies.append(lambda: to.copy_(of))
        return into


_GPU: list[Rehearsal] = []


class _Factories(TorchDispatchMode):
    """Makes tensors on the GPU where an operation is asked for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {torch.Tensor, torch.nn.Parameter, DeviceTensor}.issuperset(types):  # DTensor, around one of these
            return func(*args, **kwargs or {})
        return _GPU[-1].run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Notes which devices Python code names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [x for each in (*args, *kwargs.values()) for x in (each if isinstance(each, (list, tuple)) else (each,))]
        named = [x for x in (*flat, torch.device(kwargs.get("device") or "meta")) if isinstance(x, torch.device)]
        gpu = _GPU[-1]
        if func is torch.tensor or (func is torch.as_tensor and not isinstance(args[0], Tensor)):
            device, pins = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            if pins:
                gpu.pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
            return on_device(made) if device is not None and torch.device(device).type == "cuda" else made
        gpu.calls.append((any(x.type == "cpu" for x in named), any(isinstance(x, DeviceTensor) for x in flat)))
        try:
            return func(*args, **kwargs)
        finally:
            gpu.calls.pop()


@contextlib.contextmanager
def rehearsal(patch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Gives this process a GPU."""
    gpu = Rehearsal()
    _GPU.append(gpu)

    def synchronize(_: Any = None) -> None:
        gpu.waits += 1
        gpu.default.finish()

    both = {"current_stream": lambda _=None: gpu.current, "synchronize": synchronize}
    cuda = {"Stream": Stream, "Event": Event, "stream": lambda chosen: chosen, **both}
    own = {f"cuda.{key}": each for key, each in cuda.items()} | {f"accelerator.{key}": both[key] for key in both}
    own["Stream"] = Stream
    for name, stand_in in (stand_ins(NAME, MEMORY, CAPABILITY) | own).items():
        patch.setattr(f"torch.{name}", stand_in, raising=False)
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        """Runs hooks and gradients written in Python as Python code: nothing is noted of the call around them."""
        if gpu not in _GPU:  # the test goes on without it
            return run_backward(*args, **kwargs)
        before, gpu.calls = gpu.calls, []
        try:
            with _Calls():
                return run_backward(*args, **kwargs)
        finally:
            gpu.calls = before

    patch.setattr(torch.autograd, "_engine_run_backward", backward)
    patch.setattr(torch, "Generator", HostGenerator)
    # Modules that are moved get parameters of the new class instead of new memory under the old one.
    patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    try:
        with _Calls(), _Factories():
            yield gpu
    finally:
        _GPU.pop()
