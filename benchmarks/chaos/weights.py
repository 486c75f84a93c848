"""The weights of a run's last checkpoint, read by the project's own reader, and how they differ from another run's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

State = dict[str, Any]
"""Tensors of model and optimizer by name."""

_NOISE = 1e-8


def newest_step(checkpoints: Path) -> int:
    """Returns the step of the newest checkpoint that was written to its end; 0 if there is none. Both Phalanx and DCP
    write last what makes a folder a checkpoint: its manifest, its metadata."""
    from phalanx.checkpoint.manifest import MANIFEST

    folders = list(checkpoints.glob("step-*")) if checkpoints.is_dir() else []
    names = [path.name for path in folders if (path / MANIFEST).exists() or (path / ".metadata").exists()]
    return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)


def load(checkpoints: Path, step: int) -> State | None:
    """Returns the state in the newest whole checkpoint, or None if that is not of `step`."""
    from phalanx.checkpoint.inventory import newest_valid
    from phalanx.checkpoint.shard_file import Reader
    from phalanx.errors import PhalanxError

    try:
        manifest = newest_valid(checkpoints, report=lambda message: None)
    except PhalanxError:
        return None
    if manifest is None or manifest.step != step:
        return None
    with Reader(manifest) as tensors:
        return {name: tensors.read(name).clone() for name in tensors.names()}


def difference(state: State | None, control: State) -> float | None:
    """Returns the largest |a - b| / max(|b|, the tensor's rms) over all elements; 0.0 only if every bit is equal.

    A tensor counts as no smaller than _NOISE times the largest of its kind (weights, each moment): the biases of keys,
    whose gradient is zero, are nothing but rounding noise, other noise for every order of sums. Infinite if names or
    shapes differ or a value is not finite; None without a state."""
    import torch

    if state is None:
        return None
    if state.keys() != control.keys():
        return math.inf
    rms = {name: float(wanted.double().square().mean().sqrt()) for name, wanted in control.items()}
    largest = 0.0
    for name, wanted in control.items():
        found = state[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return math.inf
        if torch.equal(found, wanted):
            continue
        wanted64, found64 = wanted.double(), found.double()
        if not torch.isfinite(found64).all():
            return math.inf
        floor = _NOISE * max(rms[other] for other in rms if _kind(other) == _kind(name))
        scale = wanted64.abs().clamp_min(max(rms[name], floor, 1e-30))
        largest = max(largest, float(((found64 - wanted64).abs() / scale).max()))
    return largest


def _kind(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""
