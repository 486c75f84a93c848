"""Opens the data of a run, the same on all ranks."""

from __future__ import annotations

from pathlib import Path

from phalanx.comm.agree import on_rank_zero
from phalanx.config.job import Job
from phalanx.data.loader import ShardData
from phalanx.data.mixture import open_split
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.train.agreement import find_shards, open_same_shards
from phalanx.train.damaged_samples import damaged_samples
from phalanx.train.run_directory import RunDirectory
from phalanx.train.shared import require_shared


def open_data(job: Job, directory: RunDirectory, ranks: Ranks) -> tuple[ShardData, ShardData | None]:
    """Returns the training samples, and those of the validation if there is one. A collective.

    Raises DataError for data that cannot be made or read, RunError if the ranks see different data, and JobError if the
    run reads a source of a mixture more often than the job allows."""
    shards = Path(on_rank_zero(lambda: str(find_shards(job.data))))
    require_shared(directory, shards, ranks)
    index = open_same_shards(shards)
    damaged = {folder: damaged_samples(job, folder) for folder in index.folders(shards)}

    def opened(split: str) -> ShardData:
        of_split = {folder: samples.get(split, ()) for folder, samples in damaged.items()}
        return open_split(shards, split, job.model.seq_len, job.data, of_split)

    train = opened("train")
    if problems := train.epoch_problems(job.train.steps * job.train.global_batch):
        raise JobError(problems)
    return train, opened("val") if job.train.eval_samples else None
