"""A pipeline equals one process in float64 to 1e-9: under every schedule, with every other technique, and under
schedules that nobody named."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import covering
from parallel.steps import steps
from parallel.test_composition import MODELS, VOCAB, compare, job_of
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.schedule import catalogue, check, file
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.schedule import Action, Kind, Schedule

DEEP = {kind: dataclasses.replace(model, n_layers=4) for kind, model in MODELS.items()}
"""A layer for each stage of two ranks that hold two each. The GPT has biases and a tied embedding; the Llama dropout,
fewer key/value heads and a head of its own."""
FLUSHING = [name for name, entry in SCHEDULES.items() if entry.steps == 1]
Reference = Callable[[ModelConfig], tuple]


@pytest.fixture(scope="module")
def reference(ranks) -> Reference:
    """One process, by model."""
    found: dict[ModelConfig, tuple] = {}

    def of(model: ModelConfig) -> tuple:
        if model not in found:
            found[model] = ranks(steps, 1, job_of(model, Layout()), VOCAB)[0]
        return found[model]

    return of


@pytest.mark.parametrize(("kind", "micro_batches"), [("gpt", 4), ("llama", 3)])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_every_schedule_equals_one_process(ranks, reference, schedule, kind, micro_batches):
    layout = Layout(pp=2, schedule=schedule, accumulation=micro_batches)
    compare(ranks(steps, 2, job_of(DEEP[kind], layout), VOCAB), reference(DEEP[kind]))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(pp=3, schedule="1f1b", pp_cut="1+4+2", accumulation=4)),
        ("llama", Layout(pp=3, schedule="zb_v", pp_cut="1+1+1+2+1+1", accumulation=6)),
        ("llama", Layout(pp=3, schedule="interleaved_1f1b", accumulation=4)),
        ("gpt", Layout(pp=2, schedule="looped_bfs", pp_chunks=3, pp_cut="2+1+1+1+1+1", accumulation=3)),
        ("gpt", Layout(pp=4, schedule="zb_h2", pp_cut="1+1+3+2", accumulation=6)),
        ("gpt", Layout(pp=4, schedule="dualpipe", pp_cut="2+2+2+1", accumulation=4)),
        ("llama", Layout(pp=3, schedule="dualpipe", accumulation=3)),
        ("llama", Layout(pp=4, schedule="terapipe", pp_slices=4, accumulation=2)),
        ("llama", Layout(pp=4, schedule="gpipe", accumulation=1)),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else value,
)
def test_uneven_stages_of_more_ranks(ranks, reference, kind, layout):
    model = dataclasses.replace(DEEP[kind], n_layers=7)
    compare(ranks(steps, layout.world, job_of(model, layout), VOCAB), reference(model))


SMALL = {"bucket_mb": 0.004}
SHARDED = {"dp_shard": 2, "accumulate": "sharded"}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
TP = {"tp": 2}
SP = {"tp": 2, "sp": True}
REGATHER = {"tp": 2, "sp": True, "sp_regather": True}
BFS, VEE, BOTH, HALVES, INTERLEAVED = (
    {"schedule": name} for name in ("looped_bfs", "zb_v", "dualpipe", "zb_h1", "interleaved_1f1b")
)
SLICES = {"schedule": "terapipe", "pp_slices": 2}
COMPOSITIONS = [
    # one more technique
    ("gpt", {"dp_replicate": 2, "loss_chunk": 7, **SMALL}),
    ("gpt", {"dp_shard": 2, "zero": 1, **SMALL}),
    ("llama", {"dp_shard": 2, "zero": 2, **HALVES, **SMALL}),
    ("gpt", {"dp_shard": 2, **VEE}),
    ("gpt", {**HYBRID, "accumulate": "sharded", **VEE}),
    ("llama", {**TP, **VEE}),
    ("gpt", {**SP, **HALVES, "loss_chunk": 7}),
    ("llama", {"dp_shard": 2, "reshard": False, "tiles": 2, **INTERLEAVED}),
    ("gpt", {"dp_shard": 2, "tiles": 2, **BOTH}),
    # every pair of techniques at least once (test_every_pair_of_techniques_is_there)
    ("llama", {**SHARDED, **REGATHER, **BOTH, "recompute": "selective", "loss_chunk": 7}),
    ("gpt", {**HYBRID, "accumulate": "sharded", "tiles": 2, **BOTH, "recompute": "full", "loss_chunk": 7}),
    ("gpt", {**SHARDED, "zero": 2, **REGATHER, **SLICES, "recompute": "selective", "loss_chunk": 7, **SMALL}),
    ("llama", {**HYBRID, "zero": 1, **SLICES, "recompute": "full", "loss_chunk": 7, **SMALL}),
    ("gpt", {"dp_shard": 2, "zero": 1, **SP, **BOTH, "recompute": "full", "loss_chunk": 7, **SMALL}),
    ("llama", {**SHARDED, "tiles": 2, **SLICES, "recompute": "selective", "loss_chunk": 7}),
    ("llama", {**HYBRID, "zero": 2, "accumulate": "sharded", **BOTH, "recompute": "full", "loss_chunk": 7, **SMALL}),
    ("gpt", {"dp_replicate": 2, **REGATHER, **BFS, "recompute": "selective", "loss_chunk": 7, **SMALL}),
    ("gpt", {"dp_shard": 2, "zero": 1, **VEE, "recompute": "selective", **SMALL}),
    ("gpt", {"dp_shard": 2, "zero": 1, **REGATHER, "schedule": "v_half", **SMALL}),
]
LAYOUTS = [(kind, Layout(pp=2, accumulation=3, **values)) for kind, values in COMPOSITIONS]


@pytest.mark.parametrize(
    ("kind", "layout"), covering(LAYOUTS), ids=lambda value: value.line() if isinstance(value, Layout) else value
)
def test_composed_with_other_techniques_it_equals_one_process(ranks, reference, kind, layout):
    compare(ranks(steps, layout.world, job_of(DEEP[kind], layout), VOCAB), reference(DEEP[kind]))


def techniques(kind: str, layout: Layout) -> set[str]:
    """What a case of COMPOSITIONS has of everything that could disturb something else."""
    entry = SCHEDULES[layout.schedule]
    there = {
        kind: True,
        "backward passes in halves": entry.splits,
        "whole backward passes": not entry.splits,
        "several stages": entry.chunks[0] > 1,
        "two directions": entry.directions > 1,
        "slices": entry.sliced,
        "replicas": layout.dp_replicate > 1,
        f"zero {layout.zero}": layout.dp_shard > 1,
        "sharded": layout.accumulate == "sharded",
        "tp": layout.tp > 1,
        "sp": layout.sp,
        "regather": layout.sp_regather,
        "selective": layout.recompute == "selective",
        "full": layout.recompute == "full",
        "loss_chunk": layout.loss_chunk > 0,
        "tiles": layout.tiles > 1,
    }
    return {name for name, used in there.items() if used}


NEVER = [
    {"gpt", "llama"},
    {"backward passes in halves", "whole backward passes"},
    {"slices", "several stages"},
    {"slices", "two directions"},
    {"slices", "backward passes in halves"},
    {"two directions", "whole backward passes"},
    *({f"zero {a}", f"zero {b}"} for a, b in ((1, 2), (1, 3), (2, 3))),
    {"sharded", "zero 1"},  # refused
    {"selective", "full"},
    {"regather", "full"},  # what is gathered in the backward pass is computed again anyway
    {"tiles", "regather"},  # refused
    *({"tiles", other} for other in ("tp", "sp", "zero 1", "zero 2")),  # in test_tiled_layers.py
]
"""Pairs that exclude each other."""


def test_every_pair_of_techniques_is_there():
    cases = [techniques(*case) for case in LAYOUTS]
    names = sorted(set().union(*cases))
    pairs = [{a, b} for number, a in enumerate(names) for b in names[number + 1 :]]
    assert [pair for pair in pairs if pair not in NEVER and not any(pair <= case for case in cases)] == []


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_replicas_that_agree_now_and_then_may_be_pipelines(ranks, sync):
    layout = Layout(dp_replicate=2, sync=sync, sync_every=2)
    expected = ranks(steps, 2, job_of(DEEP["llama"], layout), VOCAB, 3)
    pipelines = dataclasses.replace(layout, pp=2, schedule="zb_v", accumulation=3)
    results = ranks(steps, 4, job_of(DEEP["llama"], pipelines), VOCAB, 3)
    # Ranks 0 and 2 are the first replica's pipeline, 1 and 3 the second's.
    compare([results[0], results[2]], expected[0])
    assert [loss for loss, _ in results[1][0]] == pytest.approx([loss for loss, _ in expected[1][0]], rel=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        {"zero": 2, **VEE, "accumulate": "sharded"},
        VEE,
        {**VEE, "accumulation": 1},
        {"schedule": "v_half", "accumulate": "sharded"},
        {**BOTH, "tiles": 2},
    ],
    ids=str,
)
def test_gradients_may_be_added_up_in_fp32(ranks, reference, values):
    layout = Layout(**{"pp": 2, "dp_shard": 2, "accumulation": 3} | values)
    job = job_of(DEEP["llama"], layout)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="bf16", gradients="fp32"))
    shown, _, _ = ranks(steps, layout.world, job, VOCAB)[0]
    for found, wanted in zip(shown, reference(DEEP["llama"])[0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)


def delayed(schedule: Schedule, by: int) -> Schedule:
    """A schedule of whole backward passes with the gradients of weights `by` backward passes later."""

    def program(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        done: list[Action] = []
        waiting: list[Action] = []
        for action in actions:
            if action.kind != "B":
                done.append(action)
                continue
            done.append(action._replace(kind="I"))
            waiting.append(action._replace(kind="W"))
            if len(waiting) > by:
                done.append(waiting.pop(0))
        return (*done, *waiting)

    return dataclasses.replace(schedule, programs=tuple(map(program, schedule.programs)))


def test_a_schedule_of_your_own(ranks, reference, tmp_path):
    path = tmp_path / "late_weights.csv"
    path.write_text(file.text(delayed(catalogue.build("1f1b", 4, 6), by=2)))
    layout = Layout(pp=4, schedule=str(path), accumulation=6)
    compare(ranks(steps, 4, job_of(DEEP["gpt"], layout), VOCAB), reference(DEEP["gpt"]))


def any_schedule(chosen: random.Random) -> Schedule:
    """A schedule of 2 ranks and 3 micro-batches, 1 to 4 stages anywhere, whole sequences or halves of them, in which
    each backward pass is whole or cut: some order in which one action after the other may be done."""
    slices, stages = chosen.choice([1, 2]), chosen.randint(2, 4)
    placement = [0, 1, *(chosen.randint(0, 1) for _ in range(stages - 2))]
    chosen.shuffle(placement)
    outline = Schedule("any", (tuple(placement),), 3, ((), ()), slices)
    passes = [(stage, micro, part) for stage in range(stages) for micro in range(3) for part in range(slices)]
    whole: tuple[Kind, ...] = ("F", "B")
    halves: tuple[Kind, ...] = ("F", "I", "W")
    todo = [Action(kind, *of) for of in passes for kind in chosen.choice([whole, halves])]
    done: set[Action] = set()
    programs: tuple[list[Action], list[Action]] = [], []
    while todo:
        able = [action for action in todo if all(done & set(group) for group in outline.needs(action))]
        action = chosen.choice(able)
        todo.remove(action)
        done.add(action)
        programs[placement[action.stage]].append(action)
    return dataclasses.replace(outline, programs=tuple(map(tuple, programs)))


@settings(max_examples=8, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_any_valid_schedule_is_right(ranks, reference, seed):
    schedule = any_schedule(random.Random(seed))
    check.check(schedule)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.csv"
        path.write_text(file.text(schedule))
        job: Job = job_of(DEEP["llama"], Layout(pp=2, schedule=str(path), accumulation=3))
        compare(ranks(steps, 2, job, VOCAB), reference(DEEP["llama"]))
