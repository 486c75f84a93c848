"""A diagnosis in words for people, and as JSON for programs."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.launch.watchdog.diagnosis import Diagnosis, Mismatch, RankView, Wait
from phalanx.launch.watchdog.layout import Phase
from phalanx.launch.watchdog.reader import RecordedCall

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
        return (
            f"The ranks on {host} wait for {_ranks(culprits)} on {_machines(culprits, hosts)}: the connection is cut, "
            "or the report of that machine's watchdog says more."
        )
    if diagnosis.kind == "stuck":
        return _stuck(diagnosis, host)
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
    missed = [f"It has not called {call}, in which {_waits(ranks)}." for call, ranks in victims.items()]
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


def _stuck(diagnosis: Diagnosis, host: str) -> str:
    calls = [wait.call for wait in diagnosis.waits]
    calls = calls or [view.record.calls[-1] for view in diagnosis.views.values() if view.record and view.record.calls]
    last = "; ".join(dict.fromkeys(call_words(call) for call in calls)) or "no collective yet"
    return f"All ranks on {host} have come as far as {last}, and go no further: the connection or a device hangs."


def _rank(view: RankView, waits: Sequence[Wait], stack: str) -> dict[str, Any]:
    record = view.record
    facts: dict[str, Any] = {
        "rank": view.rank,
        "silent_s": round(view.silent_s, 3),
        "state": state(view),
        "exit_code": view.exit_code,
        "waits": [
            {"call": _call(wait.call), "missing": list(wait.missing), "unseen": list(wait.unseen)} for wait in waits
        ],
        "stacks": stack,
    }
    if record is not None:
        facts |= {"pid": record.pid, "step": record.step, "phase": record.phase.label}
        facts["last_calls"] = [_call(call) for call in record.calls[-_LAST_CALLS:]]
    return facts


def _call(call: RecordedCall) -> dict[str, Any]:
    return {
        "operation": call.operation,
        "axis": call.axis,
        "group": call.channel.group,
        "sequence": call.sequence,
        "dtype": call.dtype,
        "shape": list(call.shape),
        "source": call.source,
        "module": call.module,
        "step": call.step,
        "waiting": call.waiting,
        "done": call.done,
    }


def _machines(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else "another machine"


def _end(code: int | None) -> str:
    if code is None or code < 0:
        return "has ended"
    if code - 128 in set(signal.Signals):
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"exited with code {code}"


def _waits(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def _ranks(ranks: Sequence[int]) -> str:
    unique = sorted(set(ranks))
    return f"{'ranks' if len(unique) > 1 else 'rank'} {', '.join(map(str, unique))}"
