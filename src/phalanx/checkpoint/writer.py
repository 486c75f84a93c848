"""A thread of each rank that writes one checkpoint while training goes on.

Threads must not take part in training's collectives: those of two threads may interleave differently on every rank, and
hang. So the ranks agree through the checkpoint's directory, which they share anyway: rank 0 creates it, each rank
leaves its report there, or the reason why it failed, and rank 0 commits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.in_memory import NodeMemory
from phalanx.checkpoint.inventory import Retention, directory_of, name_of
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.remote import CommitRecord, RemoteCheckpoints, folder_of, manifest_of
from phalanx.checkpoint.save import Reports, Save
from phalanx.errors import CheckpointError, DamagedCheckpointError, PhalanxError, RunError
from phalanx.launch import logs
from phalanx.units import gib
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)

NICENESS = 5
"""By how much the thread's share of the processor is below that of training."""
_POLL_S = 0.005
_SLOW_POLL_S = 0.5


@dataclass(frozen=True)
class Order:
    """A checkpoint to be written, the same on all ranks."""

    root: Path
    step: int
    ranks: int
    token: str
    """Names the temporary directory."""
    need: int
    """Bytes of the state, of all ranks together."""
    meta: dict[str, Any]
    retention: Retention
    timeout_s: float
    """Seconds without progress after which storage is said to hang."""
    stripes: int | Literal["auto"] = "auto"
    """`checkpoint.stripes`."""

    @property
    def final(self) -> Path:
        return directory_of(self.root, self.step)


def give_way() -> None:
    """Lowers this thread's share of the processor below that of training."""
    with contextlib.suppress(OSError, AttributeError):  # a thread has its own niceness on Linux only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Writer:
    """One rank's thread for one checkpoint."""

    def __init__(
        self,
        order: Order,
        rank: int,
        parts: Iterable[Part],
        check: Callable[[Part], None],
        nice: bool,
        memory: NodeMemory | None = None,
    ):
        """`parts` are read until the thread ends, each after `check` has returned, which may wait for its elements, or
        raise NotFiniteError. A `nice` thread gives way to training. With a `memory` the checkpoint goes there."""
        self.order, self.rank, self.parts, self.memory = order, rank, parts, memory
        self.check, self.nice = check, nice
        self.path: Path | None = None
        """The checkpoint, known on rank 0 once it is whole."""
        self.error: PhalanxError | None = None
        """RunError or NotFiniteError, once the thread has failed; rank 0 knows that of every rank."""
        self.began = self.progressed = time.monotonic()
        self.ended = 0.0
        self.waiting = False
        self._done, self._abandoned, self._read = threading.Event(), threading.Event(), threading.Event()
        # A daemon: a write that hangs does not keep the process from ending.
        threading.Thread(target=self._run, name=f"checkpoint {order.step}", daemon=True).start()

    @property
    def done(self) -> bool:
        """True once the thread has ended, or is about to, and no longer reads the parts."""
        return self._done.is_set()

    @property
    def hangs(self) -> bool:
        """True if the thread has made no progress for too long. One that waits for other ranks gives up by itself, if
        it still can."""
        patience = self.order.timeout_s * (1.1 if self.waiting else 1)
        return not self.done and time.monotonic() - self.progressed > patience

    @property
    def seconds(self) -> float:
        """Seconds that it took, or has taken so far."""
        return (self.ended or time.monotonic()) - self.began

    def abandon(self) -> None:
        """Gives the checkpoint up: it will not become valid, and the thread ends as soon as it can."""
        self._abandoned.set()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread ends. Returns whether it did."""
        return self._done.wait(timeout_s)

    def wait_read(self, timeout_s: float) -> bool:
        """Waits until the thread no longer reads the parts, though it may go on for other ranks. Returns whether it
        does not."""
        return self._read.wait(timeout_s)

    def hanging(self) -> str:
        """Returns the message about a thread that hangs."""
        if self.memory:
            return (
                f"step {self.order.step} was not kept in memory: the next node has not copied the part of rank "
                f"{self.rank} on {platform.node()} for {self.order.timeout_s:g} s (checkpoint.timeout_s)"
            )
        what = "rank 0's directory was not seen" if self.rank and self.waiting else "nothing was written"
        return (
            f"checkpoint {self.order.final} was given up: storage hangs, {what} by rank {self.rank} on "
            f"{platform.node()} for {self.order.timeout_s:g} s (checkpoint.timeout_s); earlier checkpoints are "
            f"untouched: check the file system of {self.order.root}"
        )

    def _run(self) -> None:
        try:
            if self.nice:
                give_way()
            if self.memory:
                self._keep(self.memory)
            elif self.rank == 0:
                self._lead()
            else:
                self._follow()
        except PhalanxError as error:
            self.error = error
        except Exception as error:
            log.debug("checkpoint %s", self.order.final, exc_info=True)
            self.error = RunError(
                f"checkpoint {self.order.final} could not be written: {type(error).__name__}: {error}"
            )
        self.parts, self.ended = (), time.monotonic()
        self._read.set()
        self._done.set()

    def _keep(self, memory: NodeMemory) -> None:
        """Writes this rank's part to its node's memory, and waits until the next node has a copy."""
        order = self.order
        save = memory.begin(order.step, order.ranks, order.token, order.need // order.ranks)
        save.write(self.rank, self.parts, self._progress, self.check, None if self.rank else order.meta)
        self._read.set()
        while not memory.is_copied(save, self.rank):
            self._abandoned.wait(_POLL_S)
            self._require_wanted()

    def _lead(self) -> None:
        """Writes rank 0's part, waits for the others', and commits."""
        order = self.order
        save = Save.begin(
            *(order.root, order.step, order.ranks, order.need, order.token, order.retention, order.stripes)
        )
        if save is None:
            self.path = order.final
            return
        try:
            save.write(0, self.parts, self._progress, self.check)
            self._read.set()
            self._wait_for_others(save)
            self.path = save.commit(order.meta, order.retention, lambda: not self._abandoned.is_set())
        except BaseException:
            save.discard()
            raise

    def _follow(self) -> None:
        """Writes this rank's part, and tells rank 0 if it cannot."""
        order, self.waiting = self.order, True
        save = Save.named(order.root, order.step, order.ranks, order.token)
        while not save.directory.is_dir():  # rank 0 tells if it could not create it, or if this rank does not see it
            if self._abandoned.wait(_POLL_S):
                return
        self._progress()
        self.waiting = False
        try:
            save.write(self.rank, self.parts, self._progress, self.check)
        except PhalanxError as error:
            save.fail(self.rank, error)
            raise

    def _wait_for_others(self, save: Save) -> None:
        """Waits until every rank has written. Raises RunError if one fails, or all make no progress for too long."""
        seen = -1
        self.waiting = True
        while missing := save.missing():
            if error := save.failure():
                raise error
            if (found := save.bytes_seen()) != seen:
                seen = found
                self._progress()
            if time.monotonic() - self.progressed > self.order.timeout_s:
                raise RunError(
                    f"checkpoint {self.order.final} was given up: rank {', '.join(map(str, missing))} wrote nothing "
                    f"that {platform.node()} sees for {self.order.timeout_s:g} s (checkpoint.timeout_s); earlier "
                    f"checkpoints are untouched: its storage hangs, or is not the {self.order.root} of the other ranks"
                )
            self._abandoned.wait(min(max(0.02 * self.seconds, _POLL_S), _SLOW_POLL_S))
            self._require_wanted()
        self._progress()
        self.waiting = False

    def _progress(self) -> None:
        self._require_wanted()
        self.progressed = time.monotonic()

    def _require_wanted(self) -> None:
        if self._abandoned.is_set():
            raise RunError(f"checkpoint {self.order.final} was given up")


UPLOADS = ".upload-"
"""Prefix of the directories through which the ranks agree on an upload."""
UPLOAD_POLL_S = 0.02
SLOW_UPLOAD_POLL_S = 1.0


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
        pause = UPLOAD_POLL_S
        with self._changed:
            while True:
                begun = [upload for upload in self.queue if self.rank == 0 or upload.reports.is_dir()]
                if begun:
                    self.current = begun[-1]
                    self.queue = self.queue[self.queue.index(self.current) + 1 :]
                    self.progressed = time.monotonic()
                    return self.current
                self._changed.wait(pause if self.queue else None)
                pause = min(1.5 * pause, SLOW_UPLOAD_POLL_S)

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
        pause = UPLOAD_POLL_S
        self._waits_for_others = True
        try:
            while reports.missing():
                if error := reports.failure():
                    raise error
                if not upload.reports.is_dir():
                    raise RunError("it was given up")
                time.sleep(pause)
                pause = min(1.5 * pause, SLOW_UPLOAD_POLL_S)
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
