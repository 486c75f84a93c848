"""Records the calls of a process group in this rank's heartbeat, for the watchdog (launch/watchdog).

All ranks of a group make the same calls in the same order, so a call is known by its number: comparing the ranks'
records shows who has not come to a call, and whether two ranks made different calls.

`record` does the same for what other code, such as a plug-in, calls on torch.distributed itself: else a rank that waits
in such a call would seem to wait for nothing, and the watchdog would blame the wrong one. `recorded` keeps the calls
and phases of a while with their times, for a profile.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import DTYPES, OTHER_TYPE, Call, Channel, Heartbeat, Phase, TimedCall

_HIDDEN = f"{Path(__file__).parent}/"
_TYPE_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


def reduction(op: object) -> str:
    """Returns the recorded name of an all-reduce by its operation, such as all_reduce_max."""
    names = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
    word = op.lower() if isinstance(op, str) else ""  # of a functional collective
    name = next((name for name, each in names.items() if word == name or op == each), "")
    return f"all_reduce_{name}" if name else "all_reduce"


def name_modules(model: nn.Module) -> None:
    """Makes the records of collectives name the part of the model (a block, its attention, the head, …) in whose
    forward or backward pass they are called. Inside of compiled modules nothing is named."""
    if heartbeat.own() is None:
        return
    for name, module in model.named_modules():
        path = name.split(".")
        if (name and len(path) == 1) or (path[0] == "blocks" and len(path) <= 3):
            marks = _Marks(name, ".".join(path[:2]) if len(path) > 2 else "")
            module.register_forward_pre_hook(marks.begin)
            module.register_forward_hook(marks.end)


class _Marks:
    """Hooks on a module. Its backward pass begins with the gradient of its output."""

    def __init__(self, name: str, outside: str):
        self.name, self.outside = name, outside

    def begin(self, _: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            heartbeat.enter_module(self.name)

    def end(self, _: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            heartbeat.enter_module(self.outside)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(self.backward)

    def backward(self, _: Tensor) -> None:
        heartbeat.enter_module(self.name)


class CallLog:
    """The calls that this rank makes on one process group under the name of an axis. Without a heartbeat it records
    nothing."""

    def __init__(self, axis: str, group: dist.ProcessGroup | None):
        self.axis, self._group = axis, group
        self._channels: dict[tuple[str, int], Channel] = {}
        # A group names a backend per device type: "cpu:gloo,cuda:nccl", "cpu:gloo,xpu:xccl", "cpu:gloo,cuda:gloo".
        self.device_backend = group is not None and "ccl" in dist.get_backend(group)

    def begin(self, operation: str, x: Tensor, *, waits: bool = False, root: int = -1) -> Call | None:
        """Records that a collective over `x` starts; with `waits`, the rank is blocked in it from now on. `root` is the
        group's rank from which or to which data go, if there is one, or the distance of a shift."""
        return self._begin("all", -1, operation, x, waits=waits, root=root)

    def send(self, x: Tensor, target: int, *, waits: bool = False) -> Call | None:
        """Records that a message to the group's rank `target` starts."""
        return self._begin("send", target, "send", x, waits=waits)

    def receive(self, x: Tensor, source: int, *, waits: bool = False) -> Call | None:
        """Records that a message from the group's rank `source` is expected."""
        return self._begin("receive", source, "receive", x, waits=waits)

    def _begin(self, kind: str, peer: int, operation: str, x: Tensor, *, waits: bool, root: int = -1) -> Call | None:
        beat = heartbeat.own()
        if beat is None or self._group is None:
            return None
        channel = self._channels.get((kind, peer)) or self._channel(beat, kind, peer)
        dtype = _TYPE_NAMES.get(x.dtype, OTHER_TYPE)
        return beat.begin(
            *(channel, operation, self.axis, dtype, x.shape, x.nbytes),
            waits=waits,
            on_device=self.device_backend and not x.is_cpu,
            hidden=_HIDDEN,
            root=dist.get_global_rank(self._group, root) if root >= 0 and operation != "shift" else root,
        )

    def _channel(self, beat: heartbeat.Heartbeat, kind: str, peer: int) -> Channel:
        assert self._group is not None
        ranks: Sequence[int] = dist.get_process_group_ranks(self._group)
        whom = ranks[peer] if peer >= 0 else -1
        channel = self._channels[kind, peer] = beat.channel(self._group.group_name, kind, ranks, whom)
        return channel


_TORCH = f"{Path(torch.__file__).parent}/"
_OWN = (f"{Path(__file__).parents[1]}/", _TORCH)
_DIFFERENTIABLE = f"{_TORCH}distributed/nn/"
"""torch's collectives with a backward pass, which call those of torch.distributed for a plug-in."""
_RECORDED = {
    "all_reduce": ("all_reduce",),
    "broadcast": ("broadcast", "broadcast_object_list"),
    "reduce": ("reduce",),
    "scatter": ("scatter", "scatter_object_list"),
    "gather": ("gather", "gather_object"),
    "all_gather": ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "send": ("send", "isend"),
    "receive": ("recv", "irecv"),
    "messages": ("batch_isend_irecv",),
    "barrier": ("barrier", "monitored_barrier"),
}
"""By operation, the functions of torch.distributed."""
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "broadcast": ("broadcast",),
    "all_gather": tuple(
        f"all_gather_{name}"
        for name in (
            *("tensor", "tensor_autograd", "single", "single_autograd"),
            *("into_tensor_coalesced", "single_coalesced"),
        )
    ),
    "reduce_scatter": tuple(
        f"reduce_scatter_{name}"
        for name in (
            *("tensor", "tensor_autograd", "single", "single_autograd"),
            *("tensor_coalesced", "single_coalesced"),
        )
    ),
    "all_to_all": ("all_to_all_single", "all_to_all_single_autograd", "permute_tensor"),
}
"""The same of torch.distributed._functional_collectives, none of which waits."""
_LATER = ("isend", "irecv", "batch_isend_irecv")
"""Functions that never wait."""
_LIKE = ("tensor", "input_tensor", "input_tensor_list", "self", "inputs", "input")
"""Arguments of which every rank gives a like one, as it does the `output` of a reduce-scatter. Values of any type have
sizes of each rank's own."""


def record() -> None:
    """Makes torch.distributed's collectives record calls from other code in this process's heartbeat, also where that
    has imported them by name. Calls of this package and of torch are recorded where they are made."""
    replaced: dict[Any, Any] = {}
    everywhere: dict[Any, Any] = {}
    for home, functions in ((dist, _RECORDED), (functional, _FUNCTIONAL)):
        for operation, name in ((operation, name) for operation, names in functions.items() for name in names):
            function = getattr(home, name, None)
            if function is not None and not hasattr(function, "records_calls"):
                later = home is functional or name in _LATER
                replaced[function] = _recording(function, operation, later=later)
                setattr(home, name, replaced[function])
                if name in ("isend", "irecv"):  # torch's P2POp compares them with its own
                    everywhere[function] = replaced[function]
    if not replaced:
        return
    for module in list(sys.modules.values()):
        own = (getattr(module, "__file__", None) or _TORCH).startswith(_OWN)
        for name, value in list(vars(module).items()):
            # isinstance would ask torch's deprecated names for their class, of which they warn.
            if type(value) is FunctionType and value in (found := everywhere if own else replaced):
                setattr(module, name, found[value])


def _recording(function: Callable[..., Any], operation: str, *, later: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)
    likes = ("self", "inputs", "output") if operation == "reduce_scatter" else _LIKE
    like = next((name for name in likes if name in signature.parameters), "")

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        caller = sys._getframe(1).f_code.co_filename
        if heartbeat.own() is None or (caller.startswith(_OWN) and not caller.startswith(_DIFFERENTIABLE)):
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        waits = not (later or given.get("async_op"))
        if operation == "messages":
            for one in given["p2p_op_list"]:
                sends, ends = "send" in one.op.__name__, {"group": one.group, "group_src": one.group_peer}
                _begin("send" if sends else "receive", one.tensor, ends, waits=False)
            return function(*args, **kwargs)
        call = _begin(operation, given.get(like), given, waits=waits)
        result = function(*args, **kwargs)
        if call is not None and waits:
            call.done()
        return result

    recorded.records_calls = True  # pyrefly: ignore[missing-attribute]
    return recorded


def _begin(operation: str, x: Any, given: dict[str, Any], *, waits: bool) -> heartbeat.Call | None:
    world = dist.distributed_c10d._get_default_group()
    group = given.get("group") or world
    if not isinstance(group, dist.ProcessGroup):  # functional collectives take names, meshes and ranks as well
        name = functional._resolve_group_name(group, given.get("tag", ""))
        group = dist.distributed_c10d._resolve_process_group(name)
    if dist.get_rank(group) < 0:
        return None
    log = CallLog("world" if group is world else group.group_name, group)
    tensor = x if isinstance(x, torch.Tensor) else x[0] if x else torch.empty(0)
    peer = next((given[name] for name in ("group_src", "group_dst") if given.get(name) is not None), None)
    if peer is None:
        peer = next((given[name] for name in ("src", "dst") if given.get(name) is not None), None)
        peer = None if peer is None else dist.get_group_rank(group, peer)
    if operation == "send":
        return log.send(tensor, 0 if peer is None else peer, waits=waits)
    if operation == "receive":
        return None if peer is None else log.receive(tensor, peer, waits=waits)  # from any rank: of no channel
    if operation == "all_reduce":
        operation = reduction(given.get("op", given.get("reduceOp", dist.ReduceOp.SUM)))
    rooted = operation in ("broadcast", "reduce", "scatter", "gather")
    return log.begin(operation, tensor, waits=waits, root=(peer or 0) if rooted else -1)


MOST_CALLS = 50_000
"""Most calls of one rank that are recorded."""
_LEDGER_NAMES = {
    **dict.fromkeys(("all_reduce_max", "all_reduce_min", "all_reduce_avg"), "all_reduce"),
    "receive": "send",
    "rotate": "send",
    "shift": "send",
}
now: Callable[[], int] = time.monotonic_ns
"""The clock of a recording, which all processes of a machine share."""


@dataclass
class Recording:
    """The calls and phases of one rank."""

    calls: list[TimedCall] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    """When each phase began."""
    left_out: int = 0
    """Calls beyond MOST_CALLS."""


class ObservedCall(Call):
    """A call that is recorded beside the heartbeat's own record of it, if there is one."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: TimedCall, inner: Call | None):
        self._call, self._inner = call, inner

    def launched(self) -> None:
        """Records that the host goes on."""
        self._call.launched = now()

    def waits(self) -> None:
        self._call.waited = now()
        if self._inner is not None:
            self._inner.waits()

    def done(self) -> None:
        if self._inner is not None:
            self._inner.done()
        self.settled()

    def settled(self) -> None:
        """Records that the host has also done its own part of the result: a sum of what has arrived."""
        self._call.done = now()


class _Recorder:
    """Stands in for this process's heartbeat, which goes on if there is one."""

    def __init__(self, inner: Heartbeat | None, recording: Recording):
        self._inner, self._recording, self._thread = inner, recording, threading.get_ident()
        self._phase = Phase.START if inner is None else inner._phase
        self.channels = {} if inner is None else inner.channels
        recording.phases.append((now(), self._phase))

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if self._inner is None else getattr(self._inner, name)

    def enter(self, phase: Phase) -> Phase:
        before, self._phase = self._phase, phase
        self._recording.phases.append((now(), phase))
        if self._inner is not None:
            self._inner.enter(phase)
        return before

    def channel(self, group: str, kind: str, ranks: Sequence[int], peer: int = -1) -> Channel:
        if self._inner is None:
            return self.channels.setdefault((group, kind, peer), Channel(0))
        return self._inner.channel(group, kind, ranks, peer)

    def begin(
        self, channel: Channel, operation: str, axis: str, *sizes: Any, waits: bool, **options: Any
    ) -> ObservedCall:
        inner, start = None, now()
        if self._inner is None:
            channel.started += 1
        else:
            inner = self._inner.begin(channel, operation, axis, *sizes, waits=waits, **options)
        known = (key for key, each in list(self.channels.items()) if each is channel)
        group, kind, peer = next(known, ("", "all", -1))
        call = TimedCall(
            axis,
            _LEDGER_NAMES.get(operation, operation),
            group if kind == "all" else f"{group}:{peer}",
            channel.started,
            bytes=sizes[-1],
            main=threading.get_ident() == self._thread,
            sends=operation == "send",
            receives=operation == "receive",
            start=start,
        )
        if waits:
            call.waited = call.launched = start
        if len(self._recording.calls) < MOST_CALLS:
            self._recording.calls.append(call)
        else:
            self._recording.left_out += 1
        return ObservedCall(call, inner)


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Records the calls and phases of a `with` block. Steps outside of it run without any of this."""
    before = heartbeat.own()
    heartbeat.adopt(cast(Heartbeat, _Recorder(before, recording)))
    try:
        yield
    finally:
        heartbeat.adopt(before)
