"""How long a rank may be silent, by what the run has done so far: with a clock of the tests' own, so nothing waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.launch.watchdog.diagnosis import Limits, Pace, RankView, hangs, load_per_core
from phalanx.launch.watchdog.heartbeat import Phase, RankRecord

LIMITS = Limits(300.0, 600.0, follows=True)
START = RankRecord(
    rank=0,
    world=1,
    pid=1,
    start_ticks=1,
    beat=0.0,
    tick=0.0,
    phase=Phase.FORWARD_BACKWARD,
    phase_began=0.0,
    step=0,
    first_step=1,
    own_s=0.0,
    work=0,
    started={},
    groups={},
)


class Run:
    """A rank and the clock by which it is watched."""

    def __init__(self) -> None:
        self.now, self.pace, self.record = 1000.0, Pace(), START
        self.look()

    def look(self) -> None:
        self.pace.update([self.record], self.now)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.record = replace(self.record, step=self.record.step + 1)
            self.look()

    def phase(self, phase: Phase, seconds: float) -> None:
        self.record = replace(self.record, phase=phase, phase_began=self.now)
        self.look()
        self.now += seconds
        self.record = replace(self.record, phase=Phase.FORWARD_BACKWARD, phase_began=self.now)
        self.look()

    def hangs_after(self, silent_s: float, load: float = 1.0) -> bool:
        return hangs({0: RankView(0, self.record, silent_s)}, LIMITS, self.pace, load)


def test_short_steps_have_twenty_seconds() -> None:
    run = Run()
    run.steps(10, 0.1)
    assert not run.hangs_after(19.0)
    assert run.hangs_after(21.0)


def test_the_first_step_has_the_timeout_and_counts_from_then_on() -> None:
    run = Run()
    assert not run.hangs_after(500.0)
    run.steps(1, 90.0)
    run.steps(5, 1.0)
    assert not run.hangs_after(179.0)  # compiling again may take as long
    assert run.hangs_after(181.0)


def test_long_steps_have_longer() -> None:
    run = Run()
    run.steps(3, 12.0)
    assert not run.hangs_after(59.0)
    assert run.hangs_after(61.0)


@pytest.mark.parametrize("phase", [Phase.SAVE, Phase.VALIDATION])
def test_the_first_of_its_kind_may_take_long_and_no_later_one_is_cut_short(phase: Phase) -> None:
    run = Run()
    run.steps(3, 0.5)
    run.record = replace(run.record, phase=phase, phase_began=run.now)
    run.look()
    assert not run.hangs_after(299.0)
    run.phase(phase, 70.0)
    run.steps(3, 0.5)
    assert run.pace.step_s < 1.0  # the save is none of its step
    assert not run.hangs_after(139.0)
    assert run.hangs_after(141.0)


def test_the_longest_limit_is_half_of_the_timeout() -> None:
    run = Run()
    run.steps(3, 200.0)
    assert not run.hangs_after(299.0)
    assert run.hangs_after(301.0, load=20.0)


def test_no_false_alarm_at_a_load_of_twenty_times_the_cores() -> None:
    """Steps of 2 s: with 20 processes on each core one takes 40 s, before any such step has been seen."""
    run = Run()
    run.steps(20, 2.0)
    for seconds in (40.0, 80.0, 199.0):
        assert not run.hangs_after(seconds, load=20.0)
    run.steps(3, 40.0)
    assert not run.hangs_after(199.0)  # what was slow may be slow again, whatever the load now
    assert load_per_core() >= 0


def test_a_limit_of_the_user_s_own_holds() -> None:
    run = Run()
    run.steps(3, 12.0)
    view = {0: RankView(0, run.record, 9.0)}
    assert hangs(view, Limits(8.0, 600.0), run.pace, 20.0)
