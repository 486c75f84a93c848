"""A short training of the job on random tokens: losses, step times and phases of every rank, and a profile."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm import blocking
from phalanx.comm.agree import gather_json
from phalanx.comm.axis import Axis
from phalanx.config.added import Axes
from phalanx.config.job import Job
from phalanx.errors import NotFiniteError, RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import median_if_slow
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.machine.clock import slowest, synchronize
from phalanx.parallel.mesh import Mesh
from phalanx.partition.derived import flushes, solve
from phalanx.pictures.elements import seconds
from phalanx.train.profile import tracing
from phalanx.train.step import StepInputs, Stepper
from phalanx.units import counted
from phalanx.verify.measure import micro_batches

PROBE_S = 0.005
"""Seconds that the probe's matrix products should take on one rank."""
PROBE_REPEATS = {True: 8, False: 16}
"""Rounds of the probe in a window, by --quick."""
SIDE = {"cpu": 192, "cuda": 2048, "xpu": 2048}
"""Side of the square matrices, by kind of device."""
MOST_PRODUCTS = 1000


@dataclass(frozen=True)
class ProbeTimes:
    """One rank's medians over one window of the probe, in seconds."""

    compute_s: float
    """The matrix products."""
    arrival_s: float
    """From the end of the products until its collective has started."""
    wait_s: float
    """Until the collective was complete: the wait for the slowest rank, and the message."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose own time is more than 1.3 times the median of the others, in every window."""

    rank: int
    host: str
    stage: str
    """compute, arrival or training."""
    own_s: float
    median_s: float

    @property
    def factor(self) -> float:
        """Its own time relative to the median of the others."""
        return self.own_s / self.median_s

    def line(self) -> str:
        what = {
            "compute": "in the compute probe",
            "arrival": "from a computation to its collective",
            "training": "of its own per training step",
        }[self.stage]
        return (
            f"rank {self.rank} ({self.host}) is slow: {seconds(self.own_s)} {what}, {self.factor:.2f} × the median "
            f"of the others ({seconds(self.median_s)})"
        )


class Probe:
    """Matrix products followed by a small all-reduce, as a training step in small. All ranks make one together."""

    def __init__(self, world: Axis, device: torch.device, quick: bool):
        self.world, self.device, self.repeats = world, device, PROBE_REPEATS[quick]
        side = SIDE[device.type]
        self.a, self.b = torch.ones(side, side, device=device), torch.ones(side, side, device=device)
        self.message = torch.zeros(256, device=device)
        self.products = 1
        self.compute()
        began = time.perf_counter()
        self.compute()
        wanted = PROBE_S / max(time.perf_counter() - began, 1e-6)
        self.products = int(slowest(min(MOST_PRODUCTS, max(1, round(wanted)))))

    def compute(self) -> None:
        for _ in range(self.products):
            torch.mm(self.a, self.b)
        synchronize(self.device)

    def window(self) -> ProbeTimes:
        compute, arrival, wait = [], [], []
        blocking.barrier()
        for _ in range(self.repeats):
            began = time.perf_counter()
            self.compute()
            computed = time.perf_counter()
            pending = self.world.all_reduce(self.message)
            called = time.perf_counter()
            pending.wait()
            synchronize(self.device)
            compute.append(computed - began)
            arrival.append(called - computed)
            wait.append(time.perf_counter() - called)
        return ProbeTimes(*map(statistics.median, (compute, arrival, wait)))


def in_probe(windows: Sequence[Mapping[int, ProbeTimes]], hosts: Sequence[str]) -> list[Straggler]:
    """Returns the ranks that were slow in every window, each a time per rank.

    A rank that computes as fast as the others may still start its collectives late. Then the delay has to show in the
    whole of its own time, since starting a collective takes only microseconds."""
    found = slow_in_all([{rank: t.compute_s for rank, t in window.items()} for window in windows], hosts, "compute")
    named = {each.rank for each in found}
    whole = [{rank: t.compute_s + t.arrival_s for rank, t in window.items()} for window in windows]
    return found + [each for each in slow_in_all(whole, hosts, "arrival") if each.rank not in named]


def slow_in_all(
    windows: Sequence[Mapping[int, float]], hosts: Sequence[str], stage: str, work: Mapping[int, int] | None = None
) -> list[Straggler]:
    """Returns the ranks whose own seconds are FACTOR times the median of the others in every window. Only ranks with
    equal `work` are compared; without it all are."""
    found = []
    for rank in windows[-1] if windows else ():
        medians = [median_if_slow(rank, own, work or dict.fromkeys(own, 0)) for own in windows]
        if None not in medians and (last := medians[-1]) is not None:
            found.append(Straggler(rank, hosts[rank], stage, windows[-1][rank], last))
    return found


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
        return statistics.median([spent for rank in self.step_s for spent in rank] or [math.nan])

    def lines(self) -> Iterator[str]:
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        loss = f", loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""
        same = "" if self.problems else ", the same on all ranks"
        yield (
            f"training: {counted(self.steps, 'step')} of {self.model} ({self.batch}), "
            f"{seconds(self.median_step_s)} per step{loss}{same}"
        )
        if self.phases:
            parts = [f"{phase} {seconds(own)}" for phase, (own, _) in self.phases.items()]
            waits = sum(waited for _, waited in self.phases.values())
            yield f"  per step: {', '.join(parts)}, waiting for other ranks {seconds(waits)}"
        if self.changed:
            yield f"  trained with {', '.join(self.changed)}: steps of their own are needed here"
        if self.traces:
            yield f"  profile: {self.traces[0]}{f' and {len(self.traces) - 1} more' if len(self.traces) > 1 else ''}"


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
    try:
        *_, (first_s, _) = mine.take(WARM_UP)  # the first step compiles and allocates
        fewest, most = STEPS[quick]
        count = min(most, max(fewest, int(BUDGET_S[quick] / max(slowest(first_s), 1e-6))))
        mine.measure(count, lambda done: tick(done, count + PROFILED))
        mine.profile(traces)
        tick(count + PROFILED, count + PROFILED)
    except NotFiniteError as error:
        mine.found.problem = str(error)
    every = [_RankSteps(**theirs) for theirs in gather_json(asdict(mine.found))]
    watched = all(theirs.phases for theirs in every)
    phases = {}
    for phase in every[0].phases if watched else ():
        own_s, waited_s = zip(*(theirs.phases[phase] for theirs in every), strict=True)
        phases[phase] = statistics.fmean(own_s), statistics.fmean(waited_s)
    problems = list(dict.fromkeys(theirs.problem for theirs in every if theirs.problem))
    own = [theirs.own for theirs in every]
    return TrainingTest(
        model=job.model.preset or f"{job.model.n_layers} layers of {job.model.d_model}",
        batch=solve(job.train.global_batch, job.layout).equation(),
        steps=len(mine.found.seconds),
        losses=every[0].losses,
        step_s=[theirs.seconds for theirs in every],
        own_s=[statistics.median(spent) for spent in own] if watched else [],
        phases=phases,
        kernels=[KernelTime(*each) for each in every[0].kernels],
        traces=[theirs.trace for theirs in every if theirs.trace],
        changed=changed,
        notes=[note for theirs in every for note in theirs.notes],
        problems=problems + _different([theirs.losses for theirs in every], hosts),
        stragglers=_stragglers(own, [theirs.work for theirs in every], hosts) if watched else [],
    )


@dataclass
class _RankSteps:
    """The results that a rank sends to all others."""

    work: int
    """Its pipeline rank: ranks with the same one have the same work."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds of each measured step."""
    own: list[float] = field(default_factory=list)
    """Seconds of each of them that the rank spent itself; 0 without a heartbeat."""
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    trace: str = ""
    notes: list[str] = field(default_factory=list)
    problem: str = ""


class _Steps:
    def __init__(self, job: Job, mesh: Mesh, device: torch.device, vocab_size: int):
        self.job, self.mesh, self.device, self.vocab_size = job, mesh, device, vocab_size
        self.stepper = Stepper(job, mesh, device, vocab_size)
        self.found = _RankSteps(mesh.coordinates["pp"])
        heartbeat.training(0, work=self.found.work)

    def take(self, steps: int, tick: Callable[[int], None] = lambda done: None) -> Iterator[tuple[float, float]]:
        """Takes steps. Yields the seconds of each, and those that the rank spent itself."""
        for done in range(steps):
            number = len(self.found.losses)
            batches, valid = micro_batches(self.job, self.vocab_size, self.mesh, number)
            synchronize(self.device)
            blocking.barrier()  # the batch is not part of the step, and takes each rank another time
            own, began = _own_ns(), time.perf_counter()
            step = self.stepper.step(StepInputs(batches, number, valid, self.job.optimizer.lr))
            synchronize(self.device)
            spent, own = time.perf_counter() - began, (_own_ns() - own) / 1e9
            self.found.losses.append(step.loss)
            heartbeat.steps_done(number + 1)
            tick(done + 1)
            yield spent, own

    def measure(self, steps: int, tick: Callable[[int], None]) -> None:
        """Takes steps, and keeps what they took and what they spent in each phase."""
        before = _phase_ns()
        for spent, own in self.take(steps, tick):
            self.found.seconds.append(spent)
            self.found.own.append(own)
        for phase, now in _phase_ns().items():
            own, waited = ((after - then) / steps / 1e9 for after, then in zip(now, before[phase], strict=True))
            self.found.phases[phase.label] = own, waited

    def profile(self, traces: Path | None) -> None:
        """Takes further steps under the profiler; keeps the operations that take longest, and the trace's file. Where
        that cannot be written there is a note: a rank that raises alone would leave the others waiting."""
        with tracing.profiler(self.device) as profiler:
            for _ in self.take(PROFILED):
                pass
        rank, world = dist.get_rank(), dist.get_world_size()
        if traces is not None and (rank == 0 or world <= TRACED_RANKS):
            path = traces / f"test-dist-rank_{rank}.json"
            try:
                tracing.write(path, tracing.exported(profiler))
                self.found.trace = str(path)
            except (OSError, RunError) as error:
                self.found.notes.append(f"rank {rank} could not write its profile: {error}")
        total = "self_device_time_total" if self.device.type != "cpu" else "self_cpu_time_total"
        events = [(getattr(event, total), event) for event in profiler.key_averages()]
        largest = sorted(events, key=lambda pair: -pair[0])[:MOST_KERNELS]
        self.found.kernels = [(event.key, event.count / PROFILED, us / PROFILED / 1e6) for us, event in largest if us]


def _own_ns() -> int:
    """Returns the nanoseconds that this rank has spent itself in the phases of steps; 0 without a heartbeat."""
    return sum(own for own, _ in _phase_ns().values())


def _phase_ns() -> dict[Phase, tuple[int, int]]:
    """Returns the nanoseconds that this rank has spent itself and waited in each phase; empty without a heartbeat."""
    beat = heartbeat.own()
    return {phase: beat.phase_ns[phase] for phase in PHASES} if beat is not None else {}


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
