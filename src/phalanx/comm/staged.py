"""The collectives of an axis whose tensors are on a GPU while its process group is gloo's, which sends host memory.

NCCL takes one rank per GPU. Where several ranks share one, as in `phalanx verify --device cuda` on a machine with a
single GPU, every message is copied to the host, sent by `Axis`, and copied back: slow, with the same sums and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis, Pending


class StagedAxis(Axis):
    """An `Axis` of gloo for tensors on any device. Calls and results are those of `Axis`."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        host = _on_host(x)
        return _CopyBack(super().all_reduce(host, op), x, host)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        host = _room_on_host(part)
        return _CopyBack(super().reduce_scatter(host, _on_host(whole)), part, host)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        host = _room_on_host(whole)
        return _CopyBack(super().all_gather(host, _on_host(part)), whole, host)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        host = _on_host(x)
        return _CopyBack(super().broadcast(host, source), x, host)

    def start_send(self, x: Tensor, target: int) -> Pending:
        host = _on_host(x)
        return _CopyBack(super().start_send(host, target), None, host)

    def start_receive(self, x: Tensor, source: int) -> Pending:
        host = _room_on_host(x)
        return _CopyBack(super().start_receive(host, source), x, host)

    def rotate(self, received: Tensor, x: Tensor) -> Pending:
        host, sent = _room_on_host(received), _on_host(x)
        return _CopyBack(super().rotate(host, sent), received, host, sent)

    def shift(self, received: Tensor, x: Tensor, hops: int) -> Pending:
        host, sent = _room_on_host(received), _on_host(x)
        return _CopyBack(super().shift(host, sent, hops), received, host, sent)

    def all_to_all(
        self,
        received: Tensor,
        x: Tensor,
        received_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        host, sent = _room_on_host(received), _on_host(x)
        return _CopyBack(super().all_to_all(host, sent, received_sizes, sizes), received, host, sent)


class _CopyBack:
    """Waits for a collective on host tensors, then copies `host` to `target`. Keeps the sent tensor alive."""

    def __init__(self, pending: Pending, target: Tensor | None, host: Tensor, *sent: Tensor):
        self.pending, self.target, self.hosts = pending, target, (host, *sent)

    def wait(self) -> Any:
        self.pending.wait()
        if self.target is not None:
            self.target.copy_(self.hosts[0])
            self.target = None


def _on_host(x: Tensor) -> Tensor:
    """Returns a copy of `x` in host memory, even if `x` is already there. Waits for the device."""
    return _room_on_host(x).copy_(x)


def _room_on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")
