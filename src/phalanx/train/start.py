"""How a run begins: what watches it, the first weights of one that starts from others (`model.from`), and the newest
checkpoint, of the run directory or of an object store, for one that resumes."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.kinds import chosen_kinds
from phalanx.blocks.parameters import count, trained_text
from phalanx.bounded import MOST_BYTES
from phalanx.check.start import KEPT, StartingPoint, is_hugging_face, run_of, starting_point
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import merged
from phalanx.checkpoint.in_memory import KeptStep, NodeMemory, PeerReader, whole_steps
from phalanx.checkpoint.inventory import check_digests, directory_of, newest_valid
from phalanx.checkpoint.manifest import MANIFEST, job_of
from phalanx.checkpoint.remote import CommitRecord, RemoteCheckpoints, manifest_of, with_patience
from phalanx.checkpoint.save import KEEP_ALL, Save
from phalanx.checkpoint.shard_file import Reader
from phalanx.checkpoint.writer import share_of
from phalanx.comm import calls
from phalanx.comm.agree import gather_json, on_every_rank, on_rank_zero
from phalanx.config.corpora import CORPORA
from phalanx.config.hugging_face import config_json
from phalanx.config.job import Job, Train
from phalanx.config.model import ModelConfig
from phalanx.config.presets import states_no_rows
from phalanx.data.files import write_atomic
from phalanx.data.loader import ShardData
from phalanx.data.packing import RangeData
from phalanx.data.template import find_template, own_template
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import CheckpointError, DamagedCheckpointError, DataError, JobError, RunError
from phalanx.exchange.folder import BESIDE, open_folder
from phalanx.exchange.import_run import LinkedTensors
from phalanx.launch.ranks import HEARTBEATS, Ranks
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.watchdog import join
from phalanx.model.attention_blocks import kernels_text
from phalanx.model.recurrent import kernel_text
from phalanx.parallel.precision import DTYPES
from phalanx.partition.derived import Batch
from phalanx.train.run_directory import RunDirectory, require_same_job
from phalanx.train.state import TrainState
from phalanx.units import counted


def watch(job: Job, ranks: Ranks, log_file: Path | None) -> None:
    """Starts this rank's heartbeat, and the watchdog of its node, unless our own launcher did. All ranks call it.

    `log_file` is rank 0's: reports go to the folder of its attempt."""
    calls.record()
    if HEARTBEATS in os.environ or ranks.world == 1:
        return
    reports = Path(on_rank_zero(lambda: str(log_file.parents[1] if log_file else RunDirectory.of(job).logs)))
    limits = Limits(job.run.hang_limit_s, job.run.timeout_s, follows=not job.run.hang_s)
    token = on_rank_zero(lambda: secrets.token_hex(8))
    join(ranks, gather_json(platform.node()), token, limits, reports, RunDirectory.of(job).metrics)


log = logging.getLogger(__name__)

EMBEDDING = "embed.weight"


def log_start(
    job: Job, device: torch.device, batch: Batch, data: ShardData, vocab: int, val: ShardData | None = None
) -> None:
    """Logs what the run trains, on what, and with what it is validated if that is less than was asked for."""
    model = job.model
    log.info("run: %s  layout: %s  precision: %s", RunDirectory.of(job).path, job.layout.line(), job.train.precision)
    layers = counted(model.n_layers, "layer")
    log.info("model: %s parameters, %s, vocabulary %d", f"{count(model, vocab):,}", layers, vocab)
    if lora := model.lora.rank:
        log.info("adapters: rank %d beside %s, training %s", lora, model.lora.targets, trained_text(model, vocab))
    if model.warms_up:
        log.info("sparse attention: the indexer alone is trained, %s", trained_text(model, vocab))
    if device.type == "cuda":
        log.info("attention: %s", kernels_text(device))
    if "delta" in chosen_kinds(model, "attention"):
        kernel = kernel_text(device, DTYPES[job.train.precision], model.delta.key_head_dim)
        log.info("gated delta nets: %s", kernel)
    log.info("batch: %s; %s training samples", batch.equation(), f"{data.sample_count:,}")
    if isinstance(data, RangeData):
        log.info("data: %s", data.facts.line())
    if val and not job.data.mix and val.sample_count < job.train.eval_samples != Train().eval_samples:
        asked = job.train.eval_samples
        log.info("validation: %s samples, the whole split, of train.eval_samples=%d", f"{val.sample_count:,}", asked)


def begin(job: Job, state: TrainState, tokenizer: Tokenizer, *, reports: bool) -> None:
    """Takes over the weights that the job names, if it does, with every rank's part of them. One rank `reports` what
    they were trained otherwise for. Raises as `open_start` does."""
    if not job.model.from_:
        if job.model.freezes:
            what = "an indexer" if job.model.warms_up else "adapters"
            log.warning("%s beside random weights, which stay as they are: model.from names trained ones", what)
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
    """Returns the rows of a run's embedding: model.vocab_size where the job states it, or as many as its tokenizer has
    `tokens`; with `model.from` those of its own newest checkpoint, or of the weights that it starts from. There may be
    rows for padding.

    Raises JobError or DataError if the tokenizer has more tokens than there are rows; CheckpointError."""
    if not job.model.from_:
        rows = job.model.vocab_size
        if states_no_rows(job.model):  # the size of a preset's own tokenizer is no statement about padding
            return tokens
        if rows < tokens:
            raise JobError(
                f"model.vocab_size is {rows:,}, and the tokenizer has {tokens:,} tokens: leave it out, or set at least "
                f"{tokens:,}; more rows are padding"
            )
        return rows
    own = None
    if directory.checkpoints.is_dir():
        own = newest_valid(directory.checkpoints, verify=False, report=lambda _: None)
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


def notices(job: Job, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields what a run does otherwise than the weights that it starts from were trained for, though it fits them."""
    there = starting_point(job.model.from_, job.model.ignore_config)
    new_head = {"reward", "tied"} if job.model.reward else set()
    for path, here, before in config_json.differing(job.model, there.model):
        if path in new_head or (path.startswith("sparse.") and not there.model.sparse.top_k):  # what begins
            continue
        yield f"model.{path} is {before} in {there.model.from_}, {here} here: its weights were trained for the former"
    if _another_tokenizer(there, tokenizer):
        yield f"the tokenizer differs from {there.tokenizer}: tokens have another meaning than in the weights"
    if first := tokenizer.decode(tokenizer.first_ids()):
        template = find_template(job.data) if CORPORA[job.data.corpus].rows is not None else None
        if not (template and template.begins_with(first)):
            mend = ": write {{ bos_token }} first in a copy of data.template" if template else ""
            yield f"texts begin without {first}, with which the tokenizer's own begin{mend}"


def _another_tokenizer(there: StartingPoint, tokenizer: Tokenizer) -> bool:
    return bool(there.tokenizer) and Tokenizer.load(Path(there.tokenizer)).fingerprint != tokenizer.fingerprint


@dataclass
class _Below:
    """The step that a checkpoint to resume from must be below, on the disk, on the store and in memory; None: any."""

    local: int | None = None
    remote: int | None = None
    kept: int | None = None


class Resume:
    """One rank's part in finding, fetching and loading checkpoints: the newest whole one of the run directory, or of
    the object store if that is newer.

    One of the store is copied to the run directory first, by all ranks together: each fetches an equal share of the
    files. Ranks that fetched only the bytes that they hold would fetch those of replicas several times, and nothing
    else (the planner, rewinding, `phalanx generate`) would find the checkpoint."""

    def __init__(self, job: Job, ranks: Ranks, directory: RunDirectory):
        self.job, self.ranks, self.directory = job, ranks, directory
        self.remote: RemoteCheckpoints | None = None
        self.tested = False
        self.memory = NodeMemory.of(directory.path, job.run.node_lost_s)
        self.kept: dict[str, KeptStep] = {}

    def load(self, state: TrainState) -> tuple[Path, str] | None:
        """Loads the newest whole checkpoint, together with all other ranks. Returns its path, and its name if it was in
        the memory of nodes; None if there is none. One that proves damaged while it is read gives way to the one before
        it. A store that fails is reported, unless the run would start from the beginning without it.

        Raises CheckpointError if all checkpoints are damaged, JobError if they belong to another job, RunError."""
        below, error, spoilt = _Below(), None, False
        self.kept = self._kept_steps()
        with_store = bool(self.job.checkpoint.remote)
        while chosen := on_rank_zero(partial(self._choose, below, with_store)):
            step, path = chosen["step"], directory_of(self.directory.checkpoints, chosen["step"])
            with_store = with_store and chosen["with_store"]
            if "kept" in chosen:
                below.kept, kept = step, self.kept[chosen["kept"]]
                try:
                    return self._load_kept(state, kept, chosen["manifest"]), kept.name
                except DamagedCheckpointError as damage:
                    spoilt = True
                    log.warning("%s; trying an earlier checkpoint", damage)
                    continue
            try:
                if "record" in chosen:
                    below.remote = step
                    if self._fetch(CommitRecord(**chosen["record"]), chosen["token"]):
                        below.local = None if below.local is None else max(below.local, step + 1)
                    continue
                below.local = step
                state.load(path)
            except DamagedCheckpointError as damage:
                error = damage
                log.warning("%s; trying the one before it", damage)
            except RunError as failure:
                error, with_store = failure, False
                log.warning("%s; looking for an older checkpoint in %s", failure, self.directory.checkpoints)
            else:
                return path, ""
        if spoilt:
            state.restart()
        if isinstance(error, DamagedCheckpointError):
            raise CheckpointError(f"no checkpoint in {self.directory.checkpoints} is whole; the oldest: {error}")
        if error:
            raise error
        return None

    def _choose(self, below: _Below, with_store: bool) -> dict[str, Any] | None:
        """Returns the newest checkpoint, on rank 0: the one of the store if it is newer than those of the directory."""
        local, record, damage = None, None, None
        try:
            local = self.directory.resume_from(self.job, before=below.local)
        except CheckpointError as error:
            damage = error
        if with_store:
            try:
                record = self._patient(lambda _: self._newest(below.remote, local.step if local else -1))
            except RunError as error:
                if local is None:
                    raise RunError(
                        f"{error}; without a checkpoint in {self.directory.checkpoints} the run would begin again, "
                        "although one may be on the store: make it reachable, or set checkpoint.remote=''"
                    ) from None
                with_store = False
                log.warning("%s; a newer checkpoint may be there than %s", error, local.path)
            except CheckpointError as error:
                damage = damage or error
        if found := self._newest_kept(below.kept, max(local.step if local else -1, record.step if record else -1)):
            return {"step": found[0].step, "kept": found[0].name, "manifest": found[1], "with_store": with_store}
        if record:
            token = secrets.token_hex(8)
            return {"step": record.step, "record": asdict(record), "token": token, "with_store": True}
        if local is None and damage:
            raise damage
        return {"step": local.step, "with_store": with_store} if local else None

    def _kept_steps(self) -> dict[str, KeptStep]:
        """Returns the steps that are whole in the memory of nodes, the newest first. A collective."""
        if not self.memory:
            return {}
        parts = self.memory.parts() if self.ranks.local_rank == 0 else []
        return {kept.name: kept for kept in whole_steps(gather_json([self.memory.place, parts]))}

    def _newest_kept(self, below: int | None, least: int) -> tuple[KeptStep, str] | None:
        """Returns the newest step of at least `least` that is whole in memory, with its manifest, on rank 0."""
        for kept in self.kept.values():
            if kept.step >= least and (below is None or kept.step < below):
                assert self.memory is not None
                try:
                    return kept, self.memory.manifest(kept).text()
                except DamagedCheckpointError as damage:
                    log.warning("%s; trying an earlier checkpoint", damage)
        return None

    def _load_kept(self, state: TrainState, kept: KeptStep, text: str) -> Path:
        """Loads a step from the memory of nodes. Raises DamagedCheckpointError on all ranks."""
        memory = self.memory
        assert memory is not None
        on_every_rank(lambda: memory.put(kept.name, text) if self.ranks.local_rank == 0 else None)
        manifest = on_every_rank(lambda: manifests.read(memory.own / kept.name))
        state.load_from(PeerReader(manifest, memory, kept, verify=self.job.checkpoint.verify))
        return manifest.path

    def _newest(self, before: int | None, above: int) -> CommitRecord | None:
        remote = self._store()
        if not self.tested:
            remote.store.require_put_if_absent()
            self.tested = True
        return remote.newest(before, above, log.warning)

    def _fetch(self, record: CommitRecord, token: str) -> bool:
        """Copies a checkpoint to the run directory, with all other ranks. Returns False if it was there already. Raises
        DamagedCheckpointError or RunError on all ranks."""
        log.info("fetching the checkpoint of step %d from %s", record.step, self.job.checkpoint.remote)
        root, world, rank = self.directory.checkpoints, self.ranks.world, self.ranks.rank
        save = Save.named(root, record.step, world, token)
        if not on_rank_zero(lambda: self._begin(record, token)):
            return False
        try:
            on_every_rank(lambda: self._patient(partial(self._copy, record, save.directory, rank, world)))
        except (CheckpointError, RunError):
            if rank == 0:
                save.discard()
            raise
        on_rank_zero(lambda: str(save.publish(KEEP_ALL)))
        return True

    def _begin(self, record: CommitRecord, token: str) -> bool:
        """Creates the directory with the manifest, on rank 0. Returns False if the checkpoint is there already."""
        save = Save.begin(self.directory.checkpoints, record.step, self.ranks.world, record.bytes, token)
        if save is None:
            return False
        try:
            content = self._patient(lambda _: self._store().store.read(manifest_of(record), MOST_BYTES))
            write_atomic(save.directory / MANIFEST, content)
            manifest = manifests.read(save.directory)
            if manifest.step != record.step:
                raise ValueError(f"its manifest is of step {manifest.step}")
            require_same_job(manifest, self.job, self._store().store.url)
        except (FileNotFoundError, ValueError) as error:
            save.discard()
            raise DamagedCheckpointError(f"checkpoint {self._store().store.url}/{record.name}: {error}") from None
        except BaseException:
            save.discard()
            raise
        return True

    def _copy(self, record: CommitRecord, directory: Path, rank: int, world: int, progress: Callable[[], None]) -> None:
        """Fetches this rank's share of the files and checks their digests."""
        manifest, store = manifests.read(directory), self._store().store
        for name in share_of(manifest, rank, world):
            try:
                store.download(f"{record.folder}/{name}", directory / name, progress)
                if self.job.checkpoint.verify:
                    check_digests(manifest, [name])
            except (FileNotFoundError, DamagedCheckpointError):
                raise DamagedCheckpointError(
                    f"checkpoint {store.url}/{record.name}: {name} is missing, or does not match its digest"
                ) from None
            progress()

    def _store(self) -> RemoteCheckpoints:
        if self.remote is None:
            self.remote = RemoteCheckpoints.of(self.job.checkpoint.remote, self.job.run.name)
        return self.remote

    def _patient(self, work: Callable[[Callable[[], None]], Any]) -> Any:
        return with_patience(self.job.checkpoint.timeout_s, self.job.checkpoint.remote, work)
