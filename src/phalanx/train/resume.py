"""Where a run goes on: from the newest whole checkpoint of its directory, or of the object store if that is newer.

A checkpoint of the store is copied to the run directory first, by all ranks together: each fetches an equal share of
the files. Ranks that fetched only the bytes that they hold would fetch those of replicas several times, and nothing
else (the planner, rewinding, `phalanx generate`) would find the checkpoint.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.bounded import MOST_BYTES
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.inventory import check_digests, directory_of
from phalanx.checkpoint.manifest import MANIFEST
from phalanx.checkpoint.remote import CommitRecord, RemoteCheckpoints, manifest_of, with_patience
from phalanx.checkpoint.save import KEEP_ALL, Save
from phalanx.checkpoint.writer import share_of
from phalanx.comm.agree import on_every_rank, on_rank_zero
from phalanx.config.job import Job
from phalanx.data.files import write_atomic
from phalanx.errors import CheckpointError, DamagedCheckpointError, RunError
from phalanx.launch.ranks import Ranks
from phalanx.train.run_directory import RunDirectory, require_same_job
from phalanx.train.state import TrainState

log = logging.getLogger(__name__)


@dataclass
class _Below:
    """The step that a checkpoint to resume from must be below, on the disk and on the store; None: any."""

    local: int | None = None
    remote: int | None = None


class Resume:
    """One rank's part in finding, fetching and loading checkpoints."""

    def __init__(self, job: Job, ranks: Ranks, directory: RunDirectory):
        self.job, self.ranks, self.directory = job, ranks, directory
        self.remote: RemoteCheckpoints | None = None
        self.tested = False

    def load(self, state: TrainState) -> Path | None:
        """Loads the newest whole checkpoint, together with all other ranks, and returns it; None if there is none. One
        that proves damaged while it is read gives way to the one before it. A store that fails is reported, unless
        the run would start from the beginning without it.

        Raises CheckpointError if all checkpoints are damaged, JobError if they belong to another job, RunError."""
        below, error = _Below(), None
        with_store = bool(self.job.checkpoint.remote)
        while chosen := on_rank_zero(partial(self._choose, below, with_store)):
            step, path = chosen["step"], directory_of(self.directory.checkpoints, chosen["step"])
            with_store = with_store and chosen["with_store"]
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
                return path
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
        if record:
            token = secrets.token_hex(8)
            return {"step": record.step, "record": asdict(record), "token": token, "with_store": True}
        if local is None and damage:
            raise damage
        return {"step": local.step, "with_store": with_store} if local else None

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
