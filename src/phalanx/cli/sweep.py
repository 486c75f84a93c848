"""`phalanx predict JOB --sweep FIELD=A,B,…`: one prediction per combination of values, as a table and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from phalanx.check.load import load_words
from phalanx.cli.auto_layout import planned
from phalanx.config import overrides
from phalanx.cost.breakdown import document, duration, model_name, subject
from phalanx.errors import DoesNotFitError, JobError
from phalanx.units import aligned, gib, listed

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob
    from phalanx.config.job import Job
    from phalanx.config.overrides import CommandLine
    from phalanx.cost.prediction import Prediction

MOST_POINTS = 1000
"""Maximum number of predictions of one sweep."""
_HEAD = ("step time", "tokens/s", "per device", "MFU", "exposed", "bubble", "sent", "peak memory", "")
_LETTERS = 55
"""Letters of labels side by side under a panel."""


@dataclass(frozen=True)
class Point:
    """One combination of values."""

    values: dict[str, str]
    loaded: LoadedJob | None = None
    prediction: Prediction | None = None
    sent: float = 0.0
    """Bytes sent per step by rank 0."""
    problem: str = ""
    """Why there is no prediction."""

    def row(self) -> list[str]:
        one = self.prediction
        if one is None:
            return [*self.values.values(), *[""] * (len(_HEAD) - 1), "refused"]
        cells = (
            duration(one.step_time_s),
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s_per_device:,.0f}",
            f"{one.mfu:.1%}",
            f"{sum(one.parts.exposed.values()) / one.step_time_s:.1%}",
            f"{one.parts.bubble / one.step_time_s:.1%}",
            gib(self.sent),
            gib(one.fullest.peak if one.fits else one.fullest.needed),
            "" if one.verdict == "fits" else one.verdict,
        )
        return [*self.values.values(), *cells]

    def as_dict(self) -> dict[str, Any]:
        if self.prediction is None or self.loaded is None:
            return {"values": self.values, "problem": self.problem}
        layout = self.loaded.job.layout.line()
        return {"values": self.values, "layout": layout, "sent_bytes": self.sent, **document(self.prediction)}


def fields_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each swept field, by its name as given. Values are separated by commas, or by semicolons
    where they contain commas, such as layouts. Raises JobError with every problem."""
    found: dict[str, list[str]] = {}
    problems: list[str] = []
    for text in texts:
        name, equals, listed = text.partition("=")
        values = [value.strip() for value in listed.split(";" if ";" in listed else ",")]
        if not equals or not name or not all(values):
            problems.append(f"--sweep {text}: expected FIELD=A,B,…, such as layout.micro_batch=1,2,4")
        elif name in found:
            problems.append(f"--sweep: {name} is given twice; list its values once")
        elif len(set(values)) < len(values):
            problems.append(f"--sweep {text}: a value is given twice")
        found[name] = values
    count = prod(map(len, found.values()))
    if count > MOST_POINTS:
        problems.append(f"--sweep: {count:,} combinations; at most {MOST_POINTS:,}")
    if problems:
        raise JobError(problems)
    return found


def points(
    texts: Sequence[str],
    subjects: Sequence[str],
    predicted: Callable[[Job], tuple[Prediction, float]],
    progress: Callable[[str, int, int], None],
) -> list[Point]:
    """Returns a point per combination of the values of --sweep, `texts`, for the job of the other words, `subjects`;
    `predicted` predicts one job. Raises JobError if no combination is a legal job, with the reason of each."""
    found, combinations = list[Point](), _combinations(texts)
    for number, values in enumerate(combinations):
        progress("predicting", number, len(combinations))
        try:
            loaded = load_words(_line(subjects, values))
            if loaded.job.layout.auto:
                loaded = planned(loaded, measures=False)
            found.append(Point(values, loaded, *predicted(loaded.job)))
        except (JobError, DoesNotFitError) as error:
            found.append(Point(values, problem="; ".join(str(error).splitlines())))
    if all(point.prediction is None for point in found):
        raise JobError(list(dict.fromkeys(point.problem for point in found)))
    return found


def first_legal(texts: Sequence[str], subjects: Sequence[str]) -> LoadedJob:
    """Returns the first combination that is a legal job, for a job that is none without the swept values. Raises
    JobError with the reason of each."""
    problems = list[str]()
    for values in _combinations(texts):
        try:
            return load_words(_line(subjects, values))
        except JobError as error:
            problems += str(error).splitlines()
    raise JobError(list(dict.fromkeys(problems)))


def _combinations(texts: Sequence[str]) -> list[dict[str, str]]:
    fields = fields_of(texts)
    return [dict(zip(fields, each, strict=True)) for each in product(*fields.values())]


def _line(subjects: Sequence[str], values: Mapping[str, str]) -> CommandLine:
    """Returns the command line of a combination. A swept layout takes the place of the job's, in whatever form that is
    given; fields that are given beside it hold for every layout."""
    line = overrides.parse([*subjects, *(f"{name}={value}" for name, value in values.items())])
    if "layout" in values:
        own = f"command line: layout={values['layout']}"
        whole = {each.origin for each in line.settings if each.implied} - {own}  # implied: a whole layout leaves it out
        kept = [each for each in line.settings if each.origin not in whole]
        line.settings[:] = sorted(kept, key=lambda each: each.origin != own)
    return line


def _subject(found: Sequence[Point]) -> str:
    """Names what the jobs have in common: model and machine, or the model."""
    jobs = [point.loaded.job for point in found if point.loaded is not None]
    for name in (lambda job: subject(job, job.layout.world), lambda job: model_name(job.model)):
        names = {name(job) for job in jobs}
        if len(names) == 1:
            return names.pop()
    return f"{len(jobs)} jobs"


def text(found: Sequence[Point]) -> str:
    """Returns the table, and below it why combinations were refused."""
    names = [name.rpartition(".")[2] for name in found[0].values]
    sides = "l" * len(names) + "r" * (len(_HEAD) - 1)
    refused: dict[str, list[str]] = {}
    for point in found:
        if point.problem:
            refused.setdefault(point.problem, []).append(
                " ".join(f"{name}={value}" for name, value in point.values.items())
            )
    rows = aligned([[*names, *_HEAD], *(point.row() for point in found)], sides)
    reasons = [f"refused: {listed(combinations, 3)}: {problem}" for problem, combinations in refused.items()]
    return "\n".join([_subject(found), "", *rows, *([""] if reasons else []), *reasons])


def picture(found: Sequence[Point]) -> str:
    """Returns tokens per second per device and peak memory over the values of the first field, as an SVG document: one
    line per combination of the others, and a dot where the job fits in memory."""
    from phalanx.pictures.panels import Panel, panels_svg  # rarely asked for

    name, *others = found[0].values
    order = list(dict.fromkeys(point.values[name] for point in found))
    every = ceil(len(order) * (1 + max(map(len, order))) / _LETTERS)
    marks = [(float(place), value) for place, value in enumerate(order) if place % every == 0]
    figures: dict[str, Callable[[Prediction], float]] = {
        "tokens/s per device": lambda one: one.tokens_per_s_per_device,
        "peak memory (GiB)": lambda one: one.fullest.needed / 2**30,
    }
    panels: list[Panel] = []
    for title, figure in figures.items():
        lines, dots = (
            defaultdict[str, list[tuple[float, float]]](list),
            defaultdict[str, list[tuple[float, float]]](list),
        )
        for point in found:
            if point.prediction is not None:
                line = ", ".join(f"{other.rpartition('.')[2]}={point.values[other]}" for other in others) or "predicted"
                place = float(order.index(point.values[name])), figure(point.prediction)
                lines[line].append(place)
                if point.prediction.fits:
                    dots[line].append(place)
        panels.append(Panel(title, name.rpartition(".")[2], title, lines, dots=dots, x_marks=marks))
    return panels_svg(f"{_subject(found)} (no dot: does not fit)", panels)
