"""The lock and files of a run directory, disks that are full or not shared, and the device's peak."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from disks import mounted
from phalanx.config import calibration
from phalanx.config.calibration import Calibration, ComputeCalibration, FitQuality, Provenance
from phalanx.config.cluster import Accelerator, Cluster, Sharing
from phalanx.data.index import INDEX
from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.train import agreement as shared
from phalanx.train import device as peak
from phalanx.train import run_directory as append
from phalanx.train import run_directory as run_lock
from phalanx.train.device import MEASUREMENT_S, MEASUREMENTS, measured_peak, peak_flops
from phalanx.train.metrics import Meter, MetricsFile, line
from phalanx.train.run_directory import LOCK, AppendedFile, Holder, RunDirectory, locked
from warm import as_file

# The lock of a run directory: never two trainers in one, whatever starts at the same instant, and who holds it.


TRAINER = """
import os, random, sys
from pathlib import Path
from phalanx.errors import RunError
from phalanx.train.run_directory import locked

directory, seed = Path(sys.argv[1]), int(sys.argv[2])
dice, trained = random.Random(seed), 0
sys.stdin.read(1)  # all at once
for number in range(80):
    try:
        with locked(directory, fresh=dice.random() < 0.5):
            os.close(os.open(directory / "occupied", os.O_CREAT | os.O_EXCL))  # fails if another is in here
            (directory / f"trained-{seed}-{number}").touch()
            (directory / "occupied").unlink()  # fails if another has renamed the directory
            trained += 1
    except RunError as error:
        assert f"{directory} is in use by " in str(error), error
print(trained)
"""


def test_trainers_that_start_at_once_are_never_two_in_one_directory(tmp_path: Path) -> None:
    argv = [*as_file(tmp_path, TRAINER), str(tmp_path / "runs" / "job")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*argv, str(seed)], **pipes) for seed in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    ends = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in ends] == [""] * 4
    trained = sum(int(out) for out, _ in ends)
    assert trained >= 4
    directories = list((tmp_path / "runs").iterdir())
    assert len(list((tmp_path / "runs").glob("*/trained-*"))) == trained  # nothing was lost, and nothing lies elsewhere
    assert all(re.fullmatch(r"job(\.\d+)?", path.name) for path in directories), "an unfinished directory is left"


def test_a_directory_that_is_renamed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def there_and_gone(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        calls.append(self)
        if len(calls) == 1:  # as Path.mkdir: the directory exists, then it is no directory
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        os.makedirs(self, mode, exist_ok)

    monkeypatch.setattr(Path, "mkdir", there_and_gone)
    with locked(tmp_path / "job"):
        assert (tmp_path / "job" / LOCK).exists()
    assert len(calls) == 2


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job").touch()
    with pytest.raises(FileExistsError), locked(tmp_path / "job"):
        pass


def holder(directory: Path) -> int | None:
    found = run_lock._holder_at(directory / LOCK)
    return found.pid if found else None


def test_a_fresh_start_is_refused_while_a_run_trains(tmp_path: Path) -> None:
    with locked(tmp_path / "job"):
        (tmp_path / "job" / "config.yaml").touch()
        me = f"process {os.getpid()} on {re.escape(platform.node())} since 20"
        with pytest.raises(RunError, match=rf"job is in use by {me}.*; wait for it"), locked(tmp_path / "job"):
            pass
        with pytest.raises(RunError, match=me), locked(tmp_path / "job", fresh=True):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_a_fresh_start_has_the_new_directory_and_frees_the_renamed_one(tmp_path: Path) -> None:
    job = tmp_path / "job"
    with locked(job, fresh=True) as renamed:
        assert renamed is None  # there was nothing to rename
        (job / "first").touch()
    with locked(job, fresh=True) as renamed:
        assert renamed == tmp_path / "job.1"
        assert os.listdir(job) == [LOCK]
        with pytest.raises(RunError, match="in use by process"), locked(job):
            pass
        with locked(tmp_path / "job.1"):  # it may go on under its new name
            assert (tmp_path / "job.1" / "first").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "job.1"]


def test_a_directory_that_is_renamed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that was opened is now that of another directory, where nobody trains."""
    job, renamed, real = tmp_path / "job", tmp_path / "job.1", run_lock.open_regular

    def slowly(path: Path, flags: int) -> int:
        descriptor = real(path, flags)
        if not renamed.exists():
            job.rename(renamed)
            job.mkdir()
        return descriptor

    monkeypatch.setattr(run_lock, "open_regular", slowly)
    with locked(job):
        assert holder(job) == os.getpid()
        assert holder(renamed) is None


def test_the_lock_of_a_killed_trainer_is_free(tmp_path: Path) -> None:
    program = "import sys, os; from pathlib import Path; from phalanx.train.run_directory import locked\n"
    program += "with locked(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == platform.node()  # it left its name
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ""


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("phalanx.train.run_directory.fcntl.flock", flock)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.05)


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_name_in_the_file_counts(tmp_path: Path) -> None:
    dead = Holder(platform.node(), os.getpid(), "then", 1)  # this process id, but not this process
    (tmp_path / LOCK).write_text(json.dumps(vars(dead)))
    with (
        locked(tmp_path),
        pytest.raises(RunError, match=f"in use by process {os.getpid()} on"),
        locked(tmp_path, fresh=True),
    ):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.usefixtures("without_flock")
def test_without_flock_the_last_of_two_names_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Holder("node-b", 7, "now", 1)
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / LOCK).write_text(json.dumps(vars(other))))
    with pytest.raises(RunError, match="in use by process 7 on node-b since now"), locked(tmp_path):
        pass


def test_a_holder_on_another_host_counts_while_its_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.05)
    monkeypatch.setattr(run_lock, "SILENCE_S", 60.0)
    lock = tmp_path / LOCK
    lock.write_text(json.dumps(vars(Holder("node-b", 7, "\x1b[2Jnow", 1))))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            os.utime(lock)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(RunError, match=r"process 7 on node-b since \\x1b\[2Jnow; .* delete .*\.lock"), locked(tmp_path):
        pass
    ended.set()
    heart.join()
    monkeypatch.setattr(run_lock, "SILENCE_S", 0.2)
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()


def test_a_holder_s_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(run_lock, "SILENCE_S", 60.0)
    with locked(tmp_path):
        assert run_lock._beats(tmp_path / LOCK)


def test_a_new_directory_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new").exists()
    with locked(tmp_path / "new"):
        (tmp_path / "new" / "config.yaml").touch()
    assert (tmp_path / "new" / LOCK).exists()
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()  # it was there before


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match=r"\.lock is a link"), locked(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "precious"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(RunError, match=r"\.lock is not a regular file"), locked(tmp_path):
        pass


# Files of lines on a disk that is full: nothing ends, one warning, and no line is lost or torn.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        yield disk


def test_metrics_wait_in_memory_while_the_disk_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, ballast = small_disk / "metrics.jsonl", small_disk / "ballast"
    ballast.write_bytes(bytes(56 << 10))
    with MetricsFile(path) as rows:
        for step in range(200):
            rows.write("step", step=step, text="x" * 100)
        assert path.stat().st_size <= 8 << 10
        ballast.unlink()
        rows.write("step", step=200)
        found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(201))
    warnings = [record.message for record in caplog.records]
    assert warnings == [
        f"{path} cannot be written: No space left on device; training goes on, and its lines wait in memory",
        f"{path} can be written again",
    ]


def test_what_does_not_fit_into_memory_either_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(append, "MOST_WAITING", 3)
    messages: list[str] = []
    with AppendedFile(tmp_path / "file", messages.append) as file:
        with monkeypatch.context() as broken:
            broken.setattr("phalanx.train.run_directory.os.write", full)
            for number in range(5):
                file.append(f"line {number}")
        file.append("line 5")
    assert (tmp_path / "file").read_text() == "line 0\nline 1\nline 2\n"
    assert len(messages) == 3
    assert messages[2].endswith("file: 3 lines could not be written and are lost")


def test_a_line_that_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    for before, kept in [("one\ntwo\nthr", "one\ntwo\n"), ("x" * 70_000, ""), ("one\n" + "x" * 70_000, "one\n")]:
        (tmp_path / "file").write_text(before)
        with AppendedFile(tmp_path / "file", print) as file:
            file.append("next")
        assert (tmp_path / "file").read_text() == f"{kept}next\n"


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(RunError, match="link is a link, and nothing is written through it"):
        AppendedFile(tmp_path / "link", print)
    assert not (tmp_path / "target").exists()


# A node with a disk of its own: ranks that do not see the run directory or the data are named, on every rank.


def complaint(ranks: Ranks, other_disk: str) -> str:
    """Asks as one rank of three nodes, of which the last has another disk; returns the error's message."""
    if ranks.rank == 2:
        os.chdir(other_disk)
    nodes = dataclasses.replace(ranks, local_world=1, local_rank=0, node_rank=ranks.rank)
    with mock.patch.object(shared, "VISIBLE_S", 0.2):
        try:
            shared.require_shared(RunDirectory(Path("runs/job")), Path("data/tokens"), nodes)
        except RunError as error:
            return str(error)
    return ""


def test_the_rank_that_sees_nothing_is_named(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    (here / "data" / "tokens").mkdir(parents=True)
    (here / "data" / "tokens" / INDEX).touch()
    (other / "runs" / "job").mkdir(parents=True)  # an equal path on another disk
    monkeypatch.chdir(here)
    assert ranks(complaint, 3, str(here)) == ["", "", ""]
    messages = set(ranks(complaint, 3, str(other)))
    assert len(messages) == 1, "every rank ends with the same message"
    run, data = messages.pop().splitlines()
    blind = f"is not shared: rank 2 on {platform.node()} does not see {other}/"
    assert run.startswith(f"run.dir {blind}runs/job, as rank 0 on {platform.node()} does; ")
    assert data.startswith(f"data.dir {blind}data/tokens, as rank 0 ")
    assert list((here / "runs" / "job").iterdir()) == [], "the token is removed"


# The peak that MFU divides by: from the table by the driver's name, stated by the job, or none at all.

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that the driver reports a GPU of this name and memory."""

    def reports(name: str, gib: float) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        facts = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)

    return reports


@pytest.mark.parametrize(
    ("name", "gib", "dtype", "tflops"),
    [
        ("NVIDIA GB200", 184.3, torch.bfloat16, 2500),
        ("NVIDIA B200", 178.4, torch.bfloat16, 2250),
        ("NVIDIA H100 PCIe", 79.1, torch.float16, 756),
        ("NVIDIA H100 80GB HBM3", 79.1, torch.float32, 67),
        ("Tesla V100-SXM2-32GB", 31.7, torch.bfloat16, 125),
    ],
)
def test_a_known_gpu_has_the_table_s_peak(gpu, name, gib, dtype, tflops):
    gpu(name, gib)
    found = peak_flops(Cluster(), CUDA, dtype, 1)
    assert (found.flops, found.source) == (tflops * 1e12, f"data sheet of {name}")


@pytest.mark.parametrize(
    ("name", "dtype"), [("NVIDIA H100 NVL", torch.bfloat16), ("NVIDIA H100 80GB HBM3", torch.float64)]
)
def test_without_a_peak_it_says_so_and_what_states_one(gpu, name, dtype):
    gpu(name, 79.1)
    found = peak_flops(Cluster(), CUDA, dtype, 1)
    assert found.flops == 0
    assert name in found.source
    assert "cluster.peak_tflops" in found.source
    stated = peak_flops(Cluster(peak_tflops=835), CUDA, dtype, 1)
    assert (stated.flops, stated.source) == (835e12, "the job's cluster.peak_tflops")


def test_without_a_peak_rows_and_lines_have_no_mfu():
    meter = Meter(positions_per_step=1024, flops_per_step=1e9, peak_flops=0.0, devices=2)
    row = meter.step(1) | {"step": 1, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3}
    assert "mfu" not in row
    assert row["tflops"] > 0
    assert "mfu" not in line(row, 2**30)


# The peak that MFU divides by: which one it is, on simulated time where it is measured.

CPU = torch.device("cpu")
FILE = """\
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.1, bandwidth_gbs: 20.0}
  sharing: {node_cores: 2, processes: 2, alone_products: 1.8, alone_streams: 1.5}
"""
QUALITY = """\
  calibration:
    compute:
      provenance: {date: 2026-11-22, host: a-host, processor: a cpu, cores: 2}
      products: {error: 0.03, spread: SPREAD, rounds: 3}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "processor", lambda: "a cpu")
    monkeypatch.setattr(calibration, "core_count", lambda: 2)
    monkeypatch.setattr(peak, "MEASUREMENT_S", 0.0)
    return tmp_path / "cluster.yaml"


def test_what_is_stated_comes_before_what_is_stored(file):
    file.write_text(FILE)
    stated = peak_flops(Cluster(peak_tflops=2.0), CPU, torch.float32, 2)
    assert (stated.flops, stated.source) == (2e12, "the job's cluster.peak_tflops")
    old = peak_flops(Cluster(), CPU, torch.float32, 2)
    assert (old.flops, old.source) == (pytest.approx(0.1e12), f"phalanx bench compute, {file}: spread unknown")
    file.write_text(FILE + QUALITY.replace("SPREAD", "0.02"))
    found = peak_flops(Cluster(), CPU, torch.float32, 2)
    assert (found.flops, found.spread) == (pytest.approx(0.1e12), 0.02)
    assert found.source == f"phalanx bench compute, {file}: spread 2.0%"
    assert peak_flops(Cluster(), CPU, torch.float32, 1).flops == pytest.approx(0.18e12), "one process has both cores"
    assert peak_flops(Cluster(), CPU, torch.float32, 4).flops == pytest.approx(0.05e12)


def test_the_job_s_own_cluster_comes_before_the_file(file):
    file.write_text(FILE)
    quality = FitQuality(0.03, 0.04, 3)
    measured = ComputeCalibration(Provenance("2026-11-22", "a-host", "a cpu", 2), products=quality)
    own = Cluster(
        device="cpu",
        accelerator=Accelerator("a cpu", fp32_tflops=0.3),
        sharing=Sharing(2, 2, 2, 1.8, 1.5),
        calibration=Calibration(measured),
    )
    found = peak_flops(own, CPU, torch.float32, 2)
    assert (found.flops, found.source) == (0.3e12, "phalanx bench compute, cluster of the job: spread 4.0%")
    elsewhere = replace(own, calibration=Calibration(replace(measured, provenance=Provenance("2026", "b", "b cpu", 2))))
    assert peak_flops(elsewhere, CPU, torch.float32, 2).source.startswith("median of")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("", torch.float32),
        ("cluster: [\n", torch.float32),
        (FILE.replace("device: cpu", "device: cuda"), torch.float32),
        (FILE + QUALITY.replace("SPREAD", "0.3"), torch.float32),
        ((FILE + QUALITY.replace("SPREAD", "0.02")).replace("cores: 2", "cores: 64"), torch.float32),
        (FILE.replace("a cpu", "another cpu"), torch.float32),
        (FILE, torch.float64),
        (FILE, torch.bfloat16),
    ],
    ids=["no file", "wrong", "a GPU's", "unreliable", "other cores", "other processor", "fp64", "not measured"],
)
def test_otherwise_it_is_measured(file, text, dtype):
    if text:
        file.write_text(text)
    found = peak_flops(Cluster(), CPU, dtype, 2)
    assert found.flops > 0
    assert found.source.startswith(f"median of {MEASUREMENTS} measurements of a {str(dtype).removeprefix('torch.')}")
    assert "; `phalanx bench compute` stores a steadier one" in found.source


def test_a_noisy_machine_s_peak_is_the_median_and_has_its_spread():
    """Each measurement has simulated time that runs at another speed: 1, 2, 3, 4 and 5 times as long."""
    times = iter(
        now
        for speed in range(1, MEASUREMENTS + 1)
        for now in (0.0, 0.0, 0.0, MEASUREMENT_S * speed, MEASUREMENT_S * speed)
    )
    found = measured_peak(CPU, torch.float64, lambda: next(times))
    flops = [2 * peak.SIDE**3 / (MEASUREMENT_S * speed) for speed in range(1, MEASUREMENTS + 1)]
    assert found.flops == pytest.approx(flops[2])
    assert found.spread == pytest.approx((flops[0] - flops[-1]) / flops[2])
    assert f"spread {found.spread:.1%}" in found.source
