"""The picture of experts' loads: every expert and row of a run, in colours of one scale."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DataError
from phalanx.pictures.experts import _colour, _spread, _tone, svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(metrics: Path) -> str:
    return svg(metrics.parent.name, metrics)


def write(folder: Path, *loads: dict[int, list[int]], torn: str = "") -> Path:
    """The metrics.jsonl of a run of that name with rows at steps 10, 20 and so on."""
    folder.mkdir()
    lines = [json.dumps({"event": "step", "step": 1, "loss": 1.0})]
    for number, of_layers in enumerate(loads, start=1):
        worst = max(max(row) * len(row) / sum(row) - 1 for row in of_layers.values())
        row = {"step": 10 * number, "steps": 10, "loads": of_layers, "max_violation": worst, "worst_layer": 0}
        lines.append(json.dumps({"event": "experts", **row, "idle": 0}))
    path = folder / "metrics.jsonl"
    path.write_text("\n".join([*lines, torn]))
    return path


def test_the_picture_shows_every_expert_and_every_row(tmp_path):
    run = write(tmp_path / "a<b & c", {0: [5, 5, 5, 5]}, {0: [1, 2, 3, 2], 1: [8, 0, 0, 0]})
    root = ElementTree.fromstring(drawn(run))
    cells = root.find(f"{SVG}g[@class='map']")
    assert cells is not None
    boxes = [box for path in cells.iter(f"{SVG}path") for box in (path.get("d") or "").split("z") if box]
    assert len(boxes) == len(set(boxes)) == 8
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "Expert load of the run a<b & c"
    assert texts[1] == (
        "step 20: an expert of layer 0 has 4.00 × an even share (max_violation 3.00); experts without tokens: 0"
    )
    shown = {"Tokens of each expert, steps 11 to 20", "Worst layer over the run", "1 ×"}
    assert {*shown, "0.50", "1.00", "1.50", "4.00", "0.00"} <= set(texts)
    (curve,) = root.iter(f"{SVG}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert "polyline" not in drawn(write(tmp_path / "short", {0: [1, 1]}))
    assert "href" not in drawn(run)
    assert "url(" not in drawn(run)


def test_steps_taken_again_and_a_line_cut_short_do_not_spoil_the_picture(tmp_path):
    again = {"event": "experts", "step": 20, "steps": 10, "loads": {0: [3, 1]}, "max_violation": 0.5, "worst_layer": 0}
    torn = '{"event": "experts", "step": 3' + "\n" + json.dumps({**again, "idle": 0})
    run = write(tmp_path / "run", {0: [1, 1]}, {0: [2, 0]}, {0: [0, 2]}, torn=torn)
    (curve,) = ElementTree.fromstring(drawn(run)).iter(f"{SVG}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert ">step 20: " in drawn(run)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=300).filter(any))
def test_a_share_has_a_colour_of_the_scale_and_an_even_one_the_middle(loads):
    shares = [load * len(loads) / sum(loads) for load in loads]
    spread = _spread(shares)
    tones = [_tone(share, spread) for share in shares]
    assert all(-20 <= tone <= 20 for tone in tones)
    assert [tone for _, tone in sorted(zip(shares, tones, strict=True))] == sorted(tones)
    assert _tone(1.0, spread) == 0
    assert len({_colour(tone) for tone in range(-20, 21)}) == 41


def test_a_run_without_experts_is_refused_with_the_reason(tmp_path):
    run = write(tmp_path / "dense")
    with pytest.raises(DataError, match="has no row about experts"):
        drawn(run)
