"""ZeRO++: quantised messages and the second copy of the parameters."""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cost.exact_state import second_copy_bytes
from parallel.steps import micro_batches, steps
from parallel.test_composition import compare_and_check_bytes
from parallel.test_predicted_traffic import DEEP, DROPS, GPT, LLAMA, SWITCH, VOCAB, check, counted, job_of
from phalanx.comm.axis import Axis, Pending
from phalanx.config import layout_line
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.job_spec import rank_spec
from phalanx.cost.rank_memory import step_memory
from phalanx.cost.traffic import step_traffic
from phalanx.parallel import fsdp
from phalanx.parallel import mesh as meshes
from phalanx.parallel.compression import Codec, CodedShare, CodedSum, quantise
from phalanx.parallel.fsdp import ShardedReplica
from phalanx.parallel.scaled import ScaledProduct
from phalanx.partition import derived as batch
from phalanx.partition.cut import stages_of
from phalanx.partition.derived import BLOCK, LARGEST, SCALE_BYTES, Format, schedule_of
from phalanx.train.step import StepInputs, Stepper

EVERY = bool(os.environ.get("PHALANX_ZERO_PLUS_PLUS"))
"""Whether all layouts are tried: `make zero-plus-plus`."""


def some(cases: list[tuple[ModelConfig, str]], *few: int) -> pytest.MarkDecorator:
    """Parametrizes a test by all cases, or by a few of them."""
    chosen = cases if EVERY else [cases[number] for number in few]
    return pytest.mark.parametrize(("model", "line"), chosen, ids=[line for _, line in chosen])


# ZeRO++'s quantised messages: rounded within a stated bound, the same on every rank and every time.

WEIGHTS = [
    (GPT, "dp_shard=3,accumulation=2,quantise_weights=int8"),
    (LLAMA, "dp_shard=4,hpz=2,recompute=full,quantise_weights=int8"),
    (DROPS, "dp_shard=4,hpz=2,tiles=3,recompute=full,quantise_weights=int8"),
    (LLAMA, "dp_shard=2,tp=2,sp=true,quantise_weights=int8"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=zb_v,quantise_weights=int8"),
    (GPT, "dp_replicate=2,dp_shard=2,quantise_weights=int8"),
    (SWITCH, "dp_shard=8,ep=2,hpz=4,quantise_weights=int8"),
]


@st.composite
def numbers(draw) -> Tensor:
    """Rows of numbers of any type whose blocks differ in size by many orders of magnitude."""
    rows, elements = draw(st.integers(1, 3)), draw(st.integers(1, 3 * BLOCK))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, elements, generator=generator, dtype=torch.float64)
    x *= 10.0 ** draw(st.integers(-30, 30))
    x[:, draw(st.integers(0, elements - 1)) :] *= 10.0 ** draw(st.integers(-6, 6))
    return x.to(draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])))


@given(numbers(), st.sampled_from(["int8", "int4"]))
def test_an_element_is_off_by_half_a_step_of_its_block_at_most(x: Tensor, format: Format):
    codec = Codec([CodedShare(x.shape[1], format)])
    wire, found = codec.encode(x), torch.empty_like(x)
    assert wire.shape == (len(x), codec.row_bytes(x.dtype))
    codec.decode(wire, found)
    scales = quantise(x, format)[1].repeat_interleave(BLOCK, 1)[:, : x.shape[1]].double()
    # The result is rounded to its own type, and the quotient to fp32.
    rounding = x.double().abs() * torch.finfo(x.dtype).eps + scales * LARGEST[format] * 2**-22
    assert ((found.double() - x.double()).abs() <= scales / 2 + rounding).all()


@given(numbers(), st.sampled_from(["int8", "int4"]), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_what_is_not_finite_stays_so(x: Tensor, format: Format, bad: float):
    codec, found, place = Codec([CodedShare(x.shape[1], format)]), torch.empty_like(x), x.shape[1] // 2
    x[0, place] = bad
    codec.decode(codec.encode(x), found)
    assert not found[0, place // BLOCK * BLOCK : (place // BLOCK + 1) * BLOCK].isfinite().any()


def test_vectors_travel_as_they_are():
    codec = Codec([CodedShare(300, "int8"), CodedShare(5, "none"), CodedShare(0, "int8"), CodedShare(7, "int4")])
    x = torch.randn(2, 312)
    found = torch.empty_like(x)
    codec.decode(codec.encode(x), found)
    assert torch.equal(found[:, 300:305], x[:, 300:305])
    assert codec.row_bytes(x.dtype) == (300 + 2 * 4) + 5 * 4 + (4 + 4)


@some(WEIGHTS, 1, 3)
def test_every_byte(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line)))


@pytest.mark.parametrize("precision", ["bf16", *(["fp64"] if EVERY else [])])
def test_every_byte_in_other_precisions(ranks, precision):
    check(ranks, job_of(LLAMA, layout_line.parse("dp_shard=4,hpz=2,quantise_weights=int8"), precision))


def test_steps_stay_close_and_repeat(ranks):
    """The second copy of codes brings the same numbers as the first gather; a run repeats to the bit."""
    line = "dp_shard=4,quantise_weights=int8"
    exact = ranks(steps, 1, job_64(LLAMA, Layout()), VOCAB)[0]
    first, again, near = (
        ranks(steps, 4, job_64(LLAMA, layout_line.parse(each)), VOCAB) for each in (line, line, f"{line},hpz=2")
    )
    for results in (again, near):
        assert results[0][0] == first[0][0]
        assert all(torch.equal(results[0][2][name], value) for name, value in first[0][2].items())
    assert all(result[0] == first[0][0] for result in first)
    assert first[0][0] != exact[0]
    for found, wanted in zip(first[0][0], exact[0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)


def test_memory_of_the_second_copy(ranks):
    job = job_of(LLAMA, layout_line.parse("dp_shard=4,hpz=2,quantise_weights=int8"))
    expected = second_copy_bytes(LLAMA, job.layout, vocab=VOCAB)
    assert (
        expected < second_copy_bytes(LLAMA, dataclasses.replace(job.layout, quantise_weights="none"), vocab=VOCAB) / 2
    )
    for most, left, _ in ranks(copied_bytes, 4, job):
        assert (most, left) == (expected, 0)


GRADIENTS = [
    (GPT, "dp_shard=3,accumulation=2,quantise_gradients=int8"),
    (LLAMA, "dp_shard=4,hpz=2,recompute=full,quantise_gradients=int4"),
    (GPT, "dp_shard=4,hpz=2,accumulation=2,accumulate=sharded,quantise_weights=int8,quantise_gradients=int4"),
    (LLAMA, "dp_shard=4,tp=2,sp=true,hpz=2,quantise_gradients=int8"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=zb_v,quantise_gradients=int4"),
    (GPT, "dp_replicate=2,dp_shard=4,hpz=2,quantise_gradients=int8"),
    (SWITCH, "dp_shard=8,ep=2,hpz=4,quantise_gradients=int8"),
    (SWITCH, "dp_shard=4,ep=2,hpz=2,quantise_gradients=int8"),
]


@some(GRADIENTS, 0, 2, 7)
def test_every_byte_of_gradients(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line)))


# Gathers in fp8: what is multiplied so travels so, and the products are those of numbers that were never sent.

FITTING = dataclasses.replace(LLAMA, d_model=32, n_heads=4, head_dim=8, d_ff=64)
ROUTED = dataclasses.replace(
    SWITCH, d_model=32, n_heads=4, head_dim=8, d_ff=64, moe=dataclasses.replace(SWITCH.moe, d_ff=32)
)
FP8 = [
    (FITTING, "dp_shard=3,accumulation=2,quantise_weights=fp8"),
    (dataclasses.replace(FITTING, d_ff=72), "dp_shard=2,tp=2,sp=true,recompute=full,quantise_weights=fp8"),
    (ROUTED, "dp_shard=4,ep=2,hpz=2,quantise_weights=fp8"),
    (dataclasses.replace(FITTING, n_layers=4), "dp_shard=2,pp=2,schedule=zb_v,accumulation=4,quantise_weights=fp8"),
    (FITTING, "dp_shard=4,hpz=2,tiles=2,recompute=full,quantise_weights=fp8,quantise_gradients=int8"),
    (ROUTED, "dp_shard=2,cp=2,quantise_weights=fp8"),
    (FITTING, "dp_replicate=2,dp_shard=2,accumulation=2,accumulate=sharded,reshard=false,quantise_weights=fp8"),
]


@some(FP8, 1, 3)
def test_every_byte_in_fp8(ranks, model, line):
    check(ranks, job_of(model, layout_line.parse(line), "fp8"))


def test_matrices_travel_in_half_the_bytes_with_a_scale_per_row(ranks):
    coded, plain = (
        ranks(counted, 2, job_of(FITTING, layout_line.parse(line), "fp8"))[0][0]["dp_shard"]
        for line in ("dp_shard=2,quantise_weights=fp8", "dp_shard=2")
    )
    matrices, rows = 2 * 32 * (2 * 32 + 2 * 16) + 6 * 32 * 64, 2 * (32 + 2 * 16 + 32) + 2 * (2 * 64 + 32)
    # Each is gathered twice, and half of it sent.
    rest = plain["all_gather"] - 2 * matrices
    assert coded["all_gather"] == rest + matrices + 4 * rows
    assert coded["reduce_scatter"] == plain["reduce_scatter"]


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "mxfp8"])
def test_what_was_rounded_for_the_way_is_rounded_to_itself(scaling):
    """With the scales of training, forward to the bit; backward but for elements far smaller than their row."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 96, generator=generator).bfloat16()
    codec, sent = Codec([CodedShare(weight.numel(), "fp8", 96)]), torch.empty(1, weight.numel(), dtype=weight.dtype)
    codec.decode(codec.encode(weight.view(1, -1)), sent)
    product, arrived = ScaledProduct(scaling, emulated=True), sent.view_as(weight)
    assert codec.row_bytes(weight.dtype) == weight.numel() + 48 * 4
    assert (arrived - weight).abs().max() > 0
    for x, of_sent, of_own in (
        (torch.randn(8, 96, generator=generator).bfloat16(), arrived, weight),
        (torch.randn(8, 48, generator=generator).bfloat16(), arrived.t(), weight.t()),
    ):
        assert torch.equal(product(x, of_sent), product(x, of_own))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_in_fp8(bad):
    x = torch.ones(1, 96)
    x[0, 40] = bad
    codec, found = Codec([CodedShare(96, "fp8", 32)]), torch.empty_like(x)
    codec.decode(codec.encode(x), found)
    assert not found[0, 32:64].isfinite().all()
    assert found[0, :32].eq(1).all()
    assert found[0, 64:].eq(1).all()


WIDE = dataclasses.replace(LLAMA, d_model=64, head_dim=16, d_ff=512, n_layers=3)
"""Every rank's share of a matrix consists of whole blocks of codes."""


def test_a_quarter_of_the_bytes_cross_between_nodes(ranks):
    """The paper's 3D to 0.75D for D bytes of parameters in bf16, with the bytes of the scales and of vectors."""
    plain, coded = (
        ranks(counted, 4, job_of(WIDE, layout_line.parse(line), "bf16"))[0][0]
        for line in ("dp_shard=4", "dp_shard=4,hpz=2,quantise_weights=int8,quantise_gradients=int4")
    )
    ring, across = 3 / 4, 1 / 2  # sent of a whole tensor by a ring over 4 ranks, and by one of two nodes
    whole = plain["dp_shard"]["reduce_scatter"] / ring
    vectors = (2 * WIDE.n_layers + 1) * WIDE.d_model * 2
    matrices, scale = whole - vectors, SCALE_BYTES / BLOCK / 2
    assert coded["dp_shard"] == {"all_gather": ring * (matrices * (1 / 2 + scale) + vectors)}
    # Both ranks of a node send to the other node.
    assert 2 * coded["hpz_across"]["all_to_all"] == across * (matrices * (1 / 4 + scale) + vectors)
    # Blocks are gathered twice, what is outside of them once.
    outside = 2 * 32 * WIDE.d_model * 2 + WIDE.d_model * 2
    assert plain["dp_shard"]["all_gather"] == ring * (2 * whole - outside)


def test_memory_of_gathers_in_fp8(ranks):
    """A second copy in fewer bytes, and the codes of a block on their way."""
    coded, plain = (
        job_of(WIDE, Layout(dp_shard=4, hpz=2, accumulation=2, quantise_weights=each), "fp8")
        for each in ("fp8", "none")
    )
    (most, left, _), (whole, _, _) = (ranks(copied_bytes, 4, each)[0] for each in (coded, plain))
    expected, without = (step_memory(rank_spec(each, VOCAB, "cpu"))[0].allocated for each in (coded, plain))
    block = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 512
    scales = WIDE.n_layers * (3 * 64 + 2 * 32 + 2 * 512) * SCALE_BYTES / 2  # of long rows they are nothing
    assert left == 0
    assert expected - without == pytest.approx(most - scales - whole + block, rel=0.01)


@pytest.mark.parametrize("format", ["int4", *(["int8"] if EVERY else [])])
def test_memory_of_codes_in_flight(ranks, format):
    """The largest group's codes, sent and arriving, take what the memory of a rank is predicted to have more."""
    plain, coded = (
        job_of(WIDE, Layout(dp_shard=4, hpz=2, accumulation=2, quantise_gradients=each)) for each in ("none", format)
    )
    expected, without = (step_memory(rank_spec(job, VOCAB, "cpu"))[0].allocated for job in (coded, plain))
    for found in ranks(in_flight, 4, coded):
        assert expected - without == pytest.approx(found, rel=0.01)


def in_flight(ranks, job: Job) -> int:
    """The most bytes of a group's codes on this rank, sent and arriving."""
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), VOCAB)
    sizes, exchange = [], CodedSum.exchange

    def noting(self: CodedSum, axis: Axis, sent: Tensor) -> tuple[Pending, Tensor]:
        pending, received = exchange(self, axis, sent)
        sizes.append(sent.nbytes + received.nbytes)
        return pending, received

    with mock.patch.object(CodedSum, "exchange", noting):
        batches, valid = micro_batches(job, 0, torch.distributed.get_rank(), VOCAB)
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
    return max(sizes)


def sum_of(ranks, layout: Layout, shares: list[int], format: Format, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a sum as codes, the exact one, and the bound of the error."""
    mesh = meshes.build(layout, "cpu")
    size, elements = layout.dp_shard, sum(shares)
    gradients = [_gradient(seed + rank, size * elements) for rank in range(size)]
    codec = Codec([CodedShare(share, format) for share in shares])
    part, rank = torch.empty(elements, dtype=torch.float64), mesh.axis("shard").rank
    coded = CodedSum(mesh.axis("shard"), mesh.axis("hpz"), mesh.axis("hpz_across"))
    coded.reduce_scatter(part, gradients[rank].clone(), codec).wait()
    mine = torch.stack([each.view(size, elements)[rank] for each in gradients])
    bound = sum(_half_steps(codec, row) for row in mine)
    nodes = mine.view(size // layout.hpz, layout.hpz, elements).sum(1)
    if layout.hpz > 1:
        # The sum of a node has the errors of its ranks already when it is rounded.
        bound = bound * (1 + 1 / (2 * LARGEST[format])) + sum(_half_steps(codec, row) for row in nodes)
    return part, mine.sum(0), bound


@pytest.mark.parametrize("line", ["dp_shard=3", "dp_shard=4,hpz=2"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_sums_of_codes_are_within_their_bound(ranks, line, format):
    layout = layout_line.parse(f"{line},quantise_gradients={format}")
    for part, exact, bound in ranks(sum_of, layout.dp_shard, layout, [700, 33], format, 5):
        assert ((part - exact).abs() <= bound * (1 + 1e-6)).all()
        assert (part != exact).any()


def _gradient(seed: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _half_steps(codec: Codec, row: Tensor) -> Tensor:
    """Half the scale of every element's block."""
    found = []
    for share, numbers in zip(codec.parts, row.split([share.elements for share in codec.parts]), strict=True):
        scales = quantise(numbers.view(1, -1), share.format)[1][0].double()
        found.append(scales.repeat_interleave(BLOCK)[: share.elements] / 2)
    return torch.cat(found)


# hpZ: a second copy of ZeRO-3's parameters inside a node changes which links carry gathers, and nothing else.

LAYOUTS = [
    (GPT, "dp_shard=4,hpz=2"),
    (GPT, "dp_shard=4,hpz=2,accumulation=3,accumulate=sharded,prefetch=0"),
    (LLAMA, "dp_shard=6,hpz=3,accumulation=2,recompute=full"),
    (DROPS, "dp_shard=4,hpz=2,tiles=3,recompute=full"),
    (GPT, "dp_replicate=2,dp_shard=4,hpz=2,accumulation=2"),
    (LLAMA, "dp_shard=2,cp=2,hpz=2"),
    (LLAMA, "dp_shard=4,tp=2,sp=true,hpz=2,recompute=selective"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=zb_v"),
    (DEEP, "dp_shard=4,pp=2,hpz=2,accumulation=4,schedule=interleaved_1f1b,recompute=full"),
    (SWITCH, "dp_shard=8,ep=2,hpz=4,accumulation=2"),
    (SWITCH, "dp_shard=4,ep=2,hpz=2"),
]


@some(LAYOUTS, 11)
def test_every_byte_of_the_second_copy(ranks, model, line):
    """Besides those that are compared together with the results."""
    check(ranks, job_of(model, layout_line.parse(line)))


def test_later_gathers_stay_in_the_node():
    """Only the first gather of a step leaves the node, however many micro-batches there are."""
    layout = layout_line.parse("dp_shard=4,accumulation=3")
    plain, near = (
        step_traffic(LLAMA, changed, batch.solve(24, changed), vocab=VOCAB)
        for changed in (layout, layout_line.parse(layout.line() + ",hpz=2"))
    )
    once = plain["dp_shard"]["reduce_scatter"]
    assert near["dp_shard"] == {"all_gather": once, "reduce_scatter": once}
    # A ring over 2 of 4 ranks sends (2-1)/2 of the bytes instead of (4-1)/4.
    assert near["hpz"]["all_gather"] == pytest.approx((plain["dp_shard"]["all_gather"] - once) * 2 / 3)


def job_64(model: ModelConfig, layout: Layout, sequences: int = 48 if EVERY else 12) -> Job:
    train = Train(global_batch=sequences, precision="fp64")
    return Job(model=model, layout=layout, train=train, optimizer=Optimizer(clip=0.5))


EXACT = [LAYOUTS[number] for number in (1, 2, 3, 4, 6, 9)] + [(LLAMA, "cp=4,hpz=2,accumulation=2")]


@some(EXACT, 0, 2, 6)
def test_equals_one_process(ranks, model, line):
    layout = layout_line.parse(line)
    expected = ranks(steps, 1, job_64(model, Layout()), VOCAB)[0]
    compare_and_check_bytes(ranks, job_64(model, layout), expected, vocab=VOCAB)


def copied_bytes(ranks, job: Job) -> tuple[int, int, int]:
    """The most bytes of second copies at a time on this rank in a step, those after it, and its pipeline rank."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    assert isinstance(stepper.replica, ShardedReplica)
    gathers = stepper.replica.gathers
    most, keep = 0, fsdp.Gather._arrived

    def held() -> int:
        return sum(each.copy.nbytes for each in gathers if each.copy is not None)

    def counting(self: fsdp.Gather, whole: Tensor, numbers: Tensor) -> None:
        nonlocal most
        keep(self, whole, numbers)
        most = max(most, held())

    fsdp.Gather._arrived = counting
    try:
        batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
        after = held()
        stepper.replica.loss(stepper.tensors(batches[0], 0, validates=True))
    finally:
        fsdp.Gather._arrived = keep
    return most, after + held(), mesh.coordinates["pp"]


MEASURED = [LAYOUTS[number] for number in (1, 5, 6, 7, 10)]


@some(MEASURED, 0)
def test_memory(ranks, model, line):
    """The second copy is as large as predicted, and gone when the optimizer begins."""
    job = job_of(model, layout_line.parse(line))
    layout, stages = job.layout, [[range(model.n_layers)]] * job.layout.pp
    if layout.pp > 1:
        schedule = schedule_of(layout, layout.accumulation)
        cut = stages_of(model, layout, schedule.stages, VOCAB)
        stages = [[cut[stage] for stage in schedule.stages_on(rank)] for rank in range(layout.pp)]
    for most, left, pp in ranks(copied_bytes, layout.world, job):
        assert most == second_copy_bytes(model, layout, vocab=VOCAB, stages=stages[pp])
        assert left == 0
