"""Which checkpoints are kept: the newest ones, every N-th step's, and the best. Imports no torch.

Only whole checkpoints count, by manifest and sizes: a damaged one never displaces a good one. Removal renames first, so
that every directory named step-NNNNNN is either whole or was damaged from outside.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from phalanx.checkpoint import files
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.validity import by_age, check
from phalanx.errors import CheckpointError, DamagedCheckpointError

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
            files.remove(path)
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
    for pattern in (".step-*.tmp-*", f"{files.REMOVED}*"):
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
