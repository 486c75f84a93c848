"""The messages of a pipeline, derived from its schedule: what each rank sends, to whom, and when.

Messages from one rank to another keep the sender's order; a receive is posted some actions before its message is
needed, and a send is waited for only to free its memory. So transfers overlap with computation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.schedule.schedule import Action, Schedule

RECEIVE_AHEAD = 2
"""Number of actions by which a receive is posted before its use."""


class P2PMailbox(Protocol):
    """Delivers results to the ranks that need them."""

    def receive(self, action: Action) -> Tensor | None:
        """Waits for the tensor that an action needs from another rank; returns None if it needs none."""
        ...

    def send(self, action: Action, result: Tensor) -> bool:
        """Starts sending an action's result if another rank needs it. Returns whether one does."""
        ...


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

    def begin(self, like: Tensor, shape: tuple[int, ...]) -> StepMailbox:
        """Begins a step in which every message has `shape`, and the type and device of `like`."""
        return StepMailbox(self, like, shape)


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
