"""Lower bounds on the seconds of a step and the bytes of its fullest rank, for many pairs of a mesh and a micro-batch
at once. A step is composed as for a prediction (exposed.compose), and memory has its formulas (MemoryFormulas of
cost/rank_memory.py): without latencies of all-reduces, without the bubble of schedules that have no closed form (unless
it is asked for), and with the fewest activations that a schedule can have in flight."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from math import inf
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import BlockKind
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.communication import RankGroup, occupancy
from phalanx.cost.exposed import (
    GRID,
    MOST_RUN,
    NEGLIGIBLE,
    WIDEST,
    ComposedStep,
    Hops,
    block_state,
    compose,
    idle,
    is_uneven,
    messages_share,
    pass_seconds,
    window_seconds,
)
from phalanx.cost.held import expert_ranks
from phalanx.cost.in_flight import WHOLE, flights
from phalanx.cost.job_spec import stages
from phalanx.cost.rank_time import HOST_OPS, handling_seconds, starts_again
from phalanx.cost.state_formulas import StateBytes, overfull
from phalanx.cost.step_state import clip_bytes, summing_seconds, update_seconds
from phalanx.partition.derived import is_offloaded, slices_of, splits_backward
from phalanx.partition.tensor_slices import head_tiles
from phalanx.plan.space import RECOMPUTE, STATES, PlanRequest, Rows, Scheduled, Space
from phalanx.plan.tables import EP, Floats, Pipelines, RankContents, Tables, line, present
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES, chunks_of


def least_in_flight(scheduled: Scheduled, pp: int, m: int, rank: int) -> int:
    """Returns the fewest activations of a stage that a rank holds at its peak; one for a schedule in a file."""
    if pp == 1 or scheduled.schedule not in SCHEDULES:
        return 1
    return SCHEDULES[scheduled.schedule].in_flight(pp, m, chunks_of(*scheduled), rank)


def _enough(scheduled: Scheduled, pp: int) -> float:
    """Returns the number of micro-batches with more than which gradients of earlier ones are there while the most are
    in flight."""
    if pp == 1:
        return 1
    known = scheduled.schedule in SCHEDULES and not SCHEDULES[scheduled.schedule].all_in_flight
    return 2 * pp + 1 if known else inf


Peak = tuple[NDArray[Any], NDArray[Any]]
"""By number of micro-batches, the blocks of a rank with activations, once per micro-batch in flight: those before the
backward pass of their inputs, and those that may wait for weight gradients alone."""


@lru_cache(4096)
def _peaks(
    model: ModelConfig, layout: Layout, least: int, several: tuple[int, ...], rank: int, runs: bool
) -> list[Peak]:
    """Returns lower bounds on the blocks at the peaks of a rank whose stages have at least so many, or if it `runs`,
    those of the schedule's own program."""
    scheduled = Scheduled(layout.schedule, layout.pp_chunks)
    if not runs:
        found = np.array([least * least_in_flight(scheduled, layout.pp, n, rank) for n in several])
        return [(np.zeros_like(found), found)]
    cut, peaks = stages(model, layout), list[list[tuple[float, float]]]()
    for n in several:
        flight = flights(layout, n)[rank]
        sizes = [len(cut[stage]) for stage in flight.held]
        passes = [one for one in flight.peaks if one.kind in ("B", "I")]
        # Gradients are counted for all stages if any pass has them.
        if n > _enough(scheduled, layout.pp):
            passes = [one for one in passes if min(one.gradients) == WHOLE] or passes
        blocks = {(sum(map(mul, one.in_flight, sizes)), sum(map(mul, one.deferred, sizes))) for one in passes}
        most, front = -1.0, list[tuple[float, float]]()
        for live, waiting in sorted(blocks, reverse=True):
            if waiting > most:
                most = waiting
                front.append((live, waiting))
        peaks.append(front)
    return [(column[:, 0], column[:, 1]) for column in map(np.array, zip_longest(*peaks, fillvalue=(0.0, 0.0)))]


MicroBatches = tuple[tuple[int, ...], NDArray[np.intp]]
"""Different numbers of micro-batches, and the place of each pair's own among them."""


def _different(m: NDArray[np.int32]) -> MicroBatches:
    several, which = np.unique(m, return_inverse=True)
    return tuple(several.tolist()), which


def rank_activations(
    tables: Tables,
    scheduled: Scheduled,
    pp: int,
    m: MicroBatches,
    share: RankContents,
    rank: int,
    kinds: Mapping[BlockKind, Floats],
    loss: Floats,
    runs: bool = False,
) -> Floats:
    """Returns the least bytes of activations at the peak of a pipeline rank, from those of the `kinds` of its blocks
    (Tables.activations, which may have an axis of recomputations first) and of the `loss`; if it `runs`, with as many
    in flight as in the schedule's own program."""
    layout = _changed(tables.space.base, pp=pp, schedule=scheduled.schedule, pp_chunks=scheduled.pp_chunks)
    slices = slices_of(layout)
    # What one block needs is there whichever comes first: the least of the kinds.
    first, *others = (kinds[kind] for kind, _ in share.blocks)
    least = np.minimum.reduce([first, *others]) if others else first
    stays = 0 if is_offloaded(layout, "activations") else least[..., 0]
    waits = np.minimum(stays, least[..., 3]) if splits_backward(layout) else stays
    if slices > 1 and tables.request.model.dropout:
        waits = waits / 2  # earlier slices see, and save scores of, fewer keys: half of all
    several, which = m
    runs = runs and pp > 1 and slices == 1 and scheduled.schedule in SCHEDULES
    peaks = _peaks(tables.request.model, layout, share.least, several, rank, runs)
    kept = np.maximum.reduce([live[which] * stays + waiting[which] * waits for live, waiting in peaks])
    # Where backward passes are split, the most can be in flight when weight gradients are computed.
    moving = 0 if splits_backward(layout) else least[..., 1]
    moving = moving + least[..., 2] if pp > 1 else moving
    if not share.head:
        return kept + moving / slices
    if pp == 1 or (scheduled.schedule in SCHEDULES and chunks_of(*scheduled) == 1):
        return kept + np.maximum(moving, loss) / slices
    # The last of several stages may have its loss when fewer are in flight.
    return np.maximum(kept + moving / slices, loss / slices)


@lru_cache(1024)
def _changed(base: Layout, **fields: Any) -> Layout:
    return replace(base, **fields)


class StepBytes:
    """The memory of layouts with the same pipeline. Arrays have a row per different rank contents and a column per
    layout."""

    def __init__(self, group: Pipelines, runs: bool):
        self.group, self.tables, self.m, self.pp, self.runs = group, group.tables, group.m, group.pp, runs
        self.formulas = group.tables.formulas
        self.entry = SCHEDULES.get(group.scheduled.schedule) if group.pp > 1 else None
        self.shards = group.shards
        self.kinds = {kind: self.tables.activations(kind, group.modes, group.inner) for kind in group.kinds}
        self.loss, self.different = self.tables.loss(group.inner), _different(self.m)
        self.activations = self._activations(np.zeros(len(group.shares)))
        self.states: dict[tuple[int, str], StateBytes] = {}
        self.whole: dict[bool, tuple[Floats, Floats]] = {}

    @property
    def layout(self) -> Layout:
        return _changed(self.tables.space.base, pp=self.pp, schedule=self.group.scheduled.schedule)

    def _activations(self, apart: Floats) -> Floats:
        """Returns the least bytes of activations at the peak, less those that are `apart` and not there in the loss,
        and of the buffer beside them."""
        group = self.group
        pipeline = self.tables, group.scheduled, self.pp, self.different
        ranks = zip(group.shares, group.first, apart, strict=True)
        found = [
            rank_activations(*pipeline, share, rank, self.kinds, self.loss - less, self.runs)
            for share, rank, less in ranks
        ]
        return np.array(found) + self.formulas.buffer(group.data_ranks)

    def bytes(self, state: int) -> Floats:
        """Returns the bytes of the fullest rank. Of ranks with the same contents the first has the most in flight."""
        zero, reshard, accumulate = STATES[state]
        found = self._state(zero, accumulate)
        whole, activations = 0.0, self.activations
        if zero == 3 and not self.formulas.profile.gathers_matrices:
            whole, activations = self._whole(reshard)
            if not self.tables.request.model.freezes:
                layout = _changed(self.tables.space.base, pp=self.pp, accumulate=accumulate)
                sent = self.formulas.sent_last(self._outside(reshard), self.m, layout)
                # In a pipeline they are there once a backward pass has been.
                whole = whole + sent * self.group.shared * (self._stays if self.pp > 1 else 1)
        bucket = 0.0
        if zero < 3 and not self.formulas.fills_late(zero):
            bucket = self.formulas.bucket(self.shards, self.group.data_ranks, self.tables.space.base)
        return found.fullest(found.early(self._stays, bucket), activations, whole).max(0)

    def _state(self, zero: int, accumulate: str) -> StateBytes:
        key, group = (zero, accumulate if zero > 1 else ""), self.group
        if key not in self.states:
            flushes = self.entry is None or self.entry.steps == 1
            self.states[key] = self.formulas.state(
                self.shards, group.data_ranks, zero, accumulate, self.m, shared=group.shared, flushes=flushes
            )
        return self.states[key]

    @cached_property
    def _stays(self) -> Floats:
        """Whether gradients of earlier micro-batches are there while the most are in flight."""
        return self.formulas.stays(self.m, _enough(self.group.scheduled, self.pp))

    def _whole(self, reshard: bool) -> tuple[Floats, Floats]:
        """Returns the bytes of unsharded parameters of ZeRO-3, and of activations beside them: in the loss no block is
        whole that is gathered again, in the backward pass at least one. In the loss FSDP2 may have what it gathered
        last (`keeps_gathered`): of a head in tiles one of these."""
        if reshard not in self.whole:
            group, tables, every = self.group, self.tables, self.formulas.keeps_whole(self.pp, reshard=reshard)
            # Experts that no other rank has are not gathered, and with ep none before they compute.
            shared = (group.ranks[1] > 1) & (every or tables.inner[group.inner, EP] == 1)
            alone, sizes = (group.ranks[1] > 1) & (tables.inner[group.inner, EP] > 1), dict[BlockKind, Floats]()
            lingers = self.formulas.profile.keeps_gathered and not (every and self.pp > 1)
            lingers = lingers and head_tiles(tables.request.model, tables.space.base) == 1
            last: Floats = np.asarray(inf)
            for kind in self.kinds:
                with_experts, dense = (
                    tables.gathered(kind, group.inner, shared=each, tiled=reshard) for each in (True, False)
                )
                block, _, tile = np.where(shared[:, None], with_experts, dense).T
                sizes[kind] = block if every else block + tile
                experts = np.where(alone, with_experts[:, 0] - dense[:, 0], 0)
                last = np.minimum(last, np.where(experts > 0, experts, np.where(tile > 0, tile, block)))
            blocks = [
                sum(many * sizes[kind] for kind, many in (share.blocks if every else ((share.blocks[0][0], 1),)))
                for share in group.shares
            ]
            each = self.formulas.width * group.shared
            there = every or not splits_backward(self.layout)  # none where weight gradients are computed
            numbers: Floats = np.stack(blocks) * np.asarray(each * there, float)
            apart = numbers * (not every) - last * self.formulas.width * lingers * (group.ranks[0] > 1)
            activations = self._activations(apart)
            self.whole[reshard] = numbers + self._outside(reshard) * each, activations
        return self.whole[reshard]

    def _outside(self, reshard: bool) -> Floats:
        """Returns the parameters outside of blocks that ZeRO-3 has whole at once."""
        return np.stack([self.tables.outside(share, self.group.inner, tiled=reshard) for share in self.group.shares])


class SlowPipeline(NamedTuple):
    """A pipeline with slow messages between ranks that are alike."""

    layout: Layout
    """The layout of the schedule."""
    micro_batches: int
    mean: float
    """Seconds of a micro-batch on a rank."""
    shares: set[tuple[int, int]]
    """Shares of forward passes and of weight gradients in it that a prediction may have, in GRID parts."""
    hops: Hops
    """Seconds of the messages."""
    rest: float
    """Seconds of the step besides."""

    def seconds(self) -> float:
        """Returns the seconds of the step at least: a prediction may round the time of messages down to the next one of
        its grid."""
        found = (
            window_seconds(self.layout, self.micro_batches, self.mean, one / GRID, two / GRID, self.hops)
            for one, two in self.shares
        )
        return (self.rest + min(found) * 2 ** (-1 / GRID)) * (1 - ROUNDING)


class StepSeconds:
    """The times of layouts with the same pipeline. Arrays have a row per different rank contents and a column per
    layout."""

    def __init__(self, group: Pipelines):
        self.group, self.tables, self.m, self.pp = group, group.tables, group.m, group.pp
        self.request = group.tables.request
        self.framework, self.device = self.request.framework, self.request.cluster.accelerator
        self.work = np.stack([self.tables.work(share)[group.inner, group.modes].T for share in group.shares], 1)
        """Seconds per micro-batch: forward, backward, the same of the host, and those of weight gradients."""
        if self.framework.sum_passes:
            width = self.request.width
            self.work[1] += summing_seconds(self.device, self.framework, width, group.trained.sum(0), self.m)
        self.slopes = self.tables.slopes[group.outer].T

    def seconds(self, state: int, exactly: NDArray[Any] | None = None) -> Floats:
        """Returns the seconds with a state sharding; the layouts `exactly` get the bubble of the schedule's program."""
        if STATES[state].zero == 3:
            step = self._step(state)
            return step.seconds(self._waiting(step, exactly)) + self._optimizer(3)
        found = self._plain_seconds if exactly is None else self._plain.seconds(self._waiting(self._plain, exactly))
        return found + self._optimizer(STATES[state].zero)

    @cached_property
    def _plain(self) -> ComposedStep:
        """The step without ZeRO-3, the same with every other state sharding."""
        return self._step(next(number for number, state in enumerate(STATES) if state.zero < 3))

    @cached_property
    def _plain_seconds(self) -> Floats:
        return self._plain.seconds(self._waiting(self._plain, None))

    def _waiting(self, step: ComposedStep, exactly: NDArray[Any] | None) -> Floats:
        """Returns a lower bound on the idle time; 0 where the program is run with ranks that differ."""
        uneven = is_uneven(self.group.scheduled[0], step.passes / self.m, step.others)
        return np.where(uneven, 0.0, self._idle(step, exactly))

    def _step(self, state: int) -> ComposedStep:
        """Returns the step with the costs of the tables: latencies of all-reduces are off."""
        group, zero3 = self.group, STATES[state].zero == 3
        work = self.work + np.where(group.shared, self._gathered(state), 0.0) if zero3 else self.work
        held, trained = self._fullest

        def sent(messages: Floats, whole: bool) -> tuple[Floats, Floats, Floats]:
            gather, reduce = self._state(held if whole else trained, trained, messages)
            return gather, reduce, self._interference(trained.sum(0), messages)

        gathers, work = group.shared if zero3 else False, work * group.parts
        return compose(work, group.count, group.blocks, self.m, group.hop, sent, gathers, self._layout, self.framework)

    def _gathered(self, state: int) -> Floats:
        """Returns the seconds that ZeRO-3 adds to the work of ranks that shard parameters."""
        _, reshard, accumulate = STATES[state]
        seconds, starts = np.zeros((5, *self.work.shape[1:])), self.framework.kernel_us * 1e-6
        handling = handling_seconds(self.device, HOST_OPS["shard"])
        twice = np.array([1 + starts_again(self.device, mode) for mode in RECOMPUTE])[self.group.modes]
        for kind, (gather, regather, reduce, slowdown) in self._blocks.items():
            forward, backward, *_ = self.tables.block(kind)[self.group.inner, self.group.modes].T
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
            held, trained = np.split(self.tables.counts(alone)[self.group.inner].T, 2)
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

    @cached_property
    def _fullest(self) -> tuple[Floats, Floats]:
        """Parameters, dense and of experts, of the rank that has most, and those of them that are trained."""
        place = self.group.total.argmax(0), np.arange(len(self.m))
        return self.group.numbers[:, *place], self.group.trained[:, *place]

    def _optimizer(self, zero: int) -> Floats:
        _, trained = self._fullest
        updated, every = (trained / self.group.ranks).sum(0), trained.sum(0)
        clipped = np.where(self.group.shared, updated, every) if zero > 1 else every
        cluster, clips = self.request.cluster, clip_bytes(self.framework, self.request.width)
        return update_seconds(cluster, self.tables.space.base, self.tables.optimizer, updated, clipped, clips)

    def _idle(self, step: ComposedStep, exactly: NDArray[Any] | None) -> Floats | float:
        """Returns a lower bound on the idle time, in micro-batches of a rank: the schedule's formula, or its program
        for the layouts `exactly` if that is not exact."""
        if self.pp == 1:
            return 0.0
        schedule, chunks = self.group.scheduled
        found, known = np.zeros(len(self.m)), np.zeros(len(self.m), bool)
        if entry := catalogue.SCHEDULES.get(schedule):
            least = np.maximum(0.0, step.forward - 0.5 / GRID)
            found[:] = entry.idle(self.pp, self.m, catalogue.chunks_of(schedule, chunks), least)
            known[:] = entry.idle_is_exact(self.pp, self.m)
        if exactly is None or known.all():
            return found
        pairs = present(exactly)
        pairs = pairs[~known[pairs]]
        for pair, m, shares in zip(pairs, self.m[pairs].tolist(), self._on_grid(step, pairs), strict=True):
            found[pair] = min(_idle(self._layout, m, *each) for each in shares)
        return found

    @cached_property
    def _layout(self) -> Layout:
        """The layout of the fields that all share."""
        schedule, chunks = self.group.scheduled
        return _changed(self.tables.space.base, pp=self.pp, schedule=schedule, pp_chunks=chunks)

    def _on_grid(self, step: ComposedStep, places: NDArray[Any]) -> Iterator[set[tuple[int, int]]]:
        """Yields the shares of forward passes and of weight gradients in GRID parts, for some layouts. The cost model
        rounds them; near a tie it may round to either side."""
        sides = (
            np.round(part[places] * GRID + more).astype(int).tolist()
            for part in (step.forward, step.weights)
            for more in (-1e-6, 1e-6)
        )
        for low, high, less, most in zip(*sides, strict=True):
            yield {*product((low, high), (less, most))}

    def windows(self, state: int, places: NDArray[Any]) -> Iterator[SlowPipeline | None]:
        """Yields, for layouts with a state sharding, their pipelines if messages take a noticeable time."""
        step, group = self._step(state) if STATES[state].zero == 3 else self._plain, self.group
        mean = (step.passes / self.m + step.others * (self.pp - 1)) / self.pp
        # A prediction may find ranks a little slower, and messages negligible.
        slow = messages_share(self._layout, self.m, mean, np.maximum(group.near, group.far)) > 2 * NEGLIGIBLE
        slow &= ~is_uneven(group.scheduled[0], step.passes / self.m, step.others)
        rest, blocks = step.state + self._optimizer(STATES[state].zero), not self.framework.pp_overlaps
        columns = (each[places].tolist() for each in (slow, self.m, mean, group.near, group.far, group.together, rest))
        for shares, late, m, each, near, far, together, more in zip(self._on_grid(step, places), *columns, strict=True):
            yield SlowPipeline(self._layout, m, each, shares, Hops(near, far, together, blocks), more) if late else None


@lru_cache(100_000)
def _idle(layout: Layout, micro_batches: int, forward: int, weights: int) -> float:
    """Returns the cost model's idle time, from shares in GRID parts."""
    return idle(layout, micro_batches, forward / GRID, weights / GRID)


ROUNDING = 1e-9
"""Relative difference between sums in different orders."""


class Bounds:
    """The bounds of a space's layouts."""

    def __init__(self, request: PlanRequest, space: Space):
        self.request, self.space, self.tables = request, space, Tables(request, space)
        self.pp, self.shard_ranks = space.column("pp"), space.column("dp_shard") * space.column("cp")
        self.data_ranks = self.shard_ranks * space.column("dp_replicate")
        self.ep_shard = space.column("ep") // np.where(space.column("etp") > 0, space.column("tp"), 1)
        self.ranks = np.stack([self.shard_ranks, expert_ranks(self.shard_ranks, self.ep_shard)])
        self.alike = space.column("ep") == 1
        self.formulas = self.tables.formulas
        axes = (space.column(name) for name in ("tp", "cp", "ep"))
        self.context = self.formulas.context(self.pp, self.data_ranks, *axes)
        self.hop, self.link, self.near, self.far, self.together = self._hops()
        self._known: dict[Hashable, Floats] = {}
        self._schedules = [present(options[:, 0]).tolist() for options in space.options]
        """By the number of a pair's options, its schedules."""

    def pairs(self) -> tuple[Floats, Floats]:
        """Returns lower bounds on the seconds and bytes of every pair of a mesh and a micro-batch: nothing recomputed,
        everything sharded, all ranks of a pipeline alike, no bubble and nothing to reduce."""
        every, tables = np.arange(len(self.pp)), self.tables
        forward, backward, host, host_backward, _ = tables.work(tables.whole)[:, RECOMPUTE.index("none")].T
        work = pass_seconds(forward, host) + pass_seconds(backward, host_backward)
        time = np.maximum(self.space.accumulation * work[tables.inner_of] / self.pp, self.link)
        kept = np.add.reduce([number * tables.kept(kind) for kind, number in tables.whole.blocks])[tables.inner_of]
        counts = np.split(tables.counts(tables.whole)[tables.inner_of].T / self.pp, 2)
        state = self._state(every, counts, 3)
        memory = state.fullest(state.buckets, kept / self.pp, 0.0)
        return time * (1 - ROUNDING), memory * (1 - ROUNDING) + self.context

    def options(
        self, pairs: NDArray[Any], schedules: Container[int], limit: float = inf, cutoff: float = inf
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Returns lower bounds on the seconds of some pairs, by recomputation and schedule, with any state sharding:
        infinite for schedules that a pair does not have, or that are not among the `schedules`. And whether bytes are
        within the `limit`, by recomputation, schedule and state sharding, at least on the rank with most activations;
        False for pairs whose times all exceed the `cutoff`."""
        time = np.full((len(pairs), len(RECOMPUTE), len(self.space.schedules)), inf)
        fits = np.zeros((*time.shape, len(STATES)), bool)
        for (pp,), members in grouped(self.pp[pairs]):
            some = pairs[members]
            m, inner = self.space.accumulation[some], self.tables.inner_of[some]
            forward, least = self._forward[:, inner], np.full(len(some), inf)
            options, timed = present(self.space.option_of[some]).tolist(), list[int]()
            for scheduled in sorted({scheduled for number in options for scheduled in self._schedules[number]}):
                if scheduled not in schedules:
                    continue
                idle = self._idle(some, pp, scheduled, forward)
                slowest, others = self._passes(pp, scheduled)[:, :, inner]
                idle = np.where(is_uneven(self.space.schedules[scheduled][0], slowest, others), 0.0, idle)
                seconds = m * slowest + idle * others
                seconds = np.maximum(seconds, self._sending(some, pp, scheduled)) * (1 - ROUNDING)
                time[members, :, scheduled] = seconds.T
                if (fastest := seconds.min(0)).min() <= cutoff:
                    least = np.minimum(least, fastest)
                    timed.append(scheduled)
            if timed:
                near = np.flatnonzero(least <= cutoff)
                fits[members[near, None], :, timed] = self._fitting(some[near], pp, timed, limit)
        return time, fits

    def rows(self, rows: Rows, limit: float = inf, cutoff: float = inf) -> tuple[Floats, Floats]:
        """Returns lower bounds on the seconds and bytes of every layout. Seconds are infinite if bytes exceed `limit`;
        with a `cutoff` bytes are infinite instead if seconds exceed that."""
        time, memory = np.full((2, len(rows)), inf)
        if cutoff < inf:
            time = self.seconds(rows)
            near = np.flatnonzero(time <= cutoff)
            memory[near] = self.sizes(rows.select(near))
            return time, memory
        memory = self.sizes(rows)
        small = np.flatnonzero(memory <= limit)
        time[small] = self.seconds(rows.select(small))
        return time, memory

    def seconds(self, rows: Rows, runs: bool = False) -> Floats:
        """Returns lower bounds on the seconds of every layout; if it `runs`, with the bubble of the schedule's own
        program, which is slower to compute."""
        time = np.empty(len(rows))
        for members, group, states, places in self._groups(rows):
            of_time, found = StepSeconds(group), np.empty((len(STATES), len(group.inner)))
            for state in present(states).tolist():
                found[state] = of_time.seconds(state, places[states == state] if runs else None)
            sending = self._sending(rows.pair[members], group.pp, int(rows.scheduled[members[0]]))
            time[members] = np.maximum(found[states, places], sending) * (1 - ROUNDING)
        return time

    def windows(self, rows: Rows) -> list[SlowPipeline | None]:
        """Returns the pipelines of layouts whose messages between stages take a noticeable time, None for others."""
        found: list[SlowPipeline | None] = [None] * len(rows)
        for members, group, states, places in self._groups(rows):
            if group.pp == 1 or group.scheduled[0] not in SCHEDULES:
                continue
            of_time = StepSeconds(group)
            for state in present(states).tolist():
                here = states == state
                for number, each in zip(members[here], of_time.windows(state, places[here]), strict=True):
                    found[number] = each
        return found

    def sizes(self, rows: Rows, runs: bool = False) -> Floats:
        """Returns lower bounds on the bytes of every layout; if it `runs`, with the activations in flight of the
        schedule's own program, which are slower to count."""
        memory = np.empty(len(rows))
        for members, group, states, places in self._groups(rows):
            of_bytes, found = StepBytes(group, runs), np.empty((len(STATES), len(group.inner)))
            for state in present(states).tolist():
                found[state] = of_bytes.bytes(state)
            beside = np.max(overfull(self.request.cluster, *self.formulas.beside(group.shards)), 0) * (1 - ROUNDING)
            here = found[states, places] * (1 - ROUNDING) + self.context[rows.pair[members]]
            memory[members] = np.maximum(here, beside[places] if np.ndim(beside) else beside)
        return memory

    def _groups(self, rows: Rows) -> Iterator[tuple[NDArray[np.intp], Pipelines, NDArray[Any], NDArray[np.intp]]]:
        """Yields the rows with the same pipeline by their numbers, the figures of their meshes and recomputations, and
        by row its state sharding and the column of the figures."""
        for (pp, scheduled), members in grouped(self.pp[rows.pair], rows.scheduled):
            different, places = runs_of(rows.pair[members] * len(RECOMPUTE) + rows.recompute[members])
            pairs, modes = np.divmod(different, len(RECOMPUTE))
            yield members, self._pipelines(pairs, modes, pp, scheduled), rows.state[members], places

    def _pipelines(self, pairs: NDArray[Any], modes: NDArray[Any], pp: int, scheduled: int) -> Pipelines:
        """Returns the figures of the meshes of some pairs, with recomputations, that their bounds need."""
        tables, cut = self.tables, self.tables.cut(pp, scheduled)
        inner = tables.inner_of[pairs]
        counts = np.stack([tables.counts(share)[inner].T for share in cut], 1)
        return Pipelines(
            tables=tables,
            pp=pp,
            scheduled=self.space.schedules[scheduled],
            modes=modes,
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
            numbers=counts[:2],
            trained=counts[2:],
            hop=self.hop[pairs],
            near=self.near[pairs],
            far=self.far[pairs],
            together=self.together[pairs],
        )

    def _state(
        self, pairs: NDArray[Any], counts: Sequence[Floats], zero: int, accumulate: str = "sharded"
    ) -> StateBytes:
        """Returns the bytes of the state of a rank with so many parameters, dense and of experts, all and those that
        training changes."""
        shards, m = list(zip(*counts, self.ranks[:, pairs], strict=True)), self.space.accumulation[pairs]
        shared = self.shard_ranks[pairs] > 1
        return self.formulas.state(shards, self.data_ranks[pairs], zero, accumulate, m, shared=shared)

    @cached_property
    def _forward(self) -> Floats:
        """The share at least of forward passes in the work of ranks that are all alike, by recomputation and inner
        combination."""
        work = np.moveaxis(self.tables.work(self.tables.whole), 1, 0)
        return work[..., 0] / work[..., :4].sum(-1)

    def _passes(self, pp: int, scheduled: int) -> Floats:
        """Returns the seconds of a micro-batch on the busiest rank of a pipeline, then on another rank on average, by
        recomputation and inner combination."""
        cut = tuple(self.tables.cut(pp, scheduled).items())
        if (pp, cut) not in self._known:
            slowest, whole = np.zeros((2, len(RECOMPUTE), len(self.tables.inner)))
            for share, (_, count) in cut:
                forward, backward, host, host_backward, _ = (self.tables.work(share) * share.part).T
                each = pass_seconds(forward, host) + pass_seconds(backward, host_backward)
                slowest, whole = np.maximum(slowest, each), whole + count * each
            self._known[pp, cut] = np.array([slowest, (whole - slowest) / max(1, pp - 1)])
        return self._known[pp, cut]

    def _idle(self, pairs: NDArray[Any], pp: int, scheduled: int, forward: Floats) -> Floats | float:
        """Returns idle time at least, in micro-batches of a rank, for some shares of forward passes."""
        schedule, chunks = self.space.schedules[scheduled]
        if pp == 1 or schedule not in SCHEDULES:
            return 0.0
        chunks, least = chunks_of(schedule, chunks), np.maximum(0.0, forward - 0.5 / GRID)
        m = np.broadcast_to(self.space.accumulation[pairs], least.shape)
        return SCHEDULES[schedule].idle(pp, m, chunks, least)

    def _fitting(self, pairs: NDArray[Any], pp: int, schedules: Sequence[int], limit: float) -> NDArray[np.bool_]:
        """Returns whether some pairs need at most `limit` bytes, by schedule, recomputation and state sharding, on the
        rank of a pipeline with the most micro-batches in flight, without unsharded parameters of ZeRO-3."""
        tables, inner, m = self.tables, self.tables.inner_of[pairs], self.space.accumulation[pairs]
        most, loss, buffer = int(m.max()), tables.loss(inner), self.formulas.buffer(self.data_ranks[pairs])
        room, different = (limit - self.context[pairs]) / (1 - ROUNDING), _different(m)
        kinds, rooms = dict[BlockKind, Floats](), dict[tuple[RankContents, float], Floats]()
        found = np.empty((len(pairs), len(schedules), len(RECOMPUTE), len(STATES)), bool)
        for place, scheduled in enumerate(schedules):
            which = self.space.schedules[scheduled]
            share, (rank, _) = max(
                tables.cut(pp, scheduled).items(),
                key=lambda item, which=which: least_in_flight(which, pp, most, item[1][0]) * item[0].least,
            )
            kinds |= {
                kind: tables.activations(kind, slice(None), inner) for kind, _ in share.blocks if kind not in kinds
            }
            if (share, _enough(which, pp)) not in rooms:
                counts, stays = np.split(tables.counts(share)[inner].T, 2), self.formulas.stays(m, _enough(which, pp))
                states = {
                    key: self._state(pairs, counts, *key) for key in {(one.zero, one.accumulate) for one in STATES}
                }
                left = {
                    key: np.where(state.held + state.stepping <= room, room - state.held - state.early(stays), -inf)
                    for key, state in states.items()
                }
                rooms[share, _enough(which, pp)] = np.stack([left[one.zero, one.accumulate] for one in STATES], 1)
            activations = buffer + rank_activations(tables, which, pp, different, share, rank, kinds, loss)
            found[:, place] = activations.T[..., None] <= rooms[share, _enough(which, pp)][:, None]
        return found

    def _sending(self, pairs: NDArray[Any], pp: int, scheduled: int) -> Floats:
        """Returns the seconds at least in which a link between two stages sends the messages of some pairs, one after
        the other: of all stages of a rank where a prediction runs the schedule with messages of nearly their time."""
        (schedule, chunks), link = self.space.schedules[scheduled], self.link[pairs]
        if not 1 < pp <= WIDEST or schedule not in SCHEDULES:
            return link
        often = chunks_of(schedule, chunks) / SCHEDULES[schedule].directions * 2 ** (-0.5 / GRID)
        return np.where(self.space.accumulation[pairs] <= MOST_RUN, link * max(1.0, often), link)

    def _hops(self) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64]]:
        """Returns, by pair, the seconds of a message from a stage to the next at least, and those of the micro-batches'
        messages one after the other between two stages, over the network where some stages are in different nodes; and
        the near and far ones, and the stages of one node, of Pipelines."""
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
        together = np.maximum(1, cluster.joined // stride)
        near, far = np.where(together > 1, inside, 0.0), np.where(together < self.pp, across, 0.0)
        return hop, np.where(several, self.space.accumulation * slowest, 0.0), near, far, together


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
