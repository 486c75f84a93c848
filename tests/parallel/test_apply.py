"""What apply makes of a model: the techniques that change how it computes, but not what."""

import logging
import shutil
from typing import Literal

import pytest
import torch

from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.launch.ranks import Ranks
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import Construction, apply, apply_compile
from phalanx.parallel.mesh import alone, build
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.offload import Host
from phalanx.techniques.compiling import refusal

SHAPE = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)


def loss_and_gradients(ranks, train):
    with torch.device("meta"):
        model = Transformer(SHAPE, 11)
    replica = apply(model, Job(model=SHAPE, train=train), build(Layout(), "cpu"), torch.device("cpu"))
    tokens = torch.arange(16).reshape(2, 8) % 11
    loss = replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
    return loss, {f.name: f.gradient for f in replica.shards}


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile builds its CPU kernels with g++, which is not here")
def test_compiled_blocks_and_loss_compute_the_same(ranks):
    (loss, gradients), (expected_loss, expected) = (
        ranks(loss_and_gradients, 1, Train(compile=on, cpu_linear="mkl"), timeout=200)[0] for on in (True, False)
    )
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def lines_and_changed_forwards(ranks: Ranks, layout: Layout) -> tuple[list[str], list[str]]:
    """The log lines of one rank, and the modules whose `forward` is not that of their class."""
    lines: list[str] = []
    logger, handler = logging.getLogger("phalanx"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with torch.device("meta"):
            model = Transformer(SHAPE, 11)
        job = Job(model=SHAPE, layout=layout, train=Train(global_batch=4, cpu_linear="mkl"))
        apply(model, job, build(layout, "cpu"), torch.device("cpu"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines, [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_each_technique_is_one_line_of_rank_zero_in_the_order_in_which_they_compose(ranks):
    layout = Layout(dp_shard=2, tp=2, sp=True, cp=2, zero=1, recompute="selective", loss_chunk=8)
    results = ranks(lines_and_changed_forwards, 8, layout)
    assert [line.split(":")[0] for line in results[0][0]] == [
        "mesh",
        "tensor parallel",
        "context parallel",
        "recompute",
        "loss",
        "data parallel",
    ]
    assert results[0][0][1] == (
        "tensor parallel: 2 ranks, vocabulary 11 + 1 padding, sequence parallel with 4 tokens of each sequence per rank"
    )
    assert all(lines == [] for lines, _ in results[1:])
    assert all(changed == [] for _, changed in results), "layers are exchanged by name or by declared hooks"


def test_auto_compiles_on_gpus_alone_and_says_why_it_does_not(caplog, monkeypatch):
    def compiled(device, layout, *, triton=True, asked: bool | Literal["auto"] = "auto"):
        caplog.clear()
        caplog.set_level(logging.INFO, "phalanx")
        monkeypatch.setattr("phalanx.parallel.compiled.has_triton", lambda: triton)
        with torch.device("meta"):
            model = Transformer(SHAPE, 11)
        job = Job(SHAPE, layout=layout, train=Train(compile=asked))
        parts = Construction(model, job, alone(), torch.device(device), Host(torch.device("cpu")))
        apply_compile(parts)
        return parts.compiled, "run" in vars(model.blocks["0"]), [each.getMessage() for each in caplog.records]

    assert compiled("cpu", Layout()) == (False, False, [])
    threads = Layout(dp_replicate=2, data_parallel="threads")
    assert compiled("cuda", threads) == (False, False, [f"compile: off, {refusal(Job(layout=threads))}"])
    assert compiled("cuda", Layout())[:2] == (True, True)
    off = "compile: off, torch finds no Triton for this GPU"
    assert compiled("cuda", Layout(), triton=False) == (False, False, [off])
    with pytest.raises(JobError, match="no Triton for this GPU; nearest legal: train.compile=auto"):
        compiled("cuda", Layout(), triton=False, asked=True)
