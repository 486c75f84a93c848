"""What happened to a run with a fault, and the verdict about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.fault import Fault

TRACEBACK = "Traceback (most recent call last)"
SURVIVED, DETECTED, LOST, SKIPPED, INVALID = "survived", "detected", "lost", "skipped", "invalid"
VERDICTS = (SURVIVED, DETECTED, LOST)
"""Best first: a class is as good as the worst of its faults."""

_ROUTINE = re.compile(
    r"^(step: +\d+ +(?! *guard)|sent per step|run: |model: |batch: |peak: |trained |validation loss|sample|$)"
)
_NOTICED = re.compile(
    r"(?i)restart|kill|SIG[A-Z]+|\blost\b|silent|stopp|damaged|corrupt|differ|not finite|\bnan\b|no space|needs .* free"
    r"|refus|in use|slow|waits? for|does not match|failed|error|missing|cannot|transient"
)


@dataclass
class Attempt:
    """One command, from its start to its end."""

    began: float
    """Seconds since the epoch, as all times here."""
    ended: float = 0.0
    code: int = 0
    """Exit code as in a shell; of several nodes the first one's that is not 0, without those that the fault took."""
    timed_out: bool = False
    lines: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Output with its times of arrival."""
    rows: list[tuple[float, dict[str, Any]]] = field(default_factory=list[tuple[float, dict[str, Any]]])
    """Rows of metrics.jsonl that this command wrote, with their times of arrival."""
    codes: list[int] = field(default_factory=list[int])
    """Exit codes of all commands."""

    @property
    def output(self) -> str:
        """The whole output."""
        return "\n".join(line for _, line in self.lines)


@dataclass
class Story:
    """All that the bench saw of one fault."""

    first: Attempt
    second: Attempt | None = None
    """The same command, given again where the first did not reach the end."""
    injected: float = 0.0
    """Time of the injection; 0: it never happened."""
    saves: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Time of each injection, and the step of the newest checkpoint then."""
    difference: float | None = None
    """Largest relative difference of a final weight from the control's; None: there are no weights."""
    orphans: list[str] = field(default_factory=list[str])
    """Commands of processes left when the first command had ended."""
    gone_s: float = 0.0
    """Seconds after the end of the command until its last process was gone."""
    ports: list[str] = field(default_factory=list[str])
    """Ports that were still open then."""
    files: list[str] = field(default_factory=list[str])
    """Temporary files that were left after the last command."""
    problems: list[str] = field(default_factory=list[str])
    """Found by the fault's own check."""

    def figures(self, fault: Fault) -> dict[str, Any]:
        """Returns the measurements for the report."""
        return {
            "exit_code": self.first.code,
            "seconds": round(self.first.ended - self.first.began, 1),
            "detect_s": _rounded(self.detect_s(fault)),
            "told": self.told(fault)[1][:300],
            "back_s": _rounded(self.back_s()),
            "steps_lost": self.steps_lost(),
            "difference": self.difference,
            "orphans": len(self.orphans),
            "gone_s": round(self.gone_s, 1),
            "ports": self.ports,
            "files_left": self.files,
        }

    def detect_s(self, fault: Fault) -> float | None:
        """Seconds from the injection to the first line that tells of it, to a restart, or to the end of the command."""
        if not self.injected:
            return None
        told = [time for time, line in [self.told(fault)] if line]
        restarts = [time for time, row in self.first.rows if time > self.injected and row["event"] == "start"]
        ends = [self.first.ended] if self.first.code else []
        return min([*told, *restarts, *ends]) - self.injected if told or restarts or ends else None

    def told(self, fault: Fault) -> tuple[float, str]:
        """Returns the first line that tells of the fault, with its time; empty if there is none."""
        lines = ((time, line) for time, line in self.first.lines if time >= self.injected)
        return next((told for told in lines if _tells(told[1], fault.names)), (0.0, ""))

    def back_s(self) -> float | None:
        """Seconds from the injection to the first step after the restart; None if the command did not restart."""
        restart = next((t for t, row in self.first.rows if t > self.injected and row["event"] == "start"), None)
        if restart is None or not self.injected:
            return None
        step = next((t for t, row in self.first.rows if t >= restart and row["event"] == "step"), None)
        return None if step is None else step - self.injected

    def steps_lost(self) -> int:
        """Steps that were taken again."""
        rows = [*self.first.rows, *(self.second.rows if self.second else [])]
        lost = done = 0
        for _, row in rows:
            if row["event"] == "start":
                lost += max(0, done - int(row["step"]))
                done = int(row["step"])
            elif row["event"] == "step":
                done = max(done, int(row["step"]))
        return lost

    def resumed_at(self, moment: float) -> int | None:
        """Step of the first start after a moment."""
        later = [row for time, row in self.first.rows if time > moment]
        later += [row for _, row in self.second.rows] if self.second else []
        return next((int(row["step"]) for row in later if row["event"] == "start"), None)


def _tells(line: str, names: str) -> bool:
    if _ROUTINE.match(line):
        return False
    return bool(names and re.search(names, line)) or bool(_NOTICED.search(line))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), 2)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one story."""

    word: str
    """survived, detected or lost; invalid: the fault was not injected."""
    reasons: tuple[str, ...] = ()
    """Why it is lost."""
    remarks: tuple[str, ...] = ()
    """What falls short of the right behaviour without loss."""


def judge(fault: Fault, story: Story) -> Verdict:
    """Returns the verdict: survived if the run reached its end by itself with the control's weights (or obeyed a fault
    that asks for a stop), detected if it stopped cleanly, named the culprit and the same command reached those weights,
    lost otherwise."""
    first = story.first
    if not story.injected:
        return Verdict(INVALID, (f"the fault was not injected; the command ended with {first.code}",))
    reasons = [*_always(fault, story), *story.problems]
    named = not fault.names or re.search(fault.names, first.output) is not None
    by_itself = first.code == 0 and not first.timed_out
    if by_itself and fault.stops and 0 not in fault.codes:
        reasons.append("the run ended with 0, as if nothing had been asked")
    if not by_itself:
        reasons += _stop(fault, story, named)
    reasons += _weights(fault, story, by_itself)
    if reasons:
        return Verdict(LOST, tuple(dict.fromkeys(reasons)))
    remarks = () if named else ("the culprit is not named",)
    return Verdict(SURVIVED if by_itself or fault.stops else DETECTED, (), remarks)


def _always(fault: Fault, story: Story) -> list[str]:
    found = []
    attempts = [attempt for attempt in (story.first, story.second) if attempt]
    if any(TRACEBACK in attempt.output for attempt in attempts) and not fault.traceback:
        found.append("a traceback is shown")
    if story.orphans:
        found.append(f"{len(story.orphans)} processes are left: {story.orphans[0][:80]}")
    if story.ports:
        found.append(f"ports are left open: {', '.join(story.ports)}")
    for moment, saved in [] if fault.damages else story.saves:
        resumed = story.resumed_at(moment)
        if resumed is not None and resumed < saved:
            found.append(f"saved work is gone: step {saved} was saved, the run went on from step {resumed}")
    return found


def _stop(fault: Fault, story: Story, named: bool) -> list[str]:
    first, second = story.first, story.second
    found = []
    if first.timed_out:
        found.append(f"it hangs: killed after {first.ended - first.began:.0f} s")
    elif first.code not in fault.codes:
        codes = ", ".join(map(str, sorted(fault.codes)))
        found.append(f"exit code {first.code}, right would be {codes}")
    if not named and not first.timed_out:
        found.append("the message does not name the culprit")
    if second and second.timed_out:
        found.append("the same command again hangs")
    elif second and second.code:
        found.append(f"the same command again ends with {second.code}: {_last(second.output)}")
    return found


def _weights(fault: Fault, story: Story, by_itself: bool) -> list[str]:
    if story.difference is None:
        return ["the run says success, but there are no final weights"] if by_itself else []
    if story.difference > fault.bound:
        silent = "silent wrong result: the" if by_itself else "after resuming, the"
        return [f"{silent} final weights differ by up to {story.difference:.2g} from the control's"]
    return []


def _last(output: str) -> str:
    lines: Sequence[str] = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no message"
