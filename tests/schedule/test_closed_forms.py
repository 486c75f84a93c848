"""Bubbles and activations are those of the papers and of the published table, exactly."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.model import ModelConfig
from phalanx.cost.prediction import predict
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import build
from phalanx.schedule.check import in_flight
from phalanx.schedule.schedule import Action, Schedule
from phalanx.schedule.timing import UNIT, bubble_fraction, time
from phalanx.simulate.step import Disturbance, figures, rank_seconds, simulate
from simulate.specs import spec

# Bubbles and activations are those of the papers, exactly.


COSTS = [UNIT, {"F": 1.0, "B": 1.5, "I": 1.0, "W": 0.5}, {"F": 2.0, "B": 7.0, "I": 4.0, "W": 3.0}]
"""F, B = I + W: as long as each other, and not."""
RANKS = st.integers(1, 9)
MICRO_BATCHES = st.integers(1, 24)


def bubble_is(schedule: Schedule, wanted: float | Fraction, costs: Mapping[str, float] = UNIT) -> None:
    assert time(schedule, costs).bubble == pytest.approx(float(wanted), abs=1e-9)


def bubble_without_flush_is(schedule: Schedule, wanted: float | Fraction) -> None:
    assert time(schedule).bubble_without_flush == pytest.approx(float(wanted), abs=1e-9)


def is_1f1b_for(name: str, p: int, m: int, **settings: int) -> None:
    """Bubble (P - 1) / M, whatever the backward pass costs."""
    for costs in COSTS:
        bubble_is(build(name, p, m, **settings), Fraction(p - 1, m), costs)


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=30, deadline=None)
def test_naive_has_one_rank_at_work_and_one_micro_batch_in_flight(p: int, m: int):
    schedule = build("naive", p, m)
    for costs in COSTS:
        bubble_is(schedule, p - 1, costs)
    assert in_flight(schedule) == (1,) * p


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=30, deadline=None)
def test_gpipe(p: int, m: int):
    """Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2."""
    is_1f1b_for("gpipe", p, m)
    assert in_flight(build("gpipe", p, m)) == (m,) * p


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=30, deadline=None)
def test_1f1b(p: int, m: int):
    """Narayanan et al. 2021, section 2.2."""
    is_1f1b_for("1f1b", p, m)
    assert in_flight(build("1f1b", p, m)) == tuple(min(m, p - rank) for rank in range(p))


@given(RANKS, st.integers(1, 5), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_interleaved_1f1b_has_its_bubble_divided_by_the_stages_of_a_rank(p: int, groups: int, v: int):
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v m); activations p (1 + (p - 1) / (p v)) for L / p layers, that
    is p v + p - 1 for one of the v stages."""
    m = p * groups
    schedule = build("interleaved_1f1b", p, m, chunks=v)
    for costs in COSTS:
        bubble_is(schedule, Fraction(p - 1, v * m), costs)
    assert max(in_flight(schedule)) == in_flight(schedule)[0] == min(m * v, p * v + p - 1)


@given(RANKS, MICRO_BATCHES, st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_interleaved_1f1b_holds_no_more_for_a_smaller_last_group(p: int, m: int, v: int):
    assert max(in_flight(build("interleaved_1f1b", p, m, chunks=v))) <= min(m * v, p * v + p - 1)


@given(RANKS, st.integers(0, 12), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_looped_bfs(p: int, more: int, v: int):
    """Lamy-Poirier 2022, section 4: the bubble of interleaved 1F1B and the activations of GPipe, where M >= P."""
    m = p + more
    schedule = build("looped_bfs", p, m, chunks=v)
    for costs in COSTS:
        bubble_is(schedule, Fraction(p - 1, v * m), costs)
    assert in_flight(schedule) == (v * m,) * p


@given(RANKS, st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_and_its_activations(p: int, more: int):
    """Qi et al. 2023, section 2.1: (p - 1) (F + B - W), B their I. DualPipe's table: (p - 1) (F + B - 2 W), B whole."""
    m = p + more
    schedule = build("zb_h1", p, m)
    bubble_is(schedule, Fraction(p - 1, 3 * m))
    bubble_without_flush_is(schedule, Fraction(p - 1, 3 * m))
    for costs in COSTS[:2]:  # where W is no longer than F
        f, i, w = costs["F"], costs["I"], costs["W"]
        bubble_is(schedule, (p - 1) * (f + i - w) / (m * (f + i + w)), costs)
    assert in_flight(schedule) == (p,) * p


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=30, deadline=None)
def test_zb_h2_has_no_bubble_without_a_flush_and_less_than_twice_the_activations(p: int, m: int):
    """Qi et al. 2023, section 2.2: 2 p - 1 activations. The first rank's first passes are what a flush adds."""
    schedule = build("zb_h2", p, m)
    if m >= 2 * p - 1:
        bubble_without_flush_is(schedule, 0)
        bubble_is(schedule, Fraction(p - 1, 3 * m))
    assert max(in_flight(schedule)) == in_flight(schedule)[0] == min(m, 2 * p - 1)


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=30, deadline=None)
def test_zb_v_has_no_bubble_without_a_flush_and_the_activations_of_1f1b(p: int, m: int):
    """Qi et al. 2023, section 6: 2 p activations of a stage are p of a rank."""
    schedule = build("zb_v", p, m)
    if m >= 2 * p - 1:
        bubble_without_flush_is(schedule, 0)
        bubble_is(schedule, Fraction(p - 1, 6 * m))
    assert max(in_flight(schedule)) == min(2 * m, 2 * p)


@given(st.integers(2, 9), st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_v_half_has_half_of_the_bubble_and_half_of_the_activations_of_1f1b(p: int, more: int):
    """Qi et al. 2024: bubble half of (p - 1) / m, activations of (p + 2) // 2 micro-batches, two stages each."""
    m = p + more
    schedule = build("v_half", p, m)
    bubble_is(schedule, Fraction(p - 1, 2 * m) if p % 2 == 0 else Fraction(3 * p - 4, 6 * m))
    assert max(in_flight(schedule)) == 2 * ((p + 2) // 2)


@given(st.integers(1, 4), st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_dualpipe(half: int, more: int):
    """DeepSeek-AI 2024, section 3.2.1: (P / 2 - 1) (F&B + B - 3 W), here with F&B = F + B; P + 1 activations."""
    p, m = 2 * half, 4 * half + 2 * more
    schedule = build("dualpipe", p, m)
    for costs in COSTS:
        f, b, w = costs["F"], costs["B"], costs["W"]
        assert idle_with_pairs(schedule, costs) == pytest.approx((half - 1) * (f + b + b - 3 * w), abs=1e-9)
    bubble_is(schedule, Fraction(half - 1, 3 * m))
    assert max(in_flight(schedule)) == p + 1


@given(st.integers(1, 5), st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_dualpipe_v(p: int, more: int):
    """DeepSeek-AI 2025: (PP / 2 - 1) (F&B + B - 3 W) on PP / 2 ranks; PP + 1 activations."""
    m = 2 * p + more
    schedule = build("dualpipe_v", p, m)
    for costs in COSTS:
        f, b, w = costs["F"], costs["B"], costs["W"]
        assert idle_with_pairs(schedule, costs) == pytest.approx((p - 1) * (f + b + b - 3 * w), abs=1e-9)
    bubble_is(schedule, Fraction(p - 1, 6 * m))
    assert max(in_flight(schedule)) == 2 * p + 1


@given(RANKS, MICRO_BATCHES, st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_terapipe_is_1f1b_with_slices_for_micro_batches(p: int, m: int, k: int):
    """Li et al. 2021, section 3.2."""
    schedule = build("terapipe", p, m, slices=k)
    for costs in COSTS:
        bubble_is(schedule, Fraction(p - 1, k * m), costs)
    assert in_flight(schedule) == tuple(min(k * m, k + p - 1 - rank) for rank in range(p))


@given(RANKS, st.integers(0, 6), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_pipedream_fills_the_pipeline_once_for_all_steps(p: int, more: int, steps: int):
    """Narayanan et al. 2020, section 3.1."""
    m = p + more
    schedule = build("pipedream", p, m, steps=steps)
    bubble_is(schedule, Fraction(p - 1, m * steps))
    assert in_flight(schedule) == tuple(min(m * steps, p - rank) for rank in range(p))


@given(RANKS, st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_pipedream_needs_two_versions_of_the_weights(p: int, more: int):
    """Narayanan et al. 2020, section 3.1: no micro-batch is in flight on a stage while two steps end there."""
    m = p + more
    for program in build("pipedream", p, m, steps=4).programs:
        flying, ended = dict[int, int](), 0
        for action in program:
            if action.kind == "F":
                flying[action.micro] = ended
            else:
                assert ended - flying.pop(action.micro) <= 1
                ended += (action.micro + 1) % m == 0


def idle_with_pairs(schedule: Schedule, costs: Mapping[str, float]) -> float:
    """The most idle time of a rank where a forward pass and the backward pass after it, of another micro-batch, are one
    thing to do: it begins when both can begin and has no result before its end."""
    blocks = [list(_pairs(program)) for program in schedule.programs]
    ends = dict[Action, float]()
    clocks, idle, at = [0.0] * schedule.ranks, [0.0] * schedule.ranks, [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(blocks):
            while at[rank] < len(own):
                block = own[at[rank]]
                needs = [[n for n in group if n in ends] for action in block for group in schedule.needs(action)]
                if not all(needs):
                    break
                begin = max([clocks[rank], *(ends[group[0]] for group in needs)])
                idle[rank] += begin - clocks[rank] if at[rank] else 0.0
                clocks[rank] = begin + sum(costs[action.kind] for action in block)
                ends.update(dict.fromkeys(block, clocks[rank]))
                at[rank] += 1
                moved = True
    assert at == [len(own) for own in blocks]
    return max(idle)


def _pairs(program: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    blocks = list[tuple[Action, ...]]()
    for action in program:
        last = blocks[-1] if blocks else ()
        if len(last) == 1 and (last[0].kind, action.kind) == ("F", "B") and last[0][1:] != action[1:]:
            blocks[-1] = (*last, action)
        else:
            blocks.append((action,))
    return blocks


# The published table of bubbles and activations, line by line, against what the schedules do with unit costs.

F, B, W = UNIT["F"], UNIT["B"], UNIT["W"]
BUBBLES = {
    ("1F1B", "(PP-1)(F+B)"): ("1f1b", lambda p, _: (p - 1) * (F + B)),
    ("ZB1P", "(PP-1)(F+B-2W)"): ("zb_h1", lambda p, _: (p - 1) * (F + B - 2 * W)),
    ("interleaved 1F1B", "(p-1)(F+B)/v"): ("interleaved_1f1b", lambda p, v: (p - 1) * (v * F + v * B) / v),
    ("ZB2P", "0"): ("zb_h2", lambda *_: 0),
    ("ZBV", "0"): ("zb_v", lambda *_: 0),
}
"""By method and formula as the table has them: our name, and the idle time. The table's F and B are a rank's, those of
all its stages. DualPipe's lines take an F and a B in one block (test_closed_forms), V-Half's and
V-Min's are about."""
P, M = 4, 12


@pytest.fixture(scope="module")
def table() -> list[dict[str, str]]:
    folder = os.environ.get("PHALANX_SHARED")
    path = Path(folder or "") / "truth" / "aux_pipeline_bubble_formulas.csv"
    if not folder or not path.is_file():
        pytest.skip("PHALANX_SHARED names no folder with truth/aux_pipeline_bubble_formulas.csv")
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("line", BUBBLES, ids=lambda line: line[0])
def test_bubbles_are_those_of_the_table(table, line):
    assert line in {(row["method"], row["bubble"]) for row in table}
    name, formula = BUBBLES[line]
    schedule = build(name, P, M)
    timing = time(schedule)
    assert max(timing.idle_inside(rank) for rank in range(P)) == formula(P, schedule.stages // P)


@pytest.mark.parametrize(
    ("method", "text", "name", "activations"),
    [
        ("1F1B", "PP", "1f1b", P),
        ("ZB1P", "PP", "zb_h1", P),
        ("DualPipe", "PP+1", "dualpipe", P + 1),
        ("DualPipeV", "PP+1", "dualpipe_v", P + 1),
        ("ZB2P", "2x 1F1B", "zb_h2", 2 * P),
        ("ZBV", "1x 1F1B", "zb_v", P),
    ],
)
def test_activations_are_no_more_than_those_of_the_table(table, method, text, name, activations):
    assert (method, text) in {(row["method"], row["activation_per_device"]) for row in table}
    schedule = build(name, P, M)
    stages = 1 if name == "dualpipe" else schedule.stages // P
    assert activations - 1 <= max(in_flight(schedule)) / stages <= activations


# One definition of the bubble: the schedule with unit times, the prediction and the simulation say the same.

SHAPE = ModelConfig(n_layers=64, d_model=4096, n_heads=32, seq_len=4096, vocab_size=256)
"""Equal stages, and nearly nothing at either end."""


def test_it_is_bubble_time_over_ideal_time() -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1) (tf + tb) over m (tf + tb), here with p 4, m 8, tf + tb 3.
    assert bubble_fraction(idle=9, step=33) == pytest.approx(3 / 8)
    assert bubble_fraction(idle=0, step=33) == 0


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v"]
)
def test_schedule_prediction_and_simulation_agree(name: str) -> None:
    one = replace(spec(f"pp=4,schedule={name}", 16), model=SHAPE, stages=())
    fast = replace(one.cluster.intra, gbs=1e9, latency_us=0.0)
    one = replace(one, cluster=replace(one.cluster, intra=fast, inter=fast))
    schedule = catalogue.build(name, 4, 16)
    rank = rank_seconds(one, schedule, 1, Disturbance())
    costs = {kind: max(seconds) for kind, seconds in rank.durations.items()}
    by_schedule = time(schedule, costs).bubble
    assert by_schedule > 0.01
    assert predict(one).bubble == pytest.approx(by_schedule, abs=0.015)
    assert figures(simulate(one)).bubble == pytest.approx(by_schedule, abs=0.015)
