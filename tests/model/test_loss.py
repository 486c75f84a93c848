from __future__ import annotations

import math

import pytest
import torch

from phalanx.config.data import IGNORE
from phalanx.model.loss import cross_entropy_sum, valid_tokens


def test_the_sum_leaves_ignored_positions_out():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, IGNORE], [IGNORE, 2, 2]])
    expected = 0.0
    for row in range(2):
        for position in range(3):
            target = int(targets[row, position])
            if target != IGNORE:
                scores = logits[row, position].tolist()
                expected += math.log(sum(map(math.exp, scores))) - scores[target]
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert valid_tokens(targets).item() == 4


def test_a_batch_without_valid_targets_costs_nothing():
    targets = torch.full((2, 3), IGNORE)
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, targets)
    loss.backward()
    assert loss.item() == 0
    assert valid_tokens(targets).item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype):
    logits = torch.zeros(1, 4000, 2, dtype=dtype)
    loss = cross_entropy_sum(logits, torch.zeros(1, 4000, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4000 * math.log(2), rel=1e-6)
