"""Profiles some steps of a run: starts and stops what records them, and lets every rank write its files.

All ranks take part, also those that write no trace: what a rank waits for is known only beside the others. Before the
first profiled step and after the last one nothing of this is in place.

Hooks record when a rank is in a forward or backward pass, of which stage and layer. They only look: losses are the same
bit for bit.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.comm import blocking
from phalanx.comm.agree import gather_json, on_every_rank
from phalanx.comm.calls import Recording, now, recorded
from phalanx.config.job import Job
from phalanx.cost.breakdown import ComparedPart, compared, compared_memory, model_name
from phalanx.cost.job_spec import on_known_cluster, rank_spec, step_spec
from phalanx.cost.prediction import Parts, step_parts
from phalanx.cost.rank_memory import step_memory
from phalanx.data.documents import with_documents
from phalanx.errors import JobError, PhalanxError, RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel.data import Replica
from phalanx.parallel.pipeline import PipeDream, Pipeline
from phalanx.parallel.recompute import Repeated, run_again
from phalanx.parallel.zero import BucketReplica
from phalanx.pictures import profile as picture
from phalanx.techniques.memory import compiles
from phalanx.train.callbacks import Callback, Steps
from phalanx.train.profile import report, tracing
from phalanx.train.profile.report import (
    ProfiledRank,
    Shares,
    by_kernels,
    latest_starts,
    mean,
    shares_of,
    spans_of_last_step,
    typical,
    union,
)
from phalanx.train.profile.trace_file import (
    DEVICE_NUMBERS,
    MOST_BYTES,
    LiveTensor,
    NamedRange,
    Range,
    TraceClock,
    at_peak,
    completed,
    merged,
    own_rows,
)
from phalanx.train.run_directory import RunDirectory
from phalanx.train.step import Stepper
from phalanx.units import counted

PassKind = Literal["forward", "backward", "recompute"]


@dataclass
class PassSpans:
    """The passes of one rank: kind, name, start and end, in nanoseconds of the recording's clock."""

    spans: list[tuple[PassKind, str, int, int]] = field(default_factory=list)
    """Whole passes, and what is recomputed inside of backward passes."""
    layers: list[tuple[PassKind, str, int, int]] = field(default_factory=list)
    """The blocks inside of them."""

    def add(self, kind: PassKind, name: str, start: int) -> None:
        self.spans.append((kind, name, start, now()))


@contextmanager
def observed(replica: Replica, passes: PassSpans, *, layers: bool) -> Iterator[None]:
    """Records the passes of a `with` block; `layers`: also those of each block, which must not be compiled."""
    with ExitStack() as held:
        for hook in _Objective(passes).hooks(replica):
            held.callback(hook.remove)
        blocks = replica.objective.model.blocks
        if layers:
            for layer, block in blocks.items():
                for hook in _Layer(passes, f"layer {layer}").hooks(block):
                    held.callback(hook.remove)
            repeat = partialmethod(_repeat, passes, Repeated.repeat)
            held.enter_context(_replaced(Repeated, "repeat", repeat))
            for module in blocks.modules():
                if getattr(module, "run", None) is run_again:
                    held.enter_context(_replaced(module, "run", partial(_run_again, passes)))
        if isinstance(replica.runner, Pipeline):
            add = replica.runner.deferred.add
            held.enter_context(_replaced(replica.runner.deferred, "add", partial(_weight_gradients, passes, add)))
        yield


class _Objective:
    """Hooks on the module that computes a stage, or the whole model with its loss."""

    def __init__(self, passes: PassSpans):
        self.passes, self.start, self.name = passes, 0, ""

    def hooks(self, replica: Replica) -> Iterator[Any]:
        stages = replica.model.stages
        self.numbers = {} if stages is None else {id(stage): number for number, stage in stages.local_stages.items()}
        yield replica.objective.register_forward_pre_hook(self.begin)
        yield replica.objective.register_forward_hook(self.end)

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        number = self.numbers.get(id(inputs[1])) if len(inputs) > 1 else None
        self.name, self.start = "" if number is None else f" stage {number}", now()

    def end(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return  # a validation
        self.passes.add("forward", f"forward{self.name}", self.start)
        output.register_hook(partial(self.backward, f"backward{self.name}"))

    def backward(self, name: str, _: Tensor) -> None:
        # The engine calls back when the whole backward pass is done.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self.passes.add, "backward", name, now()))


class _Layer:
    """Hooks on a block. Its backward pass is the time between the gradients of its output and of its input."""

    def __init__(self, passes: PassSpans, name: str):
        self.passes, self.name, self.start, self.back = passes, name, 0, 0

    def hooks(self, block: nn.Module) -> Iterator[Any]:
        yield block.register_forward_pre_hook(self.begin)
        yield block.register_forward_hook(self.end)

    def begin(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.start = now()
        if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(self.input_gradient)

    def end(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            self.passes.layers.append(("forward", self.name, self.start, now()))
            output.register_hook(self.output_gradient)

    def output_gradient(self, _: Tensor) -> None:
        self.back = now()

    def input_gradient(self, _: Tensor) -> None:
        if self.back:
            self.passes.layers.append(("backward", self.name, self.back, now()))
            self.back = 0


def _repeat(repeated: Repeated, passes: PassSpans, repeat: Callable[[Repeated], None]) -> None:
    """Repeats what is cheap, and records it."""
    start = now()
    repeat(repeated)
    passes.add("recompute", "recompute", start)


def _run_again(passes: PassSpans, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Does what `run_again` does, and records the second computation, which autograd may end early."""
    calls = 0

    def timed(*inputs: Any) -> Tensor:
        nonlocal calls
        calls, start = calls + 1, now()
        try:
            return compute(*inputs)
        finally:
            if calls > 1:
                passes.add("recompute", "recompute", start)

    return run_again(timed, *inputs)


def _weight_gradients(passes: PassSpans, add: Callable[[Any], None], products: Any) -> None:
    """Records the second half of a split backward pass."""
    start = now()
    add(products)
    passes.add("backward", "weight gradients", start)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object another attribute for the length of a `with` block."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


_PART_OF_PHASE = {Phase.DATA: "data", Phase.EXCHANGE: "optimizer", Phase.OPTIMIZER: "optimizer"}
"""The part of a step to which a phase belongs. Exchange: the gradients' norm, and what starts its collectives."""
_MEMORY_OF = {"forward": "activations", "recompute": "activations", "backward": "backward"}

Rows = dict[str, list[NamedRange]]


def record_of(
    rank: int,
    coordinates: Mapping[str, int],
    steps: Sequence[tuple[int, int]],
    recording: Recording,
    passes: PassSpans,
    *,
    every_thread: bool = False,
) -> ProfiledRank:
    """Returns a rank's record of its steps, for its shares. Backward passes on a GPU have threads of their own, whose
    calls count with `every_thread`."""
    work: dict[str, list[tuple[int, int]]] = {}
    for kind, _, start, end in passes.spans:
        work.setdefault(kind, []).append((start, end))
    for phase, start, end in _phases(recording, steps):
        if part := _PART_OF_PHASE.get(phase):
            work.setdefault(part, []).append((start, end))
    calls = [call for call in recording.calls if (call.main or every_thread) and call.launched]
    return ProfiledRank(rank, list(steps), {k: union(v) for k, v in work.items()}, calls, "cpu", dict(coordinates))


def _phases(recording: Recording, steps: Sequence[tuple[int, int]]) -> Iterator[tuple[Phase, int, int]]:
    last = steps[-1][1] if steps else 0
    for (start, phase), (end, _) in pairwise([*recording.phases, (last, Phase.RECORD)]):
        if end > start:
            yield phase, start, end


def rows_of(record: ProfiledRank, recording: Recording, passes: PassSpans, first: int) -> tuple[Rows, list[NamedRange]]:
    """Returns the rows of a rank's trace, by name, and its collectives in flight. `first` is the first step's
    number."""
    rows: Rows = {"step": [(f"step {first + n}", start, end, {}) for n, (start, end) in enumerate(record.steps)]}
    inside = (record.steps[0][0], record.steps[-1][1]) if record.steps else (0, 0)

    def add(row: str, name: str, start: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        if start < inside[1] and end > inside[0]:
            rows.setdefault(row, []).append((name, start, end, args or {}))

    for phase, start, end in _phases(recording, record.steps):
        add("phase", "data wait" if phase is Phase.DATA else phase.label, start, end)
    for _, name, start, end in sorted(passes.spans, key=lambda span: (span[2], -span[3])):
        add("pass", name, start, end)
    for kind, name, start, end in sorted(passes.layers, key=lambda span: span[2]):
        add("layer", f"{kind} {name}", start, end)
    flights = []
    for call in sorted(record.calls, key=lambda call: call.start):
        name = f"{call.axis} {call.collective}"
        args = {"axis": call.axis, "collective": call.collective, "bytes": call.bytes, "call": call.sequence}
        add("communication", f"{name}: start", call.start, call.launched, args)
        flights.append((name, call.start, call.end, args))
    for call in sorted((call for call in record.calls if call.waited), key=lambda call: call.waited):
        add("waiting", f"{call.axis} {call.collective}: wait", call.waited, call.end, {"bytes": call.bytes})
    return rows, [flight for flight in flights if flight[1] < inside[1] and flight[2] > inside[0]]


def ranges_of(record: ProfiledRank, recording: Recording, passes: PassSpans) -> list[Range]:
    """Returns the ranges that name allocations."""
    found = [Range(_MEMORY_OF[kind], name, start, end) for kind, name, start, end in passes.spans]
    found += [Range(_MEMORY_OF[kind], f"{kind} {name}", start, end) for kind, name, start, end in passes.layers]
    for call in record.calls:
        found.append(Range("communication", f"{call.axis} {call.collective}", call.start, call.launched))
    for phase, start, end in _phases(recording, record.steps):
        part = "optimizer step" if phase is Phase.OPTIMIZER else "other"
        found.append(Range(part, phase.label, start, end))
    return found


MERGED, PICTURE = "merged.json.gz", "profile.svg"


@dataclass
class Gathered:
    """The report of every rank to rank 0, as plain values."""

    host: str
    clocks: list[int]
    """The rank's clock after each of some barriers."""
    record: dict[str, Any] | None
    memory: dict[str, Any] | None
    files: list[str]
    notes: list[str]


def summarise(
    stepper: Stepper, traces: Path, steps: tuple[int, int], every: Sequence[Gathered], notes: list[str]
) -> list[str]:
    """Writes the document, the picture and the merged trace, and returns the profile's lines. A file that cannot be
    written is a note."""
    records = on_one_clock(every)
    latest = latest_starts(records)
    each_step = [shares_of(record, latest) for record in records]
    means = [mean(shares) for shares in each_step]
    middle = records[typical(means)].rank
    beside, reason = _compared(stepper, records, means)
    files = [name for each in every for name in each.files]
    document: dict[str, Any] = {
        "steps": list(steps),
        "device": stepper.device.type,
        "model": model_name(stepper.job.model),
        "layout": stepper.job.layout.line(),
        "median_rank": middle,
        "ranks": [
            {
                "rank": record.rank,
                "coordinates": record.coordinates,
                "shares": report.shares_document(whole),
                "by_step": [report.shares_document(shares) for shares in by_step],
                "spans": spans_of_last_step(record, latest),
            }
            for record, whole, by_step in zip(records, means, each_step, strict=True)
        ],
        "compared": beside,
        "not_compared": reason,
        "memory": list(_memory_beside_predicted(stepper, every)),
        "traces": str(traces),
        "files": files,
        "notes": notes,
    }

    def write(name: str, content: Callable[[], bytes]) -> None:
        try:
            tracing.write(traces / name, content())
            files.append(name)
        except (OSError, ValueError, RunError) as error:
            notes.append(f"rank 0 could not write {name}: {error}")

    def merge() -> bytes:
        content, left_out = merged([traces / f for f in files if f.startswith("rank_")])
        notes.extend(left_out)
        return content

    if sum(name.startswith("rank_") for name in files) > 1:
        write(MERGED, merge)
    write(PICTURE, lambda: picture.svg(document).encode())
    files.append(report.NAME)
    try:
        tracing.write(traces / report.NAME, (json.dumps(document, indent=1) + "\n").encode())
    except (OSError, RunError) as error:
        files.remove(report.NAME)
        notes.append(f"rank 0 could not write {report.NAME}: {error}")
    return list(report.lines({**document, "notes": []}))


def on_one_clock(every: Sequence[Gathered]) -> list[ProfiledRank]:
    """Returns the records by the clock of rank 0. Processes of a machine share theirs; those of other hosts differ by
    the median of what they read after the same barriers."""
    found = []
    for each in every:
        if each.record is None:
            continue
        record = ProfiledRank.of(each.record)
        if each.host != every[0].host:
            ahead = round(median(own - first for own, first in zip(each.clocks, every[0].clocks, strict=True)))
            record = record.shifted(-ahead)
        found.append(record)
    return found


def _compared(
    stepper: Stepper, records: Sequence[ProfiledRank], means: Sequence[Shares]
) -> tuple[dict[str, Any] | None, str]:
    """Returns the prediction beside the median rank of the busiest pipeline stage, or the reason why there is none."""
    try:
        predicted, cluster = prediction_of(stepper.job, stepper.vocab_size, stepper.device.type)
    except PhalanxError as error:
        return None, str(error)
    chosen = busiest(records, means)
    parts: list[ComparedPart] = compared(predicted, dict(means[chosen].parts()))
    return {"rank": records[chosen].rank, "cluster": cluster, "parts": report.compared_document(parts, "s")}, ""


def _memory_beside_predicted(stepper: Stepper, every: Sequence[Gathered]) -> Iterator[dict[str, Any]]:
    """Yields the memory of each rank that recorded it, with the prediction for its pipeline rank."""
    job = stepper.job
    predicted = step_memory(rank_spec(job, stepper.vocab_size, stepper.device.type))
    for table in (each.memory for each in every if each.memory is not None):
        own = predicted[table["rank"] // (job.layout.world // job.layout.pp)]  # pp is the outermost axis
        yield {**table, "compared": report.compared_document(compared_memory(own, table["parts"]), "bytes")}


def busiest(records: Sequence[ProfiledRank], means: Sequence[Shares]) -> int:
    """Returns the index of the median rank among those of the pipeline rank that computes longest: the one whose time a
    prediction states."""
    by_stage: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        by_stage.setdefault(record.coordinates.get("pp", 0), []).append(index)

    def work(indices: list[int]) -> float:
        return median(means[n].forward + means[n].backward + means[n].recompute for n in indices)

    slowest = max(by_stage.values(), key=work)
    return slowest[typical([means[n] for n in slowest])]


def prediction_of(job: Job, vocab: int, device: str) -> tuple[Parts, str]:
    """Returns the predicted parts of a step on the job's cluster, or on cluster=local if the job names none, and the
    cluster's name. Raises JobError if nothing is known about it."""
    job = on_known_cluster(job, device)
    return step_parts(with_documents(step_spec(job, vocab), job)), job.cluster.preset or job.cluster.accelerator.name


def held_tensors(stepper: Stepper) -> list[LiveTensor]:
    """Returns parameters, gradient buffers and optimizer state, between two steps."""
    seen: set[int] = set()
    found = []
    for part, name, tensor in _tensors(stepper):
        local = getattr(tensor, "to_local", lambda own=tensor: own)()
        storage = local.untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(LiveTensor(part, name, storage.nbytes()))
    return found


def _tensors(stepper: Stepper) -> Iterator[tuple[str, str, Tensor]]:
    replica, optimizer = stepper.replica, stepper.optimizer
    for number, bucket in enumerate(replica.buckets if isinstance(replica, BucketReplica) else ()):
        yield "parameters", f"bucket {number} of parameters", bucket.parameters
        if bucket.gradients is not None:
            yield "gradients", f"bucket {number} of gradients", bucket.gradients
    for name, parameter in replica.objective.model.named_parameters():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", f"{name}.grad", parameter.grad
    for shard in replica.shards:
        yield "parameters", shard.name, shard.value
    if isinstance(replica.runner, PipeDream):
        for number, weights in enumerate(replica.runner.versions):
            for weight in weights:
                yield "parameters", f"version {number} of the weights", weight
    for kind, tensors in optimizer.state_tensors().items():
        for name, tensor in tensors.items():
            yield "optimizer", f"{name} ({kind})", tensor


INTERVAL_S = 0.001
"""Seconds between samples."""


def require() -> None:
    """Raises JobError without pyinstrument."""
    if importlib.util.find_spec("pyinstrument") is None:
        raise JobError(
            "train.profile.python needs pyinstrument: pip install 'phalanx[profile]', or set train.profile.python=false"
        )


class Samples:
    """Samples the stack of the thread that starts it."""

    def __init__(self) -> None:
        from pyinstrument import Profiler

        self.profiler: Any = Profiler(interval=INTERVAL_S, async_mode="disabled")

    def start(self) -> None:
        self.profiler.start()

    def stop(self) -> None:
        if self.profiler.is_running:
            self.profiler.stop()

    def write(self, traces: Path, rank: int) -> list[str]:
        """Writes the call tree as text and HTML. Returns the files' names. Raises OSError and RunError."""
        text = self.profiler.output_text(unicode=True, color=False, show_all=False)
        names = {f"python-rank_{rank}.txt": text, f"python-rank_{rank}.html": self.profiler.output_html()}
        for name, content in names.items():
            tracing.write(traces / name, content.encode())
        return list(names)


log = logging.getLogger(__name__)

MOST_RANKS = 64
"""Ranks whose records are compared; of more, only the first."""
_ROUNDS = 5  # barriers by which hosts compare their clocks
_HISTORY = 100_000  # allocations that a CUDA snapshot remembers


class StepProfile(Callback):
    """The profile of one attempt of a run. Does nothing until its first step."""

    pause: Callable[[float], None] = staticmethod(lambda seconds: None)
    """Takes the seconds of profiling, which are not training."""

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
            on_every_rank(require)

    def around(self, steps: Steps, done: int) -> Steps:
        return self._profiled(steps, done) if self.pending and done < self.last else steps

    def _profiled(self, steps: Steps, done: int) -> Steps:
        try:
            while self.pending:
                if done + 1 >= self.first and not self.active:
                    self.active, self.first = True, done + 1  # a run that went back may have passed the first step
                    self._paused(self._start)
                start = now()
                item = next(steps, None)
                if item is None:
                    return
                if self.active and item[0] > done:
                    self.steps.append((start, now()))
                done = item[0]
                if done >= self.last:
                    self._paused(self._finish)
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

    def _paused(self, action: Callable[[], None]) -> None:
        began = time.perf_counter()
        with heartbeat.within(Phase.RECORD):
            action()
        self.pause(time.perf_counter() - began)

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
        self.samples = Samples()
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
        on_device = DEVICE_NUMBERS[self.stepper.device.type]
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
