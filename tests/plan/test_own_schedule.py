"""A schedule is one generator and one entry: with these alone it is checked, planned, predicted and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx.check.job import problems_of
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.cost.prediction import predict
from phalanx.plan.planner import search
from phalanx.schedule import catalogue, check
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.generators import round_robin, take_turns
from phalanx.schedule.schedule import Action, Schedule, ScheduleEntry
from phalanx.simulate.step import simulate, step_seconds
from plan.questions import request


def eager(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with twice the forward passes before the first backward pass."""
    micros = range(micro_batches)
    programs = [
        take_turns(
            [Action("F", rank, micro) for micro in micros],
            [Action("B", rank, micro) for micro in micros],
            before=2 * (ranks - 1 - rank),
        )
        for rank in range(ranks)
    ]
    return Schedule("eager", (round_robin(ranks),), micro_batches, tuple(programs))


EAGER = ScheduleEntry(
    eager,
    "1f1b with more forward passes ahead",
    "this test",
    in_flight=lambda p, m, v, r: min(m, 2 * (p - 1 - r) + 1),
    idle=lambda p, m, v, forward: p - 1,
    searched=True,
)


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    SCHEDULES.add("eager", EAGER)
    yield
    SCHEDULES.remove("eager")


def test_it_is_built_and_checked():
    assert check.problems(catalogue.build("eager", 4, 8)) == []
    assert catalogue.likely("Eager") == "eager"
    layout = Layout(pp=4, schedule="eager", accumulation=8)
    job = replace(Job(train=Train(global_batch=8)), layout=layout)
    assert problems_of(replace(job, model=replace(job.model, n_layers=4))) == []


@pytest.mark.parametrize("fixed", [{}, {"schedule": "eager"}], ids=["among the others", "asked for"])
def test_it_is_planned_predicted_and_simulated(fixed: dict[str, str]):
    one = request("llama3-8b", "dgx-a100-40gb:1", 16, tp=2, cp=1, pp=4, recompute="none", sp=True, **fixed)
    plan = search(one)
    tried = {candidate.layout.schedule for candidate in plan.best}
    assert tried
    if fixed:
        assert tried == {"eager"}
    spec = one.spec(replace(plan.best[0].layout, schedule="eager", pp_chunks=0, pp_cut="", recompute_cut=""))
    assert predict(spec).step_time_s > 0
    assert simulate(spec).seconds == pytest.approx(step_seconds(spec))


def test_the_planner_takes_it_where_it_is_best(monkeypatch: pytest.MonkeyPatch):
    """Without the other schedules it is what is left."""
    one = request("llama3-8b", "dgx-a100-40gb:1", 16, tp=2, cp=1, pp=4, sp=True)
    with monkeypatch.context() as patch:  # undone before the schedule is removed, or it would come back
        for name, entry in SCHEDULES.items():
            patch.setitem(SCHEDULES._entries, name, replace(entry, searched=name == "eager"))
        assert {candidate.layout.schedule for candidate in search(one).best} == {"eager"}
