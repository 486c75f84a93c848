"""`phalanx goodput`: the productive time of a job under failures by cause, and what each remedy would bring."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.bounded import read_text
from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import JSON, Option, Verb, Words, alone, flag_of
from phalanx.errors import JobError
from phalanx.simulate import causes
from phalanx.simulate.causes import Cause, FailureSpec, GoodputByCause, Remedy, expected, read_causes, remedies
from phalanx.simulate.goodput import SECONDS_PER_DAY
from phalanx.units import aligned, finite, seconds

VERB = Verb(
    "goodput",
    "Predicts how much of its time a job trains when machines fail, cause by cause, and what each remedy would bring.",
    alone(
        ("[JOB.yaml and key=value]",),
        {
            "causes": Option(
                "a table of causes, as CSV (default: the job's cluster.failures, else Llama 3's)",
                None,
                Path,
                value="FILE",
            ),
            "devices": Option("devices (default: the job's, else 16384)", 16384, at_least=1),
            "days": Option("days of the job", 54.0, at_least=0),
            "devices_per_node": Option(
                "devices that one failure takes away, and one spare machine has (default: the job's, else 8)",
                8,
                at_least=1,
            ),
            "every_minutes": Option("minutes of training between saves; 0: the best", 60.0, at_least=0),
            "checkpoint_s": Option("seconds for which a save blocks training", 30.0, at_least=0),
            "background_s": Option("seconds for which a save in the background blocks it", 3.0, at_least=0),
            "restart_s": Option("seconds from healthy machines to the next step", 300.0, at_least=0),
            "spares": Option("machines that stand by", 0, at_least=0),
            "replicas": Option("replicas that could come and go (run.min_replicas)", 1, at_least=1),
            "step_s": Option(
                "seconds of a step, which the others lose with a replica", 10.0, at_least=0, beside=("replicas",)
            ),
            "run": Option(
                "take --restart-s and --background-s from a run, as measured there",
                None,
                Path,
                value="RUN",
            ),
            "runs": Option("simulate so many runs beside the formula; 0: none", 0, at_least=0),
            "seed": Option("seed of the simulated runs", 0, at_least=0, beside=("runs",)),
            "svg": Option("write the picture of what each remedy brings", value="FILE"),
        },
        switches={"print_causes": "print the table of causes, for an own one, and exit", **DARK, **JSON},
        more=True,
    ),
    (
        ("goodput", "16,384 devices for 54 days at Llama 3's rates"),
        ("goodput job.yaml --run runs/main", "a job's devices and cluster.failures, with measured restarts"),
    ),
    (
        "The table has the columns " + ", ".join(causes.COLUMNS) + ": `count` interruptions of `devices` in `days`; "
        "found_by is crash, timeout or check; detect_s seconds of training are lost until it is noticed; replace_s "
        "until another machine is there, if no spare is free (0: it takes none); repair_h hours until the failed one "
        "is back. cluster.failures has the same as a list of mappings.",
    ),
)


@VERB.runs
def run(words: Words) -> None:
    options: dict[str, Any] = words.options
    path = options["causes"] or causes.LLAMA_3
    rows, of_job, table, problems = (), {}, (), list[str]()
    try:
        rows, of_job = _of_job(words)
    except JobError as error:
        problems += error.problems
    if rows and "causes" in words.stated:
        problems.append("--causes beside the job's cluster.failures: leave one of them out")
    try:
        table = rows or read_causes(path)
    except JobError as error:
        problems += error.problems
    if options["days"] == 0:
        problems.append("--days 0: expected more than 0")
    if problems:
        raise JobError(problems)
    if "print_causes" in words.switches:
        if idle := words.stated - {"causes"}:
            raise JobError(f"{' and '.join(map(flag_of, sorted(idle)))}: no effect with --print-causes")
        words.show([asdict(each) for each in table], causes.as_csv(rows) if rows else read_text(path).rstrip())
        return
    options = {**options, **{name: each for name, each in of_job.items() if name not in words.stated}}
    files = OutputFiles.of(words, "svg")
    measured = _measured(options["run"]) if options["run"] else {}
    if both := [name for name in measured if name in words.stated]:
        raise JobError([f"--run measures --{name.replace('_', '-')}: leave one of them out" for name in both])
    options = {**options, **measured}
    spec = FailureSpec(
        table,
        options["devices"],
        options["checkpoint_s"],
        options["restart_s"],
        60 * options["every_minutes"] or None,
        options["spares"],
        options["devices_per_node"],
        step_s=options["step_s"],
    )
    found = expected(spec)
    brought = remedies(spec, options["background_s"], options["replicas"])
    seeds = range(options["seed"], options["seed"] + options["runs"])
    runs = [causes.simulate_failures(spec, options["days"], seed) for seed in seeds]
    files.write({"svg": lambda: _picture(spec, brought)})
    words.show(
        _document(spec, found, brought, runs, options), _text(spec, found, brought, runs, options, path), wrap=False
    )
    files.tell()


def _of_job(words: Words) -> tuple[tuple[Cause, ...], dict[str, int]]:
    """Returns the causes of the job that the words name, and the options that it states. Raises JobError."""
    if not words.subjects:
        return (), {}
    from phalanx.check.load import load_words
    from phalanx.config import overrides

    job = load_words(overrides.parse(words.subjects)).job
    devices = job.cluster.devices if job.layout.auto else job.layout.world
    if not devices and "devices" not in words.stated:
        raise JobError("the job's layout is auto and its cluster has no nodes: give --devices")
    return job.cluster.failures, {"devices": devices, "devices_per_node": job.cluster.devices_per_node or 8}


def _measured(path: Path) -> dict[str, float]:
    """Returns the mean seconds of a run's restarts, and for which a save blocks it. Raises JobError without any."""
    from phalanx.report.run import read_run

    events = read_run(path).metrics.events
    names = {"restart_s": ("restart", "down_s"), "background_s": ("checkpoint", "waited_s")}
    found = {
        option: [row[name] for row in events if row["event"] == event and isinstance(row.get(name), int | float)]
        for option, (event, name) in names.items()
    }
    if missing := [names[option][0] for option, rows in found.items() if not rows]:
        raise JobError(f"--run {path}: the run has no {' and no '.join(missing)}; give --restart-s and --background-s")
    return {option: math.fsum(rows) / len(rows) for option, rows in found.items()}


def _document(
    spec: FailureSpec,
    found: GoodputByCause,
    brought: list[Remedy],
    runs: list[causes.FailureRun],
    options: dict[str, Any],
) -> dict[str, Any]:
    rows = [
        {"cause": each.cause, "share": rate / total if (total := math.fsum(spec.rates)) else 0.0, "lost": lost}
        | {"per_day": rate * SECONDS_PER_DAY, "found_by": each.found_by}
        for each, rate, lost in zip(spec.causes, spec.rates, found.lost, strict=True)
    ]
    table = [
        {"remedy": each.name, "spares": each.spec.spares, **vars(each.found.total)}
        | {"of_owned": each.found.of_owned, "shortage": each.found.shortage}
        for each in brought
    ]
    names = ("mean", "low", "high")
    simulated = dict(zip(names, causes.spread(runs), strict=True)) if runs else None
    goodput = {**vars(found.total), "shortage": found.shortage, "of_owned": found.of_owned}
    return finite(
        {"days": options["days"], "goodput": goodput, "causes": rows, "remedies": table, "simulated": simulated}
    )


def _text(
    spec: FailureSpec,
    found: GoodputByCause,
    brought: list[Remedy],
    runs: list[causes.FailureRun],
    options: dict[str, Any],
    path: Path,
) -> str:
    days, total, rates = options["days"], found.total, spec.rates
    failures = math.fsum(rates) * days * SECONDS_PER_DAY
    if not failures:
        return "no failures: no saves needed, productive time 100%"
    order = sorted(range(len(rates)), key=lambda index: -found.lost[index])
    rows = [("cause", "failures", "share", "found by", "noticed in", "replaced in", "lost")]
    for each, rate, lost in ((spec.causes[index], rates[index], found.lost[index]) for index in order):
        replaced = seconds(each.replace_s) if each.replace_s else "stays"
        counts = f"{rate * days * SECONDS_PER_DAY:.4g}", f"{rate / math.fsum(rates):.1%}"
        rows.append((each.cause, *counts, each.found_by, seconds(each.detect_s), replaced, f"{lost:.2%}"))
    lines = [
        f"failures of {spec.devices:,} devices in {days:g} days: {failures:.4g}, one every {seconds(total.mtbf_s)}",
        f"a save blocks training {seconds(spec.checkpoint_s)}, every {seconds(total.interval_s)} of training; "
        f"a restart takes {seconds(spec.restart_s)}; {spec.spares} spares",
        "",
        *aligned(rows, "lrrlrrr"),
        "",
        f"productive time: {total.fraction:.1%}; lost to saving {total.saving:.2%}, rework {total.rework:.2%}, "
        f"restarting {total.restarting:.2%}",
    ]
    if runs:
        mean, low, high = causes.spread(runs)
        of = f"simulated: {mean:.1%} in {len(runs)} runs of {days:g} days, seeds {options['seed']} to "
        lines.append(f"{of}{options['seed'] + len(runs) - 1}; eight of ten from {low:.1%} to {high:.1%}")
    rows = [("remedy", "saves every", "productive", "gain", "device-days", "of all devices")]
    for each in brought:
        gain = each.found.total.fraction - brought[0].found.total.fraction
        shares = f"{each.found.total.fraction:.1%}", f"{100 * gain:+.1f}", f"{gain * days * spec.devices:,.0f}"
        interval = each.found.total.interval_s
        rows.append(
            (each.name, "never" if math.isinf(interval) else seconds(interval), *shares, f"{each.found.of_owned:.1%}")
        )
    return "\n".join([*lines, "", *aligned(rows, "lrrrrr"), "(of all devices: spares are counted as devices)"])


def _picture(spec: FailureSpec, brought: list[Remedy]) -> str:
    from phalanx.pictures.timeline import remedies_svg

    totals = {each.name: each.found.total for each in brought}
    return remedies_svg(f"{spec.devices:,} devices: what each remedy brings", totals)
