from __future__ import annotations

import itertools
import math
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.fit import Fit, fitted, written
from benchmarks.intervals import narrowest
from benchmarks.truth import picture as accuracy_picture
from benchmarks.truth import report as accuracy_report
from benchmarks.truth.grades import (
    BLIND,
    GradedRow,
    baseline,
    by,
    errors,
    kendall,
    outcomes,
    ranking,
    verdicts,
    year_of,
)
from benchmarks.truth.report import coverage
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.frameworks import CALIBRATION, FRAMEWORKS, FittedValue, fits
from phalanx.cost.prediction import predict
from phalanx.errors import JobError
from phalanx.validation.row import read

INTERVAL = {"spread": (0.9, 1.1), "memory_limit": 80 * 2**30}
ONE = GradedRow(
    row_id="a-1",
    source="a",
    family="h100 nemo",
    calibration=False,
    measured_s=2.0,
    predicted_s=2.2,
    interval_s=(1.9, 2.5),
    measured_bytes=None,
    predicted_bytes=None,
    oom=False,
    fits=True,
    group="g",
    layout="tp=1",
    ideal_s=1.0,
)


def made(*pairs: tuple[float, float], **changed: Any) -> list[GradedRow]:
    return [
        replace(ONE, row_id=f"a-{n}", layout=f"tp={n}", measured_s=measured, predicted_s=predicted, **changed)
        for n, (measured, predicted) in enumerate(pairs)
    ]


def test_errors():
    found = errors([0.1, -0.2, None, 0.3, -0.4])
    assert found
    assert (found.n, found.median, found.p90) == (4, 0.25, 0.4)
    assert found.bias == pytest.approx(-0.05)
    assert errors([None]) is None
    ten = errors([n / 100 for n in range(1, 11)])
    assert ten
    assert ten.p90 == 0.09


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_the_baseline_is_the_best_constant(pairs):
    rows = [replace(ONE, measured_s=measured, ideal_s=ideal) for measured, ideal in pairs]
    least = sum(map(abs, baseline(rows)))
    ratios = [ideal / measured for measured, ideal in pairs]
    # The sum is convex and bends where a row is met exactly, so that the best is among these.
    best = min(sum(abs(factor * ratio - 1) for ratio in ratios) for factor in (1 / ratio for ratio in ratios))
    assert least == pytest.approx(best)


def test_a_constant_efficiency_meets_rows_that_have_one():
    rows = [replace(ONE, measured_s=3.0 * ideal, ideal_s=ideal) for ideal in (0.5, 1.0, 7.0)]
    assert baseline(rows) == pytest.approx([0, 0, 0])
    assert baseline([replace(ONE, measured_s=None)]) == []


def test_kendall():
    assert kendall([1, 2, 3], [10, 20, 30]) == 1
    assert kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    # Ties: tau-b of (1, 2, 2) and (1, 2, 3) is 2 / sqrt(2 × 3).
    assert kendall([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))
    assert kendall([1, 1, 1], [1, 2, 3]) is None


@given(st.permutations(range(6)))
def test_kendall_counts_pairs_in_order(order):
    pairs = list(itertools.combinations(order, 2))
    assert kendall(range(6), order) == pytest.approx(sum(1 if a < b else -1 for a, b in pairs) / len(pairs))


def test_ranking_is_of_layouts_that_compete():
    good = made((1.0, 1.1), (2.0, 2.3), (3.0, 2.9))
    found = ranking(good)
    assert found
    assert (found.groups, found.rows, found.tau, found.regret) == (1, 3, 1.0, 0.0)
    # The one that is predicted fastest is half as slow again as the best.
    wrong = ranking(made((2.0, 1.5), (3.0, 1.0), (4.0, 5.0)))
    assert wrong
    assert wrong.regret == pytest.approx(0.5)
    assert wrong.tau == pytest.approx(1 / 3)
    assert ranking(good[:2]) is None
    assert ranking([replace(one, group=n) for n, one in enumerate(good)]) is None


def test_runs_of_one_layout_count_once():
    rows = [*made((1.0, 1.1), (2.0, 2.3), (3.0, 2.9)), replace(ONE, layout="tp=0", measured_s=1.2, predicted_s=1.1)]
    found = ranking(rows)
    assert found
    assert found.rows == 3


def test_verdicts():
    rows = [
        replace(ONE, row_id="ran"),
        replace(ONE, row_id="ran, refused", fits=False),
        replace(ONE, row_id="oom", oom=True, fits=False, measured_s=None),
        replace(ONE, row_id="oom, missed", oom=True, measured_s=None),
        replace(ONE, row_id="nothing known", measured_s=None),
    ]
    found = verdicts(rows)
    assert (found.oom_said, found.oom_missed, found.ran_said, found.ran_refused) == (
        1,
        ("oom, missed",),
        1,
        ("ran, refused",),
    )


def prediction(seconds: float) -> Any:
    rank = SimpleNamespace(allocated=40 * 2**30, held=49 * 2**30, peak=50 * 2**30, needed=45 * 2**30)
    return SimpleNamespace(
        step_time_s=seconds, memory=(rank,), fits=True, hardware_flops=1e15, devices=8, peak_flops=1e15, **INTERVAL
    )


def test_outcomes_read_rows_and_name_those_of_the_calibration():
    row = {"model_name": "llama3-8b", "gpu": "H100", "n_gpus": "8", "global_batch_seqs": "8", "step_time_s": "2"}
    rows = [row | {"row_id": "s-1", "peak_mem_gb": "49"}, row | {"row_id": "s-2"}, row | {"gpu": "none", "row_id": "x"}]
    found, refused = outcomes(rows, lambda spec: prediction(1.8), {"s-2"})
    assert [one.calibration for one in found] == [False, True]
    assert found[0].time_error == pytest.approx(-0.1)
    assert found[0].memory_error == pytest.approx(0)
    assert found[1].memory_error is None
    assert found[0].source == "s"
    assert found[0].family == "h100-80gb megatron"
    assert found[0].ideal_s == pytest.approx(1 / 8)
    assert refused[0][0] == "x"
    assert "gpu" in refused[0][1]


def test_what_the_model_refuses_is_told():
    def refuses(spec: Any) -> Any:
        raise JobError("layout: no")

    row = {"model_name": "llama3-8b", "gpu": "H100", "n_gpus": "8", "global_batch_seqs": "8"}
    assert outcomes([row], refuses) == ([], [("line 2", "layout: no")])


def test_tables_leave_rows_of_the_calibration_out_of_errors():
    rows = [*made((1.0, 1.1), (2.0, 2.2)), replace(ONE, predicted_s=20.0, calibration=True)]
    head, line, whole = accuracy_report.table(rows, lambda one: one.source)
    assert len(head) == len(line) == len(whole)
    assert line[:5] == ("a", "2", "10.0 %", "10.0 %", "+10.0 %")
    assert accuracy_report.calibrated(rows)[1][:3] == ("h100 nemo", "1", "900.0 %")
    assert [len(cells) for cells in accuracy_report.confusion(rows)] == [3, 3, 3]
    figures = accuracy_report.as_dict(rows, [("x", "why")])
    assert figures["calibration"] == ["a-1"]
    assert figures["refused"] == {"x": "why"}
    assert figures["sources"]["a"]["time"]["median"] == pytest.approx(0.1)
    text = accuracy_report.markdown([("a", "b"), ("1", "2")])
    assert text == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_groups_are_in_the_order_of_their_names():
    assert list(by([replace(ONE, source="b"), ONE], lambda one: one.source)) == ["a", "b"]


def test_the_picture_has_a_point_for_each_row():
    rows = [
        *made((0.01, 0.012), (100.0, 90.0), source="<a>"),
        replace(ONE, source="b", measured_bytes=40e9, predicted_bytes=42e9),
    ]
    root = ET.fromstring(accuracy_picture.svg(rows))
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(circles) == 2 + 3 + 1  # the legend, times, memory
    assert "<a>" in {node.text for node in root.iter()}
    with pytest.raises(ValueError, match="no row"):
        accuracy_picture.svg([replace(ONE, measured_s=None)])


def test_more_sources_than_colours_have_other_marks():
    rows = [replace(ONE, source=f"s{n:02d}") for n in range(10)]
    tags = [node.tag.split("}")[-1] for node in ET.fromstring(accuracy_picture.svg(rows)).iter()]
    assert tags.count("rect") == 4
    assert tags.count("circle") == 16


def test_a_fit_predicts_the_median_of_its_rows_as_measured() -> None:
    line = FittedValue("slowdown", "megatron", "a100-80gb", 1.0, "made", (1, 2, 3))
    plain = {"model_name": "gpt3-175b", "gpu": "A100", "n_gpus": "64", "tp": "8", "pp": "8", "source": "megatron-core"}
    base = read(plain | {"step_time_s": "1"})
    seconds = predict(replace(base.spec, framework=replace(base.spec.framework, slowdown=1.4))).step_time_s
    measured = [seconds * factor for factor in (0.9, 1.0, 1.3)]
    rows = {name: read(plain | {"step_time_s": str(each)}) for name, each in zip(line.rows, measured, strict=True)}
    program = replace(line, programs=base.framework)
    fit = Fit(rows, [program])
    fit.once(program)
    assert fit.values[program] == pytest.approx(1.4 / FRAMEWORKS[base.framework].slowdown, rel=1e-3)


def test_a_fit_is_written_into_its_own_line() -> None:
    text, line = CALIBRATION.read_text(encoding="utf-8"), fits()[0]
    changed = written(text, {line: 2.3456})
    differ = [pair for pair in zip(text.splitlines(), changed.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(differ) == 1
    assert differ[0][1] == differ[0][0].replace(f" {line.value:g}, ", " 2.35, ")


@pytest.mark.skipif("PHALANX_TRUTH" not in os.environ, reason="PHALANX_TRUTH does not name published measurements")
def test_the_calibration_is_what_its_rows_fit() -> None:
    for line, value in fitted(Path(os.environ["PHALANX_TRUTH"])).items():
        assert line.value == pytest.approx(value, rel=0.01), line


def test_the_interval_holds_what_it_says() -> None:
    inside, outside = ONE, replace(ONE, measured_s=2.6)
    assert (inside.inside, outside.inside, replace(ONE, measured_s=None).inside) == (True, False, None)
    assert coverage([inside, inside, outside]) == pytest.approx(2 / 3)
    assert coverage([]) is None


def test_the_narrowest_interval_holds_enough_of_every_source() -> None:
    near, far = [0.0] * 16 + [0.3] * 4, [0.1] * 16 + [-0.3] * 4
    low, high = narrowest({"near": near, "far": far, "third": [0.05] * 10}) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.0), pytest.approx(0.1, abs=0.011))
    assert narrowest({"one": near, "two": far}) is None


def test_nothing_is_fitted_to_blind_sources() -> None:
    assert not {line.source for line in fits()} & set(BLIND)


@pytest.mark.parametrize(
    ("cells", "year"),
    [
        ({"notes": "README.md (2025-10 to 2026-06)"}, "2025"),
        ({"notes": "docs, 25.11 NeMo Container"}, "2025"),
        ({"source": "Narayanan (arXiv 2104.04473)"}, "2021"),
        ({"source": "a blog", "notes": "2048 GPUs, 20480 wide"}, "not said"),
    ],
)
def test_the_year_of_a_row_is_that_of_its_publication(cells: dict[str, str], year: str) -> None:
    assert year_of(cells) == year
