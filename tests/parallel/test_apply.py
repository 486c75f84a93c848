"""What apply makes of a model: the techniques that change how it computes, but not what."""

import shutil

import pytest
import torch

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.train import Train
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import build
from phalanx.parallel.micro import MicroTensors

SHAPE = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)


def loss_and_gradients(ranks, train):
    with torch.device("meta"):
        model = Transformer(SHAPE, 11)
    replica = apply(model, Job(model=SHAPE, train=train), build(Layout(), "cpu"), torch.device("cpu"))
    tokens = torch.arange(16).reshape(2, 8) % 11
    loss = replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
    return loss, {f.name: f.gradient for f in replica.fragments}


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile builds its CPU kernels with g++, which is not here")
def test_compiled_blocks_compute_the_same(ranks):
    (loss, gradients), (expected_loss, expected) = (
        ranks(loss_and_gradients, 1, Train(compile=on, cpu_linear="mkl"), timeout=200)[0] for on in (True, False)
    )
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
