"""The results of the bench: kept after every launcher, and written as a page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.results import write
from benchmarks.launchers.interrupted import INTERRUPTIONS
from benchmarks.launchers.job import MISTAKE, STEPS
from benchmarks.launchers.launchers import LAUNCHERS, Launcher
from benchmarks.launchers.trials import KILL_AT

Result = dict[str, Any]
BOUND = 1e-12
"""Largest relative difference of a loss from that of `phalanx train` alone."""
SHRUNK_BOUND = 1e-6
"""The same for a run that has gone on with fewer data ranks."""
_COLUMNS = (
    *("launcher", "nodes × ranks", "ranks started by", "final loss", "differs by", "exit", "first step"),
    *("mistake: exit, printed by", "rank killed: exit, then", "program"),
)
_VERSIONS = {
    "Slurm": ["slurmd", "-V"],  # srun asks for a cluster first
    "Open MPI": ["mpiexec.openmpi", "--version"],
    "MPICH": ["mpiexec.mpich", "--version"],
}


@dataclass
class Results:
    """Results by key of launcher or interruption."""

    path: Path
    facts: Mapping[str, Any]
    rows: dict[str, Result] = field(default_factory=dict[str, Result])

    @staticmethod
    def open(path: Path, facts: Mapping[str, Any], fresh: bool) -> Results:
        """Returns the results kept at `path`. Those of other sources of the program, or of another number of ranks, do
        not count."""
        if not fresh and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if all(kept["machine"].get(name) == facts[name] for name in ("sources", "ranks")):
                return Results(path, facts, kept["rows"])
        return Results(path, facts)

    def add(self, key: str, result: Result) -> None:
        """Adds a result, with the commit at which it was found, and writes the file."""
        self.rows[key] = {"commit": self.facts["commit"], **result}
        write(self.path, self.text())

    def text(self) -> str:
        """Returns all of it, for machines, in the order of the table."""
        keys = [key for key in (*(launcher.key for launcher in LAUNCHERS), *INTERRUPTIONS) if key in self.rows]
        rows = {key: self.rows[key] for key in keys}
        return json.dumps({"benchmark": "launchers", "machine": self.facts, "rows": rows}, indent=1) + "\n"


def sources() -> str | None:
    """Returns git's hash of the committed sources of the program: results stay when only the bench has changed."""
    command = ["git", "rev-parse", "HEAD:src"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def versions() -> dict[str, str | None]:
    """Returns the version of each launcher; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name, command in _VERSIONS.items():
        program = shutil.which(command[0]) or (shutil.which("mpiexec") if "MPI" in name else None)
        text = ""
        if program:
            shown = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=30, check=False)
            text = shown.stdout + shown.stderr
        wanted = {"Slurm": "slurm", "Open MPI": "Open ?MPI|OpenRTE", "MPICH": "HYDRA|MPICH"}[name]
        number = re.search(r"\d+\.\d+(\.\d+)?", text)
        found[name] = number[0] if number and re.search(wanted, text) else None
    return found


def problems(key: str, row: Result) -> list[str]:
    """Returns what is wrong with a row: nothing if it is as documented, or if the launcher is missing."""
    if "missing" in row:
        return []
    if "failed" in row:
        return [row["failed"]]
    if key in INTERRUPTIONS:
        shrinks = key == "shrinks"
        found = _differs(row, SHRUNK_BOUND if shrinks else BOUND)
        if bool(row["requeued"]) == shrinks:
            found.append("the job was requeued" if shrinks else "the job was not interrupted")
        return found
    found = _differs(row["good"])
    if mistake := row.get("mistake"):
        # torchrun says 1 whatever its ranks say.
        if mistake["exit"] != (1 if row["starts"] == "torchrun" else 2):
            found.append(f"a mistake ends with {mistake['exit']}")
        if mistake["times"] != 1:
            found.append(f"a mistake is printed {mistake['times']} times")
    if program := row.get("program"):
        found += _wrong_with(program, row["ranks"])
    if (killed := row.get("killed")) and (not killed["exit"] or killed["steps"] == STEPS):
        found += [f"after SIGKILL: {problem}" for problem in _differs(killed)]
    return found


def _wrong_with(program: Result, ranks: int) -> list[str]:
    """Returns what is wrong with the ranks of a program: their numbers, their sum, and the verdict on a failure."""
    said = [line.split()[2:] for line in program.get("said", {}).values()]
    if program["exit"] or said != [[str(ranks), str(float(sum(range(ranks))))]] * ranks:
        return [f"a program ends with {_code(program['exit'])} and says {said}"]
    failed = program["failed"]
    if not failed["exit"] or "exit code 7" not in (failed["message"] or ""):
        return [f"a program whose rank 1 ends with 7 ends with {_code(failed['exit'])}: {failed['message']}"]
    return []


def _differs(run: Result, bound: float = BOUND) -> list[str]:
    if run["exit"] != 0:
        return ["its time was up" if run["exit"] is None else f"it ends with {run['exit']}"]
    if run.get("loss_max_rel", math.inf) > bound:
        return ["the losses are others than those of phalanx train"]
    return []


def page(results: Results) -> str:
    """Returns the page for people."""
    commits = dict.fromkeys(str(row["commit"]) for row in results.rows.values())
    facts = {**results.facts, "commit": ", ".join(commits)}
    installed = ", ".join(f"{name} {number or 'not installed'}" for name, number in facts["launchers"].items())
    tried = [launcher for launcher in LAUNCHERS if launcher.key in results.rows]
    lines = [
        "# Launchers",
        "",
        "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, torch {torch}, Python {python}, "
        "phalanx {phalanx} ({commit}), {date}. `make launchers`".format(**facts),
        "",
        f"{installed}. The load of the machine was {facts['load']:.1f} at the start: it is in the times.",
        "",
        f"One job of {STEPS} steps in float64 (dp_replicate=2, tp={facts['ranks'] // 2}) under every launcher. Its "
        "losses and its final weights and moments are compared with those of `phalanx train` by itself.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *(f"| {' | '.join(_cells(each, results.rows[each.key], facts['ranks']))} |" for each in tried),
        "",
        "- differs by: the largest relative difference of a loss. 0: all losses, weights and moments have equal bits.",
        "- first step: seconds from the command to the end of the first step, imports included.",
        f"- mistake: `{MISTAKE}`. rank killed: SIGKILL to rank 1 after step {KILL_AT}. Launchers of ours start the "
        "ranks again; srun, mpiexec and torchrun (without --max-restarts) end.",
        "- program: `phalanx launch … -- PROGRAM`, whose ranks sum their numbers; if rank 1 ends with 7, the message "
        "says so.",
        "- stand-in: a program of the bench that sets the variables that the manual documents.",
    ]
    lines += ["", "## Jobs of Slurm that are interrupted", ""]
    lines += ["| what happens | exit | requeued | steps | differs by | seconds |", "|---|---|---|---|---|---|"]
    for key, interruption in INTERRUPTIONS.items():
        if key in results.rows:
            row = results.rows[key]
            what = " ".join((interruption.__doc__ or "").split())
            cells = (
                [what, row.get("missing") or row.get("failed", ""), "", "", "", ""]
                if "exit" not in row
                else [
                    what,
                    _code(row["exit"]),
                    str(row["requeued"]),
                    str(row["steps"]),
                    _difference(row),
                    f"{row['seconds']:.0f}",
                ]
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "The weights of a run that has shrunk differ in the biases of the keys: their gradient is zero, so that they "
        "are rounding noise.",
    ]
    wrong = [f"- {key}: {problem}" for key, row in results.rows.items() for problem in problems(key, row)]
    lines += ["", "## Not as documented", "", *(wrong or ["Nothing."])]
    return "\n".join(lines) + "\n"


def _cells(launcher: Launcher, row: Result, ranks: int) -> list[str]:
    what = f"{launcher.what} ({launcher.note})" if launcher.note else launcher.what
    head = [what, f"{launcher.nodes} × {ranks // launcher.nodes}"]
    if reason := row.get("missing") or row.get("failed"):
        return [*head, launcher.starts, f"**{reason}**", *[""] * 6]
    good, mistake, killed = row["good"], row.get("mistake"), row.get("killed")
    loss = f"{good['loss']:.12f}" if good["loss"] is not None else "none"
    first = f"{good['first_step_s']:.1f} s" if "first_step_s" in good else "none"
    said = f"{_code(mistake['exit'])}, {mistake['by']}" if mistake else ""
    if mistake and mistake["times"] != 1:
        said += f", **{mistake['times']} times**"
    then = f"{_code(killed['exit'])}, {_fate(killed)}" if killed else ""
    program = row.get("program")
    programs = ("wrong" if _wrong_with(program, ranks) else f"{ranks} ranks, verdict") if program else ""
    return [*head, launcher.starts, loss, _difference(good), _code(good["exit"]), first, said, then, programs]


def _fate(killed: Result) -> str:
    if killed["exit"] == 0 and killed.get("loss_max_rel", math.inf) <= BOUND:
        return "restarted, the same losses"
    return f"ended after step {killed['steps']}"


def _difference(run: Result) -> str:
    loss, weights = run.get("loss_max_rel"), run.get("weights_max_rel")
    if loss == weights == 0:
        return "0"
    if loss is None:
        return "not whole"
    return f"{loss:.1e}, weights {weights:.1e}" if weights is not None else f"{loss:.1e}"


def _code(code: int | None) -> str:
    return "time up" if code is None else str(code)
