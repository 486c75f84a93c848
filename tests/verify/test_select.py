"""What is compared, what is left out, and why."""

from dataclasses import replace

import pytest

from phalanx.check.job import problems_of
from phalanx.config.data import Data
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.config.train import Train
from phalanx.errors import JobError
from phalanx.schedule import catalogue, file
from phalanx.verify import covering, matrix
from phalanx.verify.plan import make

JOB = Job(model=ModelConfig(n_layers=2, d_model=32, n_heads=4, seq_len=16))


def lines(plan):
    return [layout.line() for layout in plan.layouts]


def test_the_matrix_by_default():
    plan = make(JOB)
    assert lines(plan) == [layout.line() for layout in (*map(parse, matrix.MATRIX), *covering.pairs(8))]
    assert plan.skipped == []
    stale, cut, deepened, experts = plan.notes
    assert cut == "model.n_layers: 2 in the job, those of recompute_cut in 2 layouts"
    assert "one update late" in stale
    cases = [plan.case(layout) for layout in plan.layouts]
    deep = sum(case.model.n_layers > 2 and not case.layout.recompute_cut for case in cases)
    assert deepened == f"model.n_layers: 2 in the job, one layer per stage in {deep} layouts with more stages than that"
    mixed = [case.model.moe for case in cases if case.layout.ep > 1]
    assert experts == (
        f"model.moe: no experts in the job, 8 of width 16 in {len(mixed)} layouts with ep above 1, "
        f"without aux_loss in {sum(not moe.aux_loss for moe in mixed)} with slices of sequences"
    )
    assert make(replace(JOB, model=replace(JOB.model, n_layers=4))).notes == [stale, experts]
    assert all(layout.world <= 4 for layout in make(JOB, max_ranks=4).layouts)


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


def test_what_is_not_implemented_is_refused_by_name():
    with pytest.raises(JobError, match="tp=2,offload=all.*offloading is not done by this version"):
        make(JOB, lines=["tp=2,offload=all"])


def test_illegal_layouts_of_the_matrix_are_skipped_with_the_reason():
    plan = make(replace(JOB, model=replace(JOB.model, n_heads=2)))
    reasons = {skipped.layout: skipped.reason for skipped in plan.skipped}
    assert set(reasons) == {line for line in matrix.MATRIX if "tp=4" in line}
    assert "n_heads 2 / tp 4 is not an integer; nearest tp: 1, 2" in reasons["tp=4,sp=true,recompute=full"]
    assert "needs 4 processes, more than --max-ranks 2" in [
        skipped.reason for skipped in make(JOB, max_ranks=2).skipped
    ]


def test_full_adds_every_product():
    plan = make(JOB, full=True)
    assert set(make(JOB).layouts) < set(plan.layouts)
    assert {parse(skipped.layout).tp for skipped in plan.skipped} == {3, 5, 6, 7, 8}


def test_named_layouts_are_all_that_is_compared():
    plan = make(
        replace(JOB, layout=Layout(tp=2)), lines=["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    )
    assert lines(plan) == ["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    assert [plan.case(layout).train.global_batch for layout in plan.layouts] == [24, 20]


def test_what_is_left_to_the_planner_is_no_layout_to_compare():
    with pytest.raises(JobError, match="layout 'auto,tp=2': compared are layouts, not the planner's choice"):
        make(JOB, lines=["auto,tp=2"])


def test_all_mistakes_of_named_layouts_at_once():
    with pytest.raises(JobError) as caught:
        make(JOB, lines=["tp=3", "tpp=2", "dp_shard=16", "tp=0"])
    text = "\n".join(caught.value.problems)
    assert "layout 'tp=3': layout.tp: n_heads 4 / tp 3 is not an integer; nearest tp: 1, 2, 4" in text
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
    assert (
        "pp 3 stages need at least as many layers, the model has 2; nearest legal: pp 2"
        in reasons["pp=3,accumulation=6"]
    )
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
    file.save(file.text(catalogue.build("zb_v", 2, 6)), path := tmp_path / "mine.csv")
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


KINDS = {
    "gpt": JOB.model,
    "fewer key/value heads than Ulysses ranks": replace(JOB.model, n_kv_heads=1, positions="rope", norm="rmsnorm"),
    "mixtral-8x7b": PRESETS["mixtral-8x7b"],
    "deepseek-v3": PRESETS["deepseek-v3"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_features_meet_whatever_the_kind_of_model(kind):
    plan = make(Job(model=KINDS[kind]))
    own = KINDS[kind].moe
    assert {skipped.layout for skipped in plan.skipped} == (
        {"pp=2,schedule=terapipe,pp_slices=4,accumulation=2"} if own.aux_loss else set()
    )
    for layout in plan.layouts:
        case, alone = plan.case(layout), plan.alone(layout)
        assert problems_of(case) == []
        assert (alone.model, alone.layout.world, alone.layout.ep) == (case.model, 1, 1)
        assert bool(case.model.moe.n_experts) == bool(own.n_experts or layout.ep > 1)


def test_a_model_without_experts_gets_some_for_layouts_that_deal_them_out():
    plan = make(JOB, lines=["tp=2", "dp_shard=2,ep=2", "cp=2,ep=2,pp=2,schedule=terapipe"])
    dense, whole, sliced = (plan.case(layout).model.moe for layout in plan.layouts)
    assert dense == MoE()
    assert (whole.n_experts, whole.n_shared, whole.bias_balanced) == (8, 1, True)
    assert min(whole.aux_loss, whole.z_loss) > 0
    assert sliced == replace(whole, aux_loss=0.0)
    assert plan.notes == [
        "model.moe: no experts in the job, 8 of width 16 in 2 layouts with ep above 1, without aux_loss in 1 with "
        "slices of sequences"
    ]
    own = MoE(n_experts=4, top_k=1, renormalise=False)
    plan = make(replace(JOB, model=replace(JOB.model, moe=own)), lines=["dp_shard=2,ep=2"])
    assert plan.case(plan.layouts[0]).model.moe == own
    assert plan.notes == []


def test_a_model_as_it_is_gets_no_experts():
    plan = make(JOB, as_is=True)
    assert not any(plan.case(layout).model.moe.n_experts for layout in plan.layouts)
    reasons = {skipped.layout: skipped.reason for skipped in plan.skipped}
    assert "ep 2 distributes experts, the model has none" in reasons["dp_shard=2,ep=2"]
    with pytest.raises(JobError, match="ep 2 distributes experts, the model has none"):
        make(JOB, lines=["dp_shard=2,ep=2"], as_is=True)


def test_the_job_s_own_experts_and_context_in_small():
    job = Job(model=PRESETS["deepseek-v3"], layout=parse("dp_shard=64,cp=4,cp_ulysses=2,ep=64,micro_batch=1"))
    plan = make(job)
    assert lines(plan)[0] == "dp_shard=2,cp=4,cp_ulysses=2,ep=8"
    assert "cp_ulysses=2,ep=64,micro_batch=1 (256 ranks), is compared as dp_shard=2,cp=4" in plan.notes[0]


def test_document_masks_are_told():
    job = replace(JOB, data=Data(document_mask=True))
    assert make(job, lines=["tp=2"]).notes == [
        "data.document_mask: the random sequences are cut into documents at random places"
    ]
