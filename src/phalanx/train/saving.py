"""When a run's checkpoints are written, what waits for them, and what their failure means for the run."""

from __future__ import annotations

import copy
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.in_memory import NodeMemory, kept_name
from phalanx.checkpoint.inventory import Retention, directory_of, newest_valid
from phalanx.checkpoint.parts import Part, Share, Snapshot, all_finite, is_finite
from phalanx.checkpoint.writer import Mirror, Order, Upload, Writer
from phalanx.comm.agree import on_rank_zero, require_same_calls
from phalanx.errors import CheckpointError, NotFiniteError, RunError, SupersededError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.offload import will_read
from phalanx.train.callbacks import Callback, Done
from phalanx.train.guard import Guard
from phalanx.train.metrics import Recorder
from phalanx.train.requests import Milestones, SaveTimer, StopRequest
from phalanx.train.state import TrainState
from phalanx.units import seconds as as_time

log = logging.getLogger(__name__)

_RUNNING, _DONE, _HANGING, _FATAL, _KEPT = range(5)
_ENDS_THE_RUN = (NotFiniteError, SupersededError)
"""Errors of a save for which no policy lets the run go on."""
_LONGEST_PAUSE_S = 0.05
"""Seconds between two exchanges of status, at most."""
_TOKEN_BITS = 62
"""Tokens travel as integers of 64 bits."""
_LAST_PATIENCE_S = 3.0
"""Seconds without progress after which a run that ends with an error stops waiting for a checkpoint."""


class Saving(Callback):
    """One rank's part in saving a run's checkpoints. A context manager: leaving it waits for a save that goes on."""

    def __init__(self, state: TrainState, root: Path, stop: StopRequest):
        self.state, self.root, self.stop = state, root, stop
        self.newest: Path | None = None
        """The newest whole checkpoint of the run, known on rank 0."""
        self.world, self.device = state.stepper.mesh.axis("world"), state.stepper.device
        self.options = state.stepper.job.checkpoint
        self.snapshot = Snapshot(self.device)
        state.stepper.optimizer.before_write = self.hold
        self.retention = Retention(self.options.keep, self.options.keep_every, self.options.keep_best)
        self.mirror: Mirror | None = None
        if self.options.remote:
            run, timeout_s = state.stepper.job.run.name, self.options.timeout_s
            self.mirror = Mirror(self.options.remote, run, root, self.world.rank, self.world.size, timeout_s)
        self.writer: Writer | None = None
        self.written: Callable[[int, Path, float, float], None] = lambda *_: None
        """Takes step, path, seconds and the seconds that training waited, of each checkpoint that is whole."""
        self.memory = NodeMemory.of(root.parent, state.stepper.job.run.node_lost_s)
        self.kept = ""
        """Name of the newest step that is whole in the memory of the nodes, as far as all ranks know."""
        self.told = True
        self.last = False
        self.blocked = 0.0

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for a save that goes on, as long as it makes progress. No collective: another rank may be lost."""
        if self.mirror:
            self.mirror.abandon()
        if self.writer is None:
            return
        while not self.writer.join(0.1) and time.monotonic() - self.writer.progressed < _LAST_PATIENCE_S:
            if self.writer.memory and self.writer.wait_read(0.0):
                break  # the launchers do the rest
        self.writer.abandon()
        self.poll()

    def save(self, last: bool = False) -> float:
        """Saves the state, together with all other ranks. Returns the seconds for which training was blocked.

        A save that goes on is waited for first. Then training goes on while the state is copied, and the optimizer
        waits for that (`hold`); without `checkpoint.background`, or if some host has no memory for the copy, training
        goes on once the checkpoint is whole. So it does after the `last` save of a run, which raises RunError on all
        ranks if it fails; other failures are dealt with as `checkpoint.on_failure` says.

        Raises NotFiniteError on all ranks if a parameter or a moment holds NaN or infinity. A copy is checked in the
        background while it is written; then the run is asked to stop, and its last save raises the error."""
        began = time.perf_counter()
        status = self.settle()
        self.last = last
        if status and status[0] == _FATAL:
            on_rank_zero(self._raise_error)
        hanging = [str(rank) for rank, code in enumerate(status) if code == _HANGING]
        if hanging and self.writer and not self.writer.memory:
            message = (
                f"no checkpoint of step {self.state.step}: the storage of rank {', '.join(hanging)} still hangs in the "
                f"one before; earlier checkpoints in {self.root} are untouched"
            )
            if last:
                raise RunError(message)
            self._fail(message)
            return time.perf_counter() - began
        return self._write(began, None)

    def keep(self) -> float:
        """Copies the state to the memory of this node and the next one, in the background; nothing is done while an
        earlier save goes on. All ranks call it. Returns the seconds for which training was blocked."""
        began = time.perf_counter()
        self.poll()
        if not {_DONE, _KEPT}.issuperset(self._exchanged(self._status(self.writer) if self.writer else _DONE)):
            return time.perf_counter() - began
        return self._write(began, self.memory)

    def _exchanged(self, mine: int) -> list[int]:
        """Returns the status of all ranks, and notes whether all have kept the newest save in memory."""
        every = torch.empty(self.world.size, dtype=torch.int64, device=self.device)
        self.world.all_gather(every, torch.tensor([mine], device=self.device)).wait()
        status = every.tolist()
        if self.writer and set(status) == {_KEPT}:
            self.kept = _name(self.writer.order)
        return status

    def _write(self, began: float, memory: NodeMemory | None) -> float:
        """Begins to write the state, to storage or to the `memory` of the nodes."""
        last, shares = self.last, self.state.shares()
        values = self._copied(shares) if self.options.background and not last else None
        token, need, goes_on = self._agree(shares, values is not None, withdraws=memory is None)
        self.told = False
        uploading = self.mirror.current if self.mirror else None
        retention = replace(self.retention, uploading=uploading.step if uploading else None)
        facts = copy.deepcopy(self.state.meta()), retention, self.options.timeout_s, self.options.stripes
        order = Order(self.root, self.state.step, self.world.size, token, need, *facts)
        if memory:
            memory.keep_only({self.kept, _name(order)})
        if values is not None:
            self.snapshot.begin()
        copies = zip(shares, values or [None] * len(shares), strict=True)
        parts = (part for share, value in copies for part in share.parts(value))
        check = self._check(shares) if values is not None else lambda part: None
        self.writer = Writer(order, self.world.rank, parts, check, goes_on, memory)
        if goes_on and not self.state.stepper.job.layout.is_synchronous:
            self.snapshot.hold()  # replicas average their parameters, or adopt a server's, beside the optimizer
        self.blocked = time.perf_counter() - began
        if not goes_on:
            self.settle()
            self.blocked = time.perf_counter() - began
        if last:
            self.finish()
        return self.blocked

    def hold(self) -> None:
        """Waits until the state may change: a copy of it may still be made, or what is in files still be written."""
        began = time.perf_counter()
        self.snapshot.hold()
        while self.snapshot.borrows and (writer := self.writer) and not writer.wait_read(_LONGEST_PAUSE_S):
            heartbeat.beat()
            if writer.hangs:
                writer.abandon()
                break
        self.blocked += time.perf_counter() - began

    def finish(self) -> None:
        """Waits until the newest save is whole, together with all other ranks. Raises on all of them its error if it
        failed."""
        self.last = True
        self.settle()
        on_rank_zero(self._require_written)

    def after_step(self, done: Done) -> None:
        self.poll()

    def poll(self) -> None:
        """Reports, once, what became of a save in the background. Cheap, and no collective."""
        if self.mirror:
            self.mirror.poll()
        writer = self.writer
        if writer is None or self.told:
            return
        if writer.done:
            self.told = True
            if isinstance(writer.error, _ENDS_THE_RUN) and self.world.rank == 0:
                log.warning("%s; the run stops", writer.error)
                self.stop.ask("since its state must not be saved")
            elif writer.error:
                self._fail(str(writer.error))
            elif writer.memory:
                level = logging.DEBUG if self.kept else logging.INFO
                took = as_time(writer.seconds), as_time(self.blocked)
                where = writer.memory.line
                log.log(level, "step: %d  kept in %s  (%s, training waited %s)", writer.order.step, where, *took)
            else:
                if writer.path:
                    self.newest = writer.path
                    log.info(
                        "step: %d  checkpoint: %s  (%s, training waited %s)",
                        *(writer.order.step, writer.path, as_time(writer.seconds), as_time(self.blocked)),
                    )
                    self.written(writer.order.step, writer.path, writer.seconds, self.blocked)
                self.upload(writer.order.step, writer.order.token)
        elif writer.hangs:
            writer.abandon()
            self.told = True
            self._fail(writer.hanging())

    def settle(self) -> list[int]:
        """Waits, together with all other ranks, until a save that goes on has ended or is given up. Returns the ranks'
        status, nothing if there was no save.

        The ranks exchange their status again and again, so that none waits long in one collective."""
        if self.writer is None:
            return []
        writer = self.writer
        # Once rank 0 has ended, the checkpoint is whole, or never will be.
        status = self._together(lambda: self._status(writer), writer.abandon, writer.join)
        self.poll()
        return status

    def resumed(self, path: Path, kept: str) -> None:
        """Records the checkpoint that the state was loaded from: the one `kept` in the memory of nodes, or the one at
        `path`, of which the store gets a copy if it lacks it. All ranks call it."""
        self.kept = kept
        if kept:
            return
        self.newest = path
        if self.mirror:
            self.upload(self.state.step, on_rank_zero(lambda: f"{secrets.randbits(_TOKEN_BITS):016x}"))

    def upload(self, step: int, token: str) -> None:
        """Copies a whole checkpoint to the store, if there is one, in the background. All ranks call it."""
        if self.mirror:
            self.mirror.offer(Upload(directory_of(self.root, step), step, token, self.retention))

    def finish_uploads(self) -> None:
        """Waits, together with all other ranks, until the newest checkpoint is on the store, too: as long as it makes
        progress, and a signal to stop leaves time."""
        if mirror := self.mirror:
            self._together(lambda: self._upload_status(mirror), mirror.abandon, time.sleep)

    def forget(self) -> None:
        """Waits as `settle` does, before the run goes back to an older state: what became of the save does not
        matter."""
        if _HANGING not in self.settle():
            self.writer = None
        self.kept = ""
        if self.memory:
            self.memory.keep_only(set())

    def _together(
        self, mine: Callable[[], int], give_up: Callable[[], None], wait: Callable[[float], object]
    ) -> list[int]:
        """Returns the ranks' status once none is _RUNNING; the ranks `give_up` if rank 0 is not."""
        pause = 0.001
        while True:
            status = self._exchanged(mine())
            if _RUNNING not in status:
                return status
            if status[0] != _RUNNING:
                give_up()
            heartbeat.beat()
            wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _upload_status(self, mirror: Mirror) -> int:
        mirror.poll()
        if not mirror.busy:
            return _DONE
        if self.world.rank or self.stop.seconds_left(self.state.stepper.job.run.grace_s) > _LAST_PATIENCE_S:
            return _RUNNING
        log.warning("the newest checkpoint was not uploaded to %s before the time to stop was over", mirror.url)
        return _HANGING

    def _copied(self, shares: list[Share]) -> list[Tensor] | None:
        """Returns a copy of what this rank writes, or None if there is no memory for one."""
        try:
            return self.snapshot.take([share.flat for share in shares])
        except MemoryError as error:
            log.warning("no memory for a copy of the state, so training waits for its checkpoint: %s", error)
            return None

    def _agree(self, shares: list[Share], copied: bool, *, withdraws: bool) -> tuple[str, int, bool]:
        """Returns rank 0's token, the bytes of all ranks' shares, and whether all have a copy of them. Raises
        NotFiniteError on all ranks, naming the first tensor that holds NaN or infinity on any of them."""
        size, names = sum(share.flat.nbytes for share in shares), self.state.names()
        first_bad = len(names)
        if not copied:
            # What other ranks write is checked here, too: replicas may differ by mistake.
            held = [(share.tensor.name, value) for share in shares for value in share.all]
            finite = all_finite([value for _, value in held]).tolist()  # waits for the device
            found = {name for (name, _), good in zip(held, finite, strict=True) if not good}
            first_bad = min(map(names.index, found), default=len(names))
        uploading = self.mirror.withdraw() if withdraws and self.mirror and self.world.rank == 0 else ""
        mine = [secrets.randbits(_TOKEN_BITS), size, first_bad, copied, int(uploading or "0", 16)]
        every = torch.empty(self.world.size, len(mine), dtype=torch.int64, device=self.device)
        self.world.all_gather(every.view(-1), torch.tensor(mine, device=self.device)).wait()
        tokens, sizes, bad, copies, uploads = every.t().tolist()
        if withdraws and self.mirror and self.world.rank:
            self.mirror.keep_only(f"{uploads[0]:016x}")
        if min(bad) < len(names):
            newest = on_rank_zero(lambda: _newest_good(self.root))
            raise NotFiniteError(f"{_not_saved(self.state.step, names[min(bad)])}; {newest}")
        return f"{tokens[0]:016x}", sum(sizes), all(copies)

    def _check(self, shares: list[Share]) -> Callable[[Part], None]:
        """Returns what the writer's thread does before it reads a copy: it waits until that is complete, and checks
        it."""
        step, last = self.state.step, {share.tensor.name: number for number, share in enumerate(shares)}

        def check(part: Part) -> None:
            self.snapshot.wait(last[part.tensor])
            will_read(part.value)
            if not is_finite(part.value):
                raise NotFiniteError(_not_saved(step, part.tensor))

        return check

    def _status(self, writer: Writer) -> int:
        if writer.done:
            if writer.memory and writer.error is None:
                return _KEPT
            return _FATAL if isinstance(writer.error, _ENDS_THE_RUN) else _DONE
        if writer.hangs:
            writer.abandon()
            return _HANGING
        return _RUNNING

    def _raise_error(self) -> None:
        assert self.writer is not None
        assert self.writer.error is not None
        if isinstance(self.writer.error, NotFiniteError):
            raise NotFiniteError(f"{self.writer.error}; {_newest_good(self.root)}")
        raise self.writer.error

    def _require_written(self) -> None:
        assert self.writer is not None
        if self.writer.path is None:
            raise self.writer.error or RunError(self.writer.hanging())

    def _fail(self, message: str) -> None:
        """Tells of a failure, and on rank 0 decides whether the run goes on."""
        if self.last:  # the run ends with this message
            return
        if self.writer and self.writer.memory:
            log.warning("%s; a restart resumes from an earlier step", message)
            return
        if self.world.rank:
            log.info("%s", message)  # for this rank's own log; rank 0 tells it, too
            return
        if self.options.on_failure == "continue" and self.newest is not None:
            log.warning("%s; training goes on, and if it fails, it resumes from %s", message, self.newest)
            return
        why = "checkpoint.on_failure=stop" if self.newest is not None else "there is no earlier checkpoint"
        log.warning("%s; the run stops, since %s", message, why)
        self.stop.ask(f"since a checkpoint could not be written ({why})")


def _name(order: Order) -> str:
    return kept_name(order.step, order.ranks, order.token)


def _not_saved(step: int, tensor: str) -> str:
    return f"step {step}: {tensor} holds NaN or infinity, so this state was not saved"


def _newest_good(root: Path) -> str:
    """Names the newest good checkpoint, for the message of a run that ends."""
    try:
        manifest = newest_valid(root, report=lambda _: None)
    except CheckpointError as error:
        return str(error)
    return f"the newest good checkpoint is {manifest.path}" if manifest else f"there is no checkpoint in {root}"


class Checkpoints(Callback):
    """Saves a checkpoint after the steps of `milestones`, after the last one, when the timer of rank 0 says so, and on
    request."""

    def __init__(
        self, saving: Saving, milestones: Milestones, timer: SaveTimer, recorder: Recorder, guard: Guard | None
    ):
        self.saving, self.milestones, self.timer = saving, milestones, timer
        self.recorder, self.guard, self.stepper = recorder, guard, saving.state.stepper
        saving.written = recorder.checkpoint

    def after_step(self, done: Done) -> None:
        elastic = self.stepper.elastic
        if elastic is not None and not elastic.leads:
            return
        if done.stops or done.step.requests.save or self.milestones.saves(done.number):
            with heartbeat.within(Phase.SAVE):
                done.stops |= self._save(done) and elastic is None  # the others know it after the next step
        elif self.saving.memory and self.milestones.keeps(done.number):
            with heartbeat.within(Phase.SAVE):
                self._check(done)
                with self.stepper.mesh.ledger.untracked():
                    self.recorder.meter.pause(self.saving.keep())

    def _check(self, done: Done) -> None:
        if self.guard is not None:
            self.guard.check_state(done.number)
        require_same_calls()

    def _save(self, done: Done) -> bool:
        """Saves the state. Returns whether a request to stop came meanwhile, to any rank: another step and another
        checkpoint might take longer than the time that is left."""
        self._check(done)
        stopping = torch.zeros(1, device=self.stepper.device)
        with self.stepper.mesh.ledger.untracked():
            blocked = self.saving.save(done.ends)
            stopping += self.saving.stop.requested
            self.stepper.mesh.axis("world").all_reduce(stopping).wait()
            if stopping.item():
                self.saving.finish()
        self.timer.restart()
        self.recorder.meter.pause(blocked)  # it is not training
        return bool(stopping.item())
