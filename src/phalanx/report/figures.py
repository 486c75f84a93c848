"""The figures of a run, measured beside predicted: what `phalanx report --json` prints and the page shows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.config.corpora import compared_in
from phalanx.config.job import Job
from phalanx.cost.job_spec import on_known_cluster, rank_spec, step_spec
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.rank_memory import RankMemory, step_memory
from phalanx.cost.spec import StepSpec
from phalanx.cost.traffic import step_traffic
from phalanx.data.documents import with_documents
from phalanx.data.settings import vocabulary_size
from phalanx.errors import PhalanxError
from phalanx.partition.ramp import ramp_of
from phalanx.report.run import RunRecord, history, middle, number, numbers_of, traffic_of
from phalanx.simulate.step import simulate
from phalanx.simulate.timeline import Timeline

MOST_PASSES = 20_000
"""Passes of all pipeline ranks up to which a step is simulated: beyond them it takes seconds."""


@dataclass(frozen=True)
class Expected:
    """A predicted step, or the reason why there is none."""

    spec: StepSpec | None = None
    prediction: Prediction | None = None
    memory: tuple[RankMemory, ...] = ()
    """Memory of each pipeline rank: known also where nothing is known about the devices' speed."""
    timeline: Timeline | None = None
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)
    reason: str = ""
    vocab: int = 0
    """The vocabulary that the run has, 0 if not known."""

    @property
    def cluster(self) -> str:
        """Names the machine of the prediction."""
        cluster = self.spec.cluster if self.spec else None
        return (cluster.preset or cluster.accelerator.name) if cluster else ""


def expected(record: RunRecord) -> Expected:
    """Returns the prediction of the run's step on its cluster, on cluster=local if the job names none."""
    if record.loaded is None:
        return Expected(reason="its config.yaml cannot be read")
    job = record.loaded.job
    try:
        start = record.metrics.last("start") or {}
        vocab = _count(start.get("vocab_size")) or vocabulary_size(job)
        if start.get("device") == "cpu":
            job = replace(job, cluster=replace(job.cluster, device="cpu"))
        spec = with_documents(rank_spec(job, vocab), job)
        found = Expected(
            memory=step_memory(spec),
            traffic=rank_traffic(job, spec, _count(start.get("conversations")) or 1),
            vocab=vocab,
        )
    except PhalanxError as error:
        return Expected(reason=str(error))
    try:
        spec = replace(step_spec(on_known_cluster(job), vocab), documents=spec.documents)
        prediction = predict(spec)
    except PhalanxError as error:
        return replace(found, reason=str(error))
    return replace(found, spec=spec, prediction=prediction, memory=prediction.memory, timeline=_timeline(spec))


def _count(found: Any) -> int:
    """Returns a count that a row states, or 0."""
    return found if isinstance(found, int) and 0 < found < 2**24 else 0


def _timeline(spec: StepSpec) -> Timeline | None:
    if 2 * spec.batch.accumulation * spec.layout.pp * max(1, spec.layout.pp_chunks) > MOST_PASSES:
        return None
    try:
        return simulate(spec)
    except PhalanxError:  # a layout whose steps differ
        return None


def rank_traffic(job: Job, spec: StepSpec, conversations: int = 1) -> dict[str, dict[str, float]]:
    """Returns the bytes that rank 0 sends per step: the rank whose figure `phalanx train` prints. At most so many
    `conversations` are packed into a sequence. With sync=asp replicas are taken to be of equal speed."""
    train, stages = job.train, spec.stages or None
    return step_traffic(
        spec.model,
        spec.layout,
        spec.batch,
        precision=train.precision,
        gradients=train.gradients,
        fp8_scaling=train.fp8_scaling,
        stages=stages,
        optimizer=job.optimizer,
        compared=compared_in(job.data),
        conversations=conversations,
        documents=spec.documents,
    )


def sources_of(record: RunRecord) -> list[dict[str, Any]]:
    """Returns each source by the newest rows: its path, weight (a share of all), tokens drawn with their share, passes
    over it, and its newest validation loss; None for what no row says. Nothing for a run on one corpus."""
    start = record.metrics.last("start") or {}
    known = {
        source["path"]: source
        for source in (start["sources"] if isinstance(start.get("sources"), list) else ())
        if isinstance(source, dict) and isinstance(source.get("path"), str)
    }
    drawn = record.metrics.source_tokens
    losses = numbers_of((record.metrics.last("validation") or {}).get("source_losses"))
    total = sum(drawn.values())
    found = []
    for path in known or drawn:
        tokens, once = drawn.get(path), number(known.get(path, {}).get("tokens"))
        found.append(
            {
                "path": path,
                "weight": number(known.get(path, {}).get("weight")),
                "tokens": tokens,
                "share": tokens / total if tokens is not None and total else None,
                "epochs": tokens / once if tokens is not None and once else None,
                "val_loss": losses.get(path),
            }
        )
    return found


RECENT = 100
"""Newest steps whose median is the measured figure."""


def figures(record: RunRecord) -> dict[str, Any]:
    """Returns the measured figures, None where there are none. Throughput is the median of the newest steps; `tps`,
    `tflops` and `mfu` are per device, `tps_total` is of all devices; none counts `padding` (a share)."""
    metrics = record.metrics
    recent = {name: middle(metrics.values(name, RECENT)) for name in ("step_time_s", "data_wait_s", "tps", "tps_total")}
    recent |= {name: middle(metrics.values(name, RECENT)) for name in ("tflops", "mfu", "padding")}
    start = metrics.last("start") or {}
    validations = [value for row in metrics.of("validation") if (value := number(row.get("val_loss"))) is not None]
    tokens: float | None = None
    if record.loaded:
        job, padding = record.loaded.job, metrics.values("padding")
        share = 1 - sum(padding) / len(padding) if padding else 1
        tokens = ramp_of(job).samples(metrics.last_step) * job.model.seq_len * share
    return {
        "step": metrics.last_step,
        "steps": record.total,
        "loss": next(reversed(metrics.values("loss", 1)), None),
        "val_loss": validations[-1] if validations else None,
        "best_val_loss": min(validations, default=None),
        **recent,
        "memory_bytes": max(metrics.values("memory"), default=None),
        "tokens": tokens,
        "seconds": sum(metrics.values("step_time_s")),
        "peak_flops": number(start.get("peak_flops")),
        "peak_source": str(start.get("peak_source", "")),
        "devices": number(start.get("devices")),
    }


def document(record: RunRecord, prediction: Expected) -> dict[str, Any]:
    """Returns the run as one JSON value."""
    measured = figures(record)
    return {
        "run": str(record.path),
        "state": record.state,
        "layout": record.loaded.job.layout.line() if record.loaded else None,
        "measured": measured,
        "predicted": predicted_figures(prediction, measured["padding"]),
        "not_predicted": prediction.reason,
        "sources": sources_of(record),
        "traffic_bytes": traffic_of(record.metrics.last("traffic")),
        "predicted_traffic_bytes": prediction.traffic,
        "checkpoints": [each.step for each in record.checkpoints],
        "attempts": record.attempts,
        "history": [
            {"time": time, "step": step, "event": kind, "text": words} for time, step, kind, words in history(record)
        ],
        "notes": record.notes,
    }


def predicted_figures(prediction: Expected, padding: float | None) -> dict[str, Any] | None:
    """Returns the predicted figures under the names of the measured ones. A step takes as long with `padding` (a share,
    None: there is none) as without, which throughput does not count."""
    found, tokens = prediction.prediction, 1 - (padding or 0.0)
    if found is None:
        return None
    return {
        "step_time_s": found.step_time_s,
        "tps": tokens * found.tokens_per_s_per_device,
        "tps_total": tokens * found.tokens_per_s,
        "tflops": tokens * found.tflops_per_device,
        "mfu": None if found.mfu is None else tokens * found.mfu,
        "memory_bytes": found.fullest.peak,
        "bubble": found.bubble,
        "cluster": prediction.cluster,
    }
