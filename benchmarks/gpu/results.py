"""The results file of benchmarks.gpu: written after every case, so that an interrupted run resumes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.commands import CaseError

Outcome = dict[str, Any]
"""Figures, or `skipped` or `failed` with the reason; with the date, the versions and the command."""
Row = tuple[str, ...]


@dataclass
class Results:
    """Cases by part, then by name, in the order in which they were measured."""

    path: Path
    """The path without a suffix: `.json` and `.md` are written."""
    facts: Mapping[str, Any]
    """Facts about the machine of this run (setting.facts)."""
    parts: dict[str, dict[str, Outcome]] = field(default_factory=dict)

    @staticmethod
    def open(path: Path, facts: Mapping[str, Any], fresh: bool) -> Results:
        """Returns the results of an earlier run at `path`, unless `fresh`. Raises CaseError if they cannot be read."""
        file = path.with_name(f"{path.name}.json")
        if fresh or not file.exists():
            return Results(path, facts)
        try:
            return Results(path, facts, json.loads(file.read_text(encoding="utf-8"))["parts"])
        except (ValueError, KeyError) as error:
            raise CaseError(
                f"{file} is no results file of benchmarks.gpu ({error}); --fresh writes a new one"
            ) from None

    def has(self, part: str, case: str) -> bool:
        """Returns whether a case has figures that hold. A case that failed or differed may have been fixed, and a
        skipped one's requirement installed: such cases are tried again."""
        outcome = self.parts.get(part, {}).get(case)
        return outcome is not None and not {"failed", "skipped"} & outcome.keys() and outcome.get("ok", True)

    def add(self, part: str, case: str, outcome: Outcome) -> None:
        """Adds a case, and writes the JSON file."""
        about = {"date": time.strftime("%Y-%m-%d"), "torch": self.facts["torch"], "driver": self.facts["driver"]}
        self.parts.setdefault(part, {})[case] = {**outcome, **about}
        document = {"benchmark": "gpu", "machine": self.facts, "parts": self.parts}
        self._write("json", json.dumps(document, indent=1) + "\n")

    def write_page(self, tables: Mapping[str, Sequence[Row]]) -> Path:
        """Writes the page for people: one table per part, by the part's title. Returns its path."""
        facts = self.facts
        versions = [f"{name} {facts[name]}" for name in ("driver", "cuda", "nccl", "torch", "python") if facts[name]]
        many = f"{facts['gpus']} × " if facts["gpus"] > 1 else ""
        lines = [
            f"# On {many}{facts['device']}",
            "",
            f"{facts['memory_gib']} GiB per device; {', '.join(versions)}; written {time.strftime('%Y-%m-%d')}. "
            "`make gpu`; [what it measures](../../docs/guides/gpu.md)",
        ]
        for title, rows in tables.items():
            lines += ["", f"## {title}", "", *markdown(rows)]
        return self._write("md", "\n".join(lines) + "\n")

    def _write(self, suffix: str, text: str) -> Path:
        """Writes the file atomically: a run that is killed meanwhile leaves it as it was."""
        path = self.path.with_name(f"{self.path.name}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
        return path


def markdown(rows: Sequence[Row]) -> list[str]:
    """Returns a table whose first row is its head. Shorter rows are filled up, and bars in cells are escaped."""
    width = len(rows[0])
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] + [""] * (width - len(row)) for row in rows]
    head, *body = [f"| {' | '.join(row)} |" for row in cells]
    return [head, "|---" * width + "|", *body]


def reason(outcome: Outcome) -> str | None:
    """Returns why a case has no figures, for a cell of its row."""
    return next((f"{word}: {outcome[word]}" for word in ("skipped", "failed") if word in outcome), None)
