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
from phalanx.cost.in_flight import NONE, SENT, WHOLE, Flight, RankPeak, with_all_peaks, without_fetched
from phalanx.cost.loss_memory import LossParts
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
        self.waits = waits and several and self.layout.accumulate == "local"
        """Whether ZeRO-3 sends gradients in the last backward pass of each stage alone."""
        self._known_gradients = dict[tuple[tuple[int, ...], float], float]()
        self._known_sends = dict[bool, Sends]()
        self._known_passes = dict[tuple[Any, ...], tuple[float, float]]()
        self.fsdp = FsdpMemory(step, self.runs, self.shards, first=self.first, last=self.last)
        if not self.fsdp.waiting:
            self.flight = without_fetched(flight)

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
        return self.bucket() if late and not self.flight.splits else 0

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

    @cached_property
    def fullest(self) -> tuple[float, float]:
        """The most bytes that blocks keep on the device for micro-batches in flight, and the number of these."""
        _, counts = max(((self.kept_of(counts), counts) for counts in self.flight.most), key=lambda one: one[0])
        return max(map(self.kept_at, self.flight.peaks)), sum(counts) / len(counts)

    def kept_at(self, peak: RankPeak) -> float:
        """Returns the bytes that blocks keep at a peak."""
        waiting = sum(map(mul, peak.deferred, self._deferred)) if self.flight.splits else 0.0
        return self.kept_of(peak.in_flight) + waiting

    def kept_after(self, peak: RankPeak) -> float:
        """Returns the bytes that blocks keep when a backward pass, or its second half, has ended."""
        stage = self._deferred if peak.kind == "W" else self.kept_by_stage
        return self.kept_at(peak) - stage[peak.place] / self.step.slices

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
    def _deferred(self) -> list[float]:
        """The bytes that each stage keeps per micro-batch that waits for its weight gradients alone."""
        waiting = [sum(run.many * run.block.deferred for run in runs) for runs in self.runs]
        if self.last:
            waiting[-1] += self._deferred_head()
        return waiting

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

    def sent(self, peak: RankPeak) -> float:
        """Returns the bytes of messages when a forward pass ends. A message waits until its reader has been seen to go
        on, the first ones until the first gradient comes. Beside a message with projections of the embedding are its
        parts."""
        message, waiting = self.step.under_way / TRANSIT, 1.0
        if not peak.begun:
            waiting = sum(map(mul, peak.in_flight, self.sends)) * self.step.slices
        return (waiting + TRANSIT + (self.step.beside > 0)) * message

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
        return host + max(sum(map(mul, peak.in_flight, moved)) for peak in self.flight.peaks), disk

    @cached_property
    def _of_stages(self) -> list[StateBytes]:
        """The bytes of each stage's state."""
        found = list[StateBytes]()
        for held, stage in zip(self.blocks, self.flight.held, strict=True):
            blocks, ends = [(kind.block, many) for kind, many in held], self._ends(stage)
            found.append(
                self.step.state(shards_of(parameter_counts(self.model, self.layout, blocks, *ends), self.layout))
            )
        return found

    def _ends(self, stage: int) -> tuple[bool, bool]:
        return stage == 0, stage == self.flight.stages - 1

    def gradients(self, gradients: tuple[int, ...], bucket: float) -> float:
        """Returns the bytes of gradients when each stage has NONE, all SENT, or WHOLE ones, and a `bucket` is filled
        for the first ones."""
        key = gradients, bucket
        if key not in self._known_gradients:
            self._known_gradients[key] = self._gradients_of(*key)
        return self._known_gradients[key]

    def _gradients_of(self, gradients: tuple[int, ...], bucket: float) -> float:
        state, waits = self.state, self.state.waiting > 0
        outside = self._outside if self.fsdp.outside_waits else [0.0] * len(gradients)
        if self.memory_profile.gradients_stay or (len(set(gradients)) == 1 and gradients[0] != SENT):
            begun = self.memory_profile.gradients_stay or gradients[0] == WHOLE
            return state.early(begun, bucket) + sum(outside) * (begun and not waits)
        found = bucket * (NONE in gradients or state.beside) * (not state.buckets)
        for one, beside, each in zip(gradients, outside, self._of_stages, strict=True):
            if one == WHOLE:
                found += max(each.waiting, each.gradients) + beside * (not waits)
            elif one == SENT:
                found += (each.left if self.formulas.offloads else each.gradients) + beside
        return max(state.buckets, min(found, state.early(True, bucket) + sum(outside)))

    @cached_property
    def _outside(self) -> list[float]:
        """The bytes of whole gradients outside of blocks, by stage."""
        trained = (
            0 if self.model.freezes else outside(self.model, self.layout.tp, *self._ends(stage))
            for stage in self.flight.held
        )
        return [n * self.fsdp.sum_width for n in trained]

    def backward(self, peak: RankPeak, *, unsent: bool, modules: bool = False) -> tuple[float, float]:
        """Returns the most bytes that the backward pass of a block needs besides what all blocks keep, less what later
        blocks have released: recomputed tensors and gradients of activations; and the bytes of gathered inputs, of
        messages in transit and of ZeRO-3's blocks and gradients on their way. `unsent`: whole gradients of ZeRO-3 wait
        for the last backward pass of their stage; `modules`: of modules for further tokens alone."""
        has = peak.gradients[peak.place] != NONE or self.memory_profile.gradients_stay
        key = peak.kind, peak.place, peak.last, has, self.fsdp.waits_for(peak), unsent, modules
        if key not in self._known_passes:
            inside, fetched, _ = self._backward(peak, has, unsent=unsent, modules=modules)
            inside += self.step.beside_gradient - self.step.gathered
            self._known_passes[key] = inside, self.step.gathered + self.between + fetched
        return self._known_passes[key]

    @property
    def sends_buckets(self) -> bool:
        """Whether its stages send buckets of ZeRO-1 or 2, or any that leave for the host."""
        layout = self.layout
        shares = layout.zero in (1, 2) and layout.shard_ranks > 1
        if self.formulas.offloads:  # they leave in turn, in a pipeline it is not known when
            shares = layout.pp == 1 and self.step.data_ranks > 1 and not gathers_parameters(layout)
        return shares and self.formulas.profile.keeps_buckets and any(trained for _, trained, _ in self.shards)

    def sending(self) -> Iterator[MomentBytes]:
        """Yields the bytes of gradients, activations, logits and communication at the fullest moment of the backward
        passes in which stages send the buckets of ZeRO-1 or 2, or any that leave for the host, and at their end."""
        if not self.sends_buckets:
            return
        step, m = self.step, self.step.spec.batch.accumulation
        total, arrived = self._arrived
        known = dict[tuple[int, bool], tuple[float, float, float]]()
        for peak in self.flight.peaks:
            if not self.sends_in(peak):
                continue
            several = m > 1 and (peak.last or peak.gradients[peak.place] != NONE)
            sends = self.bucket_sends(several=several)
            if peak.kind == "B":
                key = peak.place, several
                if key not in known:
                    moment = sends, arrived[peak.place]
                    known[key] = self._backward(peak, True, unsent=False, modules=False, sends=moment)
                inside, copies, gradients = known[key]
                kept = self.kept_at(peak) + inside + step.beside_gradient - step.gathered
                yield MomentBytes("backward", gradients, kept, communication=step.gathered + copies)
            else:  # once all are there
                for number in self._buckets:
                    copies, gradients = sends(number)
                    yield MomentBytes("backward", gradients, self.kept_after(peak), communication=copies)
        copies, gradients = self.bucket_sends(several=m > 1)(total)
        yield MomentBytes("backward", gradients, communication=copies)

    def sends_in(self, peak: RankPeak) -> bool:
        """Returns whether a stage sends buckets in a pass: the last one, or with accumulate=sharded every one."""
        every = self.layout.zero == 2 and self.layout.accumulate == "sharded"
        return peak.kind in ("B", "W") and (peak.last or every)

    def bucket_sends(self, *, several: bool) -> Sends:
        """Returns MemoryFormulas.sending of this rank's buckets."""
        if several not in self._known_sends:
            self._known_sends[several] = self.formulas.sending(self.shards, self._buckets, self.layout, several=several)
        return self._known_sends[several]

    @property
    def _arrived(self) -> tuple[float, list[float]]:
        """The number of parameters that have gradients, and how many of them have before each stage's backward pass."""
        total = sum(trained for _, trained, _ in self.shards)
        blocks = [sum(run.many * run.block.trained for run in held) for held in self.runs]
        embedding = 0 if self.model.freezes or not self.first else outside(self.model, self.layout.tp, True, False)
        return total, [total - embedding - sum(blocks[: place + 1]) for place in range(len(blocks))]

    @cached_property
    def _buckets(self) -> tuple[int, ...]:
        kinds = tuple((kind.block, many) for held in self.blocks for kind, many in held)
        layout, least = self.layout, bucket_bytes(self.layout) / self.width
        ends = self.first, self.last
        return bucket_ends(self.model, layout.tp, layout.ep_shard, kinds, ends, least, folds=layout.folds)

    def _backward(
        self,
        peak: RankPeak,
        has: bool,
        *,
        unsent: bool,
        modules: bool,
        sends: tuple[Sends, float] | None = None,
    ) -> tuple[float, float, float]:
        """Returns the same for one stage, its blocks and gradients on their way alone. From block to block it gives up
        what it keeps and gets gradients of weights, unless it `has` those of an earlier micro-batch. Beside the first
        block in the backward pass, what is gathered stands for what the loss leaves; beside others it comes when the
        widest tensors have gone. Of blocks whose activations are on the host, those of the one that computes and of the
        one before it are here. Where buckets are sent, `sends` has a function that returns what that takes, by how many
        parameters have gradients, and how many have when the stage begins; the third number is of these."""
        place = peak.place
        held, blocks = self.runs[place], self.fsdp.blocks[place]
        if not blocks:
            return self.step.stream / self.step.share, 0.0, 0.0

        most, given_up, arrived, sent, first, done = (-inf, 0.0, 0.0), 0.0, 0.0, 0.0, 0, 0
        if peak.kind == "I":  # what every block has computed again waits for its weight gradients
            grown = [
                run.block.deferred - (0 if run.leaves else run.block.kept) for run in held for _ in range(run.many)
            ]
            moved = max((run.moved for run in held), default=0.0)
            moved += self._deferred_head() if self.last and place == len(self.runs) - 1 else 0.0
            here = self.step.stream / self.step.share + max(0.0, sum(grown[1:])) + moved
            # At work, and when it begins.
            for number, block in enumerate(blocks):
                (_, at_work, _), *others = self.fsdp.moments(peak, number, adds=has, unsent=unsent, sends=False)
                begins = others[-1][1] if len(others) > 1 and self.layout.shard_ranks > 1 else 0.0
                most = max(most, (here + block.half, at_work, 0.0), (here, begins, 0.0), key=sum)
            return most
        last = peak.last or not self.waits
        gradients = has or self.state.buckets > 0 or self.sends_buckets
        unsent = unsent and has
        # Those of the first micro-batch of a stage wait whole where others are added to them.
        whole_first = self.waits and not has and not peak.last
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
        added = has and self.step.spec.batch.accumulation > 1 and self.layout.accumulate == "local"
        next_runs, borrowed = [*held[-2::-1], None], dict[int, float]()
        for run, later in zip(reversed(held), next_runs, strict=True):
            block, many, window = run.block, run.many, run.block.kind.block.window
            inside, stream = block.backward
            inside = block.adding if adds else block.first if alone else inside
            sharded = block.trained * self.formulas.gradient if whole_first else self._gradients(block)
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
                    moments = self.fsdp.moments(peak, first + number, gone, adds=added, unsent=unsent, sends=last)
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
        return at_once and self.memory_profile.saves_slopes and not self.flight.splits


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
        alike.setdefault((holds, neighbours), []).append(flight)
    for ranks in alike.values():
        rank = RankParts(step, with_all_peaks(tuple(ranks)))
        least = rank.state.held + rank.fullest[0] + step.context()
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
        self.rank, self.state, self.fsdp, self.generated = rank, state, rank.fsdp, generated
        # Programs that keep all parameters whole under pp were measured with more.
        self.unsent = state.waiting > 0 and not rank.memory_profile.whole_under_pp
        """Whether all gradients of ZeRO-3 wait for the last backward pass."""
        self.gathered, self.head = rank.whole()
        self.bucket = rank.bucket()
        self.passes, self.updates_each = rank.step.spec.batch.accumulation * len(rank.flight.held), stashes(rank.layout)

        self._known_forward = dict[tuple[int, tuple[int, ...]], tuple[float, float]]()
        self._known_loss = dict[tuple[int, tuple[int, ...]], tuple[float, float]]()

    def __iter__(self) -> Iterator[MomentBytes]:
        rank, flight = self.rank, self.rank.flight
        none = (NONE,) * len(flight.held)
        # Where every backward pass is followed by an update, none has left gradients.
        peaks = (peak._replace(gradients=none) if self.updates_each else peak for peak in flight.peaks)
        for peak in peaks:
            kind, at_end = peak.kind, peak.place == len(flight.held) - 1
            if kind == "F":
                yield from self._of_forward(peak)
                if rank.last and at_end:
                    yield self._loss(peak)
            elif kind == "W":
                yield from self._of_weights(peak)
            else:
                yield self._backward(peak)
                if peak.last and self.fsdp.gathers_once and self.fsdp.units and self.unsent:
                    # Sent once autograd is through.
                    moving = self.gathered + rank.between + self.fsdp.whole_at_end(peak)
                    yield MomentBytes("backward", self._after(peak), rank.kept_after(peak), communication=moving)
                if rank.last and at_end and rank.model.mtp:  # before that of the main loss, whose logits are there
                    yield self._backward(peak, modules=True)
        yield from rank.sending()
        if self.updates_each:
            others = [tuple(max(0.0, count - 1) for count in counts) for counts in flight.most]
            kept = max(map(rank.kept_of, others))
            yield MomentBytes("optimizer", self.state.gradients + self.state.copied, kept)
        if rank.step.spec.rollout:
            unsent, made = 0.0 if gathers_parameters(rank.layout) else self.state.unsent, self.generated
            yield MomentBytes("generation", unsent, made.cache, made.logits, made.gathered)

    def _early(self, peak: RankPeak) -> float:
        return self.rank.gradients(peak.gradients, self.bucket)

    def _backward(self, peak: RankPeak, *, modules: bool = False) -> MomentBytes:
        """Returns the fullest moment of a backward pass, or of its first half."""
        rank = self.rank
        again, moving = rank.backward(peak, unsent=self.unsent, modules=modules)
        # Losses in chunks that wait for their backward pass have one gradient of the head.
        summed = rank.head_gradient() if rank.last and rank.logits_of and rank.flight.losses(peak) > 1 else 0
        waiting = rank.waiting_logits(peak, further=None if modules else 0) + summed
        # Where gradients outside of blocks wait, that of the head is there with those of its stage.
        first = peak.gradients[-1] == NONE and peak.place == len(rank.flight.held) - 1
        head = self.head * (first or not (self.unsent or self.fsdp.outside_waits))
        return MomentBytes(
            "backward", self._early(peak), rank.kept_at(peak) + again, waiting, moving + self.gathered + head
        )

    def _loss(self, peak: RankPeak) -> MomentBytes:
        rank, (last, fetched) = self.rank, self._in_loss(peak)
        arrives, later = rank.is_whole_loss(), self.head + fetched - last
        late = 0.0 if self.state.unsent else rank.late_bucket()
        logits, hidden = rank.logits(arriving=later if arrives else 0.0, bucket=late)
        # A loss in chunks adds to the head's gradient at once, also where others are deferred.
        adds = rank.flight.splits and rank.logits_of > 0 and self.passes > 1
        gradients = max(self._early(peak), rank.head_gradient() * adds)
        moving = self.gathered + last + self.fsdp.sent_last + (0.0 if arrives else later) + rank.between
        return MomentBytes("loss", gradients, rank.kept_at(peak) + hidden, logits + rank.waiting_logits(peak), moving)

    def _of_forward(self, peak: RankPeak) -> Iterator[MomentBytes]:
        """Yields the end of a forward pass, when messages to the next stage wait, and the moment at which ZeRO-3 has
        most of blocks."""
        rank, fsdp, (_, fetched) = self.rank, self.fsdp, self._in_loss(peak)
        early, kept = self._early(peak), rank.kept_at(peak)
        # Of programs with another loss it is not known.
        if any(rank.sends) and rank.memory_profile.saves_slopes and not rank.flight.splits:
            yield MomentBytes("forward", early, kept, communication=rank.sent(peak) + self.gathered + fetched)
        if fsdp.units and rank.layout.shard_ranks > 1 and rank.memory_profile.keeps_buckets:
            if fsdp.gathers_once:
                early, kept = 0.0, sum(rank.kept_by_stage)
            key = peak.place, fsdp.waits_for(peak)
            if key not in self._known_forward:
                self._known_forward[key] = max(fsdp.fetched_in_forward(peak), key=sum, default=(0.0, 0.0))
            copied, inside = self._known_forward[key]
            moving = self.gathered + fsdp.sent_last + rank.between + copied
            yield MomentBytes("forward", early, kept + inside, communication=moving)

    def _in_loss(self, peak: RankPeak) -> tuple[float, float]:
        key = peak.place, self.fsdp.waits_for(peak)
        if key not in self._known_loss:
            self._known_loss[key] = self.fsdp.fetched_in_loss(peak)
        return self._known_loss[key]

    def _of_weights(self, peak: RankPeak) -> Iterator[MomentBytes]:
        """Yields the moments of the second half of a backward pass: all gradients of the stage are there beside what
        they are computed from; then ZeRO-3 sends them."""
        rank, place = self.rank, peak.place
        early, moving, waiting = self._after(peak), self.gathered + rank.between, rank.waiting_logits(peak)
        if self.fsdp.gathers_once:
            moving += self.fsdp.fetched(peak, 0, 0)
        if self.fsdp.units and not rank.waits:
            early += sum(run.many * run.block.trained for run in rank.runs[place]) * self.fsdp.sum_width
        yield MomentBytes("backward", early, rank.kept_at(peak), waiting, moving)
        if self.fsdp.units and (peak.last or not rank.waits):
            moving += self.fsdp.sent_at_end(place)
            yield MomentBytes("backward", early, rank.kept_after(peak), waiting, moving)

    def _after(self, peak: RankPeak) -> float:
        """Returns the bytes of gradients when a backward pass has computed those of its stage."""
        places = enumerate(peak.gradients)
        return self.rank.gradients(tuple(WHOLE if n == peak.place else one for n, one in places), self.bucket)


def _fullest(rank: RankParts, limit: float = inf) -> RankMemory:
    """Returns the memory of a rank at the fullest of its moments, or at the first one that needs more than `limit`."""
    state, profile, context = rank.state, rank.memory_profile, rank.step.context()
    generated = generation_bytes(rank.step.spec, rank.of_kind.items(), (rank.first, rank.last))
    state = state._replace(parameters=state.parameters + generated.reference)
    moments, at, allocated = StepMoments(rank, state, generated), MomentBytes("optimizer", -inf), 0.0
    most = -inf
    for moment in moments:
        if (size := moment.total) <= most:
            continue
        at, most = moment, size
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
        in_flight=rank.fullest[1],
        host=round(host),
        disk=round(disk),
    )
