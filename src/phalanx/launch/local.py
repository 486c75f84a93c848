"""Starts the ranks of a command on this machine, waits for them, and returns a single exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.launch.attempts import Attempts, say
from phalanx.launch.environment import LAUNCHER_PID, LOOPBACK, thread_environment
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.nodes.attempts import NodeAttempts
from phalanx.launch.nodes.join import Nodes
from phalanx.launch.output import unblocked
from phalanx.launch.restart import Restarts
from phalanx.launch.supervisor import StopSignals, Supervisor
from phalanx.launch.verdict import BEFORE_CHECKPOINT
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.folder import private_folder
from phalanx.launch.watchdog.watchdog import Watchdog

UNLIMITED = Limits(0.0, 0.0)
"""Ranks may be silent for any time."""
NO_RESTARTS = Restarts()


@unblocked()
def launch_local(
    argv: list[str],
    *,
    processes: int,
    log_dir: Path,
    threads: int,
    all_ranks: bool,
    grace_s: float = 30.0,
    module: str = "phalanx.cli.rank",
    stopped: str = BEFORE_CHECKPOINT,
    limits: Limits = UNLIMITED,
    metrics: Path | None = None,
    restarts: Restarts = NO_RESTARTS,
    nodes: Nodes | None = None,
) -> int:
    """Runs `python -m module ARGV…` as `processes` ranks and returns the exit code of the launch.

    Must be called in the main thread: it handles the signals, and a rank dies with the thread that started it.

    Args:
        argv: the command line that every rank gets.
        processes: number of ranks.
        log_dir: parent directory of attempt_<k>/rank_<r>/.
        threads: CPU threads of each rank, unless the user has set OMP_NUM_THREADS.
        all_ranks: show the output of every rank, prefixed with the rank.
        grace_s: seconds for the ranks to write a checkpoint after a signal.
        module: the module to run; it calls phalanx.launch.worker.main.
        stopped: the wording of `verdict` for ranks stopped by a signal.
        limits: when a silent rank hangs, so that all are killed.
        metrics: file to which rows about slow ranks are appended.
        restarts: when failed ranks are started again.
        nodes: the run's other nodes, and this one's part; None if all ranks are on this machine.

    Returns:
        That of the last attempt: 0, or the code of the rank that failed first, or 75 when the ranks stopped with a
        checkpoint, or 124 when the watchdog had them killed, or 128 + n when signal n ended them. The message has been
        printed to standard error.

    Raises:
        RunError: the ranks could not be started.
    """
    _say_whose_threads(threads)
    network = nodes.environment if nodes else LOOPBACK
    environment = {LAUNCHER_PID: str(os.getpid()), **network, **thread_environment(threads, os.environ)}
    with private_folder() as store_dir:
        logs = AttemptLogs(log_dir.absolute(), store_dir, environment, all_ranks)

        def new_supervisor(signals: StopSignals) -> Supervisor:
            def watchdog() -> Watchdog:
                return Watchdog(logs.heartbeats, limits, say, metrics, states=logs.attempt_dir)

            return Supervisor(logs.outcome, grace_s, signals, watchdog)

        try:
            how = (logs, new_supervisor, stopped, restarts)
            attempts = NodeAttempts(*how, nodes.join) if nodes else Attempts(*how)
            with attempts, attempts.signals.handled():
                attempts.run([module, *argv], processes)
        except OSError as error:
            raise RunError(f"Cannot start {processes} ranks with logs in {log_dir}: {error}.") from error
    return attempts.code


def _say_whose_threads(threads: int) -> None:
    theirs = os.environ.get("OMP_NUM_THREADS")
    if theirs not in (None, str(threads)):
        echo(f"phalanx: OMP_NUM_THREADS={theirs} is set and overrides {threads} threads per rank", file=sys.stderr)
