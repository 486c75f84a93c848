"""From the records of all ranks to a diagnosis: which rank holds up the others, and who waits for whom.

Everything here is a pure function of what was read. A rank *waits* if its host is blocked in a call that some other
rank has to join; the ranks that are waited for, and wait for nobody themselves, are the culprits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.launch.watchdog.layout import Phase
from phalanx.launch.watchdog.pace import Pace
from phalanx.launch.watchdog.processes import ProcessState
from phalanx.launch.watchdog.reader import ChannelKey, RankRecord, RecordedCall


@dataclass(frozen=True)
class RankView:
    """All that is known of one rank at one moment."""

    rank: int
    record: RankRecord | None
    """None if it has not written a heartbeat yet."""
    silent_s: float
    """Seconds since its last sign of life."""
    process: ProcessState | None = None
    exit_code: int | None = None
    """None while it runs; 128 + n for a death by signal n; -1 if it ended and nobody knows how."""
    ticks_s: float = 0.0
    """Seconds since the interpreter's last tick."""

    @property
    def ended(self) -> bool:
        """True if its process is gone."""
        return self.exit_code is not None

    @property
    def frozen(self) -> bool:
        """True if it cannot act, whatever call it is in. A rank that ended with an error in a call did wait there."""
        if self.ended:
            return self.exit_code in (0, -1)
        return self.process is not None and (self.process.stopped or self.process.state == "D")

    @property
    def left_early(self) -> bool:
        """True if it ended as if done, in the middle of training."""
        return self.exit_code in (0, -1) and self.record is not None and self.record.amid_training


@dataclass(frozen=True)
class Wait:
    """A rank that is blocked in a call."""

    rank: int
    call: RecordedCall
    missing: tuple[int, ...]
    """Ranks of the call that have not started it."""
    unseen: tuple[int, ...]
    """Ranks of the call on other machines, of which nothing is known here."""
    arrived: tuple[int, ...]
    """Ranks of the call that have started it."""


@dataclass(frozen=True)
class Mismatch:
    """Two ranks whose calls at the same place of the same channel differ."""

    rank: int
    call: RecordedCall
    other: int
    other_call: RecordedCall
    earlier: bool = False
    """The two calls are equal, and calls before them differ that are not recorded any more."""


Kind = Literal["mismatch", "silent", "deadlock", "unseen", "stuck"]


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks make no progress."""

    kind: Kind
    """mismatch: calls differ; silent: the culprits do not come to the call in which others wait; deadlock: ranks wait
    for each other; unseen: all wait for ranks of another machine; stuck: all ranks came, and the call does not end."""
    culprits: tuple[int, ...]
    waits: tuple[Wait, ...]
    views: Mapping[int, RankView]
    mismatch: Mismatch | None = None


@dataclass(frozen=True)
class Limits:
    """Seconds without a sign of life after which a rank hangs."""

    hang_s: float
    """0: hangs are not looked for."""
    start_s: float
    """Until the first step is done, which loads, compiles and allocates, and after the last one."""
    follows: bool = False
    """Whether `hang_s` is only the longest: the limit follows the pace of the run."""

    def of(self, view: RankView, pace: Pace | None = None, load: float = 1.0) -> float:
        """Returns the limit of a rank, by the run's pace if that is given and counts."""
        record = view.record
        if record is not None and record.phase is Phase.DONE:
            return math.inf
        steady = record is not None and record.trained and record.phase is not Phase.END
        tests = record is not None and record.phase is Phase.TEST
        if self.follows and pace is not None and record is not None and steady:
            return pace.limit_s(record, self.hang_s, load)
        return self.hang_s if steady or tests else max(self.hang_s, self.start_s)


def hangs(views: Mapping[int, RankView], limits: Limits, pace: Pace | None = None, load: float = 1.0) -> bool:
    """Returns whether the ranks hang: some rank has been silent for longer than its limit, and so has a rank at the end
    of what it waits for, or that one has ended. A rank that waits for one that still works does not hang.

    The limit follows `pace` where `limits` say so, but not for a rank that waits for one on another machine, whose
    pace is not known here. `load` is the number of processes that want each core."""
    if not limits.hang_s:
        return False
    silent = {rank: view for rank, view in views.items() if not view.ended}
    late = {rank for rank, view in silent.items() if view.silent_s > limits.of(view, pace, load)}
    waits = _waits(views) if late else ()
    far = {wait.rank for wait in waits if wait.unseen}
    late -= {rank for rank in late & far if views[rank].silent_s <= limits.of(views[rank])}
    return any(root in late or views[root].ended for rank in late for root in _roots(rank, waits))


def diagnose(views: Mapping[int, RankView]) -> Diagnosis:
    """Returns why ranks that hang, or of which one has lost the others, make no progress."""
    waits = _waits(views)
    mismatch = find_mismatch(views)
    if mismatch is not None:
        return Diagnosis("mismatch", (mismatch.rank, mismatch.other), waits, views, mismatch)
    kind, culprits = _blame(views, waits)
    return Diagnosis(kind, tuple(sorted(culprits)), waits, views)


def find_mismatch(views: Mapping[int, RankView]) -> Mismatch | None:
    """Returns the earliest two calls that stand at the same place of a channel and differ, or, if the digests say that
    they did before all records, the earliest two after that. `rank` is the odd one out where there is a majority."""
    return first_difference({rank: view.record.calls if view.record else () for rank, view in views.items()})


def first_difference(calls_of: Mapping[int, Sequence[RecordedCall]]) -> Mismatch | None:
    """Returns the same from the calls of each rank."""
    by_place: dict[tuple[ChannelKey, int], dict[int, RecordedCall]] = {}
    for rank, calls in sorted(calls_of.items()):
        for call in calls:
            by_place.setdefault((call.channel, call.sequence), {})[rank] = call
    return _odd(by_place, earlier=False) or _odd(by_place, earlier=True)


def _odd(by_place: Mapping[tuple[ChannelKey, int], Mapping[int, RecordedCall]], *, earlier: bool) -> Mismatch | None:
    def said(call: RecordedCall) -> object:
        return call.digest if earlier else call.signature

    found = []
    for calls in by_place.values():
        common = Counter(map(said, calls.values())).most_common(1)[0][0]
        odd = next((rank for rank, call in calls.items() if said(call) != common), None)
        if odd is not None:
            other = next(rank for rank, call in calls.items() if said(call) == common)
            found.append(Mismatch(odd, calls[odd], other, calls[other], earlier))
    return min(found, key=lambda mismatch: mismatch.call.began, default=None)


def _blame(views: Mapping[int, RankView], waits: Sequence[Wait]) -> tuple[Kind, set[int]]:
    left = {rank for rank, view in views.items() if view.left_early}
    if left:
        return "silent", left
    blocked = {wait.rank for wait in waits if wait.missing or wait.unseen}
    wanted = {rank for wait in waits for rank in wait.missing}
    if wanted - blocked:
        return "silent", wanted - blocked
    frozen = {rank for wait in waits for rank in wait.arrived if views[rank].frozen}
    if frozen:
        return "silent", frozen
    unseen = {rank for wait in waits for rank in wait.unseen}
    if unseen:
        return "unseen", unseen
    if blocked:
        return ("deadlock" if all(wait.call.waiting for wait in waits) else "stuck"), blocked & wanted
    running = {rank for rank, view in views.items() if not view.ended}
    idle = running - {wait.rank for wait in waits}
    longest = max((views[rank].silent_s for rank in idle), default=0.0)
    silent = {rank for rank in idle if views[rank].silent_s >= longest / 2}
    # A device that hangs silences all ranks alike, and their hosts seem to wait for nothing.
    return ("silent", silent) if silent and (silent < running or len(running) == 1) else ("stuck", running)


def _roots(rank: int, waits: Sequence[Wait]) -> set[int]:
    """Returns the ranks at the ends of the chains of waiting that begin at `rank`: itself if it waits for nobody here,
    and all of a chain that closes on itself."""
    after: dict[int, set[int]] = {}
    for wait in waits:
        after.setdefault(wait.rank, set()).update(wait.missing)
    reached: set[int] = set()
    ahead = [rank]
    while ahead:
        here = ahead.pop()
        if here not in reached:
            reached.add(here)
            ahead += after.get(here, ())
    return {each for each in reached if not after.get(each)} or reached


def _waits(views: Mapping[int, RankView]) -> tuple[Wait, ...]:
    return tuple(wait for view in views.values() if not view.frozen for wait in _waits_of(view, views))


def _waits_of(view: RankView, views: Mapping[int, RankView]) -> Iterator[Wait]:
    if view.record is None:
        return
    for call in view.record.calls:
        if call.waiting or call.on_device:
            missing, unseen, arrived = _others(view.record, call, views)
            # The host does not see when a device is through: such a call counts only while a rank has not come.
            if call.waiting or missing:
                yield Wait(view.rank, call, missing, unseen, arrived)


def _others(
    record: RankRecord, call: RecordedCall, views: Mapping[int, RankView]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the other ranks of a call: those that have not started it, those of which that is not known, and those
    that have."""
    key = call.channel
    others, side = [rank for rank in record.groups.get(key.group, ()) if rank != record.rank], False
    if key.source >= 0:
        receives = record.rank == key.target
        others, side = [key.source if receives else key.target], not receives
    missing, unseen, arrived = [], [], []
    for rank in others:
        if rank not in views:
            unseen.append(rank)
            continue
        theirs = views[rank].record
        came = theirs is not None and theirs.started.get((key, side), 0) >= call.sequence
        (arrived if came else missing).append(rank)
    return tuple(missing), tuple(unseen), tuple(arrived)
