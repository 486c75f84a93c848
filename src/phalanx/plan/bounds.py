"""Lower bounds on the time and the memory of many layouts at once, by which a search leaves out what cannot win.

They are put together from the cost model's own figures for the parts (tables.py). What a bound leaves out (latencies of
the state's collectives, the optimizer, bubbles that have no closed form) only makes it lower. Tests hold every bound
below what predict says (tests/plan/test_bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.habits import MIB
from phalanx.cost.rank_parts import Step, by_stage
from phalanx.cost.rank_time import BLEND
from phalanx.job.layout import Layout
from phalanx.plan.question import Question
from phalanx.plan.space import STATES, Plan, Rows, Space
from phalanx.plan.tables import Cut, Floats, Share, Tables, alone

IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "1f1b": lambda p, m, _: min(m, p),
    "interleaved_1f1b": lambda p, m, v: min(m * v, p * v + p - 1),
    "zb_h1": lambda p, m, _: min(m, p),
    "zb_h2": lambda p, m, _: min(m, 2 * p - 1),
    "zb_v": lambda p, m, _: min(m + 1, 2 * p),
    "v_half": lambda p, m, _: min(m + 1, 2 * (p // 2 + 1)),
    "dualpipe_v": lambda p, m, _: min(m + 1, 2 * p + 1),
    "dualpipe": lambda p, m, _: min(m // 2 + 1, p),
}
"""Activations of a stage that the first rank has at least, at most (the docstrings of phalanx.schedule): from ranks,
micro-batches and stages a rank. Of others it is taken to be one."""


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
        state = tables.numbers(tables.whole).sum(1)[which] / self.pp / self.shard_ranks * sum(self.widths)
        full = 2
        kept = sum(number * tables.activations(moe, full, everything)[:, 0] for number, moe in tables.whole.blocks)
        return time, state + np.asarray(kept)[which] / self.pp + self.context

    def rows(self, rows: Rows) -> tuple[Floats, Floats]:
        """Of every layout: seconds and bytes below which it does not come."""
        time, memory = np.empty(len(rows)), np.empty(len(rows))
        keys = np.stack([self.pp[rows.pair], rows.plan, rows.state, rows.recompute], 1)
        groups, which = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(groups)))
        for (pp, plan, state, mode), members in zip(groups, np.split(order, ends[:-1]), strict=True):
            pairs, cut = rows.pair[members], self.tables.cut(int(pp), int(plan))
            time[members] = self._time(pairs, cut, self.space.plans[plan], int(state), int(mode))
            memory[members] = self._memory(pairs, cut, self.space.plans[plan], int(state), int(mode))
        return time, memory

    def _time(self, pairs: NDArray[Any], cut: Cut, plan: Plan, state: int, mode: int) -> Floats:
        """Seconds of layouts that differ in their mesh and micro-batch alone."""
        m = self.space.accumulation[pairs]
        slowest, together, sent = np.zeros(len(pairs)), np.zeros(len(pairs)), np.zeros(len(pairs))
        for share, number in cut.shares:
            seconds = _total(self.tables.work(share, mode, self.tables.inner_of[pairs]))
            slowest, together = np.maximum(slowest, seconds), together + number * seconds
            sent = np.maximum(sent, self._sent(share, pairs, state))
        overlaps = self.question.software.dp_overlaps
        if self._three(pairs, state):
            time = m * (np.maximum(slowest, sent) if overlaps else slowest + sent)
        else:
            time = m * slowest + np.maximum(0.0, sent - slowest * overlaps)
        return time + _bubble(plan, together - slowest)

    def _three(self, pairs: NDArray[Any], state: int) -> bool:
        """Whether ranks share parameters: all of a group do, or none (space.STATES)."""
        return STATES[state].zero == 3 and bool(self.shard_ranks[pairs[0]] > 1)

    def _sent(self, share: Share, pairs: NDArray[Any], state: int) -> Floats:
        """Seconds in which a rank's state travels: of zero 3 in a micro-batch, else in a step."""
        _, reshard, accumulate = STATES[state]
        slopes, three = self.tables.slopes[self.tables.outer_of[pairs]], self._three(pairs, state)
        numbers = self.tables.numbers(share, inside=three)[self.tables.inner_of[pairs]]
        gather, reduce = (numbers * slopes[:, 0:2]).sum(1), (numbers * slopes[:, 2:4]).sum(1)
        if not three:
            return gather + reduce
        m = self.space.accumulation[pairs]
        both = gather * (2 if reshard else 1 / m) + reduce * (1 / m if accumulate == "local" else 1.0)
        return both * share.part

    def _memory(self, pairs: NDArray[Any], cut: Cut, plan: Plan, state: int, mode: int) -> Floats:
        """Bytes of the first rank, which has the most in flight, or of the last, which has the loss."""
        pp, m = int(self.pp[pairs[0]]), self.space.accumulation[pairs]
        count = IN_FLIGHT.get(plan.schedule) if pp > 1 else None
        several, which = np.unique(m, return_inverse=True)
        flying = np.array([count(pp, int(n), plan.pp_chunks or 1) if count else 1 for n in several])[which]
        found = self._rank(pairs, cut.first, flying, state, mode, stays=m > 2 * pp + 1 if count or pp == 1 else m < 0)
        if cut.last != cut.first:
            once = np.ones(len(pairs))
            found = np.maximum(found, self._rank(pairs, cut.last, once, state, mode, stays=m < 0))
        return found + self.context

    def _rank(
        self, pairs: NDArray[Any], share: Share, flying: Floats, state: int, mode: int, stays: NDArray[np.bool_]
    ) -> Floats:
        """Bytes of a rank with so many activations of a stage in flight; `stays`: gradients of earlier micro-batches
        are there while the most are in flight."""
        zero, reshard, accumulate = STATES[state]
        tables, inner = self.tables, self.tables.inner_of[pairs]
        numbers, m = tables.numbers(share)[inner], self.space.accumulation[pairs]
        parameters = gradients = optimizer = unsent = np.zeros(len(pairs))
        for held, ranks in ((numbers[:, 0], self.shard_ranks[pairs]), (numbers[:, 1], self.edp[pairs])):
            each = by_stage(zero, ranks, *self.widths)  # type: ignore[arg-type]
            parameters, gradients = parameters + held * each[0], gradients + held * each[1]
            optimizer = optimizer + held * each[2]
            if zero >= 2 and accumulate == "local" and not self.habits.reduces_each:
                unsent = unsent + np.where((m > 1) & (ranks > 1), held * self.widths[1], 0.0)
        early = np.maximum(unsent, np.where(stays, gradients, 0.0))
        kinds = [tables.activations(moe, mode, inner) for _, moe in share.blocks]
        kept = flying * share.least * np.minimum.reduce([kind[:, 0] for kind in kinds])
        # What one block needs is there whichever comes first: the least of the kinds.
        moving = np.minimum.reduce([kind[:, 1] + kind[:, 2] for kind in kinds])
        if share.head:
            moving = np.maximum(moving, tables.loss(inner))
        whole = np.where(self.data_ranks[pairs] > 1, self.habits.bucket_numbers * self.widths[1], 0.0)
        if self._three(pairs, state) and not self.habits.gathers_matrices:
            inside = tables.numbers(share, inside=True)[inner].sum(1) / sum(number for number, _ in share.blocks)
            blocks = 1 + self.space.base.prefetch if reshard else share.least
            around = numbers.sum(1) - tables.numbers(share, inside=True)[inner].sum(1)
            whole = whole + (around + inside * min(blocks, share.least)) * self.question.width
        return parameters + optimizer + np.maximum(gradients, early + kept + moving + whole)


def _total(work: Floats) -> Floats:
    """Seconds of both passes, device and host blended as in RankTime."""
    device, host = work[:, :2], work[:, 2:]
    return ((device**BLEND + host**BLEND) ** (1 / BLEND)).sum(1)


def _bubble(plan: Plan, others: Floats) -> Floats | float:
    """Idle seconds, where there is a closed form that holds for every length of passes: (p - 1) micro-batches of the
    mean of the `others` of the slowest rank, with v stages a rank a v-th."""
    if plan.schedule == "1f1b":
        return others
    if plan.schedule == "interleaved_1f1b":
        return others / plan.pp_chunks
    return 0.0
