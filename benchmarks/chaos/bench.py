"""Runs one fault: prepare, start, inject, wait for the end, give the command again where it is needed, compare."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos import processes, weights
from benchmarks.chaos.arena import WORK, Arena
from benchmarks.chaos.fault import RESUMABLE, Fault
from benchmarks.chaos.live import Live, NotReachedError
from benchmarks.chaos.machine import missing
from benchmarks.chaos.program import Program
from benchmarks.chaos.story import INVALID, LOST, SKIPPED, Attempt, Story, Verdict, judge
from benchmarks.report import without_places

GONE_S = 6.0
"""Seconds that processes may take to go after their command has ended; the right behaviour is 5."""
_CONTROL_S = 300.0
_HALF = 17

Result = dict[str, Any]


class ControlError(Exception):
    """A run without a fault failed, or differs from itself: nothing can be compared."""


class Bench:
    """The bench for one program, with the runs without faults that faults are compared with."""

    def __init__(self, program: Program, root: Path, keep: bool = False):
        self.program, self.root, self.keep = program, root, keep
        self._states: dict[str, weights.State] = {}
        self.seconds: dict[str, float] = {}
        """Seconds of each control."""

    def control(self, job: Mapping[str, Any]) -> weights.State:
        """Returns the final weights of a run without a fault. The bench's own job runs twice. Raises ControlError."""
        key = repr(sorted(job.items()))
        if key not in self._states:
            self._states[key] = self._undisturbed(job, "done")
            if not job and (off := weights.difference(self._undisturbed(job, "twin"), self._states[key])):
                raise ControlError(f"two runs without a fault differ by {off:.2g}")
        return self._states[key]

    def folder(self, start: str, job: Mapping[str, Any]) -> Path:
        """Returns the folder of a finished run, or of one that was stopped halfway."""
        path = self._place(start, job)
        if not path.exists():
            _ = self._undisturbed(job, start)
        return path / "work"

    def _place(self, start: str, job: Mapping[str, Any]) -> Path:
        return self.root / "controls" / f"{start}-{abs(hash(repr(sorted(job.items())))):x}"

    def _undisturbed(self, job: Mapping[str, Any], start: str) -> weights.State:
        place = self._place(start, job)
        shutil.rmtree(place, ignore_errors=True)
        fault = Fault(0, start, "", "", job=job, stops=True)
        with Arena(place, fault, self.program, self.root) as arena:
            live = arena.start(limit_s=_CONTROL_S)
            if start == "half":
                live.wait_step(_HALF)
                live.kill_launcher(signal.SIGTERM)
            attempt = live.finish()
            self.seconds[f"{start} {dict(job)}"] = attempt.ended - attempt.began
            if attempt.code != (RESUMABLE if start == "half" else 0) and self.program.name == "phalanx":
                raise ControlError(f"the run without a fault ended with {attempt.code}:\n{attempt.output[-2000:]}")
            state = None if start == "half" else self.program.load(arena.folder, arena.settings["train.steps"])
        if state is None and start != "half":
            raise ControlError("the run without a fault left no final weights")
        return state or {}

    def run(self, fault: Fault) -> Result:
        """Injects one fault and returns its result: the verdict and the figures. Never raises for the fault's sake."""
        fault = self.program.adapt(fault)
        lacking = [f"{name}: {reason}" for name in fault.needs if (reason := missing(name))]
        if lacking:
            return _result(fault, Verdict(SKIPPED, tuple(lacking)), {})
        try:
            control = self.control(fault.job)
        except ControlError as error:
            return _result(fault, Verdict(INVALID, (str(error),)), {})
        root = self.root / "faults" / fault.key.replace("/", "-")
        shutil.rmtree(root, ignore_errors=True)
        with Arena(root, fault, self.program, self.root) as arena:
            if fault.start != "empty":
                arena.copy(self.folder(fault.start, fault.job))
            try:
                if fault.prepare:
                    fault.prepare(arena)
                story = self._story(arena, fault)
            except (NotReachedError, OSError, subprocess.SubprocessError) as error:
                # The injection itself failed: the bench says so, and the next fault has its turn.
                return _result(fault, Verdict(INVALID, (str(error),)), {})
            found = self.program.load(arena.folder, arena.settings["train.steps"])
            story.difference = weights.difference(found, control)
            story.files = arena.left_files()
            story.problems = list(fault.check(arena, story)) if fault.check else []
            verdict = judge(fault, story)
        result = _result(fault, verdict, story.figures(fault))
        if verdict.word in (LOST, INVALID):
            result["output"] = story.first.output[-3000:]
        if not self.keep:
            shutil.rmtree(root, ignore_errors=True)
        return without_root(result, root)

    def _story(self, arena: Arena, fault: Fault) -> Story:
        live = arena.start()
        reason = ""
        try:
            (arena.during or _own_injection(arena))(live)
        except NotReachedError as error:
            reason = str(error)
        saved = weights.newest_step(arena.checkpoints)
        story = Story(live.finish())
        if arena.mark_file.exists() and not live.injected:
            live.injected = arena.mark_file.stat().st_mtime
        story.injected = live.injected
        story.saves = live.saves or [(live.injected, saved)]
        if reason and not live.injected:
            live.attempt.lines.append((time.time(), f"(bench) {reason}"))
        self._what_is_left(arena, story)
        for other in arena.others:
            other.finish()
        if story.injected and (story.first.code or story.first.timed_out):
            story.second = self._again(arena, fault)
        return story

    def _what_is_left(self, arena: Arena, story: Story) -> None:
        if arena.others and any(other.running for other in arena.others):
            return
        left, story.gone_s = processes.wait_gone(arena.mark, 0 if story.first.timed_out else GONE_S)
        story.orphans = [process.command for process in left]
        story.ports = [f"{port}" for _, port in processes.listening(process.pid for process in left)]
        processes.kill(arena.mark)

    def _again(self, arena: Arena, fault: Fault) -> Attempt:
        arena.calm()
        if fault.repair:
            fault.repair(arena)
        live = arena.start(limit_s=_CONTROL_S)
        attempt = live.finish()
        processes.kill(arena.mark)
        return attempt


def _own_injection(arena: Arena) -> Callable[[Live], None]:
    """Returns what waits for an injection that acts by itself; what was prepared before the start counts from there."""

    def wait(live: Live) -> None:
        if not (arena.plugin or arena.shim):
            live.injected = live.attempt.began
            return
        live.wait_until(arena.mark_file.exists, "the injection")
        live.injected = arena.mark_file.stat().st_mtime

    return wait


def without_root(result: Result, root: Path) -> Result:
    """Returns a result whose texts name files relative to the folder where commands run, or to the fault's `root`."""
    return json.loads(without_places(json.dumps(result), {f"{root / WORK}/": "", f"{root}/": ""}))


def _result(fault: Fault, verdict: Verdict, figures: Mapping[str, Any]) -> Result:
    figures = {name: "inf" if value == math.inf else value for name, value in figures.items()}
    return {
        "class": fault.number,
        "name": fault.name,
        "verdict": verdict.word,
        "reasons": list(verdict.reasons),
        "remarks": list(verdict.remarks),
        **figures,
    }
