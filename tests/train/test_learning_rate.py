"""Learning-rate schedules: their ends, their shape, and scaling with the batch."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Optimizer
from phalanx.train.learning_rate import at_step, peak

STEPS = 100
SCHEDULES = ["cosine", "linear", "wsd", "constant"]


def rates(optimizer: Optimizer) -> list[float]:
    return [at_step(step, optimizer, optimizer.decay_steps or STEPS, 16) for step in range(STEPS + 5)]


@given(st.sampled_from(SCHEDULES), st.integers(0, STEPS), st.integers(0, STEPS), st.floats(0, 1), st.floats(0, 1))
def test_rises_through_the_warm_up_then_never_rises(schedule, warmup, decay, floor, fraction):
    found = rates(
        Optimizer(
            1e-3,
            schedule=schedule,
            warmup_steps=warmup,
            decay_steps=decay,
            min_lr_ratio=floor,
            decay_fraction=fraction,
        )
    )
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in found)
    assert all(a < b for a, b in pairwise(found[:warmup]))
    assert all(a >= b - 1e-18 for a, b in pairwise(found[warmup:]))
    if schedule != "constant":
        assert found[-1] == pytest.approx(1e-3 * floor)


def test_first_and_last_steps():
    found = rates(Optimizer(lr=1.0, warmup_steps=10, min_lr_ratio=0.1))
    assert found[0] == pytest.approx(0.1)
    assert found[9] == found[10] == 1.0
    assert found[55] == pytest.approx(0.55)  # half way down
    assert found[STEPS] == pytest.approx(0.1)


def test_wsd_holds_then_decays():
    found = rates(Optimizer(lr=1.0, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0))
    assert set(found[:81]) == {1.0}
    assert found[90] == pytest.approx(0.5)


def test_scaling_rules():
    assert peak(Optimizer(lr=1.0, batch_scaling="linear", base_batch=4), 16) == 4.0
    assert peak(Optimizer(lr=1.0, batch_scaling="sqrt", base_batch=4), 16) == 2.0
    assert peak(Optimizer(lr=1.0), 16) == 1.0
    assert math.isclose(at_step(0, Optimizer(lr=1.0, batch_scaling="sqrt", base_batch=8), STEPS, 16), math.sqrt(2))
