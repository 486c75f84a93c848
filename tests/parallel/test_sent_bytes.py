"""What the ledger counts in real steps is what the formulas say: D are the parameters' bytes, P the ranks."""

import dataclasses
import itertools

import pytest
import torch

from parallel.steps import micro_batches
from phalanx.blocks.parameters import block_shapes, count
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.parallel import mesh as meshes
from phalanx.partition import derived as batch
from phalanx.schedule.catalogue import build
from phalanx.train.step import StepInputs, Stepper

SHAPE = ModelConfig(n_layers=3, d_model=24, n_heads=4, seq_len=12, vocab_size=24, tied=False)
"""Every size divides by 2, 3 and 4: no padding blurs the formulas."""
WIDTH = 8
"""Bytes of an element in float64."""
D = WIDTH * count(SHAPE)
BLOCKS = SHAPE.n_layers * WIDTH * sum(torch.Size(shape).numel() for shape in block_shapes(SHAPE, 0).values())
BATCH = 12
STATUS = 3 * 8
"""Loss, norm and stop, summed over all ranks once a step."""


def traffic(ranks, layout: Layout, shape: ModelConfig) -> dict[str, dict[str, float]]:
    """Bytes sent in one step, which is not the first."""
    vocab = shape.vocab_size
    job = Job(model=shape, layout=layout, train=Train(global_batch=BATCH, precision="fp64"))
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job, mesh, torch.device("cpu"), vocab)
    for step in range(2):
        mesh.ledger.clear()
        batches, valid = micro_batches(job, step, mesh.data_rank, vocab)
        stepper.step(StepInputs(batches, step, valid, 1e-2))
    return mesh.ledger.traffic()


def sent(ranks, layout: Layout, shape: ModelConfig = SHAPE) -> dict[str, dict[str, float]]:
    """The same on every rank, without what is no part of the formulas."""
    first, *others = ranks(traffic, layout.world, layout, shape)
    assert all(other == first for other in others)
    world = first.pop("world")
    assert world == {"all_reduce": pytest.approx(2 * STATUS * (layout.world - 1) / layout.world)}
    return first


def part(ranks: int) -> float:
    return (ranks - 1) / ranks


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_sends_2d_whatever_is_accumulated(ranks, size, accumulation):
    layout = Layout(dp_replicate=size, accumulation=accumulation if BATCH % (size * accumulation) == 0 else 1)
    assert sent(ranks, layout) == {"dp_replicate": {"all_reduce": pytest.approx(2 * D * part(size))}}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_send_2d_in_one_reduce_scatter_and_one_all_gather(ranks, size, zero):
    for accumulation in (1, 3 if size < 3 else 1):
        layout = Layout(dp_shard=size, zero=zero, accumulation=accumulation)
        expected = {"reduce_scatter": pytest.approx(D * part(size)), "all_gather": pytest.approx(D * part(size))}
        assert sent(ranks, layout) == {"dp_shard": expected}


@pytest.mark.parametrize("size", [2, 4])
def test_zero_3_sends_3d_but_keeps_what_the_backward_pass_needs_at_once(ranks, size):
    gathered = 2 * D - (D - BLOCKS)  # the head's group is not given up between forward and backward
    expected = {"reduce_scatter": pytest.approx(D * part(size)), "all_gather": pytest.approx(gathered * part(size))}
    assert sent(ranks, Layout(dp_shard=size)) == {"dp_shard": expected}


def test_zero_3_without_resharding_sends_2d(ranks):
    expected = {"reduce_scatter": pytest.approx(D / 2), "all_gather": pytest.approx(D / 2)}
    assert sent(ranks, Layout(dp_shard=2, reshard=False)) == {"dp_shard": expected}


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_does_not_multiply_gradient_traffic(ranks, accumulation):
    once = sent(ranks, Layout(dp_shard=2))["dp_shard"]
    local = sent(ranks, Layout(dp_shard=2, accumulation=accumulation))["dp_shard"]
    assert local["reduce_scatter"] == once["reduce_scatter"]
    for zero in (2, 3):
        layout = Layout(dp_shard=2, zero=zero, accumulation=accumulation, accumulate="sharded")
        assert sent(ranks, layout)["dp_shard"]["reduce_scatter"] == accumulation * once["reduce_scatter"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_reduces_shares_between_the_replicas(ranks, zero):
    found = sent(ranks, Layout(dp_replicate=2, dp_shard=2, zero=zero))
    assert found["dp_replicate"] == {"all_reduce": pytest.approx(2 * (D / 2) / 2)}
    assert found["dp_shard"]["reduce_scatter"] == pytest.approx(D / 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_tensor_parallel_sends_8bsh_a_block(ranks, size, accumulation):
    layout = Layout(tp=size, accumulation=accumulation)
    micro = batch.solve(BATCH, layout).micro_batch
    tokens = micro * SHAPE.seq_len
    stream = WIDTH * tokens * SHAPE.d_model
    blocks = SHAPE.n_layers * 8 * stream
    around = 4 * stream  # after the embedding, and before the head on the way back
    loss = 2 * 3 * WIDTH * tokens  # of every token the largest logit, the sum and the chosen one
    total = accumulation * (blocks + around + loss) * part(size)
    assert sent(ranks, layout) == {"tp": {"all_reduce": pytest.approx(total)}}


def test_sequence_parallel_sends_no_more(ranks):
    plain = sent(ranks, Layout(tp=2))["tp"]
    shares = sent(ranks, Layout(tp=2, sp=True))["tp"]
    tokens = BATCH * SHAPE.seq_len
    stream = WIDTH * tokens * SHAPE.d_model
    assert shares["all_gather"] == shares["reduce_scatter"] == (4 * SHAPE.n_layers + 2) * stream / 2
    # What is left: the loss, and once a step the gradients of norms, biases and positions.
    whole = SHAPE.n_layers * 6 * SHAPE.d_model + 2 * SHAPE.d_model + SHAPE.seq_len * SHAPE.d_model
    assert shares["all_reduce"] == pytest.approx(2 * (3 * WIDTH * tokens + WIDTH * whole) / 2)
    assert sum(shares.values()) == pytest.approx(plain["all_reduce"] + WIDTH * whole)


def test_gathering_again_costs_two_more_all_gathers_a_block(ranks):
    once = sent(ranks, Layout(tp=2, sp=True))["tp"]
    again = sent(ranks, Layout(tp=2, sp=True, sp_regather=True))["tp"]
    stream = WIDTH * BATCH * SHAPE.seq_len * SHAPE.d_model
    assert again["all_gather"] - once["all_gather"] == pytest.approx(SHAPE.n_layers * 2 * stream / 2)


def test_fewer_key_value_heads_than_ranks_add_one_sum_of_their_gradients(ranks):
    shape = dataclasses.replace(SHAPE, n_kv_heads=2, bias=False)
    plain = sent(ranks, Layout(tp=4), dataclasses.replace(shape, n_kv_heads=4))
    grouped = sent(ranks, Layout(tp=4), shape)
    heads = shape.n_layers * 2 * WIDTH * shape.head_size * shape.d_model  # a key and a value head on each pair of ranks
    assert grouped["tp"]["all_reduce"] - plain["tp"]["all_reduce"] == pytest.approx(2 * heads * part(2))


LONG = dataclasses.replace(SHAPE, seq_len=24, n_kv_heads=2, bias=False, positions="rope")


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_sends_keys_and_values_forward_and_those_and_their_gradients_back(ranks, size):
    found = sent(ranks, Layout(cp=size, zero=1), LONG)
    keys = WIDTH * BATCH * LONG.seq_len * LONG.kv_heads * LONG.head_size  # of a layer and whole sequences
    forward = 2 * part(size) * keys
    assert found["cp"] == {"send": pytest.approx(LONG.n_layers * 3 * forward)}
    # The state is sharded over these ranks, as over those of dp_shard.
    parameters = WIDTH * count(LONG)
    assert found["dp_shard_cp"] == {
        "reduce_scatter": pytest.approx(parameters * part(size)),
        "all_gather": pytest.approx(parameters * part(size)),
    }


def test_ulysses_sends_queries_keys_values_and_outputs_each_way(ranks):
    found = sent(ranks, Layout(cp=2, cp_ulysses=2, zero=1), LONG)
    tokens = WIDTH * BATCH * LONG.seq_len / 2  # of a rank
    once = tokens * LONG.head_size * (2 * LONG.n_heads + 2 * LONG.kv_heads) / 2
    assert found["cp"] == {"all_to_all": pytest.approx(LONG.n_layers * 2 * once)}


def test_both_send_less_each(ranks):
    found = sent(ranks, Layout(cp=4, cp_ulysses=2, zero=1), LONG)["cp"]
    tokens = WIDTH * BATCH * LONG.seq_len / 4
    exchanged = tokens * LONG.head_size * (2 * LONG.n_heads + 2 * LONG.kv_heads) / 2
    rotated = 2 * tokens * 2 * LONG.head_size * LONG.kv_heads / 2
    assert found["all_to_all"] == pytest.approx(LONG.n_layers * 2 * exchanged)
    assert found["send"] == pytest.approx(LONG.n_layers * 3 * rotated)


@pytest.mark.parametrize(("size", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_experts_get_rows_twice_and_their_gradients_twice(ranks, size, ep):
    """In the capacity form, whose rows are known beforehand: as many for each expert as it may take."""
    moe = MoE(n_experts=4, top_k=2, d_ff=24, capacity=1.0)
    shape = dataclasses.replace(SHAPE, bias=False, moe=moe, n_layers=2)
    found = sent(ranks, Layout(dp_shard=size, ep=ep, zero=1), shape)
    rows = moe.n_experts * BATCH // size * SHAPE.seq_len * moe.top_k // moe.n_experts
    assert found["ep"] == {"all_to_all": pytest.approx(4 * 2 * WIDTH * rows * SHAPE.d_model * part(ep))}
    experts = 2 * WIDTH * 4 * 2 * 24 * SHAPE.d_model
    dense = WIDTH * count(shape) - experts
    assert found["dp_shard"]["reduce_scatter"] == pytest.approx(dense * part(size))
    assert found.get("edp", {}).get("reduce_scatter", 0) == pytest.approx(experts / ep * part(size // ep))


def crossings(layout: Layout, micro_batches: int) -> list[int]:
    """By rank, the messages that it sends in a step, by the placement of the stages alone."""
    found = [0] * layout.pp
    schedule = build(layout.schedule, layout.pp, micro_batches, slices=layout.pp_slices)
    for micro in range(micro_batches):
        places = [schedule.rank_of(stage, micro) for stage in range(schedule.stages)]
        for here, there in itertools.pairwise(places):
            if here != there:
                found[here] += 1  # of the forward pass
                found[there] += 1  # of the backward pass
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, accumulation=4),
        Layout(pp=3, schedule="zb_h1", accumulation=6),
        Layout(pp=2, schedule="interleaved_1f1b", accumulation=3),
        Layout(pp=2, schedule="zb_v", accumulation=4),
        Layout(pp=2, schedule="dualpipe", accumulation=4),
        Layout(pp=3, schedule="terapipe", pp_slices=4, accumulation=2),
        Layout(pp=2, tp=2, sp=True, accumulation=3),
        Layout(pp=2, tp=2, accumulation=3),
    ],
    ids=Layout.line,
)
def test_a_pipeline_sends_every_micro_batch_over_every_boundary_once_each_way(ranks, layout):
    shape = dataclasses.replace(SHAPE, n_layers=4)
    boundary = WIDTH * BATCH // layout.accumulation * shape.seq_len * shape.d_model // (layout.tp if layout.sp else 1)
    inner = layout.world // layout.pp
    for rank, found in enumerate(ranks(traffic, layout.world, layout, shape)):
        assert found["pp"]["send"] == crossings(layout, layout.accumulation)[rank // inner] * boundary
        copies = 2 * WIDTH * count(shape) / 2 if layout.schedule == "dualpipe" else 0
        assert found["pp"].get("all_reduce", 0) == pytest.approx(copies)


@pytest.mark.parametrize("size", [2, 3])
def test_a_tied_embedding_is_summed_over_both_ends(ranks, size):
    shape = dataclasses.replace(SHAPE, tied=True)
    embedding = WIDTH * shape.vocab_size * shape.d_model
    found = ranks(traffic, size, Layout(pp=size, accumulation=2), shape)
    sums = [sent["pp"].get("all_reduce", 0) for sent in found]
    assert sums == [pytest.approx(embedding), *[0] * (size - 2), pytest.approx(embedding)]
