"""A short training of the job on random tokens: losses, step times and phases of every rank, and a profile."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile

from phalanx.comm import blocking
from phalanx.comm.agree import broadcast_json, gather_json
from phalanx.config.added import Axes
from phalanx.config.job import Job
from phalanx.errors import NotFiniteError, RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.machine.clock import slowest, synchronize
from phalanx.machine.stragglers import Straggler, slow_in_all
from phalanx.parallel.mesh import Mesh
from phalanx.partition.derived import flushes, solve
from phalanx.train.profile import tracing
from phalanx.train.step import StepInputs, Stepper
from phalanx.verify.measure import micro_batches

WARM_UP = 2
STEPS = {True: (4, 12), False: (6, 40)}
"""Fewest and most measured steps, by --quick."""
BUDGET_S = {True: 1.0, False: 5.0}
"""Seconds of the measured steps, by --quick, if that is more than the fewest steps."""
PROFILED = 2
"""Steps under the profiler, after the measured ones: it slows them down."""
FEWEST_COMPARED = 2
"""Steps in a third of the measured ones from which on ranks are compared."""
SAME = 1e-6
"""Relative difference up to which the losses of two ranks are the same."""
TRACED_RANKS = 8
"""Ranks that write a trace; with more, only rank 0 does."""
MOST_KERNELS = 10
PHASES = (Phase.FORWARD_BACKWARD, Phase.EXCHANGE, Phase.OPTIMIZER)
"""The phases of a step."""


@dataclass(frozen=True)
class KernelTime:
    """One kind of operation in rank 0's profile."""

    name: str
    calls: float
    """Calls per step."""
    seconds: float
    """Its own seconds per step, without the operations that it calls."""


@dataclass(frozen=True)
class TrainingTest:
    """The short training. Lists by rank have one entry for every rank."""

    model: str
    batch: str
    """The batch equation."""
    steps: int
    losses: list[float]
    """Rank 0's losses of all steps, the warm-up included; nats per token."""
    step_s: list[list[float]]
    """Seconds of each measured step, by rank."""
    own_s: list[float]
    """Seconds per step that a rank spends itself, by rank; empty where ranks have no heartbeat."""
    phases: dict[str, tuple[float, float]]
    """Mean seconds per step that ranks spend themselves and wait for others, by phase."""
    kernels: list[KernelTime]
    traces: list[str]
    """The files with profiles."""
    changed: list[str] = field(default_factory=list)
    """What was trained differently from the job."""
    problems: list[str] = field(default_factory=list)
    """Losses that differ between ranks, or are not finite."""
    stragglers: list[Straggler] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Profiles that could not be written."""

    @property
    def median_step_s(self) -> float:
        """The median over all ranks and steps."""
        return statistics.median([seconds for rank in self.step_s for seconds in rank] or [math.nan])


def trainable(job: Job) -> tuple[Job, list[str]]:
    """Returns the job whose every step can be taken by itself, and its differences from the job, in words."""
    changed, layout = [], job.layout
    if layout.sync != "bsp":
        changed.append(f"sync=bsp instead of {layout.sync}")
        layout = replace(layout, sync="bsp")
    if layout.axes.sizes:
        changed.append(f"without axis {layout.replica_axis}")
        layout = replace(layout, axes=Axes())
    if not flushes(layout):
        changed.append(f"schedule=1f1b instead of {layout.schedule}")
        layout = replace(layout, schedule="1f1b")
    return replace(job, layout=layout), changed


def train_briefly(
    job: Job,
    mesh: Mesh,
    device: torch.device,
    vocab_size: int,
    hosts: Sequence[str],
    *,
    quick: bool,
    traces: Path | None,
    tick: Callable[[int, int], None],
) -> TrainingTest:
    """Trains a few steps. All ranks call it; returns the same on each. Profiles go to the folder `traces`, if there is
    one. Raises what a step raises, but NotFiniteError, which is a finding."""
    job, changed = trainable(job)
    mine = _Steps(job, mesh, device, vocab_size)
    problem, kernels, trace = "", [], None
    try:
        *_, (seconds, _) = mine.take(WARM_UP)  # the first step compiles and allocates
        fewest, most = STEPS[quick]
        count = min(most, max(fewest, int(BUDGET_S[quick] / max(slowest(seconds), 1e-6))))
        total = count + PROFILED
        mine.measure(count, lambda done: tick(done, total))
        kernels, trace = mine.profile(traces)
        tick(total, total)
    except NotFiniteError as error:
        problem = str(error)
    return _combine(mine, job, changed, problem, kernels, trace, hosts)


class _Steps:
    """One rank's steps."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device, vocab_size: int):
        self.job, self.mesh, self.device, self.vocab_size = job, mesh, device, vocab_size
        self.stepper = Stepper(job, mesh, device, vocab_size)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        """Seconds of each measured step."""
        self.own: list[float] = []
        """Seconds of each of them that the rank spent itself; 0 without a heartbeat."""
        self.phases: dict[str, tuple[float, float]] = {}
        self.notes: list[str] = []
        heartbeat.training(0, work=mesh.coordinates["pp"])

    def take(self, steps: int, tick: Callable[[int], None] = lambda done: None) -> Iterator[tuple[float, float]]:
        """Takes steps. Yields the seconds of each, and those that the rank spent itself."""
        for done in range(steps):
            number = len(self.losses)
            batches, valid = micro_batches(self.job, self.vocab_size, self.mesh, number)
            synchronize(self.device)
            blocking.barrier()  # the batch is not part of the step, and takes each rank another time
            own, began = _own_ns(), time.perf_counter()
            step = self.stepper.step(StepInputs(batches, number, valid, self.job.optimizer.lr))
            synchronize(self.device)
            spent, own = time.perf_counter() - began, (_own_ns() - own) / 1e9
            self.losses.append(step.loss)
            heartbeat.steps_done(number + 1)
            tick(done + 1)
            yield spent, own

    def measure(self, steps: int, tick: Callable[[int], None]) -> None:
        """Takes steps, and keeps what they took and what they spent in each phase."""
        before = _phase_ns()
        for spent, own in self.take(steps, tick):
            self.seconds.append(spent)
            self.own.append(own)
        after = _phase_ns()
        for phase in after:
            own_ns, waited_ns = (now - then for now, then in zip(after[phase], before[phase], strict=True))
            self.phases[phase.label] = own_ns / steps / 1e9, waited_ns / steps / 1e9

    def profile(self, traces: Path | None) -> tuple[list[KernelTime], str | None]:
        """Takes further steps under the profiler. Returns the operations that take longest, and the trace's file."""
        with tracing.profiler(self.device) as profiler:
            for _ in self.take(PROFILED):
                pass
        rank, world = dist.get_rank(), dist.get_world_size()
        trace = None
        if traces is not None and (rank == 0 or world <= TRACED_RANKS):
            trace = self._write_trace(profiler, traces / f"test-dist-rank_{rank}.json")
        on_device = self.device.type == "cuda"
        events = [
            (event.self_device_time_total if on_device else event.self_cpu_time_total, event)
            for event in profiler.key_averages()
        ]
        largest = sorted(events, key=lambda pair: -pair[0])[:MOST_KERNELS]
        return [
            KernelTime(event.key, event.count / PROFILED, us / PROFILED / 1e6) for us, event in largest if us
        ], trace

    def _write_trace(self, profiler: profile, path: Path) -> str:
        """Writes a profile. Returns its path, or an empty text, with a note, where that fails: a rank that raises alone
        would leave the others waiting."""
        try:
            tracing.write(path, tracing.exported(profiler))
        except (OSError, RunError) as error:
            self.notes.append(f"rank {dist.get_rank()} could not write its profile: {error}")
            return ""
        return str(path)


def _own_ns() -> int:
    """Returns the nanoseconds that this rank has spent itself in the phases of steps; 0 without a heartbeat."""
    return sum(own for own, _ in _phase_ns().values())


def _phase_ns() -> dict[Phase, tuple[int, int]]:
    """Returns the nanoseconds that this rank has spent itself and waited in each phase; empty without a heartbeat."""
    beat = heartbeat.own()
    return {phase: beat.phase_ns[phase] for phase in PHASES} if beat is not None else {}


def _combine(
    mine: _Steps,
    job: Job,
    changed: list[str],
    problem: str,
    kernels: list[KernelTime],
    trace: str | None,
    hosts: Sequence[str],
) -> TrainingTest:
    """Combines the steps of all ranks."""
    every = gather_json(
        {
            "losses": mine.losses,
            "seconds": mine.seconds,
            "own": mine.own,
            "phases": mine.phases,
            "trace": trace,
            "notes": mine.notes,
            "problem": problem,
            "work": mine.mesh.coordinates["pp"],
        }
    )
    watched = all(theirs["phases"] for theirs in every)
    phases = {
        phase: (
            statistics.fmean(theirs["phases"][phase][0] for theirs in every),
            statistics.fmean(theirs["phases"][phase][1] for theirs in every),
        )
        for phase in (mine.phases if watched else ())
    }
    problems = list(dict.fromkeys(theirs["problem"] for theirs in every if theirs["problem"]))
    own = [theirs["own"] for theirs in every]
    return TrainingTest(
        model=job.model.preset or f"{job.model.n_layers} layers of {job.model.d_model}",
        batch=solve(job.train.global_batch, job.layout).equation(),
        steps=len(mine.seconds),
        losses=every[0]["losses"],
        step_s=[theirs["seconds"] for theirs in every],
        own_s=[statistics.median(seconds) for seconds in own] if watched else [],
        phases=phases,
        kernels=[KernelTime(**each) for each in broadcast_json([asdict(kernel) for kernel in kernels])],
        traces=[theirs["trace"] for theirs in every if theirs["trace"]],
        changed=changed,
        notes=[note for theirs in every for note in theirs["notes"]],
        problems=problems + _different([theirs["losses"] for theirs in every], hosts),
        stragglers=_stragglers(own, [theirs["work"] for theirs in every], hosts) if watched else [],
    )


def _different(losses: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """Returns a sentence about the first loss that is not finite on a rank, or differs from the median rank's."""
    for step, by_rank in enumerate(zip(*losses, strict=False)):
        usual = statistics.median_low(by_rank)
        for rank, loss in enumerate(by_rank):
            who = f"training step {step + 1}: rank {rank} ({hosts[rank]}) has loss {loss!r}"
            if not math.isfinite(loss):
                return [f"{who}, which is not finite"]
            if abs(loss - usual) > SAME * abs(usual):
                return [f"{who}, other ranks {usual!r}: all should have the same"]
    return []


def _stragglers(own: Sequence[Sequence[float]], work: Sequence[int], hosts: Sequence[str]) -> list[Straggler]:
    """Returns ranks that were slow in every third of the measured steps, if these are enough for a median."""
    third = len(own[0]) // 3
    if third < FEWEST_COMPARED:
        return []
    parts = [slice(0, third), slice(third, 2 * third), slice(2 * third, None)]
    windows = [{rank: statistics.median(seconds[part]) for rank, seconds in enumerate(own)} for part in parts]
    return slow_in_all(windows, hosts, "training", dict(enumerate(work)))
