"""Variables that hurt, temporary files, caches."""

import pytest

from disks import mounted
from machine.machines import machine, only
from phalanx.machine.system import HARMFUL, caches, temporary, variables

TWO = "model=tiny --dp-replicate 2 global_batch=8"


def test_nothing_that_hurts():
    assert only(variables(machine()), "OK")


@pytest.mark.parametrize("name", HARMFUL)
def test_values_that_hurt(name):
    values, effect = HARMFUL[name]
    line = only(variables(machine(env={name: values[0]})), "WARN")
    assert line.text == f"{name}={values[0]}: {effect}"
    assert line.remedy == f"unset {name}"
    assert only(variables(machine(env={name: "something else"})), "OK")


def test_ranks_bound_to_the_same_cores():
    assert only(variables(machine(env={"GOMP_CPU_AFFINITY": "0-3"})), "OK")
    assert only(variables(machine(env={"GOMP_CPU_AFFINITY": "0-3"}, job=TWO)), "WARN")
    assert only(variables(machine(env={"OMP_PROC_BIND": "false"}, job=TWO)), "OK")


def test_a_proxy_matters_for_an_object_store_and_is_not_shown():
    env = {"https_proxy": "http://user:secret@proxy:3128"}
    assert "secret" not in only(variables(machine(env=env)), "OK").text
    remote = "model=tiny checkpoint.remote=s3://bucket/prefix"
    line = only(variables(machine(env=env, job=remote)), "WARN")
    assert "secret" not in line.text + line.remedy
    assert only(variables(machine(env=env | {"no_proxy": "minio"}, job=remote)), "OK")


def test_temporary_files(tmp_path):
    assert only(temporary(machine(env={"TMPDIR": "/tmp"})), "OK")
    assert only(temporary(machine(env={"TMPDIR": str(tmp_path / "gone")})), "ERROR")
    long = tmp_path / ("x" * 80)
    long.mkdir()
    assert "too long" in only(temporary(machine(env={"TMPDIR": str(long)})), "WARN").text


def test_a_small_disk_for_temporary_files_and_caches(tmp_path):
    with mounted(tmp_path / "small", "size=8m") as small:
        assert only(temporary(machine(env={"TMPDIR": str(small)})), "ERROR")
        line = only(caches(machine(env={"HF_HOME": f"{small}/hub"})), "WARN")
        assert line.text.startswith(f"HF_HOME={small}/hub has ")


def test_caches(monkeypatch):
    assert only(caches(machine()), "OK").text == "no folder is set"
    assert "HF_HOME=/tmp/none/yet has" in only(caches(machine(env={"HF_HOME": "/tmp/none/yet"})), "OK").text
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "cannot be written" in only(caches(machine(env={"TORCH_HOME": "/"})), "WARN").text
