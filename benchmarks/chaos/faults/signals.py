"""Class 22: signals that ask a run to stop, in every phase of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import RESUMABLE, Fault
from benchmarks.chaos.faults.moments import Action, at_start, at_step, both, kill_launcher, kill_rank
from benchmarks.chaos.live import Live
from benchmarks.chaos.story import Story

_GOLD = "all ranks stop at the next safe point with one checkpoint and exit code 75, within run.grace_s"
_NOW = 128 + signal.SIGTERM
_STOPPED = frozenset({RESUMABLE})
_GRACE_S = 8
_SLACK_S = 12  # a busy machine: between the end of the grace time and that of the last process
_EVALUATION = {
    "data.random_tokens": 1_000_000, "train.eval_every": 14, "train.eval_samples": 1_500, "train.steps": 28,
}  # fmt: skip
_SLOW_SAVE = {"CHAOS_FS_RANK": 0, "CHAOS_FS_PATH": "/checkpoints/", "CHAOS_FS_AT": 20, "CHAOS_FS_DO": "slow"}


def _stop(name: str, what: str, during: Action | None, **fields: object) -> Fault:
    fields = {"codes": _STOPPED, "check": _in_time, **fields}
    return Fault(22, name, what, _GOLD, during=during, stops=True, **fields)  # type: ignore[arg-type]


def _in_time(arena: Arena, story: Story) -> Sequence[str]:
    took = story.first.ended - story.injected
    grace = arena.settings.get("run.grace_s", 30)
    return [f"it stopped {took:.0f} s after the signal, grace is {grace} s"] if took > grace + _SLACK_S else []


def _after(seconds: float, action: Action) -> Action:
    """Returns what acts after a pause, if the command still runs."""

    def act(live: Live) -> None:
        until = time.time() + seconds
        while live.running and time.time() < until:
            time.sleep(0.01)
        if live.running:
            action(live)

    return act


def _when_shim_acts(action: Action) -> Callable[[Arena], None]:
    def prepare(arena: Arena) -> None:
        def act(live: Live) -> None:
            live.wait_until(arena.mark_file.exists, "the save")
            live.now()
            action(live)

        arena.during = act

    return prepare


FAULTS = (
    _stop("term", "SIGTERM to the launcher between steps", at_step(kill_launcher(signal.SIGTERM)), peer=True,
          quick=True),
    _stop("usr1", "SIGUSR1 to the launcher (Slurm's --signal)", at_step(kill_launcher(signal.SIGUSR1))),
    _stop("int", "SIGINT to the launcher (Ctrl-C)", at_step(kill_launcher(signal.SIGINT))),
    _stop("hup", "SIGHUP to the launcher (the terminal is gone)", at_step(kill_launcher(signal.SIGHUP))),
    _stop("one-rank", "SIGTERM to rank 1 alone", at_step(kill_rank(1, signal.SIGTERM))),
    _stop("start", "SIGTERM while the ranks import", at_start(2.0, kill_launcher(signal.SIGTERM)),
          codes=frozenset({RESUMABLE, _NOW})),
    _stop("evaluation", "SIGTERM inside an evaluation of some seconds",
          at_step(_after(0.5, kill_launcher(signal.SIGTERM)), 14), job=_EVALUATION, extra={"run.grace_s": _GRACE_S}),
    _stop("save", "SIGTERM inside a slow save", None, shim={**_SLOW_SAVE, "CHAOS_FS_MS": 100},
          prepare=_when_shim_acts(kill_launcher(signal.SIGTERM)), needs=("compiler",)),
    _stop("data-wait", "SIGTERM while rank 1 waits for data for 60 s",
          None, plugin={"rank": 1, "at": "data", "step": 12, "do": "sleep", "seconds": 60},
          prepare=_when_shim_acts(_after(0.5, kill_launcher(signal.SIGTERM))), extra={"run.grace_s": _GRACE_S},
          codes=frozenset({RESUMABLE, _NOW})),
    _stop("twice", "SIGTERM, and once more after 1 s, inside a slow save",
          None, shim={**_SLOW_SAVE, "CHAOS_FS_MS": 1000},
          prepare=_when_shim_acts(both(kill_launcher(signal.SIGTERM), _after(1.0, kill_launcher(signal.SIGTERM)))),
          codes=frozenset({RESUMABLE, _NOW}), needs=("compiler",)),
    Fault(
        22, "reader-gone", "the reader of the output goes away (`phalanx train | head`)",
        "training goes on, or stops with a checkpoint and says so by its exit code",
        during=at_step(Live.close_output), codes=frozenset({RESUMABLE, 128 + signal.SIGPIPE}),
    ),
)  # fmt: skip
