"""Exposed time: the duration of a step if devices, their hosts and the network work at the same time.

Every formula takes numbers or arrays: the planner bounds many layouts at once with the formulas that predict one
(plan/search/bound_seconds.py).
"""

from __future__ import annotations

from typing import Any

from phalanx.cost.elementwise import larger, rounded, smaller

OVERLAP_EXPONENT = 2.2
"""Exponent of the power mean of a pass's times on device and host: 1 is their sum, infinity their maximum."""

BLOCKS_PER_MESSAGE = 4
"""Blocks whose gradients form one message if they are reduced once per step."""


def bucket_messages(blocks: Any) -> Any:
    """Returns the number of messages for the state of `blocks` blocks if it is sent once per step."""
    return larger(1, rounded(blocks / BLOCKS_PER_MESSAGE))


def pass_seconds(device: Any, host: Any) -> Any:
    """Returns the seconds of a pass that takes `device` seconds on the device and `host` seconds to launch. The host
    runs ahead of long kernels and falls behind short ones: between the maximum of both and their sum."""
    return (device**OVERLAP_EXPONENT + host**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)


def added(traffic: Any, work: Any, slowdown: Any) -> Any:
    """Returns the seconds that `traffic` seconds of messages add to the `work` that they overlap: the excess of the
    messages, and `slowdown` times the overlap."""
    return larger(0.0, traffic - work) + slowdown * smaller(traffic, work)


def block_state(
    gather: Any,
    regather: Any,
    reduce: Any,
    forward: Any,
    backward: Any,
    slowdown: Any,
    accumulation: Any,
    *,
    reshard: bool,
    local: bool,
    overlaps: bool,
) -> tuple[Any, Any]:
    """Returns the seconds that ZeRO-3 adds to a block's forward and backward pass, on average over micro-batches: its
    parameters are gathered in `gather` seconds, again in `regather` if they are resharded after the forward pass, and
    its gradients reduced in `reduce`, once per step if they accumulate `local`."""
    there = regather + (gather - regather) / accumulation if reshard else gather / accumulation
    back = regather * reshard + (reduce / accumulation if local else reduce)
    if not overlaps:
        return there, back
    return added(there, forward, slowdown), added(back, backward, slowdown)


def step_state(gather: Any, reduce: Any, forward: Any, backward: Any, blocks: Any, slowdown: Any) -> Any:
    """Returns the seconds that gathering parameters and reducing gradients once per step add to one micro-batch's
    passes, which overlap all but the last bucket and the first block's parameters."""
    inside = 1 - 1 / larger(2, blocks)
    hidden, before = backward * inside, forward * inside
    late = larger(0.0, reduce - hidden) + larger(0.0, gather - before)
    beside = smaller(reduce, hidden) + smaller(gather, before)
    return larger(late, (gather + reduce) * (1 - inside)) + slowdown * beside


def ends_of_blocks(gather: Any, reduce: Any, blocks: Any) -> Any:
    """Returns the seconds that ZeRO-3 adds outside the blocks, once per step: the parameters of the first block and
    outside the blocks arrive before any computation."""
    return 2 * (gather + reduce) / larger(1, blocks)


def boundaries(once: Any, pp: int, chunks: int, micro_batches: Any, *, overlaps: bool) -> Any:
    """Returns the exposed seconds of messages between stages, of `once` seconds each: those of warm-up and drain, and
    without overlap those of every micro-batch."""
    ramps = 2 * (pp - 1) * once
    return ramps if overlaps else ramps + 2 * chunks * micro_batches * once
