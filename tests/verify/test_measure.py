"""The measurement itself, on a small model in place of a large one, and with messages through host memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from covering import WHOLE, also_whole
from phalanx.blocks.kinds import alike, block_kinds, untrained
from phalanx.blocks.parameters import count, parameter_shapes
from phalanx.check.job import problems_of
from phalanx.check.model import model_problems
from phalanx.comm.axis import StagedAxis
from phalanx.config.cluster import Cluster
from phalanx.config.job import Data, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.errors import RunError
from phalanx.model import moe
from phalanx.model.seeding import Noise
from phalanx.parallel import compression, mesh, scaled
from phalanx.parallel.data import Replica
from phalanx.parallel.mesh import build
from phalanx.parallel.scaled import ScaledProduct
from phalanx.train.step import Stepper
from phalanx.verify import cases, measure
from phalanx.verify import run as verify
from phalanx.verify.measure import TOLERANCE, Differences, compare, difference, micro_batches, record
from phalanx.verify.run import FirstDifference, first_difference
from phalanx.verify.select import CHEAP_PARAMETERS, Selection, compared_job, select

# The measurement itself: every kind of difference is found, and named where it first appears.


JOB = Job(model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=11, dropout=0.1))


MASKED = replace(JOB, data=Data(document_mask=True))


FP8 = replace(JOB, train=Train(precision="fp8"))
MIXTURE = replace(FP8.model, dropout=0.0, moe=MoE(n_experts=4, top_k=2))


def plan_of(*lines: str, job: Job = JOB) -> Selection:
    return select(job, lines=lines)


def recorded(ranks, selection: Selection, path) -> None:
    ranks(record, 1, selection.alone(selection.layouts[0]), selection.compared.vocab_size, 2, path)


def compared(ranks, selection: Selection, path, fn=compare) -> FirstDifference | None:
    (layout,) = selection.layouts
    found = ranks(fn, layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path)[0]
    return first_difference(found, TOLERANCE)


def test_a_tampered_record_is_found_and_named(ranks, tmp_path):
    selection, path = plan_of("dp_shard=2,tp=2,sp=true" if WHOLE else "tp=2,sp=true"), tmp_path / "record"
    recorded(ranks, selection, path)
    assert compared(ranks, selection, path) is None
    original = load_file(path)
    with safe_open(path, "pt") as stored:
        scalars = stored.metadata()["scalars"]
    for key, factor, expected in (
        ("gradient/1/blocks.1.mlp.up.weight", 1 + 1e-6, FirstDifference("gradient", "blocks.1.mlp.up.weight", 2, 1e-6)),
        ("gradient/0/blocks.0.attn_norm.bias", 2.0, FirstDifference("gradient", "blocks.0.attn_norm.bias", 1, 0.5)),
        ("parameter/final_norm.weight", 1 + 1e-7, FirstDifference("parameter", "final_norm.weight", 2, 1e-7)),
    ):
        tampered = original | {key: original[key] * factor}
        save_file(tampered, path, {"scalars": scalars, "largest": "[1.0, 1.0]"})
        found = compared(ranks, selection, path)
        assert found is not None
        assert (found.what, found.name, found.step) == (expected.what, expected.name, expected.step)
        assert math.isclose(found.rel, expected.rel, rel_tol=1e-3)


@pytest.mark.parametrize("line", ["pp=2,schedule=pipedream,accumulation=4", "pp=2,schedule=pipedream_stash"])
def test_stale_gradients_over_ramps_are_those_of_one_process(ranks, tmp_path, line):
    """Three sizes in five steps: the pipeline drains between them, and takes other micro-batches after each."""
    job = replace(JOB, train=Train(batch_ramp="2*8", seq_ramp="4*4"), model=replace(JOB.model, tied=False))
    job = replace(job, optimizer=Optimizer(clip=0.0))
    selection, path = plan_of(line, job=job), tmp_path / "record"
    (layout,), vocab = selection.layouts, selection.compared.vocab_size
    cases = [selection.alone(layout), selection.case(layout)]
    alone, case = (replace(each, train=replace(each.train, batch_ramp="2*8", seq_ramp="4*4")) for each in cases)
    ranks(record, 1, alone, vocab, 5, path, selection.stale(layout))
    assert first_difference(ranks(compare, 2, case, vocab, 5, path)[0], TOLERANCE) is None


def without_summing_partials(ranks, *args):
    with mock.patch.object(Replica, "_sum_partials", return_value=None):
        return compare(ranks, *args)


def every_micro_batch_the_same_masks(ranks, *args):
    real = Noise.__init__

    def one_sample(self, seed, step, sample_ids, *args, **kwargs):
        real(self, seed, step, [sample_ids[0]] * len(sample_ids), *args, **kwargs)

    with mock.patch.object(Noise, "__init__", one_sample):
        return compare(ranks, *args)


def without_documents(ranks, *args):
    real = Stepper.tensors
    with mock.patch.object(
        Stepper, "tensors", lambda *args, **options: replace(real(*args, **options), documents=None)
    ):
        return compare(ranks, *args)


def without_loads(ranks, *args):
    """As if no expert had more to do than another."""
    with mock.patch.object(moe, "_excess", lambda load, factor: torch.zeros(len(load))):
        return compare(ranks, *args)


@pytest.mark.parametrize(
    ("job", "line", "sabotage", "name"),
    [
        (JOB, "tp=2,sp=true", without_summing_partials, "positions.weight"),
        (JOB, "dp_replicate=2", every_micro_batch_the_same_masks, "embed.weight"),
        (FP8, "tp=2,sp=true", without_summing_partials, "positions.weight"),
        (MASKED, "cp=2", without_documents, "embed.weight"),
        (JOB, "dp_shard=2,ep=2", without_loads, "blocks.0.moe.router.bias"),
    ],
)
def test_a_broken_technique_is_named_by_the_first_parameter(ranks, tmp_path, job, line, sabotage, name):
    selection, path = plan_of(line, job=job), tmp_path / "record"
    recorded(ranks, selection, path)
    found = compared(ranks, selection, path, sabotage)
    assert found is not None
    assert (found.what, found.step) == ("gradient", 1)
    assert found.name == name


@pytest.mark.parametrize(
    "line",
    [
        "dp_shard=2,tp=2,zero=3,sp=true,recompute=products,accumulation=2",
        "cp=2,pp=2,schedule=zb_h1,accumulation=2,recompute=full",
        "dp_shard=2,ep=2,zero=1",
        *also_whole("cp=2,pp=2,schedule=zb_h1,accumulation=4,recompute=full"),
    ],
)
def test_products_in_8_bits_are_those_of_one_process_but_for_the_scales_of_parts(ranks, tmp_path, line):
    selection, path = plan_of(line, job=FP8), tmp_path / "record"
    (layout,) = selection.layouts
    case = layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path
    recorded(ranks, selection, path)
    assert first_difference(ranks(compare, *case)[0], TOLERANCE) is None
    if layout.processes > 2 and not WHOLE:  # one layout tells how much is rounded
        return
    scales = max(ranks(with_scales, *case)[0].gradients[0].values())
    recorded(ranks, plan_of(line, job=JOB), path)
    rounding = max(ranks(compare, *case)[0].gradients[0].values())
    assert 0 < scales < 1e-3
    assert rounding > 1e-2


@pytest.mark.parametrize(
    ("line", "moe", "scaling"),
    [
        ("dp_shard=2,ep=2,zero=3,recompute=full", MIXTURE.moe, "rowwise"),
        ("dp_shard=2,tp=2,ep=2,zero=1,recompute=products", MIXTURE.moe, "mxfp8"),
        ("tp=2,sp=true,accumulation=2", replace(MIXTURE.moe, capacity=1.5), "tensorwise"),
        ("pp=2,schedule=zb_h1,accumulation=2", MIXTURE.moe, "rowwise"),
    ],
)
def test_products_of_experts_in_8_bits_are_those_of_one_process(ranks, tmp_path, line, moe, scaling):
    job = replace(FP8, model=replace(MIXTURE, moe=moe), train=Train(precision="fp8", fp8_scaling=scaling))
    selection, path = plan_of(line, job=job), tmp_path / "record"
    recorded(ranks, selection, path)
    assert compared(ranks, selection, path) is None
    assert compared(ranks, selection, path, with_experts_in_their_own_type) is not None


@pytest.mark.parametrize(
    ("line", "moe"),
    [
        ("dp_shard=2,tp=2,sp=true,recompute=products,accumulation=2", MoE()),
        ("dp_shard=4,ep=2,hpz=2,accumulation=2,accumulate=sharded", MIXTURE.moe),
        *also_whole(
            ("dp_shard=2,pp=2,schedule=zb_h1,accumulation=2,hpz=1,recompute=full", MoE()),
            ("dp_shard=2,pp=2,schedule=zb_h1,accumulation=4,hpz=1,recompute=full", MoE()),
        ),
    ],
)
def test_gathers_in_fp8_are_those_of_one_process(ranks, tmp_path, line, moe):
    job = replace(FP8, model=replace(JOB.model, d_model=32, dropout=0.0, moe=moe))
    selection, path = plan_of(f"{line},quantise_weights=fp8", job=job), tmp_path / "record"
    recorded(ranks, selection, path)
    assert compared(ranks, selection, path) is None
    assert compared(ranks, selection, path, with_fewer_bits_on_the_way) is not None


def with_fewer_bits_on_the_way(ranks, *args):
    """As if gathers in fp8 had two bits of mantissa."""

    def rounded(factor, _, scales):
        narrow, scale = scaled.rounded(factor, torch.float8_e5m2, scales)
        return narrow.to(torch.float8_e4m3fn), scale

    with mock.patch.object(compression, "rounded", rounded):
        return compare(ranks, *args)


def with_experts_in_their_own_type(ranks, *args):
    """As if experts' products were not in 8 bits."""
    with mock.patch.object(ScaledProduct, "groups", return_value=False):
        return compare(ranks, *args)


def with_scales(ranks, *args):
    """As products in 8 bits are trained with."""
    with mock.patch.object(ScaledProduct, "on", lambda _, scaling, __: ScaledProduct(scaling, emulated=True)):
        return compare(ranks, *args)


def without_one_stage(ranks, *args):
    """As if a pipeline's second rank brought nothing."""
    real = measure.wholes
    with mock.patch.object(measure, "wholes", lambda *args: ((n, x) for n, x in real(*args) if "blocks.1" not in n)):
        return compare(ranks, *args)


def test_a_pipeline_s_gradients_are_in_the_model_s_order_and_all_there(ranks, tmp_path):
    selection, path = plan_of("pp=2,schedule=dualpipe,accumulation=2"), tmp_path / "record"
    recorded(ranks, selection, path)
    (layout,) = selection.layouts
    found = ranks(compare, 2, selection.case(layout), selection.compared.vocab_size, 2, path)[0]
    assert first_difference(found, TOLERANCE) is None
    assert [list(step) for step in (*found.gradients, found.parameters)] == [
        list(parameter_shapes(selection.case(layout).model))
    ] * 3
    with pytest.raises(ValueError, match=r"no rank has blocks\.1\.attn_norm\.weight, blocks\.1\.attn_norm\.bias, "):
        ranks(without_one_stage, 2, selection.case(layout), selection.compared.vocab_size, 2, path)


def refuses(ranks, *args):
    raise RunError("a rank's disk is full") if ranks.rank else ValueError("two lines\nhere")


def test_a_rank_that_raises_fails_its_case_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(cases, "compare", refuses)
    selection = plan_of("accumulation=2", "accumulation=4")
    shown = []
    report = verify.run(selection, 1, shown.append, lambda layout: None)
    assert [case.error for case in report.cases] == ["ValueError: two lines"] * 2
    assert shown == report.cases
    assert not report.ok
    first = report.as_dict()["cases"][0]
    assert first["ok"] is False
    assert first["grad_max_rel"] is None


def test_the_scale_of_a_difference():
    one = torch.tensor([1e-20, 2.0])
    assert difference(one, torch.tensor([0.0, 2.0]), 0.0) == pytest.approx(5e-21)
    assert difference(torch.tensor([1e-20]), torch.tensor([0.0]), 1e-3) == pytest.approx(1e-17)
    assert difference(torch.zeros(1), torch.zeros(1), 0.0) == 0.0
    assert math.isnan(difference(torch.tensor([math.nan]), torch.ones(1), 0.0))
    with pytest.raises(ValueError, match=r"shape \(1,\), but of \(2,\)"):
        difference(torch.ones(1), one, 0.0)


def test_what_is_no_number_differs():
    found = Differences([0.0], [{"a": 0.0, "b": math.nan}], {"a": 0.0, "b": math.nan})
    assert first_difference(found, TOLERANCE) == FirstDifference("gradient", "b", 1, found.gradients[0]["b"])
    assert verify.worst([0.0, math.nan, 1.0]) == math.inf
    equal = Differences([0.0, 0.0], [{"a": 0.0}, {"a": 0.0}], {"a": 0.0}, [0.0, 0.0])
    assert first_difference(equal, TOLERANCE) is None
    for changed, expected in (
        (replace(equal, losses=[0.0, 1e-3]), FirstDifference("loss", None, 2, 1e-3)),
        (replace(equal, norms=[1e-3, 0.0]), FirstDifference("norm", None, 1, 1e-3)),
        (replace(equal, norms=[]), None),
        (replace(equal, norms=[1.0], copies=[["a"], []]), FirstDifference("copy", "a", 1, math.inf)),
        (replace(equal, copies=[[], [], ["a"]]), FirstDifference("copy", "a", 2, math.inf)),
        (replace(equal, validation=1e-3), FirstDifference("validation", None, 2, 1e-3)),
        (replace(equal, norms=[1e-3], gradients=[{"a": 0.0}, {"a": 1.0}]), FirstDifference("norm", None, 1, 1e-3)),
    ):
        assert first_difference(changed, TOLERANCE) == expected


def my_batches(ranks, job, vocab_size):
    return micro_batches(job, vocab_size, build(job.layout, "cpu"), 1)


@pytest.mark.parametrize("line", ["dp_replicate=2,accumulation=2", "dp_replicate=2,data_parallel=threads"])
def test_ranks_share_the_batch_out_and_have_different_numbers_of_valid_tokens(ranks, line):
    selection = plan_of(line)
    layout = parse(line)
    (alone, valid) = ranks(my_batches, 1, selection.alone(selection.layouts[0]), 11)[0]
    shares = ranks(my_batches, layout.processes, selection.case(selection.layouts[0]), 11)
    rows = [row for batches, _ in shares for micro in batches for row in micro.targets.tolist()]
    assert rows == alone[0].targets.tolist()
    assert all(total == valid for _, total in shares)
    counts = [sum(int((micro.targets >= 0).sum()) for micro in batches) for batches, _ in shares]
    assert sum(counts) == valid
    assert len(set(counts)) == len(counts)


def test_with_a_document_mask_every_sample_is_cut_into_documents_at_other_places(ranks):
    selection = plan_of("dp_replicate=2,accumulation=2", job=MASKED)
    (alone, _), (none, _) = (
        ranks(my_batches, 1, selection.alone(selection.layouts[0]), 11)[0],
        ranks(my_batches, 1, JOB, 11)[0],
    )
    shares = ranks(my_batches, 2, selection.case(selection.layouts[0]), 11)
    documents = [row for batches, _ in shares for micro in batches for row in micro.documents.tolist()]
    assert documents == alone[0].documents.tolist()
    assert len(set(map(tuple, documents))) > 1
    assert {row[0] for row in documents} == {0}
    assert {later - sooner for row in documents for sooner, later in itertools.pairwise(row)} == {0, 1}
    assert none[0].documents is None


# The model that is compared in place of a large one.


def test_a_cheap_model_stays_as_it_is():
    job = Job(model=ModelConfig(n_layers=4, d_model=64, n_heads=4, vocab_size=50, seq_len=100, dropout=0.1))
    compared = compared_job(job, False, 8)
    assert compared.job.model == job.model
    assert compared.vocab_size == 50
    assert set(compared.changes) == {"layout.bucket_mb", "optimizer.clip"}
    assert compared.job.train.precision == "fp64"
    narrow = Train(precision="fp8", fp8_scaling="tensorwise", compile=True)
    compared = compared_job(replace(job, train=narrow), False, 8)
    assert compared.job.train == replace(narrow, compile=False), "in fp64, with emulated products in 8 bits"


def test_the_tokenizer_s_vocabulary_is_a_prime_here():
    assert compared_job(Job(), False, 8).vocab_size == 251


def test_as_it_is():
    job = Job(model=PRESETS["gpt2"], optimizer=Optimizer(eps=1e-12))
    compared = compared_job(job, True, 8)
    assert compared.changes == {}
    assert (compared.job.model, compared.job.optimizer) == (job.model, job.optimizer)


def test_what_was_changed_is_told():
    job = Job(model=PRESETS["llama3-8b"], optimizer=Optimizer(eps=1e-12))
    changes = compared_job(job, False, 8).changes
    assert changes["model.n_layers"] == (32, 2)
    assert changes["model.seq_len"] == (8192, 32)
    assert changes["model.vocab_size"] == (128256, 251)
    assert changes["optimizer.eps"] == (1e-12, 1e-8)
    assert not {"model.n_heads", "model.n_kv_heads", "model.norm", "train.precision"} & set(changes)


def test_both_kinds_of_layers_stay_and_heads_turn_as_far():
    model = replace(PRESETS["llama3-8b"], window=4096, full_every=6, rotary_fraction=0.25)
    small = compared_job(Job(model=model), False, 8).job.model
    assert {small.window_of(layer) > 0 for layer in range(small.n_layers)} == {True, False}
    assert small.rotary_size / small.head_size == 0.25
    assert not list(model_problems(small))
    # A model in which no layer is full has none afterwards either.
    small = compared_job(Job(model=replace(model, full_every=50)), False, 8).job.model
    assert all(small.window_of(layer) for layer in range(small.n_layers))


def test_windows_shrink_with_sequences():
    model = replace(PRESETS["llama3-8b"], window=4096)
    small = compared_job(Job(model=model), False, 8).job.model
    assert (small.seq_len, small.window) == (32, 16)
    assert compared_job(Job(model=replace(model, window=1)), False, 8).job.model.window == 1
    assert compared_job(Job(model=replace(model, window=9000)), False, 8).job.model.window >= 32
    baby = replace(PRESETS["baby"], seq_len=256, window=100)
    assert compared_job(Job(model=baby), False, 8).changes["model.window"] == (100, 13)
    cheap = replace(PRESETS["tiny"], vocab_size=50, window=9)
    assert compared_job(Job(model=cheap), False, 8).job.model == cheap


def legal(job: Job, layout: Layout) -> bool:
    return not problems_of(replace(job, layout=layout, train=replace(job.train, global_batch=layout.data_ranks)))


@pytest.mark.parametrize("preset", [name for name, model in PRESETS.items() if not untrained(model)])
def test_a_small_model_is_cheap_and_legal_under_the_same_layouts(preset):
    job = Job(model=PRESETS[preset])
    compared = compared_job(job, False, 8)
    small = compared.job.model
    assert count(small, compared.vocab_size) <= 2 * CHEAP_PARAMETERS
    assert small.seq_len <= 128
    assert (small.n_heads, small.kv_heads) == (job.model.n_heads, job.model.kv_heads)
    for n in range(1, 9):
        layouts = Layout(tp=n), Layout(tp=n, sp=True), Layout(cp=n, cp_ulysses=n), Layout(dp_shard=n, ep=n)
        for layout in layouts:
            assert legal(compared.job, layout) == legal(job, layout), layout


@pytest.mark.parametrize("preset", ["gemma2-27b", "gemma3-27b", "gpt-oss-20b"])
def test_layers_with_and_without_a_window_remain(preset):
    model = compared_job(Job(model=PRESETS[preset]), False, 8).job.model
    windows = [model.window_of(layer) for layer in range(model.n_layers)]
    assert windows[-1] == 0
    assert 4 < windows[0] < model.seq_len


def test_experts_and_latent_attention_in_small_are_still_both_at_work():
    small = compared_job(Job(model=PRESETS["deepseek-v3"]), False, 8).job.model
    assert [kind.routed for kind in block_kinds(small)] == [False, True]
    moe, mla = small.moe, small.mla
    assert (moe.n_experts, moe.n_groups, moe.top_groups, moe.top_k, moe.n_shared) == (8, 4, 2, 2, 1)
    assert (mla.q_rank, mla.kv_rank, small.head_size, small.v_head_size) == (16, 8, 8, 4)
    mixtral = compared_job(Job(model=PRESETS["mixtral-8x7b"]), False, 8).job.model
    assert mixtral.moe == replace(PRESETS["mixtral-8x7b"].moe, d_ff=mixtral.moe.d_ff)


@given(
    n_experts=st.integers(2, 400),
    top_k=st.integers(1, 8),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 1), (8, 8)]),
    n_dense_layers=st.integers(0, 20),
)
def test_any_experts_are_legal_in_small(n_experts, top_k, groups, n_dense_layers):
    moe = MoE(
        n_experts=n_experts,
        top_k=top_k,
        renormalise=top_k > 1,
        n_groups=groups[0],
        top_groups=groups[1],
        n_dense_layers=n_dense_layers,
    )
    model = replace(PRESETS["llama3-8b"], moe=moe)
    assume(not list(model_problems(model)))
    small = compared_job(Job(model=model), False, 8).job.model
    assert list(model_problems(small)) == []
    assert block_kinds(small)[-1].routed
    assert (small.moe.top_k == 1) == (top_k == 1)
    for ep in range(2, 9):
        assert (small.moe.n_experts % ep == 0) == (n_experts % ep == 0)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_like_divides_by_the_same_numbers(number, at_least):
    small = alike(number, min(number, at_least), 8)
    assert min(number, at_least) <= small <= number
    assert [small % ranks == 0 for ranks in range(2, 9)] == [number % ranks == 0 for ranks in range(2, 9)]


# Layouts whose messages travel through host memory, as on a GPU that ranks share, equal one process.

STAGED = Job(model=ModelConfig(n_layers=4, d_model=16, n_heads=2, seq_len=8, vocab_size=11, dropout=0.1))
LINES = [
    "dp_shard=2,zero=2,tp=2,sp=true,accumulation=2",
    "dp_shard=2,zero=3,reshard=false,accumulation=2",
    "pp=2,schedule=dualpipe,accumulation=4",
    "cp=2",
    "cp=2,cp_ulysses=2",
    "dp_shard=2,ep=2",
    *also_whole(
        "dp_shard=2,zero=2,accumulation=2",
        "dp_replicate=2,dp_shard=2,zero=3,reshard=false,accumulation=2",
        "dp_replicate=2,dp_shard=2,zero=3",
        "tp=2,sp=true",
        "pp=2,schedule=zb_v,accumulation=4",
    ),
]


def compare_staged(ranks, *args):
    with mock.patch.object(mesh, "Axis", StagedAxis):
        return compare(ranks, *args)


@pytest.mark.parametrize("line", LINES)
def test_messages_through_host_memory_change_nothing(ranks, tmp_path, line):
    selection, path = select(STAGED, lines=[line]), tmp_path / "record"
    (layout,) = selection.layouts
    ranks(record, 1, selection.alone(layout), selection.compared.vocab_size, 2, path)
    found = ranks(compare_staged, layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path)[0]
    assert first_difference(found, TOLERANCE) is None


def test_a_cuda_job_is_compared_on_cuda():
    for cluster, expected in ((Cluster(), "cpu"), (Cluster(device="cpu"), "cpu"), (Cluster(device="cuda"), "cuda")):
        selection = select(replace(STAGED, cluster=cluster), lines=["tp=2"])
        assert selection.case(parse("tp=2")).cluster.device == expected
