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

from phalanx.cli import program as programs
from phalanx.cli.launch_plan import LaunchPlan
from phalanx.cli.verb import Option, Words, flag_of, job_verb
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch import start
from phalanx.launch.ship import interpreter, ship
from phalanx.launch.ship import parse as parse_ship
from phalanx.launch.site import known, user_folder
from phalanx.launch.submit import (
    batch_submission,
    kubernetes_submission,
    sky_submission,
    submit,
)

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
    "nnodes": Option("Nodes: N, or N:M to go on with N when nodes fail; -N for short.", value="N[:M]"),
    "nproc_per_node": Option("Processes on each node: a number, or auto for one per device.", value="N"),
    "nproc": Option("Processes in all; -n for short.", 0, at_least=1),
    "hostfile": Option("File of hosts, one per line (host, host:4, host slots=4).", value="FILE"),
    "launcher": Option(
        "What starts processes; found out by default.",
        None,
        Literal["local", "srun", "pals", "openmpi", "mpich", "ssh"],
    ),
    "ranks_by": Option(
        "What starts the ranks of a node: one Phalanx launcher, which restarts them; srun or mpiexec; torchrun.",
        "phalanx",
        Literal["phalanx", "launcher", "torchrun"],
        rare=True,
    ),
    "cpu_bind": Option("The launcher's binding of processes to processors.", rare=True),
    "port": Option("Port of the rendezvous; by default a hash of the job's id.", 0, at_least=1, rare=True),
    "remote_shell": Option("Program that takes HOST and a command for its shell.", start.SSH, str, rare=True),
    "kill": Option("End a run on this host; alone.", value="RUN", rare=True),
    "ship": Option(
        "Copy a folder, such as this environment, to all hosts' local disks first, from host to host.",
        value="FOLDER:TO",
        rare=True,
    ),
    "env": Option(
        "Variable for the job; may be repeated.", (), str, many=True, like=_ONE, value="NAME=VALUE", rare=True
    ),
    "export_env": Option(
        "Variable or pattern to export too; may be repeated.", (), str, many=True, like=_ONE, value="NAME", rare=True
    ),
    "stop_after": Option("Seconds after which the run stops with a checkpoint (75).", 0, at_least=1, rare=True),
    "submit": Option("Write and submit a batch script or a manifest.", None, Literal["slurm", "pbs", "k8s", "sky"]),
    "site": Option("Site (--list-sites), or a YAML file of one; found out by default.", value="NAME"),
    "time": Option("Time limit: 1:30:00, 90m, 2-00:00:00; -t for short.", value="TIME"),
    "account": Option("Account or project; -A for short.", value="NAME", rare=True),
    "queue": Option("Queue, partition or quality of service; -q or -p for short.", value="NAME", rare=True),
    "signal": Option(
        "Seconds before the time limit at which the run stops with a checkpoint.", 120, at_least=0, rare=True
    ),
    "batch_option": Option(
        "Further option of sbatch or qsub; may be repeated.", (), str, many=True, like=_ONE, value="WORD", rare=True
    ),
    "k8s_kind": Option("Kubernetes: what to create.", "job", Literal["job", "jobset", "trainjob"], rare=True),
    "image": Option("Kubernetes, SkyPilot: image that holds Phalanx.", rare=True),
    "bucket": Option("SkyPilot: storage of the run directories, such as s3://NAME/FOLDER.", value="URL", rare=True),
    "pvc": Option("Kubernetes: NAME[:/PATH] of the claim that holds the run directories.", rare=True),
    "namespace": Option("Kubernetes: namespace.", rare=True),
    "secret": Option("Kubernetes: Secret that has the values of --export-env.", rare=True),
    "shm_gib": Option("Kubernetes: GiB of /dev/shm.", 8, at_least=1, rare=True),
}
SWITCHES = {
    "rehearse": "First run the fullest ranks here without hardware, and stop with 3 if the job does not fit.",
    "dry_run": "Print commands, environment and hosts, or the script, and exit.",
    "requeue": "Submit again after a stop with a checkpoint (75).",
    "list_sites": "List the sites, and exit.",
    "fresh": "Start over; the existing run is renamed.",
    "oversubscribe": "Start more ranks than a machine's cores and memory bear.",
}
_BATCH = ("slurm", "pbs")
_HERE = ("",)
WORKS_WITH = {
    **dict.fromkeys(("account", "queue", "batch_option", "signal", "requeue"), _BATCH),
    **dict.fromkeys(("k8s_kind", "pvc", "namespace", "secret", "shm_gib"), ("k8s",)),
    **dict.fromkeys(("launcher", "ranks_by", "cpu_bind", "port", "stop_after"), (*_HERE, *_BATCH)),
    **dict.fromkeys(("remote_shell", "ship", "oversubscribe"), _HERE),
    "time": (*_BATCH, "k8s"),
    "image": ("k8s", "sky"),
    "bucket": ("sky",),
}
"""The values of --submit with which an option or switch has an effect; "" is a start without it."""
_MPI = ("srun", "pals", "openmpi", "mpich")
WORKS_UNDER = {"hostfile": (*_MPI, "ssh"), "cpu_bind": _MPI, "remote_shell": (*_MPI, "ssh")}
"""The values of --launcher with which an option has an effect; of --remote-shell those that --ship copies for."""
VERB = job_verb(
    "launch",
    "Starts a job where it is called, in an allocation, over ssh, or on this machine; or submits it. Words after -- "
    "are options of srun or mpiexec, or a program to start in place of the job.",
    (
        ("launch job.yaml --nnodes 2", "in an allocation, or here"),
        ("launch --nproc 4 -- python -m my.module", "any program"),
    ),
    SWITCHES,
    OPTIONS,
    auto="open",
)


@VERB.starts
def run(argv: Sequence[str]) -> int:
    words, extra = own_names(argv)
    if "--list-sites" in words:
        sites = known(os.environ)
        if "--json" in words:
            echo(json.dumps([vars(replace(site)) for site in sites.values()], indent=1))
            return 0
        width = max(map(len, sites))
        lines = [f"{name:<{width}}  {site.about or site.scheduler}" for name, site in sites.items()]
        echo("\n".join([*lines, f"\nYour own: {user_folder(os.environ) / Path('NAME.yaml')}, or --site FILE.yaml"]))
        return 0
    if words[:1] == ["--kill"] or (words[:1] and words[0].startswith("--kill=")):
        runs = [words[0].partition("=")[2], *words[1:]] if "=" in words[0] else list(words[1:])
        if len(runs) != 1 or not runs[0]:
            raise JobError("--kill takes one run's directory: phalanx launch --kill runs/NAME")
        return programs.kill(runs[0])
    is_program = bool(extra) and not extra[0].startswith("-")
    parsed = programs.parse(words, OPTIONS) if is_program else VERB.parse(words)
    if parsed is None:
        return 0
    _refuse_without_effect(parsed)
    kind = programs.ProgramLaunch if is_program else LaunchPlan
    plan = kind.of(parsed, tuple(extra), os.environ, shutil.which, platform.node())
    for note in plan.notes:
        echo(f"phalanx: {note}", file=sys.stderr)
    if "rehearse" in parsed.switches:
        from phalanx.cli.dryrun import rehearse_first  # which needs numpy

        rehearse_first(parsed.job)
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
    for flag, value in zip(words, [*words, ""][1:], strict=True):
        launcher = flag.removeprefix("--launcher=") if "=" in flag else value if flag == "--launcher" else ""
        if launcher in OTHER_LAUNCHERS:
            raise JobError(f"--launcher {launcher}: {OTHER_LAUNCHERS[launcher]}")
    return words, list(argv[end + 1 :])


def _refuse_without_effect(words: Words) -> None:
    """Raises JobError, naming each option and switch that does nothing in this launch."""
    submit = words.options["submit"] or ""
    changed = (
        name for name, option in OPTIONS.items() if (words.options.get(name) or option.default) != option.default
    )
    given = {*words.switches, *changed}
    here = f"with --submit {submit}" if submit else "without --submit"
    problems = [
        f"--{name.replace('_', '-')} has no effect {here}: it is for "
        + " or ".join(f"--submit {each}" if each else "starts without --submit" for each in works)
        for name, works in WORKS_WITH.items()
        if name in given and submit not in works
    ]
    if launcher := words.options["launcher"]:
        problems += [
            f"{flag_of(name)} has no effect with --launcher {launcher}: it is for {', '.join(works)}"
            for name, works in WORKS_UNDER.items()
            if name in given and launcher not in works
        ]
    if "kill" in given:
        problems.append("--kill stands alone: phalanx launch --kill runs/NAME")
    if words.options["port"] >= 1 << 16:
        problems.append(f"--port {words.options['port']}: at most 65535")
    if problems:
        raise JobError(problems)


def _refuse_program(first: Sequence[str]) -> None:
    if not first:
        return
    if first[0] in PROGRAMS or first[0].endswith(".py"):
        raise JobError(
            f"phalanx launch {first[0]}: this verb starts `phalanx train` of a job, and other programs after --: "
            f"phalanx launch JOB.yaml [key=value ...], or phalanx launch --nproc 2 -- {first[0]} ..."
        )
    if first[0] == "train":
        raise JobError("leave out 'train': phalanx launch JOB.yaml [key=value ...] starts `phalanx train`")
    if first[0] in ("doctor", "test-dist", "verify", "generate"):
        raise JobError(f"put -- before another verb: phalanx launch --nproc 2 -- phalanx {first[0]} ...")


def _start(words: Words, plan: LaunchPlan) -> int:
    options = words.options
    launcher = start.launcher_for(
        plan.place,
        nodes=plan.grid.nodes,
        wanted=options["launcher"],
        hosts_given=bool(options["hostfile"]),
        site=plan.site,
        version=lambda: start.mpiexec_version(shutil.which),
    )
    starts = "dry_run" not in words.switches
    request = _shipped(plan.start_request(), options["ship"], starts)
    if starts and isinstance(plan, programs.ProgramLaunch):
        echo(f"phalanx: {plan.sentence(launcher)}", file=sys.stderr)
    commands = start.commands_of(launcher, request, options["hostfile"])
    commands = [start.with_own_mpiexec(launcher, command, shutil.which, starts=starts) for command in commands]
    if not starts:
        _show(words, plan, launcher, commands)
        return 0
    if isinstance(plan, programs.ProgramLaunch) and launcher == "local":
        os.environ.update(plan.exported.values)
        return programs.run_node(plan.terms, plan.extra)
    return _run(commands, launcher, request, bare_stdout="json" in words.switches)


def _run(
    commands: Sequence[start.HostCommand], launcher: start.Launcher, request: start.StartRequest, *, bare_stdout: bool
) -> int:
    for command in commands:
        echo(f"phalanx: {command.shell}", file=sys.stderr, flush=True)
    env = {**os.environ, **request.exported.values}
    if launcher == "ssh":
        secrets = {name: os.environ[name] for name in request.exported.secrets}
        nodes = start.RemoteNodes(
            commands,
            least=request.grid.least_nodes,
            secrets=secrets,
            grace_s=request.grace_s,
            bare_stdout=bare_stdout,
        )
        return nodes.run()
    if launcher in _PASS_ON_SIGUSR1:
        return start.run_in_foreground(commands[0].argv, env)
    return _become(commands[0].argv, env)


def _shipped(request: start.StartRequest, folder: str, starts: bool) -> start.StartRequest:
    """Returns the request with the interpreter on local disks, after copying the folder of --ship if it `starts`."""
    if not folder:
        return request
    source, to = parse_ship(folder)
    if not request.hosts:
        raise JobError("--ship needs the hosts: call this inside the allocation, or give --hostfile FILE")
    if starts:
        echo(f"phalanx: copies {source} to {to} on {len(request.hosts)} hosts", file=sys.stderr, flush=True)
        ship(source, to, request.hosts, request.remote_shell)
    return replace(request, python=interpreter(request.python, source, to))


def _become(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Replaces this process by the command, so that its exit code and signals are the launch's."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        raise RunError(f"{argv[0]} cannot be started: {error.strerror}; --dry-run prints the command") from None


def _show(words: Words, plan: LaunchPlan, launcher: start.Launcher, commands: Sequence[start.HostCommand]) -> None:
    request = plan.start_request()
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


def _submit(words: Words, plan: LaunchPlan) -> int:
    if "fresh" in words.switches:
        raise JobError("--fresh with --submit would start over whenever the job is requeued: choose another run.name")
    if words.options["submit"] == "k8s":
        wanted = kubernetes_submission(plan.manifest_request, words.options["k8s_kind"], words.job.run.dir)
    elif words.options["submit"] == "sky":
        name = words.job.cluster.accelerator.name
        wanted = sky_submission(plan.manifest_request, name, words.job.run.dir)
    else:
        wanted = batch_submission(plan.submit_request())
    if "dry_run" in words.switches:
        document = {"file": str(wanted.file), "command": list(wanted.command), **plan.grid_document}
        document |= {"script": wanted.text}
        text = json.dumps(document, indent=1) + "\n" if words.as_json else wanted.text
        echo(text, end="")
        return 0
    job = submit(wanted, shutil.which)
    steps = wanted.next_steps(job)
    if words.as_json:
        echo(json.dumps({"job": job, "file": str(wanted.file), **steps}, indent=1))
    else:
        lines = [f"submitted: {job}  ({wanted.file})", *(f"  {name + ':':<9}{text}" for name, text in steps.items())]
        echo("\n".join(lines))
    return 0
