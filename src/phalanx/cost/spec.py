"""The subject of a prediction: a step of a model, on a cluster, in a layout, by a framework."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log2
from typing import Any, Literal

from phalanx.blocks.kinds import BlockKind
from phalanx.blocks.operator import MemoryProfile
from phalanx.config.cluster import Cluster
from phalanx.config.corpora import Compared
from phalanx.config.job import GrpoOptions, Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.hashed import Hashed, hashed_once
from phalanx.optimizers.entry import NOTHING_MORE, UpdateCosts
from phalanx.partition.derived import Batch
from phalanx.partition.document_sample import DocumentSample

FusedKernel = Literal[1, 2, 3, "cudnn"]
"""A kernel of fused attention: a generation of FlashAttention, or cuDNN's (kernel.FLASH)."""
Graphs = Literal["none", "router", "attention", "attention and router", "layers", "iteration"]
"""What CUDA graphs hold of a step with experts, which the host then launches at once."""


@hashed_once
@dataclass(frozen=True)
class Framework(Hashed):
    """A training framework, as far as time and memory depend on it."""

    name: str = "phalanx"
    """Name in reports."""
    slowdown: float = 1.0
    """Factor on the device time that sizes and the device's best rates give: clocks that power and heat hold down, and
    kernels that are not the best ones. Calibrated (calibration.yaml)."""
    moe_slowdown: float = 1.0
    """Further factor on blocks with experts: routing, permuting and small products in one kernel after another."""
    recurrent_slowdown: float = 1.0
    """Further factor on Mamba-2's half of a block: its scan, convolution and norm are no library's best kernels.
    Calibrated."""
    attention: Literal["flash", "unfused"] = "flash"
    """Whether attention is one kernel that saves no scores, or products with a softmax between them in memory."""
    windows: Literal["flash", "unfused"] = "flash"
    """attention=flash: whether layers with a sliding window have that kernel, too."""
    flash: FusedKernel = 2
    """The kernel of fused attention."""
    passes: float = 1.0
    """Memory-bound work (norms, activations, residuals, rotary) in multiples of reading and writing each operand once:
    1 if kernels are fused by hand or by a compiler, more if each operation is a kernel of its own."""
    loss_passes: float = 0.0
    """The same of final norm, head and loss; 0: `passes`."""
    kernel_us: float = 6.0
    """Microseconds in which the host launches a kernel; shorter kernels are launch-bound."""
    across_sockets: float = 1.0
    """Factor on the host's launches where tensor ranks have hosts on both processors of a node, and each block waits
    for the slowest of them. Calibrated."""
    reads_sizes: bool = False
    """Whether the host reads a micro-batch's sizes from the device and so waits until all that it launched is done
    (Megatron-LM's broadcast_data): at the ends of the model it has launched nothing ahead."""
    softmax_passes: float = 4.5
    """attention=unfused: passes over the scores besides those of the products: softmax and dropout, each reading and
    writing, and a mask of one byte."""
    cast_bytes: float = 3.0
    """fp8, fp4: bytes moved per element of an operand to cast it to 8 bits (read two, write one)."""
    casts_each: bool = False
    """fp8, fp4: whether each of the three products casts both operands, weights too; otherwise an activation and its
    gradient are cast once, and weights with the optimizer's step."""
    narrow_experts: bool = True
    """fp8, fp4: whether the products of experts run in that format, too."""
    wide_blocks: float = 0.0
    """fp8, fp4: the share of the blocks whose products stay in 16 bits: a recipe's first and last ones, and modules
    that predict further tokens."""
    narrow_unit: int = 16
    """fp8, fp4: of which the sizes of a matrix are multiples, if it is multiplied so."""
    softmax_heads: int = 1
    """attention=unfused: of which the heads of a rank's micro-batch are a multiple if scaling, mask and softmax are one
    kernel; otherwise they are five, in fp32 (Megatron-LM's FusedScaleMaskSoftmax.is_kernel_available: 4, because a
    block of its kernel has four warps)."""
    tp_hidden: float = 0.0
    """Share of tensor-parallel traffic that overlaps with matrix products (user buffers, AsyncTP)."""
    gathers_each: bool = False
    """Whether every matrix that tensor ranks divide by columns gathers its own input, and reduces its own gradient of
    it: a plan of DTensor's ColwiseParallel without PrepareModuleInput."""
    whole_logits: bool = False
    """Whether tensor ranks gather the logits, of which each computes the whole loss."""
    dp_overlaps: bool = True
    """Whether gradients are reduced, and parameters gathered, while other layers compute."""
    unrepeated: tuple[str, ...] = ()
    """recompute=full: operators of a block that the backward pass does not repeat: JAX's checkpoint removes the last
    product of an MLP, whose result no gradient needs, and what a policy saves stays."""
    sums_late: bool = False
    """Whether replicas of the shards sum their gradients after the backward pass, in the parameters' type: JAX's scan
    over layers returns the gradients of all layers together."""
    broadcasts: bool = False
    """zero=1: whether every tensor has an owner, as in the optimizers of Colossal-AI and InternLM: gradients are summed
    on all data ranks, and after the step each owner broadcasts its tensors while nothing computes."""
    pp_overlaps: bool = True
    """Whether stage boundaries are sent while other micro-batches compute."""
    pp_scatters: bool = False
    """Whether tensor ranks each send a part of a stage boundary and gather it on the other side (Narayanan et al. 2021,
    section 4.1) without sp, with which they hold parts already."""
    ep_once: bool = False
    """Whether a token is sent once to each node with some of its experts (DeepEP, HybridEP), not once per expert."""
    ep_forwards: bool = True
    """ep_once: whether it is passed on there to the ranks of that node; otherwise it is sent once to each rank."""
    ep_maps: bool = False
    """Whether every rank gathers and reads which experts each token of the others goes to, a byte for each pair
    (HybridEP's allgather_routing_map)."""
    ep_overlaps: bool = False
    """Whether tokens travel to and from experts while another micro-batch computes."""
    ep_cores: int = 0
    """Cores (SMs) that the dispatcher's kernels take from the computation that it overlaps."""
    moe_host_ms: float = 0.0
    """Milliseconds in which the host launches a block with experts, both passes: products of one expert after another,
    whose sizes it may have to read from the device; 0: as its kernels alone. Calibrated."""
    graphs: Graphs = "none"
    """What CUDA graphs hold of a block with experts."""
    narrow_attention: bool = False
    """fp8: whether attention's products run in 8 bits, too."""
    moe_cast_bytes: float = 10.0
    """fp8, fp4: `cast_bytes` of the experts' operands: rows are padded to the format's tile (read two, write two), and
    cast along rows and along columns for the two products that read them."""
    fused_experts: bool = False
    """Whether one kernel computes the experts' products and activation (CuTe DSL's grouped MLP)."""
    messages: int = 1
    """ZeRO-3: collectives per block for its state; a framework that gathers each parameter by itself needs one for
    each."""
    ep_folds: bool = False
    """Whether expert ranks are adjacent, tensor ranks among them, and hold whole experts (Megatron Core's parallel
    folding, Liu et al. 2025); otherwise tensor ranks share every expert."""
    gathers_narrow: bool = False
    """Whether parameters in fp8 are gathered in 8 bits."""
    offers_fp8_gathers: bool = False
    """Whether `layout.quantise_weights` may be fp8."""
    sum_passes: float = 0.0
    """Passes over memory to add a micro-batch's gradients to those before: 3 reads two and writes one; 0 if `slowdown`
    includes it."""
    clip_bytes: int = 8
    """Bytes moved per gradient to clip it: its norm is read, and it is set to zero, in fp32; 0: twice its own bytes, as
    a norm takes twice as long as its bytes (2.36e9 gradients in bf16 in 2.2 ms on an H200, 2.1 TB/s)."""
    interference: float = 1.1
    """Factor on the time of a product during a collective (Galvatron measured 1.13)."""
    fitted: bool = False
    """Whether `slowdown` was fitted to rows of this framework on this device."""
    moe_fitted: bool = False
    """Whether `moe_slowdown` or `moe_host_ms` was."""
    widened: float = 1.0
    """Factor on both ends of the interval of a step's time, for machines that nobody measured."""
    memory_profile: MemoryProfile = field(default_factory=MemoryProfile)
    """Its buffers, copies and reserves in memory."""
    alone: Framework | None = None
    """The framework that replaces this one in a job of one device, if it was measured there."""
    crowd: float = 1.0
    """The weight of this framework's figures over those of `alone` (`as_used_by`)."""

    def block_slowdown(self, kind: BlockKind) -> float:
        """Returns the slowdown of a block's kernels over the same kernels alone."""
        return self.slowdown * (self.moe_slowdown if kind.routed else 1.0)


@hashed_once
@dataclass(frozen=True)
class StepSpec(Hashed):
    """One training step. The model's vocabulary size is set, the layout complete."""

    model: ModelConfig
    cluster: Cluster
    layout: Layout
    batch: Batch
    products: Products = "bf16"
    """Number format of the matrix products of the blocks; attention and head stay in 16 bits with fp8 and fp4."""
    width: int = 2
    """Bytes per element of a parameter and of an activation."""
    framework: Framework = field(default_factory=Framework)
    stages: tuple[range, ...] = ()
    """Layers of every pipeline stage; empty: those of `layout.pp_cut`, else as even as possible."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer: its state, and what its step takes."""
    documents: DocumentSample | None = None
    """The documents that attention must not cross (data.document_mask); None: it crosses them."""
    more: UpdateCosts = NOTHING_MORE
    """What techniques add to the optimizer's step."""
    given: bool = True
    """Whether layout and batch are known; False: parts of them were filled in for a row of a table."""
    compared: Compared = ""
    """What the loss compares (pairs: DPO, completions: GRPO). Each token's gradient is then scaled by a factor that
    depends on the whole sequence."""
    rollout: GrpoOptions | None = None
    """How the completions of a batch are generated, if the loss is theirs."""

    @property
    def fitted(self) -> bool:
        """Whether the framework was fitted to such a model on this device."""
        return self.framework.fitted or (self.framework.moe_fitted and self.model.moe.n_experts > 0)


CROWD = 8
"""Devices from which on a cluster loses all that published clusters lose: the fewest of the rows that were fitted."""
_BLENDED = ("slowdown", "moe_slowdown", "passes", "kernel_us")


def as_used_by(world: int, cluster: Cluster, framework: Framework) -> tuple[Cluster, Framework]:
    """Returns the machine and the framework as a job of `world` devices has them.

    One device has rates of its own (Accelerator.alone, Framework.alone). Devices that share power and cooling lower
    their clocks, and every collective waits for the slowest of them, so that what a cluster loses grows with each
    doubling of its devices, here by the same factor from one device to `CROWD`: with a weight of log2(world) /
    log2(CROWD) between the rates of one and those of a cluster."""
    device, one = cluster.accelerator, framework.alone
    crowd = min(1.0, log2(world) / log2(CROWD))
    if crowd == 1:
        return cluster, framework
    sustained = blended(device.alone or device.sustained, device.sustained, crowd)
    cluster = replace(cluster, accelerator=replace(device, sustained=sustained))
    if one is None or crowd == 0:
        return cluster, one or framework
    figures: dict[str, Any] = {name: blended(getattr(one, name), getattr(framework, name), crowd) for name in _BLENDED}
    return cluster, replace(framework, crowd=crowd, **figures)


def blended(one: float, cluster: float, crowd: float) -> float:
    """Returns the figure between that of one device and that of a cluster, by ratio."""
    return one ** (1 - crowd) * cluster**crowd
