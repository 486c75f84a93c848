"""A simulated step with its optimizer on the host: as long as predicted, with lanes of the host and its copies."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from phalanx.config.clusters import cluster_of
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.pictures import prediction as prediction_picture
from phalanx.pictures.timeline import svg
from phalanx.simulate import timeline as trace
from phalanx.simulate.step import simulate
from simulate.specs import spec

SVG = "{http://www.w3.org/2000/svg}"


def offloaded(line: str, link_gbs: float = 0.0, m: int = 4) -> StepSpec:
    one = spec(f"{line},offload=optimizer,recompute=full", m, "llama3-8b")
    host = cluster_of("dgx-h100").host
    return replace(one, cluster=replace(one.cluster, host=replace(host, link_gbs=link_gbs or host.link_gbs)))


@pytest.mark.parametrize("link_gbs", [0.0, 0.5], ids=["hidden copies", "copies that outlast the passes"])
def test_it_takes_what_is_predicted_and_ends_with_the_host(link_gbs: float) -> None:
    one = offloaded("dp_shard=8", link_gbs)
    found = simulate(one)
    assert found.seconds == pytest.approx(predict(one).step_time_s, rel=1e-9)
    (lanes,) = found.host
    assert max(span.end for span in lanes) == pytest.approx(found.seconds)
    down, update, up = ([span for span in lanes if span.kind == kind] for kind in ("down", "update", "up"))
    assert max(span.end for span in down) == pytest.approx(update[0].start)
    assert up[0].start > update[0].start
    for copies in (down, up):
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(copies))
    shares = found.shares(0)
    assert sum(shares) == pytest.approx(found.seconds)
    assert shares.host >= update[0].seconds * (1 - 1e-9)


def test_no_rank_updates_before_all_gradients_are_there() -> None:
    found = simulate(offloaded("pp=4,dp_shard=2,zero=1", m=8))
    ends = max(span.end for spans in found.device for span in spans)
    assert all(span.start >= ends for lanes in found.host for span in lanes if span.kind == "update")
    assert max(span.end for lanes in found.host for span in lanes) == pytest.approx(found.seconds)
    assert all(span.kind != "optimizer" for spans in found.device for span in spans)


def test_the_lanes_are_in_the_picture_and_in_the_trace() -> None:
    found = simulate(offloaded("pp=2,dp_shard=2,zero=1"))
    root = ElementTree.fromstring(svg(found))
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"waits for host", "update on the host", "copy between device and host"} <= set(words)
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sum(title.startswith("update: ") for title in titles) == 2
    events = json.loads(trace.text(found))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"rank 1 {name}" for name in trace.HOST_ROWS.values()} <= set(rows.values())
    shown = [(rows[event["tid"]], event["cat"]) for event in events if event["ph"] == "X"]
    assert ("rank 0 host", "update") in shown
    assert ("rank 0 copies to the device", "up") in shown


def test_a_prediction_s_picture_has_the_host_s_memory() -> None:
    one = offloaded("dp_shard=8")
    assert "host" in words(one)
    small = replace(one, cluster=replace(one.cluster, host=replace(one.cluster.host, memory_gib=1.0)))
    assert "host: does not fit" in words(small)


def words(one: StepSpec) -> list[str]:
    """The texts of a prediction's picture."""
    root = ElementTree.fromstring(prediction_picture.svg(one, predict(one)))
    return [text.text or "" for text in root.iter(f"{SVG}text")]
