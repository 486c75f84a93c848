"""Lower bounds on the time and the memory of many layouts at once, by which a search prunes what cannot win.

They are put together from the cost model's own figures for the parts (tables.py, bound_seconds.py, bound_bytes.py).
Tests hold every bound below what predict says (tests/plan/test_bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.memory.formulas import expert_ranks, fullest
from phalanx.cost.time.exposed import pass_seconds
from phalanx.cost.time.link import RankGroup
from phalanx.cost.time.pipeline import GRID
from phalanx.plan.search.bound_bytes import StepBytes, least_in_flight
from phalanx.plan.search.bound_seconds import StepSeconds
from phalanx.plan.search.request import PlanRequest
from phalanx.plan.search.space import RECOMPUTE, STATES, Rows, Space
from phalanx.plan.search.tables import Floats, Pipelines, Tables, distinct, line
from phalanx.schedule.catalogue import SCHEDULES, chunks_of

ROUNDING = 1e-9
"""Relative difference between sums in different orders."""


class Bounds:
    """The bounds of a space's layouts."""

    def __init__(self, request: PlanRequest, space: Space):
        self.request, self.space, self.tables = request, space, Tables(request, space)
        self.pp, self.shard_ranks = space.column("pp"), space.column("dp_shard") * space.column("cp")
        self.data_ranks = self.shard_ranks * space.column("dp_replicate")
        self.ranks = np.stack([self.shard_ranks, expert_ranks(self.shard_ranks, space.column("ep"))])
        self.alike = space.column("ep") == 1
        self.formulas = self.tables.formulas
        axes = (space.column(name) for name in ("tp", "cp", "ep"))
        self.context = self.formulas.context(self.pp, self.data_ranks, *axes)
        self.hop, self.link = self._hops()
        _, first, self._options = np.unique(list(map(id, space.options)), return_index=True, return_inverse=True)
        self._schedules = [np.unique(space.options[pair][:, 0]).tolist() for pair in first]
        """By the number of a pair's options, its schedules."""
        self._known: dict[tuple[int, int, int], float] = {}

    def pairs(self) -> tuple[Floats, Floats]:
        """Returns lower bounds on the seconds and bytes of every pair of a mesh and a micro-batch: nothing recomputed,
        everything sharded, all ranks of a pipeline alike, no bubble and nothing to reduce."""
        every = np.arange(len(self.pp))
        time = np.maximum(self._uniform(every, 0)[0], self.link)
        kept, _ = self._kept(every, RECOMPUTE.index("full"))
        memory = self._fullest(every, 3, kept / self.pp)
        return time * (1 - ROUNDING), memory * (1 - ROUNDING) + self.context

    def options(self, pairs: NDArray[Any]) -> tuple[Floats, Floats]:
        """Returns lower bounds for some pairs: on seconds, by recomputation and schedule, with any state sharding; and
        on bytes, by recomputation, schedule and state sharding."""
        shape = len(pairs), len(RECOMPUTE), len(self.space.schedules)
        time, activations = np.empty(shape), np.empty(shape)
        uniform = [self._uniform(pairs, mode) for mode in range(len(RECOMPUTE))]
        flying, idle = self._by_schedule(pairs, [forward for _, forward in uniform])
        for mode, (seconds, _) in enumerate(uniform):
            bubble = 1 + idle[mode] / self.space.accumulation[pairs, None]
            time[:, mode] = np.maximum(seconds[:, None] * bubble, self.link[pairs, None])
            _, (kept, moving) = self._kept(pairs, mode)
            activations[:, mode] = kept[:, None] * flying + moving[:, None]
        memory = np.empty((*shape, len(STATES)))
        for number, (zero, _, accumulate) in enumerate(STATES):
            memory[..., number] = self._fullest(pairs, zero, activations.T, accumulate).T
        return time * (1 - ROUNDING), memory * (1 - ROUNDING) + self.context[pairs, None, None, None]

    def rows(self, rows: Rows, limit: float = inf, runs: bool = False) -> tuple[Floats, Floats]:
        """Returns lower bounds on the seconds and bytes of every layout. Seconds are infinite if bytes exceed `limit`.
        `runs`: with the bubble of the schedule's own program, which is slower to compute."""
        time, memory = np.full(len(rows), inf), np.empty(len(rows))
        for (pp, scheduled, mode), members in grouped(self.pp[rows.pair], rows.scheduled, rows.recompute):
            pairs, which = runs_of(rows.pair[members])
            states = rows.state[members]
            group = self._pipelines(pairs, pp, scheduled, mode)
            of_bytes = StepBytes(group)
            sizes = np.empty((len(STATES), len(pairs)))
            for state in np.flatnonzero(np.bincount(states)):
                sizes[state] = of_bytes.bytes(int(state))
            memory[members] = sizes[states, which] * (1 - ROUNDING) + self.context[pairs][which]
            small = memory[members] <= limit
            if not small.any():
                continue
            kept, states = members[small], states[small]
            pairs, which = runs_of(rows.pair[kept])
            of_time = StepSeconds(group if small.all() else self._pipelines(pairs, pp, scheduled, mode))
            seconds = np.empty((len(STATES), len(pairs)))
            for state in np.flatnonzero(np.bincount(states)):
                seconds[state] = of_time.seconds(int(state), which[states == state] if runs else None)
            time[kept] = np.maximum(seconds, self.link[pairs])[states, which] * (1 - ROUNDING)
        return time, memory

    def _pipelines(self, pairs: NDArray[Any], pp: int, scheduled: int, mode: int) -> Pipelines:
        """Returns the figures of the meshes of some pairs that their bounds need."""
        tables, cut = self.tables, self.tables.cut(pp, scheduled).shares
        inner = tables.inner_of[pairs]
        return Pipelines(
            tables=tables,
            pp=pp,
            scheduled=self.space.schedules[scheduled],
            mode=mode,
            shares=list(cut),
            first=[rank for rank, _ in cut.values()],
            count=np.array([[number] for _, number in cut.values()]),
            parts=np.array([[share.part] for share in cut]),
            blocks=np.array([share.number for share in cut]),
            inner=inner,
            outer=tables.outer_of[pairs],
            m=self.space.accumulation[pairs],
            shared=self.shard_ranks[pairs] > 1,
            alike=self.alike[pairs],
            data_ranks=self.data_ranks[pairs],
            ranks=self.ranks[:, pairs],
            numbers=np.stack([tables.numbers(share)[inner].T for share in cut], 1),
            trained=np.stack([tables.trained(share)[inner].T for share in cut], 1),
            hop=self.hop[pairs],
        )

    def _fullest(self, pairs: NDArray[Any], zero: int, activations: Floats, accumulate: str = "sharded") -> Floats:
        """Returns the mean bytes over the ranks of the pipeline, without unsharded parameters of ZeRO-3."""
        tables, inner = self.tables, self.tables.inner_of[pairs]
        counts = (count(tables.whole)[inner].T / self.pp[pairs] for count in (tables.numbers, tables.trained))
        shards, data_ranks, early = list(zip(*counts, self.ranks[:, pairs], strict=True)), self.data_ranks[pairs], 0.0
        parameters, gradients, optimizer = self.formulas.state(shards, zero, data_ranks)
        if self.formulas.defers(zero, accumulate):
            early = self.formulas.unsent(shards, self.space.accumulation[pairs])
        left = self.formulas.stepping(gradients, zero, self.shard_ranks[pairs] > 1)
        stepping = left + self.formulas.copied(shards, data_ranks)
        return fullest(parameters + optimizer, early, activations, 0.0, stepping)

    def _uniform(self, pairs: NDArray[Any], mode: int) -> tuple[Floats, Floats]:
        """Returns the seconds of a step where all ranks of a pipeline are alike and nothing else takes time, and the
        share at least of forward passes in them."""
        tables = self.tables
        inner, which = np.unique(tables.inner_of[pairs], return_inverse=True)
        forward, backward, host, host_backward, _ = tables.work(tables.whole, mode, inner).T
        work = pass_seconds(forward, host) + pass_seconds(backward, host_backward)
        share = forward / (forward + backward + host + host_backward)
        return self.space.accumulation[pairs] * work[which] / self.pp[pairs], share[which]

    def _kept(self, pairs: NDArray[Any], mode: int) -> tuple[Floats, tuple[Floats, Floats]]:
        """Returns the bytes that all blocks together keep of a micro-batch; and the least that one block keeps, and
        needs besides in its backward pass."""
        tables = self.tables
        inner, which = np.unique(tables.inner_of[pairs], return_inverse=True)
        kinds = [(number, tables.activations(kind, mode, inner)) for kind, number in tables.whole.blocks]
        kept = np.add.reduce([number * kind[:, 0] for number, kind in kinds])
        least = np.minimum.reduce([kind for _, kind in kinds])[which]
        return kept[which], (least[:, 0], least[:, 1] + least[:, 2] * (self.pp[pairs] > 1))

    def _by_schedule(self, pairs: NDArray[Any], forward: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
        """Returns, for some pairs and by schedule: the micro-batches of a block that a rank has in flight at least, on
        average over ranks; and for each of some shares of forward passes, idle time at least, in micro-batches of a
        rank. Schedules that a pair does not have are left out."""
        shape = len(pairs), len(self.space.schedules)
        flying, idle = np.zeros(shape), [np.zeros(shape) for _ in forward]
        several, which = distinct(self.pp[pairs], self.space.accumulation[pairs], self._options[pairs])
        for number, (pp, m, options) in enumerate(several.tolist()):
            members = np.flatnonzero(which == number)
            for scheduled in self._schedules[options]:
                flying[members, scheduled] = self._in_flight(pp, m, scheduled)
                schedule, chunks = self.space.schedules[scheduled]
                if pp > 1 and schedule in SCHEDULES:
                    for found, share in zip(idle, forward, strict=True):
                        least = np.maximum(0.0, share[members] - 0.5 / GRID)
                        found[members, scheduled] = SCHEDULES[schedule].idle(pp, m, chunks_of(schedule, chunks), least)
        return flying, idle

    def _in_flight(self, pp: int, m: int, scheduled: int) -> float:
        if (pp, m, scheduled) in self._known:
            return self._known[pp, m, scheduled]
        least = min(share.least for share in self.tables.cut(pp, scheduled).shares)
        flying = sum(least_in_flight(self.space.schedules[scheduled], pp, m, rank) for rank in range(pp))
        return self._known.setdefault((pp, m, scheduled), least * flying / pp)

    def _hops(self) -> tuple[Floats, Floats]:
        """Returns, by pair, the seconds of a message from a stage to the next at least, and those of the micro-batches'
        messages one after the other between two stages, over the network where some stages are in different nodes."""
        cluster, column = self.request.cluster, self.space.column
        payload = self.tables.boundary()[self.tables.inner_of]
        stride = column("tp") * column("cp") * column("dp_shard") * column("dp_replicate")
        (near, start_near), (far, start_far) = (
            line(cluster, "send", RankGroup(2, each)) for each in (1, cluster.joined)
        )
        inside, across = start_near + near * payload, start_far + far * payload
        several = self.pp > 1
        hop = np.where(several, np.where(stride >= cluster.joined, across, inside), 0.0)
        slowest = np.where(stride * self.pp > cluster.joined, across, inside)
        return hop, np.where(several, self.space.accumulation * slowest, 0.0)


def runs_of(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Returns the value of each run of equal numbers, and by element the index of its run."""
    begins = np.append(True, numbers[1:] != numbers[:-1])
    return numbers[begins], np.cumsum(begins) - 1


def grouped(*keys: NDArray[Any]) -> Iterator[tuple[tuple[int, ...], NDArray[np.intp]]]:
    """Yields the distinct combinations of some keys, with the indices of each."""
    combined = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        combined = combined * (int(key.max(initial=0)) + 1) + key
    if combined.max(initial=0) < 2**16:
        combined = combined.astype(np.uint16)  # which numpy sorts in linear time
    order = np.argsort(combined, kind="stable")
    ends = np.flatnonzero(np.diff(combined[order])) + 1
    for members in np.split(order, ends):
        if len(members):
            yield tuple(int(key[members[0]]) for key in keys), members
