"""A pipeline that is not flushed at the end of a step: PipeDream-2BW (Narayanan et al. 2020, section 3.1).

While one global batch is in its backward passes, the next one begins its forward passes. A micro-batch passes forward
and backward through one version of the weights; batch k of a run of batches computes with the version before the last,

    W(k + 1) = W(k) - update(gradient of batch k at W(k - 1)),

so that two versions suffice, in alternating buffers. The optimizer has the newest in tensors of its own. The pipeline
drains only where the run of batches ends (a checkpoint, a validation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.parallel.data import Replica
from phalanx.parallel.linear import DeferredWeightGrads
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.pipeline import Execution, Pipeline
from phalanx.parallel.stages import Stages
from phalanx.parallel.transfers import RECEIVE_AHEAD
from phalanx.schedule.pipedream import pipedream
from phalanx.schedule.schedule import Action, Schedule

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
    ):
        super().__init__(replica, stages, p2p_groups, deferred, token_parts)
        ranks, micro_batches = self.schedule.ranks, self.schedule.micro_batches // self.schedule.steps
        self.micro_batches = micro_batches
        """Micro-batches per batch."""
        fill, steady, drain = _split_by_batch(pipedream(ranks, micro_batches, 3), stages.rank)
        (alone,) = _split_by_batch(pipedream(ranks, micro_batches, 1), stages.rank)
        self.batch_actions = {(True, True): fill, (False, True): steady, (False, False): drain, (True, False): alone}
        """The actions up to the current batch's last micro-batch, by whether the batch is the first of its run, and
        whether another one follows."""
        self.weights = [shard.value for shard in replica.shards]
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
