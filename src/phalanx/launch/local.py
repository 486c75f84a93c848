"""Starts the ranks of a command on this machine, waits for them, and returns a single exit code."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.bounded import read_tail
from phalanx.echo import echo
from phalanx.errors import RunError, StoppedError
from phalanx.launch.fork_server import ForkServer
from phalanx.launch.logs import AttemptLogs, claim, newest_of
from phalanx.launch.nodes import Ending, NodeFailure, NodeRendezvous, Nodes
from phalanx.launch.output import unblocked
from phalanx.launch.ranks import GENERATION, LAUNCHER_PID, LOOPBACK, RESTARTED, thread_environment
from phalanx.launch.supervisor import Exit, NodePart, StopSignals, Supervisor, ranks, say
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
    """Begins, watches and judges one attempt after the other. A context manager that ends the standby process.

    Args:
        logs: the logs of the attempts.
        new_supervisor: returns the supervisor of an attempt, given the launcher's signals.
        stopped: the wording of `verdict` for ranks stopped by a signal.
        restarts: when a failed attempt is followed by another.
    """

    def __init__(
        self, logs: AttemptLogs, new_supervisor: Callable[[StopSignals], Supervisor], stopped: str, restarts: Restarts
    ):
        self.logs, self.stopped, self.restarts = logs, stopped, restarts
        self.signals = StopSignals()
        self.policy = RestartPolicy(restarts)
        self.count = 0
        """Attempts that have begun."""
        self.code = 0
        """Exit code of the latest attempt that has ended."""
        self._new_supervisor = new_supervisor
        self._standby: ForkServer | None = None
        self._restarted: dict[str, object] = {}
        self.world: int | None = None
        """Ranks of the attempt, on all nodes; None if all are on this one."""

    def run(self, command: Sequence[str], processes: int) -> int:
        """Runs `python -m COMMAND` as this many ranks, again and again while they fail and the policy says so. Returns
        the exit code of the latest attempt."""
        while (part := self.part()) is not None:
            common = self.begin()
            variables = part.variables(processes, self.count - 1, self.policy.most)
            common |= self.logs.begin(list(variables))
            environments = {rank: own | common for rank, own in variables.items()}
            with ranks(
                [*command, *(f"++{word}" for word in self.words)], environments, self.logs, self.standby()
            ) as pids:
                while self.watch(pids):
                    time.sleep(_POLL_S)
            if not self.finish():
                break
        return self.code

    def part(self) -> NodePart | None:
        """Returns this node's part in the next attempt; None if none follows."""
        return NodePart()

    @property
    def words(self) -> Sequence[str]:
        """Words that the ranks' command line gets in this attempt."""
        return ()

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._standby is not None:
            self._standby.close()

    def standby(self) -> ForkServer | None:
        """Returns the standby process, once it has imported everything; None if there is none."""
        is_ready = self._standby is not None and self._standby.wait(lambda: bool(self.signals.requests))
        return self._standby if is_ready else None

    def begin(self) -> dict[str, str]:
        """Begins an attempt. Returns variables for its ranks."""
        self.count += 1
        self.supervisor = self._new_supervisor(self.signals)
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
        supervisor = self.supervisor
        self.code, message, failure = self._judge(supervisor)
        tell(self.code, message, self.logs.attempt_dir)
        if failure is None or self.signals.requests or self._superseded:
            return False
        decision = self.policy.decide(failure)
        if decision.sentence:
            say(decision.sentence)
        noticed = min(ended.time for ended in supervisor.exits.values())
        self._restarted = {"attempt": self.count, "reason": headline(message), "time": noticed}
        return decision.restart

    def _judge(self, supervisor: Supervisor) -> tuple[int, str, Failure | None]:
        """Returns exit code and message of the attempt, and its failure, if it failed; writes the watchdog's report."""
        watchdog, finding, exits, stop = (
            supervisor.watchdog,
            supervisor.finding,
            supervisor.exits,
            supervisor.stop_signal,
        )
        records, left_early = "", {}
        if finding is not None:
            write(finding, self.logs.attempt_dir)
        if watchdog is not None:
            codes = {rank: None if ended.killed else ended.code for rank, ended in exits.items()}
            records = watchdog.post_mortem(codes)
            left_early = {rank: watchdog.left_early(rank) for rank, code in codes.items() if code == 0}
        ends = [_end(rank, ended, self.logs, left_early.get(rank, "")) for rank, ended in sorted(exits.items())]
        hang = finding.message if finding else ""
        code, message = verdict(ends, stop, self.stopped, hang=hang, records=records, world=self.world)
        first = first_failure(ends, stop)
        if not finding and first is None:
            return code, message, None
        out_of_memory = memory_kills() > self._memory_kills
        failure = Failure(code, None if finding else first, self._step(), out_of_memory)
        return code, message, failure

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
    """Returns the first line of a verdict's message."""
    return message.partition("\n")[0].removesuffix(" Its standard error ends:")


def _end(rank: int, ended: Exit, logs: AttemptLogs, left_early: str) -> End:
    """Returns a rank's end as seen and as reported; also writes its traceback to its own log."""
    outcome, log = logs.outcome(rank), logs.rank_dir(rank) / "stderr.log"
    last_words = ""
    if outcome and outcome.traceback:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:  # the verdict shows it, too
            file.write(f"{outcome.traceback}\n")
    else:
        with suppress(OSError):
            lines = read_tail(log, _LAST_BYTES).decode(errors="replace").splitlines()
            last_words = "\n".join(lines[-_LAST_LINES:])
    return End(rank, ended.code, ended.time, ended.killed, outcome, last_words, left_early)


def tell(code: int, message: str, attempt_dir: Path) -> None:
    """Prints how an attempt has ended, and where its logs are."""
    if code not in (0, StoppedError.exit_code) and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a rank that died inside its live view has left the cursor hidden
    if message:
        say(message)
    if code not in (0, StoppedError.exit_code):
        say(f"the logs of all ranks are in {attempt_dir}")


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
