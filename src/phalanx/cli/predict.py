"""`phalanx predict JOB`: time, memory and traffic of a step on any machine, without that machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.cli.files import check_folders, write
from phalanx.cli.job_words import JobVerb, Option
from phalanx.cli.software import OPTIONS, asked
from phalanx.cost import prediction_picture
from phalanx.cost.breakdown import document, memory_lines, question, time_lines
from phalanx.cost.case import Case
from phalanx.cost.predict import predict
from phalanx.cost.prediction import Prediction
from phalanx.cost.traffic_step import step_traffic
from phalanx.data.progress import stderr_progress
from phalanx.data.vocabulary import vocabulary_size
from phalanx.errors import DoesNotFitError
from phalanx.job.job import Job
from phalanx.plan.advice import advice, shortfall
from phalanx.plan.case import case_of
from phalanx.published import table
from phalanx.units import gib

VERB = JobVerb(
    "predict",
    "Time, memory and traffic of one step of a job, on any machine, without it. Exit code 3 where it does not fit.",
    switches={},
    options={
        "svg": Option(str, "", "write the pictures to a file: time and memory by part, roofline of a block"),
        **OPTIONS,
        "table": Option(str, "", "predict every row of a CSV file of configurations instead of a job"),
        "out": Option(str, "", "table: the CSV file to write; standard output where none is named"),
    },
    auto="measure",
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    if words.options["table"]:
        as_document = "json" in words.switches
        return table.run(words.options["table"], words.options["out"], as_json=as_document, progress=stderr_progress)
    check_folders(words.options, "svg")
    case = asked(case_of(words.job, vocabulary_size(words.job)), words.options)
    prediction = predict(case)
    traffic = _traffic(words.job, case)
    if words.options["svg"]:
        write(words.options["svg"], prediction_picture.svg(case, prediction))
    if "json" in words.switches:
        print(json.dumps(as_json(case, prediction, traffic), indent=1))
    else:
        print(report(case, prediction, traffic))
        if words.options["svg"]:
            print(f"\nwritten: {words.options['svg']}")
    if prediction.fits:
        return 0
    if "json" not in words.switches:
        print(f"\n{shortfall(case)}", file=sys.stderr)
    return DoesNotFitError.exit_code


def _traffic(job: Job, case: Case) -> dict[str, dict[str, float]]:
    """What the first rank sends in a step: the rank whose figure `phalanx train` prints. Nothing for sync=asp, where it
    depends on who is ready."""
    if case.layout.sync == "asp":
        return {}
    train, stages = job.train, case.stages or None
    return step_traffic(
        case.model, case.layout, case.batch, precision=train.precision, gradients=train.gradients, stages=stages
    )


def as_json(case: Case, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The document of `--json` (docs/predict.md)."""
    hints = [] if prediction.fits else [vars(one) for one in advice(case)]
    return {**document(prediction), "traffic_bytes": traffic, "advice": hints}


def report(case: Case, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> str:
    """The figures for a person."""
    low, high = prediction.spread
    step = prediction.step_time_s
    lines = [
        f"{question(case, case.layout.world)}: {case.layout.line()}",
        case.batch.equation(),
        "",
        f"step time: {step:.4g} s ({low * step:.4g} to {high * step:.4g})  "
        f"tps: {prediction.tokens_per_s_per_device:,.0f} a device  tflops: {prediction.tflops_per_device:.1f}  "
        f"mfu: {prediction.mfu:.1%}  hfu: {prediction.hfu:.1%}  bubble: {prediction.bubble:.1%}",
        *time_lines(prediction),
        "",
        *memory_lines(prediction),
    ]
    lines += ["", "traffic a step, sent by the first rank:" if traffic else "traffic: none"]
    for axis, collectives in traffic.items():
        for collective, sent in collectives.items():
            lines.append(f"  {axis:<14} {collective.replace('_', '-'):<16} {gib(sent)}")
    return "\n".join(lines)
