"""Memory of every rank of a pipeline over a training step: what is there all the time, and the fullest moment.

State is counted from parameters' shapes and ZeRO's stages (Rajbhandari et al. 2020, section 5), activations from the
operators of a block (activations.py) times what the schedule's own program has in flight. Three moments can be the
fullest: the loss, the backward pass of a block while all else is still kept, and the optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from phalanx.config.cluster import Cluster
from phalanx.cost.memory.formulas import fullest
from phalanx.cost.memory.in_flight import Flight, covering
from phalanx.cost.memory.rank_parts import RankParts, StepParts
from phalanx.cost.spec import StepSpec
from phalanx.units import gib

Moment = Literal["loss", "backward", "optimizer"]
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "reserved")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one device at the fullest moment of a step."""

    parameters: int
    """The rank's parameters."""
    gradients: int
    """Their gradients."""
    optimizer: int
    """Moments and master weights."""
    activations: int
    """Tensors that blocks keep for all micro-batches in flight, and those of the backward pass of one block."""
    logits: int
    """The logits, their fp32 copies and gradients."""
    communication: int
    """Parameters that are whole for a moment (FSDP), gathered inputs, buckets, messages under way."""
    reserved: int
    """Memory that the allocator has taken and no tensor uses, and the `context`."""
    context: int = 0
    """The part of `reserved` outside torch's allocator: the device's context and communicators' buffers."""
    moment: Moment = "backward"
    """Time of the peak: the loss, the backward pass of the first micro-batch to come back, or the optimizer step."""
    in_flight: float = 0
    """Most micro-batches in flight on the rank, averaged over its stages."""
    host: int = 0
    """Bytes of offloaded state in host memory; no part of the device's memory."""
    disk: int = 0
    """Bytes of offloaded state in files."""

    @property
    def peak(self) -> int:
        """Whole memory, as nvidia-smi shows it."""
        return sum(size for _, size in self.parts())

    @property
    def held(self) -> int:
        """Memory that the allocator has taken: torch.cuda.max_memory_reserved."""
        return self.peak - self.context

    @property
    def allocated(self) -> int:
        """Memory of tensors: torch.cuda.max_memory_allocated."""
        return self.peak - self.reserved

    @property
    def needed(self) -> int:
        """Memory without what the allocator can release: a device with less runs out of memory."""
        return self.allocated + self.context

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Returns the name and bytes of each part, in a stable order."""
        return tuple((name, getattr(self, name)) for name in PARTS)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {gib(size)}" for name, size in self.parts())
        return f"{gib(self.peak)} in the {self.moment}: {shown}"


def step_memory(spec: StepSpec) -> tuple[RankMemory, ...]:
    """Returns the memory of each rank of the pipeline. Raises JobError if pp_cut or the schedule does not fit."""
    step = StepParts(spec)
    return tuple(_fullest(step, flight) for flight in step.flights)


def needed_bytes(spec: StepSpec, limit: float = inf) -> int:
    """Returns the memory that the fullest rank needs (RankMemory.needed). Ranks that hold the same as another and have
    fewer micro-batches in flight are skipped. If some need more than `limit`, returns the need of the first of them. If
    offloaded state exceeds the host or the disk, what is missing there counts on top of a full device. Raises as
    `step_memory`."""
    step, most = StepParts(spec), 0
    keys = [
        (*(step.kinds_of(stage) for stage in flight.held), 0 in flight.held, flight.stages - 1 in flight.held)
        for flight in step.flights
    ]
    for flight, key, fuller in zip(step.flights, keys, covering(step.flights), strict=True):
        if any(keys[other] == key for other in fuller):
            continue
        memory = _fullest(step, flight)
        most = max(most, memory.needed, _short(spec.cluster, memory))
        if most > limit:
            break
    return most


def _short(cluster: Cluster, memory: RankMemory) -> int:
    """Returns the device's memory with what is missing of the other tiers; 0 if they suffice, or are not known."""
    limits = cluster.host.memory_gib, cluster.host.disk_gib
    missing = [size - gib * 2**30 for size, gib in zip((memory.host, memory.disk), limits, strict=True) if gib]
    short = sum(max(0.0, size) for size in missing)
    return round(cluster.accelerator.memory_gib * 2**30 + short) if short else 0


def _fullest(step: StepParts, flight: Flight) -> RankMemory:
    """Returns the memory of a rank at the fullest of its moments."""
    memory_profile, rank = step.memory_profile, RankParts(step, flight)
    parameters, gradients, optimizer = rank.state()
    kept, in_flight = rank.kept()
    (logits, hidden), waiting = rank.logits(), rank.waiting_logits()
    whole = rank.whole()
    # Where all are in flight at once, none has left gradients yet.
    passes = step.spec.batch.accumulation * len(flight.held)
    stays = step.formulas.stays(passes, max(map(sum, flight.most)))
    unsent = rank.unsent()
    early = max(unsent, gradients if stays else rank.bucket())
    again, moving = rank.backward(stays or unsent > 0)
    copied, held = rank.copied(), parameters + optimizer
    stepping = rank.stepping(gradients) + copied
    host, disk = rank.beside()
    moments: list[tuple[Moment, float, float, float, float]] = [
        ("backward", early, kept + again, waiting + rank.waiting_head(), moving),
        ("loss", early, kept + hidden, logits + waiting, 0),
    ]
    if flight.later and not stays:
        again, moving = rank.backward(True)
        moments.append(
            ("backward", max(unsent, gradients), rank.kept_later() + again, rank.waiting_logits(later=True), moving)
        )
    moment, early, activations, logits, moving = max(moments, key=lambda each: sum(each[1:]))
    before = early, activations + logits + moving, whole
    allocated = fullest(held, *before, stepping)
    # Where the optimizer's copy finds no room it takes more than the fullest moment needs.
    beside = fullest(held + copied, *before, 0) if memory_profile.step_is_flat else 0
    reserved, context = max(allocated, beside) * memory_profile.reserve - allocated, step.context()
    if capacity := step.spec.cluster.accelerator.memory_gib * 2**30:
        # A full device has its allocator give back what no tensor uses.
        reserved = max(0, min(reserved, capacity - context - allocated))
    if allocated <= held + stepping:
        moment, early, activations, logits, whole, moving = "optimizer", stepping, 0, 0, 0, 0
    return RankMemory(
        *(round(n) for n in (parameters, early, optimizer, activations, logits, whole + moving)),
        reserved=round(reserved) + context,
        context=context,
        moment=moment,
        in_flight=in_flight,
        host=round(host),
        disk=round(disk),
    )
