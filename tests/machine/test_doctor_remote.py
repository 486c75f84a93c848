"""Hosts through a remote shell, which here is a program that answers for them."""

import time

import pytest

from machine.machines import program
from phalanx.errors import JobError
from phalanx.machine import doctor as report

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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("job.yaml --hosts a b --json", "job.yaml"),
        ("--hosts a,b job.yaml tp=2 --timeout 3", "job.yaml tp=2 --timeout 3"),
        ("--hosts a b tp=2", "tp=2"),
        ("--remote-shell ssh job.yaml --hosts=a", "job.yaml"),
    ],
)
def test_the_words_for_each_host(argv, words):
    assert " ".join(report.words_for(argv.split())) == words


def test_a_remote_shell_with_options_of_its_own_is_no_word_of_the_job():
    argv = ["job.yaml", "--remote-shell", "ssh -o BatchMode=yes", "tp=2", "--hosts", "a", "b", "--timeout", "3"]
    assert report.words_for(argv) == ["job.yaml", "tp=2", "--timeout", "3"]


def test_facts_that_are_no_mapping_are_none(compared):
    lines = compared("a", "b", "c", b={"facts": ["torch"]})
    assert lines["same program", "b"].text == "torch is null, on the other hosts 2.13"
