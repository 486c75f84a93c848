"""Starts the ranks of a command on this machine, watches them, forwards signals, kills those that cannot continue, and
returns a single exit code; again and again where they fail and may be started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

from phalanx.bounded import read_tail
from phalanx.echo import echo, shortened
from phalanx.errors import RunError, StoppedError
from phalanx.launch.fork_server import ForkServer
from phalanx.launch.logs import AttemptLogs, claim, newest_of
from phalanx.launch.nodes import HOST, NOBODY, POLL_S, Ending, HostLink, NodeFailure, Nodes, Round, known, make
from phalanx.launch.output import unblocked
from phalanx.launch.peers import StateMemory
from phalanx.launch.ranks import GENERATION, LAUNCHER_PID, LOG_DIR, LOOPBACK, REPLICA, RESTARTED, thread_environment
from phalanx.launch.replicas import Places, ReplicaCoordinator, ReplicaTerms
from phalanx.launch.verdict import (
    BEFORE_CHECKPOINT,
    TEXTS,
    WATCHDOG_CODE,
    End,
    Failure,
    Outcome,
    RestartPolicy,
    Restarts,
    first_failure,
    memory_kills,
    verdict,
)
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.watchdog import Finding, Watchdog, private_folder, write
from phalanx.units import counted

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
            to_files = rank or not logs.owns_terminal
            files = [str(directory / f"{stream}.log") if to_files else "" for stream in _STREAMS]
            pids[rank] = start(command, {**os.environ, **variables, LOG_DIR: str(directory)}, *files)
            if to_files and logs.all_ranks:
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
        setsigmask=[signal.SIGINT],  # until `take_interrupts`: Python that is starting would end with an error
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


def after_the_end(number: int, before: Any) -> Any:
    """Returns the handler of a signal once there is nothing left to stop: the one `before`, but for SIGUSR1, which must
    not change the exit code then. It stays one that a later run takes over."""
    return (lambda *_: None) if number == signal.SIGUSR1 and before is signal.SIG_DFL else before


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
                signal.signal(number, after_the_end(number, before[number]))

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
        self.watchdog: Watchdog | None = watchdog  # None once it has failed
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


_LAST_LINES, _LAST_BYTES = 10, 1 << 14


class Attempts:
    """Begins, watches and judges one attempt after the other, as `launch_local` says. A context manager that ends the
    standby process."""

    def __init__(
        self,
        logs: AttemptLogs,
        stopped: str,
        restarts: Restarts,
        grace_s: float,
        limits: Limits,
        metrics: Path | None,
        memory: StateMemory | None,
    ):
        self.logs, self.stopped, self.restarts, self.memory = logs, stopped, restarts, memory
        self._grace_s, self._limits, self._metrics = grace_s, limits, metrics
        self.signals = StopSignals()
        self.policy = RestartPolicy(restarts)
        self.count = 0
        self.code = 0  # exit code of the latest attempt that has ended
        self.standby: ForkServer | None = None
        self._restarted: dict[str, object] = {}
        self.world: int | None = None  # ranks of the attempt, on all nodes; None if all are on this one

    def run(self, command: Sequence[str], processes: int) -> int:
        """Runs `python -m COMMAND` as this many ranks, again and again while they fail and the policy says so. Returns
        the exit code of the latest attempt."""
        if self.restarts.preload and (processes > 1 or self.restarts.most):
            self.standby = ForkServer(self.restarts.preload, self.logs.environment)
        while (part := self.part()) is not None:
            common = self.begin()
            variables = part.variables(processes, self.count - 1, self.policy.most)
            common |= self.logs.begin(list(variables))
            environments = {rank: own | common for rank, own in variables.items()}
            watchdog = Watchdog(self.logs.heartbeats, self._limits, say, self._metrics, states=self.logs.attempt_dir)
            self.supervisor = Supervisor(self.logs.outcome, self._grace_s, self.signals, watchdog)
            is_ready = self.standby is not None and self.standby.wait(lambda: bool(self.signals.requests))
            standby = self.standby if is_ready else None
            with ranks([*command, *part.words], environments, self.logs, standby) as pids:
                while self.watch(pids):
                    time.sleep(_POLL_S)
            if not self.finish():
                break
        return self.code

    def part(self) -> NodePart | None:
        """Returns this node's part in the next attempt; None if none follows."""
        return NodePart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.standby is not None:
            self.standby.close()

    def begin(self) -> dict[str, str]:
        """Begins an attempt. Returns variables for its ranks."""
        self.count += 1
        self._memory_kills = memory_kills()
        self._progress = self.restarts.progress()
        variables = {RESTARTED: json.dumps(self._restarted)} if self._restarted else {}
        if self.restarts.directory is not None:
            self._generation = variables[GENERATION] = claim(self.restarts.directory)
        return variables | self._memory_variables()

    def _memory_variables(self) -> dict[str, str]:
        """Returns the variables of the memory for the state, if there is one, in the attempt that begins."""
        return self.memory.variables() if self.memory else {}

    def watch(self, pids: Mapping[int, int]) -> bool:
        """Polls the ranks once, process ids by rank; returns whether one of them is running."""
        return self.supervisor.watch(pids)

    def finish(self) -> bool:
        """Judges the attempt, whose ranks have ended, and tells the user. Returns whether another one follows."""
        message, failure = self._judge()
        self._tell(message)
        directory = self.restarts.directory
        # Another launcher may have claimed the run directory: to claim it back would take it from a live run.
        superseded = directory is not None and newest_of(directory) != self._generation
        if failure is None or self.signals.requests or superseded:
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
        self.terms, self.link = nodes.terms, nodes.join(self.memory.address if self.memory else "")
        self.place = 0
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
        if (current := self.next_round()) is None:
            return None
        place, members = self.place, current.members
        count = f"{len(members)} node{'s' if len(members) > 1 else ''}"
        adapted = f", {' '.join(current.words)}" if current.words else ""
        say(f"round {current.number} on {count}, this is node {place}{adapted}")
        words = tuple(f"++{word}" for word in current.words)
        return NodePart(place, len(members), current.address, current.port, words)

    def next_round(self) -> Round | None:
        """Waits for the next round of this node. Returns None, with `_over` set, if none follows: the run has ended
        elsewhere, the host is away for too long, or this launcher was asked to stop."""
        last, patience_s, is_spare = self.round, self.terms.patience_s, False
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
            is_new = current and (not last or (current.generation, current.number) != (last.generation, last.number))
            if current and is_new and ending is None and notice.slot in current.members:
                break
            others = current.members if current and ending is None and notice.slot > HOST else ()
            if not is_spare and len(others) == self.terms.most and not {notice.slot, NOBODY} & {*others}:
                say("the run has all its nodes: this one is a spare, and takes the place of one that is lost")
                is_spare = True
            time.sleep(POLL_S / 4)
        self.round, self.place = current, current.members.index(notice.slot)
        self.link.exchange(waits=False, round=current.number, failure=None)
        return current

    def begin(self) -> dict[str, str]:
        assert self.round is not None, "no round has begun"
        self.logs.shared_attempt = self.round.attempt
        self.world = len(self.round.members) * self.terms.processes
        if reason := self.round.reason:
            self._restarted = {"attempt": self.count, "reason": reason, "time": self._noticed or time.time()}
        self._ending, self._noticed = None, 0.0
        return {**super().begin(), GENERATION: self.round.generation}

    def _memory_variables(self) -> dict[str, str]:
        return self.memory.variables(self.round.memory, self.place) if self.memory and self.round else {}

    def watch(self, pids: Mapping[int, int]) -> bool:
        if self._ending is None and (ending := self.ordered_end()) is not None:
            self._ending, self._noticed = ending, time.time()
            self.supervisor.end(saves=ending.saves)
        return super().watch(pids)

    def ordered_end(self) -> Ending | None:
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
            ending = self.ordered_end()
            if ending is not None and (any_kind or ending.saves):
                self._ending = ending
            time.sleep(0.05)


class ReplicaAttempts(Attempts):
    """The attempts of one of the replicas that come and go, in a thread of its own. `where` says how its ranks reach
    the coordinator; they are ended where `ordered` says so."""

    def __init__(self, replica: int, where: Mapping[str, Any], ordered: Callable[[], bool], *how: Any):
        super().__init__(*how)
        self.replica, self.where, self.ordered = replica, where, ordered
        self.error: BaseException | None = None

    def begin(self) -> dict[str, str]:
        return super().begin() | {REPLICA: json.dumps({**self.where, "replica": self.replica})}

    def watch(self, pids: Mapping[int, int]) -> bool:
        if self.ordered():
            self.supervisor.end(saves=False)
        return super().watch(pids)

    def finish(self) -> bool:
        return not self.ordered() and super().finish()

    def _tell(self, message: str) -> None:
        super()._tell(message and f"replica {self.replica}: {message}")

    def work(self, command: Sequence[str], processes: int) -> None:
        try:
            self.run(command, processes)
        except BaseException as error:
            self.error = error


def _launch_replicas(
    command: Sequence[str],
    terms: ReplicaTerms,
    processes: int,
    logs: AttemptLogs,
    preload: Sequence[str],
    nodes: Nodes | None,
    *how: Any,
) -> int:
    """Runs `python -m COMMAND` as so many replicas of `processes` ranks, each of which is started again alone; of
    several nodes, those of this one. Returns 0 if one has finished the run, or else the code of a clean stop, or of the
    first."""
    signals, standby, gone = StopSignals(), ForkServer(preload, logs.environment), list[int]()

    def run(own: Sequence[int], where: Mapping[str, Any], ordered: Callable[[], bool]) -> int:
        every = [ReplicaAttempts(each, where, ordered, logs.of_replica(each), *how) for each in own]
        threads = [threading.Thread(target=each.work, args=(command, processes)) for each in every]
        for attempts, thread in zip(every, threads, strict=True):
            attempts.signals, attempts.standby = signals, standby
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_POLL_S / len(threads))  # signals are handled in between
            if not ordered():  # those that are ended by order are not gone
                ended = [each for each, thread in zip(every, threads, strict=True) if not thread.is_alive()]
                ends = (RunError.exit_code if each.error else each.code for each in ended)
                gone[:] = [code for code in ends if code not in (0, StoppedError.exit_code)]
        for each in every:
            if each.error is not None:
                raise each.error
        codes = [each.code for each in every]
        if 0 in codes and any(codes) and not ordered():
            say(f"the run is finished; {counted(sum(map(bool, codes)), 'replica')} did not come back")
        return min(codes, key=lambda code: (code != 0, code != StoppedError.exit_code))

    with ExitStack() as held:
        held.callback(standby.close)
        held.enter_context(signals.handled())
        coordinator = None
        if nodes is None or nodes.is_host:
            at = (nodes.endpoint[0], make(nodes.directory)) if nodes else ()
            coordinator = held.enter_context(ReplicaCoordinator(terms, processes, say, *at))
        if nodes is None:
            assert coordinator is not None, "this machine's"
            members = coordinator.members

            def too_few() -> bool:
                return terms.replicas - len(gone) < terms.least and not members.notice.over

            code = run(range(terms.replicas), coordinator.where, too_few)
            if not too_few():
                return code
            left = terms.replicas - len(gone)
            say(f"the run ends: {left} of {terms.replicas} replicas are left, run.min_replicas is {terms.least}")
            return gone[0]
        if coordinator is not None:
            nodes = replace(nodes, membership=partial(Places, coordinator, claim(nodes.directory)))
        node = held.enter_context(NodeAttempts(nodes, logs, *how))
        node.signals, each = signals, terms.replicas // nodes.terms.most
        while current := node.next_round():
            first, endings = node.place * each, list[str]()
            say(f"this is node {node.place} of {nodes.terms.most}, with {counted(each, 'replica')} from {first} on")
            logs.environment = {**logs.environment, GENERATION: current.generation}
            where = {"host": current.address, "port": current.port, "key": known(nodes.directory)}

            def ordered(endings: list[str] = endings) -> bool:
                if ending := node.ordered_end():
                    endings.append(ending.reason)
                return bool(endings)

            node.code = run(range(first, first + each), where, ordered)
            if not endings:
                break
            say(f"the replicas of this node were ended: {endings[0]}")
        node.link.exchange(done=True)
        if coordinator is not None and isinstance(node.link, HostLink):
            others = node.link.membership
            while isinstance(others, Places) and others.others() and len(signals.requests) < 2:
                time.sleep(_POLL_S)
            if coordinator.members.notice.over and node.code != StoppedError.exit_code:
                node.code = 0
    return node.code


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
    memory: bool = False,
    replicas: ReplicaTerms | None = None,
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
        memory: keep the newest state of the ranks in memory while they are started again.
        replicas: the replicas of `processes` ranks each, where they come and go.
    """
    if (theirs := os.environ.get("OMP_NUM_THREADS")) not in (None, str(threads)):
        echo(f"phalanx: OMP_NUM_THREADS={theirs} is set and overrides {threads} threads per rank", file=sys.stderr)
    network = nodes.environment if nodes else LOOPBACK
    environment = {LAUNCHER_PID: str(os.getpid()), **network, **thread_environment(threads, os.environ)}
    with private_folder() as store_dir:
        logs = AttemptLogs(log_dir.absolute(), store_dir, environment, all_ranks)
        try:
            host, silence_s, key = "", 0.0, str
            if nodes:
                host, silence_s, key = nodes.endpoint[0], nodes.silence_s, lambda: known(nodes.directory)
            with StateMemory(store_dir / "state", host, key, silence_s, say) if memory else nullcontext() as kept:
                if replicas:
                    if restarts.directory is not None:  # of one node
                        logs.environment = {**environment, GENERATION: claim(restarts.directory)}
                    how = (stopped, replace(restarts, preload=(), directory=None), grace_s, limits, metrics, kept)
                    return _launch_replicas([module, *argv], replicas, processes, logs, restarts.preload, nodes, *how)
                how = (logs, stopped, restarts, grace_s, limits, metrics, kept)
                attempts = NodeAttempts(nodes, *how) if nodes else Attempts(*how)
                with attempts.signals.handled(), attempts:
                    attempts.run([module, *argv], processes)
        except OSError as error:
            raise RunError(f"Cannot start {processes} ranks with logs in {log_dir}: {error}.") from error
    return attempts.code


def launch_briefly(
    argv: list[str], *, processes: int, threads: int, stopped: str, preload: Sequence[str], grace_s: float = 30.0
) -> int:
    """Runs ranks as `launch_local` does, for a verb that keeps nothing: their logs stay only if one of them failed.
    `preload` are the modules that every rank imports."""
    logs = Path(tempfile.mkdtemp(prefix=f"phalanx_{argv[0]}_"))  # not in a run, which may belong to another user
    how = {"log_dir": logs, "threads": threads, "all_ranks": False, "grace_s": grace_s, "stopped": stopped}
    code = launch_local(argv, processes=processes, restarts=Restarts(preload=preload), **how)
    if code == 0:
        shutil.rmtree(logs)
    return code
