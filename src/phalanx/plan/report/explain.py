"""Explains why one layout is faster than another, in one line: the parts of the step that differ most."""

from __future__ import annotations

from phalanx.config.layout import Layout
from phalanx.cost.prediction import Prediction
from phalanx.units import gib

MENTIONED = 0.01
"""Smallest difference of a part that is mentioned, as a share of the slower step."""
MOST_PARTS = 3
"""Most parts that are mentioned in each direction."""
PART_NAMES = {
    "matrix products": "matrix products",
    "memory-bound": "memory-bound work",
    "recompute": "recomputation",
    "host": "host overhead",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "tp exposed": "tensor-parallel communication",
    "cp exposed": "context-parallel communication",
    "ep exposed": "the experts' all-to-alls",
    "pp exposed": "pipeline communication",
    "dp_shard exposed": "dp_shard communication",
    "dp_replicate exposed": "dp_replicate communication",
}
"""Names of a prediction's parts in sentences."""
OMITTED_FIELDS = ("micro_batch", "accumulation", "pp_cut")
"""Fields of a layout that follow from others or are too long for a line; the micro-batch is mentioned if it differs."""


def explain(prediction: Prediction, other: Prediction, factor: float = 0.0) -> str:
    """Compares two predictions of the same step: "1.20 × as fast: recomputation 0 instead of 2.1 s; but pipeline bubble
    0.8 instead of 0.5 s". The largest differences come first, a memory excess last. `factor` is the speed-up if it is
    known better than by the predictions, for instance by simulation."""
    mine, theirs = dict(prediction.parts.items()), dict(other.parts.items())
    slower = max(prediction.step_time_s, other.step_time_s)
    names = sorted({*mine, *theirs}, key=lambda name: -abs(mine.get(name, 0.0) - theirs.get(name, 0.0)))
    gains, losses = list[str](), list[str]()
    for name in names:
        less = theirs.get(name, 0.0) - mine.get(name, 0.0)
        own, others = _short(mine.get(name, 0.0)), _short(theirs.get(name, 0.0))
        if abs(less) >= MENTIONED * slower and own != others:
            (gains if less > 0 else losses).append(f"{PART_NAMES.get(name, name)} {own} instead of {others} s")
    ratio = factor or other.step_time_s / prediction.step_time_s
    if ratio < 1:
        gains, losses = losses, gains
    text = "as fast" if abs(ratio - 1) < MENTIONED / 2 else f"{ratio:.2f} × as fast"
    if gains:
        text += f": {', '.join(gains[:MOST_PARTS])}"
    if losses:
        text += f"; but {', '.join(losses[:MOST_PARTS])}"
    if prediction.fits != other.fits:
        which, fullest = ("it", prediction.fullest) if other.fits else ("the other", other.fullest)
        text += f"; {which} does not fit, {gib(fullest.needed)} of {gib(prediction.memory_limit)}"
    return text


def differences(one: Layout, other: Layout) -> str:
    """Lists the settings of `one` that differ from `other`: "tp 4 instead of 8, recompute none instead of full"."""
    fields = [name for name in vars(one) if name not in OMITTED_FIELDS and getattr(one, name) != getattr(other, name)]
    if one.micro_batch != other.micro_batch:
        fields.append("micro_batch")
    return ", ".join(
        f"{name} {_value(getattr(one, name))} instead of {_value(getattr(other, name))}" for name in fields
    )


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _value(value: object) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)
