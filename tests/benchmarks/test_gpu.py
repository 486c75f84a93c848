"""`make gpu` rehearsed on a CPU: every part runs, what is measured is kept, and what cannot be is said."""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import (
    commands,
    compute,
    kernels,
    memory,
    nanogpt,
    parity,
    plain_gpt,
    several,
    shapes,
    state,
    throughput,
    torchtitan_llama,
)
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Results, markdown
from benchmarks.gpu.setting import ROOT, Setting, find, slug

from covering import also_whole
from phalanx.check.load import load_file
from phalanx.cli.main import main as phalanx
from phalanx.verify.select import select

REHEARSAL = ["--device", "cpu", "--quick"]
H100 = Setting("cuda", False, "NVIDIA H100 80GB HBM3", 1, 79 * 2**30)
FACTS = {
    "device": "NVIDIA X",
    "gpus": 2,
    "memory_gib": 79.1,
    "driver": "570.1",
    "cuda": "12.8",
    "nccl": "2.27",
    "torch": "2.13.0",
    "python": "3.11.7",
}


@pytest.fixture
def _predicts_here(monkeypatch, capsys):
    """`phalanx predict` in this process instead of one of its own."""

    def answer(argv, **_):
        phalanx(argv[argv.index("predict") :])
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(commands, "answer", answer)


def rehearse(folder: Path, *words: str) -> dict:
    assert gpu.main([*REHEARSAL, "--out", str(folder), *words]) == 0
    return json.loads((folder / "gpu-cpu-quick.json").read_text())


def test_parity_and_memory_are_measured_once(tmp_path, capsys):
    found = rehearse(tmp_path, "--only", "parity,memory")
    assert set(found["parts"]) == {"parity", "memory"}
    layouts, blocks, losses = found["parts"]["parity"].values()
    assert layouts["ok"]
    assert (layouts["layouts"], layouts["ranks"]) == (2, 2)
    assert 0 < layouts["grad_max_rel"] <= 1e-9
    assert blocks["ok"]
    assert losses["loss_max_rel"] == 0  # the CPU beside itself
    for case in found["parts"]["memory"].values():
        assert case["measured"] > 0
        assert case["predicted"] > 0
        assert case["command"].startswith("python -m phalanx train model.n_layers=2")
    page = (tmp_path / "gpu-cpu-quick.md").read_text()
    assert capsys.readouterr().out == page
    assert "## Parity" in page
    assert "## Memory" in page
    again = rehearse(tmp_path, "--only", "parity,memory")
    assert again["parts"] == found["parts"]
    assert capsys.readouterr().err.count("measured before") == 4


def test_throughput_beside_the_plain_loop(tmp_path, monkeypatch):
    monkeypatch.delenv(nanogpt.FOLDER, raising=False)
    cases = rehearse(tmp_path, "--only", "throughput")["parts"]["throughput"]
    for name in ("phalanx", "plain loop", "phalanx, compiled", "plain loop, compiled"):
        case = cases[f"tiny, {name}"]
        assert case["tokens_per_s"] == pytest.approx(2 * 16 / case["step_s"])
        assert case["tflops"] > 0
    assert "train.compile=true" in cases["tiny, phalanx, compiled"]["command"]
    assert cases["tiny, nanoGPT"]["skipped"].startswith("not installed: NANOGPT names no folder")
    assert cases["tiny Llama, phalanx"]["tokens_per_s"] > 0
    assert cases["tiny mixture, phalanx"]["tokens_per_s"] > 0
    theirs = cases["tiny Llama, torchtitan's parts"]
    assert theirs["skipped"] == torchtitan_llama.missing() if torchtitan_llama.missing() else theirs["tokens_per_s"] > 0
    page = (tmp_path / "gpu-cpu-quick.md").read_text()
    assert "| tiny, nanoGPT, compiled | skipped: not installed" in page


def test_no_gpu_is_one_message(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("benchmarks.gpu: no NVIDIA GPU here that torch can use")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--only", "parity,speed"],
            "--only: no part speed; there are parity, memory, throughput, several, kernels, state, compute",
        ),
        (["--device", "cpu"], "--device cpu rehearses tiny sizes: add --quick"),
    ],
)
def test_wrong_options(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_results_file_is_named(tmp_path, capsys):
    (tmp_path / "gpu-cpu-quick.json").write_text("{")
    assert gpu.main([*REHEARSAL, "--out", str(tmp_path)]) == 2
    assert "--fresh writes a new one" in capsys.readouterr().err


def test_only_what_has_figures_is_kept(tmp_path):
    results = Results(tmp_path / "gpu-x", FACTS)
    outcomes = {"good": {"ok": True}, "timed": {"step_s": 1.0}, "wrong": {"ok": False}}
    outcomes |= {"broken": {"failed": "exit 1"}, "absent": {"skipped": "not installed"}}
    for name, outcome in outcomes.items():
        results.add("parity", name, outcome)
    known = Results.open(tmp_path / "gpu-x", FACTS, fresh=False)
    assert [name for name in outcomes if known.has("parity", name)] == ["good", "timed"]
    assert known.parts["parity"]["good"]["torch"] == "2.13.0"
    assert not Results.open(tmp_path / "gpu-x", FACTS, fresh=True).parts


def test_the_page_says_what_was_measured_on(tmp_path):
    page = Results(tmp_path / "gpu-x", FACTS).write_page({"A part": [("case", "figure"), ("a|b", "1"), ("why",)]})
    assert page.read_text().startswith("# On 2 × NVIDIA X\n\n79.1 GiB per device; ")
    assert "driver 570.1, cuda 12.8, nccl 2.27, torch 2.13.0" in page.read_text()
    assert markdown([("case", "figure"), ("a|b", "1"), ("why",)]) == [
        "| case | figure |",
        "|---|---|",
        "| a\\|b | 1 |",
        "| why |  |",
    ]


def test_tables_show_figures_failures_and_reasons():
    gib = 2**30
    rows = memory.PART.table({"a": {"measured": 2 * gib, "predicted": gib}, "b": {"failed": "out of memory"}})
    assert rows[1:] == [("a", "2.00", "1.00", "-50.0%"), ("b", "failed: out of memory")]
    measured = {"step_s": 0.1, "first_step_s": 9.0, "tokens_per_s": 1e5, "tflops": 100.0, "memory": gib}
    case = {**measured, "layout": "layout.micro_batch=2", "predicted_step_s": 0.2, "peak_tflops": 989.0}
    rows = throughput.PART.table({"a": case, "b": {**measured, "layout": ""}, "c": {"skipped": "too large"}})
    assert rows[1] == ("a", "100,000", "", "100", "10.1%", "100.0", "200.0", "1.0", "", "9.0", "micro_batch=2")
    assert rows[2][4] == "10.1%"  # of the same peak
    assert rows[3] == ("c", "skipped: too large")
    faster = {**measured, "layout": "", "tokens_per_s": 1.3e5}
    of_shapes = {"A, 6 layers, phalanx": case, "A, 6 layers, phalanx, compiled": {**case, "start_s": 20.0}}
    of_shapes |= {"A, 6 layers, plain loop": faster, "A, 6 layers, phalanx in fp8, compiled": faster}
    rows = throughput.PART.table(of_shapes)
    assert [row[2] for row in rows[1:]] == ["1.00", "1.00", "1.30", "1.30"]
    assert rows[2][8] == "20.0"
    updates = {"parameters": 1000, "seconds": 1e-3, "moved": 30_000, "sum": 4e7}
    rows = state.PART.table({"drawn": {"parameters": 1000, "seconds": 0.5}, "update": updates})
    assert rows[1:] == [("drawn", "1,000", "500.0"), ("update", "1,000", "1.0", "30", "0", "75%")]
    points = [{"error": -0.2, "used": True}, {"error": 4.0, "used": False}]
    rows = compute.PART.table({"a": {"median_error": 0.05, "points": points, "cluster": {"intra.gbs": 300.123}}})
    assert rows[1] == ("a", "5.0%", "20.0%", "intra.gbs 300.1")


def test_kernels_are_measured_by_the_verb(monkeypatch):
    asked = []

    def answer(argv, **_):
        asked.append(" ".join(argv[3:]))
        return {"setting": "", "cluster": {}, "median_error": 0.1, "points": [], "file": None}

    monkeypatch.setattr(commands, "answer", answer)
    for case in compute.PART.cases(Setting("cuda", False, "X", 2, 1)):
        assert case.measure()["median_error"] == 0.1
    assert asked == [
        "bench compute --precision bf16 --nproc-per-node 1 --device cuda --no-save --json",
        "bench compute --precision fp32 --nproc-per-node 1 --device cuda --no-save --json",
        "bench comm --device cuda --no-save --json",
    ]


def test_every_case_for_a_gpu_has_its_own_name():
    for part in gpu.PARTS.values():
        for setting in (H100, Setting("cuda", False, "X", 8, 2**37), find("cpu", quick=True)):
            names = [case.name for case in part.cases(setting)]
            assert len(set(names)) == len(names)
            assert names or (part is several.PART and setting is H100)


def test_where_time_is_short_the_worthiest_come_first_and_the_rest_waits(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(commands.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(commands, "_ends", math.inf)

    def case(name):
        def measure():
            commands.answer([sys.executable, "-c", "print('{}')"], limit_s=20)
            return {"name": name}

        return Case(name, measure)

    names = ["125M, phalanx", "Llama 3 8B, 6 layers, phalanx, compiled", "350M, phalanx, compiled"]
    part = Part("throughput", "x", lambda setting: [*map(case, names)], throughput.PART.table)
    monkeypatch.setattr(gpu, "PARTS", {"throughput": part})
    monkeypatch.setattr(gpu, "write_page", lambda results: tmp_path)
    results = Results(tmp_path / "gpu-x", FACTS)
    assert gpu.run(["throughput"], H100, results, 1.0)
    assert [*results.parts["throughput"]] == [names[1]]
    assert "the 1 minutes are over: the same command goes on with 2 cases" in capsys.readouterr().err


def test_every_pattern_of_worth_is_of_a_case():
    cases = [(part, case) for part in gpu.PARTS.values() for case in part.cases(replace(H100, gpus=2))]
    assert {gpu.worth(*each) for each in cases} == {*range(len(gpu.WORTH) + 1)}


def test_kernels_are_counted_by_kind():
    names = ["nvjet_tst_128x256", "triton_poi_fused_mul", "cudnn_generated_fort_native_sdpa_flash_fprop", "nvjet_x"]
    names += ["void at::native::multi_tensor_apply_kernel", "vectorized_elementwise_kernel", "Memcpy DtoD", "?"]
    times = [(at * 100.0, 90.0) for at in range(len(names))]
    events = [
        {"cat": "kernel", "name": name, "ts": at, "dur": took} for name, (at, took) in zip(names, times, strict=True)
    ]
    found = kernels.by_kind([*events, {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5.0}])
    assert found["step_ms"] == pytest.approx(0.79 / 2)
    assert found["idle_ms"] == pytest.approx(0.07 / 2)
    assert found["kinds_ms"]["products"] == pytest.approx(2 * 0.09 / 2)
    assert found["launches"]["products"] == 1
    assert [*found["kinds_ms"]][1:] == ["compiled", "attention", "optimizer", "elementwise", "copies", "others"]
    assert kernels.by_kind([]) == {}
    host = [{"cat": "phase", "name": "optimizer", "ts": 50.0, "dur": 40.0}]
    host += [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1.0, "args": {"correlation": number}}
        for number, at in enumerate((40.0, 60.0, 70.0))
    ]
    names = ["triton_poi_fused_copy", "triton_poi_fused_copy", "ncclDevKernel_AllGather"]
    launched = [
        {"cat": "kernel", "name": name, "ts": 100.0 * number, "dur": 50.0, "args": {"correlation": number}}
        for number, name in enumerate(names)
    ]
    assert kernels.by_kind([*host, *launched])["launches"] == {"compiled": 0, "optimizer": 0, "communication": 0}
    assert [*kernels.by_kind([*host, *launched])["kinds_ms"]] == ["compiled", "optimizer", "communication"]
    rows = kernels.PART.table({"a": found, "b": {"skipped": "no"}})
    assert rows[1][:4] == ("a", "0.4", "0.0", "")
    assert rows[2] == ("b", "skipped: no")


def test_a_profile_of_a_cpu_has_no_kernels(tmp_path):
    cases = rehearse(tmp_path, "--only", "kernels")["parts"]["kernels"]
    assert cases["tiny"]["skipped"] == "a CPU's profile has no kernels"


def test_drawing_and_every_update_is_measured(tmp_path):
    found = rehearse(tmp_path, "--only", "state")["parts"]["state"]
    assert [*found] == ["tiny drawn", "tiny, update of adamw"]
    assert {case["parameters"] for case in found.values()} == {108_288}
    assert [case.get("moved", 0) / case["parameters"] for case in found.values()] == [0, 30]
    assert [case.name for case in state.cases(H100)][1:] == [
        f"llama3-8b, 6 layers, update of {name}" for name in ("adamw", "lion", "sgd")
    ]


def test_what_torchtitan_needs_only_for_data_may_be_absent():
    absent = torchtitan_llama.AbsentFinder(["torchdata"])
    assert absent.find_spec("torchdata.stateful_dataloader")
    assert absent.find_spec("torch") is None
    module = torchtitan_llama.Absent("torchdata")

    @module.conf.configure(module.conf.Name)
    class Loader(module.StatefulDataLoader):
        kind: module.Literal[0] | None = None

    assert Loader.__bases__ == (object,)


@pytest.mark.usefixtures("_predicts_here")
def test_what_does_not_fit_is_skipped_with_its_size():
    layout, prediction = shapes.fitting(H100, shapes.GPT[0])
    assert shapes.tensors(prediction) <= shapes.MEMORY_FRACTION * H100.memory
    assert layout[0].startswith("layout.micro_batch=")
    with pytest.raises(SkippedError, match=r"GiB of tensors predicted for one sequence with recompute=full"):
        throughput.ours(H100, shapes.GPT[-1], compiled=False)
    small = Setting("cuda", False, "X", 1, 2**30)
    with pytest.raises(SkippedError, match=r"GiB predicted, the device has 1\.0 GiB"):
        memory.measure(small, shapes.GPT[0], ["layout.micro_batch=4"])


@pytest.mark.usefixtures("_predicts_here")
def test_fp8_is_measured_compiled_and_skipped_where_a_device_has_none(monkeypatch):
    cases = {case.name: case for case in throughput.cases(H100)}
    assert [name for name in cases if "fp8" in name and "350M" in name] == ["350M, phalanx in fp8, compiled"]
    assert not any("fp8" in case.name for case in throughput.cases(find("cpu", quick=True)))

    def refuses(words: list[str], **_: object) -> None:
        assert words[-2:] == ["train.compile=true", "++train.precision=fp8"]
        raise commands.CaseError("train.precision: NVIDIA A100 has no products in fp8; nearest legal: bf16")

    monkeypatch.setattr(commands, "train", refuses)
    with pytest.raises(SkippedError, match="has no products in fp8"):
        cases["350M, phalanx in fp8, compiled"].measure()


def test_a_run_that_ends_too_early_or_late_says_why():
    words = shapes.training(find("cpu", quick=True), shapes.TINY, "layout.micro_batch=2", "layout.tp=3")
    with pytest.raises(commands.CaseError, match="MLP width 128 / tp 3 are not integers"):
        commands.train(words, steps=2, limit_s=60)
    with pytest.raises(commands.CaseError, match=r"0 steps done after 0 s"):
        commands.train(words[:-1], steps=2, limit_s=0.1)


def test_memory_that_runs_out_is_told_apart():
    program = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')"
    with pytest.raises(commands.OutOfMemoryError, match="^out of memory$"):
        commands.answer([sys.executable, "-c", program], limit_s=30)
    with pytest.raises(commands.CaseError, match="not done after 0 s"):
        commands.answer([sys.executable, "-c", "import time; time.sleep(9)"], limit_s=0.2)


def test_an_interrupted_run_goes_on(tmp_path):
    argv = [sys.executable, "-m", "benchmarks.gpu", *REHEARSAL, "--only", "throughput", "--out", str(tmp_path)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr
    while "phalanx ..." not in process.stderr.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert "interrupted; the same command goes on" in process.stderr.read()
    assert process.wait(30) == 130


STUB = """
import torch
class GPTConfig:
    def __init__(self, **fields): self.__dict__.update(fields)
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)
    def forward(self, tokens, targets):
        logits = self.embed(tokens) @ self.embed.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""


def test_nanogpt_is_called_as_its_repository_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv(nanogpt.FOLDER, str(tmp_path))
    assert nanogpt.missing() == f"not installed: no model.py in NANOGPT={tmp_path}"
    (tmp_path / "model.py").write_text(STUB)
    assert nanogpt.missing() == ""
    options = argparse.Namespace(layers=1, heads=1, width=4, seq_len=8, vocab=11, device="cpu")
    model, optimizer = nanogpt.make(options)
    monkeypatch.delitem(sys.modules, "nanogpt_model")
    tokens = torch.randint(11, (2, 9))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()


def test_the_plain_model_learns_and_has_the_shapes_parameters():
    options = argparse.Namespace(layers=2, width=16, heads=2, vocab=11, seq_len=8, device="cpu")
    model, optimizer = plain_gpt.make(options)
    assert sum(p.numel() for p in model.parameters()) == 11 * 16 + 8 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_device_is_a_file_name():
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert slug("  ") == "unknown"
    assert find("cpu", quick=True).file_name == "gpu-cpu-quick"


@pytest.mark.usefixtures("_predicts_here")
def test_every_layout_of_memory_is_one_that_is_predicted():
    for words in memory.SINGLE_DEVICE.values():
        assert shapes.tensors(shapes.predict(H100, shapes.GPT[0], *words)) < H100.memory


@pytest.mark.usefixtures("_predicts_here")
@pytest.mark.parametrize("ranks", several.COUNTS)
def test_every_layout_of_several_gpus_is_predicted_and_fits(ranks):
    cases = several.cases(Setting("cuda", False, "NVIDIA H100 80GB HBM3", ranks, H100.memory))
    assert len(cases) == 9 * (several.COUNTS.index(ranks) + 1)
    for shape, layouts in ((shapes.GPT[3], several.DENSE), (shapes.OTHERS[1], several.EXPERTS)):
        for words in several.together(ranks, layouts).values():
            prediction, _ = memory.room(H100, shape, words, ranks)
            assert round(prediction["tps_total"] / prediction["tps"]) == ranks


DENSE, MIXTURE = shapes.TINY, shapes.TINY_OTHERS[1]
DENSE_OF_8 = replace(DENSE, layers=8, width=64, heads=8)
MIXTURE_OF_8 = replace(MIXTURE, more={**MIXTURE.more, "moe.n_experts": 8})


@pytest.mark.parametrize(
    ("ranks", "dense", "mixture"), [(2, DENSE, MIXTURE), *also_whole((8, DENSE_OF_8, MIXTURE_OF_8))]
)
def test_every_layout_of_several_gpus_is_rehearsed_on_fake_ones(capsys, ranks, dense, mixture):
    for shape, layouts in ((dense, several.DENSE), (mixture, several.EXPERTS)):
        for words in several.together(ranks, layouts).values():
            cluster = ("cluster=dgx-h100", f"cluster.devices_per_node={ranks}")
            assert phalanx(["dryrun", *shapes.training(H100, shape, *words), *cluster, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["world"] == ranks


def test_several_processes_stand_for_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(several, "DENSE", {"TP, SP": several.DENSE["TP, SP"]})
    found = rehearse(tmp_path, "--only", "several")["parts"]["several"]
    assert [*found] == ["tiny, TP, SP on 2", "tiny mixture, EP on 2"]
    for case in found.values():
        assert case["tokens_per_s"] * case["step_s"] == pytest.approx(2 * 16 * (2 if "ep=2" in case["command"] else 1))
    shown = {"step_s": 0.1, "predicted_step_s": 0.11, "tokens_per_s": 1e5, "mfu": 0.5}
    shown |= {"memory": 2**30, "predicted_memory": 2**29}
    rows = several.PART.table({"a": shown, "b": {"failed": "out of memory"}})
    assert rows[1] == ("a", "100,000", "50.0%", "100.0", "110.0", "+10.0%", "1.00", "0.50", "-50.0%")
    assert rows[2] == ("b", "failed: out of memory")


@pytest.mark.parametrize("words", parity.KINDS.values(), ids=parity.KINDS)
def test_every_kind_of_model_has_layouts_to_compare_on_a_gpu(words):
    asked = [word for word in words if "=" in word]
    ranks = int(words[words.index("--max-ranks") + 1])
    job = load_file(ROOT / parity.JOB, [*asked, "cluster.device=cuda"]).job
    chosen = select(job, schedules="--schedules" in words, max_ranks=ranks)
    assert len(chosen.layouts) > 20
    assert max(layout.processes for layout in chosen.layouts) == ranks
    assert not any(layout.data_parallel == "threads" for layout in chosen.layouts)
