"""TeraPipe's uneven slices: the dynamic program against all cuts, the times against whole sequences, the verb."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.schedule.catalogue import build
from phalanx.simulate.slices import SliceTimes, compared, slice_times
from phalanx.simulate.step import Disturbance, rank_seconds
from simulate.specs import spec


def cuts_of(whole: int):
    """Yields every way to write a number as a sum, in order."""
    for size in range(1, whole):
        for rest in cuts_of(whole - size):
            yield [size, *rest]
    yield [whole]


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_cut_is_better_than_the_dynamic_program_s(granules, ranks, micro_batches, chosen):
    sizes = range(granules + 1)
    table = np.array([[chosen.uniform(0.1, 1) * size + 0.2 for _ in sizes] for size in sizes])
    times = SliceTimes(16, table, 2 * table, ranks, micro_batches)
    best = min(times.cut(cut).latency for cut in cuts_of(granules))
    assert times.best().latency == pytest.approx(best, rel=1e-12)
    assert sum(times.best().tokens) == 16 * granules


def test_later_slices_are_shorter_where_attention_counts():
    """Of long sequences: the same work in each slice (Li et al. 2021, figure 4b)."""
    size, start = np.mgrid[0:33, 0:33]
    table = 0.02 * (size > 0) + size + 0.2 * size * start
    times = SliceTimes(1, table, 2 * table, 8, 1)
    best = times.best()
    assert all(best.latency < cut.latency for number in (1, 2, 4, 8, 16, 32) if (cut := times.equal(number)))
    assert best.tokens[0] > best.tokens[-1]


def test_one_slice_is_the_sequence_that_is_simulated():
    one = spec("pp=8,tp=8", 4)
    times, schedule = slice_times(one), build("1f1b", 8, 4)
    durations = [rank_seconds(one, schedule, rank, Disturbance()).durations for rank in range(8)]
    slowest = max(each["F"][rank] + each["B"][rank] for rank, each in enumerate(durations))
    whole = times.equal(1)
    assert whole is not None
    sends = whole.forward[0] + whole.backward[0] - slowest
    assert 0 < sends < 0.05 * slowest
    cuts = compared(times, 4)
    assert cuts["uneven"].latency <= cuts["best equal"].latency <= cuts["as trained"].latency < cuts["whole"].latency
    assert {sum(cut.tokens) for cut in cuts.values()} == {one.model.seq_len}


JOB = ["predict", "model=llama3-8b", "cluster=dgx-h100:1", "pp=8", "micro_batch=1", "train.global_batch=1"]


def test_the_verb_predicts_and_draws_the_slices(capsys, tmp_path):
    words = [*JOB, "precision=bf16", "model.seq_len=16384", "schedule=terapipe", "--picture", "slices"]
    main([*words, "--svg", str(tmp_path / "slices.svg"), "--json"])
    found = json.loads(capsys.readouterr().out)["slices"]
    assert sum(found["uneven"]["tokens"]) == 16384
    assert found["uneven"]["latency_s"] <= found["best equal"]["latency_s"]
    texts = [each.text or "" for each in ElementTree.parse(tmp_path / "slices.svg").iter() if each.tag.endswith("text")]
    assert sum(text.startswith(("uneven:", "best equal:", "as trained:", "whole:")) for text in texts) == 4
    assert main([*words[:-3], "schedule=1f1b", "--picture", "slices", "--svg", str(tmp_path / "no.svg")]) == 2
    assert "set pp and schedule=terapipe" in " ".join(capsys.readouterr().err.split())
