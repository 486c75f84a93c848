"""Blocking collectives over CPU tensors among all ranks, or those of one group, for what is not a step's traffic: they
are recorded for the watchdog, and not counted in the ledger."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.calls import CallLog, reduction
from phalanx.launch.watchdog.heartbeat import Call


def all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Replaces `x` by the sum (or, by `op`, the maximum or minimum) over all ranks, in place."""
    call = _begin(reduction(op), x)
    dist.all_reduce(x, op)
    _done(call)


def broadcast(x: Tensor, source: int = 0) -> None:
    """Sets `x` to the value of rank `source`."""
    call = _begin("broadcast", x, root=source)
    dist.broadcast(x, source)
    _done(call)


def all_gather(every: list[Tensor], x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sets `every` to the tensors `x` of the ranks of a group, by default all, in rank order."""
    call = _begin("all_gather", x, group)
    dist.all_gather(every, x, group)
    _done(call)


def barrier() -> None:
    """Returns once all ranks have come."""
    call = _begin("barrier", torch.empty(0))
    dist.barrier()
    _done(call)


def _begin(operation: str, x: Tensor, group: dist.ProcessGroup | None = None, root: int = -1) -> Call | None:
    log = CallLog("world", group or dist.distributed_c10d._get_default_group())
    return log.begin(operation, x, waits=True, root=root)


def _done(call: Call | None) -> None:
    if call is not None:
        call.done()
