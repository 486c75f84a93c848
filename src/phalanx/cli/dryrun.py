"""`phalanx dryrun JOB`: runs the real program of chosen ranks of a job without its hardware."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import Option, Words, job_verb
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.data.files import silent, stderr_progress
from phalanx.data.settings import vocabulary_size
from phalanx.echo import echo
from phalanx.errors import DoesNotFitError, JobError
from phalanx.units import gib, seconds

if TYPE_CHECKING:
    from phalanx.dryrun.rehearse import RankRehearsal

VERB = job_verb(
    "dryrun",
    "Runs the real program of a rank without its hardware and without the other ranks: it builds the model, applies "
    "the layout, takes two steps and collects a checkpoint, on tensors without elements and with collectives that end "
    "at once, at any number of ranks. It reports the memory of every moment by part and by operation, bytes sent, "
    "FLOPs and the calls in order, beside the prediction.",
    (
        ("dryrun job.yaml", "the first rank"),
        ("dryrun job.yaml --ranks distinct --svg memory.svg", "the first rank of every pipeline stage, with a picture"),
    ),
    switches=DARK,
    options={
        "rank": Option("the rank to run", 0, at_least=0),
        "ranks": Option("distinct: the first rank of every pipeline stage instead", "", value="distinct"),
        "steps": Option("optimizer steps to take", 2, at_least=1),
        "svg": Option("draw the memory of the fullest of these ranks", value="FILE"),
        "trace": Option("write its memory, phases and calls as trace events, for ui.perfetto.dev", value="FILE"),
    },
    exits={2: "the job cannot be rehearsed, or bad usage", 3: "the job does not fit in memory"},
)


@VERB.runs
def run(words: Words) -> int:
    options, job = words.options, words.job
    if options["ranks"] not in ("", "distinct"):
        raise JobError(f"--ranks: {options['ranks']!r} is not known (known: distinct); --rank takes a number")
    if options["rank"] >= job.layout.processes:
        raise JobError(f"--rank {options['rank']}: the layout has ranks 0 to {job.layout.processes - 1}")
    files = OutputFiles.of(words, "svg", "trace")
    began, vocab = time.perf_counter(), vocabulary_size(job)
    # Imported here, because it imports torch, which --help and errors do not need.
    from phalanx.dryrun.rehearse import device_type_of, distinct_ranks, rehearse
    from phalanx.dryrun.show import picture, trace

    device = device_type_of(job)
    predicted = [each.allocated for each in step_memory(rank_spec(job, vocab, device))]
    ranks = distinct_ranks(job) if options["ranks"] else [options["rank"]]
    found: list[RankRehearsal] = []
    with stderr_progress() if len(ranks) > 1 else nullcontext(silent) as progress:
        for rank in ranks:
            found.append(rehearse(job, rank, vocab, device, options["steps"]))
            progress("rehearsing ranks", len(found), len(ranks))
    fullest = max(found, key=lambda each: each.peak)
    limit = job.cluster.accelerator.memory_gib * 2**30
    files.write({"svg": lambda: picture(fullest, job, limit), "trace": lambda: trace(fullest)})
    fits = not limit or fullest.peak <= limit
    document = {
        "layout": job.layout.line(),
        "world": job.layout.processes,
        "device": device,
        "peak_bytes": fullest.as_dict()["peak_bytes"],
        "predicted_peak_bytes": {each.rank: predicted[each.coordinates.get("pp", 0)] for each in found},
        "traffic_bytes": fullest.traffic_bytes,
        "flops": fullest.as_dict()["flops"],
        "fits": fits,
        "ranks": [each.as_dict() for each in found],
        "seconds": round(time.perf_counter() - began, 3),
    }
    words.show(document, "\n\n".join(text(each, predicted[each.coordinates.get("pp", 0)]) for each in found))
    files.tell()
    if not fits:
        echo(f"phalanx: {gib(fullest.peak)} exceed the device's {gib(round(limit))}", file=sys.stderr)
    return 0 if fits else DoesNotFitError.exit_code


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
