"""Pictures of programs are well-formed, with an arrow per message; those of the documents are up to date."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from phalanx.comm.algorithms import draw
from phalanx.comm.algorithms.program import (
    CollectiveProgram,
    halving_all_reduce,
    hierarchical_all_reduce,
    naive_all_reduce,
    pairwise_all_to_all,
    ring_all_reduce,
    tree_all_reduce,
)

SVG = "{http://www.w3.org/2000/svg}"
PLANS = [
    ring_all_reduce(4, 4),
    tree_all_reduce(8, 8),
    halving_all_reduce(6, 8),
    hierarchical_all_reduce(8, 8, 4),
    naive_all_reduce(3, 3),
    pairwise_all_to_all(3, 7),
    ring_all_reduce(1, 4),
]


@pytest.mark.parametrize("program", PLANS, ids=lambda program: f"{program.name} {program.ranks}")
def test_one_arrow_for_each_message(program: CollectiveProgram):
    root = ElementTree.fromstring(draw.svg(program))
    groups = root.findall(f"{SVG}g[@class='message']")
    assert len(groups) == len(root.findall(f".//{SVG}polygon")) == len(program.messages)
    for group, message in zip(groups, program.messages, strict=True):
        dashed = [line.get("stroke-dasharray") is not None for line in group.iter(f"{SVG}line")]
        assert dashed == [message.action == "copy"]


def test_arrows_carry_the_numbers_of_their_chunks():
    root = ElementTree.fromstring(draw.svg(halving_all_reduce(4, 4)))
    labels = ["".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in root.iter(f"{SVG}g")]
    assert labels == ["23", "01", "23", "01", "1", "3", "0", "2", "1", "3", "0", "2", "23", "01", "23", "01"]


def test_everything_is_inside_the_picture():
    root = ElementTree.fromstring(draw.svg(halving_all_reduce(8, 8)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for cell in root.iter(f"{SVG}rect"):
        assert 0 <= float(cell.get("x", -1)) <= width - float(cell.get("width", 0))
    for line in root.iter(f"{SVG}line"):
        assert 0 < float(line.get("x2", -1)) < width
        assert 0 < float(line.get("y2", -1)) < height
