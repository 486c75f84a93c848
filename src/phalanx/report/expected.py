"""The cost model's answer for a run's job: what the report puts beside the measured step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.config.corpora import has_pairs
from phalanx.config.job import Job
from phalanx.cost.job_spec import on_known_cluster, rank_spec, step_spec
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.rank_memory import RankMemory, step_memory
from phalanx.cost.spec import StepSpec
from phalanx.cost.traffic import step_traffic
from phalanx.data.vocabulary import vocabulary_size
from phalanx.errors import PhalanxError
from phalanx.report.run import RunRecord
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
        vocab = _vocabulary(record, job)
        start = record.metrics.last("start") or {}
        if start.get("device") == "cpu":
            job = replace(job, cluster=replace(job.cluster, device="cpu"))
        spec = rank_spec(job, vocab)
        found = Expected(memory=step_memory(spec), traffic=rank_traffic(job, spec, _conversations(record)), vocab=vocab)
    except PhalanxError as error:
        return Expected(reason=str(error))
    try:
        spec = step_spec(on_known_cluster(job), vocab)
        prediction = predict(spec)
    except PhalanxError as error:
        return replace(found, reason=str(error))
    return replace(found, spec=spec, prediction=prediction, memory=prediction.memory, timeline=_timeline(spec))


def _vocabulary(record: RunRecord, job: Job) -> int:
    start = record.metrics.last("start") or {}
    found: Any = start.get("vocab_size")
    return found if isinstance(found, int) and 0 < found < 2**24 else vocabulary_size(job)


def _conversations(record: RunRecord) -> int:
    found: Any = (record.metrics.last("start") or {}).get("conversations")
    return found if isinstance(found, int) and 0 < found < 2**24 else 1


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
        stages=stages,
        optimizer=job.optimizer,
        pairs=has_pairs(job.data),
        conversations=conversations,
    )
