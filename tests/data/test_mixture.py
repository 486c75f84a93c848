"""Mixtures: the weights hold in every stretch, nothing depends on ranks or interruptions, and every source is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.check.load import from_dict, load_words
from phalanx.check.show import as_dict
from phalanx.config.corpora import MIX_ROUND
from phalanx.config.data import Data, MixSource
from phalanx.config.overrides import parse
from phalanx.data.index import read_index, write_index
from phalanx.data.loader import Batches, evaluation_batches
from phalanx.data.mixture import MixedData, Rounds
from phalanx.data.prepare import prepare
from phalanx.data.settings import prepared_path
from phalanx.data.shards import open_shards
from phalanx.data.split import open_split
from phalanx.errors import DataError, JobError

TEXTS = {"a": "abcdefgh", "b": "ABCDEFGHIJKL", "c": "0123456789"}


@pytest.fixture
def mix(tmp_path: Path) -> Data:
    """Three sources, each of characters of its own, by weights 5, 3 and 2."""
    for name, letters in TEXTS.items():
        text = "".join(letters[i * i % len(letters)] for i in range(4000)) + letters
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [MixSource(str(tmp_path / f"{name}.txt"), weight) for name, weight in zip("abc", (5, 3, 2), strict=True)]
    return Data(corpus="mix", mix=tuple(sources), dir=str(tmp_path / "data"))


def opened(data: Data, split: str = "train") -> MixedData:
    found = open_split(prepare(data), split, 16, data)
    assert isinstance(found, MixedData)
    return found


def steps(data: MixedData, count: int, *, ranks: int = 1, rank: int = 0, first: int = 0) -> np.ndarray:
    options = {"global_batch": 8, "micro_batch": 2, "seed": 3, "prefetch": 0}
    with Batches(data, **options, ranks=ranks, rank=rank, first_sample=first) as batches:
        return np.array([np.concatenate([batch.tokens for batch in next(batches)]) for _ in range(count)])


def test_batches_depend_on_neither_ranks_nor_interruption(mix: Data) -> None:
    data = opened(mix)
    alone = steps(data, 12)
    for ranks in (2, 4):
        parts = [steps(data, 12, ranks=ranks, rank=rank) for rank in range(ranks)]
        assert (np.concatenate(parts, axis=1) == alone).all()
    assert (steps(data, 5, first=56) == alone[7:]).all()
    text = data.tokenizer.decode(alone.reshape(-1))
    counts = [sum(map(text.count, letters)) for letters in TEXTS.values()]
    assert list(data.source_tokens(96).values()) == counts == [48 * 16, 29 * 16, 19 * 16]


def test_one_tokenizer_serves_all_sources_and_each_is_prepared_once(mix: Data) -> None:
    folder = prepare(mix)
    index = open_shards(folder, verify=True)
    assert index.vocab_size == len("".join(TEXTS.values()))
    before = {each: (each / "index.json").stat().st_mtime_ns for each in index.folders(folder)}
    other = replace(mix, mix=tuple(replace(source, weight=1) for source in mix.mix))
    assert prepare(other) == folder  # weights are no part of what is prepared
    assert {each: (each / "index.json").stat().st_mtime_ns for each in before} == before
    assert index.tokens("train") == sum(read_index(each).tokens("train") for each in before)


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1, 1], [5], [1, 1e-5], [3, 7, 11, 13, 1e-5]])
def test_weights_hold_in_every_stretch_and_every_sample_is_drawn_once(weights: list[float]) -> None:
    rounds = Rounds.of(weights)
    assert rounds.places.sum() == MIX_ROUND
    exact = np.array(weights) / sum(weights)
    assert abs(rounds.places / MIX_ROUND - exact).max() < 1 / MIX_ROUND
    chosen, numbers = rounds.draw(np.arange(2 * MIX_ROUND))
    for which, place in enumerate(rounds.places):
        assert (numbers[chosen == which] == np.arange(2 * place)).all()
        drawn = np.cumsum(chosen == which)
        wanted = np.arange(1, drawn.size + 1) * (place / MIX_ROUND)
        assert abs(drawn - wanted).max() < 1 + len(weights) / 2
    for end in (0, 1, 777, MIX_ROUND, MIX_ROUND + 5):
        assert (rounds.drawn(end) == np.bincount(chosen[:end], minlength=len(weights))).all()


def test_a_validation_reads_each_source_by_its_share(mix: Data) -> None:
    parts = opened(mix, "val").parts(20)
    assert [(weight, samples) for _, weight, _, samples in parts] == [
        (pytest.approx(weight, abs=1e-5), samples) for weight, samples in ((0.5, 10), (0.3, 6), (0.2, 4))
    ]
    for name, _, part, samples in parts:
        batches = evaluation_batches(part, samples=samples, micro_batch=2, rank=0, ranks=1)
        text = "".join(part.tokenizer.decode(batch.tokens.reshape(-1)) for batch in batches)
        assert set(text) <= set(TEXTS[Path(name).stem])


def test_a_source_that_changed_is_refused_with_the_command_for_the_mixture(mix: Data) -> None:
    folder = prepare(mix)
    changed = Path(mix.mix[1].path)
    changed.write_text(changed.read_text() + "?!")
    with pytest.raises(DataError, match=r"b\.txt\) changed since .* data\.corpus=mix"):
        prepare(mix)
    assert prepare(mix, force=True) == folder
    assert open_shards(folder).vocab_size == len("".join(TEXTS.values())) + 2


def test_a_source_that_was_prepared_again_on_its_own_is_not_taken_for_the_old_one(mix: Data) -> None:
    folder = prepare(mix)
    there = read_index(folder).folders(folder)[0]
    record = read_index(there)
    split = {**record.splits, "val": record.splits["train"][:0]}
    write_index(there, replace(record, splits=split))
    with pytest.raises(DataError, match="is not as it was when the mixture .* was prepared: expected fingerprint"):
        open_shards(folder)


def test_the_same_mixture_is_read_from_a_file_the_command_line_and_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "data:\n  tokenizer: byte\n  mix:\n    - path: 'a: b.txt'\n      weight: 7e-1\n      epochs: 2\n"
        "    - {path: c, weight: 3}\n"
    )
    job = load_words(parse([str(file)])).job
    assert job.data.mix == (MixSource("a: b.txt", 0.7, 2), MixSource("c", 3))
    assert job.data.corpus == "mix"
    words = ["tokenizer=byte", "data.mix=[{path: 'a: b.txt', weight: 0.7, epochs: 2}, {path: c, weight: 3}]"]
    assert load_words(parse(words)).job.data == job.data
    assert from_dict(as_dict(job), "checkpoint") == job


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[]", "data.mix.*is an empty list"),
        ("[{path: a, weight: 0}]", r"data.mix.*item 1 \(a\): weight must be above 0"),
        ("[{path: a, weight: -2}]", r"data.mix.*item 1 \(a\): weight must be above 0"),
        ("[{path: a, weight: nan}]", "data.mix.*item 1: weight: expected a number, found 'nan'"),
        ("[{path: a, weight: .inf}]", "data.mix.*item 1: weight: expected a number"),
        ("[{path: a, weight: 1}, {path: b}]", "data.mix.*item 2: weight is missing"),
        ("[{path: a, weight: 1, wieght: 1}]", "data.mix.*item 1: unknown key 'wieght'; did you mean weight"),
        ("[{path: a, weight: 1, weight: 2}]", "data.mix.*item 1: weight is given twice"),
        ("[{path: a, weight: [1]}]", "data.mix.*item 1: expected path, weight and epochs, each with one value"),
        ("[{path: a, weight: 1, epochs: -1}]", r"data.mix.*item 1 \(a\): epochs must not be negative"),
        ("[{path: a, weight: 1}, {path: a, weight: 1}]", "data.mix.*item 2: a is item 1, too"),
        ("[{path: a, weight: 1}, {path: b, weight: 1e-9}]", "data.mix.*item 2: weight 1e-09 is less than"),
        ("[{path: '', weight: 1}]", "data.mix.*item 1: path is ''"),
        ("[a, b]", "data.mix.*item 1: expected a mapping of path, weight and epochs, found 'a'"),
        ("book.txt", "data.mix.*expected a list of mappings of path, weight and epochs"),
        ("[[[[" * 9, "data.mix.*expected a list of mappings"),
    ],
)
def test_what_is_no_mixture_is_refused_by_name(written: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_words(parse([f"data.mix={written}"]))


@pytest.mark.parametrize("other", ["data.corpus=text", "data.path=x.txt", "data.corpus=random"])
def test_a_mixture_beside_a_corpus_or_a_path_is_refused(other: str) -> None:
    with pytest.raises(JobError, match=r"stands beside data\.(corpus|mix)"):
        load_words(parse(["data.mix=[{path: a, weight: 1}]", other]))
    with pytest.raises(JobError, match="corpus mix needs sources"):
        load_words(parse(["data.corpus=mix"]))


def test_a_tag_in_a_mixture_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("data:\n  mix: [{path: !!python/name:os.system '', weight: 1}]\n")
    with pytest.raises(JobError, match="the tag .* is not allowed"):
        load_words(parse([str(file)]))


def test_epochs_that_do_not_suffice_are_said_with_what_would(mix: Data) -> None:
    limited = replace(mix, mix=(*mix.mix[:2], replace(mix.mix[2], epochs=1.5)))
    data = opened(limited)
    one_pass = data.sources[2].sample_count
    assert data.epoch_problems(int(one_pass * 1.5 / 0.2) - 5) == []
    (problem,) = data.epoch_problems(one_pass * 10)
    assert "data.mix: item 3" in problem
    assert "which is 2.00 passes" in problem
    assert "nearest legal: epochs=2" in problem


def test_preparing_goes_on_where_it_stopped(mix: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.data import prepare as module

    build = module._build_text
    calls = []

    def failing(folder: Path, data: Data, *rest: object) -> None:
        calls.append(data.path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        build(folder, data, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "_build_text", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(mix)
    with pytest.raises(DataError, match="not finished"):
        open_shards(prepared_path(mix))
    prepare(mix)
    assert calls == [*(source.path for source in mix.mix), mix.mix[2].path]


@pytest.mark.parametrize(
    ("row", "corpus"),
    [('{"messages": []}', "chat"), ('{"prompt": "q", "completion": "a"}', "chat"), ('{"chosen": "a"}', "preferences")],
)
def test_rows_that_end_with_answers_are_no_source(mix: Data, tmp_path: Path, row: str, corpus: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{row}\n")
    with pytest.raises(DataError, match=f"rows.jsonl:1: .* data.corpus={corpus} with data.path, and are no source"):
        prepare(replace(mix, mix=(*mix.mix, MixSource(str(rows), 1))))
