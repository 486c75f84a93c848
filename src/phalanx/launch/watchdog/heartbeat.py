"""The heartbeat of this process: what it does, written to a memory-mapped file that a watchdog reads.

A store into the file takes a fraction of a microsecond and no system call, and the file survives the process. The
functions of this module do nothing in a process without a heartbeat.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

from phalanx.echo import echo
from phalanx.launch.watchdog import layout as at
from phalanx.launch.watchdog.layout import OWN_PHASES, Phase

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads, from C, even while the GIL is held."""

_TICK_S = 1.0
_CALL = struct.Struct(f"@{at.CALL_WORDS}Q")
_OPERATIONS = {name: number for number, name in enumerate(at.OPERATIONS)}
_DTYPES = {name: number for number, name in enumerate(at.DTYPES)}
_ANY_SHAPE = {_OPERATIONS["all_to_all"], _OPERATIONS["shift"]}
_now = time.monotonic_ns


class Channel:
    """One sequence of calls that the ranks of a process group make in the same order: its collectives, or the messages
    from one rank to another."""

    __slots__ = ("digest", "is_message", "number", "started")

    def __init__(self, number: int, is_message: bool = False):
        self.number, self.started, self.is_message = number, 0, is_message
        self.digest = 0
        """Of all calls so far."""

    def take(self, operation: int, dtype: int, shape: Sequence[int], nbytes: int, root: int) -> int:
        """Counts a call, and returns the digest of all so far, by what must be equal on all ranks (RecordedCall's
        `signature`). The hash of numbers is the same in every process."""
        self.started += 1
        if self.is_message:
            signature: tuple[int, ...] = (dtype, nbytes)
        elif operation in _ANY_SHAPE:
            signature = (operation, dtype, root)
        else:
            signature = (operation, dtype, nbytes, root, *shape)
        self.digest = hash((self.digest, *signature)) & 0xFFFFFFFFFFFFFFFF
        return self.digest


class Call:
    """A recorded collective of this process."""

    __slots__ = ("_base", "_beat", "_number", "_waits")

    def __init__(self, beat: Heartbeat, number: int, waits: int):
        self._beat, self._number, self._waits = beat, number, waits
        self._base = at.RING + number % at.RING_CALLS * at.CALL_WORDS

    def waits(self) -> None:
        """Records that the rank now waits for the result."""
        words = self._beat.words
        self._waits = words[at.BEAT] = _now()
        if words[self._base] == self._number:  # otherwise newer calls have taken its place
            words[self._base + at.WAITS] = self._waits

    def done(self) -> None:
        """Records that the result is there."""
        words = self._beat.words
        end = words[at.BEAT] = _now()
        if self._waits:
            self._beat.waited_ns += end - self._waits
        if words[self._base] == self._number:
            words[self._base + at.DONE] = end


class Heartbeat:
    """One rank's heartbeat file.

    Raises OSError if the file cannot be created or its space cannot be reserved.
    """

    def __init__(self, directory: Path, rank: int, world: int):
        self.rank, self.path = rank, directory / at.file_name(rank)
        temporary = directory / f".{at.file_name(rank)}"
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, at.FILE_BYTES)  # a full disk must not end a later store with SIGBUS
            self._map = mmap.mmap(file.fileno(), at.FILE_BYTES)
        view = memoryview(self._map)
        self.words, self._names = view[: at.NAMES * 8].cast("Q"), view[at.NAMES * 8 :]
        self.waited_ns = 0
        """Nanoseconds spent waiting for other ranks."""
        self.phase_ns: dict[Phase, tuple[int, int]] = dict.fromkeys(Phase, (0, 0))
        """Nanoseconds of its own, and of waiting for other ranks, that the process has spent in each phase."""
        self._phase, self._since, self._waited_before = Phase.START, _now(), 0
        self._numbers = itertools.count(1)
        self.channels: dict[tuple[str, str, int], Channel] = {}
        self._sources: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._numbers_of_names: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()  # for names, which are new a few dozen times in a run
        words = self.words
        words[at.RANK], words[at.WORLD], words[at.PID] = rank, world, os.getpid()
        words[at.STARTED], words[at.MAIN_THREAD] = _start_ticks(), threading.get_ident()
        words[at.BEAT] = words[at.TICK] = self._since
        words[at.PHASE] = self._since << at.PHASE_BITS
        words[at.MAGIC_WORD] = at.MAGIC
        temporary.rename(self.path)

    def beat(self) -> None:
        """Records a sign of life."""
        self.words[at.BEAT] = _now()

    def enter(self, phase: Phase) -> Phase:
        """Records that a phase begins, outside all modules. Returns the one before."""
        _Process.module = ""
        now, before = _now(), self._phase
        waited = self.waited_ns - self._waited_before
        own, (own_before, waited_before) = max(0, now - self._since - waited), self.phase_ns[before]
        self.phase_ns[before] = own_before + own, waited_before + waited
        if before in OWN_PHASES:
            self.words[at.OWN_NS] += own
        self._phase, self._since, self._waited_before = phase, now, self.waited_ns
        self.words[at.PHASE] = now << at.PHASE_BITS | phase
        self.words[at.BEAT] = now
        return before

    def steps_done(self, number: int) -> None:
        """Records that `number` steps are done."""
        self.words[at.STEP] = number
        self.words[at.BEAT] = _now()

    def note_memory(self, used: int) -> None:
        """Records the peak bytes so far."""
        self.words[at.MEMORY] = used

    def channel(self, group: str, kind: str, ranks: Sequence[int], peer: int = -1) -> Channel:
        """Returns a channel of the process group with the unique name `group` and the global ranks `ranks`: of `kind`
        all (collectives), or send or receive, for messages to or from the global rank `peer`."""
        found = self.channels.get((group, kind, peer))
        if found is None:
            with self._lock:
                number = min(len(self.channels), at.CHANNELS - 1)  # the last one takes the rest, without names
                found = self.channels[group, kind, peer] = Channel(number, kind != "all")
                if number < at.CHANNELS - 1:
                    entry = {"channel": number, "group": group, "kind": kind, "peer": peer, "ranks": _compact(ranks)}
                    self._append(entry)
        return found

    def begin(
        self,
        channel: Channel,
        operation: str,
        axis: str,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        *,
        waits: bool,
        on_device: bool,
        hidden: str,
        root: int = -1,
    ) -> Call:
        """Records a collective that the rank starts now. Returns the record, for `waits` and `done`.

        `root` is the global rank from which or to which data go, if there is one, or the distance of a shift.
        The source line is that of the first caller whose file is not in the folder `hidden`. `on_device`: the host does
        not see when it completes.
        """
        number, now = next(self._numbers), _now()
        dims = shape if len(shape) <= at.SHAPE_WORDS else (*shape[:3], math.prod(shape[3:]))
        padded = (*dims, 0, 0, 0, 0)[: at.SHAPE_WORDS]
        kind = _OPERATIONS[operation] | _DTYPES[dtype] << 8 | len(dims) << 16 | on_device << 24
        kind |= self._number("axis", axis) << 32
        if _Process.module:
            kind |= (self._number("module", _Process.module) + 1 & at.MOST) << 48
        digest = channel.take(_OPERATIONS[operation], _DTYPES[dtype], dims, nbytes, root)
        place = channel.number | (root + 1 & at.MOST) << 16 | self._source(hidden) << 32
        began_waiting = now if waits else 0
        words = self.words
        _CALL.pack_into(
            self._map,
            (at.RING + number % at.RING_CALLS * at.CALL_WORDS) * 8,
            *(number, kind, place, channel.started, *padded, nbytes),
            *(now, began_waiting, 0, threading.get_ident(), words[at.STEP], digest, number),
        )
        words[at.CALLS + channel.number] = channel.started
        words[at.CALL_COUNT] = number
        words[at.BEAT] = now
        return Call(self, number, began_waiting)

    def _number(self, kind: str, name: str) -> int:
        """Returns the number of an axis or module."""
        number = self._numbers_of_names.get((kind, name))
        if number is None:
            with self._lock:
                number = self._numbers_of_names[kind, name] = len(self._numbers_of_names)
                self._append({kind: number, "name": name})
        return number

    def _source(self, hidden: str) -> int:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(hidden):
            frame = frame.f_back
        code = frame.f_code
        known = self._sources.get((id(code), frame.f_lasti))
        if known is None:
            with self._lock:
                # The code object is kept, so that its id stays its own.
                known = self._sources[id(code), frame.f_lasti] = len(self._sources), code
                self._append({"source": known[0], "line": f"{_shown(code.co_filename)}:{frame.f_lineno}"})
        return known[0]

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        used = self.words[at.NAMES_BYTES]
        if used + len(line) <= at.NAMES_SIZE:  # otherwise the report says "?"
            self._names[used : used + len(line)] = line
            self.words[at.NAMES_BYTES] = used + len(line)


class _Process:
    beat: Heartbeat | None = None
    module = ""


def own() -> Heartbeat | None:
    """Returns the heartbeat of this process, if it has one."""
    return _Process.beat


def adopt(heartbeat: Heartbeat | None) -> None:
    """Makes a heartbeat that of this process."""
    _Process.beat = heartbeat


def start(directory: Path, rank: int, world: int) -> None:
    """Gives this process its heartbeat in `directory`, and makes it write its stacks there on STACKS_SIGNAL.

    Without space for the file, the process goes on unwatched and says so."""
    try:
        stacks = (directory / at.stacks_name(rank)).open("w", encoding="utf-8")  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=False)
        mine = Heartbeat(directory, rank, world)
    except OSError as error:
        echo(f"phalanx: rank {rank} is not watched for hangs: {error}", file=sys.stderr)
        return
    adopt(mine)
    threading.Thread(target=_tick, args=(mine.words,), name="heartbeat", daemon=True).start()


def beat() -> None:
    """Records a sign of life, in work of unknown length that makes no collectives. A thread beside the training must
    not hide that it hangs: calls from others than the main thread are ignored."""
    if (mine := _Process.beat) is not None and threading.current_thread() is threading.main_thread():
        mine.beat()


def enter(phase: Phase) -> None:
    """Records that a phase begins."""
    if (mine := _Process.beat) is not None:
        mine.enter(phase)


def module() -> str:
    """Returns the module of the model whose forward or backward pass runs; empty outside of any."""
    return _Process.module


def enter_module(name: str) -> None:
    """Notes for the records of collectives the module whose forward or backward pass runs from now on."""
    _Process.module = name


@contextmanager
def within(phase: Phase) -> Iterator[None]:
    """Records a phase for the length of a `with` block; afterwards the one before goes on."""
    if (mine := _Process.beat) is None:
        yield
        return
    before = mine.enter(phase)
    yield  # after an error the phase stays: it is where the rank failed
    mine.enter(before)


def memory(used: int) -> None:
    """Records the peak bytes of this rank so far."""
    if (mine := _Process.beat) is not None:
        mine.note_memory(used)


def screen(shown: bool) -> None:
    """Records whether this rank shows the live view."""
    if (mine := _Process.beat) is not None:
        mine.words[at.SCREEN] = shown


def training(steps: int, work: int, memory_limit: int = 0) -> None:
    """Records that training begins after `steps` steps. Ranks with equal `work` compute alike."""
    if (mine := _Process.beat) is not None:
        mine.words[at.WORK], mine.words[at.MEMORY_LIMIT] = work, memory_limit
        mine.words[at.FIRST_STEP] = steps + 1
        mine.steps_done(steps)


def steps_done(number: int) -> None:
    """Records that `number` steps are done."""
    if (mine := _Process.beat) is not None:
        mine.steps_done(number)


def _tick(words: memoryview) -> None:
    while True:
        words[at.TICK] = _now()
        time.sleep(_TICK_S)


def _start_ticks() -> int:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[19])


def _compact(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Returns evenly spaced ranks as {first, step, count}: a group may have thousands."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and all(b - a == step for a, b in itertools.pairwise(ranks)):
        return {"first": ranks[0], "step": step, "count": len(ranks)}
    return list(ranks)


def _shown(path: str) -> str:
    """Returns a source path from the package's folder on, or from the current directory on."""
    for root in (str(Path(__file__).parents[3]), str(Path.cwd())):
        if path.startswith(f"{root}/"):
            return path[len(root) + 1 :]
    return path
