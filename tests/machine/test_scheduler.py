"""The allocation and the launcher's variables."""

import pytest

from machine.machines import machine, only, program, statuses
from phalanx.machine.network import launcher, scheduler

NOW = 1_000_000.0
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PATH": ""}, "no allocation"),
        (SLURM | {"PATH": ""}, "Slurm job 77, 2 nodes: n[1-2]; time left not known"),
        (SLURM | {"SLURM_JOB_END_TIME": "1007200"}, "Slurm job 77, 2 nodes: n[1-2]; 2h00m left"),
        ({"LSB_JOBID": "5", "LSB_HOSTS": "a a b"}, "LSF job 5 on a, b"),
        ({"FLUX_JOB_ID": "f1"}, "Flux job f1"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1"}, "a Kubernetes pod, index 1 of an Indexed Job"),
    ],
)
def test_the_allocation_is_named(env, text):
    assert only(scheduler(machine(env=env), NOW), "OK").text == text


def test_a_login_node_is_named(tmp_path):
    program(tmp_path / "bin", "qsub", "")
    assert "a login node of PBS" in only(scheduler(machine(env={"PATH": str(tmp_path / "bin")}), NOW), "OK").text


@pytest.mark.parametrize(("left", "status"), [(300, "WARN"), (20, "ERROR"), (-5, "ERROR")])
def test_an_allocation_that_ends_soon(left, status):
    found = scheduler(machine(env=SLURM | {"SLURM_JOB_END_TIME": str(int(NOW) + left)}), NOW)
    assert " left" in only(found, status).text


@pytest.mark.parametrize(
    ("told", "text"),
    [("4:59", "4m59s left"), ("1-02:03:04", "26h03m left"), ("UNLIMITED", "not known"), ("", "not known")],
)
def test_an_older_slurm_is_asked(tmp_path, told, text):
    program(tmp_path / "bin", "squeue", f"print({told!r})")
    [line] = scheduler(machine(env=SLURM | {"PATH": str(tmp_path / "bin")}), NOW)
    assert text in line.text


def test_the_node_file_of_pbs(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\n")
    env = {"PBS_JOBID": "9.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert only(scheduler(machine(env=env), NOW), "OK").text == "PBS job 9.pbs, 2 nodes: a, b"
    env["PBS_NODEFILE"] = str(tmp_path / "gone")
    assert "cannot be read" in only(scheduler(machine(env=env), NOW), "WARN").text


def test_a_node_list_that_is_none():
    line = only(scheduler(machine(env=SLURM | {"SLURM_JOB_NODELIST": "n[1-"}), NOW), "ERROR")
    assert "SLURM_JOB_NODELIST is not a list of hosts" in line.text
    assert line.remedy


def test_the_launcher_is_named():
    assert "starts its own processes" in only(launcher(machine()), "OK").text
    assert only(launcher(machine(env=RANK | ADDRESS)), "OK").text == "torchrun: 2 ranks, 2 on this node, node 0"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (RANK, "incompletely: MASTER_ADDR, MASTER_PORT not set"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
            | {"SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"},
            "Two launchers claim this process",
        ),
        ({"SLURM_NTASKS": "4"}, "not started with srun"),
        ({"PHALANX_LOG_DIR": "/tmp/old"}, "PHALANX_LOG_DIR set"),
    ],
)
def test_variables_that_contradict_each_other(env, text):
    assert text in only(launcher(machine(env=env)), "ERROR").text


def test_a_world_that_differs_from_the_layout():
    found = list(launcher(machine(env=RANK | ADDRESS, job="model=tiny --tp 4")))
    assert statuses(found) == "OK ERROR"
    assert "torchrun started 2 ranks, but the layout tp=4 has 4" in found[1].text
    assert statuses(launcher(machine(env=RANK | ADDRESS, job="model=tiny --tp 2"))) == "OK"
