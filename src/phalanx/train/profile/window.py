"""Profiles some steps of a run: starts and stops what records them, and lets every rank write its files.

All ranks take part, also those that write no trace: what a rank waits for is known only beside the others. Before the
first profiled step and after the last one nothing of this is in place.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from phalanx.check.compile import compiles
from phalanx.comm import blocking
from phalanx.comm.agree import gather_json, on_every_rank
from phalanx.comm.calls import Recording, now, recorded
from phalanx.errors import RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase
from phalanx.train.metrics import Meter
from phalanx.train.profile import samples, tracing
from phalanx.train.profile.held import held_tensors
from phalanx.train.profile.kernels import by_kernels
from phalanx.train.profile.largest import Range, at_peak
from phalanx.train.profile.passes import PassSpans, observed
from phalanx.train.profile.record import ranges_of, record_of, rows_of
from phalanx.train.profile.summary import Gathered, summarise
from phalanx.train.profile.trace_file import MOST_BYTES, TraceClock, completed, own_rows
from phalanx.train.run_directory import RunDirectory
from phalanx.train.step import Step, Stepper
from phalanx.units import counted

log = logging.getLogger(__name__)

MOST_RANKS = 64
"""Ranks whose records are compared; of more, only the first."""
_ROUNDS = 5  # barriers by which hosts compare their clocks
_HISTORY = 100_000  # allocations that a CUDA snapshot remembers


class StepProfile:
    """The profile of one attempt of a run. Does nothing until its first step."""

    def __init__(self, stepper: Stepper, directory: RunDirectory, rank: int, done: int):
        """`done` steps of the run are done: they are not profiled. Raises JobError, on all ranks, if pyinstrument is
        asked for and missing."""
        self.stepper, self.traces, self.rank = stepper, directory.path / "traces", rank
        self.options = stepper.job.train.profile
        self.first, self.last = max(self.options.steps[0], done + 1), self.options.steps[1]
        self.pending = self.options.is_on and self.first <= self.last
        self.traced = rank in self.options.traced(stepper.job.layout.processes)
        self.active = False
        self.profiler: torch.profiler.profile | None = None
        self.steps: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.held = ExitStack()
        if self.pending and self.options.python:
            on_every_rank(samples.require)

    def around(self, steps: Iterator[tuple[int, Step]], done: int, meter: Meter) -> Iterator[tuple[int, Step]]:
        """Returns the same steps, the first of which follows `done` steps. Profiling takes no time of `meter`'s."""
        return self._profiled(steps, done, meter) if self.pending and done < self.last else steps

    def _profiled(self, steps: Iterator[tuple[int, Step]], done: int, meter: Meter) -> Iterator[tuple[int, Step]]:
        try:
            while self.pending:
                if done + 1 >= self.first and not self.active:
                    self.active, self.first = True, done + 1  # a run that went back may have passed the first step
                    self._paused(self._start, meter)
                start = now()
                item = next(steps, None)
                if item is None:
                    return
                if self.active and item[0] > done:
                    self.steps.append((start, now()))
                done = item[0]
                if done >= self.last:
                    self._paused(self._finish, meter)
                yield item
            yield from steps
        finally:
            if self.active:  # the run ends or goes back inside of the profile
                self._release()

    def _release(self) -> None:
        """Stops what records, and gives up what torch's profiler holds: it is in a circle of references, and torch 2.13
        may crash if it is collected after the process group is gone."""
        self.active = False
        self.held.close()
        self.profiler = None
        gc.collect()

    def _paused(self, action: Callable[[], None], meter: Meter) -> None:
        began = time.perf_counter()
        with heartbeat.within(Phase.RECORD):
            action()
        meter.pause(time.perf_counter() - began)

    def _start(self) -> None:
        self.recording, self.passes, self.steps = Recording(), PassSpans(), []
        self.samples = None
        if self.traced:
            self._try("torch's profiler", self._start_tracing)
            if self.options.python:
                self._try("pyinstrument", self._start_samples)
        _barrier()
        # A compiled block does not see hooks that come later.
        layers = not compiles(self.stepper.job, self.stepper.device.type)
        self.held.enter_context(observed(self.stepper.replica, self.passes, layers=layers))
        self.held.enter_context(recorded(self.recording))

    def _start_tracing(self) -> None:
        device, memory = self.stepper.device, self.options.memory
        self.before = held_tensors(self.stepper) if memory else []
        self.profiler = tracing.profiler(device, memory=memory)
        self.profiler.start()
        self.held.callback(self.profiler.stop)
        if memory and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)
            self.held.callback(lambda: torch.cuda.memory._record_memory_history(enabled=None))

    def _start_samples(self) -> None:
        self.samples = samples.Samples()
        self.samples.start()
        self.held.callback(self.samples.stop)

    def _finish(self) -> None:
        self.pending = False
        snapshot = self._try("the memory snapshot", self._snapshot) or []
        shift = time.time_ns() - now()
        self.held.close()
        on_device = self.stepper.device.type != "cpu"
        coordinates = self.stepper.mesh.coordinates
        record = record_of(self.rank, coordinates, self.steps, self.recording, self.passes, every_thread=on_device)
        files: list[str] = [*snapshot]
        memory = None
        if document := self._try("the trace", lambda: self._document(files)):
            clock = TraceClock(document, shift)
            if self.options.memory:
                memory = self._try("the memory table", lambda: self._largest(document, clock, record))
            files += self._try("its trace", lambda: self._write_trace(document, clock, record)) or []
            if on_device:
                kernels = self._try("its kernels", lambda: by_kernels(record, document["traceEvents"], clock))
                record = kernels or record
        if (sampled := self.samples) is not None:
            files += self._try("its Python samples", lambda: sampled.write(self.traces, self.rank)) or []
        if self.recording.left_out:
            self.notes.append(f"rank {self.rank}: {counted(self.recording.left_out, 'call')} beyond the most recorded")
        own = Gathered(
            host=platform.node(),
            clocks=_clocks(),
            record=record.document() if self.rank < MOST_RANKS else None,
            memory=memory,
            files=files,
            notes=self.notes,
        )
        every = [Gathered(**each) for each in gather_json(vars(own))]
        if self.rank == 0:
            self._try("the profile", lambda: self._summarise(every))
            if self.notes:
                log.warning("profile: %s; training goes on", "; ".join(self.notes))
        self._release()

    def _summarise(self, every: Sequence[Gathered]) -> None:
        self.notes[:] = [note for each in every for note in each.notes]
        for line in summarise(self.stepper, self.traces, (self.first, self.last), every, self.notes):
            log.info("%s", line)

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        """Returns the result of an action, or None with a note if it fails: a profile never stops a run, and a rank
        that raises alone would leave the others waiting."""
        try:
            return action()
        except (OSError, RunError) as error:
            self.notes.append(f"rank {self.rank} could not write {what}: {error}")
        except Exception as error:
            log.debug("profile: %s", what, exc_info=True)
            self.notes.append(f"rank {self.rank}: {what} failed: {type(error).__name__}: {error}")
        return None

    def _document(self, files: list[str]) -> dict[str, Any] | None:
        """Returns torch's trace, if this rank has one; None for one that is too large to work with, which is written as
        it is."""
        if self.profiler is None:
            return None
        content = tracing.exported(self.profiler)
        if len(content) <= MOST_BYTES:
            return json.loads(content)
        size = f"{len(content) >> 20:,} MiB"
        tracing.write(self.traces / self._trace_name, content)
        files.append(self._trace_name)
        self.notes.append(f"rank {self.rank}: its trace of {size} has torch's events only; profile fewer steps")
        return None

    @property
    def _trace_name(self) -> str:
        return f"rank_{self.rank}.json.gz"

    def _write_trace(self, document: dict[str, Any], clock: TraceClock, record: Any) -> list[str]:
        at = ", ".join(f"{axis} {place}" for axis, place in record.coordinates.items() if self._several(axis))
        title = f"rank {self.rank}" + (f" ({at})" if at else "") + f" on {platform.node()}"
        rows, flights = rows_of(record, self.recording, self.passes, self.first)
        steps = [(clock.us(start), clock.us(end)) for start, end in record.steps]
        whole = completed(document, self.rank, title, own_rows(rows, clock), flights, clock, steps)
        tracing.write(self.traces / self._trace_name, json.dumps(whole).encode())
        return [self._trace_name]

    def _several(self, axis: str) -> bool:
        return self.stepper.mesh.sizes[axis] > 1

    def _largest(self, document: dict[str, Any], clock: TraceClock, record: Any) -> dict[str, Any]:
        ranges: list[Range] = ranges_of(record, self.recording, self.passes)
        on_device = int(self.stepper.device.type == "cuda")
        table = at_peak(document["traceEvents"], clock, self.before, ranges, on_device)
        return {"rank": self.rank, **table}

    def _snapshot(self) -> list[str]:
        """Writes the allocator's history, for pytorch.org/memory_viz. It is a pickle, which nothing here reads."""
        if not (self.profiler is not None and self.options.memory and self.stepper.device.type == "cuda"):
            return []
        import pickle

        name = f"memory-rank_{self.rank}.pickle"
        tracing.write(self.traces / name, pickle.dumps(torch.cuda.memory._snapshot()))
        return [name]


def _barrier() -> None:
    """Waits for all ranks, so that none begins the first profiled step while another still starts its profiler."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        blocking.barrier()


def _clocks() -> list[int]:
    """Returns this rank's clock right after barriers, which all ranks leave at nearly the same time."""
    readings = []
    for _ in range(_ROUNDS):
        _barrier()
        readings.append(now())
    return readings
