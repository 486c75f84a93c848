"""`phalanx launch JOB`: finds out where it is, and starts the job there, or submits it to a scheduler."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from phalanx.blocks.parameters import count
from phalanx.check.load import as_yaml
from phalanx.cli.verb import Option, Words, job_verb
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch import start
from phalanx.launch.exported import Exported, exported
from phalanx.launch.grid import GridRequest, ProcessGrid, solve
from phalanx.launch.hosts import HostSlots, names_of, read_hosts
from phalanx.launch.ship import interpreter, ship
from phalanx.launch.ship import parse as parse_ship
from phalanx.launch.site import GENERIC, Site, chosen, known, user_folder
from phalanx.launch.start import IN_WORDS
from phalanx.launch.submit import (
    ManifestRequest,
    SubmitRequest,
    batch_submission,
    kubernetes_submission,
    parse_time,
    sky_submission,
    submit,
)

_DEVICES_S = 20.0
LARGE_PARAMETERS = 500_000_000
"""Parameters from which on nobody trains on the default corpus, or for the default number of steps, on purpose."""


@dataclass(frozen=True)
class LaunchPlan:
    """A job, where it is launched, and how many processes run where."""

    words: Words
    extra: tuple[str, ...]
    """The user's own options of the launcher."""
    place: start.LaunchPlace
    site: Site | None
    """The machine's settings; None on a machine of which nothing is known."""
    hosts: tuple[HostSlots, ...]
    devices: int
    """Accelerators of a node that the job uses; 0 on CPUs."""
    grid: ProcessGrid
    exported: Exported

    @classmethod
    def of(
        cls, words: Words, extra: tuple[str, ...], env: Mapping[str, str], which: Callable[[str], str | None], host: str
    ) -> LaunchPlan:
        """Returns the plan. Raises JobError if the numbers do not fit, and for every wrong option."""
        options = words.options
        place = start.where(env, which)
        site = chosen(options["site"], env, host)
        hosts = tuple(read_hosts(Path(options["hostfile"]))) if options["hostfile"] else place.hosts
        counts_here = place.is_allocation or (place.kind in ("host", "pod") and not options["submit"])
        devices = _devices(words.job, site, env, which if counts_here and not options["hostfile"] else None)
        grid = solve(_grid_request(words, place, hosts, devices))
        variables = exported(env, options["export_env"], options["env"], site.environment if site else {})
        return cls(words, extra, place, site, hosts, devices, grid, variables)

    @property
    def notes(self) -> list[str]:
        found = [f"{self.site.name}: {self.site.note}"] if self.site and self.site.note else []
        if self.hosts and self.grid.nodes < len(self.hosts):
            found.append(f"uses {self.grid.nodes} of {len(self.hosts)} nodes")
        grid, there = self.grid, self.grid.nodes * self.devices
        if grid.per_node < self.devices:
            found.append(
                f"uses {grid.per_node} of {self.devices} devices per node: the layout has {grid.processes} processes, "
                f"{grid.nnodes} node{'' if grid.nnodes == '1' else 's'} {there} devices"
            )
        return [*found, *self._left_at_default]

    @property
    def _left_at_default(self) -> list[str]:
        """A warning for each field of a large model that is submitted with the default for a first try on a laptop, and
        the offer to rehearse it."""
        loaded = self.words.loaded
        job, options = loaded.job, self.words.options
        if not options["submit"] or count(replace(job.model, vocab_size=job.model.vocab_size or 1)) < LARGE_PARAMETERS:
            return []
        offered = [] if "rehearse" in self.words.switches else ["--rehearse runs its fullest ranks here first"]
        left = {path: get(job, path) for path in ("data.corpus", "train.steps") if loaded.origins[path] == "default"}
        return [
            *(
                f"warning: {path} is not set: {job.model.preset or 'a large model'} trains on its default, {value}"
                for path, value in left.items()
            ),
            *offered,
        ]

    @property
    def grid_document(self) -> dict[str, Any]:
        return {
            "nnodes": self.grid.nnodes,
            "nproc_per_node": self.grid.per_node,
            "processes": self.grid.processes,
            "layout": self.words.job.layout.line(),
        }

    @property
    def settings(self) -> list[str]:
        return [f"{name}={shlex.quote(value)}" for name, value in sorted(self.exported.values.items())]

    def sentence(self, launcher: start.Launcher) -> str:
        grid, job = self.grid, f", job {self.place.job_id}" if self.place.job_id else ""
        nodes = f"{grid.nnodes} node{'' if grid.nnodes == '1' else 's'}"
        processes = f"{grid.per_node} process{'' if grid.per_node == 1 else 'es'} = {grid.processes}"
        layout = self.words.job.layout.line()
        return f"{IN_WORDS[self.place.kind]}{job}; {launcher}; {nodes} × {processes}; layout {layout}"

    def start_request(self, launcher: start.Launcher) -> start.StartRequest:
        options, job, grid = self.words.options, self.words.job, self.grid
        full = grid.per_node == (self.site.devices if self.site else 0)
        by_launcher = options["ranks_by"] == "launcher" and full and self.site is not None
        hosts = names_of(self.hosts)[: grid.nodes]
        return start.StartRequest(
            words=self._job_words(),
            grid=grid,
            hosts=hosts,
            endpoint=self._endpoint(hosts) if grid.nodes > 1 else None,
            ranks_by=options["ranks_by"],
            exported=self.exported,
            python=sys.executable,
            folder=os.getcwd(),
            job_id=self.place.job_id,
            cpu_bind=options["cpu_bind"] or (self.site.cpu_bind if by_launcher and self.site else ""),
            cpus_per_rank=self.site.cpus_per_rank if by_launcher and self.site else 0,
            devices=self.devices,
            in_step=self.place.in_step,
            stop_after_s=options["stop_after"],
            extra=self.extra,
            remote_shell=tuple(shlex.split(options["remote_shell"])),
            grace_s=job.run.grace_s,
        )

    def _job_words(self) -> tuple[str, ...]:
        switches = [f"--{name}" for name in ("fresh", "oversubscribe", "json") if name in self.words.switches]
        # The planner chooses an open layout for the devices of all nodes.
        job, nodes = self.words.job, self.grid.nodes
        planned = job.layout.auto and nodes > 1 and job.cluster.nodes != nodes
        return (*self.words.subjects, *([f"++cluster.nodes={nodes}"] if planned else []), *switches)

    def _endpoint(self, hosts: tuple[str, ...]) -> tuple[str, int]:
        if not hosts:
            if self.words.options["launcher"] in (None, "local"):
                return "", 0
            raise JobError(
                "no list of nodes is known here, so that their meeting place is not: call this inside the allocation, "
                "or give --hostfile FILE"
            )
        suffix = self.site.host_suffix if self.site else ""
        first = hosts[0] if not suffix or hosts[0].endswith(suffix) else hosts[0].partition(".")[0] + suffix
        key = f"{self.place.job_id}.{self.place.restarts}" if self.place.job_id else str(self._directory)
        return first, self.words.options["port"] or start.port_for(key, start.ephemeral_ports())

    @property
    def _directory(self) -> Path:
        run = self.words.job.run
        return Path(os.path.abspath(Path(run.dir) / run.name))

    @cached_property
    def submit_request(self) -> SubmitRequest:
        """The request for a batch script. Raises JobError for a wrong time limit, and if the site needs an account."""
        options, job = self.words.options, self.words.job
        site = self.site or GENERIC[options["submit"]]
        problems = []
        if site.scheduler != options["submit"]:
            problems.append(f"--submit {options['submit']}: {site.name} has {site.scheduler}")
        if site.account_required and not options["account"]:
            problems.append(f"--account is missing: {site.name} charges every job to a project")
        problems += [
            f"--batch-option {option[:80]!r}: expected an option, such as --batch-option=--exclusive"
            for option in options["batch_option"]
            if not option.isprintable() or not option.startswith("-")
        ]
        time_s, signal_s = 0, options["signal"]
        try:
            time_s = parse_time(options["time"] or site.time)
        except JobError as error:
            problems += error.problems
        if time_s and signal_s >= time_s:
            problems.append(f"--signal {signal_s} s is not less than the time limit of {time_s} s")
        program = "sbatch" if site.scheduler == "slurm" else "qsub"
        if "dry_run" not in self.words.switches:  # whose text may be for another machine
            from phalanx.data.prepare import absent  # numpy: for this alone

            problems += absent(job.data)
        if problems and "dry_run" not in self.words.switches and not shutil.which(program):
            problems.append(f"{program} is not installed here, which submits the job: --dry-run prints the text")
        if problems:
            raise JobError(problems)
        stated = self.words.loaded.origins["run.grace_s"] != "default"
        grace = [f"run.grace_s={max(10, signal_s - 10)}"] if signal_s and not stated else []
        return SubmitRequest(
            name=job.run.name,
            words=(*self.words.subjects, *grace, *self._launch_words(site, time_s, signal_s)),
            python=sys.executable,
            folder=os.getcwd(),
            directory=self._directory,
            grid=self.grid,
            ranks_by=options["ranks_by"],
            site=site,
            exported=self.exported,
            time_s=time_s,
            signal_s=signal_s,
            requeue="requeue" in self.words.switches,
            account=options["account"],
            queue=options["queue"],
            options=options["batch_option"],
            devices=self.devices if site.scheduler == "slurm" else 0,
        )

    def _launch_words(self, site: Site, time_s: int, signal_s: int) -> list[str]:
        """Returns the options of the launch inside the job."""
        options = self.words.options
        found = [f"--nnodes={self.grid.nnodes}", f"--nproc-per-node={self.grid.per_node}"]
        found += [f"--site={os.path.abspath(options['site']) if options['site'].endswith('ml') else site.name}"]
        for name in ("launcher", "cpu_bind", "port"):
            found += [f"--{name.replace('_', '-')}={options[name]}"] if options[name] else []
        found += [f"--ranks-by={options['ranks_by']}"] if options["ranks_by"] != "phalanx" else []
        # PBS has no signal before the end of the time; Slurm sends it.
        stops = options["stop_after"] or (
            time_s - signal_s if signal_s and site.scheduler == "pbs" and options["ranks_by"] == "phalanx" else 0
        )
        found += [f"--stop-after={stops}"] if stops else []
        found += [f"--export-env={name}" for name in self.exported.secrets]
        return [*found, "--", *self.extra] if self.extra else found

    @cached_property
    def manifest_request(self) -> ManifestRequest:
        options, job = self.words.options, self.words.job
        claim, _, mount = options["pvc"].partition(":")
        return ManifestRequest(
            name=job.run.name,
            job_yaml=as_yaml(self.words.loaded),
            grid=self.grid,
            values={name: value for name, value in self.exported.values.items() if name not in _LOCAL_PATHS},
            secrets=self.exported.secrets,
            secret=options["secret"],
            image=options["image"],
            claim=options["bucket"] or claim,
            mount=mount or ManifestRequest.mount,
            namespace=options["namespace"],
            devices=self.grid.per_node if _wants_devices(job, None) else 0,
            shm_gib=options["shm_gib"],
            grace_s=job.run.grace_s,
            max_restarts=job.run.max_restarts,
            time_s=parse_time(options["time"]) if options["time"] else 0,
        )


_LOCAL_PATHS = ("LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Variables that name folders of this machine, which an image does not have."""


def _grid_request(words: Words, place: start.LaunchPlace, hosts: tuple[HostSlots, ...], devices: int) -> GridRequest:
    options, job = words.options, words.job
    layout, cluster, run = job.layout, job.cluster, job.run
    stated = cluster.nodes if cluster.nodes > 1 or cluster.devices_per_node else 0
    return GridRequest(
        nnodes=options["nnodes"] or run.nnodes,
        per_node=options["nproc_per_node"],
        processes=options["nproc"],
        layout=0 if layout.auto else layout.processes,
        layout_words=layout.line(),
        cluster_nodes=stated,
        available=len(hosts),
        where=f"--hostfile {options['hostfile']}" if options["hostfile"] else "the allocation",
        devices=devices,
        cpu=cluster.device == "cpu",
    )


def _wants_devices(job: Job, site: Site | None) -> bool:
    if job.cluster.device != "auto":
        return job.cluster.device != "cpu"
    return bool(job.cluster.accelerator.name) or bool(site and site.devices)


def _devices(job: Job, site: Site | None, env: Mapping[str, str], which: Callable[[str], str | None] | None) -> int:
    """Returns the accelerators of a node: by the site's file, Slurm's variables, or the driver's own list, if `which`
    says that this host is one of them. 0 if there are none, or if the job does not use them."""
    if job.cluster.device == "cpu":
        return 0
    if site and site.devices:
        return site.devices
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        if match := re.fullmatch(r"(?:[\w.-]+:)*([0-9]{1,4})", env.get(name, "")):
            return int(match[1])
    if _wants_devices(job, site) and job.cluster.devices_per_node:
        return job.cluster.devices_per_node
    program = which("nvidia-smi") if which else None
    if not program:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_DEVICES_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
        from phalanx.cli.program import kill

        runs = [words[0].partition("=")[2], *words[1:]] if "=" in words[0] else list(words[1:])
        if len(runs) != 1 or not runs[0]:
            raise JobError("--kill takes one run's directory: phalanx launch --kill runs/NAME")
        return kill(runs[0])
    if extra and not extra[0].startswith("-"):
        return _start_program(words, extra)
    parsed = VERB.parse(words)
    if parsed is None:
        return 0
    plan = LaunchPlan.of(parsed, tuple(extra), os.environ, shutil.which, platform.node())
    for note in plan.notes:
        echo(f"phalanx: {note}", file=sys.stderr)
    if "rehearse" in parsed.switches:
        from phalanx.cli.dryrun import rehearse_first  # which needs numpy

        rehearse_first(parsed.job)
    return _submit(parsed, plan) if parsed.options["submit"] else _start(parsed, plan)


def _start_program(argv: Sequence[str], program: Sequence[str]) -> int:
    """Starts any program as ranks."""
    from phalanx.cli import program as programs

    words = programs.parse(argv, OPTIONS)
    if words is None:
        return 0
    grid, place, hosts = programs.grid_of(words, os.environ, shutil.which)
    options = words.options
    launcher = start.launcher_for(
        place,
        nodes=grid.nodes,
        wanted=options["launcher"],
        hosts_given=bool(options["hostfile"]),
        site=None,
        version=lambda: start.mpiexec_version(shutil.which),
        submits=False,
    )
    variables = exported(os.environ, options["export_env"], options["env"], {})
    starts = "dry_run" not in words.switches
    request = programs.start_request(words, program, grid, place, hosts, variables)
    echo(f"phalanx: {programs.sentence(grid, place, launcher, program)}", file=sys.stderr)
    request = _shipped(request, options["ship"], starts)
    if launcher == "local":
        if starts:
            os.environ.update(variables.values)
            settings = json.loads(request.words[0].partition("=")[2])
            return programs.run_node(settings, program)
        commands = [start.HostCommand((request.python, "-P", "-m", "phalanx.cli.node", *request.words))]
    else:
        commands = start.commands_of(launcher, request, options["hostfile"])
        commands = [start.with_own_mpiexec(launcher, command, shutil.which, starts=starts) for command in commands]
    if not starts:
        shells = [command.shell for command in commands]
        words.show(
            {"launcher": launcher, "processes": grid.processes, "commands": shells}, "\n".join(shells), wrap=False
        )
        return 0
    return _run(commands, launcher, request, bare_stdout=words.as_json)


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
    request = _shipped(plan.start_request(launcher), options["ship"], starts)
    commands = start.commands_of(launcher, request, options["hostfile"])
    commands = [start.with_own_mpiexec(launcher, command, shutil.which, starts=starts) for command in commands]
    if not starts:
        _show(words, plan, launcher, commands)
        return 0
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


def _submit(words: Words, plan: LaunchPlan) -> int:
    if "fresh" in words.switches:
        raise JobError("--fresh with --submit would start over whenever the job is requeued: choose another run.name")
    if words.options["submit"] == "k8s":
        wanted = kubernetes_submission(plan.manifest_request, words.options["k8s_kind"], words.job.run.dir)
    elif words.options["submit"] == "sky":
        name = words.job.cluster.accelerator.name
        wanted = sky_submission(plan.manifest_request, name, words.job.run.dir)
    else:
        wanted = batch_submission(plan.submit_request)
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
