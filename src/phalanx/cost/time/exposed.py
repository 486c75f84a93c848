"""What nothing hides: how long a step takes where devices, their programs and the network work at the same time.

Every formula takes numbers or arrays of them: the planner bounds many layouts at once with the same ones that predict
one (plan/search/bound_seconds.py).
"""

from __future__ import annotations

from typing import Any

from phalanx.cost.elementwise import larger, rounded, smaller

OVERLAP_EXPONENT = 2.2
"""Power mean of a pass's times on device and host: 1 is their sum (nothing runs ahead), infinity the longer of both."""

BLOCKS_PER_MESSAGE = 4
"""Blocks whose gradients travel in one message where they are reduced once a step."""


def bucket_messages(blocks: Any) -> Any:
    """Returns the messages in which the state of so many blocks travels where it does once a step."""
    return larger(1, rounded(blocks / BLOCKS_PER_MESSAGE))


def pass_seconds(device: Any, host: Any) -> Any:
    """Returns the seconds of a pass that takes `device` seconds on the device and `host` seconds to start. Where
    kernels are long the host runs ahead, where they are short it falls behind: between the longer of both and their
    sum."""
    return (device**OVERLAP_EXPONENT + host**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT)


def added(traffic: Any, work: Any, slowdown: Any) -> Any:
    """Returns the seconds that `traffic` seconds of messages add to the `work` beside them: what is longer, and
    `slowdown` of what they share."""
    return larger(0.0, traffic - work) + slowdown * smaller(traffic, work)


def block_state(
    gather: Any,
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
    parameters are gathered in `gather` seconds, again where they are resharded after the forward pass, and its
    gradients reduced in `reduce`, once a step where they accumulate `local`."""
    there = gather if reshard else gather / accumulation
    back = gather * reshard + (reduce / accumulation if local else reduce)
    if not overlaps:
        return there, back
    return added(there, forward, slowdown), added(back, backward, slowdown)


def step_state(gather: Any, reduce: Any, forward: Any, backward: Any, blocks: Any, slowdown: Any) -> Any:
    """Returns the seconds that gathering parameters and reducing gradients once a step add to one micro-batch's passes,
    which hide them but for the last bucket and the first block's parameters."""
    inside = 1 - 1 / larger(2, blocks)
    hidden, before = backward * inside, forward * inside
    late = larger(0.0, reduce - hidden) + larger(0.0, gather - before)
    beside = smaller(reduce, hidden) + smaller(gather, before)
    return larger(late, (gather + reduce) * (1 - inside)) + slowdown * beside


def ends_of_blocks(gather: Any, reduce: Any, blocks: Any) -> Any:
    """Returns the seconds that ZeRO-3 adds around the blocks, once a step: the first block's parameters and what lies
    outside come before any work."""
    return 2 * (gather + reduce) / larger(1, blocks)


def boundaries(once: Any, pp: int, chunks: int, micro_batches: Any, *, overlaps: bool) -> Any:
    """Returns the seconds of messages between stages, of `once` seconds each: those on the way in and out, and where
    nothing overlaps those of every micro-batch."""
    ramps = 2 * (pp - 1) * once
    return ramps if overlaps else ramps + 2 * chunks * micro_batches * once
