"""The schedules: one function each, which returns every rank's actions.

Bubbles are idle time over ideal computation time, with P ranks, M micro-batches, and a backward pass that takes b times
as long as a forward pass; with whole backward passes (B) they hold for every b, with split ones (I, W) for passes F, I
and W of equal time. An activation is that of one stage, live from its F to its B or W: with two stages per rank, 2 P of
them equal the peak of 1F1B on rank 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

from phalanx.schedule.schedule import Action, Kind, Schedule, action_of


def round_robin(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Assigns stages round-robin `chunks` times: stage s on rank s mod P (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int) -> tuple[int, ...]:
    """Assigns two stages per rank, to the last rank and back: rank r holds stages r and 2P - 1 - r, so the last stage,
    which has the loss, is on the first rank (Qi et al. 2023, section 6)."""
    return (*range(ranks), *reversed(range(ranks)))


def placements(kind: str, ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Returns, for each direction, the rank of each stage where stages are placed as `ScheduleEntry.placement` says."""
    straight = round_robin(ranks, chunks if kind == "round robin" else 1)
    return {"round robin": (straight,), "V": (v_shape(ranks),), "both ways": (straight, straight[::-1])}[kind]


def interleaved_1f1b(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Runs 1F1B over V = `chunks` stages per rank: groups of P micro-batches pass through a rank's first stage, then
    through its second, and so on; the last group may be smaller.

    Bubble (P - 1) / (V M) if P divides M, otherwise more. Peak on rank 0: min(M V, P V + P - 1) stage activations.
    Source: Narayanan et al. 2021, section 2.2.
    """
    programs = [_interleaved(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    return Schedule("interleaved_1f1b", (round_robin(ranks, chunks),), micro_batches, tuple(programs))


def looped_bfs(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Runs breadth first: all micro-batches pass through a rank's first stage, then through its second, and so on;
    backward passes process the stages in reverse. Each stage's parameters are needed in one stretch per direction,
    which suits sharded parameters.

    Bubble (P - 1) / (V M) if M >= P. Peak: M V stage activations. Source: Lamy-Poirier 2022 (Breadth-First Pipeline
    Parallelism), section 4.
    """
    micros, passes = range(micro_batches), range(chunks)
    programs = [
        (
            *(Action("F", rank + chunk * ranks, micro) for chunk in passes for micro in micros),
            *(Action("B", rank + chunk * ranks, micro) for chunk in reversed(passes) for micro in micros),
        )
        for rank in range(ranks)
    ]
    return Schedule("looped_bfs", (round_robin(ranks, chunks),), micro_batches, tuple(programs))


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    # A smaller last group is filled up with micro-batches that are dropped in the end: a part of an order without
    # deadlock has none.
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    stages = range(rank, ranks * chunks, ranks)
    forward = [*map(action_of, chain(*(product("F", stages, group, (0,)) for group in groups)))]
    backward = [*map(action_of, chain(*(product("B", reversed(stages), group, (0,)) for group in groups)))]
    # The first group goes through all stages but the last; a rank further from the end has two more passes to do for
    # each rank in between: there and back.
    before = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
    turns = take_turns(forward, backward, before)
    return turns if micro_batches % ranks == 0 else tuple(action for action in turns if action[2] < micro_batches)


def terapipe(ranks: int, micro_batches: int, slices: int = 4) -> Schedule:
    """Runs 1F1B over slices: the forward passes of a micro-batch's slices in order, the backward passes in reverse,
    because later slices attend to earlier ones.

    Bubble (P - 1) / (K M) with K = `slices` of equal cost. Peak on rank r: the activations of min(K M, K + P - 1 - r)
    slices. Source: Li et al. 2021 (TeraPipe), section 3.2; the paper runs all forward passes first, like GPipe, and so
    has K M live slices.
    """
    parts, micros = range(slices), range(micro_batches)
    programs = [
        take_turns(
            [Action("F", rank, micro, part) for micro in micros for part in parts],
            [Action("B", rank, micro, part) for micro in micros for part in reversed(parts)],
            before=slices - 1 + ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]
    return Schedule("terapipe", (round_robin(ranks),), micro_batches, tuple(programs), slices=slices)


class Lane(NamedTuple):
    """The passes of some micro-batches through one stage."""

    stage: int
    micros: range


Pass = tuple[Kind, int]
"""A kind, and the index of a lane."""


def times(number: int, *passes: Pass) -> list[Pass]:
    """Repeats passes `number` times; empty if it is negative."""
    return [*passes] * number


def program(passes: Iterable[Pass], lanes: Sequence[Lane]) -> tuple[Action, ...]:
    """Returns the actions for passes given as kind and lane number.

    The first F of a lane is that of its first micro-batch, the next that of the next one; so are B and I together, and
    a W belongs to the oldest I without one. Passes after a lane's last micro-batch are dropped. Dropping passes cannot
    cause a deadlock, so a pattern for many micro-batches also serves for fewer.
    """
    forward, backward = [0] * len(lanes), [0] * len(lanes)
    halves = [deque[int]() for _ in lanes]
    actions = list[Action]()
    for kind, lane in passes:
        if kind == "W":
            number = halves[lane].popleft()
        else:
            counts = forward if kind == "F" else backward
            number = counts[lane]
            counts[lane] += 1
            if kind == "I":
                halves[lane].append(number)
        stage, micros = lanes[lane]
        if number < len(micros):
            actions.append(action_of((kind, stage, micros[number], 0)))
    return tuple(actions)


def bidirectional_passes(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """Yields the passes of one of `ranks` ranks that lead to a fold and back: lane 0 has micro-batches on their way to
    the fold at the last rank, lane 1 on their way back. Each lane has at least `micro_batches` passes. Backward passes
    are split where the ranks wait for them (at the start) or where their W can fill a bubble (at the end); in between
    they stay whole, each next to a forward pass of the other lane."""
    to_fold = ranks - 1 - rank
    yield from times(2 * to_fold, ("F", 0))
    yield from times(rank + 1, ("F", 0), ("F", 1))
    yield from times(to_fold, ("I", 1), ("W", 1), ("F", 1))
    yield from times(max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1, ("F", 0), ("B", 1), ("F", 1), ("B", 0))
    yield from times(to_fold, ("B", 1), ("F", 1), ("B", 0))
    yield from times(rank + 1, ("B", 1), ("B", 0))[: rank + 1]
    split = ([1, 0] * (rank + 1))[rank + 1 :]
    late = split + [0] * to_fold
    for lane in split:
        yield "I", lane
    for lane in late[:to_fold]:
        yield "W", lane
        yield "I", 0
    for lane in late[to_fold:]:
        yield "W", lane


_HOLDS = {"F": 1, "I": 0, "W": -1}


def with_weight_passes(orders: Sequence[Sequence[Action]], stages: int, most: int) -> tuple[tuple[Action, ...], ...]:
    """Builds programs from each rank's order of F and I passes, with a W pass wherever the rank would otherwise wait,
    for another rank or because it has `most` live activations: an F adds one, a W frees one. All passes take the same
    time; those of a stage are in the order of their micro-batches, from 0 on."""
    programs = [list[Action]() for _ in orders]
    ahead = [[*reversed(order)] for order in orders]
    late = [deque[Action]() for _ in orders]
    live = [0] * len(orders)
    # By stage, the micro-batches whose input is there: all of them at the ends, where none comes from a neighbour.
    endless = sum(map(len, orders))
    ready = {"F": [endless, *[0] * stages], "I": [*[0] * (stages - 1), endless, 0]}
    unfinished = True
    while unfinished:
        now, unfinished = list[tuple[str, int]](), False
        for rank, program in enumerate(programs):
            if ahead[rank] and live[rank] + _HOLDS[ahead[rank][-1][0]] <= most:
                action = ahead[rank][-1]
                kind, stage, micro, _ = action
                if micro < ready[kind][stage]:
                    ahead[rank].pop()
                    live[rank] += _HOLDS[kind]
                    if kind == "I":
                        late[rank].append(action_of(("W", stage, micro, 0)))
                    program.append(action)
                    now.append((kind, stage))
                    continue
            if late[rank]:
                live[rank] += _HOLDS["W"]
                program.append(late[rank].popleft())
                unfinished = True
        for kind, stage in now:
            ready[kind][stage + 1 if kind == "F" else stage - 1] += 1
        unfinished = unfinished or bool(now)
    assert not any(ahead), f"the orders need more than {most} activations"
    return tuple(map(tuple, programs))


def pipedream(ranks: int, micro_batches: int, steps: int = 2) -> Schedule:
    """Runs PipeDream-2BW: 1F1B through `steps` optimizer steps of M = `micro_batches` each, so the pipeline fills once.
    A micro-batch passes forward and backward through the same version of the weights, which may be one step old.

    Bubble (P - 1) / (M steps). Peak on rank r: the activations of min(M steps, P - r) micro-batches, and two versions
    of the weights, which suffice if M >= P. Source: Narayanan et al. 2020 (Memory-Efficient Pipeline-Parallel DNN
    Training), section 3.1.
    """
    return replace(one_f_one_b(ranks, steps * micro_batches), name="pipedream", steps=steps)


def pipedream_stash(ranks: int, micro_batches: int) -> Schedule:
    """Runs PipeDream as first published: 1F1B, in which a stage's optimizer takes a step after each backward pass, and
    a micro-batch returns through the weights with which it went forward, which the stage has stashed.

    Bubble (P - 1) / M, as the pipeline drains at the end of a step of M = `micro_batches`. Peak on rank r: the
    activations of min(M, P - r) micro-batches, and as many versions of the weights. On rank r the gradient of
    micro-batch b is taken at the weights before the last min(b, P - 1 - r) updates. Source: Narayanan et al. 2019
    (PipeDream: Generalized Pipeline Parallelism for DNN Training), section 3.3.
    """
    return replace(one_f_one_b(ranks, micro_batches), name="pipedream_stash")


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Runs 1F1B with rank r's W passes r micro-batches behind.

    Bubble (P - 1) / (3 M) if M >= P: a third of 1F1B's. Peak on every rank: the activations of min(M, P) micro-batches,
    rank 0's in 1F1B. Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2.1.
    """
    return _one_stage_per_rank("zb_h1", micro_batches, [(ranks - rank, rank) for rank in range(ranks)])


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """Runs forward passes until the first gradient arrives, so that no rank ever waits: rank r begins with 2 (P - r) -
    1 of them, and its W passes lag 2 r micro-batches behind.

    Bubble 0 if M >= 2 P - 1. Peak on every rank: the activations of min(M, 2 P - 1) micro-batches. Source: Qi et al.
    2023, section 2.2. The optimizer is assumed not to wait for all ranks (section 4).
    """
    return _one_stage_per_rank("zb_h2", micro_batches, [(2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)])


def _one_stage_per_rank(name: str, micro_batches: int, shifts: Sequence[tuple[int, int]]) -> Schedule:
    """Builds a schedule from each rank's number of initial forward passes and the lag of its W passes."""
    programs = [
        program(_zero_bubble_passes(before, behind, micro_batches), [Lane(rank, range(micro_batches))])
        for rank, (before, behind) in enumerate(shifts)
    ]
    return Schedule(name, (round_robin(len(shifts)),), micro_batches, tuple(programs))


def _zero_bubble_passes(before: int, behind: int, micro_batches: int) -> Iterator[Pass]:
    """Yields `before` forward passes, then F, I and W in turn, each W `behind` micro-batches after its I."""
    yield from times(before, ("F", 0))
    for micro in range(micro_batches):
        yield "I", 0
        if micro >= behind:
            yield "W", 0
        yield "F", 0
    yield from times(min(behind, micro_batches), ("W", 0))


Passes = Callable[[int, int, int], Iterator[Pass]]
"""A generator of a rank's passes from the rank, the number of ranks and the number of micro-batches. Lane 0 is the
rank's first stage, on the way to the last rank; lane 1 its second, on the way back."""


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Has no bubble, and no more activations than 1F1B.

    Bubble 0 if M >= 2 P - 1. Peak on every rank: 2 min(M, P) activations. Source: Qi et al. 2023 (Zero Bubble Pipeline
    Parallelism), section 6.
    """
    return _v_schedule("zb_v", _zb_v, ranks, micro_batches)


def v_half(ranks: int, micro_batches: int) -> Schedule:
    """Has half of the activations of 1F1B and half of its bubble.

    Bubble (P - 1) / (2 M) for an even P, (P - 4 / 3) / (2 M) for an odd one, if M >= P. Peak on every rank: 2 (floor(P
    / 2) + 1) activations. Source: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 3.
    """
    orders = [_v_half(rank, ranks, micro_batches) for rank in range(ranks)]
    programs = with_weight_passes(orders, stages=2 * ranks, most=_activation_limit(ranks))
    return Schedule("v_half", (v_shape(ranks),), micro_batches, programs)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Runs one half of DualPipe's ranks as a V: the return of its own micro-batches replaces those of the other half,
    so there is no second copy of the parameters.

    With M >= 2 P: bubble (P - 1) (F + B + B - 3 W) over 2 M (F + B) if the forward and backward pass of a pair wait for
    each other; with F = I = W, (P - 1) / (6 M) if they need not. Peak on every rank: min(2 M, 2 P + 1) activations.
    Source: DeepSeek-AI 2025 (the DualPipe repository), DualPipeV; DualPipe itself is in the DeepSeek-V3 Technical
    Report, section 3.2.1.
    """
    return _v_schedule("dualpipe_v", bidirectional_passes, ranks, micro_batches)


def _v_schedule(name: str, passes: Passes, ranks: int, micro_batches: int) -> Schedule:
    micros = range(micro_batches)
    programs = [
        program(passes(rank, ranks, micro_batches), (Lane(rank, micros), Lane(2 * ranks - 1 - rank, micros)))
        for rank in range(ranks)
    ]
    return Schedule(name, (v_shape(ranks),), micro_batches, tuple(programs))


def _zb_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    """Yields forward passes until the first micro-batch's gradient is there; then F, I and W in turn for each lane; at
    the end W passes wherever no I is left. Needs at least 2 P - 1 micro-batches."""
    to_end = ranks - rank
    yield from times(2 * to_end - 1, ("F", 0))
    yield from times(rank, ("F", 1), ("F", 0))
    yield from times(to_end, ("F", 1), ("I", 1), ("W", 1))
    turns = max(micro_batches, 2 * ranks - 1) - ranks
    yield from times(turns, ("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    yield from times(rank, ("I", 0), ("I", 1))
    yield from times(to_end, ("I", 0), ("W", 0))
    yield from times(rank, ("W", 1), ("W", 0))


def _activation_limit(ranks: int) -> int:
    """Returns the live activations that each of P ranks may have: an even number above P."""
    return 2 * (ranks // 2 + 1)


def _v_half(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Returns the F and I passes of a rank. Every micro-batch has the same block of them, one block per 6 units of
    time: its forward passes reach the last rank by one unit per rank and return by two, and its gradients do the same a
    fixed time later. On rank r, passes on the way out thus fall on times that are r modulo 3, those on the way back on
    r + 1, and no two coincide."""
    out, back = rank, ranks + 2 * (ranks - 1 - rank)
    later = 3 * (_activation_limit(ranks) - 1)
    first, second = rank, 2 * ranks - 1 - rank
    block: list[tuple[int, Kind, int]] = [
        (out, "F", first),
        (back, "F", second),
        (out + later, "I", second),
        (back + later, "I", first),
    ]
    timed: list[tuple[int, Kind, int, int]] = sorted(
        (start + 6 * micro, kind, stage, micro) for start, kind, stage in block for micro in range(micro_batches)
    )
    return [action_of((kind, stage, micro, 0)) for _, kind, stage, micro in timed]


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
        programs.append(program(bidirectional_passes(near, half, share), lanes if near == rank else lanes[::-1]))
    line = round_robin(ranks)
    return Schedule("dualpipe", (line, line[::-1]), micro_batches, tuple(programs))


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Runs one micro-batch at a time, forward and back: one rank works while the others wait.

    Bubble P - 1. Peak: the activations of 1 micro-batch. Source: Huang et al. 2019 (GPipe), figure 2b.
    """
    programs = [
        [Action(kind, rank, micro) for micro in range(micro_batches) for kind in ("F", "B")] for rank in range(ranks)
    ]
    return Schedule("naive", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Runs all forward passes, then all backward passes.

    Bubble (P - 1) / M. Peak: the activations of M micro-batches. Source: Huang et al. 2019, section 2.2. The paper
    reverses the backward passes; here they are in the order of the micro-batches, with the same bubble and peak, so
    that gradients are accumulated in the same order as in the other schedules.
    """
    micros = range(micro_batches)
    programs = [[Action(kind, rank, micro) for kind in ("F", "B") for micro in micros] for rank in range(ranks)]
    return Schedule("gpipe", (round_robin(ranks),), micro_batches, tuple(map(tuple, programs)))


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Runs P - 1 - r forward passes on rank r; then forward and backward passes alternate, until only backward passes
    remain.

    Bubble (P - 1) / M. Peak on rank r: the activations of min(M, P - r) micro-batches. Source: Narayanan et al. 2021,
    section 2.2 (PipeDream-Flush).
    """
    programs = [alternating(rank, micro_batches, before=ranks - 1 - rank) for rank in range(ranks)]
    return Schedule("1f1b", (round_robin(ranks),), micro_batches, tuple(programs))


def alternating(stage: int, micro_batches: int, before: int) -> tuple[Action, ...]:
    """Returns the program of one stage: `before` forward passes, alternating forward and backward passes, the remaining
    backward passes. A stage then has at most `before` + 1 micro-batches in flight."""
    forward = [action_of(("F", stage, micro, 0)) for micro in range(micro_batches)]
    backward = [action_of(("B", stage, micro, 0)) for micro in range(micro_batches)]
    return take_turns(forward, backward, before)


def take_turns(forward: list[Action], backward: list[Action], before: int) -> tuple[Action, ...]:
    """Returns `before` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    before = min(before, len(forward))
    turns = [action for pair in zip(forward[before:], backward, strict=False) for action in pair]
    return (*forward[:before], *turns, *backward[len(forward) - before :])
