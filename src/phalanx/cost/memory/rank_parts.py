"""The memory of one rank of a pipeline at each moment of a step, part by part, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from phalanx.blocks.kinds import FEED_FORWARD, BlockKind
from phalanx.cost.held import BlockParameters, LayerKind, block_parameters, kinds_of, outside, table
from phalanx.cost.matrices import matrix_work
from phalanx.cost.memory.activations import saved, workspace
from phalanx.cost.memory.formulas import MemoryFormulas, expert_ranks
from phalanx.cost.memory.in_flight import Flight
from phalanx.cost.placed import placed
from phalanx.cost.spec import StepSpec
from phalanx.optimizers.facts import optimizer_costs
from phalanx.partition.pipeline import flushes
from phalanx.partition.recompute import uniform_recompute, written
from phalanx.units import MIB

TRANSIT = 2
"""Number of messages between stages that a rank has in transit at a time: one that arrives and one that leaves."""


class BlockBytes:
    """Bytes of one block of a kind on a rank."""

    def __init__(self, step: StepParts, kind: LayerKind):
        model, memory_profile, width = step.spec.model, step.memory_profile, step.spec.width
        layout = uniform_recompute(step.spec.layout, kind.recompute)
        narrow = step.spec.products in ("fp8", "fp4")
        alone = replace(layout, recompute="none")
        self.parameters: BlockParameters = block_parameters(model, layout.tp, layout.ep, kind.block)
        self.kept = step.tokens * sum(
            size for _, size in saved(model, layout, width, kind.block, memory_profile, narrow)
        )
        whole = step.tokens * sum(size for _, size in saved(model, alone, width, kind.block, memory_profile, narrow))
        self.again = max(0.0, whole - self.kept)
        # Gradients as wide as the MLP, of what its activation reads: that of what it wrote takes the place of what it
        # wrote, which the last matrix does not need any longer. Of experts also those of rows.
        tensors = 2 if model.gated else 1
        wide = FEED_FORWARD[kind.block.feed_forward].width(model) * tensors / layout.tp
        if kind.block.routed:
            rows = model.moe.top_k * (memory_profile.imbalance if layout.ep > 1 else 1)
            spread = step.share if memory_profile.routes_shards else 1
            wide = rows * (wide + model.d_model / spread)
        # What is computed again ends with an output that nothing needs.
        outputs = 2 if kind.recompute == "full" else 1
        attention = step.spec.batch.micro_batch * workspace(model, alone, width, kind.block, memory_profile, narrow)
        self.backward = self.again + max(step.tokens * wide * width, attention), outputs * step.stream / step.share
        """Bytes of the backward pass besides what is kept: inside the block, and of its residual stream."""


class StepParts:
    """Sizes that all ranks of a step share."""

    def __init__(self, spec: StepSpec):
        self.spec, self.memory_profile = spec, spec.framework.memory_profile
        if spec.products == "fp16":
            self.memory_profile = self.memory_profile.fp16 or self.memory_profile
        if spec.framework.attention == "unfused" and self.memory_profile.scores != "always":
            self.memory_profile = replace(self.memory_profile, scores="always")
        layout = spec.layout
        self.cut, self.flights = placed(spec)
        self.tokens = spec.batch.micro_batch * spec.model.seq_len / layout.cp
        self.share = layout.tp if layout.sp else 1
        self.stream = self.tokens * spec.model.d_model * spec.width
        self.under_way = TRANSIT * self.stream / self.share
        """Bytes of messages between stages."""
        self.formulas = MemoryFormulas(
            self.memory_profile, spec.width, lambda stored: optimizer_costs(spec.optimizer, spec.model, stored)
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
        self.count = sum(many for held in self.blocks for _, many in held)
        self.first, self.last = 0 in flight.held, flight.stages - 1 in flight.held
        self.outside = outside(self.model, self.layout.tp, self.first, self.last)
        dense, experts = float(self.outside), 0.0
        for kind, many in (pair for held in self.blocks for pair in held):
            parameters = step.kinds[kind].parameters
            dense, experts = dense + many * parameters.dense, experts + many * parameters.experts
        ranks = self.layout.shard_ranks
        self.shards = (dense, ranks), (experts, expert_ranks(ranks, self.layout.ep))
        """Parameters of the rank's stages, and over how many ranks their state is sharded: dense ones, and experts."""

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
        if self.step.data_ranks == 1 or (layout.zero == 3 and layout.shard_ranks > 1):
            return 0
        whole = sum(numbers for numbers, _ in self.shards) * self.formulas.gradient
        return min(whole, layout.bucket_mb * MIB)

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

    def kept(self) -> tuple[float, float]:
        """Returns the most bytes that blocks keep for all micro-batches in flight, and the number of these."""
        sizes = [sum(many * self.step.kinds[kind].kept for kind, many in held) for held in self.blocks]
        if self.memory_profile.keeps_boundaries and self.layout.pp > 1:
            last, message = self.flight.stages - 1, self.step.stream / self.step.share
            ends = [(stage > 0) + (stage < last) for stage in self.flight.held]
            sizes = [size + many * message for size, many in zip(sizes, ends, strict=True)]
        bytes_of = {counts: sum(n * size for n, size in zip(counts, sizes, strict=True)) for counts in self.flight.most}
        most = max(bytes_of, key=bytes_of.__getitem__)
        return bytes_of[most], sum(most) / len(most)

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
        most = max(self._backward(held, gradients) for held in self.blocks)
        return most, gathered + between

    def _backward(self, held: Sequence[tuple[LayerKind, int]], gradients: bool) -> float:
        """Returns the same for one stage. Blocks with the same recomputation count as one run, which keeps everything
        until its end; then it has gradients of its weights instead."""
        most = given_up = 0.0
        for _, run in groupby(reversed(held), lambda pair: pair[0].recompute):
            here = [(self.step.kinds[kind], many) for kind, many in run]
            inside, stream = (max(parts) for parts in zip(*(kind.backward for kind, _ in here), strict=True))
            most = max(most, inside + stream - given_up)
            given_up += sum(many * (kind.kept - (0 if gradients else self._gradients(kind))) for kind, many in here)
        return most or self.step.stream / self.step.share

    def _gradients(self, kind: BlockBytes) -> float:
        """Returns the bytes of the gradients of a block's weights."""
        layout, each = self.layout, 0.0
        for numbers, (_, ranks) in zip(kind.parameters[:2], self.shards, strict=True):
            each += numbers * self.formulas.per_parameter(layout.zero, ranks, self.step.data_ranks)[1]
        return each

    def logits(self) -> tuple[float, float]:
        """Returns the bytes of the logits at the peak of the loss, and of the inputs of head and final norm."""
        if not self.last:
            return 0, 0
        step, layout = self.step, self.layout
        rows = table(self.model, layout.tp) // self.model.d_model
        tokens = min(layout.loss_chunk or step.tokens, step.tokens)
        wide, narrow = self.memory_profile.split_loss_tensors if layout.tp > 1 else self.memory_profile.loss_tensors
        # What is in fp32 anyway needs no second form.
        each = wide * max(4, self.width) + (narrow * self.width if self.width < 4 or not wide else 0)
        each += self._capped()
        read = 2 * step.stream / step.share + (step.stream if layout.sp and layout.tp > 1 else 0)
        if layout.loss_chunk:  # of chunks before this one: gradients of what they read, and of the head
            read += step.stream + table(self.model, layout.tp) * self.width
        return tokens * rows * each, read

    def waiting_logits(self) -> float:
        """Returns the bytes of the log-probabilities, and of what the head read, of micro-batches in flight other than
        the one that the moment is about."""
        others = self.flight.losses - 1
        if not self.last or others <= 0:
            return 0
        step, layout = self.step, self.layout
        rows = 0 if layout.loss_chunk else table(self.model, layout.tp) // self.model.d_model
        each = max(4, self.width) + self._capped()
        return others * (step.tokens * rows * each + 2 * step.stream / step.share)

    def _capped(self) -> int:
        """Returns the bytes per logit that a soft cap saves: its result."""
        return self.width if self.model.logit_softcap else 0

    def whole(self) -> float:
        """Returns the bytes of ZeRO-3's unsharded parameters and their gradients in transit, of buckets and dummies."""
        layout, memory_profile = self.layout, self.memory_profile
        found = self.formulas.buffer(self.step.data_ranks)
        if memory_profile.dummy_gradients:
            matrices = sum(kind.parameters.matrices for kind in self.present)
            found += (matrices + self.last * table(self.model, layout.tp)) * self.width
        if layout.zero < 3 or layout.shard_ranks == 1:
            return found
        if memory_profile.gathers_matrices:
            matrix = max(table(self.model, layout.tp), *(kind.parameters.largest for kind in self.present))
            return found + matrix * 2 * self.width
        dealt_out = self.shards[1][1] > 1  # experts that no other rank has are not gathered
        sizes = [(kind.parameters.dense + dealt_out * kind.parameters.experts, kind.kept) for kind in self.present]
        block, kept = max(sizes, key=lambda size: size[0], default=(0, 0))
        blocks = self.formulas.gathers(self.count, layout.pp, layout.prefetch, reshard=layout.reshard)
        outside = self.outside + self.last * table(self.model, layout.tp)
        return found + self.formulas.gathered(outside, block, blocks, kept)
