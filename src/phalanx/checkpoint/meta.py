"""A checkpoint's metadata: what resuming and generating use of it, with its types. Imports no torch.

Whoever can write a checkpoint can write its digests, and a program may have a bug: so types and ranges are checked
before anything uses the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.check.load import from_dict
from phalanx.checkpoint.manifest import Manifest
from phalanx.config.job import Job
from phalanx.errors import CheckpointError, JobError


def job_of(manifest: Manifest) -> Job:
    """Returns the job that wrote a checkpoint. Raises CheckpointError if this version cannot read it."""
    try:
        return from_dict(manifest.meta["job"], str(manifest.path))
    except (JobError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {manifest.path} was written by a job this program cannot read: {error}"
        ) from None


def require_resumable(manifest: Manifest) -> None:
    """Raises CheckpointError, with every problem, unless the metadata hold what a run needs to resume."""
    if "imported" in manifest.meta:
        raise CheckpointError(
            f"checkpoint {manifest.path} was imported, and is not of a training run: train from its weights with "
            f"model.from={manifest.path.parent.parent} and another run.name"
        )
    if missing := sorted(PROGRESS.keys() - manifest.meta.keys()):
        raise CheckpointError(f"checkpoint {manifest.path} is not of a training run: it lacks {', '.join(missing)}")
    if wrong := problems(manifest.meta):
        raise CheckpointError(f"checkpoint {manifest.path}: its metadata are not valid: {'; '.join(wrong)}")


def problems(meta: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the values that `meta` has, none of which needs to be there."""
    return [
        f"{name} is {_shown(meta[name])}, expected {expected}"
        for name, (expected, is_right) in {**PROGRESS, **OPTIONAL}.items()
        if name in meta and not is_right(meta[name])
    ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_loss_scale(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_count(value.get("good_steps")):
        return False
    scale = value.get("value")
    return isinstance(scale, int | float) and _is_number(scale) and math.isfinite(scale) and scale > 0


def _is_history(value: Any) -> bool:
    lists = {"losses": _is_number, "norms": _is_number, "interventions": _is_count}
    return (
        isinstance(value, dict)
        and _is_count(value.get("steps"))
        and all(isinstance(value.get(name), list) and all(map(kind, value[name])) for name, kind in lists.items())
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


PROGRESS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "job": ("an object", lambda value: isinstance(value, dict)),
    "samples": ("a count", _is_count),
    "updates": ("a count", _is_count),
    "replicas": ("a count of at least 1", lambda value: _is_count(value) and value > 0),
    "loss_scale": ("an object with a positive value and the count good_steps", _is_loss_scale),
    "data": ("a fingerprint", lambda value: isinstance(value, str)),
    "vocab_size": ("a count of at least 1", lambda value: _is_count(value) and value > 0),
    "val_loss": ("a number or null", lambda value: value is None or _is_number(value)),
    "val_step": ("a count or null", lambda value: value is None or _is_count(value)),
    "guard": ("an object with the count steps and lists of numbers losses, norms, interventions", _is_history),
}
"""Every field that resuming uses: in words, and as a test of its value."""

OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schedule_end": ("a count of at least 1", lambda value: _is_count(value) and value > 0),
}
"""Fields that resuming uses where they are: checkpoints of earlier versions lack them."""
