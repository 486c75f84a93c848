"""`layout.loss_chunk=auto`: whether the loss computes logits in chunks of tokens follows from the predicted memory."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.layout import Layout
from phalanx.cost.memory.rank_memory import RankParts, StepParts, step_memory
from phalanx.cost.spec import StepSpec

SHARE = 0.1
"""The least share of logits in the memory at the peak for which the loss computes them in chunks."""


def with_loss_chunk(spec: StepSpec) -> StepSpec:
    """Returns the spec with a number in place of `loss_chunk=auto`: without chunks if the logits of a micro-batch would
    be less than a tenth of the memory of their rank at its peak, and fit."""
    if spec.layout.loss_chunk != "auto":
        return spec
    whole = _with(spec, 0)
    step = StepParts(whole)
    parts = [RankParts(step, flight) for flight in step.flights]
    fits = spec.cluster.accelerator.memory_gib * 2**30 or float("inf")
    for memory, rank in zip(step_memory(whole), parts, strict=True):
        logits = rank.logits()[0] + rank.waiting_logits()
        if logits >= SHARE * memory.allocated or (logits and memory.needed > fits):
            # The rank's tokens of a micro-batch, or of a slice of it.
            return _with(spec, spec.layout.logits_of(int(step.pass_tokens)))
    return whole


def _with(spec: StepSpec, chunk: int) -> StepSpec:
    layout: Layout = replace(spec.layout, loss_chunk=chunk)
    return replace(spec, layout=layout)
