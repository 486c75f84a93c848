"""Who a process is, from the variables of each launcher."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.ranks import LaunchersDisagreeError, Ranks, detect, lowest_evidence, rendezvous_address

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
JSRUN = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}
ROWS = {
    "torchrun": TORCHRUN,
    "slurm": SLURM,
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "pals": PALS,
    "mvapich2": MVAPICH2,
    "jsrun": JSRUN,
    "flux": FLUX,
}
REQUIRED = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"],
    "slurm": ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
    "openmpi": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    "mpich": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    "mvapich2": ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"],
    "jsrun": list(JSRUN),
    "flux": list(FLUX),
}
NAMES = sorted({name for row in ROWS.values() for name in row} | {"SLURM_STEP_NUM_TASKS", "PALS_LOCAL_SIZE", "PATH"})


@pytest.mark.parametrize("source", ROWS)
def test_each_launcher(source: str) -> None:
    node_rank = 1 if source in ("torchrun", "slurm", "pals") else None
    local_world = None if source in ("jsrun", "flux") else 4
    assert detect(ROWS[source]) == Ranks(5, 8, 1, local_world, node_rank, source)


def test_nobody_launched_us() -> None:
    assert detect({"PATH": "/bin", "SLURM_JOB_ID": "7", "PBS_NODEFILE": "/nodes"}) is None


def test_one_machine_is_node_zero() -> None:
    found = detect({**MPICH, "MPI_LOCALNRANKS": "8"})
    assert found is not None
    assert found.node_rank == 0
    assert found.one_node


def test_torchrun_in_a_slurm_step_wins() -> None:
    one_task_a_node = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    found = detect({**one_task_a_node, **TORCHRUN})
    assert found is not None
    assert found.source == "torchrun"


def test_launchers_that_agree() -> None:
    found = detect({**SLURM, **PALS})
    assert found is not None
    assert found.source == "pals"


def test_a_torchrun_per_task_is_two_launchers() -> None:
    with pytest.raises(JobError, match="slurm started torchrun 8 times(.|\\n)*--nnodes 8"):
        detect({**SLURM, **TORCHRUN, "GROUP_WORLD_SIZE": "1"})
    for more in ({"GROUP_WORLD_SIZE": "8"}, {"GROUP_WORLD_SIZE": "1", "PHALANX_LAUNCHER_PID": "7"}):
        found = detect({**SLURM, **TORCHRUN, **more})
        assert found is not None
        assert found.source == "torchrun"


def test_the_daemons_of_mpiexec_are_no_ranks() -> None:
    """mpiexec in a batch job starts one daemon per node with srun, and these start the ranks."""
    daemons = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
    found = detect({**SLURM, **daemons, **OPENMPI})
    assert found is not None
    assert found.source == "openmpi"


def test_a_launcher_that_says_no_local_rank() -> None:
    found = detect({"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_FD": "6"})
    assert found == Ranks(3, 8, None, None, None, "mpich")
    found = detect({"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "6", **FLUX})
    assert found is not None
    assert found.source == "flux", "which says it"


def test_half_of_a_launchers_variables() -> None:
    for half in ({"OMPI_COMM_WORLD_RANK": "1"}, {"WORLD_SIZE": "8"}, {"PMI_RANK": "0"}, {"PMI_SIZE": "2"}):
        with pytest.raises(JobError, match="one of several processes, but incompletely"):
            detect(half)
    with pytest.raises(JobError, match="PMIX_RANK=3, but does not say of how many"):
        detect({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1@1"})


def test_where_the_user_says_that_ranks_meet() -> None:
    assert rendezvous_address({}) is None
    assert rendezvous_address({"MASTER_ADDR": "host0", "MASTER_PORT": "29400"}) == ("host0", 29400)
    for half in ({"MASTER_ADDR": "host0"}, {"MASTER_PORT": "29400"}, {"MASTER_ADDR": "host0", "MASTER_PORT": ""}):
        with pytest.raises(JobError, match="is set, but .* is not: set both MASTER_ADDR, .* and MASTER_PORT"):
            rendezvous_address(half)
    for port in ("0", "65536", "http", "-1", "1" * 30):
        with pytest.raises(JobError, match="is no port number"):
            rendezvous_address({"MASTER_ADDR": "host0", "MASTER_PORT": port})


def test_who_prints_if_no_rank_is_known() -> None:
    """Of ranks with contradictory variables one at least prints, and without a living launcher every one."""
    for rank in range(3):
        living = {"PMI_RANK": str(rank), "PMI_FD": "6"}
        assert lowest_evidence({**living, "OMPI_COMM_WORLD_RANK": "0"}) == rank
    assert lowest_evidence({"OMPI_COMM_WORLD_RANK": "3", "RANK": "2"}) is None


def test_launchers_that_disagree() -> None:
    with pytest.raises(JobError) as error:
        detect({**SLURM, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"})
    message = str(error.value)
    assert "openmpi: rank 2 of 8" in message
    assert "slurm: rank 5 of 8" in message
    assert "`env -u SLURM_PROCID phalanx …` keeps openmpi" in message


def test_the_remedy_for_a_disagreement_works() -> None:
    env = {**SLURM, **OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}
    del env["SLURM_PROCID"]
    found = detect(env)
    assert found is not None
    assert found.source == "openmpi"


def test_batch_shell_without_srun() -> None:
    shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    with pytest.raises(JobError, match=r"allocation of 8 tasks(.|\n)*srun phalanx"):
        detect(shell)
    assert detect({**shell, "SLURM_NTASKS": "1"}) is None


def test_interactive_step_is_no_launch() -> None:
    assert detect({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}) is None


def test_pods_are_not_ranks() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
    with pytest.raises(JobError, match=r"LOCAL_RANK not set(.|\n)*RANK=1 WORLD_SIZE=4(.|\n)*torchrun in each pod"):
        detect(pod)
    assert detect({**pod, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_never_zero_of_one_when_several_are_known() -> None:
    with pytest.raises(JobError, match="MPI_LOCALRANKID or PMI_LOCAL_RANK not set"):
        detect({"PMI_RANK": "3", "PMI_SIZE": "8"})
    with pytest.raises(JobError, match="are inconsistent"):
        detect({**TORCHRUN, "RANK": "8"})


def test_only_the_launchers_variables_are_shown() -> None:
    with pytest.raises(JobError) as error:
        detect({"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_SHARED_SECRET": "hush"})
    assert "hush" not in str(error.value)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0", "1", "2", "4", "-1", "x", "", "2(x2)", "1,3"])))
def test_any_environment_gives_a_sane_answer_or_a_message(env: dict[str, str]) -> None:
    try:
        found = detect(env)
    except JobError:
        return
    if found is not None:
        assert 0 <= found.rank < found.world
        assert 0 <= found.local_rank < (found.local_world or found.world) <= found.world


@given(st.permutations(sorted(REQUIRED)), st.data())
def test_rows_are_never_mixed(sources: list[str], data: st.DataObject) -> None:
    """What is left of another launcher changes nothing as long as one of its variables is missing."""
    whole, partial, *_ = sources
    leftover = dict.fromkeys(ROWS[partial], "3")
    del leftover[data.draw(st.sampled_from(REQUIRED[partial]))]
    assert detect({**leftover, **ROWS[whole]}) == detect(ROWS[whole])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_slurm_tasks_per_node(nodes: list[int], data: st.DataObject) -> None:
    runs = [(tasks, len(list(group))) for tasks, group in itertools.groupby(nodes)]
    text = ",".join(f"{tasks}(x{count})" if count > 1 else str(tasks) for tasks, count in runs)
    node = data.draw(st.integers(0, len(nodes) - 1))
    env = {**SLURM, "SLURM_TASKS_PER_NODE": text, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    env |= {"SLURM_NTASKS": str(sum(nodes)), "SLURM_PROCID": "0"}
    found = detect(env)
    if sum(nodes) == 1:
        assert found is None
    else:
        assert found is not None
        assert found.local_world == nodes[node]


def test_ranks_that_disagree_meet_as_the_launcher_that_lives_says() -> None:
    stale = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}
    for more, claimed in (({}, ("slurm", 1)), ({"PMI_FD": "9"}, ("mpich", 0))):
        with pytest.raises(LaunchersDisagreeError) as caught:
            detect({**stale, **step, **more})
        assert caught.value.claimed is not None
        assert (caught.value.claimed.source, caught.value.claimed.rank) == claimed


def test_without_a_rank_the_first_of_a_node_speaks() -> None:
    for local_rank in (0, 1):
        half = {"PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": str(local_rank)}
        assert lowest_evidence(half) == local_rank
        with pytest.raises(JobError, match=r"PMI_RANK not set(.|\n)*mpich: PMI_SIZE=2"):
            detect(half)
