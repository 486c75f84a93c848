"""Step drivers and milestones: what is due after which step, and what each form of training yields."""

import dataclasses

import pytest

from phalanx.config.layout import Layout
from phalanx.train.requests import Milestones
from train.runs import change, rows, train


@pytest.mark.parametrize(("done", "following"), [(0, 4), (3, 4), (4, 5), (5, 8), (9, 10), (10, 11)], ids=str)
def test_the_weights_are_next_needed_where_a_validation_or_checkpoint_is_due(done, following):
    milestones = Milestones(last=11, log_every=3, eval_every=4, save_every=5)
    assert milestones.next_needing_weights(done) == following
    assert milestones.needs_weights(following)
    assert not any(milestones.needs_weights(step) for step in range(done + 1, following))


def test_without_intervals_only_the_last_step_needs_the_weights():
    milestones = Milestones(last=7, log_every=0, eval_every=0, save_every=0)
    assert milestones.next_needing_weights(2) == 7
    assert [step for step in range(1, 8) if milestones.shows(step)] == [1]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2),
        Layout(pp=2, accumulation=3, schedule="pipedream"),
        Layout(dp_replicate=2, sync="asp"),
    ],
    ids=lambda layout: layout.line(),
)
def test_every_form_of_training_records_each_step_once_and_pauses_where_something_is_due(ranks, job, layout):
    job = change(change(dataclasses.replace(job, layout=layout), "train", eval_every=4), "checkpoint", every=3)
    summaries = ranks(train, 2, job)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(job, "validation")] == [4, 6]
    assert {summary["step"] for summary in summaries} == {6}
    assert summaries[0]["loss"] == rows(job, "step")[-1]["loss"]
