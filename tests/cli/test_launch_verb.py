"""`phalanx launch` and one node of a launch, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.check.load import load_words
from phalanx.cli.auto_layout import words_for
from phalanx.cli.node import rank_variables
from phalanx.config import overrides
from phalanx.errors import JobError
from phalanx.launch.ranks import detect

# `phalanx launch`, as a user calls it: printed, started, submitted. Stand-ins on PATH play the schedulers.


JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: {dp_replicate: 2}
data: {corpus: random, random_tokens: 5000, random_vocab: 13}
train: {steps: 3, global_batch: 4, eval_samples: 0}
run: {sample_tokens: 0, threads: 1}
"""
LAUNCHERS = (
    "SLURM_",
    "PBS_",
    "OMPI_",
    "PMI",
    "PALS_",
    "KUBERNETES_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "NCCL_",
    "HF_",
)


class Shell:
    """A folder with a job, a PATH with stand-ins only, and `phalanx` in it."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "job.yaml").write_text(JOB)
        plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        self.env = {**plain, "PATH": str(self.bin), "XDG_CONFIG_HOME": str(folder / "config")}

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "phalanx", "launch", *words],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def document(self, *words: str, **env: str) -> dict:
        done = self("--json", *words, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_it_imports_no_torch():
    text = "import sys, phalanx.cli.launch, phalanx.cli.node; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_a_dry_run_on_this_host(shell):
    done = shell("job.yaml", "--dry-run", NCCL_DEBUG="WARN", HF_TOKEN="hf_1")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].endswith("local; 1 node × 2 processes = 2; layout dp_replicate=2")
    assert "export NCCL_DEBUG=WARN" in lines
    assert lines[-1] == f"{sys.executable} -P -m phalanx train job.yaml"
    assert "hf_1" not in done.stdout


def test_a_dry_run_in_an_allocation_as_json(shell):
    found = shell.document(
        *("job.yaml", "train.steps=5", "--nnodes", "2", "--dry-run", "--port", "12345", "--", "--exclude=n9"),
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_NTASKS="2",
    )
    assert (found["launcher"], found["hosts"], found["endpoint"]) == ("srun", ["n1", "n2"], "n1:12345")
    assert (found["nnodes"], found["nproc_per_node"], found["processes"]) == ("2", 1, 2)
    (command,) = found["commands"]
    words = command["argv"]
    assert words[words.index("--exclude=n9") + 1] == sys.executable
    assert words[-4:] == ["train.steps=5", "--json", "run.nnodes=2", "run.rdzv_endpoint=n1:12345"]


@pytest.mark.parametrize(
    ("content", "said"), [("a slots=1\nb slots=2\n", "slots: a 1"), ("a\na\nb:3\n", ""), ("a\nb\n", "")]
)
def test_hosts_with_fewer_slots_than_processes_are_said(shell, content, said):
    (shell.folder / "hosts").write_text(content)
    done = shell("job.yaml", "layout.dp_replicate=4", "train.global_batch=8", "--hostfile", "hosts", "--dry-run")
    assert ("2 processes per node, and these hosts have fewer slots" in done.stderr) == bool(said)
    assert said in done.stderr


def test_everything_that_a_submission_lacks_is_said_at_once(shell):
    done = shell("job.yaml", "--submit", "pbs", "--site", "polaris", "--time", "x")
    assert done.returncode == 2
    for missing in ("--account is missing", "--time 'x': expected a time limit", "qsub is not installed here"):
        assert missing in done.stderr


def test_other_launchers_names_of_options(shell):
    plain = shell.document(
        "job.yaml", "--nnodes", "2", "--nproc-per-node=1", "--launcher", "srun", "--dry-run", **ALLOC
    )
    short = shell.document("job.yaml", "-N", "2", "-ppn", "1", "-n", "2", "--launcher", "srun", "--dry-run", **ALLOC)
    assert plain == short


ALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["-n", "3"], {}, "nearest legal: --nproc 2"),
        (["--nnodes", "2"], {}, "--hostfile FILE"),
        (["--nnodess", "2"], {}, "did you mean --nnodes?"),
        (["--submit", "slrm"], {}, "did you mean slurm?"),
        (["--launcher", "slurm"], {}, "did you mean srun?"),
        (["--launcher=torchrun"], {}, "--ranks-by torchrun"),
        (["--site", "polarys"], {}, "did you mean polaris?"),
        (["--submit", "slurm", "--site", "polaris", "--account", "x"], {}, "--submit slurm: polaris has pbs"),
        (["--submit", "pbs", "--site", "polaris"], {}, "--account is missing"),
        (["--submit", "pbs", "--site", "polaris", "--time", "x"], {}, "--time 'x': expected a time limit"),
        (["--submit", "slurm", "--time", "90"], {}, "expected a time limit"),
        (["--submit", "slurm", "--time", "1m", "--signal", "60"], {}, "not less than the time limit"),
        (["--time", "1h"], {}, "--time has no effect without --submit: it is for --submit slurm or --submit pbs or"),
        (["--requeue"], {}, "--requeue has no effect without --submit"),
        (["--kill", "runs/x"], {}, "--kill stands alone: phalanx launch --kill runs/NAME"),
        (["--port", "99999"], {}, "--port 99999: at most 65535"),
        (["--env", "A=1", "--env", "A=2"], {}, "--env A is given twice, as 1 and as 2"),
        (
            ["--launcher", "local", "--hostfile", "hosts", "--cpu-bind", "none", "--remote-shell", "rsh"],
            {},
            "--hostfile has no effect with --launcher local: it is for srun, pals, openmpi, mpich, ssh\n  --cpu-bind",
        ),
        (
            ["--submit", "k8s", "-q", "prod"],
            {},
            "--queue has no effect with --submit k8s: it is for --submit slurm or",
        ),
        (["--submit", "pbs", "--ship", "a:b"], {}, "--ship has no effect with --submit pbs: it is for starts without"),
        (["--submit", "slurm", "--fresh"], {}, "would start over whenever"),
        (["model.n_layers=0"], {}, "model.n_layers"),
        (["--launcher", "srun", "--nnodes", "2"], {}, "no list of nodes is known here"),
        (["--nnodes", "2"], {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}, "2 nodes, but the allocation has 1"),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "openmpi started 2 processes of `phalanx launch`",
        ),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(shell, words, env, message):
    done = shell("job.yaml", "--dry-run", *words, **env)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("python3", "-m", "phalanx", "train", "job.yaml"), "and other programs after --: phalanx launch"),
        (("train", "job.yaml"), "leave out 'train'"),
        (("test-dist", "job.yaml"), "put -- before another verb: phalanx launch --nproc 2 -- phalanx test-dist"),
    ],
)
def test_a_program_in_place_of_a_job(shell, words, message):
    done = shell(*words, "--dry-run")
    assert done.returncode == 2
    assert message in done.stderr


def test_schedulers_names_of_options(shell):
    words = ("job.yaml", "--submit", "pbs", "--site", "polaris", "--dry-run")
    plain = shell(*words, "--account", "abc", "--queue", "prod", "--time", "2h", "--nnodes", "2")
    short = shell(*words, "-A", "abc", "-q", "prod", "--walltime", "2h", "--nhosts", "2")
    assert plain.returncode == 0
    assert short.stdout == plain.stdout
    assert "uses 1 of 4 devices per node" in plain.stderr


def test_the_mpiexec_of_the_launcher_that_was_asked_for(shell):
    shell.program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    words = ("job.yaml", "--launcher", "mpich", "--nnodes", "1")
    refused = shell(*words)
    assert refused.returncode == 2
    assert "mpiexec is that of openmpi here, not of mpich: load the module of mpich" in refused.stderr
    assert shell.document(*words, "--dry-run")["commands"][0]["argv"][0] == "mpiexec"
    shell.program("mpiexec.mpich", "exit 3")
    assert shell(*words).returncode == 3
    assert shell.document(*words, "--dry-run")["commands"][0]["argv"][0] == "mpiexec.mpich"


def test_a_login_node_starts_nothing(shell):
    shell.program("sbatch", "exit 1")
    done = shell("job.yaml")
    assert done.returncode == 2
    assert "--submit slurm" in done.stderr


def test_srun_is_shown_and_its_exit_code_returned(shell):
    shell.program("srun", 'echo "$# $NCCL_DEBUG"; exit 75')
    done = shell("job.yaml", "--env", "NCCL_DEBUG=INFO", "--nnodes", "2", **ALLOC)
    assert done.returncode == 75
    assert done.stdout.endswith(" INFO\n")
    assert done.stderr.startswith("phalanx: srun --nodes=2 ")


def test_an_mpiexec_that_does_not_say_whose_it_is_is_started(shell):
    shell.program("mpiexec", '[ "$1" = --version ] && echo unknown || exit 7')
    assert shell("job.yaml", "--launcher", "mpich").returncode == 7


def test_the_flavor_of_mpiexec_in_a_job_of_pbs(shell):
    shell.program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    (shell.folder / "nodes").write_text("x1\nx1\nx2\nx2\n")
    found = shell.document("job.yaml", "--dry-run", PBS_JOBID="5.pbs", PBS_NODEFILE=str(shell.folder / "nodes"))
    assert (found["launcher"], found["hosts"]) == ("openmpi", ["x1", "x2"])


def test_without_the_schedulers_program_a_dry_run_is_suggested(shell):
    done = shell("job.yaml", "--submit", "slurm")
    assert done.returncode == 1
    assert "sbatch is not installed here" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (shell.folder / "runs").exists()


def test_files_that_are_not_there_are_named_before_anything_is_written(shell):
    text = shell.folder / "text.yaml"
    text.write_text("data: {corpus: text, path: bok.txt, tokenizer: t.json}\n")
    words = ("text.yaml", "--submit", "slurm")
    (shell.folder / "book.txt").write_text("a")
    done = shell(*words)
    assert done.returncode == 2
    assert "data.path=bok.txt: there is no such file or folder (corpus text); did you mean book.txt?" in done.stderr
    assert "data.tokenizer=t.json" in done.stderr
    assert "sbatch is not installed here" in done.stderr
    assert not (shell.folder / "runs").exists()
    assert shell(*words, "--dry-run").returncode == 0  # its text may be for another machine


def test_the_script_is_the_text_that_is_submitted(shell):
    shell.program("sbatch", 'echo "41;cluster"')
    words = ("job.yaml", "--submit", "slurm", "--nnodes", "2", "--requeue", "--time", "90m")
    printed = shell(*words, "--dry-run")
    done = shell(*words)
    assert (printed.returncode, done.returncode) == (0, 0)
    assert (shell.folder / "runs/job/submit.sbatch").read_text() == printed.stdout
    assert "submitted: 41" in done.stdout
    assert "scancel 41" in done.stdout
    assert "run.grace_s=110 --nnodes=2 --nproc-per-node=1 --site=slurm" in printed.stdout
    found = shell.document(*words)
    assert (found["job"], found["cancel"]) == ("41", "scancel 41")


def test_what_the_scheduler_refuses_is_said(shell):
    shell.program("sbatch", "echo 'Invalid account' >&2; exit 1")
    done = shell("job.yaml", "--submit", "slurm")
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert "Invalid account" in done.stderr


QSUB = """
# Sets what PBS documents for a job (PBS Professional User's Guide, "Job environment"), and runs it here.
printf 'x1\\nx2\\n' > nodes
export PBS_JOBID=9.pbs PBS_NODEFILE=$PWD/nodes PBS_O_WORKDIR=$PWD PBS_ENVIRONMENT=PBS_BATCH PBS_JOBNAME=job
/bin/bash "$1" > out 2>&1
echo "$?" > code
echo 9.pbs
"""


def test_a_script_of_pbs_runs_its_launch_inside_the_job(shell):
    """A stand-in for qsub: no PBS server was there."""
    shell.program("qsub", QSUB)
    shell.program("mpiexec", '[ "$1" = --version ] && echo "HYDRA build details:" || { echo "ran $@"; exit 3; }')
    done = shell("job.yaml", "--submit", "pbs", "--nnodes", "2", "--time", "30m")
    assert done.returncode == 0, done.stderr
    assert "submitted: 9.pbs" in done.stdout
    assert (shell.folder / "code").read_text() == "3\n"
    shown = (shell.folder / "out").read_text()
    assert "ran -n 2 -ppn 1 -hosts x1,x2" in shown
    assert "phalanx.cli.node --stop-after=1680 job.yaml run.grace_s=110 run.nnodes=2 run.rdzv_endpoint=x1:" in shown


def test_a_manifest_on_standard_output(shell):
    done = shell("job.yaml", "--submit", "k8s", "--nnodes", "2", "--image", "r/p:1", "--pvc", "runs", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "completionMode: Indexed" in done.stdout
    assert done.stderr == ""


def test_sites_are_listed(shell):
    names = {site["name"] for site in json.loads(shell("--list-sites", "--json").stdout)}
    assert {"polaris", "aurora", "perlmutter", "frontier", "sophia", "slurm", "pbs"} <= names
    assert "ALCF Polaris" in shell("--list-sites").stdout


def test_a_node_behind_a_remote_shell_trains(shell):
    shell.program("remote", 'shift; exec /bin/sh -c "$*"')
    (shell.folder / "hosts").write_text("127.0.0.1\n")
    done = shell(
        *("job.yaml", "--hostfile", "hosts", "--remote-shell", str(shell.bin / "remote"), "--env", "OMP_NUM_THREADS=1"),
        PATH=f"{shell.bin}:/usr/bin:/bin",
    )
    assert done.returncode == 0, done.stderr
    assert "trained 192 tokens in 3 steps" in done.stdout


# One node of a launch: no rank of whoever started it, and obedient.

SLEEPER = """
import os, sys, time
import phalanx.cli.node as node

def train(argv):
    print(argv, os.environ.get("HF_TOKEN"), sys.argv, sys.stdin.read(), flush=True)
    time.sleep(30)

node.phalanx_main = train
sys.exit(node.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "env",
    [
        {
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
        },
        {"PALS_RANKID": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "1", "PMI_LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"},
    ],
)
def test_it_is_no_rank_of_what_started_it(env):
    left = {name: value for name, value in env.items() if name not in rank_variables(env)}
    assert detect(left) is None


def test_what_describes_the_job_stays():
    kept = {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "2", "SLURM_JOB_NODELIST": "a", "NCCL_DEBUG": "INFO"}
    assert rank_variables(kept) == []


def start(*argv: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLEEPER, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_signals_and_secrets_by_standard_input():
    process = start("--controlled=variables", "job.yaml", SLURM_PROCID="3")
    assert process.stdin is not None
    process.stdin.write('{"HF_TOKEN": "x"}\n')
    process.stdin.flush()
    assert line_of(process) == "['train', 'job.yaml'] x ['phalanx', 'train', 'job.yaml'] \n"
    process.stdin.write("SIGKILL\nSIGUSR1\n")
    process.stdin.flush()
    assert process.wait(10) == -signal.SIGUSR1
    process.communicate()


def test_the_end_of_standard_input_stops_it():
    process = start("--controlled", "job.yaml")
    line_of(process)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM


def test_it_stops_after_its_time():
    began = time.monotonic()
    process = start("--stop-after=1", "job.yaml")
    assert process.wait(20) == -signal.SIGUSR1
    assert time.monotonic() - began < 15
    process.communicate()


def test_it_stops_with_whoever_started_it(tmp_path):
    quoted = f"{sys.executable} -c '{SLEEPER}' job.yaml & echo $!; sleep 0.3; exec sleep 2"
    shell = subprocess.Popen(["sh", "-c", quoted], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    pid = int(line_of(shell))
    assert "job.yaml" in line_of(shell)
    shell.kill()
    shell.wait()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    assert shell.stdout is not None
    shell.stdout.close()


# The job on fewer nodes: the same global batch, and the user's layout with fewer data ranks where that is legal.

NODES = ("run.nnodes=1:4", "run.rdzv_endpoint=node-a:29400", "model.n_layers=4", "train.global_batch=24")


def words(nodes: int, *more: str) -> list[str]:
    return list(words_for(load_words(overrides.parse([*NODES, *more])), nodes))


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        ("dp_replicate=4", 3, "dp_replicate=3"),
        ("dp_replicate=4,tp=2", 1, "tp=2"),
        ("dp_shard=8,tp=2", 2, "dp_shard=4,tp=2"),
        ("dp_shard=4,zero=2,accumulation=2", 1, "dp_replicate=1"),
        ("pp=2,dp_replicate=2,dp_shard=2,accumulation=3", 2, "dp_shard=2,pp=2"),
    ],
)
def test_data_ranks_are_given_up_first_and_accumulation_makes_up_for_them(layout, nodes, expected):
    assert words(nodes, layout) == [
        f"run.nnodes={nodes}",
        f"cluster.nodes={nodes}",
        "train.global_batch=24",
        f"layout={expected}",
    ]


def test_on_all_nodes_the_layout_is_the_job_s():
    assert words(4, "dp_replicate=4") == ["run.nnodes=4", "cluster.nodes=4"]


def test_a_layout_that_does_not_divide_is_planned_anew():
    machine = ("cluster=dgx-h100:4", "cluster.devices_per_node=1", "train.precision=bf16", "model.vocab_size=256")
    found = words(2, "tp=4", *machine)
    assert found[:4] == ["run.nnodes=2", "cluster.nodes=2", "cluster.devices_per_node=1", "train.global_batch=24"]
    assert found[4].startswith("layout=")


def test_what_is_wrong_with_nodes_is_said_with_the_nearest_legal_value():
    with pytest.raises(JobError) as caught:
        words(1, "run.nnodes=3:2", "run.rdzv_endpoint=", "dp_replicate=4")
    assert any("run.nnodes=3:2: is 3:2; nearest legal: 2:3" in problem for problem in caught.value.problems)
    assert any("nodes need both, such as nnodes=2 rdzv_endpoint=HOST:29400" in p for p in caught.value.problems)
    with pytest.raises(JobError, match=r"4 ranks are not divisible by 3 nodes; nearest legal: 1, 2, 4"):
        words(1, "run.nnodes=3", "dp_replicate=4")
    with pytest.raises(JobError, match=r"must be HOST:PORT, such as node-a:29400"):
        words(1, "run.rdzv_endpoint=node-a", "dp_replicate=4")
