"""`phalanx plan`, `predict`, `simulate` and `schedule`: pages, documents, files and refusals."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.api import load_job, predict_step
from phalanx.cli import auto_layout
from phalanx.cli import files as png
from phalanx.cli.files import write
from phalanx.cli.main import main
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import step_parts
from phalanx.errors import RunError
from phalanx.pictures.elements import TEXT, TEXT_ON_DARK, document, for_ground
from phalanx.schedule import catalogue, file
from phalanx.train.profile.window import prediction_of

# `phalanx plan`: the page, the document, what is kept of a layout, and the refusals.


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
    big += ["cluster.devices_per_node=2", "offload=none"]  # with the optimizer on the host it fits
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


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--framework", "other"], "'other' is not known"), ([], "model.vocab_size is 0"), (["--mesh", "2"], "--graph")],
)
def test_what_is_wrong_is_said_before_this_machine_is_measured(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(auto_layout, "_measure_what_is_missing", lambda *_: pytest.fail("measured"))
    assert main(["plan", f"data.dir={tmp_path}", *words]) == 2
    assert said in capsys.readouterr().err


def test_states_are_chosen_only_where_that_is_allowed(capsys):
    job = [*JOB[:1], "model=llama3-8b", "cluster=dgx-a100-40gb:1", "tp=1", "pp=1", *JOB[3:]]
    plain, free = planned(capsys, *job), planned(capsys, *job, "--allow", "states")
    assert "states" not in plain
    assert [(each["state"], each["master"]) for each in free["states"]][:4] == [
        *(("fp32", "fp32"), ("bf16", "fp32"), ("8bit", "fp32"), ("fp32", "none"))
    ]
    assert free["states"][0]["seconds"] == plain["candidates"][0]["simulated_step_time_s"]
    (chosen,) = (each for each in free["states"] if each["chosen"])
    assert (
        chosen["seconds"]
        == min(each["seconds"] for each in free["states"])
        == free["candidates"][0]["simulated_step_time_s"]
    )
    assert chosen["layout"] == free["best"]["line"]


def test_compression_is_chosen_only_where_that_is_allowed(capsys):
    job = ["plan", "model=gpt2", "cluster=dgx-h100:2", "cluster.inter.gbs=1", "precision=bf16", "global_batch=256"]
    plain, free = planned(capsys, *job), planned(capsys, *job, "--allow", "compression")
    assert "compression" not in plain["best"]["line"]
    forms = free["compression"]
    assert [each["compression"] for each in forms] == ["none", "int8", "int4", "powersgd"]
    assert forms[0]["seconds"] == plain["candidates"][0]["simulated_step_time_s"]
    assert [each["chosen"] for each in forms] == [False, False, False, True]
    assert forms[3]["layout"] == free["best"]["line"]
    assert all(a["seconds"] > b["seconds"] for a, b in itertools.pairwise(forms))


def test_the_largest_models_are_those_of_the_lecture(capsys):
    found = planned(capsys, "predict", "dp_shard=8", "precision=bf16", "--largest", "80")
    (form,) = (each for each in found["forms"] if (each["state"], each["master"]) == ("fp32", "none"))
    assert form["bytes"] == [12, 5, 2 + 10 / 8, 12 / 8]
    assert form["billions"] == pytest.approx([6.66, 16, 24.62, 53.33], abs=0.01)


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


# `phalanx predict`: the document, the page, the picture and the refusals.

ROOT = Path(__file__).parents[2]
PREDICT = ["predict", "model=llama3-8b", "cluster=dgx-h100:1", "dp_shard=8", "train.precision=bf16", "micro_batch=1"]
PREDICT += ["train.global_batch=16", "recompute=full"]
PREDICTED = (
    "step_time_s tokens_per_s_per_device tflops_per_device mfu hfu bubble exposed_comm_s memory fits traffic_bytes"
)
PARTS = "parameters gradients optimizer activations logits communication reserved peak"


def test_json_of_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREDICT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(PREDICTED.split()) <= set(document)
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
    done = subprocess.run([sys.executable, "-c", program, *PREDICT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "step.svg"
    assert main([*PREDICT, "--svg", str(picture)]) == 0
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
    assert main([*PREDICT, "++recompute=none", "++micro_batch=2"]) == 3
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert "exceeds the " in err
    assert "fits with layout." in err
    assert main([*PREDICT, "++recompute=none", "++micro_batch=2", "--json"]) == 3
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
def test_refusals_of_predict(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREDICT, *words]) == 2
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
        main([*PREDICT, *words, "--json"])
        times[words] = json.loads(capsys.readouterr().out)["step_time_s"]
    assert times["--products", "fp8"] < 0.95 * times[()]
    assert times[*titan, "--products", "fp8"] < 0.8 * times[titan]
    assert times["--framework", "megatron-core"] < times[()]


def test_documents_shorten_attention_and_what_cp_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("".join("x" * (n * n % 97) + "\n" for n in range(2000)))
    data = [f"data.path={tmp_path / 'text.txt'}", f"data.dir={tmp_path / 'data'}"]
    words = [*PREDICT[:3], "dp_shard=4", "cp=2", *PREDICT[4:], "seq_len=8192", "data.corpus=text", *data]
    whole = planned(capsys, *words)
    masked = [*words, "data.document_mask=true"]
    assert "cp_imbalance" not in whole
    unknown = planned(capsys, *masked)
    assert (unknown["time_s"], unknown["traffic_bytes"]) == (whole["time_s"], whole["traffic_bytes"])
    assert [*unknown["cp_imbalance"]] == ["long", "short"]
    long, short = (planned(capsys, *masked, f"data.document_tokens={mean}") for mean in (2048, 256))
    for less, more in ((long, whole), (short, long)):
        assert less["step_time_s"] < more["step_time_s"]
        assert sum(less["traffic_bytes"].get("cp", {}).values()) < sum(more["traffic_bytes"]["cp"].values())
        assert less["memory"] == more["memory"]
    assert short["cp_imbalance"]["documents"]["skipped"] > long["cp_imbalance"]["documents"]["skipped"]
    assert short["documents"]["flops"] < long["documents"]["flops"]
    assert short["documents"]["dp_imbalance"] > 1
    simulated = planned(capsys, "simulate", *masked[1:], "data.document_tokens=256")
    assert simulated["predicted_step_time_s"] == short["step_time_s"]
    assert main(["data", "prepare", *masked[6:]]) == 0  # of the corpus are the documents once it is prepared
    capsys.readouterr()
    found = planned(capsys, *masked)
    assert 40 < found["documents"]["mean_tokens"] < 50
    assert found["step_time_s"] < short["step_time_s"]
    job = load_job(*masked[1:])
    assert predict_step(job).step_time_s == found["step_time_s"]
    assert prediction_of(job, 256, "")[0].products < step_parts(step_spec(job, 256)).products
    assert main([*words, "data.document_tokens=256"]) == 2
    assert "data.document_tokens" in capsys.readouterr().err


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
        (["--picture", "layout"], "--picture has no effect without --svg"),
        (["--picture", "layuot", "--svg", "a.svg"], "prediction, layout, context, recompute, slices, found 'layuot'"),
        (["--picture", "context", "--svg", "a.svg"], "layout.cp is 1"),
        (["--picture", "context", "--svg", "a.svg", "cp=3"], "is not an integer; nearest cp:"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PREDICT, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


# `phalanx simulate`: the figures, the document, the files, what is slow, failures, and the refusals.

SIMULATE = ["simulate", "model=gpt2", "cluster=dgx-h100:1", "pp=4", "dp_shard=2", "zero=1", "micro_batch=2"]
SIMULATE += ["train.global_batch=32", "train.precision=bf16", "train.compile=false"]


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*SIMULATE, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_a_simulation(capsys):
    document = simulated(capsys)
    main(["predict", *SIMULATE[1:], "--json"])
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
    assert main([*SIMULATE, "--svg", str(picture), "--trace", str(trace)]) == 0
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
    main([*SIMULATE, *words])
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
    main([*SIMULATE, "--restart-s", "60"])
    assert "productive time" in capsys.readouterr().out


def test_failures_are_drawn_for_the_job_s_devices(capsys, tmp_path):
    picture = tmp_path / "failures.svg"
    assert main([*SIMULATE, "--failures-svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "productive time" in out
    assert f"written: {picture}" in out
    drawn = picture.read_text()
    assert ">8 devices<" in drawn
    assert ">100,000 devices<" in drawn
    assert (
        main([*SIMULATE, "--failures-svg", str(picture), "--failures-per-device-day", "0", "--checkpoint-s", "0"]) == 0
    )


def test_slow_devices_and_both_ends_of_slow_links_are_marked(capsys, tmp_path):
    picture = tmp_path / "slow.svg"
    assert main([*SIMULATE, "--straggler", "2=1.5", "--slow-link", "dp=2", "1-2=20", "--svg", str(picture)]) == 0
    drawn = picture.read_text()
    assert ">↔ 2: 20 ×<" in drawn
    assert ">1.5 ×, ↔ 1: 20 ×<" in drawn
    assert "; rank 2 takes 1.5 ×, messages 1-2 20 ×, dp 2 ×<" in drawn


def test_what_does_not_fit_is_simulated_all_the_same(capsys):
    big = ["simulate", "model=llama3-70b", "cluster=dgx-h100:1", "tp=8", "micro_batch=1", "train.global_batch=1"]
    assert main([*big, "train.precision=bf16", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert "warning: simulated anyway: does not fit" in err


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
def test_refusals_of_simulate(words, said, capsys):
    assert main([*SIMULATE, *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


# `phalanx schedule`: lists, shows and checks; mistakes are one message; files are what they say they are.

WITHOUT_TORCH = """
import sys
from phalanx.cli.main import main
code = main(sys.argv[1:])
sys.exit("imported torch" if {"torch", "numpy"} & set(sys.modules) else code)
"""


def output(capsys, *argv: str) -> str:
    assert main(["schedule", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_schedule_answers_without_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, "schedule", "show", "zb_v", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["name"] == "zb_v"


def test_the_list_has_every_schedule(capsys):
    assert [line.split()[0] for line in output(capsys, "list").splitlines()] == list(catalogue.SCHEDULES)
    listed = json.loads(output(capsys, "list", "--json"))
    assert [entry["name"] for entry in listed] == list(catalogue.SCHEDULES)
    assert listed[0]["chunks"] == {"least": 1, "most": 1}


def test_a_schedule_is_shown_with_its_figures(capsys):
    shown = output(capsys, "show", "1f1b").splitlines()
    assert shown[:5] == [
        "1f1b: 4 ranks, 8 micro-batches",
        "bubble 27.3% of the step (37.5% of the busy time); length 33 units",
        "idle time per rank: 9, 9, 9, 9",
        "peak live activations per rank: 4, 3, 2, 1",
        "sends: may block",
    ]
    assert "rank 3" in shown[-1]


def test_json_is_one_document_with_the_figures_and_the_programs(capsys):
    found = json.loads(output(capsys, "show", "1f1b", "--stages", "2", "--microbatches", "2", "--json"))
    assert found == {
        "name": "1f1b",
        "ranks": 2,
        "stages": 2,
        "micro_batches": 2,
        "chunks": 1,
        "slices": 1,
        "steps": 1,
        "bubble": 0.5,
        "bubble_without_flush": 0.5,
        "duration": 9.0,
        "idle": [3.0, 3.0],
        "in_flight": [2, 1],
        "sends_may_block": True,
        "programs": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "written": {},
    }


@pytest.mark.parametrize("ranks", ["--stages", "--ranks", "--pp"])
@pytest.mark.parametrize("micro_batches", ["--microbatches", "--micro-batches", "--micro_batches"])
def test_sizes_have_several_names(capsys, ranks, micro_batches):
    found = json.loads(output(capsys, "show", "interleaved_1f1b", ranks, "2", f"{micro_batches}=6", "--json"))
    assert (found["ranks"], found["stages"], found["micro_batches"], found["chunks"]) == (2, 4, 6, 2)


def test_a_schedule_s_own_sizes_may_be_chosen(capsys):
    found = json.loads(output(capsys, "show", "looped_bfs", "--chunks", "3", "--json"))
    assert (found["stages"], found["chunks"]) == (12, 3)
    assert json.loads(output(capsys, "show", "terapipe", "--slices=3", "--json"))["slices"] == 3
    assert json.loads(output(capsys, "show", "pipedream", "--steps=3", "--json"))["micro_batches"] == 24


def test_files_are_written_and_read_again(capsys, tmp_path):
    svg, trace, csv = (str(tmp_path / name) for name in ("a.svg", "a.json", "zb_v.csv"))
    found = json.loads(output(capsys, "show", "zb_v", "--svg", svg, "--trace", trace, "--csv", csv, "--json"))
    assert found["written"] == {"svg": svg, "trace": trace, "csv": csv}
    assert ElementTree.parse(svg).getroot().get("role") == "img"
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert file.read(csv) == catalogue.build("zb_v", 4, 8)
    again = json.loads(output(capsys, "show", csv, "--json"))
    assert {**again, "written": found["written"]} == found
    assert output(capsys, "check", csv).startswith(f"{csv}: valid\nzb_v: 4 ranks")
    assert json.loads(output(capsys, "check", csv, "--json"))["ok"] is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["shw", "1f1b"], "no command 'shw'; did you mean `phalanx schedule show`?"),
        (["1f1b"], "put the command first: `phalanx schedule show 1f1b`"),
        (["xyz"], "no command 'xyz'; there are: list, show, check"),
        (["show"], "takes NAME|FILE, found nothing"),
        (["show", "1f1b", "zb_v"], "takes NAME|FILE, found 1f1b zb_v"),
        (["show", "1f1"], "did you mean 1f1b?"),
        (["show", "none.csv"], "none.csv: cannot be read: No such file or directory"),
        (["show", "none.csv", "--pp", "2"], "--stages: a file states the size of its schedule"),
        (["show", "1f1b", "--stags", "2"], "unknown option --stags; did you mean --stages?"),
        (["show", "1f1b", "--micro-batch", "2"], "unknown option --micro-batch; did you mean --micro-batches?"),
        (["show", "1f1b", "--stages"], "--stages: needs a value"),
        (["show", "1f1b", "--stages="], "--stages: needs a value"),
        (["show", "1f1b", "--stages", "0"], "--stages: must be at least 1, is 0"),
        (["show", "1f1b", "--pp", "two"], "--pp: expected a whole number"),
        (["show", "1f1b", "--chunks", "2"], "1f1b: chunks 2"),
        (["show", "1f1b", "--stages", "100000", "--microbatches", "100000"], "40,000,000,000 actions"),
        (["show", "terapipe", "--slices", "1000000000"], "nearest legal: 156250 slices"),
        (["show", "1f1b", "--svg", "/no/where.svg"], "--svg /no/where.svg: folder /no does not exist"),
        (["check"], "takes FILE, found nothing"),
        (["check", "mine.csv", "--svg", "a"], "unknown option --svg"),
        (["list", "1f1b"], "takes options only, found 1f1b"),
    ],
)
def test_mistakes_are_one_message_and_code_2(argv, message, capsys):
    assert main(["schedule", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_file_that_deadlocks_is_refused_with_its_circle(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert main(["schedule", "check", str(path)]) == 2
    assert "the ranks wait in a cycle, rank 0 -> rank 1 -> rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(catalogue.SCHEDULES))
def test_every_schedule_is_on_the_page_with_its_picture(name):
    page = (ROOT / "docs" / "techniques" / "schedules.md").read_text()
    assert f"| `{name}` |" in page
    assert f"(../pictures/schedule-{name}.svg)" in page


# Pictures as PNG: by a browser where one is installed, otherwise a message.


@pytest.mark.skipif(not any(map(shutil.which, png.BROWSERS)), reason="no chromium")
def test_a_name_in_png_draws_the_picture(tmp_path):
    write(str(tmp_path / "a.png"), document("a", 120, 40, []))
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (120 * png.SCALE, 40 * png.SCALE)


def test_without_a_program_the_message_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(png, "BROWSERS", ())
    monkeypatch.setattr(png.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match=r"a PNG needs cairosvg .* or chromium; write an .svg instead"):
        write(str(tmp_path / "a.png"), document("a", 120, 40, []))


def test_a_dark_picture_has_a_dark_ground_and_pale_text(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("phalanx.cli.files.write_png", lambda _, svg, dark: drawn.append(for_ground(svg, dark)))
    command = ["schedule", "show", "1f1b", "--svg", str(tmp_path / "a.png")]
    assert main(command) == main([*command, "--dark"]) == 0
    for svg, ink, other in ((drawn[0], TEXT, TEXT_ON_DARK), (drawn[1], TEXT_ON_DARK, TEXT)):
        assert ink in svg
        assert other not in svg
        assert "prefers-color-scheme" not in svg


def test_dark_is_for_a_png(capsys):
    assert main(["schedule", "show", "1f1b", "--svg", "a.svg", "--dark"]) == 2
    assert "--dark is for a PNG, an SVG follows the reader's preference: give --svg a name in .png" in (
        capsys.readouterr().err
    )


def test_two_outputs_in_one_file_are_refused(tmp_path, capsys):
    both = str(tmp_path / "a.svg")
    assert main(["plan", "model=gpt2", "cluster=dgx-h100:1", "--svg", both, "--html", both]) == 2
    assert f"both are {both}; name two files" in capsys.readouterr().err
