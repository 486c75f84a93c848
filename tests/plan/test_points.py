"""The sample of a space for its picture."""

from __future__ import annotations

from phalanx.config.layout import Layout
from phalanx.plan.planner import MOST_FAMILIES, family
from plan.answers import planned


def test_a_family_names_axes_and_state() -> None:
    assert family(Layout()) == "one device"
    assert family(Layout(dp_shard=8)) == "FSDP"
    assert family(Layout(dp_replicate=8)) == "replicas"
    assert family(Layout(tp=8, dp_shard=4)) == "tensor + FSDP"
    assert family(Layout(tp=2, pp=4, dp_shard=8, zero=1)) == "tensor + pipeline"
    assert family(Layout(tp=2, pp=4, cp=2, dp_shard=8)) == "three axes or more"


def test_points_are_a_sample_of_few_families() -> None:
    plan = planned("llama3-8b", "dgx-h100:2", 64, sample=60)
    assert 40 <= len(plan.points) <= 62
    assert len({point.family for point in plan.points}) <= MOST_FAMILIES
    assert {point.fits for point in plan.points} == {True, False}
    assert len({point.line for point in plan.points}) == len(plan.points)
    limit = plan.request.cluster.accelerator.memory_gib * 2**30
    assert all(point.peak <= limit for point in plan.points if point.fits)


def test_the_same_question_has_the_same_points() -> None:
    planned.cache_clear()
    one = planned("gpt2", "dgx-h100:1", 64, sample=20).points
    planned.cache_clear()
    assert planned("gpt2", "dgx-h100:1", 64, sample=20).points == one


def test_without_a_sample_there_are_none() -> None:
    assert not planned("gpt2", "dgx-h100:1", 64).points
