"""The verbs that predict: `phalanx plan JOB`, the fastest layout that fits; `phalanx predict JOB`, time, memory and
traffic of a step; `phalanx simulate JOB`, its events on every pipeline rank, and the time that a job loses to failures.
All work on any machine, without it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Any, Literal

from phalanx.axes.catalogue import unbalanced
from phalanx.blocks.parameters import count, count_active, count_trained, train_flops_per_step, trained_text
from phalanx.check.job import optimizer_problems
from phalanx.check.load import RESOLVED, LoadedJob
from phalanx.cli import foreign, sweep
from phalanx.cli.auto_layout import calibration_document, check_calibration, on_known_devices, request_of, worlds_of
from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import FROM, MOST_COLUMNS, Option, Words, flag_of, job_verb
from phalanx.config import values
from phalanx.config.job import Job, Optimizer
from phalanx.cost.breakdown import completions_line, document, duration, memory_lines, slow_format, subject, time_lines
from phalanx.cost.communication import place
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, calibrated
from phalanx.cost.job_spec import step_spec
from phalanx.cost.money import FIGURES, Prices, amount, is_asked, run_cost, tokens_of
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.cost.state_formulas import by_stage
from phalanx.data.documents import Asked, with_documents
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo, terminal_columns
from phalanx.errors import DoesNotFitError, JobError
from phalanx.gc import gc_paused
from phalanx.nearest import did_you_mean
from phalanx.optimizers.catalogue import state_bytes_of
from phalanx.partition.derived import PARAMETER_BYTES, slices_of, solve
from phalanx.partition.document_sample import MEANS, DocumentSample, imbalances
from phalanx.partition.ramp import assumption
from phalanx.plan import page as plan_text
from phalanx.plan.page import advice, shortfall
from phalanx.plan.plan import Candidate, Plan
from phalanx.plan.planner import search
from phalanx.plan.simplicity import EQUAL
from phalanx.simulate import goodput, slices
from phalanx.simulate.goodput import LLAMA_3_RATE, Goodput, best
from phalanx.simulate.step import AXES, Disturbance, Figures, check, figures, simulate
from phalanx.simulate.timeline import Timeline
from phalanx.units import aligned, figure, gib

if TYPE_CHECKING:
    from phalanx.plan.space import PlanRequest


def _known_framework(name: str) -> str:
    if name not in FRAMEWORKS:
        raise ValueError(f"{name!r} is not known{did_you_mean(name, FRAMEWORKS)} (known: {', '.join(FRAMEWORKS)})")
    return name


OPTIONS = {
    "products": Option(
        "number format of the matrix products in blocks; job: that of train.precision",
        "job",
        Literal["job", "bf16", "fp8", "fp4"],
    ),
    "framework": Option(
        f"predict another training framework: {', '.join(FRAMEWORKS)}", PHALANX.name, read=_known_framework
    ),
}
TOKENS = Option(
    "print what a run of so many tokens costs, such as 15T or 300B: device hours, and price, kWh and kg CO2 where "
    "cluster.price_per_device_hour, power_w and carbon_g_per_kwh are known (0: those of train.steps, if one is set)",
    0.0,
    read=amount,
)


def _show(
    words: Words,
    files: OutputFiles,
    document: dict[str, Any],
    text: str,
    job: Job,
    world: int,
    costs: tuple[int, float] | None = None,
) -> None:
    """Prints a prediction for `world` devices with the quality of their measurements, and, if something asks for it,
    what the run of --tokens costs on so many devices at so many tokens per second (`costs`)."""
    document = {**document, "calibration": calibration_document(job.cluster, world)}
    if costs is not None:
        tokens = words.options["tokens"]
        if is_asked(job.cluster, tokens):
            cost = run_cost(job.cluster, costs[0], tokens_of(job, tokens), costs[1])
            document["run"], text = cost.as_dict(), f"{text}\n\n{cost.line()}"
    if ramps := assumption(job):
        document["ramps"] = ramps
        echo(f"phalanx: {ramps}", file=sys.stderr, wrap=True)
    words.show(document, text)
    files.tell()


def asked(about: Asked, words: Words, job: Job) -> Asked:
    """Returns the spec or request of a job with the documents of its data, and with the changes of the options, or of
    the file of --from."""
    options, about = words.options, with_documents(about, job)
    if words.theirs is not None and "framework" not in words.stated:
        about = replace(about, **foreign.changes(about, words.theirs))
        return about if options["products"] == "job" else replace(about, products=options["products"])
    name, products = options["framework"], options["products"]
    framework = calibrated(name, about.cluster.accelerator) if name != PHALANX.name else about.framework
    return replace(about, framework=framework, products=about.products if products == "job" else products)


VERB = job_verb(
    "predict",
    "Predicts time, memory and traffic of one step of a job on any machine, from formulas.",
    (
        ("predict model=llama3-8b cluster=dgx-h100 dp_shard=8 precision=bf16", "one layout"),
        ("predict job.yaml --sweep micro_batch=1,2,4 --svg step.svg", "one prediction per value, with a picture"),
    ),
    switches=DARK,
    options={
        "svg": Option("write a picture", value="FILE"),
        "picture": Option(
            "svg: time and memory by part with the roofline of a block; or which rank holds which part of the "
            "parameters (layout); or which tokens each context-parallel rank holds and computes (context); or time "
            "against memory for every recomputation (recompute); or TeraPipe's slices, of equal and of unequal length "
            "(slices)",
            "prediction",
            Literal["prediction", "layout", "context", "recompute", "slices"],
            beside=("svg",),
        ),
        **OPTIONS,
        "tokens": TOKENS,
        "largest": Option(
            "print, instead of a step, the largest model whose state fits into so many GB (10^9 bytes) on each of the "
            "job's data ranks, by ZeRO stage and by the formats of the optimizer's state",
            0.0,
            value="GB",
        ),
        "sweep": Option(
            "predict every combination of the values of one or more fields, such as micro_batch=1,2,4 "
            "recompute=none,full, as a table; svg: tokens/s and memory over the first field",
            (),
            str,
            many=True,
            like=r"[^-/]*=",
            value="FIELD=A,B",
        ),
        **FROM,
        "table": Option("predict every row of a CSV file of configurations instead of one job", value="FILE"),
        "out": Option("with --table: the CSV to write (default: standard output)", value="FILE", beside=("table",)),
    },
    exits={2: "the job, or every row of --table, is refused, or bad usage", 3: "the job does not fit in memory"},
    auto="measure",
)


@VERB.runs
def run(words: Words) -> int:
    options, job = words.options, words.job
    if options["sweep"]:
        return _swept(words)
    if options["table"]:
        prices = Prices(job.cluster, options["tokens"])
        _check_of_table(words)
        from phalanx.validation import table

        return table.run(options["table"], options["out"], prices, as_json=words.as_json, progress=stderr_progress)
    if options["largest"]:
        _check_alone(words, "largest", words.stated - {"largest", *FROM})
        words.show(*_largest(job, options["largest"]))
        return 0
    files = OutputFiles.of(words, "svg")
    spec = asked(step_spec(job, vocabulary_size(job)), words, job)
    prediction = predict(spec)
    traffic = _traffic(job, spec)
    sliced = job.layout.pp > 1 and slices_of(job.layout) > 1
    cuts = slices.compared(slices.slice_times(spec), slices_of(job.layout)) if sliced else {}
    if options["picture"] == "slices" and not cuts:
        raise JobError("--picture slices draws a pipeline with slices of sequences: set pp and schedule=terapipe")
    # Here, because plan and simulate draw others.
    from phalanx.pictures import context as context_picture
    from phalanx.pictures import layout as layout_picture
    from phalanx.pictures import prediction as prediction_picture
    from phalanx.pictures.schedule import slices_svg

    pictures = {
        "slices": lambda: slices_svg(cuts, subject(spec, spec.layout.world)),
        "prediction": lambda: prediction_picture.svg(spec, prediction),
        "layout": lambda: layout_picture.svg(job, spec.model.vocab_size),
        "context": lambda: context_picture.svg(job),
        "recompute": lambda: prediction_picture.recompute_svg(job, spec),
    }
    files.write({"svg": pictures[options["picture"]]})
    costs = prediction.devices, prediction.tokens_per_s
    document, text = as_json(spec, prediction, traffic), report(spec, prediction, traffic)
    if cuts:
        document["slices"] = {name: {**vars(cut), "latency_s": cut.latency} for name, cut in cuts.items()}
        text = "\n".join([text, "", *slices.lines(cuts)])
    if spec.documents is not None:
        found, said = _documents(job, spec, spec.documents)
        document |= found
        text = "\n".join([text, "", *said])
    if words.theirs is not None:
        document["from"] = foreign.document(words.theirs, spec.framework.name)
        text = "\n".join([text, "", *foreign.lines(words.theirs, spec.framework.name, words.loaded)])
    _show(words, files, document, text, job, job.layout.world, costs)
    if prediction.fits:
        return 0
    if not words.as_json:
        echo(f"\n{shortfall(spec)}", file=sys.stderr, wrap=True)
    return DoesNotFitError.exit_code


def _documents(job: Job, spec: StepSpec, sample: DocumentSample) -> tuple[dict[str, Any], list[str]]:
    """Returns the documents of a prediction, as fields of `--json` and as lines: how much of attention they leave, and
    how cp ranks share them; where their lengths are not known, of two examples."""
    model, found, said = spec.model, dict[str, Any](), list[str]()
    if sample.lengths:
        samples = {"documents": sample}
        pairs, mean = sample.share_of_pairs(model), sum(sample.lengths) / len(sample.lengths)
        full, causal = (train_flops_per_step(model, spec.batch.global_batch, attention=of) for of in ("full", "causal"))
        flops = causal - (1 - pairs) * (full - causal)
        of_one = place(spec, replace(spec.layout, dp_shard=1, dp_replicate=1)).work
        work, found["documents"] = place(spec).work, {"mean_tokens": mean, "share_of_pairs": pairs, "flops": flops}
        source = "log-normal lengths" if job.data.document_tokens else "the prepared data"
        said += [
            f"documents: {mean:,.0f} tokens on average where sequences cut them ({source})",
            f"  attention: {pairs:.1%} of the pairs of whole sequences; {flops:.3g} FLOPs per step, where mfu counts "
            f"{full:.3g}",
        ]
        if work and of_one and spec.layout.data_ranks > 1:
            found["documents"]["dp_imbalance"] = most = work.windows[0].pairs / of_one.windows[0].pairs
            said += [f"  data ranks: they wait for one with {most:.2f} × the mean of the pairs"]
    else:
        samples = {name: DocumentSample.example(model.seq_len, mean * model.seq_len) for name, mean in MEANS.items()}
        said += [
            "documents: lengths not known, so seconds and bytes are those of whole sequences; data.document_tokens=N, "
            "or prepared data, tell them"
        ]
    if unbalanced(job):
        return found, said
    sequences = spec.batch.micro_batch
    found["cp_imbalance"] = {name: imbalances(model, job.layout, sequences, each) for name, each in samples.items()}
    for name, each in found["cp_imbalance"].items():
        mean = f", with a mean of 1/{1 / MEANS[name]:.0f} of a sequence" if name in MEANS else ""
        said.append(
            f"  cp ranks{mean}: the fullest has {each['documents']:.2f} × the mean of the pairs "
            f"({each['position']:.2f} × by position); {each['skipped']:.0%} of the micro-batches exchange nothing"
        )
    return found, said


def _check_of_table(words: Words) -> None:
    """Raises JobError for words that a table's rows leave without an effect: all but what a run costs."""
    _check_alone(words, "table", words.stated - {"table", "out", "tokens"})
    counted = {f"cluster.{name}" for name in FIGURES} if words.options["tokens"] else set[str]()
    stated = (origin for path, origin in words.loaded.origins.items() if path not in counted)
    idle = dict.fromkeys(origin for origin in stated if not origin.startswith(RESOLVED))
    if idle:
        why = "no effect with --table, but for prices, power and carbon with --tokens"
        raise JobError([f"{origin}: {why}" for origin in idle])


def _check_alone(words: Words, option: str, clashing: Collection[str]) -> None:
    if clashing:
        raise JobError(f"--{option} excludes {', '.join(map(flag_of, sorted(clashing)))}")


def _traffic(job: Job, spec: StepSpec) -> dict[str, dict[str, float]]:
    from phalanx.report.figures import rank_traffic  # with the records of runs, which planning does without

    return rank_traffic(job, spec)


def _swept(words: Words) -> int:
    """Predicts the combinations of --sweep."""
    _check_alone(words, "sweep", words.stated & {"from", "ignore", "largest", "out", "picture", "table", "tokens"})
    files = OutputFiles.of(words, "svg")

    def predicted(job: Job) -> tuple[Prediction, float]:
        spec = asked(step_spec(job, vocabulary_size(job)), words, job)
        sent = (size for collectives in _traffic(job, spec).values() for size in collectives.values())
        return predict(spec), sum(sent)

    with stderr_progress() as progress:
        found = sweep.points(words.options["sweep"], words.subjects, predicted, progress)
    files.write({"svg": lambda: sweep.picture(found)})
    words.show({"points": [point.as_dict() for point in found]}, sweep.text(found), wrap=False)
    files.tell()
    return 0 if any(point.prediction and point.prediction.fits for point in found) else DoesNotFitError.exit_code


def _states(job: Job) -> list[Optimizer]:
    """Returns the job's optimizer, and it with every legal format of its state."""
    formats = ((state, master) for master in ("fp32", "none") for state in ("fp32", "bf16", "8bit"))
    every = [job.optimizer, *(replace(job.optimizer, state=state, master=master) for state, master in formats)]
    return [each for each in dict.fromkeys(every) if not [*optimizer_problems(replace(job, optimizer=each))]]


def _variants(request: PlanRequest, job: Job, what: str) -> list[PlanRequest]:
    """Returns the request, and it with everything else that --allow lets the planner choose."""
    if what == "states":
        return [request, *(replace(request, optimizer=each) for each in _states(job)[1:])]
    if what == "compression" and "compression" not in request.fixed:
        forms = [{**request.fixed, "compression": form} for form in ("int8", "int4", "powersgd")]
        return [request, *(replace(request, fixed=fixed) for fixed in forms)]
    return [request]


def _variant(request: PlanRequest, what: str) -> dict[str, str]:
    """Returns the fields in which the requests of `_variants` differ."""
    if what == "states":
        return {"state": request.optimizer.state, "master": request.optimizer.master}
    return {"compression": request.fixed.get("compression", "none")}


def _largest(job: Job, gigabytes: float) -> tuple[dict[str, Any], str]:
    """Returns the document and the text of --largest."""
    if gigabytes < 0:
        raise JobError("--largest: the memory of a device in GB must be above 0, such as --largest 80")
    width, ranks = PARAMETER_BYTES[job.train.precision], job.layout.data_ranks
    gradient, whole = 4 if job.train.gradients == "fp32" else width, (4096, 4096)
    forms, lines = list[dict[str, Any]](), list[Sequence[str]]()
    for each in _states(job):
        state = state_bytes_of(each, "blocks.0.mlp.up.weight", whole, prod(whole), width) / prod(whole)
        stages = [sum(by_stage(zero, ranks, width, gradient, state)) for zero in range(4)]
        form = {"state": each.state, "master": each.master, "rounding": each.rounding, "state_bytes": state}
        forms.append(form | {"bytes": stages, "billions": [gigabytes / size for size in stages]})
        cells = (f"{gigabytes / size:.2f}" for size in stages)
        lines.append((each.state, each.master, f"{width}+{gradient}+{state:.3g}", *cells))
    names = ("state", "master", "bytes", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    head = f"billions of parameters whose state fits on {ranks} x {gigabytes:g} GB"
    text = "\n".join([f"{head} ({job.optimizer.name}, {job.train.precision}):", *aligned([names, *lines])])
    return {"gigabytes": gigabytes, "ranks": ranks, "forms": forms}, text


def as_json(spec: StepSpec, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns the document of `--json` (docs/guides/predict.md)."""
    hints = [] if prediction.fits else [vars(one) for one in advice(spec)]
    sizes = {"parameters": count(spec.model), "active_parameters": count_active(spec.model)}
    if spec.model.freezes:
        sizes["trained_parameters"] = count_trained(spec.model)
    notes = [*filter(None, [slow_format(spec), completions_line(spec)])]
    return {**document(prediction), **sizes, "traffic_bytes": traffic, "advice": hints, "notes": notes}


def report(spec: StepSpec, prediction: Prediction, traffic: dict[str, dict[str, float]]) -> str:
    low, high = prediction.spread
    step, who = prediction.step_time_s, "the indexer trains" if spec.model.warms_up else "adapters train"
    lines = [
        f"{subject(spec, spec.layout.world)}: {spec.layout.line()}",
        spec.batch.equation(),
        *([f"{who} {trained_text(spec.model)}"] if spec.model.freezes else []),
        "",
        f"step time: {figure(step, 4)} s ({figure(low * step, 4)} to {figure(high * step, 4)})  "
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
    if said := completions_line(spec):
        lines.insert(2, f"completions: {said}")
    lines += ["", "bytes sent per step by rank 0:" if traffic else "bytes sent per step by rank 0: none"]
    for axis, collectives in traffic.items():
        for collective, sent in collectives.items():
            lines.append(f"  {axis:<14} {collective.replace('_', '-'):<16} {gib(sent)}")
    return "\n".join(lines)


MAP_POINTS = 300
"""Number of layouts in the map of the space."""

GRAPH = {
    "graph": Option(
        "plan any operator graph instead of a job's model: a JSON file, or a function of yours that returns a torch "
        "module and example inputs, the micro-batch (docs/guides/graph.md)",
        value="FILE|MODULE:FUNCTION",
    ),
    **{
        name: Option(f"with --graph: {about}", default, value=value, at_least=least, rare=True, beside=("graph",))
        for name, about, default, value, least in (
            ("mesh", "its devices in one or two dimensions, such as 8x8 (default: the best)", "", "AxB", None),
            ("micro_batches", "plan pipeline stages for so many", 0, "", 1),
            ("splits", "a plan by hand to compare, as JSON: letters that operators split", "", "FILE", None),
            ("graph_out", "write the graph as JSON", "", "FILE", None),
        )
    },
}
"""The options of a graph. With --check its plan runs on as many gloo processes, and is compared with one."""
PLAN = job_verb(
    "plan",
    "Finds the fastest legal layout that fits in memory. Layout fields set on the command line, or beside `auto: true` "
    "in a job file, stay fixed; the planner chooses the others.",
    (
        ("plan model=llama3-8b cluster=dgx-h100:1 precision=bf16", "on a machine that you do not have"),
        ("plan job.yaml --html plan.html", "with pictures"),
    ),
    switches={
        **DARK,
        "exotic": "take the fastest layout found, not the simplest of those that count as equally fast",
        "check": "rehearse the best layouts (the real program, without hardware), and leave out those that do not fit",
    },
    options={
        "html": Option("write the plan as an HTML page with pictures", value="FILE"),
        "svg": Option("write a map of the search space, one dot per layout", value="FILE"),
        "top": Option("number of layouts to show", 10, at_least=1),
        **FROM,
        **OPTIONS,
        "tokens": TOKENS,
        "allow": Option(
            "what the planner may choose, too, that changes training's numbers: states (optimizer.state and master); "
            "compression (layout.compression)",
            "layouts",
            Literal["layouts", "states", "compression"],
        ),
        **GRAPH,
    },
    exits={3: "no layout fits"},
    auto="always",
)


@PLAN.runs
def run_plan(words: Words) -> int:
    files, checks, vocab = OutputFiles.of(words, "html", "svg"), "check" in words.switches, 0
    if not words.options["graph"]:
        if checks and (words.theirs is not None or not words.stated.isdisjoint(OPTIONS)):
            raise JobError("--check rehearses Phalanx's own program: leave out --from, --framework and --products")
        vocab = vocabulary_size(words.job)
    loaded = on_known_devices(words.loaded, measures=True)
    cluster = loaded.job.cluster
    if words.options["graph"]:
        from phalanx.cli.graph import run as plan_graph

        return plan_graph(words, cluster, files)
    check_calibration(cluster, cluster.devices)
    request = request_of(replace(loaded, job=_with_batch(loaded.job, words.before)), vocab, worlds_of(loaded.job))
    fixed, request = request.fixed, asked(request, words, loaded.job)
    if "exotic" in words.switches:
        request = replace(request, band=EQUAL)
    layout = loaded.job.layout
    if fixed and not layout.auto:
        told = f"fixed: the whole layout, {layout.line()}; the planner chooses at most the batch"
        echo(told, file=sys.stderr)
    elif fixed:
        said = ",".join(f"{name}={str(value).lower()}" for name, value in fixed.items())
        echo(f"fixed layout fields: {said}; the planner chooses the others", file=sys.stderr)
    with stderr_progress() as progress:
        sample = MAP_POINTS if files.paths else 0
        plans = list[tuple["PlanRequest", Plan]]()
        for each in _variants(request, loaded.job, words.options["allow"]):
            try:
                plans.append((each, _searched(words, each, progress, sample)))
            except JobError:
                if each is request:
                    raise  # others may have no legal layout
        chosen, plan = min(plans, key=lambda each: each[1].best[0].seconds if each[1].best else inf)
        if checks:
            from phalanx.dryrun.check import check_plan  # here, because it imports torch

            plan = check_plan(plan, replace(loaded.job, optimizer=chosen.optimizer), progress)
    plan = replace(plan, best=plan.best[: words.options["top"]])
    files.write({name: lambda name=name: _drawn(plan, name) for name in files.paths})
    text = plan_text.text(plan, min(terminal_columns(sys.stdout) or plan_text.WIDTH, MOST_COLUMNS))
    costs = next(((top.prediction.devices, top.tokens_per_s) for top in plan.best), None)
    document = plan_text.as_json(plan)
    if (what := words.options["allow"]) != "layouts":
        found = [(_variant(each, what), each is chosen, own.best[0] if own.best else None) for each, own in plans]
        document[what] = [
            {**fields, "seconds": best and best.seconds, "chosen": taken, "layout": best and best.layout.line()}
            for fields, taken, best in found
        ]
        rows = [
            ("*" if taken else " ", *(f"{name}={value}" for name, value in fields.items()))
            + ((f"{figure(best.seconds, 4)} s", best.layout.line()) if best else ("does not fit", ""))
            for fields, taken, best in found
        ]
        text = "\n".join([text, "", f"{what}, each with its fastest layout (* taken):", *aligned(rows)])
    if checks:
        document["struck"] = [{"line": line, "why": why} for line, why in plan.struck.items()]
    if plan.struck:
        text = "\n".join([text, "", "struck, when rehearsed:", *plan.struck_lines()])
    if words.theirs is not None and words.before is not None:
        job = words.before.job
        before = asked(step_spec(job, vocabulary_size(job)), words, job)
        own = Candidate.of(before)
        beside = [foreign.Beside.of(words.theirs, own, best) for best in plan.best[:1]]
        document["from"] = foreign.document(words.theirs, before.framework.name)
        document["theirs"] = next((each.as_dict() for each in beside), None)
        said = (line for each in beside for line in each.lines())
        text = "\n".join([text, "", *said, "", *foreign.lines(words.theirs, before.framework.name, words.before)])
    _show(words, files, document, text, loaded.job, cluster.devices, costs)
    return 0 if plan.best else DoesNotFitError.exit_code


def _with_batch(job: Job, before: LoadedJob | None) -> Job:
    """Returns a job with the global batch that the layout of another framework's file gives it."""
    if before is None or job.train.global_batch:
        return job
    batch = solve(0, before.job.layout).global_batch
    return replace(job, train=replace(job.train, global_batch=batch))


def _searched(words: Words, request: PlanRequest, progress: Progress, sample: int) -> Plan:
    """Returns the plan; with --from the best of the searches through what the file's framework can run."""
    if words.theirs is None or words.before is None:
        return search(request, progress, sample=sample)
    plans, refused = list[Plan](), list[str]()
    for fixed in foreign.choices(words.theirs, words.before, request.fixed):
        try:
            plans.append(search(replace(request, fixed=fixed), silent, sample=sample))
        except JobError as error:  # such a layout does not exist, as stages on one device
            refused = error.problems
    if not plans:
        raise JobError(refused)
    with_layout = [plan for plan in plans if plan.best]
    if not with_layout:
        return min(plans, key=lambda plan: plan.nearest.prediction.fullest.needed if plan.nearest else float("inf"))
    best = min(with_layout, key=lambda plan: plan.best[0].seconds)
    return replace(best, searched=sum(plan.searched for plan in plans), seconds=sum(plan.seconds for plan in plans))


def _drawn(plan: Plan, form: str) -> str:
    from phalanx.pictures import plan_page  # here, because it is rarely asked for

    if form == "svg":
        return plan_page.space_picture(plan)
    return plan_page.html(plan, _timeline(plan.best[0]) if plan.best else None)


def _timeline(best: Candidate) -> str:
    """Returns the picture of the best layout's step; of a long one its beginning and its end."""
    from phalanx.pictures import timeline as timeline_picture

    return timeline_picture.ends_svg(simulate(best.spec), subject(best.spec, best.spec.layout.world))


PROGRESS_PASSES = 50_000
"""Number of passes from which on progress is shown."""
CHECKPOINT_S, RESTART_S = 30.0, 600.0
FAILURES = {"failures_per_device_day": LLAMA_3_RATE, "checkpoint_s": CHECKPOINT_S, "restart_s": RESTART_S}
"""The options that ask about failures: their rate, and the seconds of a save and of a restart; with defaults."""
MAX_ROWS = 16
"""Maximum number of pipeline ranks in the table."""

SIMULATE = job_verb(
    "simulate",
    "Simulates one step of a job event by event: what every pipeline rank computes, sends and waits for, as figures, a "
    "picture and a trace for Perfetto.",
    (
        ("simulate examples/pipeline.yaml cluster=local --svg step.svg", "as a picture"),
        ("simulate job.yaml --straggler 2=1.2", "with a device that takes 1.2 × as long"),
    ),
    switches=DARK,
    options={
        "svg": Option("write a picture of the step", value="FILE"),
        "from": Option("with --svg: seconds at which the picture begins", None, float, beside=("svg",)),
        "to": Option("with --svg: seconds at which it ends", None, float, beside=("svg",)),
        "trace": Option("write a trace for ui.perfetto.dev or chrome://tracing", value="FILE"),
        "straggler": Option(
            "slow the passes of these pipeline ranks by a factor", (), str, many=True, like=r"\d+=", value="RANK=FACTOR"
        ),
        "slow_link": Option(
            "slow the messages between two pipeline ranks by a factor; AXIS=FACTOR, as the first word only, slows the "
            f"collectives of an axis ({', '.join(AXES)})",
            (),
            str,
            many=True,
            like=r"\d+-\d+=",
            value="A-B=FACTOR",
        ),
        "failures_per_device_day": Option(
            f"report the time lost to failures at this rate (default with one of the next two: {LLAMA_3_RATE:.3g}, "
            "Llama 3's)",
            None,
            float,
        ),
        "checkpoint_s": Option(f"seconds that a save pauses training (default {CHECKPOINT_S:g})", None, float),
        "restart_s": Option(f"seconds from a failure to the next step (default {RESTART_S:g})", None, float),
        "failures_svg": Option(
            "write the picture of productive time against the time between saves, for this job's devices beside other "
            "numbers of them",
            value="FILE",
        ),
        **OPTIONS,
    },
    auto="measure",
)


@SIMULATE.runs
def run_simulation(words: Words) -> None:
    options = words.options
    files = OutputFiles.of(words, "svg", "trace", "failures_svg")
    spec = asked(step_spec(words.job, vocabulary_size(words.job)), words, words.job)
    disturbance = _disturbance(options["straggler"], options["slow_link"])
    check(disturbance, spec)
    passes = 2 * spec.batch.accumulation * spec.layout.pp * max(1, spec.layout.pp_chunks)  # of all ranks, about
    with stderr_progress() as progress:
        result = _simulated(spec, disturbance, progress if passes > PROGRESS_PASSES else silent)
    asks = options["failures_svg"] or any(options[name] is not None for name in FAILURES)
    failures = [usual if options[name] is None else options[name] for name, usual in FAILURES.items()] if asks else []
    step_s = result.figures.step_time_s
    lost = best(spec.layout.world, failures[0], failures[1], failures[2], step_s) if failures else None
    files.write(_contents(result, (options["from"], options["to"]), failures))
    document, text = simulated_json(result, lost), simulated_text(result, lost)
    _show(words, files, document, text, words.job, words.job.layout.world)
    if not result.prediction.fits:
        warning = f"\nphalanx: warning: simulated anyway: {shortfall(spec)}"
        echo(warning, file=sys.stderr, wrap=True)


@dataclass(frozen=True)
class Simulated:
    spec: StepSpec
    prediction: Prediction
    disturbance: Disturbance
    timeline: Timeline
    figures: Figures
    undisturbed_s: float
    """Seconds of a step without disturbances."""

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.tokens / self.figures.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.prediction.devices


@gc_paused()
def _simulated(spec: StepSpec, disturbance: Disturbance, progress: Progress) -> Simulated:
    disturbed = disturbance != Disturbance()
    number = 3 if disturbed else 2
    progress("simulating the step", 0, number)
    timeline = simulate(spec, disturbance)
    progress("simulating the step", 1, number)
    found = figures(timeline)
    progress("simulating the step", 2, number)
    undisturbed = found.step_time_s
    if disturbed:
        undisturbed = simulate(spec).seconds / timeline.schedule.steps
        progress("simulating the step", number, number)
    return Simulated(spec, predict(spec), disturbance, timeline, found, undisturbed)


def _disturbance(stragglers: Sequence[str], links: Sequence[str]) -> Disturbance:
    """Returns the slow devices and links of the options. Raises JobError with every word that is wrong."""
    slow, pairs, axes, problems = list[tuple[int, float]](), [], list[tuple[str, float]](), []
    for option, said in (*(("straggler", word) for word in stragglers), *(("slow-link", word) for word in links)):
        what, _, number = said.partition("=")
        try:
            factor = values.convert(number, float)
        except ValueError:
            problems.append(f"--{option} {said}: expected a factor after the =, such as {what or 3}=1.5")
            continue
        pair = re.fullmatch(r"(\d+)-(\d+)", what)
        if option == "straggler" and re.fullmatch(r"-?\d+", what):
            slow.append((int(what), factor))
        elif option == "straggler":
            problems.append(f"--{option} {said}: expected a pipeline rank and a factor, such as 3=1.5")
        elif pair:
            one, other = sorted(map(int, pair.groups()))  # a link has no direction
            pairs.append(((one, other), factor))
        else:
            axes.append((what, factor))
    if problems:
        raise JobError(problems)
    return Disturbance(tuple(slow), tuple(pairs), tuple(axes))


def _contents(
    result: Simulated, window: tuple[float | None, float | None], failures: Sequence[float]
) -> dict[str, Callable[[], str]]:

    def step() -> str:
        from phalanx.pictures import timeline as timeline_picture  # here and below: they are rarely asked for

        about, slowed = subject(result.spec, result.spec.layout.world), _disturbance_text(result.disturbance)
        return timeline_picture.svg(result.timeline, *window, about, _marks(result.disturbance), slowed)

    def trace() -> str:
        from phalanx.simulate import timeline as events

        return events.text(result.timeline)

    def lost() -> str:
        from phalanx.pictures.timeline import SIZES, goodput_svg

        rate, save_s, restart_s = failures
        sizes = sorted({result.spec.layout.world, *SIZES})
        return goodput_svg(sizes, rate, (save_s, save_s / 10), restart_s)

    return {"svg": step, "trace": trace, "failures_svg": lost}


def _marks(disturbance: Disturbance) -> dict[int, str]:
    """Returns what slows each pipeline rank, for the picture: its device, and its links with both ranks."""
    marks: dict[int, list[str]] = {}
    for rank, factor in disturbance.slow:
        marks.setdefault(rank, []).append(f"{factor:g} ×")
    for ends, factor in disturbance.links:
        for rank, other in (ends, ends[::-1]):
            marks.setdefault(rank, []).append(f"↔ {other}: {factor:g} ×")
    return {rank: ", ".join(words) for rank, words in marks.items()}


def simulated_json(result: Simulated, lost: Goodput | None) -> dict[str, Any]:
    """Returns the document of `--json` (docs/guides/simulate.md)."""
    found = result.figures
    document: dict[str, Any] = {
        "step_time_s": found.step_time_s,
        "tps": result.tokens_per_s_per_device,
        "tps_total": result.tokens_per_s,
        "bubble": found.bubble,
        "ranks": found.ranks,
        "steps": result.timeline.schedule.steps,
        "predicted_step_time_s": result.prediction.step_time_s,
        "undisturbed_step_time_s": result.undisturbed_s,
        "fits": result.prediction.fits,
    }
    if lost:
        # Without failures the interval is infinite, which JSON lacks.
        times = {name: value if isfinite(value) else None for name, value in vars(lost).items()}
        document["goodput"] = times
    return document


def simulated_text(result: Simulated, lost: Goodput | None) -> str:
    spec, found = result.spec, result.figures
    predicted = result.prediction.step_time_s
    lines = [
        f"{subject(spec, spec.layout.world)}: {spec.layout.line()}",
        spec.batch.equation(),
        "",
        f"step time: {duration(found.step_time_s)} simulated, {duration(predicted)} predicted  "
        f"tps: {result.tokens_per_s_per_device:,.0f}  tps_total: {result.tokens_per_s:,.0f}  "
        f"bubble: {found.bubble:.1%}",
    ]
    if result.disturbance != Disturbance():
        more = found.step_time_s / result.undisturbed_s - 1
        compared = f"{abs(more):.1%} {'faster' if more < 0 else 'slower'} than undisturbed"
        lines.append(f"{_disturbance_text(result.disturbance)}: {compared} ({duration(result.undisturbed_s)})")
    lines += ["", *_rank_lines(result)]
    if lost:
        lines += ["", goodput.text(lost)]
        if lost.fraction > 0:
            lines.append(f"{'step time with failures':<28} {duration(found.step_time_s / lost.fraction)}")
    return "\n".join(lines)


def _disturbance_text(disturbance: Disturbance) -> str:
    words = [f"rank {rank} takes {factor:g} ×" for rank, factor in disturbance.slow]
    words += [f"messages {one}-{other} {factor:g} ×" for (one, other), factor in disturbance.links]
    words += [f"{axis} {factor:g} ×" for axis, factor in disturbance.axes]
    return ", ".join(words)


def _rank_lines(result: Simulated) -> Iterator[str]:
    ranks = result.figures.ranks
    shown = _shown(result)
    steps = result.timeline.schedule.steps
    whole = result.timeline.seconds
    columns = {"busy_s": "computes", "communication_s": "communicates", "idle_s": "idle"}
    if result.timeline.host:
        columns["host_s"] = "waits for host"
    yield f"{'rank':>6}  {'  '.join(f'{name:>17}' for name in columns.values())}  peak in flight"
    for number in shown:
        figures = ranks[number]
        times = "  ".join(f"{duration(figures[name] / steps):>9} {figures[name] / whole:>7.1%}" for name in columns)
        yield f"{number:>6}  {times}  {figures['peak_in_flight']:g}"
    if len(shown) < len(ranks):
        yield f"        {len(shown)} of {len(ranks)} pipeline ranks, among them the most and the least idle"


def _shown(result: Simulated) -> list[int]:
    """Returns the pipeline ranks of the table: all, or an even selection, the extremes, and the slow ones."""
    idle = [rank["idle_s"] for rank in result.figures.ranks]
    if len(idle) <= MAX_ROWS:
        return list(range(len(idle)))
    every = -(-len(idle) // (MAX_ROWS - 4))
    slow = (rank for rank, _ in result.disturbance.slow)
    extremes = (idle.index(max(idle)), idle.index(min(idle)), len(idle) - 1)
    return sorted({*range(0, len(idle), every), *extremes, *slow})
