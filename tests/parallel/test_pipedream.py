"""A pipeline that goes on from step to step: its stale gradients are those that one process takes on purpose."""

import dataclasses

import pytest
import torch

from cost.exact_state import state_bytes
from parallel.stale import emulated, streamed
from parallel.steps import worst
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.parallel import mesh as meshes
from phalanx.parallel.pipeline import _split_by_batch, version
from phalanx.partition.cut import stages_of
from phalanx.schedule.generators import pipedream
from phalanx.train.step import Stepper
from train.measured_memory import state_memory

VOCAB = 13
GPT = ModelConfig(n_layers=4, d_model=24, n_heads=4, seq_len=8, bias=True, qkv_bias=True)
LLAMA = dataclasses.replace(
    GPT, norm="rmsnorm", positions="rope", activation="swiglu", bias=False, qkv_bias=False, tied=False, dropout=0.2
)
RUNS = [1, 2, 4]
"""Steps between two moments in which the pipeline is empty: alone, fill and drain, and with a steady state."""


def job(model: ModelConfig, layout: Layout, batch: int) -> Job:
    optimizer = Optimizer(eps=1e-8, clip=0.5)
    return Job(model=model, layout=layout, optimizer=optimizer, train=Train(precision="fp64", global_batch=batch))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, accumulation=2),
        Layout(pp=4, accumulation=5),
        Layout(pp=2, dp_replicate=2, accumulation=3, bucket_mb=0.01),
        Layout(pp=2, tp=2, sp=True, accumulation=3, recompute="full"),
    ],
    ids=Layout.line,
)
def test_steps_without_a_flush_equal_one_process_with_the_same_stale_weights(ranks, model, layout):
    layout = dataclasses.replace(layout, schedule="pipedream")
    batch = layout.accumulation * layout.data_ranks
    shown, parameters = ranks(streamed, layout.world, job(model, layout, batch), VOCAB, RUNS)[0]
    expected, theirs = ranks(emulated, 1, job(model, Layout(), batch), VOCAB, RUNS)[0]
    assert [number for number, _, _ in shown] == list(range(1, sum(RUNS) + 1))
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(shown, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert norm == pytest.approx(expected_norm, rel=1e-9)
    assert worst(parameters, theirs, floor=1e-2) < 1e-9


def test_gradients_are_stale_by_one_update_from_the_third_step_on():
    assert [version(batch) for batch in range(5)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("rank", range(4))
def test_a_run_is_made_of_a_leg_that_fills_steady_ones_and_one_that_drains(rank):
    fill, steady, drain = _split_by_batch(pipedream(4, 5, 3), rank)
    *_, same, last = _split_by_batch(pipedream(4, 5, 6), rank)
    assert (same, last) == (steady, drain)
    backward = [action.micro for action in steady if action.kind == "B"]
    assert backward == list(range(5)), "each leg brings back its own batch"
    ahead = 3 - rank
    assert max(action.micro for action in fill if action.kind == "F") == 4 + ahead
    assert all(action.micro < 5 for action in drain)


def held(ranks, job: Job):
    """Bytes of parameters on a rank, and of the formula."""
    mesh = meshes.build(job.layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), VOCAB)
    stages = [stages_of(job.model, job.layout, 2, VOCAB)[mesh.coordinates["pp"]]]
    formula = state_bytes(job.model, job.layout, job.train.precision, vocab=VOCAB, stages=stages)
    return state_memory(stepper.replica, stepper.optimizer).parameters, formula.parameters


def test_two_versions_of_the_weights_are_kept_besides_the_optimizers(ranks):
    for measured, formula in ranks(held, 2, job(GPT, Layout(pp=2, accumulation=2, schedule="pipedream"), 2)):
        assert measured == formula
