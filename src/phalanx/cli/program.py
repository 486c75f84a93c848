"""`phalanx launch -- PROGRAM WORDS…`: any program as ranks, with logs, restarts and the verdict on their ends; and
`phalanx launch --kill RUN`, which ends a run on this host."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from phalanx.cli.launch_plan import LaunchPlan
from phalanx.cli.verb import JSON, WHOLE, Option, Verb, Words, alone
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.grid import GridRequest
from phalanx.launch.hosts import free_port
from phalanx.launch.local import launch_local
from phalanx.launch.nodes import Nodes, Terms
from phalanx.launch.program import PORT
from phalanx.launch.ranks import threads_for
from phalanx.launch.site import Site
from phalanx.launch.verdict import Restarts

_OF_JOBS = (
    *("signal", "k8s_kind", "image", "pvc", "namespace", "secret", "shm_gib", "ranks_by", "stop_after", "bucket"),
    "kill",
)


def parse(argv: Sequence[str], of_jobs: Mapping[str, Option]) -> Words | None:
    """Returns the words before `--`, or None after printing the help page; `of_jobs` are the options of a job's launch.
    Raises JobError with every problem."""
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
    if of_job := [flag for flag in flags if flag[2:].replace("-", "_") in _OF_JOBS]:
        raise JobError([f"{flag} is for a job file, and this is a program" for flag in of_job])
    return Verb(
        "launch",
        "Starts any program as ranks: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.",
        alone(
            (),
            {
                **{name: option for name, option in of_jobs.items() if name not in _OF_JOBS},
                "submit": Option("Write and submit a batch script.", None, Literal["slurm", "pbs"]),
                "name": Option("Name of the run; by default that of the program.", value="NAME"),
                "dir": Option("Folder of runs.", "runs", value="DIR"),
                "max_restarts": Option("Restarts after failures, in an hour.", 0, at_least=0),
            },
            switches={"all_ranks": "Show the output of every rank.", "dry_run": "Print commands, and exit.", **JSON},
        ),
        (("launch --nproc 4 -- python -m my.module --lr 1e-3", "four ranks of a program"),),
        default=WHOLE,
    ).parse(argv)


class ProgramLaunch(LaunchPlan):
    """A program that is launched."""

    @staticmethod
    def used_devices(
        words: Words, site: Site | None, env: Mapping[str, str], which: Callable[[str], str | None] | None
    ) -> int:
        return LaunchPlan.devices_of_node(site, env, which)

    @staticmethod
    def grid_request(words: Words, available: int, where: str, devices: int) -> GridRequest:
        options = words.options
        per_node = options["nproc_per_node"] or ("" if options["nproc"] else "1")
        if per_node == "auto" and not devices:
            raise JobError("--nproc-per-node auto is one per device, and no devices are known here: give a number")
        nnodes, cpu = options["nnodes"] or ("" if available else "1"), per_node != "auto"
        return GridRequest(
            nnodes, per_node, options["nproc"], available=available, where=where, devices=devices, cpu=cpu
        )

    @property
    def grid_document(self) -> dict[str, Any]:
        return {"processes": self.grid.processes, "program": list(self.extra)}

    @property
    def what(self) -> str:
        return shlex.join(self.extra)

    @property
    def directory(self) -> Path:
        return directory_of(self.words, self.extra)

    @property
    def terms(self) -> dict[str, Any]:
        """The terms of `run_node`."""
        found = {"per_node": self.grid.per_node, "directory": str(self.directory)}
        found |= {"max_restarts": self.words.options["max_restarts"], "all_ranks": "all_ranks" in self.words.switches}
        return found

    @property
    def node_words(self) -> tuple[str, ...]:
        return f"--program={json.dumps(self.terms)}", *self.extra

    def words_inside(self, site: Site, time_s: int) -> tuple[list[str], list[str]]:
        restarts, directory = self.words.options["max_restarts"], self.directory
        more = [f"--name={directory.name}", f"--dir={directory.parent}", f"--max-restarts={restarts}"]
        return [], [*more, *(["--all-ranks"] if "all_ranks" in self.words.switches else [])]


def directory_of(words: Words, program: Sequence[str]) -> Path:
    """Returns the run's directory: of `python -m my.module` it is runs/my.module, of `python -c CODE` runs/python."""
    name = Path(program[0]).stem
    for before, word in pairwise(program) if "python" in program[0] else ():
        if before == "-c" or not word.startswith("-"):
            name = {"-c": name, "-m": word}.get(before, Path(word).stem)
            break
    return Path(os.path.abspath(Path(words.options["dir"]) / (words.options["name"] or name)))


def run_node(asked: Mapping[str, Any], words: Sequence[str]) -> int:
    """Runs this node's ranks, and returns the exit code of the launch. The last words may say where nodes meet."""
    from phalanx.train.run_directory import locked

    program, nodes, per_node = list(words), None, int(asked["per_node"])
    directory, restarts = Path(asked["directory"]), int(asked["max_restarts"])
    if program[-1].startswith("run.rdzv_endpoint="):
        endpoint, nnodes = (program.pop().partition("=")[2] for _ in range(2))
        least, _, most = nnodes.partition(":")
        host, _, port = endpoint.rpartition(":")
        terms = Terms(int(least), int(most or least), per_node, 600.0)
        nodes = Nodes((host.strip("[]"), int(port)), terms, 10.0, lambda count: (), directory)
    os.environ[PORT] = str(free_port("127.0.0.1"))

    def launch() -> int:
        return launch_local(
            program,
            processes=per_node,
            log_dir=directory / "logs",
            threads=threads_for(0, per_node),
            all_ranks=bool(asked["all_ranks"]),
            module="phalanx.launch.program",
            stopped="before the program ended",
            restarts=Restarts(restarts, directory=None if nodes else directory),
            nodes=nodes,
        )

    if nodes and not nodes.is_host:
        return launch()
    with locked(directory):
        code = launch()
    echo(f"phalanx: {'ended' if code else 'done'}, exit code {code}; logs: {directory / 'logs'}", file=sys.stderr)
    return code


_POLL_S, _KILL_S = 0.1, 120.0


def kill(run: str) -> int:
    """Ends a run on this host as SIGTERM does: with a checkpoint if it trains. Returns the exit code. Raises JobError
    if nothing holds the directory, and RunError if it does not end."""
    from phalanx.train.run_directory import LOCK, Holder

    try:
        descriptor = os.open(Path(run) / LOCK, os.O_RDONLY)
    except OSError as error:
        raise JobError(f"--kill {run}: it is no run's directory, or never ran ({LOCK}: {error.strerror})") from None
    try:
        holder = Holder.read(descriptor)
    finally:
        os.close(descriptor)
    if holder is None or holder.is_gone:
        raise JobError(f"--kill {run}: nothing runs there")
    if not holder.is_here:
        raise JobError(f"--kill {run}: it is {holder}, and this is {platform.node()}: call this there")
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except OSError as error:
        raise RunError(f"--kill {run}: {holder}: {error.strerror}") from None
    echo(f"phalanx: asked {holder} to stop; it saves first, if it trains", file=sys.stderr)
    until = time.monotonic() + _KILL_S
    while not holder.is_gone:
        if time.monotonic() > until:
            raise RunError(f"--kill {run}: {holder} has not ended in {_KILL_S:g} s; kill -KILL {holder.pid} ends it")
        time.sleep(_POLL_S)
    echo(f"{run}: ended")
    return 0
