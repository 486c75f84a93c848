"""Starts the ranks of a command on this machine, waits for them, and returns a single exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.bounded import read_tail
from phalanx.echo import echo
from phalanx.errors import RunError, StoppedError
from phalanx.launch.fork_server import ForkServer
from phalanx.launch.logs import AttemptLogs, claim, newest_of
from phalanx.launch.nodes import POLL_S, Ending, NodeFailure, Nodes, Round
from phalanx.launch.output import unblocked
from phalanx.launch.ranks import GENERATION, LAUNCHER_PID, LOOPBACK, RESTARTED, thread_environment
from phalanx.launch.supervisor import NodePart, StopSignals, Supervisor, ranks, say
from phalanx.launch.verdict import (
    BEFORE_CHECKPOINT,
    TEXTS,
    End,
    Failure,
    RestartPolicy,
    Restarts,
    first_failure,
    memory_kills,
    verdict,
)
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.watchdog import Watchdog, private_folder, write

_POLL_S = 0.1
_LAST_LINES, _LAST_BYTES = 10, 1 << 14


class Attempts:
    """Begins, watches and judges one attempt after the other, as `launch_local` says. A context manager that ends the
    standby process."""

    def __init__(
        self, logs: AttemptLogs, stopped: str, restarts: Restarts, grace_s: float, limits: Limits, metrics: Path | None
    ):
        self.logs, self.stopped, self.restarts = logs, stopped, restarts
        self._grace_s, self._limits, self._metrics = grace_s, limits, metrics
        self.signals = StopSignals()
        self.policy = RestartPolicy(restarts)
        self.count = 0
        self.code = 0  # exit code of the latest attempt that has ended
        self._standby: ForkServer | None = None
        self._restarted: dict[str, object] = {}
        self.world: int | None = None  # ranks of the attempt, on all nodes; None if all are on this one

    def run(self, command: Sequence[str], processes: int) -> int:
        """Runs `python -m COMMAND` as this many ranks, again and again while they fail and the policy says so. Returns
        the exit code of the latest attempt."""
        while (part := self.part()) is not None:
            common = self.begin()
            variables = part.variables(processes, self.count - 1, self.policy.most)
            common |= self.logs.begin(list(variables))
            environments = {rank: own | common for rank, own in variables.items()}
            watchdog = Watchdog(self.logs.heartbeats, self._limits, say, self._metrics, states=self.logs.attempt_dir)
            self.supervisor = Supervisor(self.logs.outcome, self._grace_s, self.signals, watchdog)
            is_ready = self._standby is not None and self._standby.wait(lambda: bool(self.signals.requests))
            standby = self._standby if is_ready else None
            with ranks([*command, *part.words], environments, self.logs, standby) as pids:
                while self.watch(pids):
                    time.sleep(_POLL_S)
            if not self.finish():
                break
        return self.code

    def part(self) -> NodePart | None:
        """Returns this node's part in the next attempt; None if none follows."""
        return NodePart()

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._standby is not None:
            self._standby.close()

    def begin(self) -> dict[str, str]:
        """Begins an attempt. Returns variables for its ranks."""
        self.count += 1
        self._memory_kills = memory_kills()
        self._progress = self.restarts.progress()
        variables = {RESTARTED: json.dumps(self._restarted)} if self._restarted else {}
        if self.restarts.directory is not None:
            self._generation = variables[GENERATION] = claim(self.restarts.directory)
        return variables

    def watch(self, pids: Mapping[int, int]) -> bool:
        """Polls the ranks once, process ids by rank; returns whether one of them is running."""
        if self._standby is None and self.restarts.most and self.restarts.preload and self._step() is not None:
            self._standby = ForkServer(self.restarts.preload, self.logs.environment)
        return self.supervisor.watch(pids)

    def finish(self) -> bool:
        """Judges the attempt, whose ranks have ended, and tells the user. Returns whether another one follows."""
        message, failure = self._judge()
        self._tell(message)
        if failure is None or self.signals.requests or self._superseded:
            return False
        self._restarted = {"attempt": self.count, "reason": headline(message), "time": self._first_exit}
        return self._decide(failure)

    def _decide(self, failure: Failure) -> bool:
        decision = self.policy.decide(failure)
        if decision.sentence:
            say(decision.sentence)
        return decision.restart

    @property
    def _first_exit(self) -> float:
        return min(ended.time for ended in self.supervisor.exits.values())

    def _judge(self) -> tuple[str, Failure | None]:
        """Returns the message about the attempt, and its failure, if it failed; notes its exit code, and writes the
        watchdog's report."""
        watchdog, finding = self.supervisor.watchdog, self.supervisor.finding
        exits, stop = self.supervisor.exits, self.supervisor.stop_signal
        records, left_early = "", {}
        if finding is not None:
            write(finding, self.logs.attempt_dir)
        if watchdog is not None:
            codes = {rank: None if ended.killed else ended.code for rank, ended in exits.items()}
            records = watchdog.post_mortem(codes)
            left_early = {rank: watchdog.left_early(rank) for rank, code in codes.items() if code == 0}
        ends = [_reported(end, self.logs, left_early.get(rank, "")) for rank, end in sorted(exits.items())]
        hang = finding.message if finding else ""
        self.code, message = verdict(ends, stop, self.stopped, hang=hang, records=records, world=self.world)
        first = first_failure(ends, stop)
        if not finding and first is None:
            return message, None
        out_of_memory = memory_kills() > self._memory_kills
        return message, Failure(self.code, None if finding else first, self._step(), out_of_memory)

    def _tell(self, message: str) -> None:
        """Prints how the attempt has ended, and where its logs are."""
        failed = self.code not in (0, StoppedError.exit_code)
        if failed and sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a rank that died inside its live view has left the cursor hidden
        if message:
            say(message)
        if failed:
            say(f"the logs of all ranks are in {self.logs.attempt_dir}")

    @property
    def _superseded(self) -> bool:
        """True if another launcher has claimed the run directory: to claim it back would take it from a live run."""
        directory = self.restarts.directory
        return directory is not None and newest_of(directory) != self._generation

    def _step(self) -> int | None:
        """Returns the newest step that this attempt has done; None before its first."""
        progress = self.restarts.progress()
        return None if progress is None or progress == self._progress else progress[0]


def headline(message: str) -> str:
    return message.partition("\n")[0].removesuffix(" Its standard error ends:")


def _reported(end: End, logs: AttemptLogs, left_early: str) -> End:
    """Returns a rank's end with what it reported; also writes its traceback to its own log."""
    outcome, log = logs.outcome(end.rank), logs.rank_dir(end.rank) / "stderr.log"
    last_words = ""
    if outcome and outcome.traceback:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:  # the verdict shows it, too
            file.write(f"{outcome.traceback}\n")
    else:
        with suppress(OSError):
            lines = read_tail(log, _LAST_BYTES).decode(errors="replace").splitlines()
            last_words = "\n".join(lines[-_LAST_LINES:])
    return replace(end, outcome=outcome, last_words=last_words, left_early=left_early)


_EXPLANATION_S = 2.0  # seconds for which a node whose ranks lost their peers waits for the host to say why
_LOST = (*TEXTS, "did not come")
_ELSEWHERE = Ending("the host goes on without this node")


class NodeAttempts(Attempts):
    """Begins, watches and judges this node's part in one round after the other: the host may end a round, and others'
    failures count."""

    def __init__(self, nodes: Nodes, *how: Any):
        super().__init__(*how)
        self.terms, self.link = nodes.terms, nodes.join()
        self.round: Round | None = None  # the round that this node takes part in, or has taken part in
        self._over: tuple[int, str] | None = None
        """Exit code and message once another node or the user has ended the run."""
        self._ending: Ending | None = None
        self._noticed = 0.0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        message = ""
        if self._over:
            self.code, message = self._over
            if message:
                say(message)
        self.link.close(self.code, message or f"the host has ended with exit code {self.code}")

    def part(self) -> NodePart | None:
        """Waits for the next round of this node. Returns None, with `_over` set, if none follows: the run has ended
        elsewhere, the host is away for too long, or this launcher was asked to stop."""
        last, patience_s = self.round, self.terms.patience_s
        self.link.exchange(waits=True)
        while True:
            notice = self.link.notice
            current, ending = notice.round, notice.ending
            if self.signals.requests:
                self._over = 128 + self.signals.requests[0][0], "stopped while it waited for other nodes"
            elif notice.refusal:
                self._over = 2, notice.refusal
            elif ending and ending.code is not None:
                self._over = ending.code, ending.reason
            elif self.link.silent_s > patience_s:
                why = ending.reason if ending else "the host is silent"
                self._over = 1, f"{why}: it was not heard for {patience_s:g} s (run.rdzv_endpoint, run.timeout_s)"
            if self._over:
                return None
            is_new = current is not None and (last is None or current.generation != last.generation)
            if current and is_new and ending is None and notice.slot in current.members:
                break
            time.sleep(POLL_S / 4)
        self.round, members = current, current.members
        self.link.exchange(waits=False, round=current.number, failure=None)
        place, count = members.index(notice.slot), f"{len(members)} node{'s' if len(members) > 1 else ''}"
        adapted = f", {' '.join(current.words)}" if current.words else ""
        say(f"round {current.number} on {count}, this is node {place}{adapted}")
        words = tuple(f"++{word}" for word in current.words)
        return NodePart(place, len(members), current.address, current.port, words)

    def begin(self) -> dict[str, str]:
        assert self.round is not None, "no round has begun"
        self.logs.shared_attempt = self.round.attempt
        self.world = len(self.round.members) * self.terms.processes
        if reason := self.round.reason:
            self._restarted = {"attempt": self.count, "reason": reason, "time": self._noticed or time.time()}
        self._ending, self._noticed = None, 0.0
        return {**super().begin(), GENERATION: self.round.generation}

    def watch(self, pids: Mapping[int, int]) -> bool:
        if self._ending is None and (ending := self._ordered_end()) is not None:
            self._ending, self._noticed = ending, time.time()
            self.supervisor.end(saves=ending.saves)
        return super().watch(pids)

    def _ordered_end(self) -> Ending | None:
        """Returns the host's order to end the round that this node's ranks are in; None while they may go on. That all
        ranks end well, or stop with a checkpoint, is no order: these do, too."""
        notice, current = self.link.notice, self.round
        if current is None or (notice.ending and notice.ending.code in (0, StoppedError.exit_code)):
            return None
        if notice.round is None or notice.round.generation != current.generation:
            return _ELSEWHERE
        return notice.ending

    def finish(self) -> bool:
        message, failure = self._judge()
        report = failure.first.report if failure and failure.first else None
        lost = report is not None and any(text in report.message for text in _LOST)
        if not self.signals.requests:
            if lost or failure is None:
                self._await_ending(any_kind=lost)
            self._noticed = self._noticed or self._first_exit
            if self._ending is not None:
                say(f"the round ends: {self._ending.reason}")
                return True
        self._tell(message)
        if failure is None or self.signals.requests:
            self.link.exchange(done=True)
            return False
        restart = self._decide(failure)
        if not (lost and restart):
            self.link.exchange(failure=NodeFailure(self.code, headline(message), final=not restart))
        return restart

    def _await_ending(self, *, any_kind: bool) -> None:
        """Waits for the host's explanation of why the ranks have ended: `any_kind`, or a stop that all nodes make."""
        end = time.monotonic() + _EXPLANATION_S
        while self.code and self._ending is None and time.monotonic() < end:
            ending = self._ordered_end()
            if ending is not None and (any_kind or ending.saves):
                self._ending = ending
            time.sleep(0.05)


UNLIMITED = Limits(0.0, 0.0)  # ranks may be silent for any time
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

    Must be called in the main thread: it handles the signals, and a rank dies with the thread that started it. The code
    is that of the last attempt: 0, or the code of the rank that failed first, or 75 when the ranks stopped with a
    checkpoint, or 124 when the watchdog had them killed, or 128 + n when signal n ended them. The message has been
    printed to standard error. Raises RunError if the ranks cannot be started.

    Args:
        log_dir: parent directory of attempt_<k>/rank_<r>/.
        threads: CPU threads of each rank, unless the user has set OMP_NUM_THREADS.
        all_ranks: show the output of every rank, prefixed with the rank.
        grace_s: seconds for the ranks to write a checkpoint after a signal.
        module: calls phalanx.launch.worker.main.
        stopped: the wording of `verdict` for ranks stopped by a signal.
        metrics: file to which rows about slow ranks are appended.
        nodes: the run's other nodes, and this one's part; None if all ranks are on this machine.
    """
    _say_whose_threads(threads)
    network = nodes.environment if nodes else LOOPBACK
    environment = {LAUNCHER_PID: str(os.getpid()), **network, **thread_environment(threads, os.environ)}
    with private_folder() as store_dir:
        logs = AttemptLogs(log_dir.absolute(), store_dir, environment, all_ranks)

        how = (logs, stopped, restarts, grace_s, limits, metrics)
        try:
            attempts = NodeAttempts(nodes, *how) if nodes else Attempts(*how)
            with attempts, attempts.signals.handled():
                attempts.run([module, *argv], processes)
        except OSError as error:
            raise RunError(f"Cannot start {processes} ranks with logs in {log_dir}: {error}.") from error
    return attempts.code


def launch_briefly(argv: list[str], *, processes: int, threads: int, stopped: str, grace_s: float = 30.0) -> int:
    """Runs ranks as `launch_local` does, for a verb that keeps nothing: their logs stay only if one of them failed."""
    logs = Path(tempfile.mkdtemp(prefix=f"phalanx_{argv[0]}_"))  # not in a run, which may belong to another user
    code = launch_local(
        argv, processes=processes, log_dir=logs, threads=threads, all_ranks=False, grace_s=grace_s, stopped=stopped
    )
    if code == 0:
        shutil.rmtree(logs)
    return code


def _say_whose_threads(threads: int) -> None:
    theirs = os.environ.get("OMP_NUM_THREADS")
    if theirs not in (None, str(threads)):
        echo(f"phalanx: OMP_NUM_THREADS={theirs} is set and overrides {threads} threads per rank", file=sys.stderr)
