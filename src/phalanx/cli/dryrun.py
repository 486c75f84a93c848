"""`phalanx dryrun JOB`: runs the real program of chosen ranks of a job without its hardware."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import Option, Words, job_verb
from phalanx.config.job import Job
from phalanx.data.files import silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import DoesNotFitError, JobError
from phalanx.partition.ramp import assumption
from phalanx.units import gib, seconds

if TYPE_CHECKING:
    from phalanx.dryrun.rehearse import RankRehearsal

VERB = job_verb(
    "dryrun",
    "Runs the real program of a rank without its hardware and without the other ranks: it builds the model, applies "
    "the layout, takes a few steps and collects a checkpoint, on tensors without elements and with collectives that "
    "end at once, at any number of ranks. It reports the memory of every moment by part and by operation, bytes sent, "
    "FLOPs and the calls in order, beside the prediction.",
    (
        ("dryrun job.yaml", "the first rank"),
        ("dryrun job.yaml --ranks distinct --svg memory.svg", "the first rank of every pipeline stage, with a picture"),
    ),
    switches=DARK,
    options={
        "rank": Option("the rank to run", 0, at_least=0),
        "ranks": Option("distinct: the first rank of every pipeline stage instead", "", value="distinct"),
        "steps": Option("optimizer steps to take (default: 2, in a pipeline without a flush 3)", None, int, at_least=1),
        "svg": Option("draw the memory of the fullest of these ranks", value="FILE"),
        "trace": Option("write its memory, phases and calls as trace events, for ui.perfetto.dev", value="FILE"),
    },
    exits={2: "the job cannot be rehearsed, or bad usage", 3: "the job does not fit in memory"},
)


MOST_STEPS = 100
"""Most steps of a rehearsal, each of which takes seconds."""


@VERB.runs
def run(words: Words) -> int:
    options, job = words.options, words.job
    if options["ranks"] not in ("", "distinct"):
        raise JobError(f"--ranks: {options['ranks']!r} is not known (known: distinct); --rank takes a number")
    if "rank" in words.stated and options["ranks"]:
        raise JobError("--rank and --ranks: give one of them")
    if options["rank"] >= job.layout.processes:
        raise JobError(f"--rank {options['rank']}: the layout has ranks 0 to {job.layout.processes - 1}")
    if options["steps"] and options["steps"] > MOST_STEPS:
        raise JobError(
            f"--steps {options['steps']}: at most {MOST_STEPS} are rehearsed; from the third on all are alike"
        )
    files = OutputFiles.of(words, "svg", "trace")
    vocab = vocabulary_size(job)
    # Imported here and below, because it imports torch, which --help and errors do not need.
    from phalanx.dryrun.check import rehearse_ranks
    from phalanx.dryrun.rehearse import distinct_ranks
    from phalanx.dryrun.show import picture, trace

    ranks = distinct_ranks(job) if options["ranks"] else [options["rank"]]
    with stderr_progress() if len(ranks) > 1 else nullcontext(silent) as progress:
        found = rehearse_ranks(job, vocab, ranks, options["steps"], progress)
    files.write({"svg": lambda: picture(found.fullest, job, found.limit), "trace": lambda: trace(found.fullest)})
    texts = [text(each, found.predicted[found.stage(each)].allocated) for each in found.ranks]
    if saved := max(found.saved):
        texts.append(
            f"train.compile: the rehearsal is eager, and so is the prediction beside it; compiled, the step keeps "
            f"{gib(saved)} less, as predicted"
        )
    words.show(found.as_dict(), "\n\n".join(texts))
    files.tell()
    if ramps := assumption(job):
        echo(f"phalanx: {ramps}", file=sys.stderr, wrap=True)
    if not found.fits:
        echo(f"phalanx: {found.verdict}", file=sys.stderr, wrap=True)
    return 0 if found.fits else DoesNotFitError.exit_code


def rehearse_first(job: Job) -> None:
    """Rehearses the ranks of a job that may be fullest, and reports it on standard error. Raises DoesNotFitError, with
    the figures, if the job does not fit."""
    if job.layout.auto:
        raise JobError("--rehearse: layout=auto is chosen on the nodes; give a layout, such as that of `phalanx plan`")
    vocab = vocabulary_size(job)
    from phalanx.dryrun.check import check

    with stderr_progress() as progress:
        found = check(job, vocab, progress)
    if not found.fits:
        raise DoesNotFitError(f"rehearsed: {found.verdict}; `phalanx plan --check` finds a layout that fits")
    echo(f"rehearsed in {seconds(found.seconds)}: {found.verdict}", file=sys.stderr, wrap=True)


def text(found: RankRehearsal, predicted: int) -> str:
    """Returns what a rank's program did, as plain text."""
    place = ", ".join(f"{axis} {at}" for axis, at in found.coordinates.items())
    parts = ", ".join(f"{name} {gib(size)}" for name, size in found.peak_bytes.items() if size)
    gap = predicted / found.peak - 1
    lines = [
        f"rank {found.rank}{f' ({place})' if place else ''}: rehearsed in {seconds(found.seconds)}",
        f"peak memory: {gib(found.peak)} in {found.at}: {parts}; predicted {gib(predicted)} ({gap:+.1%})",
    ]
    if found.offloads:
        lines.append(f"host memory: {gib(found.host_peak_bytes)} of what is offloaded")
    lines.append("largest at the peak:")
    for each in found.by_operator[:6]:
        where = f" in {each['module']}" if each["module"] else ""
        lines.append(f"  {gib(each['bytes']):>9}  {each['part']:<13} {each['operator']}{where}")
    flops = ", ".join(f"{kind} {count / 1e12:.4g}" for kind, count in found.flops.items())
    lines += [f"TFLOP per step: {flops}", f"checkpoint: this rank writes {gib(found.checkpoint_bytes)}"]
    sent = [
        f"  {axis:<14} {collective.replace('_', '-'):<16} {gib(round(size))}"
        for axis, collectives in found.traffic_bytes.items()
        for collective, size in collectives.items()
    ]
    return "\n".join([*lines, "bytes sent per step:" if sent else "bytes sent per step: none", *sent])
