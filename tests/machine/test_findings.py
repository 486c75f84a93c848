"""The frame of the checks: deadlines, order, and what a broken check means."""

import threading
import time

from machine.machines import machine, statuses
from phalanx.machine.checks import CheckResult, DoctorCheck, error, ok, run, warn, within, worst


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
