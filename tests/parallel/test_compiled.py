"""torch.compile: as many graphs as kinds of layers, and a cache in the user's folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from phalanx.blocks.kinds import block_kinds
from phalanx.check.job import problems_of
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, DeltaNet, LoRA, ModelConfig, MoE, SparseAttention, WideHeads
from phalanx.launch.ranks import Ranks
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer
from phalanx.parallel.apply import apply
from phalanx.parallel.compiled import FOLDER, keep_compiled
from phalanx.parallel.mesh import alone, build
from phalanx.parallel.objective import FurtherTokens, MicroTensors
from phalanx.parallel.pipeline import PipeDream
from phalanx.partition.derived import Mode

# What torch compiles is kept in the user's cache folder, and a folder that others can write is not used.


ALL = bool(os.environ.get("PHALANX_COMPILE"))
SHAPE = ModelConfig(n_layers=1, d_model=16, n_heads=2, seq_len=8)


def found_in_cache(ranks: Ranks, home: str) -> dict[str, int]:
    """Computes with a compiled model on the first rank, then on the second. Returns how often each found a graph."""
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    inductor.compile_threads, inductor.cpp_cache_precompile_headers = 1, False
    os.environ.pop(FOLDER, None)
    os.environ["XDG_CACHE_HOME"] = home
    for turn in range(2):
        if ranks.rank == turn:
            with torch.device("meta"):
                model = Transformer(SHAPE, 11)
            replica = apply(model, Job(SHAPE, train=Train(compile=True)), alone(), torch.device("cpu"))
            counters.clear()
            tokens = torch.arange(16).reshape(2, 8) % 11
            replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
        dist.barrier()
    return dict(counters["inductor"])


@pytest.mark.skipif(not ALL, reason="half a minute: make compiled")
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile builds its CPU kernels with g++, which is not here")
def test_a_second_process_finds_every_graph(ranks, tmp_path):
    first, second = ranks(found_in_cache, 2, str(tmp_path), timeout=600)
    assert first["fxgraph_cache_miss"] > 0
    assert (second["fxgraph_cache_hit"], second.get("fxgraph_cache_miss", 0)) == (first["fxgraph_cache_miss"], 0)
    (folder,) = (tmp_path / "phalanx" / "compiled").iterdir()
    assert folder.name.startswith(f"torch-{torch.__version__}-python-3.")
    assert folder.stat().st_mode & 0o777 == 0o700


def loss_and_gradients(ranks, train):
    with torch.device("meta"):
        model = Transformer(SHAPE, 11)
    replica = apply(model, Job(model=SHAPE, train=train), alone(), torch.device("cpu"))
    tokens = torch.arange(16).reshape(2, 8) % 11
    loss = replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
    return loss, {f.name: f.gradient for f in replica.shards}


@pytest.mark.skipif(not ALL, reason="minutes: make compiled")
def test_compiled_blocks_and_loss_compute_the_same(ranks):
    (loss, gradients), (expected_loss, expected) = (
        ranks(loss_and_gradients, 1, Train(compile=on, cpu_linear="mkl"), timeout=200)[0] for on in (True, False)
    )
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("stated", ["", default_cache_dir()])
def test_the_folder_is_the_users_own(cache, monkeypatch, stated):
    monkeypatch.setenv(FOLDER, stated)
    keep_compiled()
    folder = Path(os.environ[FOLDER])
    assert folder.parent == cache / "phalanx" / "compiled"
    assert {each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])} == {0o700}
    monkeypatch.setenv(FOLDER, str(cache / "mine"))  # as a user sets it
    keep_compiled()
    assert os.environ[FOLDER] == str(cache / "mine")


@pytest.mark.parametrize(
    ("mode", "above", "why"),
    [(0o770, 0o700, "can be written by others"), (0o700, 0o777, "is in .*, which everyone can write")],
)
def test_code_is_not_read_from_where_others_write(cache, caplog, monkeypatch, mode, above, why):
    folder = cache / "above" / "kept"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(above)
    monkeypatch.setenv(FOLDER, str(folder))
    caplog.set_level(logging.WARNING, "phalanx")
    keep_compiled()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"compile: nothing is kept for the next start: {folder} ")
    assert re.search(why, record.getMessage())
    assert Path(os.environ[FOLDER]).stat().st_mode & 0o777 == 0o700
    assert os.environ[FOLDER] != str(folder)


def test_a_file_or_a_link_is_no_folder(cache, caplog, monkeypatch):
    (cache / "file").write_text("")
    (cache / "link").symlink_to(cache, target_is_directory=True)
    for name in ("file", "link"):
        monkeypatch.setenv(FOLDER, str(cache / name))
        keep_compiled()
        assert os.environ[FOLDER] != str(cache / name)
    assert len(caplog.records) == 2


# torch.compile makes as many graphs for many layers as for one of each kind, none again in later steps, and as many
# again for other lengths, whatever they are.

VOCABULARY, SEQ_LEN = 32, 16
GPT = ModelConfig(n_layers=2, d_model=16, n_heads=4, seq_len=SEQ_LEN)
LLAMA = replace(GPT, n_kv_heads=2, norm="rmsnorm", activation="swiglu", positions="rope", bias=False, tied=False)
EXPERTS = replace(LLAMA, moe=MoE(n_experts=4, aux_loss=0.01, n_shared=1))
LATENT = replace(LLAMA, n_kv_heads=0, mla=MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4))
GEMMA = replace(LLAMA, activation="geglu", norm_place="both", attention_softcap=50.0, logit_softcap=30.0, tied=True)
GEMMA = replace(GEMMA, scaled_embedding=True, qk_norm="head", window=4, full_every=2, window_rope_theta=1e3)
GPT_OSS = replace(EXPERTS, activation="swiglu_clamped", sinks=True, window=4, full_every=2, qkv_bias=True)
OLMO = replace(LLAMA, norm_place="after", qk_norm="width", n_kv_heads=0)
NEOX = replace(GPT, parallel_block=True, positions="rope", rotary_fraction=0.5)
QWEN_NEXT = replace(LLAMA, attention="delta,gated_heads", qk_norm="head", rotary_fraction=0.5)
QWEN_NEXT = replace(QWEN_NEXT, delta=DeltaNet(n_heads=4, key_heads=2, key_head_dim=4, head_dim=4))
DEEPSEEK = replace(LATENT, sparse=SparseAttention(top_k=4, index_heads=2, index_head_dim=4), n_layers=3, mtp=1)
GEMMA_4 = replace(GEMMA, attention_softcap=0.0, n_layers=6, shared_keys=2, double_mlp=True, wide=WideHeads(8, 1))
GEMMA_4 = replace(GEMMA_4, layer_scale=True, v_norm=True)  # one tensor of layer_embedding is as wide as all layers
FAMILIES = {
    "GPT": GPT,
    "Llama": LLAMA,
    "experts": EXPERTS,
    "latent attention": LATENT,
    "Gemma": GEMMA,
    "gpt-oss": GPT_OSS,
    "OLMo": OLMO,
    "NeoX": NEOX,
    "Qwen3-Next": QWEN_NEXT,
    "DeepSeek-V3.2": DEEPSEEK,
    "Gemma 4": GEMMA_4,
}
WAYS = {
    "alone": Layout(),
    "documents": Layout(),
    "dropout": Layout(),
    "LoRA": Layout(),
    "tensor parallel": Layout(tp=2),
    "sequence parallel": Layout(tp=2, sp=True),
    "ring": Layout(cp=2),
    "Ulysses": Layout(cp=2, cp_ulysses=2),
    "FSDP": Layout(dp_shard=2, zero=3),
    "recompute=full": Layout(recompute="full"),
    "recompute=selective": Layout(recompute="selective"),
}
CHANGED: dict[str, dict[str, Any]] = {"dropout": {"dropout": 0.1}, "LoRA": {"lora": LoRA(rank=2)}}
OUTSIDE = 3
"""Graphs besides those of blocks: embedding, final norm, loss."""


class Found(NamedTuple):
    """The outcome of a model's steps."""

    loss: Tensor
    gradients: dict[str, Tensor]
    frames: list[int]
    """What dynamo has compiled after each step, also of the models before."""
    graphs: list[int]
    """Of these the graphs with operations: others hold sizes alone."""


def few_many_and_plain(
    ranks: Ranks, model: ModelConfig, layout: Layout, lengths: list[int], documents: bool, precision: dict[str, Any]
) -> list[Found]:
    """Computes a step of each length, compiled, with one layer of each kind per pipeline rank and then with two, and
    with these a step of the last length as it is."""
    import torch._dynamo
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics, set_compilation_metrics_limit

    torch._dynamo.reset()
    set_compilation_metrics_limit(10_000)
    clear_compilation_metrics()
    micros = 2 if layout.pp > 1 else 1
    mesh, cpu = build(layout, "cpu"), torch.device("cpu")
    found, least = list[Found](), len(kinds(model)) * layout.pp
    for layers, compiled in ((least, True), (2 * least, True), (2 * least, False)):
        config = replace(model, n_layers=layers)
        with torch.device("meta"):
            made = Transformer(config, VOCABULARY)
        train = Train(compile=compiled, cpu_linear="mkl", global_batch=micros * layout.dp_shard, **precision)
        with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            replica = apply(made.double(), Job(model=config, layout=layout, train=train), mesh, cpu)
        loss, frames, graphs = torch.zeros(()), list[int](), list[int]()
        for step, length in [*enumerate(lengths)][0 if compiled else -1 :]:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
            packed = Documents(torch.arange(length).expand(2, -1) // (5 + step)) if documents else None
            noise = None
            if model.dropout:
                tp = mesh.axis("tp")
                own = (tp.rank, tp.size)
                noise = Noise(1, step, range(2), heads=own, tokens=own if layout.sp else (0, 1))
            replica.clear()
            further = (FurtherTokens.of(tokens, tokens, packed, depth) for depth in range(1, model.mtp + 1))
            micro = MicroTensors(tokens, tokens, noise, documents=packed, further=tuple(further))
            if isinstance(replica.runner, PipeDream):
                loss = replica.runner.run_batch([micro] * micros, 1.0, None, lambda _: None)
            else:
                loss = replica.gradients([micro] * micros, 1.0)
            operations = [each.graph_op_count for each in get_compilation_metrics() if each.co_name]
            frames.append(len(operations))
            graphs.append(sum(map(bool, operations)))
        gradients = {f.name: f.gradient.clone() for f in replica.shards if f.gradient is not None}
        found.append(Found(loss, gradients, frames, graphs))
    return found


CASES: dict[str, tuple[ModelConfig, Layout]] = {"sequence parallel": (GPT, Layout(tp=2, sp=True))}
"""What `make test` runs."""


def every_family() -> Iterator[tuple[str, tuple[ModelConfig, Layout]]]:
    """Yields each family with each way that is legal for it."""
    for (family, model), (way, layout) in product(FAMILIES.items(), WAYS.items()):
        changed = replace(model, **CHANGED.get(way, {}))
        if not problems_of(Job(model=changed, layout=layout)):
            yield f"{family}, {way}", (changed, layout)


MORE: dict[str, tuple[ModelConfig, Layout]] = {
    "plain": (GPT, Layout()),
    "experts, sequence parallel": (EXPERTS, Layout(tp=2, sp=True)),
    "FSDP, recomputed": (LLAMA, Layout(dp_shard=2, zero=3, recompute="full")),
    **dict(every_family()),
    "dropout, recomputed": (replace(GPT, dropout=0.1), Layout(recompute="full")),
    "dropout, selectively": (replace(GPT, dropout=0.1), Layout(recompute="selective")),
    "experts with capacity": (replace(EXPERTS, moe=replace(EXPERTS.moe, capacity=1.0)), Layout()),
    "expert parallel": (EXPERTS, Layout(dp_shard=2, ep=2)),
    "dropout, sequence parallel, recomputed": (replace(GPT, dropout=0.1), Layout(tp=2, sp=True, recompute="full")),
    "ring, selectively": (LLAMA, Layout(cp=2, recompute="selective")),
    "ZeRO-1": (LLAMA, Layout(dp_shard=2, zero=1)),
    "offload": (LLAMA, Layout(offload="activations")),
    "offload, recomputed": (LLAMA, Layout(offload="activations", recompute="full")),
    "offload, selectively": (LLAMA, Layout(offload="activations", recompute="selective")),
    "accumulate": (LLAMA, Layout(dp_shard=2, zero=2, accumulate="sharded")),
    "loss in chunks": (LLAMA, Layout(loss_chunk=8)),
    "recompute=products": (LLAMA, Layout(recompute="products")),
    "recompute=mlp": (LLAMA, Layout(recompute="mlp")),
    "recompute=mlp, FSDP": (LLAMA, Layout(dp_shard=2, zero=3, recompute="mlp")),
    "recompute=mlp, sequence parallel": (LLAMA, Layout(tp=2, sp=True, recompute="mlp")),
    "recompute=mlp, experts": (EXPERTS, Layout(recompute="mlp")),
    "recompute=mlp, split backward pass": (LLAMA, Layout(pp=2, schedule="zb_h1", recompute="mlp")),
    "recompute=products, split backward pass": (LLAMA, Layout(pp=2, schedule="zb_h1", recompute="products")),
    "recompute=products, tensor parallel": (LLAMA, Layout(tp=2, recompute="products")),
    "recompute=products, expert parallel": (EXPERTS, Layout(dp_shard=2, ep=2, recompute="products")),
    "recompute=products, offload": (LLAMA, Layout(offload="activations", recompute="products")),
    "tiles": (LLAMA, Layout(dp_shard=2, zero=3, tiles=2)),
    "1f1b": (LLAMA, Layout(pp=2, schedule="1f1b")),
    "fp8": (LLAMA, Layout()),
    "fp8, sequence parallel, recomputed": (LLAMA, Layout(tp=2, sp=True, recompute="full")),
    "fp8, experts": (EXPERTS, Layout()),
    "fp8, expert parallel": (EXPERTS, Layout(dp_shard=2, ep=2)),
    "mxfp8": (LLAMA, Layout()),
    "mxfp8, experts": (EXPERTS, Layout()),
    "slices": (LLAMA, Layout(pp=2, schedule="terapipe", pp_slices=2)),
    "no flush": (LLAMA, Layout(pp=2, schedule="pipedream")),
    "split backward pass": (LLAMA, Layout(pp=2, schedule="zb_h1")),
    "split backward pass, tiles": (LLAMA, Layout(pp=2, schedule="zb_h1", tiles=2)),
    "split backward pass, offload": (LLAMA, Layout(pp=2, schedule="zb_h1", offload="activations")),
}
"""And `make compiled`."""


@pytest.mark.parametrize("name", [*CASES, *(MORE if ALL else ())])
def test_layers_of_a_kind_share_their_graphs_and_compute_the_same(ranks, name):
    model, layout = (CASES | MORE)[name]
    length = SEQ_LEN // layout.cp
    lengths = [length, length, *([length // 2, length // 4 * 3] if ALL else [])]

    precision: dict[str, Any] = {"precision": "fp64"}
    if name.startswith(("fp8", "mxfp8")):
        precision = {"precision": "fp8", "fp8_scaling": "rowwise" if name.startswith("fp8") else "mxfp8"}
    world = layout.tp * layout.cp * layout.dp_shard * layout.pp
    arguments = (model, layout, lengths, "documents" in name, precision)
    for few, many, plain in ranks(few_many_and_plain, world, *arguments, timeout=600):
        assert {*many.frames, *plain.frames} == {few.frames[-1]}, "nothing for more layers"
        assert few.frames[0] == few.frames[1], "nothing in the second step"
        assert set(few.frames[3:]) <= {*few.frames[2:3]}, "nothing for a third length"
        # Of what is compiled again some held sizes alone before: one graph of eleven more for windows under FSDP.
        # A module for further tokens shares graphs with blocks only while their sizes are fixed.
        assert few.frames[-1] <= 2 * few.frames[0] + 3 * model.mtp, "each once more for another length"
        torch.testing.assert_close(many.loss, plain.loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(many.gradients, plain.gradients, rtol=1e-9, atol=1e-9)
        if name in WHOLE:
            assert few.graphs[0] == len(kinds(model)) + OUTSIDE


WHOLE = ("plain", "Llama, recompute=full", "Llama, LoRA", "ZeRO-1", "Llama, FSDP", "FSDP, recomputed", "fp8", "mxfp8")
"""Those whose blocks are one graph each: nothing in them is left out of compilation."""


def kinds(model: ModelConfig) -> set[tuple[object, int]]:
    """Returns the kinds of the model's blocks, with their windows."""
    return {(kind, model.window_of(layer)) for layer, kind in enumerate(block_kinds(model))}


# With recompute=products and mlp a compiled block saves what a plain one does.


def saved_bytes(_: Ranks, model: ModelConfig, mode: Mode, compiled: bool) -> int:
    """Returns the bytes that a forward pass saves for its backward pass, without parameters."""
    with torch.device("meta"):
        made = Transformer(model, VOCABULARY).double()
    train = Train(compile=compiled, cpu_linear="mkl", precision="fp64")
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
        job = Job(model=model, layout=Layout(recompute=mode), train=train)
        replica = apply(made, job, alone(), torch.device("cpu"))
    weights = {weight.untyped_storage().data_ptr() for weight in replica.objective.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            found[place] = tensor  # which stays, so that no other tensor takes its place
        return tensor

    tokens = torch.arange(2 * SEQ_LEN).reshape(2, -1) % VOCABULARY
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replica.forward_backward(MicroTensors(tokens, tokens, None), 1.0, last=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(
    ("family", "mode"),
    [("Llama", "products")]
    + [(family, "products") for family in ("GPT", "OLMo", "experts") if ALL]
    + [(family, "mlp") for family in ("Llama", "experts") if ALL],
)
def test_compiled_blocks_save_what_plain_ones_do(ranks, family, mode):
    """Between two compiled graphs a tensor per block stays: a norm's output that a layer beside them reads."""
    model = FAMILIES[family]
    compiled, plain = (ranks(saved_bytes, 1, model, mode, on, timeout=200)[0] for on in (True, False))
    most = model.n_layers * 2 * SEQ_LEN * model.d_model * 8
    assert 0 <= compiled - plain <= most * (mode == "mlp" or family == "experts")
    assert compiled < 0.8 * ranks(saved_bytes, 1, model, "none", False)[0]
