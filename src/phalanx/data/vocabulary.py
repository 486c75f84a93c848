"""The vocabulary size of a job, without reading its corpus."""

from __future__ import annotations

from phalanx.config.job import Job
from phalanx.config.tokenizers import vocabulary_of
from phalanx.errors import DataError, JobError


def vocabulary_size(job: Job) -> int:
    """Returns `model.vocab_size`, or the size given by the data's settings, or that of the prepared shards.

    Raises JobError if only reading the corpus would tell."""
    data = job.data
    if job.model.vocab_size:
        return job.model.vocab_size
    if stated := vocabulary_of(data):
        return stated
    # A prediction that knows the vocabulary need not wait for numpy.
    from phalanx.data.index import read_index
    from phalanx.data.settings import prepared_path

    try:
        return read_index(prepared_path(data)).vocab_size
    except DataError:
        raise JobError(
            f"model.vocab_size is 0, which means that of data.tokenizer={data.tokenizer}, and the data is not "
            "prepared: set model.vocab_size to a number, or first run `phalanx data prepare` with the same job"
        ) from None
