"""`phalanx simulate`: the figures, the document, the files, what is slow, failures, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

ROOT = Path(__file__).parents[2]
JOB = ["simulate", "model=gpt2", "cluster=dgx-h100:1", "pp=4", "dp_shard=2", "zero=1", "micro_batch=2"]
JOB += ["train.global_batch=32", "train.precision=bf16", "train.compile=false"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*JOB, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_what_the_design_says(capsys):
    document = simulated(capsys)
    main(["predict", *JOB[1:], "--json"])
    predicted = json.loads(capsys.readouterr().out)
    assert len(document["ranks"]) == 4
    for rank in document["ranks"]:
        whole = rank["busy_s"] + rank["communication_s"] + rank["idle_s"]
        assert whole == pytest.approx(document["step_time_s"])
    assert [rank["peak_in_flight"] for rank in document["ranks"]] == [4, 3, 2, 1]
    assert document["bubble"] == pytest.approx(predicted["bubble"], rel=0.05)
    assert document["predicted_step_time_s"] == predicted["step_time_s"]
    assert document["step_time_s"] == pytest.approx(predicted["step_time_s"], rel=0.02)
    assert document["undisturbed_step_time_s"] == document["step_time_s"]
    assert document["tps_total"] == document["tps"] * 8
    assert document["tps_total"] * document["step_time_s"] == pytest.approx(32 * 1024)
    assert "goodput" not in document


def test_page_picture_and_trace(tmp_path, capsys):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert main([*JOB, "--svg", str(picture), "--trace", str(trace)]) == 0
    out, err = capsys.readouterr()
    for word in ("gpt2 on 8 × h100-80gb", "simulated,", "predicted", "peak in flight", f"written: {picture} and"):
        assert word in out
    assert err == ""
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_what_is_slow_costs(capsys):
    words = ["--straggler", "2=4", "--slow-link", "1-2=20", "0-1=2", "recompute=full"]
    document = simulated(capsys, *words)
    assert document["step_time_s"] > 1.5 * document["undisturbed_step_time_s"]
    assert document["ranks"][2]["busy_s"] == max(rank["busy_s"] for rank in document["ranks"])
    main([*JOB, *words])
    assert "rank 2 takes 4 ×, messages 1-2 20 ×, messages 0-1 2 ×: " in capsys.readouterr().out


def test_an_axis_is_slow_and_what_follows_is_the_jobs(capsys):
    words = ["++layout=dp_shard=4,tp=2,micro_batch=2", "--slow-link", "tp=3", "recompute=full"]
    document = simulated(capsys, *words)
    assert document["step_time_s"] > document["undisturbed_step_time_s"]
    assert len(document["ranks"]) == 1


def test_of_many_ranks_the_table_shows_some(capsys):
    big = ["simulate", "model=gpt2-xl", "cluster=dgx-h100:3", "pp=24", "micro_batch=1", "train.global_batch=24"]
    assert main([*big, "train.precision=bf16", "--straggler", "7=2"]) == 0
    out = capsys.readouterr().out
    assert "of 24 pipeline ranks" in out
    assert "\n     7  " in out
    assert "\n    23  " in out
    assert "\n     3  " not in out


def test_failures_are_counted_where_they_are_asked_about(capsys):
    lost = simulated(capsys, "--checkpoint-s", "3")["goodput"]
    assert lost["checkpoint_s"] == 3
    assert lost["restart_s"] == 600
    assert lost["devices"] == 8
    assert lost["mtbf_s"] == pytest.approx(86400 / 8 / 0.000474, rel=1e-3)
    assert 0.99 < lost["fraction"] < 1
    never = simulated(capsys, "--failures-per-device-day", "0")["goodput"]
    assert never["fraction"] == 1
    assert never["interval_s"] is None
    main([*JOB, "--restart-s", "60"])
    assert "productive time" in capsys.readouterr().out


def test_failures_are_drawn_for_the_job_s_devices(capsys, tmp_path):
    picture = tmp_path / "failures.svg"
    assert main([*JOB, "--failures-svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "productive time" in out
    assert f"written: {picture}" in out
    drawn = picture.read_text()
    assert ">8 devices<" in drawn
    assert ">100,000 devices<" in drawn
    assert main([*JOB, "--failures-svg", str(picture), "--failures-per-device-day", "0", "--checkpoint-s", "0"]) == 0


def test_slow_devices_and_both_ends_of_slow_links_are_marked(capsys, tmp_path):
    picture = tmp_path / "slow.svg"
    assert main([*JOB, "--straggler", "2=1.5", "--slow-link", "tp=2", "1-2=20", "--svg", str(picture)]) == 0
    drawn = picture.read_text()
    assert ">↔ 2: 20 ×<" in drawn
    assert ">1.5 ×, ↔ 1: 20 ×<" in drawn
    assert "; rank 2 takes 1.5 ×, messages 1-2 20 ×, tp 2 ×<" in drawn


def test_what_does_not_fit_is_simulated_all_the_same(capsys):
    big = ["simulate", "model=llama3-70b", "cluster=dgx-h100:1", "tp=8", "micro_batch=1", "train.global_batch=1"]
    assert main([*big, "train.precision=bf16", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert "warning: exceeds memory; simulated anyway: does not fit" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--straggler", "4=2"], "--straggler 4=2: pipeline ranks are 0 to 3"),
        (["--straggler", "1=0"], "must be more than 0"),
        (["--straggler", "one=2"], "expected a pipeline rank and a factor, such as 3=1.5"),
        (["--straggler", "1"], "expected a factor after the ="),
        (["--slow-link", "1-9=2"], "a link joins two of them"),
        (["--slow-link", "xp=2"], "axes are tp, cp, ep, dp"),
        (["--slow-link", "1-2=fast"], "expected a factor"),
        (["--checkpoint-s", "-3"], "0 or more is needed"),
        (["--checkpoint-s", "soon"], "expected a number"),
        (["--svg", "no/such/folder/x.svg", "--trace", "."], "folder no/such/folder does not exist"),
        (["--framework", "megatron-cor"], "did you mean megatron-core?"),
        (["++cluster=dxg-h100:1"], "did you mean dgx-h100:1?"),
        (["layout=dp_replicate=8,sync=diloco"], "sync=bsp"),
    ],
)
def test_refusals(words, said, capsys):
    assert main([*JOB, *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message
