"""Values that ranks tell each other: the result or failure of an action, or one value of every rank.

A rank that raises alone leaves the others waiting in their next collective. So actions succeed or fail on all ranks.
Values travel as JSON bytes in tensors: torch's own object collectives unpickle what they receive, which lets a peer
execute code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import errors
from phalanx.comm import blocking
from phalanx.registry import blamed

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
            answer = {"error": type(error).__name__, "message": f"{blamed(error)}{error}"}
        except Exception as error:  # raised again below, once the others know
            bug = error
            answer = {"error": "RunError", "message": f"rank 0 failed: {blamed(error)}{type(error).__name__}: {error}"}
    answer = broadcast_json(answer)
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
        failure, answer = error, {"error": type(error).__name__, "message": f"{blamed(error)}{error}"}
    except Exception as error:  # raised again below, once the others know
        rank = dist.get_rank()
        failure = error
        answer = {"error": "RunError", "message": f"rank {rank} failed: {blamed(error)}{type(error).__name__}: {error}"}
    first = torch.tensor([dist.get_world_size() if failure is None else dist.get_rank()])
    blocking.all_reduce(first, dist.ReduceOp.MIN)
    if first.item() < dist.get_world_size():
        answer = broadcast_json(answer, int(first.item()))
        if failure is not None and not isinstance(failure, errors.PhalanxError):
            raise failure
        raise getattr(errors, answer["error"])(answer["message"])
    return result[0]


def broadcast_json(mine: Any, source: int = 0) -> Any:
    """Returns the value (JSON-able) of rank `source` on every rank; the values of the others are ignored."""
    data = _encode(mine) if dist.get_rank() == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    blocking.broadcast(length, source)
    payload = data if data.numel() else torch.empty(int(length.item()), dtype=torch.uint8)
    blocking.broadcast(payload, source)
    return _decode(payload)


def gather_json(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the value (JSON-able) of every rank of `group`, by default of all ranks, in rank order.

    Every rank receives the largest value's bytes once per rank. A collective; its messages are not counted. Without a
    process group (one process) it is the value alone."""
    if not dist.is_initialized():
        return [mine]
    size = dist.get_world_size(group)
    data = _encode(mine)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    blocking.all_gather(lengths, torch.tensor([data.numel()]), group)
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    payloads = [torch.empty_like(padded) for _ in range(size)]
    blocking.all_gather(payloads, padded, group)
    return [_decode(payload[:length]) for payload, length in zip(payloads, sizes, strict=True)]


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
