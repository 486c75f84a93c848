"""Records collectives and messages that code outside this package calls on torch.distributed itself, such as a
plug-in's.

Without it a rank that waits in such a call seems to wait for nothing, and the watchdog blames the wrong one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.calls import CallLog, reduction
from phalanx.launch.watchdog import heartbeat

_TORCH = f"{Path(torch.__file__).parent}/"
_OWN = (f"{Path(__file__).parents[1]}/", _TORCH)
_DIFFERENTIABLE = f"{_TORCH}distributed/nn/"
"""torch's collectives with a backward pass, which call those of torch.distributed for a plug-in."""
_RECORDED = {
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "reduce": ("reduce", "tensor"),
    "scatter": ("scatter", "tensor"),
    "gather": ("gather", "tensor"),
    "all_gather": ("all_gather", "tensor"),
    "all_gather_into_tensor": ("all_gather", "input_tensor"),
    "all_gather_single": ("all_gather", "input"),
    "reduce_scatter": ("reduce_scatter", "output"),
    "reduce_scatter_tensor": ("reduce_scatter", "output"),
    "reduce_scatter_single": ("reduce_scatter", "output"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "send": ("send", "tensor"),
    "recv": ("receive", "tensor"),
    "barrier": ("barrier", ""),
    "monitored_barrier": ("barrier", ""),
    "all_gather_object": ("all_gather", ""),
    "broadcast_object_list": ("broadcast", ""),
    "gather_object": ("gather", ""),
    "scatter_object_list": ("scatter", ""),
}
"""Functions of torch.distributed, with the operation and the argument of which every rank gives a like one. Values of
any type have sizes of each rank's own. Not isend and irecv: torch's P2POp takes none but its own."""


def record() -> None:
    """Makes torch.distributed's collectives record calls from other code in this process's heartbeat, also where that
    has imported them by name. Calls of this package and of torch are recorded where they are made."""
    replaced: dict[Any, Any] = {}
    for name, (operation, argument) in _RECORDED.items():
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "records_calls"):
            replaced[function] = _recording(function, operation, argument)
            setattr(dist, name, replaced[function])
    if not replaced:
        return
    for module in list(sys.modules.values()):
        if not (getattr(module, "__file__", None) or _TORCH).startswith(_OWN):
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in replaced:
                    setattr(module, name, replaced[value])


def _recording(function: Callable[..., Any], operation: str, argument: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if heartbeat.own() is None or (caller.startswith(_OWN) and not caller.startswith(_DIFFERENTIABLE)):
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        later = bool(given.get("async_op"))
        call = _begin(operation, given.get(argument), given, waits=not later)
        result = function(*args, **kwargs)
        if call is not None and not later:
            call.done()
        return result

    recorded.records_calls = True  # pyright: ignore[reportAttributeAccessIssue]
    return recorded


def _begin(operation: str, x: Any, given: dict[str, Any], *, waits: bool) -> heartbeat.Call | None:
    world = dist.distributed_c10d._get_default_group()
    group = given.get("group") or world
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
        operation = reduction(given.get("op", dist.ReduceOp.SUM))
    rooted = operation in ("broadcast", "reduce", "scatter", "gather")
    return log.begin(operation, tensor, waits=waits, root=(peer or 0) if rooted else -1)
