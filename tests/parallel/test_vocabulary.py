"""Losses: over a whole and a cut vocabulary, in chunks, of pairs, and of sequences in slices."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.axis import Axis
from phalanx.config.job import IGNORE, DpoOptions
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import Noise, initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.objective import Earlier, MicroTensors, Objective, PairFacts, PairLoss
from phalanx.parallel.recompute import recompute
from phalanx.parallel.stages import Stage
from phalanx.parallel.vocabulary import ChunkedLoss, CrossEntropy, recomputed_loss
from phalanx.partition.derived import Mode
from phalanx.partition.tensor_slices import padded_vocabulary

# Cross-entropy over a whole and a cut vocabulary equals torch's, in fp64, loss and gradient.


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


def cut_loss(ranks, vocab: int, scale: float, dtype: torch.dtype, ignore_all: bool, smoothing: float = 0.0):
    """The loss on this rank and the gradient of three times it, with respect to this rank's logits."""
    axis = tensor_axis(ranks)
    logits, targets = inputs(vocab, scale)
    if ignore_all:
        targets.fill_(IGNORE)
    size = padded_vocabulary(vocab, ranks.world)
    padded = F.pad(logits, (0, size - vocab), value=50.0)  # what padding rows compute must not matter
    mine = padded.chunk(ranks.world, dim=-1)[ranks.rank].to(dtype).requires_grad_()
    loss = CrossEntropy(axis, vocab, smoothing=smoothing)(mine * 1, targets).sum()  # whose logits are overwritten
    (3 * loss).backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


def reference(vocab: int, scale: float, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = inputs(vocab, scale)
    logits.requires_grad_()
    criterion = torch.nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    loss = criterion(logits.flatten(0, -2), targets.flatten())
    (3 * loss).backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize(("scale", "smoothing"), [(3.0, 0.0), (1000.0, 0.0), (3.0, 0.1)])
@pytest.mark.parametrize(("vocab", "world"), [(11, 1), (8, 2), (11, 2), (13, 4), (5, 4), (2, 3), (1, 2)])
def test_equals_torch(ranks, vocab, world, scale, smoothing):
    """Also where ranks have nothing but padding: 5 rows make 2, 2, 1 and none."""
    expected_loss, expected = reference(vocab, scale, smoothing)
    results = ranks(cut_loss, world, vocab, scale, torch.float64, False, smoothing)
    gradient = torch.cat([part for _, part in results], dim=-1)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
        assert torch.equal(loss, results[0][0])
    torch.testing.assert_close(gradient[..., :vocab], expected, rtol=1e-10, atol=1e-12)
    assert (gradient[..., vocab:] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_adds_in_fp32(ranks, smoothing):
    """The loss is that of the rounded logits, in fp32; the gradient has the logits' precision."""
    logits, targets = inputs(11)
    rounded = logits.bfloat16().float().requires_grad_()
    expected = F.cross_entropy(
        rounded.flatten(0, -2), targets.flatten(), None, None, IGNORE, None, "sum", label_smoothing=smoothing
    )
    (slopes,) = torch.autograd.grad(3 * expected, rounded)
    results = ranks(cut_loss, 2, 11, 3.0, torch.bfloat16, False, smoothing)
    for loss, gradient in results:
        assert loss.dtype == torch.float32
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradient = torch.cat([part for _, part in results], dim=-1)[..., :11].float()
    torch.testing.assert_close(gradient, slopes, rtol=8e-3, atol=1e-5)  # two roundings: of the slope, of its factor


def test_a_validation_has_no_label_smoothing():
    logits, targets = inputs(11)
    loss = CrossEntropy(Axis("tp"), 11, smoothing=0.5)
    x, weight = torch.randn(15, 6, dtype=torch.float64), torch.randn(11, 6, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(
            loss(logits * 1, targets).flatten(),
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none"),
        )
        plain = F.cross_entropy(x @ weight.t(), targets.flatten(), reduction="none")
        for found in (
            ChunkedLoss(loss, 4)(x, F.linear, weight, targets.flatten(), shared=False),
            recomputed_loss(x, F.linear, weight, targets.flatten(), loss, 4),
        ):
            torch.testing.assert_close(found, plain)


class Moved(TorchDispatchMode):
    """Bytes of tensors as large as the logits that operations read and write: not those that touch a number per
    token."""

    def __init__(self, logits: int):
        super().__init__()
        self.logits, self.bytes = logits, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::gather", "aten::scatter_", "aten::new_full"):
            large = [each for each in (*args, result) if isinstance(each, torch.Tensor) and each.numel() == self.logits]
            self.bytes += sum(each.nbytes for each in large)
        return result


@pytest.mark.parametrize(("dtype", "cap", "most"), [("float32", 0, 40), ("bfloat16", 0, 30), ("bfloat16", 30, 72)])
def test_an_eager_loss_moves_no_more_than_it_needs(dtype, cap, most):
    """In bf16: scores are widened by the kernel that subtracts the largest, and narrowed by the one that scales."""
    logits = torch.randn(32, 640).to(getattr(torch, dtype)).requires_grad_()
    changed, loss = logits.clone(), CrossEntropy(Axis("tp"), 640, cap)
    with Moved(logits.numel()) as moved:
        torch.autograd.grad(loss(changed, torch.arange(32)).sum(), changed)
    assert moved.bytes <= most * logits.numel()


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


def chunked_losses(ranks, chunk: int, cap: float, smoothing: float, frozen: bool, micros: int, again: bool = False):
    """The losses and gradients of micro-batches whose backward passes come after all forward passes; with `again` of
    logits that are computed twice."""
    axis, generator = tensor_axis(ranks), torch.Generator().manual_seed(1)
    size = padded_vocabulary(VOCAB, ranks.world)
    x = torch.randn(micros, 15, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (micros, 15), generator=generator)
    targets[0, 3:9] = IGNORE
    rows = F.pad(weight, (0, 0, 0, size - VOCAB)).chunk(ranks.world)[ranks.rank].clone().requires_grad_(not frozen)
    loss = CrossEntropy(axis, VOCAB, cap, smoothing)
    how = (
        partial(ChunkedLoss(loss, chunk), shared=True)
        if not again
        else partial(recomputed_loss, loss=loss, chunk=chunk)
    )
    losses = [how(x[m], F.linear, rows, targets[m]).sum() for m in range(micros)]
    arrived = []
    for loss in losses:
        (0.3 * loss).backward()
        arrived.append(rows.grad is not None)
    whole, matrix = x.detach().clone().requires_grad_(), weight.clone().requires_grad_()
    logits = whole @ matrix.t()
    logits = torch.tanh(logits / cap) * cap if cap else logits
    criterion = torch.nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    expected = criterion(logits.flatten(0, 1), targets.flatten())
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
@pytest.mark.parametrize(("cap", "smoothing"), [(0.0, 0.0), (CAP, 0.0), (CAP, 0.2)])
def test_chunks_have_the_gradients_of_the_whole(ranks, world, chunk, cap, smoothing):
    """Micro-batches that wait for their backward pass have one gradient of the matrix, which comes with the last."""
    assert ranks(chunked_losses, world, chunk, cap, smoothing, False, 3) == [[False, False, True]] * world


def test_the_losses_of_a_frozen_head_have_factors_of_their_own(ranks):
    assert ranks(chunked_losses, 2, 4, CAP, 0.1, True, 2) == [[False, False]] * 2


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_logits_that_are_computed_again_have_the_same_gradients(ranks, smoothing):
    assert ranks(chunked_losses, 3, 4, CAP, smoothing, False, 2, True) == [[True, True]] * 3


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


# The loss of preference pairs, against the formula of the paper.

SMALL = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)
PAIR_VOCAB = 11


def pairs(rows: int = 6, padding: int = 0) -> MicroTensors:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(PAIR_VOCAB, (rows, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.arange(8) < torch.randint(1, 7, (rows, 1), generator=generator)] = IGNORE
    reference = torch.randn(rows, generator=generator, dtype=torch.float64) - 9
    if padding:
        targets[-padding:], reference[-padding:] = IGNORE, torch.nan
    return MicroTensors(tokens[:, :-1], targets, reference=reference)


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL, PAIR_VOCAB).double()


def expected(transformer: Transformer, micro: MicroTensors, rows: int, beta: float, smoothing: float) -> torch.Tensor:
    """Equation 7 of Rafailov et al. 2023, pair by pair; smoothed as Mitchell 2023, equation 3."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(0, rows, 2):
        ratios = []
        for each in (row, row + 1):
            log_p = transformer(micro.tokens[each : each + 1])[0].log_softmax(-1)
            answer = [(place, token) for place, token in enumerate(micro.targets[each].tolist()) if token != IGNORE]
            ratios.append(sum(log_p[place, token] for place, token in answer) - micro.reference[each])
        z = beta * (ratios[0] - ratios[1])
        total = total - (1 - smoothing) * torch.sigmoid(z).log() - smoothing * torch.sigmoid(-z).log()
    return total


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradients_are_those_of_the_formula(smoothing, chunk):
    micro, transformer = pairs(padding=2), model()
    loss = PairLoss(DpoOptions(0.3, smoothing), Axis("cp"))
    objective = Objective(transformer, CrossEntropy(Axis("tp"), PAIR_VOCAB), loss, chunk)
    found = objective(micro)
    gradients = torch.autograd.grad(found, list(transformer.parameters()))
    formula = expected(transformer, micro, 4, 0.3, smoothing)
    torch.testing.assert_close(found, formula, rtol=1e-12, atol=0)
    for mine, theirs in zip(gradients, torch.autograd.grad(formula, list(transformer.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
    assert objective.counted(micro) == 2


def test_facts_are_means_over_pairs_without_padding():
    loss = PairLoss(DpoOptions(0.5), Axis("cp"))
    reference = torch.tensor([-3.0, -3, -1, -1, torch.nan, torch.nan], dtype=torch.float64)
    micro = MicroTensors(torch.zeros(6, 1), torch.zeros(6, 1), reference=reference)
    first = loss(torch.tensor([1.0, 2, 4, 3, 0, 0], dtype=torch.float64), micro)  # -log p
    assert first == pytest.approx(sum(-F.logsigmoid(torch.tensor([0.5, -0.5]))))
    assert loss.log_probabilities is not None
    assert loss.log_probabilities[:4].tolist() == [-1, -2, -4, -3]
    facts = PairFacts.of(loss.take(first))
    assert facts == PairFacts(
        reward_chosen=pytest.approx(0.5 * (2 - 3) / 2),
        reward_rejected=pytest.approx(0.5 * (1 - 2) / 2),
        reward_margin=pytest.approx(0),
        reward_accuracy=0.5,
    )
    assert PairFacts.of(loss.take(first)) is None


# The loss in chunks: the same sum and gradients, with only a chunk of logits alive.

CHUNK_VOCAB, TOKENS = 997, 48


def step(chunk: int, tied: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the largest tensor over the vocabulary kept for the backward pass, in elements."""
    shape = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=TOKENS // 2, tied=tied)
    model = Transformer(shape, CHUNK_VOCAB).double()
    initialise(model, shape, 1)
    tokens = torch.arange(TOKENS).reshape(2, -1) * 7 % CHUNK_VOCAB
    targets = tokens.roll(-1, dims=1)
    targets[:, -3:] = -100
    largest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if tensor.shape[-1:] == (CHUNK_VOCAB,):
            largest = max(largest, tensor.numel())
        return tensor

    objective = Objective(model, CrossEntropy(Axis("tp"), CHUNK_VOCAB), chunk=chunk)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = objective(MicroTensors(tokens, targets))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, largest


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 16, TOKENS, 1000])
def test_equals_the_whole_loss(chunk, tied):
    expected_loss, expected, whole = step(0, tied)
    loss, gradients, kept = step(chunk, tied)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13)
    assert whole == TOKENS * CHUNK_VOCAB
    assert kept == 0


# Sequences in slices compute what whole ones do: the loss and every gradient.

SLICE_VOCAB = 13
GPT = ModelConfig(n_layers=2, d_model=16, n_heads=4, seq_len=12)
LLAMA = dataclasses.replace(GPT, n_kv_heads=2, positions="rope", norm="rmsnorm", bias=False, tied=False, dropout=0.3)
ALL = Stage(("0", "1"), first=True, last=True)


def objective_of(shape: ModelConfig, recomputed: Mode = "none") -> Objective:
    model = Transformer(shape, SLICE_VOCAB).double()
    initialise(model, shape, 1)
    recompute(model, Layout(recompute=recomputed))
    return Objective(model, CrossEntropy(Axis("tp"), SLICE_VOCAB))


def micro_of(shape: ModelConfig) -> MicroTensors:
    tokens = torch.arange(2 * (shape.seq_len + 1)).mul(7).remainder(SLICE_VOCAB).view(2, -1)
    return MicroTensors(tokens[:, :-1], tokens[:, 1:], Noise(3, 4, (5, 6)) if shape.dropout else None)


def gradients(objective: Objective) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    return found


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
@pytest.mark.parametrize("slices", [2, 3, 12])
def test_slices_compute_what_whole_sequences_do(shape, recomputed, slices):
    objective, micro = objective_of(shape, recomputed), micro_of(shape)
    whole = objective(micro)
    whole.backward()
    expected = gradients(objective)
    earlier, losses = Earlier(), []
    for number in range(slices):
        part = micro.sliced(number, slices)
        earlier.begin(number)
        losses.append(objective(part, ALL, None, earlier))
        earlier.end()
    torch.testing.assert_close(torch.stack(losses).sum(), whole, rtol=1e-12, atol=0)
    for number in reversed(range(slices)):
        roots, theirs = earlier.again(number)
        torch.autograd.backward([losses[number], *roots], [None, *theirs])
    found = gradients(objective)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12 * float(gradient.abs().max() + 1))


def test_a_slice_is_given_up_after_its_backward_pass():
    objective, micro, earlier = objective_of(GPT), micro_of(GPT), Earlier()
    losses = []
    for number in range(3):
        part = micro.sliced(number, 3)
        earlier.begin(number)
        losses.append(objective(replace(part, noise=None), ALL, None, earlier))
        earlier.end()
    assert (len(earlier.made), len(earlier.seen)) == (3, 3)
    for number in (2, 1, 0):
        roots, theirs = earlier.again(number)
        torch.autograd.backward([losses[number], *roots], [None, *theirs])
        assert len(roots) == (0 if number == 2 else 2 * GPT.n_layers)
        assert (len(earlier.made), len(earlier.seen)) == (number + 1, number)


def test_a_micro_batch_is_cut_into_equal_slices():
    micro = micro_of(LLAMA)
    parts = [micro.sliced(number, 4) for number in range(4)]
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), micro.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), micro.targets)
    assert torch.equal(torch.cat([part.positions for part in parts]), micro.positions)
    assert micro.sliced(0, 1) is micro
