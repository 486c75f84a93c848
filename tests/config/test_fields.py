"""Names that users type: short ones, those of other frameworks, mistyped ones, and lines that verbs print."""

from __future__ import annotations

import pytest

from phalanx.config import foreign_names, overrides, values
from phalanx.config.fields import leaves, replace, resolve, suggestion
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse

LINES = [
    "dp_shard=4,tp=2,schedule=zb_v,micro_batch=1",
    "dp_shard=4,tp=2,pp=2,zero=2,accumulate=sharded,prefetch=2,sp=true,schedule=interleaved_1f1b,pp_chunks=2",
    "pp=4,schedule=terapipe,pp_slices=4,pp_cut=3+5+4+4,accumulation=8,recompute_cut=8*full+8*none",
    "cp=4,cp_ulysses=2,cp_inner=ring,recompute=selective,loss_chunk=1024",
    "schedule=zb_v",
    "auto,tp=2,sp=true",
]


def layout_of(*words: str) -> Layout:
    parsed = overrides.parse(words)
    assert parsed.problems == []
    job = Job()
    for setting in parsed.settings:
        job = replace(job, setting.path, values.convert(setting.text, leaves()[setting.path]))
    return job.layout


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_verbs_print_can_be_pasted_back(line: str) -> None:
    layout = parse(line)
    assert set(layout.line().split(",")) == set(line.split(","))
    assert layout_of(line) == layout_of(f"layout={line}") == layout
    words = line.replace("auto,", "auto=true,").split(",")
    assert layout_of(*words) == layout
    assert layout_of(*(f"--{word}" for word in words)) == layout


@pytest.mark.parametrize("name", [*foreign_names.FIELDS, *foreign_names.ADVICE])
def test_names_of_other_frameworks_are_answered_and_not_taken(name: str) -> None:
    assert resolve(name) is None
    assert suggestion(name) == suggestion(f"section.{name}") == suggestion(name.replace("_", "-"))
    said = suggestion(name).removeprefix("; did you mean ").removesuffix("?")
    assert said == foreign_names.FIELDS.get(name, f"; {foreign_names.ADVICE.get(name)}")
    assert foreign_names.FIELDS.get(name, "train.steps") in leaves()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stepz", "train.steps"),
        ("trian.stepz", "train.steps"),
        ("training.steps", "train.steps"),
        ("training.seq_len", "model.seq_len"),
        ("train.lr", "optimizer.lr"),
        ("model.kv_rank", "model.mla.kv_rank"),
        ("layout.dp_shrad", "layout.dp_shard"),
        ("tensor_paralel_degree", "layout.tp"),
        ("zero_optimization.stage", "layout.zero"),
        ("fp16.enabled", "train.precision"),
        ("heads", "model.n_heads"),
    ],
)
def test_a_mistyped_name_is_answered_with_what_was_meant(name: str, meant: str) -> None:
    assert suggestion(name) == f"; did you mean {meant}?"


@pytest.mark.parametrize("name", ["foo", "train.foo", "optimizer.type", "cluster.gpu", "rank", "wifi"])
def test_nothing_far_fetched_is_suggested(name: str) -> None:
    assert suggestion(name) == ""
