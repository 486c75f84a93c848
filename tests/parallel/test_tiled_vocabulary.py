"""Embedding and head in tiles: predicted bytes and memory, and no whole matrix. Their results: test_tiled_layers.py.

A few layouts in every run; all of them with PHALANX_TILES=1 (make tiles).
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from parallel import structures, test_predicted_traffic
from parallel.steps import micro_batches
from parallel.test_composition import VOCAB, job_of
from parallel.test_tiled_layers import EVERY
from phalanx.check.job import problems_of
from phalanx.comm.axis import Axis
from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.cost.rank_memory import step_memory
from phalanx.errors import JobError
from phalanx.parallel import mesh as meshes
from phalanx.parallel.offload import DeviceBudget
from phalanx.parallel.vocabulary import merged_loss
from phalanx.train.step import StepInputs, Stepper, rank_spec
from train.measured_memory import least_device_peak

LLAMA = replace(structures.LLAMA, dropout=0.2)
FEW_BYTES = [
    "tiles=3,tile=embedding+head,dp_shard=2,accumulation=3,accumulate=sharded,tp=2,sp=true,loss_chunk=5",
    "tiles=3,tile=embedding+head,pp=2,dp_shard=2,accumulation=3",
]
MORE_BYTES = [
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


@pytest.mark.parametrize("line", FEW_BYTES + MORE_BYTES if EVERY else FEW_BYTES)
def test_every_byte(ranks, line):
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

        peak = least_device_peak(budget, take, 2)
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
def test_what_does_not_go_is_refused(changes, line, path, message):
    ((where, said),) = problems_of(job_of(replace(structures.LLAMA, **changes), layout_line.parse(line)))
    assert where == path
    assert message in said


def test_a_tokenizer_s_vocabulary_may_be_too_small():
    layout = Layout(tiles=16, tile="head")
    with pytest.raises(JobError, match="13 rows of the vocabulary cannot fill tiles 16; nearest legal: tiles=13"):
        Stepper(job_of(LLAMA, layout), meshes.build(layout, "cpu"), torch.device("cpu"), VOCAB)
