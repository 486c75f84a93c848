"""Where a launch is, as a function of the environment."""

import pytest

from phalanx.errors import JobError
from phalanx.launch.hosts import HostSlots
from phalanx.launch.ranks import ToldError
from phalanx.launch.start.choose import where


def place(env, *programs, hosts=()):
    return where(env, lambda name: f"/bin/{name}" if name in programs else None, lambda path: list(hosts))


def test_a_lone_host_and_login_nodes():
    assert place({}).kind == "host"
    assert place({}, "sbatch", "qsub").kind == "slurm login node"
    assert place({}, "qsub").kind == "pbs login node"
    assert place({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "sbatch").kind == "pod"


def test_an_allocation_of_slurm():
    env = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_RESTART_COUNT": "3"}
    found = place(env, "sbatch")
    assert (found.kind, found.job_id, found.restarts, found.in_step) == ("slurm job", "12", 3, False)
    assert found.hosts == (HostSlots("n1"), HostSlots("n2"))
    shell = {**env, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert place(shell).in_step


def test_a_job_of_pbs():
    found = place({"PBS_JOBID": "12.s", "PBS_NODEFILE": "/x"}, "qsub", hosts=[HostSlots("a", 4)])
    assert (found.kind, found.job_id, found.hosts) == ("pbs job", "12.s", (HostSlots("a", 4),))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_JOB_ID": "1"}, "SLURM_JOB_NODELIST is not"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST: not a list"),
        ({"PBS_JOBID": "1"}, "PBS_NODEFILE is not"),
    ],
)
def test_half_an_allocation_is_refused(env, message):
    with pytest.raises(JobError, match=message):
        place(env)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "x",
        },
    ],
)
def test_one_of_several_copies_is_refused(env):
    with pytest.raises(ToldError, match="started 2 processes of `phalanx launch`"):
        place(env)
