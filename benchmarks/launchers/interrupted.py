"""Jobs of Slurm that are interrupted: USR1 before the time limit, and a node that dies. All losses and the bits of the
final weights are compared with those of a run that nothing interrupts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.launchers import job
from benchmarks.launchers.command import run
from benchmarks.launchers.job import Run, compare
from benchmarks.launchers.launchers import BATCH_WAIT, launch
from benchmarks.launchers.rig import PHALANX, MissingError, OwnSlurm, Rig

LIMIT_S = 1500.0
_MOST_STEPS = 30_000
Result = dict[str, Any]


@dataclass(frozen=True)
class LongJob:
    """A job of two minutes, submitted to Slurm; `folder` is for the job and its runs."""

    rig: Rig
    folder: Path
    steps: int
    start_s: float
    """Seconds from the command to the first step, by another run."""

    def control(self) -> Run:
        """Returns the run of `phalanx train` by itself. Raises RuntimeError if it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "job.yaml").write_text(job.text(self.rig.per_node, self.steps), encoding="utf-8")
        plain = Run(self.folder / "runs" / "plain")
        if plain.step < self.steps:
            ended = run([[*PHALANX, "train", "job.yaml", "run.name=plain"]], self.folder, {}, LIMIT_S)
            if ended.code:
                raise RuntimeError(f"phalanx train ended with {ended.code}: {ended.text[-500:]}")
        return plain

    def submitted(self, name: str, options: Sequence[str], meanwhile: Callable[[Run], bool] | None = None) -> Result:
        """Submits it, waits for its end, and returns how it ended."""
        control, trained, slurm = self.control(), Run(self.folder / "runs" / name), self.rig.slurm
        words = launch("--submit", "slurm", *options)([f"run.name={name}"])
        command = slurm.command(*BATCH_WAIT, "slurm", *words)
        disturb = (lambda _: meanwhile(trained)) if meanwhile else None
        ended = run([command], self.folder, slurm.env, LIMIT_S, disturb)
        restarts = re.search(r"^\w+, restarts (\d+)", ended.text, re.MULTILINE)
        return {
            "exit": ended.code,
            "seconds": round(ended.seconds, 1),
            "requeued": int(restarts[1]) if restarts else None,
            **compare(trained, control, self.steps),
            **({"output": ended.text[-2000:]} if ended.code else {}),
        }


def requeued(wanted: LongJob) -> Result:
    """USR1 a minute before the time limit: the run stops with a checkpoint and 75, and the job is requeued and resumes,
    as often as it takes."""
    # Slurm may send it a minute earlier, and a run that has not begun to train is not requeued.
    minutes = math.ceil((1.5 * wanted.start_s + 150) / 60)
    options = ["--nnodes", "2", "--requeue", "--time", f"{minutes}m", "--signal", "60"]
    found = wanted.submitted("requeued", options)
    if found["exit"] == 0 and not found["requeued"] and wanted.steps < _MOST_STEPS:  # the machine is faster than it was
        return requeued(replace(wanted, steps=3 * wanted.steps, folder=wanted.folder / "longer"))
    return found


def lost_node(wanted: LongJob) -> Result:
    """The second node dies while the job trains: slurmd, steps and tasks by SIGKILL. It comes back when Slurm has seen
    it, and the job is requeued and resumes."""
    return _with_a_dead_node(wanted, "lost-node", ["--nnodes", "2", "--requeue"])


def shrunk(wanted: LongJob) -> Result:
    """The second node dies while a job of `--nnodes 1:2` trains: it goes on with the first, in the same job. (Its sums
    have another order: equal within 1e-6.)"""
    return _with_a_dead_node(wanted, "shrunk", ["--nnodes", "1:2"])


def _with_a_dead_node(wanted: LongJob, name: str, options: list[str]) -> Result:
    slurm = wanted.rig.slurm
    if not isinstance(slurm, OwnSlurm):
        raise MissingError("nodes of a cluster in use are not killed: unset SLURM_CONF, so that the bench makes one")
    cluster, found = slurm.slurm, Result()

    def die(trained: Run) -> bool:
        if trained.step < wanted.steps // 3:
            return False
        found["died_at_step"] = trained.step
        cluster.fail(1)
        began = time.monotonic()
        cluster.wait_down(1)
        found["seen_s"] = round(time.monotonic() - began, 1)
        cluster.heal(1)
        return True

    return {**wanted.submitted(name, [*options, "--time", "20m"], die), **found}


INTERRUPTIONS = {"requeue": requeued, "node-dies": lost_node, "shrinks": shrunk}
"""By key for --only."""
