"""Runs the real program of one rank without hardware: it builds the model, applies the layout, takes steps, and
collects a checkpoint. What is measured is what the program does, not what a formula says."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.blocks.attention import cache_columns
from phalanx.checkpoint.parts import Snapshot
from phalanx.comm.axis import Pending
from phalanx.comm.calls import Recording, TimedCall, recorded
from phalanx.config.cluster import DEVICE_TYPES
from phalanx.config.clusters import ACCELERATORS, maker_of
from phalanx.config.corpora import has_prompts
from phalanx.config.job import Job
from phalanx.cost.generation import lengths, texts_of
from phalanx.cost.job_spec import rank_spec
from phalanx.data.loader import MicroBatch
from phalanx.dryrun.recorder import OperationRecorder
from phalanx.dryrun.world import KNOWN_BYTES, Allocation, DryWorld, pretended
from phalanx.errors import JobError
from phalanx.generate.rollouts import TrainedDecoder
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.parallel import mesh as meshes
from phalanx.parallel.data import Replica
from phalanx.parallel.fsdp import Gather, ShardedReplica
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import PipeDream
from phalanx.parallel.zero import BucketReplica
from phalanx.partition.derived import HOST, named, overlaps, tier_of
from phalanx.partition.ramp import ramp_of
from phalanx.train.drivers import driver_of
from phalanx.train.evaluate import validation_loss
from phalanx.train.feed import Feed
from phalanx.train.guard import guard_of
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Milestones, Requests
from phalanx.train.state import TrainState
from phalanx.train.step import Stepper
from phalanx.verify.measure import drawn

PARTS: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations", "logits", "communication")


@dataclass(frozen=True)
class MemoryMoment:
    """The memory of a rank after a change of it."""

    parts: dict[str, int]
    """Bytes of each of PARTS on the device."""
    phase: str
    at: int
    """Nanoseconds of the clock of calls."""


@dataclass
class RankRehearsal:
    """The figures of one rank's rehearsed program."""

    rank: int
    coordinates: dict[str, int]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each of PARTS on the device at its fullest moment."""
    at: str = ""
    """The phase of the run at that moment."""
    host_peak_bytes: int = 0
    """Most bytes of offloaded tensors in host memory."""
    by_operator: list[dict[str, Any]] = field(default_factory=list)
    """Bytes at that moment by part, operation and module, largest first."""
    timeline: list[MemoryMoment] = field(default_factory=list)
    traffic_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    """Bytes sent per step by axis and collective."""
    flops: dict[str, float] = field(default_factory=dict)
    """FLOPs per step by kind."""
    calls: list[TimedCall] = field(default_factory=list)
    """The collectives and messages of the last step, in order."""
    offloads: bool = False
    checkpoint_bytes: int = 0
    """Bytes that this rank writes of a checkpoint."""
    seconds: float = 0.0
    """Duration of the rehearsal."""

    @property
    def peak(self) -> int:
        return sum(self.peak_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns its part of the document of `phalanx dryrun --json`."""
        return {
            "rank": self.rank,
            "coordinates": self.coordinates,
            "peak_bytes": {**self.peak_bytes, "total": self.peak},
            "peak_at": self.at,
            "host_peak_bytes": self.host_peak_bytes,
            "peak_by_operator": self.by_operator,
            "traffic_bytes": self.traffic_bytes,
            "flops": {**self.flops, "total": sum(self.flops.values())},
            "calls": [[each.axis, each.collective, each.bytes] for each in self.calls],
            "checkpoint_bytes": self.checkpoint_bytes,
            "seconds": round(self.seconds, 3),
        }


def problems(job: Job) -> Iterator[str]:
    """Yields what of a job cannot be rehearsed, with what to set instead."""
    layout = job.layout
    if layout.sync == "asp":
        yield "layout.sync=asp: its messages decide what comes next; sync=bsp can be rehearsed"
    if layout.data_parallel == "threads" and layout.dp_replicate > 1:
        yield "layout.data_parallel=threads: a rehearsal runs in one thread; ddp can be rehearsed"
    if tier_of(layout, "optimizer") == "disk":
        yield f"layout.offload_to={layout.offload_to}: its files would be real; offload_to={HOST} can be rehearsed"
    if job.guard.repeat_every:
        yield f"guard.repeat_every={job.guard.repeat_every}: repeated steps are compared by values; 0 can be rehearsed"


def device_type_of(job: Job) -> str:
    """Returns the type of the device that a job's program would run on: the cluster's, though it is not here."""
    if job.cluster.device != "auto":
        return DEVICE_TYPES[job.cluster.device]
    name = job.cluster.accelerator.name
    return DEVICE_TYPES[maker_of(name) or "cuda"] if name in ACCELERATORS else "cpu"


def distinct_ranks(job: Job) -> list[int]:
    """Returns the first rank of every pipeline stage: others hold equally large parts of the same layers."""
    stride = meshes.lines(job.layout)["pp"].stride
    return [stage * stride for stage in range(job.layout.pp)]


def rehearse(
    job: Job,
    rank: int,
    vocab_size: int,
    device_type: str,
    steps: int | None = None,
    observer: OperationRecorder | None = None,
) -> RankRehearsal:
    """Runs `steps` steps of rank `rank` of a job; by default up to the first that is like all others: the optimizer's
    state is made at the end of the first step, and without a flush in the second. Raises JobError for a job that
    cannot be rehearsed, and what the program raises."""
    if found := list(problems(job)):
        raise JobError("this job cannot be rehearsed:\n" + "\n".join(f"  {each}" for each in found))
    began, steps = time.perf_counter(), steps or (3 if overlaps(job.layout) else 2)
    job = replace(job, train=replace(job.train, steps=steps, compile=False))
    recording, device = Recording(), torch.device(device_type, *([0] if device_type != "cpu" else []))
    with (
        _without_warnings_of_torch(),
        recorded(recording),
        pretended(rank, job.layout.processes, device, job.cluster, lambda: recording.phases[-1][1].label) as dry,
    ):
        mesh = meshes.build(job.layout, device.type)
        places = {axis: place for axis, place in mesh.coordinates.items() if mesh.sizes[axis] > 1}
        found = RankRehearsal(rank, places, offloads=bool(named(job.layout)))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        fake.cache_enabled = False  # `dry` remembers results itself
        with fake, dry.counting(), observer or nullcontext():
            stepper = _MarkingStepper(job, mesh, device, vocab_size, dry, observer)
            dry.known_bytes = KNOWN_BYTES
            state = TrainState(stepper, "", vocab_size)
            dry.mark("parameters", parameters_of(stepper.replica, stepper.optimizer))
            reference = []
            if has_prompts(job.data) and job.train.grpo.beta:
                reference = [shard.value.detach().clone() for shard in stepper.trained]
                dry.mark("parameters", reference)
            if observer:
                observer.begins(stepper)
            mesh.ledger.clear()
            dry.flops.clear()
            guard = guard_of(stepper, state.history, lambda *_, **__: None)
            driver = driver_of(stepper)(
                stepper=stepper,
                feed=cast(Feed, _DrawnFeed(job, vocab_size, mesh, observer)),
                milestones=Milestones(steps, 1, 0, 0),
                requests=lambda: NO_REQUESTS,
                lr=lambda _: job.optimizer.lr,
                record=lambda *_: None,
                first=0,
                guard=guard,
            )
            last = 0
            for number, _ in driver.steps():
                dry.mark("optimizer", state_of(stepper.replica, stepper.optimizer))
                if number < steps:
                    last = len(recording.calls)
            if observer:  # and what is left is for figures
                observer.ends(stepper)
                return found
            found.traffic_bytes = mesh.ledger.traffic(steps)
            found.flops = _by_kind(dry.flops, steps)
            found.calls = recording.calls[last:]
            found.checkpoint_bytes = sum(share.flat.nbytes for share in state.shares())
            stepper.reload()
            if has_prompts(job.data):
                with mesh.ledger.untracked(), heartbeat.within(Phase.DATA):
                    _generate(stepper, vocab_size, dry)
            _measure_memory(found, dry)
            _save(state)
            if job.train.eval_every:
                with mesh.ledger.untracked():
                    batches = [stepper.tensors(micro, steps, validates=True) for micro in driver.feed.peek()]
                    validation_loss(stepper.replica, mesh, batches, device)
            del driver, state, stepper, guard, reference
    found.seconds = time.perf_counter() - began
    return found


def _generate(stepper: Stepper, vocab_size: int, dry: DryWorld) -> None:
    """Begins as many texts as the job generates at once, the longest prompts first, and takes the last of their steps.
    What they draw is left out, and the passes that score them, which need less than training."""
    spec = rank_spec(stepper.job, vocab_size)
    assert spec.rollout, "the job has prompts"
    texts, (prompt, new) = texts_of(spec, spec.rollout)[1], lengths(spec, spec.rollout)
    generating, group = TrainedDecoder(stepper), spec.rollout.group
    decoder = generating.decoder
    with generating.parameters():
        dry.mark("communication", decoder.model.parameters())
        for first in range(0, texts, group):
            decoder.prefill("", [0] * prompt, min(group, texts - first), last=True)
        cache, last = decoder.batches[""], prompt + new - 2
        while cache.length <= last:  # of the passes only those in which the cache grows, and the last
            decoder.step("", [[0]] * texts)
            if cache.length < last:
                cache.length = min(cache_columns(cache.length, spec.model.seq_len), last)
            heartbeat.enter_module("")
            dry.mark("activations", cache.tensors())
        decoder.keep("", range(texts - 1))  # all but one have ended
        dry.mark("activations", cache.tensors())


def _save(state: TrainState) -> None:
    """Copies what a rank writes of a checkpoint to the host, as train/saving.py does: one tensor of each type."""
    values = [*{(x.dtype, x.device): x for x in (share.flat for share in state.shares())}.values()]
    snapshot = Snapshot(state.stepper.device)
    snapshot.take(values)
    snapshot.fill()
    if values:
        snapshot.wait(len(values) - 1)


@contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """Hides torch's advice in the `with` block, such as FSDP2's about views, which the user of a rehearsal cannot
    follow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")
        yield


class _MarkingStepper(Stepper):
    """A Stepper that says which tensors are its gradients."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device, vocab_size: int, dry: DryWorld, observer: Any):
        super().__init__(job, mesh, device, vocab_size)
        self.dry, self.observer = dry, observer
        watch_buffers(self.replica, dry.mark)

    def gradients(self, micro_batches: Sequence[MicroBatch], step: int, global_tokens: float) -> Tensor:
        heartbeat.enter_module("")  # that of the backward pass before
        if self.observer:
            self.observer.divides(self.loss_scale.value / global_tokens)
        return super().gradients(micro_batches, step, global_tokens)

    def _update(self) -> list[Tensor]:
        if self.observer:  # before the optimizer has taken them
            self.observer.gradients(self)
        return super()._update()

    def status(self, loss: Tensor, requests: Requests = NO_REQUESTS) -> tuple[Tensor, Tensor, Pending]:
        self.dry.mark("gradients", gradients_of(self.replica, self.optimizer))
        heartbeat.enter_module("")
        if self.observer and not self.stashing:
            self.observer.gradients(self)
        return super().status(loss, requests)


def parameters_of(replica: Replica, optimizer: ShardedOptimizer) -> list[Tensor]:
    """Returns the tensors that hold a rank's parameters."""
    found = [*replica.objective.parameters(), *(shard.value for shard in replica.shards)]
    if isinstance(replica.runner, PipeDream):
        found += [weight for weights in replica.runner.versions for weight in weights]
    return [*found, *(shard.value for shard in optimizer.shards)]


def state_of(replica: Replica, optimizer: ShardedOptimizer) -> list[Tensor]:
    """Returns the tensors that hold a rank's optimizer state, and what compression keeps from step to step."""
    found = [x for tensors in optimizer.state_tensors().values() for x in tensors.values()]
    return [*found, replica.compression.state] if replica.compression else found


def gradients_of(replica: Replica, optimizer: ShardedOptimizer) -> list[Tensor]:
    """Returns the tensors that hold a rank's gradients now."""
    found = [p.grad for p in replica.objective.parameters()]
    found += [shard.gradient for shard in (*replica.shards, *optimizer.shards)]
    found += [master.grad for master in optimizer.masters.values()]
    if isinstance(replica, BucketReplica):
        found += [buffer for each in replica.buckets for buffer in (each.gradients, each.reduced, each.arriving)]
    return [x for x in found if x is not None]


def watch_buffers(replica: Replica, mark: Callable[[str, list[Tensor]], None]) -> None:
    """Has flat buffers of gradients, and the second copy of parameters (hpZ), marked where they are made: ZeRO-2's
    buffers and the copy are gone before a step ends."""

    def marked(buffer: Callable[[], Tensor]) -> Tensor:
        mark("gradients", [found := buffer()])
        return found

    def copied(gather: Gather, arrived: Callable[[Tensor, Tensor], None], *tensors: Tensor) -> None:
        arrived(*tensors)
        mark("communication", [] if gather.copy is None else [gather.copy])

    for bucket in replica.buckets if isinstance(replica, BucketReplica) else ():
        bucket._buffer = partial(marked, bucket._buffer)
    for gather in replica.gathers if isinstance(replica, ShardedReplica) else ():
        gather._arrived = partial(copied, gather, gather._arrived)


class _DrawnFeed:
    """Random micro-batches of one rank: a Feed without data. They are those of the first rank, as large as any, or, if
    an `observer` compares ranks, its own."""

    def __init__(self, job: Job, vocab_size: int, mesh: Mesh, observer: OperationRecorder | None):
        self.job, self.vocab_size, self.mesh, self.observer = job, vocab_size, mesh, observer
        # Steps after the ramps, which predictions are of.
        self.ramp = ramp_of(replace(job, train=replace(job.train, batch_ramp="", seq_ramp="")))
        self.batch = self.ramp.phases[-1].batch
        self.next: list[MicroBatch] | None = None
        self.step = 0

    def peek(self) -> list[MicroBatch]:
        if self.next is None:
            share = self.batch.global_batch // self.mesh.data_ranks
            rows, first = (self.batch.global_batch, self.mesh.data_rank * share) if self.observer else (share, 0)
            step = self.step * (1 + self.job.data.document_mask)  # in even ones documents are long
            self.next, valid = drawn(self.job, self.vocab_size, rows, range(first, first + share), step)
            self.valid = valid if self.observer else valid * self.mesh.data_ranks
            self.step += 1
            if self.observer:
                self.observer.reads(self.next)
        return self.next

    def take(self) -> list[MicroBatch]:
        taken, self.next = self.peek(), None
        return taken

    def take_unless(self, _: Callable[[], bool]) -> list[MicroBatch]:
        return self.take()

    def tokens(self, _: int) -> int:
        return self.valid

    def samples(self, done: int) -> range:
        return range(done * self.batch.global_batch, (done + 1) * self.batch.global_batch)


def _by_kind(flops: dict[str, float], steps: int) -> dict[str, float]:
    """Returns FLOPs per step of matrix products, of experts' and of attention."""
    found: defaultdict[str, float] = defaultdict(float)
    for operator, count in flops.items():
        kind = "attention" if "attention" in operator else "experts" if "grouped_mm" in operator else "products"
        found[kind] += count / steps
    return dict(found)


def part_of(made: Allocation) -> str:
    """Returns which of PARTS an allocation is: what was found of it, else what the rank did when it was made."""
    if made.part:
        return made.part
    match made.phase:
        case Phase.OPTIMIZER.label:
            return "optimizer"
        case Phase.START.label:
            return "parameters"
        case Phase.EXCHANGE.label:
            return "communication"
        case _:
            return "activations" if made.module.startswith(("blocks", "embed", "final_norm")) else "logits"


def _measure_memory(found: RankRehearsal, dry: DryWorld) -> None:
    """Finds the fullest moment among the changes of memory, and what was there."""
    parts, sizes, device, host, most, when = dict.fromkeys(PARTS, 0), defaultdict[Allocation, int](int), 0, 0, -1, 0
    part_by: dict[Allocation, str] = {}
    for number, event in enumerate(dry.events):
        if event.allocation.on_host:
            host += event.change
            found.host_peak_bytes = max(found.host_peak_bytes, host)
            continue
        if not (part := part_by.get(event.allocation)):
            part = part_by[event.allocation] = part_of(event.allocation)
        parts[part] += event.change
        device += event.change
        found.timeline.append(MemoryMoment(dict(parts), event.phase, event.at))
        if device > most:
            most, when = device, number
    for event in dry.events[: when + 1]:
        if not event.allocation.on_host:
            sizes[event.allocation] += event.change
    groups: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for made, size in sizes.items():
        groups[part_by[made], made.operator, made.module] += size
    for (part, operator, module), size in sorted(groups.items(), key=lambda pair: -pair[1]):
        if size:
            found.by_operator.append({"part": part, "operator": operator, "module": module, "bytes": size})
    found.peak_bytes = dict.fromkeys(PARTS, 0)
    for (part, _, _), size in groups.items():
        found.peak_bytes[part] += size
    found.at = dry.events[when].phase
