"""From the records of all ranks to a diagnosis: which rank holds up the others, and who waits for whom; in words and as
JSON. Also how long a rank may be silent, by the longest steps so far, and which ranks are slow.

Pure functions of the records and a clock that the caller reads, so that tests need not wait.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from phalanx.launch.lifeline import ProcessState
from phalanx.launch.watchdog.heartbeat import ChannelKey, Phase, RankRecord, RecordedCall

LEAST_S = 20.0  # shortest limit
STEPS = 5.0  # the limit in steps, of the longest one so far
RARE = 2.0  # the limit in the longest save, validation or first step (with its compilation) so far
RARE_PHASES = frozenset({Phase.SAVE, Phase.VALIDATION})
"""Phases that are no part of a step. The first of its kind may take any time."""


class Pace:
    """The pace of the ranks of one attempt on this machine."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[RankRecord, float, float]] = {}
        """Each rank at the last look, when its step count came to that value, and seconds of RARE_PHASES since then."""
        self.step_s = self.first_step_s = 0.0  # longest step, and longest first step, so far
        self.rare_s: dict[Phase, float] = {}  # longest time in each of RARE_PHASES so far

    def update(self, records: Iterable[RankRecord], now: float) -> None:
        """Takes a look at the ranks at `now`, in seconds of the clock of their records."""
        for record in records:
            if not record.first_step:
                continue
            before, since, rare_s = self._seen.get(record.rank, (record, now, 0.0))
            if record.phase_began != before.phase_began and before.phase in RARE_PHASES:
                took = record.phase_began - before.phase_began
                self.rare_s[before.phase] = max(took, self.rare_s.get(before.phase, 0.0))
                rare_s += took
            if record.step > before.step:
                took = max(0.0, now - since - rare_s)
                if before.step < record.first_step:
                    self.first_step_s = max(self.first_step_s, took)
                else:  # at a look each second, many short steps may have been taken
                    self.step_s = max(self.step_s, took / (record.step - before.step))
                since, rare_s = now, 0.0
            self._seen[record.rank] = record, since, rare_s

    def limit_s(self, record: RankRecord, most_s: float, load: float) -> float:
        """Returns the seconds that a rank which has done a step may be silent, at most `most_s`. `load` is the number
        of processes that want each core: they take turns."""
        if record.phase in RARE_PHASES and record.phase not in self.rare_s:
            return most_s
        rare = max([self.first_step_s, *self.rare_s.values()])
        return min(most_s, max(LEAST_S, STEPS * self.step_s, RARE * rare) * max(1.0, load))


def load_per_core() -> float:
    """Returns how many processes want each core of this machine: now, or over the last minute if that is more."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            minute, _, _, running, _ = file.read().split()
    except (OSError, ValueError):
        return 1.0
    return max(float(minute), float(running.partition("/")[0])) / (os.cpu_count() or 1)


FACTOR = 1.3  # own seconds per step, relative to the median of the other ranks, from which on a rank is slow
WINDOW_STEPS, WINDOW_S = 10, 10.0
"""A window ends when every rank has done so many steps and so many seconds have passed."""
WINDOWS = 2  # number of windows in a row in which a rank must be slow
REPEAT_S = 600.0  # seconds until the same rank is named again


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow in WINDOWS windows."""

    rank: int
    step: int
    own_s: float  # seconds per step that it spends itself: not waiting for other ranks
    median_s: float  # the median of the other ranks that do the same work

    @property
    def factor(self) -> float:
        return self.own_s / self.median_s


def median_if_slow(rank: int, own: Mapping[int, float], work: Mapping[int, int]) -> float | None:
    """Returns the median of the other ranks' own seconds, among those with equal `work`, if `rank` needs more than
    FACTOR times as long; else None."""
    others = [own[other] for other in own if other != rank and work[other] == work[rank]]
    slow = bool(others) and own[rank] > FACTOR * median(others)
    return median(others) if slow else None


class SlowRanks:
    """Watches the ranks' own seconds per step."""

    def __init__(self) -> None:
        self._began: tuple[float, dict[int, RankRecord]] | None = None
        self._times: dict[int, int] = {}
        self._named: dict[int, float] = {}

    def update(self, records: Mapping[int, RankRecord], now: float) -> list[SlowRank]:
        """Takes the ranks' records at time `now`, in seconds. Returns the ranks to be named."""
        if not all(record.trained for record in records.values()):
            self._began = None
            return []
        if self._began is None or self._began[1].keys() != records.keys():
            self._began = now, dict(records)
            return []
        since, before = self._began
        steps = {rank: records[rank].step - before[rank].step for rank in records}
        if now - since < WINDOW_S or min(steps.values(), default=0) < WINDOW_STEPS:
            return []
        self._began = now, dict(records)
        own = {rank: (records[rank].own_s - before[rank].own_s) / steps[rank] for rank in records}
        return [found for rank in records if (found := self._judge(rank, own, records, now))]

    def _judge(
        self, rank: int, own: Mapping[int, float], records: Mapping[int, RankRecord], now: float
    ) -> SlowRank | None:
        usual = median_if_slow(rank, own, {other: record.work for other, record in records.items()})
        self._times[rank] = self._times.get(rank, 0) + 1 if usual is not None else 0
        if usual is None or self._times[rank] < WINDOWS or now - self._named.get(rank, -REPEAT_S) < REPEAT_S:
            return None
        self._named[rank] = now
        return SlowRank(rank, records[rank].step, own[rank], usual)


@dataclass(frozen=True)
class RankView:
    """All that is known of one rank at one moment."""

    rank: int
    record: RankRecord | None  # None if it has not written a heartbeat yet
    silent_s: float  # seconds since its last sign of life
    process: ProcessState | None = None
    exit_code: int | None = None
    """None while it runs; 128 + n for a death by signal n; -1 if it ended and nobody knows how."""
    ticks_s: float = 0.0  # seconds since the interpreter's last tick

    @property
    def ended(self) -> bool:
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
    missing: tuple[int, ...]  # ranks of the call that have not started it
    unseen: tuple[int, ...]  # ranks of the call on other machines, of which nothing is known here
    arrived: tuple[int, ...]  # ranks of the call that have started it


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

    hang_s: float  # 0: hangs are not looked for
    start_s: float  # until the first step is done, which loads, compiles and allocates, and after the last one
    follows: bool = False  # whether `hang_s` is only the longest: the limit follows the pace of the run

    @classmethod
    def within(cls, timeout_s: float) -> Limits:
        """Returns those of a test whose collectives wait `timeout_s`: the watchdog names who hangs before they fail."""
        return cls(timeout_s / 2, max(300.0, timeout_s / 2))

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
    """Returns the first difference between the calls that are known of the ranks."""
    return first_difference({rank: view.record.calls if view.record else () for rank, view in views.items()})


def first_difference(calls_of: Mapping[int, Sequence[RecordedCall]]) -> Mismatch | None:
    """Returns the earliest two calls that stand at the same place of a channel and differ, or, if the digests say that
    they did before all records, the earliest two after that. `rank` is the odd one out where there is a majority."""
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
    blocked = {wait.rank for wait in waits if wait.missing or wait.unseen}
    wanted = {rank for wait in waits for rank in wait.missing}
    suspects: tuple[tuple[Kind, set[int]], ...] = (
        ("silent", {rank for rank, view in views.items() if view.left_early}),
        ("silent", wanted - blocked),
        ("silent", {rank for wait in waits for rank in wait.arrived if views[rank].frozen}),
        ("unseen", {rank for wait in waits for rank in wait.unseen}),
    )
    for kind, ranks in suspects:
        if ranks:
            return kind, ranks
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
    found = []
    for view in views.values():
        if view.frozen or view.record is None:
            continue
        for call in view.record.calls:
            if call.waiting or call.on_device:
                wait = _wait(view.record, call, views)
                # The host does not see when a device is through: such a call counts only while a rank has not come.
                found += [wait] if call.waiting or wait.missing else []
    return tuple(found)


def _wait(record: RankRecord, call: RecordedCall, views: Mapping[int, RankView]) -> Wait:
    key = call.channel
    others, side = [rank for rank in record.groups.get(key.group, ()) if rank != record.rank], False
    if key.source >= 0:
        receives = record.rank == key.target
        others, side = [key.source if receives else key.target], not receives

    def came(rank: int) -> bool:
        theirs = views[rank].record
        return theirs is not None and theirs.started.get((key, side), 0) >= call.sequence

    here = [rank for rank in others if rank in views]
    missing, arrived = (tuple(rank for rank in here if came(rank) == whether) for whether in (False, True))
    return Wait(record.rank, call, missing, tuple(rank for rank in others if rank not in views), arrived)


GIL_SILENT_S = 3.0
"""Seconds without a tick of the interpreter, which ticks every second, from which on the GIL counts as held."""
_LAST_CALLS = 5
_STACKS, _STACK_LINES = 4, 12


def headline(diagnosis: Diagnosis, host: str, hosts: Sequence[str] = ()) -> str:
    """Returns the diagnosis in a few sentences: the culprits, since when, in which phase, and what they missed. `host`
    is this machine; `hosts` has that of every rank, if there are several."""
    if diagnosis.mismatch is not None:
        return mismatch_words(diagnosis.mismatch, host)
    culprits, views = diagnosis.culprits, diagnosis.views
    if diagnosis.kind == "deadlock":
        return f"Deadlock on {host}: {_ranks(culprits)} wait for each other, in different calls."
    if diagnosis.kind == "unseen":
        machines = ", ".join(dict.fromkeys(hosts[rank] for rank in culprits)) if hosts else "another machine"
        return (
            f"The ranks on {host} wait for {_ranks(culprits)} on {machines}: the connection is cut, or the report of "
            "that machine's watchdog says more."
        )
    if diagnosis.kind == "stuck":
        calls = [wait.call for wait in diagnosis.waits]
        calls = calls or [view.record.calls[-1] for view in views.values() if view.record and view.record.calls]
        last = "; ".join(dict.fromkeys(call_words(call) for call in calls)) or "no collective yet"
        return f"All ranks on {host} have come as far as {last}, and go no further: the connection or a device hangs."
    return "\n".join(_culprit(views[rank], diagnosis.waits, host) for rank in culprits)


def lines(diagnosis: Diagnosis) -> list[str]:
    """Returns a line for every wait: who waits since when in which call for whom."""
    found = []
    for wait in diagnosis.waits:
        for_whom = _ranks((*wait.missing, *wait.unseen)) if wait.missing or wait.unseen else "its completion"
        since = diagnosis.views[wait.rank].silent_s
        found.append(f"rank {wait.rank} has waited {since:.1f} s in {call_words(wait.call)} for {for_whom}")
    return found


def call_words(call: RecordedCall) -> str:
    """Returns a call in words: all-reduce #12 of tp in blocks.3.attn (float32, 4 × 8; file.py:7)."""
    shape = " × ".join(map(str, call.shape)) or "scalar"
    name = call.operation.replace("_max", " (maximum)").replace("_", "-")
    where = f" {call.channel.source} → {call.channel.target}" if call.channel.source >= 0 else ""
    if call.root >= 0 and call.operation != "shift":
        where = f" {'from' if call.operation in ('broadcast', 'scatter') else 'to'} rank {call.root}"
    where += f" in {call.module}" if call.module else ""
    return f"{name} #{call.sequence} of {call.axis}{where} ({call.dtype}, {shape}; {call.source})"


def as_json(diagnosis: Diagnosis, host: str, hosts: Sequence[str], stacks: Mapping[int, str]) -> dict[str, Any]:
    """Returns the whole diagnosis, JSON-able: hang.json."""
    return {
        "kind": diagnosis.kind,
        "host": host,
        "culprits": list(diagnosis.culprits),
        "message": headline(diagnosis, host, hosts),
        "ranks": [
            _rank(view, [wait for wait in diagnosis.waits if wait.rank == rank], stacks.get(rank, ""))
            for rank, view in sorted(diagnosis.views.items())
        ],
    }


def stack_excerpts(diagnosis: Diagnosis, stacks: Mapping[int, str]) -> list[str]:
    """Returns the end of the stack of each culprit's main thread, or that there is none."""
    found = []
    for rank in diagnosis.culprits[:_STACKS]:
        view = diagnosis.views.get(rank)
        if view is None or view.ended:
            continue
        threads = stacks.get(rank, "").strip().split("\n\n")
        if main := threads[-1].splitlines()[1 : _STACK_LINES + 1]:  # the newest thread comes first
            found += [f"main thread of rank {rank}, most recent call first:", *main]
        else:
            found.append(f"rank {rank} has not answered the request for its stack")
    return found


def state(view: RankView) -> str:
    """Returns what a rank's process does, in words."""
    if view.ended:
        return f"its process {_end(view.exit_code)}"
    if view.record is None:
        return "it has not written a heartbeat yet"
    if view.process is None:
        return "its process did something else"
    if not view.process.stopped and view.ticks_s > GIL_SILENT_S:
        return f"native code holds Python's global interpreter lock, and is {view.process.words}"
    if view.record.phase in (Phase.DATA, Phase.SAVE) and view.process.state in ("S", "D"):
        return f"its storage or data source does not answer; the process is {view.process.words}"
    return f"its process is {view.process.words}"


def _culprit(view: RankView, waits: Sequence[Wait], host: str) -> str:
    victims: dict[str, list[int]] = {}
    for wait in waits:
        if view.rank in wait.missing:
            victims.setdefault(call_words(wait.call), []).append(wait.rank)
    missed = [
        f"It has not called {call}, in which {_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'}."
        for call, ranks in victims.items()
    ]
    since = f" has been silent for {view.silent_s:.1f} s" if not view.ended else " is gone"
    where = ""
    if view.record is not None:
        number = f"step {view.record.step + 1}, " if view.record.first_step else ""
        where = f" in {number}phase {view.record.phase.label}"
    return " ".join([f"Rank {view.rank} ({host}){since}{where}: {state(view)}.", *missed])


def mismatch_words(mismatch: Mismatch, host: str) -> str:
    """Returns which two calls differ, in words."""
    if mismatch.earlier:
        return (
            f"Mismatched collectives on {host}: ranks {mismatch.rank} and {mismatch.other} made different calls of "
            f"{mismatch.call.axis} before #{mismatch.call.sequence} in step {mismatch.call.step + 1}; the first that "
            "differs is not among the last 1,024. All ranks of a group must make the same calls in the same order."
        )
    return (
        f"Mismatched collectives on {host}: rank {mismatch.rank} called {call_words(mismatch.call)} where rank "
        f"{mismatch.other} called {call_words(mismatch.other_call)}. All ranks of a group must make the same calls in "
        "the same order."
    )


def _rank(view: RankView, waits: Sequence[Wait], stack: str) -> dict[str, Any]:
    record = view.record
    facts: dict[str, Any] = {
        "rank": view.rank,
        "silent_s": round(view.silent_s, 3),
        "state": state(view),
        "exit_code": view.exit_code,
        "waits": [{"call": _facts(w.call), "missing": list(w.missing), "unseen": list(w.unseen)} for w in waits],
        "stacks": stack,
    }
    if record is not None:
        facts |= {"pid": record.pid, "step": record.step, "phase": record.phase.label}
        facts["last_calls"] = [_facts(call) for call in record.calls[-_LAST_CALLS:]]
    return facts


def _facts(call: RecordedCall) -> dict[str, Any]:
    names = ("operation", "axis", "group", "sequence", "dtype", "shape", "source", "module", "step", "waiting", "done")
    return {name: getattr(call.channel if name == "group" else call, name) for name in names}


def _end(code: int | None) -> str:
    if code is None or code < 0:
        return "has ended"
    if code - 128 in set(signal.Signals):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


def _ranks(ranks: Sequence[int]) -> str:
    unique = sorted(set(ranks))
    return f"{'ranks' if len(unique) > 1 else 'rank'} {', '.join(map(str, unique))}"
