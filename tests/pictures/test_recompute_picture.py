"""The picture of recomputation: its lines lead from one mode of all layers to another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from phalanx.config.job import Job
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Mode
from phalanx.pictures import prediction as recompute
from phalanx.pictures.panels import Panel
from pictures.test_prediction_picture import given_case


def end(spec: StepSpec, mode: Mode) -> tuple[float, float]:
    found = predict(replace(spec, layout=replace(spec.layout, recompute=mode)))
    return found.fullest.peak / 2**30, found.step_time_s


@pytest.mark.parametrize("case", ["one device", "64 stages"])
def test_lines_lead_from_mode_to_mode(case, monkeypatch):
    spec, _ = given_case(case)
    layers = spec.model.n_layers
    monkeypatch.setattr(recompute, "subject", lambda job, world: "a model")
    drawn: list[tuple[str, Sequence[Panel]]] = []
    monkeypatch.setattr(recompute, "panels_svg", lambda title, panels: drawn.append((title, panels)) or "")
    recompute.recompute_svg(Job(), spec)
    [(title, (costs, needs))] = drawn
    assert title == f"a model, {spec.cluster.accelerator.memory_gib:g} GiB each"
    for name, line in costs.lines.items():
        rest, first = (cast(Mode, mode) for mode in name.split(" to "))
        assert (line[0], line[-1]) == (end(spec, rest), end(spec, first))
        assert costs.marks[name] == line[-1]
        assert [place for place, _ in needs.lines[name]] == sorted({round(layers * n / 8) for n in range(9)})
        assert [memory for _, memory in needs.lines[name]] == [memory for memory, _ in line]
