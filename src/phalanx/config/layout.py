"""The layout of a model over devices: the degree of each axis, and the options that depend on them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Annotated, Literal

from phalanx.config.added import Axes
from phalanx.config.constraints import Example, Interval
from phalanx.hashed import Hashed, hashed_once

Recompute = Literal["none", "products", "mlp", "selective", "full"]
"""Activations of a block that the backward pass recomputes."""
TILED = ("mlp", "attention", "experts", "embedding", "head")
"""Layers that may run in tiles: dense MLPs with the shared experts, the projections of attention, routed experts, and
by rows of the vocabulary an embedding and a head that are not tied."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh's axes, outermost first; `ep` is carved out of dp_shard × cp (× tp) and multiplies nothing."""


@hashed_once
@dataclass(frozen=True)
class Layout(Hashed):
    """The layout: how the model is spread over the devices."""

    auto: bool = False
    """Let the planner choose what is not set here (phalanx plan)."""
    dp_replicate: Annotated[int, Interval(1)] = 1
    """Data-parallel replicas that hold whole copies (DDP); -1: the rest of the devices."""
    dp_shard: Annotated[int, Interval(1)] = 1
    """Data-parallel ranks that shard the state among them (ZeRO / FSDP); -1: the rest of the devices."""
    cp: Annotated[int, Interval(1)] = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    cp_ulysses: Annotated[int, Interval(1)] = 1
    """Number of the cp ranks that exchange heads for tokens (Ulysses); between the cp / cp_ulysses groups of these,
    keys and values travel a ring. 1 is a ring alone, cp is Ulysses alone, between them lies USP."""
    cp_inner: Literal["ulysses", "ring"] = "ulysses"
    """With both ulysses and ring: the one that joins neighbouring ranks and so gets the faster links."""
    cp_balance: Literal["auto", "position", "documents"] = "auto"
    """Tokens of each cp rank: by position, on a ring in zig-zag, which balances whole sequences; or with
    data.document_mask whole documents, where these are short enough that no rank needs another's keys, and otherwise on
    a ring long ones in parts, or chunks, by what attention within documents costs. auto: by documents wherever that is
    possible."""
    tp: Annotated[int, Interval(1)] = 1
    """Tensor-parallel ranks: each holds a part of every matrix."""
    pp: Annotated[int, Interval(1)] = 1
    """Pipeline ranks: each holds one or several stages of the layers."""
    ep: Annotated[int, Interval(1)] = 1
    """Expert-parallel ranks, taken from dp_shard × cp, with etp=1 from dp_shard × cp × tp: each holds a part of the
    routed experts."""
    etp: Annotated[int, Interval(0)] = 0
    """Tensor-parallel ranks of the routed experts: tp, each with a part of every matrix, or 1, each with whole experts
    (MoE parallel folding), which takes sp=true. 0: as tp."""
    ep_node: Annotated[int, Interval(1)] = 1
    """Neighbouring ranks of ep, those of a node, that exchange tokens first, before the ranks at one place of every
    node do (hierarchical all-to-all); 1: all of ep at once."""
    dispatch: Annotated[str, Example("tokens")] = "rows"
    """Way of tokens to the ranks of their experts: rows, an all-to-all of a row per token and expert; tokens, one that
    sends each token once to every rank with some of its experts; deepep, DeepEP's kernels; or that of a package."""
    ep_overlap: bool = False
    """Overlap both all-to-alls of each half of a micro-batch's sequences with attention and experts of the other."""
    redundant_experts: Annotated[int, Interval(0)] = 0
    """Slots of each ep rank for redundant experts: copies of the experts with most tokens in a micro-batch, which share
    these with their owners; results stay the same."""
    zero: Literal[1, 2, 3] = 3
    """State that dp_shard shards: 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    reshard: bool = True
    """zero=3: give up a block's parameters after its forward pass and gather them again for the backward pass; without,
    less traffic and more memory."""
    hpz: Annotated[int, Interval(1)] = 1
    """zero=3: neighbouring ranks of dp_shard × cp, those of a node, that keep a second copy of the parameters together
    (ZeRO++'s hpZ), so that only the first gather of a step crosses nodes. 1: no copy."""
    quantise_weights: Literal["none", "int8", "fp8"] = "none"
    """zero=3: all-gather parameters in 8 bits: int8, codes with a scale per block (ZeRO++'s qwZ), which rounds the
    parameters of the passes; fp8, with train.precision=fp8, the matrices that it multiplies, with a scale per row."""
    quantise_gradients: Literal["none", "int8", "int4"] = "none"
    """zero=3: send gradients as codes of 8 or 4 bits, with hpz above 1 first inside the node, so that only sums cross
    to other nodes (ZeRO++'s qgZ)."""
    prefetch: Annotated[int, Interval(0)] = 1
    """zero=3: blocks whose parameters are gathered ahead; 0 leaves it to FSDP2."""
    accumulate: Literal["local", "sharded"] = "local"
    """Gradients of all micro-batches but the last: local keeps them whole on each rank and sends once per step; sharded
    (zero 2 and 3) sends and shards those of every micro-batch, less memory for more traffic."""
    tiles: Annotated[int, Interval(1)] = 1
    """Run large matrices in this many tiles: with zero=3 only one of them is whole at a time."""
    tile: Annotated[str, Example("mlp+attention")] = "mlp"
    """Layers that run in `tiles`: mlp, attention, experts, embedding, head, joined by +, or all."""
    sp: bool = False
    """Sequence parallel: tp also shards the activations between the matrices (norms, residuals, dropout) by tokens."""
    sp_regather: bool = False
    """sp: save only this rank's part of a gathered input, and gather it again in the backward pass."""
    schedule: Annotated[str, Example("zb_v")] = "1f1b"
    """Pipeline schedule: a name that `phalanx schedule list` shows, or a file with a schedule of your own."""
    pp_chunks: Annotated[int, Interval(0)] = 0
    """Stages per pipeline rank; 0: the schedule's default."""
    pp_slices: Annotated[int, Interval(0)] = 0
    """Slices of a sequence that are pipelined one after the other (terapipe); 0: the schedule's default."""
    pp_cut: Annotated[str, Example("3+5+4+4")] = ""
    """Layers of each stage, such as 3+5+4+4; the default cut minimises the slowest stage."""
    micro_batch: Annotated[int, Interval(0), Example("4")] = 0
    """Sequences in one forward pass of one data rank; 0: follows from the batch equation."""
    accumulation: Annotated[int, Interval(0), Example("8")] = 0
    """Micro-batches per step on each data rank; 0: follows from the batch equation."""
    recompute: Annotated[float | Recompute, Interval(above=0, below=1), Example("0.5")] = "none"
    """Activations that the backward pass recomputes instead of keeping them; or a budget, the share of the bytes
    between full (0) and none (1) that blocks may keep: what costs the most seconds per byte is kept first. 0 and 1
    themselves are taken for switches elsewhere, so full and none are to be written."""
    recompute_cut: Annotated[str, Example("8*full+24*none")] = ""
    """Recomputation per layer as runs of layers, 8*full+4*selective+20*none; empty: `recompute` for all layers."""
    loss_chunk: Annotated[int | Literal["auto"], Interval(0), Example("1024")] = 0
    """Tokens whose logits exist at once while the loss is computed; 0: all of a micro-batch; auto: some, where logits
    would be a tenth of the memory at the peak."""
    offload: Annotated[str, Example("optimizer")] = "none"
    """State that leaves the device: optimizer (its state, updated by the host's processors), parameters (zero=3) and
    activations (of blocks); several as optimizer+activations, or all."""
    offload_blocks: Annotated[int, Interval(0)] = 0
    """Blocks of each stage whose activations leave the device, its first ones; 0: all but the last,
    or the only one."""
    offload_to: str = "cpu"
    """Place of offloaded optimizer state: cpu, the host's memory, or a folder on a fast local disk."""
    data_parallel: Literal["ddp", "threads"] = "ddp"
    """Execution of dp_replicate: one process per replica (ddp), or one process with one thread per replica (threads:
    torch's DataParallel, a baseline that shows the cost of one interpreter)."""
    sync: Literal["bsp", "asp", "local_sgd", "diloco"] = "bsp"
    """Synchronisation of replicas (dp_replicate): bsp sums gradients every step; asp sends each replica's to a
    parameter server and waits for nobody; local_sgd averages parameters, diloco takes an outer step, every sync_every
    steps."""
    sync_every: Annotated[int, Interval(1), Example("50")] = 10
    """local_sgd, diloco: steps that a replica makes alone between two synchronisations."""
    compression: Literal["none", "int8", "int4", "powersgd"] = "none"
    """Form in which replicas (dp_replicate) sum the gradients of matrices: numbers as they are; blocks of 8- or 4-bit
    codes; or PowerSGD, two factors of `compression_rank` with error feedback. Less traffic, other numbers."""
    compression_rank: Annotated[int, Interval(1), Example("8")] = 4
    """powersgd: rank of the approximation of a matrix."""
    compression_start: Annotated[int, Interval(0), Example("100")] = 0
    """Steps at the start of a run (warm-up) whose gradients are not compressed."""
    bucket_mb: Annotated[float, Interval(above=0)] = 25.0
    """Size in MiB of the buckets in which gradients are reduced during the backward pass."""

    axes: Axes = field(default_factory=Axes)

    def logits_of(self, tokens: int) -> int:
        """Returns how many of a micro-batch's `tokens` have logits at once in the loss; 0 if all have, without chunks.
        With auto an eighth of them, a power of two between 256 and 1,024."""
        if self.loss_chunk != "auto":
            return self.loss_chunk
        chunk = max(256, min(1024, 2 ** ((tokens // 8).bit_length() - 1)))
        return chunk if chunk < tokens and tokens >= 8 else 0

    @property
    def mode(self) -> Recompute:
        """The recomputation of all layers, where a budget has become one (cost/job_spec.py)."""
        assert isinstance(self.recompute, str), "a budget is shared out before"
        return self.recompute

    @property
    def world(self) -> int:
        """Number of devices of the layout: the product of all axes."""
        return self.pp * self.axes.ranks * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.axes.ranks * self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that share one sharded state: dp_shard × cp, because cp ranks have the same parameters."""
        return self.dp_shard * self.cp

    @property
    def folds(self) -> bool:
        """Whether tensor ranks hold whole experts: all of them are ranks of ep."""
        return 0 < self.etp < self.tp

    @property
    def ep_shard(self) -> int:
        """Number of ranks of ep along dp_shard × cp."""
        return max(1, self.ep // (self.tp if self.folds else 1))

    @property
    def ep_nodes(self) -> int:
        """Number of groups of ep_node ranks between which tokens are sent in a second step; 1: there is none."""
        return self.ep // self.ep_node if 1 < self.ep_node < self.ep else 1

    @property
    def edp(self) -> int:
        """Number of ranks that share the state of the same routed experts."""
        return max(1, self.shard_ranks // self.ep_shard)

    @property
    def ring(self) -> int:
        """Number of ring groups, between which keys and values travel."""
        return self.cp // self.cp_ulysses

    @property
    def tiled_layers(self) -> frozenset[str]:
        """Layers that `tile` names, one by one."""
        return _tiled_layers(self.tile)

    @property
    def independent_replicas(self) -> int:
        """Number of replicas that do not sum their gradients: each trains alone on its share of the batch. 1: bsp.
        Those along an axis of a package are replicas of all of dp_replicate."""
        return self.axes.ranks if self.sync == "bsp" else self.dp_replicate

    @property
    def summed_replicas(self) -> int:
        """Number of replicas that sum their gradients in every step."""
        return self.dp_replicate if self.sync == "bsp" else 1

    @property
    def is_synchronous(self) -> bool:
        """Whether all replicas sum their gradients in every step."""
        return self.sync == "bsp" and self.axes.ranks == 1

    @property
    def replica_axis(self) -> str:
        """The axis along which independent replicas lie: one of a package if it has several ranks."""
        return next(iter(self.axes.sizes), "dp_replicate")

    @property
    def processes(self) -> int:
        """Number of processes: the world size, except that `threads` puts every replica in one."""
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
            if value != getattr(default, name) and name not in ("auto", "bucket_mb", "axes")
        ]
        shown += [
            f"axes.{axis}.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for axis, options in self.axes.chosen
            for name, value in vars(options).items()
            if value != getattr(type(options)(), name)
        ]
        return ",".join(shown) or "dp_replicate=1"


@lru_cache(maxsize=64)
def _tiled_layers(names: str) -> frozenset[str]:
    return frozenset(TILED) if names == "all" else frozenset(name.strip() for name in names.split("+"))
