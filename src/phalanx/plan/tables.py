"""The cost model's figures for the parts of a layout, for many layouts at once: each part is computed once per
combination of degrees that it depends on, on first use.

Computation and memory of one device depend on the inner degrees (tp, sp, cp, cp_ulysses, ep, etp) and the
micro-batch; the state's collectives on the outer ones (tp, the ranks that shard, the replicas, and over how many of
them ep spreads the experts); the contents of the ranks on the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import BlockKind, Half, block_kinds
from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.block_memory import BlockBytes, KeptBytes, StepSizes
from phalanx.cost.communication import PURPOSES, Collective, RankGroup, boundary_bytes, group, seconds, state_messages
from phalanx.cost.held import (
    Content,
    GatheredParameters,
    LayerKind,
    ParameterCounts,
    block_parameters,
    gathered_outside,
    parameter_counts,
)
from phalanx.cost.in_flight import flights
from phalanx.cost.job_spec import stages
from phalanx.cost.loss_memory import LossParts
from phalanx.cost.rank_time import around_time, half_times
from phalanx.cost.spec import StepSpec
from phalanx.cost.state_formulas import Shards
from phalanx.cost.step_state import conversion_seconds, costs_of, groups, near_of, wire_widths
from phalanx.hashed import Hashed, hashed_once
from phalanx.partition.derived import Batch, is_file, schedule_of
from phalanx.plan.space import RECOMPUTE, PlanRequest, Scheduled, Space
from phalanx.schedule import catalogue
from phalanx.schedule.generators import placements

Floats = NDArray[np.float64]
TP, SP, CP, ULYSSES, EP, ETP, MICRO = range(7)
"""Columns of the inner combinations."""
BANDWIDTH_BOUND_BYTES = 1e15
"""Bytes of a message whose latency is negligible."""


@hashed_once
@dataclass(frozen=True)
class RankContents(Hashed):
    """The part of the model on some ranks of a pipeline: blocks of each kind, and the ends."""

    blocks: tuple[tuple[BlockKind, int], ...]
    """The kinds of blocks with their numbers, that of the last block first."""
    embedding: bool
    head: bool
    part: float = 1.0
    """Share of the micro-batches that pass each of its stages."""
    least: int = 0
    """Blocks of its smallest stage."""

    @property
    def number(self) -> int:
        """Number of blocks of all kinds."""
        return sum(many for _, many in self.blocks)

    def of(self, kind: BlockKind) -> int:
        """Returns the number of blocks of a kind."""
        return dict(self.blocks).get(kind, 0)


Cut = dict[RankContents, tuple[int, int]]
"""The first rank with each different contents in a pipeline, and the number of such ranks."""


@dataclass(frozen=True)
class Pipelines:
    """Layouts with the same pipeline, one per column: pairs of a mesh and a micro-batch, with a recomputation."""

    tables: Tables
    pp: int
    scheduled: Scheduled
    modes: NDArray[Any]
    """Numbers of the recomputations."""
    shares: list[RankContents]
    """The different contents of its ranks."""
    first: list[int]
    """The first rank with each contents; `count` and `parts` have a row each: the number of ranks with it, and the part
    of the micro-batches that pass each of their stages."""
    count: NDArray[np.int64]
    parts: Floats
    blocks: NDArray[np.int64]
    """Number of blocks, by contents."""
    inner: NDArray[np.intp]
    """Numbers of inner and outer combinations."""
    outer: NDArray[np.intp]
    m: NDArray[np.int32]
    """Micro-batches."""
    shared: NDArray[np.bool_]
    """Whether ranks shard the state."""
    alike: NDArray[np.bool_]
    """Whether experts are sharded like the rest: no rank has its own."""
    data_ranks: NDArray[np.int64]
    ranks: NDArray[np.int64]
    """Numbers of ranks that shard the state of dense parameters and of experts."""
    numbers: Floats
    """Parameters, dense and of experts, by contents."""
    trained: Floats
    """Those that training changes."""
    hop: Floats
    """Seconds of a message from a stage to the next."""
    near: Floats
    """Seconds of one inside a node; 0 where no two stages share one."""
    far: Floats
    """Seconds of one between nodes; 0 within one."""
    together: NDArray[np.int64]
    """Stages of one node."""

    @cached_property
    def kinds(self) -> list[BlockKind]:
        """The kinds of blocks in the pipeline."""
        return list(dict.fromkeys(kind for share in self.shares for kind, _ in share.blocks))

    @cached_property
    def total(self) -> Floats:
        """Number of parameters, by contents."""
        return self.numbers.sum(0)

    @property
    def shards(self) -> Shards:
        """Groups of parameters, as in cost/rank_memory.py."""
        parts = 2 if self.tables.request.model.moe.n_experts else 1
        return list(zip(self.numbers, self.trained, self.ranks, strict=True))[:parts]


class Tables:
    """The figures of one space."""

    def __init__(self, request: PlanRequest, space: Space):
        self.request, self.space = request, space
        column = space.column
        self.inner, self.inner_of = distinct(
            *(column(name) for name in ("tp", "sp", "cp", "cp_ulysses", "ep", "etp")), space.micro_batch
        )
        """The combinations of inner degrees, and by pair the number of its combination."""
        ep_shard = column("ep") // np.where(column("etp") > 0, column("tp"), 1)
        self.outer, self.outer_of = distinct(
            column("tp"), column("cp") * column("dp_shard"), column("dp_replicate"), ep_shard
        )
        """The combinations of outer degrees, and by pair the number of its combination."""
        model = request.model
        self.whole = RankContents(every_block(model), True, True, least=model.n_layers)
        simplest = alone(request, Layout(offload=space.base.offload, offload_to=space.base.offload_to), 1)
        self.formulas, self.optimizer = StepSizes(simplest).formulas, costs_of(simplest)
        self.slopes = self._slopes()
        """By outer combination: seconds per parameter, gathered, gathered again and reduced, each dense and of experts,
        and those of an empty message, in the same order; for gathers that overlap products, seconds of an empty message
        and per byte, and the share of the bytes that a rank sends."""
        self._asked: dict[tuple[str, Hashable], Floats] = {}
        self._blocks: dict[BlockKind, Floats] = {}
        self._activations: dict[BlockKind, tuple[Floats, NDArray[np.bool_]]] = {}
        self._work: dict[Hashable, Floats] = {}
        self._parts: dict[tuple[int, ...], tuple[list[StepSpec], NDArray[np.intp]]] = {}
        self._cuts: dict[tuple[int, int], Cut] = {}

    def work(self, share: RankContents) -> Floats:
        """Returns, by inner combination and recomputation, the seconds of a micro-batch that passes all stages of a
        rank, without ZeRO-3: forward and backward on the device, forward and backward of the host, and those of weight
        gradients."""
        key = share.blocks, share.embedding, share.head
        if key not in self._work:
            blocks = (number * self.block(kind) for kind, number in share.blocks)
            self._work[key] = sum(blocks, self._around(share.embedding, share.head)[:, None])
        return self._work[key]

    def _around(self, embedding: bool, head: bool) -> Floats:
        """Returns the same seconds outside the blocks, with any recomputation."""
        content = Content((), embedding, head)
        ends = embedding, head
        return self._figures(("around", ends), (TP, SP, CP, MICRO), lambda spec: around_time(spec, content).passes)

    def block(self, kind: BlockKind) -> Floats:
        """Returns the same seconds of one block."""
        if kind not in self._blocks:
            on_feed_forward = (TP, SP, CP, EP, ETP, MICRO) if kind.routed else (TP, SP, CP, MICRO)
            attention = self._half(kind, "attention", (TP, SP, CP, ULYSSES, MICRO))
            self._blocks[kind] = attention + self._half(kind, "feed_forward", on_feed_forward)
        return self._blocks[kind]

    def _half(self, kind: BlockKind, half: Half, on: tuple[int, ...]) -> Floats:
        return self._figures((half, kind), on, lambda spec: _half_passes(spec, kind, half))

    def kept(self, block: BlockKind) -> Floats:
        """Returns, by inner combination, the bytes that a block saves per micro-batch with full recomputation."""
        full = LayerKind(block, "full")
        found = self._figures(("kept", block), _of_sequences(block), lambda spec: KeptBytes(StepSizes(spec), full).kept)
        return found * self.inner[:, MICRO]

    def activations(self, block: BlockKind, modes: Any, inner: NDArray[Any]) -> Floats:
        """Returns bytes for recomputations, given by number, and inner combinations: those that a block saves per
        micro-batch, those that its backward pass needs besides, messages in flight between stages, and what a block
        saves for its weight gradients alone. All are of whole sequences; each combination is computed on first use."""
        specs, which = self._specs(_of_sequences(block))
        if block not in self._activations:
            self._activations[block] = np.empty((len(RECOMPUTE), len(which), 4)), np.zeros(len(which), bool)
        found, known = self._activations[block]
        for number in present(which[inner[~known[inner]]]).tolist():
            step, alike = StepSizes(specs[number]), np.flatnonzero(which == number)
            sizes = [BlockBytes(step, LayerKind(block, mode)) for mode in RECOMPUTE]
            each = np.array([(one.kept, sum(one.backward), step.under_way, one.deferred) for one in sizes])
            found[:, alike] = each[:, None] * self.inner[alike, MICRO, None]
            known[alike] = True
        return found[modes, inner]

    def loss(self, inner: NDArray[Any]) -> Floats:
        """Returns, for inner combinations, the bytes of the logits and of the head's input."""

        def ask(spec: StepSpec) -> float:
            return sum(LossParts(StepSizes(spec), flights(spec.layout, 1)[0]).logits(least=True))

        return self._figures(("loss", ""), (TP, SP, CP, MICRO), ask)[inner]

    def boundary(self) -> Floats:
        """Returns, by inner combination, the bytes of a message from a stage to the next."""
        return self._figures(("boundary", ""), (TP, SP, CP, MICRO), boundary_bytes)

    def outside(self, share: RankContents, inner: NDArray[Any], *, tiled: bool) -> Floats:
        """Returns, for inner combinations, the parameters outside a rank's blocks that ZeRO-3 has whole at once,
        without tiles of them."""
        ends = share.embedding, share.head

        def ask(spec: StepSpec) -> int:
            return gathered_outside(spec.model, spec.layout, *ends, tiled=tiled).block

        return self._figures(("outside", (ends, tiled)), (TP,), ask)[inner]

    def gathered(self, kind: BlockKind, inner: NDArray[Any], *, shared: bool, tiled: bool) -> Floats:
        """Returns what ZeRO-3 gathers of a block, by inner combination: the fields of GatheredParameters."""

        def ask(spec: StepSpec) -> GatheredParameters:
            return block_parameters(spec.model, spec.layout, kind).gathered(shared, tiled=tiled)

        return self._figures(("gathered", (kind, shared, tiled)), (TP, EP, ETP), ask)[inner]

    def counts(self, share: RankContents) -> Floats:
        """Returns the parameters of a rank by inner combination, dense and of experts, then those that training
        changes: the fields of ParameterCounts."""

        def ask(spec: StepSpec) -> ParameterCounts:
            return parameter_counts(spec.model, spec.layout, share.blocks, share.embedding, share.head)

        return self._figures(("counts", share), (TP, EP, ETP), ask)

    def cut(self, pp: int, scheduled: int) -> Cut:
        """Returns the contents of the ranks of a pipeline under a schedule of the space."""
        if (pp, scheduled) not in self._cuts:
            schedule, chunks = self.space.schedules[scheduled]
            layout = Layout(pp=pp, schedule=schedule, pp_chunks=chunks, pp_cut=self.space.base.pp_cut)
            self._cuts[pp, scheduled] = _cut(self.request.model, layout)
        return self._cuts[pp, scheduled]

    def _specs(self, on: tuple[int, ...]) -> tuple[list[StepSpec], NDArray[np.intp]]:
        """Returns single micro-batches of every combination of some inner degrees, others 1, and by inner combination
        the number of its own."""
        if on not in self._parts:
            some = np.ones_like(self.inner)
            some[:, on] = self.inner[:, on]
            for switch in {SP, ETP}.difference(on):
                some[:, switch] = 0
            combinations, which = distinct(*some.T)
            specs = []
            for tp, sp, cp, ulysses, ep, etp, micro in combinations.tolist():
                regather = bool(sp) and self.space.regathers
                degree = {
                    "tp": tp,
                    "sp": bool(sp),
                    "sp_regather": regather,
                    "cp": cp,
                    "cp_ulysses": ulysses,
                    "ep": ep,
                    "etp": etp,
                    "dp_shard": ep // tp if etp else ep,
                }
                specs.append(alone(self.request, Layout(**self._alone, **degree), micro))
            self._parts[on] = specs, which
        return self._parts[on]

    def _figures(self, what: tuple[str, Hashable], on: tuple[int, ...], ask: Callable[[StepSpec], Any]) -> Floats:
        """Returns the cost model's figures by inner combination, computed once per combination of the degrees `on`
        which they depend."""
        if what not in self._asked:
            specs, which = self._specs(on)
            self._asked[what] = np.array([ask(spec) for spec in specs], np.float64)[which]
        return self._asked[what]

    @cached_property
    def _alone(self) -> dict[str, Any]:
        """The fixed fields of the layout of one device, without those of pipeline or data ranks."""
        base = self.space.base
        kept = ["cp_inner", "cp_balance", "loss_chunk", "tiles", "tile", "prefetch", "bucket_mb"]
        kept += ["ep_node", "dispatch", "ep_overlap"]
        return {"zero": 1, **{name: getattr(base, name) for name in kept}}

    def _slopes(self) -> Floats:
        request, base = self.request, self.space.base
        widths = wire_widths(base, request.framework, request.products, request.width, request.model)

        def messages(layout: Layout, *, experts: bool) -> Floats:
            """Returns seconds per parameter and those of an empty message, of dense parameters or of experts."""
            among, found = groups(layout, experts=experts), np.zeros((2, 3))
            ranks = among["shard"].ranks
            sizes = {name: width / ranks for name, width in widths.items()}
            coded, codes = base.quantise_gradients != "none", codes_of(layout.dp_shard, layout.dp_replicate)
            for message in state_messages(ranks, **sizes, near=near_of(layout, among), coded=coded):
                slope, start = line(request.cluster, message.collective, among[message.among])
                row = min(2, PURPOSES.index(message.purpose))  # replicas sum when gradients are reduced
                found[:, row] += slope * message.size + codes[message.purpose], start
            return found

        @cache
        def codes_of(shard: int, replicate: int) -> dict[str, float]:
            layout = replace(base, dp_shard=shard, dp_replicate=replicate, cp=1)
            return conversion_seconds(request.cluster.accelerator, layout)

        @cache
        def dense(*degrees: int) -> tuple[Floats, tuple[float, float, float]]:
            """Returns the messages of dense parameters, and of their gathers the seconds of an empty message and per
            byte, and the share of the bytes that a rank sends."""
            layout = layout_of(*degrees)
            beside = group(layout, "shard" if layout.dp_shard > 1 else "summed")
            byte, started = line(request.cluster, "all_gather", beside)
            return messages(layout, experts=False), (started, byte, 1 - 1 / beside.ranks)

        def layout_of(tp: int, shard: int, replicate: int, ep: int = 1) -> Layout:
            return Layout(tp=tp, dp_shard=shard, dp_replicate=replicate, ep=ep, hpz=base.hpz, sync=base.sync)

        degrees = self.outer.tolist()
        every, gathers = zip(*(dense(*each[:3]) for each in degrees), strict=True)
        experts = [
            messages(layout_of(*each), experts=True) if each[3] > 1 else one
            for each, one in zip(degrees, every, strict=True)
        ]
        # By purpose, dense parameters beside experts.
        both = np.stack([np.array(every), np.array(experts)], -1).reshape(len(degrees), -1)
        return np.hstack([both, np.array(gathers)])


@lru_cache(16_384)
def _half_passes(spec: StepSpec, kind: BlockKind, half: Half) -> list[tuple[float, ...]]:
    """Returns the passes of half a block, by recomputation. Where no layout fits, searches with parts of the state on
    the host ask for the same again."""
    return [time.passes for time in half_times(spec, kind, half, RECOMPUTE)]


def _of_sequences(block: BlockKind) -> tuple[int, ...]:
    """Returns the inner degrees on which the bytes of a block for one sequence depend."""
    return (TP, SP, CP, ULYSSES, EP, ETP) if block.routed else (TP, SP, CP, ULYSSES)


@lru_cache(1024)
def every_block(model: ModelConfig) -> tuple[tuple[BlockKind, int], ...]:
    """Returns the kinds of blocks of a model with their numbers, that of the last block first."""
    return tuple(Counter(reversed(block_kinds(model))).items())


@lru_cache(4096)
def _cut(model: ModelConfig, layout: Layout) -> Cut:
    if layout.pp == 1:
        return {RankContents(every_block(model), True, True, least=model.n_layers): (0, 1)}
    cut, kinds, shares = stages(model, layout), block_kinds(model), list[RankContents]()
    if is_file(layout.schedule):
        places = schedule_of(layout, 1).placements
    else:
        chunks = catalogue.chunks_of(layout.schedule, layout.pp_chunks)
        places = placements(catalogue.SCHEDULES[layout.schedule].placement, layout.pp, chunks)
    for rank in range(layout.pp):
        held = sorted({stage for each in places for stage, at in enumerate(each) if at == rank})
        blocks = Counter(kinds[layer] for stage in held for layer in cut[stage])
        last = next(kinds[cut[stage][-1]] for stage in reversed(held) if cut[stage])
        in_order = sorted(blocks.items(), key=lambda pair, last=last: (pair[0] != last, pair[0]))
        part = sum(each.count(rank) for each in places) / len(held) / len(places)
        least = min(len(cut[stage]) for stage in held)
        shares.append(RankContents(tuple(in_order), 0 in held, len(cut) - 1 in held, part, least))
    return {share: (shares.index(share), shares.count(share)) for share in dict.fromkeys(shares)}


@lru_cache(4096)
def line(cluster: Cluster, collective: Collective, among: RankGroup) -> tuple[float, float]:
    """Returns a linear lower bound on the seconds of a collective over its bytes: the slope if latencies are
    negligible, and the seconds of an empty message. It is exact except for an all-reduce."""
    small, large, larger = (
        seconds(cluster, collective, size, among) for size in (1.0, BANDWIDTH_BOUND_BYTES, 2 * BANDWIDTH_BOUND_BYTES)
    )
    slope = (larger - large) / BANDWIDTH_BOUND_BYTES
    return slope, small - slope


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Returns the different rows of some columns of small numbers, and by row the number of its own."""
    combined = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        combined = combined * (int(column.max(initial=0)) + 1) + column
    _, first, which = np.unique(combined, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], 1).astype(np.int64), which


def present(numbers: NDArray[Any]) -> NDArray[np.intp]:
    """Returns the small numbers that occur among some, in order."""
    return np.flatnonzero(np.bincount(numbers))


def alone(request: PlanRequest, layout: Layout, micro: int) -> StepSpec:
    """Returns the spec of a single micro-batch of a layout."""
    batch = Batch(micro, micro, 1, 1)
    return request.unchecked_spec(layout, batch)
