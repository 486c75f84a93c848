"""`phalanx plan`: the page, the document, what is kept of a layout, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

JOB = ["plan", "model=gpt2", "cluster=dgx-h100:1", "train.precision=bf16", "train.global_batch=32"]
KEYS = "best fastest candidates nearest alternatives rejected searched seconds notes calibration"


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def job_file(folder: Path, layout: str) -> str:
    path = folder / "job.yaml"
    text = f"model: {{preset: gpt2}}\ncluster: {{preset: 'dgx-h100:1'}}\nlayout: {layout}\n"
    path.write_text(text + "train: {precision: bf16, global_batch: 32}\n", encoding="utf-8")
    return str(path)


def test_json_has_what_the_design_says(capsys):
    document = planned(capsys, *JOB)
    assert set(document) == set(KEYS.split())
    best = document["candidates"][0]
    assert document["best"]["line"] == best["line"]
    assert best["prediction"]["fits"]
    assert document["searched"] > sum(document["rejected"].values()) > 0
    times = [one["simulated_step_time_s"] for one in document["candidates"][1:]]
    assert times == sorted(times)


def test_page_for_a_terminal_and_for_a_browser(tmp_path, capsys):
    page, picture = tmp_path / "plan.html", tmp_path / "space.svg"
    assert main([*JOB, "--html", str(page), "--svg", str(picture), "--top", "2"]) == 0
    out = capsys.readouterr().out
    for word in (
        "gpt2 on 8 × h100-80gb",
        "global batch 32",
        "best layout:",
        "searched",
        f"written: {page} and {picture}",
    ):
        assert word in out
    assert "\n3  " not in out
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "The step of the best, simulated" in html


def test_a_long_step_is_drawn_in_two_parts(tmp_path, capsys):
    page = tmp_path / "plan.html"
    words = [*JOB, "++train.global_batch=512", "micro_batch=1", "dp_replicate=1", "dp_shard=1", "cp=1", "pp=8", "tp=1"]
    assert main([*words, "layout.schedule=1f1b", "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count("; shown: ") == 2


def test_a_job_files_own_layout_is_open(tmp_path, capsys):
    document = planned(capsys, "plan", job_file(tmp_path, "{tp: 4, dp_shard: 2}"))
    assert any(one["layout"].get("tp", 1) != 4 for one in document["candidates"])


@pytest.mark.parametrize(
    ("layout", "words"), [("{auto: true, tp: 4}", []), ("{dp_shard: 8}", ["tp=4"]), ("{tp: 2}", ["layout=auto,tp=4"])]
)
def test_what_is_set_beside_auto_or_on_the_command_line_is_kept(tmp_path, capsys, layout, words):
    assert main(["plan", job_file(tmp_path, layout), *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert {one["layout"]["tp"] for one in json.loads(out)["candidates"]} == {4}
    assert "fixed layout fields: tp=4; the planner chooses the others" in err


def test_a_whole_line_leaves_nothing_open(capsys):
    document = planned(capsys, *JOB, "layout=dp_shard=2,tp=4,sp=true,micro_batch=16")
    assert [one["line"] for one in document["candidates"]] == ["dp_shard=2,tp=4,sp=true,micro_batch=16,accumulation=1"]


def test_other_programs_and_formats(capsys):
    fixed = ("dp_shard=8", "model.d_model=2048", "model.n_heads=16")
    core = ("--framework", "megatron-core")
    times = {
        words: planned(capsys, *JOB, *fixed, *words)["candidates"][0]["simulated_step_time_s"]
        for words in ((), core, (*core, "--products", "fp8"))
    }
    assert times[*core, "--products", "fp8"] < times[core] < times[()]


def test_where_nothing_fits_it_ends_with_three_and_says_what_is_missing(capsys):
    big = ["plan", "model=llama3-70b", "cluster=dgx-h100:1", "train.global_batch=8", "train.precision=bf16"]
    big.append("offload=none")  # with the optimizer on the host it fits
    assert main(big) == 3
    out = capsys.readouterr().out
    assert "no layout fits; the one that needs the least memory is" in out
    assert "exceeds the " in out
    document = planned(capsys, *big, code=3)
    assert document["best"] is None
    assert not document["nearest"]["prediction"]["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["++cluster=dxg-h100:1"], "did you mean dgx-h100:1?"),
        (["--framework", "megatron-cor"], "did you mean megatron-core?"),
        (["--top", "0"], "--top: must be at least 1, is 0"),
        (["--html", "no/such/folder/plan.html"], "folder no/such/folder does not exist"),
        (["tp=7"], "nearest tp"),
        (["dp_shard=5"], "no layout of 8 devices is legal for this model with global batch 32 and dp_shard=5"),
        (["--htm", "x"], "html"),
    ],
)
def test_refusals(words, said, capsys):
    assert main([*JOB, *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_on_this_machine_fewer_processes_are_weighed_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    machine = "{name: a cpu, fp32_tflops: 0.2, memory_gib: 8.0, bandwidth_gbs: 20.0}"
    links = "{gbs: 1.0, latency_us: 50.0}"
    text = f"cluster:\n  devices_per_node: 2\n  device: cpu\n  accelerator: {machine}\n  intra: {links}\n"
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    document = planned(capsys, "plan", "model=tiny", "model.vocab_size=64", "train.global_batch=8")
    lines = [one["line"] for one in document["candidates"]]
    assert any(line.startswith("micro_batch=8") for line in lines)
    assert any("=2" in line for line in lines)
