"""The memory of what families change around attention: norms after the halves, parallel blocks, clamped gates, soft
caps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from train.test_predicted_memory import DEEP, WORDS, compare

PARALLEL = replace(DEEP, parallel_block=True, activation="gelu", bias=True)
CLAMPED = replace(DEEP, activation="swiglu_clamped")
NORMS = replace(DEEP, norm_place="both", activation="geglu")
CAPPED = replace(WORDS, logit_softcap=30.0, scaled_embedding=True)
CASES = {
    "norms after": (replace(DEEP, norm_place="after"), "tp=2,sp=true", "bf16"),
    "norms before and after": (NORMS, "tp=1", "bf16"),
    "norms before and after, in parts": (NORMS, "tp=2,sp=true,recompute=full", "fp32"),
    "parallel": (PARALLEL, "tp=2", "fp32"),
    "parallel, in parts": (PARALLEL, "tp=2,sp=true,sp_regather=true", "fp32"),
    "parallel, recomputed": (PARALLEL, "tp=2,sp=true,recompute=full", "bf16"),
    "clamped": (CLAMPED, "tp=1", "bf16"),
    "clamped, recomputed": (CLAMPED, "recompute=full", "fp32"),
    "capped": (CAPPED, "tp=1", "bf16"),
    "capped, cut vocabulary": (CAPPED, "tp=2", "fp32"),
    "capped, in chunks": (CAPPED, "loss_chunk=256", "fp32"),
}


@pytest.mark.parametrize(("model", "line", "precision"), CASES.values(), ids=CASES.keys())
def test_the_fullest_moment_of_a_step_is_the_predicted_one(ranks, model, line, precision):
    job = Job(model=model, layout=layout_line.parse(line), train=Train(global_batch=8, precision=precision))
    compare(ranks, job)
