"""What is compared, what is left out, and why."""

from dataclasses import replace

import pytest

from phalanx.errors import JobError
from phalanx.job.check import problems_of
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.job.layout_line import parse
from phalanx.job.model import Model, MoE
from phalanx.job.train import Train
from phalanx.schedule import catalogue, file
from phalanx.verify import matrix
from phalanx.verify.plan import make

JOB = Job(model=Model(n_layers=2, d_model=32, n_heads=4, seq_len=16))


def lines(plan):
    return [layout.line() for layout in plan.layouts]


def test_the_matrix_by_default():
    plan = make(JOB)
    assert lines(plan) == [parse(line).line() for line in matrix.MATRIX]
    assert plan.skipped == []
    stale, deepened = plan.notes
    assert "one update late" in stale
    assert deepened == "model.n_layers: 2 in the job, a layer a stage in 7 layouts with more stages than that"
    assert make(replace(JOB, model=replace(JOB.model, n_layers=4))).notes == [stale]


def test_the_job_s_own_layout_comes_first():
    job = replace(JOB, layout=Layout(tp=4, sp=True, accumulation=8, loss_chunk=512), train=Train(global_batch=32))
    plan = make(job)
    assert lines(plan)[0] == "tp=4,sp=true,accumulation=2,loss_chunk=8"
    assert "is compared as tp=4,sp=true,accumulation=2,loss_chunk=8" in plan.notes[0]
    plan = make(replace(JOB, layout=Layout(tp=2)))
    assert lines(plan)[0] == "tp=2"
    assert plan.notes[0] == "the first layout is the job's own: tp=2"
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


def test_schedules_alone_come_after_the_job_s_own_layout():
    plan = make(replace(JOB, layout=Layout(tp=2)), schedules=True, max_ranks=4)
    assert plan.layouts[0].tp == 2
    assert [layout.line() for layout in plan.layouts[1:]] == [layout.line() for layout in matrix.schedules(4)]
    assert plan.skipped == []
    assert set(plan.layouts[1:]) <= set(make(JOB, full=True, max_ranks=4).layouts)


def test_a_case_has_as_many_layers_as_stages_and_a_sequence_in_each_micro_batch():
    plan = make(JOB, schedules=True, max_ranks=4)
    found = set()
    for layout in plan.layouts:
        case, alone = plan.case(layout), plan.alone(layout)
        stages = layout.pp * catalogue.chunks_of(layout.schedule) // catalogue.SCHEDULES[layout.schedule].directions
        assert case.model.n_layers == max(2, stages)
        assert (alone.model, alone.train, alone.layout.world) == (case.model, case.train, 1)
        assert problems_of(case) == []
        found.add(case.train.global_batch)
    assert found == {3, 5, 6, 8}


def test_a_model_as_it_is_gets_no_layers():
    plan = make(JOB, schedules=True, max_ranks=4, as_is=True)
    assert {plan.case(layout).model.n_layers for layout in plan.layouts} == {2}
    reasons = {skipped.layout: skipped.reason for skipped in plan.skipped}
    assert "pp 3 stages need as many layers, the model has 2; nearest legal: pp 2" in reasons["pp=3,accumulation=6"]
    assert not any("n_layers" in note for note in plan.notes)


def test_a_pipeline_of_the_job_s_own_keeps_what_it_is_about():
    model = replace(JOB.model, n_layers=32, d_model=512, n_heads=16, seq_len=256)
    layout = Layout(pp=16, dp_shard=8, schedule="zb_v", pp_cut="1+" * 31 + "1")
    plan = make(replace(JOB, model=model, layout=layout, train=Train(global_batch=512)), schedules=True)
    assert lines(plan)[0] == "dp_shard=4,pp=2,schedule=zb_v,accumulation=4"
    assert plan.case(plan.layouts[0]).model.n_layers == 4
    uneven = replace(JOB, model=replace(JOB.model, n_layers=7), layout=Layout(pp=2, pp_cut="5+2", accumulation=16))
    assert lines(make(uneven))[0] == "pp=2,pp_cut=5+2,accumulation=4"
    large = replace(uneven, model=replace(model, n_layers=7))
    assert lines(make(large))[0] == "pp=2,accumulation=4"
    named = make(large, lines=["pp=2,pp_cut=5+2,accumulation=2"])
    assert named.case(named.layouts[0]).model.n_layers == 7


def test_a_schedule_from_a_file(tmp_path):
    file.write(catalogue.build("zb_v", 2, 6), path := tmp_path / "mine.csv")
    layout = Layout(pp=2, dp_replicate=64, schedule=str(path), accumulation=6)
    plan = make(replace(JOB, model=replace(JOB.model, n_layers=4), layout=layout, train=Train(global_batch=384)))
    assert lines(plan)[0] == f"dp_replicate=4,pp=2,schedule={path},accumulation=6"
    assert plan.case(plan.layouts[0]).train.global_batch == 24


def test_stale_gradients_are_compared_with_such_as_are_stale_on_purpose():
    stale = Layout(pp=2, schedule="pipedream", accumulation=4)
    plan = make(JOB, lines=["tp=2", stale.line()])
    assert [plan.stale(layout) for layout in plan.layouts] == [False, True]
    assert any("one update late" in note for note in plan.notes)
    assert make(JOB, lines=["tp=2"]).notes == []


def test_a_model_that_is_not_trained():
    with pytest.raises(JobError, match=r"mixture of experts \(4\) is not trainable"):
        make(replace(JOB, model=replace(JOB.model, moe=MoE(n_experts=4))))
