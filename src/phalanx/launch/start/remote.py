"""Runs what starts a job: srun or mpirun in the foreground, or the launchers of several nodes through remote shells.

None of srun and mpirun passes on Ctrl-C and SIGTERM as a request: srun kills its step a few seconds later, Open MPI's
mpirun kills the ranks at once. All of them pass on SIGUSR1, by which a run stops with a checkpoint (75).

A remote shell carries no signals. The nodes read their names from standard input, and take its end for SIGTERM: so they
stop when this process is killed, and when a connection breaks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, TextIO

from phalanx.echo import echo
from phalanx.errors import RunError
from phalanx.launch.lifeline import die_with_parent
from phalanx.launch.start.choose import HostCommand
from phalanx.launch.supervisor import StopSignals


def run_in_foreground(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command to its end, and returns its exit code, or 128 + n if signal n ended it.

    The first request to stop becomes SIGUSR1 for the command, so does the end of this process. A second one becomes
    SIGTERM, which ends the run at once. Raises RunError if the command cannot be started."""
    here, signals, passed_on = os.getpid(), StopSignals(), 0
    with signals.handled():
        try:
            command = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C comes to this process alone
                preexec_fn=lambda: die_with_parent(here, signal.SIGUSR1),  # noqa: PLW1509 - there are no threads here
            )
        except OSError as error:
            raise RunError(f"{argv[0]} cannot be started: {error.strerror}; --dry-run prints the command") from None
        while command.poll() is None:
            for number in (signal.SIGUSR1, signal.SIGTERM)[passed_on : len(signals.requests)]:
                command.send_signal(number)
                passed_on += 1
                if number == signal.SIGUSR1:
                    with suppress(OSError):  # the terminal is gone
                        line = "the run is asked to stop with a checkpoint; a second signal ends it at once"
                        echo(f"phalanx: {line}", file=sys.stderr, flush=True)
            with suppress(subprocess.TimeoutExpired):
                command.wait(_POLL_S)
    return 128 - command.returncode if command.returncode < 0 else command.returncode


_POLL_S = 0.1
_LONGEST_LINE = 65536
_LOST = {
    126: "the program is not executable there",
    127: "the program was not found there",
    255: "the host cannot be reached, or the connection broke",
}
"""Exit codes of the remote shell itself."""


class RemoteNodes:
    """The nodes of one run: a command for each, that of the rendezvous' host first; without `least` of them it cannot
    go on. `secrets` are variables that they read from their standard input. Nodes that were asked to stop may take
    `grace_s`. A `bare_stdout` is a document: it is printed without the host in front."""

    def __init__(
        self,
        commands: Sequence[HostCommand],
        *,
        least: int,
        secrets: Mapping[str, str],
        grace_s: float,
        bare_stdout: bool,
    ):
        self.commands, self.least, self.secrets, self.grace_s = commands, least, secrets, grace_s
        self.prefixes = [f"[{command.hosts[0]}] " if len(commands) > 1 else "" for command in commands]
        self.bare_stdout = bare_stdout
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._signals = StopSignals()
        self._failures: list[int] = []  # exit codes of nodes that failed, in the order in which they ended
        self._stopped_at: float | None = None

    def run(self) -> int:
        """Runs the nodes to their ends, and returns the exit code: that of the rendezvous' host, to which a failure of
        any node comes, or of the node that failed while the others waited for it; 1 if a host could not be reached.
        Raises RunError if the remote shell itself cannot be started."""
        with self._signals.handled():
            try:
                for command, prefix in zip(self.commands, self.prefixes, strict=True):
                    self._nodes.append(self._start(command, prefix))
                self._wait()
            finally:
                self._kill()
        for reader in self._readers:
            reader.join(5)
        code = self._failures[0] if self._failures and self._stopped_at is not None else self._nodes[0].returncode
        if code in _LOST:
            return RunError.exit_code
        return 128 - code if code < 0 else code

    def _start(self, command: HostCommand, prefix: str) -> subprocess.Popen[bytes]:
        try:
            node = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C of the terminal comes to this process alone, which passes it on
            )
        except OSError as error:
            raise RunError(f"{command.argv[0]} cannot be started: {error.strerror}; give --remote-shell") from None
        if self.secrets:
            self._write(node, json.dumps(self.secrets))
        assert node.stdout is not None
        assert node.stderr is not None
        out = "" if self.bare_stdout else prefix
        for pipe, stream, front in ((node.stdout, sys.stdout, out), (node.stderr, sys.stderr, prefix)):
            reader = threading.Thread(target=_show, args=(pipe, stream, front), daemon=True)
            reader.start()
            self._readers.append(reader)
        return node

    def _wait(self) -> None:
        """Waits for every node, and stops the others when one has failed without which they cannot go on."""
        alive, failed_at, passed_on = list(self._nodes), 0.0, 0
        while alive:
            for number, _ in self._signals.requests[passed_on:]:
                self._tell(number)
                passed_on += 1
            for place, node in enumerate(self._nodes):
                if node in alive and node.poll() is not None:
                    alive.remove(node)
                    if node.returncode:
                        self._failures.append(node.returncode)
                        failed_at = time.monotonic()
                    if reason := _LOST.get(node.returncode):
                        (host,), shell = self.commands[place].hosts, " ".join(self.commands[place].argv[:-2])
                        lost = f"{host}: the remote shell ended with {node.returncode}: {reason}"
                        echo(f"phalanx: {lost}. Try: {shell} {host} hostname", file=sys.stderr)
            # A launcher that could tell the others has done so. They have some time to end by themselves.
            patience_s = 0 if any(code in _LOST for code in self._failures) else self.grace_s
            too_few = bool(self._failures) and 0 < len(alive) < self.least
            if too_few and self._stopped_at is None and time.monotonic() > failed_at + patience_s:
                echo("phalanx: the nodes that are left are too few; they are stopped", file=sys.stderr)
                self._tell(signal.SIGTERM)
                self._stopped_at = time.monotonic()
            if self._stopped_at is not None and time.monotonic() > self._stopped_at + self.grace_s + 10:
                self._kill()
            time.sleep(_POLL_S)

    def _tell(self, number: int) -> None:
        for node in self._nodes:
            self._write(node, signal.Signals(number).name)

    def _write(self, node: subprocess.Popen[bytes], line: str) -> None:
        assert node.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            node.stdin.write(f"{line}\n".encode())
            node.stdin.flush()

    def _kill(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.kill()
                node.wait()


def _show(pipe: IO[bytes], stream: TextIO, prefix: str) -> None:
    for line in iter(lambda: pipe.readline(_LONGEST_LINE), b""):
        with suppress(BrokenPipeError):  # a reader that is gone does not stop training
            # In one piece, or lines of two nodes would mix.
            echo(f"{prefix}{line.decode(errors='replace').rstrip()}\n", file=stream, end="", flush=True)
