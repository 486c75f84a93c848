"""Profiles of whole runs, shares of a step, and traces."""

import dataclasses
import errno
import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Job, ProfileOptions
from phalanx.config.layout import Layout
from phalanx.errors import DataError
from phalanx.launch.watchdog.heartbeat import TimedCall
from phalanx.train.profile import report, trace_file, tracing
from phalanx.train.profile.report import (
    ProfiledRank,
    Shares,
    by_kernels,
    latest_starts,
    mean,
    minus,
    shares_of,
    total,
    typical,
    union,
    within,
)
from phalanx.train.profile.trace_file import LiveTensor, Range, TraceClock, at_peak, completed, merged, own_rows
from phalanx.train.profile.window import Gathered, StepProfile, busiest, on_one_clock
from train.runs import change, losses, train

# Profiles of whole runs: the same losses bit for bit, shares that add up, traces, and failures that stop nothing.


@pytest.fixture
def job(tmp_path, job):
    """The tests' job in fp32, without validation."""
    return change(job, "train", precision="fp32", steps=5, eval_samples=0)


def profiled(job: Job, name: str = "profiled", **options) -> Job:
    job = change(job, "run", name=name)
    return change(job, "train", profile=ProfileOptions(**options))


def traces(job: Job) -> Path:
    return Path(job.run.dir) / job.run.name / "traces"


def document(job: Job) -> dict:
    return report.read(Path(job.run.dir) / job.run.name)


def check_sums(found: dict) -> None:
    for row in found["ranks"]:
        for shares in (row["shares"], *row["by_step"]):
            assert sum(shares["parts"].values()) == pytest.approx(shares["step"], rel=1e-6)
            assert min(shares["parts"].values()) >= 0


def test_a_profile_changes_no_loss_and_shows_every_part(ranks, job):
    job = dataclasses.replace(job, layout=Layout(dp_shard=2, zero=1))
    watched = profiled(job, steps=(2, 3), memory=True, python=True)
    ranks(train, 2, job)
    ranks(train, 2, watched)
    assert losses(watched) == losses(job), "bit for bit"
    found = document(watched)
    assert found["notes"] == []
    check_sums(found)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    shares = found["ranks"][0]["shares"]
    assert len(found["ranks"][0]["by_step"]) == 2
    assert min(shares["forward"], shares["backward"], shares["optimizer"]) > 0
    assert shares["exposed"]["dp_shard"].keys() == {"reduce_scatter", "all_gather"}
    assert "all_reduce" in shares["exposed"]["world"]
    for rank, memory in enumerate(found["memory"]):
        assert memory["rank"] == rank
        assert memory["peak_bytes"] > memory["held_bytes"] > 0
        assert {"parameters", "optimizer", "activations"} <= memory["parts"].keys()
        beside = {row["name"]: row for row in memory["compared"]}
        assert all(beside[part]["ratio"] == pytest.approx(1, abs=0.02) for part in ("parameters", "optimizer"))
        assert beside["all tensors"]["measured_bytes"] == memory["peak_bytes"]
        assert 0.8 < beside["all tensors"]["ratio"] < 1.5
        assert memory["tensors"] == sorted(memory["tensors"], key=lambda tensor: -tensor["bytes"])
    files = {f"{kind}-rank_{rank}.{end}" for kind in ("python",) for rank in (0, 1) for end in ("txt", "html")}
    files |= {"rank_0.json.gz", "rank_1.json.gz", "merged.json.gz", "profile.json", "profile.svg"}
    assert set(found["files"]) == files == {path.name for path in traces(watched).iterdir()}
    assert "compute" in (traces(watched) / "python-rank_0.txt").read_text()
    merged = json.loads(gzip.decompress((traces(watched) / "merged.json.gz").read_bytes()))["traceEvents"]
    own = [event for event in merged if event.get("cat") in ("step", "pass", "layer", "waiting", "in flight")]
    assert {event["pid"] for event in merged if event["ph"] == "X"} == {0, 1000}
    assert [event["name"] for event in own if event["cat"] == "step"] == ["step 2", "step 3"] * 2
    names = {event["name"] for event in own}
    assert {"forward", "backward", "forward layer 1", "backward layer 0", "dp_shard reduce_scatter"} <= names
    # torch's clock and ours agree: the embeddings are computed in forward passes.
    passes = [(event["ts"], event["ts"] + event["dur"]) for event in own if event["name"] == "forward"]
    inside = [event for event in merged if event["name"] == "aten::embedding"]
    assert inside
    assert all(any(start <= event["ts"] <= end for start, end in passes) for event in inside)


def test_a_pipeline_shows_its_bubble_and_its_messages(ranks, job):
    # The second stage has one layer of 24, so that it always waits for the first.
    job = dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, n_layers=24),
        layout=Layout(pp=2, pp_cut="23+1", schedule="1f1b", micro_batch=3, recompute="full"),
    )
    job = profiled(job, steps=(2, 3), ranks=(1,))
    ranks(train, 2, job)
    found = document(job)
    check_sums(found)
    shares = found["ranks"][1]["shares"]
    assert shares["waiting"]["pp"] > 0
    assert shares["recompute"] > 0
    assert shares["exposed"]["pp"]["send"] > 0
    assert "rank_0.json.gz" not in found["files"]
    content = json.loads(gzip.decompress((traces(job) / "rank_1.json.gz").read_bytes()))
    names = {event["name"] for event in content["traceEvents"]}
    assert {"forward stage 1", "backward stage 1", "recompute", "pp send: wait"} <= names


def full_disk(ranks, job):
    """Trains while nothing can be written to traces. Returns the warnings of this rank."""

    def fail(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("phalanx.train.profile.window").addHandler(handler)
    before, tracing.write = tracing.write, fail
    try:
        train(ranks, job)
    finally:
        tracing.write = before
        logging.getLogger("phalanx.train.profile.window").removeHandler(handler)
    return warnings


def test_a_full_disk_is_one_warning(ranks, job):
    job = profiled(job, steps=(1, 1))
    (warnings,) = ranks(full_disk, 1, job)
    assert len(losses(job)) == 5
    (warning,) = warnings
    assert "rank 0 could not write its trace" in warning
    assert "No space left" in warning
    assert "profile.json" in warning


def test_steps_that_are_done_are_not_profiled_again(job, tmp_path):
    job = profiled(job, steps=(2, 4))
    stepper, directory = SimpleNamespace(job=job), SimpleNamespace(path=tmp_path)
    spans = {}
    for done in range(6):
        profile = StepProfile(stepper, directory, 0, done)
        spans[done] = (profile.first, profile.last) if profile.pending else None
    assert spans == {0: (2, 4), 1: (2, 4), 2: (3, 4), 3: (4, 4), 4: None, 5: None}


def test_without_a_profile_the_steps_are_passed_on_as_they_are(job, tmp_path):
    profile = StepProfile(SimpleNamespace(job=job), SimpleNamespace(path=tmp_path), 0, 0)
    steps = iter([])
    assert profile.around(steps, 0) is steps


def test_nothing_is_written_through_a_link(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "traces").symlink_to(target)
    with pytest.raises(Exception, match="is a link"):
        tracing.write(tmp_path / "traces" / "rank_0.json.gz", b"{}")
    assert list(target.iterdir()) == []
    (target / "victim").write_text("kept")
    (target / "rank_0.json").symlink_to(target / "victim")
    tracing.write(target / "rank_0.json", b"{}")
    assert (target / "victim").read_text() == "kept"


# Shares of a step: arithmetic of intervals, who is waited for, sums, and the median rank.

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def moments(spans):
    """The unit intervals that lie in any of the spans."""
    return {moment for start, end in spans for moment in range(start, end)}


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_sets_of_moments(first, second, low, high):
    a, b = union(first), union(second)
    assert moments(a) == moments(first)
    assert total(a) == len(moments(first))
    assert a == union(a)
    assert moments(minus(a, b)) == moments(first) - moments(second)
    assert total(minus(a, b)) == len(moments(first) - moments(second))
    assert moments(within(a, low, high)) == {m for m in moments(first) if low <= m < high}


def call(start, waited=0, end=0, *, sequence=1, axis="tp", channel="g", **facts):
    launched = min(start + 1, end or start + 1)
    return TimedCall(axis, "all_reduce", channel, sequence, start, max(end, launched), waited, launched, 8, **facts)


CALLS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 30), st.sampled_from(["tp", "pp"])).map(
        lambda each: call(each[0], each[0] + 1 + each[1], each[0] + 1 + each[1] + each[2], axis=each[3])
    ),
    max_size=6,
)
WORK = st.dictionaries(st.sampled_from(["forward", "backward", "recompute", "optimizer", "data"]), SPANS.map(union))


@given(WORK, CALLS, CALLS, st.sampled_from(["cpu", "cuda"]))
def test_the_parts_add_up_to_the_step(work, calls, others, device):
    records = [
        ProfiledRank(0, [(0, 40), (50, 100)], work, calls, device),
        ProfiledRank(1, [(0, 100)], {}, others, device),
    ]
    latest = latest_starts(records)
    for record in records:
        every = shares_of(ProfiledRank.of(record.document()), latest)
        for shares, (start, end) in zip(every, record.steps, strict=True):
            assert abs(sum(seconds for _, seconds in shares.parts()) - (end - start) / 1e9) < 1e-15
            assert all(seconds >= 0 for _, seconds in shares.parts())
        whole = mean(every)
        assert abs(sum(seconds for _, seconds in whole.parts()) - whole.step) < 1e-15


def test_waiting_for_a_late_rank_is_no_communication():
    """Rank 0 waits from 10 to 40; rank 1 begins at 30."""
    records = [
        ProfiledRank(0, [(0, 100)], {"forward": [(0, 10)], "backward": [(40, 90)]}, [call(9, 10, 40)]),
        ProfiledRank(1, [(0, 100)], {"forward": [(0, 30)]}, [call(30, 31, 42)]),
    ]
    latest = latest_starts(records)
    (early,), (late,) = (shares_of(record, latest) for record in records)
    assert (early.waiting, early.exposed) == ({"tp": 20e-9}, {"tp": {"all_reduce": 11e-9}})
    assert (late.waiting, late.exposed) == ({}, {"tp": {"all_reduce": 12e-9}})
    assert early.forward == 9e-9, "the call was started in the forward pass"
    assert abs(early.other - 10e-9) < 1e-15


def test_a_receiver_waits_for_its_sender():
    """Rank 0 sends message 1 to rank 1 at 30 and posts a receive of its own; other messages do not matter."""
    records = [
        ProfiledRank(0, [(0, 100)], {}, [call(30, 0, 0, channel="g:1", axis="pp", sends=True)]),
        ProfiledRank(
            1,
            [(0, 100)],
            {},
            [
                call(1, 5, 50, channel="g:0", axis="pp", receives=True),
                call(60, 62, 70, channel="g:0", axis="pp", receives=True, sequence=2),
            ],
        ),
    ]
    (shares,) = shares_of(records[1], latest_starts(records))
    assert shares.waiting == {"pp": 25e-9}
    assert abs(shares.exposed["pp"]["all_reduce"] - (1 + 20 + 1 + 8) * 1e-9) < 1e-15


def test_communication_in_flight_beside_a_pass_is_overlapped():
    record = ProfiledRank(0, [(0, 100)], {"backward": [(0, 80)]}, [call(10, 70, 75)])
    (shares,) = shares_of(record, {})
    assert shares.exposed == {"tp": {"all_reduce": 6e-9}}
    assert abs(shares.overlapped["tp"]["all_reduce"] - 59e-9) < 1e-15
    assert shares.backward == 74e-9


def test_kernels_hide_communication():
    kernel = TimedCall("tp", "all_reduce", "g", 1, 50, 90, 50, 50)
    (shares,) = shares_of(ProfiledRank(0, [(0, 100)], {"backward": [(0, 80)]}, [kernel], "cuda"), {})
    assert (shares.backward, shares.exposed) == (80e-9, {"tp": {"all_reduce": 10e-9}})
    assert abs(shares.overlapped["tp"]["all_reduce"] - 30e-9) < 1e-15


def test_the_median_rank_is_a_rank():
    ranks = [Shares(step=10, forward=f, other=10 - f) for f in (1.0, 5.0, 5.5, 6.0, 9.0)]
    assert typical(ranks) == 2
    assert typical(ranks[:1]) == 0


# Traces: events of the steps only, merged ranks, a GPU's kernels, the largest tensors, and a profile's document.

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
    calls = [TimedCall("tp", "all_reduce", "g", 1, 20_000, 60_000, 50_000, 21_000)]
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
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(DataError, match="it is a trace, for ui.perfetto.dev"):
        report.read(path)


def test_a_run_without_a_profile_is_told_how_to_get_one(tmp_path):
    with pytest.raises(DataError, match=r"no profile in .* train.profile.steps=\[10, 12\]"):
        report.read(tmp_path)
