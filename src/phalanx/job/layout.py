"""How a model is spread over devices: the degrees of each axis and what goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh's axes, outermost first; `ep` is carved out of dp_shard × cp and multiplies nothing."""


@dataclass(frozen=True)
class Layout:
    """How the model is spread over the devices."""

    dp_replicate: int = 1
    """Data-parallel replicas that hold whole copies (DDP)."""
    dp_shard: int = 1
    """Data-parallel ranks that shard the state among them (ZeRO / FSDP)."""
    cp: int = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    tp: int = 1
    """Tensor-parallel ranks: each holds a part of every matrix."""
    pp: int = 1
    """Pipeline stages (ranks): each holds a part of the layers."""
    ep: int = 1
    """Expert-parallel ranks, taken from dp_shard × cp."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard shards: 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    schedule: str = "1f1b"
    """Pipeline schedule."""
    micro_batch: int = 0
    """Sequences in one forward pass of one data rank; 0 means the rest of the equation decides."""
    accumulation: int = 0
    """Micro-batches a step on each data rank; 0 means the rest of the equation decides."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once while the loss is computed; 0 means all of a micro-batch."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State kept in host memory instead of device memory."""
    data_parallel: Literal["ddp", "threads"] = "ddp"
    """How dp_replicate runs: one process a replica (ddp), or one process with a thread a replica (threads: torch's
    DataParallel, a baseline that shows what one interpreter costs)."""
    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of this many MiB, while the backward pass goes on."""

    @property
    def world(self) -> int:
        """Devices the layout needs: the product of all axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        """Processes that run it: the world, except that `threads` puts every replica in one."""
        return self.world // self.dp_replicate if self.data_parallel == "threads" else self.world

    def line(self) -> str:
        """The layout in one line, as every table and log prints it: what differs from the default."""
        default = Layout()
        shown = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(default, name) and name != "bucket_mb"
        ]
        return ",".join(shown) or "dp_replicate=1"
