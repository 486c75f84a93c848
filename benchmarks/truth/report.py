"""The accuracy report: tables as text, and numbers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.truth.grades import Errors, GradedRow, baseline, by, errors, ranking, verdicts

Table = list[tuple[str, ...]]

HEAD = (
    *(
        "",
        "rows",
        "time median",
        "p90",
        "bias",
        "inside",
        "constant: median",
        "p90",
        "memory rows",
        "median",
        "p90",
        "bias",
    ),
    *("groups", "tau", "regret", "worst"),
)


def judged(found: Sequence[GradedRow]) -> list[GradedRow]:
    """Returns the rows that no constant was fitted to."""
    return [outcome for outcome in found if not outcome.calibration]


def table(found: Sequence[GradedRow], key: Callable[[GradedRow], str]) -> Table:
    """Returns one line per group of outcomes and one for all. Calibration rows count in no error, but in the ranking of
    their groups."""
    lines: Table = [HEAD]
    for name, group in by(found, key).items():
        lines.append(_line(name, group))
    lines.append(_line("all", found))
    return lines


def calibrated(found: Sequence[GradedRow]) -> Table:
    """Returns the calibration rows by family, with their errors after the fit."""
    lines: Table = [("family", "rows", "time median", "p90", "bias")]
    for name, group in by([row for row in found if row.calibration], lambda row: row.family).items():
        lines.append((name, str(len(group)), *_percents(errors(row.time_error for row in group))))
    return lines


def confusion(found: Sequence[GradedRow]) -> Table:
    """Returns the verdicts on memory against the outcomes."""
    counts = verdicts(found)
    return [
        ("", "predicted to fit", "predicted not to fit"),
        ("ran", str(counts.ran_said), str(len(counts.ran_refused))),
        ("out of memory", str(len(counts.oom_missed)), str(counts.oom_said)),
    ]


def as_dict(found: Sequence[GradedRow], refused: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns all figures for JSON, without the rows."""
    return {
        "rows": len(found) + len(refused),
        "refused": dict(refused),
        "sources": {name: _figures(group) for name, group in by(found, lambda row: row.source).items()},
        "families": {name: _figures(group) for name, group in by(found, lambda row: row.family).items()},
        "memory_verdicts": asdict(verdicts(found)),
        "calibration": [row.row_id for row in found if row.calibration],
    }


def markdown(lines: Table) -> str:
    """Formats a table; the first line is its head."""
    head, *rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows])


def _figures(group: Sequence[GradedRow]) -> dict[str, Any]:
    tested = judged(group)
    found = {
        "time": errors(row.time_error for row in tested),
        "constant_efficiency": errors(_constants(tested)),
        "memory": errors(row.memory_error for row in tested),
        "ranking": ranking(group),
    }
    known = {name: asdict(value) for name, value in found.items() if value}
    return known if (share := coverage(tested)) is None else {**known, "inside": share}


def _constants(group: Sequence[GradedRow]) -> list[float]:
    """Returns the errors of one constant efficiency for each source and device."""
    parts = by(group, lambda row: f"{row.source} {row.family.split()[0]}").values()
    return [error for part in parts for error in baseline(part)]


def _line(name: str, group: Sequence[GradedRow]) -> tuple[str, ...]:
    tested = judged(group)
    times, memory, ranks = (
        errors(row.time_error for row in tested),
        errors(row.memory_error for row in tested),
        ranking(group),
    )
    constant = _percents(errors(_constants(tested)))[:2]
    order = ("", "", "", "")
    if ranks:
        regrets = f"{100 * ranks.regret:.1f} %", f"{100 * ranks.worst_regret:.1f} %"
        order = (str(ranks.groups), f"{ranks.tau:.2f}", *regrets)
    return (
        name,
        _count(times),
        *_percents(times),
        _inside(tested),
        *constant,
        _count(memory),
        *_percents(memory),
        *order,
    )


def coverage(group: Sequence[GradedRow]) -> float | None:
    """Returns the share of the measurements inside the predicted interval; None without any."""
    inside = [row.inside for row in group if row.inside is not None]
    return sum(inside) / len(inside) if inside else None


def _inside(group: Sequence[GradedRow]) -> str:
    share = coverage(group)
    return "" if share is None else f"{share:.0%}".replace("%", " %")


def _count(found: Errors | None) -> str:
    return str(found.n) if found else ""


def _percents(found: Errors | None) -> tuple[str, str, str]:
    if found is None:
        return "", "", ""
    return f"{100 * found.median:.1f} %", f"{100 * found.p90:.1f} %", f"{100 * found.bias:+.1f} %"
