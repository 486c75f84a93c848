"""The messages of a pipeline, derived from its schedule: what a rank sends when, and what comes from whom.

Messages from one rank to another keep the order in which the sender makes them; a receive is begun some actions before
its message is needed, and nobody waits for a send but for its memory. So what travels hides behind what is computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Pending
from phalanx.schedule.schedule import Action, Schedule

AHEAD = 2
"""Actions before its use that a receive is begun."""


class P2PMailbox(Protocol):
    """Brings results to the ranks that need them."""

    def receive(self, action: Action) -> Tensor | None:
        """Wait for the tensor that an action needs from another rank; None where it needs none."""
        ...

    def send(self, action: Action, result: Tensor) -> bool:
        """Send an action's result on its way, if another rank needs it. Returns whether one does."""
        ...


@dataclass
class Transfers:
    """One rank's messages of a pipeline's step."""

    schedule: Schedule
    rank: int
    up: Axis
    """To higher ranks."""
    down: Axis
    """To lower ranks."""
    targets: dict[Action, tuple[int, int]] = field(init=False, default_factory=dict)
    """By action of this rank whose result another one needs: that rank, and the place in its program that reads it."""
    sources: dict[Action, tuple[int, int]] = field(init=False, default_factory=dict)
    """By action of this rank that needs another one's result: that rank, and the place in its program that makes it."""
    order: dict[int, list[int]] = field(init=False, default_factory=dict)
    """By sender, the places there of what makes results that come here."""
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
                    reader = reader._replace(kind="I")  # the backward pass is cut in halves there
                if rank == self.rank:
                    self.targets[action] = target, places[target][reader]
                if target == self.rank:
                    self.order.setdefault(rank, []).append(place)
                    self.sources[reader] = rank, place

    def connect(self, device: torch.device) -> None:
        """Send one element from each sender to each receiver, in the same order on all ranks; it is not counted.

        NCCL makes a communicator with the first message between two ranks, and each waits there for the other. Ranks
        that begin to receive before they send, as those of a pipeline do, would wait for each other for ever."""
        x = torch.zeros(1, device=device)
        with self.up.ledger.untracked(), self.down.ledger.untracked():
            for sender, receiver in sorted(self.pairs):
                axis = self.up if receiver > sender else self.down
                if self.rank == sender:
                    axis.send(x, receiver)
                elif self.rank == receiver:
                    axis.receive(x, sender)

    def begin(self, like: Tensor, shape: tuple[int, ...]) -> StepMailbox:
        """Begin a step in which every message has `shape`, and the type and device of `like`."""
        return StepMailbox(self, like, shape)


class StepMailbox:
    """Sends and receives the messages of one step."""

    def __init__(self, transfers: Transfers, like: Tensor, shape: tuple[int, ...]):
        self.transfers, self.like, self.shape = transfers, like, shape
        self.coming = {source: iter(places) for source, places in transfers.order.items()}
        self.arriving: dict[tuple[int, int], tuple[Tensor, Pending]] = {}
        """By sender and place there."""
        self.leaving: dict[int, list[tuple[int, Tensor, Pending]]] = defaultdict(list)
        """By receiver: the place there where it is read, and what must not change until then."""

    def expect(self, action: Action) -> None:
        """Begin to receive what an action will need."""
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
        """Wait for the tensor that an action needs from another rank; None where it needs none."""
        if (needed := self.transfers.sources.get(action)) is None:
            return None
        self.expect(action)
        buffer, pending = self.arriving.pop(needed)
        pending.wait()
        self._release(*needed)
        return buffer

    def send(self, action: Action, result: Tensor) -> bool:
        """Send an action's result on its way, if another rank needs it. Returns whether one does."""
        if (target := self.transfers.targets.get(action)) is None:
            return False
        rank, read = target
        group = self.transfers.up if rank > self.transfers.rank else self.transfers.down
        result = result.contiguous()
        self.leaving[rank].append((read, result, group.start_send(result, rank)))
        return True

    def settle(self) -> None:
        """Wait until everything has left."""
        for rank in self.leaving:
            self._release(rank, len(self.transfers.schedule.programs[rank]))

    def _release(self, rank: int, place: int) -> None:
        """Release the messages that another rank has read, as it is known to have come to `place` in its program."""
        for read, _, pending in self.leaving[rank]:
            if read < place:
                pending.wait()
        self.leaving[rank] = [message for message in self.leaving[rank] if message[0] >= place]


def _reader(schedule: Schedule, action: Action) -> Action | None:
    """The action of the next stage that reads a result: a forward pass, or a backward pass (or its first half)."""
    if action.kind == "F":
        return action._replace(stage=action.stage + 1) if action.stage < schedule.stages - 1 else None
    if action.kind == "W" or action.stage == 0:
        return None
    return Action("B", action.stage - 1, action.micro, action.slice)
