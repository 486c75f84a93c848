"""What stored fit errors and spreads say about predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config import calibration
from phalanx.config.calibration import (
    DEVICE_ERROR,
    LINK_ERROR,
    SPREAD,
    Calibration,
    ComputeCalibration,
    FitQuality,
    LinkCalibration,
    Provenance,
    assess,
    relative_spread,
)

HERE = Provenance("2026-11-22", "a-host", "a cpu", 2, "phalanx 0")
GOOD = FitQuality(0.03, 0.02, 3)
COMPUTE = ComputeCalibration(HERE, GOOD, FitQuality(0.08, 0.02, 3), GOOD, FitQuality(0.0, 0.04, 3))
CALIBRATION = Calibration(COMPUTE, LinkCalibration(HERE, FitQuality(0.27, 0.06, 5)))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(calibration, "processor", lambda: "a cpu")
    monkeypatch.setattr(calibration, "core_count", lambda: 2)


def test_the_spread_is_relative():
    assert relative_spread([1.0, 2.0, 4.0]) == 1.5
    assert relative_spread([3.0]) == 0


def test_a_good_measurement_is_reliable():
    found = assess(CALIBRATION, ("compute", "comm"), here=True, cpu="a cpu")
    assert (found.status, found.problem, found.remedy, found.changed) == ("reliable", "", "", "")
    assert found.line() == (
        "measured 2026-11-22 on a-host (a cpu, 2 cores); fit error: products 3.0%, attention 8.0%, streams 3.0%, links "
        "in a node 27.0%; spread: products 2.0%, attention 2.0%, streams 2.0%, blocks 4.0%, links in a node 6.0%"
    )
    document = found.as_dict()
    assert (document["status"], document["fit_error"], document["spread"]) == ("reliable", 0.27, 0.06)
    assert document["measured"]["comm"]["host"] == "a-host"
    assert document["parts"]["products"] == {"error": 0.03, "spread": 0.02, "rounds": 3}


@pytest.mark.parametrize(
    ("products", "status", "problem"),
    [
        (FitQuality(DEVICE_ERROR.unreliable, SPREAD.unreliable, 3), "reliable", ""),
        (FitQuality(0.26, 0.02, 3), "unreliable", "products: fit error 26.0% > 25%"),
        (FitQuality(0.03, 0.3, 9), "unreliable", "products: spread 30.0% > 25%"),
        (FitQuality(0.51, 0.3, 9), "refused", "products: fit error 51.0% > 25%, spread 30.0% > 25%"),
        (FitQuality(0.03, 1.2, 9), "refused", "products: spread 120.0% > 25%"),
    ],
)
def test_noisy_products_are_unreliable_or_refused(products, status, problem):
    noisy = replace(CALIBRATION, compute=replace(COMPUTE, products=products))
    found = assess(noisy, ("compute", "comm"), here=True)
    assert (found.status, found.problem) == (status, problem)
    assert found.remedy == ("run `phalanx bench compute` again on an idle machine" if problem else "")
    assert found.line().endswith(f"unreliable ({problem}): {found.remedy}" if problem else "links in a node 6.0%")


def test_links_have_bounds_of_their_own_and_matter_only_to_several_devices():
    noisy = replace(CALIBRATION, comm=LinkCalibration(HERE, FitQuality(0.5, 0.06, 5), FitQuality(0.9, 0.1, 3)))
    assert LINK_ERROR.unreliable < 0.5 < LINK_ERROR.refused < 0.9
    assert assess(noisy, ("compute",), here=True).status == "reliable"
    found = assess(noisy, ("compute", "comm"), here=True)
    assert found.status == "refused"
    assert "links in a node: fit error 50.0% > 40%; links between nodes: fit error 90.0% > 40%" in found.line()
    assert found.line().endswith("run `phalanx bench comm` again on an idle machine")


def test_a_file_without_quality_is_of_unknown_quality():
    found = assess(Calibration(), ("compute", "comm"), here=True, cpu="a cpu")
    assert found.status == "unknown"
    assert found.line() == (
        "compute and comm of unknown quality (no fit error or spread is stored): run `phalanx bench compute` and "
        "`phalanx bench comm` again on an idle machine"
    )
    document = found.as_dict()
    assert (document["fit_error"], document["spread"], document["unknown"]) == (None, None, ["compute", "comm"])
    half = assess(replace(CALIBRATION, comm=LinkCalibration()), ("compute", "comm"), here=True)
    assert (half.status, half.unknown) == ("unknown", ["comm"])
    assert half.line().endswith(": run `phalanx bench comm` again on an idle machine")


@pytest.mark.parametrize(("processor", "cores"), [("another cpu", 2), ("a cpu", 64)])
def test_a_changed_machine_is_reported(monkeypatch, processor, cores):
    monkeypatch.setattr(calibration, "processor", lambda: processor)
    monkeypatch.setattr(calibration, "core_count", lambda: cores)
    found = assess(CALIBRATION, ("compute", "comm"), here=True, cpu="a cpu")
    said = f"this machine ({processor}, {cores} cores) is not the measured one (a cpu, 2 cores)"
    assert found.changed == said
    again = "run `phalanx bench compute` and `phalanx bench comm` again on an idle machine"
    assert found.line().endswith(f"{said}: {again}")
    assert assess(CALIBRATION, ("compute", "comm"), here=False, cpu="a cpu").changed == ""
    old = assess(Calibration(), ("compute",), here=True, cpu="a cpu")
    assert bool(old.changed) == (processor != "a cpu"), "an old file stores the processor's name only"


def test_this_machine_has_a_name():
    assert calibration.host_name()
