"""Traces: events of the steps only, merged ranks, a GPU's kernels, the largest tensors, and a profile's document."""

import gzip
import json

import pytest

from phalanx.errors import DataError
from phalanx.train.profile import report, trace_file
from phalanx.train.profile.report import Communication, ProfiledRank, Shares, by_kernels
from phalanx.train.profile.trace_file import LiveTensor, Range, TraceClock, at_peak, completed, merged, own_rows
from phalanx.train.profile.window import Gathered, busiest, on_one_clock

CLOCK = TraceClock({"baseTimeNanoseconds": 5000}, 5000)
"""Microseconds of the trace are nanoseconds of the record / 1000."""


def operation(name, ts, dur=1, pid=77, tid=7, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def test_a_trace_has_the_events_of_its_steps_and_our_own():
    flow = {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": 77, "tid": 7, "ts": 12}
    name = {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}}
    events = [name, operation("before", 1), operation("during", 12, 3), operation("after", 30), flow]
    rows = own_rows({"step": [("step 4", 10_000, 20_000, {})]}, CLOCK)
    flights = [("tp all_reduce", 11_000, 19_000, {"bytes": 8})]
    whole = completed({"traceEvents": events}, 2, "rank 2", rows, flights, CLOCK, [(10, 20)])["traceEvents"]
    named = {event["name"]: event for event in whole if event["ph"] in "Xb"}
    assert named.keys() == {"step 4", "during", "tp all_reduce"}
    assert (named["step 4"]["ts"], named["step 4"]["dur"]) == (10, 10)
    assert {event["pid"] for event in whole} == {2000}
    assert [event["id"] for event in whole if event["ph"] == "s"] == [3 * 4096 + 2]
    assert [event["args"]["name"] for event in whole if event["name"] == "process_name"] == ["rank 2"]


def test_traces_are_merged_on_one_clock_and_bounded(tmp_path, monkeypatch):
    paths = []
    for rank, base in enumerate((1000, 4000)):
        paths.append(tmp_path / f"rank_{rank}.json.gz")
        event = operation(f"of {rank}", 10.0, pid=1000 * rank)
        text = json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]})
        paths[-1].write_bytes(gzip.compress(text.encode()))
    content, notes = merged(paths)
    assert notes == []
    assert [(event["name"], event["ts"]) for event in json.loads(content)["traceEvents"]] == [
        ("of 0", 10),
        ("of 1", 13),
    ]
    monkeypatch.setattr(trace_file, "MOST_BYTES", len(text) + 5)
    content, notes = merged(paths)
    assert len(json.loads(content)["traceEvents"]) == 1
    assert notes == ["rank_1.json.gz is not in the merged trace, which would have more than 0 MiB"]


def test_a_kernel_belongs_to_the_pass_that_launched_it():
    calls = [Communication("tp", "all_reduce", "g", 1, 20_000, 60_000, 50_000, 21_000)]
    record = ProfiledRank(0, [(0, 200_000)], {"forward": [(0, 30_000)], "data": [(40_000, 41_000)]}, calls)
    events = [
        operation("cudaLaunchKernel", 10, cat="cuda_runtime", correlation=1),
        operation("gemm", 100, 20, cat="kernel", correlation=1),
        operation("cudaLaunchKernelExC", 20.5, cat="cuda_runtime", correlation=2),
        operation("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 110, 30, cat="kernel", correlation=2),
        operation("cudaLaunchKernel", 35, cat="cuda_runtime", correlation=3),
        operation("elsewhere", 150, 5, cat="kernel", correlation=3),
    ]
    found = by_kernels(record, events, CLOCK)
    assert found.device == "cuda"
    assert found.work == {"forward": [(100_000, 120_000)], "data": [(40_000, 41_000)]}
    (call,) = found.calls
    assert (call.axis, call.sequence, call.start, call.end) == ("tp", 1, 110_000, 140_000)


def moment(ts, size, address, kind=0):
    args = {"Bytes": size, "Addr": address, "Device Type": kind}
    return {"ph": "i", "name": "[memory]", "ts": ts, "pid": 1, "tid": 1, "args": args}


def test_the_largest_tensors_are_those_that_are_alive_at_the_peak():
    events = [
        moment(1, 100, 1),
        moment(2, 400, 2),
        moment(2.5, 4000, 9, kind=1),
        moment(3, -400, 2),
        moment(4, 300, 2),
        moment(5, 250, 3),
        moment(6, -300, 2),
        moment(7, -50, 8),
        operation("aten::mm", 0.5, 1),
        operation("aten::linear", 3.9, 1),
    ]
    ranges = [
        Range("activations", "forward", 0, 4500),
        Range("activations", "forward layer 0", 500, 1500),
        Range("backward", "backward", 4600, 9000),
    ]
    found = at_peak(events, CLOCK, [LiveTensor("parameters", "w", 1000)], ranges, 0)
    assert (found["peak_bytes"], found["held_bytes"]) == (1650, 1000)
    assert found["parts"] == {"parameters": 1000, "activations": 400, "backward": 250}
    assert [(tensor["name"], tensor["bytes"]) for tensor in found["tensors"]] == [
        ("w", 1000),
        ("forward: aten::linear", 300),
        ("backward", 250),
        ("forward layer 0: aten::mm", 100),
    ]


def test_records_of_other_hosts_come_to_the_clock_of_rank_0():
    def gathered(host, clocks, start):
        record = ProfiledRank(0, [(start, start + 10)], {"forward": [(start, start + 5)]}, [])
        return Gathered(host, clocks, record.document(), None, [], [])

    every = [gathered("a", [1, 2, 3], 50), gathered("b", [101, 102, 900], 150), gathered("a", [7, 8, 9], 51)]
    assert [record.steps for record in on_one_clock(every)] == [[(50, 60)], [(50, 60)], [(51, 61)]]


def test_a_prediction_is_compared_with_the_busiest_stage():
    def record(rank, pp):
        return ProfiledRank(rank, [], {}, [], coordinates={"pp": pp})

    records = [record(0, 0), record(1, 0), record(2, 1), record(3, 1)]
    means = [Shares(step=10, backward=busy, other=10 - busy) for busy in (3.0, 3.1, 5.0, 5.2)]
    assert busiest(records, means) in (2, 3)


DOCUMENT = {
    "steps": [10, 12],
    "device": "cpu",
    "layout": "dp_replicate=2",
    "median_rank": 1,
    "ranks": [
        {
            "rank": rank,
            "coordinates": {"pp": 0},
            "shares": report.shares_document(
                Shares(
                    0.1,
                    0.03,
                    0.05,
                    exposed={"dp_replicate": {"all_reduce": 0.01}},
                    waiting={"pp": 0.004},
                    optimizer=0.006,
                    overlapped={"dp_replicate": {"all_reduce": 0.02}},
                )
            ),
            "by_step": [],
        }
        for rank in range(2)
    ],
    "compared": {
        "rank": 1,
        "cluster": "local",
        "parts": [
            {"name": "forward", "predicted_s": 0.02, "measured_s": 0.03, "ratio": 1.5},
            {"name": "waiting", "predicted_s": 0.0, "measured_s": 0.01, "ratio": None},
        ],
    },
    "memory": [
        {
            "rank": 0,
            "peak_bytes": 3 * 2**20,
            "held_bytes": 2**20,
            "parts": {"parameters": 2**20, "activations": 2**21},
            "tensors": [{"part": "activations", "name": "forward layer 0: aten::mm", "bytes": 2**21, "count": 4}],
            "compared": [
                {"name": "parameters", "predicted_bytes": 2**20, "measured_bytes": 2**20, "ratio": 1.0},
                {"name": "other", "predicted_bytes": 0, "measured_bytes": 8, "ratio": None},
                {"name": "all tensors", "predicted_bytes": 2**21, "measured_bytes": 3 * 2**20, "ratio": 1.5},
            ],
        }
    ],
    "traces": "runs/main/traces",
    "files": ["rank_0.json.gz"],
    "notes": ["rank 1 could not write its trace: no space"],
}


def test_a_profile_as_text():
    text = "\n".join(report.lines(DOCUMENT))
    assert text.startswith("profile of steps 10 to 12, 2 ranks on cpu: milliseconds per step\n")
    assert "  dp_replicate all-reduce exposed          10.0        10.0        10.0  10.0%\n" in text
    assert "pp bubble, waiting" in text
    assert "in flight beside other work (at most, not part of the step): dp_replicate all-reduce 20.0\n" in text
    assert "  forward                           20.0        30.0    1.50\n" in text
    assert "  waiting                            0.0        10.0\n" in text
    assert "3.0MiB: parameters 1.0MiB, activations 2.0MiB\n" in text
    assert "2.0MiB  activations    forward layer 0: aten::mm × 4\n" in text
    beside = text.partition("rank 0, tensors at the peak\n")[2].splitlines()
    assert [line.split() for line in beside[1:3]] == [
        ["parameters", "1.0MiB", "1.0MiB", "1.00"],
        ["all", "tensors", "2.0MiB", "3.0MiB", "1.50"],
    ]
    assert text.endswith("note: rank 1 could not write its trace: no space")


@pytest.mark.parametrize("change", [{"steps": 3}, {"ranks": [{}]}, {"median_rank": 7}, {"memory": [3]}])
def test_another_document_is_refused(tmp_path, change):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(DOCUMENT))
    assert report.read(path)["median_rank"] == 1
    path.write_text(json.dumps({**DOCUMENT, **change}))
    with pytest.raises(DataError, match=r"profile.json is no profile"):
        report.read(path)


def test_a_run_without_a_profile_is_told_how_to_get_one(tmp_path):
    with pytest.raises(DataError, match=r"no profile in .* train.profile.steps=\[10, 12\]"):
        report.read(tmp_path)
