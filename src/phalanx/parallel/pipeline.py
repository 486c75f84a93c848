"""Pipeline parallelism: one executor that runs any schedule (phalanx/schedule) on real ranks.

A rank executes its program action by action. Receives of an action's inputs are posted some actions earlier; its
results are sent asynchronously (parallel/transfers.py). From the forward to the backward pass an action saves a stage's
input and autograd's graph. If the schedule splits the backward pass, I runs autograd, in which linear layers defer
their weight gradients, and W computes those (parallel/linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.parallel.data import Replica
from phalanx.parallel.linear import DeferredWeightGrads, Product
from phalanx.parallel.micro import MicroTensors
from phalanx.parallel.offload.activations import SwappingRun
from phalanx.parallel.slices import Earlier
from phalanx.parallel.stages import Stage, Stages
from phalanx.parallel.transfers import RECEIVE_AHEAD, P2PMailbox, Transfers
from phalanx.schedule.schedule import Action


class Pipeline:
    """One rank's part of a pipeline, whose data parallelism is `replica`'s."""

    def __init__(
        self,
        replica: Replica,
        stages: Stages,
        p2p_groups: tuple[Axis, Axis],
        deferred: DeferredWeightGrads,
        token_parts: int,
    ):
        """Prepares transfers. `p2p_groups` are Mesh.p2p_groups("pp"). `deferred` takes the weight gradients of the
        replica's model. Between layers a rank has one of `token_parts` parts of the tokens (sequence parallelism)."""
        self.replica, self.stages, self.deferred, self.token_parts = replica, stages, deferred, token_parts
        self.schedule = stages.schedule
        self.program = self.schedule.programs[stages.rank]
        self.p2p_groups = p2p_groups
        self.transfers = Transfers(self.schedule, stages.rank, *p2p_groups)
        self.transfers.connect(self.like.device)
        last = {action.stage: place for place, action in enumerate(self.program) if action.kind in ("B", "W")}
        self.last_backward = frozenset(last.values())
        """Indices in the program after which a stage's gradients are complete."""
        self.leaving: list[Pending] = []
        """Messages of the last validation that may still be in flight."""
        deferred.arrived = replica.arrived

    def gradients(self, micros: Sequence[MicroTensors], factor: float) -> Tensor:
        """Runs a step's program. Returns the loss summed over the micro-batches whose last stage is here, in fp64."""
        mailbox = self.transfers.begin(self.like, self.shape(micros[0], self.schedule.slices))
        execution = Execution(self, mailbox, dict(enumerate(micros)), micros[0].tokens.device, factor)
        for place, action in enumerate(self.program):
            for coming in self.program[place : place + 1 + RECEIVE_AHEAD]:
                mailbox.expect(coming)
            execution.act(action, last=place in self.last_backward)
        self.replica.finish()
        mailbox.settle()
        return execution.loss

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
        """Returns the shape of a micro-batch, or of one of its slices, between two stages: (batch, tokens, d_model)."""
        batch, tokens = micro.slice(0, slices).tokens.shape
        return batch, tokens // self.token_parts, self.stages.config.d_model

    def releases_input(self, stage: Stage) -> bool:
        """Returns whether the input of a stage has left the device after its forward pass."""
        run = self.replica.objective.model.blocks[stage.layers[0]].run
        return isinstance(run, SwappingRun) and run.leaves

    @property
    def like(self) -> Tensor:
        """Returns a tensor with the type and device of messages."""
        return self.replica.shards[0].value


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
        mailbox: P2PMailbox,
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
        micro = self.micros[action.micro].slice(action.slice, self.slices)
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
        return self.slices > 1 and self.replica.objective.pairs is not None

    def _add_to_pairs(self, action: Action, micro: MicroTensors, losses: Tensor) -> None:
        """Adds a slice's losses. The last slice's backward pass is the first: by then the pairs' loss is known."""
        assert self.replica.objective.pairs is not None, "asked before"
        whole = self.of_pairs.get(action.micro, 0) + losses
        if action.slice == self.slices - 1:
            loss = self.replica.objective.pairs(whole.requires_grad_(), micro)
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
