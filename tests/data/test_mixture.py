from pathlib import Path

import numpy as np
import pytest

from phalanx.data.loader import Batches, TokenData
from phalanx.data.mixture import ROUND, MixedData, draw, shares
from phalanx.data.shards import SPLITS, CorpusRecord, Index, write_index, write_shard
from phalanx.data.tokenizer import NumberTokenizer
from phalanx.errors import DataError


def source(folder: Path, first: int, vocab: int = 1000) -> TokenData:
    folder.mkdir()
    tokenizer = NumberTokenizer(vocab)
    tokenizer.save(folder)
    splits = {s: (write_shard(folder, f"{s}-00000.bin", np.arange(first, first + 201), "uint16"),) for s in SPLITS}
    corpus = CorpusRecord("random", "random tokens", 0, 0, 0, "", "")
    write_index(folder, Index((), corpus, tokenizer.fingerprint, vocab, "uint16", splits, complete=True))
    return TokenData(folder, "train", 8)


def steps(data: MixedData, count: int, *, ranks: int = 1, rank: int = 0, first: int = 0) -> np.ndarray:
    options = {"global_batch": 8, "micro_batch": 2, "seed": 3, "prefetch": 0}
    with Batches(data, **options, ranks=ranks, rank=rank, first_sample=first) as batches:
        return np.array([np.concatenate([batch.tokens for batch in next(batches)]) for _ in range(count)])


def test_batches_depend_on_neither_ranks_nor_interruption(tmp_path: Path) -> None:
    data = MixedData([source(tmp_path / "a", 0), source(tmp_path / "b", 500)], [3, 1])
    alone = steps(data, 12)
    for ranks in (2, 4):
        parts = [steps(data, 12, ranks=ranks, rank=rank) for rank in range(ranks)]
        assert (np.concatenate(parts, axis=1) == alone).all()
    assert (steps(data, 5, first=56) == alone[7:]).all()
    of_b = int((alone[:, :, 0] >= 500).sum())
    assert data.source_tokens(0, 96, 3) == [(96 - of_b) * 8, of_b * 8]


def test_weights_hold_and_every_sample_of_a_source_is_drawn_once() -> None:
    places = shares([0.7, 0.2, 0.1])
    chosen, numbers = draw(0, 2 * ROUND, places, 1)
    for which, place in enumerate(places):
        assert sorted(numbers[chosen == which]) == list(range(2 * place))
    assert places.sum() == ROUND
    assert abs(places / ROUND - [0.7, 0.2, 0.1]).max() < 1 / ROUND


def test_bad_mixtures_are_refused(tmp_path: Path) -> None:
    for weights in ([], [1, 0], [1, float("nan")], [1, 1e-9]):
        with pytest.raises(DataError, match="weights"):
            shares(weights)
    with pytest.raises(DataError, match="one tokenizer"):
        MixedData([source(tmp_path / "a", 0), source(tmp_path / "b", 0, 900)], [1, 1])
