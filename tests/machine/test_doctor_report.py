"""The report for people, for programs that read lines, and as JSON."""

import io
from pathlib import Path

import pytest

from machine.machines import machine
from phalanx.machine.checks import GROUPS, CheckResult
from phalanx.machine.doctor import DoctorReport, checks, facts_of, merged, shown, text

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
