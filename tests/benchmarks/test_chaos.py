"""The fault bench: its judgement, its view of processes, its page, and, with PHALANX_FAULTS=1 (make faults), faults
injected for real."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid

import pytest
import torch
from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos import processes, results, weights
from benchmarks.chaos.bench import Bench
from benchmarks.chaos.fault import CLASSES, Fault
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.program import Phalanx
from benchmarks.chaos.story import DETECTED, INVALID, LOST, SURVIVED, Attempt, Story, judge

FAULT = Fault(1, "x", "SIGKILL to rank 1", "restart", names=r"Rank 1\b")
ASKED = dataclasses.replace(FAULT, stops=True, codes=frozenset({75}))
FACTS = {
    "processor": "P", "cores": 2, "memory_gib": 8, "kernel": "6", "torch": "2", "python": "3", "phalanx": "0",
    "commit": "abc", "date": "2026-01-01",
}  # fmt: skip


def attempt(code: int, *output: str, rows: tuple[tuple[float, str, int], ...] = (), timed_out: bool = False) -> Attempt:
    """An attempt from second 0 to second 20, whose output came at second 11."""
    events = [(time, {"event": event, "step": step}) for time, event, step in rows]
    return Attempt(0.0, 20.0, code, timed_out, [(11.0, line) for line in output], events)


def story(first: Attempt, second: Attempt | None = None, **fields: object) -> Story:
    return Story(first, second, **{"injected": 10.0, "difference": 0.0, **fields})  # type: ignore[arg-type]


MORE = pytest.mark.skipif("PHALANX_FAULTS" not in os.environ, reason="a fault more; set PHALANX_FAULTS=1 to run it")
SHORT = {"train.steps": 20}
"""The runs of the short subset; a job of its own also means that its control runs only once."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Phalanx(), tmp_path_factory.mktemp("chaos"))


NAMED = "phalanx: Rank 1 of 2 was killed by SIGKILL."


@pytest.mark.parametrize(
    ("fault", "told", "word", "reason"),
    [
        (FAULT, story(attempt(0, NAMED)), SURVIVED, ""),
        (FAULT, story(attempt(137, NAMED), attempt(0)), DETECTED, ""),
        (ASKED, story(attempt(75, NAMED), attempt(0)), SURVIVED, ""),
        (ASKED, story(attempt(0, NAMED)), LOST, "as if nothing had been asked"),
        (FAULT, story(attempt(0, NAMED), difference=1e-7), LOST, "silent wrong result"),
        (dataclasses.replace(FAULT, bound=1e-6), story(attempt(0, NAMED), difference=1e-7), SURVIVED, ""),
        (FAULT, story(attempt(0, NAMED), difference=None), LOST, "no final weights"),
        (FAULT, story(attempt(137, "Rank 0 failed"), attempt(0)), LOST, "does not name the culprit"),
        (FAULT, story(attempt(3, NAMED), attempt(0)), LOST, "exit code 3"),
        (FAULT, story(attempt(137, NAMED, timed_out=True), attempt(0)), LOST, "it hangs"),
        (FAULT, story(attempt(137, NAMED), attempt(4, "damaged")), LOST, "the same command again ends with 4: damaged"),
        (FAULT, story(attempt(0, NAMED, "Traceback (most recent call last):")), LOST, "traceback"),
        (FAULT, story(attempt(0, NAMED), orphans=["python"]), LOST, "1 processes are left"),
        (FAULT, story(attempt(0, NAMED), problems=["a port is open"]), LOST, "a port is open"),
        (FAULT, story(attempt(0, NAMED), injected=0.0), INVALID, "not injected"),
        (FAULT, story(attempt(0, NAMED, rows=((12.0, "start", 5),)), saves=[(10.0, 10)]), LOST, "saved work is gone"),
    ],
)  # fmt: skip
def test_judgement(fault, told, word, reason):
    verdict = judge(fault, told)
    assert verdict.word == word
    assert reason in " ".join(verdict.reasons)


def test_a_survivor_that_names_nobody_falls_short():
    assert judge(FAULT, story(attempt(0))).remarks == ("the culprit is not named",)


def test_figures():
    rows = ((1.0, "start", 0), (2.0, "step", 1), (9.0, "step", 12), (14.0, "start", 10), (14.5, "step", 11))
    told = story(attempt(0, "step: 12  lost: 1", NAMED, rows=rows))
    figures = told.figures(FAULT)
    assert (figures["detect_s"], figures["back_s"], figures["steps_lost"]) == (1.0, 4.5, 2)
    assert story(attempt(0, told_by := "step: 13  guard: a transient fault")).told(FAULT) == (11.0, told_by)
    resumed = story(attempt(137, rows=rows[:3]), attempt(0, rows=((30.0, "start", 10),)))
    figures = resumed.figures(FAULT)
    assert (figures["detect_s"], figures["back_s"], figures["steps_lost"]) == (10.0, None, 2)


def test_a_checkpoint_counts_as_saved_once_it_is_whole(tmp_path):
    for name, last in (("step-000005", "manifest.json"), ("step-000010", ".metadata"), ("step-000015", "part")):
        (tmp_path / name).mkdir()
        (tmp_path / name / last).touch()
    assert weights.newest_step(tmp_path) == 10
    assert weights.newest_step(tmp_path / "step-000015") == weights.newest_step(tmp_path / "absent") == 0


def test_one_differing_bit_is_a_difference():
    control = {"model/a": torch.ones(4), "optimizer/b": torch.zeros(2)}
    same = {name: tensor.clone() for name, tensor in control.items()}
    assert weights.difference(same, control) == 0.0
    same["model/a"][1] = 1 + 2**-23
    assert weights.difference(same, control) == pytest.approx(2**-23)
    noise = {**control, "model/key_bias": torch.full((2,), 1e-15)}
    assert 0 < weights.difference({**noise, "model/key_bias": torch.full((2,), -1e-15)}, noise) < 1e-6
    assert weights.difference({"model/a": torch.ones(4)}, control) == float("inf")
    assert weights.difference({**control, "model/a": torch.tensor([1.0, float("nan"), 1, 1])}, control) == float("inf")


def test_processes_and_their_ports_are_found_by_their_mark():
    mark = uuid.uuid4().hex
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-u", "-S", "-c", code],
        env={**os.environ, processes.MARK: mark, "RANK": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        port = int(child.stdout.readline())
        assert processes.rank_pids(mark) == {3: child.pid}
        ((address, open_port),) = processes.listening([child.pid])
        assert open_port == port
        assert processes.is_loopback(address)
        assert not processes.is_loopback("0" * 32)
    finally:
        processes.kill(mark)
        child.communicate()
    assert processes.marked(mark) == []


def test_a_class_is_as_good_as_its_worst_fault():
    def result(number: int, name: str, verdict: str) -> dict:
        return {"class": number, "name": name, "verdict": verdict, "reasons": ["it hangs"], "remarks": []}

    found = {"1/a": result(1, "a", SURVIVED), "1/b": result(1, "b", LOST), "2/a": result(2, "a", DETECTED)}
    assert results.summary(found) == (
        "2 classes by their worst fault: 0 survived, 1 detected, 1 lost. 3 faults: 1 survived, 1 detected, 1 lost."
    )
    kept = results.Results("", FACTS, programs={"phalanx": found})
    page = results.page(kept, {}, "phalanx", "peer")
    assert "| 1 | a rank is killed | **lost** |" in page
    assert "- **1/b** (lost): it hangs" in page


def test_results_of_another_commit_do_not_count(tmp_path):
    state = tmp_path / "state.json"
    kept = results.Results.open(state, FACTS, fresh=False)
    kept.add("phalanx", FAULT, {"verdict": SURVIVED})
    assert results.Results.open(state, FACTS, fresh=False).of("phalanx").keys() == {"1/x"}
    assert not results.Results.open(state, {**FACTS, "commit": "other"}, fresh=False).programs
    assert not results.Results.open(state, FACTS, fresh=True).programs


def test_the_list_has_every_class(capsys):
    assert chaos.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{number}  {title}" in shown for number, title in CLASSES.items())
    assert all(fault.key in shown for fault in FAULTS)
    assert {fault.number for fault in chaos.choose("4,1/at-step", quick=False)} == {1, 4}
    with pytest.raises(ValueError, match="no class or fault '99'"):
        chaos.choose("99", quick=False)


@pytest.mark.timeout(230)
@MORE
@pytest.mark.parametrize("key", ["1/at-step", "22/term"])
def test_the_short_subset_of_the_bench(bench, key):
    """Faults injected for real: what is lost here is lost for users."""
    (fault,) = chaos.choose(key, quick=False)
    found = bench.run(dataclasses.replace(fault, job=SHORT))
    assert found["verdict"] in (SURVIVED, DETECTED), found
    assert found["difference"] == 0.0
