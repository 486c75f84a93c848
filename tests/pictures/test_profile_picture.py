"""The picture of a profile: a bar per rank whose parts fill the step, and two bars for each compared part."""

from xml.etree import ElementTree

from phalanx.pictures import profile

SVG = "{http://www.w3.org/2000/svg}"
PARTS = {"forward": 0.03, "backward": 0.05, "tp exposed": 0.01, "pp waiting": 0.01}
DOCUMENT = {
    "steps": [10, 12],
    "layout": "tp=2,pp=2",
    "ranks": [{"rank": rank, "shares": {"step": 0.1, "parts": PARTS}} for rank in range(3)],
    "compared": {
        "rank": 1,
        "cluster": "local",
        "parts": [
            {"name": "forward", "predicted_s": 0.015, "measured_s": 0.03, "ratio": 2.0},
            {"name": "waiting", "predicted_s": 0.0, "measured_s": 0.01, "ratio": None},
            {"name": "step", "predicted_s": 0.015, "measured_s": 0.04, "ratio": 40 / 15},
        ],
    },
}


def groups(text, name):
    return [g for g in ElementTree.fromstring(text).iter(f"{SVG}g") if g.get("class") == name]


def test_bars_have_the_length_of_their_parts():
    rows = groups(profile.svg(DOCUMENT), "rank")
    assert len(rows) == 3
    widths = [float(rect.get("width", 0)) for rect in rows[0].iter(f"{SVG}rect")]
    assert [round(width / sum(widths), 3) for width in widths] == [0.3, 0.5, 0.1, 0.1]
    first, second = groups(profile.svg(DOCUMENT), "part")[0].iter(f"{SVG}rect")
    assert abs(float(second.get("width", 0)) / float(first.get("width", 1)) - 2) < 0.01


def test_a_profile_without_a_prediction_has_its_ranks_only():
    text = profile.svg({**DOCUMENT, "compared": None, "steps": [3, 3]})
    assert groups(text, "part") == []
    assert "Profile of step 3: tp=2,pp=2" in text


def test_the_axes_of_exposed_communication_differ_in_colour():
    parts = {**PARTS, "pp exposed": 0.005, "pp waiting": 0.005}
    text = profile.svg({**DOCUMENT, "ranks": [{"rank": 0, "shares": {"step": 0.1, "parts": parts}}]})
    (row,) = groups(text, "rank")
    colours = [(rect.get("fill"), rect.get("fill-opacity")) for rect in row.iter(f"{SVG}rect")]
    assert len(set(colours)) == len(parts)
