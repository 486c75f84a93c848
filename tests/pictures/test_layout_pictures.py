"""The pictures of layouts, context parallelism, experts' loads and recomputation."""

import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost.exact_state import state_bytes
from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Data, Job
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import DataError, JobError
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.partition.derived import Mode
from phalanx.partition.documents import keys_seen, long_tailed
from phalanx.partition.tensor_slices import ring_positions
from phalanx.pictures import prediction as recompute
from phalanx.pictures.context import contiguous, pairs
from phalanx.pictures.context import svg as context_svg
from phalanx.pictures.elements import COLOURS
from phalanx.pictures.experts import _colour, _spread, _tone
from phalanx.pictures.experts import svg as experts_svg
from phalanx.pictures.layout import _shards, _stages, svg
from phalanx.pictures.panels import Panel
from phalanx.units import counted
from pictures.test_plan_pictures import given_case

# The picture of a layout: well-formed, and of who really holds what.


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp_shard=4, zero=1), Layout(tp=4, dp_shard=2)])
def test_is_well_formed_and_names_the_layout(layout):
    root = ET.fromstring(svg(Job(layout=layout), 256))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == f"4 layers, 128 wide, on {counted(layout.world, 'rank')}"
    assert texts[1] == f"layout {layout.line().replace(',', ', ')}"
    assert {"embed", "attn.wq", "mlp.down", "parameters", "optimizer"} <= set(texts)
    bars = [text for text in texts if text.startswith(("replicated", "ZeRO"))]
    assert len(bars) == (4 if layout.dp_shard > 1 else 1)
    assert {"adamw ◂", *(name for name in OPTIMIZERS if name != "adamw")} <= set(texts)


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3"])
def test_experts_are_dealt_out(preset):
    layout = Layout(dp_shard=8, cp=2, tp=2, ep=4)
    texts = [e.text or "" for e in ET.fromstring(svg(Job(model=PRESETS[preset], layout=layout), 256)).iter()]
    assert {"attn.wo", "moe.router", "moe.experts.up", "moe.experts.down"} <= set(texts)
    assert "In the matrices of experts each row is an expert, distributed over 4 ep ranks, one shade each." in texts
    assert [text for text in texts if text.startswith("ZeRO-3")] == ["ZeRO-3, N=16, experts 4 ◂"]
    experts = PRESETS[preset].moe.n_experts // 4
    assert f"ep 1: experts {experts}–{2 * experts - 1} on ranks 2–3, 10–11, 18–19, 26–27" in texts
    assert len([text for text in texts if text.startswith("ep ")]) == 4


def test_replicated_experts_are_one_part_of_ep_of_them():
    """Ranks that share no state have all of the dense part, but only their own experts."""
    job = Job(model=replace(PRESETS["mixtral-8x7b"], vocab_size=1000), layout=Layout(dp_shard=8, ep=4))
    shown = dict(_stages(job, 1000))
    whole = state_bytes(job.model, Layout(dp_replicate=8))
    experts = sum(prod(shape) for name, shape in parameter_shapes(job.model, 1000).items() if is_expert(name))
    dense = whole.parameters / 4 - experts
    assert shown["replicated, ep=4"][0] / 4 == pytest.approx(dense + experts / 4, rel=1e-6)


def test_many_expert_ranks_are_cut_short_and_many_holders_counted():
    model = PRESETS["deepseek-v3"]
    texts = [e.text or "" for e in ET.fromstring(svg(Job(model=model, layout=Layout(dp_shard=512, ep=64)), 256)).iter()]
    rows = [text for text in texts if text.startswith("ep ")]
    assert len(rows) == 16
    assert rows[-1] == "ep 63: experts 252–255 on ranks 63, 127, 191, … 511 (8 in all)"


@pytest.mark.parametrize(("copies", "boxes"), [(1, 1), (3, 3), (6, 1)])
def test_slots_for_copies_are_drawn_beside_the_experts(copies, boxes):
    layout = Layout(dp_shard=4, tp=2, ep=4, redundant_experts=copies)
    drawn = svg(Job(model=replace(PRESETS["mixtral-8x7b"], vocab_size=1000), layout=layout), 1000)
    texts = [e.text or "" for e in ET.fromstring(drawn).iter()]
    assert drawn.count("stroke-dasharray") == 4 * boxes
    assert texts.count(f"× {copies}") == 4 * (copies != boxes)
    size = f"{copies * 3 * 4096 * 14336 * 4 / 2 / 2**20 / 1024:.1f}GiB" if copies > 3 else f"{copies * 336}.0MiB"
    assert [text for text in texts if text.startswith("Dashed: ") and f" {size} per layer" in text]


@given(st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([0.01, 1.0]), st.integers(1, 5))
def test_shares_cover_every_parameter(ranks, zero, bucket_mb, layers):
    layout = Layout(dp_shard=ranks, zero=zero, bucket_mb=bucket_mb)
    shards = _shards(Job(model=ModelConfig(n_layers=layers, d_model=12, n_heads=2), layout=layout), 17)
    for ends in shards.values():
        assert len(ends) == ranks
        assert sorted(ends) == ends
        assert ends[-1] == 1


# The picture of context parallelism: well-formed, and of who really holds and computes what.


def drawn(layout: Layout, seq_len: int = 64) -> list[ET.Element]:
    return list(ET.fromstring(context_svg(Job(model=ModelConfig(seq_len=seq_len, n_heads=8), layout=layout))).iter())


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
        return Counter(
            each.text for each in ET.fromstring(context_svg(job)).iter() if each.text in {"1", "2", "3", "4"}
        )

    # Of 8 chunks of 8 tokens each meets itself, then those in reach: the middle ones are of one rank.
    assert steps(1) == {"1": 8}
    assert steps(9) == steps(2) == {"1": 8 + 1, "2": 3, "4": 3}
    assert sum(steps(10).values()) == 8 + 7 + 6
    assert steps(64) == steps(0)


def test_layers_of_two_kinds_are_drawn_together():
    """Blocks in reach of the window full, those of the other layers pale."""
    model = ModelConfig(n_layers=3, seq_len=64, n_heads=8, window=9, full_every=3)
    job = Job(model=model, layout=Layout(cp=4))
    boxes = [each for each in ET.fromstring(context_svg(job)).iter() if each.get("fill-opacity") == "0.35"]
    assert len(boxes) == 36 - 8 - 7
    assert any(
        (each.text or "").endswith("without a window, 1 of 3.") for each in ET.fromstring(context_svg(job)).iter()
    )


@pytest.mark.parametrize("window", [0, 9])
def test_documents_are_drawn_with_their_pairs_by_cost_beside_zigzag(window):
    model = ModelConfig(seq_len=256, n_heads=8, window=window)
    job = Job(model=model, layout=Layout(cp=4, cp_ulysses=2), data=Data(corpus="stdlib", document_mask=True))
    found = list(ET.fromstring(context_svg(job)).iter())
    texts = [each.text or "" for each in found]
    most = {
        name: float(text.removeprefix(f"{name}: the maximum is ").split()[0])
        for text in texts
        for name in ("by documents", "zig-zag")
        if text.startswith(f"{name}: the maximum is ")
    }
    assert 1 <= most["by documents"] < most["zig-zag"]
    # What is filled is what the tokens see, once for each half of the heads.
    area = 0.0
    for points in (each.get("points", "") for each in found):
        corners = [tuple(map(float, point.split(","))) for point in points.split()]
        area += abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(corners, corners[1:] + corners[:1], strict=True))) / 2
    sides = (float(each.get("width", 0)) for each in found[1:] if each.get("width") == each.get("height"))
    side = max(sides)
    seen = keys_seen(long_tailed(256), model).sum() / model.n_layers - 128
    assert area / 2 / (side / 256) ** 2 == pytest.approx(seen, rel=0.05)


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
        context_svg(Job())


# The picture of experts' loads: every expert and row of a run, in colours of one scale.

SVG = "{http://www.w3.org/2000/svg}"


def draw_loads(metrics: Path) -> str:
    return experts_svg(metrics.parent.name, metrics)


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
    root = ElementTree.fromstring(draw_loads(run))
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
    assert "polyline" not in draw_loads(write(tmp_path / "short", {0: [1, 1]}))
    assert "href" not in draw_loads(run)
    assert "url(" not in draw_loads(run)


def test_steps_taken_again_and_a_line_cut_short_do_not_spoil_the_picture(tmp_path):
    again = {"event": "experts", "step": 20, "steps": 10, "loads": {0: [3, 1]}, "max_violation": 0.5, "worst_layer": 0}
    torn = '{"event": "experts", "step": 3' + "\n" + json.dumps({**again, "idle": 0})
    run = write(tmp_path / "run", {0: [1, 1]}, {0: [2, 0]}, {0: [0, 2]}, torn=torn)
    (curve,) = ElementTree.fromstring(draw_loads(run)).iter(f"{SVG}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert ">step 20: " in draw_loads(run)


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
        draw_loads(run)


# The picture of recomputation: its lines lead from one mode of all layers to another.


def end(spec: StepSpec, mode: Mode) -> tuple[float, float]:
    found = predict(replace(spec, layout=replace(spec.layout, recompute=mode)))
    return found.fullest.peak / 2**30, found.step_time_s


@pytest.mark.parametrize("case", ["one device", "64 stages"])
def test_lines_lead_from_mode_to_mode(case, monkeypatch):
    spec, _ = given_case(case)
    layers = spec.model.n_layers
    monkeypatch.setattr(recompute, "subject", lambda job, world: "a model")
    drawn: list[tuple[str, Sequence[Panel]]] = []
    monkeypatch.setattr(recompute, "panels_svg", lambda title, panels: drawn.append((title, panels)) or "")
    recompute.recompute_svg(Job(), spec)
    [(title, (costs, needs))] = drawn
    assert title == f"a model, {spec.cluster.accelerator.memory_gib:g} GiB each"
    for name, line in costs.lines.items():
        rest, first = (cast(Mode, mode) for mode in name.split(" to "))
        assert (line[0], line[-1]) == (end(spec, rest), end(spec, first))
        assert costs.marks[name] == line[-1]
        assert [place for place, _ in needs.lines[name]] == sorted({round(layers * n / 8) for n in range(9)})
        assert [memory for _, memory in needs.lines[name]] == [memory for memory, _ in line]
