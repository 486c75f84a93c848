"""The checkpoints of a run: which are whole, which are kept, and what `phalanx checkpoint` lists, shows and verifies.
Imports no torch.

A checkpoint is whole by its manifest, sizes and digests. Kept are the newest ones, every N-th step's, and the best.
Only whole ones count: a damaged one never displaces a good one. Removal renames first, so that every directory named
step-NNNNNN is either whole or was damaged from outside.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Generic, Literal, TypeVar

import xxhash

from phalanx.bounded import open_regular, read_bytes
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.manifest import MANIFEST, Manifest, job_of, problems
from phalanx.data.files import sync
from phalanx.echo import echo
from phalanx.errors import CheckpointError, DamagedCheckpointError, NotFoundError
from phalanx.nearest import no_run

REMOVED = ".removed-"
"""Prefix of directories that are being deleted."""


def rename(path: Path, target: Path) -> None:
    """Renames a file or directory within its parent directory, durably."""
    path.rename(target)
    sync(target.parent)


def set_aside(path: Path, prefix: str) -> Path:
    """Renames `path` to PREFIX + NAME-1, or -2, ..., the first that is free. Returns the new path."""
    for number in itertools.count(1):
        target = path.with_name(f"{prefix}{path.name}-{number}")
        if not target.exists():
            rename(path, target)
            return target
    raise AssertionError("there is always a free number")


def remove(path: Path) -> None:
    """Deletes a directory. It is renamed first, so that an interrupted removal leaves no half of it under its name."""
    hidden = path if path.name.startswith(REMOVED) else set_aside(path, REMOVED)
    shutil.rmtree(hidden)


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


log = logging.getLogger(__name__)

DAMAGED = ".damaged-"
"""Prefix of damaged checkpoints that gave way to a new one of the same step."""

T = TypeVar("T")


def space_for(need: int, checkpoints: int = 1) -> float:
    """Returns the free bytes that so many checkpoints of `need` bytes ask for, with their manifests."""
    return checkpoints * need * 1.01 + 2**20


@dataclass(frozen=True)
class Retention:
    """The policy of one job."""

    keep: int = 0
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps divisible by it are kept for ever; 0: none."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss."""
    uploading: int | None = None
    """The step of a checkpoint that stays since it is being copied elsewhere."""

    def expired(self, whole: Sequence[WholeCheckpoint[T]], damaged: Sequence[tuple[int, T]]) -> list[T]:
        """Returns the places of the checkpoints that are not kept. `whole` begins with the newest; `damaged` ones, each
        with its step, go once they are older than the `keep` newest whole ones."""
        if not self.keep or len(whole) < self.keep:
            return []
        oldest = whole[self.keep - 1].step
        best = _best(whole) if self.keep_best else None
        old = [
            checkpoint.place
            for checkpoint in whole[self.keep :]
            if checkpoint is not best and checkpoint.step != self.uploading and not self.is_permanent(checkpoint.step)
        ]
        return old + [place for step, place in damaged if step < oldest]

    def is_permanent(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is kept for ever."""
        return self.keep_every > 0 and step % self.keep_every == 0


@dataclass(frozen=True)
class WholeCheckpoint(Generic[T]):
    """What decides whether a checkpoint is kept."""

    place: T
    step: int
    val_loss: float | None
    """The validation loss that was measured at this very step."""


def remove_expired(root: Path, policy: Retention) -> None:
    """Removes the checkpoints in `root` that `policy` does not keep. A failure is logged: the run is not at risk."""
    try:
        for path in expired(root, policy):
            remove(path)
    except OSError as error:
        log.warning("an old checkpoint could not be removed: %s", error)


@dataclass(frozen=True)
class SurveyedCheckpoint:
    """A directory that is, or was, a checkpoint."""

    step: int
    path: Path
    manifest: Manifest | None
    """The manifest, if the checkpoint is whole."""
    error: CheckpointError | None = None
    """Why it is not."""

    @property
    def damaged(self) -> bool:
        """True if it is not whole, and not another version's."""
        return isinstance(self.error, DamagedCheckpointError)


def survey(root: Path) -> list[SurveyedCheckpoint]:
    """Returns all checkpoints in `root`, the newest (highest step) first, with those that gave way to another of their
    step at the end. Digests are not checked."""
    found: list[SurveyedCheckpoint] = []
    for step, path in by_age(root):
        try:
            found.append(SurveyedCheckpoint(step, path, check(path, verify=False)))
        except CheckpointError as error:
            found.append(SurveyedCheckpoint(step, path, None, error))
    gave_way = DamagedCheckpointError("it was damaged and gave way to a new checkpoint of its step")
    return found + [
        SurveyedCheckpoint(int(match[1]), path, None, gave_way) for path, match in _set_aside(root) if match
    ]


def expired(root: Path, policy: Retention) -> list[Path]:
    """Returns the checkpoints in `root` that `policy` does not keep."""
    return expired_of(survey(root), policy)


def expired_of(found: Sequence[SurveyedCheckpoint], policy: Retention) -> list[Path]:
    """Returns which of the surveyed checkpoints `policy` does not keep. Those of other versions of the program stay."""
    return policy.expired(_whole(found), [(each.step, each.path) for each in found if each.damaged])


def best_path(found: Sequence[SurveyedCheckpoint]) -> Path | None:
    """Returns the whole checkpoint with the lowest validation loss; None if none was validated."""
    best = _best(_whole(found))
    return best.place if best else None


def _whole(found: Sequence[SurveyedCheckpoint]) -> list[WholeCheckpoint[Path]]:
    return [WholeCheckpoint(each.path, each.step, val_loss_of(each.manifest)) for each in found if each.manifest]


def val_loss_of(manifest: Manifest) -> float | None:
    """Returns the validation loss that was measured at a checkpoint's own step, if it was."""
    loss = manifest.meta.get("val_loss")
    return loss if manifest.meta.get("val_step") == manifest.step and isinstance(loss, float) else None


def remove_leftovers(root: Path) -> None:
    """Deletes the remains of interrupted saves and removals: only one save at a time works in a run's directory."""
    for pattern in (".step-*.tmp-*", f"{REMOVED}*"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in root.parent.glob(".latest.*.tmp"):
        path.unlink(missing_ok=True)


def _set_aside(root: Path) -> list[tuple[Path, re.Match[str] | None]]:
    pattern = re.escape(DAMAGED) + r"step-([0-9]+)-[0-9]+"
    return [(path, re.fullmatch(pattern, path.name)) for path in root.glob(f"{DAMAGED}*")]


def _best(whole: Sequence[WholeCheckpoint[T]]) -> WholeCheckpoint[T] | None:
    """Returns the checkpoint with the lowest validation loss, the older of two equal ones."""
    losses = {
        number: checkpoint.val_loss
        for number, checkpoint in enumerate(whole)
        if checkpoint.val_loss is not None and math.isfinite(checkpoint.val_loss)
    }
    return whole[min(losses, key=lambda number: (losses[number], -number))] if losses else None


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
    if os.path.exists(path / "config.yaml"):
        raise NotFoundError(f"{path} has no checkpoint yet; it writes one at its end, or every checkpoint.every steps")
    raise NotFoundError(f"no checkpoints in {path}: it is neither a run's directory nor a folder of step-NNNNNN")


_DCP = ".metadata"
"""The file of a checkpoint of torch's DCP that says what the others hold."""


def form_of(path: Path) -> Literal["checkpoint", "safetensors", "dcp"]:
    """Returns the form of what is at `path`: a checkpoint, also that of a run or a folder, consolidated safetensors, or
    a checkpoint of torch's DCP. Raises CheckpointError for a part of one, and for a folder of several."""
    # A run that was tuned by preferences has safetensors of its own, too.
    if os.path.isfile(path / MANIFEST) or os.path.isdir(path / "checkpoints"):
        return "checkpoint"
    if os.path.isfile(path / _DCP):
        return "dcp"
    folder = os.path.isdir(path)
    if path.suffix == ".distcp" and os.path.isfile(path):
        raise CheckpointError(f"{path} is one file of a checkpoint of torch's DCP: name its folder, {path.parent}")
    if folder and (parts := sorted(path.glob("*.distcp"))):
        raise DamagedCheckpointError(
            f"{path} holds {len(parts)} files of a checkpoint of torch's DCP, such as {parts[0].name}, and no {_DCP}, "
            "which is written last: it was not saved to its end, or not copied as a whole"
        )
    shards = [each for each in path.glob("*.safetensors") if not each.name.startswith("rank-")] if folder else []
    if not shards and (inside := sorted(path.glob(f"*/{_DCP}"))):
        names = ", ".join(str(each.parent) for each in inside[:5]) + ", ..." * (len(inside) > 5)
        raise CheckpointError(f"{path} is a folder of checkpoints of torch's DCP: name one of them, {names}")
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
