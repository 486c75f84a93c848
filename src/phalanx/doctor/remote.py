"""Runs the checks on other hosts through a remote shell, and compares what they report. Needs no torch here."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from phalanx.bounded import parse_json
from phalanx.doctor.findings import CheckResult, error, ok, warn
from phalanx.doctor.machine import CheckedMachine, EndedProgram
from phalanx.errors import JobError

MAX_SKEW_S = 5.0
_AT_ONCE = 16
_PATIENCE = 12
"""Factor on the seconds of a check: the remote shell, an import of torch, and all checks."""


@dataclass(frozen=True)
class HostAnswer:
    """The answer of one host."""

    host: str
    document: dict[str, Any]
    """Its report; empty if there is none."""
    problem: str
    """Why there is none."""
    skew_s: tuple[float, float]
    """The range in which its clock is ahead of ours, in seconds."""


def words_for(argv: Sequence[str]) -> list[str]:
    """Returns the words of the command line without --hosts and --remote-shell, for the command on each host."""
    words, left = [], list(argv)
    while left:
        word = left.pop(0)
        if word in ("--remote-shell", "--remote_shell"):  # its value may hold anything: "ssh -o BatchMode=yes"
            left = left[1:]
        elif word == "--hosts":
            while left and not left[0].startswith("-") and "=" not in left[0] and not _is_file(left[0]):
                left.pop(0)
        elif not word.startswith(("--hosts=", "--remote-shell=", "--remote_shell=")) and word != "--json":
            words.append(word)
    return words


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


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
            return HostAnswer(host, {}, f"{prefix[0]}: {problem.strerror}", (0.0, 0.0))
        return _answer(host, ran, before, time.time())

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(ask, hosts))
    return [*_told(answers, shlex.join(prefix)), *_differences(answers)]


def _answer(host: str, ran: EndedProgram, before: float, after: float) -> HostAnswer:
    nothing = (0.0, 0.0)
    if ran.code is None:
        return HostAnswer(host, {}, "no answer in time", nothing)
    try:
        document = parse_json(ran.out)
        stamp = float(document["time"])
    except (ValueError, KeyError, TypeError):
        last = (ran.err.strip().splitlines() or ["no message"])[-1]
        return HostAnswer(host, {}, f"exit code {ran.code}: {last[:300]}", nothing)
    return HostAnswer(host, document, "", (stamp - after, stamp - before))


def _told(answers: Sequence[HostAnswer], shell: str) -> Iterator[CheckResult]:
    for answer in answers:
        if answer.problem:
            yield _line(
                "host",
                error(answer.problem, f"try it: {shell} {answer.host} hostname; the same Python must be there"),
                answer.host,
            )
            continue
        try:
            found = [CheckResult.from_dict(each) for each in answer.document["findings"]]
        except (KeyError, TypeError, ValueError) as problem:
            yield _line("host", error(f"its report is not understood: {problem}", "install one version"), answer.host)
            continue
        yield from (replace(finding, hosts=(answer.host,)) for finding in found)


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
    differing = [finding for name in facts[everywhere[0]] for finding in _differing(name, facts)]
    yield from differing
    if not differing:
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


def _differing(name: str, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    hosts: dict[str, list[str]] = {}
    for host, known in facts.items():
        hosts.setdefault(json.dumps(known.get(name), sort_keys=True)[:200], []).append(host)
    usual = max(hosts, key=lambda value: len(hosts[value]))
    for value, names in hosts.items():
        if value != usual:
            remedy = "give every node the same installation, job and settings"
            here, there = (text.strip('"') for text in (value, usual))
            yield _line("same program", error(f"{name} is {here}, on the other hosts {there}", remedy), *names)
