"""Shares of a step: arithmetic of intervals, who is waited for, sums, and the median rank."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.profile.report import (
    Communication,
    ProfiledRank,
    Shares,
    latest_starts,
    mean,
    minus,
    shares_of,
    total,
    typical,
    union,
    within,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def moments(spans):
    """The unit intervals that lie in any of the spans."""
    return {moment for start, end in spans for moment in range(start, end)}


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_sets_of_moments(first, second, low, high):
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert total(a) == len(moments(first))
    assert a == union(a)
    assert moments(minus(a, b)) == moments(first) - moments(second)
    assert total(minus(a, b)) == len(moments(first) - moments(second))
    assert moments(within(a, low, high)) == {m for m in moments(first) if low <= m < high}


def call(start, waited=0, end=0, *, sequence=1, axis="tp", channel="g", **facts):
    launched = min(start + 1, end or start + 1)
    return Communication(axis, "all_reduce", channel, sequence, start, max(end, launched), waited, launched, 8, **facts)


CALLS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 30), st.sampled_from(["tp", "pp"])).map(
        lambda each: call(each[0], each[0] + 1 + each[1], each[0] + 1 + each[1] + each[2], axis=each[3])
    ),
    max_size=6,
)
WORK = st.dictionaries(st.sampled_from(["forward", "backward", "recompute", "optimizer", "data"]), SPANS.map(union))


@given(WORK, CALLS, CALLS, st.sampled_from(["cpu", "cuda"]))
def test_the_parts_add_up_to_the_step(work, calls, others, device):
    records = [
        ProfiledRank(0, [(0, 40), (50, 100)], work, calls, device),
        ProfiledRank(1, [(0, 100)], {}, others, device),
    ]
    latest = latest_starts(records)
    for record in records:
        every = shares_of(ProfiledRank.of(record.document()), latest)
        for shares, (start, end) in zip(every, record.steps, strict=True):
            assert abs(sum(seconds for _, seconds in shares.parts()) - (end - start) / 1e9) < 1e-15
            assert all(seconds >= 0 for _, seconds in shares.parts())
        whole = mean(every)
        assert abs(sum(seconds for _, seconds in whole.parts()) - whole.step) < 1e-15


def test_waiting_for_a_late_rank_is_no_communication():
    """Rank 0 waits from 10 to 40; rank 1 begins at 30."""
    records = [
        ProfiledRank(0, [(0, 100)], {"forward": [(0, 10)], "backward": [(40, 90)]}, [call(9, 10, 40)]),
        ProfiledRank(1, [(0, 100)], {"forward": [(0, 30)]}, [call(30, 31, 42)]),
    ]
    latest = latest_starts(records)
    (early,), (late,) = (shares_of(record, latest) for record in records)
    assert (early.waiting, early.exposed) == ({"tp": 20e-9}, {"tp": {"all_reduce": 11e-9}})
    assert (late.waiting, late.exposed) == ({}, {"tp": {"all_reduce": 12e-9}})
    assert early.forward == 9e-9, "the call was started in the forward pass"
    assert abs(early.other - 10e-9) < 1e-15


def test_a_receiver_waits_for_its_sender():
    """Rank 0 sends message 1 to rank 1 at 30 and posts a receive of its own; other messages do not matter."""
    records = [
        ProfiledRank(0, [(0, 100)], {}, [call(30, 0, 0, channel="g:1", axis="pp", sends=True)]),
        ProfiledRank(
            1,
            [(0, 100)],
            {},
            [
                call(1, 5, 50, channel="g:0", axis="pp", receives=True),
                call(60, 62, 70, channel="g:0", axis="pp", receives=True, sequence=2),
            ],
        ),
    ]
    (shares,) = shares_of(records[1], latest_starts(records))
    assert shares.waiting == {"pp": 25e-9}
    assert abs(shares.exposed["pp"]["all_reduce"] - (1 + 20 + 1 + 8) * 1e-9) < 1e-15


def test_communication_in_flight_beside_a_pass_is_overlapped():
    record = ProfiledRank(0, [(0, 100)], {"backward": [(0, 80)]}, [call(10, 70, 75)])
    (shares,) = shares_of(record, {})
    assert shares.exposed == {"tp": {"all_reduce": 6e-9}}
    assert abs(shares.overlapped["tp"]["all_reduce"] - 59e-9) < 1e-15
    assert shares.backward == 74e-9


def test_kernels_hide_communication():
    kernel = Communication("tp", "all_reduce", "g", 1, 50, 90, 50, 50)
    (shares,) = shares_of(ProfiledRank(0, [(0, 100)], {"backward": [(0, 80)]}, [kernel], "cuda"), {})
    assert (shares.backward, shares.exposed) == (80e-9, {"tp": {"all_reduce": 10e-9}})
    assert abs(shares.overlapped["tp"]["all_reduce"] - 30e-9) < 1e-15


def test_the_median_rank_is_a_rank():
    ranks = [Shares(step=10, forward=f, other=10 - f) for f in (1.0, 5.0, 5.5, 6.0, 9.0)]
    assert typical(ranks) == 2
    assert typical(ranks[:1]) == 0
