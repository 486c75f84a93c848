"""The tokens of a sequence that a context-parallel rank holds, by arithmetic on positions alone.

With a causal mask a later token attends to more keys than an earlier one. Sequences are therefore distributed over the
groups of a ring in zig-zag: of 2 × ring equal chunks, group i holds the i-th from the start and the i-th from the end,
whose keys sum to the same number for every i (Llama Team 2024, section 3.3.2). Within a group, which with Ulysses
computes attention over all its tokens, each rank has an equal run of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.attention_runs import LEAST_RUN, window_run
from phalanx.blocks.ring import zigzag_runs
from phalanx.config.layout import Layout


def rank_positions(layout: Layout, seq_len: int, rank: int, slices: int = 1) -> list[range]:
    """Returns the positions that context-parallel rank `rank` holds, as ranges in storage order. Sequences that are
    pipelined in `slices` equal parts are distributed part by part. The layout must be legal."""
    tokens = seq_len // slices
    runs = _rank_share(layout, tokens, *cp_coordinates(layout, rank))
    return [range(run.start + part * tokens, run.stop + part * tokens) for part in range(slices) for run in runs]


def cp_coordinates(layout: Layout, rank: int) -> tuple[int, int]:
    """Returns the rank's position in the ring, and its position among the ranks that exchange heads."""
    inner, outer = (
        (layout.cp_ulysses, layout.ring) if layout.cp_inner == "ulysses" else (layout.ring, layout.cp_ulysses)
    )
    far, near = rank // inner % outer, rank % inner
    return (far, near) if layout.cp_inner == "ulysses" else (near, far)


def ring_positions(layout: Layout, tokens: int, place: int) -> list[range]:
    """Returns the positions that the ranks at one ring position hold together, of a sequence of `tokens` tokens."""
    return zigzag_runs(tokens, layout.ring, place)


def window_blocks(queries: range, keys: range, window: int) -> Iterator[tuple[range, range]]:
    """Yields blocks of queries and keys, by position, that hold all pairs that a causal mask and a window leave of
    `queries` and `keys`: runs of queries, each with the keys that some of them see.

    One block suffices where the window reaches over all."""
    queries = range(max(queries.start, keys.start), min(queries.stop, keys.stop - 1 + window))
    length = window if queries.stop - keys.start <= window else window_run(window, LEAST_RUN)
    for start in range(queries.start, queries.stop, length):
        run = range(start, min(start + length, queries.stop))
        seen = range(max(keys.start, run.start - window + 1), min(keys.stop, run.stop))
        if seen:
            yield run, seen


def _rank_share(layout: Layout, tokens: int, ring: int, ulysses: int) -> list[range]:
    """Returns the equal share of a rank in the positions of its ring position."""
    share = tokens // layout.cp
    start, found = ulysses * share, []
    for run in ring_positions(layout, tokens, ring):
        part = run[max(0, start) : max(0, start + share)]
        start -= len(run)
        if part:
            found.append(part)
    return found
