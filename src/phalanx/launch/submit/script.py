"""What batch scripts of every scheduler share: the request, time limits, and the lines that set up a node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import JobError
from phalanx.launch.exported import Exported
from phalanx.launch.grid import ProcessGrid
from phalanx.launch.sites.site import Site
from phalanx.launch.start.command import RanksBy

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_LONGEST_NAME = 63
_PLAIN = r"[A-Za-z0-9._@,+-]+"


@dataclass(frozen=True)
class SubmitRequest:
    """A job for a scheduler's queue."""

    name: str
    """The run's name."""
    words: tuple[str, ...]
    """The words of `phalanx launch` inside the job."""
    python: str
    """Path of the interpreter, the same on every node."""
    folder: str
    """The working directory."""
    directory: Path
    """The run directory, absolute: the script and its output go there."""
    grid: ProcessGrid
    ranks_by: RanksBy
    site: Site
    exported: Exported
    time_s: int
    signal_s: int
    """Seconds before the end of the time limit at which the run is asked to stop; 0 asks for nothing."""
    requeue: bool = False
    account: str = ""
    queue: str = ""
    options: tuple[str, ...] = ()
    """Further options of sbatch or qsub."""
    devices: int = 0
    """Accelerators to ask for on each node; 0 asks for none."""


def parse_time(text: str) -> int:
    """Returns a time limit in seconds: 1:30:00, 2-00:00:00, 30:00 (minutes and seconds), 90m, 1h30m.

    Raises JobError for anything else; a bare number is minutes for Slurm and seconds for PBS."""
    units = re.fullmatch(r"(?:([0-9]{1,4})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?", text)
    clock = re.fullmatch(r"(?:([0-9]{1,3})-)?(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{2})", text)
    match = clock or units
    if (
        not match
        or not text
        or not (
            seconds := sum(int(part or 0) * unit for part, unit in zip(match.groups(), _UNITS.values(), strict=True))
        )
    ):
        raise JobError(f"--time {text[:80]!r}: expected a time limit, such as 1:30:00, 90m or 2-00:00:00")
    return seconds


def clock(seconds: int) -> str:
    """Returns a time limit as all schedulers read it: HH:MM:SS."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def plain_name(name: str) -> str:
    """Returns a run's name as the name of a job: letters, digits, . _ -, at most 63."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_LONGEST_NAME].rstrip("-._")
    return plain or "phalanx"


def check_words(request: SubmitRequest, path: str, scheduler: str) -> None:
    """Raises JobError for a path that the regular expression `path` does not match, and for an account or a queue that
    is no plain word: directives cannot hold them."""
    words = (
        (path, "the run directory", str(request.directory)),
        (path, "the working directory", request.folder),
        (_PLAIN, "--account", request.account),
        (_PLAIN, "--queue", request.queue),
    )
    problems = [
        f"{what} {text[:200]!r} cannot stand in a script of {scheduler}: choose one of letters, digits and . _ - /"
        for pattern, what, text in words
        if text and not re.fullmatch(pattern, text)
    ]
    if problems:
        raise JobError(problems)


def site_directives(request: SubmitRequest) -> list[str]:
    """Returns the site's options with the number of nodes, then the user's."""
    nodes = str(request.grid.nodes)
    return [*(directive.replace("{nodes}", nodes) for directive in request.site.directives), *request.options]


def title(request: SubmitRequest, scheduler: str) -> str:
    """Returns the comment at the head of a script."""
    grid = request.grid
    return (
        f"# Run {plain_name(request.name)} ({grid.nnodes} × {grid.per_node} processes), made by `phalanx launch "
        f"--submit {scheduler}`."
    )


def setup_lines(request: SubmitRequest) -> list[str]:
    """Returns the lines that load modules and set variables. Every word is quoted; secrets have no line."""
    site = request.site
    lines = [f"module use {shlex.quote(path)}" for path in site.module_paths]
    lines += [f"module load {shlex.quote(module)}" for module in site.modules]
    # After the modules, which set some of these themselves.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(request.exported.values.items())]
    for name, folder in site.prepend.items():
        lines.append(f'export {name}={shlex.quote(folder)}"${{{name}:+:${name}}}"')
    return lines


def launch_line(request: SubmitRequest) -> str:
    """Returns the line that runs the job, and notes its exit code."""
    return f"{shlex.join([request.python, '-P', '-m', 'phalanx', 'launch', *request.words])} || code=$?"


def script(head: Sequence[str], body: Sequence[str]) -> str:
    """Returns the text of a script of bash, as a login shell that knows `module`."""
    return "\n".join(["#!/bin/bash -l", *head, "", *body]) + "\n"
