"""A standby process that has imported what ranks import, and forks them: a restart then saves those seconds.

It is started once training runs, so that it does not slow down the start. `python -m phalanx.launch.standby MODULE...`
imports the modules and serves one request after the other on its standard input, a socket:

    {"environment": {...}, "command": ["MODULE", "WORD", ...], "stdout": "FILE or empty", "stderr": ...} -> {"pid": 123}

A rank becomes the launcher's own child, because the process between them ends and the launcher adopts its descendants
(PR_SET_CHILD_SUBREAPER): it is waited for, and dies with the launcher, as one that was started afresh.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from phalanx.launch.lifeline import die_with_parent
from phalanx.launch.ranks import LAUNCHER_PID

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_IMPORT_S = 60.0
_ANSWER_S = 5.0
_POLL_S = 0.1
_ADOPTION_S = 5.0
_READY = b"ready\n"


class Standby:
    """The launcher's side. Close it."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]):
        """Starts the process. `environment` holds what the libraries read when they are loaded, such as the number of
        threads. Raises OSError if it cannot be started."""
        _adopt_orphans(True)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", __name__, *preload],
                {**os.environ, **environment, LAUNCHER_PID: str(os.getpid())},
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,  # Ctrl-C is for the launcher
            )
        self._answers = self._socket.makefile("rb")
        self._is_ready = False

    def wait(self, give_up: Callable[[], bool]) -> bool:
        """Waits until the modules are imported, for at most a minute or until `give_up` holds; returns whether they
        are. A rank started afresh would not be there sooner."""
        end = time.monotonic() + _IMPORT_S
        self._socket.settimeout(_POLL_S)
        while not self._is_ready and self._lives and time.monotonic() < end and not give_up():
            with suppress(TimeoutError):
                self._is_ready = self._socket.recv(len(_READY)) == _READY
        return self._is_ready and self._lives

    @property
    def _lives(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def start(self, command: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> int:
        """Starts a rank that runs `python -m COMMAND...` in that environment, as the leader of a session, with its
        output in the files named; empty: where the launcher's goes. Returns its process id, a child of this process.

        Raises OSError if the standby process does not answer."""
        request = {"environment": dict(environment), "command": list(command), "stdout": stdout, "stderr": stderr}
        self._socket.settimeout(_ANSWER_S)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        answer = self._answers.readline()
        if not answer:
            raise ConnectionResetError("the standby process has ended")
        return json.loads(answer)["pid"]

    def close(self) -> None:
        """Ends the process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._answers.close()
        self._socket.close()
        _adopt_orphans(False)


def _adopt_orphans(yes: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _serve(requests: socket.socket) -> list[str]:
    """Forks a rank for every request. Returns in the rank, with its command; ends when the launcher is gone."""
    lines = requests.makefile("rb")
    requests.sendall(_READY)
    for line in lines:
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank == 0:
                os.close(reading)
                os.close(writing)
                return _become_rank(json.loads(line))
            os.write(writing, str(rank).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(between, 0)
        with os.fdopen(reading) as pipe:
            requests.sendall(json.dumps({"pid": int(pipe.read())}).encode() + b"\n")
    os._exit(0)


def _become_rank(request: dict[str, object]) -> list[str]:
    environment, command = request["environment"], request["command"]
    assert isinstance(environment, dict)
    assert isinstance(command, list)
    os.setsid()
    _redirect(0, os.devnull, os.O_RDONLY)
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        if request[name]:
            _redirect(descriptor, str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.environ.clear()
    os.environ.update(environment)
    end = time.monotonic() + _ADOPTION_S
    while os.getppid() != int(os.environ[LAUNCHER_PID]) and time.monotonic() < end:
        time.sleep(0.001)
    return command


def _redirect(descriptor: int, path: str, flags: int) -> None:
    file = os.open(path, flags, 0o666)
    os.dup2(file, descriptor)
    os.close(file)


def _main() -> None:
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # exempts the imports from garbage collection, which would copy their pages in every rank
    module, *words = _serve(socket.socket(fileno=0))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
