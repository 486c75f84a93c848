"""A fault as data: its class, how it is injected, and the behaviour that counts as right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from benchmarks.chaos.arena import Arena
    from benchmarks.chaos.live import Live
    from benchmarks.chaos.story import Story

CLASSES = {
    1: "a rank is killed",
    2: "the launcher is killed",
    3: "rank 0 or its host is lost",
    4: "a rank is stopped (SIGSTOP)",
    5: "a rank holds the GIL or spins",
    6: "a rank is slow",
    7: "the network is cut, loses or crawls",
    8: "a link flaps",
    9: "collectives do not match",
    10: "data are uneven, a rank ends early",
    11: "an exception on one rank",
    12: "out of memory",
    13: "NaN, Inf or a spike",
    14: "a bit flips in the state of a replica",
    15: "a bit flips in a gradient",
    16: "the disk is full or read-only",
    17: "a rank is killed inside a save",
    18: "a checkpoint is damaged",
    19: "storage or terminal is slow or hangs",
    20: "another layout on resume",
    21: "another job, data or seed",
    22: "signals that ask for a stop",
    23: "token shards are damaged",
    24: "clocks, locks, ports, a second trainer",
    25: "hostile inputs",
}
"""The 25 classes of faults, by number."""

RESUMABLE = 75
KILLED = 128 + 9
RUN_FAILED = frozenset({1, 124, 128 + 6, KILLED, 128 + 11, 128 + 15})
"""Exit codes with which a run may stop because of a fault outside of its job: failed, watchdog, or the signal."""


@dataclass(frozen=True)
class Fault:
    """One fault. Every field but the first four has a default: a run of two replicas that starts in an empty folder."""

    number: int
    """The class, a key of CLASSES."""
    name: str
    """Unique in its class."""
    what: str
    """The injection, for the report."""
    gold: str
    """The right behaviour, for the report."""
    during: Callable[[Live], None] | None = None
    """Injects into the running command. Without it the bench waits until plugin or shim have acted."""
    prepare: Callable[[Arena], None] | None = None
    """Injects before the command starts."""
    repair: Callable[[Arena], None] | None = None
    """Mends what a person would mend before the command is given again."""
    check: Callable[[Arena, Story], Sequence[str]] | None = None
    """A further oracle: returns problems, each of which makes the run a lost one."""
    plugin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """An action inside one rank (plugin/sitecustomize.py): rank, at, do, step (optimizer steps of the process before
    it), again (as many in later attempts, for a fault that comes back)."""
    shim: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """An action on file operations of one rank (shim.c): rank, path, ops, at, do."""
    job: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings that differ from the bench's job, also for the control."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of this run alone: its control runs without them."""
    words: Mapping[int, Sequence[str]] = field(default_factory=dict[int, Sequence[str]])
    """With launch="ranks": words on the command line of one rank alone."""
    launch: Literal["phalanx", "torchrun", "ranks", "nodes"] = "phalanx"
    """Who starts the ranks: `phalanx train` itself, torchrun, nobody (a process per rank), or the program's own
    launcher on each of two nodes, which are network namespaces."""
    start: Literal["empty", "half", "done"] = "empty"
    """The run directory at the start: none, that of a run stopped halfway, or that of a finished run."""
    stops: bool = False
    """True if the fault asks for a stop or leaves nothing to go on with (a signal, a killed launcher, hostile input, a
    bug that comes back in every attempt, no whole checkpoint): a clean stop that loses nothing is then all that can be
    asked for, and counts as survived."""
    codes: frozenset[int] = RUN_FAILED
    """Exit codes of a clean stop."""
    names: str = ""
    """A pattern that the output must match: the culprit."""
    traceback: bool = False
    """True if a traceback is right: the fault is an exception in a program."""
    bound: float = 0.0
    """The largest relative difference of a weight from the control's; 0: bit-equal."""
    damages: bool = False
    """True if the fault itself takes checkpoints away, so that resuming from an older one is right."""
    limit_s: float = 120.0
    """Seconds after which everything of the fault is killed."""
    needs: tuple[str, ...] = ()
    """Needs of the fault: names of benchmarks.chaos.machine.CAPABILITIES."""
    terminal: bool = False
    """True: standard error is a terminal."""
    peer: bool = False
    """True if the same injection makes sense for torchrun with DCP."""
    quick: bool = False
    """True for the few faults of --quick."""

    @property
    def key(self) -> str:
        """CLASS/NAME, as --only takes it."""
        return f"{self.number}/{self.name}"
