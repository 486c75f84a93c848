"""What is tried under each launcher: the job as it is, with a mistake in it, and with a rank that is killed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.launchers import job
from benchmarks.launchers.command import Ended, killer, run
from benchmarks.launchers.job import MISTAKE, MISTAKE_SAID, STEPS, Run, compare
from benchmarks.launchers.launchers import Command, Launcher

LIMIT_S = 400.0
_PROGRAM = """
import os, platform, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
with open(f"rank-{rank}", "w") as file:
    print(platform.node(), os.environ["LOCAL_RANK"], dist.get_world_size(), total.item(), file=file)
dist.destroy_process_group()
sys.exit(int(sys.argv[1]) if rank == 1 else 0)
"""
KILL_AT = 15
"""Step at which a rank is killed: the first checkpoint is written."""
_KILLED = 1
_SAYS_KILLED = r"[Rr]ank 1\b|SIGKILL|signal 9|Killed|CODE: 9"
Result = dict[str, Any]


class Trials:
    """One launcher in a folder of its own.

    Args:
        launcher: which.
        command: how it starts the job here.
        folder: for the job and its runs.
        per_node: ranks per node.
        control: the run to compare with; None if this is the control.
    """

    def __init__(self, launcher: Launcher, command: Command, folder: Path, per_node: int, control: Run | None):
        self.launcher, self.command, self.folder = launcher, command, folder
        self.control = control or self.run_of("good")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.yaml").write_text(job.text(per_node), encoding="utf-8")

    def run_of(self, name: str) -> Run:
        """Returns the run directory of a trial."""
        return Run(self.folder / "runs" / name)

    def start(self, name: str, *words: str, meanwhile: Callable[[str], bool] | None = None) -> Ended:
        """Runs the job, and returns how it ended."""
        words = (f"run.name={name}", *words)
        commands = [argv(words) for argv in (self.command.argv, *self.command.others)]
        return run(commands, self.folder, self.command.env, LIMIT_S, meanwhile)

    def good(self) -> Result:
        """The job as it is."""
        ended, trained = self.start("good"), self.run_of("good")
        found = {**self._shown(ended), **compare(trained, self.control, STEPS)}
        if first := trained.first_step_at:
            found["first_step_s"] = round(first - ended.began, 2)
        return found

    def mistake(self) -> Result:
        """A field that there is not."""
        ended = self.start("mistake", MISTAKE)
        lines = [line for line in ended.text.splitlines() if MISTAKE_SAID in line]
        return {**self._shown(ended), "times": len(lines), "by": self._speaker(lines[0]) if lines else None}

    def killed(self) -> Result:
        """Rank 1 gets SIGKILL in the middle of the run."""
        trained = self.run_of("killed")
        ended = self.start("killed", meanwhile=killer(_KILLED, lambda: trained.step, KILL_AT))
        said = [line for line in ended.text.splitlines() if re.search(_SAYS_KILLED, line)]
        message = said[0][:300] if said else None
        return {**self._shown(ended), **compare(trained, self.control, STEPS), "message": message}

    def program(self) -> Result | None:
        """A program that knows nothing of Phalanx: its ranks sum their numbers; then rank 1 ends with 7."""
        if self.command.program is None:
            return None
        (self.folder / "program.py").write_text(_PROGRAM, encoding="utf-8")
        command = self.command.program
        ended, failed = (
            run([command([sys.executable, "-m", "program", str(code)])], self.folder, self.command.env, LIMIT_S)
            for code in (0, 7)
        )
        seen = {file.name: file.read_text("utf-8") for file in self.folder.glob("rank-*")}
        said = [line for line in failed.text.splitlines() if "Rank 1" in line]
        return {
            **self._shown(ended),
            "said": seen,
            "failed": {"exit": failed.code, "message": said[0] if said else None},
        }

    def _shown(self, ended: Ended) -> Result:
        """Returns the exit code and the seconds, and the end of the output if it did not end well."""
        found: Result = {"exit": ended.code, "seconds": round(ended.seconds, 1)}
        return found if ended.code == 0 else {**found, "output": ended.text[-2000:]}

    def _speaker(self, line: str) -> str:
        """Returns who prints a line: the rank in the launcher's label, or the program itself."""
        if self.launcher.label and (label := re.match(self.launcher.label, line)):
            return f"rank {label[1]}"
        if named := re.search(r"phalanx: rank (\d+)", line):
            return f"rank {named[1]}"
        if "launch" in self.command.argv(()):
            return "phalanx launch"
        return "phalanx train" if self.launcher.key == "train" else "one rank"
