"""One line on why a layout is faster than another."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS
from phalanx.cost.prediction import Parts, Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived as batch
from phalanx.plan.alternatives import differences, explain

MEGATRON_CORE = FRAMEWORKS["megatron-core"]


def prediction(layout: Layout) -> Prediction:
    cluster = cluster_of("dgx-h100:4")
    solved = batch.solve(64, layout)
    return predict(StepSpec(PRESETS["llama3-8b"], cluster, layout, solved, "bf16", 2, MEGATRON_CORE))


BASE = prediction(Layout(tp=2, dp_shard=16, zero=1, micro_batch=1))


def test_the_part_that_differs_is_named_with_both_figures() -> None:
    recomputing = prediction(Layout(tp=2, dp_shard=16, zero=1, micro_batch=1, recompute="full"))
    said = explain(BASE, recomputing)
    assert said.startswith(f"{recomputing.step_time_s / BASE.step_time_s:.2f} × as fast: recomputation 0 instead of ")
    assert explain(recomputing, BASE).startswith("0.")
    assert "recomputation" in explain(recomputing, BASE).split(";")[0]


def test_what_is_worse_comes_after_what_is_better() -> None:
    parts = Parts(products=4.0, recompute=2.0)
    other = Parts(products=4.0, bubble=1.0)
    said = explain(replace(BASE, parts=other), replace(BASE, parts=parts))
    assert said == "1.20 × as fast: recomputation 0 instead of 2 s; but pipeline bubble 1 instead of 0 s"


def test_the_factor_is_what_is_known_better() -> None:
    other = replace(BASE, parts=Parts(products=1.0))
    assert explain(replace(BASE, parts=Parts(products=2.0)), other, 1.25).startswith("1.25 × as fast")


def test_alike_is_alike_and_what_does_not_fit_is_told() -> None:
    assert explain(BASE, BASE) == "as fast"
    assert explain(BASE, replace(BASE, memory_limit=0.0)).startswith("as fast; the other does not fit, ")
    assert explain(replace(BASE, memory_limit=0.0), BASE).startswith("as fast; it does not fit, ")


parts = st.builds(Parts, *[st.floats(0, 100) for _ in range(4)], exposed=st.just({"tp": 0.5}), bubble=st.floats(1, 2))


@given(parts, parts)
def test_any_two_are_explained_in_one_line(one: Parts, other: Parts) -> None:
    said = explain(replace(BASE, parts=one), replace(BASE, parts=other))
    assert said
    assert "\n" not in said


def test_differences_are_settings() -> None:
    one, other = Layout(tp=4, recompute="none", sp=True), Layout(tp=8, recompute="full", micro_batch=2)
    said = differences(one, other)
    assert said == "tp 4 instead of 8, sp on instead of off, recompute none instead of full, micro_batch 0 instead of 2"
    assert differences(one, one) == ""
