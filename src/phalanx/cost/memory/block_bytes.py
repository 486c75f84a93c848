"""Sizes of a step that its blocks and ranks share, and the bytes of one block on a rank."""

from __future__ import annotations

from dataclasses import replace
from operator import sub
from typing import NamedTuple

from phalanx.blocks.kinds import FEED_FORWARD
from phalanx.blocks.lora import saved_input
from phalanx.blocks.place import place_of
from phalanx.blocks.residual import norm_backward, norm_saved
from phalanx.cost.held import BlockParameters, LayerKind, block_parameters
from phalanx.cost.memory.activations import deferred, saved, workspace
from phalanx.cost.spec import StepSpec
from phalanx.partition.pipeline import slices_of, splits_backward
from phalanx.partition.recompute import Mode, uniform_recompute

TRANSIT = 2
"""Number of messages between stages that a rank has in transit at a time: one that arrives and one that leaves."""


class StepSizes:
    """Sizes of a micro-batch on one rank."""

    def __init__(self, spec: StepSpec):
        self.spec, self.memory_profile = spec, spec.framework.memory_profile
        if spec.products == "fp16":
            self.memory_profile = self.memory_profile.fp16 or self.memory_profile
        if spec.framework.attention == "unfused" and self.memory_profile.scores != "always":
            self.memory_profile = replace(self.memory_profile, scores="always")
        layout = spec.layout
        self.tokens = spec.batch.micro_batch * spec.model.seq_len / layout.cp
        self.slices = slices_of(layout)
        self.splits = splits_backward(layout)
        self.pass_tokens = self.tokens / self.slices
        """Tokens of a micro-batch that pass a stage at a time."""
        self.share = layout.tp if layout.sp else 1
        self.stream = self.pass_tokens * spec.model.d_model * spec.width
        place = place_of(spec.model, layout, width=spec.width, profile=self.memory_profile)
        inputs = norm_saved(place, spec.model.d_model) + spec.model.d_model * spec.width
        self.head_reads = self.pass_tokens * inputs / self.share
        """Bytes that the final norm and the head save."""
        self.final_norm = self.pass_tokens * norm_backward(place, spec.model.d_model) / self.share
        """Bytes in the backward pass of the final norm, with its input."""
        self.under_way = TRANSIT * self.stream / self.share
        """Bytes of messages between stages."""


class BlockBytes:
    """Bytes of one block of a kind on a rank."""

    def __init__(self, step: StepSizes, kind: LayerKind):
        model, memory_profile, width = step.spec.model, step.memory_profile, step.spec.width
        layout = uniform_recompute(step.spec.layout, kind.recompute)
        narrow = step.spec.products in ("fp8", "fp4")
        alone = replace(layout, recompute="none")
        self.parameters: BlockParameters = block_parameters(model, layout, kind.block)
        parts, every = (
            [size for _, size in saved(model, each, width, kind.block, memory_profile, narrow, step.slices)]
            for each in (layout, alone)
        )
        self.kept, whole = step.tokens * sum(parts), step.tokens * sum(every)
        if kind.recompute == "products":  # each comes back when it is needed, and goes before the next
            whole = self.kept + step.tokens * max(map(sub, every, parts), default=0.0)
        self._of_slices = step, kind, layout, width, memory_profile, narrow
        self.again = max(0.0, whole - self.kept) / step.slices
        self.deferred = step.tokens * deferred(model, layout, width, kind.block)
        """Bytes that wait for the weights' gradients where these are put off."""
        # Gradients as wide as the MLP, of what its activation reads: that of what it wrote takes the place of what it
        # wrote, which the last matrix does not need any longer, if it has saved it. Of experts also those of rows.
        last = "moe.experts.down" if kind.block.routed else "mlp.down"
        reads = saved_input(place_of(model, layout), "feed_forward", last) > 0
        # With deferred weight gradients it needs it still.
        tensors = (2 if model.gated else 1) + (0 if reads and not step.splits else 1)
        wide = FEED_FORWARD[kind.block.feed_forward].width(model) * tensors / layout.tp
        if kind.block.routed:
            rows = model.moe.top_k * (memory_profile.imbalance if layout.ep > 1 else 1)
            spread = step.share if memory_profile.routes_shards else 1
            wide = rows * (wide + model.d_model / spread)
        # What is computed again ends with an output that nothing needs.
        outputs = 2 if kind.recompute == "full" else 1
        attention = workspace(
            model,
            alone,
            width,
            kind.block,
            memory_profile,
            narrow,
            step.spec.document_mask,
            step.spec.batch.micro_batch,
            step.slices,
            step.splits,
        )
        self.backward = self.again + max(step.pass_tokens * wide * width, attention), outputs * step.stream / step.share
        """Bytes of the backward pass besides what is kept: inside the block, and of its residual stream."""

    def kept_of(self, slices: int) -> float:
        """Returns the bytes that the block keeps of the first slices of a micro-batch, as many as of sequences of these
        alone, since later slices see more keys; and once the backward pass of a later slice has been, of the gradients
        of their keys and values. What is fully recomputed counts as the average slice."""
        step, kind, layout, width, profile, narrow = self._of_slices
        share, tokens = slices / step.slices, slices * step.pass_tokens
        if not slices or slices == step.slices or kind.recompute == "full":
            return share * self.kept
        model = replace(step.spec.model, seq_len=int(step.spec.model.seq_len * share))
        return tokens * sum(size for _, size in saved(model, layout, width, kind.block, profile, narrow, slices))

    def seen_gradients(self, slices: int) -> float:
        """Returns the bytes of the gradients of the keys and values of the first slices, which later ones have seen."""
        step, kind, layout, width, profile, narrow = self._of_slices
        whole = replace(layout, recompute="full")  # keeps these beside the block's input
        _, *seen = saved(step.spec.model, whole, width, kind.block, profile, narrow, step.slices)
        return slices * step.pass_tokens * sum(size for _, size in seen)


class BlockRun(NamedTuple):
    """Consecutive blocks of one kind in a stage."""

    block: BlockBytes
    many: int
    recompute: Mode
    leaves: bool
    """Whether their activations wait on the host."""
