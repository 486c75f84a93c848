"""The alternatives to the best layout: the fastest of each common kind, from its own search, and why it loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from phalanx.config.layout import Layout
from phalanx.cost.breakdown import MOMENTS
from phalanx.cost.memory.rank_memory import needed_bytes
from phalanx.cost.predict import predict
from phalanx.errors import JobError
from phalanx.plan.plan import Alternative, Candidate
from phalanx.plan.report.explain import explain
from phalanx.plan.report.families import AXES, WITHOUT, Family, families
from phalanx.plan.report.rules import rule
from phalanx.plan.search.branch import Found, Keep, Mask, Search
from phalanx.plan.search.space import RECOMPUTE, STATES, MeshDegrees
from phalanx.units import gib

RULE, HEADROOM = "rule of thumb", "with headroom for"


def alternatives(search: Search, found: Found, best: Candidate | None) -> tuple[Alternative, ...]:
    """Returns the rule of thumb first, then the alternatives that fit, fastest first, then the others. A kind that
    contains the best layout is omitted, and so is one whose layout was listed before. `found` is the search's result.
    """
    first = _rule(search, best)
    listed = {_key(candidate.layout) for candidate in (best, first.candidate) if candidate}
    others, weighed = list[Alternative](), [first.candidate] if first.candidate else []
    for family in families(search.space, search.request.cluster, best.layout if best else None):
        if best and family.has(best.layout):
            continue
        alternative = _fastest_of(search, family, weighed, best)
        if alternative.candidate:
            weighed.append(alternative.candidate)
            # An ablation is listed for each axis, even if its layout was listed before.
            if _key(alternative.candidate.layout) in listed and not family.name.startswith(WITHOUT):
                continue
            listed.add(_key(alternative.candidate.layout))
        others.append(alternative)
    if best and best.prediction.fits and not has_headroom(best):
        others.append(_headroom_alternative(search, found, best))
    return (first, *sorted(others, key=_order))


def without(axis: str, found: Sequence[Alternative]) -> Alternative | None:
    """Returns the alternative without an axis of families.AXES, or None."""
    return next((one for one in found if one.name == f"{WITHOUT}{AXES[axis]} parallelism"), None)


def has_headroom(candidate: Candidate) -> bool:
    """Returns whether the candidate still fits with the memory error that one step in ten has."""
    prediction = candidate.prediction
    return prediction.fullest.needed * prediction.memory_spread[1] <= prediction.memory_limit


def headroom_layout(found: Sequence[Alternative]) -> Candidate | None:
    """Returns the alternative with memory headroom, or None."""
    return next((one.candidate for one in found if one.name.startswith(HEADROOM)), None)


def _headroom_alternative(search: Search, found: Found, best: Candidate) -> Alternative:
    more = best.prediction.memory_spread[1]
    room = search.with_room(more)
    # The search has seen all that are nearly as fast as the best.
    seen = [spec for spec, seconds in sorted(found.predicted, key=itemgetter(1)) if seconds <= found.cutoff]
    near = next((spec for spec in seen if needed_bytes(spec, room.limit) <= room.limit), None)
    candidate = (
        Candidate(near, predict(near), found.simulated(near)) if near else room.one(np.ones(len(room.pair_bytes), bool))
    )
    why = _why(candidate, best) if candidate else "no layout of the search space has it"
    return Alternative(f"{HEADROOM} {more - 1:.0%} more memory", candidate, why)


def _rule(search: Search, best: Candidate | None) -> Alternative:
    request = search.request
    words, layout = rule(request)
    broken = [name for name, value in request.fixed.items() if getattr(layout, name) != value]
    if broken:
        return Alternative(RULE, None, f"{words}; it breaks the fixed fields: {_fixed(request.fixed, broken)}")
    if problems := request.problems(layout):
        return Alternative(RULE, None, f"{words}; {problems[0]}")
    one = Candidate.of(request.spec(layout))
    if best and _key(one.layout) == _key(best.layout):
        return Alternative(RULE, one, f"{words}; the search found nothing faster")
    return Alternative(RULE, one, f"{words}; {_why(one, best)}")


def _fastest_of(search: Search, family: Family, weighed: Sequence[Candidate], best: Candidate | None) -> Alternative:
    """Returns the fastest layout of a family, from a search or among those weighed before; if none fits, the one that
    needs the least memory."""
    pairs, keep = masks(search, family)
    known = [candidate for candidate in weighed if candidate.prediction.fits and family.has(candidate.layout)]
    fastest = [candidate for candidate in (*known, search.one(pairs, keep)) if candidate]
    candidate = min(fastest, key=lambda candidate: candidate.seconds) if fastest else search.least(pairs, keep)
    if candidate is None:
        return Alternative(family.name, None, _not_legal(search, family))
    return Alternative(family.name, candidate, _why(candidate, best))


def masks(search: Search, family: Family) -> tuple[Mask, Keep]:
    """Returns a family as a mask of a space's pairs and a filter of their rows."""
    space = search.space
    columns = SimpleNamespace(
        **{name: space.column(name) for name in MeshDegrees._fields}, micro_batch=space.micro_batch.astype(np.int64)
    )
    belongs = np.array(
        [
            [[family.options(scheduled, state, mode) for mode in RECOMPUTE] for state in STATES]
            for scheduled in space.schedules
        ]
    )
    return family.meshes(columns), lambda rows: belongs[rows.scheduled, rows.state, rows.recompute]


def _why(candidate: Candidate, best: Candidate | None) -> str:
    """Returns why a layout is not the best: its memory excess, or the parts that make it slower."""
    prediction = candidate.prediction
    if not prediction.fits:
        fullest = prediction.fullest
        largest, size = max(fullest.parts(), key=lambda part: part[1])
        over = fullest.needed - prediction.memory_limit
        return f"exceeds memory by {gib(over)} {MOMENTS[fullest.moment]}; the largest part is {largest}, {gib(size)}"
    if best is None:
        return "fits"
    return f"the best is {explain(best.prediction, prediction, candidate.seconds / best.seconds)}"


def _not_legal(search: Search, family: Family) -> str:
    """Returns why the space contains no layout of a family."""
    request = search.request
    broken = [name for name, value in request.fixed.items() if getattr(family.example, name) != value]
    if broken:
        return f"excluded by the fixed fields: {_fixed(request.fixed, broken)}"
    try:
        problems = request.problems(family.example)
    except JobError as error:
        problems = error.problems
    return problems[0] if problems else "not in the search space"


def _fixed(fixed: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {fixed[name]}" for name in names)


def _key(layout: Layout) -> Layout:
    """Returns a layout without the fields that follow from the others."""
    return replace(layout, pp_cut="", accumulation=0)


def _order(alternative: Alternative) -> tuple[int, float]:
    candidate = alternative.candidate
    if candidate is None:
        return 2, 0.0
    if not candidate.prediction.fits:
        return 1, float(candidate.prediction.fullest.needed)
    return 0, candidate.seconds
