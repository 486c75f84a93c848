"""The place of one fault: a folder with the job, the run and temporary files, and the commands that run there."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.chaos import machine, processes
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.live import Command, Live
from benchmarks.chaos.nodes import Nodes
from benchmarks.chaos.program import JOB, Program, ranks_of

_PLUGIN = Path(__file__).with_name("plugin")
_TEMPORARY = (".tmp", ".removed-")

WORK = "work"
"""The folder where commands run, in that of the fault."""


class Arena:
    """One fault's folder. A context manager: at the end its processes are killed, its mounts undone."""

    def __init__(self, root: Path, fault: Fault, program: Program, tools: Path):
        self.fault, self.program, self.tools = fault, program, tools
        self.folder, self.tmp, self.mark_file = root / WORK, root / "tmp", root / "mark"
        self.mark = uuid.uuid4().hex
        self.settings: dict[str, Any] = {**JOB, **fault.job, **fault.extra}
        self.env: dict[str, str] = {}
        """Variables of this fault."""
        self.plugin, self.shim = dict(fault.plugin), dict(fault.shim)
        self.during = fault.during
        """The injection from outside; a preparation may set it."""
        self.memory_bytes = 0
        """Limit on the address space of every process of the command; 0: none."""
        self.job_text: str | None = None
        """The text of job.yaml instead of the settings."""
        self.lives: list[Live] = []
        """All commands of this fault, in the order of their starts."""
        self.others: list[Live] = []
        """Further commands that a fault started beside the run."""
        self.exits = ExitStack()
        self.nodes: Nodes | None = None
        self.words = dict(fault.words)
        for folder in (self.folder, self.tmp):
            folder.mkdir(parents=True)

    def __enter__(self) -> Arena:
        if self.fault.launch == "nodes":
            self.nodes = self.exits.enter_context(Nodes())
        return self

    def __exit__(self, *_: object) -> None:
        processes.kill(self.mark)
        self.exits.close()

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / self.program.run

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / self.program.checkpoints

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.folder / self.program.metrics

    def newest(self) -> Path:
        """Returns the newest checkpoint by name."""
        return max(self.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))

    def calm(self) -> None:
        """Removes the injections that act by themselves."""
        self.plugin, self.shim = {}, {}

    def forget(self) -> None:
        """Goes back to the settings of the control, without limits and words of one rank."""
        self.job_text, self.words = None, {}
        self.memory_bytes = 0
        self.settings = {**JOB, **self.fault.job}

    def start(self, words: Sequence[str] = (), limit_s: float | None = None) -> Live:
        """Starts the command, with `words` after it."""
        self.program.write(self.folder, self.settings)
        if self.job_text is not None:
            (self.folder / "job.yaml").write_text(self.job_text)
        fault = self.fault
        count = {"ranks": ranks_of(self.settings), "nodes": 2}.get(fault.launch, 1)
        commands = [self._command(number, [*words, *self.words.get(number, ())]) for number in range(count)]
        self.lives.append(
            Live(commands, self.metrics, self.mark, self.mark_file, limit_s or fault.limit_s, fault.terminal)
        )
        return self.lives[-1]

    def _command(self, number: int, words: Sequence[str]) -> Command:
        argv = [*self.program.argv(self.settings, self.fault.launch, number, self.nodes), *words]
        own = self._rank_environment(number) if self.fault.launch == "ranks" else {}
        env = {**os.environ, **self._environment(), **self.program.environment(self.nodes), **own, **self.env}
        if self.nodes:
            argv = [*self.nodes.prefix(number), *argv]
        return Command(argv, self.folder, env, self.memory_bytes)

    def _environment(self) -> dict[str, str]:
        env = {processes.MARK: self.mark, "TMPDIR": str(self.tmp), "PYTHONUNBUFFERED": "1"}
        env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if self.plugin:
            env["PHALANX_CHAOS_PLUGIN"] = json.dumps({**self.plugin, "mark": str(self.mark_file)})
            env["PYTHONPATH"] = os.pathsep.join([str(_PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
        if self.shim:
            env["LD_PRELOAD"] = str(machine.build_shim(self.tools))
            env["CHAOS_FS_MARK"] = str(self.mark_file)
            env |= {name: str(value) for name, value in self.shim.items()}
        return env

    def _rank_environment(self, rank: int) -> dict[str, str]:
        world = str(ranks_of(self.settings))
        port = str(20_000 + os.getpid() % 10_000)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        return {**place, "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def left_files(self) -> list[str]:
        """Returns temporary files that the command left, relative to the fault's folder."""
        left = list(self.tmp.iterdir())
        left += [path for path in self.run.rglob(".*") if any(part in path.name for part in _TEMPORARY)]
        return sorted(str(path.relative_to(self.tmp.parent)) for path in left)

    def copy(self, source: Path) -> None:
        """Puts a copy of another run's folder in place."""
        shutil.copytree(source, self.folder, dirs_exist_ok=True, symlinks=True)
