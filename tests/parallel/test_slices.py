"""Sequences in slices compute what whole ones do: the loss and every gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import Noise, initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel.objective import Earlier, MicroTensors, Objective
from phalanx.parallel.recompute import recompute
from phalanx.parallel.stages import Stage
from phalanx.parallel.vocabulary import CrossEntropy
from phalanx.partition.derived import Mode

VOCAB = 13
GPT = ModelConfig(n_layers=2, d_model=16, n_heads=4, seq_len=12)
LLAMA = dataclasses.replace(GPT, n_kv_heads=2, positions="rope", norm="rmsnorm", bias=False, tied=False, dropout=0.3)
ALL = Stage(("0", "1"), first=True, last=True)


def objective_of(shape: ModelConfig, recomputed: Mode = "none") -> Objective:
    model = Transformer(shape, VOCAB).double()
    initialise(model, shape, 1)
    recompute(model, Layout(recompute=recomputed))
    return Objective(model, CrossEntropy(Axis("tp"), VOCAB))


def micro_of(shape: ModelConfig) -> MicroTensors:
    tokens = torch.arange(2 * (shape.seq_len + 1)).mul(7).remainder(VOCAB).view(2, -1)
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
        part = micro.slice(number, slices)
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
        part = micro.slice(number, 3)
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
    parts = [micro.slice(number, 4) for number in range(4)]
    assert torch.equal(torch.cat([part.tokens for part in parts], 1), micro.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), micro.targets)
    assert torch.equal(torch.cat([part.positions for part in parts]), micro.positions)
    assert micro.slice(0, 1) is micro
