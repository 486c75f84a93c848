"""The result in words, as JSON and as a page."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from phalanx.machine import self_test as report
from phalanx.machine.self_test import advice
from phalanx.machine.training import ProbeTimes, Straggler


def test_a_good_group_is_ok_and_needs_no_advice(good):
    assert good.ok
    assert advice(good) == []
    lines = good.text().splitlines()
    assert lines[0] == "4 ranks on 2 hosts, 1 thread each, gloo on cpu, layout dp_replicate=2,tp=2"
    assert "values on tp: 248 results per rank compared exactly, all correct" in lines
    assert "values on ep: has the ranks of tp" in lines
    assert "pairs on one host: 8 GB/s, 6.25 µs in the median; slowest 0 → 1 (node-a → node-a): 8 GB/s" in lines
    assert any(
        line.startswith("training: 3 steps of tiny") and line.endswith("the same on all ranks") for line in lines
    )
    assert lines[-1] == "ok: all values correct, no stragglers, no slow pairs (3.0 s)"


def test_every_finding_is_named_with_what_to_do(bad):
    assert not bad.ok
    text = bad.text()
    for words in (
        "values on tp: 248 results per rank compared exactly, 1 WRONG",
        "rank 3 (node-b): all-gather of 7 × bf16 per rank on tp: element 5 is 35, expected 36 (1 wrong element)",
        "training step 2: rank 0 (node-a) has loss nan, which is not finite",
        "rank 2 (node-b) is slow: 10 ms in the compute probe, 2.00 × the median of the others (5 ms)",
        "tp of ranks 2, 3 is slow: 20 ms for the largest all-reduce, 2.00 × the median of the other lines",
        "pair 1 → 2 (node-a → node-b) is slow: 0.1 GB/s, 10% of the median",
        "not done by gloo: all_reduce_avg (int64): no <such> op",
        "what to do: only ranks of host node-b see wrong values: do not train there",
        "what to do: rank 2 (node-b): computes slowly",
        "what to do: rank 1 (node-a): needs more time of its own per step",
        "what to do: all slow pairs involve host node-a, node-b: check cable",
        "note: a note",
        "FAILED: 2 problems; the first: rank 3 (node-b): all-gather",
    ):
        assert words in text, words


def test_slow_pairs_on_one_host_are_not_a_matter_of_cables(good):
    good.pairs.gbs[0][1] = 1.0
    (line,) = advice(good)
    assert line.startswith("slow pairs on host node-a: look for other processes")
    assert good.verdict() == "correct, but slow: 0 stragglers, 1 slow pair"


def test_gpus_that_talk_over_ethernet_are_told(good):
    good.device = "cuda"
    good.axes[1] = replace(good.axes[1], gbs=0.3)
    (line,) = advice(good)
    assert line.startswith("dp_replicate: 0.3 GB/s between hosts is that of Ethernet: check NCCL_SOCKET_IFNAME")


def test_json_has_every_figure_and_no_nan(bad):
    document = json.loads(json.dumps(bad.as_dict(), allow_nan=False))
    assert document["ok"] is False
    assert document["checks"][0]["wrong"][0] == {
        "rank": 3,
        "host": "node-b",
        "axis": "tp",
        "collective": "all_gather",
        "dtype": "bf16",
        "elements": 7,
        "form": "plain",
        "place": 5,
        "expected": 36.0,
        "got": 35.0,
        "wrong": 1,
    }
    assert document["pairs"]["gbs"][0][0] is None
    assert document["pairs"]["gbs"][1][2] == 0.1
    assert document["slow_pairs"] == [{"sender": 1, "receiver": 2, "gbs": 0.1, "median_gbs": 1.0}]
    assert [each["factor"] for each in document["stragglers"]] == [2.0, 2.0]
    assert document["axes"][0]["latency_us"] == 100.0
    assert len(document["axes"][0]["times"]) == 14
    assert document["training"]["losses"] == [5.5, None]
    assert document["seconds"] == {"values": 1.0, "speed": 2.0}


def test_probes_are_medians_over_the_windows(good):
    good.probes.append({rank: ProbeTimes(9.0, 9.0, 9.0) for rank in range(4)})
    assert good.probe[0].compute_s == 0.005


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "wbr"):
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("which", ["good", "bad"])
def test_the_page_is_complete_and_loads_nothing(which, request):
    text = report.page(request.getfixturevalue(which))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert [name for name in ("verdict", "values", "speed", "pairs", "ranks", "training") if name not in tags.ids] == []
    assert "src=" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "aten::mm &lt;a &amp; b&gt;" in text
    assert "<such>" not in text
    assert ("What to do" in text) == (which == "bad")


def test_pictures_are_drawn_from_the_same_figures(bad):
    drawn = report.pictures(bad)
    assert sorted(drawn) == ["bandwidth", "latency", "speed", "steps"]
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    assert drawn["bandwidth"].count("class='slow'") == 1
    assert drawn["steps"].count("class='median'") == 4
    assert "tp, 2 ranks" in drawn["speed"]
    assert drawn["speed"].count("class='panel'") == 12  # six collectives with a formula: time and bandwidth


def test_a_single_rank_has_a_page_too(good):
    good.hosts, good.checks, good.axes, good.pairs, good.probes = ["h"], [], [], None, []
    good.training = replace(good.training, step_s=[[0.01]], own_s=[])
    assert "Training" in report.page(good)
    assert good.title().startswith("1 rank on 1 host")


def test_a_straggler_in_words():
    line = Straggler(1, "b", "arrival", 0.02, 0.01).line()
    assert line == (
        "rank 1 (b) is slow: 20 ms from a computation to its collective, 2.00 × the median of the others (10 ms)"
    )
    assert math.isclose(Straggler(1, "b", "arrival", 0.02, 0.01).factor, 2)
