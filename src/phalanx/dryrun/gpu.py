"""A GPU that is not there: what Python code asks of torch.accelerator and of torch.cuda or torch.xpu, answered for the
device of a job.

Fake tensors on it are `cuda:0` or `xpu:0` to Python, so that the branches for GPUs run; torch's own code, which may be
built for CPUs, sees a CPU. Streams and events have nothing to order, as nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from phalanx.config.cluster import Cluster
from phalanx.config.clusters import DEVICES
from phalanx.dryrun.operations import attention_on_gpu

ARCHITECTURES = {"mi2": "gfx90a", "mi30": "gfx942", "mi32": "gfx942", "mi": "gfx950"}
"""Architectures of AMD's devices by the beginning of their name: of ROCm, where torch.version.hip is set."""
CAPABILITIES = {
    "v100": (7, 0),
    "a100": (8, 0),
    "l40s": (8, 9),
    "rtx-4090": (8, 9),
    "rtx-pro": (12, 0),
    "h": (9, 0),
    "gh200": (9, 0),
    "mi": (9, 4),
    "": (10, 0),
}
"""Compute capabilities by the beginning of a device's name: of data-centre Blackwell where no other fits."""


GPUS = {"cuda", "xpu"}
"""torch's types of GPUs."""


class _Stream:
    """A stream of the GPU, or a mark in one."""

    def __init__(self, device: Any = None, **_: Any):
        self.device, self.device_index = device, 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return event or self

    def wait_stream(self, _: Any) -> None:
        pass

    wait_event = record = wait = lambda self, *_: None

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class NamedDevices(TorchFunctionMode):
    """Notes which of torch's functions Python calls, to tell a CPU that Python names from one that torch's own code
    has inferred, for which all tensors are the CPU's."""

    def __init__(self, gpu: torch.device) -> None:
        super().__init__()
        self.gpu = gpu
        self.calls: list[tuple[Any, ...]] = []
        """The arguments of the calls that Python is in, innermost last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        self.calls.append(given)
        try:
            named, on_gpu = _named_and_on_gpu(given) if func in _OWN_KERNELS or func in _TO else (False, False)
            if func in _OWN_KERNELS and on_gpu:  # torch's code takes them where its device is a GPU
                func = _OWN_KERNELS[func]
            elif func in _TO and on_gpu and (named or func is Tensor.cpu):  # torch's code finds them there already
                return _copied_to_host(*args, **kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.calls.pop()

    def meant(self, device: torch.device | None, given: Iterable[Any]) -> torch.device | None:
        """Returns the device that an operation's result is for, whose caller names `device`."""
        if device is None or device.type != "cpu":
            return device
        here = any(isinstance(x, FakeTensor) and x.fake_device == self.gpu for x in given)
        if self.calls:
            named, has_gpu = _named_and_on_gpu(self.calls[-1])
            return self.gpu if not named and (here or has_gpu) else device
        return self.gpu if here and torch._C._current_graph_task_id() >= 0 else device

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes calls in the `with` block, also those of backward passes: hooks and gradients written in Python are
        Python code, whatever call has started the pass."""
        plain: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            before, self.calls = self.calls, []
            try:
                with self:
                    return plain(*args, **kwargs)
            finally:
                self.calls = before

        with mock.patch.object(torch.autograd, "_engine_run_backward", run_backward), self:
            yield


class _RmsNorm(torch.autograd.Function):
    """torch's kernel for GPUs: it saves its input, and the inverse root of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-dims], *[1] * dims, dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(x, weight, len(shape))


def _copied_to_host(x: Tensor, *given: Any, non_blocking: bool = False, dtype: Any = None, **_: Any) -> Tensor:
    dtype = next((each for each in given if isinstance(each, torch.dtype)), dtype)
    return torch.ops.aten._to_copy.default(x, dtype=dtype, device=torch.device("cpu"), non_blocking=non_blocking)


_TO = {Tensor.to, Tensor.cpu}
_OWN_KERNELS = {F.rms_norm: _rms_norm, F.scaled_dot_product_attention: attention_on_gpu}


def _named_and_on_gpu(given: Iterable[Any]) -> tuple[bool, bool]:
    """Returns whether the arguments of a call name a CPU, and have tensors of the GPU."""
    flat = [x for each in given for x in (each if isinstance(each, (list, tuple)) else (each,))]
    named = any((isinstance(x, torch.device) and x.type == "cpu") or (isinstance(x, str) and x == "cpu") for x in flat)
    return named, any(isinstance(x, FakeTensor) and x.fake_device.type in GPUS for x in flat)


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


class HostGenerator(torch.Generator):
    """A generator of the GPU, which draws what the CPU's draws."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def stand_ins(
    name: str, memory: int, capability: tuple[int, int], count: int = 1, architecture: str = "", kind: str = "cuda"
) -> dict[str, Any]:
    """Returns what stands in for attributes of torch, by name, for `count` GPUs of a type that the driver calls `name`,
    which have `memory` bytes each. Streams and events have nothing to do."""
    default = _Stream(torch.device(kind, 0))
    facts = SimpleNamespace(
        name=name, total_memory=memory, major=capability[0], minor=capability[1], multi_processor_count=132,
        gpu_subslice_count=64, has_fp64=True, gcnArchName=architecture,
    )  # fmt: skip
    both = {
        "current_stream": lambda _=None: default,
        "set_stream": lambda _: None,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: count,
    }
    own = {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _nothing,
        "device": _nothing,
        "default_stream": lambda _=None: default,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_lazy_init": lambda: None,
        "get_device_name": lambda _=None: name,
        "get_device_capability": lambda _=None: capability,
        "get_device_properties": lambda _=None: facts,
        "mem_get_info": lambda _=None: (memory * 3 // 4, memory),
        "max_memory_allocated": lambda _=None: memory // 4,
        "memory._record_memory_history": lambda **_: None,
        "memory._snapshot": dict,
    }
    general = {
        "current_accelerator": lambda _=False: torch.device(kind),
        "current_device_index": lambda: 0,
        "set_device_index": lambda _: None,
    }
    found = {f"{kind}.{key}": each for key, each in {**both, **own}.items()}
    return {**found, **{f"accelerator.{key}": each for key, each in {**both, **general}.items()}, "Stream": _Stream}


@contextmanager
def pretended_gpu(cluster: Cluster, kind: str = "cuda") -> Iterator[None]:
    """Gives this process the GPUs of one node of `cluster`, of torch's type `kind`, in the `with` block."""
    name = cluster.accelerator.name
    entry = DEVICES.get(name)
    reported = entry.reported_as[0] if entry and entry.reported_as else name
    capability = next(each for prefix, each in CAPABILITIES.items() if name.startswith(prefix))
    architecture = next((each for prefix, each in ARCHITECTURES.items() if name.startswith(prefix)), "")
    memory = round(cluster.accelerator.memory_gib * 2**30)
    dispatch = FakeTensor.__torch_dispatch__

    def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return device_of_torch(args[0])
        return dispatch(func, types, args, kwargs or {})

    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is made on the host and moved
    with ExitStack() as held:
        held.callback(torch._C._set_only_lift_cpu_tensors, before)
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
            # torch without CUDA would compose it of seven operations, whose results no GPU has.
            kernels = torch.library.Library("aten", "IMPL")
            held.callback(kernels._destroy)
            kernels.impl("silu_backward", lambda gradient, _: torch.empty_like(gradient), "CUDA")
        count = cluster.devices_per_node or 8
        for attribute, stand_in in stand_ins(reported, memory, capability, count, architecture, kind).items():
            held.enter_context(mock.patch(f"torch.{attribute}", stand_in, create=True))
        for target, attribute, stand_in in (
            (torch, "Generator", HostGenerator),
            (torch.version, "hip", "6.4" if architecture else None),
            (fake_tensor, "init_gpu_context", lambda _: None),
            (FakeTensor, "__torch_dispatch__", classmethod(dispatched)),
            *(
                (FakeTensor, f"is_{each}", property(lambda x, each=each: x.device.type == each))
                for each in ("cpu", kind)
            ),
            (FakeTensor, "record_stream", lambda *_: None),
        ):
            held.enter_context(mock.patch.object(target, attribute, stand_in, create=True))
        yield


def device_of_torch(x: FakeTensor) -> torch.device:
    """Returns the device of a fake tensor for torch's own code."""
    if x.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return torch.device("cpu") if x.fake_device.type in GPUS else x.fake_device
