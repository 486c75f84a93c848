"""Attention over one block of keys: output, log-sum-exp and gradients against the formula, by every back end."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from phalanx.model import attention_blocks, documents
from phalanx.model.attention_blocks import Seen, attend, gradients

BATCH, HEADS, SIZE = 2, 4, 8
CASES = {  # key heads, queries, keys, size of v's heads, what is seen
    "everything": (4, 6, 6, 8, ""),
    "fewer keys than queries": (4, 12, 6, 8, ""),
    "more keys than queries": (2, 6, 12, 8, ""),
    "causal": (4, 12, 12, 8, "causal"),
    "causal, grouped queries, narrow values": (2, 12, 12, 6, "causal"),
    "wide values": (1, 6, 6, 12, ""),
    "mask of every sample": (2, 6, 9, 8, "mask"),
    "mask that hides all keys of some queries": (2, 6, 9, 8, "holes"),
    "mask that hides a run of many keys": (4, 6, 1200, 8, "late"),
    "mask that hides everything": (4, 6, 6, 6, "nothing"),
    "dropout": (2, 6, 6, 8, "dropout"),
    "causal with dropout": (2, 6, 6, 6, "causal dropout"),
    "mask with holes and dropout": (1, 6, 9, 8, "holes dropout"),
}


def inputs_of(
    kv_heads: int, queries: int, keys: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the output's gradient."""
    torch.manual_seed(1)
    # As projections give them: the heads of a token lie together.
    shapes = [(queries, HEADS, SIZE), (keys, kv_heads, SIZE), (keys, kv_heads, width), (queries, HEADS, width)]
    q, k, v, given = (torch.randn(BATCH, *shape, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v, given


def seen_of(words: str, queries: int, keys: int) -> Seen:
    mask = None
    if {"mask", "holes", "late", "nothing"} & set(words.split()):
        mask = torch.rand(BATCH, 1, queries, keys) < 0.5
        mask[:, :, :, keys - 1] = True
        if "holes" in words:
            mask[:, :, 2:4] = False
        if "late" in words:
            mask[:, :, :, : keys - 20] = False
        if "nothing" in words:
            mask[:] = False
    keep = torch.rand(BATCH, HEADS, queries, keys) < 0.7 if "dropout" in words else None
    return Seen("causal" in words, mask, keep, 1 / 0.7)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / SIZE**0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    visible = visible.tril() if seen.causal else visible if seen.mask is None else seen.mask
    scores = scores.masked_fill(~visible, -torch.inf)
    probabilities = scores.softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
    return (probabilities if seen.keep is None else probabilities * seen.keep * seen.keep_scale) @ v, scores.logsumexp(
        -1
    )


def check(case: str, dtype: torch.dtype, tolerance: float) -> None:
    kv_heads, queries, keys, width, words = CASES[case]
    q, k, v, given = inputs_of(kv_heads, queries, keys, width, dtype)
    seen = seen_of(words, queries, keys)
    leaf_q, leaf_k, leaf_v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, sums = formula(leaf_q, leaf_k, leaf_v, seen)
    of_inputs = torch.autograd.grad(expected, leaves, given.double())
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    o, lse = attend(q, k, v, seen)
    assert o.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    close(o.double(), expected)
    close(lse.double(), sums)
    for found, wanted, x in zip(gradients(given, q, k, v, o, lse, seen), of_inputs, leaves, strict=True):
        assert found.shape == x.shape
        assert found.dtype == dtype
        close(found.double(), wanted.double())


DTYPES = [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_block_gives_what_the_formula_gives(case, dtype, tolerance):
    check(case, dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_so_it_does_step_by_step_and_in_runs_of_queries(case, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_fused", lambda *_: False)
    monkeypatch.setattr(attention_blocks, "MOST_SCORES", BATCH * HEADS * 20)
    check(case, dtype, tolerance)


@pytest.mark.parametrize("step_by_step", [False, True], ids=["fused", "step by step"])
def test_gradients_of_blocks_add_up_to_those_of_all_keys(step_by_step, monkeypatch):
    if step_by_step:
        monkeypatch.setattr(attention_blocks, "_fused", lambda *_: False)
    q, k, v, given = inputs_of(2, 6, 12, 6, torch.float64)
    o, lse = attend(q, k, v, Seen())
    whole = gradients(given, q, k, v, o, lse, Seen())
    blocks = [gradients(given, q, k[:, :, part], v[:, :, part], o, lse, Seen()) for part in (slice(0, 4), slice(4, 12))]
    of_q, of_k, of_v = zip(*blocks, strict=True)
    torch.testing.assert_close(sum(of_q), whole[0])
    torch.testing.assert_close(torch.cat(of_k, dim=2), whole[1])
    torch.testing.assert_close(torch.cat(of_v, dim=2), whole[2])


def test_the_cuda_kernels_take_these_arguments():
    """Without a GPU, by their shapes alone."""
    q, k, v, given = (x.to("meta") for x in inputs_of(2, 6, 12, 8, torch.bfloat16))
    o, lse = attention_blocks._cuda_forward(q, k, v, Seen(), 0.3)
    assert (o.shape, lse.shape, lse.dtype) == ((BATCH, HEADS, 6, SIZE), (BATCH, HEADS, 6), torch.float32)
    found = attention_blocks._cuda_backward(given, q, k, v, o, lse, Seen(), 0.3)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("rows", [1, 6])
def test_so_they_do_with_documents(monkeypatch, rows):
    """In one call, or in several."""
    monkeypatch.setattr(documents, "ROWS_PER_DOCUMENT", rows)
    q, k, v, given = (x.to("meta") for x in inputs_of(2, 12, 12, 8, torch.bfloat16))
    rows_of_documents = documents.Documents(torch.arange(12).expand(BATCH, -1) // 5)
    seen = Seen(causal=True, documents=rows_of_documents.to(torch.device("meta")))
    o, lse = attention_blocks._cuda_forward(q, k, v, seen, 0.3)
    assert (o.shape, lse.shape, lse.dtype) == ((BATCH, HEADS, 12, SIZE), (BATCH, HEADS, 12), torch.float32)
    found = attention_blocks._cuda_backward(given, q, k, v, o, lse, seen, 0.3)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
