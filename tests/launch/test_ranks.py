"""Who and where a process is, from the variables of each launcher, and lists of hosts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.exported import exported, is_secret
from phalanx.launch.grid import GridRequest, ProcessGrid, solve
from phalanx.launch.hosts import HostSlots, expand, parse_hosts, read_hosts
from phalanx.launch.ranks import LaunchersDisagreeError, Ranks, ToldError, detect, lowest_evidence, rendezvous_address
from phalanx.launch.start import where

# Who a process is, from the variables of each launcher.


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def of_prefix(prefix: str, text: str) -> dict[str, str]:
    return {f"{prefix}{name}": value for name, value in variables(text).items()}


TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=host0 MASTER_PORT=29400"
)
SLURM = of_prefix("SLURM_", "STEP_ID=0 PROCID=5 NTASKS=8 LOCALID=1 NODEID=1 TASKS_PER_NODE=4(x2)")
OPENMPI = of_prefix("OMPI_COMM_WORLD_", "RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 NODE_RANK=1")
MPICH = variables("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
PALS = of_prefix("PALS_", "RANKID=5 LOCAL_RANKID=1 NODEID=1") | of_prefix(
    "PMI_", "RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4"
)
MVAPICH2 = of_prefix("MV2_COMM_WORLD_", "RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4")
JSRUN = of_prefix("JSM_NAMESPACE_", "RANK=5 SIZE=8 LOCAL_RANK=1")
FLUX = of_prefix("FLUX_", "TASK_RANK=5 JOB_SIZE=8 TASK_LOCAL_ID=1")
ROWS = {"torchrun": TORCHRUN, "slurm": SLURM, "openmpi": OPENMPI, "mpich": MPICH, "pals": PALS, "mvapich2": MVAPICH2}
ROWS |= {"jsrun": JSRUN, "flux": FLUX}
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


ONE_TASK_A_NODE = SLURM | of_prefix("SLURM_", "PROCID=1 NTASKS=2 LOCALID=0 TASKS_PER_NODE=1(x2)")
NO_LOCAL_RANK = variables("PMI_RANK=5 PMI_SIZE=8 PMI_FD=6")
TOGETHER = {
    "nobody": (variables("PATH=/bin SLURM_JOB_ID=7 PBS_NODEFILE=/nodes"), None),
    "an interactive step": (SLURM | of_prefix("SLURM_", "PROCID=0 NTASKS=1 LOCALID=0"), None),
    "torchrun in a step wins": (ONE_TASK_A_NODE | TORCHRUN, "torchrun"),
    "launchers that agree": (SLURM | PALS, "pals"),
    # mpiexec in a batch job starts one daemon per node with srun, and these start the ranks.
    "the daemons of mpiexec are no ranks": (ONE_TASK_A_NODE | OPENMPI, "openmpi"),
    "no local rank": (NO_LOCAL_RANK, "mpich"),
    "another says the local rank": (NO_LOCAL_RANK | FLUX, "flux"),
    "the remedy for a disagreement": (
        {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"} | OPENMPI,
        "openmpi",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_whose_rank_it_is(case: str) -> None:
    env, source = TOGETHER[case]
    found = detect(env)
    assert (found and found.source) == source
    if env is NO_LOCAL_RANK:
        assert found == Ranks(5, 8, None, None, None, "mpich")


def test_one_machine_is_node_zero() -> None:
    found = detect({**MPICH, "MPI_LOCALNRANKS": "8"})
    assert found is not None
    assert found.node_rank == 0
    assert found.one_node


def test_a_torchrun_per_task_is_two_launchers() -> None:
    with pytest.raises(JobError, match="slurm started torchrun 8 times(.|\\n)*--nnodes 8"):
        detect({**SLURM, **TORCHRUN, "GROUP_WORLD_SIZE": "1"})
    for more in ({"GROUP_WORLD_SIZE": "8"}, {"GROUP_WORLD_SIZE": "1", "PHALANX_LAUNCHER_PID": "7"}):
        found = detect({**SLURM, **TORCHRUN, **more})
        assert found is not None
        assert found.source == "torchrun"


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


def test_batch_shell_without_srun() -> None:
    shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    with pytest.raises(JobError, match=r"allocation of 8 tasks(.|\n)*srun phalanx"):
        detect(shell)
    assert detect({**shell, "SLURM_NTASKS": "1"}) is None


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


# Where a launch is, as a function of the environment.


def place(env, *programs):
    return where(env, lambda name: f"/bin/{name}" if name in programs else None)


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


def test_a_job_of_pbs(tmp_path):
    (tmp_path / "nodes").write_text("a\n" * 4)
    found = place({"PBS_JOBID": "12.s", "PBS_NODEFILE": str(tmp_path / "nodes")}, "qsub")
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
        TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_one_of_several_copies_is_refused(env):
    with pytest.raises(ToldError, match="started 2 processes of `phalanx launch`"):
        place(env)


# Variables that a launch exports, and those that it keeps.


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MY_PASSWD"),
        *("PMI_SHARED_SECRET", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "API_KEYS", "OPENAI_KEY"),
    ],
)
def test_secrets_are_known_by_their_names(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "KEYBOARD", "OMP_NUM_THREADS", "HF_HOME"])
def test_others_are_none(name):
    assert not is_secret(name)


ENV = {
    "NCCL_DEBUG": "INFO",
    "HF_TOKEN": "hf_secret",
    "HF_HOME": "/hf",
    "EDITOR": "vi",
    "CUDA_VISIBLE_DEVICES": "0",
    "https_proxy": "http://me:secret@proxy:1",
    "NCCL_ODD": "a\nb",
    "WANDB_MODE": "offline",
}


def test_the_default_list():
    found = exported(ENV, (), (), {})
    assert found.values == {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf"}
    assert found.secrets == ()


def test_patterns_take_no_secrets_and_exact_names_do():
    assert exported(ENV, ("*",), (), {}).values.keys() == {"NCCL_DEBUG", "HF_HOME", "EDITOR", "WANDB_MODE"}
    found = exported(ENV, ("HF_TOKEN", "WANDB_*"), (), {})
    assert found.secrets == ("HF_TOKEN",)
    assert "hf_secret" not in str(found)
    assert found.values["WANDB_MODE"] == "offline"


def test_settings_win_over_the_environment_which_wins_over_the_site():
    found = exported(ENV, (), ("NCCL_DEBUG=WARN", "X=a=b"), {"NCCL_DEBUG": "TRACE", "HF_HOME": "/site", "Y": "1"})
    assert found.values == {"NCCL_DEBUG": "WARN", "HF_HOME": "/hf", "X": "a=b", "Y": "1"}


def test_all_problems_at_once():
    with pytest.raises(JobError) as caught:
        exported(ENV, ("WANDB_MOD",), ("novalue", "HF_TOKEN=x", "A=\x1b[1m", "1A=2"), {})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("--export-env WANDB_MOD", "--env novalue", "--env HF_TOKEN", "--env A", "--env 1A")
    ]
    assert "did you mean WANDB_MODE?" in caught.value.problems[0]
    assert "HF_TOKEN=x" not in str(caught.value)


# Lists of hosts of Slurm, PBS and MPI.


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2,07]", ["n1", "n2", "n07"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("a[1-2],b[3-4]", ["a1", "a2", "b3", "b4"]),
        ("rack[0-1]n[1-2]x", ["rack0n1x", "rack0n2x", "rack1n1x", "rack1n2x"]),
        ("login,nid[000001,000003-000004]", ["login", "nid000001", "nid000003", "nid000004"]),
        ("node[08-10,7],login1", ["node08", "node09", "node10", "node7", "login1"]),
        ("n2,n1,n2", ["n2", "n1", "n2"]),
    ],
)
def test_slurms_compressed_form(nodelist, hosts):
    assert expand(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    [
        *("", "n[", "n]", "n[1", "n[]", "n[2-1]", "n[a-b]", "n[1-]", "n[1-x]", "n[[1]]", ",", "a,,b", "a,", "n 1"),
        *("n;rm", "n[1" * 99 + "]" * 99, "n[1-2]" * 9),
    ],
)
def test_what_is_no_list_is_refused(nodelist):
    with pytest.raises(ValueError, match="not a|brackets"):
        expand(nodelist)


def test_a_list_stands_for_so_many_hosts_at_most():
    assert len(expand("n[0-99999]")) == 100_000
    for nodelist in ("n[0-100000]", "n[1-9][0-999999999]", "n[1-999999999]", "n" * 20_000_000):
        with pytest.raises(ValueError, match="the most is|more than"):
            expand(nodelist)


@st.composite
def compressed(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A compressed name, and the hosts that it stands for."""
    text, choices = "n", [["n"]]
    for _ in range(draw(st.integers(1, 3))):
        word = draw(st.text("abz-.9", max_size=3))
        numbers: list[str] = []
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            low, width = draw(st.integers(0, 120)), draw(st.integers(1, 4))
            high = low + draw(st.integers(0, 4))
            parts.append(f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else ""))
            numbers += [f"{number:0{max(width, len(str(low)))}}" for number in range(low, high + 1)]
        text, choices = f"{text}{word}[{','.join(parts)}]", [*choices, [word], numbers]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(compressed(), min_size=1, max_size=3))
def test_any_list_is_expanded_as_it_was_made(made):
    assert expand(",".join(text for text, _ in made)) == [host for _, hosts in made for host in hosts]


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30, unique=True))
def test_compressing_and_expanding_is_the_identity(numbers):
    names = [f"n{number:04d}" for number in numbers]
    assert expand(f"n[{','.join(name[1:] for name in names)}]") == names


@given(st.text(alphabet="n1,[]-0 ", max_size=40))
def test_any_text_gives_hosts_or_a_value_error(text):
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(re.fullmatch(r"[\w.-]+", host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [HostSlots("a"), HostSlots("b")]),
        ("a:4\nb:2\n", [HostSlots("a", 4), HostSlots("b", 2)]),
        ("a slots=4 max_slots=8\nb slots=1\n", [HostSlots("a", 4), HostSlots("b", 1)]),
        ("b.x\nb.x\na.x\na.x\n", [HostSlots("b.x", 2), HostSlots("a.x", 2)]),
        ("# all\n\na  # the first\n", [HostSlots("a")]),
    ],
)
def test_every_form_of_a_host_file(text, hosts):
    assert parse_hosts(text, "hosts") == hosts


def test_every_wrong_line_is_named():
    with pytest.raises(JobError) as caught:
        parse_hosts("a:4 slots=4\nb c\n$(id)\n-oProxyCommand=x\ne:2 slots=4\nf slots=0\ng:0\n", "hosts")
    assert [each.partition(": ")[0] for each in caught.value.problems] == [f"hosts:{n}" for n in range(2, 8)]
    assert caught.value.problems[3] == "hosts:5: e has 4 and 2 slots: keep one of them"
    assert "f has no slots" in caught.value.problems[4]


def test_a_file_without_hosts_and_one_that_is_absent(tmp_path: Path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(JobError, match="names no host"):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(JobError, match="cannot be read"):
        read_hosts(tmp_path / "other")


# Nodes × processes per node = processes of the layout.


def grid(**what) -> tuple[int, int]:
    found = solve(GridRequest(**what))
    return found.nodes, found.per_node


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"layout": 8}, (1, 8)),
        ({"layout": 8, "nnodes": "2"}, (2, 4)),
        ({"layout": 8, "per_node": "2"}, (4, 2)),
        ({"layout": 8, "nnodes": "2", "per_node": "4", "processes": 8}, (2, 4)),
        ({"layout": 8, "available": 2}, (2, 4)),
        ({"layout": 8, "available": 3}, (2, 4)),
        ({"layout": 8, "available": 4, "devices": 4}, (2, 4)),
        ({"layout": 8, "per_node": "auto", "devices": 4}, (2, 4)),
        ({"layout": 8, "per_node": "auto", "nnodes": "2"}, (2, 4)),
        ({"layout": 16, "per_node": "auto", "devices": 4, "cpu": True, "nnodes": "2"}, (2, 8)),
        ({"layout": 8, "cluster_nodes": 4}, (4, 2)),
        ({"layout": 8, "cluster_nodes": 1, "available": 2}, (1, 8)),
        ({"processes": 8, "nnodes": "2"}, (2, 4)),
        ({"nnodes": "2", "devices": 4}, (2, 4)),
        ({"available": 3, "per_node": "auto", "devices": 2}, (3, 2)),
    ],
)
def test_any_two_give_the_third(request_, expected):
    assert grid(**request_) == expected


def test_a_range_of_nodes():
    found = solve(GridRequest(layout=8, nnodes="1:4"))
    assert (found, found.nnodes, found.processes) == (ProcessGrid(4, 2, 1), "1:4", 8)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"layout": 4, "nnodes": "2", "per_node": "3", "layout_words": "tp=4"},
            "--nnodes 2 × --nproc-per-node 3 = 6 processes, but the layout tp=4 has 4; nearest legal: "
            "--nproc-per-node 2, or a layout of 6 processes",
        ),
        ({"layout": 4, "nnodes": "3"}, "4 processes, which are not divisible by 3; nearest legal: --nnodes 1, 2, 4"),
        ({"layout": 4, "processes": 8}, "--nproc 8, but the layout .* has 4 processes; nearest legal: --nproc 4"),
        ({"layout": 4, "nnodes": "4", "available": 2, "where": "it"}, "4 nodes, but it has 2; nearest .* --nnodes 2"),
        ({"layout": 8, "nnodes": "1", "devices": 4}, "8 processes per node, but a node has 4 devices"),
        ({"nnodes": "two"}, "expected a number of nodes"),
        ({"nnodes": "3:2", "layout": 6}, "nearest legal: --nnodes 2:3"),
        ({"per_node": "gpu", "layout": 6}, "expected a number of processes, or auto"),
        ({"nnodes": "2"}, "give --nproc-per-node"),
    ],
)
def test_what_does_not_fit_is_one_message_with_the_nearest_legal_choice(request_, message):
    with pytest.raises(JobError, match=message):
        solve(GridRequest(**request_))


@given(
    layout=st.integers(1, 64),
    nodes=st.integers(0, 8),
    per_node=st.integers(0, 8),
    available=st.integers(0, 8),
    devices=st.integers(0, 8),
)
def test_a_grid_is_the_layouts_or_a_message(layout, nodes, per_node, available, devices):
    request = GridRequest(
        str(nodes or ""), str(per_node or ""), layout=layout, available=available, devices=devices, where="it"
    )
    try:
        found = solve(request)
    except JobError:
        return
    assert found.processes == layout
    assert not nodes or found.nodes == nodes
    assert not per_node or found.per_node == per_node
    assert not available or found.nodes <= available
    assert not devices or found.per_node <= devices
