"""Preference pairs: two sequences a row, neighbours everywhere, with the loss on their last answers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.check.job import data_problems
from phalanx.config.job import IGNORE, Data
from phalanx.data.conversations import PreferenceData, pair_of
from phalanx.data.loader import Batches, evaluation_batches
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.errors import DataError, JobError

ASKED, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, ASKED]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Twenty pairs, of which the rejected answer of every fifth is long; before one answer another was given."""
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for n in range(20):
            row = {"messages": [*TALK[:2], {"role": "user", "content": f"{n}?"}], "chosen": f"yes {n}"}
            file.write(json.dumps({**row, "rejected": f"no {n}" + "!" * (50 * (n % 5 == 4))}) + "\n")
    path = str(tmp_path / "pairs.jsonl")
    return Data(corpus="preferences", path=path, template="raw", val_fraction=0.3, dir=str(tmp_path / "out"))


def opened(data: Data, split: str = "train", seq_len: int = 80) -> PreferenceData:
    found = open_split(prepare(data), split, seq_len, data)
    assert isinstance(found, PreferenceData)
    return found


def answers(samples: PreferenceData, targets: np.ndarray) -> list[str]:
    return [samples.tokenizer.decode(row[row != IGNORE]) for row in targets]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [ASKED], "chosen": "4", "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "2+2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score": 3},
    ],
    ids=str,
)
def test_every_form_is_a_pair(row: dict) -> None:
    assert pair_of(row) == [[ASKED, GOOD], [ASKED, BAD]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, "no chosen and no rejected"),
        ({"prompt": "x", "chosen": "y", "rejected": " "}, "rejected: message 2: no answer: its content is empty"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [TALK[0], BAD]}, "differ at message 1, which is no answer"),
        (
            {"prompt": "3+3?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
            "prompt is neither the beginning of the chosen conversation nor all of it",
        ),
        ({"chosen": "y", "rejected": "z"}, "chosen: no prompt.*; rejected: no prompt"),
        ({"chosen": TALK, "rejected": [ASKED, BAD]}, "chosen: its last message is no answer"),
    ],
    ids=str,
)
def test_other_rows_are_refused_with_the_reason(row: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pair_of(row)


def test_pairs_stay_together_on_every_rank_and_only_their_last_answers_count(data: Data) -> None:
    samples = opened(data)
    assert samples.sample_count == 28
    seen = []
    for rank in range(2):
        with Batches(samples, global_batch=8, micro_batch=2, rank=rank, ranks=2, seed=1, prefetch=0) as batches:
            for step in range(4):
                for micro in next(batches):
                    chosen, rejected = answers(samples, micro.targets)
                    number = chosen.removeprefix("yes ").strip()
                    assert rejected.rstrip("!\n") == f"no {number}"
                    assert (micro.sample_ids % 2).tolist() == [0, 1]
                    seen.append((step, number))
    assert len({number for step, number in seen if step < 3}) == 12  # no pair twice before all were read
    assert [samples.valid_tokens(8 * step, 8, 1) for step in range(3)] == [4, 4, 4]  # the loss is a mean over pairs


def test_a_pair_is_left_out_as_a_whole(data: Data) -> None:
    dropped = opened(replace(data, too_long="drop"), seq_len=40)
    assert (dropped.sample_count, dropped.facts.dropped) == (24, 4)
    cut = opened(data, seq_len=40)
    assert (cut.sample_count, cut.facts.truncated) == (28, 2)


def test_validation_reads_whole_pairs(data: Data) -> None:
    samples = opened(data, "val")
    for count, pairs in ((99, 6), (5, 2), (1, 1)):
        found = []
        for rank in range(2):
            for micro in evaluation_batches(samples, samples=count, micro_batch=2, rank=rank, ranks=2):
                found += [text for text in answers(samples, micro.targets) if text]
        assert len(found) == 2 * pairs
        assert [text.rstrip("!\n").split()[1] for text in found[::2]] == [
            text.rstrip("!\n").split()[1] for text in found[1::2]
        ]


def test_what_would_tear_pairs_apart_is_refused(data: Data) -> None:
    problems = dict(data_problems(replace(data, packing=True, document_mask=True, loss_on="all")))
    assert problems.keys() == {"data.packing", "data.loss_on"}
    with pytest.raises(JobError, match="a micro-batch of 3 sequences cuts a group of 2"):
        Batches(opened(data), global_batch=6, micro_batch=3, rank=0, ranks=1, seed=0)
    Path(data.path).write_text('{"prompt": "x", "chosen": "y"}\n')
    with pytest.raises(DataError, match="pairs.jsonl:1: no rejected"):
        prepare(replace(data, dir=data.dir + "2"))


def test_a_last_answer_that_does_not_count_is_refused() -> None:
    user, good = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}
    row = {"chosen": [user, good, user, {"role": "assistant", "content": "b", "weight": 0}], "rejected": [user, good]}
    with pytest.raises(ValueError, match="chosen: its last answer has weight 0"):
        pair_of(row)
