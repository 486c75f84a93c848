"""The predicted memory of a step for models of every kind, next to what ranks take: norms, biases, dropout, heads of
two widths, experts and documents, on the layouts that save different tensors of them. On CPU ranks, to BOUND."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from phalanx.config import layout_line
from phalanx.config.cluster import Cluster
from phalanx.config.job import Data, Job, Train
from phalanx.config.model import MLA, MoE
from train.test_predicted_memory import DEEP, compare

RMS = replace(DEEP, norm="rmsnorm")
BIASED = replace(DEEP, bias=True, activation="gelu")
DROPPED = replace(DEEP, dropout=0.1)
SCORES = replace(BIASED, dropout=0.1, positions="learned", seq_len=256, d_model=64, n_heads=4)
"""Of whose memory the probabilities of attention take most."""
LATENT = replace(DEEP, mla=MLA(q_rank=48, kv_rank=32, rope_head_dim=8, nope_head_dim=16, v_head_dim=16))
EXPERTS = replace(DEEP, moe=MoE(n_experts=4, top_k=2, d_ff=128, n_shared=1))
SLICED = "pp=2,schedule=terapipe,micro_batch=1,pp_slices=4"
RING, SPLIT = "cp=2,zero=1", "pp=2,schedule=zb_h1,micro_batch=1"
CASES = {
    "rmsnorm": (RMS, ["recompute=full", "tp=2", "tp=2,sp=true", RING, SPLIT, SLICED]),
    "biases": (BIASED, ["tp=1", "tp=2", RING, SPLIT, SLICED]),
    "dropout": (DROPPED, ["recompute=selective", RING, SPLIT, SLICED]),
    "scores": (
        SCORES,
        ["tp=1", "recompute=full", "recompute=selective", "tp=2", RING, SPLIT, SPLIT.replace("h1", "h2")],
    ),
    "long scores": (replace(SCORES, seq_len=512), [SLICED]),
    "latent": (LATENT, ["tp=1", "tp=2", "recompute=full", RING, SPLIT, SLICED]),
    "latent, rmsnorm": (replace(LATENT, norm="rmsnorm"), ["tp=1", "recompute=selective"]),
    "experts": (EXPERTS, ["tp=1", "recompute=full", "tp=2", SPLIT, SLICED]),
}
BOUND = 0.05


def job_of(model, line: str, precision: str, *, documents: bool = False) -> Job:
    layout = layout_line.parse(line)
    train = Train(global_batch=4 if layout.pp == 1 else 8, precision=precision)
    data = Data(document_mask=documents)
    return Job(model=model, layout=layout, train=train, data=data, cluster=Cluster(device="cpu"))


every_case = pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, (_, lines) in CASES.items() for line in lines], ids=str
)


@every_case
def test_every_kind_of_model_takes_what_is_predicted(ranks, name, line):
    compare(ranks, job_of(CASES[name][0], line, "fp32"), BOUND)


@pytest.mark.skipif(not os.environ.get("PHALANX_MEMORY"), reason="minutes: make memory")
@every_case
def test_so_it_does_in_half_precision(ranks, name, line):
    compare(ranks, job_of(CASES[name][0], line, "bf16"), BOUND)


@pytest.mark.parametrize("line", ["tp=1", "recompute=full", RING, "pp=2,micro_batch=1", SLICED])
def test_so_it_does_with_documents(ranks, line):
    compare(ranks, job_of(DEEP, line, "fp32", documents=True), BOUND)
