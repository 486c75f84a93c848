"""Lower bounds on the time and the memory of many layouts at once, by which a search leaves out what cannot win.

They are put together from the cost model's own figures for the parts (tables.py). What a bound leaves out (latencies of
the state's collectives, the optimizer, bubbles that have no closed form) only makes it lower. Tests hold every bound
below what predict says (tests/plan/test_bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.habits import MIB
from phalanx.cost.pipeline import CLOSED, GRID
from phalanx.cost.rank_parts import Step, by_stage
from phalanx.cost.rank_time import BLEND
from phalanx.job.layout import Layout
from phalanx.plan.question import Question
from phalanx.plan.space import STATES, Plan, Rows, Space
from phalanx.plan.tables import Floats, Share, Tables, alone

IN_FLIGHT: dict[str, Callable[[int, int, int, int], int]] = {
    "1f1b": lambda p, m, _, r: min(m, p - r),
    "interleaved_1f1b": lambda p, m, v, r: (v - 1) * min(m, p) + min(m, 2 * (p - 1 - r) + 1),
    "zb_h1": lambda p, m, _, r: min(m, p - r),
    "zb_h2": lambda p, m, _, r: min(m, 2 * (p - r) - 1),
    "zb_v": lambda p, m, *_: min(m + 1, 2 * p),
    "v_half": lambda p, m, *_: min(m + 1, 2 * (p // 2 + 1)),
    "dualpipe_v": lambda p, m, *_: min(m + 1, 2 * p + 1),
    "dualpipe": lambda p, m, *_: min(m // 2 + 1, p),
}
"""Activations of a stage that a rank has at least, at its fullest (the docstrings of phalanx.schedule): from ranks,
micro-batches, stages a rank, and the rank. Of other schedules it is taken to be one."""


WAY_IN = {"zb_h1": 1.0, "zb_h2": 1.0, "zb_v": 0.5, "v_half": 0.5, "dualpipe_v": 0.5}
"""What of its forward passes a rank does before a micro-batch is with the next one for the first time."""


class Bounds:
    """The bounds of a space's layouts."""

    def __init__(self, question: Question, space: Space):
        self.question, self.space, self.tables = question, space, Tables(question, space)
        self.pp, self.shard_ranks = space.column("pp"), space.column("dp_shard") * space.column("cp")
        self.data_ranks = self.shard_ranks * space.column("dp_replicate")
        self.edp = np.maximum(1, self.shard_ranks // space.column("ep"))
        self.widths = Step(alone(question, Layout(), 1)).widths
        self.habits = question.software.habits
        self.context = self.habits.context_mib * MIB

    def pairs(self) -> tuple[Floats, Floats]:
        """Of every pair of a mesh and a micro-batch: seconds and bytes below which none of its layouts comes: nothing
        recomputed, everything sharded, all ranks of a pipeline alike, no bubble and nothing to reduce."""
        tables = self.tables
        everything, which = np.arange(len(tables.inner)), tables.inner_of
        time = self.space.accumulation * _total(tables.work(tables.whole, 0, everything)[which] / self.pp[:, None])
        parameters, gradients, optimizer = (
            tables.numbers(tables.whole).sum(1)[which] / self.pp / self.shard_ranks * width for width in self.widths
        )
        full = 2
        each = sum(number * tables.activations(moe, full, everything)[:, 0] for number, moe in tables.whole.blocks)
        kept = np.asarray(each)[which] / self.pp
        counted = all(plan.schedule in IN_FLIGHT for plan in self.space.plans)
        early = self.stays(np.arange(len(kept)), counted) * gradients
        return time, parameters + optimizer + np.maximum(gradients, early + kept) + self.context

    def stays(self, pairs: NDArray[Any], counted: bool) -> NDArray[np.bool_]:
        """Whether gradients of earlier micro-batches are there while the most are in flight; `counted` says that
        IN_FLIGHT has the schedule."""
        pp, m = self.pp[pairs], self.space.accumulation[pairs]
        return self.habits.gradients_stay | np.where(pp == 1, m > 1, counted & (m > 2 * pp + 1))

    def rows(self, rows: Rows) -> tuple[Floats, Floats]:
        """Of every layout: seconds and bytes below which it does not come."""
        time, memory = np.empty(len(rows)), np.empty(len(rows))
        shared = self.shard_ranks[rows.pair] > 1
        for (pp, plan, _), members in _grouped(self.pp[rows.pair], rows.plan, shared):
            pairs, which = np.unique(rows.pair[members], return_inverse=True)
            group = _Group(self, pairs, int(pp), int(plan))
            for (mode,), some in _grouped(rows.recompute[members]):
                parts = group.parts(int(mode))
                for (state,), those in _grouped(rows.state[members[some]]):
                    places, of_pair = members[some[those]], which[some[those]]
                    time[places] = group.seconds(parts, int(state))[of_pair]
                    memory[places] = group.bytes(parts, int(state))[of_pair]
        return time, memory


class _Part:
    """Of ranks with the same share, by pair, under one recomputation."""

    def __init__(self, group: _Group, share: Share, mode: int, flying: Floats):
        tables, inner = group.tables, group.inner
        work = tables.work(share, mode, inner)
        self.share, self.work, self.seconds, self.forward = share, work, _total(work), work[:, 0]
        self.numbers, self.inside = tables.numbers(share)[inner], tables.numbers(share, inside=True)[inner]
        kinds = [tables.activations(moe, mode, inner) for _, moe in share.blocks]
        kept = flying * share.least * np.minimum.reduce([kind[:, 0] for kind in kinds])
        # What one block needs is there whichever comes first: the least of the kinds.
        moving = np.minimum.reduce([kind[:, 1] + kind[:, 2] for kind in kinds])
        if share.head:
            moving = np.maximum(moving, tables.loss(inner))
        self.activations: Floats = kept + moving
        """Bytes, at the fullest moment at least."""


class _Group:
    """Layouts of the same pipeline: their pairs."""

    def __init__(self, bounds: Bounds, pairs: NDArray[Any], pp: int, plan: int):
        self.bounds, self.tables, self.pairs = bounds, bounds.tables, pairs
        self.inner, self.m = self.tables.inner_of[pairs], bounds.space.accumulation[pairs]
        self.pp, self.plan, self.cut = pp, bounds.space.plans[plan], self.tables.cut(pp, plan)
        self.shared = bool(bounds.shard_ranks[pairs[0]] > 1)
        self.slopes = self.tables.slopes[self.tables.outer_of[pairs]]
        self.dense_ranks, self.expert_ranks = bounds.shard_ranks[pairs], bounds.edp[pairs]
        self.count = IN_FLIGHT.get(self.plan.schedule) if pp > 1 else None

    def parts(self, mode: int) -> list[_Part]:
        """Each different share of a rank."""
        several, which = np.unique(self.m, return_inverse=True)
        found = []
        for share, (rank, _) in self.cut.shares.items():
            chunks = self.plan.pp_chunks or 1
            most = [self.count(self.pp, int(n), chunks, rank) if self.count else 1 for n in several]
            found.append(_Part(self, share, mode, np.array(most)[which]))
        return found

    def seconds(self, parts: list[_Part], state: int) -> Floats:
        slowest = np.maximum.reduce([part.seconds for part in parts])
        if self._three(state):
            time = self.m * np.maximum.reduce([self._sharing(part, state) for part in parts])
        else:
            overlaps = self.bounds.question.software.dp_overlaps
            time = self.m * slowest + np.maximum(0.0, self._sent(parts) - slowest * overlaps)
        whole, forward = (
            np.asarray(sum(number * each for each, (_, number) in zip(lists, self.cut.shares.values(), strict=True)))
            for lists in ([part.seconds for part in parts], [part.forward for part in parts])
        )
        return time + _bubble(self.plan, whole - slowest, forward / whole)

    def _three(self, state: int) -> bool:
        """Whether ranks share parameters."""
        return STATES[state].zero == 3 and self.shared

    def _sharing(self, part: _Part, state: int) -> Floats:
        """Seconds of a micro-batch on ranks that share parameters: these travel beside its passes, or before them."""
        _, reshard, accumulate = STATES[state]
        software, share = self.bounds.question.software, part.share
        gather, reduce = self._travels(part.inside, (share.dense + share.moe) * software.messages)
        there = gather * (1 if reshard else 1 / self.m) * share.part
        back = (gather * reshard + reduce * (1 / self.m if accumulate == "local" else 1.0)) * share.part
        if software.dp_overlaps:
            return np.maximum(part.seconds, there + back)
        return _total(part.work + np.stack([there, back, *np.zeros((2, len(there)))], 1))

    def _sent(self, parts: list[_Part]) -> Floats:
        """Seconds in which the state of the rank that holds most travels, once a step."""
        numbers = np.stack([part.numbers for part in parts])
        most = numbers.sum(2).argmax(0)
        fewest = min(part.share.dense + part.share.moe for part in parts)
        gather, reduce = self._travels(numbers[most, np.arange(len(most))], max(1, round(fewest / 4)))
        return gather + reduce

    def _travels(self, numbers: Floats, messages: int) -> tuple[Floats, Floats]:
        """Seconds of gathering so many parameters, dense and of experts, and of reducing their gradients. Experts that
        no rank has for itself need no messages of their own."""
        apart = np.stack([np.ones(len(numbers), bool), self.bounds.space.column("ep")[self.pairs] > 1], 1)
        started = (numbers > 0) * apart * messages
        gather = numbers * self.slopes[:, 0:2] + started * self.slopes[:, 4:6]
        reduce = numbers * self.slopes[:, 2:4] + started * self.slopes[:, 6:8]
        return gather.sum(1), reduce.sum(1)

    def bytes(self, parts: list[_Part], state: int) -> Floats:
        """Of the fullest rank: of those with the same share the first has the most in flight."""
        return np.maximum.reduce([self._bytes(part, state) for part in parts]) + self.bounds.context

    def _bytes(self, part: _Part, state: int) -> Floats:
        zero, reshard, accumulate = STATES[state]
        habits, widths, m = self.bounds.habits, self.bounds.widths, self.m
        parameters = gradients = optimizer = unsent = np.zeros(len(m))
        for held, ranks in ((part.numbers[:, 0], self.dense_ranks), (part.numbers[:, 1], self.expert_ranks)):
            each = by_stage(zero, ranks, *widths)  # type: ignore[arg-type]
            parameters, gradients = parameters + held * each[0], gradients + held * each[1]
            optimizer = optimizer + held * each[2]
            if zero >= 2 and accumulate == "local" and not habits.reduces_each:
                unsent = unsent + np.where((m > 1) & (ranks > 1), held * widths[1], 0.0)
        stays = self.bounds.stays(self.pairs, self.count is not None)
        early = np.maximum(unsent, np.where(stays, gradients, 0.0))
        whole = np.where(self.bounds.data_ranks[self.pairs] > 1, habits.bucket_numbers * widths[1], 0.0)
        if self._three(state) and not habits.gathers_matrices:
            inside, least = part.inside.sum(1), part.share.least
            blocks = min(1 + self.bounds.space.base.prefetch, least) if reshard else least
            around = part.numbers.sum(1) - inside
            whole = (
                whole + (around + inside / (part.share.dense + part.share.moe) * blocks) * self.bounds.question.width
            )
        return parameters + optimizer + np.maximum(gradients, early + part.activations + whole)


def _grouped(*keys: NDArray[Any]) -> Iterator[tuple[tuple[int, ...], NDArray[np.intp]]]:
    """The different combinations of some keys, and the places of each."""
    combined = keys[0].astype(np.int64)
    for key in keys[1:]:
        combined = combined * 4096 + key
    _, first, which = np.unique(combined, return_index=True, return_inverse=True)
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(np.bincount(which))[:-1]
    for place, members in zip(first, np.split(order, ends), strict=True):
        yield tuple(int(key[place]) for key in keys), members


def _total(work: Floats) -> Floats:
    """Seconds of both passes, device and host blended as in RankTime."""
    device, host = work[:, :2], work[:, 2:]
    return ((device**BLEND + host**BLEND) ** (1 / BLEND)).sum(1)


def _bubble(plan: Plan, others: Floats, forward: Floats) -> Floats | float:
    """Idle seconds of the slowest rank at least: from the seconds of a micro-batch on all other ranks together, and the
    share of forward passes in them. Some have a closed form, p - 1 micro-batches or, with v stages a rank, a v-th of
    that; of others the last rank waits until the first micro-batch has come through the ranks before it."""
    if plan.schedule in CLOSED:
        return others
    if plan.schedule == "interleaved_1f1b":
        return others / max(1, plan.pp_chunks)
    way = WAY_IN.get(plan.schedule, 0.0)
    return others * way * np.maximum(0.0, forward - 0.5 / GRID)
