"""Refinements of the best layouts: other cuts and recomputation by layer, within the memory of a device, and second
copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from math import inf
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.config.layout import Layout
from phalanx.cost.block_memory import KeptBytes
from phalanx.cost.communication import group
from phalanx.cost.held import Content, LayerKind, parameter_counts, shards_of, stages_of_case
from phalanx.cost.in_flight import Flight
from phalanx.cost.prediction import step_parts
from phalanx.cost.rank_memory import StepParts, needed_bytes, step_memory
from phalanx.cost.rank_time import rank_time
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.partition import derived
from phalanx.partition.cut import Floats, Places, cut_by
from phalanx.plan.branch import Found, Keep, Search, same_passes
from phalanx.plan.plan import Candidate
from phalanx.plan.simplicity import EQUAL, is_scattered
from phalanx.plan.space import RECOMPUTE, PlanRequest, Rows
from phalanx.simulate.step import step_seconds

MOST = 4096
"""Most combinations of groups that are kept, of those on the Pareto front of bytes and seconds."""


class EqualBlocks(NamedTuple):
    """Equal blocks with their choices."""

    blocks: int
    bytes: tuple[float, ...]
    """Bytes per block, by choice."""
    seconds: tuple[float, ...]


class Filling(NamedTuple):
    """The fastest combination that fits."""

    seconds: float
    numbers: tuple[tuple[int, ...], ...]
    """Number of blocks of each group by choice."""


class _Frontier(NamedTuple):
    """The Pareto front of combinations, by rising bytes and falling seconds."""

    bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    rows: NDArray[np.intp]
    """The origin of each point: a row of the group's combinations, or the rows of two frontiers."""


def fill(groups: Sequence[EqualBlocks], room: float) -> Filling | None:
    """Returns the choices of every group's blocks that take the least seconds and at most `room` bytes; None if there
    are none."""
    if sum(group.blocks * min(group.bytes) for group in groups) > room:
        return None
    # Most often the fastest choices fit.
    fastest = [min(range(len(group.seconds)), key=lambda n, group=group: group.seconds[n]) for group in groups]
    if sum(group.blocks * group.bytes[n] for group, n in zip(groups, fastest, strict=True)) <= room:
        numbers = tuple(
            tuple(group.blocks * (n == best) for n in range(len(group.bytes)))
            for group, best in zip(groups, fastest, strict=True)
        )
        return Filling(sum(group.blocks * group.seconds[n] for group, n in zip(groups, fastest, strict=True)), numbers)
    frontiers = [_frontier(group) for group in groups]
    steps = list[_Frontier]()
    whole = frontiers[0]
    for other in frontiers[1:]:
        whole = _together(whole, other)
        steps.append(whole)
    place = int(np.searchsorted(whole.bytes, room, side="right")) - 1
    if place < 0:
        return None
    seconds = float(whole.seconds[place])
    rows = list[int]()
    for step in reversed(steps):
        place, last = (int(row) for row in step.rows[place])
        rows.append(last)
    rows.append(place)
    chosen = zip(groups, frontiers, reversed(rows), strict=True)
    numbers = (_ways(group)[int(frontier.rows[row])] for group, frontier, row in chosen)
    return Filling(seconds, tuple(tuple(map(int, number)) for number in numbers))


@lru_cache(4096)
def _choices(count: int, things: int) -> NDArray[np.intp]:
    """Returns every way in which `count` blocks make their choices, one per row."""
    if things == 1:
        return np.array([[count]])
    return np.concatenate(
        [np.insert(_choices(count - n, things - 1), 0, n, axis=1) for n in range(count + 1)]  # n make the first choice
    )


DISTINCT = 4
"""Most different choices of equal blocks that are combined: 341,000 ways for 126 blocks."""


@lru_cache(64)
def _ways(group: EqualBlocks) -> NDArray[np.intp]:
    """Returns ways in which a group's blocks make their choices, one per row: every way of the best choices. A choice
    is left out if another takes neither more bytes nor more seconds, and of more than DISTINCT those that gain least
    over a mixture of the next leaner and the next faster one."""
    costs = sorted(zip(group.bytes, group.seconds, range(len(group.bytes)), strict=True))
    best = [cost for n, cost in enumerate(costs) if all(cost[1] < other[1] for other in costs[:n])]

    def gain(n: int) -> float:
        (lean, slow, _), (size, seconds, _), (large, fast, _) = best[n - 1 : n + 2]
        return slow + (fast - slow) * (size - lean) / (large - lean) - seconds

    while len(best) > DISTINCT:
        del best[min(range(1, len(best) - 1), key=gain)]
    few = _choices(group.blocks, len(best))
    ways = np.zeros((len(few), len(group.bytes)), few.dtype)
    ways[:, [number for _, _, number in best]] = few
    return ways


@lru_cache(4096)
def _frontier(group: EqualBlocks) -> _Frontier:
    choices = _ways(group).astype(np.float64)
    return _unbeaten(choices @ np.array(group.bytes), choices @ np.array(group.seconds))


def _together(one: _Frontier, other: _Frontier) -> _Frontier:
    """Returns the frontier of every combination of two; its rows are pairs."""
    found = _unbeaten(
        np.add.outer(one.bytes, other.bytes).ravel(), np.add.outer(one.seconds, other.seconds).ravel(), MOST
    )
    return found._replace(rows=np.stack(np.divmod(found.rows, len(other.bytes)), 1))


def _unbeaten(sizes: NDArray[np.float64], seconds: NDArray[np.float64], most: float = inf) -> _Frontier:
    order = np.lexsort((seconds, sizes))
    sizes, seconds = sizes[order], seconds[order]
    before = np.concatenate([[inf], np.minimum.accumulate(seconds)[:-1]])
    kept = np.flatnonzero(seconds < before)
    if len(kept) > most:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, int(most)).astype(int))]
    return _Frontier(sizes[kept], seconds[kept], order[kept])


Counts = tuple[int, ...]
"""Numbers of blocks of each of the model's kinds in a stage."""


@dataclass(frozen=True)
class BlockCosts:
    """Costs of one block of a kind on a rank."""

    seconds: tuple[float, ...]
    """Seconds per micro-batch, by recomputation."""
    kept: tuple[float, ...]
    """Bytes per micro-batch in flight, by recomputation."""
    state: float
    """Bytes of parameters, gradients and optimizer state."""


class PipelineRanks:
    """The pipeline ranks of a step with any layers; each block has one of the allowed recomputation modes."""

    def __init__(self, spec: StepSpec, allowed: Sequence[derived.Mode] = derived.MODES, limit: float = 0.0):
        self.spec, self.modes = spec, tuple(allowed)
        model = spec.model
        self.kinds = tuple(dict.fromkeys(block_kinds(model)))
        """The kinds of blocks of the model."""
        self.of_layer = [self.kinds.index(kind) for kind in block_kinds(model)]
        """Index of the kind of each layer."""
        self.before = [
            list(accumulate((one == number for one in self.of_layer), initial=0)) for number in range(len(self.kinds))
        ]
        """Number of blocks before each layer, by kind and layer."""
        # With a cut, the cost model takes of a kind of block what it recomputes.
        cut = replace(spec.layout, recompute="none", recompute_cut=f"{model.n_layers}*none")
        self._plain = replace(spec, layout=cut)
        step = StepParts(self._plain)
        self.flights: tuple[Flight, ...] = step.flights
        self.stages = self.flights[0].stages
        self.blocks = [self._block(step, kind) for kind in self.kinds]
        self.embedding = rank_time(self._plain, Content((), True, False)).total
        self.head = rank_time(self._plain, Content((), False, True)).total
        self.limit = limit or spec.cluster.accelerator.memory_gib * 2**30 or inf
        self.around = [0.0] * len(self.flights)
        """Bytes of each rank besides those of the line."""
        self._known: dict[tuple[int, tuple[Counts, ...]], Filling | None] = {}

    def _block(self, step: StepParts, kind: BlockKind) -> BlockCosts:
        layout = self.spec.layout
        kinds = [LayerKind(kind, mode) for mode in self.modes]
        parts = [KeptBytes(step, kind) for kind in kinds]
        shards = shards_of(parameter_counts(self.spec.model, layout, [(kind, 1)], False, False), layout)
        state = step.state(shards)
        times = [rank_time(self._plain, Content(((kind, 1),), False, False)).total for kind in kinds]
        stays = 0 if derived.is_offloaded(layout, "activations") else 1
        return BlockCosts(tuple(times), tuple(part.kept * stays for part in parts), state.held + state.early(True))

    def calibrated(self, spec: StepSpec) -> bool:
        """Takes the offset of the line from a step with known layers, and returns whether that step fits."""
        counts = self._kinds(spec)
        for rank, (flight, memory) in enumerate(zip(self.flights, step_memory(spec), strict=True)):
            mine = [[(many, self.blocks[kind], mode) for (kind, mode), many in counts[n].items()] for n in flight.held]
            kept = [sum(many * block.kept[mode] for many, block, mode in stage) for stage in mine]
            state = sum(many * block.state for stage in mine for many, block, _ in stage)
            around = memory.needed - state - max(sum(map(mul, moment, kept)) for moment in flight.most)
            # What was too much once stays so: else two layouts that do not fit could lead to each other.
            full = memory.needed > self.limit
            self.around[rank] = max(self.around[rank], around) if full else around
        self._known.clear()
        return needed_bytes(spec, self.limit) <= self.limit

    def _kinds(self, spec: StepSpec) -> list[Counter[tuple[int, int]]]:
        """Returns the blocks of each stage of a step, by the indices of their kind and mode."""
        every = derived.modes(derived.written(spec.layout), spec.model.n_layers)
        return [
            Counter((self.of_layer[layer], self.modes.index(every[layer])) for layer in stage)
            for stage in stages_of_case(spec, self.stages)
        ]

    def times(self, spec: StepSpec) -> list[float]:
        """Returns the seconds per micro-batch on every rank of a step."""
        counts = self._kinds(spec)
        found = []
        for flight in self.flights:
            blocks = sum(
                many * self.blocks[kind].seconds[mode]
                for stage in flight.held
                for (kind, mode), many in counts[stage].items()
            )
            found.append((blocks + self._ends(flight)) * flight.share)
        return found

    def _ends(self, flight: Flight) -> float:
        """Returns the seconds of embedding and head, if a rank has them."""
        return self.embedding * (0 in flight.held) + self.head * (self.stages - 1 in flight.held)

    def filling(self, rank: int, counts: tuple[Counts, ...]) -> Filling | None:
        """Returns the recomputation of a rank's blocks, given the counts of each of its stages, or None if they do not
        fit. The groups are the kinds of blocks of each stage. Seconds per micro-batch include embedding and head; a
        rank that only a share of the micro-batches passes counts with that share."""
        key = rank, counts
        if key not in self._known:
            self._known[key] = self._filling(rank, counts)
        return self._known[key]

    def _filling(self, rank: int, counts: tuple[Counts, ...]) -> Filling | None:
        flight, room = self.flights[rank], self.limit - self.around[rank]
        kinds = [
            (place, block, many)
            for place, stage in enumerate(counts)
            for block, many in zip(self.blocks, stage, strict=True)
            if many
        ]
        room -= sum(many * block.state for _, block, many in kinds)
        weights = max(flight.most, key=sum)
        while True:
            groups = [
                EqualBlocks(many, tuple(weights[place] * size for size in block.kept), block.seconds)
                for place, block, many in kinds
            ]
            found = fill(groups, room)
            if found is None:
                return None
            kept = [0.0] * len(counts)
            for (place, block, _), numbers in zip(kinds, found.numbers, strict=True):
                kept[place] += sum(n * size for n, size in zip(numbers, block.kept, strict=True))
            # At another moment there can be more in flight of just those stages that keep much.
            worst = max(flight.most, key=lambda moment: sum(map(mul, moment, kept)))
            more = tuple(map(max, weights, worst))
            if more == weights or sum(map(mul, worst, kept)) <= room:
                return found._replace(seconds=(found.seconds + self._ends(flight)) * flight.share)
            weights = more

    def seconds(self, rank: int, counts: tuple[Counts, ...]) -> float:
        """Returns the least seconds per micro-batch, or infinity if the blocks do not fit."""
        found = self.filling(rank, counts)
        return inf if found is None else found.seconds

    def counts(self, stages: Sequence[range]) -> list[Counts]:
        """Returns the number of blocks of each kind in each stage."""
        return [tuple(before[stage.stop] - before[stage.start] for before in self.before) for stage in stages]

    def held(self, rank: int, counts: Sequence[Counts]) -> tuple[Counts, ...]:
        """Returns the counts of a rank's stages."""
        return tuple(counts[stage] for stage in self.flights[rank].held)


LARGEST = 2
"""Largest stage as a multiple of the mean number of layers, to which as many are added: larger ones are never best."""
MOVES = 200
"""Most layers that are moved."""
BETTER = 1 - 1e-9
"""Factor that counts as an improvement: sums of floats depend on their order."""


def stages_of_ranks(ranks: PipelineRanks, start: Sequence[range]) -> tuple[range, ...]:
    """Returns the layers of each stage, starting from `start` if layers are moved; empty if nothing fits."""
    if all(len(flight.held) == 1 for flight in ranks.flights):
        return _best(ranks)
    return _moved(ranks, start)


def _best(ranks: PipelineRanks) -> tuple[range, ...]:
    layers, stages = len(ranks.of_layer), ranks.stages
    before = np.array(ranks.before)
    of_stage = {flight.held[0]: rank for rank, flight in enumerate(ranks.flights)}
    most = LARGEST * (-(-layers // stages) + 1)

    def cost(stage: int, begins: Places, ends: Places) -> Floats:
        begins, ends = np.broadcast_arrays(begins, ends)
        counts = (before[:, ends] - before[:, begins]).reshape(len(before), -1)
        end = layers - ranks.spec.model.together
        legal = begins <= end if stage == stages - 1 else ends <= end
        known, which = np.unique(counts, axis=1, return_inverse=True)
        found = [
            ranks.seconds(of_stage[stage], (tuple(map(int, one)),)) if 0 < one.sum() <= most and one.min() >= 0 else inf
            for one in known.T
        ]
        return np.where(legal, np.array(found)[which].reshape(begins.shape), inf)

    return cut_by(cost, stages, layers)


def _moved(ranks: PipelineRanks, start: Sequence[range]) -> tuple[range, ...]:
    sizes = [len(stage) for stage in start]
    counts = ranks.counts(derived.ranges(sizes))
    seconds = [ranks.seconds(rank, ranks.held(rank, counts)) for rank in range(len(ranks.flights))]
    if max(seconds) == inf:
        return ()
    for _ in range(MOVES):
        slowest, squares = max(seconds), sum(one * one for one in seconds)
        best = slowest, squares * BETTER
        moved: tuple[list[int], list[float]] | None = None
        for other in _moves(ranks, sizes, seconds.index(slowest)):
            found = _seconds(ranks, other, counts, seconds)
            value = max(found), sum(one * one for one in found)
            if value[0] <= best[0] and value < best:
                best, moved = value, (other, found)
        if moved is None:
            break
        sizes, seconds = moved
        counts = ranks.counts(derived.ranges(sizes))
    return derived.ranges(sizes)


def _moves(ranks: PipelineRanks, sizes: Sequence[int], slowest: int) -> Iterator[list[int]]:
    """Yields the sizes with one layer of one of a rank's stages given to another stage; stages between them shift."""
    for giver in ranks.flights[slowest].held:
        if sizes[giver] == (ranks.spec.model.together if giver == len(sizes) - 1 else 1):
            continue
        for taker in range(len(sizes)):
            if taker != giver:
                other = list(sizes)
                other[giver] -= 1
                other[taker] += 1
                yield other


def _seconds(
    ranks: PipelineRanks, sizes: Sequence[int], counts: Sequence[Counts], seconds: Sequence[float]
) -> list[float]:
    """Returns the seconds of every rank with new sizes; `counts` and `seconds` are those before."""
    now = ranks.counts(derived.ranges(sizes))
    changed = {stage for stage, (one, other) in enumerate(zip(now, counts, strict=True)) if one != other}
    return [
        ranks.seconds(rank, ranks.held(rank, now)) if changed.intersection(flight.held) else before
        for rank, (flight, before) in enumerate(zip(ranks.flights, seconds, strict=True))
    ]


PAIRS = 512
"""Pairs of a mesh and a micro-batch that are examined: those with the lowest bounds."""
PREDICTED = 24
"""Layouts that are predicted: those with the lowest bounds."""
NEAR = 1.1
"""Factor on the best time up to which layouts are returned: the recomputation they need is only an estimate."""


def mixtures(search: Search, found: Found, seconds: float, keep: Keep | None = None) -> list[StepSpec]:
    """Returns layouts that fit with full recomputation, in the order of their estimated time with only as much as they
    need to fit; `seconds` are the best layout's. The estimate interpolates between no and full recomputation by the
    device's memory: with bounds, then with predictions."""
    estimates = list[tuple[float, int, StepSpec]]()
    for layout in islice(_by_bounds(search, found, seconds, keep), PREDICTED):
        try:
            small, large = (search.request.spec(replace(layout, recompute=mode)) for mode in ("full", "none"))
        except (JobError, ValueError):
            continue
        least, most = needed_bytes(small), needed_bytes(large)
        if least > search.limit:
            continue
        fast, slow = step_parts(large).total, step_parts(small).total
        about = fast + (slow - fast) * min(1.0, max(0.0, most - search.limit) / max(most - least, 1))
        if about < NEAR * seconds:
            estimates.append((about, len(estimates), small))
    return [spec for _, _, spec in sorted(estimates)]


def _by_bounds(search: Search, found: Found, seconds: float, keep: Keep | None) -> Iterator[Layout]:
    fixed = search.request.fixed
    if "recompute" in fixed or fixed.get("recompute_cut"):
        return
    pairs = np.flatnonzero((search.pair_bytes <= search.limit) & (search.pair_seconds < seconds))
    pairs = pairs[np.argsort(search.pair_seconds[pairs], kind="stable")][:PAIRS]
    rows = search.space.rows(pairs)
    rows = rows.select(rows.recompute == RECOMPUTE.index("full"))
    rows = rows.select(keep(rows)) if keep else rows
    if not len(rows):
        return
    keeping = Rows(rows.pair, rows.scheduled, rows.state, np.zeros_like(rows.recompute))
    slow, small = search.bounds.rows(rows)
    fast, large = search.bounds.rows(keeping)
    share = np.clip((large - search.limit) / np.maximum(large - small, 1.0), 0.0, 1.0)
    about = fast + share * (slow - fast)
    order = np.flatnonzero((small <= search.limit) & (about < seconds))
    fitting = {spec.layout for spec, _ in found.predicted}
    seen = set[Layout]()
    for number in order[np.argsort(about[order], kind="stable")]:
        layout = search.space.layout(rows, int(number))
        passes = same_passes(layout)
        if passes in seen or replace(layout, recompute="none") in fitting:
            continue
        seen.add(passes)
        yield layout


ROUNDS = 6
"""Rounds in which the linear memory model (PipelineRanks) is recalibrated."""
WORTH = 1.002
"""Least speedup for which a layout is refined: below it, the simpler one is as good."""
MARGIN = 1.01
"""Factor on the best time up to which refined layouts are simulated."""
TRIED, MIXED = 3, 2
"""Layouts that are refined: of the best, and of those that would fit with some recomputation."""


def refined(request: PlanRequest, candidate: Candidate) -> Candidate:
    """Returns the candidate with the best cut and the least recomputation that fit, if that is faster."""
    found = [(step_seconds(spec), spec) for spec in _refinements(request, candidate.spec)]
    if not found:
        return candidate
    seconds, spec = min(found, key=lambda one: one[0])
    better = seconds * WORTH < candidate.seconds or needed_bytes(candidate.spec) > request.limit
    return Candidate(spec, seconds) if better else candidate


def refinements(
    search: Search, found: Found, candidates: Sequence[Candidate], keep: Keep | None = None
) -> list[Candidate]:
    """Returns the refinements of the best layouts of a search, and of those that would fit and be fast with
    recomputation of some layers, each faster than all before. `candidates` are ranked, or, if none fits,
    leanest first. `keep` selects the rows that may be mixed."""
    if not candidates:
        return []
    fits = needed_bytes(candidates[0].spec) <= search.limit
    best = min(candidate.seconds for candidate in candidates) if fits else inf
    least = {False: best, True: best}
    """Seconds of the fastest without a long list of layers' recomputation, and of all."""
    passes = dict[Layout, StepSpec]()
    for candidate in candidates:
        passes.setdefault(same_passes(candidate.layout), candidate.spec)
    specs = list(islice(passes.values(), TRIED))
    if best < inf:
        specs += islice(mixtures(search, found, best, keep), MIXED)
    better = list[Candidate]()
    for other in (other for spec in specs for other in _refinements(search.request, spec)):
        scattered = is_scattered(other.layout)
        if step_parts(other).total > MARGIN * least[scattered]:
            continue
        seconds = step_seconds(other)
        if seconds * WORTH < least[scattered]:
            least = {False: least[False] if scattered else seconds, True: min(least[True], seconds)}
            better.append(Candidate(other, seconds))
    return better


def _refinements(request: PlanRequest, spec: StepSpec) -> Iterator[StepSpec]:
    """Yields the refinement of a spec; where ranks with several stages got uneven ones, for which other ranks may have
    to wait, that with the stages as they are; and where it is a long list of layers' recomputation, the refinement with
    its two commonest modes alone, of which one stage is two runs of layers."""
    other = refinement(request, spec)
    if other is None:
        return
    yield other
    if spec.layout.pp > 1 and other.layout.pp_cut != spec.layout.pp_cut and len(other.stages) > spec.layout.pp:
        same = refinement(request, spec, cuts=False)
        if same is not None:
            yield same
    if not is_scattered(other.layout) or spec.layout.pp > 1:
        return
    every = Counter[derived.Mode](derived.modes(other.layout.recompute_cut, spec.model.n_layers))
    two: list[derived.Mode] = sorted((mode for mode, _ in every.most_common(2)), key=derived.MODES.index)
    leaner = request.spec(replace(spec.layout, recompute=two[1], recompute_cut=""))
    shorter = refinement(request, leaner, two)
    if shorter is not None:
        yield shorter


def refinement(
    request: PlanRequest, spec: StepSpec, allowed: Sequence[derived.Mode] = (), *, cuts: bool = True
) -> StepSpec | None:
    """Returns the spec of a layout that fits, with another cut, another recomputation of its layers (of `allowed`, by
    default all modes) or both, whose slowest rank is faster; None if there is none. Without `cuts` the stages stay."""
    layout = spec.layout
    fixed = request.fixed
    cuts = cuts and layout.pp > 1 and not fixed.get("pp_cut")
    mixes = not fixed.get("recompute_cut") and "recompute" not in fixed
    if not (cuts or mixes):
        return None
    every = (
        tuple(allowed or derived.legal_modes(spec.layout.tiles))
        if mixes
        else tuple(dict.fromkeys(derived.modes(derived.written(layout), spec.model.n_layers)))
    )
    ranks = PipelineRanks(spec, every, request.limit)
    start = stages_of_case(spec, ranks.stages)
    fits = ranks.calibrated(spec)
    if fits and _score(ranks, spec) <= (1 + request.band.alike) * _even_score(ranks, spec):
        return None  # no cut and no recomputation can gain more than what counts as equal
    # Of ranks with several stages, layers are moved one by one: a long list of sizes that nobody would write.
    if fits and request.band != EQUAL and any(len(flight.held) > 1 for flight in ranks.flights):
        cuts = False
        if not mixes:
            return None
    best, found = (_score(ranks, spec) / WORTH if fits else inf), None
    seen = {layout}
    for _ in range(ROUNDS):
        stages = stages_of_ranks(ranks, start) if cuts else start
        other = _written(ranks, layout, stages, start, mixes) if stages else layout
        if other in seen:
            break
        seen.add(other)
        try:
            tried = request.spec(other)
        except (JobError, ValueError):
            break
        score = _score(ranks, tried)
        if score >= best:
            break
        if ranks.calibrated(tried):
            best, found = score, tried
    return found


def _score(ranks: PipelineRanks, spec: StepSpec) -> float:
    """Returns the approximate seconds of a step: all micro-batches of the slowest rank, one of every other rank."""
    times = ranks.times(spec)
    return (spec.batch.accumulation - 1) * max(times) + sum(times)


def _even_score(ranks: PipelineRanks, spec: StepSpec) -> float:
    """Returns the score if nothing were recomputed and all ranks took equally long."""
    blocks = sum(min(ranks.blocks[kind].seconds) for kind in ranks.of_layer)
    return (blocks + ranks.embedding + ranks.head) * (1 + (spec.batch.accumulation - 1) / len(ranks.flights))


def _written(
    ranks: PipelineRanks, layout: Layout, stages: Sequence[range], start: Sequence[range], mixes: bool
) -> Layout:
    """Returns the layout with these stages, and with the recomputation that fits each rank's blocks."""
    if tuple(stages) != tuple(start):
        layout = replace(layout, pp_cut="+".join(str(len(stage)) for stage in stages))
    if not mixes:
        return layout
    counts = ranks.counts(stages)
    every: list[derived.Mode] = ["full"] * len(ranks.of_layer)
    for rank, flight in enumerate(ranks.flights):
        filling = ranks.filling(rank, ranks.held(rank, counts))
        if filling is None:
            return layout
        numbers = iter(filling.numbers)
        for stage in flight.held:
            for kind, many in enumerate(counts[stage]):
                if many:
                    layers = [layer for layer in stages[stage] if ranks.of_layer[layer] == kind]
                    _assign(every, layers, dict(zip(ranks.modes, next(numbers), strict=True)))
    return derived.with_modes(layout, every)


def _assign(every: list[derived.Mode], layers: Sequence[int], numbers: dict[derived.Mode, int]) -> None:
    """Sets the modes of some layers. Those that recompute come first: the backward pass begins with the last, which
    free their activations before others need room to recompute."""
    place = 0
    for mode in ("full", "mlp", "selective", "products", "none"):
        for layer in layers[place : place + numbers.get(mode, 0)]:
            every[layer] = mode
        place += numbers.get(mode, 0)


COPIES_TRIED = 8
"""Layouts that are tried at most."""


def with_second_copies(request: PlanRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best of the candidates, which are sorted, with a second copy of the parameters: those that fit and
    are faster than without."""
    if "hpz" in request.fixed:
        return []
    copied = list[StepSpec]()
    crossing = [candidate for candidate in candidates if crosses_nodes(candidate.spec)][:COPIES_TRIED]
    for candidate in crossing:
        # The most ranks of a node that can keep a copy together: fewer would need more memory.
        near = group(candidate.layout, "shard").near(candidate.spec.cluster.joined)
        most = max(ranks for ranks in derived.legal_hpz(candidate.layout) if ranks <= near)
        copied.append(replace(candidate.spec, layout=replace(candidate.layout, hpz=most)))
    return _faster(request, crossing, copied)


def with_fp8_gathers(request: PlanRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best of the candidates, which are sorted, with gathers in fp8: those that fit and are faster."""
    if "quantise_weights" in request.fixed or not request.framework.offers_fp8_gathers:
        return []
    gathering = [
        candidate for candidate in candidates if candidate.layout.zero == 3 and candidate.layout.shard_ranks > 1
    ][:COPIES_TRIED]
    layouts = (replace(candidate.layout, quantise_weights="fp8") for candidate in gathering)
    return _faster(
        request, gathering, [replace(one.spec, layout=to) for one, to in zip(gathering, layouts, strict=True)]
    )


def _faster(request: PlanRequest, candidates: Sequence[Candidate], changed: Sequence[StepSpec]) -> list[Candidate]:
    """Returns those of the `changed` specs of candidates that fit and are faster by as much as a setting is worth."""
    limit, better = request.limit, list[Candidate]()
    for candidate, spec in zip(candidates, changed, strict=True):
        if needed_bytes(spec, limit) > limit or step_parts(spec).total * WORTH > step_parts(candidate.spec).total:
            continue
        seconds = step_seconds(spec)
        if seconds * WORTH < candidate.seconds:
            better.append(Candidate(spec, seconds))
    return better


def crosses_nodes(spec: StepSpec) -> bool:
    """Returns whether ZeRO-3 gathers parameters twice a step from ranks on several nodes."""
    layout, ranks = spec.layout, group(spec.layout, "shard")
    if derived.is_offloaded(layout, "parameters"):
        return False  # the copy would be on the device
    return layout.zero == 3 and layout.reshard and ranks.ranks > ranks.near(spec.cluster.joined)
