"""Runs one small job under every launcher that is installed, and says whether it trains the same.

    python -m benchmarks.launchers [--only srun,mpich] [--ranks 2] [--quick] [--fresh] [--json]
    python -m benchmarks.launchers --list

As root it makes two nodes (network namespaces) and, where Slurm is installed but no cluster of two machines runs, a
Slurm of those two. A launcher that is not installed gets a row that says so. Results are kept after every launcher: an
interrupted bench goes on where it was. With all rows done it writes benchmarks/results/launchers.json and launchers.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.machine import facts
from benchmarks.chaos.results import write
from benchmarks.launchers.interrupted import INTERRUPTIONS, LongJob
from benchmarks.launchers.job import NODES, STEPS, Run, long_steps
from benchmarks.launchers.launchers import LAUNCHERS, Launcher
from benchmarks.launchers.results import Results, page, problems, sources, versions
from benchmarks.launchers.rig import MissingError, Rig
from benchmarks.launchers.trials import Trials
from benchmarks.report import RESULTS, without_places

STATE = Path("runs/launchers-state.json")
CONTROL = "train"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all launchers that are here did as documented, 1 if not, 2 without a control."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launchers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WHICH", help="launchers: srun,mpich; tried again")
    parser.add_argument("--list", action="store_true", help="list the launchers")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="no rank is killed, and no job of Slurm is interrupted")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=4, help="of the job, on one or two nodes")
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    parser.add_argument("--state", type=Path, default=STATE, metavar="FILE", help="where results are kept")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the page, also if rows are missing")
    options = parser.parse_args(argv)
    names = {launcher.key: launcher.what for launcher in LAUNCHERS}
    if not options.quick:
        names |= {key: " ".join((each.__doc__ or "").split()) for key, each in INTERRUPTIONS.items()}
    wanted = [word.strip() for word in options.only.split(",") if word.strip()] or list(names)
    if unknown := [word for word in wanted if word not in names]:
        parser.error(f"--only: no launcher {', '.join(unknown)}; there are {', '.join(names)}")
    if options.list:
        print("\n".join(f"{key:<15} {names[key]}" for key in wanted))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces and the cluster are taken down
    machine = {
        **facts(),
        "sources": sources(),
        "ranks": options.ranks,
        "launchers": versions(),
        "load": os.getloadavg()[0],
    }
    results = Results.open(options.state, machine, options.fresh)
    root = Path(tempfile.mkdtemp(prefix="phalanx_launchers_"))
    try:
        with Rig(root / "rig", options.ranks // NODES) as rig:
            Bench(rig, root, results, options.quick, again=bool(options.only)).run(wanted)
    except RuntimeError as error:
        say(f"benchmarks.launchers: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"benchmarks.launchers: interrupted; the same command goes on from {options.state}")
        return 130
    finally:
        if options.keep:
            say(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    whole = results.rows.keys() >= names.keys() and not options.quick
    if folder := options.out or (RESULTS if whole else None):
        write(folder / "launchers.json", without_places(results.text()))
        write(folder / "launchers.md", page(results))
        say(f"results: {folder / 'launchers.md'}")
    print(results.text() if options.json else page(results), end="")
    return 1 if any(problems(key, results.rows[key]) for key in wanted if key in results.rows) else 0


class Bench:
    """The rows of the table, one after the other.

    Args:
        rig: nodes, Slurm and programs.
        root: for a folder per row.
        results: what is known.
        quick: no rank is killed.
        again: also rows that have results.
    """

    def __init__(self, rig: Rig, root: Path, results: Results, quick: bool, *, again: bool):
        self.rig, self.root, self.results, self.quick, self.again = rig, root, results, quick, again
        self._long: LongJob | None = None

    def run(self, wanted: Sequence[str]) -> None:
        """Tries the wanted rows that have no result yet. Raises RuntimeError if `phalanx train` alone fails."""
        todo = [key for key in wanted if self.again or key not in self.results.rows]
        if not todo:
            return
        by_key = {launcher.key: launcher for launcher in LAUNCHERS}
        control, start_s = self._control(by_key[CONTROL])
        for number, key in enumerate(todo, 1):
            began = time.monotonic()
            say(f"{number}/{len(todo)} {key} ...")
            row = self._attempt(by_key[key], control) if key in by_key else self._interrupt(key, control, start_s)
            self.results.add(key, row)
            said = row.get("missing") or "; ".join(problems(key, row)) or "as documented"
            say(f"{number}/{len(todo)} {key}: {said}  ({time.monotonic() - began:.0f} s)")

    def _control(self, alone: Launcher) -> tuple[Run, float]:
        """Returns the run of `phalanx train` by itself, and the seconds to its first step."""
        say("phalanx train by itself ...")
        trials = Trials(alone, alone.command(self.rig), self.root / "control", self.rig.per_node, None)
        ended = trials.good()
        if ended["exit"] or ended["steps"] != STEPS:
            raise RuntimeError(f"phalanx train ended with {ended['exit']}: {ended.get('output', 'too few steps')}")
        return trials.control, ended["first_step_s"]

    def _attempt(self, launcher: Launcher, control: Run) -> dict[str, Any]:
        row = {"what": launcher.what, "nodes": launcher.nodes, "ranks": self.rig.ranks, "starts": launcher.starts}
        row |= {"note": launcher.note} if launcher.note else {}

        def tried() -> dict[str, Any]:
            command = launcher.command(self.rig)
            trials = Trials(launcher, command, self.root / launcher.key, self.rig.per_node, control)
            found: dict[str, Any] = {"good": trials.good(), "mistake": trials.mistake()}
            found |= {"program": program} if (program := trials.program()) else {}
            return found if self.quick else {**found, "killed": trials.killed()}

        return {**row, **_outcome(tried)}

    def _interrupt(self, key: str, control: Run, start_s: float) -> dict[str, Any]:
        if self._long is None:
            self._long = LongJob(self.rig, self.root / "interrupted", long_steps(control), start_s)
        wanted = self._long
        return _outcome(lambda: INTERRUPTIONS[key](wanted))


def _outcome(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what an attempt found, or why it found nothing: one row must not end those that follow."""
    try:
        return attempt()
    except MissingError as error:
        return {"missing": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
