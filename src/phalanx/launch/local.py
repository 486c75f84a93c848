"""Starts the ranks of a command on this machine, waits for them, and returns a single exit code."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.echo import echo, shortened
from phalanx.errors import RunError, StoppedError
from phalanx.launch.agent import RankAgent
from phalanx.launch.environment import LAUNCHER_PID, LOOPBACK, thread_environment
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.outcome import Outcome
from phalanx.launch.output import unblocked
from phalanx.launch.supervisor import Exit, Supervisor
from phalanx.launch.verdict import BEFORE_CHECKPOINT, End, verdict
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.watchdog import Watchdog, write

UNLIMITED = Limits(0.0, 0.0)
"""Ranks may be silent for any time."""
_LAST_LINES = 10


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

    Returns:
        0, or the code of the rank that failed first, or 75 when the ranks stopped with a checkpoint, or 124 when the
        watchdog had them killed, or 128 + n when signal n ended them. The message has been printed to standard error.

    Raises:
        RunError: the ranks could not be started.
    """
    _say_whose_threads(threads)
    environment = {LAUNCHER_PID: str(os.getpid()), **LOOPBACK, **thread_environment(threads, os.environ)}
    with tempfile.TemporaryDirectory(prefix="phalanx_") as store_dir:  # mode 0700
        logs = AttemptLogs(log_dir.absolute(), Path(store_dir), environment, all_ranks)
        supervisor = Supervisor(
            lambda rank: Outcome.read(logs.rank_dir(rank)),
            grace_s,
            lambda: Watchdog(logs.heartbeats, limits, _say, metrics),
        )
        # -P keeps the ranks from importing a torch.py of the current directory
        agent = RankAgent(["-P", "-m", module, *argv], processes, logs, supervisor)
        try:
            with _quiet_agent(), supervisor.handling_signals():
                agent.run()
        except OSError as error:
            raise RunError(f"Cannot start {processes} ranks with logs in {log_dir}: {error}.") from error
        code, message = _judge(supervisor, logs, stopped)
    _tell(code, message, logs.attempt_dir)
    return code


def _judge(supervisor: Supervisor, logs: AttemptLogs, stopped: str) -> tuple[int, str]:
    """Returns exit code and message of an attempt whose ranks have ended, and writes the watchdog's report."""
    watchdog, hang, records = supervisor.watchdog, "", ""
    if supervisor.finding is not None:
        write(supervisor.finding, logs.attempt_dir)
        hang = supervisor.finding.message
    left_early = {}
    if watchdog is not None:
        codes = {rank: None if ended.killed else ended.code for rank, ended in supervisor.exits.items()}
        records = watchdog.post_mortem(codes)
        left_early = {rank: watchdog.left_early(rank) for rank, code in codes.items() if code == 0}
    ends = [
        _end(rank, ended, logs.rank_dir(rank), left_early.get(rank, ""))
        for rank, ended in sorted(supervisor.exits.items())
    ]
    return verdict(ends, supervisor.stop_signal, stopped, hang=hang, records=records)


def _say_whose_threads(threads: int) -> None:
    theirs = os.environ.get("OMP_NUM_THREADS")
    if theirs not in (None, str(threads)):
        echo(f"phalanx: OMP_NUM_THREADS={theirs} is set and overrides {threads} threads per rank", file=sys.stderr)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keeps the agent from handling signals (the supervisor does) and from logging (the verdict is printed once)."""
    signals, before = "TORCHELASTIC_SIGNALS_TO_HANDLE", os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torchelastic-events-null")]
    propagate = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    os.environ[signals] = ""
    try:
        yield
    finally:
        for logger, value in zip(loggers, propagate, strict=True):
            logger.removeHandler(silence)
            logger.propagate = value
        if before is None:
            del os.environ[signals]
        else:
            os.environ[signals] = before


def _end(rank: int, ended: Exit, directory: Path, left_early: str) -> End:
    """Returns a rank's end as seen and as reported; also writes its traceback to its own log."""
    outcome, log = Outcome.read(directory), directory / "stderr.log"
    last_words = ""
    if outcome and outcome.traceback:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:  # the verdict shows it, too
            file.write(f"{outcome.traceback}\n")
    elif log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last_words = "\n".join(lines[-_LAST_LINES:])
    return End(rank, ended.code, ended.time, ended.killed, outcome, last_words, left_early)


def _say(line: str) -> None:
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # rank 0's progress bar, which is drawn again below
    print(f"{clear}phalanx: {line}", file=sys.stderr, flush=True)


def _tell(code: int, message: str, attempt_dir: Path) -> None:
    if code not in (0, StoppedError.exit_code) and sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a rank that died inside its progress bar has left the cursor hidden
    if message:
        echo(f"phalanx: {shortened(message)}", file=sys.stderr)
    if code not in (0, StoppedError.exit_code):
        echo(f"phalanx: the logs of all ranks are in {attempt_dir}", file=sys.stderr)
