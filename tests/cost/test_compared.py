"""A predicted step beside a measured one: the same parts, under the prediction's names, and the sums of both."""

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.cost.breakdown import compared
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import Parts, step_parts

MEASURED = {
    "forward": 0.2,
    "backward": 0.5,
    "dp_shard_cp exposed": 0.1,
    "edp exposed": 0.05,
    "world exposed": 0.01,
    "pp waiting": 0.02,
    "tp waiting": 0.03,
    "optimizer": 0.04,
    "data": 0.0,
    "other": 0.05,
}


def test_parts_meet_under_the_prediction_s_names():
    parts = Parts(products=0.5, streams=0.1, host=0.1, exposed={"dp_shard": 0.3}, optimizer=0.02, forward=0.2)
    rows = {row.name: row for row in compared(parts, MEASURED)}
    assert list(rows) == [
        *("forward", "backward", "dp_shard exposed", "world exposed", "bubble", "waiting", "optimizer", "other", "step")
    ]
    assert rows["dp_shard exposed"].ratio == pytest.approx(0.5)
    assert (rows["backward"].predicted, rows["backward"].ratio) == (pytest.approx(0.5), pytest.approx(1.0))
    assert (rows["bubble"].measured, rows["waiting"].measured, rows["waiting"].ratio) == (0.02, 0.03, None)
    assert rows["step"].predicted == pytest.approx(parts.total)
    assert rows["step"].measured == pytest.approx(1.0)


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=8,zero=3",
        "tp=4,dp_replicate=2,sp=true",
        "pp=4,tp=2,schedule=1f1b,micro_batch=1",
        "cp=2,dp_shard=4,recompute=full",
    ],
)
def test_forward_and_backward_are_the_computation_of_a_step(layout):
    words = ["model=llama3-8b", "cluster=dgx-h100:1", "train.precision=bf16", "train.global_batch=16"]
    job = load_words(overrides.parse([*words, *layout.split(",")])).job
    parts = step_parts(step_spec(job, 128256))
    rows = compared(parts, {})
    assert sum(row.predicted for row in rows[:-1]) == pytest.approx(parts.total)
    assert 1.5 < parts.backward / parts.forward < 3
    assert rows[-1].predicted == parts.total
