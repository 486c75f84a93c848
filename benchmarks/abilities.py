"""The layouts that each framework of a published result supports, among which a planner may choose.

A choice that a framework could not have run says nothing about its users' choice. Each set below fixes fields of the
layout; a framework supports all layouts of all its sets. Sequence parallelism and selective recomputation came with
Korthikanti et al. 2022, ZeRO's first stage to Megatron with its distributed optimizer, the third with Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

Fixed = Mapping[str, Any]


def _sets(*always: Fixed, **choices: tuple[object, ...]) -> tuple[Fixed, ...]:
    """Returns every combination of `choices`, together with the `always` fixed fields."""
    return tuple(
        {**one, **dict(zip(choices, values, strict=True))} for one in always for values in product(*choices.values())
    )


_PIPELINES = ("1f1b", "interleaved_1f1b")
_NO_CONTEXT = {"cp": 1, "cp_ulysses": 1}
_FLAT = {"pp": 1, "schedule": "1f1b"}

MEGATRON_2021 = _sets({**_NO_CONTEXT, "dp_shard": 1, "sp": False}, schedule=_PIPELINES, recompute=("none", "full"))
"""Narayanan et al. 2021: tp, pp with chunks, replicas; recomputation of whole blocks or none."""

LLAMA3 = _sets(
    {"cp_ulysses": 1, "dp_replicate": 1, "zero": 2, "accumulate": "local"},
    {"cp_ulysses": 1, "dp_replicate": 1, "zero": 3, "accumulate": "local"},
    schedule=_PIPELINES,
)
"""Llama Team 2024, section 3.3.2: tp, pp with chunks, cp by gathering keys, FSDP over all data ranks; any
recomputation."""

MEGATRON_CORE = (
    *_sets({"dp_replicate": 1, "zero": 1, "cp_ulysses": 1, "accumulate": "local"}, schedule=_PIPELINES),
    *_sets({**_FLAT, "dp_replicate": 1, "zero": 3, "cp_ulysses": 1}),
)
"""Megatron Core and what is built on it (NeMo, Megatron-Bridge, MLPerf): the distributed optimizer under tp, pp, cp and
ep, or Megatron-FSDP without a pipeline."""

TORCHTITAN = (
    *_sets({**_FLAT, "zero": 3, "cp_ulysses": 1, "sp_regather": False}),
    *_sets({"zero": 3, "cp_ulysses": 1, "sp_regather": False}, schedule=(*_PIPELINES, "zb_v")),
)
"""torchtitan: FSDP2 and HSDP, tp with sequence parallelism that saves what it gathered, cp, and pipelines."""

ABILITIES: dict[str, tuple[Fixed, ...]] = {
    "megatron-2021": MEGATRON_2021,
    "llama3": LLAMA3,
    "megatron-core": MEGATRON_CORE,
    "torchtitan": TORCHTITAN,
    "nemo": MEGATRON_CORE,
    "mlperf": MEGATRON_CORE,
}
"""The sets by framework, or by a prefix of its name."""


def abilities(program: str) -> tuple[Fixed, ...]:
    """Returns the sets of a framework; empty if it is not known."""
    return ABILITIES.get(program) or next(
        (sets for name, sets in ABILITIES.items() if program.startswith(f"{name}-")), ()
    )
