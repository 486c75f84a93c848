"""The choice among layouts that are nearly as fast: headroom, the tie band, and subspaces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from covering import WHOLE, unless_whole
from phalanx.config.layout import Layout
from phalanx.cost.prediction import step_parts
from phalanx.cost.rank_memory import needed_bytes
from phalanx.plan.alternatives import FASTEST, FILLS, differences
from phalanx.plan.branch import Search, same_passes, simulated
from phalanx.plan.notes import NO_HEADROOM
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.plan.planner import search
from phalanx.plan.simplicity import (
    EQUAL,
    TIED,
    brief,
    ranked,
    recompute_in_words,
    simpler_because,
    simplicity,
    stages_in_words,
)
from phalanx.plan.space import PlanRequest
from plan.plans import candidate
from plan.questions import request


def asked(name: str, cluster: str, sequences: int, **fixed: Any) -> PlanRequest:
    """The request of `phalanx plan`."""
    return replace(request(name, cluster, sequences, **fixed), headroom=0.06, band=TIED)


@cache
def planned(name: str, cluster: str, sequences: int) -> Plan:
    return search(asked(name, cluster, sequences))


def named(plan: Plan, name: str) -> Alternative | None:
    return next((one for one in plan.alternatives if one.name.startswith(name)), None)


def test_a_plan_leaves_the_headroom_beyond_the_interval() -> None:
    plan = planned("llama3-70b", "dgx-h100:8", 256)
    for one in plan.best:
        high = one.prediction.fullest.needed * one.prediction.memory_spread[1]
        assert high <= 0.94 * one.prediction.memory_limit
    assert plan.best[0].prediction.verdict == "fits"


def test_what_fills_the_device_is_an_alternative_that_says_so() -> None:
    one = asked("llama2-13b", "dgx-a100:1", 32, sp=True, accumulate="local", cp=1)
    plan = search(one)
    filling = named(plan, FILLS)
    assert filling is not None
    assert filling.candidate is not None
    assert filling.candidate.seconds < plan.best[0].seconds
    assert one.limit < filling.candidate.prediction.fullest.needed <= filling.candidate.prediction.memory_limit
    assert "leaves no headroom" in filling.why


def test_the_choice_with_headroom_is_the_fastest_that_has_it() -> None:
    fixed = unless_whole(micro_batch=1)
    one = replace(asked("llama2-13b", "dgx-a100:1", 32, sp=True, accumulate="local", cp=1, **fixed), band=EQUAL)
    space = Search(one).space
    rows = space.rows(np.arange(len(space.mesh)))
    specs = [one.spec(space.layout(rows, number)) for number in range(len(rows))]
    fastest = min(step_parts(spec).total for spec in specs if needed_bytes(spec) <= one.limit)
    assert search(one).best[0].prediction.step_time_s <= fastest * 1.005


def test_a_model_that_fits_only_without_headroom_is_planned_and_told() -> None:
    one = asked("llama2-13b", "dgx-a100:1", 16, dp_shard=8, recompute="full", micro_batch=1, zero=3)
    plan = search(replace(one, headroom=0.6))
    assert plan.best
    assert plan.notes[0].startswith(f"{NO_HEADROOM}: no layout leaves 60%")
    assert not search(one).notes[0].startswith(NO_HEADROOM)


def test_short_sequences_are_not_cut_and_schedules_are_common() -> None:
    for name, cluster, sequences in (("llama3-70b", "dgx-h100:8", 256), ("llama3-8b", "dgx-h100:2", 64)):
        best = planned(name, cluster, sequences).best[0].layout
        assert best.cp == 1
        assert best.schedule in ("1f1b", "interleaved_1f1b")
        assert not best.pp_cut


def test_the_fastest_is_named_with_the_reason_for_the_simpler() -> None:
    plan = planned("llama3-70b", "dgx-h100:8", 256)
    fastest = plan.fastest
    assert fastest is not None
    assert fastest.seconds < plan.best[0].seconds
    told = named(plan, FASTEST)
    assert told is not None
    assert told.candidate is fastest
    assert plan.notes[0].startswith("The fastest layout found")
    assert simpler_because(plan.best[0].spec, fastest.spec) in plan.notes[0]


def test_every_layout_of_the_tie_band_is_simulated() -> None:
    space = Search(asked("llama3-70b", "dgx-h100:8", 256))
    assert space.parts is not None
    found = space.best(space.parts[0])
    near = {same_passes(spec.layout) for spec, seconds in found.predicted if seconds <= found.least * (1 + TIED.alike)}
    timed = {same_passes(one.layout) for one in simulated(found, TIED)}
    assert len(near) > 5
    assert near <= timed


def test_exotic_takes_the_fastest() -> None:
    one = asked("llama3-70b", "dgx-h100:8", 256)
    plan = search(replace(one, band=EQUAL))
    simple = planned("llama3-70b", "dgx-h100:8", 256)
    assert simple.fastest is not None
    assert plan.best[0].seconds <= simple.fastest.seconds * (1 + EQUAL.kinds)


FIXED: tuple[dict[str, Any], ...] = (
    {"cp": 1},
    {"cp": 1, "schedule": "interleaved_1f1b"},
    {"schedule": "interleaved_1f1b"},
    {"tp": 8},
)
SPACES = [(("mixtral-8x7b", "dgx-h100:2", 64), FIXED)]
"""Each with what is fixed. `make whole` has more devices: 280 take seven seconds per search, 2,520 twenty."""
if WHOLE:
    SPACES += [(("megatron-529.6b", f"dgx-a100:{nodes}", 8 * nodes), FIXED[1:2]) for nodes in (35, 315)]
    SPACES.append((("megatron-39.1b", "dgx-a100:5", 40), FIXED[1:2]))
    SPACES.append((("mixtral-8x7b", "dgx-h100:4", 64), FIXED))


@pytest.mark.parametrize(("space", "subspaces"), SPACES, ids=[space[1] for space, _ in SPACES])
def test_a_subspace_never_beats_its_space(space: tuple[str, str, int], subspaces: tuple[dict[str, Any], ...]) -> None:
    whole = search(asked(*space))
    fastest = search(replace(asked(*space), band=EQUAL))
    assert whole.fastest is not None
    for fixed in subspaces:
        part = search(asked(*space, **fixed))
        if not part.best:
            continue
        assert part.fastest is not None
        assert fastest.best[0].seconds <= part.fastest.seconds * (1 + EQUAL.kinds), fixed
        # What the tie band gives away for a simpler layout is all that a subspace can win.
        steps = simplicity(part.best[0].spec).steps - simplicity(whole.best[0].spec).steps
        most = (1 + TIED.kinds) ** max(0, steps) * (1 + TIED.alike)
        assert whole.best[0].seconds <= part.best[0].seconds * most, fixed


def _made(seconds: float, **fields: object) -> Candidate:
    return replace(candidate(Layout(micro_batch=1, **fields), 64), seconds=seconds)


def test_another_kind_has_to_win_by_more_than_the_band() -> None:
    plain = _made(1.0, tp=8, dp_shard=8)
    cut = _made(0.97, tp=4, cp=2, dp_shard=8)
    odd = _made(0.93, tp=4, cp=2, pp=2, dp_shard=4, zero=1, schedule="zb_h1")
    assert ranked([plain, cut, odd], TIED)[0] is plain
    assert ranked([plain, cut, odd], EQUAL)[0] is odd
    assert ranked([plain, replace(cut, seconds=0.94)], TIED) == [replace(cut, seconds=0.94), plain]
    assert ranked([plain, replace(odd, seconds=0.90)], TIED)[0].seconds == 0.90


def test_of_the_same_kind_the_simplest_within_the_band_wins() -> None:
    few, more = _made(1.015, dp_shard=64), _made(1.0, tp=8, dp_shard=8)
    assert ranked([more, few], TIED)[0] is few
    assert simpler_because(few.spec, more.spec) == "1 instead of 2 axes"
    assert simpler_because(more.spec, few.spec) == ""
    assert ranked([more, replace(few, seconds=1.03)], TIED)[0] is more


def test_a_tie_does_not_give_back_what_another_kind_has_to_win() -> None:
    plain = _made(1.06, tp=8, dp_shard=8)
    fast, simple = _made(1.0, tp=4, cp=2, dp_shard=8), _made(1.015, cp=8, dp_shard=8)
    assert simplicity(simple.spec) < simplicity(fast.spec)
    assert ranked([plain, fast, simple], TIED)[0] is fast


def test_a_cut_is_written_for_readers() -> None:
    assert stages_in_words(Layout(pp=8, pp_cut="5+5+5+5+5+5+5+4")) == "stages 0-6 of 5 layers, 7 of 4"
    assert stages_in_words(Layout(pp=2, pp_cut="3+5")) == "stages 0 of 3 layers, 1 of 5"


def test_a_long_list_of_layers_is_another_kind_and_two_runs_are_not() -> None:
    uniform = _made(1.0, dp_shard=64, recompute="full")
    two = _made(0.976, dp_shard=64, recompute_cut="20*full+60*none")
    long = _made(0.96, dp_shard=64, recompute_cut="20*full+1*products+59*none")
    assert ranked([uniform, long], TIED)[0] is uniform
    assert ranked([uniform, two, long], TIED)[0] is two
    assert ranked([uniform, replace(long, seconds=0.94)], TIED)[0].seconds == 0.94
    assert recompute_in_words(two.layout) == "first 20 blocks full, rest none"
    assert recompute_in_words(long.layout) == "59 blocks none, 20 full, 1 products"
    assert "; recomputation: first 20 blocks full, rest none" in brief(two.layout)
    assert differences(long.layout, uniform.layout).endswith(
        "recompute_cut (59 blocks none, 20 full, 1 products) instead of none"
    )
