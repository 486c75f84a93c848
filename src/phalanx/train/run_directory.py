"""A run's directory: its contents, its lock, and whether a job may resume in it. Imports no torch.

config.yaml command.txt env.json metrics.jsonl logs/attempt_k/rank_r/ checkpoints/step-000100/ latest experts.svg
trackers/ report.html loss.svg
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import shlex
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import phalanx
from phalanx.bounded import field, parse_json, read_tail
from phalanx.check.load import LoadedJob, as_dict, as_yaml
from phalanx.check.start import KEPT
from phalanx.checkpoint.inventory import check, checkpoint_at, newest_valid, set_aside
from phalanx.checkpoint.manifest import Manifest, job_of
from phalanx.config.added import ADDED
from phalanx.config.corpora import TEMPLATE_FILES
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.data.files import open_regular, write_atomic
from phalanx.echo import echo, shortened
from phalanx.errors import CheckpointError, JobError, NotFoundError, RunError
from phalanx.launch.lifeline import process_state
from phalanx.nearest import no_run
from phalanx.registry import installed

LOCK = ".lock"
HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of a holder."""
SILENCE_S = 3 * HEARTBEAT_S
"""Seconds without a heartbeat after which a holder on another host counts as gone."""
SETTLE_S = 2.0
"""Where flock cannot be relied on: seconds after which the file must still name the process that wrote its name."""
_NAMING_S = 1.0  # the holder writes its name right after it has the lock
_POLL_S = 0.05
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class Holder:
    """A process that uses a run directory, as its .lock names it."""

    host: str
    pid: int
    since: str
    """Local time at which it took the lock."""
    ticks: int
    """When the process started, in clock ticks since its host's boot: tells it from a later one with the same pid."""

    @classmethod
    def this_process(cls) -> Holder:
        """Returns this process as a holder."""
        return cls(platform.node(), os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z"), _start_of(os.getpid()))

    @classmethod
    def read(cls, descriptor: int) -> Holder | None:
        """Returns the holder that an open lock file names, or None if it names none."""
        try:
            found = json.loads(os.pread(descriptor, 4096, 0))
            return cls(str(found["host"]), int(found["pid"]), str(found["since"]), int(found["ticks"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def write(self, descriptor: int) -> None:
        """Writes the holder to an open lock file."""
        content = json.dumps(asdict(self)).encode()
        os.ftruncate(descriptor, os.pwrite(descriptor, content, 0))

    @property
    def is_here(self) -> bool:
        """True if it was started on this host."""
        return self.host == platform.node()

    @property
    def is_gone(self) -> bool:
        """True if it was started on this host and has ended."""
        return self.is_here and _start_of(self.pid) != self.ticks

    def __str__(self) -> str:
        host, since = (ascii(text)[1:-1][:100] for text in (self.host, self.since))  # whoever wrote them
        return f"process {self.pid} on {host} since {since}"


@contextmanager
def locked(directory: Path, *, fresh: bool = False) -> Iterator[Path | None]:
    """Holds the lock of a run directory, which is created if it does not exist. With `fresh` the directory is new: one
    that holds anything is renamed to NAME.1, NAME.2, ... and that path is yielded (otherwise None).

    A directory that was created and in which nothing was written is removed again, as after a mistyped data.path.

    The rename happens under the old directory's lock, and the new directory appears with its own lock held already: at
    no instant can another trainer enter either of them.

    Raises RunError that names the holder if another process uses the directory, OSError if it cannot be written.
    """
    is_new = not os.path.lexists(directory)
    descriptor, renamed = _take(directory), None
    try:
        while fresh and os.listdir(directory) != [LOCK]:
            descriptor, renamed = _start_over(directory, descriptor)
        with _heartbeat(descriptor):
            yield renamed
    finally:
        with suppress(OSError):  # whoever waits for this lock finds out, as after a rename
            if is_new and os.listdir(directory) == [LOCK] and _is_at(directory / LOCK, descriptor):
                os.unlink(directory / LOCK)
                os.rmdir(directory)
        _release(descriptor)


def _take(directory: Path) -> int:
    """Locks the directory's lock file and returns its descriptor."""
    while True:
        _make(directory)
        try:
            descriptor = open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # the directory was renamed just now
        try:
            _lock(descriptor, directory)
            if _is_at(directory / LOCK, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        _release(descriptor)  # it is the lock of a directory that was renamed in the meantime


def _make(directory: Path) -> None:
    """Creates the directory if it does not exist, also while another process renames it.

    `mkdir` with `exist_ok` fails if the directory is there when it is created and gone when it is looked at.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        with suppress(FileNotFoundError):  # renamed: whoever opens the lock file finds out and comes back
            if not stat.S_ISDIR(directory.lstat().st_mode):
                raise


def _lock(descriptor: int, directory: Path) -> None:
    """Locks the open lock file and writes this process into it. Raises RunError if another process holds it."""
    trusted = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(directory, _named(descriptor)) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        trusted = False
    last, me = Holder.read(descriptor), Holder.this_process()
    if last and last.is_here and not trusted and not last.is_gone:
        raise _in_use(directory, last)
    if last and not last.is_here:
        # It did not end cleanly, or the lock does not reach its host.
        if _beats(directory / LOCK):
            raise _in_use(directory, last)
        trusted = False
    me.write(descriptor)
    if not trusted:
        # Another process may have written its name at the same time: the last of them has the lock (M. Fischer's
        # algorithm, in Lamport, "A fast mutual exclusion algorithm", 1987).
        time.sleep(SETTLE_S)
        winner = _holder_at(directory / LOCK)
        if winner and winner != me:
            raise _in_use(directory, winner)


def _start_over(directory: Path, old: int) -> tuple[int, Path]:
    """Renames the directory, whose lock is `old`, and puts an empty one in its place. Returns the new lock's descriptor
    and the path of the renamed directory."""
    empty = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    new, renamed = _take(empty), None
    try:
        renamed = _rename(directory)
        # If another process has made an empty directory in the meantime, this replaces it, and it finds our lock there.
        empty.rename(directory)
    except OSError:
        _release(new)
        (empty / LOCK).unlink()
        empty.rmdir()
        if renamed is None:
            raise
        try:
            new = _take(directory)
        except RunError as error:
            raise RunError(f"{error}; the run that was there before is now {renamed}") from None
    _release(old)
    return new, renamed


def _rename(directory: Path) -> Path:
    """Renames a directory to NAME.1, NAME.2, ...: starting over deletes nothing."""
    number = 1
    while os.path.lexists(renamed := directory.with_name(f"{directory.name}.{number}")):
        number += 1
    return directory.rename(renamed)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


@contextmanager
def _heartbeat(descriptor: int) -> Iterator[None]:
    """Renews the modification time of the open lock file inside the `with` block."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="phalanx-run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)


def _beats(path: Path) -> bool:
    """Returns whether a lock file's heartbeat is seen within SILENCE_S. Clocks of hosts are not compared."""
    first, end = _modified(path), time.monotonic() + SILENCE_S
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        if _modified(path) != first:
            return True
    return False


def _modified(path: Path) -> int:
    """Returns the modification time in ns. The file is opened for it: NFS then asks the server."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _holder_at(path: Path) -> Holder | None:
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        return Holder.read(descriptor)
    finally:
        os.close(descriptor)


def _named(descriptor: int) -> Holder | None:
    """Returns the holder of a lock that is held; waits a moment for one that has not written its name yet."""
    end = time.monotonic() + _NAMING_S
    while ((holder := Holder.read(descriptor)) is None or holder.is_gone) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return holder


def _in_use(directory: Path, holder: Holder | None) -> RunError:
    elsewhere = f"; if it ended without a trace, delete {directory / LOCK}" if holder and not holder.is_here else ""
    return RunError(
        f"{directory} is in use by {holder or 'another process'}; wait for it, or choose another run.name{elsewhere}"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether `path` is the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _start_of(pid: int) -> int:
    """Returns when a process of this host started, in clock ticks since boot; -1 if it has ended."""
    process = process_state(pid)
    return -1 if process is None or process.state in "ZX" else process.start_ticks


MAY_DIFFER = (
    "run.threads",  # the number of threads itself is compared, where results depend on it
    "run.log_level",
    "run.all_ranks",
    # cluster=local reads these from the measurements of each machine; only predictions depend on them.
    "cluster.accelerator.",
    "cluster.intra.",
    "cluster.inter.",
    "cluster.sharing.",
    "cluster.calibration.",
)
"""Fields of a job, or their beginnings, that may differ between ranks."""


def job_facts(job: Job) -> dict[str, Any]:
    """Returns every field of the job that must be the same on all ranks, by dotted path."""
    document = as_dict(job)
    return {
        path: functools.reduce(lambda values, name: values[name], path.split("."), document)
        for path in leaves()
        if not path.startswith((*MAY_DIFFER, *ADDED))
    } | {f"added.{name}": vars(its) for name, its in (*job.techniques.chosen, *job.layout.axes.chosen)}


@functools.cache
def source_digest() -> str:
    """Returns a digest (sha256, 16 hexadecimal digits) of the program's own source files, by relative path and content:
    what a version number does not tell while somebody edits a working copy."""
    return _digest([Path(phalanx.__file__).parent])


@functools.cache
def extension_facts() -> dict[str, str]:
    """Returns the installed packages that extend Phalanx by name, each with its version and the digest of its source
    files. Nothing of them is imported."""
    return {
        package.name: f"{package.version}, source {_digest(_places(tops))}" for package, tops in installed().items()
    }


def _places(modules: Iterable[str]) -> list[Path]:
    """Returns the folders and files of top-level modules."""
    found = list[Path]()
    for module in modules:
        with suppress(ImportError, ValueError):  # loading it will say more
            spec = find_spec(module)
            if spec and spec.submodule_search_locations:
                found += map(Path, spec.submodule_search_locations)
            elif spec and spec.origin and Path(spec.origin).is_file():
                found.append(Path(spec.origin))
    return found


def _digest(places: Iterable[Path]) -> str:
    """Returns a digest of Python files: those in folders, by relative path and content, and single ones."""
    digest = hashlib.sha256()
    for place in places:
        root = place if place.is_dir() else place.parent
        for path in sorted(root.rglob("*.py")) if place.is_dir() else [place]:
            content = path.read_bytes()
            digest.update(json.dumps([str(path.relative_to(root)), len(content)]).encode() + content)
    return digest.hexdigest()[:16]


log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16  # of metrics.jsonl; a row has a few hundred, one about experts some thousands

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
"""The reference log-probabilities of preference tuning (train/evaluate.py)."""

ENTRIES = (
    *("config.yaml", "command.txt", "env.json", "metrics.jsonl", "logs", "checkpoints", "latest"),
    *("tokenizer.json", *TEMPLATE_FILES, KEPT, REFERENCE, "reference.json", "experts.svg", "traces", "trackers", LOCK),
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
                renamed = held.enter_context(locked(self.path, fresh=fresh))
            yield renamed

    def checkpoint(self, step: int = 0, verify: bool = True) -> Manifest:
        """Returns the checkpoint of `step` (0: the newest whole one); without `verify` only file sizes are checked.

        Raises JobError if this is no run, and CheckpointError if there is no such checkpoint, or it is damaged."""
        self.require()
        if step:
            return check(checkpoint_at(self.checkpoints, step), verify)
        manifest = newest_valid(self.checkpoints, verify, report=log.warning)
        if manifest is None:
            raise CheckpointError(
                f"{self.path} has no checkpoint yet; it writes one at its end, or every checkpoint.every steps"
            )
        return manifest

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


def newest_step(metrics: Path) -> tuple[int, float] | None:
    """Returns the newest step that metrics.jsonl reports, and when it was done, in seconds since the epoch; None if it
    reports none in its last rows."""
    try:
        lines = read_tail(metrics, _TAIL_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if line.startswith(b'{"event": "step"'):
            with suppress(ValueError):  # half a line, left by a rank that was killed
                row = parse_json(line)
                return field(row, "step", int), field(row, "time", float)
    return None


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


MOST_WAITING = 10_000
"""Lines that wait in memory for the disk; later ones are lost."""
_BLOCK = 1 << 16


class AppendedFile:
    """A text file, one line at a time, each written at once. A context manager.

    A line that cannot be written waits in memory and is tried again with the next one; the first failure, and the lines
    lost in the end, are reported. A last line that a killed process has left half-written is removed.
    Raises RunError if the path is a link or no regular file.
    """

    def __init__(self, path: Path, report: Callable[[str], None]):
        self.path, self.lost = path, 0
        self._report, self._failed = report, False
        self._descriptor = -1
        self._waiting: deque[bytes] = deque()
        self._write()

    def __enter__(self) -> AppendedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, line: str) -> None:
        """Appends a line, given without its newline."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(f"{line}\n".encode(errors="backslashreplace"))
        else:
            self.lost += 1
        self._write()

    def close(self) -> None:
        """Closes the file, after a last try to write the lines that wait."""
        self._write()
        self.lost += len(self._waiting)
        self._waiting.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.lost:
            self._report(f"{self.path}: {self.lost:,} lines could not be written and are lost")

    def _write(self) -> None:
        try:
            if self._descriptor < 0:
                self._descriptor = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
                _remove_half_line(self._descriptor)
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[0])
                if rest := self._waiting[0][written:]:  # the disk became full within the line
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
        except OSError as error:
            if not self._failed:
                self._report(
                    f"{self.path} cannot be written: {error.strerror}; training goes on, and its lines wait in memory"
                )
            self._failed = True
        else:
            if self._failed:
                self._report(f"{self.path} can be written again")
            self._failed = False


def _remove_half_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    if not end or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    while end:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            os.ftruncate(descriptor, start + newline + 1)
            return
        end = start
    os.ftruncate(descriptor, 0)
