"""The attempts of one launch: each is watched to its end and judged, and may be followed by another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.bounded import read_tail
from phalanx.echo import echo, shortened
from phalanx.errors import StoppedError
from phalanx.launch import generation
from phalanx.launch.environment import GENERATION, RESTARTED
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.processes import NodePart, ranks
from phalanx.launch.restart import Failure, RestartPolicy, Restarts, memory_kills
from phalanx.launch.standby import Standby
from phalanx.launch.supervisor import Exit, StopSignals, Supervisor
from phalanx.launch.verdict import End, first_failure, verdict
from phalanx.launch.watchdog.watchdog import write

_LAST_LINES, _LAST_BYTES = 10, 1 << 14
_POLL_S = 0.1


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
        self._standby: Standby | None = None
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

    def standby(self) -> Standby | None:
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
            self._generation = variables[GENERATION] = generation.claim(self.restarts.directory)
        return variables

    def watch(self, pids: Mapping[int, int]) -> bool:
        """Polls the ranks once, process ids by rank; returns whether one of them is running."""
        if self._standby is None and self.restarts.most and self.restarts.preload and self._step() is not None:
            self._standby = Standby(self.restarts.preload, self.logs.environment)
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
        return directory is not None and generation.newest_of(directory) != self._generation

    def _step(self) -> int | None:
        """Returns the newest step that this attempt has done; None before its first."""
        progress = self.restarts.progress()
        return None if progress is None or progress == self._progress else progress[0]


def say(line: str) -> None:
    """Prints a line of the launcher on standard error, above what rank 0 shows, which is drawn again below."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")  # clears the line that rank 0 has begun, which is drawn again below
    echo(f"phalanx: {shortened(line)}", file=sys.stderr, flush=True)


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
