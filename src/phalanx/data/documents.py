"""The documents from which the predictions of a job take their means: those of its prepared data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from phalanx.data.settings import prepared_path
from phalanx.errors import DataError
from phalanx.partition.document_sample import DocumentSample, sampled

if TYPE_CHECKING:
    from phalanx.config.job import Job
    from phalanx.cost.spec import StepSpec
    from phalanx.plan.space import PlanRequest

Asked = TypeVar("Asked", "StepSpec", "PlanRequest")


def with_documents(about: Asked, job: Job) -> Asked:
    """Returns the spec or request of a job with the documents of the first sequences that training reads, unless it
    states their length, attention crosses them, or the data is not prepared. Raises JobError for invalid settings of
    the data."""
    if about.documents is None or about.documents.lengths:
        return about
    # Here, because only such jobs wait for numpy.
    import numpy as np

    from phalanx.data.mixture import open_split

    try:
        split = open_split(prepared_path(job.data), "train", job.model.seq_len, job.data)
        rows = min(sampled(job.model.seq_len), split.sample_count)
        found = split.micro_batch(split.order(0, rows, job.train.seed), np.arange(rows)).documents
    except DataError:
        return about
    assert found is not None, "data.document_mask"
    return replace(about, documents=DocumentSample.of(found))
