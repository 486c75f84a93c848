"""Cross-entropy over a whole and a cut vocabulary equals torch's, in fp64, loss and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE
from phalanx.parallel.vocabulary import ChunkedLoss, CrossEntropy
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


def tensor_axis(ranks) -> Axis:
    if ranks.world == 1:
        return Axis("tp")
    return Axis("tp", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())


def cut_loss(ranks, vocab: int, scale: float, dtype: torch.dtype, ignore_all: bool):
    """The loss on this rank and the gradient of three times it, with respect to this rank's logits."""
    axis = tensor_axis(ranks)
    logits, targets = inputs(vocab, scale)
    if ignore_all:
        targets.fill_(IGNORE)
    size = padded_vocabulary(vocab, ranks.world)
    padded = F.pad(logits, (0, size - vocab), value=50.0)  # what padding rows compute must not matter
    mine = padded.chunk(ranks.world, dim=-1)[ranks.rank].to(dtype).requires_grad_()
    loss = CrossEntropy(axis, vocab)(mine * 1, targets).sum()  # whose logits are overwritten
    (3 * loss).backward()
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
@pytest.mark.parametrize(("vocab", "world"), [(11, 1), (8, 2), (11, 2), (13, 4), (5, 4), (2, 3), (1, 2)])
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
    logits = torch.full((2, 4), float("nan") if ranks.rank == 0 else 0.0)
    return CrossEntropy(tensor_axis(ranks), 8)(logits, torch.tensor([1, 6])).sum()


def test_a_nan_on_one_rank_is_everybodys_loss(ranks):
    assert all(loss.isnan() for loss in ranks(nan_logits, 2))


def test_a_likely_target_has_a_gradient_with_all_its_digits():
    """In bf16 its probability is 1: 1 subtracted from it would leave nothing."""
    logits = torch.tensor([[9.0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    CrossEntropy(Axis("tp"), 3)(logits * 1, torch.tensor([0])).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].item() == pytest.approx(torch.tensor([9.0, 0, 0]).softmax(0)[0].item() - 1, rel=4e-3)


VOCAB, WIDTH, CAP = 11, 6, 2.5


def chunked_losses(ranks, chunk: int, cap: float, frozen: bool, micros: int):
    """The losses and gradients of micro-batches whose backward passes come after all forward passes."""
    axis, generator = tensor_axis(ranks), torch.Generator().manual_seed(1)
    size = padded_vocabulary(VOCAB, ranks.world)
    x = torch.randn(micros, 15, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (micros, 15), generator=generator)
    targets[0, 3:9] = IGNORE
    rows = F.pad(weight, (0, 0, 0, size - VOCAB)).chunk(ranks.world)[ranks.rank].clone().requires_grad_(not frozen)
    how = ChunkedLoss(CrossEntropy(axis, VOCAB, cap), chunk)
    losses = [how(x[m], F.linear, rows, targets[m], shared=True).sum() for m in range(micros)]
    arrived = []
    for loss in losses:
        (0.3 * loss).backward()
        arrived.append(rows.grad is not None)
    whole, matrix = x.detach().clone().requires_grad_(), weight.clone().requires_grad_()
    logits = whole @ matrix.t()
    logits = torch.tanh(logits / cap) * cap if cap else logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (0.3 * expected).backward()
    assert x.grad is not None
    assert matrix.grad is not None
    padded = F.pad(matrix.grad, (0, 0, 0, size - VOCAB)).chunk(ranks.world)[ranks.rank]
    axis.all_reduce(x.grad).wait()
    torch.testing.assert_close(sum(losses), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, whole.grad, rtol=1e-10, atol=1e-13)
    if not frozen:
        torch.testing.assert_close(rows.grad, padded, rtol=1e-10, atol=1e-13)
    return arrived


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4, 15, 99])
@pytest.mark.parametrize("cap", [0.0, CAP])
def test_chunks_have_the_gradients_of_the_whole(ranks, world, chunk, cap):
    """Micro-batches that wait for their backward pass have one gradient of the matrix, which comes with the last."""
    assert ranks(chunked_losses, world, chunk, cap, False, 3) == [[False, False, True]] * world


def test_the_losses_of_a_frozen_head_have_factors_of_their_own(ranks):
    assert ranks(chunked_losses, 2, 4, CAP, True, 2) == [[False, False]] * 2


def test_a_dropped_loss_leaves_nothing_behind():
    how = ChunkedLoss(CrossEntropy(Axis("tp"), VOCAB), 4)
    weight, targets = torch.randn(VOCAB, WIDTH, requires_grad=True), torch.arange(9)
    loss = how(torch.randn(9, WIDTH), F.linear, weight, targets, shared=True)
    del loss
    x = torch.randn(9, WIDTH)
    how(x, F.linear, weight, targets, shared=True).backward()
    mine, weight.grad = weight.grad, None
    F.cross_entropy(x @ weight.t(), targets, reduction="sum").backward()
    torch.testing.assert_close(mine, weight.grad)


def test_gradients_in_bf16_are_scaled_by_a_factor_with_all_its_digits():
    """In bf16 1.3 would be 1.2969."""
    x, weight = (torch.randn(n, 32).bfloat16().requires_grad_() for n in (64, VOCAB))
    sums = []
    for factor in (1.0, 1.3):
        how = ChunkedLoss(CrossEntropy(Axis("tp"), VOCAB), 16)
        loss = how(x, F.linear, weight, torch.arange(64) % VOCAB, shared=False)
        sums.append([g.double().abs().sum() for g in torch.autograd.grad(factor * loss, (x, weight))])
    for one, more in zip(*sums, strict=True):
        assert (more / one).item() == pytest.approx(1.3, abs=1e-3)
