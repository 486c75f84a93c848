"""Processors, memory, shared memory, ulimits."""

import resource
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine.machines import machine, only, statuses, write
from phalanx.machine.system import cgroup_cores, memory, memory_bytes, processors, shared_memory, ulimits

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
