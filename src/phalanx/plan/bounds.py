"""Lower bounds on the time and the memory of many layouts at once, by which a search leaves out what cannot win.

Every bound is made of the cost model's own figures for the parts (a block, the head, a collective), asked once for each
combination of degrees that it depends on, and put together for all layouts by NumPy. What is left out of a bound
(latencies, the optimizer, bubbles that have no closed form) only makes it lower. Tests hold every bound below what
predict says (tests/plan/test_bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.activations import block
from phalanx.cost.case import Case
from phalanx.cost.communication import group
from phalanx.cost.habits import MIB
from phalanx.cost.held import block_parameters, outside
from phalanx.cost.link import Group, seconds
from phalanx.cost.rank_parts import Step, by_stage
from phalanx.cost.rank_time import BLEND, Content, RankTime, around_time, block_time, contents
from phalanx.cost.traffic import Collective
from phalanx.job.batch import Batch
from phalanx.job.cluster import Cluster
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.plan.case import stages
from phalanx.plan.question import Question
from phalanx.plan.space import RECOMPUTE, STATES, Rows, Space

Floats = NDArray[np.float64]
HUGE = 1e15
"""Bytes beside which latencies are nothing."""

IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "1f1b": lambda p, m, _: min(m, p),
    "interleaved_1f1b": lambda p, m, v: min(m * v, p * v + p - 1),
    "zb_h1": lambda p, m, _: min(m, p),
    "zb_h2": lambda p, m, _: min(m, 2 * p - 1),
    "zb_v": lambda p, m, _: 2 * min(m, p),
    "v_half": lambda p, m, _: min(2 * m, 2 * (p // 2 + 1)),
    "dualpipe_v": lambda p, m, _: min(2 * m, 2 * p + 1),
}
"""Activations of a stage that the first rank has at most (the docstrings of phalanx.schedule): from ranks,
micro-batches and stages a rank. Of others it is taken to be one."""


@dataclass(frozen=True)
class Cut:
    """What the ranks of a pipeline hold: each kind of content once, and how many ranks have it."""

    contents: tuple[tuple[Content, int], ...]
    first: Content
    least: float
    """Blocks of the smallest stage of the first rank."""


class Bounds:
    """The bounds of a space's layouts."""

    def __init__(self, question: Question, space: Space):
        self.question, self.space = question, space
        column = space.column
        self.pp, self.shard_ranks = column("pp"), column("dp_shard") * column("cp")
        inner = np.stack([column(name) for name in ("tp", "sp", "cp", "cp_ulysses", "ep")] + [space.micro_batch], 1)
        self.inner, self.inner_of = np.unique(inner, axis=0, return_inverse=True)
        outer = np.stack([column("tp"), column("cp") * column("dp_shard"), column("dp_replicate"), column("ep")], 1)
        self.outer, self.outer_of = np.unique(outer, axis=0, return_inverse=True)
        self.edp = np.maximum(1, self.shard_ranks // column("ep"))
        moe = [question.model.is_moe_layer(layer) for layer in range(question.model.n_layers)]
        self.layers = {True: sum(moe), False: len(moe) - sum(moe)}
        self.widths = Step(_case(question, Layout(), 1), (range(question.model.n_layers),)).widths
        self.tables: dict[tuple[str, int, int], Floats] = {}
        self.numbers: dict[tuple[Content, bool], Floats] = {}
        self.slopes = self._slopes()
        self.context = question.software.habits.context_mib * MIB

    def pairs(self) -> tuple[Floats, Floats]:
        """Of every pair of a mesh and a micro-batch: seconds and bytes below which none of its layouts comes: nothing
        recomputed, everything sharded, all ranks of a pipeline alike, no bubble and nothing to reduce."""
        everything = np.arange(len(self.inner))
        whole = Content(self.layers[False], self.layers[True], True, True)
        time = self.space.accumulation * _total(self._work(whole, 0, everything)[self.inner_of] / self.pp[:, None])
        held = self._parameters(whole).sum(1)[self.inner_of]
        state = held / self.pp / self.shard_ranks * sum(self.widths)
        kept = sum(number * self._kept(moe, 2, everything) for moe, number in self.layers.items() if number)
        return time, state + np.asarray(kept)[self.inner_of] / self.pp + self.context

    def rows(self, rows: Rows) -> tuple[Floats, Floats]:
        """Of every layout: seconds and bytes below which it does not come."""
        time, memory = np.empty(len(rows)), np.empty(len(rows))
        keys = np.stack([self.pp[rows.pair], rows.plan, rows.state, rows.recompute], 1)
        groups, which = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(groups)))
        for (pp, plan, state, mode), members in zip(groups, np.split(order, ends[:-1]), strict=True):
            time[members], memory[members] = self._group(rows.pair[members], int(pp), int(plan), int(state), int(mode))
        return time, memory

    def _group(self, pairs: NDArray[Any], pp: int, plan: int, state: int, mode: int) -> tuple[Floats, Floats]:
        """Layouts that differ in their mesh and micro-batch alone."""
        cut = self._cut(pp, plan)
        m = self.space.accumulation[pairs]
        slowest, together, sent = np.zeros(len(pairs)), np.zeros(len(pairs)), np.zeros(len(pairs))
        for content, number in cut.contents:
            seconds = _total(self._work(content, mode, self.inner_of[pairs]))
            slowest, together = np.maximum(slowest, seconds), together + number * seconds
            sent = np.maximum(sent, self._sent(content, pairs, state))
        overlaps = self.question.software.dp_overlaps
        if STATES[state].zero == 3:
            time = m * (np.maximum(slowest, sent) if overlaps else slowest + sent)
        else:
            time = m * slowest + np.maximum(0.0, sent - slowest * overlaps)
        return time + _bubble(self.space.plans[plan], together - slowest), self._memory(pairs, cut, plan, state, mode)

    def _memory(self, pairs: NDArray[Any], cut: Cut, plan: int, state: int, mode: int) -> Floats:
        """State and activations of the first rank."""
        zero, _, accumulate = STATES[state]
        numbers, m = self._parameters(cut.first)[self.inner_of[pairs]], self.space.accumulation[pairs]
        shard, pp = self.shard_ranks[pairs], int(self.pp[pairs[0]])
        parameters = gradients = optimizer = early = np.zeros(len(pairs))
        for held, ranks in ((numbers[:, 0], shard), (numbers[:, 1], self.edp[pairs])):
            each = by_stage(zero, ranks, *self.widths)  # type: ignore[arg-type]
            parameters = parameters + held * each[0]
            gradients = gradients + held * each[1]
            optimizer = optimizer + held * each[2]
            if zero >= 2 and accumulate == "local" and not self.question.software.habits.reduces_each:
                early = early + np.where((m > 1) & (ranks > 1), held * self.widths[1], 0.0)
        schedule, chunks = self.space.plans[plan]
        count = IN_FLIGHT.get(schedule, lambda *_: 1) if pp > 1 else lambda *_: 1
        several, which = np.unique(m, return_inverse=True)
        flying = np.array([count(pp, int(n), chunks or 1) for n in several])[which]
        # From twice as many on, gradients of earlier micro-batches are there while the most are in flight.
        early = np.maximum(early, np.where(m > 2 * pp + 1, gradients, 0.0)) if schedule in IN_FLIGHT else early
        kinds = [self._kept(moe, mode, self.inner_of[pairs]) for moe, number in self.layers.items() if number]
        kept = flying * cut.least * np.minimum.reduce(kinds)
        return parameters + optimizer + np.maximum(gradients, early + kept) + self.context

    def _sent(self, content: Content, pairs: NDArray[Any], state: int) -> Floats:
        """Seconds in which a rank's state travels: of zero 3 in a micro-batch, else in a step."""
        zero, reshard, accumulate = STATES[state]
        slopes = self.slopes[self.outer_of[pairs]]
        numbers = self._parameters(content, inside=zero == 3)[self.inner_of[pairs]]
        gather = (numbers * slopes[:, 0:2]).sum(1)
        reduce = (numbers * slopes[:, 2:4]).sum(1)
        if zero < 3 or self.shard_ranks[pairs[0]] == 1:
            return gather + reduce
        m = self.space.accumulation[pairs]
        return gather * (2 if reshard else 1 / m) + reduce * (1 / m if accumulate == "local" else 1.0)

    def _work(self, content: Content, mode: int, inner: NDArray[Any]) -> Floats:
        """Of some inner combinations: device and host seconds of a micro-batch on a rank, forward and backward."""
        work = self._around(content.embedding, content.head, inner)
        for number, moe in ((content.dense, False), (content.moe, True)):
            if number:
                work = work + number * self._blocks(moe, mode, inner)
        return work

    def _blocks(self, moe: bool, mode: int, inner: NDArray[Any]) -> Floats:
        """The same of a block."""
        return self._asked(("block", moe, mode), inner, 4, lambda case: _seconds(block_time(case, moe)))

    def _around(self, embedding: bool, head: bool, inner: NDArray[Any]) -> Floats:
        """The same of what lies around the blocks."""
        content = Content(0, 0, embedding, head)
        return self._asked(
            ("around", embedding + 2 * head, 0), inner, 4, lambda case: _seconds(around_time(case, content))
        )

    def _kept(self, moe: bool, mode: int, inner: NDArray[Any]) -> Floats:
        """Of some inner combinations: bytes that a block keeps of a micro-batch."""
        question = self.question
        narrow = question.products in ("fp8", "fp4")

        def kept(case: Case) -> float:
            sizes = block(question.model, case.layout, question.width, moe, question.software.habits, narrow)
            tokens = case.batch.micro_batch * question.model.seq_len / case.layout.cp
            return tokens * sum(size for _, size in sizes)

        return self._asked(("kept", moe, mode), inner, 1, kept)[:, 0]

    def _asked(self, what: tuple[str, int, int], inner: NDArray[Any], width: int, ask: Callable[[Case], Any]) -> Floats:
        """What the cost model says of some inner combinations: each is asked once."""
        table = self.tables.setdefault(what, np.full((len(self.inner), width), np.nan))
        for number in np.unique(inner[np.isnan(table[inner, 0])]):
            tp, sp, cp, ulysses, ep, micro = self.inner[number].tolist()
            layout = Layout(
                tp=tp,
                sp=bool(sp),
                cp=cp,
                cp_ulysses=ulysses,
                ep=ep,
                dp_shard=ep,
                zero=1,
                recompute=RECOMPUTE[what[2]],
                cp_inner=self.space.base.cp_inner,
                sp_regather=self.space.base.sp_regather and bool(sp),
                loss_chunk=self.space.base.loss_chunk,
            )
            table[number] = ask(_case(self.question, layout, micro))
        return table[inner]

    def _parameters(self, content: Content, inside: bool = False) -> Floats:
        """By inner combination: numbers of a rank, dense and of experts; `inside` its blocks alone."""
        if (content, inside) in self.numbers:
            return self.numbers[content, inside]
        model = self.question.model
        degrees, which = np.unique(self.inner[:, [0, 4]], axis=0, return_inverse=True)
        found = []
        for tp, ep in degrees.tolist():
            dense = 0.0 if inside else outside(model, tp, content.embedding, content.head)
            experts = 0.0
            for number, moe in ((content.dense, False), (content.moe, True)):
                if number:
                    held = block_parameters(model, tp, ep, moe)
                    dense, experts = dense + number * held.dense, experts + number * held.experts
            found.append((dense, experts))
        numbers = self.numbers[content, inside] = np.array(found, np.float64)[which]
        return numbers

    def _slopes(self) -> Floats:
        """By outer combination: seconds a parameter, gathered (dense, experts) and reduced (dense, experts)."""
        question, found = self.question, []
        narrow = question.software.gathers_narrow and question.products in ("fp8", "fp4")
        width = 1 if narrow else question.width
        gradient = question.software.habits.gradient_bytes or question.width
        for tp, shard, replicate, ep in self.outer.tolist():
            layout = Layout(tp=tp, dp_shard=shard, dp_replicate=replicate, ep=ep)
            replicas = group(layout, "replicate")
            gathers, reduces = [], []
            for ranks in (group(layout, "shard"), group(layout, "edp")):
                each = _slope(question.cluster, "all_reduce", replicas) / ranks.ranks
                gathers.append(width * _slope(question.cluster, "all_gather", ranks))
                reduces.append(gradient * (_slope(question.cluster, "reduce_scatter", ranks) + each))
            found.append((*gathers, *reduces))
        return np.array(found)

    def _cut(self, pp: int, plan: int) -> Cut:
        schedule, chunks = self.space.plans[plan]
        layout = Layout(pp=pp, schedule=schedule, pp_chunks=chunks, pp_cut=self.space.base.pp_cut)
        return _cut(self.question.model, layout)


@lru_cache(4096)
def _cut(model: Model, layout: Layout) -> Cut:
    cut = stages(model, layout)
    ranks = contents(model, layout, cut)
    count = {content: ranks.count(content) for content in ranks}
    return Cut(tuple(count.items()), ranks[0], min(map(len, cut)) if cut else model.n_layers)


@lru_cache(4096)
def _slope(cluster: Cluster, collective: Collective, among: Group) -> float:
    """Seconds a byte of a collective, where latencies do not count."""
    return (seconds(cluster, collective, 2 * HUGE, among) - seconds(cluster, collective, HUGE, among)) / HUGE


def _case(question: Question, layout: Layout, micro: int) -> Case:
    """A micro-batch of a layout, alone."""
    batch = Batch(micro, micro, 1, 1)
    return Case(question.model, question.cluster, layout, batch, question.products, question.width, question.software)


def _seconds(time: RankTime) -> tuple[float, float, float, float]:
    """Forward and backward on the device, forward and backward on the host."""
    return time.forward, time.device - time.forward, time.host_forward, time.host_backward


def _total(work: Floats) -> Floats:
    """Seconds of both passes, device and host blended as in RankTime."""
    device, host = work[:, :2], work[:, 2:]
    return ((device**BLEND + host**BLEND) ** (1 / BLEND)).sum(1)


def _bubble(plan: Any, others: Floats) -> Floats | float:
    """Idle seconds, where there is a closed form that holds for every length of passes: (p - 1) micro-batches of the
    mean of the `others` of the slowest rank, with v stages a rank a v-th."""
    if plan.schedule == "1f1b":
        return others
    if plan.schedule == "interleaved_1f1b":
        return others / plan.pp_chunks
    return 0.0
