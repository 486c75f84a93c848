"""The ledger adds up calls and bytes by axis and collective, for programs and for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.axis import Ledger
from phalanx.cost.communication import sent_bytes
from phalanx.units import gib


def filled() -> Ledger:
    ledger = Ledger()
    for _ in range(4):
        ledger.add("tp", "all_reduce", 1000, 4)
    ledger.add("tp", "all_gather", 600, 4)
    ledger.add("dp_shard", "reduce_scatter", 2**21, 2)
    return ledger


def test_bytes_by_axis_and_collective():
    assert filled().traffic() == {
        "dp_shard": {"reduce_scatter": 2**20},
        "tp": {"all_gather": 450, "all_reduce": 6000},
    }
    assert filled().traffic(steps=2) == {
        "dp_shard": {"reduce_scatter": 2**19},
        "tp": {"all_gather": 225, "all_reduce": 3000},
    }


def test_lines_for_a_person():
    assert filled().lines(steps=2) == [
        f"dp_shard: reduce-scatter {gib(2**19)} in 0.5 calls",
        f"tp: all-gather {gib(225)} in 0.5 calls, all-reduce {gib(3000)} in 2 calls",
    ]
    assert Ledger().lines(steps=1) == []


def test_clearing_starts_anew():
    ledger = filled()
    ledger.clear()
    assert ledger.traffic() == {}
    ledger.add("tp", "all_reduce", 8, 2)
    assert ledger.traffic() == {"tp": {"all_reduce": 8}}


@given(
    st.lists(st.tuples(st.sampled_from(["all_reduce", "all_gather", "broadcast"]), st.integers(0, 10**9)), max_size=9)
)
def test_entries_are_sums_of_calls(calls):
    ledger = Ledger()
    for collective, payload in calls:
        ledger.add("cp", collective, payload, 3)
    for collective in {name for name, _ in calls}:
        payloads = [payload for name, payload in calls if name == collective]
        assert ledger.entries["cp", collective].calls == len(payloads)
        expected = sum(sent_bytes(collective, payload, 3) for payload in payloads)
        assert ledger.traffic()["cp"][collective] == pytest.approx(expected)
