"""`phalanx predict JOB`: time, memory and traffic of a step on any machine, without that machine."""

from __future__ import annotations

import sys
from typing import Any, Literal

from phalanx.blocks.parameters import count, count_active, count_trained, trained_text
from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.option import Option
from phalanx.cli.predicting import OPTIONS, TOKENS, asked, asked_cost, calibration_document
from phalanx.cli.verb import Words, job_verb
from phalanx.cost.breakdown import document, memory_lines, slow_format, subject, time_lines
from phalanx.cost.job_spec import step_spec
from phalanx.cost.money import Prices
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.data.files import stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import DoesNotFitError, JobError
from phalanx.pictures import context as context_picture
from phalanx.pictures import layout as layout_picture
from phalanx.pictures import prediction as prediction_picture
from phalanx.plan.page import advice, shortfall
from phalanx.report.figures import rank_traffic
from phalanx.units import gib
from phalanx.validation import table

VERB = job_verb(
    "predict",
    "Predicts time, memory and traffic of one step of a job on any machine, from formulas.",
    (
        ("predict model=llama3-8b cluster=dgx-h100 dp_shard=8 precision=bf16", "one layout"),
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
        "tokens": TOKENS,
        "table": Option(str, "", "predict every row of a CSV file of configurations instead of one job", value="FILE"),
        "out": Option(str, "", "with --table: the CSV file to write (default: standard output)", value="FILE"),
    },
    exits={3: "the job does not fit in memory"},
    auto="measure",
)


@VERB.runs
def run(words: Words) -> int:
    options, job = words.options, words.job
    if options["table"]:
        prices = Prices(job.cluster, options["tokens"])
        return table.run(options["table"], options["out"], prices, as_json=words.as_json, progress=stderr_progress)
    if options["picture"] != "prediction" and not options["svg"]:
        raise JobError(f"--picture {options['picture']} says what --svg draws: name a file, such as --svg step.svg")
    files = OutputFiles.of(words, "svg")
    spec = asked(step_spec(job, vocabulary_size(job)), options)
    prediction = predict(spec)
    traffic = rank_traffic(job, spec)
    pictures = {
        "prediction": lambda: prediction_picture.svg(spec, prediction),
        "layout": lambda: layout_picture.svg(job, spec.model.vocab_size),
        "context": lambda: context_picture.svg(job),
        "recompute": lambda: prediction_picture.recompute_svg(job, spec),
    }
    files.write({"svg": pictures[options["picture"]]})
    calibration = calibration_document(job.cluster, job.layout.world)
    document = {**as_json(spec, prediction, traffic), "calibration": calibration}
    text = report(spec, prediction, traffic)
    if cost := asked_cost(job, prediction.devices, prediction.tokens_per_s, options["tokens"]):
        document["run"], text = cost.as_dict(), f"{text}\n\n{cost.line()}"
    words.show(document, text)
    files.tell()
    if prediction.fits:
        return 0
    if not words.as_json:
        echo(f"\n{shortfall(spec)}", file=sys.stderr, wrap=True)
    return DoesNotFitError.exit_code


def as_json(spec: StepSpec, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns the document of `--json` (docs/guides/predict.md)."""
    hints = [] if prediction.fits else [vars(one) for one in advice(spec)]
    sizes = {"parameters": count(spec.model), "active_parameters": count_active(spec.model)}
    if spec.model.lora.rank:
        sizes["trained_parameters"] = count_trained(spec.model)
    return {
        **document(prediction),
        **sizes,
        "traffic_bytes": traffic,
        "advice": hints,
        "notes": [*filter(None, [slow_format(spec)])],
    }


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
        f"interval: {prediction.sure}",
        "",
        *memory_lines(prediction),
    ]
    if slow := slow_format(spec):
        lines.insert(2, f"precision: {slow}")
    lines += ["", "bytes sent per step by rank 0:" if traffic else "bytes sent per step by rank 0: none"]
    for axis, collectives in traffic.items():
        for collective, sent in collectives.items():
            lines.append(f"  {axis:<14} {collective.replace('_', '-'):<16} {gib(sent)}")
    return "\n".join(lines)
