"""A rank's recording, in the forms that shares, traces and the memory table need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from phalanx.comm.calls import Recording, TimedCall
from phalanx.launch.watchdog.layout import Phase
from phalanx.train.profile.largest import Range
from phalanx.train.profile.passes import PassSpans
from phalanx.train.profile.shares import Communication, ProfiledRank, union
from phalanx.train.profile.trace_file import NamedRange

_PART_OF_PHASE = {Phase.DATA: "data", Phase.EXCHANGE: "optimizer", Phase.OPTIMIZER: "optimizer"}
"""The part of a step to which a phase belongs. Exchange: the gradients' norm, and what starts its collectives."""
_MEMORY_OF = {"forward": "activations", "recompute": "activations", "backward": "backward"}

Rows = dict[str, list[NamedRange]]


def record_of(
    rank: int,
    coordinates: Mapping[str, int],
    steps: Sequence[tuple[int, int]],
    recording: Recording,
    passes: PassSpans,
    *,
    every_thread: bool = False,
) -> ProfiledRank:
    """Returns a rank's record of its steps, for its shares. Backward passes on a GPU have threads of their own, whose
    calls count with `every_thread`."""
    work: dict[str, list[tuple[int, int]]] = {}
    for kind, _, start, end in passes.spans:
        work.setdefault(kind, []).append((start, end))
    for phase, start, end in _phases(recording, steps):
        if part := _PART_OF_PHASE.get(phase):
            work.setdefault(part, []).append((start, end))
    calls = [_communication(call) for call in recording.calls if (call.main or every_thread) and call.launched]
    return ProfiledRank(rank, list(steps), {k: union(v) for k, v in work.items()}, calls, "cpu", dict(coordinates))


def _communication(call: TimedCall) -> Communication:
    end = max(call.done or call.launched, call.launched)
    return Communication(
        call.axis,
        call.collective,
        call.channel,
        call.sequence,
        call.start,
        end,
        call.waited,
        call.launched,
        call.bytes,
        call.sends,
        call.receives,
    )


def _phases(recording: Recording, steps: Sequence[tuple[int, int]]) -> Iterator[tuple[Phase, int, int]]:
    last = steps[-1][1] if steps else 0
    for (start, phase), (end, _) in pairwise([*recording.phases, (last, Phase.RECORD)]):
        if end > start:
            yield phase, start, end


def rows_of(record: ProfiledRank, recording: Recording, passes: PassSpans, first: int) -> tuple[Rows, list[NamedRange]]:
    """Returns the rows of a rank's trace, by name, and its collectives in flight. `first` is the first step's
    number."""
    rows: Rows = {"step": [(f"step {first + n}", start, end, {}) for n, (start, end) in enumerate(record.steps)]}
    inside = (record.steps[0][0], record.steps[-1][1]) if record.steps else (0, 0)

    def add(row: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        if start < inside[1] and end > inside[0]:
            rows.setdefault(row, []).append((name, start, end, args or {}))

    for phase, start, end in _phases(recording, record.steps):
        add("phase", "data wait" if phase is Phase.DATA else phase.label, start, end)
    for _, name, start, end in sorted(passes.spans, key=lambda span: (span[2], -span[3])):
        add("pass", name, start, end)
    for kind, name, start, end in sorted(passes.layers, key=lambda span: span[2]):
        add("layer", f"{kind} {name}", start, end)
    flights = []
    for call in sorted(record.calls, key=lambda call: call.start):
        name = f"{call.axis} {call.collective}"
        args = {"axis": call.axis, "collective": call.collective, "bytes": call.bytes, "call": call.sequence}
        add("communication", f"{name}: start", call.start, call.launched, args)
        flights.append((name, call.start, call.end, args))
    for call in sorted((call for call in record.calls if call.waited), key=lambda call: call.waited):
        add("waiting", f"{call.axis} {call.collective}: wait", call.waited, call.end, {"bytes": call.bytes})
    return rows, [flight for flight in flights if flight[1] < inside[1] and flight[2] > inside[0]]


def ranges_of(record: ProfiledRank, recording: Recording, passes: PassSpans) -> list[Range]:
    """Returns the ranges that name allocations."""
    found = [Range(_MEMORY_OF[kind], name, start, end) for kind, name, start, end in passes.spans]
    found += [Range(_MEMORY_OF[kind], f"{kind} {name}", start, end) for kind, name, start, end in passes.layers]
    for call in record.calls:
        found.append(Range("communication", f"{call.axis} {call.collective}", call.start, call.launched))
    for phase, start, end in _phases(recording, record.steps):
        part = "optimizer step" if phase is Phase.OPTIMIZER else "other"
        found.append(Range(part, phase.label, start, end))
    return found
