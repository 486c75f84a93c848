"""A collective program as text for a terminal: a row per step, a column per rank, and what each rank sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phalanx.comm.algorithms.program import ChunkMessage, CollectiveProgram, CollectiveStep, chunks_of
from phalanx.units import gib

ROWS, COLUMNS = 32, 12
"""Maximum numbers of steps and ranks shown."""


def table(program: CollectiveProgram) -> Iterator[str]:
    """Yields the lines of the steps: `3⇒1` is chunk 3 to rank 1, combined with its own; `3→1` overwrites."""
    shown = program.steps[:ROWS]
    ranks = range(min(program.ranks, COLUMNS))
    heads = ["step", "phase", *(f"rank {rank}" for rank in ranks)]
    rows = [heads, *([str(number), *_cells(step, program, ranks)] for number, step in enumerate(shown, 1))]
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


def _cells(step: CollectiveStep, program: CollectiveProgram, ranks: range) -> list[str]:
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
