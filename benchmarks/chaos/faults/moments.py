"""When and how faults are injected from outside: small functions that faults are put together from."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from benchmarks.chaos.live import Live, send

STEP = 12
"""The step at which faults are injected, of 40; checkpoints are those of steps 5 and 10."""

Action = Callable[[Live], None]


def at_step(action: Action, step: int = STEP) -> Action:
    """Returns what waits for `step` to be done and then acts."""

    def wait_and_act(live: Live) -> None:
        live.wait_step(step)
        live.now()
        action(live)

    return wait_and_act


def at_start(seconds: float, action: Action) -> Action:
    """Returns what acts `seconds` after the start of the command: Python may still be importing."""

    def wait_and_act(live: Live) -> None:
        until = live.attempt.began + seconds
        live.wait_until(lambda: time.time() >= until, f"{seconds} s")
        live.now()
        action(live)

    return wait_and_act


def kill_rank(rank: int, number: int = signal.SIGKILL) -> Action:
    """Returns what sends a signal to one rank."""
    return lambda live: live.kill_rank(rank, number)


def kill_launcher(number: int = signal.SIGKILL, node: int = 0) -> Action:
    """Returns what sends a signal to the launcher."""

    def act(live: Live) -> None:
        if number == signal.SIGKILL:
            live.victims.add(node)
        live.kill_launcher(number, node)

    return act


def stop_rank(rank: int, seconds: float | None) -> Action:
    """Returns what stops a rank by SIGSTOP, and lets it go on after `seconds`; None: never."""

    def act(live: Live) -> None:
        pid = live.pid(rank)
        live.kill_rank(rank, signal.SIGSTOP)
        if seconds is not None:
            until = time.time() + seconds
            live.wait_until(lambda: time.time() >= until, "the rank could go on")
            send(pid, signal.SIGCONT)

    return act


def both(*actions: Action) -> Action:
    """Returns what does one after the other."""

    def act(live: Live) -> None:
        for action in actions:
            action(live)

    return act


def after_restart(action: Action) -> Action:
    """Returns what waits until the run trains again after a first injection, and then acts."""

    def wait_and_act(live: Live) -> None:
        def trains_again() -> bool:
            starts = [time for time, row in live.attempt.rows if time > live.injected and row["event"] == "start"]
            return bool(starts) and live.attempt.rows[-1][1]["event"] == "step" and live.step > STEP + 3

        live.wait_until(trains_again, "the restart")
        action(live)

    return wait_and_act
