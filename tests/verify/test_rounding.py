"""`phalanx verify --precision`: what one process's reordered sums call normal, and what they do not."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch

from covering import also_whole
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.precision import Precision
from phalanx.model.layers import MLP
from phalanx.parallel.data import Replica
from phalanx.train.step import Stepper
from phalanx.verify import cases, rounding
from phalanx.verify.measure import Differences, compare, multiply_in_chunks
from phalanx.verify.rounding import MULTIPLE, Rounding, RoundingReport, run_in_precision
from phalanx.verify.select import select

MODEL = ModelConfig(n_layers=2, d_model=32, n_heads=2, seq_len=16, vocab_size=11)
JOB = Job(model=MODEL)


@pytest.fixture
def report_of(pool, monkeypatch):
    """`report_of(precision, *lines)`: the report on layouts, on the warm ranks."""
    monkeypatch.setattr(cases, "Pool", lambda *_: nullcontext(pool))

    def found(precision: Precision, *lines: str, job: Job = JOB) -> RoundingReport:
        selection = select(job, lines=lines, precision=precision)
        return run_in_precision(selection, 1, lambda case: None, lambda layout: None)

    return found


@pytest.mark.parametrize(
    ("precision", "lines"),
    [
        ("bf16", ("tp=2,sp=true", "cp=2,accumulation=2")),
        ("fp16", ("tp=2,sp=true", "pp=2,accumulation=4")),
        ("fp8", ("tp=2,sp=true", "pp=2,accumulation=4")),
        *also_whole(*((each, ("tp=2,sp=true", "cp=2,pp=2,accumulation=4")) for each in ("bf16", "fp16", "fp8"))),
    ],
)
def test_layouts_are_normal_in_every_precision(report_of, precision, lines):
    report = report_of(precision, *lines)
    assert report.ok, report.text()
    for case in report.cases:
        assert case.losses is not None
        (loss,) = case.losses
        assert 0 < loss.error <= loss.normal
        assert case.worst is not None
        assert 0 < case.worst.multiple <= MULTIPLE
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (found["precision"], found["multiple"], found["ok"]) == (precision, MULTIPLE, True)
    assert {"loss", "one_process", "float64", "difference", "error", "normal"} < set(found["cases"][0]["losses"][0])
    assert f"Normal for {precision}: 2 layouts (up to 4 x the largest error" in report.text()


def test_rows_of_experts_that_no_kernel_aligns_train_in_half_precision(report_of):
    """Their gradients have padding between them, and sharded weights one dimension."""
    job = replace(JOB, model=replace(MODEL, d_model=20, d_ff=20, moe=MoE(n_experts=4, top_k=2)))
    report = report_of("fp16", "dp_shard=2,pp=2,ep=2,schedule=zb_h1,accumulation=2", job=job)
    assert report.cases[0].error is None


def with_the_loss_scaled_by_own_tokens(ranks, *args, **options):
    real = Stepper.factor
    wrong = mock.patch.object(Stepper, "factor", lambda self, tokens, micros: real(self, tokens / 2, micros))
    return _only_on_several(wrong, ranks, *args, **options)


def without_the_sum_of_norms(ranks, *args, **options):
    return _only_on_several(mock.patch.object(Replica, "_sum_partials", return_value=None), ranks, *args, **options)


def _only_on_several(wrong, ranks, *args, **options):
    if ranks.world == 1:
        return compare(ranks, *args, **options)
    with wrong:
        return compare(ranks, *args, **options)


@pytest.mark.parametrize(
    ("line", "bug"),
    [("dp_replicate=2", with_the_loss_scaled_by_own_tokens), ("tp=2,sp=true", without_the_sum_of_norms)],
)
def test_a_planted_bug_is_not_normal(report_of, monkeypatch, line, bug):
    monkeypatch.setattr(cases, "compare", bug)
    report = report_of("bf16", line)
    (case,) = report.cases
    assert not case.ok
    assert case.worst is not None
    assert (case.worst.what, case.worst.multiple > MULTIPLE) == ("gradient", True)
    assert f"Not normal:\n  {case.layout}: the gradient of {case.worst.name} is" in report.text()


def test_the_rounding_is_the_largest_of_all_orders_and_of_no_tensor_far_below_the_others():
    one = Differences([1e-3], [{"a": 1e-3, "b": 1e-9, "c": 2e-3}], values=[2.0], all_parameters=1e-4)
    two = Differences([2e-3], [{"a": 3e-3, "b": 2e-9, "c": 1e-3}], values=[2.1], all_parameters=2e-4)
    found = Rounding.of([one, two])
    assert (found.loss, found.parameters, found.losses) == (2e-3, 2e-4, [2.0])
    assert found.gradients == {"a": 3e-3, "b": 2e-3, "c": 2e-3}


def test_what_is_no_number_is_not_normal():
    wrong = Differences([math.nan], [{"a": math.nan}], values=[math.nan], expected=[1.0], all_parameters=math.nan)
    normal = Rounding(1e-3, {"a": 1e-3}, 1e-3, [1.0])
    assert not all(each.error <= each.normal for each in rounding._losses(wrong, normal))
    assert all(each.multiple == math.inf for each in rounding._tensors(wrong, normal))


def test_products_in_chunks_are_the_same_products():
    torch.manual_seed(0)
    plain = MLP(replace(MODEL, d_ff=48)).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    expected = plain(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()])
    multiply_in_chunks(plain, 4, 1)
    found = plain(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), [x, *plain.parameters()]), wanted)
