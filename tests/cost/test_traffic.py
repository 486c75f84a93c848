"""Bytes of a collective: by hand, by its relations to others, and by the messages of the algorithms themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.communication import sent_bytes

payloads, many = st.integers(0, 10**12), st.integers(1, 4096)


def test_by_hand():
    assert sent_bytes("all_gather", 1200, 4) == 900
    assert sent_bytes("reduce_scatter", 1200, 4) == 900
    assert sent_bytes("all_to_all", 1200, 4) == 900
    assert sent_bytes("all_reduce", 1200, 4) == 1800
    assert sent_bytes("broadcast", 1200, 4) == 1800


@given(payloads)
def test_one_rank_sends_nothing(payload):
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert sent_bytes(collective, payload, 1) == 0


@given(payloads, many)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(payload, ranks):
    parts = sent_bytes("reduce_scatter", payload, ranks) + sent_bytes("all_gather", payload, ranks)
    assert sent_bytes("all_reduce", payload, ranks) == pytest.approx(parts)


@given(payloads, many)
def test_more_ranks_send_more_but_never_the_whole(payload, ranks):
    here, next_up = sent_bytes("all_gather", payload, ranks), sent_bytes("all_gather", payload, ranks + 1)
    assert here <= next_up <= payload


@given(st.integers(1, 64), st.integers(1, 1000))
def test_an_all_gather_sends_this_ranks_part_to_every_other(ranks, part):
    assert sent_bytes("all_gather", ranks * part, ranks) == pytest.approx((ranks - 1) * part)
