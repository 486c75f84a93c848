"""The picture of context parallelism: well-formed, and of who really holds and computes what."""

import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError
from phalanx.partition.tensor_slices import ring_positions
from phalanx.pictures.context import contiguous, pairs, svg
from phalanx.pictures.elements import COLOURS


def drawn(layout: Layout, seq_len: int = 64) -> list[ET.Element]:
    return list(ET.fromstring(svg(Job(model=ModelConfig(seq_len=seq_len, n_heads=8), layout=layout))).iter())


def texts(layout: Layout, seq_len: int = 64) -> list[str]:
    return [element.text or "" for element in drawn(layout, seq_len) if element.tag.endswith("text")]


@pytest.mark.parametrize(
    "layout",
    [Layout(cp=2), Layout(cp=4, cp_ulysses=2), Layout(cp=8, cp_ulysses=2, cp_inner="ring"), Layout(cp=4, cp_ulysses=4)],
)
def test_is_well_formed_and_names_layout_and_ranks(layout):
    found = texts(layout)
    assert found[0] == f"4 layers, 128 wide, on {layout.cp} ranks"
    line = layout.line().replace(",", ", ")
    assert found[1] == f"layout {line}: 64 tokens on {layout.cp} context-parallel ranks"
    assert {f"rank {rank}" for rank in range(layout.cp)} <= set(found)
    assert len([text for text in found if text.startswith("head")]) == (
        layout.cp_ulysses if layout.ring < layout.cp else 0
    )


def test_each_step_of_a_ring_has_its_blocks():
    # Of 8 × 8 chunks the 36 that are not in the future: of each place's keys, its own in step 1 and so on.
    steps = Counter(text for text in texts(Layout(cp=4)) if text in {"1", "2", "3", "4"})
    assert steps == {"1": 12, "2": 8, "3": 8, "4": 8}


def test_blocks_that_no_window_reaches_are_not_drawn():
    def steps(window: int) -> Counter[str | None]:
        job = Job(model=ModelConfig(seq_len=64, n_heads=8, window=window), layout=Layout(cp=4))
        return Counter(each.text for each in ET.fromstring(svg(job)).iter() if each.text in {"1", "2", "3", "4"})

    # Of 8 chunks of 8 tokens each meets itself, then those in reach: the middle ones are of one rank.
    assert steps(1) == {"1": 8}
    assert steps(9) == steps(2) == {"1": 8 + 1, "2": 3, "4": 3}
    assert sum(steps(10).values()) == 8 + 7 + 6
    assert steps(64) == steps(0)


def test_layers_of_two_kinds_are_drawn_together():
    """Blocks in reach of the window full, those of the other layers pale."""
    model = ModelConfig(n_layers=3, seq_len=64, n_heads=8, window=9, full_every=3)
    job = Job(model=model, layout=Layout(cp=4))
    boxes = [each for each in ET.fromstring(svg(job)).iter() if each.get("fill-opacity") == "0.35"]
    assert len(boxes) == 36 - 8 - 7
    assert any((each.text or "").endswith("without a window, 1 of 3.") for each in ET.fromstring(svg(job)).iter())


def test_every_rank_computes_as_many_chunks():
    boxes = [each for each in drawn(Layout(cp=4)) if each.tag.endswith(("rect", "polygon"))]
    colours = Counter(box.get("fill") for box in boxes)
    # 9 blocks of the matrix, a bar, and tokens held at two places: rank 3's meet and are two runs all the same.
    assert [colours[colour] for colour in COLOURS[:4]] == [12, 12, 12, 12]


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9))
def test_zigzag_gives_all_places_the_same_number_of_pairs(ring, ulysses, chunk):
    layout, tokens = Layout(cp=ring * ulysses, cp_ulysses=ulysses), 2 * ring * ulysses * chunk
    everything = tokens * (tokens + 1) // 2
    dealt = [pairs(ring_positions(layout, tokens, place)) for place in range(ring)]
    assert dealt == [everything // ring] * ring
    assert sum(pairs(contiguous(layout, tokens, place)) for place in range(ring)) == everything
    assert pairs([range(5)]) == sum(range(1, 6))


def test_nothing_to_draw_without_cp():
    with pytest.raises(JobError, match=r"layout\.cp is 1"):
        svg(Job())
