"""Checkpoints: safetensors files and a JSON manifest with sizes and digests. No pickle is written or read.

A checkpoint is written to a temporary directory, synced, and renamed; then the run's `latest` is replaced. So whenever
the machine dies, every directory named step-NNNNNN is whole, and `latest` names one of them. The digests detect flipped
bits, which no tensor format does by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, RunError
from phalanx.units import gib

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "phalanx-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's metadata."""

    path: Path
    step: int
    meta: dict[str, Any]
    """The trainer's metadata: the job, samples read, the loss scale, ..."""
    files: dict[str, dict[str, Any]]
    """{"model.safetensors": {"bytes": ..., "sha256": ...}}"""


def save(root: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], meta: dict[str, Any], keep: int) -> Path:
    """Writes root/step-NNNNNN, a safetensors file per group, then root/../latest; deletes all but the `keep` newest.

    An existing checkpoint of the same step is left as it is. Raises RunError if the disk is full or cannot be written;
    existing checkpoints stay whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = root / f"step-{step:06d}"
    if final.exists():
        return final
    temporary = root / f".{final.name}.tmp-{os.getpid()}"
    need = sum(t.numel() * t.element_size() for group in groups.values() for t in group.values())
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        _require_space(root, need)
        temporary.mkdir()
        files = {}
        for name, tensors in groups.items():
            file = temporary / f"{name}.safetensors"
            save_file({key: t.detach().contiguous().cpu() for key, t in tensors.items()}, file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "meta": meta, "files": files}
        manifest["digest"] = _manifest_digest(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        temporary.rename(final)
        _write_latest(root.parent / LATEST, f"{root.name}/{final.name}")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"checkpoint {final} could not be written: {error}; earlier checkpoints are untouched"
        ) from error
    for old in _by_age(root)[keep:] if keep else []:
        shutil.rmtree(old)
    return final


class Reader:
    """The tensors of one group of a checkpoint, read one at a time. A context manager.

    Raises CheckpointError, naming the file, if one cannot be read."""

    def __init__(self, manifest: Manifest, group: str):
        self.path = manifest.path
        self.file = manifest.path / f"{group}.safetensors"

    def __enter__(self) -> Reader:
        from safetensors import SafetensorError, safe_open

        try:
            self.tensors = safe_open(self.file, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint file {self.file} cannot be read: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        del self.tensors

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError

        try:
            return self.tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint file {self.file}: {name} cannot be read: {error}") from error

    def names(self) -> list[str]:
        """Returns the names of the group's tensors."""
        return list(self.tensors.keys())

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError with every name that is missing, extra or of another shape."""
        held = set(self.names())
        wrong = [f"{name} is missing" for name in shapes.keys() - held]
        wrong += [f"{name} is not in the model" for name in held - shapes.keys()]
        for name in shapes.keys() & held:
            there = tuple(self.tensors.get_slice(name).get_shape())
            if there != tuple(shapes[name]):
                wrong.append(f"{name} is {there} there and {tuple(shapes[name])} here")
        if wrong:
            raise CheckpointError(f"checkpoint {self.path} does not fit the model: {'; '.join(sorted(wrong))}")


def check(path: Path, verify: bool = True) -> Manifest:
    """Reads a checkpoint's manifest and checks the files' sizes, and with `verify` their digests.

    Raises CheckpointError that names the file at fault.
    """
    try:
        raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {path} has no {MANIFEST}: it is not a checkpoint, or an incomplete one"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of a Phalanx checkpoint")
    if raw.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {raw.get('version')}; this program reads {VERSION}"
        )
    if raw.pop("digest", None) != _manifest_digest(raw):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} does not match its own digest: it was changed")
    for name, facts in raw["files"].items():
        if Path(name).name != name:
            raise CheckpointError(f"checkpoint {path}: {MANIFEST} names {name!r}, a file outside its directory")
        _check_file(path / name, facts, verify)
    return Manifest(path, raw["step"], raw["meta"], raw["files"])


def newest_valid(root: Path, verify: bool = True, report: Callable[[str], None] = print) -> Manifest | None:
    """Returns the newest checkpoint that is whole, or None if there is none at all. Damaged ones are reported.

    Raises CheckpointError if there are checkpoints and every one of them is damaged.
    """
    wrong = ""
    for path in _by_age(root):
        try:
            manifest = check(path, verify)
        except CheckpointError as error:
            wrong = str(error)
            report(f"{error}; trying the one before it")
        else:
            return manifest
    if wrong:
        raise CheckpointError(f"no checkpoint in {root} is whole; the oldest: {wrong}")
    return None


def _by_age(root: Path) -> list[Path]:
    """Returns the checkpoints in `root`, the newest (highest step) first."""
    named = {path: re.fullmatch(r"step-(\d+)", path.name) for path in root.glob("step-*")}
    steps = {path: int(match[1]) for path, match in named.items() if match}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def _check_file(file: Path, facts: dict[str, Any], verify: bool) -> None:
    if not file.is_file():
        raise CheckpointError(f"checkpoint file {file} is missing")
    size = file.stat().st_size
    if size != facts["bytes"]:
        raise CheckpointError(f"checkpoint file {file} has {size} bytes, its manifest says {facts['bytes']}")
    if verify and _digest(file) != facts["sha256"]:
        raise CheckpointError(
            f"checkpoint file {file} does not match its sha256 {facts['sha256'][:12]}…: it is corrupt"
        )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _require_space(root: Path, need: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need * 1.01 + 2**20:
        raise OSError(f"it needs {gib(need)}, and {root} has {gib(free)} free")


def _remove_leftovers(root: Path) -> None:
    """Deletes the remains of a killed save: only one save at a time works in a run's directory."""
    for path in root.glob(".step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _write_latest(latest: Path, name: str) -> None:
    temporary = latest.with_name(f".{latest.name}.tmp")
    temporary.write_text(name + "\n", encoding="utf-8")
    _sync(temporary)
    temporary.replace(latest)
    _sync(latest.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
