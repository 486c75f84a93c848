"""Checks of a job on this machine, and of its file systems."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.trained import small_job
from disks import fill, lustre, mounted
from machine.machines import machine, only, program, statuses, with_torch, write
from phalanx.config.layout import Layout
from phalanx.data.prepare import prepare
from phalanx.machine import storage
from phalanx.machine.checks import CHECKS, CheckedMachine
from phalanx.train.run_directory import Holder, RunDirectory
from train.runs import train

# The file system of the run directory, on real ones where that needs no more than a folder, and on stand-ins.


MOUNTS = "1 0 8:1 / / rw,relatime - ext4 /dev/vda rw\n2 1 0:5 / {point} {options} - {kind} server:/x rw\n"


def stored(tmp_path, job="model=tiny", **fields):
    return machine(job=f"{job} run.dir={tmp_path} run.name=run", **fields)


@pytest.mark.parametrize(
    ("kind", "options", "status"),
    [
        ("ext4", "rw", "OK"),
        ("nfs4", "rw", "OK"),
        ("nfs", "rw,nolock", "WARN"),
        ("nfs", "rw,local_lock=all", "WARN"),
        ("lustre", "rw,flock", "OK"),
        ("lustre", "rw", "WARN"),
        ("gpfs", "rw", "OK"),
        ("tmpfs", "rw", "WARN"),
        ("overlay", "rw", "WARN"),
        ("fuse.sshfs", "rw", "WARN"),
        ("9p", "rw", "WARN"),
    ],
)
def test_the_type_of_the_file_system(tmp_path, kind, options, status):
    write(tmp_path, "/proc/self/mountinfo", MOUNTS.format(point=tmp_path, options=options, kind=kind))
    found = machine(tmp_path, job=f"model=tiny run.dir={tmp_path} run.name=run")
    assert f"{kind} (server:/x)" in only(storage.file_system(found), status).text


def test_a_disk_of_one_node_for_a_run_of_several(tmp_path):
    write(tmp_path, "/proc/self/mountinfo", MOUNTS.format(point=tmp_path, options="rw", kind="xfs"))
    several = f"model=tiny run.dir={tmp_path} cluster.nodes=2 --dp-replicate 2 global_batch=8"
    assert "a disk of this node" in only(storage.file_system(machine(tmp_path, job=several)), "WARN").text


def test_the_innermost_mount_counts_and_names_are_unescaped(tmp_path):
    write(tmp_path, "/proc/self/mountinfo", MOUNTS.format(point="/a\\040b", options="rw", kind="nfs4"))
    found = machine(tmp_path)
    assert storage.mount_of(storage.Path("/a b/c"), found.read("/proc/self/mountinfo"))[0] == "nfs4"
    assert storage.mount_of(storage.Path("/a"), found.read("/proc/self/mountinfo"))[0] == "ext4"


def test_striping_is_told_of_the_run_and_the_shards(tmp_path, monkeypatch):
    calls = lustre(tmp_path, monkeypatch)
    write(tmp_path, "/proc/self/mountinfo", (tmp_path / ".mounts").read_text())
    found = machine(tmp_path, job=f"model=tiny run.dir={tmp_path} run.name=run data.dir=/data")
    found = replace(found, env={"PATH": os.environ["PATH"]})
    line = only(storage.striping(found), "OK").text
    assert f"{tmp_path}/run: lustre, stripe count 4 × 1.0MiB, 16 storage targets; /data: ext4" == line
    assert "setstripe" not in calls.read_text()
    without = replace(found, env={"PATH": str(tmp_path)})
    assert "there is no lfs on PATH" in only(storage.striping(without), "WARN").text


def test_writing_here(tmp_path):
    assert "atomic rename" in only(storage.writes(stored(tmp_path)), "OK").text
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(storage.Path, "mkdir", refused)
    line = only(storage.writes(stored(tmp_path)), "ERROR")
    assert line.text.endswith("cannot be written: Read-only file system")
    assert list(storage.locks(stored(tmp_path))) == []  # one line about it is enough


def test_a_full_disk(tmp_path):
    with mounted(tmp_path / "small", "size=64k,nr_inodes=100") as small:
        fill(small)
        assert only(storage.writes(stored(small)), "ERROR").text.startswith(f"{small}/run: No space left")
        assert only(storage.space(stored(small)), "ERROR").text.endswith("no room for new files")


def test_a_disk_without_much_room(tmp_path):
    with mounted(tmp_path / "small", "size=64m,nr_inodes=0") as small:
        assert only(storage.space(stored(small)), "WARN")
    with mounted(tmp_path / "few", "size=2g,nr_inodes=5000") as few:
        assert "inodes" in only(storage.space(stored(few)), "WARN").text
        assert only(storage.file_system(stored(few)), "WARN")
    with mounted(tmp_path / "large", "size=2g,nr_inodes=0") as large:
        assert only(storage.space(stored(large)), "OK")


@pytest.mark.parametrize(("seconds", "way"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_file_server_with_another_clock(tmp_path, monkeypatch, seconds, way):
    now = storage.time.time
    monkeypatch.setattr(storage.time, "time", lambda: now() - seconds)
    lines = list(storage.writes(stored(tmp_path)))
    assert way in lines[0].text
    assert lines[0].status == "WARN"


def test_slow_durability(tmp_path, monkeypatch):
    times = iter([0.0, 4.0])
    monkeypatch.setattr(storage.time, "monotonic", lambda: next(times))
    assert "fsync of a small file takes 4.0s" in only(storage.writes(stored(tmp_path)), "WARN").text


def test_exclusive_creation_that_has_no_effect(tmp_path, monkeypatch):
    real = os.open
    monkeypatch.setattr(
        storage.os, "open", lambda path, flags, *mode, **at: real(path, flags & ~os.O_EXCL, *mode, **at)
    )
    assert "twice" in next(iter(storage.writes(stored(tmp_path)))).text


def test_locks(tmp_path):
    assert only(storage.locks(stored(tmp_path)), "OK")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("code", "status"), [(0, "WARN"), (1, "ERROR")])
def test_locks_without_effect(tmp_path, code, status):
    program(tmp_path / "bin", "python", f"raise SystemExit({code})")
    assert only(storage.locks(stored(tmp_path, python=str(tmp_path / "bin" / "python"))), status)


@pytest.mark.parametrize(("number", "status"), [(errno.ENOLCK, "WARN"), (errno.EIO, "ERROR")])
def test_no_locks(tmp_path, monkeypatch, number, status):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert os.strerror(number) in only(storage.locks(stored(tmp_path)), status).text


@pytest.mark.parametrize(("mask", "status"), [("0022", "OK"), ("0077", "OK"), ("0277", "ERROR")])
def test_the_umask(tmp_path, mask, status):
    write(tmp_path, "/proc/self/status", f"Name:\tpython\nUmask:\t{mask}\n")
    assert only(storage.umask(machine(tmp_path)), status)


def test_nothing_left(tmp_path):
    assert only(storage.leftovers(stored(tmp_path)), "OK").text == "none"


def test_a_directory_in_use(tmp_path):
    lock = tmp_path / "run" / ".lock"
    me = Holder.this_process()
    for holder, status, text in (
        (vars(me), "WARN", "is in use by process"),
        (vars(me) | {"host": "elsewhere"}, "WARN", "if it has ended, delete"),
        (vars(me) | {"ticks": me.ticks + 1}, "OK", "which has ended"),
    ):
        write(tmp_path, "run/.lock", json.dumps(holder))
        line = only(storage.leftovers(stored(tmp_path)), status)
        assert text in line.text + line.remedy
        assert str(lock) in line.text + line.remedy or holder["host"] == platform.node()


def test_half_checkpoints_and_links(tmp_path):
    write(tmp_path, "run/checkpoints/.step-000010.tmp-ab/rank-00000.safetensors", "")
    assert "1 file of interrupted saves" in only(storage.leftovers(stored(tmp_path)), "OK").text
    (tmp_path / "run" / "latest").symlink_to("/etc/passwd")
    assert "holds links" in next(iter(storage.leftovers(stored(tmp_path)))).text


def test_ranks_that_outlived_their_launcher(tmp_path):
    write(tmp_path, "/proc/4242/cmdline", "python\0-m\0phalanx.cli.rank\0train\0")
    write(tmp_path, "/proc/4242/status", f"PPid:\t1\nUid:\t{os.getuid()}\t0\t0\t0\n")
    assert "kill 4242" in only(storage.leftovers(machine(tmp_path)), "WARN").remedy
    write(tmp_path, "/proc/4242/status", f"PPid:\t77\nUid:\t{os.getuid()}\t0\t0\t0\n")
    assert only(storage.leftovers(machine(tmp_path)), "OK")


def test_the_lock_program_tells_a_held_lock(tmp_path):
    (tmp_path / "lock").touch()
    command = [sys.executable, "-I", "-S", "-c", storage._NO_LOCK, str(tmp_path / "lock")]
    assert subprocess.run(command, check=False).returncode == 0
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert subprocess.run(command, check=False).returncode == 3


def test_every_check_names_its_file_system_without_touching_it(tmp_path):
    found = stored(tmp_path)
    for check in CHECKS:
        assert check.group != "storage" or check.name == "umask" or str(tmp_path) in check.subject(found)
    assert statuses(storage.file_system(found)) in ("OK", "WARN")


# A job on this machine: layout, data, memory, checkpoints, run directory.


@pytest.fixture
def here(tmp_path):
    """A machine with a small job in a folder of its own."""
    return CheckedMachine(job=small_job(tmp_path, Layout(), "fp32", 4), has_job=True, env={})


def test_the_layout():
    assert only(storage.layout_here(machine(job="model=tiny --tp 2")), "OK").text == "tp=2: 2 processes"
    assert "planner" in only(storage.layout_here(machine(job="model=tiny layout=auto")), "OK").text
    several = machine(job="model=tiny cluster.nodes=2 --dp-replicate 2 global_batch=8")
    assert "run.nnodes=2" in only(storage.layout_here(several), "ERROR").remedy


def test_data_that_is_not_prepared(here):
    assert "not prepared yet" in only(storage.data_here(here), "OK").text
    nodes = replace(here.job.cluster, nodes=2)
    assert only(storage.data_here(replace(here, job=replace(here.job, cluster=nodes))), "WARN")


def test_data_that_is_there_and_data_that_is_damaged(here):
    folder = prepare(here.job.data)
    assert "vocabulary 13" in only(storage.data_here(here), "OK").text
    (folder / "train-00000.bin").write_bytes(b"short")
    line = only(storage.data_here(here), "ERROR")
    assert "expected 9,000 bytes, found 5" in line.text
    assert "phalanx data prepare" in line.remedy


@pytest.mark.parametrize(
    "words",
    ["data.corpus=text data.path=/no/such/text", "data.corpus=text data.path=/etc data.tokenizer=/no/tokenizer.json"],
)
def test_data_that_cannot_be_made(words):
    assert only(storage.data_here(machine(job=f"model=tiny data.corpus=text {words}")), "ERROR")


def test_a_folder_of_data_that_cannot_be_written(here, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "cannot be written" in only(storage.data_here(here), "ERROR").text


def memory_of(root: Path, total_kb: int, free_kb: int) -> None:
    write(root, "/proc/meminfo", f"MemTotal: {total_kb} kB\nMemAvailable: {free_kb} kB\n")


def test_memory_of_the_host(tmp_path, here):
    found = with_torch(replace(here, root=tmp_path))
    memory_of(tmp_path, 2**23, 2**22)
    assert only(storage.memory(found), "OK").text.startswith("1 rank × ")
    memory_of(tmp_path, 2**23, 2**10)
    assert only(storage.memory(found), "WARN")
    memory_of(tmp_path, 2**10, 2**10)
    assert only(storage.memory(found), "ERROR")


@pytest.mark.parametrize(("gib", "status"), [(80, "OK"), (0.001, "ERROR")])
def test_memory_of_a_gpu(here, gib, status):
    assert "its GPU has" in only(storage.memory(with_torch(here, memory=[int(gib * 2**30)])), status).text


def test_checkpoints(here, tmp_path):
    assert only(storage.checkpoints(here), "OK")
    with mounted(tmp_path / "small", "size=64k") as small:
        run = replace(here.job.run, dir=str(small))
        assert "not even one" in only(storage.checkpoints(replace(here, job=replace(here.job, run=run))), "ERROR").text
    with mounted(tmp_path / "larger", "size=4m") as larger:
        large = f"model=tiny model.vocab_size=100 run.dir={larger} checkpoint.keep=40"
        assert "41 are there" in only(storage.checkpoints(machine(job=large)), "WARN").text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bytes_of_a_checkpoint_are_those_of_a_real_one(ranks, tmp_path, precision):
    config = small_job(tmp_path, Layout(), precision, 4)
    prepare(config.data)
    ranks(train, 1, config)
    found = CheckedMachine(job=config, has_job=True, env={})
    assert "finished at step 6" in only(storage.run_directory(found), "OK").text
    [*files] = (RunDirectory.of(config).checkpoints / "step-000006").glob("*.safetensors")
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert sum(file.stat().st_size for file in files) - headers == storage.checkpoint_bytes(config, 13)
    longer = replace(config, train=replace(config.train, steps=9))
    assert "resumes at step 6 of 9" in only(storage.run_directory(replace(found, job=longer)), "OK").text
    other = replace(config, model=replace(config.model, n_layers=3))
    line = only(storage.run_directory(replace(found, job=other)), "ERROR")
    assert "another job" in line.text
    assert "--fresh" in line.remedy


def test_a_run_that_begins(here):
    assert "begins at step 0" in only(storage.run_directory(here), "OK").text


def test_trackers_that_are_not_installed(here, monkeypatch):
    assert not list(storage.trackers(here))
    named = replace(here, job=replace(here.job, run=replace(here.job.run, trackers=("mlflow",))))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert only(storage.trackers(named), "OK").text == "mlflow is installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = only(storage.trackers(named), "ERROR")
    assert "mlflow needs mlflow and sqlalchemy and alembic, not installed here" in line.text
    assert line.remedy == 'pip install "phalanx[mlflow]", or leave mlflow out'
