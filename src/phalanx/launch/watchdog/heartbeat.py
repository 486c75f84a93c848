"""The heartbeat of this process: what it does, written to a memory-mapped file that a watchdog reads.

The file is 64-bit words in the machine's byte order. A store into it takes a fraction of a microsecond and no system
call, and the file survives the process. The functions of this module do nothing in a process without a heartbeat.
`HeartbeatFile` reads the file while the rank runs, or after it died.
"""

from __future__ import annotations

import faulthandler
import functools
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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from phalanx.echo import echo
from phalanx.launch.lifeline import process_state
from phalanx.launch.watchdog import nccl

MAGIC = int.from_bytes(b"phxbeat4", "little")

MAGIC_WORD, RANK, WORLD, PID, STARTED, MAIN_THREAD = range(6)
"""Identity. STARTED is the process's start in clock ticks since boot, so that a reused process id is noticed.
MAIN_THREAD is Python's identifier of the thread that trains."""
BEAT, PHASE, STEP, OWN_NS, TICK, CALL_COUNT, NAMES_BYTES, WORK, FIRST_STEP, MEMORY, MEMORY_LIMIT, SCREEN = range(16, 28)
"""State; what each word means stands at the fields of RankRecord. Times are nanoseconds of CLOCK_MONOTONIC, which all
processes of a machine share. PHASE: since when << PHASE_BITS | phase. CALL_COUNT: collectives recorded. NAMES_BYTES:
bytes in use of NAMES."""
PHASE_BITS = 4


class Phase(IntEnum):
    """The part of a run in which a rank is."""

    START = 0
    DATA = 1
    FORWARD_BACKWARD = 2
    EXCHANGE = 3
    OPTIMIZER = 4
    RECORD = 5
    VALIDATION = 6
    SAVE = 7
    TEST = 8  # the self-test of the ranks before any training
    END = 9
    DONE = 10  # the process group has been left: nobody waits for this rank any more, and it may take any time

    @functools.cached_property
    def label(self) -> str:
        return "forward/backward" if self is Phase.FORWARD_BACKWARD else self.name.lower()


OWN_PHASES = frozenset({Phase.DATA, Phase.FORWARD_BACKWARD, Phase.EXCHANGE, Phase.OPTIMIZER})

NUMBER, KIND, PLACE, SEQUENCE, SHAPE = range(5)
NBYTES, BEGAN, WAITS, DONE, THREAD, CALL_STEP, DIGEST, NUMBER_AGAIN = range(8, 16)
"""A recorded collective. KIND: operation | dtype << 8 | dimensions << 16 | on_device << 24 | axis << 32 | module << 48.
PLACE: channel | root << 16 | source << 32. Root and module are 0 where there is none, else one more than the number.
WAITS and DONE are times, 0 until then."""
SHAPE_WORDS, CALL_WORDS = 4, 16

OPERATIONS = (
    *("all_reduce", "all_reduce_max", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "receive"),
    *("rotate", "barrier", "all_reduce_min", "all_reduce_avg", "reduce", "scatter", "gather", "shift"),
)
OTHER_TYPE = "another type"
DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", OTHER_TYPE),
)
"""The operations and data types that can be recorded, by number."""

MOST = (1 << 16) - 1  # the largest number that a root, an axis or a module can have
CHANNELS = 1024
CALLS = 64
RING = CALLS + CHANNELS
RING_CALLS = 1024
NAMES = RING + RING_CALLS * CALL_WORDS
NAMES_SIZE = 256 * 1024
FILE_BYTES = NAMES * 8 + NAMES_SIZE


def file_name(rank: int | str) -> str:
    """Returns the name of a rank's heartbeat file; of `*`, the pattern of all."""
    return f"rank_{rank}.beat"


def stacks_name(rank: int) -> str:
    """Returns the name of the file to which a rank writes its stacks on request."""
    return f"rank_{rank}.stacks"


STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads, from C, even while the GIL is held."""

_TICK_S = 1.0
_CALL = struct.Struct(f"@{CALL_WORDS}Q")
_OPERATIONS = {name: number for number, name in enumerate(OPERATIONS)}
_DTYPES = {name: number for number, name in enumerate(DTYPES)}
_ANY_SHAPE = {_OPERATIONS["all_to_all"], _OPERATIONS["shift"]}
_now = time.monotonic_ns


class Channel:
    """One sequence of calls that the ranks of a process group make in the same order: its collectives, or the messages
    from one rank to another."""

    __slots__ = ("digest", "is_message", "number", "started")

    def __init__(self, number: int, is_message: bool = False):
        self.number, self.started, self.is_message = number, 0, is_message
        self.digest = 0

    def take(self, operation: int, dtype: int, shape: Sequence[int], nbytes: int, root: int) -> int:
        """Counts a call, and returns the digest of all so far. The hash of numbers is the same in every process."""
        self.started += 1
        equal = signature(self.is_message, operation, operation in _ANY_SHAPE, dtype, shape, nbytes, root)
        self.digest = hash((self.digest, *equal)) & 0xFFFFFFFFFFFFFFFF
        return self.digest


def signature(
    is_message: bool, operation: Any, any_shape: bool, dtype: Any, shape: Sequence[int], nbytes: int, root: int
) -> tuple[Any, ...]:
    """Returns what must be equal on all ranks of a call: a message's bytes and type; a collective's operation, root,
    shape and type. The shapes of an all-to-all and of a shift may differ."""
    if is_message:
        return dtype, nbytes
    return (operation, dtype, root) if any_shape else (operation, dtype, nbytes, root, *shape)


class Call:
    __slots__ = ("_base", "_beat", "_number", "_waits")

    def __init__(self, beat: Heartbeat, number: int, waits: int):
        self._beat, self._number, self._waits = beat, number, waits
        self._base = RING + number % RING_CALLS * CALL_WORDS

    def waits(self) -> None:
        """Records that the rank now waits for the result."""
        words = self._beat.words
        self._waits = words[BEAT] = _now()
        if words[self._base] == self._number:  # otherwise newer calls have taken its place
            words[self._base + WAITS] = self._waits

    def done(self) -> None:
        words = self._beat.words
        end = words[BEAT] = _now()
        if self._waits:
            self._beat.waited_ns += end - self._waits
        if words[self._base] == self._number:
            words[self._base + DONE] = end


class Heartbeat:
    """One rank's heartbeat file.

    Raises OSError if the file cannot be created or its space cannot be reserved.
    """

    def __init__(self, directory: Path, rank: int, world: int):
        self.rank, self.path = rank, directory / file_name(rank)
        temporary = directory / f".{file_name(rank)}"
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)  # a full disk must not end a later store with SIGBUS
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        view = memoryview(self._map)
        self.words, self._names = view[: NAMES * 8].cast("Q"), view[NAMES * 8 :]
        self.waited_ns = 0  # nanoseconds spent waiting for other ranks
        self.phase_ns: dict[Phase, tuple[int, int]] = dict.fromkeys(Phase, (0, 0))
        """Nanoseconds of its own, and of waiting for other ranks, that the process has spent in each phase."""
        self._phase, self._since, self._waited_before = Phase.START, _now(), 0
        self._numbers = itertools.count(1)
        self.channels: dict[tuple[str, str, int], Channel] = {}
        self._sources: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._named: dict[str, dict[str, int]] = {"axis": {}, "module": {}}
        self._lock = threading.Lock()  # for names, which are new a few dozen times in a run
        words = self.words
        words[RANK], words[WORLD], words[PID] = rank, world, os.getpid()
        process = process_state(os.getpid())
        words[STARTED], words[MAIN_THREAD] = process.start_ticks if process else 0, threading.get_ident()
        words[BEAT] = words[TICK] = self._since
        words[PHASE] = self._since << PHASE_BITS
        words[MAGIC_WORD] = MAGIC
        temporary.rename(self.path)

    def beat(self) -> None:
        self.words[BEAT] = _now()

    def enter(self, phase: Phase) -> Phase:
        """Records that a phase begins, outside all modules. Returns the one before."""
        _Process.module = ""
        now, before = _now(), self._phase
        waited = self.waited_ns - self._waited_before
        own, (own_before, waited_before) = max(0, now - self._since - waited), self.phase_ns[before]
        self.phase_ns[before] = own_before + own, waited_before + waited
        if before in OWN_PHASES:
            self.words[OWN_NS] += own
        self._phase, self._since, self._waited_before = phase, now, self.waited_ns
        self.words[PHASE] = now << PHASE_BITS | phase
        self.words[BEAT] = now
        return before

    def steps_done(self, number: int) -> None:
        self.words[STEP] = number
        self.words[BEAT] = _now()

    def note_memory(self, used: int) -> None:
        self.words[MEMORY] = used

    def channel(self, group: str, kind: str, ranks: Sequence[int], peer: int = -1) -> Channel:
        """Returns a channel of the process group with the unique name `group` and the global ranks `ranks`: of `kind`
        all (collectives), or send or receive, for messages to or from the global rank `peer`."""
        found = self.channels.get((group, kind, peer))
        if found is None:
            with self._lock:
                number = min(len(self.channels), CHANNELS - 1)  # the last one takes the rest, without names
                found = self.channels[group, kind, peer] = Channel(number, kind != "all")
                if number < CHANNELS - 1:
                    ends = {"all": (-1, -1), "send": (self.rank, peer), "receive": (peer, self.rank)}[kind]
                    self._append("channel", number, [group, *ends, kind == "receive", _compact(ranks)])
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
        dims = shape if len(shape) <= SHAPE_WORDS else (*shape[:3], math.prod(shape[3:]))
        padded = (*dims, 0, 0, 0, 0)[:SHAPE_WORDS]
        kind = _OPERATIONS[operation] | _DTYPES[dtype] << 8 | len(dims) << 16 | on_device << 24
        kind |= self._number("axis", axis) << 32
        if _Process.module:
            kind |= (self._number("module", _Process.module) + 1 & MOST) << 48
        digest = channel.take(_OPERATIONS[operation], _DTYPES[dtype], dims, nbytes, root)
        place = channel.number | (root + 1 & MOST) << 16 | self._source(hidden) << 32
        began_waiting = now if waits else 0
        words = self.words
        _CALL.pack_into(
            self._map,
            (RING + number % RING_CALLS * CALL_WORDS) * 8,
            *(number, kind, place, channel.started, *padded, nbytes),
            *(now, began_waiting, 0, threading.get_ident(), words[STEP], digest, number),
        )
        words[CALLS + channel.number] = channel.started
        words[CALL_COUNT] = number
        words[BEAT] = now
        return Call(self, number, began_waiting)

    def _number(self, kind: str, name: str) -> int:
        known = self._named[kind]
        number = known.get(name)
        if number is None:
            with self._lock:
                number = known[name] = len(known)
                self._append(kind, number, name)
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
                self._append("source", known[0], f"{_shown(code.co_filename)}:{frame.f_lineno}")
        return known[0]

    def _append(self, kind: str, number: int, value: Any) -> None:
        line = json.dumps([kind, number, value]).encode() + b"\n"
        used = self.words[NAMES_BYTES]
        if used + len(line) <= NAMES_SIZE:  # otherwise the report says "?"
            self._names[used : used + len(line)] = line
            self.words[NAMES_BYTES] = used + len(line)


class _Process:
    beat: Heartbeat | None = None
    module = ""


def own() -> Heartbeat | None:
    return _Process.beat


def adopt(heartbeat: Heartbeat | None) -> None:
    """Makes a heartbeat that of this process, which begins outside all modules: those of an earlier one are over."""
    _Process.beat, _Process.module = heartbeat, ""


def start(directory: Path, rank: int, world: int) -> None:
    """Gives this process its heartbeat in `directory`, and makes it write its stacks there on STACKS_SIGNAL.

    Without space for the file, the process goes on unwatched and says so."""
    try:
        stacks = (directory / stacks_name(rank)).open("w", encoding="utf-8")  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True, chain=False)
        mine = Heartbeat(directory, rank, world)
    except OSError as error:
        echo(f"phalanx: rank {rank} is not watched for hangs: {error}", file=sys.stderr)
        return
    adopt(mine)
    threading.Thread(target=_tick, args=(mine.words, directory, rank), name="heartbeat", daemon=True).start()


def beat() -> None:
    """Records a sign of life, in work of unknown length that makes no collectives. A thread beside the training must
    not hide that it hangs: calls from others than the main thread are ignored."""
    if (mine := _Process.beat) is not None and threading.current_thread() is threading.main_thread():
        mine.beat()


def enter(phase: Phase) -> None:
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
    if (mine := _Process.beat) is not None:
        mine.note_memory(used)


def screen(shown: bool) -> None:
    """Records whether this rank shows the live view."""
    if (mine := _Process.beat) is not None:
        mine.words[SCREEN] = shown


def training(steps: int, work: int, memory_limit: int = 0) -> None:
    """Records that training begins after `steps` steps. Ranks with equal `work` compute alike."""
    if (mine := _Process.beat) is not None:
        mine.words[WORK], mine.words[MEMORY_LIMIT] = work, memory_limit
        mine.words[FIRST_STEP] = steps + 1
        mine.steps_done(steps)


def steps_done(number: int) -> None:
    if (mine := _Process.beat) is not None:
        mine.steps_done(number)


def _tick(words: memoryview, directory: Path, rank: int) -> None:
    while True:
        words[TICK] = _now()
        with suppress(Exception):  # whatever the flight recorder does, the ticks go on
            nccl.answer(directory, rank)
        time.sleep(_TICK_S)


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


_ATTEMPTS = 5  # at reading a record that is being written, which takes the writer less than a microsecond


class ChannelKey(NamedTuple):
    """The name of a channel, the same on all its ranks."""

    group: str  # torch's unique name of the process group
    source: int = -1  # the sender's global rank; -1 for collectives
    target: int = -1  # the receiver's global rank; -1 for collectives


@dataclass(frozen=True)
class RecordedCall:
    number: int  # position among all calls of the rank
    channel: ChannelKey
    sequence: int  # position among the calls on this side of the channel, from 1
    operation: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str  # file:line of the caller
    step: int  # steps done when it was started
    began: float
    waits: float
    """Since when the rank has waited for the result, in seconds of CLOCK_MONOTONIC; 0 if it does not."""
    done: bool
    on_device: bool  # true if the host cannot see when it completes
    main: bool  # true if the thread that trains started it
    root: int = -1  # the global rank from which or to which data go, the distance of a shift, or -1
    module: str = ""  # the module of the model in whose forward or backward pass it was started, if known
    digest: int = 0
    """Of all calls of the channel up to this one: equal on ranks that have made the same calls; 0: not known."""

    @property
    def waiting(self) -> bool:
        """True if the rank is blocked in it. A thread beside the training that expects a message, as those of a
        parameter server do, blocks nothing."""
        return self.waits > 0 and not self.done and (self.main or self.operation != "receive")

    @property
    def signature(self) -> tuple[Any, ...]:
        any_shape = _OPERATIONS[self.operation] in _ANY_SHAPE
        is_message = self.channel.source >= 0
        return signature(is_message, self.operation, any_shape, self.dtype, self.shape, self.nbytes, self.root)


@dataclass
class TimedCall:
    """One collective or message. Times are nanoseconds of the monotonic clock; 0: not yet."""

    axis: str
    collective: str
    """As the ledger calls it: a message is a send, on both sides."""
    channel: str
    """The same text on every rank that takes part in calls of this order."""
    sequence: int
    """The place among the calls of the channel, from 1."""
    start: int = 0
    done: int = 0
    """When the rank had its result."""
    waited: int = 0
    """When the rank began to wait for its result."""
    launched: int = 0
    """When the host went on after starting it."""
    bytes: int = 0
    sends: bool = False
    receives: bool = False
    main: bool = True
    """Whether the thread that trains made it."""

    @property
    def end(self) -> int:
        return max(self.done, self.launched)

    def shifted(self, by: int) -> TimedCall:
        """Returns the call by a clock that is `by` ns ahead."""
        times = {name: getattr(self, name) for name in ("start", "done", "waited", "launched")}
        return replace(self, **{name: at + by for name, at in times.items() if at})


@dataclass(frozen=True)
class RankRecord:
    """A rank as its heartbeat file describes it. Times are seconds of CLOCK_MONOTONIC."""

    rank: int
    world: int
    pid: int
    start_ticks: int  # the process's start, in clock ticks since boot
    beat: float  # the newest sign of life from the training code
    tick: float
    """The interpreter's newest tick, from a thread that does nothing else: it stops while the GIL is held."""
    phase: Phase
    phase_began: float
    step: int
    first_step: int  # steps done when the process began to train, plus 1; 0 before that
    own_s: float  # seconds spent in steps without waiting for other ranks
    work: int
    """Ranks with an equal value do the same work per step, so that their speeds can be compared (the stage)."""
    started: dict[tuple[ChannelKey, bool], int]  # calls started by (channel, whether as its receiver)
    groups: dict[str, tuple[int, ...]]  # the global ranks of each process group, by its unique name
    calls: tuple[RecordedCall, ...] = ()
    memory: int = 0
    memory_limit: int = 0  # peak bytes so far, and those that the rank can have; 0: not known
    has_screen: bool = False

    @property
    def trained(self) -> bool:
        """True once a step has been done by this process."""
        return 0 < self.first_step <= self.step

    @property
    def where(self) -> str:
        """The step and the phase in which it is."""
        return f"in step {self.step + 1}, phase {self.phase.label}"

    @property
    def amid_training(self) -> bool:
        """True between the beginning of training and its end."""
        return self.first_step > 0 and self.phase < Phase.END


class HeartbeatFile:
    """A rank's heartbeat file, open for reading.

    Raises OSError if it is not there yet, ValueError if it is not one of this version.
    """

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map)[: NAMES * 8].cast("Q")
        if self._words[MAGIC_WORD] != MAGIC:
            raise ValueError(f"{path} is not a heartbeat file of this version")

    @property
    def beat(self) -> float:
        """The time of the newest sign of life, in seconds of CLOCK_MONOTONIC."""
        return self._words[BEAT] / 1e9

    def read(self, calls: int = RING_CALLS) -> RankRecord:
        words, names = self._words, defaultdict[str, dict[int, Any]](dict)
        for line in self._map[NAMES * 8 : NAMES * 8 + words[NAMES_BYTES]].splitlines():
            kind, number, value = json.loads(line)
            names[kind][number] = value
        channels = {
            number: (ChannelKey(*key), receives, _ranks(ranks))
            for number, (*key, receives, ranks) in names["channel"].items()
        }
        newest = words[CALL_COUNT]
        recorded = [
            self._call(n, names, channels) for n in range(max(1, newest - min(calls, RING_CALLS) + 1), newest + 1)
        ]
        return RankRecord(
            rank=words[RANK],
            world=words[WORLD],
            pid=words[PID],
            start_ticks=words[STARTED],
            beat=words[BEAT] / 1e9,
            tick=words[TICK] / 1e9,
            phase=Phase(words[PHASE] & (1 << PHASE_BITS) - 1),
            phase_began=(words[PHASE] >> PHASE_BITS) / 1e9,
            step=words[STEP],
            first_step=words[FIRST_STEP],
            own_s=words[OWN_NS] / 1e9,
            work=words[WORK],
            started={(key, receives): words[CALLS + number] for number, (key, receives, _) in channels.items()},
            groups={key.group: ranks for key, _, ranks in channels.values()},
            calls=tuple(call for call in recorded if call is not None),
            memory=words[MEMORY],
            memory_limit=words[MEMORY_LIMIT],
            has_screen=words[SCREEN] == 1,
        )

    def _call(
        self,
        number: int,
        names: Mapping[str, Mapping[int, Any]],
        channels: Mapping[int, tuple[ChannelKey, bool, tuple[int, ...]]],
    ) -> RecordedCall | None:
        """Returns a call; None if it was overwritten meanwhile, or left half-written by a process that was killed."""
        base = RING + number % RING_CALLS * CALL_WORDS
        for _ in range(_ATTEMPTS):
            words = self._words[base : base + CALL_WORDS].tolist()
            if words[NUMBER] == words[NUMBER_AGAIN] == number:
                break
        else:
            return None
        kind, place = words[KIND], words[PLACE]
        if place & 0xFFFF not in channels:
            return None
        return RecordedCall(
            number=number,
            channel=channels[place & 0xFFFF][0],
            sequence=words[SEQUENCE],
            operation=OPERATIONS[kind & 0xFF],
            axis=names["axis"].get(kind >> 32 & MOST, "?"),
            dtype=DTYPES[kind >> 8 & 0xFF],
            shape=tuple(words[SHAPE : SHAPE + (kind >> 16 & 0xFF)]),
            nbytes=words[NBYTES],
            source=names["source"].get(place >> 32, "?"),
            step=words[CALL_STEP],
            began=words[BEGAN] / 1e9,
            waits=words[WAITS] / 1e9,
            done=words[DONE] > 0,
            on_device=bool(kind >> 24 & 0xFF),
            main=words[THREAD] == self._words[MAIN_THREAD],
            root=(place >> 16 & MOST) - 1,
            module=names["module"].get((kind >> 48) - 1, ""),
            # The last channel takes the rest of all, in an order of each rank's own.
            digest=words[DIGEST] if place & 0xFFFF < CHANNELS - 1 else 0,
        )


def _ranks(compact: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(compact, list):
        return tuple(compact)
    return tuple(range(compact["first"], compact["first"] + compact["step"] * compact["count"], compact["step"]))
