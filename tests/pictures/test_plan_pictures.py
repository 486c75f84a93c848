"""The pages and pictures of plans and predictions."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.clusters import CLUSTERS
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.roofline import points
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Batch
from phalanx.pictures.elements import STYLE, log_ticks, seconds
from phalanx.pictures.page import CSS
from phalanx.pictures.plan_page import ABOVE, command, html, job_section, memory_picture, space_picture, time_picture
from phalanx.pictures.prediction import svg
from phalanx.plan.plan import Plan, SpacePoint
from phalanx.units import gib
from plan.plans import hopeless, plan

# The plan's page: well-formed, whole in itself, and nothing of a job runs in it. One test opens it in a browser.


SECTIONS = ["chosen", "best", "parts", "why", "instead", "timeline", "space", "rejected"]
TIMELINE = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9' width='9' height='9'><title>t</title></svg>"
VOID = {"meta", "wbr", "br"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=2000 --dump-dom"
)


class Balanced(HTMLParser):
    """Counts elements, gathers attributes, and fails where tags do not match."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def test_it_is_well_formed_and_has_every_section() -> None:
    found = Balanced(html(plan(), TIMELINE))
    ids = found.values("id")
    assert ids == SECTIONS
    assert found.seen["svg"] == 4
    assert len(re.findall("<tr", html(plan()))) > len(plan().best) + len(plan().alternatives)
    assert Balanced(html(hopeless())).values("id") == ["chosen", "parts", "space", "rejected"]
    nothing = replace(hopeless(), nearest=None, points=(), rejected={})
    assert Balanced(html(nothing)).values("id") == ["chosen"]


def test_it_loads_nothing() -> None:
    page = html(plan(), TIMELINE)
    found = Balanced(page)
    assert not found.values("src")
    assert not found.values("href")
    assert not {"link", "img", "iframe", "object"} & set(found.seen)
    assert "url(" not in page
    assert "@import" not in page
    assert set(re.findall(r"https?://[^'\" ]*", page)) == {"http://www.w3.org/2000/svg"}
    policy = next(value for name, value in found.attributes if name == "content" and "default-src" in value)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert found.seen["script"] == 1
    assert set(re.findall(r"<style>.*?</style>", page, flags=re.DOTALL)) == {f"<style>{CSS}</style>", STYLE}


def poisoned(bad: str) -> Plan:
    """A plan in which every text that comes from outside is `bad`."""
    spec = plan().best[0].spec
    accelerator = replace(spec.cluster.accelerator, name=bad)
    spec = replace(
        spec,
        model=replace(spec.model, preset=bad),
        cluster=replace(spec.cluster, preset=bad, accelerator=accelerator),
        layout=replace(spec.layout, schedule=bad),
    )
    first = replace(plan().best[0], spec=spec)
    alternatives = tuple(each._replace(name=bad, why=bad) for each in plan().alternatives)
    points = (*plan().points, SpacePoint(bad, 12.0, 2.0**36, True, bad))
    return replace(
        plan(),
        request=spec,
        best=(first, *plan().best[1:]),
        alternatives=alternatives,
        points=points,
        rejected={bad: 3},
        notes=(bad,),
    )


@pytest.mark.parametrize("bad", ["<script>alert(1)</script>", "'\"><img src=x onerror='alert(1)'>", "--></style>&lt;b"])
def test_what_comes_from_outside_is_text(bad: str) -> None:
    good, found = Balanced(html(plan(), TIMELINE)), Balanced(html(poisoned(bad), TIMELINE))
    assert bad not in html(poisoned(bad))
    assert set(found.seen) == set(good.seen)
    assert found.seen["script"] == 1
    assert {name for name, _ in found.attributes} == {name for name, _ in good.attributes}


def test_a_large_space_is_not_a_large_page() -> None:
    many = tuple(
        point._replace(seconds=point.seconds * (1 + number / 100), family=f"family {number % 11}")
        for number in range(40)
        for point in plan().points
    )
    page = html(replace(plan(), points=many[:1000], best=plan().best * 4), TIMELINE)
    assert len(page.encode()) < 1_500_000
    assert "others" in page


def test_the_layout_can_be_pasted() -> None:
    for layout in (each.layout for each in plan().best):
        assert Layout(**yaml.safe_load(job_section(layout))["layout"]) == layout
        words = shlex.split(command(layout))
        assert words[:3] == ["phalanx", "train", "JOB"]
        job = load_words(overrides.parse(["model=llama3-70b", "cluster=dgx-h100:8", *words[3:]])).job
        assert job.layout == layout
    odd = command(Layout(schedule="my schedule's.yaml", pp=2))
    assert shlex.split(odd)[3:] == ["pp=2", "layout.schedule=my schedule's.yaml"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_a_browser_shows_it_and_sorts_its_table(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    click = (
        "const head = [...document.querySelectorAll('#best th')].find(head => head.textContent === 'memory');"
        "head.click(); document.documentElement.dataset.order ="
        "[...document.querySelectorAll('#best tbody tr')].map(row => row.cells[0].textContent).join();"
    )
    page.write_text(html(plan(), TIMELINE).replace("</body>", f"<script>{click}</script></body>"), encoding="utf-8")
    assert BROWSER
    words = [BROWSER, *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Uncaught" not in done.stderr
    assert "Content Security Policy" not in done.stderr
    opened = re.search("<html[^>]*>", done.stdout)
    assert opened, done.stdout[:2000]
    assert "data-ready" in opened[0]
    peaks = [each.prediction.fullest.peak for each in plan().best]
    order = ",".join(str(rank + 1) for rank in sorted(range(len(peaks)), key=lambda rank: peaks[rank]))
    assert f'data-order="{order}"' in opened[0]
    assert re.findall('<section id="(\\w+)"', done.stdout) == SECTIONS


# The pictures of a plan: well-formed, of the plan's own figures, and no text over another.


def test_bars_are_as_long_as_their_parts() -> None:
    best = plan().best
    for drawn, values in (
        (time_picture(best), [each.prediction.parts.items() for each in best]),
        (memory_picture(best), [each.prediction.fullest.parts() for each in best]),
    ):
        root = ET.fromstring(drawn)
        assert_apart(root)
        rows = of_kind(root, "}g", "row")
        assert len(rows) == len(best)
        scales = []
        for row, parts in zip(rows, values, strict=True):
            boxes = of_kind(row, "}rect")
            assert len(boxes) == sum(1 for _, size in parts if size)
            length = sum(float(each.get("width", 0)) for each in boxes)
            scales.append(length / sum(size for _, size in parts))
        assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-3)


def test_the_mark_stands_at_the_simulated_time() -> None:
    root = ET.fromstring(time_picture(plan().best))
    for row, each in zip(of_kind(root, "}g", "row"), plan().best, strict=True):
        boxes, (mark,) = of_kind(row, "}rect"), of_kind(row, "}line", "mark")
        left = float(boxes[0].get("x", 0))
        length = sum(float(box.get("width", 0)) for box in boxes)
        share = (float(mark.get("x1", 0)) - left) / length
        assert share == pytest.approx(each.seconds / each.prediction.step_time_s, abs=1e-3)


def test_the_limit_lies_before_what_does_not_fit() -> None:
    least = hopeless().nearest
    assert least
    for shown, fits in ((plan().best, True), ((least,), False)):
        root = ET.fromstring(memory_picture(shown))
        limit, *_ = of_kind(root, "}line", "limit")
        ends = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in of_kind(root, "}rect")]
        assert (max(ends) <= float(limit.get("x1", 0))) == fits


def test_the_map_has_a_dot_a_layout_and_rings_the_best() -> None:
    root = ET.fromstring(space_picture(plan()))
    assert_apart(root)
    dots = of_kind(root, "}circle", "point")
    bytes_limit = plan().best[0].prediction.memory_limit
    near = [point for point in plan().points if point.peak <= ABOVE * bytes_limit]
    assert 0 < len(dots) == len(near) < len(plan().points)
    assert (
        f"; {len(plan().points) - len(near)} others of the sample need more than {gib(ABOVE * bytes_limit)}"
        in words(root)[1]
    )
    assert sum(dot.get("fill") == "none" for dot in dots) == sum(not point.fits for point in near)
    (limit,) = of_kind(root, "}line", "limit")
    for dot, point in zip(dots, sorted(near, key=lambda point: point.fits), strict=True):
        if abs(point.peak / bytes_limit - 1) > 1e-3:  # a full device's allocator gives back: peak and limit are one
            assert (float(dot.get("cy", 0)) > float(limit.get("y1", 0))) == (point.peak < bytes_limit)
    usual = [each.candidate.prediction.fullest.peak for each in plan().alternatives if each.candidate]
    assert len(of_kind(root, "}path", "diamond")) == 1 + sum(peak <= ABOVE * bytes_limit for peak in usual)
    assert "best" in words(root)
    assert set(Counter(point.family for point in near)) <= set(words(root))
    assert f"memory per device: {gib(bytes_limit)}" in words(root)


def test_the_map_where_nothing_fits_and_where_there_is_nothing() -> None:
    assert "needs least" in words(ET.fromstring(space_picture(hopeless())))
    with pytest.raises(ValueError, match="no layouts"):
        space_picture(replace(hopeless(), points=(), nearest=None))


@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.05, 1e9))
def test_logarithmic_ticks_are_few_and_inside(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert 1 <= len(found) <= 12
    assert found == sorted(found)
    assert all(low * (1 - 1e-6) <= tick <= low * factor * (1 + 1e-6) for tick in found)


# The pictures of a prediction: well-formed, of the prediction's own figures, and no text over another.

CASES = {
    "one device": ("gpt2", "dgx-a100", Layout(), 1),
    "a node": ("llama3-70b", "dgx-h100", Layout(dp_shard=8, tp=8), 1),
    "64 stages": ("megatron-1008b", "selene", Layout(dp_replicate=6, tp=8, pp=64, recompute="full"), 512),
    "experts": ("deepseek-v3", "h800", Layout(pp=16, ep=64, dp_shard=128, zero=1, schedule="dualpipe"), 120),
    "fp32": ("gpt2", "dgx-h100", Layout(), 1),
}


def given_case(name: str) -> tuple[StepSpec, Prediction]:
    preset, cluster, layout, accumulation = CASES[name]
    model = PRESETS[preset]
    model = replace(model, vocab_size=model.vocab_size or 50257)
    batch = Batch(layout.data_ranks * accumulation, 1, accumulation, layout.data_ranks)
    products, width = ("fp32", 4) if name == "fp32" else ("bf16", 2)
    spec = StepSpec(model, CLUSTERS[cluster], layout, batch, products, width, PHALANX)
    return spec, predict(spec)


def group(root: ET.Element, name: str) -> ET.Element:
    return next(each for each in root.iter() if each.get("class") == name)


def of_kind(root: ET.Element, tag: str, name: str | None = None) -> list[ET.Element]:
    return [each for each in root.iter() if each.tag.endswith(tag) and name in (None, each.get("class"))]


def words(root: ET.Element) -> list[str]:
    return [each.text or "" for each in of_kind(root, "}text")]


@pytest.fixture(params=CASES)
def drawn(request) -> tuple[StepSpec, Prediction, ET.Element]:
    spec, prediction = given_case(request.param)
    return spec, prediction, ET.fromstring(svg(spec, prediction))


def test_time_shows_every_part_that_counts(drawn):
    _, prediction, root = drawn
    shown = words(group(root, "time"))
    step, (low, high) = prediction.step_time_s, prediction.spread
    assert shown[0] == f"Time of a step: {seconds(step)}"
    assert f"{seconds(low * step)} to {seconds(high * step)}" in shown
    parts = {name: spent for name, spent in prediction.parts.items() if spent >= 5e-4 * step}
    assert [text for text in shown if text in dict(prediction.parts.items())] == list(parts)
    bars = of_kind(group(root, "time"), "}rect")[:-1]
    scale = float(of_kind(group(root, "time"), "}rect")[-1].get("width", 0)) / step
    for bar, spent in zip(bars, parts.values(), strict=True):
        assert float(bar.get("width", 0)) == pytest.approx(max(1, spent * scale), abs=0.02)


def test_memory_has_a_bar_a_rank_as_long_as_its_peak(drawn):
    """One rank has rows from left to right, several have stacks upwards."""
    _, prediction, root = drawn
    panel = group(root, "memory")
    bars = of_kind(panel, "}g", "rank")
    assert len(bars) == len(prediction.memory)
    line = of_kind(panel, "}line", "limit")[0]
    for bar, memory in zip(bars, prediction.memory, strict=True):
        boxes = of_kind(bar, "}rect")
        assert len(boxes) == sum(1 for _, size in memory.parts() if size)
        if len(bars) == 1:
            right = max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes)
            above = right - float(line.get("x1", 0))
        else:
            above = float(line.get("y1", 0)) - min(float(box.get("y", 0)) for box in boxes)
        if abs(memory.peak / prediction.memory_limit - 1) > 1e-2:  # of drawings equal to the pixel neither is above
            assert (above < 0) == (memory.peak < prediction.memory_limit)
    said = "fits" if prediction.fits else "does not fit"
    assert words(panel)[0].startswith(f"Memory in GiB: at most {gib(prediction.fullest.peak)}")
    assert words(panel)[0].endswith(f": {said}")


def test_the_roofline_has_a_dot_and_a_row_an_operator(drawn):
    spec, _, root = drawn
    panel, found = group(root, "roofline"), points(spec)
    assert len(of_kind(panel, "}circle", "operator")) == len(found)
    assert {point.name for point in found} <= set(words(panel))
    ridge = next(text for text in words(panel) if text.startswith("ridge"))
    assert (
        ridge
        == {
            "a100-80gb": "ridge 153 FLOP/byte",
            "h100-80gb": "ridge 295 FLOP/byte" if spec.products == "bf16" else "ridge 20 FLOP/byte",
            "h800-80gb": "ridge 295 FLOP/byte",
        }[spec.cluster.accelerator.name]
    )


def test_no_text_lies_over_another_or_beyond_the_edge(drawn):
    root = drawn[2]
    assert_apart(root)


@given(
    seq_len=st.sampled_from([8, 64, 4096]),
    d_model=st.sampled_from([32, 512, 8192]),
    micro_batch=st.sampled_from([1, 16]),
    pp=st.sampled_from([1, 2, 8]),
    cluster=st.sampled_from(["dgx-v100", "dgx-h100", "dgx-b200", "tpu-v5e"]),
    heads=st.sampled_from([1, 8]),
)
def test_any_size_can_be_drawn(seq_len, d_model, micro_batch, pp, cluster, heads):
    model = ModelConfig(n_layers=8, seq_len=seq_len, d_model=d_model, n_heads=heads, vocab_size=1000)
    batch = Batch(16 * micro_batch, micro_batch, 16, 1)
    spec = StepSpec(model, CLUSTERS[cluster], Layout(pp=pp), batch, framework=PHALANX)
    assert_apart(ET.fromstring(svg(spec, predict(spec))))


def assert_apart(root: ET.Element) -> None:
    boxes = [box(each) for each in of_kind(root, "}text") if "transform" not in each.attrib]
    for left, _, right, _, text in boxes:
        assert left >= 0, text
        assert right <= float(root.get("width", 0)), text
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


def box(element: ET.Element) -> tuple[float, float, float, float, str]:
    """Where a text is: a letter is about as wide as half its height."""
    text, size = element.text or "", float(element.get("font-size", 12))
    width, x, y = 0.52 * size * len(text), float(element.get("x", 0)), float(element.get("y", 0))
    left = x - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
    return left, y - 0.75 * size, left + width, y + 0.2 * size, text


def test_seconds():
    assert [seconds(value) for value in (93.47, 1.0, 0.99996, 0.1441, 4.27e-3, 14e-3, 24.8e-6, 1e-7, 12345.0)] == [
        *("93.5 s", "1 s", "1 s", "144 ms", "4.27 ms", "14 ms", "24.8 µs", "0.1 µs", "12,345 s")
    ]
