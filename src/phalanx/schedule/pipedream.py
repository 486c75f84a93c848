"""Pipelines without a flush at the end of an optimizer step."""

from __future__ import annotations

from dataclasses import replace

from phalanx.schedule.schedule import Schedule
from phalanx.schedule.simple import one_f_one_b


def pipedream(ranks: int, micro_batches: int, steps: int = 2) -> Schedule:
    """Runs PipeDream-2BW: 1F1B through `steps` optimizer steps of M = `micro_batches` each, so the pipeline fills once.
    A micro-batch passes forward and backward through the same version of the weights, which may be one step old.

    Bubble (P - 1) / (M steps). Peak on rank r: the activations of min(M steps, P - r) micro-batches, and two versions
    of the weights, which suffice if M >= P. Source: Narayanan et al. 2020 (Memory-Efficient Pipeline-Parallel DNN
    Training), section 3.1.
    """
    return replace(one_f_one_b(ranks, steps * micro_batches), name="pipedream", steps=steps)
