"""The loader: samples across shards, their order, resuming by one number, and reading ahead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import IGNORE
from phalanx.data import loader
from phalanx.data.files import SPLITS
from phalanx.data.index import CorpusRecord, Index, write_index, write_shard
from phalanx.data.loader import (
    Batches,
    MicroBatch,
    ReadAhead,
    TokenData,
    evaluation_batches,
    order_key,
    permute,
    sample_ids,
)
from phalanx.data.packing import BestFitDocuments
from phalanx.data.tokenizer import ByteTokenizer, NumberTokenizer, Tokenizer, train_bpe
from phalanx.errors import DataError, JobError

# The loader: samples across shards, the same data at any number of ranks, resuming by one number, exact evaluation.


VOCAB = 1000


def write_folder(
    folder: Path, shards: dict[str, list[np.ndarray]], vocab_size: int = VOCAB, tokenizer: Tokenizer | None = None
) -> Path:
    tokenizer = tokenizer or NumberTokenizer(VOCAB)
    tokenizer.save(folder)
    splits = {
        split: tuple(write_shard(folder, f"{split}-{i:05d}.bin", t, "uint16") for i, t in enumerate(shards[split]))
        for split in SPLITS
    }
    corpus = CorpusRecord("random", "random tokens", 0, 0, 0, "", "")
    write_index(folder, Index((), corpus, tokenizer.fingerprint, vocab_size, "uint16", splits, complete=True))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train: 0 … 400 in shards of 100, 3, 0, 197 and 101 tokens; val: 500 … 550."""
    cuts = [100, 103, 103, 300]
    return write_folder(
        tmp_path_factory.mktemp("shards"), {"train": np.split(np.arange(401), cuts), "val": [np.arange(500, 551)]}
    )


def numbers(batches: list[MicroBatch]) -> list[int]:
    return [int(number) for batch in batches for number in batch.sample_ids]


@given(seq_len=st.integers(1, 200))
def test_samples_are_windows_that_share_one_token(folder: Path, seq_len: int) -> None:
    data = TokenData(folder, "train", seq_len)
    assert data.sample_count == 400 // seq_len
    samples = data.samples(np.arange(data.sample_count))
    assert samples.dtype == np.int64
    for i, sample in enumerate(samples):
        assert sample.tolist() == list(range(i * seq_len, (i + 1) * seq_len + 1))


@given(first=st.integers(0, 400), count=st.integers(1, 401))
def test_read_crosses_shards(folder: Path, first: int, count: int) -> None:
    data = TokenData(folder, "train", 8)
    if first + count > 401:
        with pytest.raises(ValueError, match="of 401"):
            data.read(first, count)
    else:
        assert data.read(first, count).tolist() == list(range(first, first + count))


def test_token_data_knows_its_tokenizer(folder: Path) -> None:
    data = TokenData(folder, "val", 10, verify=True)
    assert (data.vocab_size, data.tokens, data.sample_count) == (VOCAB, 51, 5)
    assert data.tokenizer.decode(data.read(0, 3)) == "500 501 502"
    assert data.index == TokenData(folder, "train", 5).index


def test_too_few_tokens_shows_what_fits(folder: Path) -> None:
    assert TokenData(folder, "val", 50).sample_count == 1
    with pytest.raises(
        DataError, match=r"has 51 tokens, and a sample needs seq_len \+ 1 = 52: .* model.seq_len=50 or less"
    ):
        TokenData(folder, "val", 51)
    with pytest.raises(DataError, match="split 'test': expected one of train, val"):
        TokenData(folder, "test", 5)


def test_a_token_outside_the_vocabulary_is_not_handed_to_the_model(tmp_path: Path) -> None:
    data = TokenData(write_folder(tmp_path, {"train": [np.arange(101)], "val": []}, vocab_size=90), "train", 10)
    data.samples(np.array([0, 7]))
    with pytest.raises(DataError, match=r"holds token 90, expected tokens below the vocabulary size 90.*--force"):
        data.samples(np.array([8]))


def steps(folder: Path, count: int, **options: int) -> list[list[MicroBatch]]:
    settings = {"global_batch": 12, "micro_batch": 2, "rank": 0, "ranks": 1, "seed": 5, **options}
    with Batches(TokenData(folder, "train", 8), **settings) as batches:
        return [next(batches) for _ in range(count)]


def test_a_step_is_micro_batches_of_shifted_tokens(folder: Path) -> None:
    [step] = steps(folder, 1, ranks=2, rank=1)
    assert len(step) == 3
    ids = sample_ids(6, 6, 50, seed=5)
    for m, batch in enumerate(step):
        assert batch.tokens.shape == batch.targets.shape == (2, 8)
        assert batch.tokens.dtype == batch.targets.dtype == np.int64
        assert batch.tokens.flags.c_contiguous
        assert batch.targets.flags.c_contiguous
        assert batch.sample_ids.tolist() == [6 + 2 * m, 7 + 2 * m]
        assert batch.tokens[:, 0].tolist() == (8 * ids[2 * m : 2 * m + 2]).tolist()
        assert np.array_equal(batch.targets, batch.tokens + 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_the_union_over_ranks_does_not_depend_on_their_number(folder: Path, ranks: int, prefetch: int) -> None:
    alone = [np.concatenate([b.tokens for b in step]) for step in steps(folder, 9)]
    each = [steps(folder, 9, ranks=ranks, rank=rank, prefetch=prefetch) for rank in range(ranks)]
    for s in range(9):
        assert [n for rank in each for n in numbers(rank[s])] == list(range(12 * s, 12 * s + 12))
        assert np.array_equal(np.concatenate([b.tokens for rank in each for b in rank[s]]), alone[s])


@pytest.mark.parametrize("members", [1, 2, 3])
def test_replicas_that_are_there_deal_out_every_sample_once(folder: Path, members: int) -> None:
    how = {"global_batch": 20, "micro_batch": 2, "ranks": 2, "first_sample": 40, "prefetch": 0, "seed": 3}
    found = []
    for member in range(members):
        for rank in range(2):
            with Batches(TokenData(folder, "train", 8), **how, rank=rank, members=(member, members)) as batches:
                found += [*numbers(next(batches)), *numbers(next(batches))]
    assert sorted(found) == list(range(40, 80))


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resuming_needs_one_number(folder: Path, stop: int) -> None:
    """Also when it happens twice, across an epoch's end (50 samples), and with another number of ranks."""
    whole = steps(folder, 10)
    resumed = steps(folder, 10 - stop, first_sample=12 * stop)
    again = [steps(folder, 9 - stop, first_sample=12 * (stop + 1), ranks=3, rank=r) for r in range(3)]
    for s, step in enumerate(whole[stop:]):
        assert numbers(resumed[s]) == numbers(step)
        for batch, other in zip(step, resumed[s], strict=True):
            assert np.array_equal(batch.tokens, other.tokens)
            assert np.array_equal(batch.targets, other.targets)
    for s, step in enumerate(whole[stop + 1 :]):
        tokens = np.concatenate([b.tokens for rank in again for b in rank[s]])
        assert np.array_equal(tokens, np.concatenate([b.tokens for b in step]))


def test_an_epoch_reads_every_sample_once(folder: Path) -> None:
    tokens = np.concatenate([b.tokens for step in steps(folder, 25, global_batch=4) for b in step])
    first, second = tokens[:50, 0] // 8, tokens[50:, 0] // 8
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(("global_batch", "micro_batch"), [(12, 5), (10, 2), (12, 0), (0, 2)])
def test_batches_that_do_not_divide_are_refused(folder: Path, global_batch: int, micro_batch: int) -> None:
    with pytest.raises(JobError, match=rf"{global_batch} = {micro_batch} × accumulation × 4"):
        steps(folder, 1, global_batch=global_batch, micro_batch=micro_batch, ranks=4)


def test_an_error_while_reading_ahead_reaches_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenData(folder, "train", 8)
    read, calls = data.samples, iter(range(10))

    def failing(ids: np.ndarray) -> np.ndarray:
        if next(calls) == 2:
            raise DataError("the disk is gone")
        return read(ids)

    monkeypatch.setattr(data, "samples", failing)
    with Batches(data, global_batch=2, micro_batch=2, rank=0, ranks=1, seed=0) as batches:
        assert [numbers(next(batches)), numbers(next(batches))] == [[0, 1], [2, 3]]
        with pytest.raises(DataError, match="the disk is gone"):
            next(batches)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_closing_leaves_no_thread(folder: Path, prefetch: int) -> None:
    before = threading.active_count()
    data = TokenData(folder, "train", 8)
    batches = Batches(data, global_batch=2, micro_batch=1, rank=0, ranks=1, seed=0, prefetch=prefetch)
    next(batches)
    assert threading.active_count() == before + (prefetch > 0)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(batches)


@given(samples=st.integers(1, 60), micro_batch=st.integers(1, 7), ranks=st.integers(1, 5))
def test_evaluation_is_exact_at_any_number_of_ranks(folder: Path, samples: int, micro_batch: int, ranks: int) -> None:
    data = TokenData(folder, "train", 8)
    each = [
        list(evaluation_batches(data, samples=samples, micro_batch=micro_batch, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in each}) == 1
    counted = min(samples, 50)
    spread = [i * 50 // counted for i in range(counted)]
    valid = [b.targets[b.targets != IGNORE] for batches in each for b in batches]
    assert sorted(np.concatenate(valid)) == [8 * sample + i for sample in spread for i in range(1, 9)]
    seen = [n for batches in each for n in numbers(batches)]
    assert sorted(n for n in seen if n >= 0) == spread
    assert spread[-1] >= 50 - -(-50 // counted)  # up to the end of the split
    for batches in each:
        for batch in batches:
            assert batch.tokens.shape == (micro_batch, 8)
            padding = batch.sample_ids < 0
            assert (batch.targets[padding] == IGNORE).all()
            assert np.array_equal(batch.targets[~padding], batch.tokens[~padding] + 1)


class Separated(NumberTokenizer):
    """Numbers, with a separator of any length."""

    def __init__(self, separator: tuple[int, ...]):
        super().__init__(VOCAB)
        self.separator = separator


def packed(folder: Path, separator: tuple[int, ...], tokens: list[int], seq_len: int) -> TokenData:
    """One shard of tokens, read with document masks."""
    write_folder(folder, {"train": [np.array(tokens)], "val": []})
    data = TokenData(folder, "train", seq_len)
    data.tokenizer, data.document_mask = Separated(separator), True  # a tokenizer.json of numbers has no separator
    return data


def test_a_document_ends_with_its_end_of_text(tmp_path: Path) -> None:
    data = packed(tmp_path, (9,), [1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 9, 1], 6)
    assert data.documents(np.array([0, 1])).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]]
    assert data.documents(np.array([1])).dtype == np.int64


def test_a_separator_of_several_tokens_may_lie_across_two_samples(tmp_path: Path) -> None:
    data = packed(tmp_path, (8, 9), [9, 8, 1, 8, 9, 2, 9, 8, 9, 8, 9, 3, 3], 4)
    #                                sample 0: 9 8 1 8, sample 1: 9 2 9 8, sample 2: 9 8 9 3
    assert data.documents(np.arange(3)).tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 2]]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=21, max_size=60),
    separator=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    seq_len=st.integers(1, 10),
)
def test_two_tokens_share_a_document_where_no_separator_ends_between_them(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], separator: list[int], seq_len: int
) -> None:
    data = packed(tmp_path_factory.mktemp("packed"), tuple(separator), tokens, seq_len)
    ends = [tokens[max(0, i + 1 - len(separator)) : i + 1] == separator for i in range(len(tokens))]
    for sample, found in enumerate(data.documents(np.arange(data.sample_count))):
        first = sample * seq_len
        assert found.tolist() == [sum(ends[first : first + place]) for place in range(seq_len)]


@given(
    lengths=st.lists(st.integers(1, 25), min_size=2, max_size=30),
    separator=st.sampled_from([(9,), (8, 9)]),
    seq_len=st.integers(1, 10),
    searched=st.sampled_from([4, 1 << 22]),
)
def test_packed_documents_are_whole_or_cut_once_per_sample(tmp_path_factory, lengths, separator, seq_len, searched):
    """Every pair of neighbours in a document is an input and its target, in one place; no other pair is."""
    texts = [[number % 8] * (length - 1) + [*separator] for number, length in enumerate(lengths)]
    folder = tmp_path_factory.mktemp("packed")
    tokens = [token for text in texts for token in text]
    text = packed(folder, separator, tokens, min(seq_len, len(tokens) - 1) or 1)
    with mock.patch.object(loader, "SEARCHED", searched):
        if len(separator) == 1 and max(lengths) == 1:
            with pytest.raises(DataError, match="no document of split train has two tokens"):
                BestFitDocuments(text)
            return
        data = BestFitDocuments(text)
    assert (folder / "train.documents").exists()
    again = BestFitDocuments(text)  # from what was kept
    ids = np.arange(data.sample_count)
    micro, other = data.micro_batch(ids, ids), again.micro_batch(ids, ids)
    assert np.array_equal(micro.tokens, other.tokens)
    found = list[tuple[int, ...]]()
    for row in range(len(ids)):
        for number in range(data.most_conversations):
            here = micro.conversations[row] == number
            assert np.array_equal(here, (micro.documents[row] == number) & (micro.targets[row] != IGNORE))
            if here.any():
                found.append((*micro.tokens[row][here].tolist(), int(micro.targets[row][here][-1])))
                assert np.array_equal(micro.targets[row][here][:-1], micro.tokens[row][here][1:])
    size = text.seq_len
    parts = [tuple(text[at : at + size + 1]) for text in texts for at in range(0, len(text) - 1, size)]
    assert sorted(found) == sorted(parts)
    assert data.facts.used == data.facts.counted == sum(len(part) - 1 for part in parts)
    assert data.facts.truncated == sum(len(text) - 1 > size for text in texts)
    assert data.valid_tokens(0, len(ids), 1) == data.facts.counted
    half = [c for c in (micro.conversations >= 0).sum(axis=1) if 2 * c <= size]
    assert len(half) <= 1  # two half-empty samples would be one


@pytest.mark.parametrize("prefetch", [0, 3])
def test_micro_batches_tell_documents_where_asked(tmp_path: Path, prefetch: int) -> None:
    texts = ["one", "two or more", "and a third one", "the end"] * 6
    bpe = train_bpe(texts, 260)
    tokens = np.concatenate([np.append(bpe.encode(text), bpe.separator) for text in texts])
    write_folder(tmp_path, {"train": [tokens], "val": [tokens]}, bpe.vocab_size, bpe)
    data = TokenData(tmp_path, "train", 16, document_mask=True)
    with Batches(data, global_batch=4, micro_batch=2, rank=0, ranks=1, seed=1, prefetch=prefetch) as batches:
        read = [*next(batches), *next(batches)]
    read += evaluation_batches(data, samples=3, micro_batch=2, rank=0, ranks=1)
    for batch in read:
        assert batch.documents is not None
        for row, found in zip(batch.tokens, batch.documents, strict=True):
            ends = row == bpe.separator[0]
            assert found.tolist() == [int(ends[:place].sum()) for place in range(16)]
    assert max(int(batch.documents.max()) for batch in read if batch.documents is not None) > 1
    plain = TokenData(tmp_path, "train", 16)
    assert next(evaluation_batches(plain, samples=3, micro_batch=2, rank=0, ranks=1)).documents is None


def test_lines_are_the_documents_of_bytes(tmp_path: Path) -> None:
    tokens = ByteTokenizer().encode("ab\ncd\n\nef")
    write_folder(tmp_path, {"train": [tokens], "val": []}, 256, ByteTokenizer())
    data = TokenData(tmp_path, "train", 8, document_mask=True)
    assert data.documents(np.array([0])).tolist() == [[0, 0, 0, 1, 1, 1, 2, 3]]


def test_without_anything_between_documents_they_cannot_be_told_apart(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no separator between documents; nearest legal: data.document_mask=false"):
        TokenData(folder, "train", 8, document_mask=True)


# The order is a permutation for every size, every epoch has its own, and any position can be computed alone.


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    taken = permute(np.arange(n), n, order_key(seed, epoch))
    assert taken.dtype == np.int64
    assert np.array_equal(np.sort(taken), np.arange(n))


@given(n=st.integers(1, 2**62), data=st.data())
def test_any_position_can_be_asked_alone(n: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8)))
    key = order_key(7, 3)
    together = permute(index, n, key)
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [int(permute(np.array(i), n, key)) for i in index]
    assert len(set(together.tolist())) == len(set(index.tolist()))


def test_shape_is_kept_and_outside_is_refused() -> None:
    key = order_key(0, 0)
    assert permute(np.arange(12).reshape(3, 4), 50, key).shape == (3, 4)
    assert permute(np.empty(0, np.int64), 50, key).shape == (0,)
    with pytest.raises(ValueError, match=r"outside \[0, 50\): 3 \.\. 50"):
        permute(np.array([3, 50]), 50, key)
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([-1]), 50, key)


@pytest.mark.parametrize("n", [2, 3, 7, 10])
def test_every_place_is_equally_likely(n: int) -> None:
    trials = 2000
    counts = np.zeros((n, n))
    for seed in range(trials):
        counts[np.arange(n), permute(np.arange(n), n, order_key(seed, 0))] += 1
    expected = trials / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together() -> None:
    n = 10_000
    taken = permute(np.arange(n), n, order_key(1, 0))
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(np.arange(n), taken)[0, 1]) < 0.04


def test_order_is_fixed_for_good() -> None:
    """A change here would make every run that resumes read other samples."""
    assert permute(np.arange(10), 10, order_key(1337, 0)).tolist() == [0, 4, 9, 2, 3, 6, 1, 7, 8, 5]


@given(first=st.integers(0, 500), count=st.integers(1, 120), n=st.integers(1, 60), seed=st.integers(0, 100))
def test_sample_ids_do_not_depend_on_where_one_starts(first: int, count: int, n: int, seed: int) -> None:
    whole = sample_ids(0, first + count, n, seed)
    assert np.array_equal(sample_ids(first, count, n, seed), whole[first:])


def test_each_epoch_visits_every_sample_once_in_its_own_order() -> None:
    n = 100
    epochs = sample_ids(0, 3 * n, n, seed=1).reshape(3, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert not np.array_equal(epochs[0], sample_ids(0, n, n, seed=2))


# Reading ahead: the same items in the same order, errors in their turn, and no thread left behind.


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def counting(made: list[int], last: int = 10**9) -> Iterator[int]:
    for number in range(last):
        made.append(number)
        yield number


def test_items_in_order_then_the_end() -> None:
    items = ReadAhead(iter(range(20)), 3)
    assert list(items) == list(range(20))
    assert list(items) == []
    assert not threads()


@pytest.mark.parametrize("depth", [1, 4])
def test_at_most_depth_items_are_ready(depth: int) -> None:
    made: list[int] = []
    items = ReadAhead(counting(made), depth)
    assert soon(lambda: len(made) == depth)
    assert next(items) == 0
    assert soon(lambda: len(made) == depth + 1)
    time.sleep(0.05)
    assert len(made) == depth + 1
    items.close()


def test_an_error_comes_in_its_turn() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("third")

    items = ReadAhead(failing(), 5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert not threads()


def test_close_is_prompt_and_may_come_twice() -> None:
    items = ReadAhead(counting([]), 2)
    next(items)
    started = time.monotonic()
    items.close()
    items.close()
    assert time.monotonic() - started < 1
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)


def test_close_wakes_a_waiting_reader() -> None:
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(10)
        yield 1

    items = ReadAhead(slow(), 1)
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.append(list(items)))
    reader.start()
    threading.Timer(0.05, go.set).start()
    items.close()
    reader.join(10)
    assert got in ([[]], [[1]])
    assert not threads()


def test_dropping_the_last_reference_ends_the_thread() -> None:
    items = ReadAhead(counting([]), 2)
    next(items)
    del items
    gc.collect()
    assert soon(lambda: not threads())
