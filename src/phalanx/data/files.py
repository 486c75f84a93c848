"""Files that are written whole or not at all, locks, and the progress of long operations on standard error: a bar on a
terminal, otherwise an occasional plain line."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal

from phalanx.echo import echo, visible
from phalanx.errors import RunError
from phalanx.units import counted, gib, seconds

SPLITS: tuple[str, ...] = ("train", "val")
TOKEN_SHARD_TOKENS = 1 << 22
"""Tokens per shard of a corpus without text."""
TEMPORARY = ".tmp"
"""Suffix of files being written; a leftover belongs to a killed process."""


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file with `flags` of os.open and returns its descriptor. A new one has the mode that the umask
    allows, but is never written by everybody.

    Raises RunError if the path is a link, a FIFO or a device: whoever can create names in a shared folder could make a
    program write to any file of its user, or wait for ever. Raises OSError as os.open does.
    """
    try:
        # O_NONBLOCK: a FIFO without a reader must not block; regular files ignore it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o664)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise RunError(_not_regular(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(_not_regular(path))
    return descriptor


def _not_regular(path: Path) -> str:
    kind = "a link" if path.is_symlink() else "not a regular file"
    return f"{path} is {kind}, and nothing is written through it; remove it"


def sync(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` so that `path` holds either its old content or all of the new one, even after a crash. The file
    is a new one, as readable as the umask lets it be; a link at `path` is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of a killed process with the same number
    try:
        with open(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the rename itself must survive a power cut


@contextmanager
def locked(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path`; calls `waiting(holder's pid)` once if another process holds it.

    The kernel releases the lock when its holder dies, so a leftover lock file blocks nobody.
    """
    with path.open("a+", encoding="ascii", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            waiting(file.read(100).strip())
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


Progress = Callable[[str, int, int], None]
"""Callback with the current activity, the amount done, and the total; (text, 0, 0) only prints a message."""


LINE_AFTER_S = 2.0
"""Seconds between the first plain lines; later ones come after a fifth of the time so far."""


@contextmanager
def stderr_progress() -> Iterator[Progress]:
    """Provides a Progress that shows itself on standard error inside the `with` block."""
    if sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield _lines()


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing; a Progress for callers that want none."""


def meter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """Returns a function that adds an amount to what is done, and shows it. Threads may share it."""
    lock, done = Lock(), 0

    def add(amount: int) -> None:
        nonlocal done
        with lock:
            done = min(done + amount, total)
            progress(what, done, total)

    return add


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if not total:
                bars.console.print(visible(what), markup=False, highlight=False)
                return
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _lines() -> Progress:
    started: dict[str, float] = {}
    next_line: dict[str, float] = {}

    def show(what: str, done: int, total: int) -> None:
        if not total:
            echo(what, file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        began = started.setdefault(what, now)
        if done < total and (now < next_line.setdefault(what, began + LINE_AFTER_S) or 1000 * done < total):
            return  # "0%" says nothing
        if next_line.get(what) == math.inf:
            return
        share = done / total
        percent = f"{100 * share:.1f}" if share < 0.01 else 100 * done // total
        left = f" ({seconds((now - began) / share * (1 - share))} left)" if 0.01 <= share < 1 else ""
        echo(f"{what}: {percent}%{left}", file=sys.stderr, flush=True)
        next_line[what] = now + max(LINE_AFTER_S, (now - began) / 5) if done < total else math.inf

    return show


MOUNTS = Path("/proc/self/mountinfo")
LUSTRE = "lustre"
_LFS_S = 10.0
_STRIPE_BYTES = 2**30


def mount_of(path: Path, table: str | None = None) -> tuple[str, str, set[str]]:
    """Returns type, source and options of the file system that a path is on, from the kernel's table alone, which no
    file server can make hang. Links on the way are not resolved."""
    best: tuple[str, str, set[str]] = ("an unknown file system", "?", set())
    length = -1
    wanted = Path(os.path.abspath(path))
    for line in (MOUNTS.read_text(errors="replace") if table is None else table).splitlines():
        before, _, after = line.partition(" - ")
        fields, behind = before.split(), after.split()
        if len(fields) < 6 or len(behind) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if len(point.parts) >= length and wanted.is_relative_to(point):
            length = len(point.parts)
            best = behind[0], behind[1], {*fields[5].split(","), *behind[2].split(",")}
    return best


def auto_stripes(files: int, nbytes: int, targets: int) -> int:
    """Returns the stripes of each of `files` files of `nbytes` bytes together, which are written at the same time: one
    per GiB of a file, and at most so many that the files share the `targets` without meeting on one."""
    return max(1, min(-(-nbytes // files // _STRIPE_BYTES), targets // files))


def stripe(folder: Path, count: int | Literal["auto"], files: int, nbytes: int) -> str:
    """Sets the stripes of files that will be created in a folder, if it is on Lustre; 0 leaves those that it has.
    Returns what was done, or why it could not be, for people; nothing elsewhere. Raises nothing: striping is speed."""
    try:
        if not count or mount_of(folder.resolve())[0] != LUSTRE:
            return ""
        known = targets_in(_lfs("osts", str(folder)))
        if count == "auto" and not known:
            raise OSError("lfs osts lists no active storage targets")
        chosen = auto_stripes(files, nbytes, known) if count == "auto" else count
        _lfs("setstripe", "--stripe-count", str(chosen), str(folder))
    except (OSError, subprocess.SubprocessError) as error:
        return f"Lustre's own striping is used in {folder}: {getattr(error, 'strerror', None) or error}"
    return f"Lustre: {counted(chosen, 'stripe')} per file in {folder}, {counted(known, 'storage target')}"


def targets_in(text: str) -> int:
    """Returns the active storage targets that `lfs osts` has printed."""
    return len(re.findall(r"^\d+: \S+ ACTIVE", text, flags=re.MULTILINE))


def striping_in(text: str) -> str:
    """Returns the striping that `lfs getstripe -d` has printed of a folder."""
    sizes, counts = (re.findall(rf"stripe_{name}: *(-?\d+)", text) for name in ("size", "count"))
    shown = [f"stripe count {count} × {gib(int(size))}" for count, size in zip(counts, sizes, strict=False)]
    return ", then ".join(shown) or "an unknown striping"


def _lfs(*words: str) -> str:
    try:
        ran = subprocess.run(["lfs", *words], capture_output=True, text=True, timeout=_LFS_S, check=False)
    except FileNotFoundError:
        raise OSError("there is no lfs on PATH") from None
    if ran.returncode:
        raise OSError(f"lfs {words[0]} ended with exit code {ran.returncode}: {ran.stderr.strip()[-200:]}")
    return ran.stdout
