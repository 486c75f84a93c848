"""Starts the ranks of a command on this machine, waits for them, and returns a single exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.launch.attempts import Attempts, headline, say, tell
from phalanx.launch.environment import LAUNCHER_PID, LOOPBACK, thread_environment
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.lost_peer import TEXTS
from phalanx.launch.nodes.join import Nodes
from phalanx.launch.nodes.messages import Ending, NodeFailure
from phalanx.launch.nodes.node import NodeRendezvous
from phalanx.launch.output import unblocked
from phalanx.launch.processes import NodePart
from phalanx.launch.restart import Failure, Restarts
from phalanx.launch.supervisor import StopSignals, Supervisor
from phalanx.launch.verdict import BEFORE_CHECKPOINT
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.folder import private_folder
from phalanx.launch.watchdog.watchdog import Watchdog

# The attempts of a node's launcher: as those of a lone one, but the host may end them, and others' failures count.
_EXPLANATION_S = 2.0
"""Seconds for which a node whose ranks lost their peers waits for the host to say why."""
_LOST = (*TEXTS, "did not come")


class NodeAttempts(Attempts):
    """Begins, watches and judges this node's part in one round after the other."""

    def __init__(
        self,
        logs: AttemptLogs,
        new_supervisor: Callable[[StopSignals], Supervisor],
        stopped: str,
        restarts: Restarts,
        node: Callable[[StopSignals], NodeRendezvous],
    ):
        super().__init__(logs, new_supervisor, stopped, restarts)
        self.node = node(self.signals)
        self._ending: Ending | None = None
        self._noticed = 0.0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        message = ""
        if over := self.node.over:
            self.code, message = over.code, over.message
            if message:
                say(message)
        self.node.link.close(self.code, message or f"the host has ended with exit code {self.code}")

    def part(self) -> NodePart | None:
        return self.node.next_round()

    @property
    def words(self) -> Sequence[str]:
        current = self.node.round
        return current.words if current else ()

    def begin(self) -> dict[str, str]:
        current = self.node.round
        assert current is not None, "no round has begun"
        self.logs.shared_attempt = current.attempt
        self.world = self.node.world
        if current.reason:
            self._restarted = {"attempt": self.count, "reason": current.reason, "time": self._noticed or time.time()}
        self._ending, self._noticed = None, 0.0
        return {**super().begin(), **self.node.variables}

    def watch(self, pids: Mapping[int, int]) -> bool:
        if self._ending is None and (ending := self.node.ending) is not None:
            self._ending, self._noticed = ending, time.time()
            self.supervisor.end(saves=ending.saves)
        return super().watch(pids)

    def finish(self) -> bool:
        self.code, message, failure = self._judge(self.supervisor)
        if self.signals.requests:
            tell(self.code, message, self.logs.attempt_dir)
            self.node.done()
            return False
        lost = failure is not None and _lost_its_peers(failure)
        if lost or failure is None:
            self._await_ending(any_kind=lost)
        self._noticed = self._noticed or min(ended.time for ended in self.supervisor.exits.values())
        if self._ending is not None:
            say(f"the round ends: {self._ending.reason}")
            return True
        if failure is None:
            tell(self.code, message, self.logs.attempt_dir)
            self.node.done()
            return False
        tell(self.code, message, self.logs.attempt_dir)
        decision = self.policy.decide(failure)
        if decision.sentence:
            say(decision.sentence)
        if not (lost and decision.restart):
            self.node.failed(NodeFailure(self.code, headline(message), final=not decision.restart))
        return decision.restart

    def _await_ending(self, *, any_kind: bool) -> None:
        """Waits for the host's explanation of why the ranks have ended: `any_kind`, or a stop that all nodes make."""
        if self.code == 0:
            return
        end = time.monotonic() + _EXPLANATION_S
        while self._ending is None and time.monotonic() < end:
            ending = self.node.ending
            if ending is not None and (any_kind or ending.saves):
                self._ending = ending
            time.sleep(0.05)


def _lost_its_peers(failure: Failure) -> bool:
    report = failure.first.report if failure.first else None
    return report is not None and any(text in report.message for text in _LOST)


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
