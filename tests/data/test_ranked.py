"""Preference rows in other forms: KTO's labels, ranked responses, ShareGPT's conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.job import Data
from phalanx.data.conversations import pair_of, preference_rows
from phalanx.data.prepare import prepare
from phalanx.errors import DataError


def pairs(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the last messages of each pair, or the row's problem."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(corpus="preferences", path=str(folder / "rows.jsonl"))
    found = preference_rows([folder / "rows.jsonl"], data)
    return [
        (row.problem,) if row.problem else tuple(messages[-1]["content"] for messages in row.conversations)
        for row in found
    ]


def labelled(prompt: Any, completion: str, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_answers_with_both_labels_of_one_prompt_are_pairs(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "q"}]
    rows = [
        labelled("p", "good", True),
        labelled(asked, "yes", 1),
        labelled("p", "bad", False),
        labelled("p", "worse", "false"),
        {"prompt": "x", "chosen": "c", "rejected": "r"},
        labelled(asked, "no", 0),
    ]
    assert pairs(tmp_path, rows) == [("c", "r"), ("good", "bad"), ("good", "worse"), ("yes", "no")]


def test_a_prompt_with_one_label_is_refused_once_with_the_number_of_its_rows(tmp_path: Path) -> None:
    rows = [*(labelled(f"p{n}", "a", True) for n in range(40)), labelled("q", "a", "maybe")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = Data(corpus="preferences", path=str(tmp_path / "rows.jsonl"), template="raw", dir=str(tmp_path / "data"))
    with pytest.raises(DataError) as caught:
        prepare(data)
    text = str(caught.value)
    assert "41 rows cannot be used" in text
    assert "rows.jsonl:1: its prompt has only answers with label true" in text
    assert "(and 39 more rows)" in text
    assert "rows.jsonl:41: label is 'maybe': expected true or false" in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(("name", "values"), [("scores", [0.5, 9, 0.5]), ("ranks", [2, 1, 2])])
def test_every_two_responses_of_different_rank_are_a_pair(tmp_path: Path, name: str, values: list[float]) -> None:
    row = {"prompt": "p", "responses": ["a", "b", "c"], name: values}
    assert pairs(tmp_path, [row]) == [("b", "a"), ("b", "c")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"responses": ["a", "b"]}, "responses need one list beside them"),
        ({"responses": ["a", "b"], "scores": [1, 2], "ranks": [2, 1]}, "responses need one list beside them"),
        ({"responses": ["a", "b"], "scores": [1]}, "scores must be 2 numbers"),
        ({"responses": ["a", "b"], "scores": [1, True]}, "scores must be 2 numbers"),
        ({"responses": ["a", "b", "c"], "scores": [1, float("nan"), 2]}, "scores must be 3 numbers"),
        ({"responses": ["a", "b"], "ranks": [1, 1]}, "no two of its 2 responses differ in ranks"),
        ({"responses": ["a", "b"], "ranks": [1, 2], "why": "x"}, "'why' is not understood"),
    ],
    ids=str,
)
def test_responses_without_an_order_are_refused(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    ((found,),) = pairs(tmp_path, [{"prompt": "p", **row}])
    assert reason in found


def test_conversations_of_sharegpt_with_one_message_each_are_a_pair() -> None:
    row = {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    }
    asked = {"role": "user", "content": "2+2?"}
    assert pair_of(row) == [[asked, {"role": "assistant", "content": answer}] for answer in ("4", "5")]
    assert pair_of({**row, "prompt": "2+2?", "messages": [asked]}) == pair_of(row)


QUESTION = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "ab")
WHOLE = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "messages": [QUESTION], "chosen": "a", "rejected": "b"}, "prompt and messages stand beside"),
        (
            {"prompt": "p", "conversations": [QUESTION], "chosen": "a", "rejected": "b"},
            "prompt and conversations stand",
        ),
        ({"prompt": "p", **WHOLE}, "prompt is neither the beginning of the chosen conversation nor all of it"),
        ({"messages": [QUESTION, BAD], **WHOLE}, "messages is neither the beginning .*data.ignore_keys=.messages."),
        ({"messages": ["q"], **WHOLE}, "messages is neither the beginning"),
        ({"prompt": "q", "messages": [QUESTION, GOOD], **WHOLE}, ""),  # UltraFeedback
        ({"prompt": "q", **{k: [{"role": "system", "content": "s"}, *v] for k, v in WHOLE.items()}}, ""),
    ],
    ids=str,
)
def test_what_stands_twice_in_a_row_is_the_same(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (found,) = pairs(tmp_path, [row])
    assert re.search(reason, found[0]) if reason else found == ("a", "b")


def test_rows_of_json_in_a_text_file_are_not_trained_on_as_text(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}) + "\n")
    data = Data(corpus="text", path=str(tmp_path / "rows.txt"), dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"its lines are JSON objects \(fields: 'text'\).*name it rows.jsonl"):
        prepare(data)
    (tmp_path / "rows.txt").write_text('{"a": 1} is JSON, and this line is not\nnor is this\n')
    prepare(data)


@pytest.mark.parametrize("corpus", ["text", "chat"])
def test_a_json_file_of_one_object_says_what_it_is(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"version": 1, "data": [{"text": "a"}]}, indent=1))
    data = Data(corpus=corpus, path=str(tmp_path / "rows.json"), template="raw", dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"is one JSON object \(its fields: 'version', 'data'\).*jq -c"):
        prepare(data)
