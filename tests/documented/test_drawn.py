"""Every picture of docs/pictures is what the code draws today.

Pictures of predictions, simulations, plans and schedules are made again by the commands on their pages; those of
measurements are drawn again from the recorded figures (documented/measured, benchmarks/results), or have the words that
the code draws for other figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from documented.drawn import FOLDER, ROOT, commands, made
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.cost.communication import Collective, RankGroup
from phalanx.cost.fit import COLLECTIVES, AttentionTiming, ProductTiming, StreamTiming, Transfer, device_rows
from phalanx.pictures import experts, profile
from phalanx.pictures.elements import STYLE
from phalanx.pictures.heat_map import divergence_map, heat_map, histograms
from phalanx.pictures.panels import device_svg, link_svg
from phalanx.pictures.profile import RankRows
from pictures.contrast import contrasts

MEASURED = Path(__file__).parent / "measured"
COMMANDS = commands() if FOLDER.exists() else {}
VARYING = {"plan-space.svg": "the planner simulates as many layouts as it can in half a second"}
"""Pictures of commands whose figures depend on the machine, with the reason."""
SCREENSHOTS = {
    "report.png": "a browser's picture of a measured run's page; tests/report compares the page",
    "report-compare.png": "the same of two runs",
    "coalesced.svg": "rates of the processor that measured them",
    "grpo.svg": "the curve of a run of minutes; tests/report compares such curves",
}
"""Pictures that no test makes again, with the reason."""
SHAPES = ("n × n × n", "tokens × 2048 × 512", "1024 × slice × 512", "1024 × 512 × slice", "2048 × 512 × tokens")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the package is installed without its documents")


def shown(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def words(svg: str) -> set[str]:
    """Returns the texts of a picture without their figures; labels of an axis are none."""
    texts = (element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    bare = {re.sub(r"\d[\d.,]*", "#", text) for text in texts}
    return {text for text in bare if not re.fullmatch(r"#( ?[A-Za-zµ]{1,2})?", text)}


def step_of_ranks() -> str:
    rows = json.loads((MEASURED / "report-step.json").read_text(encoding="utf-8"))
    return profile.measured_svg(rows["title"], [RankRows(**rank) for rank in rows["ranks"]])


def of_benchmark(name: str) -> str:
    from benchmarks import sync_picture

    draw = {"sync": sync_picture.picture, "compression": sync_picture.compression_picture}[name]
    return draw(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")))


RECORDED: dict[str, Callable[[], str]] = {
    "experts.svg": lambda: experts.svg("experts", MEASURED / "experts.jsonl", "4 layers, 128 wide, on 2 ranks"),
    "profile.svg": lambda: profile.svg(json.loads((MEASURED / "profile.json").read_text(encoding="utf-8"))),
    "report-step.svg": step_of_ranks,
    "compression.svg": lambda: of_benchmark("compression"),
    "sync.svg": lambda: of_benchmark("sync"),
    "verify.svg": lambda: divergence_map(**json.loads((MEASURED / "verify.json").read_text(encoding="utf-8"))),
}
"""Pictures of recorded figures."""


def device() -> str:
    products = [ProductTiming(name, n, n, n, 1e-9 * n**2) for name in SHAPES for n in (64, 512)]
    products += [ProductTiming("512 × vocabulary × 512", n, n, n, 1e-9 * n**2) for n in (64, 512)]
    attentions = [AttentionTiming(n, 8, 64, back, 1e-3) for n in (128, 256) for back in (False, True)]
    streams = [StreamTiming(name, size, 1e-9 * size) for name in ("copy", "add") for size in (1e6, 1e8)]
    machine = Accelerator("any", fp32_tflops=0.2, ceiling=1.0, bandwidth_gbs=40, launch_us=5)
    rows = device_rows(machine, "fp32", products, attentions, streams)
    return device_svg("AMD EPYC, fp32: 2 processes of 1 thread, fp32 on cpu", products, attentions, streams, rows)


def links(title: str, names: list[str], collectives: Sequence[Collective] = COLLECTIVES) -> str:
    transfers = [Transfer(name, size, RankGroup(2), 1e-3) for name in collectives for size in (1024, 2**20)]
    machine = Cluster(devices_per_node=4, intra=Link(2.0, 50, 1.0))
    return link_svg(title, [(machine, transfers)] * len(names), names)


def pairs() -> str:
    rates = [[0.0 if a == b else 1.0 + a + b for b in range(4)] for a in range(4)]
    hosts = {rank: ("node-a", "node-b")[rank // 2] for rank in range(4)}
    return heat_map("Bandwidth between ranks, one way", rates, hosts, lambda value: f"{value:.3g}", unit="GB/s")


def steps() -> str:
    rows = {f"rank {rank} ({host})": [60.0, 61.5, 66.0] for rank, host in enumerate(("node-a", "node-b"))}
    return histograms("Time of a training step", "milliseconds per step", rows)


ALIKE: dict[str, Callable[[], str]] = {
    "bench_compute.svg": device,
    "bench_comm.svg": lambda: links("AMD EPYC: collectives of gloo, 2 processes of 1 thread", ["2 ranks"]),
    "test_dist_speed.svg": lambda: links(
        "Collectives of gloo by axis, 4 ranks on 2 hosts",
        ["dp_replicate, 2 ranks", "tp, 2 ranks", "world, 4 ranks"],
        (*COLLECTIVES, "broadcast"),
    ),
    "test_dist_bandwidth.svg": pairs,
    "test_dist_steps.svg": steps,
}
"""Pictures of measurements that only their machines can repeat, drawn with other figures."""


def test_every_picture_is_made_again_or_has_a_reason():
    groups = [set(COMMANDS), set(RECORDED), set(ALIKE), set(SCREENSHOTS)]
    assert sorted(name for group in groups for name in group) == sorted(path.name for path in FOLDER.iterdir())
    assert set(VARYING) <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - set(VARYING)))
def test_a_command_makes_the_picture_of_its_page(name, tmp_path):
    """`make pictures` makes them all again."""
    assert made(COMMANDS[name], tmp_path) == shown(name)


@pytest.mark.parametrize("name", sorted(VARYING))
def test_a_command_makes_a_picture_of_the_same_words(name, tmp_path):
    families = {"three axes or more", "others"}
    differing = words(made(COMMANDS[name], tmp_path)) ^ words(shown(name))
    assert {text for text in differing if " + " not in text} <= families


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_figures_make_the_picture(name):
    assert RECORDED[name]() == shown(name)


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_a_measured_picture_has_the_words_of_today(name):
    assert words(ALIKE[name]()) == words(shown(name))
    assert STYLE in shown(name)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.svg")))
def test_every_text_has_the_contrast_of_wcag(name):
    """Also on coloured cells, on light pages and on dark ones."""
    found = [pair for dark in (False, True) for pair in contrasts(shown(name), dark=dark)]
    assert found
    low = [pair for pair in found if pair[1] < 4.5]
    assert not low


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_picture_of_a_job_names_model_and_machine(name):
    """Those of schedules, collectives and failures are of no model."""
    given = dict(word.split("=", 1) for word in COMMANDS[name] if "=" in word)
    if "cluster" not in given or name == "goodput.svg":
        return
    title = ElementTree.fromstring(shown(name)).findtext("{http://www.w3.org/2000/svg}title") or ""
    assert re.match(rf"{given.get('model', '4 layers, 128 wide,')}( with \d+ layers, \d+ wide,)? on ", title)
    assert f"({given['cluster']})" in title.replace("own cluster", given["cluster"])
