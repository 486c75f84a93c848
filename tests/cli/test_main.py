"""The command line as a whole: help without torch, unknown verbs, exit codes."""

import os
import subprocess
import sys

import pytest

from phalanx.cli.main import VERBS, main

IN_A_FRESH_PROCESS = """
import sys
from phalanx.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as left:
    code = left.code or 0
heavy = {"torch", "transformers", "tokenizers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--help"],
        ["--version"],
        *([verb, "--help"] for verb in VERBS),
        ["train", "--print-config", "model=llama3-8b"],
        ["train", "--print-config", "--json"],
    ],
    ids=" ".join,
)
def test_help_and_configuration_answer_without_torch(argv):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "phalanx: no verb 'trian'; did you mean `phalanx train`?"),
        (["xyz"], "phalanx: no verb 'xyz'; the verbs are: init, train, launch, verify, generate, serve"),
        (["job.yaml"], "phalanx: no verb 'job.yaml'; put the verb first: `phalanx train job.yaml`"),
        *(
            (
                [verb, *words, "offload=parameters"],
                "layout.offload: parameters on the host are updated there, so their optimizer has to be there;",
            )
            for verb in ("train", "verify", "plan", "predict", "simulate")
            for words in (["model=tiny"], ["model=tiny", "--print-config"], ["model=tiny", "layout=auto"])
        ),
        (
            ["train", "model=mixtral-8x7b", "--ep", "3", "--dp_shard", "3"],
            "layout.ep: n_experts 8 / ep 3 is not an integer",
        ),
        (["generate", "nowhere"], "phalanx: no run in nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_message_and_a_code(argv, message, capsys):
    code = main(argv)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "Traceback" not in error


def test_training_without_a_job_is_explained(capsys):
    for argv in (["train"], ["train", "--json"]):
        assert main(argv) == 2
        assert "phalanx train needs a job: a file, or fields\n  phalanx init " in capsys.readouterr().err


def test_several_problems_are_listed(capsys):
    assert main(["train", "stepz=3", "--lr", "x"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "phalanx: 2 problems:"


def test_torch_is_not_imported_by_the_packages_that_plan():
    modules = "phalanx.check.load, phalanx.blocks.parameters, phalanx.data.loader"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1"}


@pytest.mark.parametrize("argv", [["schedule", "list"], ["train", "--help"], ["trian"], []], ids=" ".join)
def test_of_several_ranks_only_the_first_does_what_one_process_does(argv, monkeypatch, capsys):
    printed = {}
    for rank in range(3):
        for name, value in OPENMPI.items():
            monkeypatch.setenv(name, value)
        for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        code = main(argv)
        printed[rank] = (code, *capsys.readouterr())
    assert printed[0][1] or printed[0][2]
    assert printed[1] == printed[2] == (0, "", "")
    if argv == ["schedule", "list"]:
        assert printed[0][0] == 0
        assert printed[0][2] == "phalanx schedule runs once: rank 0 of 4 does it, the others end\n"


def test_half_of_a_launcher_s_variables_is_said_by_one_rank(monkeypatch, capsys):
    monkeypatch.setenv("PMI_FD", "9")
    for rank, code in ((0, 2), (1, 2)):
        monkeypatch.setenv("PMI_RANK", str(rank))
        assert main(["schedule", "list"]) == code
        assert capsys.readouterr().err.count("incompletely: PMI_SIZE") == 1 - rank


def test_a_stream_that_has_no_multiplication_sign():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "phalanx",
            "predict",
            "model=tiny",
            "data.corpus=random",
            "cluster=dgx-h100:1",
            "dp_shard=8",
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "accumulation 1 \\xd7 data ranks 8" in done.stdout
