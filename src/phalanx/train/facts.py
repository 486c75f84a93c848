"""What all ranks must have in common and can be told without torch: the job's fields, the program's source files, and
the installed packages that extend it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import phalanx
from phalanx.check.load import as_dict
from phalanx.config.fields import leaves
from phalanx.config.job import Job
from phalanx.registry import installed

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
        if not path.startswith(MAY_DIFFER)
    }


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
