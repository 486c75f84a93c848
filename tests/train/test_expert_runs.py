"""Whole runs with experts, with parts of sequences on several ranks, and with documents that attention keeps apart."""

import dataclasses
import json

import pytest
import torch

from phalanx.config.job import Data
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.errors import StoppedError
from train.runs import change, losses, moves_between, rows, train, weights

DEEPSEEK = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=2,
    seq_len=16,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    dropout=0.1,
    moe=MoE(n_experts=4, top_k=2, d_ff=16, n_shared=1, n_dense_layers=1, router="sigmoid", bias_balanced=True),
    mla=MLA(q_rank=8, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=6),
)


@pytest.mark.parametrize(
    "layouts",
    [
        (Layout(dp_shard=2, ep=2), Layout(cp=2, tp=2, ep=2, zero=1), Layout()),
        (Layout(cp=2, cp_ulysses=2), Layout(dp_shard=4, ep=2, zero=2, bucket_mb=0.01), Layout(pp=2, accumulation=3)),
        (Layout(dp_shard=4, ep=4), Layout(dp_replicate=2, dp_shard=2, ep=2)),
    ],
    ids=lambda layouts: " then ".join(each.line() for each in layouts),
)
def test_a_run_moves_between_layouts_of_experts(ranks, job, layouts):
    job = dataclasses.replace(job, model=DEEPSEEK)
    moves_between(ranks, job, layouts)
    assert any(tensor.abs().max() > 0 for name, tensor in weights(job).items() if name.endswith("router.bias"))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (Layout(dp_shard=2, ep=2), "bf16"),
        (Layout(dp_shard=2, tp=2, ep=2, zero=1, sp=True), "fp32"),
        (Layout(cp=2), "fp32"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_stopping_and_resuming_gives_the_same_bits(ranks, job, layout, precision):
    job = change(dataclasses.replace(job, model=DEEPSEEK, layout=layout), "train", precision=precision)
    ranks(train, layout.processes, job)
    broken = change(job, "run", name="broken")
    with pytest.raises(StoppedError):
        ranks(train, layout.processes, broken, 3)
    ranks(train, layout.processes, broken)
    straight, resumed = weights(job), weights(broken)
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
    assert losses(broken) == losses(job)


def test_documents_that_attention_keeps_apart_give_a_curve_of_their_own_on_any_layout(ranks, job, tmp_path):
    texts = [f"{word} and {word} again, and no end of {word}" for word in ("cats", "dogs", "birds", "fish") * 60]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = Data(
        corpus="text",
        path=str(tmp_path / "text.jsonl"),
        dir=str(tmp_path / "data"),
        tokenizer="bpe",
        bpe_vocab=300,
        document_mask=True,
    )
    job = dataclasses.replace(job, data=data)
    ranks(train, 1, job)
    for number, layout in enumerate([Layout(cp=2), Layout(cp=2, cp_ulysses=2), Layout(tp=2, sp=True)]):
        other = change(dataclasses.replace(job, layout=layout), "run", name=f"layout{number}")
        ranks(train, layout.processes, other)
        assert losses(other) == pytest.approx(losses(job), rel=1e-9)
        assert rows(other, "validation")[-1]["val_loss"] == pytest.approx(
            rows(job, "validation")[-1]["val_loss"], rel=1e-9
        )
    plain = change(change(job, "data", document_mask=False), "run", name="plain")
    ranks(train, 1, plain)
    assert losses(plain) != pytest.approx(losses(job), rel=1e-6)
