"""Matrices in tiles: the same results and names, predicted bytes, and less of a model whole at once."""

import dataclasses
import os
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from checkpoint.contents import contents
from covering import also_whole
from parallel import structures, test_predicted_traffic
from parallel.steps import micro_batches, steps, worst
from parallel.test_composition import VOCAB as ODD_VOCAB
from parallel.test_composition import compare, compare_and_check_bytes, job_of
from parallel.test_pipeline import is_exact
from phalanx.blocks.kinds import block_kinds
from phalanx.check.job import problems_of
from phalanx.comm.axis import Axis
from phalanx.config import layout_line
from phalanx.config.job import Checkpoint, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.cost.held import block_parameters, outside
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import JobError
from phalanx.parallel import mesh as meshes
from phalanx.parallel.fsdp_private import is_whole
from phalanx.parallel.linear import Tile
from phalanx.parallel.offload import DeviceBudget
from phalanx.parallel.vocabulary import merged_loss
from phalanx.train.requests import StopRequest
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import StepInputs, Stepper, rank_spec
from train.measured_memory import least_device_peak

# The MLP's matrices in tiles: the same computation and names, and less of a model whole at once.


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
        (Layout(tiles=4, recompute="full", accumulation=3), GPT),
        (Layout(tiles=3, dp_shard=3, zero=2, accumulation=2, accumulate="sharded"), LLAMA),
        (Layout(tiles=3, dp_shard=2), LLAMA),
        (Layout(tiles=4, dp_shard=2, accumulation=3, accumulate="sharded", prefetch=0), GPT),
        *also_whole(
            (Layout(tiles=3), GPT),
            (Layout(tiles=4, dp_shard=2, recompute="selective", reshard=False), GPT),
            (Layout(tiles=2, dp_shard=2, dp_replicate=2), GPT),
        ),
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
    layouts = [Layout(dp_shard=2, tiles=tiles) for tiles in (1, 8)]
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
    layouts = [Layout(dp_shard=2, zero=2, bucket_mb=0.01, tiles=tiles, tile="all") for tiles in (1, 8)]
    found = [ranks(largest_bucket, 2, layout)[0] for layout in layouts]
    for layout, size in zip(layouts, found, strict=True):
        print(layout.line(), f"largest bucket {size:,}", sep="  ")
    assert found[0] >= 8 * 64 * 1024 > 7 * found[1]


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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout(dp_shard=2, tiles=4), Layout(dp_shard=2)),
        *also_whole((Layout(dp_shard=4, tiles=2), Layout(dp_shard=2, tp=2, tiles=4, tile="all"))),
    ],
    ids=Layout.line,
)
def test_a_checkpoint_loads_with_and_without_tiles(ranks, tmp_path, first, second):
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


# Tiles of every layer, embedding and head, with the other techniques: one process's results, and predicted bytes. A
# few layouts in every run; all of them with PHALANX_TILES=1 (make tiles).

DEEPSEEK = dataclasses.replace(
    structures.LLAMA,
    bias=True,
    n_kv_heads=4,
    head_dim=0,
    mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=6),
    moe=MoE(n_experts=4, top_k=2, d_ff=8, n_shared=1, n_dense_layers=1),
)
MODELS = {
    "gpt": ModelConfig(n_layers=2, d_model=24, n_heads=4, seq_len=8, bias=True, qkv_bias=True),
    "llama": dataclasses.replace(structures.LLAMA, dropout=0.2),
    "deepseek": DEEPSEEK,
    "capped": dataclasses.replace(structures.GEMMA_2, tied=False),
    **structures.STRUCTURES,
}
FEW = [
    ("gpt", "tiles=2,tile=all,tp=2,sp=true,dp_shard=2,recompute=full,accumulation=2,accumulate=sharded"),
    ("neox with experts", "tiles=2,tile=all,dp_shard=2,ep=2,tp=2,sp=true"),
    ("deepseek", "tiles=2,tile=all,pp=2,schedule=zb_h1,dp_shard=2,ep=2,accumulation=2"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,zero=2,bucket_mb=0.004"),
    ("llama", "tiles=3,tile=embedding+head,dp_shard=2,loss_chunk=5,accumulation=2"),
    ("capped", "tiles=3,tile=embedding+head,dp_shard=2,tp=2,sp=true,accumulation=2,accumulate=sharded"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=dualpipe,dp_shard=2,accumulation=2"),
]
MORE = [
    ("gpt", "tiles=2,tile=all"),
    ("llama", "tiles=2,tile=all,dp_shard=2,dp_replicate=2,tp=2"),
    ("gpt", "tiles=3,tile=attention,dp_shard=2"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,recompute=full,accumulation=2"),
    ("llama", "tiles=2,tile=all,dp_shard=3,accumulation=2"),
    ("llama", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true"),
    ("gpt", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("llama", "tiles=2,tile=all,tp=4,zero=1,dp_shard=2"),
    ("olmo2", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,recompute=full"),
    ("gemma2", "tiles=2,tile=all,dp_shard=2,recompute=full"),
    ("neox", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true"),
    ("neox", "tiles=2,tile=attention,dp_shard=2,tp=2,recompute=full"),
    ("gpt-oss", "tiles=2,tile=all,dp_shard=2"),
    ("gpt-oss", "tiles=4,tile=experts,dp_shard=2,ep=2"),
    ("gpt-oss", "tiles=2,tile=all,dp_shard=2,cp=2,ep=4"),
    ("neox with experts", "tiles=2,tile=all,dp_shard=4,ep=2,recompute=full"),
    ("neox with experts", "tiles=2,tile=all,pp=2,dp_shard=2,ep=2,tp=2,accumulation=3,recompute=full"),
    ("gemma2 with experts", "tiles=2,tile=all,dp_shard=2,dp_replicate=2,ep=2"),
    ("deepseek", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("deepseek", "tiles=2,tile=all,dp_shard=4,ep=2,accumulation=3,micro_batch=1"),
    ("deepseek", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,ep=2,recompute=full"),
    ("deepseek", "tiles=2,tile=mlp+experts,dp_shard=2,zero=1,ep=2"),
    ("llama", "tiles=2,tile=all,dp_shard=2,cp=2"),
    ("llama", "tiles=2,tile=all,cp=2,cp_ulysses=2,tp=2"),
    ("gpt", "tiles=2,tile=all,pp=2,schedule=zb_h1,dp_shard=2,tp=2,accumulation=3"),
    ("llama", "tiles=2,tile=all,pp=2,schedule=dualpipe,tp=2,sp=true,dp_shard=2,accumulation=2"),
    ("llama", "tiles=5,tile=embedding+head"),
    ("capped", "tiles=7,tile=head,tp=2,loss_chunk=7"),
    ("llama", "tiles=4,tile=embedding+head,tp=4,loss_chunk=3"),
    ("llama", "tiles=2,tile=embedding+head,tp=4,dp_replicate=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=2,zero=1"),
    ("llama", "tiles=3,tile=embedding,dp_shard=2,zero=2,accumulation=2,accumulate=sharded,bucket_mb=0.001"),
    ("llama", "tiles=3,tile=head,dp_shard=3,reshard=false,accumulation=2"),
    ("llama", "tiles=3,tile=embedding+head,dp_shard=2,dp_replicate=2,cp=2"),
    ("capped", "tiles=2,tile=embedding+head,dp_shard=2,cp=2,cp_ulysses=2,tp=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=4,hpz=2,accumulation=3"),
    ("llama", "tiles=3,tile=embedding+head,pp=2,schedule=zb_h1,dp_shard=2,accumulation=3,accumulate=sharded"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=zb_h1,dp_shard=2,tp=2,accumulation=3,loss_chunk=5"),
    ("llama", "tiles=2,tile=embedding+head,pp=2,schedule=terapipe,pp_slices=2,dp_shard=2,accumulation=2"),
    ("llama", "tiles=2,tile=embedding+head,dp_shard=2,offload=optimizer"),
]
FEW_BYTES = [("DEEPSEEK", "muon", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true")]
"""Those of AdamW are compared together with the results."""
MORE_BYTES = [
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2,sp=true,recompute=full"),
    ("SWITCH", "adamw", "tiles=2,tile=all,dp_shard=4,ep=2,recompute=full"),
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,accumulation=2"),
    ("LLAMA", "adamw", "tiles=2,tile=attention,dp_shard=2,recompute=full"),
    ("GPT", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2"),
    ("DROPS", "adamw", "tiles=2,tile=all,tp=2,dp_shard=2,recompute=full"),
    ("ONE_KEY", "adamw", "tiles=3,tile=all,tp=2,sp=true,dp_shard=2"),
    ("SWITCH", "adamw", "tiles=3,tile=experts,dp_shard=2,dp_replicate=2,ep=2"),
    ("DEEPSEEK", "adamw", "tiles=2,tile=all,dp_shard=2,tp=2,ep=2,sp=true,recompute=full"),
    ("DEEPSEEK", "adamw", "tiles=2,tile=mlp,dp_shard=2,zero=1,bucket_mb=0.002"),
    ("SWITCH", "muon", "tiles=2,tile=all,dp_shard=4,ep=2"),
    ("GPT", "muon", "tiles=2,tile=all,dp_shard=2,tp=2,zero=1"),
    ("ONE_KEY", "muon", "tiles=3,tile=all,tp=4"),
    ("DEEP", "adamw", "tiles=2,tile=all,pp=2,accumulation=4,dp_shard=2,schedule=zb_h1,tp=2,recompute=full"),
]
EVERY = bool(os.environ.get("PHALANX_TILES"))


@pytest.fixture(scope="module")
def reference(ranks):
    return cache(lambda kind: ranks(steps, 1, job_of(MODELS[kind], Layout()), ODD_VOCAB)[0])


@pytest.mark.parametrize(("kind", "line"), FEW + MORE if EVERY else FEW)
def test_all_layers_in_tiles_equal_one_process(ranks, reference, kind, line):
    job = job_of(MODELS[kind], layout_line.parse(line))
    assert problems_of(job) == []
    if is_exact(job.layout):
        compare_and_check_bytes(ranks, job, reference(kind))
    else:
        compare(ranks(steps, job.layout.world, job, ODD_VOCAB), reference(kind))


@pytest.mark.parametrize(("model", "optimizer", "line"), FEW_BYTES + MORE_BYTES if EVERY else FEW_BYTES)
def test_every_byte(ranks, model, optimizer, line):
    job = test_predicted_traffic.job_of(getattr(test_predicted_traffic, model), layout_line.parse(line))
    test_predicted_traffic.check(ranks, dataclasses.replace(job, optimizer=Optimizer(name=optimizer)))


@pytest.mark.parametrize(
    ("kind", "line", "path", "message"),
    [
        ("gpt", "tiles=2,tile=atention", "layout.tile", "no layers 'atention'; did you mean attention?"),
        ("gpt", "tiles=2,tile=mlp+experts", "layout.tile", "no layers of experts"),
        ("deepseek", "tiles=3,tile=experts", "layout.tiles", "8 / tiles 3 is not an integer; nearest tiles: 1, 2, 4"),
        ("gpt", "tiles=2,tp=2,sp=true,sp_regather=true", "layout.sp_regather", "sp_regather=false, or tiles=1"),
    ],
)
def test_layers_that_do_not_go_are_refused(kind, line, path, message):
    ((where, said),) = problems_of(job_of(MODELS[kind], layout_line.parse(line)))
    assert where == path
    assert message in said


# Embedding and head in tiles: predicted bytes and memory, and no whole matrix. Their results: test_tiling.py. A
# few layouts in every run; all of them with PHALANX_TILES=1 (make tiles).

WIDE_LLAMA = replace(structures.LLAMA, dropout=0.2)
FEW_TABLE_BYTES = ["tiles=3,tile=embedding+head,pp=2,dp_shard=2,accumulation=3"]
MORE_TABLE_BYTES = [
    "tiles=3,tile=embedding+head,dp_shard=2,accumulation=3,accumulate=sharded,tp=2,sp=true,loss_chunk=5",
    "tiles=3,tile=embedding+head,dp_shard=4,hpz=2,accumulation=2",
    "tiles=3,tile=embedding+head,dp_shard=4,hpz=2,quantise_weights=int8,quantise_gradients=int4",
    "tiles=3,tile=embedding,dp_shard=2,reshard=false,accumulation=2",
    "tiles=3,tile=head,tp=2,loss_chunk=5",
    "tiles=3,tile=embedding+head,dp_shard=2,dp_replicate=2,recompute=full",
    "tiles=3,tile=embedding+head,pp=2,schedule=interleaved_1f1b,dp_shard=2,accumulation=4,accumulate=sharded",
    "tiles=3,tile=embedding+head,pp=2,dp_shard=2,accumulation=4,reshard=false",
    "tiles=3,tile=embedding+head,pp=2,schedule=dualpipe,dp_shard=2,accumulation=4",
    "tiles=3,tile=embedding+head,dp_shard=2,zero=2,bucket_mb=0.001",
    "tiles=3,tile=embedding+head,cp=2,dp_shard=2",
]
LARGE = replace(structures.LLAMA, d_model=32, d_ff=64, seq_len=64, n_layers=2)
LARGE_VOCAB = 4096


@pytest.mark.parametrize("line", FEW_TABLE_BYTES + MORE_TABLE_BYTES if EVERY else FEW_TABLE_BYTES)
def test_every_byte_of_the_tables(ranks, line):
    model = test_predicted_traffic.DEEP
    test_predicted_traffic.check(ranks, test_predicted_traffic.job_of(model, layout_line.parse(line)))


def counted(ranks, job: Job) -> tuple[int, list[int]]:
    """The peak of the device's tensors in bytes, and the elements of each all-gather of a step."""
    mesh, sizes, real = meshes.build(job.layout, "cpu"), list[int](), Axis.all_gather

    def all_gather(self, whole, part):
        sizes.append(whole.numel())
        return real(self, whole, part)

    with DeviceBudget().counting() as budget, pytest.MonkeyPatch.context() as patch:
        stepper = Stepper(job, mesh, torch.device("cpu"), LARGE_VOCAB)
        patch.setattr(Axis, "all_gather", all_gather)

        def take(step: int) -> None:
            batches, valid = micro_batches(job, step, mesh.data_rank, LARGE_VOCAB)
            stepper.step(StepInputs(batches, step, valid, 1e-2))

        peak = least_device_peak(budget, take, 2, alone=job.layout.world == 1)
    return peak, sizes


@pytest.mark.parametrize(
    ("layout", "largest"),
    [
        (Layout(dp_shard=2, tiles=8, tile="embedding+head"), LARGE_VOCAB // 8 * 32),
        (Layout(dp_shard=2), 2 * LARGE_VOCAB * 32 + 32),
    ],
    ids=["tiled", "whole"],
)
def test_neither_matrix_nor_logits_are_whole_and_memory_is_the_predicted_one(ranks, layout, largest):
    train = Train(precision="fp32", global_batch=4)
    job = Job(model=LARGE, layout=replace(layout, recompute="full"), train=train)
    (predicted,) = step_memory(rank_spec(job, LARGE_VOCAB, "cpu"))
    for peak, sizes in ranks(counted, 2, job):
        print(layout.line(), f"{peak:,} bytes, predicted {predicted.allocated:,}, largest all-gather {max(sizes):,}")
        assert max(sizes) == largest
        assert predicted.allocated == pytest.approx(peak, rel=0.1)


def test_parts_of_the_vocabulary_merge_to_the_loss():
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 10, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 9, -100, 5, 2])
    parts = [logits[:, :3], logits[:, 3:9], logits[:, 9:], torch.full((6, 2), float("-inf"), dtype=torch.float64)]
    sums = torch.stack([part.logsumexp(-1) for part in parts])
    one_hot = torch.nn.functional.one_hot(targets.clamp(min=0), 12).split([3, 6, 1, 2], dim=-1)
    chosen = torch.stack([(part.nan_to_num(neginf=0) * hot).sum(-1) for part, hot in zip(parts, one_hot, strict=True)])
    losses = merged_loss(sums, chosen, targets, tp=Axis("tp"))
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "line", "path", "message"),
    [
        ({"tied": True}, "tiles=2,tile=head", "layout.tile", "(model.tied=true), which both ends of the model read"),
        ({"tied": True}, "tiles=2,tile=head+mlp", "layout.tile", "nearest legal: tile=mlp, or model.tied=false"),
        ({"vocab_size": 13}, "tiles=8,tile=head,tp=2", "layout.tiles", "7 rows of the vocabulary cannot fill tiles 8"),
    ],
)
def test_tables_that_do_not_go_are_refused(changes, line, path, message):
    ((where, said),) = problems_of(job_of(replace(structures.LLAMA, **changes), layout_line.parse(line)))
    assert where == path
    assert message in said


def test_a_tokenizer_s_vocabulary_may_be_too_small():
    layout = Layout(tiles=16, tile="head")
    with pytest.raises(JobError, match="13 rows of the vocabulary cannot fill tiles 16; nearest legal: tiles=13"):
        Stepper(job_of(WIDE_LLAMA, layout), meshes.build(layout, "cpu"), torch.device("cpu"), ODD_VOCAB)
