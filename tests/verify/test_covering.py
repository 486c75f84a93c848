"""The layouts in which features meet."""

import itertools

import pytest

from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.verify import select as covering


def shows(layout: Layout, entry: str) -> bool:
    """Whether a layout has an entry of FEATURES, and no other of its row that is more than that."""
    row = next(row for row in covering.FEATURES if entry in row)
    return entry == max((each for each in row if has(layout, each)), key=len, default=None)


def has(layout: Layout, entry: str) -> bool:
    entry_layout = parse(entry)
    names = {item.partition("=")[0] for item in entry.split(",")}
    return all(getattr(layout, name) == getattr(entry_layout, name) for name in names)


def meet(layouts: tuple[Layout, ...]) -> set[tuple[str, str]]:
    entries = [entry for row in covering.FEATURES for entry in row]
    return {
        pair
        for layout in layouts
        for pair in itertools.combinations((entry for entry in entries if shows(layout, entry)), 2)
    }


def across() -> set[tuple[str, str]]:
    rows = itertools.combinations(covering.FEATURES, 2)
    return {pair for one, other in rows for pair in itertools.product(one, other)}


def test_every_two_features_meet_on_at_most_8_ranks():
    layouts = covering.pairs(8)
    assert len(layouts) == len(set(layouts)) < 50
    assert all(1 < layout.world <= 8 and layout.shard_ranks % layout.ep == 0 for layout in layouts)
    assert across() == meet(layouts)


@pytest.mark.parametrize(("max_ranks", "missing"), [(4, {("dp_shard=2,zero=1", "cp=4,cp_ulysses=2")}), (1, set())])
def test_with_fewer_ranks_those_meet_that_fit(max_ranks, missing):
    layouts = covering.pairs(max_ranks)
    assert all(layout.world <= max_ranks for layout in layouts)
    found = meet(layouts)
    assert not missing & found
    assert ("recompute=full", "loss_chunk=24") in found
    assert (("cp=2", "ep=2") in found) == (max_ranks > 1)


def test_without_layouts_that_are_not_legal_all_others_still_meet():
    layouts = covering.pairs(8, lambda layout: layout.schedule != "terapipe" and layout.tp == 1)
    gone = {pair for pair in across() if any("terapipe" in entry or "tp=2" in entry for entry in pair)}
    assert meet(layouts) == across() - gone
