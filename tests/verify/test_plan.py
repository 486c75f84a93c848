"""What is compared, what is left out, and why."""

from dataclasses import replace

import pytest

from phalanx.errors import JobError
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.layout_line import parse
from phalanx.job.model import Model, MoE
from phalanx.job.train import Train
from phalanx.verify import matrix
from phalanx.verify.plan import make

JOB = Job(model=Model(n_layers=2, d_model=32, n_heads=4, seq_len=16))


def lines(plan):
    return [layout.line() for layout in plan.layouts]


def test_the_matrix_by_default():
    plan = make(JOB)
    assert lines(plan) == [parse(line).line() for line in matrix.MATRIX]
    assert plan.skipped == []
    assert plan.notes == []


def test_the_job_s_own_layout_comes_first():
    job = replace(JOB, layout=Layout(tp=4, sp=True, accumulation=8, loss_chunk=512), train=Train(global_batch=32))
    plan = make(job)
    assert lines(plan)[0] == "tp=4,sp=true,accumulation=2,loss_chunk=8"
    assert "is compared as tp=4,sp=true,accumulation=2,loss_chunk=8" in plan.notes[0]
    plan = make(replace(JOB, layout=Layout(tp=2)))
    assert lines(plan)[0] == "tp=2"
    assert plan.notes == ["the first layout is the job's own: tp=2"]
    assert lines(plan).count("tp=2") == 1


def test_what_is_too_large_is_reduced_and_said():
    plan = make(replace(JOB, layout=Layout(dp_shard=64, tp=4, zero=2), train=Train(global_batch=64)))
    assert lines(plan)[0] == "dp_shard=2,tp=4,zero=2"
    assert "dp_shard=64,tp=4,zero=2 (256 ranks), is compared as dp_shard=2,tp=4,zero=2" in plan.notes[0]


def test_the_parts_that_are_not_trained_are_skipped_with_the_reason():
    plan = make(replace(JOB, layout=Layout(tp=2, offload="all")))
    assert lines(plan)[0] == "tp=2"
    assert plan.skipped[0].layout == "tp=2,offload=all"
    assert "offloading is not done by this version" in plan.skipped[0].reason


def test_illegal_layouts_of_the_matrix_are_skipped_with_the_reason():
    plan = make(replace(JOB, model=replace(JOB.model, n_heads=2)))
    reasons = {skipped.layout: skipped.reason for skipped in plan.skipped}
    assert set(reasons) == {line for line in matrix.MATRIX if "tp=4" in line}
    assert "n_heads 2 / tp 4 is not whole; nearest tp: 1, 2" in reasons["tp=4,sp=true,recompute=full"]
    assert "needs 4 processes, more than --max-ranks 2" in [
        skipped.reason for skipped in make(JOB, max_ranks=2).skipped
    ]


def test_full_adds_every_product():
    assert set(make(JOB).layouts) < set(make(JOB, full=True).layouts)
    skipped = make(JOB, full=True).skipped
    assert {parse(s.layout).tp for s in skipped} == {3, 5, 6, 7, 8}


def test_named_layouts_are_all_that_is_compared():
    plan = make(
        replace(JOB, layout=Layout(tp=2)), lines=["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    )
    assert lines(plan) == ["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    assert [plan.case(layout).train.global_batch for layout in plan.layouts] == [24, 20]


def test_all_mistakes_of_named_layouts_at_once():
    with pytest.raises(JobError) as caught:
        make(JOB, lines=["tp=3", "tpp=2", "dp_shard=16", "tp=0"])
    text = "\n".join(caught.value.problems)
    assert "layout 'tp=3': layout.tp: n_heads 4 / tp 3 is not whole; nearest tp: 1, 2, 4" in text
    assert "layout 'tpp=2': unknown key tpp; did you mean tp?" in text
    assert "layout 'dp_shard=16': needs 16 processes, more than --max-ranks 8" in text
    assert "layout 'tp=0': layout.tp: must be at least 1, is 0" in text


def test_a_model_that_is_not_trained():
    with pytest.raises(JobError, match=r"mixture of experts \(4\) is not trainable"):
        make(replace(JOB, model=replace(JOB.model, moe=MoE(n_experts=4))))
