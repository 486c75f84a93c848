"""The cost model's figures for the parts of a layout, for many layouts at once: each part is asked for once for every
combination of degrees that it depends on, when it is first wanted.

What one device computes and keeps depends on the inner degrees (tp, sp, cp, cp_ulysses, ep) and the micro-batch; what
the state's collectives take on the outer ones (tp, the ranks that shard, the replicas, ep); which rank has what of the
model on the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.cost.case import Case
from phalanx.cost.communication import group
from phalanx.cost.held import BlockKind, block_parameters, outside
from phalanx.cost.link import Group, seconds
from phalanx.cost.placed import Content, content_of
from phalanx.cost.rank_parts import Rank, Step
from phalanx.cost.rank_time import RankTime, around_time, block_time
from phalanx.cost.traffic import Collective
from phalanx.job.batch import Batch
from phalanx.job.cluster import Cluster
from phalanx.job.layout import Layout
from phalanx.job.model import Model
from phalanx.job.pipeline import is_file, schedule_of
from phalanx.plan.case import stages
from phalanx.plan.question import Question
from phalanx.plan.space import RECOMPUTE, Space
from phalanx.schedule import catalogue

Floats = NDArray[np.float64]
HUGE = 1e15
"""Bytes beside which latencies are nothing."""


@dataclass(frozen=True)
class Share:
    """What some ranks of a pipeline have of the model: blocks without and with experts, and what lies around them."""

    dense: int
    moe: int
    embedding: bool
    head: bool
    part: float = 1.0
    """Of the micro-batches, those that pass each of its stages."""
    least: int = 0
    """Blocks of its smallest stage."""

    @property
    def blocks(self) -> tuple[tuple[int, bool], ...]:
        """Number and kind (with experts), of each kind that there is."""
        return tuple((number, moe) for number, moe in ((self.dense, False), (self.moe, True)) if number)


@dataclass(frozen=True)
class Cut:
    """What the ranks of a pipeline have."""

    shares: dict[Share, tuple[int, int]]
    """Of each different share, the first rank that has it, and how many do."""


class Tables:
    """The figures of one space."""

    def __init__(self, question: Question, space: Space):
        self.question, self.space = question, space
        column = space.column
        inner = np.stack([column(name) for name in ("tp", "sp", "cp", "cp_ulysses", "ep")] + [space.micro_batch], 1)
        self.inner, self.inner_of = np.unique(inner, axis=0, return_inverse=True)
        """The combinations of inner degrees, and by pair the number of its own."""
        outer = np.stack([column("tp"), column("cp") * column("dp_shard"), column("dp_replicate"), column("ep")], 1)
        self.outer, self.outer_of = np.unique(outer, axis=0, return_inverse=True)
        """The same of the outer degrees."""
        model = question.model
        moe = sum(model.is_moe_layer(layer) for layer in range(model.n_layers))
        self.whole = Share(model.n_layers - moe, moe, True, True, least=model.n_layers)
        self.slopes = self._slopes()
        """By outer combination: seconds a parameter, gathered (dense, experts) and reduced (dense, experts), and those
        of a message of no bytes, in the same order."""
        self._asked: dict[tuple[str, int, int], Floats] = {}
        self._numbers: dict[tuple[Share, bool], Floats] = {}

    def work(self, share: Share, mode: int, inner: NDArray[Any]) -> Floats:
        """Of inner combinations: seconds of a micro-batch on a rank, forward and backward on the device, forward and
        backward of the host. `mode` is the number of a recomputation."""
        content = Content((), share.embedding, share.head)
        ends = share.embedding + 2 * share.head
        found = self._ask(("around", ends, 0), inner, 4, lambda case: _seconds(around_time(case, content)))
        for number, moe in share.blocks:
            found = found + number * self._ask(
                ("block", moe, mode), inner, 4, lambda case, moe=moe: _seconds(block_time(case, moe))
            )
        return found * share.part

    def activations(self, moe: bool, mode: int, inner: NDArray[Any]) -> Floats:
        """Of inner combinations, bytes: what a block keeps of a micro-batch, what its backward pass needs besides, what
        it gathers for that, a message between stages."""
        kind = BlockKind(moe, RECOMPUTE[mode])  # type: ignore[arg-type]

        def ask(case: Case) -> tuple[float, float, float, float]:
            step = Step(case)
            found = step.kinds[kind]
            gathered = Rank(step, step.flights[0]).backward(True)[1]
            return found.kept, sum(found.backward), gathered, step.stream / step.share

        return self._ask(("activations", moe, mode), inner, 4, ask)

    def loss(self, inner: NDArray[Any]) -> Floats:
        """Of inner combinations: bytes of the logits and of what the head reads."""

        def ask(case: Case) -> float:
            step = Step(case)
            return sum(Rank(step, step.flights[0]).logits())

        return self._ask(("loss", 0, 0), inner, 1, ask)[:, 0]

    def numbers(self, share: Share, inside: bool = False) -> Floats:
        """By inner combination: parameters of a rank, dense and of experts; `inside`, its blocks' alone."""
        if (share, inside) in self._numbers:
            return self._numbers[share, inside]
        model = self.question.model
        degrees, which = np.unique(self.inner[:, [0, 4]], axis=0, return_inverse=True)
        found = []
        for tp, ep in degrees.tolist():
            dense = 0.0 if inside else outside(model, tp, share.embedding, share.head)
            experts = 0.0
            for number, moe in share.blocks:
                held = block_parameters(model, tp, ep, moe)
                dense, experts = dense + number * held.dense, experts + number * held.experts
            found.append((dense, experts))
        return self._numbers.setdefault((share, inside), np.array(found, np.float64)[which])

    def cut(self, pp: int, plan: int) -> Cut:
        """What the ranks of a pipeline have under a plan of the space."""
        schedule, chunks = self.space.plans[plan]
        base = self.space.base
        return _cut(self.question.model, Layout(pp=pp, schedule=schedule, pp_chunks=chunks, pp_cut=base.pp_cut))

    def _ask(self, what: tuple[str, int, int], inner: NDArray[Any], width: int, ask: Callable[[Case], Any]) -> Floats:
        """What the cost model says of some inner combinations. The last of `what` is the recomputation."""
        if what not in self._asked:
            self._asked[what] = np.full((len(self.inner), width), np.nan)
        table = self._asked[what]
        for number in np.unique(inner[np.isnan(table[inner, 0])]):
            tp, sp, cp, ulysses, ep, micro = self.inner[number].tolist()
            degrees = {"tp": tp, "sp": bool(sp), "cp": cp, "cp_ulysses": ulysses, "ep": ep, "dp_shard": ep}
            layout = replace(self._alone, recompute=RECOMPUTE[what[2]], **degrees)  # type: ignore[arg-type]
            table[number] = ask(alone(self.question, layout, micro))
        return table[inner]

    @property
    def _alone(self) -> Layout:
        """What is fixed of the layout of one device: nothing that has to do with other ranks of pipeline or data."""
        base = self.space.base
        kept = ("cp_inner", "sp_regather", "loss_chunk", "tiles", "prefetch", "bucket_mb")
        return Layout(zero=1, **{name: getattr(base, name) for name in kept})

    def _slopes(self) -> Floats:
        question, found = self.question, []
        narrow = question.software.gathers_narrow and question.products in ("fp8", "fp4")
        width = 1 if narrow else question.width
        gradient = question.software.habits.gradient_bytes or question.width
        for tp, shard, replicate, ep in self.outer.tolist():
            layout = Layout(tp=tp, dp_shard=shard, dp_replicate=replicate, ep=ep)
            replicas = group(layout, "replicate")
            all_reduce, begun = _line(question.cluster, "all_reduce", replicas)
            gathers, reduces, starts, late = [], [], [], []
            for ranks in (group(layout, "shard"), group(layout, "edp")):
                gather, started = _line(question.cluster, "all_gather", ranks)
                scatter, scattered = _line(question.cluster, "reduce_scatter", ranks)
                gathers.append(width * gather)
                reduces.append(gradient * (scatter + all_reduce / ranks.ranks))
                starts.append(started)
                late.append(scattered + begun)
            found.append((*gathers, *reduces, *starts, *late))
        return np.array(found)


@lru_cache(4096)
def _cut(model: Model, layout: Layout) -> Cut:
    if layout.pp == 1:
        moe = sum(model.is_moe_layer(layer) for layer in range(model.n_layers))
        alone = Share(model.n_layers - moe, moe, True, True, least=model.n_layers)
        return Cut({alone: (0, 1)})
    cut, shares = stages(model, layout), []
    # Who holds what does not depend on the number of micro-batches: the smallest that is legal is built fastest.
    name, few = layout.schedule, range(1, 2 * layout.pp + 1)
    legal = few if is_file(name) else (m for m in few if not catalogue.problems(name, layout.pp, m, layout.pp_chunks))
    schedule = schedule_of(layout, next(iter(legal)))
    for rank in range(schedule.ranks):
        held = schedule.held(rank)
        content = content_of(Case(model, Cluster(), layout, Batch(1, 1, 1, 1), stages=cut), cut, held)
        visits = sum(placement.count(rank) for placement in schedule.placements)
        part = visits / len(held) / len(schedule.placements)
        least = min(len(cut[stage]) for stage in held)
        shares.append(Share(content.dense, content.moe, content.embedding, content.head, part, least))
    return Cut({share: (shares.index(share), shares.count(share)) for share in dict.fromkeys(shares)})


@lru_cache(4096)
def _line(cluster: Cluster, collective: Collective, among: Group) -> tuple[float, float]:
    """A line below the seconds of a collective over its bytes: its slope where latencies do not count, and what a
    message of a byte takes."""
    small, large, larger = (seconds(cluster, collective, size, among) for size in (1.0, HUGE, 2 * HUGE))
    return (larger - large) / HUGE, small


def alone(question: Question, layout: Layout, micro: int) -> Case:
    """A micro-batch of a layout, alone."""
    batch = Batch(micro, micro, 1, 1)
    return Case(question.model, question.cluster, layout, batch, question.products, question.width, question.software)


def _seconds(time: RankTime) -> tuple[float, float, float, float]:
    return time.forward, time.device - time.forward, time.host_forward, time.host_backward
