"""Absurd numbers are refused at once, by every verb, with the bound and its reason."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from math import isfinite

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.check import model as model_rules
from phalanx.check.job import out_of_range
from phalanx.check.load import load_words
from phalanx.check.model import size_problems
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.config.constraints import Interval
from phalanx.config.fields import constraints, leaves, replace
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import JobError

NUMBERS = [path for path, kind in leaves().items() if kind in (int, float)]
BOUNDS = [(path, most) for path, (most, _) in model_rules.BOUNDS.items()]
SECONDS = 0.5
"""Of processor time; an answer takes milliseconds."""


def problems(words: Iterable[str]) -> list[str]:
    """What is wrong with a job; nothing where it is legal. It is said at once."""
    began = time.process_time()
    try:
        load_words(overrides.parse([*words]))
        found = []
    except JobError as error:
        found = error.problems
    assert time.process_time() - began < SECONDS, words
    return found


def test_every_size_has_a_lower_and_an_upper_bound() -> None:
    shape = {path for path in NUMBERS if path.startswith(("model.", "cluster.", "layout."))}
    shares = {
        path
        for path, ranges in constraints(Job).items()
        if any(isinstance(one, Interval) and isfinite(one.most) for one in ranges)
    }
    assert shape <= {path for path, _ in BOUNDS} | shares | {"model.dropout"}
    assert len(BOUNDS) == len({path for path, _ in BOUNDS})
    assert shape <= set(constraints(Job))


@pytest.mark.parametrize(("path", "most"), BOUNDS)
def test_a_number_above_its_bound_is_refused_with_the_reason(path: str, most: int) -> None:
    (found,) = [problem for problem in size_problems(replace(Job(), path, most + 1)) if problem[0] == path]
    assert found[1].startswith(f"must be at most {most:,}, is {most + 1:,}: ")
    assert not any(found[0] == path for found in size_problems(replace(Job(), path, most)))
    problems([f"{path}={most}"])


def test_a_section_that_a_program_gave_a_list_is_looked_through() -> None:
    job = replace(replace(Job(), "run.trackers", ["wandb"]), "run.timeout_s", -1.0)
    assert [path for path, _ in out_of_range(job)] == ["run.timeout_s"]


def test_a_product_of_axes_is_bounded() -> None:
    (found,) = size_problems(Job(layout=Layout(dp_replicate=2048, dp_shard=1024, tp=2, pp=2)))
    assert found == (
        "layout",
        "pp 2 × dp_replicate 2048 × dp_shard 1024 × cp 1 × tp 2 = 8,388,608 devices, at most 1,048,576",
    )
    assert not list(size_problems(Job(layout=Layout(dp_replicate=512, dp_shard=512, tp=4))))


LARGE = st.one_of(
    st.integers(2, 2**21), st.integers(-(10**30), 10**30), st.sampled_from([10**11, 10**12, 2**63, -1]), st.floats()
)
SETTINGS = st.lists(st.tuples(st.sampled_from(NUMBERS), LARGE), min_size=1, max_size=4)


@given(SETTINGS)
@example([("layout.cp", 2**20), ("model.seq_len", 2**27), ("cluster.devices_per_node", 0)])
@example([("layout.cp", 720720), ("layout.cp_ulysses", 7), ("model.n_heads", 2**14)])
@example([("layout.pp", 1024), ("train.global_batch", 2**20 - 1), ("model.n_layers", 3)])
@example([("model.moe.n_experts", 2**14), ("model.moe.n_groups", 2**14), ("model.moe.top_k", 2**14)])
@example([("layout.tp", 2**20), ("model.n_heads", 2**14), ("model.d_ff", 2**20 - 3)])
def test_any_numbers_are_a_job_or_refused_at_once(settings: list[tuple[str, float]]) -> None:
    problems(f"{path}={value}" for path, value in settings)


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("model.n_layers=100000", "model.n_layers"),
        ("model.d_model=1e11", "model.d_model"),
        ("model.vocab_size=1e11", "model.vocab_size"),
        ("model.seq_len=1e11", "model.seq_len"),
        ("model.moe.n_experts=1e11", "model.moe.n_experts"),
        ("cluster=dgx-h100:125000000000", "cluster.nodes"),
        ("cluster.devices_per_node=1e11", "cluster.devices_per_node"),
        ("layout.dp_shard=1000000000000", "layout.dp_shard"),
        ("layout.accumulation=1e11", "layout.accumulation"),
        ("train.global_batch=1e11", "train.global_batch"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "predict", "plan", "simulate", "verify"])
def test_every_verb_refuses_absurd_sizes_at_once(
    verb: str, word: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    assert main([verb, "model=tiny", word]) == 2
    assert time.process_time() - began < 2 * SECONDS  # some import torch's launcher first
    said = capsys.readouterr().err
    assert re.search(rf"{re.escape(path)}(=\S+)?: must be at most ", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("line", ["pp=1000000,schedule=gpipe", "dp_shard=1000000000000", "ep=100000000000,dp_shard=2"])
def test_verify_refuses_absurd_layouts_at_once(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["verify", "model=tiny", "--layouts", line]) == 2
    assert time.process_time() - began < 2 * SECONDS
    assert "must be at most" in capsys.readouterr().err


def test_a_schedule_that_would_fill_memory_is_refused() -> None:
    words = ["n_layers=64", "pp=64", "micro_batch=1", "accumulation=1000000"]
    (found,) = problems(words)
    assert "layout.schedule: 1f1b: 64 stages × 1,000,000 micro-batches × 2 passes = 128,000,000 actions" in found
    assert problems([*words[:-1], "accumulation=32768"]) == []


@pytest.mark.parametrize(
    "words",
    [
        ["n_layers=" + "9" * 5000],
        ["cluster=dgx-h100:" + "9" * 5000],
        ["layout=tp=" + "9" * 5000],
        ["layout.pp=2", "layout.pp_cut=" + "9" * 5000],
        ["layout.pp=2", "layout.pp_cut=9999999999+1"],
        ["layout.recompute_cut=" + "9" * 5000 + "*full"],
        ["layout.recompute_cut=999999999*full"],
        ["nnodes=2", "nproc_per_node=2", "dp_replicate=-1", *(f"{axis}=1e300" for axis in ("tp", "pp", "cp"))],
    ],
)
def test_numbers_of_many_digits_are_refused_at_once(words: list[str]) -> None:
    assert problems(words)
