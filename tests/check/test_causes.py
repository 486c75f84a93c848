"""One cause is one message, and the values that it names are legal in the whole job."""

from __future__ import annotations

import re

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.errors import JobError


def refused(*argv: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load_words(overrides.parse(argv))
    return caught.value.problems


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "model=llama3-8b cluster=dgx-h100 tp=3 dp_shard=8",
            "n_heads 32 / tp 3 and MLP width 14336 / tp 3 are not integers; nearest tp: 1",
        ),
        ("model=llama3-8b cluster=dgx-h100 tp=3 dp_shard=4", "nearest tp: 1 with dp_replicate=2, 2"),
        ("model=llama3-8b cluster=dgx-h100 tp=3", "nearest tp: 1 with dp_replicate=8, 2 with dp_replicate=4, 4 with"),
        (
            "model=llama3-8b cluster=dgx-h100:3 tp=24",
            "nearest tp: 2 with dp_replicate=12, 4 with dp_replicate=6, 8 with dp_replicate=3 (with another "
            "train.global_batch)",
        ),
        (
            "model=llama3-8b model.n_heads=7 cluster=dgx-h100 dp_shard=8",
            "model.n_heads=7: d_model 4096 / n_heads 7 is not an integer, and n_heads 7 / n_kv_heads 8 is not an "
            "integer, and rotary positions turn pairs: head_size must be even, is 585; nearest n_heads: 8, 16, 32",
        ),
        ("model=llama3-8b d_model=100", "nearest d_model: 64, 128, 192"),
        ("model=tiny-moe dp_shard=8 ep=5", "and n_experts 8 / ep 5 is not an integer; nearest ep: 2, 4, 8"),
        (
            "model=llama3-8b tp=4 cp=2 seq_len=8001 sp=true",
            "seq_len 8001 / cp 2 are not integers; nearest seq_len: 7992",
        ),
        ("model=tiny-deepseek n_groups=3", "nearest n_groups: 1, 2, 4"),
    ],
)
def test_one_cause_is_one_message(argv, message):
    [problem] = refused(*argv.split())
    assert message in problem


@pytest.mark.parametrize(
    "argv",
    [
        "model=llama3-8b n_heads=7",
        "model=llama3-8b n_kv_heads=7",
        "model=llama3-8b d_model=4098 tp=8",
        "model=llama3-8b d_ff=1000 tp=16",
        "model=llama3-8b seq_len=1000 cp=16 sp=true tp=8",
        "model=tiny-moe dp_shard=16 ep=5",
        "model=tiny tiles=5",
        "model=tiny layout.pp=2 schedule=terapipe pp_slices=5 micro_batch=1",
    ],
)
def test_every_value_that_is_named_is_legal_in_the_whole_job(argv):
    [problem] = refused(*argv.split())
    [(name, values)] = re.findall(r"nearest (\w+): ([\d, ]+)", problem)
    for value in values.rstrip(" ,").split(", "):
        load_words(overrides.parse([*argv.split(), f"{name}={value}"]))


def test_two_causes_are_two_messages_each_judged_without_the_other():
    heads, tp = refused("model=tiny", "n_heads=7", "tp=3")
    assert "d_model 64 / n_heads 7 is not an integer; nearest n_heads: 2, 4, 8 (or set head_dim)" in heads
    assert "n_heads 7 / tp 3 and MLP width 256 / tp 3 are not integers; nearest tp: 1, 2, 4" in tp
