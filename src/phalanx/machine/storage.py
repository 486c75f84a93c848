"""Checks of a job on this machine, and of the file system of its run directory: what a run relies on is tried there, in
a folder that is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.inventory import REMOVED, space_for
from phalanx.config.corpora import CORPORA, TOKENIZERS
from phalanx.config.fields import replace
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.trackers import missing
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.cost.state_formulas import state_bytes
from phalanx.data.files import (
    LUSTRE,
    MOUNTS,
    TEMPORARY,
    mount_of,
    open_regular,
    striping_in,
    sync,
    targets_in,
    write_atomic,
)
from phalanx.data.settings import vocabulary_size
from phalanx.errors import CheckpointError, DataError, JobError, RunError
from phalanx.machine.checks import CheckedMachine, CheckResult, Problems, check, error, ok, warn
from phalanx.machine.system import memory_bytes
from phalanx.train.run_directory import ENTRIES, LOCK, Holder
from phalanx.units import counted, gib, seconds

_UNKNOWN_VOCABULARY = 256
"""Vocabulary for an estimate before the data is prepared; that of the bytes."""
_NO_ANSWER = "the file system of the data or of the run does not answer"


@check("job", "layout")
def layout_here(machine: CheckedMachine) -> Problems:
    """Yields the layout, and whether this machine alone has enough for it."""
    job = machine.job
    if job.layout.auto:
        yield ok("the planner chooses the layout when training starts")
        return
    text = f"{job.layout.line()}: {counted(job.layout.processes, 'process')}".replace("processs", "processes")
    if job.cluster.nodes > 1 and machine.ranks is None and not job.run.nnodes:
        yield error(
            f"{text} on {job.cluster.nodes} nodes, but no launcher started this command",
            f"start it with torchrun, srun or mpiexec, or on every node with run.nnodes={job.cluster.nodes} "
            "run.rdzv_endpoint=HOST:PORT",
        )
    return text


@check("job", "data", _NO_ANSWER, 3.0)
def data_here(machine: CheckedMachine) -> Problems:
    """Yields whether the token shards are there and whole, or can be made here."""
    from phalanx.data.formats import pair_of
    from phalanx.data.index import INDEX, open_shards
    from phalanx.data.settings import prepared_path, tokenizer_path

    data = machine.job.data
    prepare = "prepare the data: phalanx data prepare JOB, with the same settings"
    try:
        folder = prepared_path(data)
        if os.path.exists(folder / INDEX):
            index = open_shards(folder)
            tokens = ", ".join(f"{index.tokens(split):,} {split}" for split in ("train", "val"))
            yield ok(f"{folder}: {tokens} tokens, vocabulary {index.vocab_size}")
            return
        if data.tokenizer not in TOKENIZERS:
            tokenizer_path(data)
    except DataError as problem:
        text, _, advice = str(problem).partition(". ")
        yield error(text, advice or prepare)
        return
    own = {"data.path": data.path} if data.path and "path" in CORPORA[data.corpus].settings else {}
    paths = own | {f"data.mix: {source.path}": source.path for source in data.mix}
    files = {name: (pair_of(path) or (Path(path).expanduser(),))[0] for name, path in paths.items()}
    if unread := [name for name, file in files.items() if not os.access(file, os.R_OK)]:
        yield error(f"{', '.join(unread)}{f'={data.path}' if own else ''} cannot be read", "correct the path")
    elif not os.access(nearest_folder(Path(data.dir).expanduser()), os.W_OK):
        yield error(f"{folder} is not prepared, and {data.dir} cannot be written", "set data.dir to another folder")
    elif machine.several_nodes:
        yield warn(f"{folder} is not prepared: rank 0 prepares it while the others wait", prepare)
    return f"{folder} is not prepared yet: training begins with it"


def _vocabulary(machine: CheckedMachine) -> int:
    try:
        return vocabulary_size(machine.job)
    except (JobError, DataError):
        return _UNKNOWN_VOCABULARY


@check("job", "memory", _NO_ANSWER, 6.0)
def memory(machine: CheckedMachine) -> Problems:
    """Yields the predicted peak memory of the fullest rank against its device, or of all ranks of this node against
    the host."""
    sizes = machine.torch.facts().get("memory") if machine.may_use_gpus else None
    job = machine.job if sizes else replace(machine.job, "cluster.device", "cpu")
    peak = max(rank.peak for rank in step_memory(rank_spec(job, _vocabulary(machine))))
    if sizes:
        text = f"a rank needs {gib(peak)} at its peak, as predicted; its GPU has {gib(min(sizes))}"
        if peak > min(sizes):
            yield error(text, "phalanx predict JOB lists changes that make it fit")
        else:
            yield ok(text)
        return
    ranks, (most, free) = machine.local_ranks, memory_bytes(machine)
    need = peak * ranks
    text = f"{counted(ranks, 'rank')} × {gib(peak)} at the peak, as predicted; {gib(free)} are free of {gib(most)}"
    if most and need > most:
        yield error(text, "use fewer ranks per node, a smaller micro-batch, recompute=full, or ask for more memory")
    elif most and need > free:
        yield warn(text, "end other programs, or ask for more memory")
    else:
        yield ok(text)


def checkpoint_bytes(job: Job, vocab: int) -> int:
    """Returns the bytes of the tensors of one checkpoint, whatever the layout: every parameter and its optimizer state
    once. State that a `layout.sync` other than bsp adds is not counted."""
    whole = rank_spec(replace(job, "layout", Layout()), vocab, "cpu")
    parameters, _, optimizer = state_bytes(whole, range(job.model.n_layers))
    return round(parameters + optimizer)


@check("job", "checkpoints", _NO_ANSWER)
def checkpoints(machine: CheckedMachine) -> Problems:
    """Yields whether the checkpoints that the job keeps fit on the file system of the run directory."""
    job, folder = machine.job, machine.run_directory.path
    size = checkpoint_bytes(job, _vocabulary(machine))
    found = os.statvfs(nearest_folder(folder))
    free = found.f_bavail * found.f_frsize
    kept = (job.checkpoint.keep or 1) + 1
    text = f"{gib(size)} each; {gib(free)} free"
    remedy = "free some space, lower checkpoint.keep, or choose another run.dir"
    if free < space_for(size):
        yield error(f"{text}: not even one fits", remedy)
    elif free < space_for(size, kept):
        yield warn(f"{text}; {kept} are there at a time, which takes {gib(space_for(size, kept))}", remedy)
    return f"{text}, {kept} at a time"


@check("job", "run directory", _NO_ANSWER, 3.0)
def run_directory(machine: CheckedMachine) -> Problems:
    """Yields whether the job resumes, begins, or is refused in its run directory."""
    directory = machine.run_directory
    try:
        newest = directory.resume_from(machine.job)
    except (JobError, CheckpointError, RunError) as problem:
        text, _, rest = str(problem).partition("; ")
        yield error(" ".join(text.split()), " ".join(rest.split())[:500] or "choose another run.name")
        return
    except OSError as problem:
        yield error(f"{directory.path}: {problem.strerror}", "choose another run.dir")
        return
    if newest is None:
        return f"{directory.path}: training begins at step 0"
    if newest.step >= machine.job.train.steps:
        return f"{directory.path}: finished at step {newest.step}"
    return f"{directory.path}: training resumes at step {newest.step} of {machine.job.train.steps}"


@check("job", "trackers")
def trackers(machine: CheckedMachine) -> Problems:
    """Yields whether the job's trackers are installed here, if it has any."""
    names = machine.job.run.trackers
    for name in names:
        if problem := next(missing([name]), ""):
            text, _, remedy = problem.partition(": pip")
            yield error(text, f"pip{remedy}")
        else:
            yield ok(f"{name} is installed")


_PATIENCE = 1.5
_SERVER = "its server does not answer: set run.dir to another file system, or tell the administrator"
_SLOW_FSYNC_S = 1.0
_MAX_SKEW_S = 2.0
_FEW_INODES, _LEAST_INODES = 10_000, 200
_LITTLE_SPACE = 2**30
_ELSEWHERE = "set run.dir to a folder on another file system"
_NO_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "fuse")
"""Beginnings of the types of file systems that several nodes can mount."""
_WEAK = ("9p", "cifs", "smb3", "vboxsf", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "vfat", "exfat")
"""File systems without some of what a run relies on, or across a slow link."""


def mounted(machine: CheckedMachine) -> str:
    """Returns the folder of the run, and its file system."""
    kind, source, _ = mount_of(machine.folder, machine.read(str(MOUNTS)))
    return f"{machine.folder} on {kind} ({source})"


def nearest_folder(path: Path) -> Path:
    """Returns the path, or the first folder above it that exists."""
    path = Path(os.path.abspath(path))
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@check("storage", "file system", _SERVER, _PATIENCE, mounted)
def file_system(machine: CheckedMachine) -> Problems:
    folder = machine.folder
    kind, source, options = mount_of(nearest_folder(folder).resolve(), machine.read(str(MOUNTS)))
    text = f"{folder}: {kind} ({source})"
    if kind in _IN_MEMORY:
        yield warn(f"{text}, in memory: checkpoints are gone after a restart of the machine", _ELSEWHERE)
    elif kind == "overlay":
        yield warn(
            f"{text}, a container's own layer: it goes with the container", "mount a volume, and set run.dir to it"
        )
    elif kind in _WEAK:
        yield warn(f"{text}: slow, or without reliable renames and locks", _ELSEWHERE)
    elif kind.startswith("nfs") and options & {"nolock", "local_lock=all", "local_lock=flock"}:
        yield warn(f"{text} with locks that other nodes do not see", "mount it without nolock and local_lock")
    elif kind == LUSTRE and "flock" not in options:
        yield warn(f"{text} without locks across nodes", "mount it with -o flock")
    elif machine.several_nodes and not machine.is_compared and not kind.startswith(_SHARED):
        yield warn(f"{text}: perhaps a disk of this node alone", "set run.dir to a file system that all nodes mount")
    return text


@check("storage", "striping", _SERVER, _PATIENCE, mounted)
def striping(machine: CheckedMachine) -> Problems:
    """Yields what file systems the run and its token shards are on, and on Lustre how new files are striped."""
    shown: list[str] = []
    for folder in dict.fromkeys((machine.folder, Path(machine.job.data.dir).expanduser())):
        there = nearest_folder(folder).resolve()
        kind = mount_of(there, machine.read(str(MOUNTS)))[0]
        if kind != LUSTRE:
            shown.append(f"{folder}: {kind}")
            continue
        try:
            layout, targets = (machine.call(["lfs", *words, str(there)]) for words in (("getstripe", "-d"), ("osts",)))
        except OSError:
            problem, layout, targets = "there is no lfs on PATH", None, None
        else:
            problem = next((ran.err.strip()[-200:] or "no answer" for ran in (layout, targets) if ran.code != 0), "")
        if problem or not layout or not targets:
            yield warn(
                f"{folder}: {kind}, and its striping is neither seen nor set: {problem}",
                "put Lustre's lfs on PATH, or set the stripes of large checkpoints: lfs setstripe -c 8 FOLDER",
            )
        else:
            known = counted(targets_in(targets.out), "storage target")
            shown.append(f"{folder}: {kind}, {striping_in(layout.out)}, {known}")
    return "; ".join(shown)


@check("storage", "writes", _SERVER, _PATIENCE, mounted)
def writes(machine: CheckedMachine) -> Problems:
    """Yields whether files are created exclusively, written durably, renamed atomically, and dated by our clock."""
    folder = machine.folder
    try:
        scratch = _scratch(folder)
    except OSError as problem:
        yield error(f"{folder} cannot be written: {problem.strerror}", _ELSEWHERE)
        return
    try:
        return (yield from _writes(scratch))
    except OSError as problem:
        yield error(f"{folder}: {problem.strerror or problem} ({problem.filename})", _ELSEWHERE)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(folder: Path) -> Path:
    scratch = nearest_folder(folder) / f".phalanx-doctor-{secrets.token_hex(6)}"
    scratch.mkdir(0o700)
    return scratch


def _writes(scratch: Path) -> Problems:
    path = scratch / "file"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    else:
        yield error("a file was created twice (O_EXCL has no effect): two runs may take one directory", _ELSEWHERE)
    before, began = time.time(), time.monotonic()
    write_atomic(path, b"new" * 1000)
    took = time.monotonic() - began
    if path.read_bytes() != b"new" * 1000 or os.listdir(scratch) != ["file"]:
        yield error("a file renamed over another one was not replaced by it", _ELSEWHERE)
    sync(scratch)
    skew = path.stat().st_mtime - before
    if abs(skew) > took + _MAX_SKEW_S:
        yield warn(
            f"the file system's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
            "set the clocks by NTP (chronyc tracking)",
        )
    if took > _SLOW_FSYNC_S:
        yield warn(f"fsync of a small file takes {seconds(took)}", "expect slow checkpoints; " + _ELSEWHERE)
    return f"exclusive create, fsync ({seconds(took)}), atomic rename, clock within {abs(skew):.1f} s"


@check("storage", "locks", _SERVER, _PATIENCE, mounted)
def locks(machine: CheckedMachine) -> Problems:
    """Yields whether a lock of one process (flock) keeps another one out."""
    folder = machine.folder
    slower = "a run then tells by heartbeats who has its directory, which takes up to 15 s; " + _ELSEWHERE
    try:
        scratch = _scratch(folder)
    except OSError:
        return  # `writes` says so
    try:
        with (scratch / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ran = machine.call([machine.python, "-I", "-S", "-c", _NO_LOCK, str(scratch / "lock")])
    except OSError as problem:
        if problem.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            yield warn(f"no locks (flock): {problem.strerror}", slower)
        else:
            yield error(f"locking a file failed: {problem.strerror}", _ELSEWHERE)
        return
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if ran.code == 3:
        yield ok("flock keeps a second process out")
    elif ran.code == 0:
        yield warn("flock does not keep a second process out", slower)
    else:
        yield error(f"a second process could not try the lock: {ran.err.strip()[-200:] or 'no answer'}", _ELSEWHERE)


@check("storage", "space", _SERVER, _PATIENCE, mounted)
def space(machine: CheckedMachine) -> Problems:
    """Yields free space and free inodes; a job's checkpoints are compared with it by the group `job`."""
    folder = machine.folder
    found = os.statvfs(nearest_folder(folder))
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{gib(free)} free of {gib(size)}"
    if not found.f_files:  # btrfs and others have as many as fit
        inodes = ""
    else:
        inodes = f", {found.f_favail:,} inodes"
        if found.f_favail < _LEAST_INODES:
            yield error(f"{text}{inodes}: no room for new files", "delete small files, or " + _ELSEWHERE)
            return
        if found.f_favail < _FEW_INODES:
            yield warn(f"{text}{inodes}", "delete small files, or " + _ELSEWHERE)
            return
    if free < _LITTLE_SPACE:
        yield warn(f"{text}{inodes}", "free some space, or " + _ELSEWHERE)
    return f"{text}{inodes} (quotas are not seen)"


@check("storage", "umask", _SERVER, _PATIENCE)
def umask(machine: CheckedMachine) -> Problems:
    """Yields whether the owner may read and write what he creates."""
    found = re.search(r"^Umask:\s+([0-7]+)$", machine.read("/proc/self/status"), flags=re.MULTILINE)
    mask = int(found[1], 8) if found else 0o022
    if mask & 0o700:
        yield error(f"umask {mask:04o} takes the owner's own rights", "umask 022")
    return f"{mask:04o}"


@check("storage", "leftovers", _SERVER, _PATIENCE, mounted)
def leftovers(machine: CheckedMachine) -> Problems:
    """Yields what earlier runs left in the run directory, and processes that outlived their launcher."""
    directory = machine.run_directory
    if machine.has_job:
        yield from _of_directory(directory.path)
    if orphans := _orphans(machine):
        yield warn(
            f"ranks of an earlier run that outlived their launcher: process {', '.join(map(str, orphans[:8]))}",
            f"look at them (ps -fp {orphans[0]}), and end them: kill {' '.join(map(str, orphans[:8]))}",
        )
    return "none"


def _of_directory(path: Path) -> Iterator[CheckResult]:
    if links := [name for name in ENTRIES if (path / name).is_symlink()]:
        yield error(f"{path} holds links, through which nothing is written: {', '.join(links)}", "remove them")
    holder = _holder(path / LOCK)
    if holder is not None and holder.is_gone:
        yield ok(f"{path / LOCK} names {holder}, which has ended: the next run takes the lock")
    elif holder is not None:
        where = "" if holder.is_here else f"; if it has ended, delete {path / LOCK}"
        yield warn(f"{path} is in use by {holder}", f"wait for it, or choose another run.name{where}")
    half = []
    for folder in (path, path / "checkpoints"):
        with suppress(OSError):
            half += [
                name
                for name in sorted(os.listdir(folder))
                if (name.startswith(REMOVED) or (name.startswith(".") and (TEMPORARY in name)))
            ]
    if half:
        shown = ", ".join(half[:4]) + (", …" if len(half) > 4 else "")
        yield ok(f"{counted(len(half), 'file')} of interrupted saves, removed by the next save: {shown}")


def _holder(path: Path) -> Holder | None:
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except (OSError, RunError):
        return None
    try:
        return Holder.read(descriptor)
    finally:
        os.close(descriptor)


def _orphans(machine: CheckedMachine) -> list[int]:
    """Returns processes of this user that are ranks of a run, and whose launcher has ended: their parent is the first
    process."""
    found = []
    for name in machine.names_in("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        words = machine.read(f"/proc/{name}/cmdline").split("\0")
        if "phalanx.cli.rank" not in words:
            continue
        status = dict(re.findall(r"^(PPid|Uid):\s+([0-9]+)", machine.read(f"/proc/{name}/status"), flags=re.MULTILINE))
        if status.get("PPid") == "1" and status.get("Uid") == str(os.getuid()):
            found.append(int(name))
    return found
