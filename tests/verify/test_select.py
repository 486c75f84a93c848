"""What is compared, what is left out, and the layouts that are compared by default."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from covering import WHOLE, also_whole
from phalanx.blocks.kinds import block_kinds
from phalanx.check.job import problems_of
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.schedule import catalogue, file
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.verify import select as covering
from phalanx.verify import select as matrix
from phalanx.verify.select import Selection, compared_job, select

# What is compared, what is left out, and why.


JOB = Job(model=ModelConfig(n_layers=2, d_model=32, n_heads=4, seq_len=16))


def lines(selection):
    return [layout.line() for layout in selection.layouts]


def test_the_matrix_by_default():
    selection = select(JOB)
    assert lines(selection) == [layout.line() for layout in (*map(parse, matrix.MATRIX), *matrix.pairs(8))]
    assert selection.skipped == []
    stale, cut, deepened, experts = selection.notes
    assert cut == "model.n_layers: 2 in the job, those of recompute_cut in 2 layouts"
    assert "as late as theirs" in stale
    cases = [selection.case(layout) for layout in selection.layouts]
    deep = sum(case.model.n_layers > 2 and not case.layout.recompute_cut for case in cases)
    assert deepened == f"model.n_layers: 2 in the job, one more than there are stages in {deep} layouts"
    mixed = [case.model.moe for case in cases if case.layout.ep > 1]
    assert experts == (
        f"model.moe: no experts in the job, 8 of width 16 in {len(mixed)} layouts with ep above 1, "
        f"without aux_loss in {sum(not moe.aux_loss for moe in mixed)} with slices of sequences"
    )
    assert select(replace(JOB, model=replace(JOB.model, n_layers=5))).notes[2:] == [experts]
    assert all(layout.world <= 4 for layout in select(JOB, max_ranks=4).layouts)


def test_the_job_s_own_layout_comes_first():
    job = replace(JOB, layout=Layout(tp=4, sp=True, accumulation=8, loss_chunk=512), train=Train(global_batch=32))
    selection = select(job, alone=not WHOLE)
    assert lines(selection)[0] == "tp=4,sp=true,accumulation=2,loss_chunk=8"
    assert "is compared as tp=4,sp=true,accumulation=2,loss_chunk=8" in selection.notes[0]
    selection = select(replace(JOB, layout=Layout(tp=2)))
    assert lines(selection)[0] == "tp=2"
    assert selection.notes[0] == "the first layout is the job's own: tp=2"
    assert lines(selection).count("tp=2") == 1


def test_a_schedule_by_another_framework_s_name_is_taken_and_said():
    selection = select(JOB, lines=["pp=2,schedule=GPipe,micro_batch=1", "tp=2"])
    assert lines(selection) == ["pp=2,schedule=gpipe,micro_batch=1", "tp=2"]
    said = "layout 'pp=2,schedule=GPipe,micro_batch=1': taken as pp=2,schedule=gpipe,micro_batch=1"
    assert selection.notes == [said, "model.n_layers: 2 in the job, one more than there are stages in 1 layout"]


def test_what_is_too_large_is_reduced_and_said():
    job = replace(JOB, layout=Layout(dp_shard=64, tp=4, zero=2), train=Train(global_batch=64))
    selection = select(job, alone=not WHOLE)
    assert lines(selection)[0] == "dp_shard=2,tp=4,zero=2"
    assert "dp_shard=64,tp=4,zero=2 (256 ranks), is compared as dp_shard=2,tp=4,zero=2" in selection.notes[0]


def test_an_offload_that_a_layout_cannot_use_is_refused_by_name():
    with pytest.raises(JobError, match=r"tp=2,zero=2,offload=all.*which is zero=3, and zero is 2; nearest legal"):
        select(JOB, lines=["tp=2,zero=2,offload=all"])


def test_illegal_layouts_of_the_matrix_are_skipped_with_the_reason():
    selection = select(replace(JOB, model=replace(JOB.model, n_heads=2)))
    reasons = {skipped.layout: skipped.reason for skipped in selection.skipped}
    assert set(reasons) == {line for line in matrix.MATRIX if "tp=4" in line}
    assert "n_heads 2 / tp 4 is not an integer; nearest tp: 1, 2" in reasons["tp=4,sp=true,recompute=full"]
    assert "needs 4 processes, more than --max-ranks 2" in [
        skipped.reason for skipped in select(JOB, max_ranks=2).skipped
    ]


@cache
def everything(ranks: int = 4) -> Selection:
    return select(JOB, full=True, max_ranks=ranks)


@pytest.mark.parametrize(("ranks", "illegal"), [(4, {3}), *also_whole((8, {3, 5, 6, 7, 8}))])
def test_full_adds_every_product(ranks, illegal):
    assert set(select(JOB, max_ranks=ranks).layouts) < set(everything(ranks).layouts)
    assert illegal == {parse(each.layout).tp for each in everything(ranks).skipped if "max-ranks" not in each.reason}


def test_named_layouts_are_all_that_is_compared():
    selection = select(
        replace(JOB, layout=Layout(tp=2)), lines=["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    )
    assert lines(selection) == ["dp_shard=3,zero=1", "dp_replicate=2,micro_batch=5,accumulation=2"]
    assert [selection.case(layout).train.global_batch for layout in selection.layouts] == [24, 20]


def test_what_is_left_to_the_planner_is_no_layout_to_compare():
    with pytest.raises(JobError, match="layout 'auto,tp=2': verify compares layouts, not the planner's choice"):
        select(JOB, lines=["auto,tp=2"])


def test_all_mistakes_of_named_layouts_at_once():
    with pytest.raises(JobError) as caught:
        select(JOB, lines=["tp=3", "tpp=2", "dp_shard=16", "tp=0"])
    text = "\n".join(caught.value.problems)
    assert (
        "layout 'tp=3': layout.tp: n_heads 4 / tp 3 and MLP width 128 / tp 3 are not integers; nearest tp: 1, 2, 4"
        in text
    )
    assert "layout 'tpp=2': unknown key tpp; did you mean tp?" in text
    assert "layout 'dp_shard=16': needs 16 processes, more than --max-ranks 8" in text
    assert "layout 'tp=0': layout.tp: must be at least 1, is 0" in text


def test_schedules_alone_come_after_the_job_s_own_layout():
    selection = select(replace(JOB, layout=Layout(tp=2)), schedules=True, max_ranks=4)
    assert selection.layouts[0].tp == 2
    assert [layout.line() for layout in selection.layouts[1:]] == [layout.line() for layout in matrix.every_schedule(4)]
    assert selection.skipped == []
    assert set(selection.layouts[1:]) <= set(everything().layouts)


def test_a_case_has_a_layer_more_than_stages_and_a_sequence_in_each_micro_batch():
    selection = select(JOB, schedules=True, max_ranks=4)
    found = set()
    for layout in selection.layouts:
        case, alone = selection.case(layout), selection.alone(layout)
        stages = layout.pp * catalogue.chunks_of(layout.schedule) // catalogue.SCHEDULES[layout.schedule].directions
        assert case.model.n_layers == stages + 1
        assert (alone.model, alone.train, alone.layout.world) == (case.model, case.train, 1)
        assert problems_of(case) == []
        found.add(case.train.global_batch)
    assert found == {3, 5, 6, 8}


def test_a_small_model_has_every_kind_of_layer():
    """The second kind of Qwen3-Next's pattern is that of its fourth layer."""

    def kinds(name: str):
        return block_kinds(compared_job(Job(model=PRESETS[name]), as_is=False, max_ranks=8).job.model)

    assert [kind.attention for kind in kinds("qwen3-next-80b-a3b")] == ["delta", "gated_heads"]
    assert [kind.rotates for kind in kinds("smollm3-3b")] == [True, False]


def test_a_model_as_it_is_gets_no_layers():
    selection = select(JOB, schedules=True, max_ranks=4, as_is=True)
    assert {selection.case(layout).model.n_layers for layout in selection.layouts} == {2}
    reasons = {skipped.layout: skipped.reason for skipped in selection.skipped}
    assert (
        "pp 3 stages need at least as many layers, the model has 2; nearest legal: pp 2"
        in reasons["pp=3,accumulation=6"]
    )
    assert not any("n_layers" in note for note in selection.notes)


def test_a_pipeline_of_the_job_s_own_keeps_what_it_is_about():
    model = replace(JOB.model, n_layers=32, d_model=512, n_heads=16, seq_len=256)
    layout = Layout(pp=16, dp_shard=8, schedule="zb_v", pp_cut="1+" * 31 + "1")
    selection = select(replace(JOB, model=model, layout=layout, train=Train(global_batch=512)), alone=not WHOLE)
    assert lines(selection)[0] == "dp_shard=4,pp=2,schedule=zb_v,accumulation=4"
    assert selection.case(selection.layouts[0]).model.n_layers == 5
    uneven = replace(JOB, model=replace(JOB.model, n_layers=7), layout=Layout(pp=2, pp_cut="5+2", accumulation=16))
    assert lines(select(uneven, alone=not WHOLE))[0] == "pp=2,pp_cut=5+2,accumulation=4"
    large = replace(uneven, model=replace(model, n_layers=7))
    assert lines(select(large, alone=not WHOLE))[0] == "pp=2,accumulation=4"
    named = select(large, lines=["pp=2,pp_cut=5+2,accumulation=2"])
    assert named.case(named.layouts[0]).model.n_layers == 7


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(file.text(catalogue.build("zb_v", 2, 6)))
    layout = Layout(pp=2, dp_replicate=64, schedule=str(path), accumulation=6)
    job = replace(JOB, model=replace(JOB.model, n_layers=4), layout=layout, train=Train(global_batch=384))
    selection = select(job, alone=not WHOLE)
    assert lines(selection)[0] == f"dp_replicate=4,pp=2,schedule={path},accumulation=6"
    assert selection.case(selection.layouts[0]).train.global_batch == 24


def test_stale_gradients_are_compared_with_such_as_are_stale_on_purpose():
    stale = Layout(pp=2, schedule="pipedream", accumulation=4)
    selection = select(JOB, lines=["tp=2", stale.line()])
    assert [selection.stale(layout) for layout in selection.layouts] == [None, selection.layouts[1]]
    assert any("as late as theirs" in note for note in selection.notes)
    assert select(JOB, lines=["tp=2"]).notes == []


KINDS = {
    "gpt": JOB.model,
    "fewer key/value heads than Ulysses ranks": replace(JOB.model, n_kv_heads=1, positions="rope", norm="rmsnorm"),
    "mixtral-8x7b": PRESETS["mixtral-8x7b"],
    "deepseek-v3": PRESETS["deepseek-v3"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_features_meet_whatever_the_kind_of_model(kind):
    selection = select(Job(model=KINDS[kind]))
    own = KINDS[kind].moe
    assert {skipped.layout for skipped in selection.skipped} == (
        {"pp=2,schedule=terapipe,pp_slices=4,accumulation=2"} if own.aux_loss else set()
    )
    for layout in selection.layouts:
        case, alone = selection.case(layout), selection.alone(layout)
        assert problems_of(case) == []
        assert (alone.model, alone.layout.world, alone.layout.ep) == (case.model, 1, 1)
        assert bool(case.model.moe.n_experts) == bool(own.n_experts or layout.ep > 1)


def test_a_model_without_experts_gets_some_for_layouts_that_deal_them_out():
    selection = select(JOB, lines=["tp=2", "dp_shard=2,ep=2", "cp=2,ep=2,pp=2,schedule=terapipe"])
    dense, whole, sliced = (selection.case(layout).model.moe for layout in selection.layouts)
    assert dense == MoE()
    assert (whole.n_experts, whole.n_shared, whole.bias_balanced) == (8, 1, True)
    assert min(whole.aux_loss, whole.z_loss) > 0
    assert sliced == replace(whole, aux_loss=0.0)
    assert selection.notes == [
        "model.n_layers: 2 in the job, one more than there are stages in 1 layout",
        "model.moe: no experts in the job, 8 of width 16 in 2 layouts with ep above 1, without aux_loss in 1 with "
        "slices of sequences",
    ]
    own = MoE(n_experts=4, top_k=1, renormalise=False)
    selection = select(replace(JOB, model=replace(JOB.model, moe=own)), lines=["dp_shard=2,ep=2"])
    assert selection.case(selection.layouts[0]).model.moe == own
    assert selection.notes == []


def test_a_model_as_it_is_gets_no_experts():
    selection = select(JOB, as_is=True)
    assert not any(selection.case(layout).model.moe.n_experts for layout in selection.layouts)
    reasons = {skipped.layout: skipped.reason for skipped in selection.skipped}
    assert "ep 2 distributes experts, the model has none" in reasons["dp_shard=2,ep=2"]
    with pytest.raises(JobError, match="ep 2 distributes experts, the model has none"):
        select(JOB, lines=["dp_shard=2,ep=2"], as_is=True)


def test_the_job_s_own_experts_and_context_in_small():
    job = Job(model=PRESETS["deepseek-v3"], layout=parse("dp_shard=64,cp=4,cp_ulysses=2,ep=64,micro_batch=1"))
    selection = select(job, alone=not WHOLE)
    assert lines(selection)[0] == "dp_shard=2,cp=4,cp_ulysses=2,ep=8"
    assert "cp_ulysses=2,ep=64,micro_batch=1 (256 ranks), is compared as dp_shard=2,cp=4" in selection.notes[0]


def test_document_masks_are_told():
    job = replace(JOB, data=Data(document_mask=True))
    assert select(job, lines=["tp=2"]).notes == [
        "data.document_mask: the random sequences are cut into documents at random places"
    ]


def test_rounded_layouts_are_not_called_equal():
    with pytest.raises(JobError, match=r"at most 1/254 of the largest of 256.*nearest legal: quantise_weights=none"):
        select(JOB, lines=["dp_shard=2,quantise_weights=int8"])
    with pytest.raises(JobError, match=r"int4 rounds gradients .* at most 1/14 .* quantise_gradients=none"):
        select(JOB, lines=["dp_shard=2,quantise_gradients=int4"])
    job = replace(JOB, layout=Layout(dp_shard=2, quantise_weights="int8", quantise_gradients="int4"))
    selection = select(job, alone=not WHOLE)
    assert selection.layouts[0].line() == "dp_shard=2"
    notes = [note for note in selection.notes if "compared without quantisation" in note]
    assert ["1/254" in note for note in notes] == [True, False]
    with pytest.raises(JobError, match=r"powersgd sums only their part .* nearest legal: compression=none"):
        select(JOB, lines=["dp_replicate=2,compression=powersgd"])
    job = replace(JOB, layout=Layout(dp_replicate=2, compression="powersgd", compression_rank=1))
    assert select(job, alone=not WHOLE).layouts[0].line() == "dp_replicate=2"


@pytest.mark.parametrize("sync", ["asp", "local_sgd", "diloco"])
def test_replicas_that_are_not_in_step_are_refused_with_the_reason(sync):
    with pytest.raises(JobError, match=f"layout.sync: {sync} is not compared: .*nearest legal: sync=bsp"):
        select(JOB, lines=[f"dp_replicate=2,sync={sync}"])


def test_the_job_s_own_asynchronous_layout_is_skipped_and_the_others_are_compared():
    selection = select(replace(JOB, layout=Layout(dp_replicate=2, sync="asp")))
    assert "asp is not compared" in selection.skipped[0].reason
    assert "tp=2" in lines(selection)


def test_what_is_legal_follows_from_the_precision_of_the_comparison():
    gathered = "dp_shard=2,quantise_weights=fp8"
    assert lines(select(JOB, lines=[gathered], precision="fp8")) == [gathered]
    with pytest.raises(JobError, match="precision is bf16"):
        select(JOB, lines=[gathered], precision="bf16")


def test_one_illegal_layout_does_not_stop_the_others():
    selection = select(JOB, lines=["tp=3", "nonsense=1", "tp=2", "layout=auto"])
    assert lines(selection) == ["tp=2"]
    assert len(selection.refused) >= 3
    assert any("tp=3" in problem for problem in selection.refused)


# The layouts that are compared by default.

LAYOUTS = [parse(line) for line in matrix.MATRIX]


def test_every_line_is_another_layout_of_at_most_8_ranks():
    assert len(set(LAYOUTS)) == len(LAYOUTS)
    assert all(layout.world <= 8 for layout in LAYOUTS)


@pytest.mark.parametrize(
    "technique",
    [
        {"dp_replicate": 2},
        {"accumulation": 2},
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "zero": 3},
        {"reshard": False},
        {"hpz": 2, "accumulation": 2},
        {"accumulate": "sharded", "zero": 2},
        {"accumulate": "sharded", "zero": 3},
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
        {"tp": 2, "sp": False},
        {"tp": 4},
        {"tp": 2, "sp": True},
        {"sp_regather": True},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute_cut": "1*full+1*selective+1*products+1*none", "pp": 1},
        {"recompute_cut": "1*full+2*selective+1*none", "pp": 2, "tp": 2, "sp_regather": True},
        {"loss_chunk": 24},
        {"offload": "optimizer+activations"},
        {"offload": "all", "zero": 3},
        {"data_parallel": "threads"},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 4},
        {"pp": 2, "accumulate": "sharded"},
        *({"cp": cp, "cp_ulysses": 1} for cp in (2, 4)),
        {"cp": 2, "cp_ulysses": 2},
        *({"cp": 4, "cp_ulysses": 2, "cp_inner": inner} for inner in ("ulysses", "ring")),
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
        *({"dp_shard": shard, "ep": ep} for shard, ep in ((2, 2), (4, 2), (4, 4))),
        {"cp": 2, "ep": 2, "dp_shard": 1},
        {"schedule": "terapipe"},
        {"schedule": "zb_v", "recompute": "full"},
        {"schedule": "dualpipe"},
        {"schedule": "pipedream"},
    ],
    ids=str,
)
def test_every_technique_is_there(technique):
    assert any(all(getattr(layout, name) == value for name, value in technique.items()) for layout in LAYOUTS)


def test_full_is_every_product_in_every_form():
    layouts = list(matrix.products(4))
    assert len(set(layouts)) == len(layouts)
    assert {(x.dp_replicate, x.dp_shard, x.cp, x.tp) for x in layouts} == {
        (r, s, c, t)
        for r, s, c, t in itertools.product(range(1, 5), range(1, 5), (1, 2), range(1, 5))
        if 2 <= r * s * c * t <= 4
    }
    assert Layout(cp=2, zero=1, recompute="full") in layouts
    assert Layout(dp_shard=2, tp=2, sp=True, zero=1, recompute="selective") in layouts
    assert not any(layout.sp and layout.tp == 1 for layout in layouts)


def test_schedules_are_every_one_on_pipelines_of_three_sizes():
    layouts = list(matrix.every_schedule(4))
    assert len(set(layouts)) == len(layouts) == 9 * len(SCHEDULES)
    assert {layout.schedule for layout in layouts} == set(SCHEDULES)
    assert {(x.pp, x.accumulation) for x in layouts} == {(p, m) for p in (2, 3, 4) for m in (p, 2 * p, p + 1)}
    assert all(x == Layout(pp=x.pp, schedule=x.schedule, accumulation=x.accumulation) for x in layouts)
    assert {layout.pp for layout in matrix.every_schedule(3)} == {2, 3}
    assert list(matrix.every_schedule(1)) == []


@pytest.mark.parametrize(
    ("line", "max_ranks", "expected"),
    [
        ("dp_shard=64,tp=8", 8, "dp_shard=2,tp=4"),
        ("dp_replicate=16", 8, "dp_replicate=8"),
        ("dp_replicate=2,dp_shard=2,tp=2", 4, "dp_shard=2,tp=2"),
        ("dp_shard=3,tp=3", 8, "tp=3"),
        ("tp=4,sp=true", 8, "tp=4,sp=true"),
        ("dp_replicate=64,data_parallel=threads", 1, "dp_replicate=64,data_parallel=threads"),
        ("pp=16,dp_shard=8,tp=8,schedule=zb_v", 8, "pp=2,dp_shard=2,tp=2,schedule=zb_v"),
        ("pp=4,tp=2,pp_cut=1+2+3+2", 8, "pp=4,tp=2,pp_cut=1+2+3+2"),
        ("pp=4,tp=2,pp_cut=1+2+3+2", 4, "pp=2,tp=2"),
        ("pp=2,schedule=terapipe,pp_slices=8", 1, "dp_replicate=1"),
        ("pp=4,dp_replicate=8,schedule=mine.csv", 8, "pp=4,dp_replicate=2,schedule=mine.csv"),
        ("pp=16,tp=2,schedule=mine.csv", 8, "pp=16,schedule=mine.csv"),
        ("dp_shard=8,cp=8,cp_ulysses=2,tp=8", 8, "dp_shard=2,cp=2,cp_ulysses=2,tp=2"),
        ("dp_shard=4,cp=16,cp_ulysses=4", 8, "dp_shard=2,cp=4,cp_ulysses=4"),
        ("dp_shard=2,cp=6,cp_ulysses=3,cp_inner=ring", 8, "dp_shard=2,cp=3,cp_ulysses=3,cp_inner=ring"),
        ("dp_shard=2,cp=4,cp_ulysses=2,cp_inner=ring", 2, "cp=2,cp_ulysses=2,cp_inner=ring"),
        ("cp=4,cp_ulysses=2,cp_inner=ring", 1, "dp_replicate=1"),
        ("dp_shard=64,ep=16,tp=2", 8, "dp_shard=4,ep=4,tp=2"),
        ("dp_shard=9,cp=2,ep=6", 8, "dp_shard=3,cp=2,ep=6"),
        ("dp_shard=64,tp=4,sp=true,ep=64,etp=1", 8, "dp_shard=2,tp=4,sp=true,ep=8,etp=1"),
        ("dp_shard=6,ep=3", 4, "dp_shard=3,ep=3"),
        ("pp=4,schedule=zb_v,pp_chunks=2,pp_slices=2,pp_cut=1+1", 1, "dp_replicate=1"),
    ],
)
def test_a_large_layout_keeps_its_techniques(line, max_ranks, expected):
    assert matrix.reduced(parse(line), max_ranks) == parse(expected)


# The layouts in which features meet.


def shows(layout: Layout, entry: str) -> bool:
    """Whether a layout has an entry of FEATURES, and no other of its row that is more than that."""
    row = next(row for row in covering.FEATURES if entry in row)
    return entry == max((each for each in row if has(layout, each)), key=len, default=None)


def has(layout: Layout, entry: str) -> bool:
    entry_layout = parse(entry)
    names = {item.partition("=")[0] for item in entry.split(",")}
    return all(getattr(layout, name) == getattr(entry_layout, name) for name in names)


def meet(layouts: tuple[Layout, ...]) -> set[tuple[str, str]]:
    entries = [entry for row in covering.FEATURES for entry in row]
    return {
        pair
        for layout in layouts
        for pair in itertools.combinations((entry for entry in entries if shows(layout, entry)), 2)
    }


def across() -> set[tuple[str, str]]:
    rows = itertools.combinations(covering.FEATURES, 2)
    return {pair for one, other in rows for pair in itertools.product(one, other)}


def test_every_two_features_meet_on_at_most_8_ranks():
    layouts = covering.pairs(8)
    assert len(layouts) == len(set(layouts)) < 50
    assert all(1 < layout.world <= 8 and layout.shard_ranks % layout.ep == 0 for layout in layouts)
    assert across() == meet(layouts)


@pytest.mark.parametrize(("max_ranks", "missing"), [(4, {("dp_shard=2,zero=1", "cp=4,cp_ulysses=2")}), (1, set())])
def test_with_fewer_ranks_those_meet_that_fit(max_ranks, missing):
    layouts = covering.pairs(max_ranks)
    assert all(layout.world <= max_ranks for layout in layouts)
    found = meet(layouts)
    assert not missing & found
    assert ("recompute=full", "loss_chunk=24") in found
    assert (("cp=2", "ep=2") in found) == (max_ranks > 1)


def test_without_layouts_that_are_not_legal_all_others_still_meet():
    layouts = covering.pairs(8, lambda layout: layout.schedule != "terapipe" and layout.tp == 1)
    gone = {pair for pair in across() if any("terapipe" in entry or "tp=2" in entry for entry in pair)}
    assert meet(layouts) == across() - gone
