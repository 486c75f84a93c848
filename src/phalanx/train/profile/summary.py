"""Rank 0's part of a profile: all ranks' shares, the prediction beside them, one trace of all, and the document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.config.job import Job
from phalanx.cost.breakdown import ComparedPart, compared, compared_memory, model_name
from phalanx.cost.job_spec import on_known_cluster, rank_spec, step_spec
from phalanx.cost.prediction import Parts, step_parts
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import PhalanxError, RunError
from phalanx.pictures import profile as picture
from phalanx.train.profile import report, tracing
from phalanx.train.profile.shares import ProfiledRank, Shares, latest_starts, mean, shares_of, typical
from phalanx.train.profile.spans import spans_of_last_step
from phalanx.train.profile.trace_file import merged
from phalanx.train.step import Stepper

MERGED, PICTURE = "merged.json.gz", "profile.svg"


@dataclass
class Gathered:
    """The report of every rank to rank 0, as plain values."""

    host: str
    clocks: list[int]
    """The rank's clock after each of some barriers."""
    record: dict[str, Any] | None
    memory: dict[str, Any] | None
    files: list[str]
    notes: list[str]


def summarise(
    stepper: Stepper, traces: Path, steps: tuple[int, int], every: Sequence[Gathered], notes: list[str]
) -> list[str]:
    """Writes the document, the picture and the merged trace, and returns the profile's lines. A file that cannot be
    written is a note."""
    records = on_one_clock(every)
    latest = latest_starts(records)
    each_step = [shares_of(record, latest) for record in records]
    means = [mean(shares) for shares in each_step]
    middle = records[typical(means)].rank
    beside, reason = _compared(stepper, records, means)
    files = [name for each in every for name in each.files]
    document: dict[str, Any] = {
        "steps": list(steps),
        "device": stepper.device.type,
        "model": model_name(stepper.job.model),
        "layout": stepper.job.layout.line(),
        "median_rank": middle,
        "ranks": [
            {
                "rank": record.rank,
                "coordinates": record.coordinates,
                "shares": report.shares_document(whole),
                "by_step": [report.shares_document(shares) for shares in by_step],
                "spans": spans_of_last_step(record, latest),
            }
            for record, whole, by_step in zip(records, means, each_step, strict=True)
        ],
        "compared": beside,
        "not_compared": reason,
        "memory": list(_memory_beside_predicted(stepper, every)),
        "traces": str(traces),
        "files": files,
        "notes": notes,
    }

    def write(name: str, content: Callable[[], bytes]) -> None:
        try:
            tracing.write(traces / name, content())
            files.append(name)
        except (OSError, ValueError, RunError) as error:
            notes.append(f"rank 0 could not write {name}: {error}")

    def merge() -> bytes:
        content, left_out = merged([traces / f for f in files if f.startswith("rank_")])
        notes.extend(left_out)
        return content

    if sum(name.startswith("rank_") for name in files) > 1:
        write(MERGED, merge)
    write(PICTURE, lambda: picture.svg(document).encode())
    files.append(report.NAME)
    try:
        tracing.write(traces / report.NAME, (json.dumps(document, indent=1) + "\n").encode())
    except (OSError, RunError) as error:
        files.remove(report.NAME)
        notes.append(f"rank 0 could not write {report.NAME}: {error}")
    return list(report.lines({**document, "notes": []}))


def on_one_clock(every: Sequence[Gathered]) -> list[ProfiledRank]:
    """Returns the records by the clock of rank 0. Processes of a machine share theirs; those of other hosts differ by
    the median of what they read after the same barriers."""
    found = []
    for each in every:
        if each.record is None:
            continue
        record = ProfiledRank.of(each.record)
        if each.host != every[0].host:
            ahead = round(median(own - first for own, first in zip(each.clocks, every[0].clocks, strict=True)))
            record = _shifted(record, -ahead)
        found.append(record)
    return found


def _shifted(record: ProfiledRank, by: int) -> ProfiledRank:
    def moved(at: int) -> int:
        return at + by if at else 0

    return replace(
        record,
        steps=[(a + by, b + by) for a, b in record.steps],
        work={name: [(a + by, b + by) for a, b in spans] for name, spans in record.work.items()},
        calls=[
            replace(
                call,
                start=moved(call.start),
                end=moved(call.end),
                waited=moved(call.waited),
                launched=moved(call.launched),
            )
            for call in record.calls
        ],
    )


def _compared(
    stepper: Stepper, records: Sequence[ProfiledRank], means: Sequence[Shares]
) -> tuple[dict[str, Any] | None, str]:
    """Returns the prediction beside the median rank of the busiest pipeline stage, or the reason why there is none."""
    try:
        predicted, cluster = prediction_of(stepper.job, stepper.vocab_size, stepper.device.type)
    except PhalanxError as error:
        return None, str(error)
    chosen = busiest(records, means)
    parts: list[ComparedPart] = compared(predicted, dict(means[chosen].parts()))
    return {"rank": records[chosen].rank, "cluster": cluster, "parts": report.compared_document(parts, "s")}, ""


def _memory_beside_predicted(stepper: Stepper, every: Sequence[Gathered]) -> Iterator[dict[str, Any]]:
    """Yields the memory of each rank that recorded it, with the prediction for its pipeline rank."""
    job = stepper.job
    predicted = step_memory(rank_spec(job, stepper.vocab_size, stepper.device.type))
    for table in (each.memory for each in every if each.memory is not None):
        own = predicted[table["rank"] // (job.layout.world // job.layout.pp)]  # pp is the outermost axis
        yield {**table, "compared": report.compared_document(compared_memory(own, table["parts"]), "bytes")}


def busiest(records: Sequence[ProfiledRank], means: Sequence[Shares]) -> int:
    """Returns the index of the median rank among those of the pipeline rank that computes longest: the one whose time a
    prediction states."""
    by_stage: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        by_stage.setdefault(record.coordinates.get("pp", 0), []).append(index)

    def work(indices: list[int]) -> float:
        return median(means[n].forward + means[n].backward + means[n].recompute for n in indices)

    slowest = max(by_stage.values(), key=work)
    return slowest[typical([means[n] for n in slowest])]


def prediction_of(job: Job, vocab: int, device: str) -> tuple[Parts, str]:
    """Returns the predicted parts of a step on the job's cluster, or on cluster=local if the job names none, and the
    cluster's name. Raises JobError if nothing is known about it."""
    job = on_known_cluster(job, device)
    return step_parts(step_spec(job, vocab)), job.cluster.preset or job.cluster.accelerator.name
