"""Installs an example as pip would: its module beside the metadata of a package with an entry point."""

from __future__ import annotations

import os
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
