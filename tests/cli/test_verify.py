"""`phalanx verify` as a user runs it: every technique on the main example, JSON, mistakes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.config.layout_line import parse
from phalanx.verify import select as matrix

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "main.yaml")
SMALL = ["model.n_layers=2", "model.d_model=32", "model.d_ff=48", "model.seq_len=16"]
LINES = [*matrix.MATRIX[::12], matrix.pairs(8)[0].line()]
"""Not all that the command compares where nobody names any: that takes minutes."""


def phalanx(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "verify", *argv], capture_output=True, text=True, check=False, timeout=200
    )


def test_the_main_example_under_many_techniques():
    four_layers = "++model.n_layers=4"  # as many as the stages of a layout that one names
    done = phalanx(EXAMPLE, *SMALL, four_layers, "--steps", "2", "--json", "--layouts", *LINES)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    cases = {case["layout"]: case for case in report["cases"]}
    assert list(cases) == [parse(line).line() for line in LINES]
    for line, case in cases.items():
        assert case["ok"] is True
        assert (case["world"], case["n_experts"]) == (parse(line).world, 8 if parse(line).ep > 1 else 0)
        assert (case["first_difference"], case["error"]) == (None, None)
        for what in ("loss_max_rel", "grad_max_rel", "param_max_rel"):
            assert 0 <= case[what] <= 1e-9
    assert (report["steps"], report["tolerance"], report["precision"]) == (2, 1e-9, "fp64")
    assert (report["model"]["vocab_size"], report["skipped"]) == (251, [])
    assert set(report["shrunk"]) == {"layout.bucket_mb", "optimizer.clip"}
    assert f"ok    {parse(LINES[2]).line()} (" in done.stderr
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "messages"),
    [
        (["--steps", "0", "tp=3"], ["--steps: must be at least 1, is 0", "n_heads 4 / tp 3 and"]),
        (["--layouts", "tp=3", "tpp=2"], ["layout 'tp=3': layout.tp: n_heads 4", "did you mean tp?"]),
        (["--layots", "tp=2"], ["unknown option --layots; did you mean --layouts?"]),
        (["--full", "--layouts", "tp=2"], ["--full and --layouts exclude each other"]),
        (["--static", "--precision", "bf16"], ["--static compares no values: leave --precision out"]),
        (["--schedules", "--full"], ["--schedules excludes --full, which includes it, and --layouts"]),
        (["--schedules", "--layouts", "tp=2"], ["--schedules excludes --full"]),
        (["--precision", "bf17"], ["--precision: expected one of bf16, fp16, fp8, found 'bf17'"]),
        (
            ["--precision", "bf16", "--svg", "x.svg"],
            ["--svg draws the module that differs, for which --precision does"],
        ),
        (["--svg", "x.pdf"], ["--svg x.pdf: a picture is written as .svg or .png"]),
        (["model=tiny-moe", "--layouts", "dp_shard=3,ep=3"], ["n_experts 8 / ep 3 is not an integer; nearest ep: 1"]),
    ],
)
def test_mistakes_are_one_message_and_the_code_2(argv, messages, capsys):
    assert main(["verify", *argv]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages)


@pytest.fixture
def finds(monkeypatch):
    """`finds(differences)`: what the ranks will say that they found."""
    from phalanx.launch.pool import Pool
    from phalanx.verify import run as verify

    monkeypatch.setattr(verify, "locate", lambda *args: None)
    return lambda found: monkeypatch.setattr(Pool, "run", lambda *args, **kwargs: [found])


TP_2 = ["verify", EXAMPLE, *SMALL, "--layouts", "tp=2", "--steps", "1"]


def test_a_difference_is_exit_code_1_and_names_the_parameter(finds, capsys):
    from phalanx.verify.measure import Differences

    finds(Differences([0.0], [{"embed.weight": 1e-13, "blocks.0.attn.wq.weight": 0.25}], {"embed.weight": 3e-4}))
    assert main(TP_2) == 1
    output = capsys.readouterr()
    assert "tp=2: blocks.0.attn.wq.weight: the gradient of step 1 differs by 2.5e-01" in output.out
    assert "Not equal to one process: 1 of 1 layout (tolerance 1e-09, 1 step, " in output.out
    assert "FAIL  tp=2" in output.err
    assert main([*TP_2, "--json"]) == 1
    case = json.loads(capsys.readouterr().out)["cases"][0]
    name = "blocks.0.attn.wq.weight"
    assert case["first_difference"] == {"what": "gradient", "name": name, "step": 1, "rel": 0.25}


def test_the_table_of_equal_layouts(finds, capsys):
    from phalanx.verify.measure import Differences

    finds(Differences([2e-16], [{"embed.weight": 1e-13}], {"embed.weight": 3e-14}))
    assert main(TP_2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layout", "ranks", "loss", "gradients", "parameters", "time"]
    assert lines[1].split()[:6] == ["tp=2", "2", "2.0e-16", "1.0e-13", "3.0e-14", "ok"]
    assert lines[-1].startswith("Equal to one process: 1 layout (tolerance 1e-09, 1 step, ")


def test_ctrl_c_leaves_nothing_behind():
    argv = [sys.executable, "-m", "phalanx", "verify", EXAMPLE, "--layouts", "dp_replicate=2", "--steps", "100000"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert "comparing 1 layout with" in process.stderr.readline()
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal sends it
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "phalanx: interrupted"
    assert "Traceback" not in error
