"""The file system that a path is on, and Lustre's striping: the number of storage targets (OSTs) that each new file of
a folder is spread over (`lfs setstripe`; Lustre Software Release 2.x Operations Manual, chapter 19).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Literal

from phalanx.units import counted, gib

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
