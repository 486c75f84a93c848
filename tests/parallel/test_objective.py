"""The loss in chunks: the same sum and gradients, with only a chunk of logits alive."""

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.objective import MicroTensors, Objective
from phalanx.parallel.vocabulary import CrossEntropy

VOCAB, TOKENS = 997, 48


def step(chunk: int, tied: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the largest tensor over the vocabulary kept for the backward pass, in elements."""
    shape = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=TOKENS // 2, tied=tied)
    model = Transformer(shape, VOCAB).double()
    initialise(model, shape, 1)
    tokens = torch.arange(TOKENS).reshape(2, -1) * 7 % VOCAB
    targets = tokens.roll(-1, dims=1)
    targets[:, -3:] = -100
    largest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if tensor.shape[-1:] == (VOCAB,):
            largest = max(largest, tensor.numel())
        return tensor

    objective = Objective(model, CrossEntropy(Axis("tp"), VOCAB), chunk=chunk)
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
    assert whole == TOKENS * VOCAB
    assert kept == 0
