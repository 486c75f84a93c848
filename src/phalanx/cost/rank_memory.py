"""Memory of a pipeline rank at each moment of a step, part by part, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from operator import mul
from typing import Any, Literal, NamedTuple

from phalanx.blocks.kinds import BlockKind
from phalanx.cost.block_memory import TRANSIT, BlockBytes, BlockRun, StepSizes
from phalanx.cost.compression import compression_bytes
from phalanx.cost.fsdp_memory import FsdpMemory
from phalanx.cost.generation import GenerationBytes, generation_bytes
from phalanx.cost.held import (
    LayerKind,
    kinds_of,
    outside,
    parameter_counts,
    placed,
    shards_of,
    table,
)
from phalanx.cost.in_flight import Flight, with_all_peaks
from phalanx.cost.matrices import bucket_ends, matrix_work
from phalanx.cost.spec import StepSpec
from phalanx.cost.state_formulas import Shards, StateBytes, overfull
from phalanx.partition.derived import (
    bucket_bytes,
    flushes,
    gathers_parameters,
    offloaded_layers,
    stashes,
    written,
)
from phalanx.partition.tensor_slices import head_tiles
from phalanx.units import gib

Sends = Callable[[float], tuple[float, float]]
TILE_LOSS_TENSORS = 1, 1
"""Tensors as large as a tile's logits, in fp32 and in the width of the computation: its scores become probabilities and
their gradient in place."""


class StepParts(StepSizes):
    """Sizes that all ranks of a step share, with the formulas of its state and its kinds of blocks."""

    def __init__(self, spec: StepSpec):
        super().__init__(spec)
        layout = spec.layout
        self.cut, self.flights = placed(spec)
        self.data_ranks = layout.data_ranks * layout.cp
        """Ranks over which gradients are reduced."""
        self.recomputes = written(layout)
        every = kinds_of(spec.model, self.recomputes, range(spec.model.n_layers))
        self.kinds = {kind: BlockBytes(self, kind) for kind in {kind for kind, _ in every}}

    def kinds_of(self, stage: int) -> tuple[tuple[LayerKind, int], ...]:
        """Returns the kinds of blocks of a stage, with the number of each."""
        return kinds_of(self.spec.model, self.recomputes, self.cut[stage])

    def state(self, shards: Shards, *, flushes: bool = True, stashed: int = 0) -> StateBytes:
        """Returns the bytes of the state of some parameters."""
        layout = self.spec.layout
        zero, shared = (layout.zero, layout.accumulate, self.spec.batch.accumulation), gathers_parameters(layout)
        return self.formulas.state(shards, self.data_ranks, *zero, shared=shared, flushes=flushes, stashed=stashed)

    def context(self) -> int:
        """Returns the bytes outside the allocator."""
        layout = self.spec.layout
        return self.formulas.context(layout.pp, self.data_ranks, layout.tp, layout.cp, layout.ep)


class LossParts:
    """Memory of the loss on one rank of a pipeline."""

    def __init__(self, step: StepSizes, flight: Flight):
        self.step, self.flight = step, flight
        self.model, self.layout = step.spec.model, step.spec.layout
        self.memory_profile, self.width, self.formulas = step.memory_profile, step.spec.width, step.formulas
        self.first, self.last = 0 in flight.held, flight.stages - 1 in flight.held

    @property
    def logits_of(self) -> int:
        """Tokens that have logits at once in a loss in chunks; 0 without chunks."""
        return self.layout.logits_of(int(self.step.pass_tokens))

    def logits(self, *, least: bool = False, arriving: float = 0.0, bucket: float = 0.0) -> tuple[float, float]:
        """Returns the bytes of the logits at the peak of the loss, or of what the final norm's backward pass adds if
        that is more, and of the inputs of head and final norm. `least`: without the gradient of the head, as in the
        layouts that count it elsewhere; `arriving`: what else is there once the loss is computed; `bucket`: what is
        counted beside them and comes with the head's gradient (late_bucket)."""
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
            slopes = tokens * rows * self.width + (0 if least else self.head_gradient())
            most = max(most, slopes + step.stream + arriving)
        given = step.stream + (0 if least else self.head_gradient()) if bucket and not self.logits_of else 0
        return max(most - bucket, given, step.final_norm - step.head_reads + arriving), read

    def waiting_logits(self, *, later: bool = False, further: int | None = None) -> float:
        """Returns the bytes of what the loss saves (the gradient of the logits, log-probabilities in fp32, or logits)
        and of what the head read, of micro-batches in flight other than the one that the moment is about, and of that
        one's `further` losses before its last one, by default those of model.mtp. `later`: when all stages have
        gradients of an earlier one."""
        others = (self.flight.later_losses if later else self.flight.losses) - 1 / self.step.slices
        step, layout, modules = self.step, self.layout, self.model.mtp
        further = modules if further is None else further
        others = max(0.0, others) * step.slices
        early = others * modules + further
        if not self.last or not others + early:
            return 0
        chunked = self.logits_of or head_tiles(self.model, layout) > 1
        rows = 0 if chunked else table(self.model, layout.tp) // self.model.d_model
        each = self.width
        if not self.memory_profile.saves_slopes:
            each = (max(4, self.width) if self._loss_tensors()[0] else self.width) + self._capped()
        saved = step.pass_tokens * rows * each
        # Losses in chunks have computed a gradient of the head, one for each factor.
        head = self.head_gradient() if further and chunked else 0
        return others * (saved + step.head_reads) + early * (saved + step.stream) + head

    def _loss_tensors(self) -> tuple[int, int]:
        """Returns the tensors as large as the logits at the peak of the loss: in fp32, and in the width of the
        computation."""
        profile, tp = self.memory_profile, self.layout.tp
        wide, narrow = profile.split_loss_tensors if tp > 1 else profile.loss_tensors
        return (wide * tp, narrow * tp) if profile.whole_logits else (wide, narrow)

    def _capped(self) -> int:
        """Returns the bytes per logit of a soft cap's result, which needs room where the logits are not in fp32 twice
        anyway."""
        beside = self.width >= 4 if self.memory_profile.saves_slopes else True
        return self.width if self.model.logit_softcap and beside else 0

    def head_gradient(self) -> int:
        """Returns the bytes of the gradient of the head's part here. ZeRO-3's is in `whole`."""
        counted = self.model.freezes or gathers_parameters(self.layout)
        return 0 if counted else table(self.model, self.layout.tp) * self.width


class RankParts(LossParts):
    """Memory of one rank of a pipeline, part by part."""

    step: StepParts  # pyrefly: ignore[bad-override-mutable-attribute] -- never set again

    def __init__(self, step: StepParts, flight: Flight):
        super().__init__(step, flight)
        self.blocks = [step.kinds_of(stage) for stage in flight.held]
        self.runs = [self._runs(held, stage) for held, stage in zip(self.blocks, flight.held, strict=True)]
        self.present = {run.block for held in self.runs for run in held}
        receives = any(stage and stage - 1 not in flight.held for stage in flight.held)
        self.sends = [stage < flight.stages - 1 and stage + 1 not in flight.held for stage in flight.held]
        self.between = (receives + any(self.sends)) * step.under_way
        """Bytes of messages between this rank's stages and those of others."""
        self.of_kind = Counter[BlockKind]()
        for kind, many in (pair for held in self.blocks for pair in held):
            self.of_kind[kind.block] += many
        held = parameter_counts(self.model, self.layout, self.of_kind.items(), self.first, self.last)
        self.shards = shards_of(held, self.layout)
        """Parameters of the rank's stages, those that are trained, and over how many ranks their state is sharded:
        dense ones, and experts."""
        waits = step.formulas.profile.keeps_buckets and gathers_parameters(self.layout) and self.layout.pp > 1
        several = step.spec.batch.accumulation > 1
        self.waits = (
            waits and several and self.layout.accumulate == "local" and (not flight.deferring or len(flight.held) == 1)
        )
        """Whether ZeRO-3 sends gradients in the last backward pass of each stage alone."""
        self.fsdp = FsdpMemory(step, self.runs, self.shards, flight.ahead, first=self.first, last=self.last)

    @cached_property
    def state(self) -> StateBytes:
        """The bytes of the rank's state, with whole matrices among the temporary tensors of its step."""
        stashed = int(max(max(counts) for counts in self.flight.most)) if stashes(self.layout) else 0
        found = self.step.state(self.shards, flushes=flushes(self.layout), stashed=stashed)
        whole = matrix_work(self.step.spec, tuple(self.of_kind.items()), (self.first, self.last))
        temporary = max((each.most_elements for each in whole), default=0) * max(4, self.width)
        kept, used = compression_bytes(self.model, self.layout, self.shards, self.formulas.gradient)
        if self.memory_profile.keeps_buckets and self.formulas.gradient < 4 and self.present:
            # Norms are summed in fp32, one gradient after the other.
            largest = max(table(self.model, self.layout.tp), *(kind.parameters.largest for kind in self.present))
            used = max(used, 4 * largest / (self.shards[0][2] if self.layout.zero else 1))
        return found._replace(optimizer=found.optimizer + kept, copied=max(found.copied + temporary, used))

    def bucket(self) -> float:
        """Returns the bytes of the first bucket; without any, gradients arrive one by one as activations are freed."""
        if gathers_parameters(self.layout):
            return 0
        return self.formulas.bucket(self.shards, self.step.data_ranks, self.layout)

    def late_bucket(self) -> float:
        """Returns the bytes of the first bucket if it is made late (MemoryFormulas.fills_late)."""
        late = self.formulas.fills_late(self.layout.zero) and self.layout.shard_ranks > 1
        return self.bucket() if late and not self.flight.deferring else 0

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

    def kept(self, peaks: Sequence[tuple[float, ...]]) -> tuple[float, float]:
        """Returns the most bytes that blocks keep on the device for the micro-batches in flight at some peaks, and the
        number of these."""
        most, counts = max(((self.kept_of(counts), counts) for counts in peaks), key=lambda one: one[0])
        return self._deferred if self.flight.deferring else most, sum(counts) / len(counts)

    def kept_of(self, counts: Sequence[float]) -> float:
        """Returns the bytes that blocks keep for so many micro-batches in flight per stage."""
        found = sum(map(mul, counts, self.kept_by_stage))
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
        return max(sum(map(mul, counts, (*self.kept_by_stage, *waiting))) for counts in self.flight.joined)

    def _deferred_head(self) -> float:
        """Returns the bytes of a micro-batch's input of the head and gradient of the logits, unless these come in
        chunks or the head is frozen."""
        step, layout = self.step, self.layout
        if self.logits_of or head_tiles(self.model, layout) > 1 or self.model.freezes:
            return 0.0
        return step.tokens * (table(self.model, layout.tp) // self.model.d_model + self.model.d_model) * self.width

    @cached_property
    def kept_by_stage(self) -> list[float]:
        """The bytes that each stage keeps on the device per micro-batch in flight."""
        sizes = [
            sum(run.many * run.block.kept for run in runs if not run.leaves) + self._beside(runs, stage)
            for runs, stage in zip(self.runs, self.flight.held, strict=True)
        ]
        if self.memory_profile.keeps_boundaries and self.layout.pp > 1:
            last, message = self.flight.stages - 1, self.step.stream / self.step.share
            ends = [(stage > 0) + (stage < last) for stage in self.flight.held]
            sizes = [size + many * message for size, many in zip(sizes, ends, strict=True)]
        return sizes

    def forward(self) -> tuple[float, float, float]:
        """Returns the bytes that blocks keep when the last forward pass before any backward pass ends, and those of
        messages then, and when later ones end. A message waits until its reader has been seen to go on, the first ones
        until the first gradient comes. Beside a message with projections of the embedding are its parts."""
        message, often = self.step.under_way / TRANSIT, self.step.slices
        coming = (TRANSIT + (self.step.beside > 0)) * message
        waiting = [sum(map(mul, counts, self.sends)) * often * message for counts in self.flight.most]
        most = [self.kept_of(counts) for counts in self.flight.most]
        kept, sent = max(zip(most, waiting, strict=True), key=sum)
        return kept, sent + coming, message + coming

    def _beside(self, runs: Sequence[BlockRun], stage: int) -> float:
        """Returns the bytes that a stage keeps on the device per micro-batch and that belong to no block of `runs`: of
        the projections of the embedding for all layers, what the first stage saves, and what comes with a later stage's
        input; and keys and values that blocks here have borrowed from one on the host."""
        step = self.step
        away = {run.block.kind.block.window for run in runs if run.leaves and run.block.kind.block.lends}
        readers = (run.block for run in runs if not run.leaves)
        found = sum(
            {each.kind.block.window: each.borrowed for each in readers if each.kind.block.window in away}.values()
        )
        leaves = bool(runs) and runs[0].leaves
        if stage:
            return found + step.beside * (not leaves)
        found += step.beside_saved + step.beside * any(run.recompute == "full" for run in runs)
        reads = step.beside_saved > 0 and not self.model.freezes
        return found + leaves * reads * step.stream * step.slices / step.share

    def beside(self) -> tuple[float, float]:
        """Returns the most bytes in host memory and on disk."""
        moved = [sum(run.many * run.moved for run in runs) for runs in self.runs]
        host, disk = self.formulas.beside(self.shards)
        return host + max(sum(map(mul, peak, moved)) for peak in self.flight.unread or self.flight.most), disk

    def backward(
        self, gradients: bool, *, unsent: bool = False, modules: bool = False, place: int | None = None
    ) -> tuple[float, float]:
        """Returns the most bytes that the backward pass of a block needs besides what all blocks keep, less what later
        blocks have released: recomputed tensors and gradients of activations; and the bytes of gathered inputs, of
        messages in transit and of ZeRO-3's blocks and gradients on their way. `gradients`: those of all weights are
        counted already, also those of ZeRO-3 that are `unsent`: in a pipeline they leave in the last backward pass of a
        stage, here of that at `place`. `modules`: of modules for further tokens alone."""
        places = range(len(self.runs)) if place is None else (place,)
        found = [
            self._backward(each, gradients, unsent=unsent, modules=modules, last=not self.waits or place is not None)
            for each in places
        ]
        inside, fetched, _ = max(found, key=sum)
        return inside + self.step.beside_gradient - self.step.gathered, self.step.gathered + self.between + fetched

    @property
    def sends_buckets(self) -> bool:
        """Whether its stages send buckets of ZeRO-1 or 2, or any that leave for the host."""
        layout = self.layout
        shares = layout.zero in (1, 2) and layout.shard_ranks > 1
        if self.formulas.offloads:  # they leave in turn, in a pipeline it is not known when
            shares = layout.pp == 1 and self.step.data_ranks > 1 and not gathers_parameters(layout)
        return shares and self.formulas.profile.keeps_buckets and any(trained for _, trained, _ in self.shards)

    def sending(self, *, stays: bool) -> Iterator[MomentBytes]:
        """Yields the bytes of gradients, activations, logits and communication at the fullest moment of the backward
        pass in which each stage sends the buckets of ZeRO-1 or 2, or any that leave for the host, and at its end.
        `stays`: sums of earlier micro-batches are there while the most are in flight."""
        if not self.sends_buckets:
            return
        layout, step, m = self.layout, self.step, self.step.spec.batch.accumulation
        total = sum(trained for _, trained, _ in self.shards)
        embedding = 0 if self.model.freezes or not self.first else outside(self.model, layout.tp, True, False)
        arrived = total - embedding - sum(run.many * run.block.trained for held in self.runs for run in held)
        sends = {
            several: self.formulas.sending(self.shards, self._buckets, layout, several=several)
            for several in (m > 1, m > 1 and stays)
        }
        fullest = self.kept(self.flight.most)[0]
        for place, held in reversed([*enumerate(self.runs)] * (not self.flight.deferring)):
            # By whether there are sums of earlier micro-batches: nothing else changes what the backward pass needs.
            passes = {m > 1: self.kept_of([(each <= place) / step.slices for each in range(len(self.runs))])}
            if layout.zero == 2 and layout.accumulate == "sharded":  # every micro-batch sends
                passes[m > 1 and stays] = max(fullest, passes.get(m > 1 and stays, fullest))
            for several, kept in passes.items():
                sent = sends[several], arrived
                inside, copies, gradients = self._backward(place, True, unsent=False, modules=False, sends=sent)
                inside += step.beside_gradient - step.gathered
                yield MomentBytes("backward", gradients, kept + inside, communication=step.gathered + copies)
            arrived += sum(run.many * run.block.trained for run in held)
        copies, gradients = sends[m > 1](total)
        yield MomentBytes("backward", gradients, communication=copies)

    @cached_property
    def _buckets(self) -> tuple[int, ...]:
        kinds = tuple((kind.block, many) for held in self.blocks for kind, many in held)
        layout, least = self.layout, bucket_bytes(self.layout) / self.width
        ends = self.first, self.last
        return bucket_ends(self.model, layout.tp, layout.ep_shard, kinds, ends, least, folds=layout.folds)

    def _backward(
        self,
        place: int,
        gradients: bool,
        *,
        unsent: bool,
        modules: bool,
        sends: tuple[Sends, float] | None = None,
        last: bool = True,
    ) -> tuple[float, float, float]:
        """Returns the same for one stage, its blocks and gradients on their way alone. From block to block it gives up
        what it keeps and gets gradients of weights. Beside the first block in the backward pass, what is gathered
        stands for what the loss leaves; beside others it comes when the widest tensors have gone. Of blocks whose
        activations are on the host, those of the one that computes and of the one before it are here. Where buckets are
        sent, `sends` has a function that returns what that takes, by how many parameters have gradients, and how many
        have when the stage begins; the third number is of these."""
        held, blocks = self.runs[place], self.fsdp.blocks[place]
        if not blocks:
            return self.step.stream / self.step.share, 0.0, 0.0

        most, given_up, arrived, sent, first, done = (-inf, 0.0, 0.0), 0.0, 0.0, 0.0, 0, 0
        if self.flight.deferring:  # what every block has computed again waits for its weight gradients
            inside = max(sum(block.backward) for block in blocks)
            grown = [
                run.block.deferred - (0 if run.leaves else run.block.kept) for run in held for _ in range(run.many)
            ]
            moved = max((run.moved for run in held), default=0.0)
            moved += self._deferred_head() if self.last and place == len(self.runs) - 1 else 0.0
            each = (self.fsdp.moments(place, number, unsent=unsent, sends=last) for number in range(len(blocks)))
            whole = max(next(moment)[1] for moment in each)
            return inside + max(0.0, sum(grown[1:])) + moved, whole, 0.0
        adds = gradients and not self.memory_profile.gradients_stay and not gathers_parameters(self.layout)
        # Of gradients in flat buckets one bucket is counted already.
        bucket = 0.0 if self.layout.zero == 2 and self.layout.shard_ranks > 1 else self.bucket()
        alone = not gradients and not bucket and not self.formulas.offloads
        head = 0.0
        if self.last and place == len(self.runs) - 1:
            if not gradients:
                arrived = 0.0 if self.formulas.offloads and self.layout.pp == 1 else self.head_gradient()
            elif self.model.tied and self.first and not self.model.freezes and (unsent or not self.fsdp.units):
                head = table(self.model, self.layout.tp) * self.width  # waits for that of the embedding
        next_runs, borrowed = [*held[-2::-1], None], dict[int, float]()
        for run, later in zip(reversed(held), next_runs, strict=True):
            block, many, window = run.block, run.many, run.block.kind.block.window
            inside, stream = block.backward
            inside = block.adding if adds else block.first if alone else inside
            sharded = self._gradients(block)
            gained = (0 if gradients else sharded) + self.fsdp.summed_over_replicas(block)
            reduced = block.trained * self.formulas.gradient - sharded if unsent else 0.0
            released = 0 if run.leaves else block.kept
            # Between them bytes grow or shrink evenly.
            for number in sorted({*range(min(many, 2)), *range(max(0, many - 1 - self.fsdp.ahead), many)}):
                moments = [(inside, 0.0, 0.0)]
                if sends:
                    sizes, before = sends[0], sends[1] + done + number * block.trained
                    moments = [(size, *sizes(before + own)) for own, size in block.moments.items()]
                elif self.fsdp.units:
                    gone = sent + number * reduced if last else 0.0
                    moments = self.fsdp.moments(place, first + number, gone, unsent=unsent, sends=last)
                here = stream - given_up - number * released + max(0.0, arrived + number * gained - bucket)
                # Gradients of keys and values wait for the block that has lent them.
                here += head + sum((borrowed | ({window: block.borrowed} if number else {})).values())
                here += run.moved + (run.moved if number + 1 < many else later.moved if later else 0.0)
                if block.kind.block.predicts or not modules:
                    size, whole, summed = max(moments, key=sum)
                    most = max(most, (here + size, whole, summed), key=sum)
            done += many * block.trained
            given_up, arrived, sent = given_up + many * released, arrived + many * gained, sent + many * reduced
            first += many
            if block.borrowed:
                borrowed[window] = block.borrowed
            elif block.kind.block.lends:
                borrowed.pop(window, None)
        return most

    def _gradients(self, kind: BlockBytes) -> float:
        """Returns the bytes of the gradients of a block's weights, unless they leave for the host at once."""
        layout, each = self.layout, 0.0
        if self.formulas.offloads and layout.pp == 1:
            return each
        trained = kind.parameters.trained_dense, kind.parameters.trained_experts
        for numbers, (*_, ranks) in zip(trained, self.shards, strict=True):
            each += numbers * self.formulas.per_parameter(layout.zero, ranks, self.step.data_ranks)[1]
        return each

    def whole(self) -> tuple[float, float]:
        """Returns the bytes of buckets, dummies, the second copy of the parameters and what ZeRO-3 has whole outside of
        blocks; and those of its gradient of the head, which the backward pass begins with."""
        found = self.formulas.buffer(self.step.data_ranks)
        if self.memory_profile.dummy_gradients:
            matrices = sum(kind.parameters.matrices for kind in self.present)
            found += (matrices + self.last * table(self.model, self.layout.tp)) * self.width
        within, head = self.fsdp.whole()
        return found + within, head

    def is_whole_loss(self) -> bool:
        """Returns whether the loss is computed at once before ZeRO-3 fetches blocks for the backward pass and has the
        head's gradient; its formula is known for losses that save the gradient of the logits."""
        at_once = not self.logits_of and head_tiles(self.model, self.layout) == 1
        return at_once and self.memory_profile.saves_slopes and not self.flight.deferring


Moment = Literal["loss", "forward", "backward", "optimizer", "generation"]
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
    """Time of the peak: the loss, the end of a forward pass, the backward pass of the first micro-batch to return, the
    optimizer step, or the generation of completions."""
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
    return tuple(_fullest(RankParts(step, flight)) for flight in step.flights)


def needed_bytes(spec: StepSpec, limit: float = inf) -> int:
    """Returns the memory that the fullest rank needs (RankMemory.needed), or a number above `limit` if that is more.
    Ranks that hold the same are predicted as one, with the peaks of all. If offloaded state exceeds the host or the
    disk, what is missing there counts on top of a full device. Raises as `step_memory`."""
    step, most, alike = StepParts(spec), 0, dict[tuple[Any, ...], list[Flight]]()
    for flight in step.flights:
        held = flight.held
        holds = (*map(step.kinds_of, held), 0 in held, flight.stages - 1 in held)
        neighbours = tuple(later - stage == 1 for stage, later in pairwise(held))
        stays = step.formulas.stays(spec.batch.accumulation * len(held), max(map(sum, flight.most)))
        alike.setdefault((holds, neighbours, stays), []).append(flight)
    for ranks in alike.values():
        rank = RankParts(step, with_all_peaks(tuple(ranks)))
        least = rank.state.held + rank.kept(rank.flight.most)[0] + step.context()
        least = max(least, overfull(spec.cluster, *rank.beside()))
        if least > limit:  # without anything that is there for a moment
            return ceil(least)
        memory = _fullest(rank, limit)
        most = max(most, memory.needed, round(overfull(spec.cluster, memory.host, memory.disk)))
        if most > limit:
            break
    return most


class MomentBytes(NamedTuple):
    """Bytes at one moment of a step, besides what the rank has throughout."""

    moment: Moment
    gradients: float
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.logits + self.communication


class StepMoments:
    """The moments of a step at which a rank may be fullest."""

    def __init__(self, rank: RankParts, state: StateBytes, generated: GenerationBytes):
        flight, batch = rank.flight, rank.step.spec.batch
        self.rank, self.state, self.fsdp, self.generated = rank, state, rank.fsdp, generated
        # Programs that keep all parameters whole under pp were measured with more.
        self.unsent = state.unsent > 0 and not rank.memory_profile.whole_under_pp
        """Whether all gradients of ZeRO-3 wait for the last backward pass."""
        self.kept, self.in_flight = rank.kept(flight.most)
        self.gathered, self.head = rank.whole()
        self.in_loss, self.bucket = self.fsdp.fetched_in_loss(), rank.bucket()
        self.whole = self.gathered + self.head * (not self.unsent and not self.fsdp.outside_waits)
        self.passes, self.updates_each = batch.accumulation * len(flight.held), stashes(rank.layout)
        # Where all are in flight at once, none has left gradients yet.
        self.stays = rank.step.formulas.stays(self.passes, max(map(sum, flight.most))) and not self.updates_each
        """Whether gradients of earlier micro-batches are there while the most are in flight."""
        self.early = self._gradients(self.stays)

    def __iter__(self) -> Iterator[MomentBytes]:
        yield from self._of_passes()
        yield from self._of_zero3()
        yield from self._of_messages()
        yield from self._of_other_batches()
        if self.rank.step.spec.rollout:
            unsent, made = 0.0 if gathers_parameters(self.rank.layout) else self.state.unsent, self.generated
            yield MomentBytes("generation", unsent, made.cache, made.logits, made.gathered)

    def _gradients(self, stays: bool) -> float:
        return self.state.early(stays, self.bucket) + self.fsdp.outside_waits

    def _of_passes(self) -> Iterator[MomentBytes]:
        """Yields the first backward pass while the most are in flight, the loss, and those that send gradients."""
        rank = self.rank
        gradients = self.stays or self.state.unsent > 0
        again, moving = rank.backward(gradients or rank.sends_buckets, unsent=self.unsent)
        # Losses in chunks that wait for their backward pass have one gradient of the head.
        summed = rank.head_gradient() if rank.last and rank.logits_of and rank.flight.losses > 1 else 0
        waiting = rank.waiting_logits(further=0) + summed
        yield MomentBytes("backward", self.early, self.kept + again, waiting, moving + self.whole)
        yield self._loss()
        yield from rank.sending(stays=self.stays)
        if rank.last and rank.model.mtp:  # before that of the main loss, whose logits are there
            again, moving = rank.backward(gradients, unsent=self.unsent, modules=True)
            waiting = rank.waiting_logits() + summed
            yield MomentBytes("backward", self.early, self.kept + again, waiting, moving + self.whole)

    def _loss(self) -> MomentBytes:
        rank, (last, fetched) = self.rank, self.in_loss
        arrives, later = rank.is_whole_loss(), self.head + fetched - last
        late = 0.0 if self.state.unsent else rank.late_bucket()
        logits, hidden = rank.logits(arriving=later if arrives else 0.0, bucket=late)
        # A loss in chunks adds to the head's gradient at once, also where others are deferred.
        adds = bool(rank.flight.deferring) and rank.logits_of > 0 and self.passes > 1
        gradients = max(self.early, rank.head_gradient() * adds)
        moving = self.gathered + last + self.fsdp.sent_last + (0.0 if arrives else later) + rank.between
        return MomentBytes("loss", gradients, self.kept + hidden, logits + rank.waiting_logits(), moving)

    def _of_zero3(self) -> Iterator[MomentBytes]:
        """Yields the moments at which ZeRO-3 fetches blocks in a forward pass, or sends gradients that have waited."""
        rank, fsdp, flight = self.rank, self.fsdp, self.rank.flight
        if rank.waits and flight.deferring:  # sent once autograd is through
            moving = self.gathered + rank.between + fsdp.sent_at_end()
            yield MomentBytes("backward", self.early, communication=moving)
        for place, counts in enumerate(flight.final if rank.waits and not flight.deferring else ()):
            again, moving = rank.backward(True, unsent=self.unsent, place=place)
            waiting = rank.waiting_logits(further=0)
            yield MomentBytes("backward", self.early, rank.kept_of(counts) + again, waiting, moving + self.whole)
        if fsdp.units and rank.layout.shard_ranks > 1 and rank.memory_profile.keeps_buckets:
            there, saved = (0.0, sum(rank.kept_by_stage)) if fsdp.gathers_once else (self.early, self.kept)
            for copied, inside in fsdp.fetched_in_forward():
                moving = self.gathered + fsdp.sent_last + rank.between + copied
                yield MomentBytes("forward", there, saved + inside, communication=moving)
        if fsdp.gathers_once and fsdp.units and self.unsent:  # sent once autograd is through
            moving = self.gathered + rank.between + fsdp.fetched_at_end()
            yield MomentBytes("backward", self.early, communication=moving)

    def _of_messages(self) -> Iterator[MomentBytes]:
        """Yields the ends of forward passes, when messages to the next stage wait."""
        rank = self.rank
        # Of programs with another loss it is not known.
        if any(rank.sends) and rank.memory_profile.saves_slopes and not rank.flight.deferring:
            (ends, sent, later), (_, fetched) = rank.forward(), self.in_loss
            early = self.state.early(stays=False, bucket=self.bucket)
            yield MomentBytes("forward", early, ends, communication=sent + self.gathered + fetched)
            yield MomentBytes("forward", self.early * self.stays, ends, communication=later + self.gathered + fetched)

    def _of_other_batches(self) -> Iterator[MomentBytes]:
        """Yields backward passes for which all stages have gradients, and the optimizer's step while micro-batches are
        in flight."""
        rank, flight = self.rank, self.rank.flight
        if flight.later and not self.stays and not self.updates_each:
            again, moving = rank.backward(True, unsent=self.unsent)
            kept, waiting = rank.kept(flight.later)[0] + again, rank.waiting_logits(later=True)
            yield MomentBytes("backward", self._gradients(True), kept, waiting, moving + self.whole)
        if self.updates_each:
            others = [tuple(max(0.0, count - 1) for count in counts) for counts in flight.most]
            yield MomentBytes("optimizer", self.state.gradients + self.state.copied, rank.kept(others)[0])


def _fullest(rank: RankParts, limit: float = inf) -> RankMemory:
    """Returns the memory of a rank at the fullest of its moments, or at the first one that needs more than `limit`."""
    state, profile, context = rank.state, rank.memory_profile, rank.step.context()
    generated = generation_bytes(rank.step.spec, rank.of_kind.items(), (rank.first, rank.last))
    state = state._replace(parameters=state.parameters + generated.reference)
    moments, at, allocated = StepMoments(rank, state, generated), MomentBytes("optimizer", -inf), 0.0
    for moment in moments:
        at = max(at, moment, key=lambda each: each.total)
        allocated = state.fullest(at.gradients, at.activations + at.logits, at.communication)
        if allocated + context > limit + len(PARTS):  # which are rounded
            break
    # Where the optimizer's copy finds no room it takes more than the fullest moment needs.
    most = max(allocated, state.held + at.total + state.copied) if profile.step_is_flat else allocated
    reserved = most * profile.reserve - allocated
    if allocated <= state.held + state.stepping:
        at = MomentBytes("optimizer", state.stepping)
    host, disk = rank.beside()
    return RankMemory(
        *(round(n) for n in (state.parameters, at.gradients, state.optimizer, *at[2:])),
        reserved=round(reserved) + context,
        context=context,
        moment=at.moment,
        in_flight=moments.in_flight,
        host=round(host),
        disk=round(disk),
    )
