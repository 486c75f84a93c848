"""torch's profiler, and the files that it writes: shared by profiles of runs and by `phalanx test-dist`."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.data.files import write_atomic
from phalanx.errors import RunError


def profiler(device: torch.device, *, memory: bool = False) -> profile:
    """Returns a profiler of a rank's device, and with `memory` of its allocations; a context manager."""
    activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper())}
    return profile(activities=activities, profile_memory=memory)


def exported(done: profile) -> bytes:
    """Returns the trace of a profiler that has stopped, as JSON. Raises OSError if the temporary folder has no
    space."""
    with tempfile.TemporaryDirectory() as folder:  # the profiler would follow a link
        path = Path(folder) / "trace.json"
        done.export_chrome_trace(str(path))
        return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    """Writes a file of a profile, compressed if its name ends in .gz. Makes its folder; a link in the file's place is
    replaced, not followed. Raises OSError, and RunError if the folder is a link."""
    if path.parent.is_symlink():
        raise RunError(f"{path.parent} is a link, and nothing is written through it; remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)
