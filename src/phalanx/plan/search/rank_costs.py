"""The time per micro-batch of pipeline ranks with other layers, within the memory of a device.

Seconds are the cost model's of a block of each kind, of the embedding and of the head, added up. Bytes are a line:
state of every block and its activations times the micro-batches in flight, above what the exact model
(cost/memory/rank_memory.py) says of a known layout; `PipelineRanks.calibrated` moves the line to another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from phalanx.blocks.kinds import BlockKind, block_kinds
from phalanx.cost.held import LayerKind
from phalanx.cost.memory.block_bytes import BlockBytes
from phalanx.cost.memory.formulas import expert_ranks
from phalanx.cost.memory.in_flight import Flight
from phalanx.cost.memory.rank_memory import needed_bytes, step_memory
from phalanx.cost.memory.rank_parts import StepParts
from phalanx.cost.placed import Content, stages_of_case
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.rank_time import rank_time
from phalanx.partition.recompute import MODES, Mode, modes, written
from phalanx.partition.tiers import is_offloaded
from phalanx.plan.search.knapsack import EqualBlocks, Filling, fill

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

    def __init__(self, spec: StepSpec, allowed: Sequence[Mode] = MODES):
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
        self.limit = spec.cluster.accelerator.memory_gib * 2**30 or inf
        self.around = [0.0] * len(self.flights)
        """Bytes of each rank besides those of the line."""
        self._known: dict[tuple[int, tuple[Counts, ...]], Filling | None] = {}

    def _block(self, step: StepParts, kind: BlockKind) -> BlockCosts:
        layout, formulas = self.spec.layout, step.formulas
        kinds = [LayerKind(kind, mode) for mode in self.modes]
        parts = [BlockBytes(step, kind) for kind in kinds]
        held = parts[0].parameters
        shards = (
            (held.dense, held.trained_dense, layout.shard_ranks),
            (held.experts, held.trained_experts, expert_ranks(layout.shard_ranks, layout.ep)),
        )
        parameters, gradients, optimizer = formulas.state(shards, layout.zero, step.data_ranks)
        if formulas.defers(layout.zero, layout.accumulate):
            gradients = max(gradients, formulas.unsent(shards, self.spec.batch.accumulation))
        state = parameters + gradients + optimizer
        times = [rank_time(self._plain, Content(((kind, 1),), False, False)).total for kind in kinds]
        stays = 0 if is_offloaded(layout, "activations") else 1
        return BlockCosts(tuple(times), tuple(part.kept * stays for part in parts), state)

    def calibrated(self, spec: StepSpec) -> bool:
        """Takes the offset of the line from a step with known layers, and returns whether that step fits."""
        counts = self._kinds(spec)
        for rank, memory in enumerate(step_memory(spec)):
            flight = self.flights[rank]
            mine = [counts[stage] for stage in flight.held]
            line = sum(many * self.blocks[kind].state for stage in mine for (kind, _), many in stage.items())
            line += max(
                sum(
                    flying * many * self.blocks[kind].kept[mode]
                    for flying, stage in zip(moment, mine, strict=True)
                    for (kind, mode), many in stage.items()
                )
                for moment in flight.most
            )
            around = memory.needed - line
            # What was too much once stays so: else two layouts that do not fit could lead to each other.
            full = memory.needed > self.limit
            self.around[rank] = max(self.around[rank], around) if full else around
        self._known.clear()
        return needed_bytes(spec, self.limit) <= self.limit

    def _kinds(self, spec: StepSpec) -> list[Counter[tuple[int, int]]]:
        """Returns the blocks of each stage of a step, by the indices of their kind and mode."""
        every = modes(written(spec.layout), spec.model.n_layers)
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
            worst = max(flight.most, key=lambda moment: sum(n * size for n, size in zip(moment, kept, strict=True)))
            more = tuple(map(max, weights, worst))
            if more == weights or sum(n * size for n, size in zip(worst, kept, strict=True)) <= room:
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
