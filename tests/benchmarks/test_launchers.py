"""The bench of launchers: its judgement, its page, and its stand-ins for PBS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from benchmarks.chaos import processes
from benchmarks.launchers import __main__ as bench
from benchmarks.launchers import command, job, rig, standins
from benchmarks.launchers.interrupted import INTERRUPTIONS
from benchmarks.launchers.job import STEPS, Run
from benchmarks.launchers.launchers import LAUNCHERS
from benchmarks.launchers.results import Results, page, problems

from phalanx.check.load import load_file

FACTS = {
    "processor": "P", "cores": 2, "memory_gib": 8, "kernel": "6", "torch": "2", "python": "3", "phalanx": "0",
    "commit": "abc", "date": "2026-01-01", "ranks": 4, "sources": "abc", "load": 1.0,
    "launchers": {"Slurm": "22.05.8", "MPICH": None},
}  # fmt: skip
GOOD = {"exit": 0, "steps": STEPS, "loss": 4.1, "loss_max_rel": 0.0, "weights_max_rel": 0.0, "first_step_s": 3.0}
ROW = {
    "starts": "srun",
    "good": GOOD,
    "mistake": {"exit": 2, "times": 1, "by": "rank 0"},
    "killed": {"exit": 137, "steps": 16, "loss": 4.2},
}
INTERRUPTED = {**GOOD, "requeued": 2, "seconds": 300.0}


def test_a_row_as_documented_has_no_problems():
    assert problems("srun", ROW) == []
    assert problems("hostfile", {**ROW, "killed": GOOD}) == []
    assert problems("torchrun", {**ROW, "starts": "torchrun", "mistake": {"exit": 1, "times": 1}}) == []
    assert problems("mpich", {"missing": "not installed"}) == []
    assert problems("requeue", INTERRUPTED) == []
    assert problems("shrinks", {**INTERRUPTED, "requeued": 0, "loss_max_rel": 1e-9}) == []


@pytest.mark.parametrize(
    ("key", "row", "problem"),
    [
        ("srun", {**ROW, "good": {**GOOD, "exit": 1}}, "it ends with 1"),
        ("srun", {**ROW, "good": {**GOOD, "exit": None}}, "its time was up"),
        ("srun", {**ROW, "good": {**GOOD, "loss_max_rel": 1e-9}}, "the losses are others"),
        ("srun", {**ROW, "good": {"exit": 0, "steps": 3, "loss": 4.1}}, "the losses are others"),
        ("srun", {**ROW, "mistake": {"exit": 2, "times": 4}}, "printed 4 times"),
        ("srun", {**ROW, "mistake": {"exit": 0, "times": 1}}, "a mistake ends with 0"),
        ("launch", {**ROW, "killed": {**GOOD, "loss_max_rel": 0.1}}, "after SIGKILL: the losses are others"),
        ("requeue", {**INTERRUPTED, "requeued": 0}, "not interrupted"),
        ("shrinks", INTERRUPTED, "was requeued"),
        ("requeue", {"failed": "TimeoutError: x"}, "TimeoutError"),
    ],
)
def test_what_is_not_as_documented_is_said(key, row, problem):
    assert problem in "; ".join(problems(key, row))


def test_the_page_has_a_row_for_every_launcher(tmp_path):
    results = Results.open(tmp_path / "state.json", FACTS, fresh=False)
    for launcher in LAUNCHERS:
        results.add(launcher.key, ROW)
    results.add("mpich", {"missing": "not installed"})
    results.add("requeue", INTERRUPTED)
    results.add("node-dies", {"missing": "no cluster"})
    results.add("shrinks", {"failed": "TimeoutError: x"})
    text = page(results)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(LAUNCHERS) + 2 + len(INTERRUPTIONS)
    assert {line.count("|") for line in rows[: 2 + len(LAUNCHERS)]} == {11}
    assert "| srun | 2 × 2 | srun | 4.100000000000 | 0 | 0 | 3.0 s | 2, rank 0 | 137, ended after step 16 |" in text
    assert "**not installed**" in text
    assert text.endswith("## Not as documented\n\n- shrinks: TimeoutError: x\n")
    assert Results.open(tmp_path / "state.json", FACTS, fresh=False).rows == results.rows
    assert Results.open(tmp_path / "state.json", {**FACTS, "sources": "b"}, fresh=False).rows == {}


def test_the_job_is_legal_for_every_number_of_ranks(tmp_path):
    for per_node in (1, 2, 4):
        (tmp_path / "job.yaml").write_text(job.text(per_node))
        assert load_file(tmp_path / "job.yaml", []).job.layout.processes == 2 * per_node


def test_the_losses_of_a_run_are_those_of_its_last_attempt(tmp_path):
    rows = [{"event": "step", "time": float(at), "step": step, "loss": at} for at, step in enumerate([1, 2, 2, 3])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st')
    run = Run(tmp_path)
    assert (run.losses, run.step, run.first_step_at) == ([0, 2, 3], 3, 0.0)
    assert Run(tmp_path / "none").step == 0


def test_a_command_is_bare_of_launchers_and_nothing_of_it_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ended = command.run([["sh", "-c", "echo $SLURM_JOB_ID.$A; sleep 100 & exit 3"]], tmp_path, {"A": "b"}, 20)
    assert (ended.code, ended.text) == (3, ".b\n")
    assert command.run([["sleep", "100"]], tmp_path, {}, 0.2).code is None


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID"])
def test_ranks_are_found_by_their_launchers_variable(variable):
    mark = uuid.uuid4().hex
    ranks = [
        subprocess.Popen(
            ["cat"],
            env={**os.environ, processes.MARK: mark, variable: str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:  # the system shows a program's environment only once it runs: one that answers does
            assert rank.stdin is not None
            assert rank.stdout is not None
            rank.stdin.write(b"\n")
            assert rank.stdout.readline() == b"\n"
        assert command.rank_pid(mark, 1) == ranks[1].pid
        assert command.rank_pid(mark, 2) is None
        kill = command.killer(1, iter([0, 1, 15]).__next__, 15)
        assert (kill(mark), kill(mark), ranks[1].poll(), kill(mark)) == (False, False, None, True)
        assert ranks[1].wait(10) == -9
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_the_stand_ins_for_pbs_set_what_is_documented(tmp_path):
    (tmp_path / "hosts").write_text("x1\nx2\nx3\n")
    remote = tmp_path / "remote"
    remote.write_text('#!/bin/sh\nexport ON=$1; shift; exec /bin/sh -c "$*"\n')
    remote.chmod(0o755)
    standins.write(tmp_path / "bin", sys.executable, tmp_path / "hosts", remote)
    names = "ON PALS_RANKID PALS_LOCAL_RANKID PALS_NODEID PMI_SIZE PMI_LOCAL_SIZE PBS_JOBNAME"
    script = tmp_path / "submit.pbs"
    echo = " ".join(f"${name}" for name in names.split())
    script.write_text(
        f"#!/bin/bash\n#PBS -l select=2\n#PBS -N try\n#PBS -o {tmp_path}/\n"
        f"cd $PBS_O_WORKDIR; mpiexec -n 4 --ppn 2 --envall sh -c 'echo {echo}; exit $PALS_RANKID'\n"
    )
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["qsub", str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    code = tmp_path / "bin" / f"{done.stdout.strip()}.code"
    wait_for_text(code)
    shown = (tmp_path / f"{done.stdout.strip()}.OU").read_text()
    assert code.read_text() == "3\n", shown
    assert sorted(shown.splitlines()) == [
        "x1 0 0 0 4 2 try", "x1 1 1 0 4 2 try", "x2 2 0 1 4 2 try", "x2 3 1 1 4 2 try",
    ]  # fmt: skip


def wait_for_text(file: Path) -> None:
    ended = command.run([["sh", "-c", f"until [ -s {file} ]; do sleep 0.05; done"]], file.parent, {}, 30)
    assert ended.code == 0


def test_what_is_not_here_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(rig, "lacking", lambda _: "needs root")
    said = {}
    with rig.Rig(tmp_path / "rig", 1) as means:
        for launcher in LAUNCHERS:
            try:
                launcher.command(means)
            except rig.MissingError as error:
                said[launcher.key] = str(error)
    assert [each.key for each in LAUNCHERS if each.key not in said] == ["train", "launch", "torchrun"]
    assert said["mpich"] == said["openmpi-2"] == "not installed"
    assert said["hostfile"] == "two network namespaces: needs root"
    assert said["srun"].startswith("not installed: slurmctld, slurmd")


def test_what_the_command_line_refuses(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "srum"])
    assert "no launcher srum" in capsys.readouterr().err
    assert bench.main(["--list"]) == 0
    assert "node-dies" in capsys.readouterr().out
