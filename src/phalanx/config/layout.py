"""The layout of a model over devices: the degree of each axis, and the options that depend on them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from phalanx.hashed import Hashed, hashed_once

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh's axes, outermost first; `ep` is carved out of dp_shard × cp and multiplies nothing."""


@hashed_once
@dataclass(frozen=True)
class Layout(Hashed):
    """The layout: how the model is spread over the devices."""

    auto: bool = False
    """Leave what is not set here to the planner (phalanx plan)."""
    dp_replicate: int = 1
    """Data-parallel replicas that hold whole copies (DDP)."""
    dp_shard: int = 1
    """Data-parallel ranks among which the state is sharded (ZeRO / FSDP)."""
    cp: int = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    cp_ulysses: int = 1
    """Ranks of cp that exchange heads for tokens (Ulysses); keys and values travel in a ring between the cp /
    cp_ulysses
    groups. 1 is pure ring attention, cp is pure Ulysses, values in between are USP."""
    cp_inner: Literal["ulysses", "ring"] = "ulysses"
    """With both: which of the two uses neighbouring ranks, which have the faster links."""
    tp: int = 1
    """Tensor-parallel ranks: each holds a part of every matrix."""
    pp: int = 1
    """Pipeline ranks: each holds one or more stages of layers."""
    ep: int = 1
    """Expert-parallel ranks, taken from dp_shard × cp: each holds a part of the routed experts."""
    zero: Literal[1, 2, 3] = 3
    """What dp_shard shards: 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    reshard: bool = True
    """zero=3: free a block's parameters after its forward pass and gather them again for the backward pass; off: less
    traffic, more memory."""
    prefetch: int = 1
    """zero=3: number of blocks whose parameters are prefetched; 0 leaves it to FSDP2."""
    accumulate: Literal["local", "sharded"] = "local"
    """Gradient accumulation: local keeps whole gradients on each rank and reduces once per step; sharded (zero 2 and 3)
    reduces and shards after every micro-batch, which needs less memory and more traffic."""
    tiles: int = 1
    """zero=3: run the MLP matrices in this many tiles, of which one is gathered at a time."""
    sp: bool = False
    """Sequence parallel: tp also shards the activations between the matrices (norms, residuals, dropout) by tokens."""
    sp_regather: bool = False
    """sp: save only this rank's part of a gathered input, and gather it again in the backward pass."""
    schedule: str = "1f1b"
    """Pipeline schedule: a name that `phalanx schedule list` shows, or a file with a schedule of your own."""
    pp_chunks: int = 0
    """Stages per pipeline rank; 0 uses the schedule's own number."""
    pp_slices: int = 0
    """Parts of a sequence that are pipelined one after the other (terapipe); 0 uses the schedule's own number."""
    pp_cut: str = ""
    """Layers of each stage, such as 3+5+4+4; the default cut minimises the slowest stage."""
    micro_batch: int = 0
    """Sequences in one forward pass of one data rank; 0 derives it from the batch equation."""
    accumulation: int = 0
    """Micro-batches per step on each data rank; 0 derives it from the batch equation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass instead of saved: none, those of attention (selective), or all."""
    recompute_cut: str = ""
    """Recomputation per layer, as runs of layers in order: 8*full+4*selective+20*none; empty applies `recompute` to
    every
    layer."""
    loss_chunk: int = 0
    """Tokens whose logits are in memory at once during the loss; 0 means all of a micro-batch."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State kept in host memory instead of device memory."""
    data_parallel: Literal["ddp", "threads"] = "ddp"
    """How dp_replicate runs: one process per replica (ddp), or one process with one thread per replica (threads:
    torch's
    DataParallel, a baseline that shows the cost of one interpreter)."""
    sync: Literal["bsp", "asp", "local_sgd", "diloco"] = "bsp"
    """How replicas (dp_replicate) synchronise: bsp sums gradients every step; asp sends each replica's gradients to a
    parameter server without waiting; local_sgd averages parameters and diloco takes an outer step, both every
    sync_every steps."""
    sync_every: int = 10
    """local_sgd, diloco: steps between two synchronisations."""
    bucket_mb: float = 25.0
    """Size of a gradient bucket in MiB; buckets are reduced during the backward pass."""

    @property
    def world(self) -> int:
        """Devices the layout needs: the product of all axes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that share one sharded state: dp_shard × cp, because cp ranks would hold the same
        parameters."""
        return self.dp_shard * self.cp

    @property
    def ring(self) -> int:
        """Groups between which keys and values travel."""
        return self.cp // self.cp_ulysses

    @property
    def apart(self) -> int:
        """Replicas that do not sum their gradients with others': each computes by itself, on its share of the batch. 1
        with bsp, where all are one."""
        return 1 if self.sync == "bsp" else self.dp_replicate

    @property
    def processes(self) -> int:
        """Processes that run it: the world, except that `threads` puts every replica in one."""
        return self.world // self.dp_replicate if self.data_parallel == "threads" else self.world

    def line(self) -> str:
        """Returns the layout in one line, as every table and log prints it: the fields that differ from the default;
        for a
        layout left to the planner, `auto` and the fields that are set."""
        default = Layout()
        shown = ["auto"] if self.auto else []
        shown += [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in ((field.name, getattr(self, field.name)) for field in fields(self))
            if value != getattr(default, name) and name not in ("auto", "bucket_mb")
        ]
        return ",".join(shown) or "dp_replicate=1"
