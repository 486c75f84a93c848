"""What recipes of models with experts add to a block's time and take from it: the host's launches, modules that the
backward pass computes again, and traffic that overlaps computation."""

from __future__ import annotations

from phalanx.blocks.kinds import HALVES, BlockKind, half_block
from phalanx.cost.communication import NO_MESSAGES, messages_seconds, place
from phalanx.cost.exposed import added
from phalanx.cost.kernels import HOST_BACKWARD, operator_seconds
from phalanx.cost.spec import Graphs, StepSpec

GRAPHED: dict[Graphs, float] = {
    "none": 0.0,
    "router": 0.15,
    "attention": 0.35,
    "attention and router": 0.5,
    "layers": 1.0,
    "iteration": 1.0,
}
"""Share of the host's time for a block with experts that CUDA graphs save: that of the modules they hold."""
PLAIN_DISPATCH, TWO_STREAMS = 1.1, 1.2
"""The host's time for a block with experts over that with DeepEP or HybridEP and without overlap: if it reads from the
device how many rows each rank gets, and sorts them in kernels of their own (NCCL's all-to-all); and if it switches
between two micro-batches on two streams."""
REPEATED: dict[str, tuple[str, ...]] = {
    "mla_up_proj": ("wq_b", "wkv_b", "q_norm", "kv_norm"),
    "layernorm": ("attn_norm", "mlp_norm"),
    "core_attn": ("attention",),
    "moe_act": ("experts.activation",),
    "moe": ("router", "dispatch", "experts.up", "experts.activation", "experts.down", "combine"),
    "mlp": (),
}
"""Modules of Megatron Core's selective recomputation (recompute_modules), and their operators of a block with experts;
mlp are the dense blocks' own."""


def launch_seconds(spec: StepSpec) -> tuple[float, float] | None:
    """Returns the seconds in which the host launches both passes of a block with experts; None: as its kernels. With a
    capacity there are no sizes to read."""
    framework, reads = spec.framework, not (spec.framework.ep_once or spec.model.moe.capacity)
    if not framework.moe_host_ms:
        return None
    host = framework.moe_host_ms * 1e-3 * (1 - GRAPHED[framework.graphs])
    host *= (PLAIN_DISPATCH if reads else 1) * (TWO_STREAMS if framework.ep_overlaps else 1)
    forward = host / (1 + HOST_BACKWARD)
    return forward, host - forward


def repeated_seconds(spec: StepSpec, kind: BlockKind) -> tuple[float, float]:
    """Returns the seconds of computation and of messages that recomputed modules repeat in a block's backward pass."""
    framework, layout, here = spec.framework, spec.layout, place(spec)
    names = {name for module in framework.memory_profile.repeats for name in REPEATED[module]}
    again = [operator for half in HALVES for operator in half_block(here, kind, half) if operator.name in names]
    if not again:
        return 0.0, 0.0
    slowdown = framework.block_slowdown(kind)
    device, tp, ep = spec.cluster.accelerator, layout.tp, layout.ep_shard
    seconds = operator_seconds(device, again, framework, spec.products, tp, ep, slowdown=slowdown)
    return seconds.forward, messages_seconds(spec, here, again)[0].get("ep", NO_MESSAGES).forward


def exposed_share(spec: StepSpec, traffic: float, computation: float) -> float:
    """Returns the share of `traffic` seconds to and from experts that `computation` seconds of another micro-batch do
    not hide. The first micro-batch has none before it, the last none after it, and the dispatcher's cores are busy."""
    framework = spec.framework
    if not framework.ep_overlaps or not traffic:
        return 1.0
    beside = added(traffic, computation, framework.ep_cores / spec.cluster.accelerator.cores)
    alone = 1 / spec.batch.accumulation
    return alone + (1 - alone) * beside / traffic
