"""One optimizer step of a job on this rank, which the training loop repeats and `phalanx verify` compares."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.comm.axis import Pending
from phalanx.config.job import Job
from phalanx.data.loader import MicroBatch
from phalanx.errors import NotFiniteError
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.layout import Phase
from phalanx.model.documents import Conversations, Documents
from phalanx.model.noise import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply, initialise
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.offload.host import Host
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.parallel.pipedream import PipeDream
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.precision import DTYPES, LossScale
from phalanx.parallel.preferences import PairFacts
from phalanx.partition.derived import HOST, is_offloaded, named, tier_of
from phalanx.partition.tensor_slices import rank_positions
from phalanx.train.in_files import InFiles
from phalanx.train.memory import Memory
from phalanx.train.optimizer import ShardedOptimizer
from phalanx.train.requests import NO_REQUESTS, Requests
from phalanx.train.residence import OnDevice, OnHost
from phalanx.train.sync.diloco import DiLoCo
from phalanx.train.sync.local import LocalSGD

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """The result of one step: the same on every rank of a replica, and with sync=bsp on all ranks."""

    loss: float
    """Mean over the global batch's tokens, in nats; over its part of them for an independent replica."""
    grad_norm: float
    requests: Requests = NO_REQUESTS
    """Requests of any rank; independent replicas know them only when they synchronize."""
    pairs: PairFacts | None = None
    """Of preference pairs: rewards, margin and accuracy, over the global batch."""


@dataclass
class Computed:
    """A step's gradients, summed over the data ranks and taken by the optimizer, before it writes anything."""

    own_loss: Tensor
    """The loss summed over this rank's micro-batches, in fp64."""
    tokens: int
    """Valid tokens of the batch that one update covers."""
    square: Tensor
    """The square of the gradients' norm: of this rank's until the step is settled, then of all ranks'."""
    status: Tensor
    """Loss, squared norm and requests, (3,) in fp64, and with preference pairs the sums of these, (7,): over all ranks
    once `everywhere` has arrived."""
    everywhere: Pending
    arrived: Any = None
    """The arrival of `status` on the host, if it was fetched from a GPU."""

    def settle(self) -> None:
        """Waits for the sums, which are the same on all ranks: on a GPU the device waits, not the host."""
        self.everywhere.wait()
        self.square = self.status[1]

    def fetch(self) -> None:
        """Starts copying `status` to the host, where `wait` makes it readable while the device goes on."""
        there, self.status = self.status, torch.empty_like(self.status, device="cpu", pin_memory=self.status.is_cuda)
        self.status.copy_(there, non_blocking=True)
        self.arrived = torch.cuda.current_stream(there.device).record_event() if there.is_cuda else None

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
    def pairs(self) -> PairFacts | None:
        """The facts of preference pairs, of a settled step; None of other data."""
        return PairFacts.of(self.status[3:]) if len(self.status) > 3 else None


class Stepper:
    """A job's model with its optimizer, distributed as the layout says, on one rank."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device, vocab_size: int, dtype: torch.dtype | None = None):
        """`dtype`: the parameters' type, if it is not the one that the job's precision has."""
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
        if isinstance(self.replica.runner, PipeDream):
            shards = [_copy(shard) for shard in shards]  # it computes with older versions
        level = logging.INFO if mesh.axis("world").rank == 0 else logging.DEBUG
        with self.memory.allocating("optimizer"):
            residence = self._residence(shards, level)
            self.optimizer = ShardedOptimizer(
                shards, job.optimizer, job.model.moe.bias_rate, mesh.axis("tp"), residence
            )
        if isinstance(residence, OnHost):
            self.replica.offload(residence.move)
        self.loss_scale = LossScale(dtype)
        self.bad = torch.zeros((), dtype=torch.bool, device=device)
        """Set on the device from the first launched step on that is not finite, until it is reverted."""
        runner = self.replica.runner
        self.places = self._places(runner.schedule.slices if isinstance(runner, Pipeline) else 1)
        self.places_of_whole = self._places(1)
        self.independent_replicas = job.layout.independent_replicas
        self.sync: LocalSGD | None = None
        if job.layout.sync in ("local_sgd", "diloco"):
            kind = LocalSGD if job.layout.sync == "local_sgd" else DiLoCo
            self.sync = kind(job, mesh, self.optimizer, device)

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
        tensors = [self.tensors(micro, step) for micro in micro_batches]
        with self.memory.allocating("activations", "logits", "gradients"):
            return self.replica.gradients(tensors, self.factor(global_tokens, micro_batches))

    def factor(self, global_tokens: float, micro_batches: Sequence[MicroBatch]) -> float:
        """Returns the factor of a backward pass's loss, summed over valid tokens, and sets that of the routers'
        penalties, which are summed over all tokens but padding. Without a valid token there is no loss, and nothing to
        divide."""
        factor = self.loss_scale.value / (global_tokens or 1)
        self.routing.factor = factor * micro_batches[0].valid_share
        return factor

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        global_tokens: int,
        lr: float,
        requests: Requests = NO_REQUESTS,
    ) -> Step:
        """Takes optimizer step `step`, whose global batch has `global_tokens` valid tokens. Independent replicas assume
        that their parts of them are equal.

        `requests` of any rank are seen on all; a void step changes nothing. Raises NotFiniteError, before the optimizer
        writes anything, if loss or gradients are not finite (with fp16, if a smaller loss scale cannot help);
        independent replicas raise it when they synchronize. Raises RunError if memory is short. With sync=asp the
        parameter server takes the steps (train/sync/asp.py)."""
        assert self.job.layout.sync != "asp", "the parameter server takes the steps"
        return self.finish(self.compute(micro_batches, step, global_tokens, requests), step, lr)

    def compute(
        self, micro_batches: Sequence[MicroBatch], step: int, global_tokens: int, requests: Requests = NO_REQUESTS
    ) -> Computed:
        """Computes the gradients of step `step`, and starts summing what decides about it."""
        tokens = global_tokens // self.independent_replicas
        # Where ranks hold whole gradients, the optimizer does not wait for the requests: NaN keeps it from writing.
        loss = self.gradients(micro_batches, step, math.nan if requests.void else tokens)
        heartbeat.enter(Phase.EXCHANGE)
        return Computed(loss, tokens, *self.status(loss, requests))

    def finish(self, computed: Computed, step: int, lr: float) -> Step:
        """Updates the parameters with a step's gradients, or raises as `step` does."""
        if self.mesh.is_sharded:
            computed.settle()
        norm = computed.square.sqrt()
        grad_norm = norm.item()
        heartbeat.enter(Phase.OPTIMIZER)
        if math.isfinite(grad_norm):
            with self.memory.allocating("optimizer"):
                self.optimizer.step(lr, norm)
            self.loss_scale.fine()
        computed.everywhere.wait()  # if ranks hold whole gradients, it overlaps with the optimizer
        mean, requests = computed.loss, computed.requests
        problem = ""
        if not math.isfinite(grad_norm) and not requests.void and not self.loss_scale.overflow():
            bad = self.name_first(self.optimizer.first_bad_gradient())
            problem = f"step {step + 1}: loss {mean:g}, gradient norm {grad_norm:g}{bad}"
        if self.sync:
            requests = self.sync.after_update(step, requests, problem)
        elif problem:
            raise NotFiniteError(problem)
        heartbeat.enter(Phase.EXCHANGE)
        self.replica.publish()
        self.discard()
        heartbeat.enter(Phase.RECORD)
        return Step(mean, grad_norm, requests, computed.pairs)

    @property
    def launches(self) -> bool:
        """Whether `launch` can take the steps: the host decides nothing in them, and updates nothing itself."""
        return self.optimizer.skips and self.sync is None

    def launch(self, computed: Computed, lr: float) -> None:
        """Updates the parameters with a step's gradients as `finish` does, but the host waits for nothing, and the
        device decides: from a step on whose loss or norm is not finite nothing changes until `revert`."""
        computed.settle()
        heartbeat.enter(Phase.OPTIMIZER)
        self.bad |= ~computed.status[:2].isfinite().all()
        with self.memory.allocating("optimizer"):
            self.optimizer.step(lr, computed.square.sqrt(), self.bad)
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
        """Discards the gradients."""
        self.optimizer.clear()
        self.replica.clear()

    def status(self, loss: Tensor, requests: Requests = NO_REQUESTS) -> tuple[Tensor, Tensor, Pending]:
        """Starts summing loss, squared gradient norm and requests over the ranks.

        Returns the square of the norm of this rank's gradients, the tensor that becomes the sums, and the pending
        collective. The gradients then belong to the optimizer."""
        with self.memory.allocating("gradients"):
            # torch's norm of no gradients is on the CPU.
            square = self.optimizer.square_norm(self.loss_scale.value).to(loss.device)
        # One rank counts each value: a loss, one of those that read the same samples, a gradient's element, one of
        # those that hold it.
        first_replica = self.independent_replicas > 1 or self.mesh.coordinates["dp_replicate"] == 0
        counted = square * (math.nan if requests.void else first_replica)
        status = torch.stack((loss * self.mesh.owns_loss, counted, torch.full_like(loss, requests.encode())))
        if pairs := self.replica.objective.pairs:
            status = torch.cat((status, pairs.take(status) * self.mesh.owns_loss))
        return square, status, self._reduce(status)

    def restart(self) -> None:
        """Returns to the initial weights, without optimizer state."""
        initialise(self.replica, self.job)
        self.optimizer.restart()
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
            self.replica.runner.restart([f.value for f in self.replica.shards])

    def tensors(self, micro: MicroBatch, step: int, validates: bool = False) -> MicroTensors:
        """Moves this rank's part of a micro-batch to the device, with the inputs of its dropout masks in optimizer step
        `step`. When it `validates`, sequences are not sliced."""
        places = self.places_of_whole if validates else self.places
        tokens = torch.from_numpy(micro.tokens).to(self.device, non_blocking=True)
        targets = torch.from_numpy(micro.targets).to(self.device, non_blocking=True)
        documents = None
        if micro.documents is not None:
            documents = Documents(torch.from_numpy(micro.documents)).to(self.device)
        reference = None if micro.reference is None else torch.from_numpy(micro.reference).to(self.device)
        conversations = None
        if self.job.model.moe.n_experts and micro.conversations is not None:
            conversations = Conversations(
                torch.from_numpy(micro.conversations).to(self.device, non_blocking=True), micro.most_conversations
            )
        seq_len = tokens.shape[1]
        if places is not None:
            tokens, targets = tokens[:, places], targets[:, places]
            conversations = conversations and conversations.at(places)
        noise = None
        if self.job.model.dropout:
            tp = self.mesh.axis("tp")
            part = tp.rank, tp.size
            tokens_here = part if self.job.layout.sp else (0, 1)
            samples = micro.sample_ids.tolist()
            noise = Noise(
                self.job.train.seed, step, samples, heads=part, tokens=tokens_here, places=places, seq_len=seq_len
            )
        return MicroTensors(tokens, targets, noise, places, documents, reference, conversations)

    def _places(self, slices: int) -> Tensor | None:
        """Returns the positions of this rank's tokens of every sequence; None if it has all."""
        if self.job.layout.cp == 1:
            return None
        runs = rank_positions(self.job.layout, self.job.model.seq_len, self.mesh.coordinates["cp"], slices)
        return torch.tensor([position for run in runs for position in run], device=self.device)

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


def _copy(shard: ParameterShard) -> ParameterShard:
    return replace(shard, value=shard.value.detach().clone().requires_grad_(), gradient=None)
