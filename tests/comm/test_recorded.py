"""Recordings of collectives: names as the ledger's, times in order, and everything as before afterwards."""

import torch

from phalanx.comm import axis as axes
from phalanx.comm.axis import Axis
from phalanx.comm.calls import Recording, recorded
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase


def collectives(ranks):
    """Calls on an axis of two ranks, recorded. Returns them, and whether the class is as before."""
    group = torch.distributed.distributed_c10d._get_default_group()
    axis = Axis("tp", 2, ranks.rank, group)
    methods, wait, beat = dict(vars(Axis)), axes._Then.wait, heartbeat.own()
    recording = Recording()
    with recorded(recording):
        heartbeat.enter(Phase.OPTIMIZER)
        sums = [torch.ones(4), torch.ones(30_000)]
        works = [axis.all_reduce(x) for x in sums]
        for work in works:
            work.wait()
        x = torch.zeros(3)
        axis.send(x, 1) if ranks.rank == 0 else axis.receive(x, 0)
        axis.reduce_scatter(torch.empty(2), torch.ones(4)).wait()
        Axis("alone").all_reduce(torch.ones(2)).wait()
    same = dict(vars(Axis)) == methods and axes._Then.wait is wait and heartbeat.own() is beat
    axis.all_reduce(torch.ones(2)).wait()
    return (
        [vars(call) for call in recording.calls],
        [phase for _, phase in recording.phases],
        same,
        axis.ledger.traffic(),
    )


def test_every_collective_is_recorded_under_its_ledger_name(ranks):
    (first, phases, same, traffic), (second, *_) = ranks(collectives, 2)
    assert same
    assert phases[-1] is Phase.OPTIMIZER
    assert [call["collective"] for call in first] == ["all_reduce", "all_reduce", "send", "reduce_scatter"]
    assert {call["collective"] for call in first} == traffic["tp"].keys()
    assert [(call["sends"], call["receives"]) for call in (first[2], second[2])] == [(True, False), (False, True)]
    assert [call["bytes"] for call in first] == [16, 120_000, 12, 16]
    for mine, theirs in zip(first, second, strict=True):
        assert mine["axis"] == "tp"
        assert mine["sequence"] == theirs["sequence"]
        assert mine["main"]
        assert 0 < mine["start"] <= mine["launched"] <= mine["waited"] <= mine["done"]
    assert first[0]["channel"] == second[0]["channel"] == first[3]["channel"]
    assert [call["sequence"] for call in (first[0], first[1], first[3])] == [
        first[0]["sequence"],
        first[0]["sequence"] + 1,
        first[0]["sequence"] + 2,
    ]
