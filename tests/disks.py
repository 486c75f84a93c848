"""Filesystems of a test: small ones that become full, and ones that nobody can write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.data import files


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mounts a tmpfs at a new folder, such as `size=64k`. Skips the test where that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "phalanx-test", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills the filesystem of a folder, and returns the file that does."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


LFS = """#!{python} -S
import sys
with open({calls!r}, "a") as file:
    print(*sys.argv[1:], file=file)
if sys.argv[1] == "osts":
    print("OBDS:", *["%d: x-OST%04x_UUID ACTIVE" % (n, n) for n in range(16)], "16: x-OST0010_UUID INACTIVE", sep="\\n")
elif sys.argv[1] == "getstripe":
    print("stripe_count:  4 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1")
elif {refuses}:
    sys.exit("setstripe: Operation not permitted")
"""


def lustre(folder: Path, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> Path:
    """Makes a folder seem to be on Lustre, with a stand-in for `lfs` in PATH. Returns the file of its calls."""
    mounts, programs, calls = folder / ".mounts", folder / ".bin", folder / ".calls"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:5 / {folder} rw - lustre mds:/x rw,flock\n")
    monkeypatch.setattr(files, "MOUNTS", mounts)
    programs.mkdir()
    (programs / "lfs").write_text(LFS.format(python=sys.executable, calls=str(calls), refuses=refuses))
    (programs / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    calls.touch()
    return calls
