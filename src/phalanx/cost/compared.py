"""A predicted step beside a measured one, part by part: its time and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.cost.memory.rank_memory import RankMemory
from phalanx.cost.prediction import Parts

AXES: dict[str, str] = dict.fromkeys(
    ("dp_shard_cp", "edp", "hpz", "edp_hpz", "hpz_across", "edp_hpz_across"), "dp_shard"
)
"""The axis of a prediction for axes of the ledger that it has under another name."""


@dataclass(frozen=True)
class ComparedPart:
    """One part of a step, in seconds or bytes."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if the prediction has none of it."""
        return self.measured / self.predicted if self.predicted else None


def compared(predicted: Parts, measured: Mapping[str, float]) -> list[ComparedPart]:
    """Returns the parts of a step that a prediction or a measurement has, and at the end the whole step.

    `measured` are the parts of a rank's step by name: forward, backward, recompute, "AXIS exposed", "AXIS waiting",
    optimizer, data and other. Waiting along pp is the bubble; that along other axes is for slower ranks. A prediction
    knows neither waiting nor data nor other: its ranks are equal, and its data are there."""
    ours = {
        "forward": predicted.forward,
        "backward": predicted.backward,
        "recompute": predicted.recompute,
        **{f"{axis} exposed": seconds for axis, seconds in predicted.exposed.items()},
        "bubble": predicted.bubble,
        "optimizer": predicted.optimizer,
    }
    theirs: dict[str, float] = {}
    for name, seconds in measured.items():
        axis, _, kind = name.partition(" ")
        waits = "bubble" if axis == "pp" else "waiting"
        known = {"exposed": f"{AXES.get(axis, axis)} exposed", "waiting": waits}.get(kind, name)
        theirs[known] = theirs.get(known, 0.0) + seconds
    order = ["forward", "backward", "recompute"]
    order += sorted(name for name in {**ours, **theirs} if name.endswith(" exposed"))
    order += ["bubble", "waiting", "optimizer", "data", "other"]
    rows = [ComparedPart(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in order]
    rows = [row for row in rows if row.predicted or row.measured]
    return [*rows, ComparedPart("step", predicted.total, sum(theirs.values()))]


def compared_memory(predicted: RankMemory, measured: Mapping[str, int]) -> list[ComparedPart]:
    """Returns the parts of a rank's tensors at the fullest moment, in bytes, and at the end all of them.

    `measured` are the bytes by part: parameters, gradients, optimizer, activations (made in forward passes), backward
    (made in backward passes: gradients, too), communication and other. A prediction has no other."""
    passes = {"gradients", "activations", "logits", "backward"}
    rows = [
        ComparedPart(name, getattr(predicted, name, 0), measured.get(name, 0))
        for name in ("parameters", "optimizer", "communication", "other")
    ]
    ours = sum(size for name, size in predicted.parts() if name in passes)
    theirs = sum(size for name, size in measured.items() if name in passes)
    rows.insert(2, ComparedPart("activations, gradients", ours, theirs))
    rows = [row for row in rows if row.predicted or row.measured]
    return [*rows, ComparedPart("all tensors", predicted.allocated, sum(measured.values()))]
