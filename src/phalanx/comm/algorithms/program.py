"""A collective as data: which rank sends which elements to which, step by step, with the resulting counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

Action = Literal["copy", "reduce"]


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """Elements that one rank sends to another."""

    source: int
    target: int
    span: range
    """The elements of the source's buffer that are sent."""
    action: Action
    """The target's operation: `copy` overwrites its elements, `reduce` combines them with its own."""
    shift: int = 0
    """Offset of the landing position in the target's buffer. Nonzero only for all-to-all."""

    @property
    def landing(self) -> range:
        """The elements of the target's buffer that are written."""
        return range(self.span.start + self.shift, self.span.stop + self.shift)


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """Messages that travel at the same time: every rank sends at most one of them and receives at most one.

    The data sent was there before the step. A step whose messages are all empty has none, and still counts.
    """

    phase: str
    messages: tuple[ChunkMessage, ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """One collective among `ranks` ranks."""

    name: str
    ranks: int
    sizes: tuple[int, ...]
    """Elements of the buffer on each rank."""
    chunks: tuple[range, ...]
    """The parts into which the algorithm divides the tensor. If it is scattered, chunk r is for rank r."""
    steps: tuple[CollectiveStep, ...]

    @property
    def messages(self) -> list[ChunkMessage]:
        """All messages, in the order of the steps."""
        return list(chain.from_iterable(step.messages for step in self.steps))

    @property
    def reduces(self) -> bool:
        """True if any message is combined with the target's data."""
        return any(message.action == "reduce" for message in self.messages)

    def messages_sent(self) -> list[int]:
        """Returns the number of messages that each rank sends."""
        sources = [message.source for message in self.messages]
        return [sources.count(rank) for rank in range(self.ranks)]

    def elements_sent(self) -> list[int]:
        """Returns the elements that each rank sends; times the bytes of an element, this is its traffic."""
        sent = [0] * self.ranks
        for message in self.messages:
            sent[message.source] += len(message.span)
        return sent

    def critical_elements(self) -> int:
        """Returns the sum of the longest message of every step, in elements.

        In the alpha-beta model with one class of links (Thakur, Rabenseifner & Gropp 2005) the program takes
        len(steps)·alpha + critical_elements()·element_bytes·beta seconds.
        """
        return sum(max((len(message.span) for message in step.messages), default=0) for step in self.steps)


def chunked(n: int, parts: int) -> tuple[range, ...]:
    """Splits `n` elements into `parts` contiguous chunks whose sizes differ by at most 1, the longer ones first.

    Raises ValueError if n is negative or parts is not positive.
    """
    if n < 0 or parts < 1:
        raise ValueError(f"cannot divide {n} elements among {parts} ranks: need elements >= 0 and ranks >= 1")
    small, longer = divmod(n, parts)
    bounds = accumulate((small + (part < longer) for part in range(parts)), initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def chunks_of(message: ChunkMessage, program: CollectiveProgram) -> list[int]:
    """Returns the chunks that have elements in a message of the program."""
    span = message.span
    return [
        index for index, chunk in enumerate(program.chunks) if max(chunk.start, span.start) < min(chunk.stop, span.stop)
    ]


def joined(chunks: Sequence[range]) -> range:
    """Returns neighbouring chunks as one span."""
    return range(chunks[0].start, chunks[-1].stop)


def step(phase: str, messages: Iterable[ChunkMessage]) -> CollectiveStep:
    """Returns a step without empty messages."""
    return CollectiveStep(phase, tuple(message for message in messages if message.span))


def side_by_side(step_lists: Sequence[Sequence[CollectiveStep]]) -> list[CollectiveStep]:
    """Merges step lists of equal length among disjoint ranks into one: first steps together, second steps, ..."""
    return [
        CollectiveStep(together[0].phase, tuple(chain.from_iterable(each.messages for each in together)))
        for together in zip(*step_lists, strict=True)
    ]


def reversed_as_copies(phase: str, steps: Sequence[CollectiveStep]) -> list[CollectiveStep]:
    """Reverses the steps: the same messages from target to source, last step first, as copies of the reduced data."""
    return [
        CollectiveStep(
            phase, tuple(ChunkMessage(each.target, each.source, each.span, "copy") for each in back.messages)
        )
        for back in reversed(steps)
    ]


def check_root(root: int, ranks: int) -> None:
    """Raises ValueError if `root` is not one of the ranks."""
    if not 0 <= root < ranks:
        raise ValueError(f"root {root} is not one of the {ranks} ranks (0 to {ranks - 1})")
