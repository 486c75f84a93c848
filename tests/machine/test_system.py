"""Checks of the environment, the limits, the software and the accelerators of a machine."""

from __future__ import annotations

import importlib.metadata
import resource
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disks import mounted
from machine.machines import PATH, machine, only, program, statuses, with_torch, write
from phalanx.errors import ExtensionError
from phalanx.machine import system
from phalanx.machine.checks import CheckedMachine
from phalanx.machine.system import (
    HARMFUL,
    caches,
    cgroup_cores,
    gpus,
    memory,
    memory_bytes,
    processors,
    shared_memory,
    temporary,
    ulimits,
    variables,
)
from phalanx.registry import Package

# Variables that hurt, temporary files, caches.


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


# Processors, memory, shared memory, ulimits.


GIB_IN_KB = 2**20
MEMINFO = "MemTotal:       {total} kB\nMemFree:        1 kB\nMemAvailable:   {free} kB\n"


def limits(**stated):
    """Returns a getrlimit with these soft limits and no others: nofile=100."""
    known = {getattr(resource, f"RLIMIT_{name.upper()}"): value for name, value in stated.items()}

    def limit(which):
        default = 0 if which == resource.RLIMIT_CORE else resource.RLIM_INFINITY
        return known.get(which, default), resource.RLIM_INFINITY

    return limit


def test_cores_for_all_ranks(tmp_path):
    assert "4 cores" in only(processors(machine(tmp_path), 4), "OK").text
    fits = machine(tmp_path, job="model=tiny --dp-replicate 4 global_batch=8")
    assert statuses(processors(fits, 4)) == "OK"
    assert "2 cores" in only(processors(fits, 2), "WARN").text


def test_threads_of_openmp(tmp_path):
    job = "model=tiny --dp-replicate 2 global_batch=8"
    assert statuses(processors(machine(tmp_path, job=job, env={"OMP_NUM_THREADS": "2"}), 4)) == "OK"
    line = only(processors(machine(tmp_path, job=job, env={"OMP_NUM_THREADS": "4"}), 4), "WARN")
    assert line.remedy == "set OMP_NUM_THREADS=2, or unset it"
    assert "take turns" in only(processors(machine(tmp_path, job=job, env={"OMP_NUM_THREADS": "1"}), 1), "WARN").text
    assert statuses(processors(machine(tmp_path, env={"OMP_NUM_THREADS": "many"}), 4)) == "WARN OK"


def test_ranks_that_their_launcher_has_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "8"), ("LOCAL_RANK", "0"))}
    found = machine(tmp_path, env=mpi | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMP_NUM_THREADS": "1"})
    assert "1 core of 8" in only(processors(found, 1), "OK").text
    assert statuses(processors(replace(found, env=mpi | {"OMP_NUM_THREADS": "2"}), 1)) == "WARN"


@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_a_cgroup(tmp_path, version):
    if version == 2:
        write(tmp_path, "/proc/self/cgroup", "0::/pod/box\n")
        write(tmp_path, "/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
        write(tmp_path, "/sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    else:
        write(tmp_path, "/proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n")
        write(tmp_path, "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "150000\n")
        write(tmp_path, "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert cgroup_cores(machine(tmp_path)) == 1.5
    assert "allows 1.5" in only(processors(machine(tmp_path), 8), "WARN").text


def test_memory_of_machine_and_cgroup(tmp_path):
    write(tmp_path, "/proc/meminfo", MEMINFO.format(total=64 * GIB_IN_KB, free=32 * GIB_IN_KB))
    assert only(memory(machine(tmp_path)), "OK").text == "32.0GiB free of 64.0GiB"
    write(tmp_path, "/proc/self/cgroup", "0::/box\n")
    write(tmp_path, "/sys/fs/cgroup/box/memory.max", f"{8 * 2**30}\n")
    write(tmp_path, "/sys/fs/cgroup/box/memory.current", f"{7 * 2**30}\n")
    write(tmp_path, "/sys/fs/cgroup/box/memory.stat", f"anon 1\ninactive_file {4 * 2**30}\n")
    assert only(memory(machine(tmp_path)), "OK").text == "5.0GiB free of 8.0GiB"
    write(tmp_path, "/sys/fs/cgroup/box/memory.stat", "inactive_file 0\n")
    write(tmp_path, "/sys/fs/cgroup/box/memory.current", f"{8 * 2**30 - 1000}\n")
    assert statuses(memory(machine(tmp_path))) == "WARN"


def test_memory_that_is_not_lent_twice(tmp_path):
    write(tmp_path, "/proc/meminfo", MEMINFO.format(total=64 * GIB_IN_KB, free=32 * GIB_IN_KB))
    write(tmp_path, "/proc/sys/vm/overcommit_memory", "2\n")
    assert "overcommit" in only(memory(machine(tmp_path)), "WARN").text
    assert "mount /proc" in only(memory(machine(tmp_path / "none")), "WARN").remedy


@given(st.text(alphabet="0123456789:/.,max \n-", max_size=60), st.text(alphabet="0123456789max \n", max_size=30))
def test_nothing_that_the_kernel_may_write_breaks_the_parsing(tmp_path_factory, group, value):
    root = tmp_path_factory.mktemp("root")
    write(root, "/proc/self/cgroup", group)
    write(root, "/proc/meminfo", value)
    write(root, "/sys/fs/cgroup/cpu.max", value)
    write(root, "/sys/fs/cgroup/memory.max", value)
    assert cgroup_cores(machine(root)) >= 0
    assert min(memory_bytes(machine(root))) >= 0


def test_shared_memory(tmp_path, monkeypatch):
    assert "NCCL cannot use" in only(shared_memory(machine(tmp_path)), "WARN").text
    assert "/dev/shm" in only(shared_memory(machine()), "OK").text
    small = type("Statvfs", (), {"f_blocks": 16384, "f_frsize": 4096, "f_bavail": 16384})
    monkeypatch.setattr("os.statvfs", lambda _: small)
    assert "too small" in only(shared_memory(machine()), "WARN").text


def test_limits_that_are_no_limits():
    assert only(ulimits(machine(), limits()), "OK").text == "unlimited open files, unlimited processes"


@pytest.mark.parametrize(
    ("name", "value", "status", "text"),
    [
        ("fsize", 2**20, "ERROR", "ulimit -f"),
        ("nofile", 1024, "WARN", "1024 open files"),
        ("nproc", 200, "WARN", "ulimit -u"),
        ("stack", 2**20, "WARN", "ulimit -s"),
        ("cpu", 1800, "WARN", "1800 s of processor time"),
        ("as", 2**30, "WARN", "ulimit -v"),
    ],
)
def test_limits_that_end_a_run(name, value, status, text):
    assert text in only(ulimits(machine(), limits(**{name: value})), status).text


def test_limits_that_depend_on_the_machine(tmp_path):
    assert statuses(ulimits(machine(tmp_path), limits(memlock=65536, core=2**30))) == "OK"
    write(tmp_path, "/sys/class/infiniband/mlx5_0", "")
    write(tmp_path, "/proc/sys/kernel/core_pattern", "core\n")
    assert statuses(ulimits(machine(tmp_path), limits(memlock=65536, core=2**30))) == "WARN WARN"
    write(tmp_path, "/proc/sys/kernel/core_pattern", "|/usr/bin/collector\n")
    assert statuses(ulimits(machine(tmp_path), limits(core=2**30))) == "OK"


# Python, packages, torch, and files in the way.


NEEDS = ["torch<2.14,>=2.11", "numpy>=1.26", "PyYAML>=6.0.1", "rich>=13.9"]


def test_python_and_its_encoding():
    assert sys.executable in only(system.python(machine(), "UTF-8"), "OK").text
    assert "C.UTF-8" in only(system.python(machine(), "ISO-8859-1"), "WARN").remedy
    assert "assertions" in only(system.python(machine(env={"PYTHONOPTIMIZE": "1"}), "utf-8"), "WARN").text


def test_packages_that_are_there():
    assert "numpy" in only(system.packages(machine()), "OK").text


def test_packages_that_extend_phalanx(monkeypatch):
    monkeypatch.setattr(system, "installed", dict)
    assert only(system.extensions(machine()), "OK").text == "no package extends Phalanx"
    monkeypatch.setattr(system, "installed", lambda: {Package("lab", "2.0"): ["lab"]})
    assert only(system.extensions(machine()), "OK").text == "lab 2.0"

    def fail() -> None:
        raise ExtensionError("package lab 2.0: cluster 'lab': source must not be empty")

    monkeypatch.setattr(system, "load_installed", fail)
    assert "source must not be empty" in only(system.extensions(machine()), "ERROR").text


@pytest.mark.parametrize(("name", "found"), [("rich", "12.0"), ("PyYAML", None)])
def test_packages_that_are_missing_or_old(name, found):
    def version(asked):
        if asked == name and found is None:
            raise importlib.metadata.PackageNotFoundError(asked)
        return found if asked == name else "99.0"

    line = only(system.packages(machine(), NEEDS, version), "ERROR")
    assert line.text.startswith(name)
    assert line.remedy.startswith(f"pip install '{name}>=")


@pytest.mark.parametrize(
    ("installed", "bound"),
    [("2.13.0+cpu", ""), ("2.11", ""), ("2.11.0", ""), ("2.10.1", ">=2.11"), ("2.14", "<2.14"), ("3", "<2.14")],
)
def test_versions_in_a_range(installed, bound):
    assert system.out_of_range(installed, "torch<2.14,>=2.11; python_version > '3'") == bound


@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_versions_are_ordered_as_numbers(mine, least):
    padded = [each + [0] * (3 - len(each)) for each in (mine, least)]
    installed, bound = (".".join(map(str, each)) for each in (mine, least))
    assert (system.out_of_range(installed, f"x>={bound}") == "") == (padded[0] >= padded[1])


def test_torch():
    assert only(system.torch(with_torch(machine())), "OK").text == "torch 2.13.0 (CPU build), gloo"


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        ({"version": "2.1.0"}, "ERROR", "torch 2.1.0"),
        ({"version": "9.0.0"}, "WARN", "tested with"),
        ({"gloo": False}, "ERROR", "every run needs gloo"),
        ({"devices": ["A100"], "cuda": "12.4"}, "WARN", "through gloo, which is slow"),
        ({"problem": "importing torch takes more than 40 s"}, "ERROR", "takes more than 40 s"),
    ],
)
def test_torch_that_does_not_serve(facts, status, text):
    assert text in only(system.torch(with_torch(machine(), **facts)), status).text


def test_a_login_node_without_torch(monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "torch is not installed" in only(system.torch(machine()), "WARN").text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import time; time.sleep(60)", "takes more than 0.8 s"),
        ("import os; os.abort()", "ended with signal 6: no message"),
        ("raise SystemExit('libtorch.so is broken')", "ended with exit code 1: libtorch.so is broken"),
        ("print('[1]')", "something else"),
    ],
)
def test_an_import_that_hangs_or_crashes(tmp_path, text, problem):
    program(tmp_path / "bin", "python", text)
    found = CheckedMachine(python=str(tmp_path / "bin" / "python"), seconds=0.2)
    assert problem in only(system.torch(found), "ERROR").text


def test_files_that_hide_libraries(tmp_path):
    here, stated = tmp_path / "here", tmp_path / "stated"
    for folder in (here, stated):
        folder.mkdir()
        (folder / "helper.py").touch()
    found = machine(env={"PYTHONPATH": f"{stated}:{tmp_path / 'gone'}"})
    assert only(system.import_path(found, here), "OK")
    (here / "torch.py").touch()
    (stated / "queue.py").touch()
    (stated / "yaml.py").touch()
    lines = list(system.import_path(found, here))
    assert statuses(lines) == "WARN WARN"
    assert "the current directory has torch.py" in lines[0].text
    assert f"{stated} (PYTHONPATH) has queue.py, yaml.py" in lines[1].text


def test_folders_of_another_python(tmp_path):
    found = machine(env={"PYTHONPATH": "/opt/lib/python2.7/site-packages"})
    assert "python2.7" in only(system.import_path(found, tmp_path), "WARN").text
    own = f"/opt/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    assert only(system.import_path(machine(env={"PYTHONPATH": own}), tmp_path), "OK")


# GPUs, by a stand-in for nvidia-smi and for what torch says.


GPU = "NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 500, {mig}, {persistence}, {mode}, {ecc}\n"
FINE = {"mig": "Disabled", "persistence": "Enabled", "mode": "Default", "ecc": "0"}
SMI = """
import sys
if any(word.startswith("--query-gpu") for word in sys.argv):
    print({csv!r}, end="")
else:
    print("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |")
"""
TWO_GPUS = {"available": True, "cuda": "12.4", "nccl": True, "devices": ["A100"] * 2, "memory": [80 * 2**30] * 2}


@pytest.fixture
def with_driver(tmp_path):
    """`with_driver(csv, env=..., job=..., **facts of torch)`: a machine whose nvidia-smi prints this."""

    def made(csv, env=None, job="", **facts):
        program(tmp_path / "bin", "nvidia-smi", SMI.format(csv=csv))
        path = f"{tmp_path / 'bin'}:{PATH}"
        return with_torch(machine(tmp_path, env={"PATH": path} | (env or {}), job=job), **facts)

    return made


def line(**changed):
    return GPU.format(**FINE | changed)


def test_no_gpu(tmp_path):
    assert "on the CPU" in only(gpus(machine(tmp_path, env={"PATH": ""})), "OK").text


def test_a_job_for_gpus_without_one(tmp_path):
    found = with_torch(machine(tmp_path, env={"PATH": ""}, job="model=tiny cluster.device=cuda"))
    assert "0 CUDA devices" in only(gpus(found), "ERROR").text


def test_gpus_without_nvidia_smi(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = list(gpus(with_torch(machine(tmp_path, env={"PATH": ""}), **TWO_GPUS)))
    assert statuses(found) == "WARN OK"
    assert found[0].remedy == "add it to PATH"


def test_two_gpus(with_driver):
    text = only(gpus(with_driver(line() * 2, **TWO_GPUS)), "OK").text
    assert text == "2 × NVIDIA A100-SXM4-80GB, driver 550.54.15, CUDA 12.4; torch sees 2"


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({"ecc": "3"}, "ERROR", "GPU 0 has 3 uncorrected memory errors"),
        ({"mode": "Prohibited"}, "ERROR", "compute mode Prohibited"),
        ({"persistence": "Disabled"}, "WARN", "persistence mode"),
        ({"mig": "Enabled"}, "WARN", "partitioned (MIG)"),
        ({"mig": "[N/A]", "ecc": "[N/A]", "persistence": "[Not Supported]"}, "", ""),
    ],
)
def test_faults_that_the_driver_shows(with_driver, changed, status, text):
    found = list(gpus(with_driver(line(**changed) + line(), **TWO_GPUS)))
    assert statuses(found) == f"{status} OK".strip()
    assert text in found[0].text


def test_memory_that_somebody_uses(with_driver):
    found = list(gpus(with_driver(line().replace(" 500,", " 60000,") + line(), **TWO_GPUS)))
    assert statuses(found) == "WARN OK"
    assert "GPU 0: 60,000MiB in use" in found[0].text


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        ({"cuda": None}, "ERROR", "has no CUDA"),
        ({"cuda": "13.0"}, "ERROR", "supports CUDA 12.4, torch is built for 13.0"),
        ({"cuda": "12.1"}, "ERROR", "torch.cuda.is_available() is false"),
        (TWO_GPUS | {"devices": ["A100"]}, "WARN", "of which torch sees 1"),
        (TWO_GPUS | {"cuda": "12.8"}, "OK", "minor-version compatibility"),
    ],
)
def test_driver_and_torch(with_driver, facts, status, text):
    assert text in only(gpus(with_driver(line() * 2, **facts)), status).text


def test_torch_that_is_not_there_is_not_compared(with_driver):
    found = with_driver(line())
    found.torch._facts = {"problem": "torch cannot be imported"}
    assert "not compared" in only(gpus(found), "OK").text


def test_ranks_without_a_gpu(with_driver):
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    found = with_driver(line() * 2, env=torchrun | {"CUDA_VISIBLE_DEVICES": "0,1"}, **TWO_GPUS)
    first, _ = gpus(found)
    assert first.status == "ERROR"
    assert "local rank 3 has no GPU: it sees 2 (CUDA_VISIBLE_DEVICES=0,1)" in first.text
    four = with_driver(line() * 2, job="model=tiny --dp-replicate 4 global_batch=8", **TWO_GPUS)
    assert statuses(gpus(four)) == "ERROR OK"
    two = with_driver(line() * 2, job="model=tiny --dp-replicate 2 global_batch=8", **TWO_GPUS)
    assert statuses(gpus(two)) == "OK"


def test_a_driver_that_hangs(tmp_path):
    program(tmp_path / "bin", "nvidia-smi", "import time\ntime.sleep(60)\n")
    found = machine(tmp_path, env={"PATH": str(tmp_path / "bin")}, seconds=0.5)
    began = time.monotonic()
    assert "the driver hangs" in only(gpus(found), "ERROR").text
    assert time.monotonic() - began < 5


def test_a_driver_that_fails(tmp_path):
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    program(tmp_path / "bin", "nvidia-smi", f"print({failed!r})\nraise SystemExit(9)\n")
    line = only(gpus(machine(tmp_path, env={"PATH": str(tmp_path / "bin")})), "ERROR")
    assert f"exit code 9: {failed}" in line.text


def test_an_answer_that_is_not_understood(tmp_path):
    program(tmp_path / "bin", "nvidia-smi", "print('what, ever')")
    assert "not understood" in only(gpus(machine(tmp_path, env={"PATH": str(tmp_path / "bin")})), "WARN").text
