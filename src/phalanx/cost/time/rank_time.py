"""The time of one micro-batch on each pipeline rank: its blocks, what lies around them, and communication inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import add, attrgetter

from phalanx.config.layout import Layout
from phalanx.cost.held import block_parameters, outside
from phalanx.cost.placed import Content
from phalanx.cost.spec import StepSpec
from phalanx.cost.time import operators
from phalanx.cost.time.communication import BlockTraffic, block_traffic
from phalanx.cost.time.kernel import stream_seconds
from phalanx.cost.time.layer import Seconds, work_seconds
from phalanx.cost.time.state_time import ParameterCounts, interference, state_seconds, zero_three
from phalanx.partition.recompute import Mode, alike

BLEND = 2.2
"""Power mean of a pass's times on device and host: 1 is their sum (nothing runs ahead), infinity the longer of both."""

HANDLING = {"tp": 35, "sp": 110, "ring": 80, "ulysses": 45, "ep": 35, "shard": 90}
"""Operations that the program itself does around a block's collectives in a forward pass, by what needs them (ring: by
message, with the attention of its blocks and their merging; shard: FSDP's hooks). Only on a CPU are they not hidden:
they are the processor time of two processes beside that of data parallel alone, in times of starting an operation."""


@dataclass(frozen=True)
class RankTime:
    """One micro-batch on a rank, both passes, in seconds."""

    products: float = 0.0
    streams: float = 0.0
    recompute: float = 0.0
    host_forward: float = 0.0
    """Time in which the host starts the forward pass."""
    host_backward: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    shard: float = 0.0
    """Parameters gathered and gradients scattered in every micro-batch (zero 3)."""
    forward: float = 0.0
    """What of the device's time is the forward pass."""
    weights: float = 0.0
    """What of it makes gradients of weights."""

    @property
    def device(self) -> float:
        """Time of the device, which nothing keeps waiting."""
        return self.products + self.streams + self.recompute + self.communication

    @property
    def host(self) -> float:
        """Time in which the device waits for its program to start kernels."""
        return _waits(self.forward, self.host_forward) + _waits(self.device - self.forward, self.host_backward)

    @property
    def total(self) -> float:
        return self.device + self.host

    @property
    def forward_seconds(self) -> float:
        """The forward pass, with what the device waits for its program."""
        return self.forward + _waits(self.forward, self.host_forward)

    @property
    def backward_seconds(self) -> float:
        return self.total - self.forward_seconds

    @property
    def communication(self) -> float:
        """What of it nothing hides."""
        return self.tp + self.cp + self.ep + self.shard

    def scaled(self, factor: float) -> RankTime:
        return RankTime(*(factor * part for part in _PARTS(self)))

    def __add__(self, other: RankTime) -> RankTime:
        return RankTime(*map(add, _PARTS(self), _PARTS(other)))


_PARTS = attrgetter(*(field.name for field in fields(RankTime)))


def _waits(device: float, host: float) -> float:
    """What a pass of `device` seconds takes longer when the host needs `host` seconds to start it. Where kernels are
    long the host runs ahead, where they are short it falls behind: between the longer of both and their sum."""
    return (device**BLEND + host**BLEND) ** (1 / BLEND) - device if host else 0.0


def held_by(spec: StepSpec, content: Content) -> ParameterCounts:
    """Parameters of a rank before data ranks shard them."""
    model, layout = spec.model, spec.layout
    dense, experts = float(outside(model, layout.tp, content.embedding, content.head)), 0.0
    for number, moe in ((content.dense, False), (content.moe, True)):
        if number:
            block = block_held(spec, moe)
            dense += number * block.dense
            experts += number * block.experts
    return ParameterCounts(round(dense), round(experts))


def block_held(spec: StepSpec, moe: bool) -> ParameterCounts:
    """Parameters of one block, with experts or without."""
    found = block_parameters(spec.model, spec.layout.tp, spec.layout.ep, moe)
    return ParameterCounts(found.dense, found.experts)


@lru_cache(50_000)
def block_time(spec: StepSpec, moe: bool) -> RankTime:
    """One block with its communication; what it recomputes is what `layout.recompute` says."""
    return block_times(spec, moe, (spec.layout.recompute,))[0]


def block_times(spec: StepSpec, moe: bool, recomputes: Sequence[Mode]) -> list[RankTime]:
    """The same of each of some recomputations."""
    model, layout = spec.model, spec.layout
    layer = model.n_layers - 1 if moe else 0
    work = operators.block(model, layer, layout, spec.batch.micro_batch)
    seconds = work_seconds(spec.cluster.accelerator, work, spec.framework, spec.products)
    traffic = block_traffic(spec, moe)
    return [_block_time(spec, moe, seconds, traffic, mode) for mode in recomputes]


def _block_time(spec: StepSpec, moe: bool, seconds: Seconds, traffic: BlockTraffic, mode: Mode) -> RankTime:
    layout, framework = spec.layout, spec.framework
    again, tp_again, ep_again = _recomputed(spec, mode, seconds, traffic.tp_forward, traffic.ep_forward)
    visible = 1 - framework.tp_hidden
    tp_forward = traffic.tp_forward * visible
    # What is gathered again, and the sum of the inputs' gradients, travel beside the weights' gradients.
    tp_backward = traffic.tp_backward * visible + max(0.0, traffic.tp_regather - seconds.weights)
    tp_backward += tp_again * visible
    ring_forward = _beside(spec, traffic.ring_forward, seconds.attention)
    ring_backward = _beside(spec, traffic.ring_backward, 2 * seconds.attention)
    cp_forward, cp_backward = traffic.cp_forward + ring_forward, traffic.cp_backward + ring_backward
    ep_forward, ep_backward = traffic.ep_forward, traffic.ep_backward + ep_again
    handling = _handling(spec, moe)
    tp_forward, tp_backward = tp_forward + handling["tp"], tp_backward + 2 * handling["tp"]
    cp_forward, cp_backward = cp_forward + handling["cp"], cp_backward + 2 * handling["cp"]
    ep_forward, ep_backward = ep_forward + handling["ep"], ep_backward + 2 * handling["ep"]
    forward = seconds.forward + tp_forward + cp_forward + ep_forward
    backward = seconds.backward + again + tp_backward + cp_backward + ep_backward
    shard_forward, shard_backward = _shard(spec, moe, forward, backward)
    shard_forward, shard_backward = shard_forward + handling["shard"], shard_backward + 2 * handling["shard"]
    repeated = seconds.host_forward if mode == "full" else 0.0
    starts = framework.kernel_us * 1e-6 * _collectives(layout, moe)
    return RankTime(
        products=seconds.products,
        streams=seconds.streams,
        recompute=again,
        host_forward=seconds.host_forward + starts,
        host_backward=seconds.host_backward + repeated + starts * (2 if repeated else 1),
        tp=tp_forward + tp_backward,
        cp=cp_forward + cp_backward,
        ep=ep_forward + ep_backward,
        shard=shard_forward + shard_backward,
        forward=forward + shard_forward,
        weights=seconds.weights,
    )


def _handling(spec: StepSpec, moe: bool) -> dict[str, float]:
    """Seconds that the program itself takes around a block's collectives, by axis, in the forward pass; twice that in
    the backward pass. 0 where it runs ahead of a device."""
    layout, each = spec.layout, spec.cluster.accelerator.host_us * 1e-6
    operations = {
        "tp": (layout.tp > 1) * HANDLING["sp" if layout.sp else "tp"],
        "cp": (layout.ring - 1) * HANDLING["ring"] + (layout.cp_ulysses > 1) * HANDLING["ulysses"],
        "ep": (moe and layout.ep > 1) * HANDLING["ep"],
        "shard": zero_three(layout) * HANDLING["shard"],
    }
    return {axis: count * each for axis, count in operations.items()}


def _alike(spec: StepSpec, mode: Mode) -> StepSpec:
    """The case with all blocks recomputing the same."""
    return replace(spec, layout=alike(spec.layout, mode)) if spec.layout.recompute_cut else spec


def _beside(spec: StepSpec, traffic: float, work: float) -> float:
    """What a ring's traffic adds to the attention beside it: what is longer, and where one processor moves bytes and
    computes, what it takes of it."""
    slower = spec.framework.interference - 1 if spec.cluster.accelerator.host_us else 0.0
    return max(0.0, traffic - work) + slower * min(traffic, work)


def _collectives(layout: Layout, moe: bool) -> int:
    """Collectives that the host starts in a block's forward pass."""
    return (
        (layout.tp > 1) * (4 if layout.sp else 2)
        + (layout.ring - 1)
        + (layout.cp_ulysses > 1) * 4
        + (moe and layout.ep > 1) * 2
        + zero_three(layout)
    )


def _recomputed(spec: StepSpec, mode: Mode, seconds: Seconds, tp: float, ep: float) -> tuple[float, float, float]:
    """Seconds of work, of tensor- and of expert-parallel traffic that the backward pass repeats."""
    if mode == "full":
        return seconds.forward, tp, ep
    if mode == "selective":
        if spec.framework.memory_profile.selective == "products":
            return (seconds.forward - seconds.attention) / 2, 0.0, 0.0
        return seconds.attention, 0.0, 0.0
    return 0.0, 0.0, 0.0


def _shard(spec: StepSpec, moe: bool, forward: float, backward: float) -> tuple[float, float]:
    """What zero 3 adds to a block forward and backward: gathering and scattering beside the neighbour's work, and its
    slowing it down."""
    layout, framework = spec.layout, spec.framework
    if not zero_three(layout):
        return 0.0, 0.0
    held = block_held(spec, moe)
    state = state_seconds(spec, held, framework.messages)
    scatters = 1.0 if layout.accumulate == "sharded" or spec.batch.accumulation == 1 else 1 / spec.batch.accumulation
    there = state.gather if layout.reshard or spec.batch.accumulation == 1 else state.gather / spec.batch.accumulation
    back = (state.gather if layout.reshard else 0.0) + state.reduce * scatters
    if not framework.dp_overlaps:
        return there, back
    slower = interference(spec, held, framework.messages)
    return (
        max(0.0, there - forward) + slower * min(there, forward),
        max(0.0, back - backward) + slower * min(back, backward),
    )


def around_time(spec: StepSpec, content: Content) -> RankTime:
    """Embedding, head and loss."""
    found = RankTime()
    parts = []
    if content.embedding:
        parts.append(operators.embedding(spec.model, spec.layout, spec.batch.micro_batch))
    if content.head:
        parts.append(operators.head(spec.model, spec.layout, spec.batch.micro_batch))
    for work in parts:
        seconds = work_seconds(spec.cluster.accelerator, work, spec.framework, spec.products)
        found += RankTime(
            products=seconds.products,
            streams=seconds.streams,
            host_forward=seconds.host_forward,
            host_backward=seconds.host_backward,
            forward=seconds.forward,
            weights=seconds.weights,
        )
    return found


def rank_time(spec: StepSpec, content: Content) -> RankTime:
    """A micro-batch on a rank with `content`; where only some pass it, their share of one."""
    found = around_time(spec, content)
    for kind, many in content.kinds:
        found += block_time(_alike(spec, kind.recompute), kind.experts).scaled(many)
    found += _summed(spec, content)
    return found if content.share == 1 else found.scaled(content.share)


def _summed(spec: StepSpec, content: Content) -> RankTime:
    """Adding a micro-batch's gradients to those of the micro-batches before, of which the first has none."""
    passes, count = spec.framework.sum_passes, spec.batch.accumulation
    if not passes or count == 1:
        return RankTime()
    held = held_by(spec, content)
    moved = (held.dense + held.experts) * (spec.framework.memory_profile.gradient_bytes or spec.width) * passes
    return RankTime(streams=stream_seconds(spec.cluster.accelerator, moved, 0) * (count - 1) / count)
