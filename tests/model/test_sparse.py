"""Sparse attention against its definition, written out over all keys of every head, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.blocks.sparse import sparse_rows
from phalanx.config.model import MLA, ModelConfig, SparseAttention
from phalanx.model import sparse
from phalanx.model.cache import Cache
from phalanx.model.documents import Conversations, Documents
from phalanx.model.layers import rotary_table, rotate
from phalanx.model.moe import Routing

MODEL = ModelConfig(
    d_model=24,
    n_heads=3,
    seq_len=20,
    positions="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    mla=MLA(q_rank=10, kv_rank=8, rope_head_dim=4, nope_head_dim=6, v_head_dim=5),
    sparse=SparseAttention(top_k=6, index_heads=3, index_head_dim=8, index_loss=0.7),
)
FACTOR = 0.125


def made(model: ModelConfig = MODEL) -> sparse.IndexedAttention:
    torch.manual_seed(0)
    layer = sparse.IndexedAttention(model, 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    layer.core.routing = Routing(factor=FACTOR)
    return layer


def defined(
    layer: sparse.IndexedAttention,
    model: ModelConfig,
    x: Tensor,
    table: Tensor,
    documents: Documents | None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the output and the indexer's loss over queries that are real."""
    seq, index, mla = x.shape[1], layer.index, model.mla
    read = layer.q_norm(layer.wq_a(x))
    q, q_turned = layer.wq_b(read).unflatten(-1, (3, -1)).split(layer.parts, -1)
    latent, k_turned = layer.wkv_a(x).split([mla.kv_rank, mla.rope_head_dim], -1)
    k, v = layer.wkv_b(layer.kv_norm(latent)).unflatten(-1, (3, -1)).split(layer.kv_parts, -1)
    k_turned = rotate(k_turned.unsqueeze(2), table).expand(-1, -1, 3, -1)
    q, k = torch.cat((q, rotate(q_turned, table)), -1), torch.cat((k, k_turned), -1)
    seen = torch.ones(seq, seq, dtype=torch.bool).tril()[None]
    if documents is not None:
        seen = seen & (documents.numbers[:, :, None] == documents.numbers[:, None, :])
    own, read = x.detach(), read.detach()
    index_q = rotate(index.wq(read).unflatten(-1, (3, -1)), table)
    index_k = rotate(F.layer_norm(index.wk(own), (8,), index.norm.weight, index.norm.bias, 1e-6).unsqueeze(2), table)
    each = torch.einsum("bqhd,bkd->bqkh", index_q, index_k.squeeze(2)).div(8**0.5).relu()
    scores = (each * index.weights(own).div(3**0.5).unsqueeze(2)).sum(-1).masked_fill(~seen, -torch.inf)
    if not model.sparse.dense_warmup and model.sparse.top_k < seq:
        kept = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : model.sparse.top_k]
        seen = seen & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, kept, value=True)
    products = torch.einsum("bqhd,bkhd->bhqk", q, k) * model.head_size**-0.5
    p = products.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    target = p.detach().mean(1)
    logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    loss = (torch.xlogy(target, target) - target * logs).sum(-1)
    loss = loss.sum() if real is None else loss[real].sum()
    return layer.wo(torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)), loss


@pytest.mark.parametrize("rows", [0, 7], ids=["at once", "in runs"])
@pytest.mark.parametrize("documents", ["none", "whole", "padded"])
@pytest.mark.parametrize("fields", [{}, {"dense_warmup": True}, {"top_k": 40}, {"index_loss": 0.0}], ids=str)
def test_output_and_gradients_are_those_of_the_definition(
    fields: dict[str, object], documents: str, rows: int, monkeypatch: pytest.MonkeyPatch
):
    model = replace(MODEL, sparse=replace(MODEL.sparse, **fields))
    if rows:
        monkeypatch.setattr(sparse, "sparse_rows", lambda *_: rows)
    layer, routing = made(model), Routing(factor=FACTOR)
    layer.core.routing = routing
    x = torch.randn(2, 20, 24, dtype=torch.float64, requires_grad=True)
    table = rotary_table(model, torch.arange(20), torch.float64)
    numbers, of, conversations = torch.tensor([[0] * 8 + [1] * 12, [0] * 3 + [1] * 17]), None, None
    if documents != "none":
        of = Documents(numbers)
    if documents == "padded":  # the end of one sequence, and all of the other
        conversations = Conversations(torch.tensor([[0] * 8 + [1] * 7 + [-1] * 5, [-1] * 20]), 2)
    real = None if conversations is None else conversations.real
    expected, loss = defined(layer, model, x, table, of, real)
    found = layer(x, table, None, None, of, conversations)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    factor = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    total = (expected * factor).sum() + FACTOR * model.sparse.index_loss * loss
    of_definition = torch.autograd.grad(total, inputs)
    gradients = torch.autograd.grad((found * factor).sum(), inputs)
    for one, other in zip(gradients, of_definition, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert any(gradient.any() for gradient in gradients[-6:-1]) == bool(model.sparse.index_loss)
    penalties = routing.take().penalties
    assert penalties["index_queries"].item() == (40 if real is None else 15)
    noted = penalties["index_loss"]
    assert noted.item() == pytest.approx(model.sparse.index_loss * loss.item(), abs=1e-11)


def test_of_equal_scores_the_earlier_key_is_chosen():
    """An indexer whose scores are all 0 chooses the first keys, from however many."""
    layer = made()
    torch.nn.init.zeros_(layer.index.weights.weight)
    x = torch.randn(1, 20, 24, dtype=torch.float64)
    index = layer.index(x, x[..., :10], rotary_table(MODEL, torch.arange(20), torch.float64))
    for keys in (20, 13):
        seen = layer.core.seen(torch.arange(keys), keys, None)
        of_keys = sparse.IndexTensors(index.queries[:, :keys], index.keys[:, :keys], index.weights[:, :keys])
        chosen = layer.core.choose(of_keys, seen)
        assert chosen[0, 6:].tolist() == [list(range(6))] * (keys - 6)


def test_a_cache_of_latents_and_index_keys_gives_the_same():
    layer, cache = made(), Cache(20)
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    table = rotary_table(MODEL, torch.arange(20), torch.float64)
    with torch.no_grad():
        whole, parts = layer(x, table, None, None), []
        for first, end in ((0, 9), (9, 10), (10, 20)):
            parts.append(layer(x[:, first:end], table[:, first:end], None, cache))
            cache.length = end
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-11)
    keys, values = cache._layers[0]
    assert (keys.shape[-1], values.shape[-1]) == (8 + 4, 8)


def test_runs_of_queries_fit_in_memory():
    large = replace(MODEL, n_heads=128, sparse=SparseAttention(top_k=2048), mla=MLA(kv_rank=512))
    assert sparse_rows(1, 4096, 128, 4096, large) == 2**26 // (2048 * 576)
    assert sparse_rows(1, 20, 3, 20, MODEL) == 20
