"""Updates of whole matrices: what ranks compute of shared ones is what one process computes of the whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.model.seeding import derive_seed
from phalanx.model.transformer import Transformer
from phalanx.optimizers.entry import is_hidden_matrix
from phalanx.parallel import mesh as meshes
from phalanx.parallel.apply import apply
from phalanx.parallel.parameter_shards import MatrixUpdates

VOCAB = 29
LLAMA = ModelConfig(
    n_layers=2, d_model=20, n_heads=4, n_kv_heads=1, head_dim=6, d_ff=36, seq_len=16,
    norm="rmsnorm", positions="rope", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    LLAMA,
    n_kv_heads=4,
    bias=True,
    moe=MoE(n_experts=4, top_k=2, d_ff=12, n_dense_layers=1, n_shared=1),
    mla=MLA(q_rank=12, kv_rank=10, rope_head_dim=4, nope_head_dim=6, v_head_dim=5),
)


def cubed(x: Tensor) -> Tensor:
    """Depends on all of a matrix."""
    return x @ x.mT @ x


def whole_of(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(0, name))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def differences(ranks, job: Job) -> tuple[dict[str, float], int, bool]:
    mesh = meshes.build(job.layout, "cpu")
    with torch.device("meta"):
        model = Transformer(job.model, VOCAB).double()
    replica = apply(model, job, mesh, torch.device("cpu"))
    updates = MatrixUpdates(replica.shards, mesh.axis("tp"))
    here = {}
    for shard in replica.shards:
        here[shard.name] = torch.empty_like(shard.value)
        shard.assign(whole_of(shard.whole_name, shard.tensor_slice.whole), here[shard.name])
    mesh.ledger.clear()
    updates.apply({name: here[name] for name in updates.names}, cubed)
    found = {}
    for shard in replica.shards:
        expected, whole = torch.empty_like(shard.value), whole_of(shard.whole_name, shard.tensor_slice.whole)
        matrix = is_hidden_matrix(shard.whole_name, whole.shape)
        assert matrix == (shard.name in updates.names)
        shard.assign(cubed(whole) if matrix else whole, expected)
        error = (here[shard.name] - expected).abs()
        found[shard.name] = float(error.max()) / float(whole.norm() ** 3) if error.numel() else 0.0
    travel = any(m.holder is None for group in updates.groups for m in group.matrices)
    return found, len(updates.groups), travel


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (LLAMA, "accumulation=1"),
        (LLAMA, "dp_replicate=2"),
        (LLAMA, "dp_shard=3,zero=1"),
        (LLAMA, "dp_shard=3,zero=2,bucket_mb=0.01"),
        (LLAMA, "dp_shard=3"),
        (LLAMA, "dp_shard=2,tiles=2"),
        (LLAMA, "tp=2,dp_shard=2"),
        (LLAMA, "tp=4,sp=true"),
        (LLAMA, "tp=2,dp_shard=2,zero=1,pp=2"),
        (EXPERTS, "dp_shard=4,ep=2"),
        (EXPERTS, "dp_shard=4,ep=2,zero=1"),
        (EXPERTS, "dp_shard=2,cp=2,ep=2,tp=2,zero=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_compute_what_one_process_computes(ranks, model, line):
    layout = dataclasses.replace(layout_line.parse(line), micro_batch=1)
    job = Job(model=model, layout=layout, train=Train(global_batch=layout.data_ranks * layout.pp, precision="fp64"))
    for rank, (found, groups, _) in enumerate(ranks(differences, layout.processes, job)):
        assert groups
        assert max(found.values()) < 1e-12, f"rank {rank}: {found}"
