"""Which checkpoints are whole: the manifest, the sizes and the digests of the shard files. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from phalanx.bounded import open_regular
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.manifest import Manifest
from phalanx.echo import echo
from phalanx.errors import CheckpointError, DamagedCheckpointError

CHUNK_BYTES = 2**20
"""Bytes that are read and hashed at a time."""


def directory_of(root: Path, step: int) -> Path:
    """Returns the directory of the checkpoint after `step` steps."""
    return root / name_of(step)


def name_of(step: int) -> str:
    """Returns the name of the checkpoint after `step` steps: step-000100."""
    return f"step-{step:06d}"


def check(path: Path, verify: bool = True) -> Manifest:
    """Reads a checkpoint's manifest and checks the shard files' sizes, and with `verify` their digests.

    Raises DamagedCheckpointError that names the file at fault; CheckpointError if another version of the program wrote
    the checkpoint.
    """
    manifest = manifests.read(path)
    if not manifest.finite:
        raise DamagedCheckpointError(f"checkpoint {path} was not checked for NaN and infinity before it was saved")
    for name in manifest.files:
        if wrong := size_problem(manifest, name):
            raise DamagedCheckpointError(wrong)
    if verify:
        check_digests(manifest, manifest.files)
    return manifest


def check_digests(manifest: Manifest, names: Iterable[str]) -> None:
    """Checks the digests of some of a checkpoint's shard files. Raises DamagedCheckpointError that names the file."""
    for name in names:
        if wrong := digest_problem(manifest, name):
            raise DamagedCheckpointError(wrong)


def size_problem(manifest: Manifest, name: str) -> str:
    """Returns why a shard file cannot be whole, by its size; nothing if it has the right one."""
    file, expected = manifest.path / name, manifest.files[name].bytes
    if not file.is_file():
        return f"checkpoint file {file} is missing"
    size = file.stat().st_size
    return f"checkpoint file {file} has {size} bytes, its manifest says {expected}" if size != expected else ""


def digest_problem(manifest: Manifest, name: str, progress: Callable[[int], None] = lambda _: None) -> str:
    """Returns why a shard file is corrupt, by its digest; nothing if it is not. `progress` gets the size of every chunk
    that was read."""
    file, expected = manifest.path / name, manifest.files[name].digest
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with open_regular(file) as stream:
            while size := stream.readinto(buffer):
                digest.update(buffer[:size])
                progress(size)
    except OSError as error:
        return f"checkpoint file {file} cannot be read: {error}"
    if digest.hexdigest() != expected:
        return f"checkpoint file {file} does not match its digest {expected[:12]}…: it is corrupt"
    return ""


def newest_valid(
    root: Path, verify: bool = True, report: Callable[[str], None] = echo, before: int | None = None
) -> Manifest | None:
    """Returns the newest checkpoint that is whole (if given, of a step below `before`), or None if there is none at
    all. Damaged ones are reported.

    Raises CheckpointError if there are checkpoints and every one of them is damaged.
    """
    wrong = ""
    for step, path in by_age(root):
        if before is not None and step >= before:
            continue
        try:
            return check(path, verify)
        except CheckpointError as error:
            wrong = str(error)
            report(f"{error}; trying the one before it")
    if wrong:
        raise CheckpointError(f"no checkpoint in {root} is whole; the oldest: {wrong}")
    return None


def by_age(root: Path) -> list[tuple[int, Path]]:
    """Returns step and path of the checkpoints in `root`, whole or not, the newest (highest step) first."""
    named = {path: re.fullmatch(r"step-([0-9]+)", path.name) for path in root.glob("step-*")}
    return sorted(((int(match[1]), path) for path, match in named.items() if match), reverse=True)
