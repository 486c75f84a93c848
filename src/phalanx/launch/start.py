"""The place of a launch (an allocation of Slurm or PBS, a login node, a pod, a lone host), the launcher for it, and the
commands of every launcher (options: templates/commands.yaml). The place is a pure function of the environment, the
installed programs and PBS's node file.

Also what runs the commands: srun or mpirun in the foreground, or the launchers of several nodes through remote shells.
None of srun and mpirun passes on Ctrl-C and SIGTERM as a request: srun kills its step a few seconds later, Open MPI's
mpirun kills the ranks at once. All of them pass on SIGUSR1, by which a run stops with a checkpoint (75). A remote shell
carries no signals: the nodes read their names from standard input, and take its end for SIGTERM, so that they stop when
this process is killed, and when a connection breaks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, TextIO

from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.detected import detected
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.hosts import HostSlots, expand, read_hosts
from phalanx.launch.lifeline import die_with_parent
from phalanx.launch.local import StopSignals
from phalanx.launch.ranks import ToldError
from phalanx.launch.site import Site
from phalanx.launch.template import template, words

RanksBy = Literal["phalanx", "launcher", "torchrun"]
Launcher = Literal["local", "srun", "pals", "openmpi", "mpich", "ssh"]

PORTS = range(10_000, 32_000)
"""Ports for a rendezvous: above those of services, below those that Linux gives to clients by default."""
_NO_EPHEMERAL = range(0)


@dataclass(frozen=True)
class StartRequest:
    words: tuple[str, ...]
    grid: ProcessGrid
    hosts: tuple[str, ...]
    """The hosts to use, the first of which is the host of the rendezvous; empty if only the launcher knows them."""
    endpoint: tuple[str, int] | None  # where the nodes meet; None on one node
    ranks_by: RanksBy
    exported: Exported
    python: str  # path of the interpreter, the same on every host
    folder: str  # the working directory, the same on every host
    job_id: str = ""
    cpu_bind: str = ""
    cpus_per_rank: int = 0  # processors of a rank for launchers that ask; 0 leaves it to them
    devices: int = 0
    in_step: bool = False
    stop_after_s: int = 0  # seconds after which the run is asked to stop with a checkpoint; 0 is never
    extra: tuple[str, ...] = ()  # the user's own options of the launcher
    remote_shell: tuple[str, ...] = ()
    grace_s: float = 30.0  # seconds that the nodes need from the first end to the last


@dataclass(frozen=True)
class HostCommand:
    """A command that runs here, and the hosts on which its processes run."""

    argv: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    stdin: str = ""  # what is written to its standard input, in words; empty if nothing is

    @property
    def shell(self) -> str:
        """The command as it may be pasted into a shell."""
        return shlex.join(self.argv)


def node_words(request: StartRequest, controlled: str = "") -> tuple[str, ...]:
    """Returns what the launcher starts on each node, or for each rank if it starts them all. `controlled` is the flag
    of a node that reads signals from its standard input."""
    values = {
        "python": request.python,
        "controlled": controlled,
        "stop_after_s": request.stop_after_s or None,
        "job": request.words,
        "nnodes": request.grid.nnodes,
        "per_node": request.grid.per_node,
        "endpoint": shown(request.endpoint) if request.endpoint else None,
        "alone": request.endpoint is None,
        "grace_s": round(request.grace_s),
        "run_id": re.sub(r"[^\w.-]", "-", request.job_id) or "phalanx",
    }
    return words(template(_COMMANDS)["node"][request.ranks_by], values)


def shown(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_for(key: str, ephemeral: range = _NO_EPHEMERAL) -> int:
    """Returns the port of a rendezvous: a hash of `key` (the job's id and its restarts, or the run's directory) into
    PORTS, outside the `ephemeral` ports. So two jobs on one node hardly collide, and every node finds the same."""
    legal = [port for port in PORTS if port not in ephemeral] or list(PORTS)
    return legal[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(legal)]


def ephemeral_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """Returns the ports that this kernel gives to clients; none if it does not say."""
    try:
        first, last = map(int, path.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return _NO_EPHEMERAL
    return range(first, last + 1)


SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"  # never asks for a password: ten hosts would ask at once


def _remote(request: StartRequest) -> list[HostCommand]:
    """Returns one command for each host. What runs there is one word for the host's shell, as with ssh."""
    names, found = request.exported.secrets, []
    for host in request.hosts[: request.grid.nodes]:
        settings = [f"{name}={value}" for name, value in sorted(request.exported.values.items())]
        words = node_words(request, "--controlled=variables" if names else "--controlled")
        inside = f"cd {shlex.quote(request.folder)} && exec {shlex.join(['env', *settings, *words])}"
        said = f"one line of JSON with {', '.join(names)}, then signals" if names else "signals, by name"
        found.append(HostCommand((*request.remote_shell, host, inside), (host,), said))
    return found


Kind = Literal["slurm job", "pbs job", "slurm login node", "pbs login node", "pod", "host"]

IN_WORDS: dict[Kind, str] = {
    "slurm job": "inside an allocation of Slurm",
    "pbs job": "inside a job of PBS",
    "slurm login node": "on a login node of Slurm (sbatch is installed, and there is no allocation)",
    "pbs login node": "on a login node of PBS (qsub is installed, and there is no job)",
    "pod": "in a Kubernetes pod",
    "host": "on a host without a scheduler",
}


@dataclass(frozen=True)
class LaunchPlace:
    kind: Kind
    job_id: str = ""
    hosts: tuple[HostSlots, ...] = ()
    in_step: bool = False  # true in a shell that srun started: a further step must share its processors
    restarts: int = 0  # times that the scheduler has requeued the job

    @property
    def is_allocation(self) -> bool:
        """True if the hosts are this job's to use."""
        return self.kind in ("slurm job", "pbs job")


def where(
    env: Mapping[str, str],
    which: Callable[[str], str | None],
) -> LaunchPlace:
    """Returns the place that an environment and the installed programs describe.

    Raises JobError if this process is one of several that a launcher started (on all but rank 0 ToldError), and if an
    allocation's list of nodes is missing or cannot be read."""
    # A batch shell has SLURM_NTASKS without a step: that is where a launch belongs.
    ranks = detected({name: value for name, value in env.items() if name != "SLURM_NTASKS" or "SLURM_STEP_ID" in env})
    if ranks is not None and ranks.world > 1:
        message = (
            f"{ranks.source} started {ranks.world} processes of `phalanx launch`, which is called once, in the "
            "allocation's shell, and starts the others itself; in place of this command, let "
            f"{ranks.source} start `phalanx train`"
        )
        raise ToldError(message, JobError.exit_code) if ranks.rank else JobError(message)
    if env.get("SLURM_JOB_ID"):
        nodelist = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
        if not nodelist:
            raise JobError(
                "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: start this inside the allocation's shell"
            )
        try:
            hosts = tuple(map(HostSlots, expand(nodelist)))
        except ValueError as error:
            raise JobError(f"SLURM_JOB_NODELIST: {error}") from None
        restarts = env.get("SLURM_RESTART_COUNT", "")
        restarts = int(restarts) if restarts.isdecimal() and len(restarts) < 10 else 0
        return LaunchPlace("slurm job", env["SLURM_JOB_ID"], hosts, "SLURM_STEP_ID" in env, restarts)
    if env.get("PBS_JOBID"):
        if not env.get("PBS_NODEFILE"):
            raise JobError("PBS_JOBID is set, but PBS_NODEFILE is not: start this inside the job's own shell")
        return LaunchPlace("pbs job", env["PBS_JOBID"], tuple(read_hosts(Path(env["PBS_NODEFILE"]))))
    if env.get("KUBERNETES_SERVICE_HOST"):
        return LaunchPlace("pod")
    if which("sbatch"):
        return LaunchPlace("slurm login node")
    if which("qsub"):
        return LaunchPlace("pbs login node")
    return LaunchPlace("host")


_COMMANDS = "commands.yaml"
_BASE = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER", "VIRTUAL_ENV")
"""Names that a process needs, wherever it starts."""

_FLAVORS: dict[Launcher, str] = {
    "openmpi": r"open ?mpi|openrte|prrte|prte",
    "pals": r"\bpals\b",
    "mpich": r"hydra|mpich|intel\(r\) mpi",
}
OTHER_NAMES: dict[Launcher, tuple[str, ...]] = {
    "openmpi": ("mpirun.openmpi", "mpiexec.openmpi"),
    "mpich": ("mpiexec.mpich", "mpiexec.hydra"),
}
"""Other names of each launcher's mpiexec, where several MPIs are installed."""


def flavor_of(version: str) -> Launcher:
    """Returns whose mpiexec it is, by what `mpiexec --version` prints. Raises JobError if it is none that is known."""
    for launcher, pattern in _FLAVORS.items():
        if re.search(pattern, version, re.IGNORECASE):
            return launcher
    first = version.strip().partition("\n")[0][:200]
    raise JobError(f"mpiexec --version says {first!r}: give --launcher pals, openmpi or mpich")


_VERSION_S = 20.0


def launcher_for(
    place: LaunchPlace,
    *,
    nodes: int,
    wanted: Launcher | None,
    hosts_given: bool,
    site: Site | None,
    version: Callable[[], str],
) -> Launcher:
    """Returns the launcher: the wanted one, or that of the place. `version` returns what `mpiexec --version` prints.
    Raises JobError where nothing can start the job, with the ways to start it."""
    if wanted:
        return wanted
    if hosts_given:
        return "ssh"
    if place.kind == "slurm job":
        return "srun"
    here = f"this is {IN_WORDS[place.kind]}"
    if place.kind == "pbs job":
        if site and site.launcher:
            return site.launcher
        if text := version():
            return flavor_of(text)
        if nodes > 1:
            raise JobError("this job of PBS has several nodes, but no mpiexec: load its module, or give --launcher ssh")
    elif place.kind in ("slurm login node", "pbs login node"):
        scheduler, allocation = ("slurm", "salloc") if place.kind.startswith("slurm") else ("pbs", "qsub -I")
        raise JobError(
            f"{here}: submit the job (--submit {scheduler}), call this inside an allocation ({allocation}), or run it "
            "on this very host (--launcher local)"
        )
    elif nodes > 1:
        hosts = "name the hosts (--hostfile FILE, one per line, reached over ssh), or run all ranks here (--nnodes 1)"
        ways = "submit it (--submit k8s)" if place.kind == "pod" else hosts
        raise JobError(f"the job has {nodes} nodes, but {here}: {ways}")
    return "local"


def mpiexec_version(which: Callable[[str], str | None]) -> str:
    """Returns what this host's mpiexec prints about itself; empty if there is none."""
    program = which("mpiexec") or which("mpirun")
    return _version(program) if program else ""


def with_own_mpiexec(
    launcher: Launcher, command: HostCommand, which: Callable[[str], str | None], *, starts: bool
) -> HostCommand:
    """Returns the command with the launcher's own mpiexec. Where several MPIs are installed without modules, as on
    Debian, they are called mpiexec.openmpi and mpiexec.mpich, and mpiexec is one of them. Raises JobError if the
    command is to be started here (`starts`), and its mpiexec is another's."""
    program = which(command.argv[0]) if launcher in _FLAVORS else None
    if program is None:
        return command
    try:
        flavor = flavor_of(_version(program))
    except JobError:  # a site's own: the user knows what it is
        return command
    if flavor == launcher:
        return command
    for name in OTHER_NAMES.get(launcher, ()):
        if which(name):
            return replace(command, argv=(name, *command.argv[1:]))
    if starts:
        raise JobError(
            f"{command.argv[0]} is that of {flavor} here, not of {launcher}: load the module of {launcher}, or give "
            f"--launcher {flavor}"
        )
    return command


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, errors="replace", timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def commands_of(launcher: Launcher, request: StartRequest, hostfile: str = "") -> list[HostCommand]:
    """Returns the commands that start the job: one, except over remote shells. Raises JobError for what the launcher
    cannot do."""
    grid, exported = request.grid, request.exported
    if launcher in ("local", "ssh") and request.extra:
        raise JobError(f"words after -- are for srun or mpiexec, but the launcher is {launcher}: {request.extra[0]}")
    if launcher in ("local", "ssh") and request.ranks_by == "launcher":
        raise JobError(f"--ranks-by launcher needs srun or mpiexec, but the launcher is {launcher}")
    if launcher == "local" and grid.nodes > 1:
        raise JobError(f"--launcher local is one host, but the job has {grid.nodes} nodes")
    if request.stop_after_s and request.ranks_by != "phalanx":
        raise JobError(f"--stop-after needs Phalanx launchers (--ranks-by phalanx, not {request.ranks_by})")
    if launcher == "local":  # train starts its own ranks
        is_program = any(word.startswith("--program=") for word in request.words[:1])
        plain = request.ranks_by == "phalanx" and not request.stop_after_s and not is_program
        return [HostCommand(node_words(replace(request, ranks_by="launcher") if plain else request))]
    if launcher == "ssh":
        if not request.hosts:
            raise JobError("--launcher ssh needs hosts: --hostfile FILE, one per line")
        return _remote(request)
    by_launcher = request.ranks_by == "launcher"
    per_node = grid.per_node if by_launcher else 1
    names = sorted({*exported.values, *exported.secrets})
    values = {
        "nodes": grid.nodes,
        "tasks": grid.nodes * per_node,
        "per_node": per_node,
        "hosts": ",".join(request.hosts),
        # A slot for each process: host files of schedulers have one per processor, or none.
        "slots": ",".join(f"{host}:{per_node}" for host in request.hosts),
        "hostfile": hostfile,
        "hostfile_alone": "" if request.hosts else hostfile,
        "cpu_bind": request.cpu_bind or "none",
        "cpus_per_rank": (request.cpus_per_rank or None) if by_launcher else None,
        "devices": request.devices > 0,
        "in_step": request.in_step,
        "shrinks": grid.least_nodes < grid.nodes,
        "wait_s": 0 if grid.least_nodes < grid.nodes else round(request.grace_s) + 30,
        "names": ",".join(sorted({*_BASE, *names})),
        "x_names": [word for name in names for word in ("-x", name)],
    }
    options = words(template(_COMMANDS)[launcher], values)
    return [HostCommand((*options, *request.extra, *node_words(request)), request.hosts)]


def run_in_foreground(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command to its end, and returns its exit code, or 128 + n if signal n ended it.

    The first request to stop becomes SIGUSR1 for the command, so does the end of this process. A second one becomes
    SIGTERM, which ends the run at once. Raises RunError if the command cannot be started."""
    here, signals, passed_on = os.getpid(), StopSignals(), 0
    with signals.handled():
        try:
            command = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C comes to this process alone
                preexec_fn=lambda: die_with_parent(here, signal.SIGUSR1),  # noqa: PLW1509 - there are no threads here
            )
        except OSError as error:
            raise RunError(f"{argv[0]} cannot be started: {error.strerror}; --dry-run prints the command") from None
        while command.poll() is None:
            for _ in signals.requests[passed_on:]:
                command.send_signal(signal.SIGTERM if passed_on else signal.SIGUSR1)
                if not passed_on:
                    with suppress(OSError):  # the terminal is gone
                        line = "the run is asked to stop with a checkpoint; a second signal ends it at once"
                        echo(f"phalanx: {line}", file=sys.stderr, flush=True)
                passed_on += 1
            with suppress(subprocess.TimeoutExpired):
                command.wait(_POLL_S)
    return 128 - command.returncode if command.returncode < 0 else command.returncode


_POLL_S = 0.1
_LONGEST_LINE = 65536
_LOST = {
    126: "the program is not executable there",
    127: "the program was not found there",
    255: "the host cannot be reached, or the connection broke",
}
"""Exit codes of the remote shell itself."""


class RemoteNodes:
    """The nodes of one run: a command for each, that of the rendezvous' host first; without `least` of them it cannot
    go on. `secrets` are variables that they read from their standard input. Nodes that were asked to stop may take
    `grace_s`. A `bare_stdout` is a document: it is printed without the host in front."""

    def __init__(
        self,
        commands: Sequence[HostCommand],
        *,
        least: int,
        secrets: Mapping[str, str],
        grace_s: float,
        bare_stdout: bool,
    ):
        self.commands, self.least, self.secrets, self.grace_s = commands, least, secrets, grace_s
        self.prefixes = [f"[{command.hosts[0]}] " if len(commands) > 1 else "" for command in commands]
        self.bare_stdout = bare_stdout
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._signals = StopSignals()
        self._failures: list[int] = []  # exit codes of nodes that failed, in the order in which they ended
        self._stopped_at: float | None = None

    def run(self) -> int:
        """Runs the nodes to their ends, and returns the exit code: that of the rendezvous' host, to which a failure of
        any node comes, or of the node that failed while the others waited for it; 1 if a host could not be reached.
        Raises RunError if the remote shell itself cannot be started."""
        with self._signals.handled():
            try:
                for command, prefix in zip(self.commands, self.prefixes, strict=True):
                    self._nodes.append(self._start(command, prefix))
                self._wait()
            finally:
                self._kill()
        for reader in self._readers:
            reader.join(5)
        code = self._failures[0] if self._failures and self._stopped_at is not None else self._nodes[0].returncode
        if code in _LOST:
            return RunError.exit_code
        return 128 - code if code < 0 else code

    def _start(self, command: HostCommand, prefix: str) -> subprocess.Popen[bytes]:
        try:
            node = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C of the terminal comes to this process alone, which passes it on
            )
        except OSError as error:
            raise RunError(f"{command.argv[0]} cannot be started: {error.strerror}; give --remote-shell") from None
        if self.secrets:
            self._write(node, json.dumps(self.secrets))
        assert node.stdout is not None
        assert node.stderr is not None
        out = "" if self.bare_stdout else prefix
        for pipe, stream, front in ((node.stdout, sys.stdout, out), (node.stderr, sys.stderr, prefix)):
            reader = threading.Thread(target=_show, args=(pipe, stream, front), daemon=True)
            reader.start()
            self._readers.append(reader)
        return node

    def _wait(self) -> None:
        """Waits for every node, and stops the others when one has failed without which they cannot go on."""
        alive, failed_at, passed_on = list(self._nodes), 0.0, 0
        while alive:
            for number, _ in self._signals.requests[passed_on:]:
                self._tell(number)
                passed_on += 1
            for place, node in enumerate(self._nodes):
                if node in alive and node.poll() is not None:
                    alive.remove(node)
                    if node.returncode:
                        self._failures.append(node.returncode)
                        failed_at = time.monotonic()
                    if reason := _LOST.get(node.returncode):
                        (host,), shell = self.commands[place].hosts, " ".join(self.commands[place].argv[:-2])
                        lost = f"{host}: the remote shell ended with {node.returncode}: {reason}"
                        echo(f"phalanx: {lost}. Try: {shell} {host} hostname", file=sys.stderr)
            # A launcher that could tell the others has done so. They have some time to end by themselves.
            patience_s = 0 if any(code in _LOST for code in self._failures) else self.grace_s
            too_few = bool(self._failures) and 0 < len(alive) < self.least
            if too_few and self._stopped_at is None and time.monotonic() > failed_at + patience_s:
                echo("phalanx: the nodes that are left are too few; they are stopped", file=sys.stderr)
                self._tell(signal.SIGTERM)
                self._stopped_at = time.monotonic()
            if self._stopped_at is not None and time.monotonic() > self._stopped_at + self.grace_s + 10:
                self._kill()
            time.sleep(_POLL_S)

    def _tell(self, number: int) -> None:
        for node in self._nodes:
            self._write(node, signal.Signals(number).name)

    def _write(self, node: subprocess.Popen[bytes], line: str) -> None:
        assert node.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            node.stdin.write(f"{line}\n".encode())
            node.stdin.flush()

    def _kill(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.kill()
                node.wait()


def _show(pipe: IO[bytes], stream: TextIO, prefix: str) -> None:
    for line in iter(lambda: pipe.readline(_LONGEST_LINE), b""):
        with suppress(BrokenPipeError):  # a reader that is gone does not stop training
            # In one piece, or lines of two nodes would mix.
            echo(f"{prefix}{line.decode(errors='replace').rstrip()}\n", file=stream, end="", flush=True)
