"""A job on this machine: layout, data, memory, checkpoints, run directory."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.trained import small_job
from disks import mounted
from machine.machines import machine, only, with_torch, write
from phalanx.config.layout import Layout
from phalanx.data.prepare import prepare
from phalanx.machine import storage
from phalanx.machine.checks import CheckedMachine
from phalanx.train.run_directory import RunDirectory
from train.runs import train


@pytest.fixture
def here(tmp_path):
    """A machine with a small job in a folder of its own."""
    return CheckedMachine(job=small_job(tmp_path, Layout(), "fp32"), has_job=True, env={})


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
    config = small_job(tmp_path, Layout(), precision)
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
