"""The prediction of one step: its time by part, its memory by rank, and its FLOPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.parameters import (
    attention_flops_per_sequence,
    block_flops_per_sequence,
    repeated_flops_per_sequence,
    train_flops_per_step,
)
from phalanx.blocks.sparse import flops_beyond
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.communication import boundary_seconds, group
from phalanx.cost.exposed import (
    FREE,
    NEGLIGIBLE,
    UNEVEN,
    ComposedStep,
    Hops,
    compose,
    idle,
    is_uneven,
    messages_share,
    on_grid,
    uneven_seconds,
    window_seconds,
)
from phalanx.cost.generation_time import RolloutTime, generation
from phalanx.cost.held import content_of, contents, placed
from phalanx.cost.intervals import memory_factors, sureness, time_factors
from phalanx.cost.kernels import peak_flops
from phalanx.cost.rank_memory import RankMemory, step_memory
from phalanx.cost.rank_time import held_by, rank_time
from phalanx.cost.spec import StepSpec
from phalanx.cost.step_state import (
    duplicated_stages_seconds,
    fetch_seconds,
    interference,
    offloaded_work,
    optimizer_seconds,
    state_seconds,
    synchronization_seconds,
)
from phalanx.notebook import ShownInNotebooks
from phalanx.partition.derived import Tier, gathers_parameters, is_file, modes, written
from phalanx.schedule.timing import bubble_fraction

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part, on the slowest rank; they add up to the step time."""

    products: float = 0.0
    """Matrix products and attention."""
    streams: float = 0.0
    """Memory-bound operations."""
    recompute: float = 0.0
    """Repeated forward passes, before backward passes."""
    host: float = 0.0
    """Time for which devices wait for their hosts to launch kernels."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Exposed communication, by axis of the mesh."""
    bubble: float = 0.0
    """The bubble time: waiting for other pipeline ranks."""
    optimizer: float = 0.0
    """The optimizer step, clipping, and the fixed costs of a step; offloaded, on the host."""
    copies: float = 0.0
    """Exposed copies between device and host."""
    files: float = 0.0
    """Exposed reads and writes of optimizer state in files."""
    generation: float = 0.0
    """A step's share of generating its batch of completions (GRPO)."""
    scoring: float = 0.0
    """The same of the forward passes that score them."""
    forward: float = 0.0
    """The part of products, streams and host in forward passes; the rest is in backward passes."""

    @property
    def backward(self) -> float:
        """Seconds of computation in backward passes, without repeated forward passes."""
        return max(0.0, self.products + self.streams + self.host - self.forward)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(seconds for _, seconds in self.items())

    def items(self) -> list[tuple[str, float]]:
        """Returns name and seconds of every part, of communication one part per axis."""
        return [
            ("matrix products", self.products),
            ("memory-bound", self.streams),
            ("recompute", self.recompute),
            ("host", self.host),
            *((f"{axis} exposed", seconds) for axis, seconds in self.exposed.items()),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
            *([("host copies exposed", self.copies)] if self.copies else []),
            *([("disk exposed", self.files)] if self.files else []),
            *([("generation", self.generation), ("scoring", self.scoring)] if self.generation else []),
        ]


@dataclass(frozen=True)
class Prediction(ShownInNotebooks):
    """One step of a job: time, memory and traffic."""

    page, height = "phalanx.pictures.prediction:page", 560

    parts: Parts
    """Seconds of the step by part."""
    devices: int
    tokens: int
    """Tokens per step, on all devices together."""
    model_flops: int
    """FLOPs per step without recomputation, attention counted in full."""
    hardware_flops: int
    """FLOPs per step with recomputation."""
    peak_flops: float
    """Peak FLOP/s of one device, by its data sheet."""
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    memory_limit: float
    """Bytes of memory per device."""
    spread: tuple[float, float]
    """Factors on the time between which eight of ten published steps lie."""
    memory_spread: tuple[float, float]
    sure: str
    """How sure the time is, and why."""
    host_limit: float = 0.0
    """Bytes of host memory per device; 0: not known."""
    disk_limit: float = 0.0
    """Bytes of disk per device; 0: not known."""
    generation: RolloutTime | None = None
    """The completions of a batch, of whose time each step of it has its share (GRPO)."""

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.parts.total

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together."""
        return self.tokens / self.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second per device."""
        return self.tokens_per_s / self.devices

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per device."""
        return self.model_flops / self.step_time_s / self.devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the devices, 0 to 1."""
        return self.model_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def hfu(self) -> float:
        """FLOPs with recomputation over the peak of the devices, 0 to 1."""
        return self.hardware_flops / self.step_time_s / self.devices / self.peak_flops

    @property
    def bubble(self) -> float:
        """The pipeline bubble (schedule/timing.py)."""
        return bubble_fraction(self.parts.bubble, self.step_time_s)

    @property
    def fullest(self) -> RankMemory:
        """The memory of the pipeline rank that needs most."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory of each kind."""
        return self.fullest.needed <= self.memory_limit and not self.short_tiers

    @property
    def verdict(self) -> Verdict:
        """Whether it fits: "tight" where the devices are full before what the allocator reserves, or the upper end of
        the memory's interval, has room."""
        if not self.fits:
            return "does not fit"
        return "tight" if self.upper_memory > self.memory_limit else "fits"

    @property
    def upper_memory(self) -> float:
        """Bytes at the upper end of the memory's interval, with what the allocator reserves."""
        return max(self.fullest.needed * self.memory_spread[1], self.fullest.peak)

    @property
    def tiers(self) -> dict[Tier, tuple[int, float]]:
        """The most bytes on any rank in each tier of memory that is used, and its limit; 0: not known."""
        found: dict[Tier, tuple[int, float]] = {"device": (self.fullest.peak, self.memory_limit)}
        host, disk = max(rank.host for rank in self.memory), max(rank.disk for rank in self.memory)
        if host:
            found["host"] = host, self.host_limit
        if disk:
            found["disk"] = disk, self.disk_limit
        return found

    @property
    def short_tiers(self) -> tuple[Tier, ...]:
        """The tiers other than the device that are known to be too small."""
        return tuple(tier for tier, (most, limit) in self.tiers.items() if tier != "device" and 0 < limit < most)


def hardware_flops_per_step(model: ModelConfig, layout: Layout, sequences: int) -> int:
    """Returns the FLOPs of one optimizer step with what the layout computes twice: of each block the forward pass
    (full), its attention (selective), or the first matrices of its MLP (mlp); with products no product. Raises JobError
    where `layout.recompute_cut` does not fit the model."""
    repeated = _repeated_flops_per_sequence(model, written(layout), layout.sp)
    return train_flops_per_step(model, sequences) + sequences * repeated


@lru_cache(4096)
def _repeated_flops_per_sequence(model: ModelConfig, recomputes: str, sp: bool) -> int:
    flops = 0
    for layer, mode in enumerate(modes(recomputes, model.n_layers)):
        if mode == "full":
            flops += block_flops_per_sequence(model, layer)
        elif mode == "selective":
            flops += attention_flops_per_sequence(model, layer)
        elif mode == "mlp":
            flops += repeated_flops_per_sequence(model, layer, sp)
    return flops + sum(flops_beyond(model) for kind in block_kinds(model) if kind.attention == "sparse")


def step_parts(spec: StepSpec) -> Parts:
    """Returns the seconds of one step by part; their sum is the step time."""
    layout, batch = spec.layout, spec.batch
    count = Counter(contents(spec))
    ranks, m = list(count), batch.accumulation
    times = [rank_time(spec, content) for content in ranks]
    held = max((held_by(spec, content) for content in ranks), key=lambda held: held.dense + held.experts)

    def sent(messages: int, _: bool) -> tuple[float, float, float]:
        state = state_seconds(spec, held, int(messages))
        return state.gather, state.reduce, interference(spec, held, int(messages))

    step = compose(
        np.array([time.waited for time in times]).T,
        np.array([*count.values()]),
        np.array([content.blocks for content in ranks]),
        m,
        _hop(spec),
        sent,
        gathers_parameters(layout),
        layout,
        spec.framework,
    )
    content, slowest = ranks[step.busiest], times[step.busiest]
    optimizer = optimizer_seconds(spec, held, content)
    # Those of the first block and outside the blocks, as in `ends_of_blocks`.
    fetched = 2 * fetch_seconds(spec, *held.sent(layout, "parameter")) / max(1, content.blocks)
    host = offloaded_work(spec, held, slowest.backward_seconds, optimizer)
    bidirectional = min(content.share for content in ranks) < 1
    bubble = float(step.others) * idle(layout, m, on_grid(step.forward), on_grid(step.weights))
    between = _between_stages(spec, step)
    if layout.pp > 1 and float(step.passes) / m > UNEVEN * float(step.others):
        bubble, between = _uneven(spec, step, bubble, between)
    exposed = {
        "tp": m * slowest.tp,
        "cp": m * slowest.cp,
        "ep": m * slowest.ep,
        "pp": between + (duplicated_stages_seconds(spec, held) if bidirectional else 0.0),
        "dp_shard" if layout.shard_ranks > 1 else "dp_replicate": m * slowest.shard + float(step.state),
    }
    made = generation(spec)
    exposed["dp_replicate"] = exposed.get("dp_replicate", 0.0) + synchronization_seconds(spec, held)
    return Parts(
        products=m * slowest.products,
        streams=m * slowest.streams,
        recompute=m * slowest.recompute,
        host=m * slowest.host,
        exposed={axis: spent for axis, spent in exposed.items() if spent},
        bubble=bubble,
        optimizer=optimizer,
        copies=(sum(host.late) if host else 0.0) + fetched + m * slowest.copies,
        files=host.late_files if host else 0.0,
        generation=(made.prompts_s + made.decoding_s) / made.updates if made else 0.0,
        scoring=made.scoring_s / made.updates if made else 0.0,
        forward=m * (slowest.forward_seconds - slowest.forward_communication),
    )


def _between_stages(spec: StepSpec, step: ComposedStep) -> float:
    """Returns the exposed seconds of messages between stages: those of warm-up and drain and, where messages are slow,
    those for which ranks wait in between: a schedule has only so many micro-batches in flight, and a link sends one
    message after another."""
    layout, m = spec.layout, spec.batch.accumulation
    if layout.pp == 1:
        return 0.0
    mean = (float(step.passes) / m + float(step.others) * (layout.pp - 1)) / layout.pp
    if (seconds := _slow_hops(spec, mean)) is None:
        return float(step.boundaries)
    near, far = seconds.near, seconds.far
    shares = on_grid(step.forward), on_grid(step.weights)
    without = float(step.passes) + idle(layout, m, *shares) * float(step.others)
    # Ranks that are slower than the mean hide messages.
    windows = window_seconds(layout, m, mean, *shares, seconds)
    return max(float(step.boundaries), max(windows, m * max(near, far)) - without)


def _slow_hops(spec: StepSpec, mean: float) -> Hops | None:
    """Returns the seconds of messages between stages; None where they are negligible beside a rank's `mean` seconds
    for a micro-batch."""
    layout, m = spec.layout, spec.batch.accumulation
    together = max(1, spec.cluster.joined // group(layout, "pp").stride)
    near = boundary_seconds(spec, 0, 1) if together > 1 else 0.0
    far = boundary_seconds(spec, together - 1, together) if together < layout.pp else 0.0
    if messages_share(layout, m, mean, max(near, far)) < NEGLIGIBLE:
        return None
    return Hops(near, far, together, not spec.framework.pp_overlaps)


SLOW = 0.25
"""Time of a message over a stage's from which programs of all schedules are run with the time of each rank."""


def _uneven(spec: StepSpec, step: ComposedStep, bubble: float, between: float) -> tuple[float, float]:
    """Returns idle seconds of the busiest of ranks that differ, and those of messages besides, from those of equal
    ranks: closed forms of schedules with whole backward passes hold for these, too."""
    layout, m, slowest = spec.layout, spec.batch.accumulation, float(step.passes) / spec.batch.accumulation
    stages = placed(spec)[0]
    every = [content_of(spec, stages, [stage]) for stage in range(len(stages))]
    times = {content: rank_time(spec, content) for content in set(every)}
    passes = [(one.forward_seconds, one.backward_seconds, one.weights) for one in map(times.__getitem__, every)]
    mean = sum(forward + backward for forward, backward, _ in passes) / layout.pp
    hops = _slow_hops(spec, mean) or FREE
    if is_uneven(layout.schedule, slowest, float(step.others)):
        free = uneven_seconds(layout, m, passes, slowest)
        bubble = max(0.0, free - float(step.passes))
        sent = uneven_seconds(layout, m, passes, slowest, hops) - free if hops != FREE else 0.0
        return bubble, max(float(step.boundaries), sent)
    if not is_file(layout.schedule) and max(hops.near, hops.far) * len(stages) > SLOW * mean * layout.pp:
        between = max(between, uneven_seconds(layout, m, passes, slowest, hops) - bubble - float(step.passes))
    return bubble, between


def _hop(spec: StepSpec) -> float:
    """Returns the seconds of a message from a stage to the next, on average over the boundaries."""
    last = spec.layout.pp - 1
    return sum(boundary_seconds(spec, rank, rank + 1) for rank in range(last)) / max(1, last)


def predict(spec: StepSpec) -> Prediction:
    """Returns time, memory and FLOPs of one step. Raises JobError if the layout's schedule or cut does not fit it."""
    device, sequences = spec.cluster.accelerator, spec.batch.global_batch
    return Prediction(
        parts=step_parts(spec),
        devices=spec.layout.world,
        tokens=sequences * spec.model.seq_len,
        model_flops=train_flops_per_step(spec.model, sequences),
        hardware_flops=hardware_flops_per_step(spec.model, spec.layout, sequences),
        peak_flops=spec.cluster.peak_tflops * 1e12 or peak_flops(device, spec.products),
        memory=step_memory(spec),
        memory_limit=device.memory_gib * 2**30,
        spread=time_factors(spec),
        memory_spread=memory_factors(),
        sure=sureness(spec),
        host_limit=spec.cluster.host.memory_gib * 2**30,
        disk_limit=spec.cluster.host.disk_gib * 2**30,
        generation=generation(spec),
    )
