"""Records collectives that code outside this package calls on torch.distributed itself, such as a plug-in's.

Without it a rank that waits in such a call seems to wait for nothing, and the watchdog blames the wrong one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.calls import CallLog, reduction
from phalanx.launch.watchdog import heartbeat

_OWN = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")
_TENSOR = {
    "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "all_gather": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", -1),
}
"""Functions of torch.distributed, with the operation and the place of the tensor that every rank gives."""


def record() -> None:
    """Makes torch.distributed's collectives record calls from other code in this process's heartbeat. Calls of this
    package and of torch are recorded where they are made."""
    for name, (operation, place) in _TENSOR.items():
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "records_calls"):
            setattr(dist, name, _recording(function, operation, place))


def _recording(function: Callable[..., Any], operation: str, place: int) -> Callable[..., Any]:
    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if heartbeat.own() is None or sys._getframe(1).f_code.co_filename.startswith(_OWN):
            return function(*args, **kwargs)
        call = _begin(operation, place, args, kwargs)
        result = function(*args, **kwargs)
        if call is not None and not kwargs.get("async_op"):
            call.done()
        return result

    recorded.records_calls = True  # pyright: ignore[reportAttributeAccessIssue]
    return recorded


def _begin(operation: str, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> heartbeat.Call | None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    groups = [x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)]
    group = groups[0] if groups else dist.distributed_c10d._get_default_group()
    if dist.get_rank(group) < 0:
        return None
    x = torch.empty(0) if place < 0 or not tensors else tensors[min(place, len(tensors) - 1)]
    if operation == "all_reduce":
        ops = [op for op in (*args, *kwargs.values()) if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType)]
        operation = reduction(ops[0]) if ops else operation
    is_world = group is dist.distributed_c10d._get_default_group()
    log = CallLog("world" if is_world else group.group_name, group)
    return log.begin(operation, x, waits=not kwargs.get("async_op"))
