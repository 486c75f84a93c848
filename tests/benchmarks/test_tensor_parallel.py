"""The comparison of tensor-parallel degrees: the same work for every contender, and its memory counted whole."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import tensor_parallel as benchmark


def test_the_contenders_share_one_batch_on_four_ranks():
    jobs = [benchmark.load(tp, benchmark.QUICK) for tp in benchmark.DEGREES]
    assert [(job.layout.dp_shard, job.layout.tp, job.layout.world) for job in jobs] == [(4, 1, 4), (2, 2, 4), (1, 4, 4)]
    assert {benchmark.tokens(job) for job in jobs} == {16 * 32}
    whole = benchmark.batch(jobs[-1], 0).tokens
    for job in jobs:
        parts = [benchmark.batch(job, rank).tokens for rank in range(job.layout.data_ranks)]
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("measured", [True, False])
def test_the_table_has_predictions_where_the_machine_was_measured(measured):
    names = [benchmark.name_of(tp) for tp in benchmark.DEGREES]
    result = {
        "predicted": {name: {"step_s": 0.2, "bytes": 2**20} for name in names if measured},
        "median_s": dict.fromkeys(names, 0.1),
        "ratios": dict.fromkeys(names, 1.0),
        "peak_bytes": dict.fromkeys(names, 2**21),
        "tokens": 2048,
    }
    head, *rows = benchmark.table(result)
    assert len(rows) == 3
    expected = ("200 ms", "1.0 MiB") if measured else ("", "")
    assert rows[1] == ("dp_shard 2 × tp 2", "100 ms", expected[0], "20,480", "**1.000 ×**", "2.0 MiB", expected[1])
    assert len(head) == len(rows[1])
