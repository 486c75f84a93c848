"""Heads whose values are narrower or wider than their queries never have whole scores on a CPU."""

import pytest
import torch

from phalanx.model.attention import Reach, blocked_attention
from phalanx.model.attention_blocks import Scoring


@pytest.mark.parametrize("width", [4, 12])
def test_unequal_widths_equal_attention_by_whole_scores(width: int) -> None:
    torch.manual_seed(0)
    make = [torch.randn(2, 3, 20, size, dtype=torch.float64, requires_grad=True) for size in (8, 8, width)]
    q, k, v = make
    unseen = torch.ones(20, 20, dtype=torch.bool).triu(1)
    whole = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(unseen, float("-inf")).softmax(-1) @ v
    blocked = blocked_attention(q, k, v, Reach(0, None, Scoring()), None)
    given = torch.randn_like(whole)
    torch.testing.assert_close(blocked, whole, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(blocked, make, given), torch.autograd.grad(whole, make, given), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
