"""Actions that rank 0 performs for all ranks; every rank shares the result or the failure.

A rank that raises alone leaves the others waiting in their next collective. Here the failure is broadcast, so that all
ranks stop with the same message. The result travels as JSON: nothing that arrives can execute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx import errors


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


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """Broadcasts rank 0's message as JSON bytes over CPU tensors."""
    data = json.dumps(message).encode() if dist.get_rank() == 0 else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(length, src=0)
    payload = torch.zeros(int(length.item()), dtype=torch.uint8)
    if data:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(payload, src=0)
    return json.loads(payload.numpy().tobytes())
