"""The cost of a run: one formula, whose figures are left out where something is not known."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.load import load_words
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import MACHINES, cluster_of
from phalanx.cost.money import Prices, amount, is_asked, run_cost, tokens_of
from phalanx.errors import JobError

POSITIVE = st.floats(1e-3, 1e6)
PRICED = Cluster(price_per_device_hour=2.0, power_w=1000.0, carbon_g_per_kwh=400.0)


def test_a_run_by_hand() -> None:
    """3.6e9 tokens at 1e6 per second are an hour, of eight devices."""
    cost = run_cost(PRICED, 8, 3.6e9, 1e6)
    assert (cost.seconds, cost.device_hours, cost.price, cost.kwh, cost.co2_kg) == (3600, 8, 16, 8, 3.2)
    assert cost.line() == "run of 3.6B tokens: 1h00m, 8 device hours, price 16, 8 kWh, 3.2 kg CO2"


@given(POSITIVE, POSITIVE, POSITIVE, st.integers(1, 100_000), POSITIVE, POSITIVE)
def test_costs_are_proportional(
    price: float, power: float, carbon: float, devices: int, tokens: float, speed: float
) -> None:
    cluster = Cluster(price_per_device_hour=price, power_w=power, carbon_g_per_kwh=carbon)
    one = run_cost(cluster, devices, tokens, speed)
    assert one.price is not None
    assert one.kwh is not None
    assert one.co2_kg is not None
    assert one.price == pytest.approx(price * one.device_hours)
    assert one.kwh * 3.6e6 == pytest.approx(power * devices * one.seconds)  # joules
    assert one.co2_kg * 1000 == pytest.approx(carbon * one.kwh)
    twice = run_cost(cluster, devices, 2 * tokens, speed)
    for name in ("seconds", "device_hours", "price", "kwh", "co2_kg"):
        assert getattr(twice, name) == pytest.approx(2 * getattr(one, name))
    # Twice the devices at twice the speed take half as long, and cost the same.
    faster = run_cost(cluster, 2 * devices, tokens, 2 * speed)
    assert faster.seconds == pytest.approx(one.seconds / 2)
    assert faster.price == pytest.approx(one.price)


@given(st.booleans(), st.booleans(), st.booleans())
def test_nothing_is_guessed(price: bool, power: bool, carbon: bool) -> None:
    cluster = Cluster(price_per_device_hour=2.0 * price, power_w=700.0 * power, carbon_g_per_kwh=50.0 * carbon)
    cost = run_cost(cluster, 8, 1e9, 1e4)
    assert (cost.price is not None, cost.kwh is not None, cost.co2_kg is not None) == (price, power, power and carbon)
    line = cost.line()
    assert [word in line for word in ("price", "kWh", "CO2")] == [price, power, power and carbon]
    assert "device hours" in line


def test_the_power_of_a_machine_is_its_makers_and_stated() -> None:
    assert cluster_of("dgx-h100:4").power_w == 1275
    for entry in MACHINES.values():
        assert "kW" in entry.source if entry.cluster.power_w else entry.cluster.power_w == 0
        assert ("CO2" in entry.source) == (entry.cluster.carbon_g_per_kwh > 0)
        assert entry.cluster.price_per_device_hour == 0


def test_it_is_printed_where_it_is_asked_for() -> None:
    known = cluster_of("dgx-h100:4")
    assert not is_asked(known, 0)
    assert not is_asked(cluster_of("jean-zay"), 0)
    assert is_asked(known, 1e9)
    for name in ("price_per_device_hour", "power_w", "carbon_g_per_kwh"):
        assert is_asked(replace(known, **{name: 3.0}), 0)
    words = "model=llama3-8b train.steps=100 train.global_batch=64 train.precision=bf16"
    job = load_words(overrides.parse(words.split())).job
    assert tokens_of(job, 0) == 100 * 64 * 8192
    assert tokens_of(job, 15e12) == 15e12


def test_carbon_without_power_has_no_effect() -> None:
    words = "model=llama3-8b cluster=gb200-nvl72:2 dp_shard=8 cluster.carbon_g_per_kwh=30"
    with pytest.raises(JobError, match="has no effect here: it is for cluster.power_w above 0"):
        load_words(overrides.parse(words.split()))


JOB = ["model=llama3-8b", "cluster=dgx-h100:8", "train.precision=bf16", "train.global_batch=256"]


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_predict_and_plan_print_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["dp_shard=64", "layout.micro_batch=1"] if verb == "predict" else []
    asked = [verb, *JOB, *layout, "--tokens", "15T", "cluster.price_per_device_hour=2.5"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "run of 15T tokens:" in text
    assert "kg CO2" not in text
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    run = document["run"]
    step = document["step_time_s"] if verb == "predict" else document["candidates"][0]["simulated_step_time_s"]
    assert run["device_hours"] == pytest.approx(15e12 / (256 * 8192) * step * 64 / 3600)
    assert run["price"] == pytest.approx(2.5 * run["device_hours"])
    assert run["kwh"] == pytest.approx(1.275 * run["device_hours"])
    assert run["co2_kg"] is None
    assert main([verb, *JOB, *layout, "--json"]) == 0
    assert "run" not in json.loads(capsys.readouterr().out)


def test_a_table_has_it_as_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    columns = "model_name,gpu,n_gpus,dp,zero_stage,micro_batch,global_batch_seqs,precision"
    rows = [f"{model},H100,64,64,3,1,128,bf16" for model in ("llama3-8b", "no-such")]
    table.write_text("\n".join([columns, *rows, ""]))
    words = ["predict", "--table", str(table), "--out", str(out), "--tokens", "1e12"]
    assert main([*words, "cluster.price_per_device_hour=2"]) == 0
    first, second = csv.DictReader(io.StringIO(out.read_text()))
    hours = float(first["pred_run_device_hours"])
    assert hours == pytest.approx(1e12 / float(first["pred_tokens_per_s_per_gpu"]) / 3600, rel=1e-4)
    assert float(first["pred_run_price"]) == pytest.approx(2 * hours, rel=1e-4)
    assert first["pred_run_co2_kg"] == second["pred_run_price"] == ""
    assert main(words[:-2]) == 0
    assert "pred_run_price" not in out.read_text()
    capsys.readouterr()
    assert main([*words[:-2], "cluster.price_per_device_hour=2", "tp=2"]) == 2
    told = capsys.readouterr().err
    for word in ("cluster.price_per_device_hour=2", "tp=2"):
        assert f"{word}: no effect with --table, but for prices, power and carbon with --tokens" in told
    assert main([*words, "--framework", "nemo"]) == 2
    assert "--table excludes --framework" in capsys.readouterr().err


def test_a_row_s_machine_keeps_what_a_user_does_not_state() -> None:
    machine = cluster_of("dgx-h100")
    cost = Prices(Cluster(price_per_device_hour=3.0), 1e9).of(machine, 8, 1e4)
    assert cost.kwh == pytest.approx(cost.device_hours * 1.275)
    assert cost.price == pytest.approx(3 * cost.device_hours)


@pytest.mark.parametrize(("text", "tokens"), [("15T", 15e12), ("1.05b", 1.05e9), ("15e12", 15e12), ("2_000", 2000.0)])
def test_an_amount_of_tokens_may_have_a_unit(text: str, tokens: float) -> None:
    assert amount(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "15Q", "-1", "0", "nan", "inf", "1e400"])
def test_what_is_no_amount_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="15T"):
        amount(text)
