"""Policies that a form of training cannot follow are refused, with the nearest legal choice."""

import pytest

from phalanx.check.job import problems_of, unguarded
from phalanx.config.job import GuardOptions, Job, Train
from phalanx.config.layout import Layout

TRAIN = Train(global_batch=12)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(dp_replicate=2), ""),
        (Layout(pp=2, accumulation=2, schedule="zb_h1"), ""),
        (Layout(dp_replicate=2, sync="local_sgd"), "replicas train independently (sync=local_sgd)"),
        (Layout(dp_replicate=2, sync="asp"), "replicas train independently (sync=asp)"),
        (Layout(pp=2, accumulation=2, schedule="pipedream"), "steps overlap (schedule=pipedream)"),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else "",
)
def test_policies_need_steps_that_all_ranks_take_together(layout, reason):
    assert unguarded(Job(layout=layout)) == reason
    assert not problems_of(Job(layout=layout, train=TRAIN))
    wanted = Job(layout=layout, train=TRAIN, guard=GuardOptions(on_spike="skip", on_nan="rewind", repeat_every=1))
    found = problems_of(wanted)
    assert [path for path, _ in found] == (["guard.on_spike", "guard.on_nan", "guard.repeat_every"] if reason else [])
    assert all(reason in text and "nearest legal: " in text for _, text in found)
