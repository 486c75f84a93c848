"""The time of a pipeline against its schedule run action by action."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.layout import Layout
from phalanx.cost.exposed import compose, idle, on_grid
from phalanx.cost.spec import Framework
from phalanx.errors import JobError
from phalanx.schedule import catalogue
from phalanx.schedule.timing import time


@given(st.integers(2, 8), st.integers(1, 40))
def test_1f1b_and_gpipe_idle_for_all_ranks_but_one(pp: int, micro: int) -> None:
    for schedule in ("1f1b", "gpipe"):
        assert idle(Layout(pp=pp, schedule=schedule), micro, 0.25) == pytest.approx(pp - 1)


@pytest.mark.parametrize("pp", [8, 16, 17, 40])
def test_wide_pipelines_idle_by_their_closed_forms(pp: int) -> None:
    """Beyond the ranks up to which programs are run, too."""
    for schedule, idle_time in {"naive": (pp - 1) * 32, "interleaved_1f1b": (pp - 1) / 2, "1f1b": pp - 1}.items():
        layout = Layout(pp=pp, schedule=schedule, pp_chunks=2 if schedule == "interleaved_1f1b" else 0)
        micro = 4 * pp if schedule == "interleaved_1f1b" else 32
        assert idle(layout, micro) == pytest.approx(idle_time)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(JobError, match="did you mean 1f1b"):
        idle(Layout(pp=2, schedule="1f1"), 4)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    layout = Layout(pp=4, schedule="interleaved_1f1b", pp_chunks=chunks)
    assert idle(layout, 64, 0.25) == pytest.approx(3 / chunks)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "naive", "zb_h1", "zb_h2", "zb_v", "v_half", "interleaved_1f1b", "dualpipe_v"]),
    st.sampled_from([2, 4]),
    st.integers(4, 12),
)
def test_many_micro_batches_as_when_all_are_run(schedule: str, pp: int, times: int) -> None:
    """Beyond a few for each rank the rest is extrapolated: exactly, for schedules that repeat themselves."""
    micro = pp * times
    layout = Layout(pp=pp, schedule=schedule)
    program = catalogue.build(schedule, pp, micro)
    each = max(sum(a.kind == "F" for a in p) for p in program.programs) / micro
    costs = {"F": 0.25 / each, "B": 0.75 / each, "I": 0.375 / each, "W": 0.375 / each}
    timing = time(program, costs)
    whole = timing.duration - max(timing.work(rank) for rank in range(pp))
    assert idle(layout, micro, 0.25, 0.375) == pytest.approx(max(0.0, whole), abs=0.3)


def seconds(layout: Layout, micro_batches: int, ranks: list[float], forward: float, weights: float) -> float:
    """Composes a step of ranks that take so long for a micro-batch, with these shares of it, and nothing else."""
    parts = np.array([[forward], [1 - forward], [0], [0], [weights]]) * ranks
    ones, free = np.ones(len(ranks), int), lambda *_: (0.0, 0.0, 0.0)
    step = compose(parts, ones, ones, micro_batches, 0.0, free, False, layout, Framework())
    return step.seconds(idle(layout, micro_batches, on_grid(step.forward), on_grid(step.weights)))


def test_one_slow_rank_sets_the_pace() -> None:
    layout = Layout(pp=4)
    assert seconds(layout, 16, [1.0] * 4, 0.25, 0.375) == pytest.approx(16 + 3)
    assert seconds(layout, 16, [1.0, 1.0, 1.0, 2.0], 0.3, 0.4) == pytest.approx(32 + 3)


def test_without_a_pipeline_it_is_the_sum() -> None:
    assert seconds(Layout(), 7, [2.0], 0.5, 0.75) == 14
