"""Few ranks read the samples and send the others theirs (data.readers): the same bits at any number of readers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from covering import also_whole
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.layout import Layout
from phalanx.data.loader import MicroBatch, SplitReader
from phalanx.errors import JobError
from phalanx.train import feed
from phalanx.train.feed import packed, unpacked
from train.runs import change, losses, require_same_weights, rows, stop, stopped, train


def trained_reading(ranks, job):
    """Trains. Returns how often this rank has read tokens."""
    reads, before = [], SplitReader.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitReader, "read", lambda *words: reads.append(1) or before(*words))
        train(ranks, job)
    return len(reads)


@pytest.mark.parametrize(
    ("layout", "readers", "who"),
    [
        (Layout(dp_replicate=2, tp=2), 2, [0, 2]),  # one of the ranks with the same samples
        (Layout(dp_shard=3, zero=3), 2, [0, 2]),  # one of them for two data ranks
        (Layout(pp=2, accumulation=3, schedule="pipedream"), 1, [0]),  # stages ask at other times
        (Layout(dp_replicate=2, sync="local_sgd", sync_every=3), 1, [0]),
        *also_whole((Layout(dp_replicate=2, tp=2), 1, [0]), (Layout(pp=2, dp_shard=2, zero=1, accumulation=2), 1, [0])),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else None,
)
def test_few_readers_train_as_many_do_and_the_others_read_nothing(ranks, job, layout, readers, who):
    job = replace(change(job, "train", eval_samples=0), layout=layout)
    ranks(train, layout.processes, job)
    few = change(change(job, "run", name="few"), "data", readers=readers)
    reads = ranks(trained_reading, layout.processes, few)
    assert [rank for rank, count in enumerate(reads) if count] == who
    require_same_weights(few, job)


def test_a_run_goes_on_with_another_number_of_readers(ranks, job):
    job = replace(job, layout=Layout(dp_replicate=2, tp=2))
    ranks(train, 4, job)
    moved = change(change(job, "run", name="moved"), "data", readers=1)
    stop(ranks, moved, 3)
    ranks(train, 4, change(moved, "data", readers=2, prefetch=0))
    require_same_weights(moved, job)
    assert len(losses(moved)) == 6


def trained_at_speeds(ranks, job, seconds):
    """Trains where trying readers takes these seconds on each rank, by the ranks that share a reader. Returns how often
    this rank has read tokens since."""
    reads, read, take, tried = [], SplitReader.read, feed.Feed.take, feed.readers_of

    def slowly(own):
        found = take(own)
        own.meter.waited += 1e4 * seconds[own.readers.axis.size][ranks.rank]
        return found

    def measured(*arguments, **named):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feed.Feed, "take", slowly)
            found = tried(*arguments, **named)
        reads.clear()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitReader, "read", lambda *words: reads.append(1) or read(*words))
        patch.setattr("phalanx.train.loop.readers_of", measured)
        train(ranks, job)
    return len(reads)


@pytest.mark.parametrize(
    ("seconds", "who", "said"),
    [
        ({1: [0, 0, 0, 9], 2: [4, 0, 0, 0], 4: [1, 0, 0, 0]}, [0], "1 reader; reading and sending took, in ms"),
        ({1: [0, 0, 9, 0], 2: [1, 0, 0, 0], 4: [0, 0, 0, 4]}, [0, 2], "2 readers; reading"),
        ({1: [9, 0, 0, 0], 2: [6, 0, 0, 0], 4: [5, 0, 0, 0]}, [0, 1, 2, 3], "every rank; reading"),
    ],
    ids=["one", "two", "all"],
)
def test_auto_takes_the_fastest_number_of_readers_of_all_ranks(ranks, job, seconds, who, said):
    """The slowest rank counts, and few readers must take half as long."""
    job = replace(change(job, "train", eval_samples=0, steps=2), layout=Layout(dp_replicate=2, tp=2))
    ranks(train, 4, job)
    chosen = change(change(job, "run", name="auto"), "data", readers="auto")
    reads = ranks(trained_at_speeds, 4, chosen, seconds)
    assert [rank for rank, count in enumerate(reads) if count] == who
    require_same_weights(chosen, job)
    (start,) = rows(chosen, "start")
    assert start["readers"].startswith(said)


def test_auto_measures_nothing_where_no_two_ranks_need_the_same(ranks, job):
    job = change(replace(job, layout=Layout(dp_replicate=2)), "data", readers="auto")
    ranks(train, 2, job)
    assert rows(job, "start")[0]["readers"] == "every rank reads its own samples: no two need the same"


def stopped_by_slow_storage(ranks, job):
    """Trains with a storage that hangs in step 3, in which a signal comes."""
    ready, calls = feed.Batches.wait, iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "_PATIENCE_S", feed._POLL_S / 2)
        # The reader has a stream of each of two data ranks.
        patch.setattr(feed.Batches, "wait", lambda self, _: next(calls) < 2 * 2 and ready(self, 60))
        return stopped(ranks, job, 3)


def test_a_reader_whose_storage_hangs_lets_all_ranks_stop(ranks, job):
    job = change(replace(job, layout=Layout(dp_replicate=2)), "data", readers=1)
    for message in ranks(stopped_by_slow_storage, 2, job):
        assert re.search("stopped by a signal at step 2 of 6, with a checkpoint", message)


def test_a_message_holds_all_of_a_micro_batch_of_any_form():
    ids = np.arange(8).reshape(2, 4)
    plain = MicroBatch(ids, ids - 100, np.array([1 << 40, -1]))
    full = replace(plain, documents=ids, conversations=ids - 1, reference=np.array([0.1, np.nan]), valid_share=0.3)
    for micro in (plain, full):
        blank = replace(micro, tokens=np.zeros_like(ids), sample_ids=np.zeros(2, dtype=np.int64), valid_share=1.0)
        for found in unpacked(packed([micro, micro]), [blank, blank]):
            for name, value in vars(micro).items():
                np.testing.assert_array_equal(getattr(found, name), value)
                assert np.asarray(getattr(found, name)).dtype == np.asarray(value).dtype
    assert unpacked(torch.zeros_like(packed([plain])), [plain]) == []


@pytest.mark.parametrize("words", ["sync=asp", "data_parallel=threads"])
def test_replicas_that_take_samples_in_turn_have_no_readers(words):
    with pytest.raises(JobError, match="is for ranks that take steps together"):
        load_words(overrides.parse(f"model=tiny global_batch=8 dp_replicate=2 data.readers=1 {words}".split()))


def test_predictions_say_what_they_assume_of_readers():
    said = "data.readers=auto: chosen by measuring when a run starts; predictions take data for read ahead"
    words = "model=tiny global_batch=8"
    assert said in load_words(overrides.parse(f"{words} dp_replicate=2 data.readers=auto".split())).answers
    assert said not in load_words(overrides.parse(f"{words} dp_replicate=2 data.readers=1".split())).answers
    assert not any(
        "readers" in each
        for each in load_words(overrides.parse(f"{words} dp_replicate=2 data.readers=2".split())).answers
    )
    for ranks, who in ((2, "each of the 2 data ranks reads"), (1, "the one data rank reads")):
        answers = load_words(overrides.parse(f"{words} dp_replicate={ranks} data.readers=3".split())).answers
        assert f"data.readers=3: {who} its own samples, and more cannot" in answers


def test_a_job_that_loses_data_ranks_keeps_its_readers(ranks, job):
    job = change(job, "data", readers=2)
    ranks(train, 2, replace(job, layout=Layout(dp_replicate=2)))
    for name, layout in (("tp", Layout(tp=2)), ("one", Layout())):
        fewer = change(replace(job, layout=layout), "run", name=name)
        ranks(train, layout.processes, fewer)
        assert losses(fewer) == pytest.approx(losses(job), rel=1e-9)
