"""The results of the bench: kept after every fault, and written as a page."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault import CLASSES, Fault
from benchmarks.chaos.story import INVALID, LOST, SKIPPED, SURVIVED, VERDICTS

Result = dict[str, Any]


@dataclass
class Results:
    """Results by program, then by fault."""

    path: Path
    facts: Mapping[str, Any]
    controls: dict[str, Any] = field(default_factory=dict[str, Any])
    """Facts about the runs without a fault."""
    programs: dict[str, dict[str, Result]] = field(default_factory=dict[str, dict[str, Result]])

    @staticmethod
    def open(path: Path, facts: Mapping[str, Any], fresh: bool) -> Results:
        """Returns the results kept at `path`. Those of another version of the program do not count."""
        if fresh or not path.exists():
            return Results(path, facts)
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"].get("commit") != facts["commit"]:
            return Results(path, facts)
        return Results(path, facts, kept["controls"], kept["programs"])

    def of(self, program: str) -> dict[str, Result]:
        """Returns the results of one program, by fault."""
        return self.programs.setdefault(program, {})

    def add(self, program: str, fault: Fault, result: Result) -> None:
        """Adds a result and writes the file."""
        self.of(program)[fault.key] = result
        write(self.path, json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, Any]:
        """Returns all of it, for machines."""
        return {"benchmark": "chaos", "machine": self.facts, "controls": self.controls, "programs": self.programs}


def write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def worst(results: Sequence[Result]) -> str:
    """Returns the verdict of a class: that of its worst fault; skipped if none was tried."""
    tried = [result["verdict"] for result in results if result["verdict"] in VERDICTS]
    return max(tried, key=VERDICTS.index, default=SKIPPED)


def by_class(results: Mapping[str, Result]) -> dict[int, list[Result]]:
    """Returns the results of each class that has any."""
    found: dict[int, list[Result]] = {}
    for result in results.values():
        found.setdefault(result["class"], []).append(result)
    return dict(sorted(found.items()))


def counts(results: Mapping[str, Result]) -> Counter[str]:
    """Returns how many classes came out in each way."""
    return Counter(worst(of_class) for of_class in by_class(results).values())


def summary(results: Mapping[str, Result]) -> str:
    """Returns one line: classes and faults by verdict."""
    classes, faults = counts(results), Counter(result["verdict"] for result in results.values())
    words = [*VERDICTS, *(word for word in (SKIPPED, INVALID) if faults[word])]
    of_classes = ", ".join(f"{classes[word]} {word}" for word in VERDICTS)
    return (
        f"{sum(classes.values())} classes by their worst fault: {of_classes}. "
        f"{len(results)} faults: {', '.join(f'{faults[word]} {word}' for word in words)}."
    )


def page(results: Results, faults: Mapping[str, Fault], main: str, peer: str) -> str:
    """Returns the page for people."""
    own, other = results.of(main), results.programs.get(peer, {})
    facts = results.facts
    lines = [
        "# Faults",
        "",
        "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}, torch {torch}, Python {python}, "
        "phalanx {phalanx} ({commit}), {date}. `make chaos`; [how to read it](../../docs/guides/chaos.md)".format(
            **facts
        ),
        "",
        summary(own),
        "",
        f"Without a fault: {control_line(results.controls.get(main, {}))}",
        "",
        "## By class",
        "",
        "| class | fault | verdict | slowest detection s | back in training s | steps lost | worst of it |",
        "|---|---|---|---|---|---|---|",
        *(_class_row(number, of_class) for number, of_class in by_class(own).items()),
        "",
        "Seconds and steps are the largest of the class's faults.",
        "",
        "## Not survived",
        "",
        *(_not_survived(own) or ["Every fault was survived."]),
        "",
        "## Every fault",
        "",
        "| fault | injection | verdict | detected s | back s | lost steps | exit | weights | remarks |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_fault_row(faults[key], result) for key, result in own.items() if key in faults),
    ]
    if other:
        lines += ["", f"## The same faults under {peer}", "", *_beside(own, other, faults, main, peer)]
    return "\n".join(lines) + "\n"


def control_line(controls: Mapping[str, Any]) -> str:
    """Returns what a program's runs without a fault showed."""
    if not controls:
        return "not measured"
    seconds = controls["seconds"]["done {}"]
    return f"two runs have the same bits in every weight and moment; one takes {seconds:.1f} s."


def _class_row(number: int, results: Sequence[Result]) -> str:
    verdict = worst(results)
    bad = [f"{r['name']}: {(r['reasons'] or r['remarks'])[0]}" for r in results
           if r["verdict"] == verdict and (r["reasons"] or r["remarks"])]  # fmt: skip
    cells = [
        str(number),
        CLASSES[number],
        verdict if verdict == SURVIVED else f"**{verdict}**",
        *(_largest(results, name) for name in ("detect_s", "back_s", "steps_lost")),
        _cell(bad[0]) if bad else "",
    ]
    return f"| {' | '.join(cells)} |"


def _largest(results: Sequence[Result], name: str) -> str:
    values = [result[name] for result in results if isinstance(result.get(name), int | float)]
    return f"{max(values):g}" if values else ""


def _fault_row(fault: Fault, result: Result) -> str:
    shown = [result.get(name) for name in ("detect_s", "back_s", "steps_lost", "exit_code")]
    reasons = "; ".join([*result["reasons"], *result["remarks"]])
    cells = [fault.key, fault.what, result["verdict"], *("" if v is None else f"{v:g}" for v in shown)]
    return f"| {' | '.join([*map(_cell, cells), _weights(result), _cell(reasons)])} |"


def _weights(result: Result) -> str:
    difference = result.get("difference")
    if difference is None:
        return "none" if "exit_code" in result else ""
    return "equal" if difference == 0 else f"{difference:.1g}" if isinstance(difference, float) else str(difference)


def _not_survived(results: Mapping[str, Result]) -> list[str]:
    found = []
    for key, result in results.items():
        if result["verdict"] in (LOST, INVALID, SKIPPED):
            found.append(f"- **{key}** ({result['verdict']}): {_cell('; '.join(result['reasons']))}")
        elif result["verdict"] != SURVIVED:
            found.append(f"- {key} ({result['verdict']}): stops; the same command resumes")
    return found


def _beside(
    own: Mapping[str, Result], other: Mapping[str, Result], faults: Mapping[str, Fault], main: str, peer: str
) -> list[str]:
    head = [
        f"| fault | injection | {main} | {peer} | {main}: back s | {peer}: back s | {peer}: remarks |",
        "|---" * 7 + "|",
    ]
    rows = []
    for key, theirs in other.items():
        ours = own.get(key, {})
        back = [f"{r.get('back_s')}" if r.get("back_s") is not None else "" for r in (ours, theirs)]
        cells = [key, faults[key].what, ours.get("verdict", ""), theirs["verdict"], *back, "; ".join(theirs["reasons"])]
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return [f"{peer}: {summary(other)}", "", *head, *rows]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:240]
