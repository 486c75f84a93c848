"""Memory of the loss on a pipeline rank: the logits, and what it saves of micro-batches in flight."""

from __future__ import annotations

from phalanx.cost.block_memory import StepSizes
from phalanx.cost.held import table
from phalanx.cost.in_flight import Flight, RankPeak
from phalanx.partition.derived import gathers_parameters
from phalanx.partition.tensor_slices import head_tiles

TILE_LOSS_TENSORS = 1, 1
"""Tensors as large as a tile's logits, in fp32 and in the width of the computation: its scores become probabilities and
their gradient in place."""


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
        if self.memory_profile.saves_slopes and not self.logits_of and tiles == 1 and not self.flight.splits:
            slopes = tokens * rows * self.width + (0 if least else self.head_gradient())
            most = max(most, slopes + step.stream + arriving)
        given = step.stream + (0 if least else self.head_gradient()) if bucket and not self.logits_of else 0
        return max(most - bucket, given, step.final_norm - step.head_reads + arriving), read

    def waiting_logits(self, peak: RankPeak | None = None, *, further: int | None = None) -> float:
        """Returns the bytes of what the loss saves (the gradient of the logits, log-probabilities in fp32, or logits)
        and of what the head read, of micro-batches in flight at a peak (by default the one with most of them) other
        than the one that is at work in the last stage, and of that one's `further` losses before its last one, by
        default those of model.mtp."""
        flight, step, layout, modules = self.flight, self.step, self.layout, self.model.mtp
        at_work = peak is None or peak.place == len(flight.held) - 1
        losses = max(map(flight.losses, flight.peaks)) if peak is None else flight.losses(peak)
        further = modules * at_work if further is None else further
        others = max(0.0, losses - at_work / step.slices) * step.slices
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
