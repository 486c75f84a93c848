"""A picture of TeraPipe's slices: a panel per cut, a row per pipeline rank, time to the right. Forward passes come
first, as in the paper, then backward passes, the last slice first."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.pictures.elements import COLOURS, END, SMALL, box, document, fill_of, heading, text
from phalanx.simulate.slices import SliceCut
from phalanx.units import duration

_LEFT, _WIDTH, _ROW = 90.0, 820.0, 16.0
_MOST_ROWS = 16
"""Ranks in a picture; of a longer pipeline only the first."""


def slices_svg(cuts: dict[str, SliceCut], where: str) -> str:
    """Returns the first micro-batch under every cut, on one scale of time; `where` names model and machine."""
    drawn = {name: list(_passes(cut)) for name, cut in cuts.items()}
    longest = max(start + seconds for passes in drawn.values() for *_, start, seconds in passes)
    parts, top = [heading(16, 28, f"{where}: the first micro-batch in slices, on the slowest stage's times")], 60.0
    for name, passes in drawn.items():
        cut, rows = cuts[name], min(cuts[name].ranks, _MOST_ROWS)
        tokens = ", ".join(map(str, cut.tokens[:12])) + (", …" if len(cut.tokens) > 12 else "")
        parts.append(text(16, top, f"{name}: {duration(cut.latency)} per step; tokens {tokens}"))
        parts += [text(_LEFT - 8, top + 20 + rank * _ROW, f"rank {rank}", f"{END} {SMALL}") for rank in range(rows)]
        for kind, rank, number, start, seconds in passes:
            if rank < rows:
                tip = f"{kind} of slice {number}: {cut.tokens[number]} tokens, {duration(seconds)}"
                x, width = _LEFT + _WIDTH * start / longest, max(0.3, _WIDTH * seconds / longest - 0.5)
                parts.append(box(x, top + 9 + rank * _ROW, width, _ROW - 3, fill_of(COLOURS[kind == "B"]), tip))
        top += rows * _ROW + 44
    return document(where, _LEFT + _WIDTH + 24, top, parts)


def _passes(cut: SliceCut) -> Iterator[tuple[str, int, int, float, float]]:
    """Yields kind, rank, slice, start and seconds of the passes of one micro-batch."""
    free, last = [0.0] * cut.ranks, range(len(cut.tokens))
    for kind, order, ranks, times in (
        ("F", last, range(cut.ranks), cut.forward),
        ("B", reversed(last), reversed(range(cut.ranks)), cut.backward),
    ):
        through = [*ranks]
        for number in order:
            before = 0.0
            for rank in through:
                start = max(before, free[rank])
                before = free[rank] = start + times[number]
                yield kind, rank, number, start, times[number]
