"""Installs an example as pip would, its module beside a package's metadata with an entry point, and runs commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import phalanx
from phalanx.registry import GROUP

PACKAGES = Path(__file__).parent / "packages"


def install(folder: Path, module: str, *, version: str = "1.0", text: str | None = None) -> Path:
    """Puts a module and its metadata into a folder, and returns the folder. The module is an example of
    docs/reference/extending.md, or `text`."""
    source = (PACKAGES / f"{module}.py").read_text() if text is None else text
    metadata = folder / f"phalanx_{module}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: phalanx-{module.replace('_', '-')}\nVersion: {version}\n"
    )
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{module} = {module}:register\n")
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """Returns the environment of a command that finds the packages in these folders."""
    source = Path(phalanx.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, source]))}


def commands(at: Path, *installed: Path) -> Callable[..., str]:
    """Returns a function that runs a command of phalanx in a folder with packages installed, checks its exit code, and
    returns its standard output, or what `streams` says. `more` are installed, too; `alone`: nothing is."""

    def run(*words: str, code: int = 0, streams: str = "out", more: Sequence[Path] = (), alone: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "phalanx", *words],
            cwd=at,
            env={**environment(*more, *(() if alone else installed)), "PHALANX_HOME": str(at / "home")},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if streams == "out" else done.stderr

    return run
