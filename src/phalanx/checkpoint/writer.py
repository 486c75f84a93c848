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
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.parts import Part
from phalanx.checkpoint.retention import Retention
from phalanx.checkpoint.save import Save
from phalanx.checkpoint.validity import directory_of
from phalanx.errors import PhalanxError, RunError

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
    ):
        """`parts` are read until the thread ends, each after `check` has returned, which may wait for its elements, or
        raise NotFiniteError. A `nice` thread gives way to training."""
        self.order, self.rank, self.parts = order, rank, parts
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
            if self.rank == 0:
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

    def _lead(self) -> None:
        """Writes rank 0's part, waits for the others', and commits."""
        order = self.order
        save = Save.begin(order.root, order.step, order.ranks, order.need, order.token, order.retention)
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
