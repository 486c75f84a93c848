"""torch's parallelize_module, as benchmarks compare with it, computes what one process does."""

from __future__ import annotations

import pytest
import torch
from benchmarks.peers import harness, torch_tp
from torch.distributed.tensor import DTensor

from phalanx.config.job import Job
from phalanx.config.model import ModelConfig

JOB = Job(model=ModelConfig(n_layers=2, d_model=16, n_heads=2, seq_len=8, vocab_size=11))


def losses_and_parameters(sequence: bool | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps on one process (None), or cut over the ranks of the default group."""
    torch.set_default_dtype(torch.float64)
    model = harness.build(JOB)
    if sequence is not None:
        torch_tp.cut(model, 2, sequence)
    optimizer = harness.adamw(model, JOB)
    step = harness.plain_step(model, optimizer, lambda: torch_tp.clip(model, limit=0.1))
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(2)]
    named = dict(model.named_parameters())
    return losses, {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named.items()}


def cut_over(ranks, sequence):
    return losses_and_parameters(sequence)


def alone(ranks):
    return losses_and_parameters(None)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and sp"])
def test_two_ranks_equal_one_process(ranks, sequence):
    expected, parameters = ranks(alone, 1)[0]
    for losses, found in ranks(cut_over, 2, sequence):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert expected[1] < expected[0]
        for name, value in found.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-9, atol=1e-12, msg=name)
