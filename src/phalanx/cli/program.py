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
from typing import Any

from phalanx.cli.verb import JSON, WHOLE, Option, Verb, Words, alone
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.launch.grid import GridRequest, ProcessGrid, solve
from phalanx.launch.hosts import free_port, names_of, read_hosts
from phalanx.launch.local import launch_local
from phalanx.launch.nodes import Nodes, Terms
from phalanx.launch.program import PORT
from phalanx.launch.ranks import threads_for
from phalanx.launch.start import IN_WORDS, StartRequest, ephemeral_ports, port_for, where
from phalanx.launch.verdict import Restarts

_OF_JOBS = (
    *("submit", "site", "time", "account", "queue", "signal", "batch_option", "k8s_kind", "image", "pvc", "namespace"),
    *("secret", "shm_gib", "ranks_by", "stop_after", "bucket", "kill"),
)


def parse(argv: Sequence[str], of_jobs: Mapping[str, Option]) -> Words | None:
    """Returns the words before `--`, or None after printing the help page; `of_jobs` are the options of a job's launch.
    Raises JobError with every problem."""
    flags = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
    if of_job := [flag for flag in flags if flag[2:].replace("-", "_") in _OF_JOBS]:
        raise JobError([f"{flag} is for a job file; a program is started here, or in an allocation" for flag in of_job])
    return Verb(
        "launch",
        "Starts any program as ranks: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.",
        alone(
            (),
            {
                **{name: option for name, option in of_jobs.items() if name not in _OF_JOBS},
                "name": Option("Name of the run; by default that of the program.", value="NAME"),
                "dir": Option("Folder of runs.", "runs", value="DIR"),
                "max_restarts": Option("Restarts after failures, in an hour.", 0, at_least=0),
            },
            switches={"all_ranks": "Show the output of every rank.", "dry_run": "Print commands, and exit.", **JSON},
        ),
        (("launch --nproc 4 -- python -m my.module --lr 1e-3", "four ranks of a program"),),
        default=WHOLE,
    ).parse(argv)


def grid_of(words: Words, env: Mapping[str, str], which: Callable[[str], str | None]) -> tuple[ProcessGrid, Any, Any]:
    """Returns nodes × processes, the place, and the hosts. Raises JobError if the numbers do not fit."""
    options, place = words.options, where(env, which)
    hosts = tuple(read_hosts(Path(options["hostfile"]))) if options["hostfile"] else place.hosts
    whence = f"--hostfile {options['hostfile']}" if options["hostfile"] else "the allocation"
    per_node = options["nproc_per_node"] or ("" if options["nproc"] else "1")
    nnodes = options["nnodes"] or ("" if hosts else "1")
    grid = solve(GridRequest(nnodes, per_node, options["nproc"], available=len(hosts), where=whence))
    return grid, place, hosts


def start_request(
    words: Words, program: Sequence[str], grid: ProcessGrid, place: Any, hosts: Any, exported: Any
) -> StartRequest:
    """Returns what the launcher starts on every node. Raises JobError if nodes have no meeting place."""
    options, directory = words.options, directory_of(words, program)
    settings = {
        "per_node": grid.per_node,
        "directory": str(directory),
        "max_restarts": options["max_restarts"],
        "all_ranks": "all_ranks" in words.switches,
    }
    names = names_of(hosts)[: grid.nodes]
    if grid.nodes > 1 and not names:
        raise JobError("no list of nodes is known here: call this inside the allocation, or give --hostfile FILE")
    port = options["port"] or port_for(place.job_id or str(directory), ephemeral_ports())
    return StartRequest(
        words=(f"--program={json.dumps(settings)}", *program),
        grid=grid,
        hosts=names,
        endpoint=(names[0], port) if grid.nodes > 1 else None,
        ranks_by="phalanx",
        exported=exported,
        python=sys.executable,
        folder=os.getcwd(),
        job_id=place.job_id,
        cpu_bind=options["cpu_bind"],
        in_step=place.in_step,
        remote_shell=tuple(shlex.split(options["remote_shell"])),
    )


def directory_of(words: Words, program: Sequence[str]) -> Path:
    """Returns the run's directory: of `python -m my.module` it is runs/my.module, of `python -c CODE` runs/python."""
    name = Path(program[0]).stem
    for before, word in pairwise(program) if "python" in program[0] else ():
        if before == "-c" or not word.startswith("-"):
            name = {"-c": name, "-m": word}.get(before, Path(word).stem)
            break
    return Path(os.path.abspath(Path(words.options["dir"]) / (words.options["name"] or name)))


def sentence(grid: ProcessGrid, place: Any, launcher: str, program: Sequence[str]) -> str:
    nodes, per_node = grid.nnodes, grid.per_node
    return f"{IN_WORDS[place.kind]}; {launcher}; {nodes} × {per_node} = {grid.processes} ranks of {shlex.join(program)}"


def run_node(settings: Mapping[str, Any], words: Sequence[str]) -> int:
    """Runs this node's ranks, and returns the exit code of the launch. The last words may say where nodes meet."""
    from phalanx.train.run_directory import locked

    program, nodes, per_node = list(words), None, int(settings["per_node"])
    directory, restarts = Path(settings["directory"]), int(settings["max_restarts"])
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
            all_ranks=bool(settings["all_ranks"]),
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
