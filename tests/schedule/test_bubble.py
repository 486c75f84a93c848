"""One definition of the bubble: the schedule with unit times, the prediction and the simulation say the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config.model import ModelConfig
from phalanx.cost.prediction import predict
from phalanx.schedule import catalogue
from phalanx.schedule.timing import bubble_fraction, time
from phalanx.simulate.step import Disturbance, figures, rank_seconds, simulate
from simulate.specs import spec

SHAPE = ModelConfig(n_layers=64, d_model=4096, n_heads=32, seq_len=4096, vocab_size=256)
"""Equal stages, and nearly nothing at either end."""


def test_it_is_bubble_time_over_ideal_time() -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1) (tf + tb) over m (tf + tb), here with p 4, m 8, tf + tb 3.
    assert bubble_fraction(idle=9, step=33) == pytest.approx(3 / 8)
    assert bubble_fraction(idle=0, step=33) == 0


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v"]
)
def test_schedule_prediction_and_simulation_agree(name: str) -> None:
    one = replace(spec(f"pp=4,schedule={name}", 16), model=SHAPE, stages=())
    fast = replace(one.cluster.intra, gbs=1e9, latency_us=0.0)
    one = replace(one, cluster=replace(one.cluster, intra=fast, inter=fast))
    schedule = catalogue.build(name, 4, 16)
    rank = rank_seconds(one, schedule, 1, Disturbance())
    costs = {kind: max(seconds) for kind, seconds in rank.durations.items()}
    by_schedule = time(schedule, costs).bubble
    assert by_schedule > 0.01
    assert predict(one).bubble == pytest.approx(by_schedule, abs=0.015)
    assert figures(simulate(one)).bubble == pytest.approx(by_schedule, abs=0.015)
