"""A collective program as a picture and as text: a step per row, a rank per column, and what each rank sends.

The SVG has no background and uses colours of medium lightness, so that it suits light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phalanx.comm.algorithms.program import ChunkMessage, CollectiveProgram, CollectiveStep, chunks_of
from phalanx.pictures.elements import COLOURS, NEUTRAL, document, heading, text
from phalanx.units import gib

ROWS, COLUMNS = 32, 12
"""Maximum numbers of steps and ranks shown."""


def table(program: CollectiveProgram) -> Iterator[str]:
    """Yields the lines of the steps: `3⇒1` is chunk 3 to rank 1, combined with its own; `3→1` overwrites."""
    shown = program.steps[:ROWS]
    ranks = range(min(program.ranks, COLUMNS))
    heads = ["step", "phase", *(f"rank {rank}" for rank in ranks)]
    rows = [heads, *([str(number), *_row_cells(step, program, ranks)] for number, step in enumerate(shown, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    left_out = [
        f"{total - most} of {total} {what}"
        for total, most, what in ((len(program.steps), ROWS, "steps"), (program.ranks, COLUMNS, "ranks"))
        if total > most
    ]
    if left_out:
        yield f"not shown: {', '.join(left_out)}; --svg and --json have them all"
    yield "3⇒1: chunk 3 to rank 1, combined with its own; 3→1: overwrites it"


def counts(program: CollectiveProgram, element_bytes: int) -> Iterator[str]:
    """Yields the lines of the traffic, with elements of `element_bytes` bytes."""
    yield f"steps: {len(program.steps)}"
    yield f"messages sent per rank: {_by_rank(program.messages_sent(), str)}"
    yield f"bytes sent per rank: {_by_rank([n * element_bytes for n in program.elements_sent()], gib)}"
    yield f"bytes on the critical path: {gib(program.critical_elements() * element_bytes)}"


def _row_cells(step: CollectiveStep, program: CollectiveProgram, ranks: range) -> list[str]:
    sent = {message.source: message for message in step.messages}
    return [step.phase, *(_cell(sent[rank], program) if rank in sent else "" for rank in ranks)]


def _cell(message: ChunkMessage, program: CollectiveProgram) -> str:
    carried = chunks_of(message, program)
    if len(program.chunks) == 1:
        name = "all"
    else:
        name = f"{carried[0]}" if len(carried) == 1 else f"{carried[0]}-{carried[-1]}"
    return f"{name}{'⇒' if message.action == 'reduce' else '→'}{message.target}"


def _by_rank(numbers: Sequence[int], shown: Callable[[int], str]) -> str:
    """Returns one figure if it is the same for all ranks, all figures of few ranks, and otherwise the range."""
    if len(set(numbers)) == 1:
        return shown(numbers[0])
    if len(numbers) <= COLUMNS:
        return ", ".join(map(shown, numbers))
    return f"{shown(min(numbers))} to {shown(max(numbers))}"


_CELL = 14  # pixels
_MARGIN_LEFT = 176
_MARGIN = 24
_TOP = 62
_BAND = 84  # height of a step: the chunks that are sent, then the arrows


def svg(program: CollectiveProgram) -> str:
    """Returns the picture of `program` as an SVG document.

    The chunks that an arrow carries stand above it, in their colours; a solid arrow is combined with the receiver's
    data, a dashed one overwrites it. Chunks without elements are not shown: draw a program of at least as many elements
    as chunks.
    """
    widest = max((len(chunks_of(message, program)) for message in program.messages), default=1)
    spacing = max(72, widest * _CELL + 20)
    width = _MARGIN_LEFT + program.ranks * spacing + _MARGIN
    height = _TOP + len(program.steps) * _BAND + 2 * _MARGIN
    columns = [_MARGIN_LEFT + rank * spacing + spacing / 2 for rank in range(program.ranks)]
    parts = [
        heading(_MARGIN, 24, _title(program)),
        *(_rank(rank, x, height - 2 * _MARGIN) for rank, x in enumerate(columns)),
    ]
    for index, step in enumerate(program.steps):
        top = _TOP + index * _BAND
        parts.append(text(_MARGIN, top + 12, f"step {index + 1}", "font-weight='600'"))
        parts.append(text(_MARGIN, top + 28, step.phase))
        parts.extend(_message(message, program, columns, top) for message in step.messages)
    words = "solid: combined with the receiver's own   dashed: copied"
    parts.append(text(_MARGIN, height - 18, words, "xml:space='preserve'"))
    return document(_title(program), width, height, parts)


def _title(program: CollectiveProgram) -> str:
    return f"{program.name} on {program.ranks} ranks: {len(program.steps)} steps"


def _rank(rank: int, x: float, bottom: float) -> str:
    line = f"<line x1='{x:g}' y1='{_TOP - 6}' x2='{x:g}' y2='{bottom:g}' stroke='{NEUTRAL}' stroke-opacity='0.35'/>"
    return f"<text x='{x:g}' y='{_TOP - 12}' text-anchor='middle'>rank {rank}</text>" + line


def _message(message: ChunkMessage, program: CollectiveProgram, columns: list[float], top: float) -> str:
    """Returns the chunks above the source, and the arrow from there to the target at the end of the step."""
    carried = chunks_of(message, program)
    colour = COLOURS[carried[0] % len(COLOURS)] if len(carried) == 1 else NEUTRAL
    cells = _cells(carried, program, columns[message.source], top)
    return f"<g class='message'>{cells}{_arrow(message, columns, top, colour)}</g>"


def _cells(carried: list[int], program: CollectiveProgram, centre: float, top: float) -> str:
    """Returns one numbered square per chunk; a wider one labelled `all` if the algorithm does not divide the tensor."""
    size = 2 * _CELL if len(program.chunks) == 1 else _CELL
    left = centre - size * len(carried) / 2
    cells = []
    for place, chunk in enumerate(carried):
        x = left + place * size
        label = "all" if len(program.chunks) == 1 else str(chunk)
        cells.append(
            f"<rect x='{x:g}' y='{top}' width='{size}' height='{_CELL}' fill='{COLOURS[chunk % len(COLOURS)]}'/>"
            f"<text x='{x + size / 2:g}' y='{top + 11}' text-anchor='middle' font-size='10' fill='#fff'>{label}</text>"
        )
    return "".join(cells)


def _arrow(message: ChunkMessage, columns: list[float], top: float, colour: str) -> str:
    """Returns a line to just above the next step, and its head."""
    x1, y1 = columns[message.source], top + _CELL
    x2, y2 = columns[message.target], top + _BAND - 6
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back, side = 9, 4
    base_x, base_y = x2 - back * ux, y2 - back * uy
    corners = ((x2, y2), (base_x - side * uy, base_y + side * ux), (base_x + side * uy, base_y - side * ux))
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    dashes = " stroke-dasharray='5 4'" if message.action == "copy" else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{base_x:.1f}' y2='{base_y:.1f}' stroke='{colour}' "
        f"stroke-width='2'{dashes}/>"
        f"<polygon points='{head}' fill='{colour}'/>"
    )
