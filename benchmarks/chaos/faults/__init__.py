"""All faults of the bench, one file per subject."""

from __future__ import annotations

from benchmarks.chaos.fault import CLASSES, Fault
from benchmarks.chaos.faults import (
    checkpoints,
    clashes,
    collectives,
    data,
    hostile,
    kills,
    network,
    numbers,
    resume,
    signals,
    stalls,
    storage,
)

_FILES = (
    kills, stalls, network, collectives, numbers, storage, checkpoints, resume, signals, data, clashes, hostile,
)  # fmt: skip

FAULTS: tuple[Fault, ...] = tuple(
    sorted((fault for file in _FILES for fault in file.FAULTS), key=lambda fault: fault.number)
)
"""Every fault, by class."""

assert {fault.number for fault in FAULTS} == set(CLASSES), "every class has a fault"
assert len({fault.key for fault in FAULTS}) == len(FAULTS), "every fault has a name of its own"
