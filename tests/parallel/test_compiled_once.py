"""torch.compile makes as many graphs for many layers as for one of each kind, and none again in later steps."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from phalanx.blocks.kinds import block_kinds
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA, ModelConfig, MoE
from phalanx.config.train import Precision, Train
from phalanx.launch.ranks import Ranks
from phalanx.model.documents import Documents
from phalanx.model.noise import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import build
from phalanx.parallel.micro import MicroTensors

ALL = bool(os.environ.get("PHALANX_COMPILE"))
VOCABULARY, SEQ_LEN = 32, 16
GPT = ModelConfig(n_layers=2, d_model=16, n_heads=4, seq_len=SEQ_LEN)
LLAMA = replace(GPT, n_kv_heads=2, norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=False)
EXPERTS = replace(LLAMA, moe=MoE(n_experts=4, aux_loss=0.01, n_shared=1))
OUTSIDE = 3
"""Graphs besides those of blocks: embedding, final norm, loss."""


def run(
    ranks: Ranks,
    model: ModelConfig,
    layout: Layout,
    *,
    compiled: bool,
    length: int,
    documents: bool = False,
    precision: Precision = "fp64",
) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Returns the loss and gradients of the last step, and the number of graphs after each step."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    micros = 2 if layout.pp > 1 else 1
    real = torch.compile
    torch.compile = partial(real, backend="aot_eager")
    try:
        with torch.device("meta"):
            made = Transformer(model, VOCABULARY)
        train = Train(compile=compiled, cpu_linear="mkl", precision=precision, global_batch=micros * layout.dp_shard)
        job = Job(model=model, layout=layout, train=train)
        mesh = build(layout, "cpu")
        replica = apply(made.double(), job, mesh, torch.device("cpu"))
    finally:
        torch.compile = real
    loss, graphs = torch.zeros(()), list[int]()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
        packed = Documents(torch.arange(length).expand(2, -1) // (5 + step)) if documents else None
        noise = None
        if model.dropout:
            tp = mesh.axis("tp")
            own = (tp.rank, tp.size)
            noise = Noise(1, step, range(2), heads=own, tokens=own if layout.sp else (0, 1))
        replica.clear()
        micro = MicroTensors(tokens, tokens, noise, documents=packed)
        loss = replica.gradients([micro] * micros, 1.0)
        graphs.append(counters["stats"]["unique_graphs"])
    return loss, {f.name: f.gradient.clone() for f in replica.shards if f.gradient is not None}, graphs


CASES: dict[str, tuple[ModelConfig, Layout]] = {
    "plain": (GPT, Layout()),
    "experts, sequence parallel": (EXPERTS, Layout(tp=2, sp=True)),
    "FSDP, recomputed": (LLAMA, Layout(dp_shard=2, zero=3, recompute="full")),
    "ring": (LLAMA, Layout(cp=2)),
}
"""What `make test` runs."""
MORE: dict[str, tuple[ModelConfig, Layout]] = {
    "dropout": (replace(GPT, dropout=0.1), Layout()),
    "documents": (LLAMA, Layout()),
    "experts": (EXPERTS, Layout()),
    "sequence parallel": (LLAMA, Layout(tp=2, sp=True)),
    "LoRA": (replace(LLAMA, lora=LoRA(rank=2)), Layout()),
    "recomputed": (LLAMA, Layout(recompute="full")),
    "dropout, recomputed": (replace(GPT, dropout=0.1), Layout(recompute="full")),
    "selectively": (LLAMA, Layout(recompute="selective")),
    "dropout, selectively": (replace(GPT, dropout=0.1), Layout(recompute="selective")),
    "window": (replace(LLAMA, window=4, full_every=2), Layout()),
    "experts with capacity": (replace(EXPERTS, moe=replace(EXPERTS.moe, capacity=1.0)), Layout()),
    "experts, recomputed": (EXPERTS, Layout(recompute="full")),
    "expert parallel": (EXPERTS, Layout(dp_shard=2, ep=2)),
    "tensor parallel": (LLAMA, Layout(tp=2)),
    "parallel block": (replace(GPT, parallel_block=True), Layout(tp=2, sp=True)),
    "dropout, sequence parallel, recomputed": (replace(GPT, dropout=0.1), Layout(tp=2, sp=True, recompute="full")),
    "Ulysses": (LLAMA, Layout(cp=2, cp_ulysses=2)),
    "ring, selectively": (LLAMA, Layout(cp=2, recompute="selective")),
    "ZeRO-1": (LLAMA, Layout(dp_shard=2, zero=1)),
    "FSDP": (LLAMA, Layout(dp_shard=2, zero=3)),
    "offload": (LLAMA, Layout(offload="activations")),
    "offload, recomputed": (LLAMA, Layout(offload="activations", recompute="full")),
    "offload, selectively": (LLAMA, Layout(offload="activations", recompute="selective")),
    "accumulate": (LLAMA, Layout(dp_shard=2, zero=2, accumulate="sharded")),
    "loss in chunks": (LLAMA, Layout(loss_chunk=8)),
    "recompute=products": (LLAMA, Layout(recompute="products")),
    "tiles": (LLAMA, Layout(dp_shard=2, zero=3, tiles=2)),
    "1f1b": (LLAMA, Layout(pp=2, schedule="1f1b")),
    "fp8": (LLAMA, Layout()),
    "fp8, sequence parallel, recomputed": (LLAMA, Layout(tp=2, sp=True, recompute="full")),
    "split backward pass": (LLAMA, Layout(pp=2, schedule="zb_h1")),
    "split backward pass, tiles": (LLAMA, Layout(pp=2, schedule="zb_h1", tiles=2)),
    "split backward pass, offload": (LLAMA, Layout(pp=2, schedule="zb_h1", offload="activations")),
}
"""And `make compiled`."""


@pytest.mark.parametrize("name", [*CASES, *(MORE if ALL else ())])
def test_layers_of_a_kind_share_their_graphs_and_compute_the_same(ranks, name):
    model, layout = (CASES | MORE)[name]
    length = SEQ_LEN // layout.cp

    def runs(layers, compiled):
        world = layout.tp * layout.cp * layout.dp_shard * layout.pp
        call = partial(run, compiled=compiled, length=length, documents=name == "documents")
        call.keywords["precision"] = "fp8" if name.startswith("fp8") else "fp64"
        return ranks(call, world, replace(model, n_layers=layers * at_least), layout, timeout=300)

    at_least = len(kinds(model)) * layout.pp
    few, many, plain = runs(1, True), runs(2, True), runs(2, False)
    for one, more, expected in zip(few, many, plain, strict=True):
        (loss, gradients, graphs), (plain_loss, plain_gradients, none) = more, expected
        assert graphs == [graphs[0]] * 2 == one[2], "as many graphs as for fewer layers, none in the second step"
        assert none == [0, 0]
        torch.testing.assert_close(loss, plain_loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(gradients, plain_gradients, rtol=1e-9, atol=1e-9)
        if name in WHOLE:
            assert graphs[0] == len(kinds(model)) + OUTSIDE


WHOLE = ("plain", "recomputed", "LoRA", "ZeRO-1", "FSDP", "FSDP, recomputed", "fp8")
"""Those whose blocks are one graph each: nothing in them is left out of compilation."""


def kinds(model: ModelConfig) -> set[tuple[object, int]]:
    """Returns the kinds of the model's blocks, with their windows."""
    return {(kind, model.window_of(layer)) for layer, kind in enumerate(block_kinds(model))}
