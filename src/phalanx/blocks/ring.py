"""Who holds which tokens on a ring, and which keys each position sends to which other: arithmetic alone.

Sequences are cut in zig-zag: of 2 × ring equal chunks, position i of the ring holds the i-th from the start and the
i-th from the end (Llama Team 2024, section 3.3.2). Without a window every position needs all keys, which travel around
the ring. With one, a position needs the last keys of the chunks before its own, and only these are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


def zigzag_runs(tokens: int, ring: int, position: int) -> list[range]:
    """Returns the tokens of a ring position, of sequences of `tokens` tokens."""
    if ring == 1:
        return [range(tokens)]
    chunk, mirror = tokens // (2 * ring), 2 * ring - 1 - position
    return [range(position * chunk, (position + 1) * chunk), range(mirror * chunk, (mirror + 1) * chunk)]


def sliced_runs(tokens: int, ring: int, position: int, slices: int) -> list[range]:
    """Returns the same of sequences of `slices` slices of `tokens` tokens each, every one of which is cut in
    zig-zag."""
    runs = zigzag_runs(tokens, ring, position)
    return [range(start + run.start, start + run.stop) for start in range(0, slices * tokens, tokens) for run in runs]


def reached(keys: range, queries: Sequence[range], window: int) -> range:
    """Returns the keys of a run that queries of other runs see under a causal mask and a window (0: all keys): the last
    ones, as many as the nearest later run reaches."""
    later = [run.start for run in queries if run.start > keys.start]
    if not later:
        return range(keys.stop, keys.stop)
    first = max(keys.start, min(later) - window + 1) if window else keys.start
    return range(min(first, keys.stop), keys.stop)


def reached_runs(tokens: int, ring: int, slices: int, window: int, position: int, source: int) -> list[range]:
    """Returns, for the runs of keys of position `source` in `slices` slices of `tokens` tokens, those that the queries
    of `position` in the last slice see; runs may be empty."""
    queries = sliced_runs(tokens, ring, position, slices)[-2:]
    return [reached(run, queries, window) for run in sliced_runs(tokens, ring, source, slices)]


@lru_cache(4096)
def ring_hops(tokens: int, ring: int, slices: int, window: int) -> tuple[int, ...]:
    """Returns the distances over which some position sends keys to one after it, in the last of `slices` slices."""
    return tuple(
        hops
        for hops in range(1, ring)
        if any(
            any(reached_runs(tokens, ring, slices, window, (source + hops) % ring, source)) for source in range(ring)
        )
    )


class RingKeys(NamedTuple):
    """Keys per sequence that one position sends to the others, and gets from them, in its messages' order: to and from
    the next positions and those before, by distance. Slices of a sequence send separately."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@lru_cache(4096)
def ring_keys(seq_len: int, ring: int, slices: int, window: int, position: int | None = None) -> RingKeys:
    """Returns the keys of the messages, none of them empty, of a layer with a window; for no `position` those of the
    one that sends most keys if sequences have one slice."""
    if position is None:
        ends = {0, min(1, ring - 1), ring // 2, ring - 1}
        return max(
            (ring_keys(seq_len, ring, slices, window, end) for end in sorted(ends)), key=lambda keys: sum(keys.sent)
        )
    tokens = seq_len // slices
    others = [(position + hops) % ring for hops in range(1, ring)]

    def counted(at: int, source: int, seen: int) -> int:
        return sum(map(len, reached_runs(tokens, ring, seen, window, at, source)))

    so_far = range(1, slices + 1)
    sent = (counted(other, position, seen) for seen in so_far for other in others)
    received = (counted(position, other, seen) for seen in so_far for other in reversed(others))
    return RingKeys(tuple(filter(None, sent)), tuple(filter(None, received)))
