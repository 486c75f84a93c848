"""What predictions take from a sample of documents."""

from dataclasses import replace

import numpy as np

from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.document_sample import MEANS, DocumentSample, document_work, imbalances, most_of
from phalanx.partition.documents import DocumentCut, assigned, keys_within, pairs_of

MODEL = ModelConfig(n_layers=1, d_model=4, n_heads=1, seq_len=1 << 20)


def test_more_micro_batches_of_an_example_exchange_nothing_where_documents_are_shorter():
    model, layout = replace(MODEL, seq_len=1024, d_model=256, n_heads=4), Layout(cp=4)
    samples = [DocumentSample.example(1024, MEANS[name] * 1024) for name in ("short", "long")]
    short, long = (imbalances(model, layout, 1, sample) for sample in samples)
    assert long["skipped"] < 0.1
    assert short["skipped"] > 0.5
    for found in (short, long):
        assert 1 <= found["documents"] < found["position"]
    alone = imbalances(model, Layout(cp=4, cp_ulysses=4), 1, samples[0])
    assert alone["position"] == 1
    assert alone["skipped"] > 0.5


SAMPLE = DocumentSample((60, 4, 16, 32, 16, 64, 64, 64))
"""Two sequences of 128 tokens, and the start of a third."""


def test_a_prediction_takes_the_pairs_of_the_fullest_rank_and_what_each_position_sends():
    model = replace(MODEL, seq_len=128, n_layers=2, window=8, full_every=2)
    numbers = SAMPLE.numbers(128)
    assert DocumentSample.of(numbers) == replace(SAMPLE, lengths=(60, 4, 16, 32, 16, 64, 64))
    work = document_work(model, Layout(), 1, SAMPLE)
    assert work is not None
    assert work.exchanged == 0
    for each in work.windows:
        assert each.pairs == keys_within(numbers, model, each.window).sum() / len(numbers)
    layout = Layout(cp=2)
    work = document_work(model, layout, 1, SAMPLE)
    assert work is not None
    cuts = [assigned(row, model, layout) for row in np.split(numbers, len(numbers))]
    assert 0 < work.exchanged == np.mean([not cut.skips(layout) for cut in cuts]) < 1
    for each in work.windows:
        pairs, sent = [], np.zeros(2)
        for row, cut in zip(np.split(numbers, len(numbers)), cuts, strict=True):
            seen = keys_within(row, model, each.window)
            pairs.append(pairs_of(seen, cut.places).pairs[int(np.argmax(cut.pairs))])
            for place in range(2):
                runs = DocumentCut(row, cut.places, place, each.window).sent[1 - place]
                sent[place] += sum(run.stop - run.start for run in runs)
        assert each.pairs == np.mean(pairs)
        assert [of.sent for of in each.ring] == list(sent / len(cuts))
        assert [of.received for of in each.ring] == list(sent[::-1] / len(cuts))


def test_whole_sequences_count_where_lengths_are_not_known_or_the_cut_goes_by_position():
    model = replace(MODEL, seq_len=128)
    assert document_work(model, Layout(), 1, DocumentSample()) is None
    assert document_work(model, Layout(), 1, None) is None
    assert document_work(model, Layout(cp=2, cp_balance="position"), 1, SAMPLE) is None
    ulysses = document_work(model, Layout(cp=2, cp_ulysses=2, cp_balance="position"), 1, SAMPLE)
    assert ulysses is not None
    assert ulysses.exchanged == 1
    masked = document_work(model, Layout(), 1, SAMPLE, kernel=False)  # masks of an eighth of the queries
    assert masked is not None
    assert masked.windows[0].pairs == 9 / 8 * 128 * 129 / 2


def test_data_ranks_wait_for_the_one_with_most_pairs():
    assert most_of((1.0, 3.0), 1, 1) == 1
    assert most_of((1.0, 3.0), 2, 1) == (0.25 * 1 + 0.75 * 3) / 2
    assert most_of((2.0, 2.0), 64, 4) == 1
    assert most_of((1.0, 3.0), 64, 1) > 1.49
    assert 1 < most_of((1.0, 3.0), 8, 64) < most_of((1.0, 3.0), 8, 4) < most_of((1.0, 3.0), 8, 1)
