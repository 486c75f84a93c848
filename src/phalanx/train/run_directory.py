"""A run's directory: its contents, its lock, and whether a job may resume in it. Imports no torch.

config.yaml command.txt env.json metrics.jsonl logs/attempt_k/rank_r/ checkpoints/step-000100/ latest experts.svg
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import phalanx
from phalanx.check.load import LoadedJob, from_dict
from phalanx.check.show import as_yaml
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.validity import newest_valid
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.errors import CheckpointError, JobError, RunError

log = logging.getLogger(__name__)

STRUCTURE = (
    *(path for path in leaves() if path.startswith("model.") and path not in ("model.preset", "model.dropout")),
    *(f"data.{name}" for name in ("corpus", "text_field", "tokenizer", "bpe_vocab", "val_fraction", "limit_mb")),
    "data.random_tokens",
    "data.random_vocab",
    "train.seed",
    "train.precision",
)
"""Fields that must equal those of a checkpoint for a job to resume from it. Others may change between attempts."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @classmethod
    def of(cls, job: Job) -> RunDirectory:
        return cls(Path(job.run.dir) / job.run.name)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def next_log_dir(self) -> Path:
        """Creates and returns the log directory of a single process: logs/attempt_k/rank_0, as the launcher does."""
        from phalanx.launch.logs import next_attempt

        path = next_attempt(self.logs) / "rank_0"
        path.mkdir()
        return path

    def start(self, loaded: LoadedJob) -> None:
        """Records the resolved job, the command, and facts about the machine before a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.config.write_text(as_yaml(loaded), encoding="utf-8")
        with (self.path / "command.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}  {shlex.join(['phalanx', *sys.argv[1:]])}\n")
        (self.path / "env.json").write_text(json.dumps(_environment(), indent=1) + "\n", encoding="utf-8")

    def require(self) -> None:
        """Raises CheckpointError if this is not the directory of a run; names the runs beside it."""
        if os.path.isfile(self.config):
            return
        known = sorted(str(config.parent) for config in self.path.parent.glob("*/config.yaml"))
        hint = f"; runs there: {', '.join(known)}" if known else ""
        raise CheckpointError(f"no run in {self.path}: it has no config.yaml{hint}")

    def move_aside(self) -> Path | None:
        """Renames an existing directory to NAME.1, NAME.2, ...: starting over deletes nothing."""
        if not self.path.exists():
            return None
        number = 1
        while (kept := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return self.path.rename(kept)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory: two trainers in one directory would overwrite each other. The kernel releases the lock
        however the holder ends. Raises RunError if another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(f"{self.path} is in use by {holder}; wait for it, or choose another run.name") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
            yield

    def resume_from(self, job: Job, verify: bool = False, before: int | None = None) -> Manifest | None:
        """Returns the newest whole checkpoint of this run (if given, of a step below `before`), if there is any.
        Digests are checked with `verify`; otherwise `TrainState.load` checks them, on all ranks together.

        Raises JobError if it belongs to another job, with every difference; CheckpointError if all are damaged.
        """
        if not os.path.isdir(self.checkpoints):
            return None
        manifest = newest_valid(self.checkpoints, verify, log.warning, before)
        if manifest is None:
            return None
        then = job_of(manifest)
        changed = [path for path in leaves() if get(then, path) != get(job, path)]
        fatal = [path for path in changed if path in STRUCTURE]
        if fatal:
            differences = "".join(f"\n  {path}: {get(then, path)!r} there, {get(job, path)!r} here" for path in fatal)
            raise JobError(
                f"{self.path} holds a checkpoint of another job (step {manifest.step}); --fresh starts over and "
                f"renames the existing run, run.name=OTHER starts another:{differences}"
            )
        fields = [path for path in changed if not path.startswith(("run.", "cluster.", "checkpoint."))]
        for path in fields:
            log.info("resuming with a change: %s: %r -> %r", path, get(then, path), get(job, path))
        return manifest


def job_of(manifest: Manifest) -> Job:
    """Returns the job that wrote a checkpoint. Raises CheckpointError if this version cannot read it."""
    try:
        return from_dict(manifest.meta["job"], str(manifest.path))
    except (JobError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {manifest.path} was written by a job this program cannot read: {error}"
        ) from None


def _environment() -> dict[str, object]:
    """Returns versions and an allow-list of variables. Never the whole environment: it holds secrets."""
    import importlib.metadata

    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "PBS_JOBID", "WORLD_SIZE")
    prefixes = ("NCCL_", "GLOO_", "TORCH_NCCL_")
    shown = {k: v for k, v in os.environ.items() if k in names or k.startswith(prefixes)}
    packages = ("torch", "numpy", "safetensors", "tokenizers")
    return {
        "phalanx": phalanx.__version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "git": _git_commit(),
        "variables": shown,
    }


def _git_commit() -> str | None:
    """Returns the commit of the source tree this program runs from, with "+" if files were changed."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() or None
