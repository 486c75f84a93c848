"""Fields of rows: each is used as its format defines, or refused by name; nothing is left out silently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Data
from phalanx.data.rows import METADATA, conversation_of, for_template, renamed, tools_of, trained, unwritten

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation_of(row)]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [USER, ANSWER], "id": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        {"messages": [{**USER, "weight": None, "name": None}, ANSWER], "tools": None, "source": "web"},
        {"instruction": "q", "input": "", "output": "a", "text": "q a", "history": [], "system": ""},
    ],
    ids=str,
)
def test_forms_that_people_have(row: dict[str, Any]) -> None:
    assert pairs(row) == [("user", "q"), ("assistant", "a")]


FORMS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER], "conversations": None, "system": "s", "tools": None},
    {"conversations": [USER, ANSWER], "prompt": None, "completion": None},
    {"prompt": "q", "completion": "a", "history": [["h", "i"]], "messages": None, "instruction": None, "output": None},
    {"instruction": "q", "input": "c", "output": "a", "history": None, "system": None, "text": None, "prompt": None},
]
"""Rows of every form, with columns of the others that hold nothing, as tables of several data sets have them."""


@pytest.mark.parametrize("row", FORMS, ids=lambda row: next(iter(row)))
def test_no_value_of_another_kind_is_dropped_silently(row: dict[str, Any]) -> None:
    assert pairs(row)[-1] == ("assistant", "a")
    for name in row:
        for value in (7, True, 0.5, {"MARK": 1}, ["MARK"], [["MARK", 1]], [{"MARK": "x"}], "MARK"):
            changed = {**row, name: value}
            try:
                found = str(conversation_of(changed)) + str(tools_of(changed))
            except ValueError:
                continue
            assert "MARK" in found, (name, value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "q", "input": {"a": 1}, "output": "a"}, "instruction and input are texts, found dict"),
        ({"instruction": "q", "output": "a", "text": "q b"}, "text stands beside .*data.ignore_keys=.text"),
        ({"instruction": "q", "output": "a", "history": 5}, "history is int, not a list"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "tools is not a list of objects, .* found int"),
        ({"messages": [USER, ANSWER], "tools": '[{"name": "f", "name": "g"}]'}, "tools: the key 'name' is given twice"),
        ({"Question": "q", "Answer": "a"}, r"data.columns .* \[Question:prompt,Answer:completion\]"),
    ],
    ids=str,
)
def test_what_is_not_understood_says_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversation_of({**row, "tools": tools_of(row)})


@pytest.mark.parametrize(
    ("theirs", "ours"), [("human", "user"), ("gpt", "assistant"), ("ipython", "tool"), ("bot", "assistant")]
)
def test_roles_of_other_programs_mean_the_same_under_either_name(theirs: str, ours: str) -> None:
    for names in (("role", "content"), ("from", "value")):
        row = {"messages": [USER, ANSWER, dict(zip(names, (theirs, "x"), strict=True)), ANSWER]}
        assert pairs(row)[2] == (ours, "x")


def test_system_and_history_come_first() -> None:
    row = {
        "instruction": "say it",
        "input": "",
        "output": "arr",
        "system": "Be a pirate.",
        "history": [["hi", "hello"]],
    }
    expected = [("system", "Be a pirate."), ("user", "hi"), ("assistant", "hello"), ("user", "say it")]
    assert pairs(row) == [*expected, ("assistant", "arr")]
    assert pairs({"messages": [USER, ANSWER], "system": "s"})[0] == ("system", "s")
    same = {"messages": [{"role": "system", "content": "s"}, USER, ANSWER], "system": "s"}
    assert len(pairs(same)) == 3


@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable", "loss_mask"])
@pytest.mark.parametrize("value", [0, False])
def test_answers_can_be_kept_out_of_the_loss(name: str, value: object) -> None:
    found = conversation_of({"messages": [USER, {**ANSWER, name: value}, USER, ANSWER]})
    assert trained(found) == [False, True]
    assert for_template(found) == [USER, {**ANSWER, "trained": False}, USER, ANSWER]
    assert for_template(found, marked=False) == [USER, ANSWER, USER, ANSWER]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "message 2: its weight is 0.5"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no answer counts in the loss"),
        ({"messages": [{**USER, "weight": 1}, ANSWER]}, "message 1: its weight is 1, and only answers are trained on"),
        ({"messages": [USER, {**ANSWER, "wieght": 0}]}, "message 2: 'wieght' is not understood; did you mean weight?"),
        ({"messages": [USER, {**ANSWER, "weight": 0, "train": True}]}, "weight and train contradict each other"),
        ({"messages": [USER, ANSWER], "sytem": "s"}, "'sytem' is not understood; did you mean system?"),
        ({"messages": [USER, ANSWER], "history": [["a", "b"]]}, "'history' is not understood"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history: turn 1 is not a list of two texts"),
        ({"prompt": "q", "completion": "a", "mask": 1}, "data.ignore_keys=[mask]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "message 1: its content is a list of parts of type image_url",
        ),
        ({"messages": [USER, ANSWER], "conversations": [ANSWER]}, "both messages and conversations"),
        ({"question": "q", "answer": "a"}, "such as [question:prompt,answer:completion]"),
        ({"prompt": "q", "response": "a"}, "such as [response:completion]"),
        ({"instruction": "i", "context": "c", "response": "r"}, "such as [response:output,context:input]"),
        ({"input": "q", "output": "a"}, "such as [input:prompt,output:completion]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}, ANSWER]},
            "message 1: its content has parts with 'cache' beside their text",
        ),
        ({"a": "q", "b": "a"}, "such as [question:prompt,answer:completion]"),
        ({"messages": [USER, {**ANSWER, "refusal": "no"}]}, "allow it with data.ignore_keys=[messages.refusal]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_understood_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        conversation_of(row)
    assert message in str(caught.value)


def test_columns_are_renamed_and_keys_ignored() -> None:
    data = Data(columns=("question:prompt", "answer:completion"), ignore_keys=("mask",))
    row = renamed({"question": "q", "answer": "a", "mask": 1}, data)
    assert pairs(row) == [("user", "q"), ("assistant", "a")]
    with pytest.raises(ValueError, match="no field 'question' of data.columns"):
        renamed({"q": 1}, data)
    with pytest.raises(ValueError, match="has a field 'prompt', too"):
        renamed({"question": "q", "prompt": "p", "answer": "a"}, data)


def test_a_key_of_messages_is_ignored_by_its_own_name_and_says_nothing_if_it_is_empty() -> None:
    row = {"messages": [USER, {**ANSWER, "refusal": "no", "weight": 1}], "weight": 0}
    found = renamed(row, Data(ignore_keys=("messages.refusal", "weight")))
    assert conversation_of(found) == [USER, {**ANSWER, "weight": 1}]
    empty = {**ANSWER, "function_call": None, "annotations": [], "refusal": ""}
    assert pairs({"messages": [USER, empty]}) == pairs({"messages": [USER, ANSWER]})


def test_tools_and_calls_need_a_template_that_writes_them() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "4"}, ANSWER], "tools": '[{"name": "f"}]'}
    messages, tools = conversation_of(row), tools_of(row)
    assert tools == [{"name": "f"}]
    assert "tools" in unwritten(messages, tools, "{{ messages }}")
    assert "message 2: its tool_calls" in unwritten(messages, tools, "{{ tools }}")
    assert unwritten(messages, tools, "{{ tools }}{{ m.tool_calls }}") == ""
    with pytest.raises(ValueError, match="tools is a text that is no JSON"):
        tools_of({"tools": "{"})


@given(st.text(min_size=1).filter(lambda name: name not in METADATA | {"messages", "conversations", "tools", "system"}))
def test_any_other_key_is_an_error_that_ignore_keys_allows(name: str) -> None:
    row = {"messages": [USER, ANSWER], name: 1}
    with pytest.raises(ValueError, match="not understood"):
        conversation_of(row)
    assert conversation_of(renamed(row, Data(ignore_keys=(name,)))) == [USER, ANSWER]
