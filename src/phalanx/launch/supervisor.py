"""The ranks of one machine in one attempt: their processes, and who watches them.

It forwards signals, records how each rank ends, and kills those that cannot continue.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple, NoReturn

from phalanx.echo import echo, shortened
from phalanx.errors import StoppedError
from phalanx.launch.fork_server import ForkServer
from phalanx.launch.logs import AttemptLogs
from phalanx.launch.ranks import LOG_DIR
from phalanx.launch.verdict import WATCHDOG_CODE, End, Outcome
from phalanx.launch.watchdog.watchdog import Finding, Watchdog

LONGEST_S = 3600.0  # a job that has more time left was not signalled because its time ends


def grace_left(stated_s: float, env: Mapping[str, str], now: float) -> float:
    """Returns the seconds that ranks have from a signal at `now` (seconds since the epoch): those that the job states,
    or, if it is more, the time until Slurm ends the allocation.

    Slurm does not tell a job what its `--signal` or the partition's GraceTime is. It tells when the job ends
    (SLURM_JOB_END_TIME), which is what a signal announces that comes within the last hour.
    """
    end = env.get("SLURM_JOB_END_TIME", "")
    left = int(end) - now if re.fullmatch(r"[0-9]{1,12}", end) else 0.0
    return max(stated_s, left) if left <= LONGEST_S else stated_s


_POLL_S = 0.1
_STREAMS = ("stdout", "stderr")


class NodePart(NamedTuple):
    """This node's part in an attempt, and where rank 0 is."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    """The port of the ranks' store. It is 0 for a lone node, whose ranks meet through a file."""
    words: tuple[str, ...] = ()  # further words of the ranks' command line

    def variables(self, processes: int, restarts: int, most: int) -> dict[int, dict[str, str]]:
        """Returns the variables of this node's ranks by rank, as torchrun has them; nodes have equally many ranks."""
        world, first = self.nodes * processes, self.node * processes
        common = {
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world),
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "ROLE_NAME": "rank",
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": most,
            "TORCHELASTIC_RUN_ID": "phalanx",
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        of_each = {first + i: {"RANK": first + i, "ROLE_RANK": first + i, "LOCAL_RANK": i} for i in range(processes)}
        return {rank: {name: str(v) for name, v in (common | own).items()} for rank, own in of_each.items()}


@contextmanager
def ranks(
    command: Sequence[str], environments: Mapping[int, Mapping[str, str]], logs: AttemptLogs, standby: ForkServer | None
) -> Iterator[dict[int, int]]:
    """Runs `python -m COMMAND` once per rank inside the `with` block; gives the process ids by rank, which are children
    of this process. Every rank leads a session and a process group of its own. What is left is killed at the end.

    Rank 0 keeps the terminal for its live view; the others write to files."""
    pids: dict[int, int] = {}
    over, tails = threading.Event(), []
    start = standby.start if standby else _start
    try:
        for rank, variables in environments.items():
            directory = logs.rank_dir(rank)
            files = [str(directory / f"{stream}.log") if rank else "" for stream in _STREAMS]
            pids[rank] = start(command, {**os.environ, **variables, LOG_DIR: str(directory)}, *files)
            if rank and logs.all_ranks:
                shown = zip(files, _STREAMS, strict=True)
                tails += [threading.Thread(target=_tail, args=(rank, *each, over)) for each in shown]
        for tail in tails:
            tail.start()
        yield pids
    finally:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids.values():
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        over.set()
        for tail in tails:
            if tail.ident:
                tail.join()


def _tail(rank: int, name: str, stream: str, over: threading.Event) -> None:
    """Shows the lines that a rank writes to a file, until it has ended."""
    begun, last = "", False
    with open(name, "a+", errors="replace") as file:
        file.seek(0)
        while not last:
            last = over.wait(_POLL_S)  # before the reading: what is written until then is shown
            while more := file.readline():
                begun += more
                if begun.endswith("\n"):
                    getattr(sys, stream).write(f"[rank {rank}] {begun}")
                    begun = ""
    if begun:
        getattr(sys, stream).write(f"[rank {rank}] {begun}\n")


def _start(command: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> int:
    """Starts Python for a rank, as ForkServer.start does."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    files = [(descriptor, name) for descriptor, name in ((1, stdout), (2, stderr)) if name]
    return os.posix_spawn(
        sys.executable,
        # -P keeps the ranks from importing a torch.py of the current directory
        [sys.executable, "-P", "-m", *command],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, descriptor, name, flags, 0o666) for descriptor, name in files],
        setsid=True,
    )


FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone: Ctrl-C is no longer possible
}
"""Signals to the launcher → signals to every rank."""

SAME_REQUEST_S = 0.5
"""`timeout` and wrappers like it send a signal to the child and again to its group: that is one request."""
_PEER_GRACE_S = 3.0  # for the peers of a failed rank: long enough to notice and report it
_UNBEGUN_GRACE_S = 3.0  # before the first step there is nothing to save
_UNKILLABLE_S = 60.0  # after SIGKILL: a process whose disk or driver does not answer stays until it does
_SILENT_PEER_GRACE_S = 0.5  # after a rank that was killed: its peers know less of the reason than the launcher


class StopSignals:
    """The signals to the launcher that ask its ranks to stop, in whatever attempt."""

    def __init__(self) -> None:
        self.requests: list[tuple[signal.Signals, float]] = []
        """Each request with the time at which it came, by the monotonic clock."""

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the launcher's signals inside the `with` block; only the main thread may do this."""
        before = {number: signal.getsignal(number) for number in FORWARDED}
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # nohup stays
        for number in taken:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requests or now - self.requests[-1][1] > SAME_REQUEST_S:
            self.requests.append((signal.Signals(number), now))


class Supervisor:
    """The ranks of one attempt. `outcome` returns what a rank itself said about its end, or None. Ranks have `grace_s`
    to end after a signal, or after one of them ended with an error that it announced."""

    def __init__(
        self, outcome: Callable[[int], Outcome | None], grace_s: float, signals: StopSignals, watchdog: Watchdog
    ):
        self.exits: dict[int, End] = {}
        self.stop_signal: signal.Signals | None = None  # the signal that was forwarded to the ranks
        self.finding: Finding | None = None  # the reason for which the watchdog had all ranks killed
        self.watchdog: Watchdog | None = watchdog  # none once it has failed
        self._outcome = outcome
        self._grace_s = grace_s
        self._requests = signals.requests
        self._deadline = float("inf")
        self._killed: set[int] = set()
        self._killed_at = float("inf")
        self._running: Mapping[int, int] = {}

    def end(self, *, saves: bool) -> None:
        """Ends the ranks although none of them failed: at once, or, if they can stop with a checkpoint (`saves`), as a
        signal does."""
        if saves:
            self._signal(signal.SIGTERM)
        self._allow(grace_left(self._grace_s, os.environ, time.time()) if saves else 0)

    def watch(self, pids: Mapping[int, int]) -> bool:
        """Polls the ranks once, `pids` by rank; returns whether one of them is running."""
        self._note_exits(pids)
        running = self._running = {rank: pid for rank, pid in pids.items() if rank not in self.exits}
        self._pass_signal_on()
        self._look_for_hangs(running, pids)
        if running and time.monotonic() >= self._deadline and not self._killed:
            self._kill(running, pids)
        if running and time.monotonic() > self._killed_at + _UNKILLABLE_S:
            self._leave(running)
        return bool(running)

    def _look_for_hangs(self, running: Mapping[int, int], pids: Mapping[int, int]) -> None:
        if self.watchdog is None or not running or self._killed:
            return
        try:
            self.finding = self.watchdog.poll(running, {rank: ended.code for rank, ended in self.exits.items()})
        except Exception as error:  # what only watches must never end a run
            self.watchdog.tell(f"the watchdog is off, since it failed: {type(error).__name__}: {error}")
            self.watchdog = None
        if self.finding is not None:
            self._kill(running, pids)

    def _note_exits(self, pids: Mapping[int, int]) -> None:
        for rank in pids.keys() - self.exits.keys():
            # WNOWAIT leaves the process for `ranks` to reap
            status = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            code = status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status
            self.exits[rank] = End(rank, code, time.time(), rank in self._killed)
            if code not in (0, StoppedError.exit_code):
                outcome = self._outcome(rank)
                announced = _PEER_GRACE_S if outcome and outcome.traceback else self._grace_s
                self._allow(announced if outcome else _SILENT_PEER_GRACE_S)
            elif code == 0 and self.watchdog is not None and self.watchdog.left_early(rank):
                self._allow(_PEER_GRACE_S)

    def _pass_signal_on(self) -> None:
        if self._requests and self.stop_signal is None:
            self.stop_signal = FORWARDED[self._requests[0][0]]
            self._signal(self.stop_signal)
            begun = self.watchdog is None or self.watchdog.any_began_to_train(self._running)
            grace_s = self._grace_s if begun else min(self._grace_s, _UNBEGUN_GRACE_S)
            self._allow(grace_left(grace_s, os.environ, time.time()))
        if len(self._requests) > 1:
            self._allow(0)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _leave(self, running: Mapping[int, int]) -> NoReturn:
        """Ends the launcher although ranks are left, which it would wait for in vain."""
        left = ", ".join(f"rank {rank} (process {pid})" for rank, pid in running.items())
        if self.finding:
            echo(f"phalanx: {self.finding.message}", file=sys.stderr)
        echo(
            f"phalanx: {left} cannot be killed: its disk or driver does not answer the kernel; it ends when that does",
            file=sys.stderr,
            flush=True,
        )
        os._exit(WATCHDOG_CODE)

    def _allow(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _kill(self, running: Mapping[int, int], pids: Mapping[int, int]) -> None:
        self._killed.update(running)
        self._killed_at = time.monotonic()
        for pid in pids.values():  # each rank leads a process group: children of ended ranks are killed too
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def say(line: str) -> None:
    """Prints a line of the launcher on standard error, above what rank 0 shows, which is drawn again below."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")  # clears the line that rank 0 has begun, which is drawn again below
    echo(f"phalanx: {shortened(line)}", file=sys.stderr, flush=True)
