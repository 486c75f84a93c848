"""The lines of a report, and checks that cannot hang it: each runs in a thread of its own, up to a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

Status = Literal["OK", "WARN", "ERROR"]
"""OK; WARN: a run may be slow, or fail later; ERROR: a run fails."""
STATUSES: tuple[Status, ...] = ("OK", "WARN", "ERROR")
"""From the best to the worst."""
GROUPS = ("launch", "software", "accelerator", "limits", "storage", "network", "environment", "job", "nodes")
"""The groups of checks, in the order of the report."""
SECONDS = 10.0
"""Seconds that a check may take by default."""
T = TypeVar("T")


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    group: str
    check: str
    status: Status
    text: str
    """What was found, with its figures."""
    remedy: str = ""
    """What to do about it; empty if the status is OK."""
    hosts: tuple[str, ...] = ()
    """The hosts on which it was found."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding for `--json`."""
        return {**asdict(self), "hosts": list(self.hosts)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> CheckResult:
        """Returns the finding of another host's report. Raises KeyError, TypeError or ValueError if it is none."""
        if found["status"] not in STATUSES or found["group"] not in GROUPS:
            raise ValueError(f"status {found['status']!r}, group {found['group']!r}")
        check, text, remedy = (str(found[name])[:4000] for name in ("check", "text", "remedy"))
        return cls(found["group"], check, found["status"], text, remedy, tuple(map(str, found["hosts"])))


def ok(text: str) -> CheckResult:
    """Returns a line of a check that found nothing wrong; `run` adds the names of its group and check."""
    return CheckResult("", "", "OK", text)


def warn(text: str, remedy: str) -> CheckResult:
    """Returns a line about something that may slow a run down, or end it later."""
    return CheckResult("", "", "WARN", text, remedy)


def error(text: str, remedy: str) -> CheckResult:
    """Returns a line about something that makes a run fail."""
    return CheckResult("", "", "ERROR", text, remedy)


@dataclass(frozen=True)
class DoctorCheck:
    """One check: a function that returns lines, made by `ok`, `warn` and `error`."""

    group: str
    name: str
    find: Callable[[], Iterable[CheckResult]]
    if_it_hangs: str = "look for a file system or a name server that does not answer"
    """The remedy if it does not return in time."""
    patience: float = 1.0
    """Factor on the seconds that a check may take."""
    subject: Callable[[], str] = str
    """What hangs if the check does, found out without touching it."""


def run(checks: Sequence[DoctorCheck], seconds: float = SECONDS) -> list[CheckResult]:
    """Runs all checks at the same time, and returns their lines in the order of the checks.

    A check that has not returned after `seconds`, times its patience, is an ERROR and is left behind; one that raises
    is an ERROR, too."""
    found: list[list[CheckResult]] = [[] for _ in checks]
    began = time.monotonic()

    def work(number: int, check: DoctorCheck) -> None:
        try:
            lines = list(check.find())
        except Exception as problem:  # one broken check must not hide the findings of the others
            lines = [error(f"the check failed: {type(problem).__name__}: {problem}", "report this as a bug")]
        found[number] = lines

    threads = [
        threading.Thread(target=work, args=pair, name=f"phalanx-doctor-{pair[1].name}", daemon=True)
        for pair in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    report: list[CheckResult] = []
    for check, thread, lines in zip(checks, threads, range(len(checks)), strict=True):
        limit = seconds * check.patience
        thread.join(max(0.0, began + limit - time.monotonic()))
        what = check.subject()
        hangs = error(f"no answer after {limit:g} s{f': {what}' if what else ''}", check.if_it_hangs)
        named = [hangs] if thread.is_alive() else found[lines]
        report += [replace(line, group=check.group, check=check.name) for line in named]
    return report


def within(seconds: float, work: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `work`, or `otherwise` if it takes longer: it is then left behind. An exception counts
    as taking longer."""
    found = [otherwise]

    def call() -> None:
        with suppress(Exception):
            found[0] = work()

    thread = threading.Thread(target=call, name="phalanx-doctor-within", daemon=True)
    thread.start()
    thread.join(seconds)
    return otherwise if thread.is_alive() else found[0]


def worst(findings: Iterable[CheckResult]) -> Status:
    """Returns the worst status, OK for no findings."""
    return STATUSES[max((STATUSES.index(finding.status) for finding in findings), default=0)]
