"""The clock: as long as it takes, on every rank."""

import time

import torch

from phalanx.calibrate.clock import Clock

CPU = torch.device("cpu")


def test_a_call_takes_as_long_as_it_takes():
    ((seconds,),) = Clock(CPU, repeats=3, least_s=0.001).turns([lambda: time.sleep(0.01)])
    assert 0.01 <= seconds < 0.1


def test_short_calls_are_made_several_times_in_a_repeat():
    calls = []
    Clock(CPU, repeats=2, least_s=0.01).turns([lambda: (calls.append(1), time.sleep(0.001))])
    assert len(calls) > 2 + 2  # a warm-up, a first look, and two repeats of several


def test_calls_take_turns():
    order, ticks = [], []
    calls = [lambda: (order.append("a"), time.sleep(0.001)), lambda: (order.append("b"), time.sleep(0.001))]
    Clock(CPU, repeats=3, least_s=0.0).turns(calls, lambda: ticks.append(1))
    assert order == ["a", "a", "b", "b", *"ababab"]
    assert len(ticks) == 6


def slow_on_one(ranks):
    return Clock(CPU, repeats=3, least_s=0.001).turns([lambda: time.sleep(0.02 if ranks.rank else 0.001)])[0]


def test_every_rank_knows_every_rank_s_time(ranks):
    one, other = ranks(slow_on_one, 2)
    assert one == other
    assert one[0] < 0.02 <= one[1]


def test_quick_is_quicker():
    quick, slow = Clock.of(CPU, quick=True), Clock.of(CPU, quick=False)
    assert quick.repeats < slow.repeats
    assert quick.least_s < slow.least_s
    assert slow.repeats % 2 == quick.repeats % 2 == 1  # a median that was measured
