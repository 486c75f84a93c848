"""Lower bounds on the seconds of a step, for many pairs of a mesh and a micro-batch at once: the time of
cost/time/step_time.py without latencies of all-reduces, and without the bubble of schedules that have no closed form,
unless it is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import BlockKind
from phalanx.config.layout import Layout
from phalanx.cost.time.exposed import (
    block_state,
    boundaries,
    bucket_messages,
    ends_of_blocks,
    pass_seconds,
    step_state,
)
from phalanx.cost.time.link import occupancy
from phalanx.cost.time.pipeline import GRID, idle
from phalanx.cost.time.rank_time import HOST_OPS, handling_seconds, starts_again
from phalanx.cost.time.state_time import clip_bytes, summing_seconds, update_seconds
from phalanx.plan.search.space import RECOMPUTE, STATES
from phalanx.plan.search.tables import Floats, Pipelines, RankContents
from phalanx.schedule import catalogue


class StepSeconds:
    """The times of layouts with the same pipeline and recomputation. Arrays have a row per different rank contents and
    a column per pair."""

    def __init__(self, group: Pipelines):
        self.group, self.tables, self.m, self.pp = group, group.tables, group.m, group.pp
        self.request = group.tables.request
        self.framework, self.device = self.request.framework, self.request.cluster.accelerator
        self.work = np.stack([self.tables.work(share, group.mode, group.inner).T for share in group.shares], 1)
        """Seconds per micro-batch: forward, backward, the same of the host, and those of weight gradients."""
        if self.framework.sum_passes:
            width = self.request.width
            self.work[1] += summing_seconds(self.device, self.framework, width, group.trained.sum(0), self.m)
        self.slopes = self.tables.slopes[group.outer].T

    def seconds(self, state: int, exactly: NDArray[Any] | None = None) -> Floats:
        """Returns the seconds with a state sharding; the pairs `exactly` get the bubble of the schedule's program."""
        if STATES[state].zero == 3:
            return self._step(self._passes(state), exactly) + self._optimizer(state)
        if exactly is not None:
            return self._step(self._plain_passes, exactly) + self._optimizer(state)
        return self._plain + self._optimizer(state)

    @cached_property
    def _plain_passes(self) -> tuple[Floats, ...]:
        """Passes without ZeRO-3, the same with every other state sharding."""
        return self._passes(next(number for number, state in enumerate(STATES) if state.zero < 3))

    @cached_property
    def _plain(self) -> Floats:
        return self._step(self._plain_passes, None)

    def _step(self, passes: tuple[Floats, ...], exactly: NDArray[Any] | None) -> Floats:
        """Returns the seconds without those of the optimizer."""
        time, others, forward, weights = passes
        return time + self._idle(forward, weights, exactly) * others if self.pp > 1 else time

    def _passes(self, state: int) -> tuple[Floats, ...]:
        """Returns the seconds of the busiest rank with its exposed collectives, and of another rank's micro-batch; the
        shares of forward passes and of weight gradients in the latter."""
        group, work = self.group, self.work
        if STATES[state].zero == 3:
            work = work + np.where(group.shared, self._gathered(state), 0.0)
        work = work * group.parts
        each = pass_seconds(work[0], work[2]) + pass_seconds(work[1], work[3])
        busiest, columns = each.argmax(0), np.arange(len(self.m))
        slowest, whole = each[busiest, columns], (group.count * each).sum(0)
        ahead = work[0][busiest, columns]
        time = self.m * slowest + self._ends(state, group.blocks[busiest], ahead, slowest - ahead) + self._messages()
        others = (whole - slowest) / max(1, self.pp - 1)
        return time, others, (group.count * work[0]).sum(0) / whole, (group.count * work[4]).sum(0) / whole

    def _gathered(self, state: int) -> Floats:
        """Returns the seconds that ZeRO-3 adds to the work of ranks that shard parameters."""
        _, reshard, accumulate = STATES[state]
        seconds, starts = np.zeros((5, *self.work.shape[1:])), self.framework.kernel_us * 1e-6
        handling = handling_seconds(self.device, HOST_OPS["shard"])
        twice = 2 if starts_again(self.device, RECOMPUTE[self.group.mode]) else 1
        for kind, (gather, regather, reduce, slowdown) in self._blocks.items():
            forward, backward, *_ = self.tables.block(kind, self.group.mode, self.group.inner).T
            there, back = block_state(
                gather,
                regather,
                reduce,
                forward,
                backward,
                slowdown,
                self.m,
                reshard=reshard,
                local=accumulate == "local",
                overlaps=self.framework.dp_overlaps,
            )
            number = np.array([[share.of(kind)] for share in self.group.shares])
            for row, more in enumerate((there + handling, back + 2 * handling, starts, starts * twice)):
                seconds[row] += number * more
        return seconds

    @cached_property
    def _blocks(self) -> dict[BlockKind, tuple[Floats, Floats, Floats, Floats]]:
        """By kind of block: seconds of gathering its parameters, of gathering them again and of reducing its gradients,
        and the interference of these."""
        blocks = {}
        for kind in self.group.kinds:
            alone = RankContents(((kind, 1),), False, False)
            held, trained = (count(alone)[self.group.inner].T for count in (self.tables.numbers, self.tables.trained))
            messages = self.framework.messages
            (gather, reduce), regather = self._state(held, trained, messages), self._sent(held, messages, 2)
            blocks[kind] = gather, regather, reduce, self._interference(held.sum(0), messages)
        return blocks

    def _state(self, gathered: Floats, trained: Floats, messages: Floats | int) -> tuple[Floats, Floats]:
        """Returns the seconds of gathering parameters, dense and of experts, and of reducing the gradients of those
        that are `trained`."""
        return self._sent(gathered, messages, 0), self._sent(trained, messages, 4)

    def _sent(self, numbers: Floats, messages: Floats | int, column: int) -> Floats:
        """Returns the seconds of messages of parameters, with the slopes from a column on."""
        alike, s = self.group.alike, self.slopes
        dense, experts = numbers[0] + np.where(alike, numbers[1], 0.0), np.where(alike, 0.0, numbers[1])
        some, more = messages * (dense > 0), messages * (experts > 0)
        return dense * s[column] + experts * s[column + 1] + some * s[column + 6] + more * s[column + 7]

    def _interference(self, numbers: Floats, messages: Floats | int) -> Floats:
        """Returns the slowdown, minus one, of a product during the collectives of `numbers` parameters."""
        start, byte, sent = self.slopes[12:]
        payload = numbers * self.request.width / messages
        return (self.framework.interference - 1) * occupancy(
            self.request.cluster, payload * sent, start + byte * payload
        )

    def _ends(self, state: int, blocks: NDArray[Any], ahead: Floats, behind: Floats) -> Floats:
        """Returns the exposed seconds per step of gathering and reducing the state. `blocks`, `ahead` and `behind` are
        the slowest rank's blocks and its seconds in forward and in backward passes."""
        (held, trained), shared, around = self._fullest, self.group.shared, 0.0
        if STATES[state].zero == 3:
            around = ends_of_blocks(*self._state(held, trained, np.maximum(1, blocks)), blocks)
            if shared.all():
                return around
        messages = bucket_messages(blocks)
        gather, reduce = self._state(trained, trained, messages)
        late = gather + reduce
        if self.framework.dp_overlaps:
            late = step_state(gather, reduce, ahead, behind, blocks, self._interference(trained.sum(0), messages))
        return np.where(shared, around, late) if STATES[state].zero == 3 else late

    @cached_property
    def _fullest(self) -> tuple[Floats, Floats]:
        """Parameters, dense and of experts, of the rank that has most, and those of them that are trained."""
        place = self.group.total.argmax(0), np.arange(len(self.m))
        return self.group.numbers[:, *place], self.group.trained[:, *place]

    def _optimizer(self, state: int) -> Floats:
        _, trained = self._fullest
        updated, every = (trained / self.group.ranks).sum(0), trained.sum(0)
        clipped = np.where(self.group.shared, updated, every) if STATES[state].zero > 1 else every
        cluster, clips = self.request.cluster, clip_bytes(self.framework, self.request.width)
        return update_seconds(cluster, self.tables.space.base, self.tables.optimizer, updated, clipped, clips)

    def _messages(self) -> Floats:
        """Returns the seconds of messages between stages."""
        chunks = catalogue.chunks_of(*self.group.scheduled)
        return boundaries(self.group.hop, self.pp, chunks, self.m, overlaps=self.framework.pp_overlaps)

    def _idle(self, forward: Floats, weights: Floats, exactly: NDArray[Any] | None) -> Floats:
        """Returns a lower bound on the idle time, in micro-batches of a rank, from the shares of forward passes and of
        weight gradients in these: the schedule's formula, or its program for the pairs `exactly` if that is not
        exact."""
        schedule, chunks = self.group.scheduled
        found, known = np.zeros(len(self.m)), np.zeros(len(self.m), bool)
        if entry := catalogue.SCHEDULES.get(schedule):
            least = np.maximum(0.0, forward - 0.5 / GRID)
            found[:] = entry.idle(self.pp, self.m, catalogue.chunks_of(schedule, chunks), least)
            known[:] = entry.idle_is_exact(self.pp, self.m)
        if exactly is None or known.all():
            return found
        pairs = np.unique(exactly)
        pairs = pairs[~known[pairs]]
        layout = replace(self.tables.space.base, pp=self.pp, schedule=schedule, pp_chunks=chunks)
        # The cost model rounds the shares; near a tie it may round to either side.
        (low, high), (less, most) = (
            [np.round(part[pairs] * GRID + more).astype(int).tolist() for more in (-1e-6, 1e-6)]
            for part in (forward, weights)
        )
        for pair, m, first, second, third, fourth in zip(
            pairs, self.m[pairs].tolist(), low, high, less, most, strict=True
        ):
            found[pair] = min(_idle(layout, m, one, two) for one in {first, second} for two in {third, fourth})
        return found


@lru_cache(100_000)
def _idle(layout: Layout, micro_batches: int, forward: int, weights: int) -> float:
    """Returns the cost model's idle time, from shares in GRID parts."""
    return idle(layout, micro_batches, forward / GRID, weights / GRID)
