"""Planted bugs: the module, the direction and the collective that `phalanx verify` names."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

from covering import also_whole
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.presets import PRESETS
from phalanx.model.transformer import Transformer
from phalanx.parallel import expert, tensor
from phalanx.parallel.data import Replica
from phalanx.parallel.zero import BucketReplica
from phalanx.train.step import Stepper
from phalanx.verify import cases
from phalanx.verify import run as verify
from phalanx.verify.locate import Divergence, explained, locate
from phalanx.verify.measure import TOLERANCE, compare
from phalanx.verify.select import select
from phalanx.verify.trace import trace_step

MODEL = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    positions="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    seq_len=16,
    vocab_size=11,
)
JOB = Job(model=MODEL)
EXPERTS = "dp_shard=2,ep=2,zero=1"
MIXTURE = replace(JOB, model=replace(MODEL, moe=MoE(n_experts=4, top_k=2)))


def without_the_sum_after_attention(ranks, *args):
    """Tensor parallelism: the product of attention's output is not summed."""
    with mock.patch.object(tensor._Rows, "forward", staticmethod(_rows_without_sum)):
        return trace_step(ranks, *args)


def _rows_without_sum(ctx, x, parallel, multiply, owner, weight):
    ctx.parallel, ctx.multiply, ctx.owner = parallel, multiply, owner
    ctx.save_for_backward(x, weight)
    y = multiply(x, weight)
    if weight.shape[1] != MODEL.d_model // 2:  # the MLP's
        parallel.tp.all_reduce(y).wait()
    return y


def with_positions_from_0(ranks, *args):
    """Context parallelism: every rank turns its queries and keys as if its tokens were the first ones."""
    real = Transformer.through

    def through(self, layers, x, positions, *others, **more):
        return real(self, layers, x, torch.arange(len(positions)), *others, **more)

    with mock.patch.object(Transformer, "through", through):
        return trace_step(ranks, *args)


def without_the_last_micro_batch(ranks, *args):
    """Accumulation: the last micro-batch is left out."""
    real = Replica.gradients
    with mock.patch.object(Replica, "gradients", lambda self, micros, factor: real(self, micros[:-1], factor)):
        return trace_step(ranks, *args)


def with_experts_divided_twice(ranks, *args):
    """Expert parallelism: the gradients of experts are divided by the ranks that hold different ones."""
    real = Replica.finish

    def finish(self):
        real(self)
        for shard in self.shards:
            if ".experts." in shard.whole_name:
                shard.gradient /= 2

    with mock.patch.object(BucketReplica, "finish", finish):
        return trace_step(ranks, *args)


def without_the_sum_of_norms(ranks, *args):
    """Sequence parallelism: the gradients of norms are those of each rank's own tokens."""
    with mock.patch.object(Replica, "_sum_partials", return_value=None):
        return trace_step(ranks, *args)


def with_another_slice_of_wk(ranks, *args):
    """Tensor parallelism: both ranks hold the first rows of the keys' matrix."""
    real = tensor.slice_of

    def slice_of(name, *others, **more):
        found = real(name, *others, **more)
        return replace(found, start=0) if name.endswith("attn.wk.weight") else found

    with mock.patch.object(tensor, "slice_of", slice_of):
        return trace_step(ranks, *args)


def with_the_loss_scaled_by_own_tokens(ranks, *args):
    """Data parallelism: each rank divides its loss by its own tokens, not by all."""
    real = Stepper.factor
    with mock.patch.object(Stepper, "factor", lambda self, tokens, micros: real(self, tokens / 2, micros)):
        return trace_step(ranks, *args)


def without_the_sum_before_the_mlp(ranks, *args):
    """Tensor parallelism: the gradient of the columns' input is not summed."""

    def backward(ctx, *grads):
        with mock.patch.object(tensor.TensorParallel, "start_reduce", lambda self, x: (x, mock.Mock())):
            return columns(ctx, *grads)

    columns = tensor._Columns.backward
    with mock.patch.object(tensor._Columns, "backward", staticmethod(backward)):
        return trace_step(ranks, *args)


def with_rows_in_another_order(ranks, *args):
    """Expert parallelism: what comes back is not in the order of what was sent."""
    real = expert.transpose_blocks
    calls = iter(range(10**6))

    def transpose(rows, blocks):
        return real(rows, blocks) if next(calls) % 2 == 0 else real(rows, blocks).flip(0)

    with mock.patch.object(expert, "transpose_blocks", transpose):
        return trace_step(ranks, *args)


def with_stale_parameters(ranks, *args):
    """ZeRO-1: the updated parameters are not gathered."""
    real = BucketReplica.publish
    with mock.patch.object(
        BucketReplica, "publish", lambda self, frozen=False: real(self, frozen=True) if frozen else None
    ):
        return trace_step(ranks, *args)


def found_in(ranks, job: Job, line: str, bug, step: int = 1) -> Divergence:
    selection = select(job, lines=[line])
    (layout,) = selection.layouts
    found = locate(ranks, selection, layout, step, bug)
    assert found is not None
    return found


BUGS = [
    (JOB, "tp=2", without_the_sum_after_attention, ("forward", "blocks.0.attn.wo"), (0, 1), "tp"),
    (JOB, "cp=2", with_positions_from_0, ("forward", "blocks.0.attn.core.q"), (0, 1), None),
    (JOB, "dp_replicate=2,accumulation=2", without_the_last_micro_batch, ("forward", "embed"), (0, 1), None),
    (MIXTURE, EXPERTS, with_experts_divided_twice, ("gradient", "blocks.0.moe.experts.up.weight"), (0, 1), "ep"),
    (JOB, "tp=2,sp=true", without_the_sum_of_norms, ("gradient", "blocks.0.attn_norm.weight"), (0, 1), "tp"),
    (JOB, "tp=2", with_another_slice_of_wk, ("forward", "blocks.0.attn.wk"), (1,), None),
    (JOB, "dp_replicate=2", with_the_loss_scaled_by_own_tokens, ("backward", "loss"), (0, 1), "dp_replicate"),
    (JOB, "tp=2", without_the_sum_before_the_mlp, ("backward", "blocks.1.mlp_norm"), (0, 1), "tp"),
    (MIXTURE, EXPERTS, with_rows_in_another_order, ("forward", "blocks.0.moe.experts"), (0, 1), None),
]
LOOKS = {
    without_the_sum_after_attention: "add up to the expected ones: they are not summed over tp",
    with_positions_from_0: "tokens 12–15, all heads of rank 0; tokens 4–11, all heads of rank 1; every "
    "head has the right length: it is turned to another position",
    without_the_last_micro_batch: "no rank computed it for rows 2–3, 6–7",
    with_experts_divided_twice: "0.5 × the expected values: divided by the size of ep once too often?",
    without_the_sum_of_norms: "not summed over tp; so do 4 other parameters",
    with_another_slice_of_wk: "its weight differs from one process's on rank 1; they are the whole's columns 0–3",
    with_the_loss_scaled_by_own_tokens: "2 × the expected values: summed twice, or not divided, over dp_replicate?",
    without_the_sum_before_the_mlp: "not summed over tp",
    with_rows_in_another_order: "tokens 0–15, experts 0–1 of rank 0; all tokens, experts 0–3 of rank 1",
}


@pytest.mark.parametrize(("job", "line", "bug", "place", "of_ranks", "axis"), BUGS)
def test_a_planted_bug_is_located(ranks, job, line, bug, place, of_ranks, axis):
    found = found_in(ranks, job, line, bug)
    assert ((found.direction, found.module), found.ranks, found.axis) == (place, of_ranks, axis)
    assert LOOKS[bug] in found.what
    assert found.rel > TOLERANCE
    if bug is without_the_sum_after_attention:
        assert found.between == ()
        assert found.collective == "tp all_reduce of 16.0KiB", "the embedding's: the one after attention is missing"
    if bug is with_rows_in_another_order:
        assert [call.split(" of ")[0] for call in found.between] == ["ep all_gather", "ep all_to_all", "ep all_to_all"]
        assert explained(found)[-1].startswith("collectives since the module before, on rank 0: ep all_gather of 64B,")


def test_an_update_that_does_not_arrive_shows_in_the_next_step(ranks):
    found = found_in(ranks, JOB, "dp_shard=2,zero=1", with_stale_parameters, 2)
    assert (found.direction, found.module, found.ranks) == ("forward", "embed", (0,))
    assert "its weight differs from one process's on rank 0: the update of step 1 has not reached it" in found.what


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (JOB, "tp=2,sp=true,pp=2,schedule=zb_h1,accumulation=4,recompute=full"),
        (JOB, "cp=4,cp_ulysses=2,loss_chunk=24"),
        *also_whole(
            (JOB, "cp=4,cp_ulysses=2,dp_shard=2,loss_chunk=24"),
            (Job(model=PRESETS["deepseek-v3"]), "dp_shard=2,ep=2,tp=2,sp=true"),
        ),
        (MIXTURE, "dp_shard=2,tp=2,ep=2,zero=2"),
        (MIXTURE, "cp=2,pp=2,ep=2,schedule=dualpipe"),
        (replace(JOB, model=PRESETS["pythia-70m"]), "tp=2,sp=true"),
        (Job(model=PRESETS["deepseek-v3"]), "dp_shard=2,tp=2,ep=4,etp=1,sp=true"),
    ],
)
def test_nothing_is_located_in_a_layout_that_is_equal(ranks, job, line):
    selection = select(job, lines=[line])
    (layout,) = selection.layouts
    assert locate(ranks, selection, layout, 1) is None


def test_what_is_not_compared_is_said(ranks):
    found = found_in(ranks, JOB, "tp=2,loss_chunk=24", without_the_sum_after_attention)
    assert "no rank has the output of head as a tensor of its own" in found.unknown


def test_the_report_names_the_module_and_draws_it(monkeypatch):
    monkeypatch.setattr(cases, "compare", compared_without_the_sum)
    monkeypatch.setattr(verify, "trace_step", without_the_sum_after_attention)
    report = verify.run(select(JOB, lines=["tp=2"]), 1, lambda case: None, lambda layout: None)
    (case,) = report.as_dict()["cases"]
    assert case["divergence"]["module"] == "blocks.0.attn.wo"
    assert case["divergence"]["table"]["forward"]["blocks.0.attn.core"] == [pytest.approx(0.0, abs=TOLERANCE)] * 2
    json.dumps(case, allow_nan=False)
    assert "step 1: blocks.0.attn.wo is the first module whose output differs\n" in report.text()
    drawn = verify.picture(report)
    assert drawn is not None
    assert drawn.count("class='first'") == 1
    assert "<title>blocks.0.attn.wo, forward, rank 1: " in drawn


def compared_without_the_sum(ranks, *args):
    with mock.patch.object(tensor._Rows, "forward", staticmethod(_rows_without_sum)):
        return compare(ranks, *args)
