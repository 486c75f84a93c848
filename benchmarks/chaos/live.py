"""A command that runs: its output, its rows of metrics.jsonl and its processes, watched from outside."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import processes, weights
from benchmarks.chaos.story import Attempt

_POLL_S = 0.01


class NotReachedError(Exception):
    """The command ended, or its time was up, before the moment of the injection came."""


@dataclass
class Command:
    """A command of one node."""

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    memory_bytes: int = 0
    """Limit on the address space of the command and of each of its children; 0: none."""


@dataclass
class Live:
    """One attempt while it runs; of several nodes all commands."""

    commands: Sequence[Command]
    metrics: Path
    mark: str
    mark_file: Path
    limit_s: float
    terminal: bool = False
    attempt: Attempt = field(init=False)
    injected: float = 0.0
    saves: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Time of each injection, and the step of the newest checkpoint then."""
    victims: set[int] = field(default_factory=set[int])
    """Indices of commands whose own exit code does not count: the fault killed them, or cut them off."""
    open_ports: Sequence[tuple[str, int]] = ()
    """Addresses and ports that an injection has found open."""
    reading: threading.Event = field(default_factory=threading.Event)
    """Cleared: nobody reads the output, as behind a stopped terminal."""

    def __post_init__(self) -> None:
        self.attempt = Attempt(began=time.time())
        status = self.metrics.stat() if self.metrics.exists() else None
        self._inode, self._offset = (status.st_ino, status.st_size) if status else (0, 0)
        self._rest = b""
        self.reading.set()
        self.popens: list[subprocess.Popen[bytes]] = []
        self._outputs: list[int] = []
        for command in self.commands:
            reads, writes = pty.openpty() if self.terminal else os.pipe()
            self._outputs.append(reads)
            popen = subprocess.Popen(
                command.argv,
                cwd=command.cwd,
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=writes,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.popens.append(popen)
            if command.memory_bytes:
                resource.prlimit(popen.pid, resource.RLIMIT_AS, (command.memory_bytes, command.memory_bytes))
            os.close(writes)
            threading.Thread(target=self._read, args=(reads,), daemon=True).start()

    @property
    def step(self) -> int:
        """The newest step in metrics.jsonl that this command wrote; 0 before the first."""
        self.poll()
        return max((int(row["step"]) for _, row in self.attempt.rows if row["event"] == "step"), default=0)

    @property
    def running(self) -> bool:
        """True while one of the commands runs."""
        return any(popen.poll() is None for popen in self.popens)

    def poll(self) -> None:
        """Takes the new rows of metrics.jsonl."""
        with suppress(FileNotFoundError):
            status = self.metrics.stat()
            if status.st_ino != self._inode:  # a new file: the directory was renamed
                self._inode, self._offset, self._rest = status.st_ino, 0, b""
            if status.st_size < self._offset:  # the half line of a killed run was cut off
                self._offset, self._rest = status.st_size, b""
            if status.st_size == self._offset:
                return
            with self.metrics.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                with suppress(ValueError):
                    self.attempt.rows.append((time.time(), json.loads(line)))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for `condition`; raises NotReachedError if the command ends or its time is up before."""
        while not condition():
            if not self.running:
                raise NotReachedError(f"the command ended before {what}")
            if time.time() - self.attempt.began > self.limit_s:
                raise NotReachedError(f"the time was up before {what}")
            self.poll()
            time.sleep(_POLL_S)

    def wait_step(self, step: int) -> None:
        """Waits until step `step` is done."""
        self.wait_until(lambda: self.step >= step, f"step {step}")

    def now(self) -> None:
        """Notes that the fault, or its next part, is injected now."""
        self.saves.append((time.time(), weights.newest_step(self.metrics.parent / "checkpoints")))
        self.injected = self.injected or self.saves[-1][0]

    def pid(self, rank: int) -> int:
        """Returns the process id of a rank."""
        pids = processes.rank_pids(self.mark)
        with suppress(OSError, ValueError):  # the plugin's note, of a rank whose environment does not show its number
            noted = int(Path(f"{self.mark_file}.rank{rank}").read_text())
            if any(process.pid == noted for process in processes.marked(self.mark)):
                return noted
        if rank not in pids:
            raise NotReachedError(f"rank {rank} is not running")
        return pids[rank]

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank: the injection."""
        pid = self.pid(rank)
        self.now()
        send(pid, number)

    def kill_launcher(self, number: int = signal.SIGKILL, node: int = 0) -> None:
        """Sends a signal to the command itself: the injection."""
        self.now()
        send(self.popens[node].pid, number)

    def close_output(self) -> None:
        """Goes away as the reader of the output, as `head` does."""
        self.now()
        for descriptor in self._outputs:
            os.close(descriptor)
        self._outputs.clear()

    def finish(self) -> Attempt:
        """Waits for the end, kills everything when the time is up, and returns the attempt."""
        attempt = self.attempt
        while self.running and time.time() - attempt.began < self.limit_s:
            self.poll()
            time.sleep(_POLL_S)
        attempt.ended = time.time()
        attempt.timed_out = self.running
        if attempt.timed_out:
            processes.kill(self.mark)
        codes = attempt.codes = [_as_in_a_shell(popen.wait()) for popen in self.popens]
        telling = [code for node, code in enumerate(codes) if node not in self.victims] or codes
        attempt.code = next((code for code in telling if code), 0)
        self.reading.set()
        self.poll()
        time.sleep(0.05)  # the rest of the output arrives
        return attempt

    def _read(self, descriptor: int) -> None:
        rest = b""
        while True:
            self.reading.wait()
            try:
                new = os.read(descriptor, 2**16)
            except OSError:  # a terminal whose last process is gone, or the injection closed it
                new = b""
            now = time.time()
            *lines, rest = (rest + new).split(b"\n") if new else ([rest, b""] if rest else [b""])
            self.attempt.lines += [(now, line.decode(errors="replace").rstrip("\r")) for line in lines]
            if not new:
                return


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _as_in_a_shell(code: int) -> int:
    return 128 - code if code < 0 else code
