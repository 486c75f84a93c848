"""Whole runs on tiny models: the same curve on any layout, exact resuming, clean ends, and single steps."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.contents import require_same_bits
from covering import also_whole, each_technique
from parallel.steps import micro_batches
from phalanx.cli.train import _text as text_of
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import CheckpointError, JobError, NotFiniteError
from phalanx.launch.ranks import SINGLE
from phalanx.parallel.mesh import build
from phalanx.parallel.parameter_shards import wholes
from phalanx.partition.ramp import ramp_of
from phalanx.train import loop
from phalanx.train.learning_rate import at_step, end_of, peak, resumed_end
from phalanx.train.metrics import Meter, line
from phalanx.train.requests import Milestones, StopRequest
from phalanx.train.step import StepInputs, Stepper
from train.runs import change, losses, moves_between, resumes_bit_by_bit, rows, stop, train, weights

# Whole runs on tiny models: the same curve on any layout, exact resuming, and clean ends.

LAYOUTS = [
    Layout(accumulation=3),
    Layout(dp_replicate=2, micro_batch=2),
    Layout(dp_replicate=3),
    Layout(dp_replicate=4, accumulation=3),
    Layout(dp_replicate=2, data_parallel="threads"),
    Layout(dp_replicate=2, recompute="full", accumulation=3),
    Layout(recompute="selective", loss_chunk=7),
    Layout(dp_replicate=2, recompute="full", loss_chunk=64),
    Layout(dp_shard=2, zero=1, accumulation=3),
    Layout(dp_shard=2, zero=2, bucket_mb=0.005, accumulation=3, accumulate="sharded"),
    Layout(dp_shard=2, zero=3, accumulation=2),
    Layout(dp_shard=4, zero=3, reshard=False, accumulation=3, accumulate="sharded"),
    Layout(dp_replicate=2, dp_shard=2, zero=2, bucket_mb=0.005),
    Layout(dp_replicate=2, dp_shard=2, zero=3),
    Layout(tp=2, accumulation=2),
    Layout(tp=2, sp=True, sp_regather=True, loss_chunk=50),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, accumulation=2, recompute="full"),
    Layout(dp_shard=2, tp=2, zero=1),
    Layout(pp=2, accumulation=3),
    Layout(dp_shard=2, pp=2, zero=2, schedule="zb_h1", accumulation=3),
    Layout(tp=2, pp=2, sp=True, schedule="dualpipe", accumulation=2),
    Layout(pp=2, schedule="terapipe", pp_slices=4, accumulation=2),
    Layout(cp=2, zero=1),
    Layout(cp=4, cp_ulysses=2, accumulation=3),
    Layout(cp=2, pp=2, schedule="terapipe", pp_slices=2, accumulation=2),
]
SHARDED = [
    Layout(dp_shard=2, zero=1, bucket_mb=0.01),
    Layout(dp_shard=2, zero=2, bucket_mb=0.01),
    Layout(dp_shard=2, zero=3),
    Layout(tp=2, sp=True),
    Layout(dp_shard=2, tp=2, zero=3),
]
"""One of every kind of sharding: their runs stop, resume and fail like any other."""
CODES = Layout(dp_shard=4, hpz=2, quantise_weights="int8", quantise_gradients="int4")
"""ZeRO++ with quantised messages."""


def test_the_loss_curve_does_not_depend_on_the_layout(ranks, job):
    job = change(change(job, "model", dropout=0.2), "train", steps=2)
    ranks(train, 1, job)
    expected = [row["loss"] for row in rows(job, "step")]
    assert len(expected) == 2
    for number, (layout,) in enumerate(each_technique(zip(LAYOUTS))):
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"layout{number}")
        other = change(other, "guard", every=1)
        summaries = ranks(train, layout.processes, other)
        assert not rows(other, "guard"), "replicas have the same bits"
        assert [row["loss"] for row in rows(other, "step")] == pytest.approx(expected, rel=1e-9)
        assert len({summary["val_loss"] for summary in summaries}) == 1
        assert summaries[0]["val_loss"] == pytest.approx(rows(job, "validation")[-1]["val_loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(), "fp64"),
        *((layout, "fp32") for layout in (SHARDED[0], SHARDED[2])),
        (SHARDED[-1], "bf16"),
        (Layout(dp_shard=2, pp=2, schedule="dualpipe", accumulation=2), "bf16"),
        (Layout(dp_replicate=2, dp_shard=2, compression="powersgd", compression_rank=1, compression_start=2), "fp32"),
        *also_whole(
            (Layout(dp_replicate=3, bucket_mb=0.01), "fp32"),
            (SHARDED[1], "fp32"),
            (SHARDED[3], "fp32"),
            (CODES, "fp32"),  # they carry nothing from one step to the next
            (Layout(pp=2, schedule="zb_h1", accumulation=3), "fp32"),
            (Layout(dp_replicate=2, pp=2, accumulation=2, compression="powersgd", compression_rank=2), "bf16"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_stopping_and_resuming_gives_the_same_bits_as_an_unbroken_run(ranks, job, layout, precision):
    job = change(change(job, "train", precision=precision), "model", dropout=0.1)
    resumes_bit_by_bit(ranks, replace(job, layout=layout), *((2, 3) if layout.world == 1 else (3,)))


MOVES = [
    (Layout(tp=2), Layout(dp_shard=3, zero=2, bucket_mb=0.01), Layout(dp_shard=2, tp=2)),
    (Layout(pp=4, accumulation=4), Layout(pp=2, schedule="zb_v", accumulation=4), Layout(tp=2)),
    (Layout(), Layout(pp=2, dp_shard=2, zero=1, schedule="dualpipe", accumulation=2), Layout(pp=3, accumulation=3)),
    *also_whole(
        (Layout(), Layout(dp_shard=4, hpz=2)),  # second copies, which no checkpoint has
        (Layout(dp_shard=2, zero=3), Layout(tp=2, sp=True), Layout()),
        (Layout(dp_replicate=3), Layout(dp_shard=2, tp=2, sp=True, zero=1), Layout(dp_replicate=2, dp_shard=2)),
        (Layout(dp_shard=4, hpz=2), Layout(dp_shard=2, tp=2), Layout(dp_shard=4, hpz=4)),
    ),
]


@pytest.mark.parametrize("layouts", MOVES, ids=lambda layouts: " then ".join(each.line() for each in layouts))
def test_resuming_on_another_layout_continues_the_same_curve(ranks, job, layouts):
    """A checkpoint holds whole tensors: a run may go on under any layout, and back."""
    if any(layout.pp > 1 for layout in layouts):
        job = change(job, "model", n_layers=4)  # for two stages on each of two ranks
    moves_between(ranks, job, layouts)


def warned(ranks, job: Job) -> list[str]:
    """Trains, and returns what was warned of."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("phalanx").addHandler(handler)
    try:
        train(ranks, job)
    finally:
        logging.getLogger("phalanx").removeHandler(handler)
    return found


def test_error_feedback_begins_anew_in_another_layout_which_is_said(ranks, job):
    layout = Layout(dp_replicate=2, compression="powersgd", compression_rank=1)
    job = replace(job, layout=layout)
    stop(ranks, job, 3)
    moved = replace(job, layout=replace(layout, compression_rank=2))
    assert {"powersgd/rank0", "powersgd/rank1"} <= weights(job).keys()
    first, second = ranks(warned, 2, moved)
    assert any("the error feedback of checkpoint" in line and "begins anew" in line for line in first)
    assert not second
    assert weights(moved)["powersgd/rank0"].numel() > 0


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout(dp_replicate=2), Layout(pp=2, micro_batch=1), Layout(cp=2, accumulation=2)),
        *also_whole((Layout(), Layout(dp_shard=2, tp=2, sp=True), Layout(pp=2, schedule="zb_h1", micro_batch=1))),
    ],
    ids=lambda layouts: " then ".join(each.line() for each in layouts),
)
def test_ramps_go_on_in_any_layout(ranks, job, layouts):
    """The layout changes within both ramps, and after them."""
    job = change(change(job, "train", batch_ramp="3*4+1*8", seq_ramp="1*4+4*8"), "model", dropout=0.1)
    job = change(job, "data", readers=1)
    moves_between(ranks, job, layouts)
    sizes, (start, *_) = [4, 4, 4, 8, 12, 12], rows(job, "start")
    assert start["step"] == 0
    steps = rows(job, "step")
    assert [row["tps_total"] * row["step_time_s"] / 16 for row in steps] == pytest.approx(sizes)
    assert ramp_of(job).samples(6) == sum(sizes)


def test_the_loss_falls_on_text(ranks, job, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    data = dataclasses.replace(job.data, corpus="text", path=str(tmp_path / "text.txt"))
    job = change(change(dataclasses.replace(job, data=data), "train", steps=40), "run", name="text")
    ranks(train, 1, job)
    found = losses(job)
    assert found[0] == pytest.approx(math.log(10), rel=0.1)
    assert found[-1] < 1.0


@pytest.mark.parametrize(
    ("precision", "gradients", "layouts"),
    [
        ("bf16", "same", [Layout(), SHARDED[-1], *also_whole(*SHARDED[:-1])]),
        ("bf16", "fp32", [Layout(dp_replicate=2), SHARDED[1], *also_whole(SHARDED[-1])]),
        ("fp16", "same", [SHARDED[0], SHARDED[2], *also_whole(Layout(dp_replicate=2))]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_half_precision_trains(ranks, job, precision, gradients, layouts):
    full = change(change(job, "train", precision="fp32"), "run", name="full")
    ranks(train, 1, full)
    half = change(change(job, "train", precision=precision, gradients=gradients), "checkpoint", every=3)
    for number, layout in enumerate(layouts):
        job = change(dataclasses.replace(half, layout=layout), "run", name=f"half{number}")
        ranks(train, layout.processes, job)
        assert losses(job) == pytest.approx(losses(full), rel=2e-2)
        found = weights(job)
        assert found["embed.weight"].dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
        assert found["master/embed.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "layout", [Layout(), SHARDED[-1], *also_whole(Layout(dp_replicate=2), SHARDED[1])], ids=Layout.line
)
def test_a_loss_that_is_not_finite_stops_before_the_optimizer_writes_it(ranks, job, layout):
    job, world = dataclasses.replace(change(job, "checkpoint", every=2), layout=layout), layout.processes
    stop(ranks, job, 3)
    before = weights(job)
    messages = ranks(poisoned, world, job)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 4: loss nan, gradient norm nan, first in embed.weight (samples 36 to 47).")
    after = weights(job)
    assert all(torch.equal(before[name], after[name]) for name in before)


def poisoned(ranks, job):
    """The message with which a run ends, one of whose ranks meets a NaN in its first micro-batch."""
    stop = StopRequest()
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), stop)
    real = trainer.stepper.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        return real(micro, factor * (math.nan if ranks.rank == 0 else 1), last=last) * math.nan

    trainer.stepper.replica.forward_backward = forward_backward
    with pytest.raises(NotFiniteError) as caught:
        trainer.run()
    return str(caught.value)


@pytest.mark.parametrize("layout", [Layout(), SHARDED[0], SHARDED[2], *also_whole(SHARDED[3])], ids=Layout.line)
def test_fp16_overflow_skips_the_step_and_goes_on(ranks, job, layout):
    job = change(change(job, "train", precision="fp16", steps=3), "optimizer", lr=1e-3)
    job = dataclasses.replace(job, layout=layout)
    assert ranks(overflowing, layout.processes, job) == [2.0**15] * layout.processes


def overflowing(ranks, job):
    trainer = loop.Trainer(job, ranks, torch.device("cpu"), StopRequest())
    real = trainer.stepper.replica.forward_backward

    def forward_backward(micro, factor, *, last):
        overflows = trainer.state.step == 1 and ranks.rank == 0
        return real(micro, factor * (math.inf if overflows else 1), last=last)

    trainer.stepper.replica.forward_backward = forward_backward
    trainer.run()
    assert trainer.stepper.optimizer.updates == 2
    return trainer.stepper.loss_scale.value


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(ranks, job):
    ranks(train, 1, job)
    other = change(change(job, "model", n_layers=3), "train", seed=7, steps=9)
    with pytest.raises(JobError) as caught:
        ranks(train, 1, other)
    assert "model.n_layers: 2 there, 3 here" in str(caught.value)
    assert "train.seed: 1337 there, 7 here" in str(caught.value)
    assert "--fresh starts over" in str(caught.value)


def test_a_corrupt_newest_checkpoint_gives_way_to_the_one_before(ranks, job):
    job = change(job, "checkpoint", every=2)
    two = dataclasses.replace(job, layout=Layout(dp_replicate=2))
    stop(ranks, two, 4)
    root = Path(job.run.dir) / "run" / "checkpoints"
    with (root / "step-000004" / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    ranks(train, 2, two)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 4, 3, 4, 5, 6]
    for path in root.glob("*/rank-*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        ranks(train, 2, two)


def test_a_rank_that_is_restarted_after_the_last_checkpoint_takes_no_step(ranks, job):
    first = ranks(train, 1, job)[0]
    again = ranks(train, 1, job)[0]
    assert (again["step"], again["loss"], again["val_loss"]) == (first["step"], None, first["val_loss"])
    assert len(losses(job)) == first["step"]
    assert f"in {first['step']} steps\n" in text_of({**again, "sample": ""})


def test_a_job_for_more_processes_than_there_are_is_refused(job):
    with pytest.raises(JobError, match="needs 2 processes, but 1 were started"):
        train(SINGLE, dataclasses.replace(job, layout=Layout(dp_replicate=2)))


# One step on every kind of layout: in which precision gradients are summed, and who is named where one is bad.

VOCAB = 13
JOB = Job(
    model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=16),
    train=Train(steps=6, global_batch=12, precision="fp64"),
)


def with_layout(layout: Layout, **train) -> Job:
    return dataclasses.replace(JOB, layout=layout, train=dataclasses.replace(JOB.train, **train))


def summed_gradients(ranks, job: Job):
    """The dtype in which this rank gets its gradients, and on rank 0 all of them, whole, in fp64."""
    mesh = build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
    stepper.gradients(batches, 0, valid)
    shards = stepper.replica.shards
    found = {f.name: f.gradient for f in shards if f.gradient is not None}
    whole = wholes(shards, found, mesh, ranks.rank == 0)
    return found["embed.weight"].dtype, {name: tensor.double() for name, tensor in whole}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector, relative to its length."""
    square = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    return (square / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5


def test_gradients_of_half_precision_may_be_summed_in_fp32(ranks):
    """Each micro-batch's gradient is rounded to bf16 once; the sum of them is then that of fp32."""
    expected = ranks(summed_gradients, 1, with_layout(Layout(), precision="fp64"))[0][1]
    for spread in (Layout(dp_replicate=2), *SHARDED[:3]):
        layout = dataclasses.replace(spread, accumulation=6)
        errors = {}
        for gradients, dtype in (("fp32", torch.float32), ("same", torch.bfloat16)):
            half = with_layout(layout, precision="bf16", gradients=gradients)
            found = ranks(summed_gradients, layout.processes, half)
            # FSDP2 sums in fp32 too, and then rounds each sum once to the parameters' precision.
            assert {each for each, _ in found} == {
                torch.bfloat16 if layout.dp_shard > 1 and layout.zero == 3 else dtype
            }
            errors[gradients] = error(found[0][1], expected)
        assert errors["fp32"] < errors["same"] < 0.1, layout.line()


@pytest.mark.parametrize("layout", SHARDED, ids=Layout.line)
def test_the_first_bad_parameter_is_named_by_all_ranks_alike(ranks, layout):
    """One value of one rank's share turns bad: the others hold nothing that is."""
    for name in ("blocks.1.mlp.down.weight", "final_norm.bias"):
        messages = ranks(one_bad_value, layout.processes, with_layout(layout), name)
        assert len(set(messages)) == 1
        assert messages[0].startswith("step 1: loss 2.")
        assert messages[0].endswith(f"gradient norm inf, first in {name}")


def one_bad_value(ranks, job: Job, name: str) -> str:
    """The message with which a step ends, where the last rank that counts a share of `name` finds an infinite gradient.
    Checks that no rank's parameters were changed by it."""
    mesh = build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    shard = next(f for f in stepper.replica.shards if f.name == name)
    holders = torch.zeros(mesh.axis("world").size)
    holders[ranks.rank] = float(shard.value.numel() > 0 and shard.tensor_slice.first)
    mesh.axis("world").all_reduce(holders).wait()
    real = stepper.optimizer.square_norm

    def square_norm(loss_scale: float = 1.0) -> torch.Tensor:
        if ranks.rank == holders.nonzero().max().item():
            assert shard.gradient is not None
            shard.gradient.view(-1)[-1] = math.inf
        return real(loss_scale)

    stepper.optimizer.square_norm = square_norm
    before = [f.value.detach().clone() for f in stepper.replica.shards]
    batches, valid = micro_batches(job, 0, mesh.data_rank, VOCAB)
    with pytest.raises(NotFiniteError) as caught:
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
    for shard, value in zip(stepper.replica.shards, before, strict=True):
        assert torch.equal(shard.value, value)
    return str(caught.value)


# Step drivers and milestones: what is due after which step, and what each form of training yields.


@pytest.mark.parametrize(("done", "following"), [(0, 4), (3, 4), (4, 5), (5, 8), (9, 10), (10, 11)], ids=str)
def test_the_weights_are_next_needed_where_a_validation_or_checkpoint_is_due(done, following):
    milestones = Milestones(last=11, log_every=3, eval_every=4, save_every=5)
    assert milestones.next_needing_weights(done) == following
    assert milestones.needs_weights(following)
    assert not any(milestones.needs_weights(step) for step in range(done + 1, following))


def test_without_intervals_only_the_last_step_needs_the_weights():
    milestones = Milestones(last=7, log_every=0, eval_every=0, save_every=0)
    assert milestones.next_needing_weights(2) == 7
    assert [step for step in range(1, 8) if milestones.shows(step)] == [1]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2),
        Layout(pp=2, accumulation=3, schedule="pipedream"),
        Layout(dp_replicate=2, sync="asp"),
    ],
    ids=lambda layout: layout.line(),
)
def test_every_form_of_training_records_each_step_once_and_pauses_where_something_is_due(ranks, job, layout):
    job = change(change(dataclasses.replace(job, layout=layout), "train", eval_every=4), "checkpoint", every=3)
    summaries = ranks(train, 2, job)
    assert [row["step"] for row in rows(job, "step")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(job, "validation")] == [4, 6]
    assert {summary["step"] for summary in summaries} == {6}
    assert summaries[0]["loss"] == rows(job, "step")[-1]["loss"]


# Runs whose pipeline goes on from step to step: checkpoints, validation, stopping and NaN find it empty.

LAYOUT = Layout(pp=2, accumulation=3, schedule="pipedream")


@pytest.fixture
def streamed(job):
    job = change(change(job, "train", steps=9, eval_every=4), "checkpoint", every=5)
    return dataclasses.replace(change(job, "model", dropout=0.1), layout=LAYOUT)


def test_resuming_from_a_checkpoint_gives_the_same_bits_as_an_unbroken_run(ranks, streamed, tmp_path):
    ranks(train, 2, streamed)
    straight, curve = weights(streamed), losses(streamed)
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000009")
    (tmp_path / "runs" / "run" / "latest").unlink(missing_ok=True)
    ranks(train, 2, streamed)
    require_same_bits(weights(streamed), straight)
    assert losses(streamed) == [*curve, *curve[5:]], "the steps after the checkpoint were made twice"
    assert len(curve) == 9


def test_a_request_to_stop_lets_what_is_under_way_come_back(ranks, streamed):
    stop(ranks, change(streamed, "train", eval_every=0), 2, "at step 4 of 9, with a checkpoint")
    ranks(train, 2, change(streamed, "train", eval_every=0))
    assert len(losses(streamed)) == 9


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_written(ranks, streamed):
    with pytest.raises(NotFiniteError, match=r"step \d: loss .*, gradient norm .*, first in "):
        ranks(train, 2, change(streamed, "optimizer", lr=1e200, clip=0.0, warmup_steps=0))


# Throughput: per device and of the whole job, in the row and in the log line.


def test_throughput_is_per_device_and_of_the_whole_job() -> None:
    meter = Meter(positions_per_step=8000, flops_per_step=2e12, peak_flops=4e12, devices=8)
    row = meter.step(1)
    seconds = row["step_time_s"]
    assert row["tps"] == pytest.approx(1000 / seconds)
    assert row["tps_total"] == pytest.approx(8000 / seconds)
    assert row["mfu"] == pytest.approx(0.5 / seconds)
    assert set(meter.since_shown()) == {"tps", "tps_total", "tflops", "mfu"}


def test_the_log_line_is_as_the_documentation_shows_it() -> None:
    row = {"step": 10, "loss": 2.12341, "grad_norm": 0.512, "lr": 3e-4}
    row |= {"tps": 9999.0, "tps_total": 79992.0, "tflops": 1.234, "mfu": 0.401}
    assert line(row, int(12.3 * 2**30)) == (
        "step: 10  loss: 2.1234  grad_norm: 0.51  lr: 3.0e-04  tps: 9,999  tps_total: 79,992  tflops: 1.23  "
        "mfu: 40.1%  memory: 12.3GiB"
    )


def test_padding_counts_in_no_figure() -> None:
    tokens = {1: 2000, 2: 6000}
    meter = Meter(
        positions_per_step=8000, flops_per_step=2e12, peak_flops=4e12, devices=8, tokens_of=tokens.__getitem__
    )
    one, two = meter.step(1), meter.step(2)
    assert one["tps_total"] * one["step_time_s"] == pytest.approx(2000)
    assert two["mfu"] * two["step_time_s"] == pytest.approx(0.5 * 0.75)
    assert (one["padding"], two["padding"]) == (0.75, 0.25)
    both = meter.since_shown()
    assert both["padding"] == 0.5
    shown = line({"step": 2, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, **both}, 0)
    assert "  padding: 50.0%  tps: " in shown


# Learning-rate schedules: their ends, their shape, and scaling with the batch.

STEPS = 100
SCHEDULES = ["cosine", "linear", "wsd", "constant"]


def rates(optimizer: Optimizer) -> list[float]:
    return [at_step(step, optimizer, optimizer.decay_steps or STEPS, 16) for step in range(STEPS + 5)]


@given(st.sampled_from(SCHEDULES), st.integers(0, STEPS), st.integers(0, STEPS), st.floats(0, 1), st.floats(0, 1))
def test_rises_through_the_warm_up_then_never_rises(schedule, warmup, decay, floor, fraction):
    found = rates(
        Optimizer(
            lr=1e-3,
            schedule=schedule,
            warmup_steps=warmup,
            decay_steps=decay,
            min_lr_ratio=floor,
            decay_fraction=fraction,
        )
    )
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in found)
    assert all(a < b for a, b in pairwise(found[:warmup]))
    assert all(a >= b - 1e-18 for a, b in pairwise(found[warmup:]))
    if schedule != "constant":
        assert found[-1] == pytest.approx(1e-3 * floor)


def test_first_and_last_steps():
    found = rates(Optimizer(lr=1.0, warmup_steps=10, min_lr_ratio=0.1))
    assert found[0] == pytest.approx(0.1)
    assert found[9] == found[10] == 1.0
    assert found[55] == pytest.approx(0.55)  # half way down
    assert found[STEPS] == pytest.approx(0.1)


def test_wsd_holds_then_decays():
    found = rates(Optimizer(lr=1.0, schedule="wsd", decay_fraction=0.2, min_lr_ratio=0.0))
    assert set(found[:81]) == {1.0}
    assert found[90] == pytest.approx(0.5)


def test_scaling_rules():
    assert peak(Optimizer(lr=1.0, batch_scaling="linear", base_batch=4), 16) == 4.0
    assert peak(Optimizer(lr=1.0, batch_scaling="sqrt", base_batch=4), 16) == 2.0
    assert peak(Optimizer(lr=1.0), 16) == 1.0
    assert math.isclose(at_step(0, Optimizer(lr=1.0, batch_scaling="sqrt", base_batch=8), STEPS, 16), math.sqrt(2))


# A run that resumes with another length keeps the end of its learning rate's schedule, unless the job sets it.


def job(steps: int, **optimizer) -> Job:
    plain = Job()
    return replace(
        plain,
        train=replace(plain.train, steps=steps),
        optimizer=replace(plain.optimizer, lr=4e-3, warmup_steps=20, **optimizer),
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_longer_run_keeps_the_end_and_says_how_to_move_it(schedule):
    end = resumed_end(job(1000, schedule=schedule), job(500, schedule=schedule), 500, None)
    assert end.step == 500
    assert end.message.startswith("learning rate: 4.00e-04 at step 501: its schedule still ends at step 500, ")
    assert "not at train.steps=1000; optimizer.decay_steps=1000 moves the end, and the rate jumps to " in end.message


LONG, SHORT = job(1000), job(500)
OWN_END = job(1000, decay_steps=1000)
DOUBLE = replace(SHORT, optimizer=replace(SHORT.optimizer, lr=8e-3))
JUMP = "learning rate: jumps at step "


@pytest.mark.parametrize(
    ("now", "then", "step", "saved", "end", "message"),
    [
        (LONG, LONG, 700, 500, 500, None),
        (job(300), SHORT, 200, None, 500, None),
        (OWN_END, SHORT, 500, 500, 1000, f"{JUMP}501 from 4.00e-04 to 2.26e-03"),
        (OWN_END, OWN_END, 500, 1000, 1000, ""),
        (LONG, SHORT, 10, None, 1000, None),
        (job(1000, schedule="wsd"), job(500, schedule="wsd"), 300, None, 1000, ""),
        (SHORT, SHORT, 200, 500, 500, ""),
        (DOUBLE, SHORT, 100, 500, end_of(SHORT), f"{JUMP}101 from 3.76e-03 to 7.52e-03"),
    ],
    ids=["kept", "kept, shorter", "own", "own as before", "in the warm-up", "held", "the same", "another peak"],
)
def test_where_the_schedule_of_a_resumed_run_ends_and_what_is_said(now, then, step, saved, end, message):
    found = resumed_end(now, then, step, saved)
    assert found.step == end
    assert message is None or found.message == message


def test_a_run_goes_on_without_quantised_messages(ranks, job):
    """Its weights are the quantised run's, so that losses stay near those of one process, and are not equal to them."""
    ranks(train, 1, job)
    moved = change(job, "run", name="moved")
    stop(ranks, replace(moved, layout=CODES), 3)
    ranks(train, 2, replace(moved, layout=Layout(dp_shard=2)))
    assert losses(moved) == pytest.approx(losses(job), rel=1e-2)
    assert losses(moved) != losses(job)
