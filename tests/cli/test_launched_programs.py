"""Any program as ranks: variables, logs, restarts, exit codes; ending a run; folders on the hosts' disks; SkyPilot."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from phalanx.cli.main import main
from phalanx.cli.program import directory_of
from phalanx.cli.verb import Words
from phalanx.errors import RunError
from phalanx.launch.ship import MARK, interpreter, rounds

PROGRAM = """
import os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(*[os.environ[name] for name in names], *sys.argv[1:], flush=True)
print(*[name for name in os.environ if name.startswith("PHALANX_")], flush=True)
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    print("this is why", file=sys.stderr, flush=True)
    sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 7)
if "--wait" in sys.argv:
    open(f"ready{os.environ['RANK']}", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def environment() -> dict[str, str]:
    launchers = ("SLURM_", "PBS_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PHALANX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def words(*given: str) -> list[str]:
    here = () if "--kill" in given else ("--launcher", "local")  # also where a scheduler is installed
    return [sys.executable, "-P", "-m", "phalanx", "launch", *here, *given]


def launched(folder: Path, *given: str):
    return subprocess.run(words(*given), cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def test_a_program_gets_the_variables_of_torchrun_and_its_words(folder):
    done = launched(folder, "--nproc", "2", "--all-ranks", "--", sys.executable, "program.py", "--lr", "1e-3")
    assert done.returncode == 0, done.stderr
    first, *others = sorted(
        line.removeprefix("[rank 1] ").split() for line in done.stdout.splitlines() if ":" not in line
    )
    lines = [line for line in (first, *others) if line]
    assert [line[:4] for line in lines] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert {tuple(line[4:]) for line in lines} == {("127.0.0.1", lines[0][5], "--lr", "1e-3")}
    assert int(lines[0][5]) > 0
    assert not any("PHALANX_" in word for line in lines for word in line), "a Phalanx verb takes itself for torchrun's"
    assert (folder / "runs/program/logs/attempt_0/rank_1/stdout.log").exists()


def test_a_failure_is_told_and_restarted(folder):
    program = ("--", sys.executable, "program.py", "--fail")
    once = launched(folder, "--nproc", "2", *program)
    assert once.returncode == 7
    assert "Rank 1 of 2 ended with exit code 7" in once.stderr
    assert "this is why" in once.stderr
    again = launched(folder, "--nproc", "2", "--max-restarts", "1", "--name", "again", *program)
    assert again.returncode == 0, again.stderr
    assert "Restart 1 of at most 1." in again.stderr
    assert (folder / "runs/again/logs/attempt_1").exists()
    absent = launched(folder, "--", "no-such-program")
    assert absent.returncode == 127
    assert "no-such-program cannot be started: No such file or directory" in absent.stderr


@contextmanager
def ended_with(running: subprocess.Popen):
    try:
        yield
    finally:
        running.terminate()


def test_a_run_is_ended_by_its_name(folder):
    command = words("--nproc", "2", "--", sys.executable, "program.py", "--wait")
    with (
        subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL) as running,
        ended_with(running),
    ):
        while not all((folder / f"ready{rank}").exists() for rank in range(2)):
            assert running.poll() is None
            time.sleep(0.05)
        busy = launched(folder, "--", sys.executable, "program.py")
        assert busy.returncode == 1
        assert f"process {running.pid}" in busy.stderr
        ended = launched(folder, "--kill", "runs/program")
        assert (ended.returncode, ended.stdout) == (0, "runs/program: ended\n"), ended.stderr
        assert running.wait() == 128 + 15
    assert "nothing runs there" in launched(folder, "--kill", "runs/program").stderr
    assert "no run's directory" in launched(folder, "--kill", "runs/other").stderr


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("python -m my.module --lr 1", "my.module"),
        ("/usr/bin/python3.11 -u a/train.py b.py", "train"),
        ("python -c print(1)", "python"),
        ("./a.out b", "a"),
        ("phalanx test-dist", "phalanx"),
    ],
)
def test_a_run_is_named_after_its_program(program, name):
    words = SimpleNamespace(options={"name": "", "dir": "runs"})
    assert directory_of(cast(Words, words), program.split()).name == name


def test_mistakes_are_answered(folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))  # no scheduler
    for given, answer in (
        (("python", "x.py"), "phalanx launch --nproc 2 -- python"),
        (("test-dist",), "put -- before another verb: phalanx launch --nproc 2 -- phalanx test-dist"),
        (("--kill",), "--kill takes one run's directory"),
        (("--nprocs", "2", "--", "x"), "did you mean --nproc?"),
        (("--nnodes", "2", "--", "x"), "name the hosts"),
        (("--submit=sky", "--time", "9m", "--", "x"), "--submit: expected one of slurm, pbs, found 'sky'"),
        (("--submit=slurm", "--signal", "9", "--", "x"), "--signal is for a job file, and this is a program"),
        (("--submit=slurm", "--time", "soon", "--", "x"), "expected a time limit"),
        (("--launcher", "local", "--nnodes", "2", "--", "x"), "--launcher local is one host"),
        (("--nproc-per-node", "auto", "--", "x"), "no devices are known here: give a number"),
        (("--ship", "nowhere:/tmp/me/env", "--", "x"), "there is no folder"),
        (("--ship", ".:env", "--", "x"), "expected FOLDER:TO"),
        (("--ship", ".:/tmp/me/env", "--", "x"), "--ship needs the hosts"),
    ):
        assert main(["launch", *given]) == 2
        assert answer in " ".join(capsys.readouterr().err.split())


def test_a_program_is_submitted(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    sbatch = folder / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 17\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    words = ["--nnodes", "2", "--nproc-per-node", "4", "--", "python", "-m", "my.module", "--lr", "1e-3"]
    assert main(["launch", *words]) == 2
    assert "submit the job (--submit slurm)" in " ".join(capsys.readouterr().err.split())
    assert main(["launch", "--submit", "slurm", "--time", "10m", "--batch-option=--mem=1G", *words]) == 0
    assert capsys.readouterr().out.startswith("submitted: 17")
    script = (folder / "runs/my.module/submit.sbatch").read_text().splitlines()
    assert {"#SBATCH --job-name=my.module", "#SBATCH --nodes=2", "#SBATCH --time=00:10:00"} <= {*script}
    assert "#SBATCH --mem=1G" in script
    (line,) = [line for line in script if " phalanx launch --" in line and not line.startswith("#")]
    inside = line.partition(" -m phalanx launch ")[2].removesuffix(" || code=$?").split()
    assert inside[-6:] == words[-6:]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert main(["launch", "--nproc-per-node", "auto", "--launcher", "local", "--dry-run", "--", "python", "x.py"]) == 0
    assert '"per_node": 4' in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(["launch", "--dry-run", *inside]) == 0
    shown = capsys.readouterr().out
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in shown
    assert "-- python" not in shown
    assert "python -m my.module --lr 1e-3 run.nnodes=2 run.rdzv_endpoint=n1:" in shown


# Folders on the hosts' local disks.


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 100])
def test_every_host_gets_one_copy_from_one_that_has_it(count):
    hosts, have = [f"h{number}" for number in range(count)], {""}
    found = rounds(hosts)
    for pairs in found:
        assert len({sender for sender, _ in pairs}) == len(pairs), "a host sends one copy at a time"
        assert {sender for sender, _ in pairs} <= have
        have |= {receiver for _, receiver in pairs}
    assert have == {"", *hosts}
    assert sum(map(len, found)) == count
    assert len(found) == (0 if count == 0 else 1 + (count - 1).bit_length())


def test_the_copies_arrive_and_their_interpreter_is_used(folder, capsys, monkeypatch):
    """A stand-in for ssh, under which each host sees a /disk of its own."""
    shell = folder / "shell"
    # Of a sender's command only the first path is its own, the others are the receiver's.
    here = f"/\\/disk\\//{folder}/$1/disk/"
    choice = f'case "$2" in bash*) c="${{2{here}}}" ;; *) c="${{2/{here}}}" ;; esac'
    shell.write_text(f'#!/bin/bash\nmkdir -p {folder}/$1/disk\n{choice}\nexec bash -c "$c"\n')
    shell.chmod(shell.stat().st_mode | stat.S_IXUSR)
    (folder / "env/bin").mkdir(parents=True)
    (folder / "env/bin/python").write_text("x")
    (folder / "hosts").write_text("a\nb\nc\n")
    monkeypatch.setattr(sys, "executable", str(folder / "env/bin/python"))
    monkeypatch.chdir(folder)
    given = ["--hostfile", "hosts", "--nproc-per-node", "1", "--remote-shell", str(shell), "--ship", "env:/disk/env"]
    assert main(["launch", *given, "--dry-run", "--", "python", "x.py"]) == 0
    assert capsys.readouterr().out.count("/disk/env/bin/python -P -m phalanx.cli.node") == 3
    assert not (folder / "a/disk").exists()
    from phalanx.launch.ship import ship

    ship(folder / "env", Path("/disk/env"), ["a", "b", "c"], [str(shell)])
    for host in "abc":
        assert (folder / host / "disk/env/bin/python").read_text() == "x"
        assert os.listdir(folder / host / "disk") == ["env"]
    (folder / "env/bin/python").write_text("newer")
    ship(folder / "env", Path("/disk/env"), ["a", "b"], [str(shell)])
    assert (folder / "b/disk/env/bin/python").read_text() == "newer"
    (folder / "b/disk/env" / MARK).unlink()
    with pytest.raises(RunError, match="is there, and is no copy that --ship has made"):
        ship(folder / "env", Path("/disk/env"), ["a", "b"], [str(shell)])
    assert (folder / "b/disk/env/bin/python").read_text() == "newer", "a folder of somebody stays"
    assert interpreter("/usr/bin/python3", folder / "env", Path("/disk/env")) == "/usr/bin/python3"


# SkyPilot.


JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
layout: {dp_replicate: 16}
cluster: {preset: "dgx-h100:2"}
data: {corpus: random, random_tokens: 5000, random_vocab: 13}
train: {steps: 3, global_batch: 16}
"""


def test_a_task_of_skypilot(folder, capsys, monkeypatch):
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_TOKEN", "hidden")
    given = ["launch", "job.yaml", "--submit", "sky", "--nnodes", "2", "--export-env", "HF_TOKEN", "--dry-run"]
    assert main([*given, "--bucket", "s3://me/runs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    task = yaml.safe_load(document["script"])
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["file_mounts"] == {"/runs": {"source": "s3://me/runs", "mode": "MOUNT"}}
    assert document["command"][:4] == ["sky", "launch", "--yes", "--detach-run"]
    assert "--secret=HF_TOKEN" in document["command"]
    assert "hidden" not in json.dumps(document)
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    job = task["run"].partition("<<'END_OF_JOB'\n")[2].partition("\nEND_OF_JOB\n")[0]
    assert yaml.safe_load(job)["layout"]["dp_replicate"] == 16
    assert 'run.nnodes=2 run.rdzv_endpoint="$host:' in task["run"]
    assert main(given) == 2
    assert "--bucket is missing" in capsys.readouterr().err
    assert main([*given, "--bucket", "me"]) == 2
    assert "expected an address" in capsys.readouterr().err


def test_a_node_that_cannot_meet_the_others_says_so(folder):
    """Its part is started by srun or a remote shell: what it prints is all that a person sees."""
    settings = {"per_node": 1, "directory": str(folder / "run"), "max_restarts": 0, "all_ranks": False}
    meeting = ["run.nnodes=2", "run.rdzv_endpoint=no-such-host.invalid:29400"]
    command = [sys.executable, "-m", "phalanx.cli.node", f"--program={json.dumps(settings)}", "program", *meeting]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no-such-host.invalid is no known host" in done.stderr
    assert "Traceback" not in done.stderr
