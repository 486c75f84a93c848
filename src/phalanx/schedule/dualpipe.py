"""Micro-batches through the pipeline both ways at a time."""

from __future__ import annotations

from phalanx.schedule.bidirectional import passes
from phalanx.schedule.order import Lane, program
from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """The first half of the micro-batches goes from rank 0 to rank P - 1, the other half the other way, through second
    copies of the stages: rank r holds stages r and P - 1 - r. Where the two meet, one's forward pass and the other's
    backward pass can share their time, computing while the other communicates.

    With P and M even, M >= 2 P, and F + B the time of such a pair: bubble (P / 2 - 1) (F + B + B - 3 W) over M (F + B)
    where both passes of a pair wait for each other; with F = I = W, (P / 2 - 1) / (3 M) where they need not. Peak on
    every rank: P + 1 activations of a stage. Other numbers of ranks are taken as well, an odd P as if it were P + 1,
    and of micro-batches from one for each way on. Source: DeepSeek-AI 2024 (DeepSeek-V3 Technical Report), section
    3.2.1."""
    half, share = -(-ranks // 2), -(-micro_batches // 2)
    ways = range(share), range(share, micro_batches)
    programs = list[tuple[Action, ...]]()
    for rank in range(ranks):
        mirror = ranks - 1 - rank
        lanes = Lane(rank, ways[0]), Lane(mirror, ways[1])
        # Each half of the ranks is a V of its own, folded where it meets the other half.
        near = min(rank, mirror)
        programs.append(program(passes(near, half, share), lanes if near == rank else lanes[::-1]))
    line = round_robin(ranks)
    return Schedule("dualpipe", (line, line[::-1]), micro_batches, tuple(programs))
