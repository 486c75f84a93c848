"""`phalanx bench`, and the verbs that predict on a measured machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from phalanx.cli.main import main
from phalanx.config import calibration
from phalanx.config.clusters import cluster_of
from phalanx.machine import calibration as compute
from phalanx.machine import clock
from phalanx.machine.calibration import Shape

# `phalanx bench`: measures, writes what `cluster=local` reads, and says what went wrong.


WITHOUT_TORCH = """
import sys
from phalanx.cli.main import main
code = main(sys.argv[1:])
sys.exit("imported torch" if {"torch", "numpy"} & set(sys.modules) else code)
"""
PHALANX = [sys.executable, "-m", "phalanx"]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Where the machine's file goes; and nobody has launched this process."""
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def few(monkeypatch):
    """Shapes that take no time, in this process."""
    monkeypatch.setattr(
        compute, "products_of", lambda unit, quick: [Shape("n × n × n", n, n, n) for n in (64, 128, 256)]
    )
    monkeypatch.setattr(compute, "sequence_lengths", lambda unit, quick: [64, 128])
    monkeypatch.setattr(compute, "stream_sizes", lambda quick: [2**20, 2**24])
    monkeypatch.setattr(compute, "SUSTAINED_REPEAT_S", {True: 0.001, False: 0.001})
    monkeypatch.setattr(clock, "QUICK_BUDGET_S", 0.0)


def test_help_and_mistakes_need_no_torch():
    words_of_links = WITHOUT_TORCH.replace(', "numpy"', "")  # the names of collectives stand beside the fit
    for program, words, code in (
        (WITHOUT_TORCH, ["--help"], 0),
        (words_of_links, ["comm", "--collectives", "all_recude"], 2),
        (WITHOUT_TORCH, ["comm", "--nproc-per-nod", "2"], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, "bench", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
    assert "did you mean --nproc-per-node?" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compte"], "no command 'compte'; did you mean `phalanx bench compute`?"),
        (["compute", "job.yaml"], "phalanx bench compute takes options only, found job.yaml"),
        (["compute", "--precision", "fp64"], "--precision: expected one of fp32, bf16, fp16, found 'fp64'"),
        (["compute", "--collectives", "send"], "unknown option --collectives"),
        (["compute", "--threads"], "--threads: needs a value"),
        (["compute", "--threads", "0"], "--threads: must be at least 1, is 0"),
        (["compute", "--save", "--no-save"], "--save and --no-save exclude each other"),
        (["compute", "--svg", "/no/where.svg"], "--svg /no/where.svg: folder /no does not exist"),
        (["comm", "--collectives", "all_reduce,allgather"], "no collective 'allgather'; did you mean all_gather?"),
        (["comm", "--nproc-per-node", "1"], "needs at least two ranks; there is one"),
    ],
)
def test_mistakes_are_one_message_and_code_2(words, message, capsys, home):
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA devices")
def test_a_device_that_is_not_there_is_refused(home, capsys):
    assert main(["bench", "compute", "--device", "cuda"]) == 2
    assert "--device=cuda, but this machine has 0 CUDA devices; use --device=cpu" in capsys.readouterr().err


def test_a_file_that_is_wrong_is_said_before_anything_is_measured(home, capsys):
    home.mkdir()
    (home / "cluster.yaml").write_text("cluster:\n  device: gpu\n")
    assert main(["bench", "compute"]) == 2
    assert ":2: cluster.device: expected one of auto, cpu, cuda, rocm, xpu, found 'gpu'" in capsys.readouterr().err


def test_one_process_measures_and_predictions_know_it(few, home, tmp_path, capsys):
    svg = tmp_path / "compute.svg"
    assert main(["bench", "compute", "--nproc-per-node", "1", "--threads", "1", "--quick", "--svg", str(svg)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("1 process of 1 thread, fp32 on cpu\n")
    assert "product    256×256×256" in captured.out
    assert f"written: {home / 'cluster.yaml'}\nwritten: {svg}\n" in captured.out
    assert "next: phalanx bench comm" in captured.err
    machine = cluster_of("local")
    assert machine.devices_per_node == 1
    assert machine.accelerator.fp32_tflops > 0
    assert ElementTree.parse(svg).getroot().get("role") == "img"
    head = (home / "cluster.yaml").read_text().splitlines()[1]
    assert head.endswith("phalanx bench compute --nproc-per-node 1 --threads 1 --quick")


def test_json_is_one_document_and_nothing_need_be_written(few, home, capsys):
    words = ["bench", "compute", "--nproc-per-node", "1", "--threads", "1", "--quick", "--json", "--no-save"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bench"], found["precision"], found["file"]) == ("compute", "fp32", None)
    assert found["cluster"]["accelerator.fp32_tflops"] > 0
    assert {point["kind"] for point in found["points"]} == {"product", "attention", "stream"}
    assert not home.exists()


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PHALANX, "bench", "comm", "--device", "cpu", *words],
        env={**os.environ, "PHALANX_HOME": str(home), "TMPDIR": str(home.parent), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks_measure_their_link(home):
    out = home.parent / "mine.yaml"
    words = ("--quick", "--json", "--collectives", "all-reduce,send", "--out", str(out))
    with start(home, *words) as process:
        text, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    found = json.loads(text)
    assert [(group["ranks"], group["place"]) for group in found["groups"]] == [(2, "intra")]
    assert {point["kind"] for point in found["points"]} == {"all_reduce", "send"}
    assert found["cluster"]["intra.gbs"] > 0
    assert "intra:" in out.read_text()
    assert not home.exists()
    assert not list(home.parent.glob("phalanx_bench_*"))  # the logs of ranks that did well


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(home: Path, which: int, by: signal.Signals) -> subprocess.CompletedProcess[str]:
    """A measurement whose launcher (0) or a rank (1, 2) gets a signal in the middle."""
    with start(home) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        while first and not first.startswith("measuring"):
            first = process.stderr.readline()
        ranks = [
            pid for pid in children(process.pid) if b"phalanx.cli.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(ranks) == 2
        os.kill([process.pid, *ranks][which], by)
        text, errors = process.communicate(timeout=100)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    return subprocess.CompletedProcess([], process.returncode, text, errors)


def test_a_rank_that_dies_is_named_and_nothing_is_written(home):
    done = ended(home, 2, signal.SIGKILL)
    assert done.returncode == 128 + signal.SIGKILL
    assert "Rank 1 of 2 was killed by SIGKILL" in done.stderr
    assert done.stdout == ""
    assert not home.exists()


def test_ctrl_c_ends_it_and_nothing_is_written(home):
    done = ended(home, 0, signal.SIGINT)
    assert done.returncode == 128 + signal.SIGINT
    assert "Stopped by SIGINT before everything was measured; nothing was written." in done.stderr
    assert "Traceback" not in done.stderr
    assert not home.exists()


def test_ranks_of_another_launcher_are_measured_between_nodes(home, free_port):
    """Two nodes of one rank each, as torchrun would start them: what they measure is `inter`."""
    processes = []
    for rank in range(2):
        env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "PHALANX_HOME": home, "OMP_NUM_THREADS": 1}
        processes.append(
            subprocess.Popen(
                [*PHALANX, "bench", "comm", "--device", "cpu", "--quick", "--collectives", "send"],
                env={**os.environ, **{name: str(value) for name, value in env.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    (first, errors), (second, _) = (process.communicate(timeout=100) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    assert "2 ranks, one per node: latency" in first
    assert "→ cluster.inter" in first
    assert second == ""
    text = (home / "cluster.yaml").read_text()
    assert "  inter:\n" in text
    assert "  intra:\n" not in text


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


# Verbs that predict on a measured machine print the quality of its measurements, and refuse to use very noisy ones.

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
