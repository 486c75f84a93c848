"""The all-gather of a group of ZeRO-3's parameters: as codes (qwZ), and from a second copy inside a node (hpZ).

Wang et al. 2023, "ZeRO++", section 3.2: after the first gather of a step the ranks of a node keep what has arrived,
each an equal part of it, and later gathers of the step stay in the node. They bring the same numbers, so results are
the same to the bit. DeepSpeed does so for gathers of the backward pass; here also those of the next micro-batch's
forward pass stay in the node, because parameters change only after the step.

With codes (section 3.1) every rank computes with the same rounded parameters, also with its own share; the second copy
then consists of codes, too. The shards that the optimizer updates are never rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.parallel import fsdp_private
from phalanx.parallel.codec import Codec


class Allocates:
    """Allocates a collective's memory through FSDP2's interface."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Allocates, fsdp_private.AllGather):
    """Gathers the parameters of one group. `near` are the ranks of `shard` that keep a second copy together; None
    without one. `codec` translates a rank's shares; None sends numbers."""

    def __init__(self, shard: Axis, near: Axis | None, codec: Codec | None):
        self.shard, self.near, self.codec = shard, near, codec
        self.copy: Tensor | None = None
        """This rank's part of the second copy: what shard.size / near.size ranks sent, in rank order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self.near is not None and self.copy is not None:
            axis, sent = self.near, self.copy
        else:
            axis, sent = self.shard, input_tensor
            if self.codec is not None:
                sent = self.codec.encode(input_tensor.view(1, -1)).view(-1)
        whole = output_tensor if self.codec is None else sent.new_empty(axis.size * sent.numel())
        arriving = Arriving(axis.all_gather(whole, sent), lambda: self._arrived(whole, output_tensor))
        if async_op:
            return arriving
        arriving.wait()
        return None

    def drop(self) -> None:
        """Gives up the second copy: the parameters may change now."""
        self.copy = None

    def _arrived(self, whole: Tensor, numbers: Tensor) -> None:
        """Keeps a part of what all ranks have sent, and writes its numbers."""
        if self.near is not None and self.copy is None:
            self.copy = whole.view(self.near.size, -1)[self.near.rank].clone()
        if self.codec is not None:
            self.codec.decode(whole.view(self.shard.size, -1), numbers.view(self.shard.size, -1))


class Arriving(dist.Work):
    """A collective in flight, with FSDP2's interface for waiting. `then` is called once it has arrived."""

    def __init__(self, pending: Pending, then: Callable[[], None] | None = None):
        super().__init__()
        self.pending, self.then = pending, then

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.pending.wait()
        if self.then is not None:
            self.then()
            self.then = None
        return True
