"""The report: all lines, of one machine or of several, as text and as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import phalanx
from phalanx.doctor import accelerator, environment, limits, network, scheduler, software, storage
from phalanx.doctor import job as job_checks
from phalanx.doctor.findings import GROUPS, CheckResult, DoctorCheck, error, run, worst
from phalanx.doctor.machine import CheckedMachine
from phalanx.echo import visible
from phalanx.train.run_directory import extension_facts, job_facts, source_digest
from phalanx.units import listed, seconds

FORMAT = 1
"""Version of the document of `--json`; it changes when a key is removed or gets another meaning."""
_COLOURS = {"OK": "32", "WARN": "33", "ERROR": "31;1"}
_SHOWN_HOSTS = 4


@dataclass(frozen=True)
class DoctorReport:
    """What was found, on which machines."""

    findings: tuple[CheckResult, ...]
    hosts: tuple[str, ...]
    launcher: str
    """The launcher that started the ranks, or "none"."""
    world: int
    """Ranks that were asked; 1 without a launcher."""
    took_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about this machine that all nodes of a run must share, by name."""

    @property
    def exit_code(self) -> int:
        return 1 if worst(self.findings) == "ERROR" else 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json` (docs/guides/doctor.md)."""
        return {
            "format": FORMAT,
            "phalanx": phalanx.__version__,
            "status": worst(self.findings),
            "launcher": self.launcher,
            "world": self.world,
            "hosts": list(self.hosts),
            "seconds": round(self.took_s, 2),
            "time": time.time(),
            "facts": dict(self.facts),
            "findings": [finding.as_dict() for finding in self.findings],
        }


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns every check of one machine."""
    rooms = [scheduler, software, accelerator, limits, storage, network, environment]
    found = [check for room in rooms for check in room.checks(machine)]
    return [*found, *job_checks.checks(machine)] if machine.has_job else found


def launcher_findings(machine: CheckedMachine) -> list[CheckResult]:
    """Returns the lines of a rank that is not the first of its node, which reports the others."""
    checks = [check for check in scheduler.checks(machine) if check.name == "launcher"]
    return [replace(finding, hosts=(platform.node(),)) for finding in run(checks, machine.seconds)]


def local_findings(machine: CheckedMachine, problems: Sequence[str]) -> list[CheckResult]:
    """Returns the lines of this machine. `problems` are those of the job."""
    illegal = [
        replace(error(" ".join(problem.split()), "correct the job: no verb takes it"), group="job", check="job file")
        for problem in problems
    ]
    host = (platform.node(),)
    return [replace(finding, hosts=host) for finding in [*run(checks(machine), machine.seconds), *illegal]]


def facts_of(machine: CheckedMachine) -> dict[str, Any]:
    """Returns what all nodes of a run must share: torch's facts as far as it is installed, the program, the job."""
    known = {
        "phalanx version": phalanx.__version__,
        "phalanx source": source_digest(),
        "extensions": extension_facts(),
        "Python version": platform.python_version(),
        **machine.torch.facts().get("facts", {}),
    }
    if machine.has_job:
        digest = hashlib.sha256(json.dumps(job_facts(machine.job), sort_keys=True).encode()).hexdigest()
        known["job (sha256 of its fields)"] = digest[:16]
    return known


def merged(findings: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """Returns the lines of several hosts with equal ones as one, in the order of groups and checks."""
    hosts: dict[CheckResult, dict[str, None]] = {}
    order: dict[tuple[str, str], int] = {}
    for finding in findings:
        order.setdefault((finding.group, finding.check), len(order))
        hosts.setdefault(replace(finding, hosts=()), {}).update(dict.fromkeys(finding.hosts))
    lines = [replace(finding, hosts=tuple(names)) for finding, names in hosts.items()]
    return tuple(sorted(lines, key=lambda line: (GROUPS.index(line.group), order[line.group, line.check])))


def shown(report: DoctorReport) -> list[CheckResult]:
    """Returns the lines for people: where a check found nothing wrong on several hosts, one line is enough."""
    found: list[CheckResult] = []
    for line in report.findings:
        alike = [other for other in report.findings if (other.group, other.check) == (line.group, line.check)]
        fine = [other for other in alike if other.status == "OK"]
        if line.status != "OK" or len(fine) == 1 or len(report.hosts) == 1:
            found.append(line)
        elif line is fine[0]:
            hosts = tuple(dict.fromkeys(host for other in fine for host in other.hosts))
            found.append(replace(line, text=f"{line.text} (figures of {line.hosts[0]})", hosts=hosts))
    return found


def text(report: DoctorReport, stream: TextIO, env: dict[str, str] | None = None) -> str:
    """Returns the report for `stream`: in groups and columns on a terminal, coloured unless NO_COLOR is set; elsewhere
    one line per finding that can be searched."""
    env = dict(os.environ) if env is None else env
    if not stream.isatty():
        return "\n".join([*(_plain(line, report) for line in shown(report)), _summary(report)])
    colours = not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    return "\n".join([*_grouped(report, colours, shutil.get_terminal_size().columns), _summary(report)])


def show(report: DoctorReport, stream: TextIO) -> None:
    """Writes the report for people. It does not pass `echo`, which would show its colours as escapes: the texts of the
    checks are made visible one by one."""
    stream.write(f"{text(report, stream)}\n")
    stream.flush()


def _plain(line: CheckResult, report: DoctorReport) -> str:
    remedy = f" -> {line.remedy}" if line.remedy else ""
    return visible(f"{line.status:<5}  {line.group}: {line.check}: {_where(line, report)}{line.text}{remedy}")


def _where(line: CheckResult, report: DoctorReport) -> str:
    """Returns the hosts of a line, unless they are all of them."""
    if not line.hosts or set(line.hosts) == set(report.hosts):
        return ""
    return f"[{listed(line.hosts, _SHOWN_HOSTS)}] "


def _grouped(report: DoctorReport, colours: bool, width: int) -> Iterable[str]:
    lines, group = shown(report), ""
    column = max((len(line.check) for line in lines), default=0)
    margin = 2 + 5 + 2 + column + 2
    for line in lines:
        if line.group != group:
            group = line.group
            yield _coloured(group, "1", colours)
        status = _coloured(f"{line.status:<5}", _COLOURS[line.status], colours)
        first, *rest = _wrapped(_where(line, report) + line.text, width - margin)
        yield f"  {status}  {visible(line.check):<{column}}  {first}"
        yield from (" " * margin + each for each in rest)
        if line.remedy:
            first, *rest = _wrapped(line.remedy, width - margin - 3)
            yield " " * margin + _coloured("-> ", _COLOURS[line.status], colours) + first
            yield from (" " * (margin + 3) + each for each in rest)


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(visible(words), max(30, width), break_long_words=False, break_on_hyphens=False) or [""]


def _coloured(words: str, code: str, colours: bool) -> str:
    return f"\x1b[{code}m{words}\x1b[0m" if colours else words


def _summary(report: DoctorReport) -> str:
    counts = {status: sum(line.status == status for line in report.findings) for status in _COLOURS}
    parts = [f"{counts['ERROR']} errors", f"{counts['WARN']} warnings", f"{counts['OK']} OK"]
    where = f" on {len(report.hosts)} hosts" if len(report.hosts) > 1 else ""
    return f"{', '.join(parts)}{where} ({seconds(report.took_s)})".replace("1 errors", "1 error").replace(
        "1 warnings", "1 warning"
    )
