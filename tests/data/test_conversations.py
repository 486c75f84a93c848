"""Samples of conversations, their packing, and the prompts of a fine-tuned run."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.config.job import IGNORE, Data
from phalanx.data import prepare as module
from phalanx.data.conversations import ConversationData
from phalanx.data.index import open_shards, read_index
from phalanx.data.loader import Batches, evaluation_batches
from phalanx.data.mixture import open_split
from phalanx.data.packing import one_each, pack
from phalanx.data.prepare import prepare
from phalanx.data.rows import encode_rows
from phalanx.data.template import ChatPrompts, ChatTemplate
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from phalanx.errors import DataError

# Samples of conversations: whole ones, answers exactly, counts known without reading, damage found.


ROWS = 40
BPE = train_bpe(["the sea, the sea; " * 20, "again and again 12 34 é"], 300)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Forty conversations of two answers each, 50 to 90 characters long, in several shards."""
    monkeypatch.setattr(module, "SHARD_CHARACTERS", 300)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for n in range(ROWS):
            texts = [f"q{n}", "A" * (n % 13 + 1), f"again {n}", "B" * (n % 7 + 1)]
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
            file.write(json.dumps({"messages": messages}) + "\n")
    path = str(tmp_path / "rows.jsonl")
    return Data(corpus="chat", path=path, template="raw", val_fraction=0.2, dir=str(tmp_path / "out"))


def whole(data: Data, split: str = "train", seq_len: int = 64, **options: object) -> ConversationData:
    data = replace(data, **options)
    found = open_split(prepare(data), split, seq_len, data)
    assert isinstance(found, ConversationData)
    return found


def test_the_shards_hold_every_row_once_and_say_whose_each_token_is(data: Data) -> None:
    folder = prepare(data)
    index = open_shards(folder, verify=True)
    assert len(index.splits["train"]) > 2
    assert [sum(shard.conversations for shard in index.splits[split]) for split in ("train", "val")] == [32, 8]
    everything = whole(data)
    batch = everything.micro_batch(np.arange(32), np.arange(32))
    decode = everything.tokenizer.decode
    for n, (tokens, targets) in enumerate(zip(batch.tokens, batch.targets, strict=True)):
        answers = "A" * (n % 13 + 1) + "\n" + "B" * (n % 7 + 1) + "\n"
        assert decode(targets[targets != IGNORE]) == answers
        text = f"q{n}{answers.split()[0]}\nagain {n}{answers.split()[1]}\n"
        assert decode(tokens)[: len(text) - 1] == text[:-1]  # the last token is a target only
        assert not tokens[len(text) - 1 :].any()
    assert batch.documents is None


def test_packed_samples_hold_whole_conversations_with_numbers_of_their_own(data: Data) -> None:
    alone = whole(data).micro_batch(np.arange(32), np.arange(32))
    packed = whole(data, packing=True, document_mask=True, seq_len=100)
    assert packed.sample_count < 32
    found = set()
    for sample in range(packed.sample_count):
        batch = packed.micro_batch(np.array([sample]), np.array([sample]))
        assert batch.documents is not None
        tokens, targets, documents = batch.tokens[0], batch.targets[0], batch.documents[0]
        assert (np.diff(documents) >= 0).all()
        for number in np.unique(documents):
            own = documents == number
            if (targets[own] == IGNORE).all():
                assert number == documents[-1]  # padding
                assert not tokens[own].any()
                continue
            found.add((tuple(tokens[own]), tuple(targets[own])))
    lengths = [int(np.flatnonzero(row != IGNORE)[-1]) + 1 for row in alone.targets]
    rows = zip(alone.tokens, alone.targets, lengths, strict=True)
    assert found == {(tuple(tokens[:n]), tuple(targets[:n])) for tokens, targets, n in rows}


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "document_mask": True}, {"loss_on": "all"}, {"too_long": "drop"}, {"document_mask": True}],
    ids=str,
)
@pytest.mark.parametrize("seq_len", [20, 26, 64])
def test_every_rank_knows_the_valid_tokens_of_a_step_without_reading_it(
    data: Data, options: dict, seq_len: int
) -> None:
    samples = whole(data, seq_len=seq_len, **options)
    for step in range(4):
        counts = []
        for rank in range(2):
            with Batches(
                samples, global_batch=6, micro_batch=1, rank=rank, ranks=2, seed=3, first_sample=6 * step, prefetch=0
            ) as batches:
                counts += [int((micro.targets != IGNORE).sum()) for micro in next(batches)]
        assert all(counts)  # a sample without an answer is left out
        assert samples.valid_tokens(6 * step, 6, 3) == sum(counts)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_update_together_know_their_valid_targets_per_token(data: Data, replicas: int) -> None:
    samples, found = whole(data, seq_len=64), []
    for rank in range(4):
        with Batches(
            samples, global_batch=8, micro_batch=1, rank=rank, ranks=4, seed=3, prefetch=0, replicas=replicas
        ) as batches:
            found.append(next(batches))
    for start in range(0, 4, 4 // replicas):
        together = [micro for own in found[start : start + 4 // replicas] for micro in own]
        valid = sum(int((micro.targets != IGNORE).sum()) for micro in together)
        tokens = sum(int((micro.conversations >= 0).sum()) for micro in together)
        assert {micro.valid_share for micro in together} == {valid / tokens}


def test_what_is_too_long_is_cut_or_left_out_and_counted(data: Data) -> None:
    full = whole(data)
    lengths = full._positions
    assert full.facts.conversations == 32
    assert (full.facts.truncated, full.facts.dropped) == (0, 0)
    cut, dropped = whole(data, seq_len=20), whole(data, seq_len=20, too_long="drop")
    long = int((lengths > 20).sum())
    assert 0 < long < 32
    assert (cut.facts.truncated, cut.facts.dropped, cut.sample_count) == (long, 0, 32)
    assert (dropped.facts.truncated, dropped.facts.dropped, dropped.sample_count) == (0, long, 32 - long)
    assert dropped.facts.used == int(lengths[lengths <= 20].sum())
    # At three tokens the first answer has only begun in rows with one digit, and not at all in the others.
    tiny = whole(data, seq_len=2)
    assert (tiny.facts.truncated, tiny.facts.dropped) == (10, 22)
    with pytest.raises(DataError, match=r"none of the 32 conversations of split train has an answer within"):
        whole(data, seq_len=1)


def test_loss_on_all_counts_every_target(data: Data) -> None:
    samples = whole(data, loss_on="all")
    assert samples.facts.counted == samples.facts.used
    answers = whole(data)
    assert answers.folder == samples.folder  # the shards are the same
    assert answers.facts.counted < samples.facts.counted


def test_validation_pads_to_equal_micro_batches(data: Data) -> None:
    samples = whole(data, "val", packing=True, document_mask=True, seq_len=100)
    batches = [list(evaluation_batches(samples, samples=99, micro_batch=3, rank=r, ranks=2)) for r in range(2)]
    assert len({len(each) for each in batches}) == 1
    counted = sum(int((micro.targets != IGNORE).sum()) for each in batches for micro in each)
    assert counted == samples.facts.counted


def test_a_stopped_preparation_goes_on(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {file.name: file.read_bytes() for file in prepare(data).iterdir() if file.name != ".lock"}
    data = replace(data, dir=data.dir + "2")
    calls = iter(range(100))

    def failing(*arguments: object) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return encode_rows(*arguments)

    monkeypatch.setattr(module, "encode_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(data)
    monkeypatch.setattr(module, "encode_rows", encode_rows)
    folder = prepare(data)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"} == {
        **expected,
        "index.json": (folder / "index.json").read_bytes(),
    }
    assert read_index(folder).fingerprint == read_index(Path(data.dir[:-1]) / folder.name).fingerprint


def test_changed_rows_and_damaged_tables_are_refused(data: Data) -> None:
    folder = prepare(data)
    table = folder / "train-00001.rows"
    content = table.read_bytes()
    table.write_bytes(content[:8] + b"\xff" + content[9:])
    with pytest.raises(DataError, match=r"train-00001.rows: expected sha256 .*data prepare"):
        open_split(folder, "train", 64, data)
    table.write_bytes(content)
    (folder / "train-00000.bin").write_bytes(bytes((folder / "train-00000.bin").stat().st_size))
    with pytest.raises(DataError, match=r"train-00000.bin: block 0 .* of split train. Restore"):
        open_split(folder, "train", 64, data).micro_batch(np.arange(2), np.arange(2))
    Path(data.path).write_text(json.dumps({"prompt": "x", "completion": "y"}) + "\n")
    with pytest.raises(DataError, match="the corpus .* changed since these shards were made"):
        prepare(data)


def test_the_template_belongs_to_the_settings_of_the_shards(data: Data, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    folders = set()
    for text in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }} {% endfor %}",
    ):
        own.write_text(text)
        folders.add(prepare(replace(data, template=str(own))))
    assert len({prepare(data), *folders}) == 3
    assert (folders.pop() / "chat_template.jinja").exists()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(max_size=12), st.booleans()), min_size=1, max_size=6))
def test_the_tokens_of_parts_are_those_of_the_whole_text(parts: list[tuple[str, bool]]) -> None:
    text = "".join(each for each, _ in parts)
    [(ids, marks)] = BPE.encode_marked([parts])
    assert ids.tolist() == BPE.encode(text).tolist()
    assert marks.size == ids.size
    if all(mark for _, mark in parts):
        assert marks.all()
    if not any(mark for _, mark in parts):
        assert not marks.any()


@pytest.mark.parametrize("packing", [False, True])
def test_positions_that_hold_tokens_are_known_without_reading(data: Data, packing: bool) -> None:
    samples = whole(data, packing=packing, document_mask=packing)
    used = [samples.used_positions(n, 1, 7) for n in range(samples.sample_count)]
    assert sum(used) == samples.used_positions(0, samples.sample_count, 7) == samples.facts.used
    assert all(0 < each <= samples.seq_len for each in used)


# Packing: every item once, no bin above its capacity, few bins, and the same ones every time.

CAPACITY = 50


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200))
def test_every_item_is_in_one_bin_that_has_room_for_it(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    items, starts = pack(sizes, CAPACITY)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    filled = np.add.reduceat(sizes[items], starts[:-1])
    assert filled.max() <= CAPACITY
    # Johnson's bound, with the sum of the lengths in place of the fewest possible bins.
    assert len(filled) <= 11 / 9 * max(1, -(-sizes.sum() // CAPACITY)) + 6 / 9 or (2 * sizes > CAPACITY).sum() > 1
    assert (filled * 2 > CAPACITY).sum() >= len(filled) - 1  # two half empty bins would have been one


def test_the_fullest_bin_with_room_is_chosen() -> None:
    items, starts = pack(np.array([3, 6, 4, 7]), 10)
    assert [items[a:b].tolist() for a, b in itertools.pairwise(starts)] == [[0, 3], [1, 2]]


def test_without_packing_each_has_its_own() -> None:
    items, starts = one_each(3)
    assert items.tolist() == [0, 1, 2]
    assert starts.tolist() == [0, 1, 2, 3]


# Prompts of a fine-tuned run: what its conversations begin with, token for token.

ASKED = {"role": "user", "content": "What is 2+2?"}


def prompts(folder: Path, template: str) -> tuple[Path, ChatPrompts]:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": ASKED["content"], "completion": "4"}) + "\n")
    out, path = str(folder / "out"), str(folder / "rows.jsonl")
    prepared = prepare(Data(corpus="chat", path=path, template=template, tokenizer="byte", val_fraction=0, dir=out))
    found = ChatPrompts.of_run(prepared, Tokenizer.load(prepared))
    assert found is not None
    return prepared, found


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("alpaca", "\n"), ("raw", "\n")]
)
def test_the_prompt_is_the_beginning_of_the_training_text(tmp_path: Path, template: str, end: str) -> None:
    prepared, chat = prompts(tmp_path, template)
    assert chat.end == end
    stored = (prepared / "train-00000.bin").read_bytes()
    text = bytes(stored[n] for n in range(0, len(stored), 4)).decode()
    prompt = bytes(chat([ASKED])).decode()
    assert text.startswith(prompt + "4" + end)
    assert not stored[4 * len(prompt) - 1] >> 7  # the last token of the prompt
    assert stored[4 * len(prompt) + 3] >> 7  # the first of the answer


def test_a_message_that_the_template_passes_over_is_refused() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | upper }}{% endif %}{% endfor %}"
    chat = ChatPrompts(ChatTemplate(source, {}, "users only", trusted=True), ByteTokenizer())
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "x"}]
    assert chat.text(said) == "HIX"
    with pytest.raises(ValueError, match=r"messages\[0\].content is not written .* of the role 'system' there"):
        chat.text([{"role": "system", "content": "be brief"}, *said])


def test_without_a_template_there_are_no_prompts_and_refusals_are_passed_on(tmp_path: Path) -> None:
    assert ChatPrompts.of_run(tmp_path, ByteTokenizer()) is None
    refusing = ChatTemplate("{{ raise_exception('no') }}", {}, "refusing", trusted=True)
    with pytest.raises(ValueError, match="TemplateError: no"):
        ChatPrompts(refusing, ByteTokenizer())([ASKED])
    silent = ChatTemplate("{{ messages[0].content }}", {}, "silent", trusted=True)
    with pytest.raises(ValueError, match=r"messages\[0\].name is not written by the model's chat template"):
        ChatPrompts(silent, ByteTokenizer())([ASKED | {"name": "Ann"}])
    assert ChatPrompts(silent, ByteTokenizer()).text([ASKED | {"refusal": None}]) == ASKED["content"]
