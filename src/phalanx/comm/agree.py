"""Actions of rank 0, or of every rank, whose failure all ranks share.

A rank that raises alone leaves the others waiting in their next collective. Here the failure is broadcast, so that all
ranks stop with the same message. The result travels as JSON: nothing that arrives can execute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx import errors
from phalanx.comm import blocking

T = TypeVar("T")


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Calls `work` on rank 0 and returns its result (JSON-able) on every rank.

    A PhalanxError raised by it is raised on every rank, with the same class and message. Without a process group (one
    process) it is a plain call.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    answer: dict[str, Any] = {}
    bug: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = {"result": work()}
        except errors.PhalanxError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # raised again below, once the others know
            bug = error
            answer = {"error": "RunError", "message": f"rank 0 failed: {type(error).__name__}: {error}"}
    answer = _broadcast(answer)
    if bug is not None:
        raise bug
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["result"]


def on_every_rank(work: Callable[[], T]) -> T:
    """Calls `work` on every rank and returns this rank's own result once all have one.

    If it raises a PhalanxError on any rank, all ranks raise that of the first such rank, with the same class and
    message. Without a process group (one process) it is a plain call.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except errors.PhalanxError as error:
        failure, answer = error, {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # raised again below, once the others know
        rank = dist.get_rank()
        failure = error
        answer = {"error": "RunError", "message": f"rank {rank} failed: {type(error).__name__}: {error}"}
    first = torch.tensor([dist.get_world_size() if failure is None else dist.get_rank()])
    blocking.all_reduce(first, dist.ReduceOp.MIN)
    if first.item() < dist.get_world_size():
        answer = _broadcast(answer, int(first.item()))
        if failure is not None and not isinstance(failure, errors.PhalanxError):
            raise failure
        raise getattr(errors, answer["error"])(answer["message"])
    return result[0]


def _broadcast(message: dict[str, Any], source: int = 0) -> dict[str, Any]:
    """Broadcasts the message of rank `source` as JSON bytes over CPU tensors."""
    data = json.dumps(message).encode() if dist.get_rank() == source else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    blocking.broadcast(length, source)
    payload = torch.zeros(int(length.item()), dtype=torch.uint8)
    if data:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    blocking.broadcast(payload, source)
    return json.loads(payload.numpy().tobytes())
