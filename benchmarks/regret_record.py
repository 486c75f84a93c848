"""Measured steps in a file of JSON lines, one per layout and round, so that an interrupted benchmark resumes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse


@dataclass(frozen=True)
class Entry:
    """One layout in one round."""

    phase: str
    """The phase: survey, or final."""
    round: int
    model: str
    layout: Layout
    seconds: tuple[float, ...]
    """Seconds of each step."""


class Record:
    """All entries, written to disk as they are added."""

    def __init__(self, path: Path, *, resume: bool):
        self.path = path
        self.entries: list[Entry] = []
        if not resume:
            path.unlink(missing_ok=True)
        elif path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                layout, seconds = parse(found.pop("layout")), tuple(found.pop("seconds"))
                self.entries.append(Entry(**found, layout=layout, seconds=seconds))

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry) | {"layout": entry.layout.line()}) + "\n")

    def has(self, phase: str, number: int, model: str, layout: Layout) -> bool:
        return any((e.phase, e.round, e.model, e.layout) == (phase, number, model, layout) for e in self.entries)

    def seconds(self, model: str, *phases: str) -> dict[Layout, float]:
        """Returns the median of each layout's steps, in all rounds of some phases together."""
        steps: dict[Layout, list[float]] = {}
        for entry in self.entries:
            if entry.model == model and entry.phase in phases:
                steps.setdefault(entry.layout, []).extend(entry.seconds)
        return {layout: statistics.median(found) for layout, found in steps.items()}

    def ratio(self, model: str, layout: Layout, other: Layout) -> float:
        """Returns a layout's time relative to `other`: the median of the final rounds' ratios."""
        rounds: list[dict[Layout, float]] = []
        for number in sorted({e.round for e in self.entries if e.phase == "final" and e.model == model}):
            of_round = [e for e in self.entries if (e.phase, e.model, e.round) == ("final", model, number)]
            rounds.append({e.layout: statistics.median(e.seconds) for e in of_round})
        return statistics.median(one[layout] / one[other] for one in rounds)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Kendall's tau-b of two series of the same items: 1 for equal ranking, -1 for reversed ranking."""
    agree = disagree = ties_first = ties_second = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = first[i] - first[j], second[i] - second[j]
            agree += a * b > 0
            disagree += a * b < 0
            ties_first += a == 0 != b
            ties_second += b == 0 != a
    pairs = agree + disagree
    rest = ((pairs + ties_first) * (pairs + ties_second)) ** 0.5
    return (agree - disagree) / rest if rest else 0.0
