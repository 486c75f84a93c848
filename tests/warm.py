"""Starts Python without its imports: `python -m MODULE` and `python FILE` of a test are forked from a warm process.

A process that imports torch takes two seconds before it does a thing, and tests start hundreds. `install` makes
`subprocess.Popen` and `os.posix_spawn` ask a server that has imported torch for a fork. What is forked is a child of
the process that asked, with the environment, folder and streams it asked for; what it starts, such as ranks, is forked
too. A process is started afresh if the interpreter is told something else than the server was (PYTHONHASHSEED, LC_ALL),
for `python -c`, in tests marked `cold`, which are about the start of processes, and everywhere with PHALANX_COLD=1. A
fork that is given that variable starts its own processes afresh.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from phalanx import registry
from phalanx.config import fields
from phalanx.config.job import Job
from phalanx.launch import fork_server
from phalanx.launch.lifeline import leave, process_state

PRELOAD = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
"""What is imported before the modules of Phalanx; the latter of them when a rank makes an optimizer."""
READ_AT_LOAD = ("PYTHON", "LC_", "LANG", "LD_", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG")
"""How the names of variables begin that Python or torch read when they are loaded."""
FOLLOWED = {"PYTHONSAFEPATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
"""Those of them that a fork can follow."""
PHALANX = str(Path(sys.executable).with_name("phalanx"))
FLAGS = ("-P", "-u")
SIDE = 256
"""The rows of a matrix with which tests and forks measure the peak of a CPU where no job or file states it: products of
the rows that a fresh process takes are half a second in float64."""
STREAMS = range(3)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37  # linux/prctl.h
ADOPTION_S = 10.0
ANSWER_S = 150.0
"""How long a request may take, the first the imports, too: less than a test."""
WITHOUT = (
    "phalanx.launch.fork_server",
    *("phalanx --", "phalanx plan", "phalanx predict", "phalanx simulate", "phalanx dryrun", "phalanx report"),
    *("phalanx models", "phalanx schedule", "phalanx schema", "phalanx docs", "phalanx extensions", "phalanx init"),
    *("phalanx checkpoint", "phalanx import", "phalanx export", "phalanx goodput", "phalanx profile"),
)
"""Programs that start no other, or seldom, or whose forks do: they get no server of their own, and start it afresh."""
ROOM = 20000
"""The room for the words of a fork, which `ps` shows, and for its environment."""

is_cold = "PHALANX_COLD" in os.environ
"""Whether processes are started afresh."""

_prctl = ctypes.CDLL(None).prctl
_spawn = os.posix_spawn
_server: Server | None = None
_loaded_with: dict[str, str] = {}


def as_file(folder: Path, program: str) -> list[str]:
    """Returns words that start a program, given as text, so that it can be forked."""
    path = folder / "program.py"
    path.write_text(program)
    return [sys.executable, str(path)]


class Start(NamedTuple):
    words: list[str]
    """The interpreter's arguments: -m MODULE ... or FILE ..., perhaps after -P, and -u as torchrun gives it."""
    environment: dict[str, str]
    setsid: bool
    parent: int

    @property
    def flags(self) -> list[str]:
        return [*takewhile(FLAGS.__contains__, self.words)]

    @property
    def program(self) -> list[str]:
        return self.words[len(self.flags) :]


class Server:
    """The side that asks."""

    def __init__(self, channel: socket.socket, pid: int):
        self._channel = channel
        self._channel.settimeout(ANSWER_S)
        self._answers = channel.makefile("rb")
        self._lock = threading.Lock()
        self._pid = pid

    def start(
        self, words: list[str], environment: Mapping[str, str], setsid: bool, folder: Any, streams: Sequence[int]
    ) -> int:
        """Returns the process id of a new child of this process. Raises OSError if the server does not answer, which
        ends it: the next request would get this one's answer. From then on processes are started afresh."""
        message = json.dumps(Start(words, dict(environment), setsid, os.getpid())).encode()
        with self._lock, _adopting():
            where = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                socket.send_fds(self._channel, [len(message).to_bytes(4, "big")], [where, *streams])
                self._channel.sendall(message)
                if not (answer := self._answers.readline()):
                    raise ConnectionResetError("the warm process has ended")
                return int(answer)
            except BaseException as error:  # also where a test's time is over
                self._give_up(error)
                raise
            finally:
                os.close(where)

    def _give_up(self, error: BaseException) -> None:
        global _server  # noqa: PLW0603
        _server = None
        state = process_state(self._pid)
        error.add_note(f"The warm process {self._pid}: {state.words if state else 'ended'}; its stacks are on stderr.")
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGABRT)


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes those of this process's descendants that lose their parent its children."""
    before = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _words(argv: Any, environment: Mapping[str, str]) -> list[str] | None:
    """Returns the interpreter's arguments if a fork can follow them, else None."""
    if _server is None or is_cold or not isinstance(argv, list | tuple):
        return None
    program, *words = [os.fspath(word) for word in argv]
    if program == PHALANX:
        words = ["-P", "-m", "phalanx", *words]
    elif program != sys.executable:
        return None
    first = next(dropwhile(FLAGS.__contains__, words), "")
    is_like = first == "-m" or first.endswith(".py")
    return words if is_like and _read_at_load(environment) == _loaded_with else None


def _read_at_load(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_LOAD) and k not in FOLLOWED}


class Popen(subprocess.Popen):
    """A process, forked by the server where that can be."""

    def _execute_child(self, *given: Any) -> None:
        of = inspect.signature(super()._execute_child).bind(*given).arguments
        environment = os.environ if of["env"] is None else of["env"]
        words = _words(of["args"], environment)
        odd = any(of[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
        if words is None or odd or {of["gid"], of["gids"], of["uid"]} != {None} or of["umask"] >= 0:
            super()._execute_child(*given)
            return
        theirs = [of[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if each == -1 else each for own, each in zip(STREAMS, theirs, strict=True)]
        assert _server is not None
        self.pid = _server.start(words, environment, of["start_new_session"], of["cwd"], streams)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(of[name] for name in ends))


def posix_spawn(path: str, argv: Sequence[str], environment: Mapping[str, str], /, **options: Any) -> int:
    """`os.posix_spawn`, by the server where that can be."""
    words = _words(argv, environment)
    if words is None or options.keys() - {"file_actions", "setsid", "setsigmask"}:
        return _spawn(path, argv, environment, **options)
    streams, opened = list(STREAMS), []
    try:
        for kind, *action in options.get("file_actions") or ():
            if kind == os.POSIX_SPAWN_OPEN:
                opened.append(os.open(*action[1:]))
                streams[action[0]] = opened[-1]
            else:
                assert kind == os.POSIX_SPAWN_DUP2
                streams[action[1]] = action[0]
        assert _server is not None
        return _server.start(words, environment, options.get("setsid", False), None, streams)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def install() -> None:
    """Starts the server in the background, and makes this process ask it."""
    if is_cold or _server is not None:
        return
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "ROOM": "-" * ROOM}
    environment.pop("PYTHONPATH", None)
    with theirs:
        words = [sys.executable, __file__, "-" * ROOM]
        process = subprocess.Popen(words, stdin=theirs, stdout=subprocess.DEVNULL, env=environment)
    process.returncode = 0  # it ends when this process has ended: no warning that it runs
    _ask(ours, process.pid)


def install_in_fork() -> None:
    """Gives a fork of a process that has a server one of its own, so that its children are its own."""
    global _server  # noqa: PLW0603
    _server = None
    install()


def use_one_thread() -> None:
    """Sets one thread per operation of torch, if that is imported."""
    if "torch" in sys.modules:  # not for the sake of tests that do without it
        sys.modules["torch"].set_num_threads(1)


def measure_briefly() -> None:
    importlib.import_module("phalanx.train.device").SIDE = SIDE


def _ask(channel: socket.socket, pid: int) -> None:
    global _server  # noqa: PLW0603
    _server = Server(channel, pid)
    _loaded_with.update(_read_at_load(os.environ))
    subprocess.Popen = Popen
    os.posix_spawn = posix_spawn


def _serve(channel: socket.socket) -> Start:
    """Forks a process for every request, and returns in it; ends when nobody is left who could ask."""
    while True:
        head, descriptors, *_ = socket.recv_fds(channel, 4, len(STREAMS) + 1)
        if not head:
            os._exit(0)
        start = Start(*json.loads(channel.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            if start.setsid:  # before the answer: who has that may signal the group
                os.setsid()
            os.write(writing, b"%d\n" % os.getpid())
            os.close(reading)
            os.close(writing)
            channel.close()
            _become(start, descriptors)
            return start
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        os.waitpid(between, 0)  # which makes its fork the child of who asks: not before does that hear of it
        with os.fdopen(reading, "rb") as pipe:
            channel.sendall(pipe.read())


def _become(start: Start, descriptors: Sequence[int]) -> None:
    """Makes a fork what a fresh process is."""
    faulthandler.disable()
    where, *streams = descriptors
    os.fchdir(where)
    for number, descriptor in zip(STREAMS, streams, strict=True):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(start.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old, is_line = getattr(sys, name), number == STREAMS[-1] or os.isatty(number)
        at_once = number > 0 and ("-u" in start.flags or bool(start.environment.get("PYTHONUNBUFFERED")))
        raw = open(number, "wb" if number else "rb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, old.encoding, old.errors, None, number > 0 and is_line, at_once)
        stream.mode = "w" if number else "r"  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    fork_server.show([sys.executable, *start.words], start.environment)
    end = time.monotonic() + ADOPTION_S
    while os.getppid() != start.parent and time.monotonic() < end:
        time.sleep(0.0005)


def _run(start: Start) -> None:
    """Runs the module or file in this process."""
    safe = "-P" in start.flags or bool(start.environment.get("PYTHONSAFEPATH"))
    first, *rest = start.program
    sys.path[:0] = filter(None, start.environment.get("PYTHONPATH", "").split(os.pathsep))
    if first == "-m":
        sys.path[:0] = [] if safe else [os.getcwd()]
        sys.modules.pop(rest[0], None)  # what runs as a program is not that
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.path[:0] = [] if safe else [str(Path(first).resolve().parent)]
    sys.argv = [first, *rest]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = first
    exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def _leave(code: Any) -> None:
    """Ends the process as the interpreter does, but for taking its modules apart. Returns where that cannot be."""
    if code is not None and not isinstance(code, int):
        with suppress(OSError, ValueError):
            print(code, file=sys.stderr)
        code = 1
    leave((code or 0) & 0xFF)


def modules() -> Iterator[str]:
    """Yields the names of Phalanx' modules, but for those that are programs, and one that looks for packages that
    extend Phalanx as soon as it is imported: those are of the environment of a fork."""
    import phalanx

    for _, name, _ in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
        if name.rpartition(".")[2] not in ("__main__", "rank") and name != "phalanx.cli.init":
            yield name


def _read_fields(of: type) -> None:
    """Evaluates what the types of a job's fields state, as every command does that reads a job."""
    fields.leaves(of)
    fields.constraints(of)
    for kind in fields.children(of).values():
        if dataclasses.is_dataclass(kind):
            _read_fields(kind)


def _with_own_server(start: Start) -> Start:
    """Gives a fork a server of its own, so that its children are its own. Returns in it, and in what that forks."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        _ask(ours, pid)
        return start
    ours.close()
    os.setsid()
    fork_server.show([sys.executable, __file__], {})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)  # who reads the streams waits for their end
    for number in STREAMS:
        os.dup2(nothing, number)
    os.close(nothing)
    return _serve(theirs)


def _main() -> None:
    """The server, and what it forks."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    _loaded_with.update(_read_at_load(os.environ))
    subprocess.Popen = Popen  # for torchrun, which takes the name when it is imported
    for module in (*PRELOAD, *modules()):
        importlib.import_module(module)
    measure_briefly()
    fields.constraints()
    _read_fields(Job)
    assert not registry._loading.begun, "a module that is imported looks for packages that extend Phalanx"
    sys.path.pop(0)  # this folder
    for each in weakref.finalize._registry:
        each.atexit = False  # at its end torch would forget its operators one by one: a third of a small fork's seconds
    gc.freeze()  # exempts the imports from garbage collection, which would copy their pages in every fork
    start = _serve(channel)
    words = " ".join(start.program[1:])
    if "PHALANX_COLD" not in start.environment and not words.startswith(WITHOUT):
        start = _with_own_server(start)
    try:
        _run(start)
    except SystemExit as left:
        _leave(left.code)
        raise
    _leave(None)


if __name__ == "__main__":
    _main()
