"""A thread of each rank that copies whole checkpoints to an object store while training goes on.

A local checkpoint is written first, as without a store; then every rank uploads its share of the files, and rank 0
commits (`checkpoint/remote.py`). As in `checkpoint/writer.py` the threads agree through the directory that the ranks
share: rank 0 creates .upload-NNNNNN-TOKEN there when an upload begins, and each rank leaves its report in it.

A checkpoint whose upload has not begun when the next one is saved is not uploaded. Rank 0 decides that where all ranks
meet anyway (`withdraw` and `keep_only`), so that no rank uploads what another has skipped.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.remote import CommitRecord, RemoteCheckpoints, folder_of, manifest_of
from phalanx.checkpoint.reports import Reports
from phalanx.checkpoint.retention import Retention
from phalanx.checkpoint.validity import name_of
from phalanx.checkpoint.writer import give_way
from phalanx.errors import CheckpointError, DamagedCheckpointError, PhalanxError, RunError
from phalanx.launch import logs
from phalanx.units import gib
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)

UPLOADS = ".upload-"
"""Prefix of the directories through which the ranks agree on an upload."""
_POLL_S = 0.02
_SLOW_POLL_S = 1.0


@dataclass(frozen=True)
class Upload:
    """A whole local checkpoint that is to be copied."""

    path: Path
    step: int
    token: str
    """16 hexadecimal digits, the same on all ranks."""
    retention: Retention

    @property
    def reports(self) -> Path:
        """The directory that rank 0 creates when the upload begins, and deletes when it ends."""
        return self.path.with_name(f"{UPLOADS}{name_of(self.step)}-{self.token}")


class Mirror:
    """One rank's part in the copies."""

    def __init__(self, url: str, run: str, root: Path, rank: int, ranks: int, timeout_s: float):
        """The copies of the run's checkpoints, which lie in `root`, go to URL/RUN. After `timeout_s` without progress
        the store is said to hang. Nothing is done until the first `offer`."""
        self.url, self.run, self.rank, self.ranks, self.timeout_s = url, run, rank, ranks, timeout_s
        self.progressed = time.monotonic()
        self.queue: list[Upload] = []
        self.current: Upload | None = None
        self._changed = threading.Condition()
        self._waits_for_others = False
        self._hanging: Upload | None = None
        self._thread: threading.Thread | None = None
        if rank == 0:
            for leftover in root.glob(f"{UPLOADS}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """True while there is something to copy, unless the store hangs."""
        return bool(self.queue or self.current) and self._hanging is None

    def offer(self, upload: Upload) -> None:
        """Copies a whole checkpoint as soon as the one before it is copied. All ranks call it."""
        if self._thread is None:
            # A daemon: a store that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="checkpoint upload", daemon=True)
            self._thread.start()
        with self._changed:
            self.queue.append(upload)
            self._changed.notify()

    def withdraw(self) -> str:
        """Drops what has not begun, on rank 0. Returns the token of the upload that goes on, or nothing."""
        with self._changed:
            for upload in self.queue:
                log.info("step: %d  not uploaded: the upload of an earlier checkpoint still goes on", upload.step)
            self.queue.clear()
            return self.current.token if self.current else ""

    def keep_only(self, token: str) -> None:
        """Drops what rank 0 has dropped, on the other ranks."""
        with self._changed:
            self.queue = [upload for upload in self.queue if upload.token == token]
            self._changed.notify()

    def abandon(self) -> None:
        """Drops everything: the run ends."""
        with self._changed:
            self.queue.clear()
            self._hanging = self.current

    def poll(self) -> None:
        """Reports, once, that the store hangs. Cheap."""
        upload = self.current
        if upload is None or self._waits_for_others or self._hanging is upload:
            return
        if time.monotonic() - self.progressed > self.timeout_s:
            self._hanging = upload
            message = f"{self.url} hangs: no progress for {self.timeout_s:g} s (checkpoint.timeout_s)"
            self._give_up(upload, RunError(message))

    def _run(self) -> None:
        give_way()
        while True:
            upload = self._next()
            try:
                remote = RemoteCheckpoints.of(self.url, self.run)
                self._lead(remote, upload) if self.rank == 0 else self._follow(remote, upload)
            except PhalanxError as error:
                if self._hanging is not upload:  # which is known already
                    self._give_up(upload, error)
            except Exception as error:
                log.debug("upload of %s", upload.path, exc_info=True)
                self._give_up(upload, RunError(f"{type(error).__name__}: {error}"))
            with self._changed:
                self.current = self._hanging = None

    def _next(self) -> Upload:
        """Waits for an upload, and on other ranks than 0 until rank 0 has begun it."""
        pause = _POLL_S
        with self._changed:
            while True:
                begun = [upload for upload in self.queue if self.rank == 0 or upload.reports.is_dir()]
                if begun:
                    self.current = begun[-1]
                    self.queue = self.queue[self.queue.index(self.current) + 1 :]
                    self.progressed = time.monotonic()
                    return self.current
                self._changed.wait(pause if self.queue else None)
                pause = min(1.5 * pause, _SLOW_POLL_S)

    def _lead(self, remote: RemoteCheckpoints, upload: Upload) -> None:
        """Uploads rank 0's share, waits for the others', and commits."""
        began = time.monotonic()
        with contextlib.suppress(DamagedCheckpointError):  # which gives way when this one is committed
            if found := remote.find(upload.step):
                log.info("step: %d  uploaded: %s/%s was there already", upload.step, remote.store.url, found.name)
                return
        record = self._upload_all(remote, upload)
        # From here on a failure deletes nothing: the store may have written the record although its answer was lost.
        logs.check(upload.path.parent.parent)
        committed, where = remote.commit(record), f"{remote.store.url}/{record.name}"
        if not committed:
            log.warning("step %d: another run committed %s meanwhile; this copy was deleted", record.step, where)
            return
        took = time.monotonic() - began
        log.info(
            "step: %d  uploaded: %s  (%s in %s, %.0f MB/s)",
            *(record.step, where, gib(record.bytes), as_time(took), record.bytes / 1e6 / took),
        )
        try:
            remote.remove_expired(upload.retention, lambda: self._progress(upload))
        except (RunError, CheckpointError) as error:
            log.warning("an old checkpoint could not be removed: %s", error)

    def _upload_all(self, remote: RemoteCheckpoints, upload: Upload) -> CommitRecord:
        """Uploads rank 0's share, waits for the others', and uploads the manifest. Returns what is to be committed."""
        folder = folder_of(upload.step, upload.token)
        upload.reports.mkdir()
        try:
            manifest = manifests.read(upload.path)
            self._copy(remote, upload, manifest)
            self._wait_for_others(upload)
            record = CommitRecord.of(manifest, folder, (upload.path / MANIFEST).stat().st_size)
            remote.store.upload(upload.path / MANIFEST, manifest_of(record), lambda: self._progress(upload))
        except BaseException:
            with contextlib.suppress(PhalanxError):
                remote.remove_folder(folder)
            raise
        finally:
            shutil.rmtree(upload.reports, ignore_errors=True)
        return record

    def _follow(self, remote: RemoteCheckpoints, upload: Upload) -> None:
        """Uploads this rank's share."""
        self._copy(remote, upload, manifests.read(upload.path))
        Reports(upload.reports, self.ranks).write(self.rank, {})

    def _copy(self, remote: RemoteCheckpoints, upload: Upload, manifest: Manifest) -> None:
        for name in share_of(manifest, self.rank, self.ranks):
            target = f"{folder_of(upload.step, upload.token)}/{name}"
            remote.store.upload(upload.path / name, target, lambda: self._progress(upload))

    def _wait_for_others(self, upload: Upload) -> None:
        """Waits until every rank has uploaded. Each one notices by itself if its store hangs."""
        reports = Reports(upload.reports, self.ranks)
        reports.write(0, {})
        pause = _POLL_S
        self._waits_for_others = True
        try:
            while reports.missing():
                if error := reports.failure():
                    raise error
                if not upload.reports.is_dir():
                    raise RunError("it was given up")
                time.sleep(pause)
                pause = min(1.5 * pause, _SLOW_POLL_S)
        finally:
            self._waits_for_others = False
            self.progressed = time.monotonic()

    def _progress(self, upload: Upload) -> None:
        if self._hanging is upload or (self.rank and not upload.reports.is_dir()):
            raise RunError("it was given up")
        self.progressed = time.monotonic()

    def _give_up(self, upload: Upload, error: PhalanxError) -> None:
        """Tells of a failure, on rank 0 the user, on other ranks rank 0."""
        if self.rank:
            error = RunError(f"rank {self.rank} on {platform.node()}: {error}")
            log.info("checkpoint %s was not uploaded: %s", upload.path, error)
            Reports(upload.reports, self.ranks).fail(self.rank, error)
            return
        shutil.rmtree(upload.reports, ignore_errors=True)
        log.warning("checkpoint %s was not uploaded: %s; the local one is whole", upload.path, error)


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """Returns the shard files that a rank copies: its own, if as many ranks wrote the checkpoint."""
    return sorted(manifest.files)[rank::ranks]
