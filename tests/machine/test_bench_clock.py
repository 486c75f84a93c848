"""The clock on simulated time: rounds are repeated until they agree, and their spread is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from phalanx.config.calibration import STABLE_SPREAD
from phalanx.machine.clock import BUDGET_S, MAX_CALLS, QUICK_BUDGET_S, WINDOW, Clock

CPU = torch.device("cpu")


class SimulatedMachine:
    """Simulated time, on which a call takes its seconds times the machine's slowdown at that moment."""

    def __init__(self, slowdown: Callable[[float], float] = lambda now: 1.0):
        self.seconds, self.slowdown = 0.0, slowdown

    def now(self) -> float:
        return self.seconds

    def call(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.seconds += seconds * self.slowdown(self.seconds)

        return run

    def clock(self, repeats: int = 3, min_repeat_s: float = 0.0, budget_s: float = 60.0) -> Clock:
        return Clock(CPU, repeats, min_repeat_s, budget_s, self.now)


def test_a_quiet_machine_needs_the_fewest_rounds():
    machine, unstable = SimulatedMachine(), []
    found = machine.clock().measure([machine.call(0.01), machine.call(2.0)], on_unstable=unstable.append)
    assert found.seconds == [[pytest.approx(0.01)], [pytest.approx(2.0)]]
    assert found.spreads == pytest.approx([0, 0])
    assert (found.rounds, unstable) == (WINDOW, [])


def test_short_calls_are_made_several_times_in_a_repeat():
    machine, calls = SimulatedMachine(), []
    call = machine.call(0.001)
    machine.clock(repeats=2, min_repeat_s=0.01).measure([lambda: (calls.append(1), call())])
    assert len(calls) == 2 + WINDOW * 2 * 10  # a warm-up, a first look, and ten calls per repeat
    tiny = SimulatedMachine()
    tiny.clock(repeats=1, min_repeat_s=1.0).measure([tiny.call(1e-9)])
    assert tiny.seconds == pytest.approx((2 + WINDOW * MAX_CALLS) * 1e-9)


def test_calls_take_turns_and_tick():
    machine, order, ticks = SimulatedMachine(), [], []
    call = machine.call(1.0)
    calls = [lambda name=name: (order.append(name), call()) for name in "ab"]
    machine.clock(repeats=3).measure(calls, lambda: ticks.append(1))
    assert order == ["a", "a", "b", "b", *"ababab" * WINDOW]
    assert len(ticks) == 6 * WINDOW


def test_a_disturbance_that_ends_is_measured_away():
    """Another program halves the speed for the first 10 seconds; what is kept is the quiet machine after it."""
    machine, unstable, ticks = SimulatedMachine(lambda now: 2.0 if now < 10 else 1.0), [], []
    found = machine.clock().measure([machine.call(1.0)], lambda: ticks.append(1), unstable.append)
    assert found.seconds == [[pytest.approx(1.0)]]
    assert found.spread <= STABLE_SPREAD
    assert found.rounds > WINDOW
    assert unstable == [pytest.approx(1.0)]
    assert len(ticks) == 3 * WINDOW, "the rounds after the first ones are beside the bar"


def test_a_machine_that_never_settles_keeps_its_spread_and_ends():
    """Rounds of 3 seconds alternate between full and a third of the speed."""
    speeds = iter([1.0, 1.0, *[factor for _ in range(1000) for factor in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)]])
    machine = SimulatedMachine(lambda now: next(speeds))
    found = machine.clock(budget_s=60).measure([machine.call(1.0)])
    assert found.spread == pytest.approx(2.0, abs=0.1) or found.spread == pytest.approx(2 / 3, abs=0.1)
    assert found.spread > STABLE_SPREAD
    assert machine.seconds + 20 >= 2 + WINDOW * 3 + 60
    assert machine.seconds < 60 + 2 + 9 * WINDOW + 9, "the budget ends it within a round"


def test_the_rounds_that_agree_best_are_kept():
    """Each round is slower than the one before; the differences are smallest in the middle."""
    factors: Iterator[float] = iter([1.0, 1.0, 1.0, 2.0, 2.2, 2.4, 4.0, *[9.0, 3.0, 1.0] * 99])
    machine = SimulatedMachine(lambda now: next(factors))
    found = machine.clock(repeats=1, budget_s=50).measure([machine.call(1.0)])
    assert found.seconds == [[pytest.approx(2.2)]]
    assert found.spread == pytest.approx(0.4 / 2.2)


def slow_on_one(ranks):
    machine = SimulatedMachine()
    found = machine.clock().measure([machine.call(0.02 if ranks.rank else 0.001)])
    # The rounds of rank 1 differ, and its time runs faster: both ranks measure as many rounds.
    drift = SimulatedMachine(lambda now: 1 + now * ranks.rank)
    return found.seconds, drift.clock(budget_s=20).measure([drift.call(1.0)]).rounds


def test_every_rank_knows_every_rank_s_time(ranks):
    one, other = ranks(slow_on_one, 2)
    assert one == other
    assert one[0] == [[pytest.approx(0.001), pytest.approx(0.02)]]


def test_quick_is_quicker():
    quick, slow = Clock.for_device(CPU, quick=True), Clock.for_device(CPU, quick=False)
    assert quick.repeats < slow.repeats
    assert quick.min_repeat_s < slow.min_repeat_s
    assert (quick.budget_s, slow.budget_s) == (QUICK_BUDGET_S, BUDGET_S)
    assert slow.repeats % 2 == quick.repeats % 2 == 1  # a median that was measured
