"""One optimizer step of a job on this rank, which the training loop repeats and `phalanx verify` compares."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.axes.catalogue import unbalanced
from phalanx.blocks.parameters import parameter_shapes
from phalanx.comm.axis import Pending
from phalanx.config.job import IGNORE, Job
from phalanx.cost.in_flight import WHOLE
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import RankParts, StepParts
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError, RunError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.model.documents import Conversations, Documents
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply, initialise
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import FurtherTokens, MicroTensors, PairLoss, PolicyLoss
from phalanx.parallel.offload import BudgetError, Host
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.pipeline import PipeDream, Pipeline, StashingPipeline
from phalanx.parallel.precision import DTYPES, LossScale
from phalanx.partition import derived as batch
from phalanx.partition.derived import HOST, Part, is_offloaded, named, tier_of
from phalanx.partition.documents import Assignment, Numbers, Places, assigned, held
from phalanx.partition.tensor_slices import rank_positions
from phalanx.techniques.catalogue import updates_of
from phalanx.techniques.memory import offload_problems, with_offload
from phalanx.train.elastic import ElasticDiLoCo, ElasticReplicas
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.residence import InFiles, OnDevice, OnHost
from phalanx.train.sync import AxisSync, DiLoCo, LocalSGD
from phalanx.units import gib

REFUSALS = ("can't allocate memory", "DefaultCPUAllocator", "could not create a primitive")
"""Texts of the RuntimeError of torch, or of oneDNN, where a CPU has no memory left."""


@dataclass(frozen=True)
class Memory:
    """The predicted memory of one rank, which explains an out-of-memory error."""

    job: Job
    device: torch.device
    vocab_size: int
    pp_rank: int = 0
    """The rank's place in its pipeline."""

    def table(self) -> dict[str, int]:
        """Returns the bytes of each part, at the moment when there is most of it."""
        step = StepParts(rank_spec(self.job, self.vocab_size, self.device.type))
        rank = RankParts(step, step.flights[self.pp_rank])
        state = rank.state
        counted = (WHOLE,) * len(rank.flight.held)  # gradients are a part of their own
        passes = (peak._replace(gradients=counted) for peak in rank.flight.peaks if peak.kind in ("B", "I"))
        activations = rank.fullest[0] + max(rank.backward(peak, unsent=False)[0] for peak in passes)
        logits = rank.logits()[0] + rank.waiting_logits()
        parts = {
            "parameters": state.parameters,
            "gradients": state.early(True),
            "optimizer": state.optimizer,
            "activations": activations,
            "logits": logits,
        }
        return {name: round(size) for name, size in parts.items()}

    @contextmanager
    def allocating(self, *parts: str) -> Iterator[None]:
        """Attributes a `with` block's allocations to these parts of the table. Raises RunError if they do not fit."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RunError(self._message(parts, error)) from error
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            raise RunError(self._message(parts, error)) from error

    def _message(self, parts: Iterable[str], error: Exception) -> str:
        table = self.table()
        largest = max(parts, key=table.__getitem__)
        shown = ", ".join(f"{part} {gib(size)}" for part, size in table.items())
        message = str(error).strip().splitlines() or [type(error).__name__]
        words = " or ".join(sorted(parts, key=table.__getitem__, reverse=True))
        free = error.free if isinstance(error, BudgetError) else free_bytes(self.device)
        return (
            f"no memory for this rank's {words}: it is predicted to need {shown}, together "
            f"{gib(sum(table.values()))}; {gib(free)} are free; nearest remedy for its {largest}: "
            f"{self._remedy(largest)} ({message[0]})"
        )

    def _remedy(self, part: str) -> str:
        """Returns the smallest change of the layout that makes a part smaller."""
        layout, model = self.job.layout, self.job.model
        if part == "logits":
            tokens = batch.solve(self.job.train.global_batch, layout).micro_batch * model.seq_len
            smaller = max(1, (layout.logits_of(tokens) or tokens) // 4)
            return f"layout.loss_chunk={smaller if layout.loss_chunk else 'auto'}"
        if part == "activations":
            if layout.recompute_cut:
                return "layout.recompute=full layout.recompute_cut="
            if layout.recompute == "none":
                return f"layout.recompute={'selective' if model.dropout else 'products'}"
            if layout.recompute != "full":
                return "layout.recompute=full"
            if layout.tp > 1 and not layout.sp:
                return "layout.sp=true"
            micro_batch = batch.solve(self.job.train.global_batch, layout).micro_batch
            if micro_batch > 1:
                return f"layout.micro_batch={micro_batch // 2}"
            return self._offload("activations") or self._more_devices()
        stage = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
        if layout.shard_ranks > 1 and layout.zero < stage:
            return f"layout.zero={stage}"
        if layout.dp_replicate > 1:
            stage = max(stage, layout.zero if layout.shard_ranks > 1 else stage)
            return f"layout.dp_replicate=1 layout.dp_shard={layout.data_ranks} layout.zero={stage}"
        return self._offload("parameters" if part == "parameters" else "optimizer") or self._more_devices()

    def _offload(self, part: Part) -> str:
        """Returns the change that offloads a part too; empty if it leaves the device already, or cannot."""
        layout = with_offload(part, self.job.layout)
        problems = offload_problems(replace(self.job, layout=layout))
        if layout.offload == self.job.layout.offload or any(True for _ in problems):
            return ""
        return f"layout.offload={layout.offload}"

    def _more_devices(self) -> str:
        layout, model = self.job.layout, self.job.model
        twice = 2 * layout.tp
        if model.n_heads % twice == 0 and model.ff_size % twice == 0 and layout.tiles == 1:
            return (
                f"twice the devices with layout.tp={twice}, or layout.dp_shard={2 * layout.dp_shard} with layout.zero=3"
            )
        return f"twice the devices with layout.dp_shard={2 * layout.dp_shard} and layout.zero=3"


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that a rank can still allocate: of an accelerator, or of the machine and its process limit."""
    if device.type != "cpu":
        return torch.get_device_module(device).mem_get_info(device)[0]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    left = limit - pages * resource.getpagesize() if limit != resource.RLIM_INFINITY else 2**63
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(left, available))


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInputs:
    """All that a rank takes an optimizer step with."""

    micro_batches: Sequence[MicroBatch]
    """This rank's."""
    step: int
    """The step's number, from 0."""
    tokens: int
    """Valid tokens of the global batch. Independent replicas assume that their parts of them are equal."""
    lr: float
    requests: Requests = NO_REQUESTS
    """This rank's."""
    samples: range = range(0)
    """Those of the global batch, which the guard names."""


@dataclass(frozen=True)
class Step:
    """The result of one step: the same on every rank of a replica, and with sync=bsp on all ranks."""

    loss: float
    """Mean over the global batch's tokens, in nats; over its part of them for an independent replica."""
    grad_norm: float
    requests: Requests = NO_REQUESTS
    """Requests of any rank; independent replicas know them only when they synchronize."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further means over the global batch, by their names in metrics.jsonl: rewards, margin and accuracy of preference
    pairs, KL, clipping and entropy of completions, or the loss of modules for further tokens."""


@dataclass
class Computed:
    """A step's gradients, summed over the data ranks and taken by the optimizer, before it writes anything."""

    inputs: StepInputs
    own_loss: Tensor
    """The loss summed over this rank's micro-batches, in fp64."""
    tokens: float
    """Valid tokens of the batch that one update covers."""
    square: Tensor
    """The square of the gradients' norm: of this rank's until the step is settled, then of all ranks'."""
    status: Tensor
    """Loss, squared norm and requests, (3,) in fp64, and with preference pairs or completions the sums of these, (7,),
    or with modules for further tokens their loss, (4,): over all ranks once `everywhere` has arrived."""
    everywhere: Pending
    compared: PairLoss | PolicyLoss | None = None
    arrived: Any = None
    """The arrival of `status` on the host, if it was fetched from a GPU."""

    def settle(self) -> None:
        """Waits for the sums, which are the same on all ranks: on a GPU the device waits, not the host."""
        self.everywhere.wait()
        self.square = self.status[1]

    def fetch(self) -> None:
        """Starts copying `status` to the host, where `wait` makes it readable while the device goes on."""
        there, self.status = self.status, torch.empty_like(self.status, device="cpu", pin_memory=not self.status.is_cpu)
        self.status.copy_(there, non_blocking=True)
        self.arrived = None if there.is_cpu else torch.accelerator.current_stream(there.device).record_event()

    def wait(self) -> None:
        """Waits for a `status` that was fetched."""
        if self.arrived is not None:
            self.arrived.synchronize()

    @property
    def loss(self) -> float:
        """The mean loss over the batch, of a settled step."""
        return (self.status[0] / (self.tokens or 1)).item()

    @property
    def grad_norm(self) -> float:
        """The norm of the gradients, of a settled step."""
        return self.status[1].sqrt().item()  # not of `square`, which stays on the device

    @property
    def requests(self) -> Requests:
        """The requests of any rank, of a settled step."""
        return Requests.decode(self.status[2].item())

    @property
    def facts(self) -> dict[str, float]:
        """Step.facts of a settled step."""
        more = self.status[3:]
        if len(more) == 1:
            return {"mtp_loss": (more[0] / (self.tokens or 1)).item()}
        found = self.compared and self.compared.facts(more)
        return asdict(found) if found else {}


class Stepper:
    """A job's model with its optimizer, distributed as the layout says, on one rank."""

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        device: torch.device,
        vocab_size: int,
        dtype: torch.dtype | None = None,
        elastic: ElasticReplicas | None = None,
    ):
        """`dtype`: the parameters' type, if it is not the one that the job's precision has. `elastic`: replicas that
        come and go, each with a stepper of its own."""
        self.job, self.mesh, self.device, self.vocab_size = job, mesh, device, vocab_size
        dtype = dtype or DTYPES[job.train.precision]
        with torch.device("meta"):
            model = Transformer(job.model, vocab_size).to(dtype)
        self.routing = model.routing
        self.memory = Memory(job, device, vocab_size, mesh.coordinates["pp"])
        self.host = Host(device)
        with self.memory.allocating("parameters"):
            self.replica = apply(model, job, mesh, device, self.host)
        shards = self.trained = [shard for shard in self.replica.shards if not shard.frozen]
        if job.layout.sync == "asp":
            # The first replica's ranks hold the server's parameters beside those they compute with.
            serves = mesh.coordinates["dp_replicate"] == 0
            shards = [_copy(shard) for shard in shards] if serves else []
        self.stashing = self.replica.runner if isinstance(self.replica.runner, StashingPipeline) else None
        self.lr, self.squares = 0.0, list[Tensor]()
        """With a pipeline that updates per micro-batch: the rate of this step, and its gradients' squared norms."""
        if self.stashing or isinstance(self.replica.runner, PipeDream):
            shards = [_copy(shard) for shard in shards]  # it computes with older versions
        level = logging.INFO if mesh.axis("world").rank == 0 else logging.DEBUG
        with self.memory.allocating("optimizer"):
            residence = self._residence(shards, level)
            self.optimizer = ShardedOptimizer(
                *(shards, job.optimizer, job.model.moe.bias_rate, mesh.axis("tp"), residence, updates_of(job)),
                seed=job.train.seed,
            )
        if isinstance(residence, OnHost):
            self.replica.offload(residence.move)
        self.loss_scale = LossScale(dtype)
        self.bad = torch.zeros((), dtype=torch.bool, device=device)
        """Set on the device from the first launched step on that is not finite, until it is reverted."""
        runner = self.replica.runner
        self.slices = runner.schedule.slices if isinstance(runner, Pipeline) else 1
        self.places = dict[tuple[int, int], Tensor | None]()
        self.assignments = list[Assignment]()
        """The assignment of each micro-batch's documents to cp ranks, since a step was recorded."""
        self.independent_replicas = job.layout.independent_replicas
        self.elastic = elastic
        self.sync: LocalSGD | None = None
        if elastic and job.layout.sync == "diloco":
            self.sync = ElasticDiLoCo(job, mesh, self.optimizer, device, elastic)
        elif job.layout.sync in ("local_sgd", "diloco"):
            kind = LocalSGD if job.layout.sync == "local_sgd" else DiLoCo
            self.sync = kind(job, mesh, self.optimizer, device)
        elif job.layout.axes.sizes:
            self.sync = AxisSync(job, mesh, self.optimizer, device)

    def _residence(self, shards: Sequence[ParameterShard], level: int) -> OnDevice:
        """Returns where the state of the optimizer of these shards lives, logged at `level`."""
        layout = self.job.layout
        beside = is_offloaded(layout, "parameters")
        match tier_of(layout, "optimizer"):
            case "device":
                if layout.offload_to != HOST and self.mesh.axis("world").rank == 0:
                    log.warning(
                        "layout.offload_to=%s is not used: layout.offload=%s leaves optimizer state on the device",
                        *(layout.offload_to, layout.offload),
                    )
                return OnDevice()
            case "host":
                log.log(level, "offload: optimizer state and its update on the host")
                return OnHost(self.host, beside=beside)
            case "disk":
                folder, world = Path(layout.offload_to).expanduser().absolute(), self.mesh.axis("world")
                return InFiles(self.host, folder, self.job.optimizer, shards, world, level, beside=beside)

    def gradients(self, micro_batches: Sequence[MicroBatch], step: int, global_tokens: float) -> Tensor:
        """Runs forward and backward over this rank's micro-batches. Returns the loss summed over them, in fp64.

        Afterwards the shards' gradients are those of the mean loss over `global_tokens`, times the loss scale."""
        heartbeat.enter(Phase.FORWARD_BACKWARD)
        if self.replica.compression:
            self.replica.compression.step = step
        tensors = [self.tensors(micro, step) for micro in micro_batches]
        if self.stashing:
            void = math.isnan(global_tokens)
            counts = [math.nan if void else float((micro.targets != IGNORE).sum()) for micro in micro_batches]
            self.stashing.factors = [self.factor(count, micro_batches) for count in counts]
            self.stashing.update, self.squares = self._update, []
        with self.memory.allocating("activations", "logits", "gradients"):
            return self.replica.gradients(tensors, self.factor(global_tokens, micro_batches))

    def _update(self) -> list[Tensor]:
        """Takes the optimizer's step with this stage's gradients of one micro-batch, and returns the new weights. What
        is not finite changes none; the step then fails on all ranks."""
        for own, shard in zip(self.optimizer.shards, self.trained, strict=True):
            own.gradient = shard.gradient
        square = self.optimizer.square_norm(self.loss_scale.value)
        self.squares.append(square)
        if math.isfinite(square.item()):
            self.optimizer.step(self.lr, square.sqrt())
        for own in self.optimizer.shards:  # or they would lie beside those of the next micro-batch
            own.gradient = None
        self.discard()
        return [shard.value for shard in self.optimizer.shards]

    def factor(self, global_tokens: float, micro_batches: Sequence[MicroBatch]) -> float:
        """Returns the factor of a backward pass's loss, summed over valid tokens, and sets that of the routers'
        penalties, which are summed over all tokens but padding. Without a valid token there is no loss, and nothing to
        divide."""
        factor = self.loss_scale.value / (global_tokens or 1)
        self.routing.factor = factor * micro_batches[0].valid_share
        return factor

    def step(self, inputs: StepInputs) -> Step:
        """Takes an optimizer step.

        Requests of any rank are seen on all; a void step changes nothing. Raises NotFiniteError, before the optimizer
        writes anything, if loss or gradients are not finite (with fp16, if a smaller loss scale cannot help);
        independent replicas raise it when they synchronize. Raises RunError if memory is short. With sync=asp the
        parameter server takes the steps (train/drivers.py)."""
        assert self.job.layout.sync != "asp", "the parameter server takes the steps"
        return self.finish(self.compute(inputs))

    def compute(self, inputs: StepInputs) -> Computed:
        """Computes the gradients of a step, and starts summing what decides about it."""
        # Along an axis of a package the mean over replicas is that of the whole batch, to the last digit.
        exact = bool(self.job.layout.axes.sizes)
        self.lr = inputs.lr
        replicas = self.independent_replicas
        tokens = inputs.tokens / replicas if exact else inputs.tokens // replicas
        # Where ranks hold whole gradients, the optimizer does not wait for the requests: NaN keeps it from writing.
        loss = self.gradients(inputs.micro_batches, inputs.step, math.nan if inputs.requests.void else tokens)
        heartbeat.enter(Phase.EXCHANGE)
        status = self.status(loss, inputs.requests)
        return Computed(inputs, loss, tokens, *status, self.replica.objective.compared)

    def finish(self, computed: Computed) -> Step:
        """Updates the parameters with a step's gradients, or raises as `step` does."""
        if self.mesh.is_sharded:
            computed.settle()
        norm, inputs = computed.square.sqrt(), computed.inputs
        grad_norm = norm.item()
        heartbeat.enter(Phase.OPTIMIZER)
        if math.isfinite(grad_norm) and not self.stashing:
            with self.memory.allocating("optimizer"):
                self.optimizer.step(inputs.lr, norm)
            self.loss_scale.fine()
        computed.everywhere.wait()  # if ranks hold whole gradients, it overlaps with the optimizer
        mean, requests = computed.loss, computed.requests
        problem = ""
        if not math.isfinite(grad_norm) and not requests.void and not self.loss_scale.overflow():
            bad = self.name_first(self.optimizer.first_bad_gradient())
            problem = not_finite(inputs.step + 1, mean, grad_norm) + bad
        if self.sync:
            requests = self.sync.after_update(inputs.step, requests, problem)
        elif problem:
            raise NotFiniteError(problem)
        heartbeat.enter(Phase.EXCHANGE)
        self.replica.publish()
        self.discard()
        heartbeat.enter(Phase.RECORD)
        return Step(mean, grad_norm, requests, computed.facts)

    @property
    def launches(self) -> bool:
        """Whether `launch` can take the steps: the host decides nothing in them, and updates nothing itself."""
        return self.optimizer.skips and self.sync is None and self.stashing is None and self.elastic is None

    def launch(self, computed: Computed) -> None:
        """Updates the parameters with a step's gradients as `finish` does, but the host waits for nothing, and the
        device decides: from a step on whose loss or norm is not finite nothing changes until `revert`."""
        computed.settle()
        heartbeat.enter(Phase.OPTIMIZER)
        self.bad |= ~computed.status[:2].isfinite().all()
        with self.memory.allocating("optimizer"):
            self.optimizer.step(computed.inputs.lr, computed.square.sqrt(), self.bad)
        heartbeat.enter(Phase.EXCHANGE)
        self.replica.publish()
        self.discard()
        computed.fetch()
        heartbeat.enter(Phase.RECORD)

    def revert(self, steps: int) -> None:
        """Forgets the last steps, which were launched and which the device has not applied."""
        self.optimizer.updates -= steps
        self.bad.zero_()

    @property
    def offloaded(self) -> dict[str, int]:
        """Bytes copied between the tiers of memory so far, by direction; empty if nothing is offloaded."""
        return {**vars(self.host.copied), **self.optimizer.residence.moved} if named(self.job.layout) else {}

    def discard(self) -> None:
        self.optimizer.clear()
        self.replica.clear()

    def status(self, loss: Tensor, requests: Requests = NO_REQUESTS) -> tuple[Tensor, Tensor, Pending]:
        """Starts summing loss, squared gradient norm and requests over the ranks.

        Returns the square of the norm of this rank's gradients, the tensor that becomes the sums, and the pending
        collective. The gradients then belong to the optimizer."""
        with self.memory.allocating("gradients"):
            # torch's norm of no gradients is on the CPU.
            square = self.optimizer.square_norm(self.loss_scale.value).to(loss.device)
        if self.stashing:  # the optimizer has used them: the mean over the micro-batches
            square = torch.stack(self.squares).mean().to(loss.device)
        # One rank counts each value: a loss, one of those that read the same samples, a gradient's element, one of
        # those that hold it.
        first_replica = self.job.layout.sync != "bsp" or self.mesh.coordinates["dp_replicate"] == 0
        counted = square * (math.nan if requests.void else first_replica)
        status = torch.stack((loss * self.mesh.owns_loss, counted, torch.full_like(loss, requests.encode())))
        if compared := self.replica.objective.compared:
            status = torch.cat((status, compared.take(status) * self.mesh.owns_loss))
        elif self.job.model.mtp:
            status = torch.cat((status, self.replica.objective.take_further(status) * self.mesh.owns_loss))
        if self.elastic and not self.sync:
            self.elastic.sum(status)
        return square, status, self._reduce(status)

    def restart(self) -> None:
        """Returns to the initial weights, without optimizer state."""
        initialise(self.replica, self.job)
        self.optimizer.restart()
        if self.replica.compression:
            self.replica.compression.restart()
        self.loss_scale = LossScale(DTYPES[self.job.train.precision])

    @torch.no_grad()
    def reload(self) -> None:
        """Adopts the parameters and optimizer state loaded from a checkpoint, on every rank."""
        self.replica.publish(frozen=True)
        self.optimizer.reload()
        if self.sync:
            self.sync.reload()
        for own, shard in zip(self.optimizer.shards, self.trained, strict=False):
            if own is not shard:
                own.value.copy_(shard.value)
        if isinstance(self.replica.runner, PipeDream):
            self.replica.runner.restart([f.value for f in self.trained])

    def tensors(self, micro: MicroBatch, step: int, validates: bool = False) -> MicroTensors:
        """Moves this rank's part of a micro-batch to the device, with the inputs of its dropout masks in optimizer step
        `step`. When it `validates`, sequences are not sliced."""
        places = self._places(micro.tokens.shape[1], 1 if validates else self.slices)
        tokens = torch.from_numpy(micro.tokens).to(self.device, non_blocking=True)
        targets = torch.from_numpy(micro.targets).to(self.device, non_blocking=True)
        documents = None
        if micro.documents is not None:
            every, place = (), 0
            if not unbalanced(self.job):
                every = self.assigned(micro.documents, validates)
                place, runs = held(self.job.layout, every, self.mesh.coordinates["cp"])
                places = torch.tensor([position for run in runs for position in run], device=self.device)
            documents = Documents(torch.from_numpy(micro.documents), every, micro.documents, place).to(self.device)
        reference = None if micro.reference is None else torch.from_numpy(micro.reference).to(self.device)
        policy = None if micro.policy is None else torch.from_numpy(micro.policy).to(self.device, non_blocking=True)
        conversations = None
        if (self.job.model.moe.n_experts or self.job.model.sparse.top_k) and micro.conversations is not None:
            conversations = Conversations(
                torch.from_numpy(micro.conversations).to(self.device, non_blocking=True), micro.most_conversations
            )
        seq_len = tokens.shape[1]
        further = tuple(FurtherTokens.of(tokens, targets, documents, depth + 1) for depth in range(self.job.model.mtp))
        if places is not None:
            further = tuple(each.map(lambda x: x[:, places]) for each in further)
            tokens, targets = tokens[:, places], targets[:, places]
            policy = None if policy is None else policy[:, places]
            conversations = conversations and conversations.at(places)
        noise = None
        alpha = self.job.train.neftune_alpha
        if self.job.model.dropout or alpha:
            tp = self.mesh.axis("tp")
            part = tp.rank, tp.size
            tokens_here = part if self.job.layout.sp else (0, 1)
            samples = micro.sample_ids.tolist()
            noise = Noise(
                *(self.job.train.seed, step, samples, part, tokens_here, places, seq_len),
                embeddings=alpha / math.sqrt(seq_len * self.job.model.d_model),
                halved=batch.halved(self.job.train.global_batch, self.job.layout),
            )
        return MicroTensors(tokens, targets, noise, places, documents, reference, policy, conversations, further)

    def assigned(self, numbers: Numbers, validates: bool) -> Places:
        """Returns the tokens of every cp rank, or of every position of the ring, by the documents of a micro-batch."""
        found = assigned(numbers, self.job.model, self.job.layout)
        if not validates:
            self.assignments.append(found)
        return found.places

    def _places(self, seq_len: int, slices: int) -> Tensor | None:
        """Returns the positions of this rank's tokens of every sequence of `seq_len` tokens; None if it has all."""
        if self.job.layout.cp == 1:
            return None
        if (seq_len, slices) not in self.places:
            runs = rank_positions(self.job.layout, seq_len, self.mesh.coordinates["cp"], slices)
            places = torch.tensor([position for run in runs for position in run], device=self.device)
            self.places[seq_len, slices] = places
        return self.places[seq_len, slices]

    def name_first(self, bad: int | None) -> str:
        """Returns ", first in NAME" for the first shard that any rank calls `bad`, if there is one. A collective."""
        names = list(parameter_shapes(self.job.model, self.vocab_size))
        place = 0 if bad is None else len(names) - names.index(self.trained[bad].whole_name)
        first = torch.tensor([place], device=self.device)
        self._reduce(first, torch.distributed.ReduceOp.MAX).wait()
        return f", first in {names[len(names) - int(first.item())]}" if first.item() else ""

    def _reduce(self, x: Tensor, op: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM) -> Pending:
        """Starts a sum (or maximum) over the ranks that take a step together: all, or those of one replica."""
        return (
            self.mesh.reduce_replica(x, op)
            if self.independent_replicas > 1
            else self.mesh.axis("world").all_reduce(x, op)
        )


def not_finite(number: int, loss: float, grad_norm: float) -> str:
    """Returns the problem of a step, from 1, whose loss or gradient norm is not finite."""
    return f"step {number}: loss {loss:g}, gradient norm {grad_norm:g}"


def _copy(shard: ParameterShard) -> ParameterShard:
    return replace(shard, value=shard.value.detach().clone().requires_grad_(), gradient=None)
