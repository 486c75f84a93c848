"""Productive time under failures: the closed form against a simulation of failures, its limits, its best interval."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.simulate import goodput
from phalanx.simulate.goodput import LLAMA_3_RATE, SECONDS_PER_DAY, at, best, exact_interval

costs = st.floats(1, 600)
devices = st.integers(1, 200_000)


def simulated(tau: float, delta: float, restart: float, mtbf: float, days: float, seed: int) -> dict[str, float]:
    """Shares of time of a job that failures hit at moments drawn beforehand, phase after phase."""
    generator = random.Random(seed)
    spent = dict.fromkeys(("fraction", "saving", "rework", "restarting"), 0.0)
    clock, failure, restarting = 0.0, generator.expovariate(1 / mtbf), False
    while clock < days * SECONDS_PER_DAY:
        phase = restart if restarting else tau + delta
        if failure < clock + phase:
            spent["restarting" if restarting else "rework"] += failure - clock
            clock, restarting = failure, True
            failure += generator.expovariate(1 / mtbf)
            continue
        clock += phase
        if restarting:
            spent["restarting"] += restart
        else:
            spent["fraction"] += tau
            spent["saving"] += delta
        restarting = False
    return {name: seconds / clock for name, seconds in spent.items()}


@pytest.mark.parametrize(
    ("tau", "delta", "restart", "mtbf"),
    [(800, 30, 600, 11000), (300, 30, 600, 1800), (900, 120, 600, 700), (100, 0, 300, 2000)],
)
def test_the_closed_form_is_what_a_simulation_finds(tau, delta, restart, mtbf):
    runs = [simulated(tau, delta, restart, mtbf, 60, seed) for seed in range(24)]
    expected = at(tau, 1, SECONDS_PER_DAY / mtbf, delta, restart)
    for name in runs[0]:
        found = [run[name] for run in runs]
        mean = sum(found) / len(found)
        error = math.sqrt(sum((value - mean) ** 2 for value in found) / (len(found) - 1) / len(found))
        assert abs(mean - getattr(expected, name)) <= 4 * error + 1e-12, name


@given(devices, st.floats(0, 0.1), st.floats(0, 1e4), st.floats(0, 1e5), st.floats(1e-3, 1e7))
def test_the_shares_add_up_to_one(count, failures, delta, restart, tau):
    found = at(tau, count, failures, delta, restart)
    shares = (found.fraction, found.saving, found.rework, found.restarting)
    assert sum(shares) == pytest.approx(1)
    assert all(-1e-12 <= share <= 1 for share in shares)


def test_without_failures_only_saving_costs():
    assert at(100, 16384, 0, 25, 600).fraction == pytest.approx(0.8)
    assert at(100, 1, 1e-12, 25, 600).fraction == pytest.approx(0.8)
    never = best(16384, 0, 30, 600)
    assert (never.interval_s, never.fraction, never.interruptions_per_day) == (math.inf, 1, 0)


def test_where_saving_costs_nothing_only_restarts_do():
    free = best(16384, LLAMA_3_RATE, 0, 600)
    assert free.interval_s == 0
    assert free.fraction == pytest.approx(math.exp(-600 / free.mtbf_s)) == pytest.approx(1 - free.restarting)
    assert at(1e-3, 16384, LLAMA_3_RATE, 0, 600).fraction == pytest.approx(free.fraction, rel=1e-6)


def test_a_job_that_never_reaches_its_save_trains_nothing():
    assert at(1e7, 100_000, LLAMA_3_RATE, 30, 600).fraction == 0


@given(devices, st.floats(1e-6, 1e-2), costs, costs)
def test_no_other_interval_trains_more(count, failures, delta, restart):
    found = best(count, failures, delta, restart)
    for factor in (0.3, 0.8, 0.99, 1.01, 1.25, 4):
        assert at(found.interval_s * factor, count, failures, delta, restart).fraction <= found.fraction * (1 + 1e-12)


@given(devices, st.floats(1e-6, 1e-2), costs, costs, st.floats(0.1, 100))
def test_whole_steps_are_the_best_of_whole_steps(count, failures, delta, restart, step):
    found = best(count, failures, delta, restart, step)
    steps = round(found.interval_s / step)
    assert steps >= 1
    assert found.interval_s == pytest.approx(steps * step)
    for other in {max(1, steps - 1), steps + 1}:
        assert at(other * step, count, failures, delta, restart).fraction <= found.fraction * (1 + 1e-12)


@given(st.floats(1e-6, 100), st.floats(100, 1e8))
def test_the_interval_solves_its_equation_and_young_and_daly_come_near(delta, mtbf):
    tau = exact_interval(delta, mtbf)
    young = math.sqrt(2 * delta * mtbf)  # Young 1974
    assert 0 < tau <= min(mtbf, young) * (1 + 1e-9)
    assert math.log1p(-tau / mtbf) == pytest.approx(-(tau + delta) / mtbf, rel=1e-6) or tau > 0.999 * mtbf
    # What the series leave out is of the next order of sqrt(delta / 2M).
    small = math.sqrt(delta / (2 * mtbf))
    assert abs(young / tau - 1) <= 2 * small + 1e-6
    daly = young * (1 + small / 3 + small**2 / 9) - delta if delta < 2 * mtbf else mtbf  # Daly 2006
    assert abs(daly / tau - 1) <= small**3 + 1e-6


def test_daly_s_own_examples():
    """Daly 2006, figures 3 to 5: 5 minutes a save; the optimum of the new model at mean times of 24 h, 6 h, 15 min."""
    for hours, minutes in ((24, 117), (6, 57), (0.25, 9.1)):
        assert exact_interval(300, hours * 3600) / 60 == pytest.approx(minutes, rel=0.01)


def test_the_case_of_llama_3():
    """Over 90 % effective time (section 3.3.4) at an interruption every three hours: it takes saves of seconds, which
    the 2 TB/s of its storage allow for 12 bytes a parameter, and restarts of hardly more than a quarter of an hour."""
    save = 405e9 * 12 / 2e12
    assert best(16384, LLAMA_3_RATE, save, 600).mtbf_s / 3600 == pytest.approx(3.09, abs=0.01)
    assert best(16384, LLAMA_3_RATE, save, 600).fraction > 0.92
    assert best(16384, LLAMA_3_RATE, save, 900).fraction > 0.90
    assert best(16384, LLAMA_3_RATE, save, 1000).fraction < 0.90
    assert best(16384, LLAMA_3_RATE, 60, 0).fraction < 0.90, "saves of a minute alone cost a tenth"


def test_more_devices_train_a_smaller_share():
    found = [best(count, LLAMA_3_RATE, 30, 600) for count in (1024, 4096, 16384, 100_000)]
    assert [round(g.fraction, 2) for g in found] == [0.98, 0.95, 0.88, 0.60]
    assert [g.interval_s for g in found] == sorted((g.interval_s for g in found), reverse=True)


def test_impossible_figures_are_all_named():
    with pytest.raises(JobError) as raised:
        best(0, -1, math.nan, 600)
    assert len(raised.value.problems) == 3
    with pytest.raises(JobError, match="time between checkpoints is 0 s"):
        at(0, 1, 0.1, 1, 1)
    with pytest.raises(JobError, match="a step takes -1 s"):
        best(1, 0.1, 1, 1, step_s=-1)


def test_the_text_has_the_figures():
    lines = goodput.text(best(16384, LLAMA_3_RATE, 30, 600)).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "7.76 per day, one every 3h05m",
        "13m17s, each checkpoint 30.0s",
        "88.0%",
        "saving 3.31%, rework 3.48%, restarting 5.25%",
    ]
    assert "no failures" in goodput.text(best(8, 0, 30, 600))
