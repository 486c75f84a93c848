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
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

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
    "isend": ("send", "tensor"),
    "irecv": ("receive", "tensor"),
    "batch_isend_irecv": ("messages", "p2p_op_list"),
    "barrier": ("barrier", ""),
    "monitored_barrier": ("barrier", ""),
    "all_gather_object": ("all_gather", ""),
    "broadcast_object_list": ("broadcast", ""),
    "gather_object": ("gather", ""),
    "scatter_object_list": ("scatter", ""),
}
"""Functions of torch.distributed, with the operation and the argument of which every rank gives a like one. Values of
any type have sizes of each rank's own."""
_LATER = ("isend", "irecv", "batch_isend_irecv")
"""Functions that never wait."""
_FUNCTIONAL = {
    "broadcast": ("broadcast", "self"),
    "all_reduce": ("all_reduce", "self"),
    "all_reduce_coalesced": ("all_reduce", "self"),
    **dict.fromkeys(("all_gather_tensor", "all_gather_tensor_autograd"), ("all_gather", "self")),
    **dict.fromkeys(("all_gather_single", "all_gather_single_autograd"), ("all_gather", "self")),
    **dict.fromkeys(("all_gather_into_tensor_coalesced", "all_gather_single_coalesced"), ("all_gather", "self")),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_autograd"), ("reduce_scatter", "self")),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_autograd"), ("reduce_scatter", "self")),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ("reduce_scatter", "inputs")
    ),
    **dict.fromkeys(("all_to_all_single", "all_to_all_single_autograd", "permute_tensor"), ("all_to_all", "self")),
}
"""The same of torch.distributed._functional_collectives, none of which waits."""


def record() -> None:
    """Makes torch.distributed's collectives record calls from other code in this process's heartbeat, also where that
    has imported them by name. Calls of this package and of torch are recorded where they are made."""
    replaced: dict[Any, Any] = {}
    everywhere: dict[Any, Any] = {}
    for home, functions in ((dist, _RECORDED), (functional, _FUNCTIONAL)):
        for name, (operation, argument) in functions.items():
            function = getattr(home, name, None)
            if function is not None and not hasattr(function, "records_calls"):
                later = home is functional or name in _LATER
                replaced[function] = _recording(function, operation, argument, later=later)
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


def _recording(function: Callable[..., Any], operation: str, argument: str, *, later: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)

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
            for one in given[argument]:
                sends, ends = "send" in one.op.__name__, {"group": one.group, "group_src": one.group_peer}
                _begin("send" if sends else "receive", one.tensor, ends, waits=False)
            return function(*args, **kwargs)
        call = _begin(operation, given.get(argument), given, waits=waits)
        result = function(*args, **kwargs)
        if call is not None and waits:
            call.done()
        return result

    recorded.records_calls = True  # pyright: ignore[reportAttributeAccessIssue]
    return recorded


def _begin(operation: str, x: Any, given: dict[str, Any], *, waits: bool) -> heartbeat.Call | None:
    world = dist.distributed_c10d._get_default_group()
    group = given.get("group") or world
    if not isinstance(group, dist.ProcessGroup):  # functional collectives take names, meshes and ranks as well
        name = functional._resolve_group_name(group, given.get("tag", ""))
        group = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateImportUsage]
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
