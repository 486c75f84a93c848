"""The time of one micro-batch on each pipeline rank: its blocks, what lies around them, and communication inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import add, attrgetter

from phalanx.blocks.ends import embedding, head
from phalanx.blocks.kinds import BlockKind, block
from phalanx.blocks.operator import Operator
from phalanx.cost.held import block_parameters, outside
from phalanx.cost.placed import Content
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import NO_MESSAGES, MessageSeconds, collectives, messages_seconds, place
from phalanx.cost.time.kernel import stream_seconds
from phalanx.cost.time.layer import Seconds, operator_seconds
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
    """Returns the parameters of a rank before data ranks shard them."""
    model, layout = spec.model, spec.layout
    dense, experts = float(outside(model, layout.tp, content.embedding, content.head)), 0.0
    for kind, number in content.of_kind.items():
        held = block_held(spec, kind)
        dense += number * held.dense
        experts += number * held.experts
    return ParameterCounts(round(dense), round(experts))


def block_held(spec: StepSpec, kind: BlockKind) -> ParameterCounts:
    """Returns the parameters of one block."""
    found = block_parameters(spec.model, spec.layout.tp, spec.layout.ep, kind)
    return ParameterCounts(found.dense, found.experts)


@lru_cache(50_000)
def block_time(spec: StepSpec, kind: BlockKind) -> RankTime:
    """Returns the time of one block with its communication; it recomputes what `layout.recompute` says."""
    return block_times(spec, kind, (spec.layout.recompute,))[0]


def block_times(spec: StepSpec, kind: BlockKind, recomputes: Sequence[Mode]) -> list[RankTime]:
    """Returns the same for each of some recomputations."""
    layout = spec.layout
    here = place(spec)
    work = block(here._replace(recompute="none"), kind)
    seconds = operator_seconds(spec.cluster.accelerator, work, spec.framework, spec.products, layout.tp, layout.ep)
    return [_block_time(spec, kind, seconds, block(here._replace(recompute=mode), kind), mode) for mode in recomputes]


def _block_time(
    spec: StepSpec, kind: BlockKind, seconds: Seconds, operators: Sequence[Operator], mode: Mode
) -> RankTime:
    layout, framework, here = spec.layout, spec.framework, place(spec)
    messages = messages_seconds(spec, here, operators)
    tp, cp, ep = (messages.get(axis, NO_MESSAGES) for axis in ("tp", "cp", "ep"))
    ring, regather = messages.get("attention", NO_MESSAGES), messages.get("weight_gradients", NO_MESSAGES)
    again = _recomputed(spec, mode, seconds)
    visible = 1 - framework.tp_hidden
    tp_forward = tp.forward * visible
    # What is gathered again travels beside the gradients of weights.
    tp_backward = (tp.backward + tp.again) * visible + max(0.0, regather.backward - seconds.weights)
    cp_forward = cp.forward + _beside(spec, ring, ring.forward, seconds.attention)
    cp_backward = cp.backward + cp.again + _beside(spec, ring, ring.backward, 2 * seconds.attention)
    cp_backward += _beside(spec, ring, ring.again, seconds.attention)
    ep_forward, ep_backward = ep.forward, ep.backward + ep.again
    handling = _handling(spec, kind)
    tp_forward, tp_backward = tp_forward + handling["tp"], tp_backward + 2 * handling["tp"]
    cp_forward, cp_backward = cp_forward + handling["cp"], cp_backward + 2 * handling["cp"]
    ep_forward, ep_backward = ep_forward + handling["ep"], ep_backward + 2 * handling["ep"]
    forward = seconds.forward + tp_forward + cp_forward + ep_forward
    backward = seconds.backward + again + tp_backward + cp_backward + ep_backward
    shard_forward, shard_backward = _shard(spec, kind, forward, backward)
    shard_forward, shard_backward = shard_forward + handling["shard"], shard_backward + 2 * handling["shard"]
    repeated = seconds.host_forward if mode == "full" else 0.0
    starts = framework.kernel_us * 1e-6 * (collectives(here, operators) + zero_three(layout))
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


def _handling(spec: StepSpec, kind: BlockKind) -> dict[str, float]:
    """Seconds that the program itself takes around a block's collectives, by axis, in the forward pass; twice that in
    the backward pass. 0 where it runs ahead of a device."""
    layout, each = spec.layout, spec.cluster.accelerator.host_us * 1e-6
    operations = {
        "tp": (layout.tp > 1) * HANDLING["sp" if layout.sp else "tp"],
        "cp": (layout.ring - 1) * HANDLING["ring"] + (layout.cp_ulysses > 1) * HANDLING["ulysses"],
        "ep": (kind.feed_forward == "experts" and layout.ep > 1) * HANDLING["ep"],
        "shard": zero_three(layout) * HANDLING["shard"],
    }
    return {axis: count * each for axis, count in operations.items()}


def _alike(spec: StepSpec, mode: Mode) -> StepSpec:
    """The case with all blocks recomputing the same."""
    return replace(spec, layout=alike(spec.layout, mode)) if spec.layout.recompute_cut else spec


def _beside(spec: StepSpec, ring: MessageSeconds, traffic: float, work: float) -> float:
    """Seconds that a ring's messages add to the attention beside them: what is longer, and what they slow it down. One
    processor moves bytes and computes; an accelerator loses the cores and the memory bandwidth that messages use."""
    share = 1.0 if spec.cluster.accelerator.host_us else ring.occupancy
    return max(0.0, traffic - work) + (spec.framework.interference - 1) * share * min(traffic, work)


def _recomputed(spec: StepSpec, mode: Mode, seconds: Seconds) -> float:
    """Seconds of work that the backward pass repeats."""
    if mode == "full":
        return seconds.forward
    if mode == "selective":
        if spec.framework.memory_profile.selective == "products":
            return (seconds.forward - seconds.attention) / 2
        return seconds.attention
    return 0.0


def _shard(spec: StepSpec, kind: BlockKind, forward: float, backward: float) -> tuple[float, float]:
    """What zero 3 adds to a block forward and backward: gathering and scattering beside the neighbour's work, and its
    slowing it down."""
    layout, framework = spec.layout, spec.framework
    if not zero_three(layout):
        return 0.0, 0.0
    held = block_held(spec, kind)
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
    """Returns the time of embedding, head and loss with their communication."""
    found, here, vocab = RankTime(), place(spec), spec.model.vocab_size
    parts: list[tuple[Operator, ...]] = []
    if content.embedding:
        parts.append((embedding(here, vocab),))
    if content.head:
        parts.append(tuple(head(here, vocab)))
    for operators in parts:
        seconds = operator_seconds(spec.cluster.accelerator, operators, spec.framework, spec.products, spec.layout.tp)
        tp = messages_seconds(spec, here, operators).get("tp", NO_MESSAGES)
        found += RankTime(
            products=seconds.products,
            streams=seconds.streams,
            host_forward=seconds.host_forward,
            host_backward=seconds.host_backward,
            tp=tp.forward + tp.again + tp.backward,
            forward=seconds.forward + tp.forward,
            weights=seconds.weights,
        )
    return found


def rank_time(spec: StepSpec, content: Content) -> RankTime:
    """A micro-batch on a rank with `content`; where only some pass it, their share of one."""
    found = around_time(spec, content)
    for kind, many in content.kinds:
        found += block_time(_alike(spec, kind.recompute), kind.block).scaled(many)
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
