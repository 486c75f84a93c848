"""`phalanx predict JOB`: time, memory and traffic of a step on any machine, without that machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from phalanx.blocks.parameters import count, count_active, count_trained, trained_text
from phalanx.cli.calibration import calibration_document
from phalanx.cli.files import DARK, check_folders, wants_dark, write
from phalanx.cli.framework import OPTIONS, asked
from phalanx.cli.job_words import JobVerb
from phalanx.cli.option import Option
from phalanx.config.job import Job
from phalanx.cost.breakdown import document, memory_lines, subject, time_lines
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.data.progress import stderr_progress
from phalanx.data.vocabulary import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import DoesNotFitError, JobError
from phalanx.pictures import context as context_picture
from phalanx.pictures import layout as layout_picture
from phalanx.pictures import prediction as prediction_picture
from phalanx.pictures import recompute as recompute_picture
from phalanx.plan.page import advice, shortfall
from phalanx.report.expected import rank_traffic
from phalanx.units import gib
from phalanx.validation import table

VERB = JobVerb(
    "predict",
    "Predicts time, memory and traffic of one step of a job on any machine, from formulas.",
    (
        ("predict model=llama3-8b cluster=dgx-h100 dp_shard=8 global_batch=16", "one layout"),
        ("predict job.yaml --svg step.svg", "with a picture"),
    ),
    switches=DARK,
    options={
        "svg": Option(str, "", "write a picture", value="FILE"),
        "picture": Option(
            Literal["prediction", "layout", "context", "recompute"],
            "prediction",
            "svg: time and memory by part with the roofline of a block; or which rank holds which part of the "
            "parameters (layout); or which tokens each context-parallel rank holds and computes (context); or time "
            "against memory for every recomputation (recompute)",
        ),
        **OPTIONS,
        "table": Option(str, "", "predict every row of a CSV file of configurations instead of one job", value="FILE"),
        "out": Option(str, "", "with --table: the CSV file to write (default: standard output)", value="FILE"),
    },
    exits={3: "the job does not fit in memory"},
    auto="measure",
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    if words.options["table"]:
        as_document = "json" in words.switches
        return table.run(words.options["table"], words.options["out"], as_json=as_document, progress=stderr_progress)
    _check_picture(words.options)
    dark = wants_dark(words.switches, words.options, "svg")
    spec = asked(step_spec(words.job, vocabulary_size(words.job)), words.options)
    prediction = predict(spec)
    traffic = rank_traffic(words.job, spec)
    if words.options["svg"]:
        write(words.options["svg"], _picture(words.options["picture"], words.job, spec, prediction), dark)
    if "json" in words.switches:
        calibration = calibration_document(words.job.cluster, words.job.layout.world)
        echo(json.dumps({**as_json(spec, prediction, traffic), "calibration": calibration}, indent=1))
    else:
        echo(report(spec, prediction, traffic), wrap=True)
        if words.options["svg"]:
            echo(f"\nwritten: {words.options['svg']}")
    if prediction.fits:
        return 0
    if "json" not in words.switches:
        echo(f"\n{shortfall(spec)}", file=sys.stderr, wrap=True)
    return DoesNotFitError.exit_code


def _check_picture(options: Mapping[str, Any]) -> None:
    """Raises JobError if a picture is asked for without a file to write it to."""
    if options["picture"] != "prediction" and not options["svg"]:
        raise JobError(f"--picture {options['picture']} says what --svg draws: name a file, such as --svg step.svg")
    check_folders(options, "svg")


def _picture(name: str, job: Job, spec: StepSpec, prediction: Prediction) -> str:
    if name == "layout":
        return layout_picture.svg(job, spec.model.vocab_size)
    if name == "context":
        return context_picture.svg(job)
    if name == "recompute":
        return recompute_picture.svg(job, spec)
    return prediction_picture.svg(spec, prediction)


def as_json(spec: StepSpec, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns the document of `--json` (docs/predict.md)."""
    hints = [] if prediction.fits else [vars(one) for one in advice(spec)]
    sizes = {"parameters": count(spec.model), "active_parameters": count_active(spec.model)}
    if spec.model.lora.rank:
        sizes["trained_parameters"] = count_trained(spec.model)
    return {**document(prediction), **sizes, "traffic_bytes": traffic, "advice": hints}


def report(spec: StepSpec, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> str:
    """Returns the figures as text."""
    low, high = prediction.spread
    step = prediction.step_time_s
    lines = [
        f"{subject(spec, spec.layout.world)}: {spec.layout.line()}",
        spec.batch.equation(),
        *([f"adapters train {trained_text(spec.model)}"] if spec.model.lora.rank else []),
        "",
        f"step time: {step:.4g} s ({low * step:.4g} to {high * step:.4g})  "
        f"tps: {prediction.tokens_per_s_per_device:,.0f}  tps_total: {prediction.tokens_per_s:,.0f}  "
        f"tflops: {prediction.tflops_per_device:.1f}  mfu: {prediction.mfu:.1%}  hfu: {prediction.hfu:.1%}  "
        f"bubble: {prediction.bubble:.1%}",
        *time_lines(prediction),
        "",
        *memory_lines(prediction),
    ]
    lines += ["", "bytes sent per step by rank 0:" if traffic else "bytes sent per step by rank 0: none"]
    for axis, collectives in traffic.items():
        for collective, sent in collectives.items():
            lines.append(f"  {axis:<14} {collective.replace('_', '-'):<16} {gib(sent)}")
    return "\n".join(lines)
