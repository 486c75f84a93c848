"""`phalanx simulate JOB`: the events of one step on every pipeline rank, with slow devices and links if asked, and the
time that a job loses to failures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.option import Option
from phalanx.cli.predicting import OPTIONS, asked, calibration_document
from phalanx.cli.verb import Words, job_verb
from phalanx.config import values
from phalanx.cost.breakdown import duration, subject
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.gc import gc_paused
from phalanx.plan.page import shortfall
from phalanx.simulate import goodput
from phalanx.simulate.goodput import LLAMA_3_RATE, Goodput, best
from phalanx.simulate.step import AXES, Disturbance, Figures, check, figures, simulate
from phalanx.simulate.timeline import Timeline

PROGRESS_PASSES = 50_000
"""Number of passes from which on progress is shown."""
CHECKPOINT_S, RESTART_S = 30.0, 600.0
"""Default seconds of a save and of a restart when failures are asked about."""
MAX_ROWS = 16
"""Maximum number of pipeline ranks in the table."""

VERB = job_verb(
    "simulate",
    "Simulates one step of a job event by event: what every pipeline rank computes, sends and waits for, as figures, a "
    "picture and a trace for Perfetto.",
    (
        ("simulate examples/pipeline.yaml cluster=local --svg step.svg", "as a picture"),
        ("simulate job.yaml --straggler 2=1.2", "with a device that takes 1.2 × as long"),
    ),
    switches=DARK,
    options={
        "svg": Option(str, "", "write a picture of the step", value="FILE"),
        "from": Option(float, None, "with --svg: seconds at which the picture begins"),
        "to": Option(float, None, "with --svg: seconds at which it ends"),
        "trace": Option(str, "", "write a trace for ui.perfetto.dev or chrome://tracing", value="FILE"),
        "straggler": Option(
            str,
            (),
            "slow the passes of these pipeline ranks by a factor",
            many=True,
            like=r"\d+=",
            value="RANK=FACTOR",
        ),
        "slow_link": Option(
            str,
            (),
            "slow the messages between two pipeline ranks by a factor; AXIS=FACTOR, as the first word only, slows the "
            f"collectives of an axis ({', '.join(AXES)})",
            many=True,
            like=r"\d+-\d+=",
            value="A-B=FACTOR",
        ),
        "failures_per_device_day": Option(
            float,
            None,
            f"report the time lost to failures at this rate (default with one of the next two: {LLAMA_3_RATE:.3g}, "
            "Llama 3's)",
        ),
        "checkpoint_s": Option(float, None, f"seconds that a save pauses training (default {CHECKPOINT_S:g})"),
        "restart_s": Option(float, None, f"seconds from a failure to the next step (default {RESTART_S:g})"),
        "failures_svg": Option(
            str,
            "",
            "write the picture of productive time against the time between saves, for this job's devices beside other "
            "numbers of them",
            value="FILE",
        ),
        **OPTIONS,
    },
    auto="measure",
)


@VERB.runs
def run(words: Words) -> None:
    options = words.options
    files = OutputFiles.of(words, "svg", "trace", "failures_svg")
    spec = asked(step_spec(words.job, vocabulary_size(words.job)), options)
    disturbance = _disturbance(options["straggler"], options["slow_link"])
    check(disturbance, spec)
    passes = 2 * spec.batch.accumulation * spec.layout.pp * max(1, spec.layout.pp_chunks)  # of all ranks, about
    with stderr_progress() as progress:
        result = _simulated(spec, disturbance, progress if passes > PROGRESS_PASSES else silent)
    failures = _failures(options)
    lost = best(spec.layout.world, *failures, result.figures.step_time_s) if failures else None
    files.write(_contents(result, (options["from"], options["to"]), failures))
    calibration = calibration_document(words.job.cluster, words.job.layout.world)
    words.show({**as_json(result, lost), "calibration": calibration}, report(result, lost))
    files.tell()
    if not result.prediction.fits:
        warning = f"\nphalanx: warning: simulated anyway: {shortfall(spec)}"
        echo(warning, file=sys.stderr, wrap=True)


@dataclass(frozen=True)
class Simulated:
    """A simulated step, and the steps it is compared with."""

    spec: StepSpec
    prediction: Prediction
    disturbance: Disturbance
    timeline: Timeline
    figures: Figures
    undisturbed_s: float
    """Seconds of a step without disturbances."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on all devices together, of the simulated step."""
        return self.prediction.tokens / self.figures.step_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second per device, of the simulated step."""
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
            pairs.append(((int(pair[1]), int(pair[2])), factor))
        else:
            axes.append((what, factor))
    if problems:
        raise JobError(problems)
    return Disturbance(tuple(slow), tuple(pairs), tuple(axes))


def _failures(options: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Returns failures per device per day, seconds of a save and seconds of a restart, if an option asks about
    failures."""
    rate, save, restart = (options[name] for name in ("failures_per_device_day", "checkpoint_s", "restart_s"))
    if rate is None and save is None and restart is None and not options["failures_svg"]:
        return None
    return (
        LLAMA_3_RATE if rate is None else rate,
        CHECKPOINT_S if save is None else save,
        RESTART_S if restart is None else restart,
    )


def _contents(
    result: Simulated, window: tuple[float | None, float | None], failures: tuple[float, float, float] | None
) -> dict[str, Callable[[], str]]:
    """Returns what each file holds."""

    def step() -> str:
        from phalanx.pictures import timeline as timeline_picture  # here and below: they are rarely asked for

        about, slowed = subject(result.spec, result.spec.layout.world), _disturbance_text(result.disturbance)
        return timeline_picture.svg(result.timeline, *window, about, _marks(result.disturbance), slowed)

    def trace() -> str:
        from phalanx.simulate import timeline as events

        return events.text(result.timeline)

    def lost() -> str:
        from phalanx.pictures.timeline import SIZES, goodput_svg

        assert failures is not None, "the picture asks about failures"
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


def as_json(result: Simulated, lost: Goodput | None) -> dict[str, Any]:
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


def report(result: Simulated, lost: Goodput | None) -> str:
    """Returns the figures as text."""
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
