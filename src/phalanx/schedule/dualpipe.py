"""A bidirectional pipeline: micro-batches enter at both ends."""

from __future__ import annotations

from phalanx.schedule.bidirectional import passes
from phalanx.schedule.order import Lane, program
from phalanx.schedule.placement import round_robin
from phalanx.schedule.schedule import Action, Schedule


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Sends the first half of the micro-batches from rank 0 to rank P - 1, the other half in reverse, through second
    copies of the stages: rank r holds stages r and P - 1 - r. Where the two meet, the forward pass of one and the
    backward pass of the other can overlap, each computing during the communication of the other.

    With P and M even, M >= 2 P, and F + B the time of such a pair: bubble (P / 2 - 1) (F + B + B - 3 W) over M (F + B)
    if both passes of a pair wait for each other; with F = I = W, (P / 2 - 1) / (3 M) if they need not. Peak on every
    rank: P + 1 activations of a stage. Other numbers of ranks are accepted, an odd P as if it were P + 1, and any
    number of micro-batches from one per direction on.

    Source: DeepSeek-AI 2024 (DeepSeek-V3 Technical Report), section 3.2.1.
    """
    half, share = -(-ranks // 2), -(-micro_batches // 2)
    ways = range(share), range(share, micro_batches)
    programs = list[tuple[Action, ...]]()
    for rank in range(ranks):
        mirror = ranks - 1 - rank
        lanes = Lane(rank, ways[0]), Lane(mirror, ways[1])
        # Each half of the ranks is a V, folded where it meets the other half.
        near = min(rank, mirror)
        programs.append(program(passes(near, half, share), lanes if near == rank else lanes[::-1]))
    line = round_robin(ranks)
    return Schedule("dualpipe", (line, line[::-1]), micro_batches, tuple(programs))
