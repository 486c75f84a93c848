"""The capabilities of this machine, and the mounts, groups and libraries that faults need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from benchmarks.report import machine as processor

_MEMORY = Path("/sys/fs/cgroup/memory")
_SHIM = Path(__file__).with_name("shim.c")


def facts() -> dict[str, object]:
    """Returns a description of this machine, its kernel and the program's version."""
    import phalanx

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        **processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": os.uname().release,
        "phalanx": phalanx.__version__,
        "commit": commit.stdout.strip() or None,
    }


@cache
def missing(capability: str) -> str:
    """Returns why this machine lacks a capability; empty if it has it."""
    return CAPABILITIES[capability]()


def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _namespaces() -> str:
    if reason := _root():
        return reason
    if not shutil.which("ip"):
        return "needs the program ip (iproute2)"
    name = f"chaos-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


def _compiler() -> str:
    return "" if _cc() else "needs a C compiler (gcc or cc)"


def _cgroup() -> str:
    return _root() or ("" if (_MEMORY / "memory.limit_in_bytes").exists() else "needs the memory group of cgroup v1")


CAPABILITIES = {"root": _root, "namespaces": _namespaces, "compiler": _compiler, "memory group": _cgroup}
"""Capability → a function that returns why it is missing."""


def _cc() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build_shim(folder: Path) -> Path:
    """Compiles shim.c into `folder`, once; returns the library."""
    library = folder / "shim.so"
    if not library.exists():
        draft = folder / f"shim.{os.getpid()}.so"
        compiler = _cc()
        assert compiler, "the caller has asked for the compiler"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(draft), str(_SHIM), "-ldl"], check=True)
        draft.rename(library)
    return library


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[None]:
    """Mounts an empty file system of `size` (as mount has it) at `folder`, for the length of a `with` block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes everything in `folder` read-only, also for root, for the length of a `with` block."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


class MemoryGroup:
    """A group of processes with a limit on memory. The kernel kills one of them where it is exceeded."""

    def __init__(self) -> None:
        self.folder = _MEMORY / f"chaos-{os.getpid()}"
        self.folder.mkdir(exist_ok=True)

    def take(self, pid: int, spare_mib: int) -> None:
        """Puts a process into the group, which allows `spare_mib` more: pages used before stay with the old group."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        (self.folder / "memory.limit_in_bytes").write_text(str(spare_mib * 2**20))

    def close(self) -> None:
        """Removes the group once its processes are gone."""
        with suppress(OSError):
            self.folder.rmdir()
