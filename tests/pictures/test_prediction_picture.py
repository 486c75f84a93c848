"""The pictures of a prediction: well-formed, of the prediction's own figures, and no text over another."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.clusters import CLUSTERS
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.roofline import points
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Batch
from phalanx.pictures.elements import seconds
from phalanx.pictures.prediction import svg
from phalanx.units import gib

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
