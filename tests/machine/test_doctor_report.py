"""The report of one machine or of several."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from machine.machines import machine, program
from phalanx.errors import JobError
from phalanx.machine import doctor as report
from phalanx.machine.checks import GROUPS, CheckResult
from phalanx.machine.doctor import DoctorReport, checks, facts_of, merged, shown, text

# The report for people, for programs that read lines, and as JSON.


LINES = (
    CheckResult("software", "python", "OK", "Python 3.11", "", ("a",)),
    CheckResult("limits", "memory", "WARN", "little \x1b[31m free", "ask for more " * 20, ("a",)),
    CheckResult("storage", "locks", "ERROR", "none", "elsewhere", ("a",)),
)
REPORT = DoctorReport(LINES, ("a",), "none", 1, 2.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_for_programs():
    plain = text(REPORT, io.StringIO(), {}).splitlines()
    assert plain[0] == "OK     software: python: Python 3.11"
    assert plain[1].startswith("WARN   limits: memory: little \\x1b[31m free -> ask for more")
    assert plain[2] == "ERROR  storage: locks: none -> elsewhere"
    assert plain[3] == "1 error, 1 warning, 1 OK (2.0s)"


def test_groups_and_columns_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = text(REPORT, Terminal(), {"NO_COLOR": "1"})
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert lines[:4] == ["software", "  OK     python  Python 3.11", "limits", "  WARN   memory  little \\x1b[31m free"]
    assert lines[4].startswith(" " * 17 + "-> ask for more")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)])
def test_colours(env, coloured):
    shown = text(REPORT, Terminal(), env)
    assert ("\x1b[31;1mERROR\x1b[0m" in shown) == coloured
    assert "\x1b[31m" not in shown  # what a check found has no effect on the terminal


def test_equal_lines_of_hosts_are_one():
    def line(host, status, words):
        return CheckResult("limits", "memory", status, words, "x" if status == "WARN" else "", (host,))

    found = merged(
        [line("a", "OK", "3GiB"), line("b", "OK", "3GiB"), line("c", "WARN", "1GiB"), line("d", "OK", "4GiB")]
    )
    assert [(each.text, each.hosts) for each in found] == [("3GiB", ("a", "b")), ("1GiB", ("c",)), ("4GiB", ("d",))]
    report = DoctorReport(found, ("a", "b", "c", "d"), "torchrun", 4, 1.0)
    assert [(each.text, each.hosts) for each in shown(report)] == [
        ("3GiB (figures of a)", ("a", "b", "d")),
        ("1GiB", ("c",)),
    ]
    assert "[c] 1GiB" in text(report, io.StringIO(), {})
    assert "2 OK on 4 hosts" in text(report, io.StringIO(), {})


def test_the_document():
    document = REPORT.as_dict()
    assert list(document) == [
        *("format", "phalanx", "status", "launcher", "world", "hosts", "seconds", "time", "facts", "findings")
    ]
    assert (document["format"], document["status"], REPORT.exit_code) == (1, "ERROR", 1)
    assert list(document["findings"][0]) == ["group", "check", "status", "text", "remedy", "hosts"]
    assert DoctorReport(LINES[:2], ("a",), "none", 1, 2.0).exit_code == 0


def test_every_check_belongs_to_a_group_and_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "doctor.md").read_text()
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for check in checks(machine(job="model=tiny", env=env)):
        assert check.group in GROUPS
        assert f"| {check.name} |" in page


def test_facts():
    found = machine(job="model=tiny")
    found.torch._facts = {"facts": {"torch version": "2.13"}}
    facts = facts_of(found)
    assert {"phalanx version", "phalanx source", "Python version", "torch version"} < set(facts)
    other = machine(job="model=tiny train.steps=7")
    other.torch._facts = {"problem": "none"}
    digest = "job (sha256 of its fields)"
    assert facts_of(other)[digest] != facts[digest]
    assert "torch version" not in facts_of(other)


# Hosts through a remote shell, which here is a program that answers for them.


SHELL = """
import json, sys, time
host, script = sys.argv[-2:]
known = {known!r}
if host == "gone":
    sys.exit("ssh: connect to host gone port 22: No route to host")
if host == "hangs":
    time.sleep(60)
document = {{"time": time.time() + known.get(host, {{}}).pop("ahead", 0), "findings": [], "facts": {{"torch": "2.13"}}}}
document |= known.get(host, {{}})
print(json.dumps(document) if host != "strange" else "motd")
"""
LINE = {"group": "limits", "check": "memory", "status": "WARN", "text": "little", "remedy": "more", "hosts": ["x"]}


@pytest.fixture
def compared(tmp_path):
    """`compared(hosts, host={...})`: the lines of hosts whose reports have these keys."""

    def of(*hosts, seconds=10.0, **known):
        program(tmp_path / "bin", "rsh", SHELL.format(known=known))
        lines = report.compare(hosts, str(tmp_path / "bin" / "rsh"), ["job.yaml"], seconds)
        return {(line.check, *line.hosts): line for line in lines}

    return of


def test_hosts_that_agree(compared):
    lines = compared("a", "b", a={"findings": [LINE]})
    assert lines["memory", "a"].text == "little"
    assert lines["same program", "a", "b"].status == lines["clocks", "a", "b"].status == "OK"


def test_a_host_with_another_version(compared):
    line = compared("a", "b", "c", b={"facts": {"torch": "2.11"}})["same program", "b"]
    assert (line.status, line.text) == ("ERROR", "torch is 2.11, on the other hosts 2.13")


@pytest.mark.parametrize(("ahead", "text"), [(3600, "s ahead of"), (-3600, "s behind")])
def test_a_host_with_another_clock(compared, ahead, text):
    line = compared("a", "b", b={"ahead": ahead})["clocks", "b"]
    assert line.status == "WARN"
    assert text in line.text


def test_hosts_that_do_not_answer(compared):
    lines = compared("a", "gone", "strange")
    assert lines["host", "gone"].text == "exit code 1: ssh: connect to host gone port 22: No route to host"
    assert lines["host", "strange"].status == "ERROR"


def test_a_host_that_hangs(compared):
    began = time.monotonic()
    assert compared("hangs", seconds=0.05)["host", "hangs"].text == "no answer in time"
    assert time.monotonic() - began < 5


def test_a_report_that_is_not_understood(compared):
    assert "not understood" in compared("a", a={"findings": [{"status": "FINE"}]})["host", "a"].text


def test_a_shell_that_is_not_there(tmp_path):
    [line] = report.compare(["a"], str(tmp_path / "none"), [], 1.0)
    assert (line.status, "No such file" in line.text) == ("ERROR", True)


@pytest.mark.parametrize(("hosts", "shell"), [(["-oProxyCommand=x"], "ssh"), (["a b"], "ssh"), (["a"], "ssh 'x")])
def test_words_that_are_no_hosts(hosts, shell):
    with pytest.raises(JobError):
        report.compare(hosts, shell, [], 1.0)


def test_facts_that_are_no_mapping_are_none(compared):
    lines = compared("a", "b", "c", b={"facts": ["torch"]})
    assert lines["same program", "b"].text == "torch is null, on the other hosts 2.13"
