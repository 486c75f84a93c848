"""The layout of a heartbeat file: 64-bit words in the machine's byte order, written by one rank, read by the watchdog.

    words     what
    0  … 15   identity: constants, written before the file gets its name
    16 … 63   state: each word is stored at once, so that it is never torn
    CALLS     one word per channel: the number of calls that the rank has started on it
    RING      the last RING_CALLS collectives, CALL_WORDS each; the call's number stands in the first and the last word,
              and they differ while the record is being written
    NAMES     JSON lines, appended: the channels, axes, modules and source lines to which the records refer by number

The file has a fixed size, reserved on disk, so that a store into it cannot fail later. It survives its writer.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = int.from_bytes(b"phxbeat3", "little")

# Identity.
MAGIC_WORD, RANK, WORLD, PID, STARTED, MAIN_THREAD = range(6)
"""STARTED is the process's start in clock ticks since boot, so that a reused process id is noticed. MAIN_THREAD is
Python's identifier of the thread that trains."""

# State. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
BEAT = 16
"""Time of the newest sign of life from the training code."""
PHASE = 17
"""The phase, and since when: time << PHASE_BITS | phase."""
STEP = 18
"""Steps done."""
OWN_NS = 19
"""Nanoseconds spent in OWN_PHASES without waiting for another rank, since the process began."""
TICK = 20
"""Time of the interpreter's newest tick, from a thread that does nothing else: it stops while the GIL is held."""
CALL_COUNT = 21
"""Number of collectives recorded."""
NAMES_BYTES = 22
"""Bytes in use of NAMES."""
WORK = 23
"""Ranks with an equal value do the same work per step, so their speeds can be compared (the pipeline stage)."""
FIRST_STEP = 24
"""Steps done when this process began to train, plus 1; 0 until then."""

MEMORY, MEMORY_LIMIT = 25, 26
"""Peak bytes so far, and those that the rank can have; 0: not known."""
SCREEN = 27
"""1 while the rank shows the live view: then it prints what the watchdog says, above the view."""

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
    TEST = 8
    """The self-test of the ranks before any training."""
    END = 9
    DONE = 10
    """The process group has been left: nobody waits for this rank any more, and it may take any time."""

    @property
    def label(self) -> str:
        """The phase in words."""
        return "forward/backward" if self is Phase.FORWARD_BACKWARD else self.name.lower()


OWN_PHASES = frozenset({Phase.DATA, Phase.FORWARD_BACKWARD, Phase.EXCHANGE, Phase.OPTIMIZER})
"""The phases that make up a step."""

# A recorded collective.
NUMBER, KIND, PLACE, SEQUENCE = range(4)
"""KIND: operation | dtype << 8 | dimensions << 16 | on_device << 24 | axis << 32 | module << 48.
PLACE: channel | root << 16 | source << 32. Root and module are 0 where there is none, else one more than the number."""
SHAPE, SHAPE_WORDS = 4, 4
NBYTES, BEGAN, WAITS, DONE, THREAD, CALL_STEP, DIGEST, NUMBER_AGAIN = range(8, 16)
"""WAITS and DONE are times, 0 until then. DIGEST is that of all calls of the channel so far, which is equal on ranks
that have made the same calls."""
CALL_WORDS = 16

OPERATIONS = (
    *("all_reduce", "all_reduce_max", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "receive"),
    *("rotate", "barrier", "all_reduce_min", "all_reduce_avg", "reduce", "scatter", "gather", "shift"),
)
"""The operations that can be recorded, by number."""
OTHER_TYPE = "another type"
DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", OTHER_TYPE),
)
"""The data types that can be recorded, by number."""

MOST = (1 << 16) - 1
"""The largest number that a root, an axis or a module can have."""
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
