"""The memory of one rank of a pipeline at each moment of a step, part by part, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from operator import mul

from phalanx.blocks.kinds import BlockKind
from phalanx.cost.held import (
    GatheredParameters,
    LayerKind,
    gathered_outside,
    kinds_of,
    outside,
    table,
    trained_outside,
)
from phalanx.cost.matrices import matrix_work
from phalanx.cost.memory.block_bytes import BlockBytes, BlockRun, StepSizes
from phalanx.cost.memory.formulas import MemoryFormulas, expert_ranks
from phalanx.cost.memory.in_flight import Flight
from phalanx.cost.placed import placed
from phalanx.cost.spec import StepSpec
from phalanx.optimizers.catalogue import OptimizerCosts, optimizer_costs, outer_bytes
from phalanx.partition.pipeline import flushes
from phalanx.partition.recompute import written
from phalanx.partition.second_copy import is_copied, near_ranks
from phalanx.partition.tiers import gathers_parameters, is_offloaded, offloaded_layers, tier_of
from phalanx.partition.tiles import head_tiles
from phalanx.partition.wire import wire_width
from phalanx.units import MIB

TILE_LOSS_TENSORS = 1, 1
"""Tensors as large as a tile's logits, in fp32 and in the width of the computation: its scores become probabilities and
their gradient in place."""


class StepParts(StepSizes):
    """Sizes that all ranks of a step share, with the formulas of its state and its kinds of blocks."""

    def __init__(self, spec: StepSpec):
        super().__init__(spec)
        layout = spec.layout
        self.cut, self.flights = placed(spec)

        def costs(stored: int) -> OptimizerCosts:
            inner = optimizer_costs(spec.optimizer, spec.model, stored)
            return replace(inner, state=inner.state + outer_bytes(layout, stored))

        self.formulas = MemoryFormulas(
            self.memory_profile,
            spec.width,
            costs,
            tier_of(layout, "optimizer"),
            tier_of(layout, "parameters"),
        )
        self.data_ranks = layout.data_ranks * layout.cp
        """Ranks over which gradients are reduced."""
        self.recomputes = written(layout)
        every = kinds_of(spec.model, self.recomputes, range(spec.model.n_layers))
        self.kinds = {kind: BlockBytes(self, kind) for kind in {kind for kind, _ in every}}

    def kinds_of(self, stage: int) -> tuple[tuple[LayerKind, int], ...]:
        """Returns the kinds of blocks of a stage, with the number of each."""
        return kinds_of(self.spec.model, self.recomputes, self.cut[stage])

    def context(self) -> int:
        """Returns the bytes outside the allocator."""
        layout = self.spec.layout
        return self.formulas.context(layout.pp, self.data_ranks, layout.tp, layout.cp, layout.ep)


class RankParts:
    """Memory of one rank of a pipeline, part by part."""

    def __init__(self, step: StepParts, flight: Flight):
        self.step, self.flight = step, flight
        self.model, self.layout = step.spec.model, step.spec.layout
        self.memory_profile, self.width, self.formulas = step.memory_profile, step.spec.width, step.formulas
        self.blocks = [step.kinds_of(stage) for stage in flight.held]
        # The backward pass begins with the last.
        self.present = [
            step.kinds[kind] for kind in dict.fromkeys(kind for held in self.blocks for kind, _ in held[::-1])
        ]
        self.runs = [self._runs(held, stage) for held, stage in zip(self.blocks, flight.held, strict=True)]
        self.count = sum(many for held in self.blocks for _, many in held)
        self.first, self.last = 0 in flight.held, flight.stages - 1 in flight.held
        self.outside = outside(self.model, self.layout.tp, self.first, self.last)
        dense, experts = float(self.outside), 0.0
        trained, trained_experts = float(trained_outside(self.model, self.layout.tp, self.first, self.last)), 0.0
        for kind, many in (pair for held in self.blocks for pair in held):
            parameters = step.kinds[kind].parameters
            dense, experts = dense + many * parameters.dense, experts + many * parameters.experts
            trained += many * parameters.trained_dense
            trained_experts += many * parameters.trained_experts
        ranks = self.layout.shard_ranks
        self.shards = (dense, trained, ranks), (experts, trained_experts, expert_ranks(ranks, self.layout.ep))
        """Parameters of the rank's stages, those that are trained, and over how many ranks their state is sharded:
        dense ones, and experts."""

    def state(self) -> tuple[float, float, float]:
        """Returns the bytes of parameters, gradients and optimizer state at the start of the optimizer step."""
        layout = self.layout
        return self.formulas.state(self.shards, layout.zero, self.step.data_ranks, flushes=flushes(layout))

    def unsent(self) -> float:
        """Returns the bytes of unsharded gradients that wait for the last micro-batch before ZeRO-2 or 3 sends them."""
        if not self.formulas.defers(self.layout.zero, self.layout.accumulate):
            return 0
        return self.formulas.unsent(self.shards, self.step.spec.batch.accumulation)

    def bucket(self) -> float:
        """Returns the bytes of the first bucket; without any, gradients arrive one by one as activations are freed."""
        layout = self.layout
        if self.step.data_ranks == 1 or gathers_parameters(layout):
            return 0
        whole = sum(trained for _, trained, _ in self.shards) * self.formulas.gradient
        # On their way to the host one bucket is summed while the next is filled.
        return min(whole, (2 if self.formulas.offloads else 1) * layout.bucket_mb * MIB)

    def stepping(self, gradients: float) -> float:
        """Returns the bytes of gradients on the device when the optimizer begins."""
        return self.formulas.stepping(gradients, self.layout.zero, gathers_parameters(self.layout))

    def beside(self) -> tuple[float, float]:
        """Returns the bytes of state and activations in host memory, and of state on disk."""
        host, disk = self.formulas.beside(self.shards)
        return host + self.activations_beside(), disk

    def copied(self) -> float:
        """Returns the bytes of the gradients that the optimizer copies to its own precision, and of its temporary
        tensors."""
        return self.formulas.copied(self.shards, self.step.data_ranks) + self._whole_matrices()

    def _whole_matrices(self) -> int:
        """Returns the bytes of temporary tensors while the optimizer computes with whole matrices."""
        counts = Counter[BlockKind]()
        for kind, many in (pair for held in self.blocks for pair in held):
            counts[kind.block] += many
        work = matrix_work(self.step.spec, tuple(counts.items()), (self.first, self.last))
        return max((each.most_elements for each in work), default=0) * max(4, self.width)

    def _runs(self, held: Sequence[tuple[LayerKind, int]], stage: int) -> list[BlockRun]:
        """Returns the blocks of a stage as runs, those first whose activations leave the device."""
        leaving = len(offloaded_layers(self.layout, self.step.cut[stage]))
        found = list[BlockRun]()
        for kind, many in held:
            away = min(many, leaving)
            leaving -= away
            parts = (away, True), (many - away, False)
            found += [BlockRun(self.step.kinds[kind], n, kind.recompute, leaves) for n, leaves in parts if n]
        return found

    def kept(self) -> tuple[float, float]:
        """Returns the most bytes that blocks keep on the device for all micro-batches in flight, and the number of
        these."""
        bytes_of = {counts: self._kept_of(counts) for counts in self.flight.most}
        most = max(bytes_of, key=bytes_of.__getitem__)
        return self._deferred if self.flight.deferring else bytes_of[most], sum(most) / len(most)

    def kept_later(self) -> float:
        """Returns the same bytes when all stages have gradients of an earlier micro-batch."""
        if self.flight.deferring:
            return self._deferred
        return max(self._kept_of(counts) for counts in self.flight.later)

    def _kept_of(self, counts: Sequence[float]) -> float:
        """Returns the bytes that blocks keep for so many micro-batches in flight per stage."""
        found = sum(map(mul, counts, self._kept))
        if self.step.slices > 1:
            runs = [[(run.many, run.block) for run in held if not run.leaves] for held in self.runs]
            found += sum(map(self._by_slice, counts, runs))
        return found

    def _by_slice(self, count: float, blocks: Sequence[tuple[int, BlockBytes]]) -> float:
        """Returns how many bytes more blocks keep than of average slices. Of a micro-batch that is not whole the first
        slices are there: forward passes add the next one, backward passes take the last. So they are of the one that
        goes back, with gradients from its later slices, of whole ones, and of the newest."""
        slices, others = self.step.slices, self.step.spec.batch.accumulation - 1
        there, most = round(count * slices), 0.0
        for back in range(max(1, there - others * slices), min(there, slices) + 1):
            whole, newest = divmod(there - back, slices)
            more = sum(
                many * (block.kept_of(back) + (back < slices) * block.seen_gradients(back) + block.kept_of(newest))
                for many, block in blocks
            )
            average = sum(many * block.kept for many, block in blocks)
            more -= (count - whole) * average
            most = more if back == max(1, there - others * slices) else max(most, more)
        return most

    @cached_property
    def _deferred(self) -> float:
        """The most bytes of all micro-batches in flight where some wait for their weight gradients alone."""
        waiting = [sum(run.many * run.block.deferred for run in runs) for runs in self.runs]
        if self.last:
            waiting[self.flight.held.index(self.flight.stages - 1)] += self._deferred_head()
        return max(sum(map(mul, counts, (*self._kept, *waiting))) for counts in self.flight.joined)

    def _deferred_head(self) -> float:
        """Returns the bytes of a micro-batch's input of the head and gradient of the logits, unless these come in
        chunks or the head is frozen."""
        step, layout = self.step, self.layout
        if self.logits_of or head_tiles(self.model, layout) > 1 or self.model.lora.rank:
            return 0.0
        return step.tokens * (table(self.model, layout.tp) // self.model.d_model + self.model.d_model) * self.width

    @cached_property
    def _kept(self) -> list[float]:
        """The bytes that each stage keeps on the device per micro-batch in flight."""
        sizes = [sum(run.many * run.block.kept for run in runs if not run.leaves) for runs in self.runs]
        if self.memory_profile.keeps_boundaries and self.layout.pp > 1:
            last, message = self.flight.stages - 1, self.step.stream / self.step.share
            ends = [(stage > 0) + (stage < last) for stage in self.flight.held]
            sizes = [size + many * message for size, many in zip(sizes, ends, strict=True)]
        return sizes

    def activations_beside(self) -> float:
        """Returns the most bytes of activations in host memory."""
        peaks = self.flight.unread or self.flight.most
        return max(sum(map(mul, peak, self._moved)) for peak in peaks)

    @cached_property
    def _moved(self) -> list[float]:
        """Bytes of a micro-batch's activations, by stage, that leave the device."""
        return [sum(run.many * run.block.kept for run in runs if run.leaves) for runs in self.runs]

    def backward(self, gradients: bool) -> tuple[float, float]:
        """Returns the most bytes that the backward pass of a block needs besides what all blocks keep, less what later
        blocks have released: recomputed tensors and gradients of activations; and the bytes of gathered inputs and of
        messages in transit. `gradients`: those of all weights are counted already."""
        step, layout = self.step, self.layout
        # In place of an input that is gathered again, a parallel block has the gradient of the feed-forward layer's
        # input, of all tokens, while it computes that of attention's.
        again = layout.sp_regather or self.memory_profile.regathers or self.model.parallel_block
        gathered = (2 if again else 1) * step.stream if layout.sp and layout.tp > 1 else 0
        between = step.under_way if layout.pp > 1 else 0
        most = max(self._backward(runs, gradients, gathered) for runs in self.runs)
        return most, gathered + between

    def _backward(self, held: Sequence[BlockRun], gradients: bool, gathered: float) -> float:
        """Returns the same for one stage. Blocks with the same recomputation count as one run. From block to block it
        gives up what it keeps and gets gradients of weights, so that its first block in the backward pass has the most,
        or its last. Beside the last, what is `gathered` comes when the widest tensors have gone; beside the first it
        stands for what the loss leaves. Of blocks whose activations are on the host, those of the one that computes and
        of the one before it are here."""
        moved = max((run.block.kept for run in held if run.leaves), default=0.0)
        if self.flight.deferring:  # what every block has computed again waits for its weight gradients
            inside = max((sum(run.block.backward) for run in held), default=0.0)
            grown = [
                run.block.deferred - (0 if run.leaves else run.block.kept) for run in held for _ in range(run.many)
            ]
            return inside + max(0.0, sum(grown[1:])) + moved or self.step.stream / self.step.share
        most = given_up = arrived = 0.0
        # Of gradients in flat buckets one bucket is counted already.
        bucket = 0.0 if self.layout.zero == 2 and self.layout.shard_ranks > 1 else self.bucket()
        for (_, leaves), run in groupby(held[::-1], lambda run: (run.recompute, run.leaves)):
            here = list(run)
            inside, stream = (max(parts) for parts in zip(*(run.block.backward for run in here), strict=True))
            many, last = sum(run.many for run in here), here[-1].block
            gained = 0.0 if gradients else sum(run.many * self._gradients(run.block) for run in here)
            first_has = max(0.0, arrived - bucket)
            arrived += gained
            last_has = 0.0 if gradients else max(0.0, arrived - self._gradients(last) - bucket)
            released = 0.0 if leaves else sum(run.many * run.block.kept for run in here)
            if leaves:
                kept = max(run.block.kept for run in here)
                before_it = max(0.0, arrived - 2 * gained / many - bucket) if many > 1 else 0.0
                beside = max(kept + last_has, 2 * kept + max(first_has, before_it) if many > 1 else 0.0)
            else:
                # The last block of the run has what is fetched for the block before it.
                beside = max(first_has, last.kept - released + last_has + moved - gathered)
            most = max(most, inside + stream + beside - given_up)
            given_up += released
        return most or self.step.stream / self.step.share

    def _gradients(self, kind: BlockBytes) -> float:
        """Returns the bytes of the gradients of a block's weights, unless they leave for the host at once."""
        layout, each = self.layout, 0.0
        if self.formulas.offloads and layout.pp == 1:
            return each
        trained = kind.parameters.trained_dense, kind.parameters.trained_experts
        for numbers, (*_, ranks) in zip(trained, self.shards, strict=True):
            each += numbers * self.formulas.per_parameter(layout.zero, ranks, self.step.data_ranks)[1]
        return each

    @property
    def logits_of(self) -> int:
        """Tokens that have logits at once in a loss in chunks; 0 without chunks."""
        return self.layout.logits_of(int(self.step.pass_tokens))

    def logits(self, *, least: bool = False) -> tuple[float, float]:
        """Returns the bytes of the logits at the peak of the loss, or of what the final norm's backward pass adds if
        that is more, and of the inputs of head and final norm. `least`: without the gradient of the head, as in the
        layouts that count it elsewhere."""
        if not self.last:
            return 0, 0
        step, layout = self.step, self.layout
        tiles = head_tiles(self.model, layout)
        rows = -(-table(self.model, layout.tp) // self.model.d_model // tiles)
        tokens = min(self.logits_of or step.pass_tokens, step.pass_tokens)
        wide, narrow = TILE_LOSS_TENSORS if tiles > 1 else self._loss_tensors()
        # What is in fp32 anyway needs no second form.
        each = wide * max(4, self.width) + (narrow * self.width if self.width < 4 or not wide else 0)
        each += self._capped()
        read = step.head_reads + (step.stream if layout.sp and layout.tp > 1 else 0)
        if tiles > 1:  # gradients of what this tile read and of what the others did, and of the tile
            read += 2 * step.stream + rows * self.model.d_model * self.width
        elif self.logits_of:  # of chunks before this one: gradients of what they read, and of the head
            read += step.stream + (0 if least else self.head_gradient())
        most = tokens * rows * each
        if self.memory_profile.saves_slopes and not self.logits_of and tiles == 1 and not self.flight.deferring:
            most = max(most, tokens * rows * self.width + step.stream + (0 if least else self.head_gradient()))
        return max(most, step.final_norm - step.head_reads), read

    def waiting_logits(self, *, later: bool = False) -> float:
        """Returns the bytes of what the loss saves (the gradient of the logits, log-probabilities in fp32, or logits)
        and of what the head read, of micro-batches in flight other than the one that the moment is about.
        `later`: when all stages have gradients of an earlier one."""
        others = (self.flight.later_losses if later else self.flight.losses) - 1 / self.step.slices
        if not self.last or others <= 0:
            return 0
        step, layout = self.step, self.layout
        chunked = self.logits_of or head_tiles(self.model, layout) > 1
        rows = 0 if chunked else table(self.model, layout.tp) // self.model.d_model
        each = self.width
        if not self.memory_profile.saves_slopes:
            each = (max(4, self.width) if self._loss_tensors()[0] else self.width) + self._capped()
        return others * step.slices * (step.pass_tokens * rows * each + step.head_reads)

    def _loss_tensors(self) -> tuple[int, int]:
        """Returns the tensors as large as the logits at the peak of the loss: in fp32, and in the width of the
        computation."""
        return self.memory_profile.split_loss_tensors if self.layout.tp > 1 else self.memory_profile.loss_tensors

    def _capped(self) -> int:
        """Returns the bytes per logit of a soft cap's result, which needs room where the logits are not in fp32 twice
        anyway."""
        beside = self.width >= 4 if self.memory_profile.saves_slopes else True
        return self.width if self.model.logit_softcap and beside else 0

    def whole(self) -> float:
        """Returns the bytes of ZeRO-3's unsharded parameters and their gradients in transit, of the second copy of the
        parameters, of buckets and dummies."""
        layout, memory_profile = self.layout, self.memory_profile
        found = self.formulas.buffer(self.step.data_ranks)
        if memory_profile.dummy_gradients:
            matrices = sum(kind.parameters.matrices for kind in self.present)
            found += (matrices + self.last * table(self.model, layout.tp)) * self.width
        if not gathers_parameters(layout):
            return found
        if is_copied(layout):
            found += self.formulas.second_copy(
                self.shards, (near_ranks(layout), near_ranks(layout, experts=layout.ep > 1)), layout.quantise_weights
            )
        if memory_profile.gathers_matrices:
            matrix = max(table(self.model, layout.tp), *(kind.parameters.largest for kind in self.present))
            return found + matrix * 2 * self.width
        # Experts that no other rank has are not gathered.
        dealt_out = self.shards[1][2] > 1 or is_offloaded(layout, "parameters")
        sizes = [(kind.parameters.gathered(dealt_out, tiled=layout.reshard), kind.kept) for kind in self.present]
        held, kept = max(sizes, key=lambda size: size[0].block + size[0].tile, default=(GatheredParameters(0, 0, 0), 0))
        ends = gathered_outside(self.model, layout, self.first, self.last, tiled=layout.reshard)
        held = held._replace(tile=max(held.tile, ends.tile))
        # Without a collective FSDP2 fetches a block when it computes.
        ahead = layout.prefetch if layout.shard_ranks > 1 else 0
        blocks = self.formulas.gathers(self.count, layout.pp, ahead, reshard=layout.reshard)
        if layout.quantise_weights != "none":
            # The codes of a block that arrives, beside its numbers.
            found += max(held.block, held.tile, ends.block) * wire_width(layout.quantise_weights, self.width)
        if layout.quantise_gradients != "none":
            # The codes of a group's gradients that a rank sends, and as many that it gets.
            found += 2 * max(held.trained, ends.block, ends.tile) * wire_width(layout.quantise_gradients, self.width)
        return found + self.formulas.gathered(ends.block + ends.trained, held, blocks, kept)

    def head_gradient(self) -> int:
        """Returns the bytes of the gradient of the head's part here. ZeRO-3's is in `whole`."""
        counted = self.model.lora.rank or gathers_parameters(self.layout)
        return 0 if counted else table(self.model, self.layout.tp) * self.width

    def waiting_head(self) -> int:
        """Returns these bytes where losses in chunks wait for their backward pass: one gradient of all."""
        return self.head_gradient() if self.last and self.logits_of and self.flight.losses > 1 else 0
