"""A run's directory: its contents, its lock, and whether a job may resume in it. Imports no torch.

config.yaml command.txt env.json metrics.jsonl logs/attempt_k/rank_r/ checkpoints/step-000100/ latest experts.svg
trackers/ report.html loss.svg
"""

from __future__ import annotations

import contextlib
import errno
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
from phalanx.check.load import LoadedJob, as_yaml
from phalanx.check.start import KEPT
from phalanx.checkpoint.files import set_aside
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.meta import job_of
from phalanx.checkpoint.validity import newest_valid
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.data.files import open_regular, write_atomic
from phalanx.data.template import TEMPLATE_FILES
from phalanx.echo import echo, shortened
from phalanx.errors import JobError, NotFoundError, RunError
from phalanx.nearest import no_run
from phalanx.train import run_lock
from phalanx.train.facts import extension_facts

log = logging.getLogger(__name__)

NOT_OF_STRUCTURE = ("model.preset", "model.from", "model.dropout")
"""Fields of the model that may differ from those of a checkpoint."""
STRUCTURE = (
    *(path for path in leaves() if path.startswith("model.") and path not in NOT_OF_STRUCTURE),
    *(f"data.{name}" for name in ("corpus", "text_field", "tokenizer", "bpe_vocab", "val_fraction", "limit_mb")),
    *(f"data.{name}" for name in ("template", "packing", "too_long")),
    "data.random_tokens",
    "data.random_vocab",
    "optimizer.name",
    "train.seed",
    "train.precision",
)
"""Fields that must equal those of a checkpoint for a job to resume from it. Others may change between attempts."""

REFERENCE = "reference.safetensors"
"""The reference log-probabilities of preference tuning (train/reference.py)."""

ENTRIES = (
    *("config.yaml", "command.txt", "env.json", "metrics.jsonl", "logs", "checkpoints", "latest"),
    *("tokenizer.json", *TEMPLATE_FILES, KEPT, REFERENCE, "experts.svg", "traces", "trackers", run_lock.LOCK),
    *("report.html", "loss.svg"),
)
"""Names that a run writes in its directory. None of them may be a link."""

VARIABLES = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "PBS_JOBID", "LSB_JOBID"),
    *("NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"),
    *("NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_LAUNCH_MODE"),
    *("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NET_PLUGIN"),
    *("NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE"),
    *("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NCCL_TOPO_FILE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
)
"""Environment variables that env.json shows. Each stands here by name: an environment also holds secrets."""


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
        """Creates and returns the log directory of a single process: logs/attempt_k/rank_0, as the launcher does.
        Raises RunError if that fails."""
        from phalanx.launch.logs import next_attempt

        with self.writing():
            path = next_attempt(self.logs) / "rank_0"
            path.mkdir()
        return path

    def start(self, loaded: LoadedJob) -> None:
        """Records the resolved job, the command, and facts about the machine before a run. A file in the place of the
        logs is renamed. Raises RunError if the directory cannot be written, or if one of its entries is a link."""
        command = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}  {shlex.join(['phalanx', *sys.argv[1:]])}\n"
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            if self.logs.exists() and not self.logs.is_dir():
                aside = set_aside(self.logs, "")
                echo(f"phalanx: {self.logs} is not a directory; it was renamed to {aside}", file=sys.stderr)
            write_atomic(self.config, as_yaml(loaded).encode())
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(open_regular(self.path / "command.txt", flags), "a", encoding="utf-8") as file:
                file.write(command)
            write_atomic(self.path / "env.json", f"{json.dumps(_environment(), indent=1)}\n".encode())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an OSError of the block into a RunError about this directory."""
        try:
            yield
        except OSError as error:
            at = f"{error.filename}: " if error.filename else ""
            hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another run.dir"
            raise RunError(
                f"the run directory {self.path} cannot be written: {at}{error.strerror or error}; {hint}"
            ) from None

    def _refuse_links(self) -> None:
        links = [name for name in ENTRIES if (self.path / name).is_symlink()]
        if links:
            raise RunError(
                f"in the run directory {self.path} these are links, and nothing is written through them: "
                f"{', '.join(links)}; remove them (the run directory itself may be a link)"
            )

    def require(self) -> None:
        """Raises NotFoundError if this is not the directory of a run; names the runs beside it."""
        if os.path.isfile(self.config):
            return
        raise NotFoundError(no_run(self.path, "no config.yaml"))

    @contextlib.contextmanager
    def lock(self, *, fresh: bool = False) -> Iterator[Path | None]:
        """Locks the directory: two trainers in one directory would overwrite each other. With `fresh` it is a new one:
        an existing run is renamed, and its new path is yielded. Raises RunError if another process uses the directory,
        or if it cannot be written."""
        with contextlib.ExitStack() as held:
            with self.writing():
                renamed = held.enter_context(run_lock.locked(self.path, fresh=fresh))
            yield renamed

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
        then = require_same_job(manifest, job, str(self.path))
        changed = [path for path in leaves() if get(then, path) != get(job, path)]
        for path in changed:
            if not path.startswith(("run.", "cluster.", "checkpoint.")):
                log.info("resuming with a change: %s: %r -> %r", path, get(then, path), get(job, path))
        if (before_it := manifest.meta.get("extensions", {})) != extension_facts():
            now = extension_facts()
            log.warning("resuming with a change: extensions: %s -> %s", shortened(repr(before_it)), now)
        return manifest


def require_same_job(manifest: Manifest, job: Job, where: str) -> Job:
    """Returns the job of a checkpoint from which `job` can resume. Raises JobError with every difference if it cannot;
    CheckpointError if this version cannot read it."""
    then = job_of(manifest)
    fatal = [path for path in STRUCTURE if get(then, path) != get(job, path)]
    # Which sample comes next depends on the weights; paths may be others for the same tokens, which have a fingerprint.
    fatal += ["data.mix"] if _weights(then) != _weights(job) else []
    if fatal:
        differences = "".join(f"\n  {path}: {get(then, path)!r} there, {get(job, path)!r} here" for path in fatal)
        raise JobError(
            f"{where} holds a checkpoint of another job (step {manifest.step}); --fresh starts over and "
            f"renames the existing run, run.name=OTHER starts another:{differences}"
        )
    return then


def _weights(job: Job) -> list[float]:
    return [source.weight for source in job.data.mix]


def _environment() -> dict[str, object]:
    """Returns versions, facts about the machine, and VARIABLES."""
    import importlib.metadata

    packages = ("torch", "numpy", "safetensors", "tokenizers")
    return {
        "phalanx": phalanx.__version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "extensions": extension_facts(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "git": _git_commit(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
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
