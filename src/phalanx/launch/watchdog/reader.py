"""Reads heartbeat files: the state of a rank, while it runs or after it died."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.launch.watchdog import layout as at
from phalanx.launch.watchdog.layout import Phase

_ATTEMPTS = 5  # at reading a record that is being written, which takes the writer less than a microsecond


class ChannelKey(NamedTuple):
    """The name of a channel, the same on all its ranks."""

    group: str
    """torch's unique name of the process group."""
    source: int = -1
    """The sender's global rank; -1 for collectives."""
    target: int = -1
    """The receiver's global rank; -1 for collectives."""


@dataclass(frozen=True)
class RecordedCall:
    """One call of one rank."""

    number: int
    """Position among all calls of the rank."""
    channel: ChannelKey
    sequence: int
    """Position among the calls on this side of the channel, from 1."""
    operation: str
    axis: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str
    """file:line of the caller."""
    step: int
    """Steps done when it was started."""
    began: float
    waits: float
    """Since when the rank has waited for the result, in seconds of CLOCK_MONOTONIC; 0 if it does not."""
    done: bool
    on_device: bool
    """True if the host cannot see when it completes."""
    main: bool
    """True if the thread that trains started it."""
    root: int = -1
    """The global rank from which or to which data go, the distance of a shift, or -1."""
    module: str = ""
    """The module of the model in whose forward or backward pass it was started, if known."""
    digest: int = 0
    """Of all calls of the channel up to this one: equal on ranks that have made the same calls; 0: not known."""

    @property
    def waiting(self) -> bool:
        """True if the rank is blocked in it. A thread beside the training that expects a message, as those of a
        parameter server do, blocks nothing."""
        return self.waits > 0 and not self.done and (self.main or self.operation != "receive")

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal on all ranks: a message's bytes and type; a collective's operation, root, shape and type.
        The shapes of an all-to-all and of a shift may differ."""
        if self.channel.source >= 0:
            return self.dtype, self.nbytes
        if self.operation in ("all_to_all", "shift"):
            return self.operation, self.dtype, self.root
        return self.operation, self.dtype, self.root, self.shape, self.nbytes


@dataclass(frozen=True)
class RankRecord:
    """A rank as its heartbeat file describes it. Times are seconds of CLOCK_MONOTONIC."""

    rank: int
    world: int
    pid: int
    start_ticks: int
    """The process's start, in clock ticks since boot."""
    beat: float
    tick: float
    phase: Phase
    phase_began: float
    step: int
    first_step: int
    """Steps done when the process began to train, plus 1; 0 before that."""
    own_s: float
    """Seconds spent in steps without waiting for other ranks."""
    work: int
    started: dict[tuple[ChannelKey, bool], int]
    """Calls started by (channel, whether as its receiver)."""
    groups: dict[str, tuple[int, ...]]
    """The global ranks of each process group, by its unique name."""
    calls: tuple[RecordedCall, ...] = ()
    """The newest calls, oldest first."""
    memory: int = 0
    memory_limit: int = 0
    """Peak bytes so far, and those that the rank can have; 0: not known."""
    has_screen: bool = False
    """It shows the live view."""

    @property
    def trained(self) -> bool:
        """True once a step has been done by this process."""
        return 0 < self.first_step <= self.step

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
            self._map = mmap.mmap(file.fileno(), at.FILE_BYTES, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map)[: at.NAMES * 8].cast("Q")
        if self._words[at.MAGIC_WORD] != at.MAGIC:
            raise ValueError(f"{path} is not a heartbeat file of this version")

    @property
    def beat(self) -> float:
        """The time of the newest sign of life, in seconds of CLOCK_MONOTONIC."""
        return self._words[at.BEAT] / 1e9

    def read(self, calls: int = at.RING_CALLS) -> RankRecord:
        """Returns the rank's state with its newest `calls` calls."""
        words = self._words
        names = _Names(words, self._map[at.NAMES * 8 : at.NAMES * 8 + words[at.NAMES_BYTES]])
        phase = words[at.PHASE]
        number = phase & (1 << at.PHASE_BITS) - 1
        started = {(key, receives): words[at.CALLS + channel] for channel, (key, receives, _) in names.channels.items()}
        return RankRecord(
            rank=words[at.RANK],
            world=words[at.WORLD],
            pid=words[at.PID],
            start_ticks=words[at.STARTED],
            beat=words[at.BEAT] / 1e9,
            tick=words[at.TICK] / 1e9,
            phase=Phase(number),
            phase_began=(phase >> at.PHASE_BITS) / 1e9,
            step=words[at.STEP],
            first_step=words[at.FIRST_STEP],
            own_s=words[at.OWN_NS] / 1e9,
            work=words[at.WORK],
            started=started,
            groups={key.group: ranks for key, _, ranks in names.channels.values()},
            calls=tuple(self._calls(calls, names)),
            memory=words[at.MEMORY],
            memory_limit=words[at.MEMORY_LIMIT],
            has_screen=words[at.SCREEN] == 1,
        )

    def _calls(self, count: int, names: _Names) -> list[RecordedCall]:
        newest = self._words[at.CALL_COUNT]
        found = []
        for number in range(max(1, newest - min(count, at.RING_CALLS) + 1), newest + 1):
            call = self._call(number, names)
            if call is not None:
                found.append(call)
        return found

    def _call(self, number: int, names: _Names) -> RecordedCall | None:
        base = at.RING + number % at.RING_CALLS * at.CALL_WORDS
        for _ in range(_ATTEMPTS):
            words = self._words[base : base + at.CALL_WORDS].tolist()
            if words[at.NUMBER] == words[at.NUMBER_AGAIN] == number:
                return names.call(words)
        return None  # overwritten meanwhile, or left half-written by a process that was killed


class _Names:
    """The names and places that the numbers in a file stand for."""

    def __init__(self, words: memoryview, data: bytes):
        rank, self.main_thread = words[at.RANK], words[at.MAIN_THREAD]
        self.channels: dict[int, tuple[ChannelKey, bool, tuple[int, ...]]] = {}
        self.axes: dict[int, str] = {}
        self.modules: dict[int, str] = {}
        self.sources: dict[int, str] = {}
        for line in data.splitlines():
            entry = json.loads(line)
            if "channel" in entry:
                kind, peer = entry["kind"], entry["peer"]
                ends = {"all": (-1, -1), "send": (rank, peer), "receive": (peer, rank)}[kind]
                key = ChannelKey(entry["group"], *ends)
                self.channels[entry["channel"]] = key, kind == "receive", _ranks(entry["ranks"])
            elif "axis" in entry:
                self.axes[entry["axis"]] = entry["name"]
            elif "module" in entry:
                self.modules[entry["module"]] = entry["name"]
            else:
                self.sources[entry["source"]] = entry["line"]

    def call(self, words: list[int]) -> RecordedCall | None:
        kind, place = words[at.KIND], words[at.PLACE]
        known = self.channels.get(place & 0xFFFF)
        if known is None:
            return None
        return RecordedCall(
            number=words[at.NUMBER],
            channel=known[0],
            sequence=words[at.SEQUENCE],
            operation=at.OPERATIONS[kind & 0xFF],
            axis=self.axes.get(kind >> 32 & at.MOST, "?"),
            dtype=at.DTYPES[kind >> 8 & 0xFF],
            shape=tuple(words[at.SHAPE : at.SHAPE + (kind >> 16 & 0xFF)]),
            nbytes=words[at.NBYTES],
            source=self.sources.get(place >> 32, "?"),
            step=words[at.CALL_STEP],
            began=words[at.BEGAN] / 1e9,
            waits=words[at.WAITS] / 1e9,
            done=words[at.DONE] > 0,
            on_device=bool(kind >> 24 & 0xFF),
            main=words[at.THREAD] == self.main_thread,
            root=(place >> 16 & at.MOST) - 1,
            module=self.modules.get((kind >> 48) - 1, ""),
            # The last channel takes the rest of all, in an order of each rank's own.
            digest=words[at.DIGEST] if place & 0xFFFF < at.CHANNELS - 1 else 0,
        )


def _ranks(compact: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(compact, list):
        return tuple(compact)
    return tuple(range(compact["first"], compact["first"] + compact["step"] * compact["count"], compact["step"]))
