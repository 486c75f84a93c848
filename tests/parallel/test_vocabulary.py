"""Vocabulary-parallel cross-entropy equals torch's, in fp64, loss and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.comm.axis import Axis
from phalanx.config.data import IGNORE
from phalanx.parallel.vocabulary import cross_entropy_sum
from phalanx.partition.tensor_slices import padded_vocabulary

SHAPE = (3, 5)


def inputs(vocab: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all tokens, and targets of which some do not count and some are the first and the last."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(*SHAPE, vocab, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(vocab, SHAPE, generator=generator)
    targets[0, 0], targets[0, 1] = 0, vocab - 1
    targets[1, 2:] = IGNORE
    return logits, targets


def cut_loss(ranks, vocab: int, scale: float, dtype: torch.dtype, ignore_all: bool):
    """The loss on this rank and the gradient of three times it, with respect to this rank's logits."""
    axis = Axis("tp", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())
    logits, targets = inputs(vocab, scale)
    if ignore_all:
        targets.fill_(IGNORE)
    size = padded_vocabulary(vocab, ranks.world)
    padded = F.pad(logits, (0, size - vocab), value=50.0)  # what padding rows compute must not matter
    mine = padded.chunk(ranks.world, dim=-1)[ranks.rank].to(dtype).requires_grad_()
    kept = mine.detach().clone()
    loss = cross_entropy_sum(mine, targets, tp=axis, vocab=vocab)
    (3 * loss).backward()
    assert torch.equal(mine.detach(), kept)  # the copy is worked on, not the logits
    assert mine.grad is not None
    return loss.detach(), mine.grad


def reference(vocab: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = inputs(vocab, scale)
    logits.requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (3 * loss).backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("scale", [3.0, 1000.0])
@pytest.mark.parametrize(("vocab", "world"), [(8, 2), (11, 2), (13, 4), (5, 4), (2, 3), (1, 2)])
def test_equals_torch(ranks, vocab, world, scale):
    """Also where ranks have nothing but padding: 5 rows make 2, 2, 1 and none."""
    expected_loss, expected = reference(vocab, scale)
    results = ranks(cut_loss, world, vocab, scale, torch.float64, False)
    gradient = torch.cat([part for _, part in results], dim=-1)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
        assert torch.equal(loss, results[0][0])
    torch.testing.assert_close(gradient[..., :vocab], expected, rtol=1e-10, atol=1e-12)
    assert (gradient[..., vocab:] == 0).all()


def test_half_precision_adds_in_fp32(ranks):
    """The loss is that of the rounded logits, in fp32; the gradient has the logits' precision."""
    logits, targets = inputs(11)
    expected = F.cross_entropy(
        logits.bfloat16().float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    for loss, gradient in ranks(cut_loss, 2, 11, 3.0, torch.bfloat16, False):
        assert loss.dtype == torch.float32
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_without_valid_targets_loss_and_gradient_are_zero(ranks):
    for loss, gradient in ranks(cut_loss, 2, 7, 3.0, torch.float64, True):
        assert loss == 0
        assert (gradient == 0).all()


def nan_logits(ranks):
    axis = Axis("tp", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())
    logits = torch.full((2, 4), float("nan") if ranks.rank == 0 else 0.0, requires_grad=True)
    return cross_entropy_sum(logits, torch.tensor([1, 6]), tp=axis, vocab=8).detach()


def test_a_nan_on_one_rank_is_everybodys_loss(ranks):
    assert all(loss.isnan() for loss in ranks(nan_logits, 2))
