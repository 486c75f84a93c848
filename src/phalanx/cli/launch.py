"""`phalanx launch JOB`: finds out where it is, and starts the job there, or submits it to a scheduler."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from phalanx.cli.job_words import JobVerb, JobWords
from phalanx.cli.launch_plan import LaunchPlan
from phalanx.cli.option import Option
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.sites.site import known, user_folder
from phalanx.launch.start.choose import (
    SSH,
    HostCommand,
    Launcher,
    commands_of,
    environment,
    launcher_for,
    mpiexec_version,
    with_own_mpiexec,
)
from phalanx.launch.start.remote import RemoteNodes, run_in_foreground
from phalanx.launch.submit.kubernetes import kubernetes_submission
from phalanx.launch.submit.script import Submission, pbs_submission, slurm_submission, submit

_ONE = r"(?!)"  # an option that may be repeated, with one value each time
ALIASES = {
    **dict.fromkeys(("-n", "-np", "--np", "--world-size"), "--nproc"),
    **dict.fromkeys(("-N", "-nh", "--nodes", "--nhosts"), "--nnodes"),
    **dict.fromkeys(("-ppn", "--ppn"), "--nproc-per-node"),
    **dict.fromkeys(("-A", "--project"), "--account"),
    **dict.fromkeys(("-p", "-q", "--partition", "--qos"), "--queue"),
    **dict.fromkeys(("-t", "--walltime"), "--time"),
}
"""What srun, mpiexec, qsub and other launchers call the same."""
OTHER_LAUNCHERS = {
    "torchrun": "torchrun starts the ranks of a node: give --ranks-by torchrun",
    "slurm": "did you mean srun?",
    "pbs": "did you mean pals?",
    **dict.fromkeys(("mpi", "mpiexec", "mpirun"), "whose? give pals, openmpi or mpich (also for Intel MPI)"),
    **dict.fromkeys(("intel", "intelmpi", "impi"), "did you mean mpich? Intel MPI has the same options"),
}
"""What --launcher does not take, with the answer."""
_PASS_ON_SIGUSR1 = ("srun", "openmpi", "mpich")
"""Launchers that were seen to give the ranks this signal; what PALS does is not known here."""
PROGRAMS = ("python", "python3", "torchrun", "mpiexec", "mpirun", "srun", "phalanx")

OPTIONS = {
    "nnodes": Option(str, "", "Nodes: N, or N:M to go on with N when nodes fail; -N for short.", value="N[:M]"),
    "nproc_per_node": Option(str, "", "Processes on each node: a number, or auto for one per device.", value="N"),
    "nproc": Option(int, 0, "Processes in all; -n for short.", at_least=1),
    "hostfile": Option(str, "", "File of hosts, one per line (host, host:4, host slots=4).", value="FILE"),
    "launcher": Option(
        Literal["local", "srun", "pals", "openmpi", "mpich", "ssh"],
        None,
        "What starts processes; found out by default.",
    ),
    "ranks_by": Option(
        Literal["phalanx", "launcher", "torchrun"],
        "phalanx",
        "What starts the ranks of a node: a launcher of ours, which restarts them; srun or mpiexec; torchrun.",
        rare=True,
    ),
    "cpu_bind": Option(str, "", "The launcher's binding of processes to processors.", rare=True),
    "port": Option(int, 0, "Port of the rendezvous; by default a hash of the job's id.", at_least=1, rare=True),
    "remote_shell": Option(str, SSH, "Program that takes HOST and a command for its shell.", rare=True),
    "env": Option(
        str, (), "Variable for the job; may be repeated.", many=True, like=_ONE, value="NAME=VALUE", rare=True
    ),
    "export_env": Option(
        str, (), "Variable or pattern to export too; may be repeated.", many=True, like=_ONE, value="NAME", rare=True
    ),
    "stop_after": Option(int, 0, "Seconds after which the run stops with a checkpoint (75).", at_least=1, rare=True),
    "submit": Option(Literal["slurm", "pbs", "k8s"], None, "Write and submit a batch script or a manifest."),
    "site": Option(str, "", "Site (--list-sites), or a YAML file of one; found out by default.", value="NAME"),
    "time": Option(str, "", "Time limit: 1:30:00, 90m, 2-00:00:00; -t for short.", value="TIME"),
    "account": Option(str, "", "Account or project; -A for short.", value="NAME"),
    "queue": Option(str, "", "Queue, partition or quality of service; -q or -p for short.", value="NAME"),
    "signal": Option(
        int, 120, "Seconds before the time limit at which the run stops with a checkpoint.", at_least=0, rare=True
    ),
    "batch_option": Option(
        str, (), "Further option of sbatch or qsub; may be repeated.", many=True, like=_ONE, value="WORD", rare=True
    ),
    "k8s_kind": Option(Literal["job", "jobset", "trainjob"], "job", "Kubernetes: what to create.", rare=True),
    "image": Option(str, "", "Kubernetes: image that holds Phalanx.", rare=True),
    "pvc": Option(str, "", "Kubernetes: NAME[:/PATH] of the claim that holds the run directories.", rare=True),
    "namespace": Option(str, "", "Kubernetes: namespace.", rare=True),
    "secret": Option(str, "", "Kubernetes: Secret that has the values of --export-env.", rare=True),
    "shm_gib": Option(int, 8, "Kubernetes: GiB of /dev/shm.", at_least=1, rare=True),
}
SWITCHES = {
    "dry_run": "Print commands, environment and hosts, or the script, and exit.",
    "requeue": "Submit again after a stop with a checkpoint (75).",
    "list_sites": "List the sites, and exit.",
    "fresh": "Start over; the existing run is renamed.",
    "oversubscribe": "Start more ranks than a machine's cores and memory bear.",
}
VERB = JobVerb(
    "launch",
    "Starts a job where it is called: inside an allocation of Slurm or PBS with srun or mpiexec, over ssh on the hosts "
    "of a file, or on this machine; or submits it to Slurm, PBS or Kubernetes. Words after -- are options of srun or "
    "mpiexec.",
    (
        ("launch job.yaml --nnodes 2", "here: inside an allocation, or on this machine"),
        ("launch job.yaml --submit slurm -N 2 -t 2h --dry-run", "show the batch script"),
    ),
    SWITCHES,
    OPTIONS,
    auto="open",
)


def run(argv: Sequence[str]) -> int:
    words, extra = own_names(argv)
    if "--list-sites" in words:
        return _list_sites("--json" in words)
    parsed = VERB.parse(words)
    if parsed is None:
        return 0
    plan = LaunchPlan.of(parsed, tuple(extra), os.environ, shutil.which, platform.node())
    for note in plan.notes:
        echo(f"phalanx: {note}", file=sys.stderr)
    return _submit(parsed, plan) if parsed.options["submit"] else _start(parsed, plan)


def own_names(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before and after --, the former with this verb's names. Raises JobError for the words of a
    program, and for a launcher by another name."""
    end = argv.index("--") if "--" in argv else len(argv)
    _refuse_program(argv[:1])
    words = []
    for word in argv[:end]:
        flag, equals, value = word.partition("=")
        words.append(f"{ALIASES.get(flag, flag)}{equals}{value}")
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        launcher = flag.removeprefix("--launcher=") if "=" in flag else value if flag == "--launcher" else ""
        if launcher in OTHER_LAUNCHERS:
            raise JobError(f"--launcher {launcher}: {OTHER_LAUNCHERS[launcher]}")
    return words, list(argv[end + 1 :])


def _refuse_program(first: Sequence[str]) -> None:
    if not first:
        return
    if first[0] in PROGRAMS or first[0].endswith(".py"):
        raise JobError(
            f"phalanx launch {first[0]}: this verb starts `phalanx train` of a job, and no other program: "
            "phalanx launch JOB.yaml [key=value ...]"
        )
    if first[0] == "train":
        raise JobError("leave out 'train': phalanx launch JOB.yaml [key=value ...] starts `phalanx train`")
    if first[0] in ("doctor", "test-dist", "verify", "generate"):
        raise JobError(
            f"phalanx launch starts training only; start `phalanx {first[0]}` with srun, mpiexec or torchrun "
            "(`phalanx docs launch`)"
        )


def _start(words: JobWords, plan: LaunchPlan) -> int:
    options = words.options
    launcher = launcher_for(
        plan.place,
        nodes=plan.grid.nodes,
        wanted=options["launcher"],
        hosts_given=bool(options["hostfile"]),
        site=plan.site,
        version=lambda: mpiexec_version(shutil.which),
    )
    request = plan.start_request(launcher)
    commands = commands_of(launcher, request, options["hostfile"])
    starts = "dry_run" not in words.switches
    commands = [with_own_mpiexec(launcher, command, shutil.which, starts=starts) for command in commands]
    if not starts:
        _show(words, plan, launcher, commands)
        return 0
    for command in commands:
        echo(f"phalanx: {command.shell}", file=sys.stderr, flush=True)
    env = environment(request, os.environ)
    if launcher == "ssh":
        secrets = {name: os.environ[name] for name in request.exported.secrets}
        nodes = RemoteNodes(
            commands,
            least=request.grid.least_nodes,
            secrets=secrets,
            grace_s=request.grace_s,
            bare_stdout="json" in words.switches,
        )
        return nodes.run()
    if launcher in _PASS_ON_SIGUSR1:
        return run_in_foreground(commands[0].argv, env)
    return _become(commands[0].argv, env)


def _become(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Replaces this process by the command, so that its exit code and signals are the launch's."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        raise RunError(f"{argv[0]} cannot be started: {error.strerror}; --dry-run prints the command") from None


def _show(words: JobWords, plan: LaunchPlan, launcher: Launcher, commands: Sequence[HostCommand]) -> None:
    request = plan.start_request(launcher)
    if "json" in words.switches:
        document: dict[str, Any] = {
            "place": plan.place.kind,
            "job_id": plan.place.job_id,
            "site": plan.site.name if plan.site else None,
            "launcher": launcher,
            "ranks_by": request.ranks_by,
            **plan.grid_document,
            "hosts": list(request.hosts),
            "endpoint": f"{request.endpoint[0]}:{request.endpoint[1]}" if request.endpoint else None,
            "environment": dict(sorted(request.exported.values.items())),
            "secrets": list(request.exported.secrets),
            "commands": [
                {"hosts": list(each.hosts), "argv": list(each.argv), "shell": each.shell, "stdin": each.stdin}
                for each in commands
            ],
        }
        echo(json.dumps(document, indent=1))
        return
    lines = [f"# {' '.join(plan.sentence(launcher).split())}"]  # one line: the next one would be a command
    lines += [f"# hosts: {' '.join(request.hosts)}"] if request.hosts else []
    lines += [f"# meet at {request.endpoint[0]}:{request.endpoint[1]}"] if request.endpoint else []
    if launcher != "ssh":  # there, each command has them
        lines += [f"export {setting}" for setting in plan.settings]
    lines += [f"# {name}: set, not shown" for name in request.exported.secrets]
    for command in commands:
        lines += [f"# standard input: {command.stdin}"] if command.stdin else []
        lines.append(command.shell)
    echo("\n".join(lines))


def _submit(words: JobWords, plan: LaunchPlan) -> int:
    if "fresh" in words.switches:
        raise JobError("--fresh with --submit would start over whenever the job is requeued: choose another run.name")
    wanted = _submission(words, plan)
    as_json = "json" in words.switches
    if "dry_run" in words.switches:
        document = {"file": str(wanted.file), "command": list(wanted.command), **plan.grid_document}
        document |= {"script": wanted.text}
        echo(json.dumps(document, indent=1) if as_json else wanted.text, end="\n" if as_json else "")
        return 0
    job = submit(wanted, shutil.which)
    _tell(wanted, job, as_json)
    return 0


def _submission(words: JobWords, plan: LaunchPlan) -> Submission:
    scheduler = words.options["submit"]
    if scheduler == "k8s":
        return kubernetes_submission(plan.manifest_request, words.options["k8s_kind"], words.job.run.dir)
    return (slurm_submission if scheduler == "slurm" else pbs_submission)(plan.submit_request)


def _tell(wanted: Submission, job: str, as_json: bool) -> None:
    steps = wanted.next_steps(job)
    if as_json:
        echo(json.dumps({"job": job, "file": str(wanted.file), **steps}, indent=1))
        return
    echo(f"submitted: {job}  ({wanted.file})\n" + "\n".join(f"  {name + ':':<9}{text}" for name, text in steps.items()))


def _list_sites(as_json: bool) -> int:
    sites = known(os.environ)
    if as_json:
        echo(json.dumps([vars(replace(site)) for site in sites.values()], indent=1))
        return 0
    width = max(map(len, sites))
    lines = [f"{name:<{width}}  {site.about or site.scheduler}" for name, site in sites.items()]
    echo("\n".join([*lines, f"\nYour own: {user_folder(os.environ) / Path('NAME.yaml')}, or --site FILE.yaml"]))
    return 0
