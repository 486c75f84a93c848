"""`phalanx predict`: the document, the page, the picture and the refusals."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main

ROOT = Path(__file__).parents[2]
JOB = ["predict", "model=llama3-8b", "cluster=dgx-h100:1", "dp_shard=8", "train.precision=bf16", "micro_batch=1"]
JOB += ["train.global_batch=16", "recompute=full"]
KEYS = "step_time_s tokens_per_s_per_device tflops_per_device mfu hfu bubble exposed_comm_s memory fits traffic_bytes"
PARTS = "parameters gradients optimizer activations logits communication reserved peak"


def test_json_has_what_the_design_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(KEYS.split()) <= set(document)
    assert set(PARTS.split()) == set(document["memory"])
    assert document["memory"]["peak"] == sum(size for part, size in document["memory"].items() if part != "peak")
    assert document["fits"] is True
    low, high = document["interval"]["step_time_s"]
    assert low < document["step_time_s"] < high
    assert document["step_time_s"] == pytest.approx(sum(document["time_s"].values()))
    assert document["traffic_bytes"]["dp_shard"]["all_gather"] > 16e9


def test_it_answers_without_torch() -> None:
    program = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, *JOB], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.svg"
    assert main([*JOB, "--svg", str(picture)]) == 0
    page = capsys.readouterr().out
    for word in (
        "step time:",
        "tps: ",
        "tps_total: ",
        "mfu:",
        "matrix products",
        "peak memory",
        "fits",
        "all-gather",
        "8 × h100-80gb",
    ):
        assert word in page
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_what_does_not_fit_ends_with_three_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "++recompute=none", "++micro_batch=2"]) == 3
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert "exceeds the " in err
    assert "fits with layout." in err
    assert main([*JOB, "++recompute=none", "++micro_batch=2", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["advice"][0]["fits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["++cluster=dxg-h100:1"], "did you mean dgx-h100:1?"),
        (["++cluster=dgx-h100:two"], "after the colon comes the number of nodes"),
        (["++cluster=dgx-h100:2"], "16"),
        (["--framework", "megatron-cor"], "did you mean megatron-core?"),
        (["--products", "fp7"], "fp8"),
        (["--tabel", "x.csv"], "table"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_without_a_machine_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=gpt2"]) == 2
    assert "phalanx bench compute" in capsys.readouterr().err


def test_eight_bits_and_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    times = {}
    titan = ("--framework", "torchtitan-compile")
    for words in ((), ("--products", "fp8"), ("--framework", "megatron-core"), titan, (*titan, "--products", "fp8")):
        main([*JOB, *words, "--json"])
        times[words] = json.loads(capsys.readouterr().out)["step_time_s"]
    assert times["--products", "fp8"] < 0.95 * times[()]
    assert times[*titan, "--products", "fp8"] < 0.8 * times[titan]
    assert times["--framework", "megatron-core"] < times[()]


def test_a_table_is_predicted_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    head = "row_id,model_name,n_layers,hidden,n_heads,vocab,seq_len,gpu,n_gpus,gpus_per_node,dp,tp,pp,micro_batch"
    rows = [
        "a,gpt,24,2304,24,51200,2048,A100-SXM-80GB,32,8,32,1,1,16,512",
        "b,gpt,24,2304,24,51200,2048,Z9,1,1,1,1,1,1,1",
    ]
    source.write_text("\n".join([f"{head},global_batch_seqs", *rows]) + "\n", encoding="utf-8")
    assert main(["predict", "--table", str(source), "--out", str(target)]) == 0
    good, bad = csv.DictReader(target.open(encoding="utf-8"))
    assert float(good["pred_step_time_s"]) > 0
    assert float(good["pred_peak_mem_gb"]) > 0
    assert bad["pred_step_time_s"] == ""
    assert "Z9" in bad["pred_note"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--picture", "layout"], "--picture layout says what --svg draws: name a file"),
        (["--picture", "layuot", "--svg", "a.svg"], "prediction, layout, context, recompute, found 'layuot'"),
        (["--picture", "context", "--svg", "a.svg"], "layout.cp is 1"),
        (["--picture", "context", "--svg", "a.svg", "cp=3"], "is not an integer; nearest cp:"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*JOB, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
