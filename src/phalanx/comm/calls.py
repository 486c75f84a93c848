"""Records the calls of a process group in this rank's heartbeat, for the watchdog (launch/watchdog).

All ranks of a group make the same calls in the same order, so a call is known by its number: comparing the ranks'
records shows who has not come to a call, and whether two ranks made different calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import DTYPES, OTHER_TYPE, Call, Channel

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
            marks = _Marks(name)
            module.register_forward_pre_hook(marks.begin)
            module.register_forward_hook(marks.end)


class _Marks:
    """Hooks on a module. Its backward pass begins with the gradient of its output."""

    def __init__(self, name: str):
        self.name, self.outside = name, ""

    def begin(self, _: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.outside = heartbeat.module()
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
        self._nccl = group is not None and "nccl" in dist.get_backend(group)

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
            on_device=self._nccl and x.is_cuda,
            hidden=_HIDDEN,
            root=dist.get_global_rank(self._group, root) if root >= 0 and operation != "shift" else root,
        )

    def _channel(self, beat: heartbeat.Heartbeat, kind: str, peer: int) -> Channel:
        assert self._group is not None
        ranks: Sequence[int] = dist.get_process_group_ranks(self._group)
        whom = ranks[peer] if peer >= 0 else -1
        channel = self._channels[kind, peer] = beat.channel(self._group.group_name, kind, ranks, whom)
        return channel
