"""A server that has imported what ranks import, and forks them: a rank then starts without those seconds.

A launch has one for its first ranks and for restarts, a pool of ranks (pool.py) for all of its own.
`python -m phalanx.launch.fork_server MODULE...` imports the modules, calls the function of each MODULE:FUNCTION, and
serves one request after the other on its standard input, a socket: four bytes with the length of the text, which
descriptors may accompany, and the text:

    {"environment": {...}, "command": ["MODULE", "WORD", ...], "stdout": "FILE or empty", "stderr": ...} -> PID

A rank becomes a child of the process that asks, because the one between them ends and the former adopts its descendants
for so long (PR_SET_CHILD_SUBREAPER): it is waited for, and dies with its parent, as one that was started afresh.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from phalanx.gc import gc_paused
from phalanx.launch.lifeline import die_with_parent, process_state
from phalanx.launch.ranks import LAUNCHER_PID
from phalanx.launch.watchdog.heartbeat import STACKS_SIGNAL

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_MOST_DESCRIPTORS = 8
_IMPORT_S = 300.0
_ANSWER_S = 5.0
_POLL_S = 0.1
_ADOPTION_S = 5.0
STACKS_WAIT_S = 0.5
"""How long a process has to write its stacks."""
_READY = b"ready\n"
_ROOM = 2**12
"""Bytes for the words that `ps` shows of a rank, and for its environment, beside those of the server."""


class ForkServer:
    def __init__(self, preload: Sequence[str], environment: Mapping[str, str], patience: float = 1.0):
        """Starts the process. `environment` holds what the libraries read when they are loaded, such as the number of
        threads; `patience` is a factor on the seconds that its imports and answers may take. Raises OSError if it
        cannot be started."""
        self._patience = patience
        self._socket, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        socket.send_fds(self._socket, [b"\n"], [self._stacks.fileno()])
        with theirs:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", __name__, *preload, " " * _ROOM],
                {**os.environ, **environment, LAUNCHER_PID: str(os.getpid()), "ROOM": " " * _ROOM},
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,  # Ctrl-C is for the launcher
            )
        self._answers = self._socket.makefile("rb")
        self._is_ready = False
        self._lock = threading.Lock()

    def wait(self, give_up: Callable[[], bool]) -> bool:
        """Waits until the modules are imported, for at most five minutes or until `give_up` holds; returns whether they
        are. A rank started afresh would not be there sooner."""
        end = time.monotonic() + _IMPORT_S * self._patience
        with self._lock:
            self._socket.settimeout(_POLL_S)
            while not self._is_ready and self._lives and time.monotonic() < end and not give_up():
                with suppress(TimeoutError, ConnectionResetError):
                    self._is_ready = self._socket.recv(len(_READY)) == _READY
        return self._is_ready and self._lives

    def stacks(self) -> str:
        """Returns where the process stands: what the kernel says of it, and the stacks of its threads."""
        state = process_state(self._pid)
        if os.fstat(self._stacks.fileno()).st_size:  # else it has not come as far as to write them
            os.kill(self._pid, STACKS_SIGNAL)
            time.sleep(STACKS_WAIT_S)
        self._stacks.seek(0)
        return f"process {self._pid}: {state.words if state else 'ended'}\n{self._stacks.read()}"

    @property
    def _lives(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: str = "",
        stderr: str = "",
        *,
        descriptors: Sequence[int] = (),
    ) -> int:
        """Starts a rank that runs `python -m COMMAND...` in that environment, as the leader of a session, with its
        output in the files named; empty: where the server's goes. A command that begins with "MODULE:FUNCTION" calls
        the function with the words. `descriptors` are open in the rank, too; their numbers there are further words.
        Returns its process id, a child of this process.

        Raises OSError if the server does not answer, which ends it: the next request would get this one's answer."""
        request = {"environment": dict(environment), "command": list(command), "stdout": stdout, "stderr": stderr}
        text = json.dumps(request).encode()
        with self._lock, _adopting():
            try:
                self._socket.settimeout(_ANSWER_S * self._patience)
                socket.send_fds(self._socket, [len(text).to_bytes(4, "big")], descriptors)
                self._socket.sendall(text)
                if not (answer := self._answers.readline()):
                    raise ConnectionResetError("the fork server has ended")
                return int(answer)
            except BaseException:  # also where the caller is interrupted
                self._is_ready = False
                os.kill(self._pid, signal.SIGKILL)
                raise

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for each in (self._answers, self._socket, self._stacks):
            each.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes those of this process's descendants that lose their parent its children."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _serve(requests: socket.socket) -> list[str]:
    """Forks a rank for every request. Returns in the rank, with its command; ends when the other side is gone."""
    requests.sendall(_READY)
    while True:
        head, descriptors, *_ = socket.recv_fds(requests, 4, _MOST_DESCRIPTORS)
        if not head:
            os._exit(0)
        request = json.loads(requests.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.setsid()  # before the answer: who has that may signal the group
            os.write(writing, b"%d\n" % os.getpid())
            os.close(reading)
            os.close(writing)
            requests.detach()  # its number is the rank's standard input
            return [*_become_rank(request), *map(str, descriptors)]
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        os.waitpid(between, 0)  # only now its fork is the child of who asks
        with os.fdopen(reading, "rb") as pipe:
            requests.sendall(pipe.read())


def _become_rank(request: dict[str, object]) -> list[str]:
    environment, command = request["environment"], request["command"]
    assert isinstance(environment, dict)
    assert isinstance(command, list)
    _redirect(0, os.devnull, os.O_RDONLY)
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        if request[name]:
            _redirect(descriptor, str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.environ.clear()
    os.environ.update(environment)
    show([sys.executable, "-P", "-m", *command], environment)
    end = time.monotonic() + _ADOPTION_S
    while os.getppid() != int(os.environ[LAUNCHER_PID]) and time.monotonic() < end:
        time.sleep(0.001)
    return command


def show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Puts words and variables where `ps`, `pkill -f` and /proc look for those of this process."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    for first, shown in ((45, words), (47, ["=".join(each) for each in environment.items()])):
        begin, end = int(fields[first]), int(fields[first + 1])  # arg_start, arg_end; env_start, env_end of proc(5)
        line = b"\0".join(map(os.fsencode, shown))[: max(0, end - begin - 1)]
        ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _redirect(descriptor: int, path: str, flags: int) -> None:
    file = os.open(path, flags, 0o666)
    os.dup2(file, descriptor)
    os.close(file)


def _main() -> None:
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the ranks: it ends them at once, wherever they are
    requests = socket.socket(fileno=0)
    stacks = os.fdopen(socket.recv_fds(requests, 1, 1)[1][0], "w")
    faulthandler.register(STACKS_SIGNAL, stacks)
    stacks.write("Stacks on request:\n")
    stacks.flush()
    with gc_paused():  # a tenth of the seconds of importing
        for module, _, function in (word.partition(":") for word in sys.argv[1:-1]):
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    gc.freeze()  # exempts the imports from garbage collection, which would copy their pages in every rank
    for each in weakref.finalize._registry:  # pyrefly: ignore[missing-attribute]
        each.atexit = False  # a rank would end with 0.04 s of processor time in which torch forgets its operators
    module, *words = _serve(requests)
    faulthandler.unregister(STACKS_SIGNAL)
    stacks.close()
    sys.argv = [module, *words]
    name, _, function = module.partition(":")
    if function:
        getattr(importlib.import_module(name), function)(*words)
    else:
        sys.modules.pop(name, None)  # what runs as a program is not that
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
