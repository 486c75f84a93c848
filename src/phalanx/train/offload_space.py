"""Whether the disks of a run's hosts have room for the state that their ranks put into files."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from phalanx.comm.axis import Axis
from phalanx.errors import JobError
from phalanx.units import gib


def require_space(folder: Path, need: int, world: Axis) -> None:
    """Raises JobError on all ranks if a folder is missing or not writable, or if the ranks on a disk need more than it
    has. A collective of all ranks; each needs `need` bytes."""
    found = world.gather_json([platform.node(), *_disk(folder), need])
    problems: dict[str, None] = {}
    disks: dict[tuple[str, int], tuple[int, int]] = {}
    for host, device, free, problem, size in found:
        if problem:
            problems[f"layout.offload_to: {folder} on {host} {problem}"] = None
        disks[host, device] = free, disks.get((host, device), (0, 0))[1] + size
    for (host, device), (free, size) in disks.items():
        if device and size > free:
            problems[
                f"layout.offload_to: the disk of {folder} on {host} has {gib(free)} free, and its ranks' optimizer "
                f"state needs {gib(size)}: free some space, name a larger disk, or share the state among more ranks "
                "(zero=1, layout.dp_shard)"
            ] = None
    if problems:
        raise JobError(list(problems))


def _disk(folder: Path) -> tuple[int, int, str]:
    """Returns the number of a folder's disk, 0 without a usable folder, its free bytes, and what is wrong."""
    try:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist: make it, on a fast local disk"
            return 0, 0, what
        if not os.access(folder, os.W_OK | os.X_OK):
            return 0, 0, "cannot be written: name a folder of your own"
        space = os.statvfs(folder)
        return folder.stat().st_dev, space.f_bavail * space.f_frsize, ""
    except OSError as error:
        return 0, 0, f"cannot be used: {error.strerror or error}"
