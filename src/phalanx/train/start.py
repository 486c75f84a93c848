"""The first weights of a run that starts from others (`model.from`): parameters only, into any layout."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from phalanx.check.start import KEPT, StartingPoint, is_hugging_face, run_of, starting_point
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import merged
from phalanx.checkpoint.inventory import newest_valid
from phalanx.checkpoint.manifest import job_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.hugging_face import config_json
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.config.presets import states_no_rows
from phalanx.data.loader import ShardData
from phalanx.data.template import own_template
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import CheckpointError, DataError, JobError
from phalanx.exchange.folder import BESIDE, open_folder
from phalanx.exchange.import_run import LinkedTensors
from phalanx.train.run_directory import RunDirectory
from phalanx.train.state import TrainState

log = logging.getLogger(__name__)

EMBEDDING = "embed.weight"


def begin(job: Job, state: TrainState, tokenizer: Tokenizer, *, reports: bool) -> None:
    """Takes over the weights that the job names, if it does, with every rank's part of them. One rank `reports` what
    they were trained otherwise for. Raises as `open_start` does."""
    if not job.model.from_:
        if job.model.lora.rank:
            log.warning("adapters beside random weights, which stay as they are: model.from names trained ones")
        return
    source = with_adapters_of(open_start(job.model), job)
    if reports:
        for notice in notices(job, tokenizer):
            log.warning("%s", notice)
    state.start_from(source)
    log.info("started from %s: parameters only", source.manifest.path)


def open_start(model: ModelConfig) -> Reader:
    """Returns the parameters that a model starts from: those of a run, of one of its checkpoints, of consolidated
    safetensors of ours, or of a Hugging Face folder. Raises CheckpointError if there are none."""
    path = Path(model.from_)
    if not is_hugging_face(path):
        return open_source(path)
    folder = open_folder([path], model.ignore_config)
    if head := folder.own_head:
        raise CheckpointError(
            f"{path}: {head} differs from the embedding though tie_word_embeddings is true: `phalanx import hf {path} "
            "--out RUN` keeps both, then model.from=RUN"
        )
    return LinkedTensors(folder.files(folder.described.model), folder.described.model, folder.model_type)


def with_adapters_of(source: Reader, job: Job) -> Reader:
    """Returns what a job starts from: parameters with adapters if the job has the very same, otherwise with adapters
    merged into their matrices. Raises CheckpointError as `merged` does."""
    if (without := merged(source)) is source:
        return source
    return source if job_of(source.manifest).model.lora == job.model.lora else without


def keep_tokenizer(job: Job, data: ShardData, directory: RunDirectory) -> None:
    """Copies the tokenizer and what goes with it into a run, so that text can be generated without the training data.
    Raises RunError if the directory cannot be written."""
    with directory.writing():
        directory.path.mkdir(parents=True, exist_ok=True)
        data.tokenizer.save(directory.path)
        if template := own_template(data.folder):
            template.save(directory.path)
        keep_small_files(job, data.tokenizer, directory.path)


def keep_small_files(job: Job, tokenizer: Tokenizer, directory: Path) -> None:
    """Copies generation settings and the like into a run's `directory` from the imported model that it starts from, so
    that an export has them; not if the run has another tokenizer. Raises OSError."""
    start, kept = Path(job.model.from_), directory / KEPT
    if not job.model.from_ or kept.exists() or not start.exists():  # a run that resumes does not need its start
        return
    there = start if is_hugging_face(start) else run_of(start) / KEPT
    files = [there / name for name in BESIDE if (there / name).is_file()]
    if files and not _another_tokenizer(starting_point(job.model.from_, job.model.ignore_config), tokenizer):
        kept.mkdir()
        for file in files:
            shutil.copyfile(file, kept / file.name)


def vocabulary_of(job: Job, directory: RunDirectory, tokens: int) -> int:
    """Returns the rows of a run's embedding: as many as its tokenizer has `tokens`, or with `model.from` those of its
    own newest checkpoint, or of the weights that it starts from, which may have rows for padding.

    Raises DataError if the tokenizer has more tokens than there are rows; CheckpointError."""
    if not job.model.from_:
        return _padded(job, tokens)
    own = newest_valid(directory.checkpoints, verify=False, report=lambda _: None) if _exists(directory) else None
    manifest = own or open_start(job.model).manifest
    if EMBEDDING not in manifest.tensors:
        raise CheckpointError(f"{manifest.path} has no {EMBEDDING}: it holds no model of this kind")
    rows = manifest.tensors[EMBEDDING].shape[0]
    if tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens:,} tokens, the embedding in {manifest.path} has {rows:,} rows: set "
            "data.tokenizer to the tokenizer.json of the weights that model.from names"
        )
    return rows


def _padded(job: Job, tokens: int) -> int:
    """Returns model.vocab_size where the job states one: an embedding with rows for padding beyond the tokens. The size
    of a preset's own tokenizer is no such statement. Raises JobError if the tokenizer has more tokens."""
    rows = job.model.vocab_size
    if states_no_rows(job.model):
        return tokens
    if rows < tokens:
        raise JobError(
            f"model.vocab_size is {rows:,}, and the tokenizer has {tokens:,} tokens: leave it out, or set at least "
            f"{tokens:,}; more rows are padding"
        )
    return rows


def notices(job: Job, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields what a run does otherwise than the weights that it starts from were trained for, though it fits them."""
    there = starting_point(job.model.from_, job.model.ignore_config)
    for path, here, before in config_json.differing(job.model, there.model):
        yield f"model.{path} is {before} in {there.model.from_}, {here} here: its weights were trained for the former"
    if _another_tokenizer(there, tokenizer):
        yield f"the tokenizer differs from {there.tokenizer}: tokens have another meaning than in the weights"


def _another_tokenizer(there: StartingPoint, tokenizer: Tokenizer) -> bool:
    return bool(there.tokenizer) and Tokenizer.load(Path(there.tokenizer)).fingerprint != tokenizer.fingerprint


def _exists(directory: RunDirectory) -> bool:
    return directory.checkpoints.is_dir()
