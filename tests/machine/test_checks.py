"""The machine as checks see it, and how they run."""

from __future__ import annotations

import threading
import time

from machine.machines import machine, program, statuses, write
from phalanx.launch.lifeline import process_state
from phalanx.machine.checks import CheckedMachine, CheckResult, DoctorCheck, error, ok, run, warn, within, worst

# What checks may ask of a machine: files of the kernel, programs with deadlines, torch in a process of its own.


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_files_of_the_kernel(tmp_path):
    write(tmp_path, "/proc/some", "text")
    assert machine(tmp_path).read("/proc/some") == "text"
    assert machine(tmp_path).read("/proc/other", "nothing") == "nothing"
    assert machine(tmp_path).names_in("/proc") == ["some"]
    assert machine(tmp_path).names_in("/sys") == []


def test_a_program_that_leaves_a_child_behind_does_not_hang_the_caller(tmp_path):
    text = "import subprocess, sys\nsubprocess.Popen(['sleep', '5'])\nprint('done')\nsys.exit(7)\n"
    program(tmp_path / "bin", "parent", text)
    began = time.monotonic()
    ran = machine().call([str(tmp_path / "bin" / "parent")])
    assert (ran.code, ran.out) == (7, "done\n")
    assert time.monotonic() - began < 4


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    program(tmp_path / "bin", "parent", "import os, time\nprint(os.fork(), flush=True)\ntime.sleep(60)\n")
    ran = machine().call([str(tmp_path / "bin" / "parent")], 0.5)
    assert ran.code is None
    child = max(map(int, ran.out.split()))
    end = time.monotonic() + 5
    while (state := process_state(child)) and state.state != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert state is None or state.state == "Z"


def test_the_ranks_of_a_node():
    assert machine().local_ranks == 1
    assert machine(job="model=tiny cluster.nodes=2 --dp-replicate 4 global_batch=8").local_ranks == 2
    assert machine(env=TORCHRUN).local_ranks == 1  # the launcher does not say
    assert machine(env=TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).local_ranks == 2
    assert machine(env=TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}).several_nodes
    assert not machine(env=TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}).several_nodes
    assert machine(env={"RANK": "1", "WORLD_SIZE": "4"}).ranks is None


def test_torch_is_asked_once(tmp_path):
    program(
        tmp_path / "bin",
        "python",
        f"open({str(tmp_path / 'asked')!r}, 'a').write('x')\nprint('{{\"version\": \"1\"}}')",
    )
    found = CheckedMachine(python=str(tmp_path / "bin" / "python"))
    assert found.torch.facts() == found.torch.facts() == {"version": "1"}
    assert (tmp_path / "asked").read_text() == "x"


# The frame of the checks: deadlines, order, and what a broken check means.


def test_lines_come_in_the_order_of_the_checks():
    slow = DoctorCheck("storage", "slow", lambda _: (time.sleep(0.05), [ok("one"), warn("two", "mend it")])[1])
    lines = run([slow, DoctorCheck("network", "quick", lambda _: [ok("three")])], machine())
    assert [(line.group, line.check, line.text) for line in lines] == [
        ("storage", "slow", "one"),
        ("storage", "slow", "two"),
        ("network", "quick", "three"),
    ]


def test_a_check_that_hangs_is_an_error_and_is_left_behind():
    forever = threading.Event()
    began = time.monotonic()
    hanging = DoctorCheck(
        "storage", "locks", lambda _: [ok(str(forever.wait()))], "try another one", 1.0, lambda _: "/scratch on nfs4"
    )
    lines = run([hanging, DoctorCheck("network", "loopback", lambda _: [ok("answers")])], machine(seconds=0.2))
    assert time.monotonic() - began < 2
    forever.set()
    assert statuses(lines) == "ERROR OK"
    assert lines[0].text == "no answer after 0.2 s: /scratch on nfs4"
    assert lines[0].remedy == "try another one"


def test_a_check_that_raises_hides_no_other():
    def broken(_):
        yield ok("this far")
        raise ZeroDivisionError("by zero")

    lines = run(
        [DoctorCheck("limits", "broken", broken), DoctorCheck("limits", "fine", lambda _: [ok("fine")])], machine()
    )
    assert statuses(lines) == "ERROR OK"
    assert lines[0].text == "the check failed: ZeroDivisionError: by zero"


def test_work_that_takes_too_long():
    forever = threading.Event()
    assert within(1.0, lambda: 3, 4) == 3
    assert within(0.05, forever.wait, False) is False
    forever.set()


def test_the_worst_status_counts():
    assert worst([]) == "OK"
    assert worst([ok("a"), warn("b", "c")]) == "WARN"
    assert worst([warn("b", "c"), error("d", "e"), ok("a")]) == "ERROR"


def test_a_line_survives_json():
    line = CheckResult("nodes", "clocks", "WARN", "off", "set it", ("a", "b"))
    assert CheckResult.from_dict(line.as_dict()) == line
