"""Records the collectives and phases of this process for a while, with their times.

Every collective of a run reports to the heartbeat (comm/calls.py), with or without a watchdog, and so do the phases of
a step. A recording puts itself in the heartbeat's place and passes everything on; afterwards the heartbeat is back, so
that steps that are not recorded run the same code as before. All ranks of a process group make the same calls in the
same order: a call is the same one on every rank that has its group and number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from phalanx.comm import axis as axes
from phalanx.comm.axis import Axis
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Call, Channel, Heartbeat, Phase

MOST_CALLS = 50_000
"""Most calls of one rank that are recorded."""
_METHODS = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"),
    *("start_send", "start_receive", "rotate", "shift"),
)
_LEDGER_NAMES = {
    **dict.fromkeys(("all_reduce_max", "all_reduce_min", "all_reduce_avg"), "all_reduce"),
    "receive": "send",
    "rotate": "send",
    "shift": "send",
}
now: Callable[[], int] = time.monotonic_ns
"""The clock of a recording, which all processes of a machine share."""


@dataclass
class TimedCall:
    """One collective or message. Times are nanoseconds of the monotonic clock; 0: not yet."""

    axis: str
    collective: str
    """As the ledger calls it: a message is a send, on both sides."""
    channel: str
    """The same text on every rank that takes part in calls of this order."""
    sequence: int
    """The place among the calls of the channel, from 1."""
    bytes: int
    main: bool
    """Whether the thread that trains made it."""
    sends: bool = False
    receives: bool = False
    start: int = 0
    launched: int = 0
    """When the host went on after starting it."""
    waited: int = 0
    """When the rank began to wait for its result."""
    done: int = 0
    """When the rank had its result."""


@dataclass
class Recording:
    """The calls and phases of one rank."""

    calls: list[TimedCall] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    """When each phase began."""
    left_out: int = 0
    """Calls beyond MOST_CALLS."""


class _Watched(Call):
    """A call that is recorded beside the heartbeat's own record."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: TimedCall, inner: Call | None):
        self._call, self._inner = call, inner

    def waits(self) -> None:
        self._call.waited = now()
        if self._inner is not None:
            self._inner.waits()

    def done(self) -> None:
        if self._inner is not None:
            self._inner.done()
        self._call.done = now()

    def settled(self) -> None:
        """Records that the host has also done its own part of the result: a sum of what has arrived."""
        self._call.done = now()


class _RecordingHeartbeat(Heartbeat):
    """Stands in for a process's heartbeat, which goes on if there is one."""

    def __init__(self, inner: Heartbeat | None, recording: Recording):
        self._inner, self._recording, self._thread = inner, recording, threading.get_ident()
        self._phase_now = Phase.START if inner is None else inner._phase
        self._own: dict[tuple[str, str, int], Channel] = {}
        self.channels = {} if inner is None else inner.channels
        self.newest: TimedCall | None = None
        recording.phases.append((now(), self._phase_now))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def beat(self) -> None:
        if self._inner is not None:
            self._inner.beat()

    def steps_done(self, number: int) -> None:
        if self._inner is not None:
            self._inner.steps_done(number)

    def note_memory(self, used: int) -> None:
        if self._inner is not None:
            self._inner.note_memory(used)

    def enter(self, phase: Phase) -> Phase:
        before, self._phase_now = self._phase_now, phase
        self._recording.phases.append((now(), phase))
        if self._inner is not None:
            self._inner.enter(phase)
        return before

    def channel(self, group: str, kind: str, ranks: Sequence[int], peer: int = -1) -> Channel:
        if self._inner is not None:
            return self._inner.channel(group, kind, ranks, peer)
        return self._own.setdefault((group, kind, peer), Channel(0))

    def begin(
        self,
        channel: Channel,
        operation: str,
        axis: str,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        *,
        waits: bool,
        on_device: bool,
        hidden: str,
        root: int = -1,
    ) -> Call:
        inner = None
        if self._inner is None:
            channel.started += 1
        else:
            options = {"waits": waits, "on_device": on_device, "hidden": hidden}
            inner = self._inner.begin(channel, operation, axis, dtype, shape, nbytes, **options, root=root)
        call = TimedCall(
            axis,
            _LEDGER_NAMES.get(operation, operation),
            self._name(channel),
            channel.started,
            nbytes,
            threading.get_ident() == self._thread,
            sends=operation == "send",
            receives=operation == "receive",
            start=now(),
        )
        if waits:
            call.waited = call.launched = call.start
        if len(self._recording.calls) < MOST_CALLS:
            self._recording.calls.append(call)
        else:
            self._recording.left_out += 1
        self.newest = call
        return _Watched(call, inner)

    def _name(self, channel: Channel) -> str:
        """Returns the group of a channel, and for messages the peer."""
        known = self._own if self._inner is None else self._inner.channels
        for (group, kind, peer), each in list(known.items()):
            if each is channel:
                return f"{group}:{peer}" if kind in ("send", "receive") else group
        return ""


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Records the calls and phases of a `with` block."""
    before = heartbeat.own()
    mine = _RecordingHeartbeat(before, recording)
    watched = {(Axis, name): partial(_launching, mine=mine) for name in _METHODS} | {(axes._Then, "wait"): _settling}
    kept = {place: getattr(*place) for place in watched}
    heartbeat.adopt(mine)
    for place, watch in watched.items():
        setattr(*place, watch(kept[place]))
    try:
        yield
    finally:
        for place, method in kept.items():
            setattr(*place, method)
        heartbeat.adopt(before)


def _launching(method: Callable[..., Any], mine: _RecordingHeartbeat) -> Callable[..., Any]:
    """Returns a method of Axis that also records from when to when the host was in it."""

    @wraps(method)
    def launch(*args: Any, **kwargs: Any) -> Any:
        start, before = now(), mine.newest
        result = method(*args, **kwargs)
        call = mine.newest
        if call is not None and call is not before and not call.launched:
            call.start, call.launched = start, now()
        return result

    return launch


def _settling(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns the method `_Then.wait` that also records when the host's own part of a collective is done."""

    @wraps(wait)
    def settle(then: Any) -> None:
        call = then.call
        wait(then)
        if isinstance(call, _Watched):
            call.settled()

    return settle
