"""The formulas of a rank's state: parameters, gradients, optimizer state, and gradients that wait or are on their way.

Every formula of MemoryFormulas takes numbers or arrays of them: RankParts (rank_memory.py) prices one rank with the
same ones by which the planner bounds many layouts at once (plan/bounds.py). `shards` are groups of parameters on one
rank, such as dense ones and experts: how many there are, how many of them are trained, and over how many ranks their
state is sharded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.blocks.operator import MemoryProfile
from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.cost.exposed import larger, smaller
from phalanx.cost.held import (
    GatheredParameters,
    kinds_of,
    parameter_counts,
    shards_of,
)
from phalanx.cost.spec import StepSpec
from phalanx.optimizers.catalogue import OptimizerCosts, optimizer_costs, outer_bytes
from phalanx.partition.derived import (
    BUFFER_BYTES,
    BUFFERS,
    Tier,
    bucket_bytes,
    flushes,
    stashes,
    tier_of,
    written,
)
from phalanx.units import MIB

Shards = Sequence[tuple[Any, Any, Any]]


class StateBytes(NamedTuple):
    """Bytes of a rank's state: numbers, or arrays of them."""

    parameters: Any
    gradients: Any
    """All gradients, when the optimizer begins."""
    optimizer: Any
    waiting: Any
    """Unsharded gradients that wait for the last micro-batch before ZeRO-2 or 3 sends them."""
    buckets: Any
    """Those of buckets that keep their memory, which are there all the time."""
    beside: int
    """Whether buckets are filled beside shards of earlier micro-batches' sums (ZeRO-2)."""
    left: Any
    """Gradients on the device when the optimizer begins."""
    copied: Any
    """Their copies in its precision, and temporary tensors."""

    @property
    def unsent(self) -> Any:
        """Unsharded gradients, once there are any."""
        return larger(self.waiting, self.buckets)

    @property
    def stepping(self) -> Any:
        """Gradients on the device in the optimizer's step, and their copies."""
        return self.left + self.copied

    @property
    def held(self) -> Any:
        """Parameters and optimizer state, which are there all the time."""
        return self.parameters + self.optimizer

    def early(self, begun: Any, bucket: Any = 0.0) -> Any:
        """Returns the bytes of gradients in the passes: all of them once they have `begun` to be there, else those of a
        `bucket`, and both where shards stay beside buckets that are filled."""
        there = larger(self.waiting, self.gradients) * begun
        return larger(self.buckets, there + bucket * (1 - begun * (1 - self.beside)))

    def fullest(self, early: Any, activations: Any, whole: Any) -> Any:
        """Returns the bytes at the fullest moment of a step beside the context: in the passes `early` gradients,
        activations and what is `whole` for a moment are there; in the optimizer's step all gradients and copies."""
        return self.held + larger(early + activations + whole, self.stepping)


class MemoryFormulas:
    """The formulas for one framework and numbers of `width` bytes in the computation. `data_ranks` are those over which
    gradients are reduced, context-parallel ones included. `optimizer` returns what the optimizer takes, for the
    bytes of a stored parameter; its state is in `optimizer_tier`, parameters are in `parameters_tier`."""

    def __init__(
        self,
        profile: MemoryProfile,
        width: int,
        optimizer: Callable[[int], OptimizerCosts],
        optimizer_tier: Tier = "device",
        parameters_tier: Tier = "device",
    ):
        self.profile, self.width, self.tier = profile, width, optimizer_tier
        self.parameter = profile.parameter_bytes or width
        self.gradient = profile.gradient_bytes or self.parameter
        self.unbuffered = profile.unbuffered_gradient_bytes or self.gradient
        self.resident = self.parameter if parameters_tier == "device" else 0
        """Bytes of a parameter on the device between its uses."""
        costs = optimizer(self.parameter)
        self.kept, self.host_copy = costs.state, costs.copied
        """Bytes of optimizer state per parameter, in whatever tier."""
        self.offloads = optimizer_tier != "device"
        self.optimizer, self.transient = (0.0, 0.0) if self.offloads else (costs.state, costs.transient)
        self.widened = profile.step_gradient_bytes + costs.widened
        """Bytes per parameter of the copy in fp32 that the step makes of gradients in half precision."""

    def per_parameter(self, zero: int, ranks: Any, data_ranks: Any) -> tuple[Any, Any, Any]:
        """Returns the bytes of a parameter, its gradient and its optimizer state on each of `ranks` ranks."""
        buffered = data_ranks > 1 if zero < 3 else (data_ranks > 1) & (ranks == 1)
        return by_stage(zero, ranks, self.resident, self._gradient(buffered), self.optimizer)

    def _gradient(self, buffered: Any) -> Any:
        """Returns the bytes of a gradient's number, in flat buffers or outside of them."""
        if self.unbuffered == self.gradient:
            return self.gradient
        return self.unbuffered + buffered * (self.gradient - self.unbuffered)

    def state(
        self,
        shards: Shards,
        data_ranks: Any,
        zero: int,
        accumulate: str = "sharded",
        micro_batches: Any = 1,
        *,
        shared: Any = True,
        flushes: bool = True,
        stashed: int = 0,
    ) -> StateBytes:
        """Returns the bytes of a rank's state; `shared`: whether ranks share parameters, or they come from the host. A
        pipeline without a flush has two versions of the weights besides the optimizer's own, and gradients that wait
        for their step; one that stashes weights has `stashed` versions besides it."""
        versions, waiting = (1 + stashed, 1) if flushes else (3, 2)
        parameters = gradients = optimizer = 0.0
        for numbers, trained, ranks in shards:
            each = self.per_parameter(zero, ranks, data_ranks)
            parameters = parameters + numbers * (each[0] * versions)
            gradients = gradients + trained * (each[1] * waiting + self.profile.passing_gradient_bytes)
            optimizer = optimizer + trained * each[2]
        waiting = buckets = 0.0
        if zero > 1 and accumulate == "local" and not self.profile.reduces_each:
            # With those of dense parameters, the first of `shards`, also those of experts that no rank shares.
            _, trained, ranks = zip(*shards, strict=True)
            waiting = sum(trained) * (ranks[0] > 1) * (self.gradient * (micro_batches > 1))
        if self.profile.keeps_buckets and not self.offloads and flushes:
            _, trained, ranks = zip(*shards, strict=True)
            whole = (data_ranks > 1) & ((ranks[0] == 1) | (zero < 2))
            buckets = sum(trained) * (self.gradient * whole)
        # With an offloaded optimizer gradients have left, but for ZeRO-3's shards, which leave last, unless parameters
        # are offloaded, too.
        stay = shared * (zero == 3) * (self.resident > 0) if self.offloads else 1
        copied = self.copied(shards, data_ranks)
        beside = int(zero == 2 and accumulate == "sharded" and self.profile.keeps_buckets)
        return StateBytes(parameters, gradients, optimizer, waiting, buckets, beside, gradients * stay, copied)

    def beside(self, shards: Shards) -> tuple[Any, Any]:
        """Returns the bytes in host memory and on disk of an offloaded optimizer: its state with its own parameters,
        of which files have buffers in host memory; gradients, and those that it copies to its precision; parameters
        on their way to the device, in the memory of their gradients if the type is the same; and of parameters that are
        not on the device."""
        if not self.offloads:
            return 0.0, 0.0
        own = max(4, self.parameter)
        # With parameters in host memory the optimizer updates these themselves, if they have no masters.
        state = self.kept + (0 if self.tier == "host" and not self.resident else self.host_copy)
        arriving = self.gradient + (self.gradient < own) * self.widened
        arriving += self.parameter * (self.parameter != self.gradient and not self.host_copy)
        updated = sum(trained / ranks for _, trained, ranks in shards)
        parameters = sum(numbers / ranks for numbers, _, ranks in shards) * (self.parameter - self.resident)
        if self.tier == "host":
            return parameters + updated * (state + arriving), 0.0
        buffers = smaller(updated * state, BUFFERS * BUFFER_BYTES)
        return parameters + updated * arriving + buffers, updated * state

    def stays(self, passes: Any, in_flight: Any) -> Any:
        """Returns whether gradients are there while the most forward passes are in flight: some of all `passes` of a
        step have come back by then."""
        return (passes > in_flight) | self.profile.gradients_stay

    def copied(self, shards: Shards, data_ranks: Any) -> Any:
        """Returns the bytes of the gradients that the optimizer copies to its own precision, and of its temporary
        tensors."""
        if self.offloads:
            return 0.0
        each = (self._gradient(data_ranks > 1) < 4) * self.widened + self.transient
        return sum(trained / ranks for _, trained, ranks in shards) * each

    def buffer(self, data_ranks: Any) -> Any:
        """Returns the bytes of the buffer from which gradients are reduced over data and context-parallel ranks."""
        return (data_ranks > 1) * (self.profile.bucket_numbers * self.gradient)

    def bucket(self, shards: Shards, data_ranks: Any, layout: Layout) -> Any:
        """Returns the bytes of a bucket. In a pipeline, on their way to the host, one is summed while the next is
        filled."""
        whole = sum(trained for _, trained, _ in shards) * self.gradient
        return (data_ranks > 1) * smaller(whole, (1 + (self.offloads and layout.pp > 1)) * bucket_bytes(layout))

    def fills_late(self, zero: int) -> bool:
        """Returns whether the first bucket is made with a micro-batch's first gradient, when the gradient of the logits
        has been used: ZeRO-2 frees what it has sent."""
        return zero == 2 and self.profile.keeps_buckets

    def sending(
        self, shards: Shards, buckets: Sequence[int], layout: Layout, *, several: bool
    ) -> Callable[[float], tuple[float, float]]:
        """Returns a function of the number of parameters whose gradients have come in the last backward pass. It
        returns the bytes that a collective has copied, and those of gradients in flat buckets of ZeRO-1 or 2, or
        of buckets that leave for the host. `buckets`: how many have come when each is full; `several`: there are sums
        of earlier micro-batches. When the next bucket is sent, ZeRO-2 frees one but for its shard, or it has left."""
        total = sum(trained for _, trained, _ in shards)
        moving = sum(trained for _, trained, ranks in shards if ranks > 1)
        share = sum(trained / ranks for _, trained, ranks in shards if ranks > 1)
        sums, keeps_sums = moving / total * self.gradient, several and layout.accumulate == "local"
        transient = layout.zero == 2 and share > 0
        # They change with the bucket, and with the first gradient of the next one.
        known: dict[tuple[int, bool], tuple[float, float]] = {}

        def sizes(full: int, begun: bool) -> tuple[float, float]:
            before, sent, filling = (
                buckets[n] if n >= 0 else 0 for n in (full - 2, full - 1, min(full, len(buckets) - 1))
            )
            copies = self.profile.copies_sums * (sent - before) * sums
            whole = total if several and (keeps_sums or not transient) else filling if begun else sent
            summed = total + sent - before if several and not keeps_sums else sent
            if self.offloads:  # those before the one that was sent last have left
                own = (summed - before) / total * share * transient
                return copies, (whole - before + own) * self.gradient
            if layout.zero == 1:
                return self.profile.copies_sums * sent * sums, total * self.gradient
            return copies, (whole - before) * sums + summed / total * share * self.gradient + (
                total - moving
            ) * self.gradient

        def sends(arrived: float) -> tuple[float, float]:
            full = bisect_right(buckets, arrived)
            key = full, arrived > (buckets[full - 1] if full else 0)
            if key not in known:
                known[key] = sizes(*key)
            return known[key]

        return sends

    def keeps_whole(self, pp: int, *, reshard: bool) -> bool:
        """Returns whether ZeRO-3 has all of a rank's blocks whole at once."""
        return not reshard or (self.profile.whole_under_pp and pp > 1)

    def passing(self, held: GatheredParameters, *, waits: bool) -> float:
        """Returns the bytes of the gradients of a ZeRO-3 block on the way, which are there while the next block
        computes: FSDP2 keeps what it sends, and unless it `waits` for their sum a collective has a copy."""
        return held.trained * (max(self.width, self.gradient) + (0 if waits else self.width))

    def sent_last(self, outside: Any, micro_batches: Any, layout: Layout) -> Any:
        """Returns the bytes of gradients outside of blocks that FSDP2 has sent for a micro-batch, and keeps until it
        sends those of the next one, or that wait for the end of a pipeline's step; for `outside` trained parameters."""
        return (micro_batches > 1) * (layout.accumulate == "sharded") * outside * max(self.width, self.gradient)

    def context(self, *axes: Any) -> Any:
        """Returns the bytes outside the allocator, of the device's context and of a communicator per axis of the mesh;
        `axes` are their sizes."""
        return (self.profile.context_mib + sum(size > 1 for size in axes) * self.profile.communicator_mib) * MIB


def formulas_of(spec: StepSpec, profile: MemoryProfile) -> MemoryFormulas:
    """Returns the formulas of a step."""
    layout = spec.layout

    def costs(stored: int) -> OptimizerCosts:
        inner = optimizer_costs(spec.optimizer, spec.model, stored, spec.more)
        state = inner.state if profile.state_bytes is None else profile.state_bytes
        return replace(inner, state=state + outer_bytes(layout, stored))

    return MemoryFormulas(profile, spec.width, costs, tier_of(layout, "optimizer"), tier_of(layout, "parameters"))


def state_bytes(spec: StepSpec, layers: range) -> tuple[float, float, float]:
    """Returns the bytes of parameters, gradients and optimizer state on a rank with these layers when the optimizer
    begins, of what the layout keeps on the device."""
    model, layout = spec.model, spec.layout
    blocks = [(kind.block, many) for kind, many in kinds_of(model, written(layout), layers)]
    held = parameter_counts(model, layout, blocks, 0 in layers, model.n_layers - 1 in layers)
    formulas, data_ranks = formulas_of(spec, spec.framework.memory_profile), layout.data_ranks * layout.cp
    stashed = int(stashes(layout))  # between steps, when no micro-batch is in flight
    shards, flushing = shards_of(held, layout), flushes(layout)
    return formulas.state(shards, data_ranks, layout.zero, flushes=flushing, stashed=stashed)[:3]


def by_stage(zero: int, ranks: Any, parameter: float, gradient: float, optimizer: float) -> tuple[Any, Any, Any]:
    """Returns the bytes of state per parameter on each of `ranks` ranks, by ZeRO stage (0: none), from those of one
    copy (Rajbhandari et al. 2020, section 5)."""
    return (
        parameter / (ranks if zero >= 3 else 1),
        gradient / (ranks if zero >= 2 else 1),
        optimizer / (ranks if zero >= 1 else 1),
    )


def overfull(cluster: Cluster, host: Any, disk: Any) -> Any:
    """Returns the bytes of a full device and of what finds no room in host memory or on disk; 0 if all does."""
    beside = (host, cluster.host.memory_gib), (disk, cluster.host.disk_gib)
    short = sum(larger(0.0, size - gib * 2**30) for size, gib in beside if gib)
    return (short > 0) * (cluster.accelerator.memory_gib * 2**30 + short)
