"""Verbs that predict on a measured machine print the quality of its measurements, and refuse to use very noisy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.config import calibration

MACHINE = """\
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.2, memory_gib: 8.0, bandwidth_gbs: 20.0}
  intra: {gbs: 1.0, latency_us: 50.0}
"""
MEASURED = """\
  calibration:
    compute:
      provenance: {date: 2026-11-22, host: a-host, processor: a cpu, cores: 2, versions: phalanx 0}
      products: {error: PRODUCTS, spread: 0.02, rounds: 3}
    comm:
      provenance: {date: 2026-11-22, host: a-host, processor: a cpu, cores: 2, versions: phalanx 0}
      intra: {error: LINKS, spread: 0.05, rounds: 4}
"""
JOB = ("cluster=local", "model=tiny", "model.vocab_size=64", "train.global_batch=8")
PREDICT = ("predict", *JOB, "layout=dp_replicate=2")
VERBS = (PREDICT, ("simulate", *JOB, "layout=dp_replicate=2"), ("plan", *JOB), ("predict", *JOB, "layout=auto"))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes the file of cluster=local, measured on this machine with these fit errors."""
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "processor", lambda: "a cpu")
    monkeypatch.setattr(calibration, "core_count", lambda: 2)

    def write(products: float | None, links: float = 0.27) -> Path:
        quality = MEASURED.replace("PRODUCTS", str(products)).replace("LINKS", str(links))
        (tmp_path / "cluster.yaml").write_text(MACHINE + (quality if products is not None else ""))
        return tmp_path / "cluster.yaml"

    return write


def lines_of(capsys) -> tuple[list[str], str]:
    """Returns the lines on standard error about the measurements, and standard output."""
    out, err = capsys.readouterr()
    return [line for line in err.splitlines() if line.startswith("cluster")], out


@pytest.mark.parametrize("verb", VERBS)
def test_every_use_prints_error_and_spread_in_one_line(machine, capsys, verb):
    machine(0.03)
    assert main([*verb, "--json"]) == 0
    (line,), out = lines_of(capsys)
    assert line == (
        "cluster=local: measured 2026-11-22 on a-host (a cpu, 2 cores); fit error: products 3.0%, links in a node "
        "27.0%; spread: products 2.0%, links in a node 5.0%"
    )
    document = json.loads(out)["calibration"]
    assert (document["status"], document["fit_error"], document["spread"]) == ("reliable", 0.27, 0.05)


@pytest.mark.parametrize("verb", VERBS)
def test_an_unreliable_measurement_is_said_to_be_so(machine, capsys, verb):
    machine(0.3)
    assert main([*verb, "--json"]) == 0
    (line,), out = lines_of(capsys)
    told = "unreliable (products: fit error 30.0% > 25%): run `phalanx bench compute` again on an idle machine"
    assert line.endswith(told)
    assert json.loads(out)["calibration"]["status"] == "unreliable"


@pytest.mark.parametrize("verb", [*VERBS, ("train", *JOB, "layout=auto"), ("verify", *JOB, "layout=auto")])
def test_predictions_on_a_worthless_measurement_are_refused(machine, capsys, verb):
    machine(0.51)
    assert main([*verb]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "phalanx: predictions on cluster=local are refused, because its measurements are too noisy (products: fit "
        "error 51.0% > 25%): run `phalanx bench compute` again on an idle machine, or predict with them anyway: "
        "cluster.allow_unreliable=true\n"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_they_are_made_nevertheless_on_request(machine, capsys, verb):
    machine(0.51)
    assert main([*verb, "--allow-unreliable", "--json"]) == 0
    (line,), out = lines_of(capsys)
    assert "unreliable (products: fit error 51.0% > 25%)" in line
    assert json.loads(out)["calibration"]["status"] == "refused"


def test_links_do_not_matter_to_one_device(machine, capsys):
    machine(0.03, links=0.9)
    assert main([*PREDICT]) == 2
    assert "links in a node: fit error 90.0% > 40%" in capsys.readouterr().err
    assert main(["predict", *JOB, "cluster.devices_per_node=1"]) == 0
    (line,), _ = lines_of(capsys)
    assert "links" not in line


def test_an_old_file_is_read_and_its_quality_is_unknown(machine, capsys):
    machine(None)
    assert main([*PREDICT, "--json"]) == 0
    (line,), out = lines_of(capsys)
    assert line.startswith("cluster=local: compute and comm of unknown quality")
    document = json.loads(out)["calibration"]
    assert (document["status"], document["fit_error"]) == ("unknown", None)


def test_a_changed_machine_is_told_on_it_and_not_elsewhere(machine, capsys, monkeypatch):
    path = machine(0.03)
    monkeypatch.setattr(calibration, "core_count", lambda: 64)
    assert main([*PREDICT]) == 0
    (line,), _ = lines_of(capsys)
    assert "; this machine (a cpu, 64 cores) is not the measured one (a cpu, 2 cores): run" in line
    assert main(["predict", str(path), *JOB[1:], "layout=dp_replicate=2"]) == 0
    (line,), _ = lines_of(capsys)
    assert line.startswith("cluster: measured 2026-11-22")
    assert "64 cores" not in line


def test_a_catalogued_machine_has_no_measurements(capsys):
    words = ["model=tiny", "model.vocab_size=64", "train.global_batch=8", "layout=dp_replicate=8"]
    assert main(["predict", "cluster=dgx-h100:1", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["calibration"] is None


def test_print_config_shows_where_the_figures_come_from(machine, capsys):
    machine(0.51)
    assert main([*PREDICT, "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "        error: 0.51  # preset local\n" in out
    assert main(["predict", "cluster=dgx-h100:1", *JOB[1:], "dp_replicate=8", "--print-config"]) == 0
    assert "calibration" not in capsys.readouterr().out
