"""Mixtures: the weights hold in every stretch, nothing depends on ranks or interruptions, and every source is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.check.load import as_dict, from_dict, load_words
from phalanx.config.corpora import MIX_ROUND
from phalanx.config.job import IGNORE, Data, MixSource
from phalanx.config.overrides import parse
from phalanx.data import prepare as prepare_module
from phalanx.data.index import open_shards, read_index, write_index
from phalanx.data.loader import Batches, MicroBatch, evaluation_batches
from phalanx.data.mixture import MixedData, Rounds, open_split
from phalanx.data.prepare import absent, prepare
from phalanx.data.settings import prepared_path
from phalanx.errors import DataError, JobError, NotFoundError

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
    assert list(data.source_tokens(96, 3).values()) == counts == [48 * 16, 29 * 16, 19 * 16]


def test_one_tokenizer_serves_all_sources_and_each_is_prepared_once(mix: Data) -> None:
    folder = prepare(mix)
    index = open_shards(folder, verify=True)
    assert index.vocab_size == len("".join(TEXTS.values()))
    before = {each: (each / "index.json").stat().st_mtime_ns for each in index.folders(folder)}
    other = replace(mix, mix=tuple(replace(source, weight=1) for source in mix.mix))
    assert prepare(other) == folder  # weights are no part of what is prepared
    assert {each: (each / "index.json").stat().st_mtime_ns for each in before} == before
    assert index.tokens("train") == sum(read_index(each).tokens("train") for each in before)


def test_a_process_that_waits_for_another_prepares_sources_meanwhile(mix: Data, monkeypatch) -> None:
    mix = replace(mix, tokenizer="byte")
    alone, made = read_index(prepare(replace(mix, dir=f"{mix.dir}-alone"))), list[bool]()

    @contextmanager
    def taken(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
        waiting("7")
        made.append(all((Path(mix.dir) / each.folder / "index.json").exists() for each in alone.sources))
        yield

    monkeypatch.setattr(prepare_module, "locked", taken)
    found = read_index(prepare(mix))
    assert made[-1]
    assert len(made) == 1 + len(mix.mix), "each source was prepared once"
    assert found.sources == alone.sources


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
        ("[{path: a, weight: [1]}]", r"data.mix.*item 1: weight: expected a number, found '\[1\]'"),
        ("[{path: a, weight: 1, epochs: -1}]", r"data.mix.*item 1 \(a\): epochs must not be negative"),
        ("[{path: a, weight: 1}, {path: a, weight: 1}]", "data.mix.*item 2: a is item 1, too"),
        ("[{path: a, weight: 1}, {path: ./a, weight: 1}]", r"data.mix.*item 2: \./a is item 1, too"),
        ("[{path: a, weight: 1}, {path: b, weight: 1e-9}]", "data.mix.*item 2: weight 1e-09 is less than"),
        ("[{path: '', weight: 1}]", "data.mix.*item 1: path is ''"),
        ("[a, b]", "data.mix.*item 1: expected a mapping of path, weight, .* and ignore_keys, found 'a'"),
        ("book.txt", "data.mix.*expected a list of mappings of path, weight, .* and ignore_keys"),
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
        build(folder, data, *rest)

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
def test_rows_among_texts_are_refused_with_the_corpus_that_reads_them(
    mix: Data, tmp_path: Path, row: str, corpus: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{row}\n")
    with pytest.raises(DataError, match=f"rows.jsonl:1: .* data.corpus={corpus}, also with data.mix"):
        prepare(replace(mix, mix=(*mix.mix, MixSource(str(rows), 1))))


ANSWERS = {"talk": "abc", "asked": "ABCD", "text": "0123456789\n"}
ROWS = 30


@pytest.fixture
def talks(tmp_path: Path) -> Data:
    """Conversations, questions in columns of their own, and a text: the answers of each are of its own characters."""
    with (tmp_path / "talk.jsonl").open("w") as talk, (tmp_path / "asked.jsonl").open("w") as asked:
        for n in range(ROWS):
            answer = {"role": "assistant", "content": "abc"[: n % 3 + 1]}
            talk.write(json.dumps({"messages": [{"role": "user", "content": "?" * (n % 5 + 1)}, answer]}) + "\n")
            asked.write(json.dumps({"question": "!" * (n % 4 + 1), "reply": "ABCD" * (n % 2 + 1)}) + "\n")
    (tmp_path / "text.txt").write_text("".join(f"{n * n * 7919}\n" for n in range(200)))
    sources = (
        MixSource(str(tmp_path / "talk.jsonl"), 5),
        MixSource(str(tmp_path / "asked.jsonl"), 3, columns=("question:prompt", "reply:completion")),
        MixSource(str(tmp_path / "text.txt"), 2, corpus="text"),
    )
    return Data(corpus="chat", mix=sources, template="raw", val_fraction=0.2, dir=str(tmp_path / "data"))


@pytest.mark.parametrize(
    "options", [{}, {"packing": True, "document_mask": True}, {"loss_on": "all"}, {"too_long": "drop"}], ids=str
)
def test_conversations_are_drawn_by_weight_and_their_answers_counted(talks: Data, options: dict) -> None:
    data = replace(talks, **options)
    samples = opened(data)
    first = 0
    counted = dict.fromkeys(ANSWERS, 0)
    for ranks, count in ((1, 3), (2, 2), (4, 4)):  # as a run that is resumed with other numbers of ranks
        for step in range(count):
            before = first + 8 * step
            found: list[MicroBatch] = []
            for rank in range(ranks):
                of_rank = {"rank": rank, "ranks": ranks, "first_sample": before}
                with Batches(samples, global_batch=8, micro_batch=2, seed=3, prefetch=0, **of_rank) as batches:
                    found += next(batches)
            rows = [row[row != IGNORE] for micro in found for row in micro.targets]
            assert samples.valid_tokens(before, 8, 3) == sum(map(len, rows))
            for micro in found:
                assert micro.conversations is not None
                assert ((micro.conversations < 0) <= (micro.targets == IGNORE)).all()
                assert micro.most_conversations == samples.most_conversations
                assert micro.valid_share == found[0].valid_share
            used = sum(int((micro.conversations >= 0).sum()) for micro in found if micro.conversations is not None)
            assert samples.used_positions(before, 8, 3) == used
            numbers, _ = samples.rounds.draw(np.arange(before, before + 8))
            for which, row in zip(numbers.tolist(), rows, strict=True):
                name = [*ANSWERS][which]
                counted[name] += len(row)
                own = set(ANSWERS[name]) | ({"?", "!", "\n"} if "loss_on" in options else {"\n"})
                assert set(samples.tokenizer.decode(row)) <= own
        first += 8 * count
        told = {Path(path).stem: tokens for path, tokens in samples.source_tokens(first, 3).items()}
        assert told == counted
    assert list(opened(data).source_tokens(first, 3).values()) == list(counted.values())  # as after a resume


def test_every_conversation_of_a_source_is_read_once_in_a_pass(talks: Data) -> None:
    samples = opened(talks)
    ids = samples.order(0, 48, 1)
    assert len(set(ids[ids < 24].tolist())) == 24  # of weight 5 in 10
    facts = samples.source_facts()
    assert [fact["weight"] for fact in facts] == [0.5, 0.3, 0.2]
    passed = samples.sources[0].counted_tokens(0, 24, 1)
    assert facts[0]["tokens"] == passed
    assert samples.sources[0].counted_tokens(24, 24, 1) == passed


def test_a_vocabulary_made_of_conversations_is_that_of_all_sources(talks: Data) -> None:
    folder = prepare(replace(talks, tokenizer="bpe", bpe_vocab=300))
    index = open_shards(folder, verify=True)
    assert index.vocab_size <= 300
    assert [bool(read_index(each).row_size) for each in index.folders(folder)] == [True, True, False]
    other = replace(talks.mix[1], columns=("question:prompt", "reply:completion"), ignore_keys=("id",))
    assert prepared_path(replace(talks, mix=(talks.mix[0], other, talks.mix[2]))) != prepared_path(talks)


def test_pairs_of_several_sources_stay_together_and_keep_their_reference(talks: Data, tmp_path: Path) -> None:
    for name in "pq":
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for n in range(15):
                file.write(json.dumps({"prompt": f"{n}", "chosen": f"{name}{n}", "rejected": f"{name}{n}!"}) + "\n")
    sources = tuple(MixSource(str(tmp_path / f"{name}.jsonl"), weight) for name, weight in (("p", 2), ("q", 1)))
    data = opened(replace(talks, corpus="preferences", mix=sources))
    data.refer(np.arange(data.sample_count, dtype=np.float64))
    seen, names = [], []
    for rank in range(2):
        with Batches(data, global_batch=12, micro_batch=2, rank=rank, ranks=2, seed=1, prefetch=0) as batches:
            for micro in (micro for _ in range(3) for micro in next(batches)):
                chosen, rejected = (data.tokenizer.decode(row[row != IGNORE]).strip() for row in micro.targets)
                assert rejected == f"{chosen}!"
                assert micro.reference is not None
                assert micro.reference[1] == micro.reference[0] + 1
                assert micro.reference[0] % 2 == 0
                seen.append(chosen)
                names.append(chosen[0])
    assert len(set(seen)) == 18
    assert names.count("p") == 12
    assert [data.valid_tokens(12 * step, 12, 1) for step in range(3)] == [6, 6, 6]
    tokens = data.source_tokens(36, 1)
    assert sum(tokens.values()) == sum(2 * len(answer) + 3 for answer in seen)  # each answer, with "!", ends a line
    assert [samples for *_, samples in opened(replace(talks, corpus="preferences", mix=sources), "val").parts(6)] == [
        4,
        2,
    ]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("{path: a, weight: 1, corpus: chat}, {path: b, weight: 1, corpus: preferences}", "item 2 .b.: corpus pref"),
        (
            "{path: a, weight: 1, corpus: preferences}, {path: b, weight: 1, corpus: text}",
            "item 2 .*a run has one loss",
        ),
        ("{path: a, weight: 1, corpus: random}", "item 1: corpus: expected one of .*found 'random'"),
        ("{path: a, weight: 1, corpus: chat, columns: [x]}", "item 1: columns: expected THEIRS:OURS"),
        ("{path: a, weight: 1, corpus: chat, columns: {x: y}}", "item 1: expected path, .*a list of them"),
        ("{path: a, weight: 1, columns: ['x:y']}", "item 1 .a.: columns is for conversations"),
        ("{path: a, weight: 1, ignore_keys: [x]}", "item 1 .a.: ignore_keys is for conversations"),
    ],
)
def test_sources_that_do_not_go_together_are_refused(mix: str, message: str) -> None:
    with pytest.raises(JobError, match=f"data.mix.*{message}"):
        load_words(parse([f"data.mix=[{mix}]"]))


def test_a_source_that_is_not_there_is_named_by_its_item(mix: Data) -> None:
    other = replace(mix, mix=(*mix.mix, MixSource(mix.mix[0].path + "t", 1)))
    with pytest.raises(NotFoundError, match=r"data\.mix: item 4: .*a\.txtt: there is no such file .*a\.txt"):
        prepare(other)
    assert ["data.mix: item 4" in problem for problem in absent(other)] == [True]


def test_a_mixture_is_of_what_its_sources_are() -> None:
    chat = "{path: b, weight: 2, corpus: chat, columns: ['x: y:prompt', z:completion]}"
    rows = f"[{{path: a, weight: 1, corpus: text}}, {chat}]"
    job = load_words(parse(["data.template=raw", f"data.mix={rows}"])).job
    assert job.data.corpus == "chat"
    assert job.data.mix[1].columns == ("x: y:prompt", "z:completion")
    assert from_dict(as_dict(job), "checkpoint") == job
