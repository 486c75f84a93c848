"""`phalanx plan JOB`: the fastest layout that fits, the alternatives, and the reasons for the choice."""

from __future__ import annotations

import sys
from dataclasses import replace

from phalanx.check.load import LoadedJob
from phalanx.cli.auto_layout import fixed_of, on_known_devices, worlds_of
from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.help_page import MOST_COLUMNS
from phalanx.cli.option import Option
from phalanx.cli.predicting import OPTIONS, TOKENS, asked, asked_cost, calibration_document, check_calibration
from phalanx.cli.verb import Words, job_verb
from phalanx.cost.breakdown import subject
from phalanx.data.files import stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo, terminal_columns
from phalanx.errors import DoesNotFitError
from phalanx.plan import page as report
from phalanx.plan.plan import Candidate, Plan
from phalanx.plan.planner import search
from phalanx.plan.simplicity import EQUAL
from phalanx.plan.space import plan_request

MAP_POINTS = 300
"""Number of layouts in the map of the space."""
MAX_DRAWN_PASSES = 120
"""Passes per rank up to which a picture shows the whole step."""

VERB = job_verb(
    "plan",
    "Finds the fastest legal layout that fits in memory. Layout fields set on the command line, or beside `auto: true` "
    "in a job file, stay fixed; the planner chooses the others.",
    (
        ("plan model=llama3-8b cluster=dgx-h100:1 precision=bf16", "on a machine that you do not have"),
        ("plan job.yaml --html plan.html", "with pictures"),
    ),
    switches={**DARK, "exotic": "take the fastest layout found, not the simplest of those that count as equally fast"},
    options={
        "html": Option(str, "", "write the plan as an HTML page with pictures", value="FILE"),
        "svg": Option(str, "", "write a map of the search space, one dot per layout", value="FILE"),
        "top": Option(int, 10, "number of layouts to show", at_least=1),
        **OPTIONS,
        "tokens": TOKENS,
    },
    exits={3: "no layout fits"},
    auto="always",
)


@VERB.runs
def run(words: Words) -> int:
    files = OutputFiles.of(words, "html", "svg")
    loaded = on_known_devices(words.loaded, measures=True)
    cluster = loaded.job.cluster
    check_calibration(cluster, cluster.devices)
    fixed = {name: getattr(loaded.job.layout, name) for name in fixed_of(loaded)}
    request = plan_request(loaded.job, vocabulary_size(loaded.job), fixed)
    request = asked(replace(request, worlds=worlds_of(loaded.job)), words.options)
    if "exotic" in words.switches:
        request = replace(request, band=EQUAL)
    if told := _fixed_note(loaded):
        echo(told, file=sys.stderr)
    with stderr_progress() as progress:
        plan = search(request, progress, sample=MAP_POINTS if files.paths else 0)
    plan = replace(plan, best=plan.best[: words.options["top"]])
    files.write({"html": lambda: _page(plan), "svg": lambda: _map(plan)})
    document = {**report.as_json(plan), "calibration": calibration_document(cluster, cluster.devices)}
    text = report.text(plan, min(terminal_columns(sys.stdout) or report.WIDTH, MOST_COLUMNS))
    for best in plan.best[:1]:
        devices = best.prediction.devices
        if cost := asked_cost(loaded.job, devices, best.tokens_per_s, words.options["tokens"]):
            document["run"], text = cost.as_dict(), f"{text}\n\n{cost.line()}"
    words.show(document, text)
    files.tell()
    return 0 if plan.best else DoesNotFitError.exit_code


def _fixed_note(loaded: LoadedJob) -> str:
    """Returns a sentence about the fixed fields of the layout; nothing if all are open."""
    layout, kept = loaded.job.layout, fixed_of(loaded)
    if not kept:
        return ""
    if not layout.auto:
        return f"fixed: the whole layout, {layout.line()}; the planner chooses at most the batch"
    said = ",".join(f"{name}={str(getattr(layout, name)).lower()}" for name in kept)
    return f"fixed layout fields: {said}; the planner chooses the others"


def _map(plan: Plan) -> str:
    # Imported here and below, because it is rarely asked for.
    from phalanx.pictures.plan_page import space_picture

    return space_picture(plan)


def _page(plan: Plan) -> str:
    from phalanx.pictures import plan_page

    return plan_page.html(plan, _timeline(plan.best[0]) if plan.best else None)


def _timeline(best: Candidate) -> str:
    """Returns the picture of the best layout's step; of a long one its beginning and its end."""
    from phalanx.pictures import timeline as timeline_picture
    from phalanx.simulate.step import simulate

    timeline, about = simulate(best.spec), subject(best.spec, best.spec.layout.world)
    passes = max(map(len, timeline.schedule.programs))
    if passes <= MAX_DRAWN_PASSES:
        return timeline_picture.svg(timeline, about=about)
    part = timeline.seconds * MAX_DRAWN_PASSES / 2 / passes
    windows = ((0, part), (timeline.seconds - part, None))
    return "".join(timeline_picture.svg(timeline, *window, about) for window in windows)
