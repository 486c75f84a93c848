"""The checkpoints of a run as `phalanx checkpoint` lists, shows and verifies them. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from phalanx.bounded import read_bytes
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.meta import job_of, problems
from phalanx.checkpoint.retention import Retention, SurveyedCheckpoint, best_path, expired_of, survey, val_loss_of
from phalanx.checkpoint.validity import by_age, digest_problem, directory_of, newest_valid, size_problem
from phalanx.errors import CheckpointError, NotFoundError
from phalanx.nearest import no_run

HASHING_THREADS = 4
"""Files that are hashed at a time, on as many cores: their digests keep up with the disk."""


def root_of(path: Path) -> Path:
    """Returns the folder of checkpoints at `path`, which is a run's directory or that folder itself. Raises
    CheckpointError if there is none."""
    for root in (path / "checkpoints", path):
        if os.path.isdir(root) and (root != path or by_age(root)):
            return root
    if not os.path.exists(path):
        raise NotFoundError(no_run(path, "nothing"))
    raise NotFoundError(f"no checkpoints in {path}: it is neither a run's directory nor a folder of step-NNNNNN")


def form_of(path: Path) -> Literal["checkpoint", "safetensors", "dcp"]:
    """Returns the form of what is at `path`: a checkpoint, also that of a run or a folder, consolidated safetensors, or
    a checkpoint of torch's DCP."""
    if os.path.isfile(path / MANIFEST):
        return "checkpoint"
    if os.path.isfile(path / ".metadata"):
        return "dcp"
    folder = os.path.isdir(path)
    shards = [each for each in path.glob("*.safetensors") if not each.name.startswith("rank-")] if folder else []
    return "safetensors" if shards or (not folder and path.name.endswith(".safetensors")) else "checkpoint"


def checkpoint_at(path: Path, step: int = 0) -> Path:
    """Returns the directory of a checkpoint: `path` itself, or the one of `step` (0: the newest whole one, by the sizes
    of its files) of the run or folder at `path`. Raises CheckpointError if there is none."""
    if os.path.isfile(path / MANIFEST):
        if step and manifests.read(path).step != step:
            raise CheckpointError(f"{path} is the checkpoint of another step than {step}")
        return path
    root = root_of(path)
    if not step:
        newest = newest_valid(root, verify=False, report=lambda _: None)
        if newest is None:
            raise CheckpointError(f"{path} has no checkpoint yet")
        return newest.path
    found = directory_of(root, step)
    if not os.path.isdir(found):
        steps = [str(each) for each, _ in by_age(root)]
        more = f", and {len(steps) - 10} older ones" if len(steps) > 10 else ""
        raise NotFoundError(f"{root} has no checkpoint of step {step}; there are: {', '.join(steps[:10])}{more}")
    return found


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a listing."""

    found: SurveyedCheckpoint
    age_s: float | None
    """Seconds since it was committed; None if that cannot be told."""
    bytes: int
    """Bytes of its files on the disk."""
    layout: str
    """The job's layout in one line; empty if it cannot be read."""
    val_loss: float | None
    """The validation loss of its step."""
    notes: tuple[str, ...]
    """Of "latest", "best", "permanent", "expired": what holds for it."""


@dataclass(frozen=True)
class Listing:
    """All checkpoints of a run."""

    root: Path
    checkpoints: tuple[Listed, ...]
    policy: Retention | None
    """The retention of the newest whole checkpoint's job."""
    unfinished: tuple[Path, ...]
    """Directories of saves that go on, or were interrupted."""


def listing(path: Path) -> Listing:
    """Returns the checkpoints of the run or folder at `path`, the newest first. Digests are not checked. Raises
    CheckpointError if there is no such folder."""
    root = root_of(path)
    found = survey(root)
    whole = [each.manifest for each in found if each.manifest]
    best, policy = best_path(found), _policy(whole)
    expired = set(expired_of(found, policy)) if policy else set()
    latest = _latest(root)

    def notes(each: SurveyedCheckpoint) -> tuple[str, ...]:
        holds = {
            "latest": each.path == latest,
            "best": each.path == best,
            "permanent": bool(policy and each.manifest and policy.is_permanent(each.step)),
            "expired": each.path in expired,
        }
        return tuple(name for name, true in holds.items() if true)

    unfinished = tuple(sorted(root.glob(".step-*.tmp-*")))
    return Listing(root, tuple(_listed(each, notes(each)) for each in found), policy, unfinished)


def _listed(found: SurveyedCheckpoint, notes: tuple[str, ...]) -> Listed:
    manifest = found.manifest
    return Listed(
        found,
        age_of(found.path),
        bytes_in(found.path),
        layout_of(manifest) if manifest else "",
        val_loss_of(manifest) if manifest else None,
        notes,
    )


def layout_of(manifest: Manifest) -> str:
    """Returns the layout of a checkpoint's job in one line."""
    try:
        return job_of(manifest).layout.line() or "one process"
    except CheckpointError:
        return "unknown"


def precision_of(manifest: Manifest) -> str:
    """Returns the precision of a checkpoint's job."""
    try:
        return job_of(manifest).train.precision
    except CheckpointError:
        return "unknown"


def age_of(checkpoint: Path) -> float | None:
    """Returns the seconds since a checkpoint was committed; None if it has no manifest."""
    try:
        return max(0.0, time.time() - os.stat(checkpoint / MANIFEST).st_mtime)
    except OSError:
        return None


def bytes_in(folder: Path) -> int:
    """Returns the bytes of the files in a folder."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return 0


def _policy(whole: list[Manifest]) -> Retention | None:
    try:
        options = job_of(whole[0]).checkpoint if whole else None
    except CheckpointError:
        return None
    return Retention(options.keep, options.keep_every, options.keep_best) if options else None


def _latest(root: Path) -> Path | None:
    """Returns the checkpoint that the run's file `latest` names."""
    try:
        return root.parent / read_bytes(root.parent / "latest", 4096).decode().strip()
    except (OSError, ValueError):
        return None


def damage(path: Path, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Reads all of a checkpoint. Returns everything that is wrong with it: its manifest, every file's size and digest,
    and the values that resuming uses. `progress` gets the bytes of every chunk that was read, in several threads."""
    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return [str(error)]
    wrong = [f"checkpoint {path}: its metadata: {problem}" for problem in problems(manifest.meta)]
    if not manifest.finite:
        wrong.append(f"checkpoint {path} was not checked for NaN and infinity before it was saved")
    sizes = {name: size_problem(manifest, name) for name in manifest.files}
    wrong += filter(None, sizes.values())
    return wrong + digest_problems(manifest, [name for name, problem in sizes.items() if not problem], progress)


def digest_problems(
    manifest: Manifest, names: Iterable[str], progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Returns which of a checkpoint's files are corrupt, by their digests, several at a time. An interruption ends it
    at once."""
    stopped = Event()

    def count(size: int) -> None:
        if stopped.is_set():
            raise OSError("interrupted")
        progress(size)

    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as pool:
        running = [pool.submit(digest_problem, manifest, name, count) for name in names]
        left = set(running)
        try:
            while left:  # waiting in short steps, so that Ctrl-C is noticed
                _, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
        return [problem for each in running if (problem := each.result())]
