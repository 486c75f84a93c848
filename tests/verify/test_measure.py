"""The measurement itself: every kind of difference is found, and named where it first appears."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout_line import parse
from phalanx.config.model import ModelConfig
from phalanx.errors import RunError
from phalanx.model import moe
from phalanx.model.seeding import Noise
from phalanx.parallel.data import Replica
from phalanx.parallel.linear import Fp8Product
from phalanx.parallel.mesh import build
from phalanx.train.step import Stepper
from phalanx.verify import measure
from phalanx.verify import run as verify
from phalanx.verify.measure import TOLERANCE, Differences, compare, difference, micro_batches, record
from phalanx.verify.run import FirstDifference, first_difference
from phalanx.verify.select import Selection, select

JOB = Job(model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=11, dropout=0.1))


MASKED = replace(JOB, data=Data(document_mask=True))


FP8 = replace(JOB, train=Train(precision="fp8"))


def plan_of(*lines: str, job: Job = JOB) -> Selection:
    return select(job, lines=lines)


def recorded(ranks, selection: Selection, path) -> None:
    ranks(record, 1, selection.alone(selection.layouts[0]), selection.compared.vocab_size, 2, path)


def compared(ranks, selection: Selection, path, fn=compare) -> FirstDifference | None:
    (layout,) = selection.layouts
    found = ranks(fn, layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path)[0]
    return first_difference(found, TOLERANCE)


def test_a_tampered_record_is_found_and_named(ranks, tmp_path):
    selection, path = plan_of("dp_shard=2,tp=2,sp=true"), tmp_path / "record"
    recorded(ranks, selection, path)
    assert compared(ranks, selection, path) is None
    original = load_file(path)
    for key, factor, expected in (
        ("gradient/1/blocks.1.mlp.up.weight", 1 + 1e-6, FirstDifference("gradient", "blocks.1.mlp.up.weight", 2, 1e-6)),
        ("gradient/0/blocks.0.attn_norm.bias", 2.0, FirstDifference("gradient", "blocks.0.attn_norm.bias", 1, 0.5)),
        ("parameter/final_norm.weight", 1 + 1e-7, FirstDifference("parameter", "final_norm.weight", 2, 1e-7)),
    ):
        tampered = original | {key: original[key] * factor}
        save_file(tampered, path, {"losses": "[1.0, 1.0]", "largest": "[1.0, 1.0]"})
        found = compared(ranks, selection, path)
        assert found is not None
        assert (found.what, found.name, found.step) == (expected.what, expected.name, expected.step)
        assert math.isclose(found.rel, expected.rel, rel_tol=1e-3)


def without_summing_partials(ranks, *args):
    with mock.patch.object(Replica, "_sum_partials", return_value=None):
        return compare(ranks, *args)


def every_micro_batch_the_same_masks(ranks, *args):
    real = Noise.__init__

    def one_sample(self, seed, step, sample_ids, **kwargs):
        real(self, seed, step, [sample_ids[0]] * len(sample_ids), **kwargs)

    with mock.patch.object(Noise, "__init__", one_sample):
        return compare(ranks, *args)


def without_documents(ranks, *args):
    real = Stepper.tensors
    with mock.patch.object(Stepper, "tensors", lambda *args: replace(real(*args), documents=None)):
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
        "cp=2,pp=2,schedule=zb_h1,accumulation=4,recompute=full",
        "dp_shard=2,ep=2,zero=1",
    ],
)
def test_products_in_8_bits_are_those_of_one_process_but_for_the_scales_of_parts(ranks, tmp_path, line):
    selection, path = plan_of(line, job=FP8), tmp_path / "record"
    (layout,) = selection.layouts
    case = layout.processes, selection.case(layout), selection.compared.vocab_size, 2, path
    recorded(ranks, selection, path)
    assert first_difference(ranks(compare, *case)[0], TOLERANCE) is None
    scales = max(ranks(with_scales, *case)[0].gradients[0].values())
    recorded(ranks, plan_of(line, job=JOB), path)
    rounding = max(ranks(compare, *case)[0].gradients[0].values())
    assert 0 < scales < 1e-3
    assert rounding > 1e-2


def with_scales(ranks, *args):
    """As products in 8 bits are trained with."""
    with mock.patch.object(Fp8Product, "on", lambda _, scaling, __: Fp8Product(scaling, emulated=True)):
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
    assert [list(step) for step in (*found.gradients, found.parameters)] == [list(parameter_shapes(JOB.model))] * 3
    with pytest.raises(ValueError, match=r"no rank has blocks\.1\.attn_norm\.weight, blocks\.1\.attn_norm\.bias, "):
        ranks(without_one_stage, 2, selection.case(layout), selection.compared.vocab_size, 2, path)


def refuses(ranks, *args):
    raise RunError("a rank's disk is full") if ranks.rank else ValueError("two lines\nhere")


def test_a_rank_that_raises_fails_its_case_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(verify, "compare", refuses)
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
    only_loss = Differences([0.0, 1e-3], [{"a": 0.0}, {"a": 0.0}], {"a": 0.0})
    assert first_difference(only_loss, TOLERANCE) == FirstDifference("loss", None, 2, 1e-3)


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
