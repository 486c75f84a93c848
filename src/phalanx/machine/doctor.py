"""The report: all lines, of one machine or of several, as text and as JSON.

Other hosts are asked through a remote shell; what they report is compared here, which needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import phalanx
from phalanx.bounded import parse_json
from phalanx.echo import visible
from phalanx.errors import JobError
from phalanx.machine import network, storage, system
from phalanx.machine.checks import CHECKS, GROUPS, CheckedMachine, CheckResult, DoctorCheck, error, ok, run, warn, worst
from phalanx.train.run_directory import extension_facts, job_facts, source_digest
from phalanx.units import counted, listed, seconds

MODULES = (network, storage, system)
"""The modules whose checks are made; importing them enters these into CHECKS."""
MAX_SKEW_S = 5.0
_AT_ONCE = 16
_PATIENCE = 12
"""Factor on the seconds of a check: the remote shell, an import of torch, and all checks."""


@dataclass(frozen=True)
class HostAnswer:
    host: str
    document: dict[str, Any] = field(default_factory=dict)
    """Its report; empty if there is none."""
    problem: str = ""
    """Why there is none."""
    skew_s: tuple[float, float] = (0.0, 0.0)
    """The range in which its clock is ahead of ours, in seconds."""


def compare(hosts: Sequence[str], shell: str, words: Sequence[str], seconds: float) -> list[CheckResult]:
    """Runs `phalanx doctor WORDS --json` on all hosts at the same time, in this directory and with this Python.

    Returns the lines of every host, and how hosts differ. Raises JobError for a host or shell that is no word."""
    if wrong := [host for host in hosts if host.startswith("-") or not host.isprintable() or " " in host]:
        raise JobError(f"--hosts: {wrong[0]!r} is no host name")
    try:
        prefix = shlex.split(shell)
    except ValueError as problem:
        raise JobError(f"--remote-shell: {problem}") from None
    command = [sys.executable, "-P", "-m", "phalanx", "doctor", *words, "--json"]
    # A colleague's PYTHONPATH, modules and variables are not there: the report says what differs.
    script = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"

    def ask(host: str) -> HostAnswer:
        before = time.time()
        try:
            ran = CheckedMachine(seconds=seconds * _PATIENCE).call([*prefix, host, script])
        except OSError as problem:
            return HostAnswer(host, problem=f"{prefix[0]}: {problem.strerror}")
        if ran.code is None:
            return HostAnswer(host, problem="no answer in time")
        try:
            document = parse_json(ran.out)
            stamp = float(document["time"])
        except (ValueError, KeyError, TypeError):
            last = (ran.err.strip().splitlines() or ["no message"])[-1]
            return HostAnswer(host, problem=f"exit code {ran.code}: {last[:300]}")
        return HostAnswer(host, document, "", (stamp - time.time(), stamp - before))

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(ask, hosts))
    return [*_told(answers, shlex.join(prefix)), *_differences(answers)]


def _told(answers: Sequence[HostAnswer], shell: str) -> Iterator[CheckResult]:
    for answer in answers:
        host = answer.host
        try:
            if answer.problem:
                remedy = f"try it: {shell} {host} hostname; the same Python must be there"
                yield _line("host", error(answer.problem, remedy), host)
            else:
                found = [CheckResult.from_dict(each) for each in answer.document["findings"]]
                yield from (replace(finding, hosts=(host,)) for finding in found)
        except (KeyError, TypeError, ValueError) as problem:
            yield _line("host", error(f"its report is not understood: {problem}", "install one version"), host)


def _line(check: str, finding: CheckResult, *hosts: str) -> CheckResult:
    return replace(finding, group="nodes", check=check, hosts=hosts)


def _differences(answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    """Yields the facts in which hosts differ from most of them, and clocks that are off."""
    there = [answer for answer in answers if not answer.problem]
    if len(there) < 2:
        return
    everywhere = [answer.host for answer in there]
    told = {answer.host: answer.document.get("facts") for answer in there}
    facts: dict[str, dict[str, Any]] = {host: found if isinstance(found, dict) else {} for host, found in told.items()}
    agree = True
    for name in facts[everywhere[0]]:
        hosts: dict[str, list[str]] = {}
        for host, known in facts.items():
            hosts.setdefault(json.dumps(known.get(name), sort_keys=True)[:200], []).append(host)
        usual = max(hosts, key=lambda value: len(hosts[value]))
        for value, names in ((value, names) for value, names in hosts.items() if value != usual):
            agree = False
            here, others = (text.strip('"') for text in (value, usual))
            text = f"{name} is {here}, on the other hosts {others}"
            yield _line("same program", error(text, "give every node the same installation, job and settings"), *names)
    if agree:
        yield _line("same program", ok(f"{len(facts[everywhere[0]])} facts agree on {len(there)} hosts"), *everywhere)
    off = [answer for answer in there if answer.skew_s[0] > MAX_SKEW_S or answer.skew_s[1] < -MAX_SKEW_S]
    for answer in off:
        low, high = answer.skew_s
        apart = f"at least {low:.1f} s ahead of" if low > 0 else f"at least {-high:.1f} s behind"
        yield _line(
            "clocks", warn(f"its clock is {apart} that of {platform.node()}", "set the clocks by NTP"), answer.host
        )
    if not off:
        yield _line("clocks", ok(f"no clock is seen to be more than {MAX_SKEW_S:g} s off"), *everywhere)


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
    found = sorted(CHECKS, key=lambda check: GROUPS.index(check.group))
    left_out = ("memory", "checkpoints", "run directory", "trackers") if machine.job.layout.auto else ()
    return [check for check in found if check.group != "job" or (machine.has_job and check.name not in left_out)]


def launcher_findings(machine: CheckedMachine) -> list[CheckResult]:
    """Returns the lines of a rank that is not the first of its node, which reports the others."""
    checks = [check for check in CHECKS if check.name == "launcher"]
    return [replace(finding, hosts=(platform.node(),)) for finding in run(checks, machine)]


def local_findings(machine: CheckedMachine, problems: Sequence[str]) -> list[CheckResult]:
    """Returns the lines of this machine. `problems` are those of the job."""
    illegal = [
        replace(error(" ".join(problem.split()), "correct the job: no verb takes it"), group="job", check="job file")
        for problem in problems
    ]
    host = (platform.node(),)
    return [replace(finding, hosts=host) for finding in [*run(checks(machine), machine), *illegal]]


def apart(findings: Sequence[CheckResult], reason: str) -> list[CheckResult]:
    """Returns the lines of this node alone, and why it did not meet the others."""
    text, _, advice = reason.partition("\n")
    advice = advice or "start the same command on every node, and look at what this node says about the network"
    return [*findings, replace(error(text[:1000], advice), group="nodes", check="rendezvous")]


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
        lines = [
            visible(
                f"{line.status:<5}  {line.group}: {line.check}: {_where(line, report)}{line.text}"
                + (f" -> {line.remedy}" if line.remedy else "")
            )
            for line in shown(report)
        ]
        return "\n".join([*lines, _summary(report)])
    colours = not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    return "\n".join([*_grouped(report, colours, shutil.get_terminal_size().columns), _summary(report)])


def show(report: DoctorReport, stream: TextIO) -> None:
    """Writes the report for people. It does not pass `echo`, which would show its colours as escapes: the texts of the
    checks are made visible one by one."""
    stream.write(f"{text(report, stream)}\n")
    stream.flush()


def _where(line: CheckResult, report: DoctorReport) -> str:
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
    where = f" on {len(report.hosts)} hosts" if len(report.hosts) > 1 else ""
    words = f"{counted(counts['ERROR'], 'error')}, {counted(counts['WARN'], 'warning')}, {counts['OK']} OK"
    return f"{words}{where} ({seconds(report.took_s)})"
