"""A picture of context parallelism: the tokens of each rank, the ring step in which queries meet keys, and the balance
of the work (`phalanx predict JOB --svg FILE --picture context`). It is drawn from the arithmetic that training uses
(partition/tensor_slices.py), for a sequence without slices; where documents decide (partition/documents.py), for an
example of documents."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil, sqrt

from phalanx.axes.catalogue import unbalanced
from phalanx.blocks.attention import visible_pairs
from phalanx.blocks.kinds import block_kinds
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.breakdown import subject
from phalanx.errors import JobError
from phalanx.partition.documents import DocumentCut, Numbers, Places, assigned, keys_seen, long_tailed, pairs_of
from phalanx.partition.tensor_slices import cp_coordinates, rank_share, ring_positions
from phalanx.pictures.elements import BOLD, COLOURS, NEUTRAL, ON_CELL, SMALL, box, document, heading, text
from phalanx.units import counted

_WIDTH, _MARGIN = 1000, 24
_SIDE = 340  # pixels of the side of one matrix
_MATRICES, _BARS = 216, 626  # left edges
_LONGEST = 220  # pixels of the longest bar


def svg(job: Job) -> str:
    """Returns the picture of how a layout distributes sequences, as an SVG document. Raises JobError without cp."""
    layout, tokens = job.layout, job.model.seq_len
    if layout.cp == 1:
        raise JobError(
            "layout.cp is 1: every rank holds whole sequences, so there is nothing to draw; set for example cp=4"
        )
    title = subject(job, layout.world)
    numbers, places = None, tuple(ring_positions(layout, tokens, place) for place in range(layout.ring))
    if layout.ring > 1 and not unbalanced(job):
        numbers = long_tailed(tokens)
        places = assigned(numbers, job.model, Layout(cp=layout.ring)).places
    caption = [*_first_lines(layout, tokens), *_caption(layout, _windows(job.model), numbers)]
    top = 48 + 17 * len(caption) + 36
    matrices, bottom = _matrices(layout, job.model, top, places, numbers)
    bars, lowest = _bars(layout, job.model, top, places, numbers)
    parts = [
        heading(_MARGIN, 26, title),
        *(text(_MARGIN, 48 + 17 * number, line) for number, line in enumerate(caption)),
        *_strip(layout, tokens, top, bottom - top, places),
        *matrices,
        *bars,
    ]
    return document(title, _WIDTH, int(max(bottom, lowest)) + 16, parts)


def pairs(runs: Sequence[range], window: int = 0) -> int:
    """Returns the number of query × key pairs of the queries at some positions under a causal mask and a window."""
    return sum(visible_pairs(run, window) for run in runs)


def contiguous(layout: Layout, tokens: int, place: int) -> list[range]:
    """Returns the tokens of a ring position if sequences were cut into contiguous runs."""
    share = tokens // layout.ring
    return [range(place * share, (place + 1) * share)]


def _windows(model: ModelConfig) -> Counter[int]:
    """Returns the windows of the layers (0: none), with the number of layers."""
    return Counter(kind.window for kind in block_kinds(model))


def _first_lines(layout: Layout, tokens: int) -> list[str]:
    line = layout.line().replace(",", ", ")
    words = f"layout {line}: {tokens:,} tokens on {layout.cp} context-parallel ranks"
    return textwrap.wrap(words, 140, break_on_hyphens=False)


def _caption(layout: Layout, windows: Counter[int], numbers: Numbers | None) -> Iterator[str]:
    yield "Colours are ranks. The matrix shows which rank computes a query's score with a key; later keys are masked."
    if numbers is not None:
        yield (
            f"Documents, {numbers.max() - numbers.min() + 1:,} of them in this example (log-normal lengths), see only "
            "themselves, and are shared out over the ranks by what they cost."
        )
    elif layout.ring > 1:
        groups = "rank" if layout.cp_ulysses == 1 else f"group of {layout.cp_ulysses} ranks"
        around = f"and so on, with {counted(layout.ring - 1, 'message')}." if 0 in windows else "and so on."
        yield (
            f"Numbers are steps of the ring: in step 1 each {groups} has its own keys, then those of the one before, "
            + around
        )
        if any(windows):
            yield "With a window, keys go straight to the ranks that see them, and only the last ones of a chunk do."
    if layout.cp_ulysses > 1:
        whole = "whole sequences" if layout.ring == 1 else "all tokens of their group"
        yield f"Ulysses: {layout.cp_ulysses} ranks have a part of the heads each, of {whole}, while attention computes."
    if len(windows) > 1:
        yield f"Pale: only in layers without a window, {windows[0]} of {windows.total()}."


def _strip(layout: Layout, tokens: int, top: float, side: float, places: Places) -> Iterator[str]:
    """Yields the sequence from top to bottom, each run in its rank's colour."""
    yield _title(_MARGIN, top, "Tokens held")
    scale = side / tokens
    for rank in range(layout.cp):
        for run in rank_share(layout, places[cp_coordinates(layout, rank)[0]], rank):
            y, height = top + run.start * scale, len(run) * scale
            yield _box(_MARGIN, y, 22, height, _colour(rank))
            if height >= 11:
                tokens_held = f"{run.start:,}" if len(run) == 1 else f"{run.start:,}–{run.stop - 1:,}"
                yield text(_MARGIN + 30, y + height / 2 + 4, f"rank {rank}: {tokens_held}", SMALL)


def _matrices(
    layout: Layout, model: ModelConfig, top: float, places: Places, numbers: Numbers | None
) -> tuple[list[str], float]:
    """Returns queries × keys, once for each rank's part of the heads; and the lower end."""
    drawn, parts = [_title(_MATRICES, top, "Attention: queries ↓ × keys →")], layout.cp_ulysses

    def matrix(part: int, box: tuple[float, float, float]) -> Iterator[str]:
        if numbers is None:
            return _matrix(layout, model, part, box)
        return _documents(layout, model, part, box, places, numbers)

    if parts == 1:
        return [*drawn, *matrix(0, (_MATRICES, top, _SIDE))], top + _SIDE
    heads, columns = model.n_heads // layout.tp // parts, ceil(sqrt(parts))
    each = (_SIDE + 40 - 16 * (columns - 1)) / columns
    y = top
    for part in range(parts):
        x, y = _MATRICES + part % columns * (each + 16), top + part // columns * (each + 26)
        first, last = part * heads, (part + 1) * heads - 1
        name = f"head {first}" if heads == 1 else f"heads {first}–{last}"
        drawn += [text(x, y + 8, name, SMALL), *matrix(part, (x, y + 14, each))]
    return drawn, y + 14 + each


def _matrix(layout: Layout, model: ModelConfig, part: int, box: tuple[float, float, float]) -> Iterator[str]:
    """Yields one square: the pairs of the ring positions' chunks of queries and of keys that meet; those that a window
    cuts are drawn whole, and those that meet only in layers without a window pale."""
    x, y, side = box
    rank_of = {cp_coordinates(layout, rank): rank for rank in range(layout.cp)}
    # With as many tokens as there are chunks, positions are the chunks' numbers.
    chunks = 2 * layout.ring if layout.ring > 1 else 1
    place_of = {
        run.start: place for place in range(layout.ring) for run in _single(ring_positions(layout, chunks, place))
    }
    cell, windows = side / chunks, _windows(model)
    for query, place in place_of.items():
        colour, near = _colour(rank_of[place, part]), _first_key(query, max(windows), model.seq_len, chunks)
        for key in range(_first_key(query, min(windows), model.seq_len, chunks), query + 1):
            left, top = x + key * cell, y + query * cell
            if key == query:
                corner = f"{left:.1f},{top:.1f} {left:.1f},{top + cell:.1f} {left + cell:.1f},{top + cell:.1f}"
                yield f"<polygon points='{corner}' fill='{colour}'/>"
            else:
                yield _box(left, top, cell - 1, cell - 1, colour, pale=key < near)
            if layout.ring > 1 and cell >= 16:
                step = (place - place_of[key]) % layout.ring + 1
                down, across = (0.72, 0.3) if key == query else (0.5, 0.5)
                ink = ON_CELL if key < near else "fill='#fff'"
                where = f"text-anchor='middle' font-size='{min(12, cell / 2.2):.0f}' {ink}"
                yield text(left + across * cell, top + down * cell + 4, str(step), where)
    yield f"<rect x='{x:.1f}' y='{y:.1f}' width='{side:.1f}' height='{side:.1f}' fill='none' stroke='{NEUTRAL}'/>"


def _documents(
    layout: Layout, model: ModelConfig, part: int, box: tuple[float, float, float], places: Places, numbers: Numbers
) -> Iterator[str]:
    """Yields one square with what each run of queries of one document sees, in the layers that see most."""
    x, y, side = box
    rank_of = {cp_coordinates(layout, rank): rank for rank in range(layout.cp)}
    scale, window = side / model.seq_len, 0 if 0 in _windows(model) else max(_windows(model))
    for place in range(layout.ring):
        for start, stop, first in DocumentCut(numbers, places, place, 0).mine(0):
            rows = [start, *([first + window] if window and start < first + window < stop else []), stop]
            left = [(max(first, row - window) if window else first, row) for row in rows]
            corners = [*left, (stop, stop), (start, start)]
            points = " ".join(f"{x + key * scale:.1f},{y + row * scale:.1f}" for key, row in corners)
            yield f"<polygon points='{points}' fill='{_colour(rank_of[place, part])}'/>"
    yield f"<rect x='{x:.1f}' y='{y:.1f}' width='{side:.1f}' height='{side:.1f}' fill='none' stroke='{NEUTRAL}'/>"


def _first_key(query: int, window: int, tokens: int, chunks: int) -> int:
    """Returns the first chunk of keys in the window (0: none) of a chunk of queries."""
    first = query * tokens // chunks - window + 1
    return max(0, first) * chunks // tokens if window else 0


def _single(runs: Sequence[range]) -> Iterator[range]:
    return (range(position, position + 1) for run in runs for position in run)


def _bars(
    layout: Layout, model: ModelConfig, top: float, places: Places, numbers: Numbers | None
) -> tuple[list[str], float]:
    """Returns the work of every rank and, for comparison, in contiguous runs, or of documents in zig-zag; and the lower
    end."""
    heads, tokens, ring = model.n_heads // layout.tp // layout.cp_ulysses, model.seq_len, range(layout.ring)
    names = ("zig-zag", "contiguous") if numbers is None else ("by documents", "zig-zag")
    of_other = contiguous if numbers is None else ring_positions
    kinds = {names[0]: places, names[1]: [of_other(layout, tokens, place) for place in ring]}
    if layout.ring == 1:
        kinds = {"": places}
    if numbers is None:
        work = {name: [_mean_pairs(runs, _windows(model)) for runs in each] for name, each in kinds.items()}
    else:
        seen = keys_seen(numbers, model)
        work = {name: [pairs // model.n_layers for pairs in pairs_of(seen, each).pairs] for name, each in kinds.items()}
    counts = {
        name: [heads * each[cp_coordinates(layout, rank)[0]] for rank in range(layout.cp)]
        for name, each in work.items()
    }
    widest = max(count for each in counts.values() for count in each)
    over = "mean over layers" if len(_windows(model)) > 1 else "over all its heads"
    parts, y = [_title(_BARS, top, f"Query × key pairs per rank, {over}")], top
    for rank in range(layout.cp):
        parts.append(text(_BARS, y + 12, f"rank {rank}"))
        for name, each in counts.items():
            width, hollow = _LONGEST * each[rank] / widest, name == names[1]
            parts.append(_box(_BARS + 56, y, width, 13, _colour(rank), hollow=hollow))
            parts.append(text(_BARS + 64 + width, y + 11, _number(each[rank]), SMALL))
            y += 17
        y += 7
    y += 12
    for name, each in counts.items():
        most = f"the maximum is {max(each) * len(each) / sum(each):.2f} × the mean"
        if name:
            parts.append(_box(_BARS, y - 10, 12, 12, NEUTRAL, hollow=name == names[1]))
        parts.append(text(_BARS + (20 if name else 0), y, f"{name}: {most}" if name else most))
        y += 20
    return parts, y


def _mean_pairs(runs: Sequence[range], windows: Counter[int]) -> int:
    """Returns the pairs per layer, of layers with some windows."""
    return sum(layers * pairs(runs, window) for window, layers in windows.items()) // windows.total()


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _number(count: int) -> str:
    return f"{count:,}" if count < 10**9 else f"{count:.3e}"


def _title(x: float, top: float, words: str) -> str:
    return text(x, top - 14, words, BOLD)


def _box(
    x: float, y: float, width: float, height: float, colour: str, *, hollow: bool = False, pale: bool = False
) -> str:
    paint = f"fill='none' stroke='{colour}' stroke-width='1.5'" if hollow else f"fill='{colour}'"
    if pale:
        paint += " fill-opacity='0.35'"
    return box(x, y, width, height, paint)
