"""The vocabulary size of a job, without reading its corpus."""

from __future__ import annotations

from phalanx.config.data import Data
from phalanx.config.job import Job
from phalanx.config.presets import states_no_rows
from phalanx.config.tokenizers import vocabulary_of
from phalanx.errors import DataError, JobError


def vocabulary_size(job: Job) -> int:
    """Returns the rows of the embedding that training gives the job, or the vocabulary without padding where they are
    its own: `model.vocab_size`, unless that only is the size of a preset's own tokenizer and the job names another; or
    the size given by the data's settings, or that of the prepared shards.

    Raises JobError if only reading the corpus would tell."""
    data, rows = job.data, job.model.vocab_size
    named = (data.corpus, data.tokenizer) != (Data.corpus, Data.tokenizer)
    if rows and (job.model.from_ or not named or not states_no_rows(job.model)):
        return rows
    if stated := vocabulary_of(data):
        return stated
    # A prediction that knows the vocabulary need not wait for numpy.
    from phalanx.data.index import read_index
    from phalanx.data.settings import prepared_path

    try:
        return read_index(prepared_path(data)).vocab_size
    except DataError:
        if rows:
            return rows
        raise JobError(
            f"model.vocab_size is 0, which means that of data.tokenizer={data.tokenizer}, and the data is not "
            "prepared: set model.vocab_size to a number, or first run `phalanx data prepare` with the same job"
        ) from None
