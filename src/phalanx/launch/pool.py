"""A pool of warm rank processes: runs functions on a group of ranks at milliseconds per call.

It serves tests and `phalanx verify`, which compare many layouts with one process. A launch starts Python and imports
torch in every rank; here a fork server imports torch once and the ranks are forked from it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch import process_group
from phalanx.launch.fork_server import STACKS_WAIT_S, ForkServer
from phalanx.launch.lifeline import die_with_parent
from phalanx.launch.local import NodePart
from phalanx.launch.ranks import LAUNCHER_PID, STORE, Ranks
from phalanx.launch.watchdog.heartbeat import STACKS_SIGNAL

_PEER_GRACE_S = 0.5  # after one rank's error: if all ranks raise it, all errors are collected and none is killed
_TIMEOUT_MARGIN_S = 60.0  # a group's own timeout comes after the pool's, which shows where every rank stands


class Pool:
    """Up to `max_ranks` processes on this machine, started when first needed and used for every call.

    Each call has a process group of its own, and finds seed and default dtype as in a fresh process. After an error
    the processes that took part are replaced. Use from one thread. The fork server imports the modules `preload` once,
    on top of torch. Ranks that outnumber the GPUs share them.
    """

    def __init__(self, max_ranks: int, preload: Sequence[str] = (), device_type: str = "cpu"):
        self.max_ranks, self.device_type = max_ranks, device_type
        if device_type != "cpu":
            # A fork of a process that has called CUDA cannot use it, so torch must count GPUs through NVML.
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
            # A group with a backend per device type has no default one, and torch warns of that at every group.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._environment = {**os.environ, LAUNCHER_PID: str(os.getpid())}
        self._server = ForkServer([__name__, *preload], {}, patience=10.0)  # nothing else could start ranks
        self._directory = tempfile.TemporaryDirectory(prefix="phalanx_pool_")  # mode 0700
        self._ranks: dict[int, _PoolProcess] = {}
        self._calls = itertools.count()
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Returns the results of `fn(ranks, *args, **kwargs)` on `world` ranks, by rank, within so many seconds. `fn`
        is at the top of a module that can be imported, or of the program itself; arguments and results are copied,
        tensors included.

        Raises:
            Exception: what the first failing rank raised, with that rank's traceback as a note.
            TimeoutError: a rank did not return; the message has every rank's stack.
            RuntimeError: a rank died, or none can be started.
        """
        if not 1 <= world <= self.max_ranks:
            raise ValueError(f"world {world} is not between 1 and this pool's {self.max_ranks} ranks")
        deadline = time.monotonic() + timeout
        call = pickle.dumps((fn, args, kwargs))
        store = str(Path(self._directory.name) / f"store_{next(self._calls)}")
        processes = [self._process(rank, timeout) for rank in range(world)]
        try:
            for rank, process in enumerate(processes):
                ranks = Ranks(rank, world, rank, world, 0, "pool")
                where = sys.path, str(Path.cwd()), _main()
                process.connection.send((*where, ranks, self.device_type, store, timeout + _TIMEOUT_MARGIN_S, call))
            answers = _collect(processes, deadline)
            results = {rank: answer.value for rank, answer in answers.items() if answer.value is not None}
            if len(results) < world:
                raise _error(fn, processes, answers, timeout)
            for process in processes:
                process.connection.send(None)  # a rank may exit only now: its peers might still read from it
            return [pickle.loads(results[rank]) for rank in range(world)]
        except BaseException:  # also when the caller is interrupted: the next call must not read this one's answers
            for rank in range(world):
                self._ranks.pop(rank).kill()
            raise

    def wait(self, seconds: float) -> None:
        """Waits until ranks can be started. Raises RuntimeError, with the stacks of the fork server, if they cannot
        within so many seconds, or ever."""
        end = time.monotonic() + seconds
        if not self._server.wait(lambda: time.monotonic() > end):
            raise RuntimeError(f"the fork server cannot start ranks, after {seconds:g} s.\n{self._server.stacks()}")

    def close(self) -> None:
        """Ends all processes; also called when the interpreter exits."""
        atexit.unregister(self.close)
        for process in self._ranks.values():
            process.kill()
        self._ranks.clear()
        self._server.close()
        self._directory.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process(self, rank: int, timeout: float) -> _PoolProcess:
        process = self._ranks.get(rank)
        if process is None or process.exit_code() is not None:
            self.wait(timeout)
            process = self._ranks[rank] = _PoolProcess(self._server, self._environment, Path(self._directory.name))
        return process


def _main() -> dict[str, Any]:
    """Returns what multiprocessing imports the program's own module by, whose functions a call may name."""
    return {key: value for key, value in spawn.get_preparation_data("rank").items() if key.startswith("init_main")}


@dataclass(frozen=True)
class _Answer:
    """The answer of a rank; empty if it died or no longer answers."""

    value: bytes | None = None
    """Pickled by value: tensors sent through multiprocessing are handles that die with the process."""
    error: BaseException | None = None
    trace: str = ""
    exit_code: int | None = None  # -n for a death by signal n


class _PoolProcess:
    def __init__(self, server: ForkServer, environment: Mapping[str, str], directory: Path):
        file, name = tempfile.mkstemp(prefix="stacks_", dir=directory)
        os.close(file)
        self.stacks = Path(name)
        """The file to which the process writes its threads' stacks, on request or when it dies."""
        self.connection, theirs = Pipe()
        with theirs:
            self._pid = server.start([f"{__name__}:serve", name], environment, descriptors=[theirs.fileno()])
        self._exit_code: int | None = None

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Returns the exit code, -n for a death by signal n; None if the process has not ended within `seconds`."""
        end = time.monotonic() + seconds
        while self._exit_code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                break
            else:
                time.sleep(0.01)
        return self._exit_code

    def ask_for_stacks(self) -> None:
        """Makes the process write its stack, even from inside a collective."""
        if self.exit_code() is None:
            os.kill(self._pid, STACKS_SIGNAL)

    def kill(self) -> None:
        if self.exit_code() is None:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            self._exit_code = os.waitstatus_to_exitcode(status)
        self.connection.close()


def _collect(processes: Sequence[_PoolProcess], deadline: float) -> dict[int, _Answer]:
    answers: dict[int, _Answer] = {}
    pending = dict(enumerate(processes))
    while pending and (ready := wait([p.connection for p in pending.values()], deadline - time.monotonic())):
        for rank in [rank for rank, process in pending.items() if process.connection in ready]:
            process = pending.pop(rank)
            try:
                answers[rank] = process.connection.recv()
            except (EOFError, ConnectionResetError):
                answers[rank] = _Answer(exit_code=process.exit_code(1.0))
            if answers[rank].value is None:
                deadline = min(deadline, time.monotonic() + _PEER_GRACE_S)
    return answers


def _error(
    fn: Callable[..., Any], processes: Sequence[_PoolProcess], answers: dict[int, _Answer], timeout: float
) -> BaseException:
    world, failed = len(processes), {rank: answer for rank, answer in answers.items() if answer.value is None}
    for rank, answer in failed.items():
        if answer.error is None:  # before the errors of its peers, which only lost the connection
            return RuntimeError(
                f"rank {rank} of {world} died in {fn.__qualname__} (exit code {answer.exit_code}).\n"
                f"{processes[rank].stacks.read_text(errors='replace')}"
            )
    for rank, answer in failed.items():
        if answer.error is not None:
            answer.error.add_note(f"Raised on rank {rank} of {world}:\n{answer.trace}")
            return answer.error
    for process in processes:
        process.ask_for_stacks()
    time.sleep(STACKS_WAIT_S)
    lines = [f"{fn.__qualname__} on {world} ranks took longer than {timeout:g} s. Stacks of the ranks:"]
    for rank, process in enumerate(processes):
        stacks = "finished" if rank in answers else process.stacks.read_text(errors="replace").rstrip()
        lines.append(f"rank {rank}: {stacks}")
    return TimeoutError("\n".join(lines))


def serve(stacks: str, descriptor: str) -> None:
    """Serves calls in a rank process until the caller is gone."""
    die_with_parent(int(os.environ.pop(LAUNCHER_PID)))
    connection = Connection(int(descriptor))
    if not Path(stacks).exists():
        return  # the caller was interrupted while this process started, and has cleaned up
    with open(stacks, "w", encoding="utf-8") as file, suppress(EOFError):
        faulthandler.enable(file)
        faulthandler.register(STACKS_SIGNAL, file)
        while True:
            path, directory, main, *call = connection.recv()
            sys.path[:] = path  # the function's module has to be importable here as it is there
            os.chdir(directory)
            spawn.prepare(main)
            environment = dict(os.environ)
            connection.send(_answer(*call))
            connection.recv()
            if dist.is_initialized():
                process_group.shutdown()
            gc.freeze()  # what a call leaves, such as imports: no later collection walks through it
            os.environ.clear()
            os.environ.update(environment)


def _answer(ranks: Ranks, device_type: str, store: str, timeout_s: float, call: bytes) -> _Answer:
    launched = NodePart().variables(ranks.world, 0, 0)[ranks.rank]  # for code that reads them
    os.environ.update(launched, OMP_NUM_THREADS="1", **{STORE: store})
    torch.set_num_threads(1)  # the call before may have set more
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        fn, args, kwargs = pickle.loads(call)
        process_group.init(ranks, device=process_group.device_of(ranks, device_type), timeout_s=timeout_s)
        return _Answer(pickle.dumps(fn(ranks, *args, **kwargs)))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as reason:  # whatever its __reduce__ or __init__ may raise
            text = f"{type(error).__name__}: {error} (cannot be sent as it is: {reason})"
            return _Answer(error=RuntimeError(text), trace=trace)
        return _Answer(error=error, trace=trace)
