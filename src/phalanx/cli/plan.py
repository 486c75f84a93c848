"""`phalanx plan JOB`: the fastest layout that fits, what else was weighed, and why it was chosen."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from phalanx.cli.auto_layout import fixed_of, on_known_devices, worlds_of
from phalanx.cli.files import check_folders, write
from phalanx.cli.job_words import JobVerb, Option
from phalanx.cli.software import OPTIONS, asked
from phalanx.data.progress import stderr_progress
from phalanx.data.vocabulary import vocabulary_size
from phalanx.errors import DoesNotFitError
from phalanx.job.load import LoadedJob
from phalanx.plan import report
from phalanx.plan.plan import Candidate, Plan
from phalanx.plan.question import Question, question_of
from phalanx.plan.search import search

POINTS = 300
"""Layouts of the map of the space."""
LEGIBLE = 120
"""Passes of a rank that a picture of the step shows one by one."""

VERB = JobVerb(
    "plan",
    "The fastest layout that fits, of all that are legal. What the command line sets of the layout is kept, and what a "
    "job file sets beside `auto: true`; the rest of the layout is open. Exit code 3 where nothing fits.",
    switches={},
    options={
        "html": Option(str, "", "write the answer as a page with pictures to a file"),
        "svg": Option(str, "", "write the map of the space, a dot a layout, to a file"),
        "top": Option(int, 10, "show so many layouts at most", at_least=1),
        **OPTIONS,
    },
    auto="always",
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    options = words.options
    pictures = {"html": _page, "svg": _map}
    check_folders(options, *pictures)
    loaded = on_known_devices(words.loaded, measures=True)
    question = asked(_question(loaded), options)
    if told := _told(loaded):
        print(told, file=sys.stderr)
    with stderr_progress() as progress:
        plan = search(question, progress, sample=POINTS if any(options[name] for name in pictures) else 0)
    plan = replace(plan, best=plan.best[: options["top"]])
    for name, drawn in pictures.items():
        if options[name]:
            write(options[name], drawn(plan))
    if "json" in words.switches:
        print(json.dumps(report.as_json(plan), indent=1))
    else:
        print(report.text(plan))
        if files := " and ".join(options[name] for name in pictures if options[name]):
            print(f"\nwritten: {files}")
    return 0 if plan.best else DoesNotFitError.exit_code


def _question(loaded: LoadedJob) -> Question:
    job = loaded.job
    fixed = {name: getattr(job.layout, name) for name in fixed_of(loaded)}
    return replace(question_of(job, vocabulary_size(job), fixed), worlds=worlds_of(job))


def _told(loaded: LoadedJob) -> str:
    """What of the layout is kept, in words; nothing where all is open."""
    layout, kept = loaded.job.layout, fixed_of(loaded)
    if not kept:
        return ""
    if not layout.auto:
        return f"the whole layout is given, {layout.line()}: open is the batch at most"
    said = ",".join(f"{name}={str(getattr(layout, name)).lower()}" for name in kept)
    return f"kept of the layout: {said}; the rest is open"


def _map(plan: Plan) -> str:
    # Here and below, because few ask for it.
    from phalanx.plan.space_picture import space_picture

    return space_picture(plan)


def _page(plan: Plan) -> str:
    from phalanx.plan import page

    return page.html(plan, _timeline(plan.best[0]) if plan.best else None)


def _timeline(best: Candidate) -> str:
    """The picture of the best layout's step; of a long one its beginning and its end."""
    from phalanx.simulate import picture
    from phalanx.simulate.step import simulate

    timeline = simulate(best.case)
    passes = max(map(len, timeline.schedule.programs))
    if passes <= LEGIBLE:
        return picture.svg(timeline)
    part = timeline.seconds * LEGIBLE / 2 / passes
    return picture.svg(timeline, 0, part) + picture.svg(timeline, timeline.seconds - part)
