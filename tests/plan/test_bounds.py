"""Bounds are bounds: no layout is faster or smaller than they say."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import WHOLE
from phalanx.cost.prediction import predict
from phalanx.cost.rank_memory import needed_bytes
from phalanx.errors import JobError
from phalanx.plan.bounds import Bounds
from phalanx.plan.space import STATES, PlanRequest, space_of
from phalanx.schedule.catalogue import SCHEDULES
from plan.questions import QUESTIONS, on_laptop, request

PAIRS, LAYOUTS = 50, 50 if WHOLE else 15
"""`make whole` takes three times as many layouts of every question."""
EXACT = 1 + 1e-9
"""Sums of floats differ by their order."""


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_layout_is_faster_or_smaller_than_its_bounds(name: str) -> None:
    for one in QUESTIONS[name].each():
        compared = compare(one, random.Random(name))
        assert compared >= 10


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_bounds_hold_for_every_schedule(name: str) -> None:
    alone = {"dp_replicate": 1, "dp_shard": 1} if SCHEDULES[name].stashes else {}  # with no data ranks
    one = request("llama3-8b", "dgx-h100:2", 64, schedule=name, cp=1, **alone)
    assert compare(one, random.Random(name)) >= (1 if alone else 10)


@pytest.mark.parametrize("sync", ["asp", "local_sgd", "diloco"])
def test_bounds_hold_for_every_synchronisation(sync: str) -> None:
    """Replicas that train by themselves do not sum their gradients in a step."""
    assert compare(request("llama3-8b", "dgx-h100:2", 64, sync=sync, cp=1), random.Random(sync)) >= 10


@pytest.mark.parametrize("fixed", [{}, {"quantise_weights": "int8", "quantise_gradients": "int4"}])
def test_bounds_hold_with_a_second_copy(fixed: dict[str, str]) -> None:
    one = request("llama3-8b", "dgx-h100:4", 64, hpz=8, cp=1, **fixed)
    assert compare(one, random.Random("hpz")) >= 10
    assert all(state.zero == 3 for state in (STATES[rows[1]] for option in space_of(one).options for rows in option))


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_bounds_hold_with_tiles(model: str) -> None:
    one = request(model, "dgx-h100:2", 64, tiles=4, tile="all", cp=1)
    assert compare(one, random.Random("tiles")) >= 10


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_bounds_hold_where_the_host_is_full(offload: str) -> None:
    one = request("llama3-405b", "dgx-a100:1", 8, offload=offload, zero=3, recompute="full")
    assert compare(one, random.Random(offload)) >= 10
    space = space_of(one)
    _, memory = Bounds(one, space).rows(space.rows(np.arange(len(space.mesh))))
    assert memory.min() > one.limit + 400 * 2**30, "what finds no room in host memory counts"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        ["1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe", "dualpipe_v", "gpipe"]
    ),
    st.floats(-2, 1.5),
    st.sampled_from([5, 50, 2000]),
    st.integers(0, 2**32),
)
def test_bounds_hold_over_slow_links(schedule: str, speed: float, latency: float, seed: int) -> None:
    """A link that sends one message after another bounds a pipeline; a prediction must know it, too."""
    one = request("llama3-8b", "dgx-h100:2", 64, schedule=schedule, cp=1)
    inter = replace(one.cluster.inter, gbs=10**speed, latency_us=latency)
    compare(replace(one, cluster=replace(one.cluster, inter=inter)), random.Random(seed), spread=inf)


def compare(one: PlanRequest, random: random.Random, spread: float = 5) -> int:
    """Holds some layouts of a question against their bounds; how many."""
    space = space_of(one)
    numbers = sorted(random.sample(range(len(space.mesh)), min(PAIRS, len(space.mesh))))
    with np.errstate(all="raise"):
        bounds = Bounds(one, space)
        pair_seconds, pair_bytes = bounds.pairs()
        rows = space.rows(np.array(numbers))
        rows = rows.select(np.array(sorted(random.sample(range(len(rows)), min(LAYOUTS, len(rows))))))
        seconds, memory = bounds.rows(rows)
        tight, pipelines = bounds.sizes(rows, runs=True), bounds.windows(rows)
    compared = 0
    for number in range(len(rows)):
        layout = space.layout(rows, number)
        try:
            spec = one.spec(layout)
            predicted, needed = predict(spec).step_time_s, needed_bytes(spec)
        except JobError:  # the schedule does not go with the batch or the layers
            continue
        compared += 1
        pair = rows.pair[number]
        assert 0 < pair_seconds[pair] <= seconds[number] * EXACT, layout.line()
        assert 0 < pair_bytes[pair] <= memory[number] * EXACT, layout.line()
        assert seconds[number] <= predicted * EXACT, layout.line()
        assert memory[number] <= tight[number] * EXACT <= needed * EXACT**2, layout.line()
        assert seconds[number] > predicted / spread, layout.line()
        if pipeline := pipelines[number]:
            assert pipeline.seconds() <= predicted * EXACT, layout.line()
    return compared


def test_bounds_are_near_where_nothing_is_left_out() -> None:
    """Data parallel alone, zero 3: no bubble, and everything hidden but a block's collectives."""
    one = request("llama3-8b", "dgx-h100:2", 64, tp=1, pp=1, cp=1, dp_replicate=1, zero=3, recompute="full")
    space = space_of(one)
    rows = space.rows(np.arange(len(space.mesh)))
    seconds, memory = Bounds(one, space).rows(rows)
    for number in range(len(rows)):
        spec = one.spec(space.layout(rows, number))
        assert seconds[number] > 0.95 * predict(spec).step_time_s
        assert memory[number] > 0.999 * needed_bytes(spec)


def test_bytes_without_a_pipeline_are_those_of_the_cost_model() -> None:
    """Nothing is left out but the first bucket: state, ZeRO-3's whole parameters, the loss and the optimizer's copy."""
    one = request("llama3-8b", "dgx-h100:2", 64, pp=1, cp=1)
    space = space_of(one)
    rows = space.rows(np.arange(len(space.mesh)))
    _, memory = Bounds(one, space).rows(rows)
    needed = [needed_bytes(one.spec(space.layout(rows, number))) for number in range(len(rows))]
    assert memory == pytest.approx(needed, rel=1e-3)


def test_bounds_do_not_depend_on_what_else_is_asked() -> None:
    one = on_laptop(16)
    space = space_of(one)
    every = space.rows(np.arange(len(space.mesh)))
    seconds, memory = Bounds(one, space).rows(every)
    some = np.arange(0, len(every), 7)
    again, bytes_again = Bounds(one, space).rows(every.select(some))
    assert (again == seconds[some]).all()
    assert (bytes_again == memory[some]).all()


@pytest.mark.parametrize("name", ["llama, this program", "experts", "windows", "adapters"])
def test_bounds_by_schedule_are_below_those_of_each_layout(name: str) -> None:
    for one in QUESTIONS[name].each():
        space = space_of(one)
        bounds, limit = Bounds(one, space), one.limit / 2
        pairs = np.array(sorted(random.Random(name).sample(range(len(space.mesh)), min(PAIRS, len(space.mesh)))))
        by_schedule, fits = bounds.options(pairs, range(len(space.schedules)), limit)
        rows = space.rows(pairs)
        seconds, memory = bounds.rows(rows)
        place = np.repeat(np.arange(len(pairs)), space.sizes[pairs])
        assert (by_schedule[place, rows.recompute, rows.scheduled] <= seconds * EXACT).all()
        assert (fits[place, rows.recompute, rows.scheduled, rows.state] | (memory > limit)).all()
        assert not fits.all()
