"""Pipeline parallelism: one executor that runs any schedule (phalanx/schedule) on real ranks.

A rank executes its program action by action. Its messages are derived from the schedule and keep the sender's order: a
receive is posted some actions before its message is needed, and a send is waited for only to free its memory. From the
forward to the backward pass an action saves a stage's input and autograd's graph. If the schedule splits the backward
pass, I runs autograd, in which linear layers defer their weight gradients, and W computes those (parallel/linear.py).

PipeDream-2BW (Narayanan et al. 2020, section 3.1) is not flushed at the end of a step: while one global batch is in its
backward passes, the next one begins its forward passes. A micro-batch passes forward and backward through one version
of the weights; batch k of a run of batches computes with the version before the last,

    W(k + 1) = W(k) - update(gradient of batch k at W(k - 1)),

so that two versions suffice, in alternating buffers. The optimizer has the newest in tensors of its own. The pipeline
drains only where the run of batches ends (a checkpoint, a validation).

PipeDream as first published (Narayanan et al. 2019, section 3.3) updates a stage after each backward pass, and stashes
a version of its weights for each micro-batch in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.parallel.data import Replica
from phalanx.parallel.linear import DeferredWeightGrads, Product
from phalanx.parallel.objective import Earlier, MicroTensors, PairLoss
from phalanx.parallel.offload import SwappingRun
from phalanx.parallel.stages import Stage, Stages
from phalanx.schedule.generators import pipedream
from phalanx.schedule.schedule import Action, Schedule

RECEIVE_AHEAD = 2
"""Number of actions by which a receive is posted before its use."""


@dataclass
class Transfers:
    """One rank's messages of a pipeline's step."""

    schedule: Schedule
    rank: int
    up: Axis
    """Messages to higher ranks."""
    down: Axis
    """Messages to lower ranks."""
    targets: dict[Action, tuple[int, int]] = field(init=False, default_factory=dict)
    """By action of this rank whose result another rank needs: that rank, and the index in its program that reads it."""
    sources: dict[Action, tuple[int, int]] = field(init=False, default_factory=dict)
    """By action of this rank that needs another rank's result: that rank, and the index in its program that produces
    it."""
    order: dict[int, list[int]] = field(init=False, default_factory=dict)
    """By sender, the indices in its program of the results received here."""
    pairs: set[tuple[int, int]] = field(init=False, default_factory=set)
    """Every (sender, receiver) of the pipeline."""

    def __post_init__(self) -> None:
        places = [{action: place for place, action in enumerate(program)} for program in self.schedule.programs]
        for rank, program in enumerate(self.schedule.programs):
            for place, action in enumerate(program):
                reader = _reader(self.schedule, action)
                if reader is None or (target := self.schedule.rank_of(reader.stage, reader.micro)) == rank:
                    continue
                self.pairs.add((rank, target))
                if reader not in places[target]:
                    reader = reader._replace(kind="I")  # the backward pass is split there
                if rank == self.rank:
                    self.targets[action] = target, places[target][reader]
                if target == self.rank:
                    self.order.setdefault(rank, []).append(place)
                    self.sources[reader] = rank, place

    def connect(self, device: torch.device) -> None:
        """Sends one element from each sender to each receiver, in the same order on all ranks; it is not counted.

        NCCL creates a communicator with the first message between two ranks, and each waits there for the other. Ranks
        that post receives before they send, as those of a pipeline do, would deadlock."""
        x = torch.zeros(1, device=device)
        with self.up.ledger.untracked(), self.down.ledger.untracked():
            for sender, receiver in sorted(self.pairs):
                axis = self.up if receiver > sender else self.down
                if self.rank == sender:
                    axis.send(x, receiver)
                elif self.rank == receiver:
                    axis.receive(x, sender)


class StepMailbox:
    """Sends and receives the messages of one step."""

    def __init__(self, transfers: Transfers, like: Tensor, shape: tuple[int, ...]):
        self.transfers, self.like, self.shape = transfers, like, shape
        self.coming = {source: iter(places) for source, places in transfers.order.items()}
        self.arriving: dict[tuple[int, int], tuple[Tensor, Pending]] = {}
        """Pending receives by sender and index in its program."""
        self.leaving: dict[int, list[tuple[int, Tensor, Pending]]] = defaultdict(list)
        """Pending sends by receiver: the index in its program that reads them, and the tensor that must not change
        until then."""

    def expect(self, action: Action) -> None:
        """Begins to receive an action's input."""
        if (needed := self.transfers.sources.get(action)) is None or needed in self.arriving:
            return
        source, place = needed
        group = self.transfers.up if source < self.transfers.rank else self.transfers.down
        for made in self.coming[source]:
            buffer = torch.empty(self.shape, dtype=self.like.dtype, device=self.like.device)
            self.arriving[source, made] = buffer, group.start_receive(buffer, source)
            if made == place:
                return

    def receive(self, action: Action) -> Tensor | None:
        """Waits for the tensor that an action needs from another rank; returns None if it needs none."""
        if (needed := self.transfers.sources.get(action)) is None:
            return None
        self.expect(action)
        buffer, pending = self.arriving.pop(needed)
        pending.wait()
        self._release(*needed)
        return buffer

    def send(self, action: Action, result: Tensor) -> bool:
        """Starts sending an action's result if another rank needs it. Returns whether one does."""
        if (target := self.transfers.targets.get(action)) is None:
            return False
        rank, read = target
        group = self.transfers.up if rank > self.transfers.rank else self.transfers.down
        result = result.contiguous()
        self.leaving[rank].append((read, result, group.start_send(result, rank)))
        return True

    def settle(self) -> None:
        """Waits until everything has been sent."""
        for rank in self.leaving:
            self._release(rank, len(self.transfers.schedule.programs[rank]))

    def _release(self, rank: int, place: int) -> None:
        """Releases the messages that another rank has read, given that it has reached `place` in its program."""
        for read, _, pending in self.leaving[rank]:
            if read < place:
                pending.wait()
        self.leaving[rank] = [message for message in self.leaving[rank] if message[0] >= place]


def _reader(schedule: Schedule, action: Action) -> Action | None:
    """Returns the next stage's action that reads a result: a forward or backward pass (or its first half)."""
    if action.kind == "F":
        return action._replace(stage=action.stage + 1) if action.stage < schedule.stages - 1 else None
    if action.kind == "W" or action.stage == 0:
        return None
    return Action("B", action.stage - 1, action.micro, action.slice)


@dataclass(frozen=True)
class RankProgram:
    """One rank's part of a schedule."""

    actions: Sequence[Action]
    transfers: Transfers
    last_backward: frozenset[int]
    """Indices of the actions after which a stage's gradients are complete."""

    @classmethod
    def of(cls, schedule: Schedule, rank: int, p2p_groups: tuple[Axis, Axis]) -> RankProgram:
        actions = schedule.programs[rank]
        last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
        return cls(actions, Transfers(schedule, rank, *p2p_groups), frozenset(last.values()))


class Pipeline:
    """One rank's part of a pipeline, whose data parallelism is `replica`'s."""

    def __init__(
        self,
        replica: Replica,
        stages: Stages,
        p2p_groups: tuple[Axis, Axis],
        deferred: DeferredWeightGrads,
        token_parts: int,
        device: torch.device,
    ):
        """Prepares transfers between devices. `p2p_groups` are Mesh.p2p_groups("pp"). `deferred` takes the weight
        gradients of the replica's model. Between layers a rank has one of `token_parts` parts of the tokens (sequence
        parallelism)."""
        self.replica, self.stages, self.deferred, self.token_parts = replica, stages, deferred, token_parts
        self.schedule = stages.schedule
        self.p2p_groups = p2p_groups
        self.schedules: Callable[[int], Schedule] | None = None
        """Returns the schedule of other numbers of micro-batches, of runs with a ramp."""
        self.programs = {self.schedule.micro_batches: RankProgram.of(self.schedule, stages.rank, p2p_groups)}
        """By number of micro-batches."""
        self.programs[self.schedule.micro_batches].transfers.connect(device)
        self.like = replica.shards[0].value.new_empty(0, device=device)  # offloaded parameters are on the host
        """A tensor with the type and device of messages."""
        self.leaving: list[Pending] = []
        """Messages of the last validation that may still be in flight."""
        deferred.arrived = replica.arrived

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        """Runs a step's program. Returns the loss summed over the micro-batches whose last stage is here, in fp64."""
        if len(micros) not in self.programs and self.schedules is not None:
            schedule = self.schedules(len(micros))
            self.programs[len(micros)] = RankProgram.of(schedule, self.stages.rank, self.p2p_groups)
        own = self.programs[len(micros)]
        mailbox = StepMailbox(own.transfers, self.like, self.shape(micros[0], self.schedule.slices))
        execution = Execution(self, mailbox, dict(enumerate(micros)), micros[0].tokens.device, factor)
        for place, action in enumerate(own.actions):
            for coming in own.actions[place : place + 1 + RECEIVE_AHEAD]:
                mailbox.expect(coming)
            self.before(action, execution)
            execution.act(action, last=place in own.last_backward)
            self.after(action)
        self.replica.finish()
        mailbox.settle()
        return execution.loss

    def before(self, action: Action, execution: Execution) -> None:
        """Called before an action."""

    def after(self, action: Action) -> None:
        """Called after an action."""

    def loss(self, micro: MicroTensors) -> Tensor:
        """Returns a validation loss: the micro-batch goes forward through all stages, in the first direction. Zero
        where the last stage is elsewhere."""
        for pending in self.leaving:
            pending.wait()
        self.leaving = []
        rank, (up, down) = self.stages.rank, self.p2p_groups
        ranks = self.schedule.placements[0]
        x = None
        for number, stage in self.stages.local_stages.items():
            if ranks[number] != rank:
                continue
            if number and (source := ranks[number - 1]) != rank:
                x = torch.empty(self.shape(micro), dtype=self.like.dtype, device=self.like.device)
                (up if source < rank else down).start_receive(x, source).wait()
            x = self.replica.objective(micro, stage, x)
            if stage.last:
                return x
            if (target := ranks[number + 1]) != rank:
                self.leaving.append((up if target > rank else down).start_send(x.contiguous(), target))
        return torch.zeros((), device=micro.tokens.device)

    def shape(self, micro: MicroTensors, slices: int = 1) -> tuple[int, int, int]:
        """Returns the shape of a micro-batch, or of one of its slices, between two stages: (batch, tokens,
        stream_width)."""
        batch, tokens = micro.sliced(0, slices).tokens.shape
        return batch, tokens // self.token_parts, self.stages.config.stream_width

    def releases_input(self, stage: Stage) -> bool:
        """Returns whether the input of a stage has left the device after its forward pass."""
        model = self.replica.objective.model
        run = model.blocks[stage.layers[0]].run
        return isinstance(run, SwappingRun) and run.leaves and bool(model.trunk(stage.layers[:1]))


@dataclass
class SavedForward:
    """The state that a forward action saves until its backward action (B, or I)."""

    x: Tensor | None
    """The stage's input, a leaf; None for the first stage."""
    root: Tensor
    """The root of the backward pass: the stage's output, or the loss."""


class Execution:
    """One execution of a program."""

    def __init__(
        self,
        pipeline: Pipeline,
        mailbox: StepMailbox | StreamMailbox,
        micros: dict[int, MicroTensors],
        device: torch.device,
        factor: float,
    ):
        self.pipeline, self.mailbox, self.micros, self.factor = pipeline, mailbox, micros, factor
        self.replica, self.deferred, self.slices = pipeline.replica, pipeline.deferred, pipeline.schedule.slices
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.saved: dict[Action, SavedForward] = {}
        self.local_results: dict[Action, Tensor] = {}
        """Results passed from one local stage to the next, by the action that reads them (B stands for I, too)."""
        self.earlier: dict[tuple[int, int], Earlier] = {}
        self.of_pairs: dict[int, Tensor] = {}
        """By micro-batch in slices: the losses of its sequences so far, (micro_batch,); once all its slices are there,
        the gradient of the pairs' loss by them, which is that by each slice's."""
        self.deferred_weight_grads: dict[Action, list[Product]] = {}

    def act(self, action: Action, *, last: bool) -> None:
        """Executes one action. `last`: afterwards the stage has the gradients of all micro-batches."""
        if action.kind == "F":
            self._forward(action, self.pipeline.stages.local_stages[action.stage])
            return
        if action.kind == "I":
            self.deferred.products = self.deferred_weight_grads[action._replace(kind="W")] = []
            self._backward(action)
            self.deferred.products = None
            return
        self.replica.begin_backward(action.stage, last=last)
        if action.kind == "B":
            self._backward(action)
        else:
            self.deferred.add(self.deferred_weight_grads.pop(action))
        self.replica.end_backward(action.stage, last=last)

    def _forward(self, action: Action, stage: Stage) -> None:
        micro = self.micros[action.micro].sliced(action.slice, self.slices)
        x = None if stage.first else self._read(action).requires_grad_()
        earlier = None
        if self.slices > 1:
            earlier = self.earlier.setdefault((action.stage, action.micro), Earlier())
            earlier.begin(action.slice)
        root = self.replica.objective(micro, stage, x, earlier)
        if earlier is not None:
            earlier.end()
        if stage.last and self._slices_pairs:
            self._add_to_pairs(action, micro, root.detach())
        elif stage.last:
            self.loss += root.detach()
            root = root * self.factor
        else:
            self._pass_on(action, action._replace(stage=action.stage + 1), root.detach())
            # The backward pass needs the output's autograd graph, but not its values.
            root.data = root.new_empty(1).expand(root.shape)
        if x is not None and self.pipeline.releases_input(stage):
            x.data = x.new_empty(1).expand(x.shape)  # its first block has it on the host
        self.saved[action] = SavedForward(x, root)

    def _backward(self, action: Action) -> None:
        saved = self.saved.pop(action._replace(kind="F"))
        stage = self.pipeline.stages.local_stages[action.stage]
        roots: list[Tensor] = [saved.root]
        gradients: list[Tensor | None] = [self._read(action)] if not stage.last else [self.of_pairs.get(action.micro)]
        if self.slices > 1:
            seen, theirs = self.earlier[action.stage, action.micro].again(action.slice)
            roots += seen
            gradients += theirs
            if action.slice == 0:
                del self.earlier[action.stage, action.micro]
                if stage.last:
                    self.of_pairs.pop(action.micro, None)
        torch.autograd.backward(roots, gradients)
        if saved.x is not None:
            assert saved.x.grad is not None, "a stage computes with its input"
            self._pass_on(action, Action("B", action.stage - 1, action.micro, action.slice), saved.x.grad)

    @property
    def _slices_pairs(self) -> bool:
        return self.slices > 1 and isinstance(self.replica.objective.compared, PairLoss)

    def _add_to_pairs(self, action: Action, micro: MicroTensors, losses: Tensor) -> None:
        """Adds a slice's losses. The last slice's backward pass is the first: by then the pairs' loss is known."""
        pairs = self.replica.objective.compared
        assert isinstance(pairs, PairLoss), "asked before"
        whole = self.of_pairs.get(action.micro, 0) + losses
        if action.slice == self.slices - 1:
            loss = pairs(whole.requires_grad_(), micro)
            self.loss += loss.detach()
            (whole,) = torch.autograd.grad(loss * self.factor, whole)
        self.of_pairs[action.micro] = whole

    def _read(self, action: Action) -> Tensor:
        """Returns an action's input: the previous stage's output, or in the backward pass the next stage's gradient."""
        local_results = self.local_results.pop(action._replace(kind="B") if action.kind == "I" else action, None)
        result = self.mailbox.receive(action) if local_results is None else local_results
        assert result is not None, "the validator has found every result that is read"
        return result

    def _pass_on(self, action: Action, reader: Action, result: Tensor) -> None:
        if not self.mailbox.send(action, result):
            self.local_results[reader] = result


class StashingPipeline(Pipeline):
    """One rank's part of a step in which every micro-batch updates each stage as soon as it has returned there."""

    def __init__(self, replica: Replica, *arguments: Any):
        super().__init__(replica, *arguments)
        self.weights = [shard.value for shard in replica.shards if not shard.frozen]
        self.factors: Sequence[float] = ()
        """By micro-batch of the next step: the factor of its loss."""
        self.update: Callable[[], Sequence[Tensor]] = lambda: self.weights
        """Takes the optimizer's step with the shards' gradients, and returns its weights, one for every shard."""

    def before(self, action: Action, execution: Execution) -> None:
        if action.kind == "F":
            self.stash[action.micro] = [weight.data for weight in self.weights]
            execution.factor = self.factors[action.micro]
        else:
            self._use(self.stash.pop(action.micro))

    def after(self, action: Action) -> None:
        if action.kind == "B":
            self.replica.finish()
            self._use(self.newest)  # frees the version of this micro-batch
            self.newest = [value.detach().clone() for value in self.update()]
        self._use(self.newest)

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        """Runs a step's program, with an update per micro-batch. Returns the loss as Pipeline.gradients does."""
        self.stash: dict[int, list[Tensor]] = {}
        self.newest = [weight.data for weight in self.weights]
        return super().gradients(micros, factor)

    def _use(self, values: Sequence[Tensor]) -> None:
        """Computes with a version of the weights. Tensors saved by earlier forward passes stay valid."""
        for weight, value in zip(self.weights, values, strict=True):
            weight.data = value


Due = Callable[[int], None]
"""Called before the first forward pass of a batch of the run: its version of the weights must be available."""
More = Callable[[], Sequence[MicroTensors]]
"""Returns the micro-batches of the next batch."""


class PipeDream(Pipeline):
    """One rank's part in runs of batches."""

    def __init__(
        self,
        replica: Replica,
        stages: Stages,
        p2p_groups: tuple[Axis, Axis],
        deferred: DeferredWeightGrads,
        token_parts: int,
        device: torch.device,
    ):
        super().__init__(replica, stages, p2p_groups, deferred, token_parts, device)
        self.micro_batches = 0
        """Micro-batches per batch of the current run."""
        self.weights = [shard.value for shard in replica.shards if not shard.frozen]
        self.versions = [[w.data for w in self.weights], [w.data.clone() for w in self.weights]]
        self.execution: Execution | None = None
        """The execution of the current run; None between runs."""
        self.batch = 0
        """The current batch's number in the run."""

    @property
    def running(self) -> bool:
        """True if micro-batches of another batch are in flight."""
        return self.batch > 0

    def run_batch(self, micros: Sequence[MicroTensors], factor: float, more: More | None, due: Due) -> Tensor:
        """Runs until the current batch has finished its backward passes, and with `more` starts the next one. Returns
        the batch's loss where the last stage is here. Afterwards the parameter shards have its gradients."""
        if self.execution is None:
            if len(micros) != self.micro_batches:
                self._prepare(len(micros))
            self.mailbox = StreamMailbox(self, micros[0])
            self.execution = Execution(self, self.mailbox, {}, micros[0].tokens.device, factor)
        execution, mailbox, first = self.execution, self.mailbox, self.batch * self.micro_batches
        # The rank with the last stage, whose losses these are, never runs ahead of its batch.
        execution.loss, execution.factor = torch.zeros_like(execution.loss), factor
        execution.micros = dict(enumerate(micros, first))
        program = self.batch_actions[self.batch == 0, more is not None]
        actions = [a._replace(micro=a.micro + first) for a in program]
        for place, action in enumerate(actions):
            if action.kind == "F" and action.micro % self.micro_batches == 0:
                if action.micro > first and more is not None:
                    execution.micros |= dict(enumerate(more(), action.micro))
                due(action.micro // self.micro_batches)
            for coming in actions[place : place + 1 + RECEIVE_AHEAD]:
                mailbox.expect(coming)
            self._use(action.micro // self.micro_batches)
            execution.act(action, last=place == len(actions) - 1)
        self.replica.finish()
        self.batch += 1
        if more is None:
            mailbox.settle()
            self.execution, self.batch = None, 0
        return execution.loss

    def _prepare(self, micro_batches: int) -> None:
        """Plans runs of batches of so many micro-batches."""
        ranks, rank, self.micro_batches = self.schedule.ranks, self.stages.rank, micro_batches
        fill, steady, drain = _split_by_batch(pipedream(ranks, micro_batches, 3), rank)
        (alone,) = _split_by_batch(pipedream(ranks, micro_batches, 1), rank)
        self.batch_actions = {(True, True): fill, (False, True): steady, (False, False): drain, (True, False): alone}
        """The actions up to the current batch's last micro-batch, by whether the batch is the first of its run, and
        whether another one follows."""

    @torch.no_grad()
    def write(self, batch: int, values: Sequence[Tensor]) -> None:
        """Sets the weights of a batch of the run to `values`, one for every parameter shard."""
        for mine, value in zip(self.versions[version(batch) % 2], values, strict=True):
            mine.copy_(value)

    def restart(self, values: Sequence[Tensor]) -> None:
        """Begins another run of batches, at these weights."""
        self.write(0, values)
        self._use(0)

    def _use(self, batch: int) -> None:
        """Computes with the weights of a batch. Tensors saved by earlier forward passes stay valid."""
        for weight, values in zip(self.weights, self.versions[version(batch) % 2], strict=True):
            weight.data = values


def version(batch: int) -> int:
    """Returns the number of updates that the weights of a batch of a run have seen: one less than there are."""
    return max(batch - 1, 0)


class StreamMailbox:
    """Messages between neighbours over a whole run of batches: they arrive in the order in which they are needed."""

    def __init__(self, pipeline: PipeDream, micro: MicroTensors):
        self.rank, self.last = pipeline.stages.rank, pipeline.schedule.ranks - 1
        self.p2p_groups, self.like, self.shape = pipeline.p2p_groups, pipeline.like, pipeline.shape(micro)
        self.arriving: dict[Action, tuple[Tensor, Pending]] = {}
        self.leaving: dict[Action, tuple[Tensor, Pending]] = {}

    def expect(self, action: Action) -> None:
        """Begins to receive an action's input."""
        source = self.rank - 1 if action.kind == "F" else self.rank + 1
        if action in self.arriving or not 0 <= source <= self.last:
            return
        up, down = self.p2p_groups
        buffer = torch.empty(self.shape, dtype=self.like.dtype, device=self.like.device)
        self.arriving[action] = buffer, (up if action.kind == "F" else down).start_receive(buffer, source)

    def receive(self, action: Action) -> Tensor | None:
        self.expect(action)
        if action not in self.arriving:
            return None
        buffer, pending = self.arriving.pop(action)
        pending.wait()
        # A returned gradient shows that the sent activation was read. A received micro-batch was computed after the
        # backward passes that 1F1B has before it, so that their gradients were read.
        behind = 0 if action.kind == "B" else self.last - self.rank + 2
        read = [s for s in self.leaving if s.kind != action.kind and s.micro <= action.micro - behind]
        for sent in read:
            self.leaving.pop(sent)[1].wait()
        return buffer

    def send(self, action: Action, result: Tensor) -> bool:
        target = self.rank + 1 if action.kind == "F" else self.rank - 1
        if not 0 <= target <= self.last:
            return False
        up, down = self.p2p_groups
        result = result.contiguous()
        self.leaving[action] = result, (up if action.kind == "F" else down).start_send(result, target)
        return True

    def settle(self) -> None:
        """Waits until everything has been sent."""
        for _, pending in self.leaving.values():
            pending.wait()
        self.leaving.clear()


def _split_by_batch(schedule: Schedule, rank: int) -> list[list[Action]]:
    """Returns a rank's program, cut after the last backward pass of each step; micro-batches are numbered from the
    step's first."""
    micro_batches = schedule.micro_batches // schedule.steps
    program = schedule.programs[rank]
    ends = [n + 1 for n, action in enumerate(program) if action.kind == "B" and (action.micro + 1) % micro_batches == 0]
    return [
        [action._replace(micro=action.micro - run_batch * micro_batches) for action in program[start:end]]
        for run_batch, (start, end) in enumerate(pairwise([0, *ends]))
    ]
