"""Who takes part in a step, and which steps count, where replicas come and go."""

import socket
import time

import pytest

from phalanx.errors import RunError
from phalanx.launch.replicas import (
    FIRST_CALL_S,
    RankMessage,
    ReplicaCoordinator,
    ReplicaLink,
    ReplicaMembers,
    ReplicaNotice,
    ReplicaTerms,
)
from phalanx.launch.verdict import LOST_PEER, LostPeerError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(replicas: int = 3, ranks: int = 2, least: int = 1) -> ReplicaMembers:
    members = ReplicaMembers(ReplicaTerms(replicas, least), ranks, Clock())
    come(members, *range(replicas))
    assert members.decide()
    return members


def come(members: ReplicaMembers, *replicas: int, step: int = 0) -> None:
    for replica in replicas:
        for rank in range(members.ranks):
            members.enter((replica, rank), RankMessage(ready=step, port=100 + replica))


def vote(members: ReplicaMembers, *replicas: int, summed: bool = True) -> bool:
    notice = members.notice
    for replica in replicas:
        for rank in range(members.ranks):
            members.vote((replica, rank), RankMessage(epoch=notice.epoch, step=notice.step, summed=summed))
    return members.decide()


def test_all_begin_together_and_the_first_is_the_one_that_has_come_furthest():
    members = ReplicaMembers(ReplicaTerms(3, 1), 1, Clock())
    come(members, 0, 2)
    assert not members.decide(), "one is missing"
    come(members, 1, step=7)
    assert members.decide()
    assert (members.notice.members, members.notice.new, members.notice.step) == ((1, 0, 2), (0, 2), 7)
    assert members.notice.port == 101


def test_some_begin_without_the_rest_after_a_while_if_they_are_enough():
    members = ReplicaMembers(ReplicaTerms(3, 2), 1, clock := Clock())
    come(members, 0)
    clock.now = 2 * FIRST_CALL_S
    assert not members.decide(), "fewer than the least"
    come(members, 2)
    assert members.decide()
    assert members.notice.members == (0, 2)


def test_a_step_counts_once_all_ranks_have_its_sum():
    members = begun()
    assert not vote(members, 0, 1)
    assert vote(members, 2)
    assert (members.notice.step, members.notice.epoch) == (1, 1)
    assert not vote(members, 0, 1, summed=False)
    assert vote(members, 2)
    assert (members.notice.step, members.notice.epoch) == (1, 2), "computed again over new connections"


def test_a_lost_replica_is_left_out_of_the_step_in_which_it_was_lost():
    members = begun()
    vote(members, 0, summed=False)
    assert members.leave(1)
    assert members.notice.lost
    assert vote(members, 2, summed=False)
    assert (members.notice.step, members.notice.members, members.notice.lost) == (0, (0, 2), False)


def test_a_step_counts_if_the_sum_has_reached_all_that_are_left():
    members = begun()
    vote(members, 0, 1, 2)
    vote(members, 1)
    members.leave(1)
    assert vote(members, 0, 2)
    assert (members.notice.step, members.notice.members) == (2, (0, 2))


def test_a_replica_that_is_back_at_once_joins_after_the_step_as_a_new_one():
    members = begun()
    members.leave(0)
    come(members, 0, step=-1)
    assert vote(members, 1, 2, summed=False)
    assert (members.notice.members, members.notice.new) == ((1, 2, 0), (0,))
    assert members.notice.port == 101


def test_votes_about_another_step_or_of_a_stranger_do_not_count():
    members = begun(ranks=1)
    members.vote((0, 0), RankMessage(epoch=1, step=5, summed=True))
    members.vote((1, 0), RankMessage(epoch=0, step=0, summed=True))
    assert not members.votes
    members.leave(2)
    members.vote((2, 0), RankMessage(epoch=1, step=0, summed=True))
    assert not members.votes


def test_fewer_than_the_least_wait_and_keep_their_state():
    members = begun(least=2)
    members.leave(0)
    members.leave(1)
    assert not vote(members, 2, summed=False)
    come(members, 1, step=-1)
    assert members.decide()
    assert (members.notice.members, members.notice.new, members.notice.step) == ((2, 1), (1,), 0)


def test_when_all_are_lost_they_begin_from_what_they_have_loaded():
    members = begun()
    for replica in range(3):
        members.leave(replica)
    come(members, 0, 1, 2, step=4)
    assert members.decide()
    assert (members.notice.step, members.notice.new) == (4, (1, 2))


def arrive(members: ReplicaMembers, *places: tuple[int, int]) -> bool:
    notice = members.notice
    for place in places:
        members.arrive(place, RankMessage(epoch=notice.epoch, step=notice.step, arrives=True))
    return members.decide()


def test_an_exchange_opens_with_those_that_come_in_time_and_a_late_one_copies_their_state():
    members = ReplicaMembers(ReplicaTerms(3, 2, grace_s=5.0), 2, clock := Clock())
    come(members, 0, 1, 2)
    assert members.decide()
    assert not arrive(members, (0, 0), (0, 1), (2, 0), (1, 0))
    assert not arrive(members, (1, 1)), "two of two: the grace begins"
    clock.now = 4.9
    assert not members.decide()
    clock.now = 5.0
    assert members.decide()
    assert (members.notice.members, members.notice.opened, members.notice.new) == ((0, 1), True, ())
    assert not vote(members, 0)
    members.arrive((2, 1), RankMessage(epoch=1, step=0, arrives=True))
    assert vote(members, 1)
    assert (members.notice.members, members.notice.opened, members.notice.new) == ((0, 1, 2), False, (2,))
    assert arrive(members, *((replica, rank) for replica in range(3) for rank in range(2))), "nobody is waited for"
    assert (members.notice.step, members.notice.opened) == (1, True)


def test_an_exchange_that_loses_a_replica_is_made_again_by_those_that_arrive_again():
    members = ReplicaMembers(ReplicaTerms(3, 1, grace_s=5.0), 1, Clock())
    come(members, 0, 1, 2)
    members.decide()
    assert arrive(members, (0, 0), (1, 0), (2, 0))
    members.leave(1)
    assert vote(members, 0, 2, summed=False)
    assert (members.notice.members, members.notice.step, members.notice.opened) == ((0, 2), 0, False)
    members.leave(2)
    come(members, 2, step=-1)
    assert arrive(members, (0, 0))
    assert members.notice.members == (0,), "what comes back waits until the exchange is over"
    assert vote(members, 0)
    assert (members.notice.members, members.notice.new) == ((0, 2), (2,))


@pytest.fixture
def coordinator():
    with ReplicaCoordinator(ReplicaTerms(2, 1), 1, tell=lambda _: None) as coordinator:
        yield coordinator


def link(coordinator, replica: int, facts: str = "same") -> ReplicaLink:
    return ReplicaLink({**coordinator.where, "replica": replica}, 0, facts)


def test_ranks_hear_of_each_other_and_at_once_of_a_lost_one(coordinator):
    first, second = link(coordinator, 0), link(coordinator, 1)
    assert not first.copies
    for each in (first, second):
        each.ready(0, 1)
    begun = first.newer(ReplicaNotice(), lambda: None)
    assert begun.members == (0, 1)
    second._socket.shutdown(socket.SHUT_RDWR)
    first.vote(begun, 0, summed=False)
    assert first.newer(begun, lambda: None).members == (0,)
    again = link(coordinator, 1)
    assert again.copies
    first.finish()
    again.ready(-1, 2)
    assert again.newer(ReplicaNotice(), lambda: None).over


def test_a_rank_that_has_nobody_to_copy_from_is_started_again(coordinator):
    first, second = link(coordinator, 0), link(coordinator, 1)
    for each in (first, second):
        each.ready(0, 1)
    begun = first.newer(ReplicaNotice(), lambda: None)
    second._socket.shutdown(socket.SHUT_RDWR)
    while not first.lost(begun):
        time.sleep(0.01)
    again = link(coordinator, 1)
    again.ready(-1, 2)
    first._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LostPeerError) as caught:
        again.newer(begun, lambda: None)
    assert any(words in str(caught.value) for words in LOST_PEER), "the launcher knows it by its words"


def test_a_rank_with_another_job_or_without_the_key_is_refused(coordinator):
    link(coordinator, 0)
    with pytest.raises(RunError, match="replica 1 may not take part: its job or program differs"):
        link(coordinator, 1, "other")
    where = {**coordinator.where, "replica": 1}
    with pytest.raises(RunError, match="a replica was lost: its launcher does not answer"):
        ReplicaLink({**where, "key": "guessed"}, 0, "same")
