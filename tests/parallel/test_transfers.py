"""The messages that a schedule means: each is sent once and received once, in one order on both sides, and no process
group is needed to know them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.axis import Axis, Ledger
from phalanx.parallel.pipeline import RECEIVE_AHEAD, StepMailbox, Transfers
from phalanx.schedule.catalogue import SCHEDULES, build, problems
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import time

NOBODY = Axis("pp")


def every(name: str) -> Iterator[Schedule]:
    """The schedule for 1 to 5 ranks and 1 to 8 micro-batches."""
    for ranks in range(1, 6):
        for micro_batches in range(1, 9):
            if not problems(name, ranks, micro_batches):
                yield build(name, ranks, micro_batches)


def ends(schedule: Schedule) -> list[Transfers]:
    return [Transfers(schedule, rank, NOBODY, NOBODY) for rank in range(schedule.ranks)]


def needs(schedule: Schedule) -> set[tuple[int, Action, int, Action]]:
    """What one rank needs of another: (rank, action that makes it, rank, action that needs it)."""
    homes = {action: rank for rank, program in enumerate(schedule.programs) for action in program}
    found = set()
    for rank, program in enumerate(schedule.programs):
        for action in program:
            for group in schedule.needs(action):
                (made,) = (one for one in group if one in homes)
                if homes[made] != rank:
                    found.add((homes[made], made, rank, action))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_send_has_one_receive_and_is_needed(name):
    for schedule in every(name):
        programs, both = schedule.programs, ends(schedule)
        sent = [
            (rank, action, target, programs[target][place])
            for rank, end in enumerate(both)
            for action, (target, place) in end.targets.items()
        ]
        received = [
            (source, programs[source][place], rank, action)
            for rank, end in enumerate(both)
            for action, (source, place) in end.sources.items()
        ]
        assert len(sent) == len(received) == len(needs(schedule))
        assert set(sent) == set(received) == needs(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_receiver_expects_messages_in_the_order_in_which_they_are_sent(name):
    for schedule in every(name):
        both = ends(schedule)
        for rank, end in enumerate(both):
            sent = defaultdict[int, list[int]](list)
            for place, action in enumerate(schedule.programs[rank]):
                if action in end.targets:
                    sent[end.targets[action][0]].append(place)
            assert sent == {target: other.order[rank] for target, other in enumerate(both) if rank in other.order}


@dataclass
class Line:
    """What goes from one rank to another: receives take the messages in the order in which they were begun."""

    sent: deque[Tensor] = field(default_factory=deque)
    begun: deque[Tensor] = field(default_factory=deque)


@dataclass
class Arrival:
    line: Line
    buffer: Tensor | None = None

    def wait(self) -> None:
        taken = self.buffer is None or all(each is not self.buffer for each in self.line.begun)
        while not taken:
            first = self.line.begun.popleft()
            first.copy_(self.line.sent.popleft())
            taken = first is self.buffer


class Wires(Axis):
    """All ranks in one process, as one of them sees them."""

    def __init__(self, rank: int, lines: dict[tuple[int, int], Line]):
        super().__init__("pp", rank=rank)
        self.lines = lines

    def start_send(self, x: Tensor, target: int) -> Arrival:
        line = self.lines[self.rank, target]
        line.sent.append(x)
        return Arrival(line)

    def start_receive(self, x: Tensor, source: int) -> Arrival:
        line = self.lines[source, self.rank]
        line.begun.append(x)
        return Arrival(line, x)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_reads_what_was_made_for_it(name):
    schedule = build(name, 3, 4)
    numbers = {action: float(n) for n, action in enumerate(a for program in schedule.programs for a in program)}
    made_for = {(rank, action): made for _, made, rank, action in needs(schedule)}
    lines = defaultdict[tuple[int, int], Line](Line)
    mails: list[StepMailbox] = []
    for rank in range(3):
        wires = Wires(rank, lines)
        mails.append(StepMailbox(Transfers(schedule, rank, wires, wires), torch.zeros(()), (2,)))
    order = sorted(
        (start, rank, place) for rank, s in enumerate(time(schedule).starts) for place, start in enumerate(s)
    )
    for _, rank, place in order:
        program = schedule.programs[rank]
        for later in program[place + 1 : place + 1 + RECEIVE_AHEAD]:
            mails[rank].expect(later)
        found = mails[rank].receive(program[place])
        made = made_for.get((rank, program[place]))
        assert (found is None) == (made is None)
        if found is not None and made is not None:
            assert found.tolist() == [numbers[made]] * 2
        mails[rank].send(program[place], torch.full((2,), numbers[program[place]]))
    for mail in mails:
        mail.settle()
        assert not mail.arriving
        assert not any(mail.leaving.values())
    assert not any(line.sent or line.begun for line in lines.values())


@dataclass
class Noted:
    """A lane that notes who sends to whom, in the order of the calls."""

    rank: int
    calls: list[tuple[int, int]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def send(self, x: Tensor, target: int) -> None:
        self.calls.append((self.rank, target))

    def receive(self, x: Tensor, source: int) -> None:
        self.calls.append((source, self.rank))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pair_meets_once_in_an_order_that_all_ranks_share(name):
    for schedule in every(name):
        pairs = {(rank, target) for rank, _, target, _ in needs(schedule)}
        for rank in range(schedule.ranks):
            lane = Noted(rank)
            end = Transfers(schedule, rank, lane, lane)  # pyright: ignore[reportArgumentType]
            end.connect(torch.device("cpu"))
            assert end.pairs == pairs
            assert lane.calls == [pair for pair in sorted(pairs) if rank in pair]


def connected(ranks):
    """Connects over gloo, then sends as a step does. Returns what this rank's ledger has and what it received."""
    everyone = dist.distributed_c10d._get_default_group()
    lane = Axis("pp", ranks.world, ranks.rank, everyone, Ledger())
    end = Transfers(build("1f1b", 2, 2), ranks.rank, lane, lane)
    end.connect(torch.device("cpu"))
    received = torch.zeros(1)
    if ranks.rank == 0:
        lane.send(torch.ones(1), 1)
    else:
        lane.receive(received, 0)
    return lane.ledger.entries, received.item()


def test_connecting_is_not_counted_and_leaves_nothing_behind(ranks):
    first, second = ranks(connected, 2)
    assert [entry.calls for entry in first[0].values()] == [1]
    assert second == ({}, 1.0)
