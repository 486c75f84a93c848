"""Schedules as CSV files: one row per rank with its actions in order, as cells such as `0F0`, `1B3`, `0I2`, `0W2`, with
slices `0F0.1`.

This is the format without communication that torch.distributed.pipelining reads and writes ("compute_only"), so
schedules can be exchanged (except slices, which torch does not have). Blank cells are bubbles without meaning. Lines
that begin with `#` are comments, except `# name: mine` (default: the file's name) and `# steps: 2`. Stages,
micro-batches, slices and the rank of each stage follow from the cells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from phalanx.bounded import read_text
from phalanx.errors import MOST_PROBLEMS, JobError
from phalanx.schedule.check import check
from phalanx.schedule.schedule import MOST_ACTIONS, Action, Kind, Schedule

MOST_BYTES = 64 * 2**20
_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})(?:\.(\d{1,9}))?")
_COMMENT = re.compile(r"#\s*(name|steps)\s*:\s*(.*)")
_TORCH_ACTIONS = re.compile(r"UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|OVERLAP_F_B|FULL_BACKWARD")


def read(path: Path | str) -> Schedule:
    """Reads and validates the schedule of a file. Raises JobError with every problem of the file, by line and cell, or,
    if the file is well-formed, of its schedule."""
    path = Path(path)
    try:
        return _parsed(_text_of(path), path.stem)
    except JobError as error:
        raise JobError([f"{path}: {problem}" for problem in error.problems]) from None


def text(schedule: Schedule) -> str:
    """Returns the schedule in the file format, with comments only where necessary, because torch reads none."""
    steps = [f"# steps: {schedule.steps}"] if schedule.steps > 1 else []
    rows = [",".join(map(str, program)) for program in schedule.programs]
    return "\n".join([*steps, *rows]) + "\n"


def _text_of(path: Path) -> str:
    try:
        content = read_text(path, MOST_BYTES)
    except UnicodeDecodeError as error:
        raise JobError(f"not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise JobError(f"cannot be read: {error.strerror}") from None
    if (cells := content.count(",") + content.count("\n") + 1) > MOST_ACTIONS:
        raise JobError(f"the file has {cells:,} cells; the most are {MOST_ACTIONS:,}")
    return content


def _parsed(content: str, name: str) -> Schedule:
    steps = 1
    problems: list[str] = []
    programs: list[tuple[Action, ...]] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if comment := _COMMENT.match(line):
            key, value = comment.group(1), comment.group(2).strip()
            if key == "name":
                name = value or name
            elif re.fullmatch(r"[1-9]\d{0,8}", value):
                steps = int(value)
            else:
                problems.append(f"line {number}: steps must be a whole number of at least 1, is {value!r}")
        elif line.strip() and not line.startswith("#"):
            programs.append(tuple(_row(line, f"line {number} (rank {len(programs)})", problems)))
    if not problems and not any(programs):
        problems.append("no actions: expected one row per rank, with cells such as 0F0 and 0B0")
    if problems:
        raise JobError(problems)
    schedule = _inferred(name, tuple(programs), steps)
    check(schedule)
    return schedule


def _row(line: str, where: str, problems: list[str]) -> Iterable[Action]:
    for number, cell in enumerate(line.split(","), start=1):
        word = cell.strip().strip('"')
        if match := _CELL.fullmatch(word):
            stage, kind, micro, part = match.groups()
            yield Action(cast(Kind, kind), int(stage), int(micro), int(part or 0))
        elif word:
            explained = len(problems) <= MOST_PROBLEMS  # the error lists no more
            problems.append(f"{where}, cell {number}: {_misread(word)}" if explained else "")


def _misread(word: str) -> str:
    shown = word if len(word) <= 20 else word[:20] + "..."
    if found := _TORCH_ACTIONS.search(word):
        return (
            f"{shown!r}: {found.group()} is not supported, only F, B, I and W: use torch's file without communication"
        )
    if _CELL.fullmatch(word.upper()):
        return f"{shown!r} is not an action: did you mean {word.upper()}?"
    return f"{shown!r} is not an action; expected stage, F, B, I or W, and micro-batch, such as 0F3 (or 0F3.1, sliced)"


def _inferred(name: str, programs: tuple[tuple[Action, ...], ...], steps: int) -> Schedule:
    """Returns the schedule of the programs: the largest numbers give the counts, forward passes give the placement."""
    actions = [action for program in programs for action in program]
    stages = 1 + max(action.stage for action in actions)
    micros = 1 + max(action.micro for action in actions)
    slices = 1 + max(action.slice for action in actions)
    if (passes := stages * micros * slices) > len(actions):
        parts = f" x {slices} slices" if slices > 1 else ""
        raise JobError(
            f"the largest numbers mean {stages} stages x {micros} micro-batches{parts} = {passes} forward passes, "
            f"and as many backward; there are {len(actions)} actions in all"
        )
    ranks_of: list[dict[int, list[int]]] = [{} for _ in range(stages)]
    for rank, program in enumerate(programs):
        for kind, stage, micro, _ in program:
            if kind == "F":
                ranks_of[stage].setdefault(rank, []).append(micro)
    unknown = [f"stage {stage} has no forward pass on any rank" for stage, ranks in enumerate(ranks_of) if not ranks]
    if unknown:
        raise JobError(unknown)
    ways = 1 if all(len(ranks) == 1 for ranks in ranks_of) else 2
    placements = [[_only_rank(ranks, way, ways, micros) for ranks in ranks_of] for way in range(ways)]
    ambiguous = [stage for stage in range(stages) if any(placement[stage] < 0 for placement in placements)]
    if ambiguous:
        raise JobError([_ambiguous_rank(stage, ranks_of[stage], micros) for stage in ambiguous])
    return Schedule(name, tuple(map(tuple, placements)), micros, programs, slices, steps)


def _only_rank(ranks: dict[int, list[int]], way: int, ways: int, micros: int) -> int:
    """Returns the rank that has a stage in a direction, or -1 if none or several have it. `Schedule.direction` assigns
    micro-batches to directions."""
    found = [rank for rank, own in ranks.items() if any(micro * ways // micros == way for micro in own)]
    return found[0] if len(found) == 1 else -1


def _ambiguous_rank(stage: int, ranks: dict[int, list[int]], micros: int) -> str:
    places = " and ".join(f"rank {rank} (micro-batches {_spans(own)})" for rank, own in sorted(ranks.items()))
    half = (micros + 1) // 2
    return (
        f"stage {stage} is on {places}; a stage is on one rank, or, if half of the micro-batches run in reverse, on "
        f"one for {_spans(range(half))} and one for {_spans(range(half, micros))}"
    )


def _spans(numbers: Iterable[int]) -> str:
    """Formats numbers as ranges: "0 to 3, 5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in spans)
