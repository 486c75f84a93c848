"""Bytes of state, of what ZeRO-3 gathers and of the fullest moment of a step.

Every formula takes numbers or arrays of them: rank_parts.py prices one rank with the same ones by which the planner
bounds many layouts at once (plan/search/bound_bytes.py). `shards` are groups of parameters on one rank, such as dense
ones and experts: how many there are, how many of them are trained, and over how many ranks their state is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.blocks.memory_profile import MemoryProfile
from phalanx.cost.elementwise import larger, smaller
from phalanx.cost.held import GatheredParameters
from phalanx.optimizers.catalogue import OptimizerCosts, offloaded_bytes
from phalanx.partition.tiers import BUFFER_BYTES, BUFFERS, Tier
from phalanx.partition.wire import Format, wire_width
from phalanx.units import MIB

Shards = Sequence[tuple[Any, Any, Any]]


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
        self.kept = costs.state
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

    def state(self, shards: Shards, zero: int, data_ranks: Any, *, flushes: bool = True) -> tuple[Any, Any, Any]:
        """Returns the bytes of parameters, gradients and optimizer state when the optimizer begins. A pipeline without
        a flush has two versions of the weights besides the optimizer's own, and gradients that wait for their step."""
        versions, waiting = (1, 1) if flushes else (3, 2)
        parameters = gradients = optimizer = 0.0
        for numbers, trained, ranks in shards:
            each = self.per_parameter(zero, ranks, data_ranks)
            parameters = parameters + numbers * (each[0] * versions)
            gradients = gradients + trained * (each[1] * waiting + self.profile.passing_gradient_bytes)
            optimizer = optimizer + trained * each[2]
        return parameters, gradients, optimizer

    def defers(self, zero: int, accumulate: str) -> bool:
        """Returns whether ZeRO-2 or 3 reduces gradients only after the last micro-batch."""
        return zero >= 2 and accumulate == "local" and not self.profile.reduces_each

    def unsent(self, shards: Shards, micro_batches: Any) -> Any:
        """Returns the bytes of the gradients, whole, that wait for the last micro-batch where their reduction is
        deferred: with those of dense parameters, the first of `shards`, also those of experts that no rank shares."""
        _, trained, ranks = zip(*shards, strict=True)
        return sum(trained) * (ranks[0] > 1) * (self.gradient * (micro_batches > 1))

    def stepping(self, gradients: Any, zero: int, shared: Any) -> Any:
        """Returns the bytes of gradients on the device when the optimizer begins: with an offloaded optimizer they have
        left, but for ZeRO-3's shards, which leave last, unless parameters are offloaded, too."""
        return gradients * shared * (zero == 3) * (self.resident > 0) if self.offloads else gradients

    def beside(self, shards: Shards) -> tuple[Any, Any]:
        """Returns the bytes in host memory and on disk of an offloaded optimizer: its state with its own parameters,
        of which files have buffers in host memory; gradients, and those that it copies to its precision; parameters
        on their way to the device, in the memory of their gradients if the type is the same; and of parameters that are
        not on the device."""
        if not self.offloads:
            return 0.0, 0.0
        own = max(4, self.parameter)
        state = offloaded_bytes(self.kept, self.parameter)
        if self.tier == "host" and self.parameter >= own and not self.resident:
            state -= own  # the optimizer updates the parameters themselves
        arriving = self.gradient + (self.gradient < own) * self.widened
        arriving += self.parameter * (self.parameter != self.gradient and self.parameter < own)
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

    def gathers(self, blocks: Any, pp: int, prefetch: int, *, reshard: bool) -> Any:
        """Returns how many of a rank's blocks ZeRO-3 has whole at a time."""
        if not reshard or (self.profile.whole_under_pp and pp > 1):
            return blocks
        return smaller(1 + prefetch, blocks)

    def gathered(self, outside: Any, held: GatheredParameters, blocks: Any, kept: Any) -> Any:
        """Returns the bytes of the parameters that ZeRO-3 has whole, and of their gradients on the way: `outside` the
        blocks, and `blocks` of the largest, which has those `held` and keeps `kept` bytes. Its first gradients are
        there when its activations are gone."""
        gradients = held.trained * (self.width + max(self.width, self.gradient))
        return (outside + held.block * blocks + held.tile) * self.width + larger(0.0, gradients - kept)

    def second_copy(self, shards: Shards, near: Sequence[Any], format: Format) -> Any:
        """Returns the bytes of the second copy of the parameters, in the format in which they are sent; as many ranks
        keep it together as `near` has for each of `shards`."""
        each = wire_width(format, self.width)
        return sum(numbers / ranks for (numbers, *_), ranks in zip(shards, near, strict=True)) * each

    def context(self, *axes: Any) -> Any:
        """Returns the bytes outside the allocator, of the device's context and of a communicator per axis of the mesh;
        `axes` are their sizes."""
        communicators = sum(size > 1 for size in axes)
        return (self.profile.context_mib + communicators * self.profile.communicator_mib) * MIB


def expert_ranks(shard_ranks: Any, ep: Any) -> Any:
    """Returns over how many ranks the state of a rank's experts is sharded, of `shard_ranks` for dense parameters."""
    return larger(1, shard_ranks // ep)


def by_stage(zero: int, ranks: Any, parameter: float, gradient: float, optimizer: float) -> tuple[Any, Any, Any]:
    """Returns the bytes of state per parameter on each of `ranks` ranks, by ZeRO stage (0: none), from those of one
    copy (Rajbhandari et al. 2020, section 5)."""
    return (
        parameter / (ranks if zero >= 3 else 1),
        gradient / (ranks if zero >= 2 else 1),
        optimizer / (ranks if zero >= 1 else 1),
    )


def fullest(state: Any, early: Any, activations: Any, whole: Any, gradients: Any) -> Any:
    """Returns the bytes at the fullest moment of a step beside the context. `state`, parameters and optimizer state, is
    there all the time; in the passes `early` gradients, activations and what is `whole` for a moment; in the
    optimizer's step all `gradients` and their copies."""
    return state + larger(early + activations + whole, gradients)
