"""The commands that start a job."""

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.hosts import HostSlots
from phalanx.launch.sites.site import known
from phalanx.launch.start import choose
from phalanx.launch.start.choose import PORTS, LaunchPlace, StartRequest, commands_of, launcher_for, port_for

REQUEST = StartRequest(
    words=("job.yaml", "train.steps=5"),
    grid=ProcessGrid(2, 4, 2),
    hosts=("n1", "n2"),
    endpoint=("n1", 12345),
    ranks_by="phalanx",
    exported=Exported({"NCCL_DEBUG": "INFO"}, ("HF_TOKEN",)),
    python="/venv/bin/python",
    folder="/work dir",
    job_id="77",
    remote_shell=("ssh",),
)
NODE = "/venv/bin/python -P -m phalanx.cli.node job.yaml train.steps=5 run.nnodes=2 run.rdzv_endpoint=n1:12345"


def test_srun_starts_one_launcher_per_node():
    assert choose.command(REQUEST).shell == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n1,n2 --export=ALL --input=none "
        f"--cpu-bind=none --kill-on-bad-exit=0 --wait=60 {NODE}"
    )


def test_srun_goes_on_when_a_node_fails_if_the_run_does():
    words = choose.command(replace(REQUEST, grid=ProcessGrid(2, 4, 1))).argv
    assert {"--no-kill", "--wait=0", "run.nnodes=1:2"} <= set(words)


def test_srun_starts_every_rank():
    request = replace(REQUEST, ranks_by="launcher", cpu_bind="cores", cpus_per_rank=8, devices=4, in_step=True)
    words = choose.command(request).argv
    assert words[-6:] == ("-P", "-m", "phalanx", "train", "job.yaml", "train.steps=5")
    assert {"--ntasks=8", "--ntasks-per-node=4", "--cpu-bind=cores", "--cpus-per-task=8"} <= set(words)
    assert {"--gpu-bind=none", "--overlap"} <= set(words)


def test_torchrun_on_every_node():
    words = choose.command(replace(REQUEST, ranks_by="torchrun", grace_s=110)).shell
    assert words.endswith(
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 4 --signals-to-handle "
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 110 --rdzv-backend c10d --rdzv-endpoint n1:12345 "
        "--rdzv-id 77 -m phalanx train job.yaml train.steps=5"
    )
    alone = replace(REQUEST, ranks_by="torchrun", grid=ProcessGrid(1, 4, 1), endpoint=None)
    assert "--standalone --nproc-per-node 4 --signals-to-handle" in choose.local(alone).shell


@pytest.mark.parametrize(
    ("ranks_by", "launcher", "expected"),
    [
        ("phalanx", "pals", f"mpiexec -n 2 --ppn 1 --envall --line-buffer --cpu-bind none {NODE}"),
        (
            "phalanx",
            "openmpi",
            f"mpirun -n 2 --host n1:1,n2:1 --map-by ppr:1:node --bind-to none -x HF_TOKEN -x NCCL_DEBUG {NODE}",
        ),
        (
            "phalanx",
            "mpich",
            "mpiexec -n 2 -ppn 1 -hosts n1,n2 -bind-to none -genvlist "
            f"HF_TOKEN,HOME,LANG,LOGNAME,NCCL_DEBUG,PATH,SHELL,USER,VIRTUAL_ENV {NODE}",
        ),
        (
            "launcher",
            "pals",
            "mpiexec -n 8 --ppn 4 --envall --line-buffer --cpu-bind none "
            "/venv/bin/python -P -m phalanx train job.yaml train.steps=5",
        ),
    ],
)
def test_mpi(ranks_by, launcher, expected):
    (command,) = commands_of(launcher, replace(REQUEST, ranks_by=ranks_by))
    assert command.shell == expected


def test_options_of_the_user_stand_before_the_program():
    words = choose.pals(replace(REQUEST, extra=("--verbose",)), "").argv
    assert words.index("--verbose") < words.index("/venv/bin/python")


@pytest.mark.parametrize(
    ("version", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4\n", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi"),
        ("HYDRA build details:\n    Version: 4.0.2\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9\n", "mpich"),
        ("mpiexec version 1.2.12, PALS\n", "pals"),
    ],
)
def test_the_flavor_of_mpiexec(version, flavor):
    assert choose.flavor_of(version) == flavor


def test_an_unknown_mpiexec():
    with pytest.raises(JobError, match="give --launcher pals, openmpi or mpich"):
        choose.flavor_of("srun 1.0")


def test_remote_shells_get_one_word_for_the_hosts_shell():
    first, second = choose.remote(REQUEST)
    assert first.argv[:2] == ("ssh", "n1")
    assert second.argv[:2] == ("ssh", "n2")
    assert first.argv[2] == (
        "cd '/work dir' && exec env NCCL_DEBUG=INFO /venv/bin/python -P -m phalanx.cli.node --controlled=variables "
        "job.yaml train.steps=5 run.nnodes=2 run.rdzv_endpoint=n1:12345"
    )
    assert first.stdin == "one line of JSON with HF_TOKEN, then signals"


@given(st.lists(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), min_size=1, max_size=5))
def test_words_survive_two_shells(words):
    request = replace(REQUEST, words=tuple(words), exported=Exported({"A": words[0]}))
    (command,) = choose.remote(replace(request, hosts=("n1",), grid=ProcessGrid(1, 4, 1)))
    outer = shlex.split(command.shell)
    assert tuple(outer) == command.argv
    inner = shlex.split(outer[-1])
    assert inner[inner.index("--controlled") + 1 :][: len(words)] == words
    assert f"A={words[0]}" in inner


@pytest.mark.parametrize(
    ("launcher", "change", "message"),
    [
        ("local", {}, "--launcher local is one host, but the job has 2 nodes"),
        ("ssh", {"extra": ("--x",)}, "words after -- are for srun or mpiexec"),
        ("ssh", {"ranks_by": "launcher"}, "needs srun or mpiexec"),
        ("ssh", {"hosts": ()}, "needs hosts"),
        ("srun", {"ranks_by": "torchrun", "stop_after_s": 5}, "--stop-after needs launchers of ours"),
    ],
)
def test_what_a_launcher_cannot_do(launcher, change, message):
    with pytest.raises(JobError, match=message):
        commands_of(launcher, replace(REQUEST, **change))


SLURM, PBS = (
    LaunchPlace("slurm job", "1", (HostSlots("a"), HostSlots("b"))),
    LaunchPlace("pbs job", "1", (HostSlots("a"),)),
)


@pytest.mark.parametrize(
    ("place", "nodes", "hosts_given", "site", "version", "launcher"),
    [
        (SLURM, 1, False, "", "", "srun"),
        (PBS, 2, False, "polaris", "", "pals"),
        (PBS, 2, False, "", "mpirun (Open MPI) 5.0", "openmpi"),
        (PBS, 1, False, "", "", "local"),
        (LaunchPlace("host"), 1, False, "", "", "local"),
        (LaunchPlace("host"), 2, True, "", "", "ssh"),
    ],
)
def test_the_launcher_of_a_place(place, nodes, hosts_given, site, version, launcher):
    chosen = known({"XDG_CONFIG_HOME": "/nowhere"}).get(site)
    found = launcher_for(place, nodes=nodes, wanted=None, hosts_given=hosts_given, site=chosen, version=lambda: version)
    assert found == launcher


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (LaunchPlace("slurm login node"), "--submit slurm.*salloc.*--launcher local"),
        (LaunchPlace("pbs login node"), "--submit pbs.*qsub -I"),
        (LaunchPlace("pod"), "--submit k8s"),
        (LaunchPlace("host"), "--hostfile FILE"),
        (PBS, "no mpiexec: load its module"),
    ],
)
def test_where_nothing_can_start_the_job_the_message_names_the_ways(place, message):
    with pytest.raises(JobError, match=message):
        launcher_for(place, nodes=2, wanted=None, hosts_given=False, site=None, version=lambda: "")


@given(st.text(), st.integers(0, 30000), st.integers(0, 30000))
def test_a_port_is_legal_and_the_same_for_the_same_key(key, first, count):
    ephemeral = range(first, first + count)
    port = port_for(key, ephemeral)
    assert port in PORTS
    assert port not in ephemeral or all(each in ephemeral for each in PORTS)
    assert port == port_for(key, ephemeral)


def test_jobs_that_follow_each_other_have_different_ports():
    ports = {port_for(f"{job}.0") for job in range(1000)}
    assert len(ports) > 950
