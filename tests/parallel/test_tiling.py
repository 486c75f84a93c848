"""The MLP's matrices in tiles: the same computation and names, and less of a model whole at once."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from checkpoint.contents import contents
from parallel.steps import micro_batches, steps, worst
from phalanx.blocks.kinds import block_kinds
from phalanx.check.job import problems_of
from phalanx.comm.axis import Axis
from phalanx.config.job import Checkpoint, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import block_parameters, outside
from phalanx.parallel import mesh as meshes
from phalanx.parallel.fsdp_private import is_whole
from phalanx.parallel.linear import Tile
from phalanx.train.requests import StopRequest
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import StepInputs, Stepper

VOCAB = 13
GPT = ModelConfig(n_layers=2, d_model=8, n_heads=2, seq_len=6, d_ff=48, dropout=0.1)
LLAMA = ModelConfig(
    n_layers=2,
    d_model=8,
    n_heads=2,
    seq_len=6,
    d_ff=36,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
)


def job(layout: Layout, model: ModelConfig = GPT, **train) -> Job:
    return Job(model=model, layout=layout, train=Train(precision="fp64", global_batch=12, **train))


@pytest.fixture(scope="module")
def expected(ranks):
    return {model: ranks(steps, 1, job(Layout(), model), VOCAB)[0] for model in (GPT, LLAMA)}


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(tiles=3), GPT),
        (Layout(tiles=4, recompute="full", accumulation=3), GPT),
        (Layout(tiles=2, dp_replicate=2), GPT),
        (Layout(tiles=3, dp_shard=3, zero=2, accumulation=2, accumulate="sharded"), LLAMA),
        (Layout(tiles=3, dp_shard=2), LLAMA),
        (Layout(tiles=4, dp_shard=3, accumulation=2), GPT),
        (Layout(tiles=4, dp_shard=2, accumulation=3, accumulate="sharded", prefetch=0), GPT),
        (Layout(tiles=4, dp_shard=2, recompute="full", accumulation=2), GPT),
        (Layout(tiles=4, dp_shard=2, recompute="selective", reshard=False), GPT),
        (Layout(tiles=2, dp_shard=2, dp_replicate=2), GPT),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else value.activation,
)
def test_equals_one_process_without_tiles(ranks, expected, layout, model):
    (shown, gradients, parameters), *others = ranks(steps, layout.world, job(layout, model), VOCAB)
    shown_there, gradients_there, parameters_there = expected[model]
    torch.testing.assert_close(shown, shown_there, rtol=1e-9, atol=1e-9)
    assert worst(gradients, gradients_there, 1e-6 * max(float(g.abs().max()) for g in gradients_there.values())) < 1e-9
    assert worst(parameters, parameters_there, 1e-2) < 1e-9
    assert all(other[0] == shown for other in others)


def gathered(ranks, layout: Layout) -> list[int]:
    """Elements of each tensor that a step all-gathers, in their order."""
    sizes = []
    real = Axis.all_gather

    def all_gather(self, whole, part):
        if self.name == "dp_shard":
            sizes.append(whole.numel())
        return real(self, whole, part)

    this = job(layout, replace(GPT, d_model=64, d_ff=1024))
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(this, mesh, torch.device("cpu"), VOCAB)
    batches, valid = micro_batches(this, 0, mesh.data_rank, VOCAB)
    Axis.all_gather = all_gather
    try:
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
    finally:
        Axis.all_gather = real
    return sizes


def largest_gather(model: ModelConfig, layout: Layout) -> int:
    """Elements of the largest tensor that the formulas say is gathered."""
    held = block_parameters(model, layout, block_kinds(model)[0]).gathered(layout.ep == 1, tiled=layout.reshard)
    return max(held.block, held.tile, outside(replace(model, vocab_size=VOCAB), layout.tp, True, True))


def test_only_a_tile_is_whole_at_once(ranks):
    layouts = [Layout(dp_shard=2, tiles=tiles) for tiles in (1, 2, 4, 8)]
    layouts += [replace(layouts[-1], tile="all"), replace(layouts[-1], recompute="full")]
    found = [ranks(gathered, 2, layout)[0] for layout in layouts]
    for layout, sizes in zip(layouts, found, strict=True):
        print(layout.line(), f"largest {max(sizes) * 8:,}", f"together {sum(sizes) * 8:,}", len(sizes), sep="  ")
    for layout, sizes in zip(layouts, found, strict=True):
        assert max(sizes) == largest_gather(replace(GPT, d_model=64, d_ff=1024), layout)
    without, *_, with_tiles, _, recomputed = found
    matrix = 64 * 1024
    assert max(without) >= 2 * matrix, "both matrices of a block's MLP at once"
    assert max(with_tiles) < matrix / 2, "a tile, or what is left of a block"
    assert sum(with_tiles) == sum(without), "the same traffic"
    up = matrix // 8 + 1024 // 8
    assert with_tiles.count(up) == 2 * 2 * 8, "each layer's tiles in forward and backward pass"
    assert recomputed.count(up) == 2 * 3 * 8, "and when the forward pass is repeated"


def largest_bucket(ranks, layout: Layout) -> int:
    """Bytes of the largest whole gradient that ZeRO-2 keeps until it is reduced."""
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(job(layout, replace(GPT, d_model=64, d_ff=1024)), mesh, torch.device("cpu"), VOCAB)
    return max(bucket.shard.size * bucket.each * 8 for bucket in stepper.replica.buckets)


def test_with_zero_2_a_tile_is_the_largest_bucket(ranks):
    layouts = [Layout(dp_shard=2, zero=2, bucket_mb=0.01, tiles=tiles, tile="all") for tiles in (1, 2, 4, 8)]
    found = [ranks(largest_bucket, 2, layout)[0] for layout in layouts]
    for layout, size in zip(layouts, found, strict=True):
        print(layout.line(), f"largest bucket {size:,}", sep="  ")
    assert found[0] >= 8 * 64 * 1024 > 7 * found[3]


def most_whole(ranks, layout: Layout) -> int:
    """How many of the model's tiles are whole at once, at most, whenever a collective starts."""
    this = job(layout)
    mesh = meshes.build(layout, "cpu")
    stepper = Stepper(this, mesh, torch.device("cpu"), VOCAB)
    modules = stepper.replica.objective.modules()
    tiles = [module for module in modules if isinstance(module, Tile) and isinstance(module, FSDPModule)]
    found = []
    reals = {name: getattr(Axis, name) for name in ("all_gather", "reduce_scatter")}

    def watched(name):
        def collective(self, *tensors):
            found.append(sum(is_whole(tile) for tile in tiles))
            return reals[name](self, *tensors)

        return collective

    batches, valid = micro_batches(this, 0, mesh.data_rank, VOCAB)
    for name in reals:
        setattr(Axis, name, watched(name))
    try:
        stepper.step(StepInputs(batches, 0, valid, 1e-2))
    finally:
        for name, real in reals.items():
            setattr(Axis, name, real)
    return max(found)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_tile_is_gathered_ahead(ranks, recompute):
    assert max(ranks(most_whole, 2, Layout(dp_shard=2, tiles=4, recompute=recompute))) <= 1


def save_and_load(ranks, root, first: Layout, second: Layout):
    """Steps under one layout, a checkpoint, steps under another; and the same steps under the second alone."""
    found = []
    for before, after in ((first, second), (second, second)):
        folder = root / before.line() / "checkpoints"
        for layout, step in ((before, 0), (after, 1)):
            this = replace(job(layout), checkpoint=Checkpoint())
            mesh = meshes.build(layout, "cpu")
            stepper = Stepper(this, mesh, torch.device("cpu"), VOCAB)
            state = TrainState(stepper, "data", VOCAB, step=step)
            if step:
                state.load(folder / "step-000001")
            batches, valid = micro_batches(this, step, mesh.data_rank, VOCAB)
            shown = stepper.step(StepInputs(batches, step, valid, 1e-2))
            state.step += 1
            Saving(state, folder, StopRequest()).save(last=True)
            path = folder / f"step-{state.step:06d}"
        found.append((shown.loss, shown.grad_norm, path))
    return found


@pytest.mark.parametrize("with_first", [True, False])
@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(dp_shard=2, tiles=4), Layout(dp_shard=2)],
        [Layout(dp_shard=2, tp=2, tiles=4, tile="all"), Layout(dp_shard=4, tiles=2)],
    ],
    ids=lambda layouts: layouts[0].line(),
)
def test_a_checkpoint_loads_with_and_without_tiles(ranks, tmp_path, layouts, with_first):
    first, second = layouts if with_first else layouts[::-1]
    (*shown, path), (*expected, path_there) = ranks(save_and_load, first.world, tmp_path, first, second)[0]
    assert shown == pytest.approx(expected, rel=1e-9)
    there, here = (contents(p) for p in (path_there, path))
    assert worst(here, there, 1e-2) < 1e-9
    assert {name: t.shape for name, t in here.items()} == {name: t.shape for name, t in there.items()}


def test_tiles_multiply_through_onednn(ranks):
    plain, tiled = (
        ranks(steps, 1, replace(job(layout), train=Train(global_batch=12, cpu_linear="onednn")), VOCAB)[0]
        for layout in (Layout(), Layout(tiles=4))
    )
    assert worst(tiled[1], plain[1], 1e-3) < 1e-4


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tiles=5), "MLP width 48 / tiles 5 is not an integer; nearest tiles: 3, 4, 6"),
        (Layout(tiles=16, tp=2), "MLP width 48 / (tp 2 × tiles 16) is not an integer; nearest tiles: 8, 12, 24"),
        (Layout(tiles=3, tile="attention"), "8 rows of attn.wq / tiles 3 is not an integer; nearest tiles: 1, 2, 4"),
        (Layout(tiles=0), "must be at least 1"),
    ],
)
def test_what_does_not_go_is_refused(layout, message):
    ((path, said),) = problems_of(job(layout))
    assert path == "layout.tiles"
    assert message in said
