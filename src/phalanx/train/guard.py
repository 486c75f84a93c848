"""The guard judges every step before the optimizer writes it, and answers what it finds by the job's policies.

A step is in doubt if replicas of state or gradients differ, if loss or gradients are not finite, or if one of them
jumps; by `guard.repeat_every`, further steps are treated alike. It is then computed again from the same inputs, until
two results agree. Another result shows a transient fault of the hardware, which is named, and the result that came
twice is used; the same result shows that data or model are the cause (the idea of Megatron-LM's RerunStateMachine). All
decisions follow from sums over all ranks: the ranks agree.

On a GPU the host judges a step while the device computes the next one. The device itself applies no step from one on
that is not finite, so that a step in doubt is computed again from the weights before it, and then the next one.

Two tensors are replicas if they are the same range of the same slice of the same parameter, of one kind (the parameter
itself, its fp32 master, a moment, its summed gradient). Nothing else is assumed about the layout: ranks along an axis
tell each other what they hold, once, as hashes. Replicas differ in some bit only if one of them is corrupt: they begin
with the same bits, an all-reduce gives the same bits to all its ranks (gloo and NCCL add every element once, along one
path, and pass on the sum; DDP has relied on it since 2020), and the optimizer computes each element from that element's
state alone. Tensor ranks compute some gradients each for itself, from equal inputs: these are equal where kernels are
deterministic, and compared only there.
"""

from __future__ import annotations

import logging
import math
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.check.job import unguarded
from phalanx.comm.axis import Axis
from phalanx.config.job import GuardOptions
from phalanx.errors import CorruptionError, NotFiniteError, RunError, SpikeError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.model.moe import Statistics
from phalanx.parallel.data import Replica
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.train.requests import NO_REQUESTS, is_due
from phalanx.train.step import Computed, Step, StepInputs, Stepper
from phalanx.units import counted, listed

_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd: 2^64 / golden ratio, and splitmix64's
_LOW_BITS = 0xFFFFFFFF


@torch.no_grad()
def digests(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the digest of every tensor, (len(tensors),) of int64 on `device`; 0 for None.

    Tensors of equal bits and shapes have equal digests, on any device. Different ones have different digests, but for
    one chance in 2^63."""
    entries: list[Tensor] = []
    lengths: list[int] = []
    for tensor in tensors:
        # Offloaded state is summed on its host.
        parts = [] if tensor is None else [part.to(device) for part in _sums(words(tensor))]
        entries += parts
        lengths.append(sum(part.numel() for part in parts))
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if not entries:
        return result
    values = torch.cat(entries)
    owners = torch.repeat_interleave(torch.tensor(lengths, device=device), output_size=len(values))
    # Places count from the start of each tensor, so that a digest does not depend on the tensors beside it.
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    places = torch.arange(len(values), device=device) - starts[owners]
    weights = _mixed(places + 1) | 1
    return result.index_add_(0, owners, _mixed(values + weights) * weights)


def words(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as 64-bit words, (n,) of int64: a view where it fills whole words."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if flat.is_contiguous() and not flat.nbytes % 8 and not flat.storage_offset() * size % 8:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-flat.nbytes // 8), dtype=torch.int64, device=flat.device)
    padded.view(flat.dtype)[: flat.numel()].copy_(flat)
    return padded


def _sums(bits: Tensor) -> list[Tensor]:
    """Returns the sums of rows and of columns of the words (n,) as a matrix, and the words that fill no row."""
    width = 1 << (len(bits).bit_length() // 2)
    whole = len(bits) // width * width
    matrix = bits[:whole].view(-1, width)
    return [matrix.sum(1), matrix.sum(0), bits[whole:]]


def _mixed(x: Tensor) -> Tensor:
    """Returns a bijective hash of 64-bit words (the steps of splitmix64: Steele et al. 2014)."""
    for multiplier in _MULTIPLIERS:
        x = (x ^ ((x >> 32) & _LOW_BITS)) * multiplier
    return x ^ ((x >> 32) & _LOW_BITS)


PARAMETER, MASTER, GRADIENT = "parameter", "master", "gradient"
AXES = ("dp_replicate", "shard", "tp", "pp")
"""The axes along which replicas may lie: each rank's place follows from these four."""
_NONE = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the training state on this rank."""

    kind: str
    shard: ParameterShard

    @property
    def name(self) -> str:
        """The parameter's name, with the kind where it is not the parameter itself."""
        return self.shard.name if self.kind == PARAMETER else f"{self.shard.name} ({self.kind})"

    @cached_property
    def key(self) -> int:
        """A hash that replicas on other ranks have, too, and nothing else."""
        part, shard = self.shard.tensor_slice, self.shard
        facts = (self.kind, shard.name, part.dim, part.start, part.size, shard.start, shard.value.numel())
        return int.from_bytes(blake2b(repr(facts).encode(), digest_size=8).digest(), signed=True)


@dataclass(frozen=True)
class Difference:
    """A tensor whose replicas differ."""

    key: int
    kind: str
    name: str
    digests: dict[int, int]
    """By rank."""

    @property
    def good(self) -> list[int]:
        """The ranks that hold what more than half of the replicas hold; none without a majority."""
        digest, count = Counter(self.digests.values()).most_common(1)[0]
        return [rank for rank, own in self.digests.items() if own == digest] if 2 * count > len(self.digests) else []

    @property
    def suspects(self) -> list[int]:
        """The ranks that hold something else than the majority; all of them without one."""
        good = self.good
        return [rank for rank in self.digests if rank not in good]


class Replicas:
    """This rank's part in comparing the replicated state of a run."""

    def __init__(self, stepper: Stepper, *, exact: bool):
        """Finds the replicas; `exact` if kernels are deterministic. A collective of all ranks."""
        self.stepper, self.mesh, self.device = stepper, stepper.mesh, stepper.device
        self.held = _held(stepper)
        summed = {name for partial in stepper.replica.model.partials for name in partial.names}
        with self.mesh.ledger.untracked():
            lines = []
            for axis in (self.mesh.axis(name) for name in AXES):
                compared = [exact or axis.name != "tp" or held.shard.whole_name in summed for held in self.held]
                keys = [held.key if yes else _NONE for held, yes in zip(self.held, compared, strict=True)]
                if axis.size > 1:
                    lines.append(_Line(axis, torch.tensor(keys, dtype=torch.int64, device=self.device)))
            self.lines = [line for line in lines if len(line.keys)]
            self.exist = self._count(len(self.lines)) > 0
        """Whether any rank has a replica of anything."""
        shared = {int(number) for line in self.lines for number in line.own}
        sizes = [0 if held.kind == GRADIENT else self._bytes(held) for held in self.held]
        self.share = sum(sizes[number] for number in shared) / max(1, sum(sizes))
        """The share of this rank's parameters and moments that another rank holds, too."""

    @torch.no_grad()
    def differing(self, *, gradients: bool) -> list[Difference]:
        """Compares all replicas, with the summed `gradients` or without. Returns those that differ, the same on all
        ranks. A collective of all ranks; while all are equal, each axis sends 16 bytes per tensor."""
        if not self.exist:
            return []
        self.stepper.replica.arrive()
        with self.mesh.ledger.untracked():
            own = digests([self.tensor(h) if gradients or h.kind != GRADIENT else None for h in self.held], self.device)
            found = {int(number) for line in self.lines for number in line.differing(own)}
            if not self._count(len(found)):
                return []
            return self._locate(found, own.tolist())

    def tensor(self, held: StateTensor) -> Tensor | None:
        """Returns what is held, which the optimizer may not have yet, or no longer."""
        optimizer, shard = self.stepper.optimizer, held.shard
        if held.kind == PARAMETER:
            return shard.value
        master = optimizer.masters[shard.name]
        if held.kind == MASTER:
            return master
        if held.kind == GRADIENT:
            return master.grad
        return optimizer.state_of(shard, held.kind)

    def gradient_digest(self) -> int:
        """Returns one digest of all gradients that this rank's optimizer has."""
        gradients = [self.tensor(held) for held in self.held if held.kind == GRADIENT]
        return int(digests([digests(gradients, self.device)], self.device).item())

    @torch.no_grad()
    def heal(self, differences: Sequence[Difference]) -> None:
        """Copies each tensor from the first rank of its majority to the ranks that hold something else. A collective of
        the ranks concerned; every difference has a majority."""
        self.stepper.optimizer.before_write()
        by_key = {held.key: held for held in self.held}
        world = self.mesh.axis("world")
        with self.mesh.ledger.untracked():
            for difference in differences:
                source = difference.good[0]
                if world.rank != source and world.rank not in difference.suspects:
                    continue
                tensor = self.tensor(by_key[difference.key])
                assert tensor is not None, "it had a digest"
                if world.rank != source:
                    arrived = torch.empty_like(tensor, device=self.device, memory_format=torch.contiguous_format)
                    world.receive(arrived, source)
                    tensor.copy_(arrived)
                    continue
                for rank in difference.suspects:
                    world.send(tensor.detach().to(self.device).contiguous(), rank)

    def _bytes(self, held: StateTensor) -> int:
        """Returns the bytes of a parameter, a master or a tensor of the optimizer's state."""
        if held.kind == PARAMETER:
            return held.shard.value.nbytes
        optimizer = self.stepper.optimizer
        master = optimizer.masters[held.shard.name]
        if held.kind == MASTER:
            return master.nbytes
        own = next(kind for kind in optimizer.kinds_of(held.shard) if kind.kind == held.kind)
        return (own.bytes or master.element_size()) * (master.numel() // own.block)

    def _locate(self, found: set[int], own: list[int]) -> list[Difference]:
        """Returns the tensors that any rank has `found` to differ, with the digests of all ranks that hold them."""
        world = self.mesh.axis("world")
        keys = {key for theirs in world.gather_json([self.held[n].key for n in found]) for key in theirs}
        mine = [(h.key, h.kind, h.name, own[n]) for n, h in enumerate(self.held) if h.key in keys]
        merged: dict[int, Difference] = {}
        for rank, theirs in enumerate(world.gather_json(mine)):
            for key, kind, name, digest in theirs:
                merged.setdefault(key, Difference(key, kind, name, {})).digests[rank] = digest
        return [merged[key] for key in sorted(merged, key=lambda key: (merged[key].name, key))]

    def _count(self, mine: int) -> int:
        total = torch.tensor([mine], device=self.device)
        self.mesh.axis("world").all_reduce(total).wait()
        return int(total.item())


class _Line:
    """The tensors that ranks of one axis hold more than once."""

    def __init__(self, axis: Axis, keys: Tensor):
        """Exchanges the `keys` (n,) of what each rank holds."""
        self.axis = axis
        longest = torch.tensor([len(keys)], device=keys.device)
        axis.all_reduce(longest, dist.ReduceOp.MAX).wait()
        mine = keys.new_full((int(longest.item()),), _NONE)
        mine[: len(keys)] = keys
        every = keys.new_empty(axis.size * len(mine))
        axis.all_gather(every, mine).wait()
        known, counts = every.unique(return_counts=True)
        self.keys = known[(counts > 1) & (known != _NONE)]
        """What at least two ranks hold, in one order on all of them."""
        own = torch.isin(keys, self.keys)
        self.own = own.nonzero().squeeze(1)
        """The indices of this rank's tensors among them."""
        self.places = torch.searchsorted(self.keys, keys[own])
        """Their places in `keys`."""

    def differing(self, own: Tensor) -> Tensor:
        """Returns the indices of this rank's tensors that differ from their replicas on the axis, from the digests of
        all its tensors: one all-reduce for largest and smallest."""
        extremes = own.new_full((2, len(self.keys)), _NONE)
        extremes[0, self.places] = own[self.own]
        extremes[1, self.places] = ~own[self.own]
        self.axis.all_reduce(extremes, dist.ReduceOp.MAX).wait()
        return self.own[(extremes[0] != ~extremes[1])[self.places]]


def _held(stepper: Stepper) -> list[StateTensor]:
    optimizer = stepper.optimizer
    shards = [shard for shard in optimizer.shards if shard.value.numel()]
    held = [StateTensor(PARAMETER, shard) for shard in stepper.replica.local_parameters() if shard.value.numel()]
    held += [StateTensor(MASTER, shard) for shard in shards if optimizer.masters[shard.name] is not shard.value]
    for kind in optimizer.kinds:
        has = {shard.name for shard in optimizer.places(kind)}
        held += [StateTensor(kind, shard) for shard in shards if shard.name in has and not shard.balances]
    return held + [StateTensor(GRADIENT, shard) for shard in shards]


log = logging.getLogger(__name__)

LIMIT_STEPS = 1000
"""The steps over which interventions are counted against `guard.limit`."""


@dataclass
class History:
    """Running medians of the steps that were taken, and the steps at which the guard intervened."""

    options: GuardOptions
    steps: int = 0
    """Steps taken since the run began."""
    losses: deque[float] = field(init=False)
    norms: deque[float] = field(init=False)
    interventions: list[int] = field(default_factory=list)
    """Steps, from 1, that were skipped, healed, or led to a rewind, those of the last LIMIT_STEPS."""

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.options.spike_window)
        self.norms = deque(maxlen=self.options.spike_window)

    def take(self, loss: float, norm: float) -> None:
        """Records a step that the optimizer takes."""
        self.steps += 1
        self.losses.append(loss)
        self.norms.append(norm)

    def spike(self, loss: float, norm: float) -> str:
        """Returns how a step's loss or gradient norm jumps; nothing if they do not, or if it is too early to tell."""
        if self.steps < self.options.spike_warmup or not self.losses:
            return ""
        texts = []
        for name, value, values, factor in (
            ("loss", loss, self.losses, self.options.spike_loss),
            ("gradient norm", norm, self.norms, self.options.spike_norm),
        ):
            usual = median(values)
            if value > factor * usual:
                texts.append(f"{name} {value:.4g} is {value / usual:.3g} × its median of {usual:.4g}")
        return ", ".join(texts)

    def intervene(self, step: int) -> bool:
        """Records an intervention at `step`. Returns whether the limit allows it."""
        self.interventions = [each for each in self.interventions if each > step - LIMIT_STEPS]
        if len(self.interventions) >= self.options.limit:
            return False
        self.interventions.append(step)
        return True

    def restart(self) -> None:
        """Forgets the steps, and keeps the interventions: a run that goes back must not go back for ever."""
        self.steps = 0
        self.losses.clear()
        self.norms.clear()

    def state(self) -> dict[str, Any]:
        """Returns everything as JSON-able values, for a checkpoint."""
        return {
            "steps": self.steps,
            "losses": list(self.losses),
            "norms": list(self.norms),
            "interventions": self.interventions,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Adopts a checkpoint's state. Interventions of this process, which led here, stay."""
        self.restart()
        self.steps = int(state["steps"])
        self.losses.extend(map(float, state["losses"]))
        self.norms.extend(map(float, state["norms"]))
        self.interventions = self.interventions or [*map(int, state["interventions"])]


NOISE = 0.01
"""Relative difference up to which two results agree on devices whose kernels are not deterministic."""


def repeats_exactly(device: torch.device) -> bool:
    """Returns whether a step computed twice on `device` has the same bits."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


class OwnGradients:
    """Adds up this rank's own gradients, bit by bit, before they are summed over the data ranks."""

    def __init__(self, replica: Replica, device: torch.device, *, exact: bool):
        self.exact = exact
        self.total = torch.zeros((), dtype=torch.int64 if exact else torch.float64, device=device)
        replica.observe(self)

    def __call__(self, gradients: Tensor) -> None:
        # One read of the gradients. A sum of words modulo 2^64 differs after any change of one word.
        if self.exact:
            self.total += words(gradients).sum()
        else:
            dtype = torch.promote_types(gradients.dtype, torch.float32)
            self.total += torch.linalg.vector_norm(gradients.detach(), dtype=dtype).double() ** 2

    def clear(self) -> None:
        self.total.zero_()


@dataclass
class Attempt:
    """One computation of a step, settled."""

    computed: Computed
    kind: str = ""
    """The kind of doubt about it: "differs", "not_finite", "spike"; empty if there is none."""
    doubt: str = ""
    """The doubt in words."""
    differences: list[Difference] = field(default_factory=list)
    """Gradients whose replicas differ."""
    result: Tensor | None = None
    """This rank's loss, its gradients before, and those after they were summed over ranks, (3,): digests where kernels
    repeat exactly, otherwise the loss and norms."""

    def agrees(self, other: Attempt, *, exact: bool) -> Tensor:
        """Returns where this rank's result is that of another attempt, (3,) of bool."""
        assert self.result is not None, "it was kept"
        assert other.result is not None, "it was kept"
        if exact:
            return self.result == other.result
        return torch.isclose(self.result, other.result, rtol=NOISE, atol=0.0, equal_nan=True)


MOST_ATTEMPTS = 3
NAMED = 4
"""Tensors that a message names; a row of metrics.jsonl names all of them."""

Report = Callable[[int, str, dict[str, Any]], None]
"""Records what was found in a step, from 1: a line of text, and the values of a row of metrics.jsonl."""


class Rewind(Exception):  # noqa: N818 (a request, not an error)
    """Asks the loop, on every rank, to go back to the newest checkpoint, or without one to the initial weights."""

    def __init__(self, samples: int | None):
        super().__init__()
        self.samples = samples
        """The sample to continue with; None for the checkpoint's own position, to take the same steps again."""


@dataclass
class Launched:
    """A step that the device takes, and that the host has not judged."""

    computed: Computed
    result: torch.Tensor
    """As Attempt.result."""
    routed: Statistics
    """The statistics of its routers, which the run's have once the step is judged."""


class Guard:
    """One rank's part in guarding a run whose ranks take every step together."""

    def __init__(self, stepper: Stepper, history: History, report: Report):
        """Finds the replicas. A collective of all ranks."""
        self.stepper, self.history, self.report = stepper, history, report
        self.options = stepper.job.guard
        self.world = stepper.mesh.axis("world")
        self.exact = repeats_exactly(stepper.device)
        self.replicas = Replicas(stepper, exact=self.exact)
        self.own_gradients = OwnGradients(stepper.replica, stepper.device, exact=self.exact)
        # Comparing bits needs the gradients of a step in doubt, and spikes the medians of all steps before it.
        self.defers = stepper.launches and not self.exact and self.options.on_spike == "off"
        """Whether the host judges steps one step later, and the device keeps bad ones from being applied."""
        self.pending: Launched | None = None
        """The launched step that has not been judged."""

    def submit(self, inputs: StepInputs, *, settles: bool) -> Iterator[tuple[int, Step]]:
        """Takes an optimizer step as `step` does. Yields the steps that become known, with their numbers from 1: not
        this one, where the guard `defers`, unless it `settles` or an earlier one asks for a checkpoint. If an earlier
        one was void, it is the last. The routers' statistics are those of the steps yielded so far. Raises as `step`
        does."""
        step = inputs.step
        pending, launched, self.pending = self.pending, None, None
        looks = is_due(step + 1, self.options.every) or is_due(step + 1, self.options.repeat_every)
        if self.defers and not settles and not looks:
            launched = self._launch(inputs)
        before, applied = self._conclude(pending, launched) if pending else (None, True)
        asked = NO_REQUESTS
        if before is not None and before.requests.void:
            yield step, before
            return
        if before is not None:
            # Its requests are met after this step, which the weights already have.
            asked = before.requests
            yield step, replace(before, requests=NO_REQUESTS)
        if launched is None:
            last = self.step(inputs)
        elif not applied:
            with self.stepper.mesh.ledger.untracked():  # it was sent once
                last = self.step(inputs)
        elif asked.pauses:
            last, _ = self._conclude(launched, None)
        else:
            self.pending = launched
            return
        yield step + 1, replace(last, requests=last.requests | asked)

    def _launch(self, inputs: StepInputs) -> Launched:
        """Takes a step without waiting for it."""
        self.own_gradients.clear()
        routing = self.stepper.routing
        before = routing.take()
        computed = self.stepper.compute(inputs)
        routed = routing.take()
        routing.add(before)
        self.stepper.launch(computed)
        result = torch.stack((computed.own_loss, self.own_gradients.total, computed.square))
        return Launched(computed, result, routed)

    def _conclude(self, launched: Launched, following: Launched | None) -> tuple[Step, bool]:
        """Returns a launched step, and whether the device has applied it. If it is in doubt it is answered now:
        neither it nor the `following` one has changed anything."""
        computed = launched.computed
        heartbeat.enter(Phase.EXCHANGE)
        computed.wait()
        self.stepper.routing.add(launched.routed)
        judged = self._judge(computed)
        taken = Step(computed.loss, computed.grad_norm, computed.requests, computed.facts)
        overflow = not (math.isfinite(taken.loss) and math.isfinite(taken.grad_norm))
        if not judged.kind and not overflow and not computed.requests.void:
            self.stepper.loss_scale.fine()
            self.history.take(taken.loss, taken.grad_norm)
            return taken, True
        self.stepper.revert(1 if following is None else 2)
        if computed.requests.void:
            return taken, False
        if not judged.kind:
            self.stepper.loss_scale.overflow()
            return taken, False
        judged.result = launched.result
        return self.step(computed.inputs, first=judged), False

    def step(self, inputs: StepInputs, first: Attempt | None = None) -> Step:
        """Takes an optimizer step as Stepper.step does; `first` is an attempt that was made and is in doubt.

        Raises, on every rank and before the optimizer writes: NotFiniteError, SpikeError or CorruptionError where the
        policy is to stop or its limit is reached; Rewind where the policy is to go back."""

        def attempt() -> Attempt:
            self.own_gradients.clear()
            computed = self.stepper.compute(inputs)
            computed.settle()
            return self._judge(computed)

        last, number = first or attempt(), inputs.step + 1
        if last.computed.requests.void:
            return self.stepper.finish(last.computed)
        repeats = is_due(number, self.options.repeat_every)
        if last.doubt or repeats or is_due(number, self.options.every):
            last = self._investigate(attempt, last, number, repeats)
        if last.kind:
            return self._answer(last)
        taken = self.stepper.finish(last.computed)
        if math.isfinite(taken.grad_norm):
            self.history.take(taken.loss, taken.grad_norm)
        return taken

    def check_state(self, step: int) -> None:
        """Compares the replicas of parameters and moments after step `step`, before they are saved. Raises Rewind or
        CorruptionError as `step` does."""
        if self.options.every and (differences := self.replicas.differing(gradients=False)):
            self._leave_if_corrupt(differences)
            self._answer_corruption(differences, step)

    def _leave_if_corrupt(self, differences: Sequence[Difference]) -> None:
        """Ends a replica that comes and goes: the others know nothing of it, and it copies their state when it is
        back."""
        if differences and self.stepper.elastic:
            raise RunError(f"{_describe(differences)}: this replica leaves, to copy the state of another")

    def _judge(self, computed: Computed) -> Attempt:
        """Returns an attempt with the doubt that its loss and norm raise."""
        loss, norm, scale = computed.loss, computed.grad_norm, self.stepper.loss_scale
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if scale.dynamic and scale.value > 1:
                return Attempt(computed)  # an overflow of fp16, which a smaller scale answers
            return Attempt(computed, "not_finite", f"loss {loss:g}, gradient norm {norm:g}")
        if self.options.on_spike != "off" and (text := self.history.spike(loss, norm)):
            return Attempt(computed, "spike", text)
        return Attempt(computed)

    def _investigate(self, attempt: Callable[[], Attempt], first: Attempt, number: int, repeats: bool) -> Attempt:
        """Compares replicas, and computes a step in doubt, or one that `repeats` in any case, until two attempts agree.
        Returns the last attempt, whose gradients the optimizer has."""
        attempts = [first]
        if state := self._compare(first):
            self._answer_corruption(state, number)
            if any(difference.kind in (PARAMETER, MASTER) for difference in state):
                attempts = []  # it computed with what was corrupt
        while not self._settled(attempts, repeats):
            if len(attempts) == MOST_ATTEMPTS:
                self._give_up(attempts, number)
            if attempts and attempts[-1].result is None:
                attempts[-1].result = self._result(attempts[-1])
            attempts.append(self._again(attempt))
        self._report_transient(attempts, number)
        return attempts[-1]

    def _compare(self, attempt: Attempt) -> list[Difference]:
        """Puts an attempt in doubt if replicas of its gradients differ. Returns parameters, masters and moments that
        differ."""
        if not self.options.every:
            return []
        differences = self.replicas.differing(gradients=True)
        self._leave_if_corrupt(differences)
        attempt.differences = [difference for difference in differences if difference.kind == GRADIENT]
        if attempt.differences:
            attempt.kind, attempt.doubt = "differs", _describe(attempt.differences)
        return [difference for difference in differences if difference.kind != GRADIENT]

    def _again(self, attempt: Callable[[], Attempt]) -> Attempt:
        routed = self.stepper.routing.take()
        self.stepper.discard()
        with self.stepper.mesh.ledger.untracked():
            another = attempt()
        self.stepper.routing.clear()
        self.stepper.routing.add(routed)  # each token is routed once
        self._compare(another)
        another.result = self._result(another)
        return another

    def _result(self, attempt: Attempt) -> torch.Tensor:
        own, digest = self.own_gradients.total, self.replicas.gradient_digest
        if self.exact:
            loss = attempt.computed.own_loss.view(torch.int64)
            return torch.stack((loss, own, torch.tensor(digest(), device=own.device)))
        return torch.stack((attempt.computed.own_loss, own, attempt.computed.square))

    def _settled(self, attempts: Sequence[Attempt], repeats: bool) -> bool:
        """Returns whether the last of the attempts may be used: the only one if it is not in doubt and not to be
        repeated, otherwise if an earlier one agrees with it on all ranks."""
        if len(attempts) < 2:
            return bool(attempts) and not attempts[-1].kind and not repeats
        return any(self._agree(attempts[-1], earlier) for earlier in attempts[:-1])

    def _agree(self, one: Attempt, other: Attempt) -> bool:
        differ = (~one.agrees(other, exact=self.exact).all()).long()
        with self.stepper.mesh.ledger.untracked():
            self.world.all_reduce(differ).wait()
            if self.stepper.elastic:
                self.stepper.elastic.exchange(differ)
        return not differ.item()

    def _report_transient(self, attempts: Sequence[Attempt], number: int) -> None:
        """Names the ranks whose results were others than those of the last attempt, if an attempt differed from it."""
        if len(attempts) < MOST_ATTEMPTS:
            return  # two that agree, or a single one
        odd = next(each for each in attempts if not self._agree(each, attempts[-1]))
        where, hosts = self._blame(odd, attempts[-1])
        text = f"{odd.doubt or 'a result'} did not come again: a transient fault of the hardware {where}"
        row = {"found": "transient", "action": "computed_again", "hosts": hosts}
        self.report(number, text, row | self._facts(odd))

    def _blame(self, odd: Attempt, good: Attempt) -> tuple[str, dict[str, str]]:
        """Returns who computed something else in attempt `odd`, in words and as the hosts by rank. A collective."""
        mine = [platform.node(), odd.agrees(good, exact=self.exact).tolist()]
        everyone = dict(enumerate(self.world.gather_json(mine)))
        of_own = {rank: host for rank, (host, (loss, own, _)) in everyone.items() if not (loss and own)}
        after_sum = {rank: host for rank, (host, (_, _, summed)) in everyone.items() if not summed}
        hosts = of_own or after_sum
        where = f"on {_ranks(hosts)}"
        if len(hosts) > 1:
            where = f"on one of {_ranks(hosts)}, which exchange what they compute"
        return where, {str(rank): host for rank, host in hosts.items()}

    def _give_up(self, attempts: Sequence[Attempt], number: int) -> NoReturn:
        where, hosts = self._blame(attempts[-2], attempts[-1])
        text = f"{MOST_ATTEMPTS} computations of a step gave {MOST_ATTEMPTS} results: a fault {where}"
        self.stepper.discard()
        self.report(number, text, {"found": "fault", "action": "stop", "hosts": hosts} | self._facts(attempts[0]))
        raise CorruptionError(f"step {number}: {text}. Take the host out of service; the same command resumes")

    def _answer(self, last: Attempt) -> Step:
        """Answers a doubt that came again by its policy."""
        number, samples = last.computed.inputs.step + 1, last.computed.inputs.samples
        if last.kind == "differs":
            self._answer_corruption(last.differences, number)
        policy = self.options.on_nan if last.kind == "not_finite" else self.options.on_spike
        action, limit = self._allowed(policy, number)
        found = {"found": last.kind, "action": action, "samples": [samples.start, samples.stop - 1]}
        text = f"{last.doubt} (samples {samples.start} to {samples.stop - 1})"
        self.report(number, f"{text}: {action}{limit}", found | self._facts(last))
        if action == "stop" and last.kind == "not_finite":
            try:
                return self.stepper.finish(last.computed)
            except NotFiniteError as error:
                raise NotFiniteError(f"{error}{limit}") from None
        self.stepper.discard()
        if action == "stop":
            raise SpikeError(
                f"step {number}: {text}, computed twice{limit}; the optimizer did not apply it. A lower optimizer.lr "
                "or guard.on_spike=skip trains past it, a higher guard.spike_loss or spike_norm allows it"
            )
        if action == "rewind":
            raise Rewind(samples.stop)
        heartbeat.enter(Phase.RECORD)
        return Step(last.computed.loss, last.computed.grad_norm, last.computed.requests)

    def _answer_corruption(self, differences: Sequence[Difference], number: int) -> None:
        """Heals the replicas that differ, or raises Rewind or CorruptionError."""
        policy = self.options.on_corruption
        heals = all(each.good and each.kind != GRADIENT for each in differences)
        action, limit = self._allowed("rewind" if policy == "heal" and not heals else policy, number)
        every = self.world.gather_json(platform.node())
        hosts = {rank: every[rank] for rank in sorted({rank for each in differences for rank in each.digests})}
        text = _describe(differences, hosts)
        row = {
            "found": "corruption",
            "action": action,
            "tensors": [each.name for each in differences],
            "hosts": {str(rank): hosts[rank] for each in differences for rank in each.suspects},
        }
        self.report(number, f"{text}: {action}{limit}", row)
        if action == "heal":
            self.replicas.heal(differences)
            return
        self.stepper.discard()
        if action == "rewind":
            raise Rewind(None)
        raise CorruptionError(
            f"step {number}: {text}{limit}. Checkpoints are from before; the same command resumes from the newest. "
            "Test the memory of the host first"
        )

    def _allowed(self, policy: str, number: int) -> tuple[str, str]:
        """Returns the policy, or "stop" once interventions have reached their limit, with the words that say so."""
        if policy == "stop" or self.history.intervene(number):
            return policy, ""
        return "stop", f"; guard.limit of {self.options.limit} in {LIMIT_STEPS:,} steps is reached"

    @staticmethod
    def _facts(attempt: Attempt) -> dict[str, float]:
        return {"loss": attempt.computed.loss, "grad_norm": attempt.computed.grad_norm}


def guard_of(stepper: Stepper, history: History, report: Report) -> Guard | None:
    """Returns what judges a run's steps, where they can be judged. A collective."""
    job = stepper.job
    if reason := unguarded(job):
        log.info("guard: off: %s", reason)
        return None
    guard = Guard(stepper, history, report)
    if job.guard.every and guard.replicas.exist:
        log.info(
            "guard: compares replicas every %s; %.0f%% of this rank's state is replicated",
            *(counted(job.guard.every, "step"), 100 * guard.replicas.share),
        )
    return guard


def _describe(differences: Sequence[Difference], hosts: dict[int, str] | None = None) -> str:
    """Returns which tensors differ, and on which ranks:

    "replicas differ: blocks.0.attn.wq.weight (exp_avg) and 2 more on rank 3 (node7), not on ranks 0, 1, 2"
    """
    names = [each.name for each in differences]
    suspects = sorted({rank for each in differences for rank in each.suspects})
    others = sorted({rank for each in differences for rank in each.digests} - {*suspects})
    where = _ranks({rank: (hosts or {}).get(rank, "") for rank in suspects})
    if not others:
        return f"replicas differ: {listed(names, NAMED)} on {where}, without a majority"
    return f"replicas differ: {listed(names, NAMED)} on {where}, not on {_ranks(dict.fromkeys(others, ''))}"


def _ranks(hosts: dict[int, str]) -> str:
    """Returns "rank 3 (node7)", or "ranks 0, 1"."""
    names = ", ".join(f"{rank} ({host})" if host else str(rank) for rank, host in hosts.items())
    return f"{'rank' if len(hosts) == 1 else 'ranks'} {names}"
