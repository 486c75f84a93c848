"""`phalanx train` when its readers, launcher, peers or run directory fail it."""

from __future__ import annotations

import json
import os
import platform
import pty
import socket
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disks import fill, mounted
from phalanx.check.load import load_file
from phalanx.cli.main import main
from phalanx.errors import RunError
from phalanx.train.run_directory import ENTRIES, RunDirectory

# `phalanx train` when what is around it goes away: its readers, its launcher, its peers.


JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 2000, random_vocab: 13}
train: {steps: 4, global_batch: 4, eval_samples: 4, log_every: 1}
run: {sample_tokens: 0, timeout_s: 60}
"""
TRAIN = [sys.executable, "-m", "phalanx", "train", "job.yaml"]
ENDLESS = "train.steps=10000000"
PATIENCE_S = 100

MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run, which does not exist yet."""
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs" / "job"


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"event": "step"') if path.exists() else 0


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def state(pid: int) -> str:
    """Returns the state of a process as in /proc, "Z" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stopped_terminal_and_a_vanished_reader_do_not_stop_training(run: Path) -> None:
    """Standard output is a pipe to a program that has ended, as in `| head`; standard error a terminal after Ctrl-S."""
    terminal, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(TRAIN, stdout=writer, stderr=theirs) as process:
        assert process.wait(PATIENCE_S) == 0
    for descriptor in (terminal, theirs, writer):
        os.close(descriptor)
    assert steps(run) == 4
    logs = run / "logs" / "attempt_0" / "rank_0"
    assert "step: 4  loss: " in (logs / "stderr.log").read_text()
    assert "run directory: runs/job" in (logs / "stdout.log").read_text()


RANK = b"\0phalanx\0train\0"
"""Words of a rank's command line; a path may hold the name, too."""


def test_ranks_end_with_a_torchrun_that_is_killed(run: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "phalanx"]
    with subprocess.Popen([*argv, "train", "job.yaml", ENDLESS], stderr=subprocess.DEVNULL) as agent:
        wait_for(lambda: steps(run) > 3)
        ranks = [pid for pid in children(agent.pid) if RANK in Path(f"/proc/{pid}/cmdline").read_bytes()]
        agent.kill()
    assert len(ranks) == 2
    wait_for(lambda: {state(pid) for pid in ranks} <= {"Z"})


@contextmanager
def ranks_of_mpiexec(*argv: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks as mpiexec starts them on two machines: nobody but the ranks themselves sees that one ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **MPI, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*TRAIN, *argv],
            env=environment | {"OMPI_COMM_WORLD_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_peer_that_goes_away_is_a_message(run: Path) -> None:
    with ranks_of_mpiexec(ENDLESS) as ranks:
        wait_for(lambda: steps(run) > 3)
        ranks[1].kill()
        _, error = ranks[0].communicate(timeout=PATIENCE_S)
    assert ranks[0].returncode == 1, error
    assert "phalanx: rank 0 of 2 on " in error
    assert "lost rank 1: another rank ended, hangs, or its connection broke while this one waited in " in error
    assert "Traceback" not in error


def test_a_rank_0_that_cannot_start_tells_the_others(run: Path) -> None:
    with RunDirectory(run).lock(), ranks_of_mpiexec() as ranks:
        ends = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    (_, first), (_, second) = ends
    assert first.startswith(f"phalanx: runs/job is in use by process {os.getpid()} on "), first
    assert "Traceback" not in first
    assert second == "", "rank 0 alone prints it"


WORKER = """
import os, sys, threading, time
from pathlib import Path
from phalanx.launch.lifeline import die_with_launcher
die_with_launcher()
if threading.active_count() == 1:
    sys.exit("nothing watches")
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (MPI, '"$0" -c "$1" "$2"; true'),
        (TORCHRUN, 'setsid --wait sh -c \'"$0" -c "$1" "$2"; true\' "$0" "$1" "$2"; true'),
    ],
    ids=["mpiexec", "a wrapper script under torchrun"],
)
def test_a_rank_ends_with_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], command: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    argv = ["sh", "-c", command, sys.executable, WORKER, str(tmp_path / "pid")]
    with subprocess.Popen(argv, env={**os.environ, **environment}) as launcher:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        launcher.kill()
    wait_for(lambda: state(int((tmp_path / "pid").read_text())) == "Z")


def test_a_process_without_a_launcher_outlives_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nohup phalanx train &` goes on when its shell ends."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path / "pid")], capture_output=True, text=True, check=False
    )
    assert done.stderr == "nothing watches\n"


# `phalanx train` and a run directory that it cannot or must not use: one message, and nothing is overwritten.

ALONE = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
data: {corpus: random, random_tokens: 2000, random_vocab: 13}
train: {steps: 2, global_batch: 4, eval_samples: 4}
run: {sample_tokens: 0}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "job.yaml").write_text(ALONE)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Trains in this process, which must fail, and returns the message."""

    def fails(*argv: str, code: int = 1) -> str:
        assert main(["train", "job.yaml", *argv]) == code
        *progress, message = capsys.readouterr().err.splitlines()
        assert message.startswith("phalanx: ")
        assert all(line.startswith("tokenizing: ") for line in progress), progress
        return message

    return fails


@pytest.mark.parametrize("argv", [(), ("--fresh",)])
def test_a_run_that_trains_is_left_alone(here: Path, fails: Callable[..., str], argv: tuple[str, ...]) -> None:
    loaded = load_file(here / "job.yaml")
    directory = RunDirectory.of(loaded.job)
    with directory.lock():
        directory.start(loaded)
        assert f"runs/job is in use by process {os.getpid()} on {platform.node()} since 20" in fails(*argv)
    assert [path.name for path in (here / "runs").iterdir()] == ["job"]


@pytest.fixture
def read_only(here: Path) -> Iterator[Path]:
    """A folder that not even root can write."""
    folder = here / "readonly"
    if os.getuid():
        folder.mkdir(mode=0o555)
        yield folder
        return
    with mounted(folder, "ro") as disk:
        yield disk


def test_a_read_only_folder(read_only: Path, fails: Callable[..., str]) -> None:
    message = fails(f"run.dir={read_only}")
    assert message.startswith(f"phalanx: the run directory {read_only}/job cannot be written: ")
    assert message.endswith("; choose another run.dir")


def test_a_full_disk(here: Path, fails: Callable[..., str]) -> None:
    with mounted(here / "disk", "size=64k") as disk:
        fill(disk)
        message = fails(f"run.dir={disk}")
    assert message.startswith(f"phalanx: the run directory {disk}/job cannot be written: ")
    assert message.endswith("No space left on device; free some space")


def test_a_file_in_the_place_of_the_run_directory(here: Path, fails: Callable[..., str]) -> None:
    (here / "runs").mkdir()
    (here / "runs" / "job").write_text("precious")
    assert "the run directory runs/job cannot be written: " in fails("--fresh")
    assert (here / "runs" / "job").read_text() == "precious"


def test_a_file_in_the_place_of_the_logs_is_set_aside(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_file(here / "job.yaml")
    directory = RunDirectory.of(loaded.job)
    directory.path.mkdir(parents=True)
    directory.logs.write_text("precious")
    directory.start(loaded)
    assert directory.next_log_dir() == directory.logs / "attempt_0" / "rank_0"
    assert (directory.path / "logs-1").read_text() == "precious"
    assert "runs/job/logs is not a directory; it was renamed to runs/job/logs-1" in capsys.readouterr().err


def test_logs_that_another_start_left_half_made(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    (tmp_path / "logs" / "attempt_0").mkdir(parents=True)
    (tmp_path / "logs" / "attempt_1").touch()
    (tmp_path / "logs" / "attempt_2").symlink_to(tmp_path / "nowhere")
    assert directory.next_log_dir() == tmp_path / "logs" / "attempt_3" / "rank_0"


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "x" * 300])
def test_a_name_that_is_no_folder_s(here: Path, fails: Callable[..., str], name: str) -> None:
    said = fails(f"run.name={name}", code=2)
    assert f"run.name={name}: must be the name of one folder: printable, without / and a leading dot" in said
    assert not (here / "runs").exists()


def test_planted_links_are_named_and_not_followed(here: Path) -> None:
    loaded, target = load_file(here / "job.yaml"), here / "target"
    target.write_text("precious")
    directory = RunDirectory.of(loaded.job)
    directory.path.mkdir(parents=True)
    for name in ENTRIES:
        (directory.path / name).symlink_to(target)
    with pytest.raises(RunError, match=r"these are links, .*: config\.yaml, .*metrics\.jsonl, .*latest, .*\.lock"):
        directory.start(loaded)
    with pytest.raises(RunError, match=r"runs/job/\.lock is a link"), directory.lock():
        pass
    assert target.read_text() == "precious"


def test_a_run_directory_may_itself_be_a_link(here: Path) -> None:
    loaded = load_file(here / "job.yaml")
    (here / "runs").mkdir()
    (here / "big").mkdir()
    (here / "runs" / "job").symlink_to(here / "big")
    directory = RunDirectory.of(loaded.job)
    with directory.lock():
        directory.start(loaded)
        with pytest.raises(RunError, match="in use by process"), directory.lock(fresh=True):
            pass
    assert (here / "big" / "config.yaml").exists()
    with directory.lock(fresh=True) as renamed:
        assert renamed == Path("runs/job.1")
    assert (here / "runs" / "job.1").readlink() == here / "big"
    assert not (here / "runs" / "job").is_symlink()


def test_colleagues_can_read_a_run_and_not_everyone_can_write_it(here: Path) -> None:
    for mask, file_mode, folder_mode in [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o664, 0o775)]:
        os.umask(mask)
        assert main(["train", "job.yaml", f"run.name=mask{mask}"]) == 0
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in (here / "runs" / f"mask{mask}").rglob("*")}
        names = {path.name for path in found}
        assert names > {"config.yaml", "env.json", "tokenizer.json", "latest", "metrics.jsonl", "stderr.log", ".lock"}
        wrong = {
            path: oct(mode) for path, mode in found.items() if mode != (folder_mode if path.is_dir() else file_mode)
        }
        assert not wrong


def test_the_environment_is_shown_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_TOKEN", "GLOO_PASSWORD", "TORCH_NCCL_KEY", "PMI_SHARED_SECRET", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "a value")
    loaded = load_file(here / "job.yaml")
    directory = RunDirectory.of(loaded.job)
    directory.start(loaded)
    text = (directory.path / "env.json").read_text()
    assert json.loads(text)["variables"]["NCCL_DEBUG"] == "a value"
    assert text.count("a value") == 1
