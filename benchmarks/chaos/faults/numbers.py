"""Classes 13, 14 and 15: values that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.chaos.fault import Fault

_POLICY = "skipped, computed again or stopped before the optimizer writes it; never saved as the newest checkpoint"
_REPLICA = "digests across replicas name rank and tensor; healed, rewound or stopped"
_REPEATED = "no sum over ranks can show it: seen where each step is computed twice, which the user must ask for"
_NAN_STOP = frozenset({5, 1})
_NAN = r"(?i)\bnan\b|not finite|inf\b"


def _guarded(number: int, name: str, what: str, gold: str, guard: dict[str, Any] | None = None, **plugin: Any) -> Fault:
    """Returns a fault of one rank's values. `guard` has settings of the guard other than its defaults: a policy for
    spikes, and what finds a wrong value that makes nothing jump, are the user's to choose."""
    extra = {f"guard.{field}": value for field, value in (guard or {}).items()}
    settings = ", ".join(f"{field}={value}" for field, value in extra.items())
    return Fault(
        number, name, f"{what} ({settings})" if settings else what, gold, extra=extra,
        plugin={"rank": 1, "step": 12, **plugin}, names=_NAN if number == 13 and not guard else r"(?i)rank 1\b",
        codes=frozenset({*_NAN_STOP, 4}), peer=plugin["at"] != "all_reduce",
    )  # fmt: skip


FAULTS = (
    _guarded(13, "gradient", "a gradient of rank 1 is NaN in one step", _POLICY,
             at="all_reduce", do="set", value="nan"),
    _guarded(13, "infinite", "a gradient of rank 1 is infinite in one step", _POLICY,
             at="all_reduce", do="set", value="inf"),
    _guarded(13, "spike", "the gradients of rank 1 are 10,000 times too large in one step", _POLICY,
             {"on_spike": "skip", "spike_warmup": 8}, at="all_reduce", do="scale", factor=1e4),
    _guarded(13, "weight", "a weight of rank 1 becomes NaN", _POLICY, at="after-step", do="nan-weight"),
    _guarded(13, "moment", "a moment of rank 1 becomes NaN", _POLICY, at="after-step", do="nan-moment"),
    Fault(
        13, "before-last-save", "a weight of rank 0 becomes NaN between the last step and the last save",
        "success is not claimed; the NaN is not saved as the newest checkpoint",
        plugin={"rank": 0, "at": "after-step", "step": 40, "do": "nan-weight"}, names=_NAN, codes=_NAN_STOP,
    ),
    _guarded(14, "exponent", "the highest exponent bit of a weight of rank 1 flips", _REPLICA,
             at="after-step", do="flip-weight", bit=30),
    _guarded(14, "mantissa", "a middle mantissa bit of a weight of rank 1 flips", _REPLICA,
             at="after-step", do="flip-weight", bit=12),
    _guarded(14, "lowest", "the lowest mantissa bit of a weight of rank 1 flips", _REPLICA,
             at="after-step", do="flip-weight", bit=0),
    _guarded(14, "moment", "a middle mantissa bit of a moment of rank 1 flips", _REPLICA,
             at="after-step", do="flip-moment", bit=12),
    replace(
        _guarded(14, "majority", "the lowest mantissa bit of a weight of rank 1 of three flips", _REPLICA,
                 at="after-step", do="flip-weight", bit=0),
        job={"layout.dp_replicate": 3, "train.global_batch": 33}, peer=False,
    ),
    _guarded(15, "exponent", "the highest exponent bit of a gradient of rank 1 flips before the reduction",
             "seen by the norm, the step is computed again", at="all_reduce", do="flip", bit=30),
    _guarded(15, "mantissa", "the highest mantissa bit of a gradient of rank 1 flips before the reduction",
             _REPEATED, {"repeat_every": 1}, at="all_reduce", do="flip", bit=22),
    _guarded(15, "lowest", "the lowest mantissa bit of a gradient of rank 1 flips before the reduction",
             _REPEATED, {"repeat_every": 1}, at="all_reduce", do="flip", bit=0),
)  # fmt: skip
