"""A report of a test of four ranks on two hosts, with findings of every kind."""

import math

import pytest

from phalanx.config.layout import Layout
from phalanx.machine.collectives import AxisChecks, WrongResult
from phalanx.machine.links import CallTime, PairMatrix, SlowLine, TimedAxis
from phalanx.machine.self_test import DistReport
from phalanx.machine.training import KernelTime, ProbeTimes, Straggler, TrainingTest

HOSTS = ["node-a", "node-a", "node-b", "node-b"]
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast", "reduce")


def timed(name: str, stride: int, place: str, **changes) -> TimedAxis:
    times = [CallTime(call, size, 1e-4 + size / 1e9) for size in (2**10, 2**20) for call in NAMES]
    known = {"latency_us": 100.0, "gbs": 1.0, "error": 0.1, "spread": 0.05, "times": times, "barrier_s": 1e-4}
    return TimedAxis(axis=name, ranks=2, stride=stride, place=place, **{**known, **changes})


def matrix(slow: bool) -> PairMatrix:
    gbs = [[math.nan if a == b else 8.0 if a // 2 == b // 2 else 1.0 for b in range(4)] for a in range(4)]
    if slow:
        gbs[1][2] = 0.1
    return PairMatrix([0, 1, 2, 3], [[50 / rate for rate in row] for row in gbs], gbs, 1, 0)


def training(**changes) -> TrainingTest:
    known = {
        "model": "tiny",
        "batch": "global batch 8 = micro-batch 4 × accumulation 1 × data ranks 2",
        "steps": 3,
        "losses": [5.5, 5.4, 5.3],
        "step_s": [[0.01, 0.011, 0.012]] * 4,
        "own_s": [0.008] * 4,
        "phases": {"forward/backward": (0.006, 0.001), "optimizer": (0.001, 0.0)},
        "kernels": [KernelTime("aten::mm <a & b>", 12.5, 0.002)],
        "traces": ["traces/test-dist-rank_0.json"],
    }
    return TrainingTest(**{**known, **changes})


@pytest.fixture
def good() -> DistReport:
    window = {rank: ProbeTimes(0.005, 0.0001, 0.0002) for rank in range(4)}
    return DistReport(
        Layout(tp=2, dp_replicate=2),
        HOSTS,
        "gloo",
        "cpu",
        1,
        checks=[AxisChecks("tp", 2, 248), AxisChecks("dp_replicate", 2, 248)],
        same_ranks={"ep": "tp"},
        axes=[timed("tp", 1, "one host"), timed("dp_replicate", 2, "one rank per host")],
        pairs=matrix(slow=False),
        probes=[window, window],
        training=training(),
        seconds={"values": 1.0, "speed": 2.0},
    )


@pytest.fixture
def bad(good: DistReport) -> DistReport:
    wrong = WrongResult(3, "node-b", "tp", "all_gather", "bf16", 7, "plain", 5, 36.0, 35.0, 1)
    good.checks[0] = AxisChecks("tp", 2, 248, [wrong], 1, {"all_reduce_avg (int64)": "no <such> op"}, ["reduce"])
    good.axes[0] = timed("tp", 1, "one host", slow_lines=[SlowLine([2, 3], 0.02, 0.01)], left_out=[2**24])
    good.pairs = matrix(slow=True)
    good.stragglers = [Straggler(2, "node-b", "compute", 0.01, 0.005)]
    good.training = training(
        losses=[5.5, math.nan],
        problems=["training step 2: rank 0 (node-a) has loss nan, which is not finite"],
        stragglers=[Straggler(1, "node-a", "training", 0.02, 0.01)],
    )
    good.notes = ["a note"]
    return good
