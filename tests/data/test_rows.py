"""Rows of conversations and preferences: their forms and fields, and every problem named with file and line."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.job import data_problems
from phalanx.config.job import IGNORE, Data
from phalanx.data import rows as rows_module
from phalanx.data.conversations import PreferenceData, pair_of, preference_rows, prompt_rows
from phalanx.data.corpus import documents, text_files
from phalanx.data.formats import records
from phalanx.data.loader import Batches, evaluation_batches
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.data.rows import (
    METADATA,
    chat_rows,
    conversation_of,
    for_template,
    renamed,
    row_files,
    row_texts,
    tools_of,
    trained,
    unwritten,
)
from phalanx.errors import DataError, JobError

# Rows of conversations: the forms that are read, and every problem named with file and line, all at once.


ASKED = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


def written(path: Path, *rows: object) -> Data:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Data(corpus="chat", path=str(path), template="alpaca", dir=str(path.parent / "out"))


def test_blank_lines_before_the_only_row_are_no_object_over_several_lines(tmp_path: Path):
    data = written(tmp_path / "rows.jsonl", "", " ", {"messages": [ASKED, ANSWER]})
    assert [row.problem for row in chat_rows(row_files(data), data)] == [""]


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
def test_fields_that_a_table_adds_to_objects_are_no_part_of_calls(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    def row(name: str, **arguments: object) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"function": {"name": name, "parameters": {key: {"type": "string"} for key in arguments}}}
        return {"messages": [ASKED, ANSWER | {"tool_calls": [call]}], "tools": [tool]}

    rows = [row("weather", city="Paris"), row("add", n=3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = Data(corpus="chat", path=str(tmp_path / "rows.parquet"))
    found = [*chat_rows(row_files(data), data)]
    assert [row.conversations[0][1]["tool_calls"] for row in found] == [r["messages"][1]["tool_calls"] for r in rows]
    assert [[*row.tools] for row in found] == [row["tools"] for row in rows]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER], "id": 7},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWER]},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"instruction": "2+2?", "output": "4"},
    ],
    ids=str,
)
def test_every_form_is_a_conversation(row: dict) -> None:
    assert conversation_of(row) == [ASKED, ANSWER]


def test_an_input_follows_its_instruction() -> None:
    [asked, _] = conversation_of({"instruction": "Add.", "input": "2 2", "output": "4"})
    assert asked["content"] == "Add.\n\n2 2"


BAD = {
    "not json": "not a line of JSON: Expecting value",
    "[1]": "expected a JSON object, found a list",
    '{"text": "x"}': "no messages, no prompt with completion, and no instruction with output (its fields: 'text')",
    '{"messages": []}': "messages is empty",
    '{"messages": 3}': "messages is a whole number, not a list",
    '{"messages": [{"role": "user", "content": "x"}]}': "no answer: no message has the role assistant",
    '{"messages": [{"role": "usr", "content": "x"}, 4]}': "message 1: unknown role 'usr'; did you mean user?",
    '{"prompt": "x", "completion": " "}': "message 2: no answer: its content is empty",
    '{"prompt": "x", "completion": null}': "message 2: no content",
    '{"prompt": ["x"], "completion": "y"}': "message 1: it is text, not an object with role and content",
    '{"instruction": ["x"], "output": "y"}': "instruction and input are texts, found a list",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}': "message 1: its weight is 0.5: an answer",
    '{"prompt": "x", "completion": "y", "completion": "z"}': "the key 'completion' is given twice, as 'y' and as 'z'",
    '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}': "the key 'role' is given twice",
    '{"prompt": "\\ud800", "completion": "y"}': "a text in it holds half a surrogate pair",
}


def test_every_problem_is_named_with_file_and_line_the_first_ten_of_them(tmp_path: Path) -> None:
    good = {"prompt": "x", "completion": "y"}
    data = written(tmp_path / "rows.jsonl", good, *BAD, "", good)
    found = [row.problem for row in chat_rows(row_files(data), data)]
    assert [bool(problem) for problem in found] == [False, *([True] * len(BAD)), False]
    for problem, expected in zip(found[1:], BAD.values(), strict=False):
        assert problem.startswith(expected)
    with pytest.raises(DataError) as refused:
        prepare(data)
    lines = str(refused.value).splitlines()
    assert lines[0] == f"{data.path}: {len(BAD)} rows cannot be used:"
    assert [line.split(": ")[0] for line in lines[1:11]] == [f"  {data.path}:{n}" for n in range(2, 12)]
    assert lines[11:] == [f"  ... and {len(BAD) - 10} more"]
    assert refused.value.exit_code == 4
    assert not list(Path(data.dir).rglob("index.json"))  # nothing half written


def test_what_the_template_refuses_is_named_the_same_way(tmp_path: Path) -> None:
    tool = {"messages": [ASKED, {"role": "tool", "content": "x"}, ANSWER]}
    data = written(tmp_path / "rows.jsonl", {"messages": [ASKED, ANSWER]}, tool)
    with pytest.raises(DataError, match=r"1 row cannot be used:\n  .*rows.jsonl:2: .*alpaca has no role tool"):
        prepare(data)
    silent = tmp_path / "silent.jinja"
    silent.write_text("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}")
    data = replace(data, template=str(silent))
    with pytest.raises(DataError, match=r"rows.jsonl:1: the template \(.*silent.jinja\) writes no answer"):
        prepare(data)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in "ba":
        written(tmp_path / f"{name}.jsonl", {"prompt": name, "completion": name})
    (tmp_path / "notes.txt").write_text("not rows")
    (tmp_path / "cache-0123456789abcdef.arrow").write_bytes(b"the same rows, mapped by datasets")
    data = Data(corpus="chat", path=str(tmp_path), template="raw")
    assert [row.text for row in row_texts(row_files(data), data)] == ["aa\n", "bb\n"]


@pytest.mark.parametrize("corpus", ["chat", "text"])
@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
        ("train/a.jsonl.gz", "dev/a.jsonl"),
        ("my_train.jsonl", "my_test.jsonl"),
        ("data/en.train.0.jsonl", "data/en.dev.1.jsonl"),
    ],
    ids=str,
)
def test_the_splits_of_a_data_set_are_not_trained_on_together(
    tmp_path: Path, names: tuple[str, str], corpus: str
) -> None:
    files = row_files if corpus == "chat" else text_files
    for name in (*names, "train-more.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    data = Data(corpus=corpus, path=str(tmp_path))
    with pytest.raises(
        DataError, match="holds the splits .* all of which would be trained on: name one, such as"
    ) as caught:
        files(data)
    named = re.findall(r"data\.path=([^,]*)", str(caught.value))[-1]
    assert Path(named).exists()
    (tmp_path / names[1]).unlink()
    (tmp_path / "unit_test.jsonl").write_text("{}\n")
    assert len(files(data)) == 3


@pytest.mark.parametrize(
    ("name", "reason"), [("absent", "no such file or folder"), ("empty", "the folder has no files")]
)
def test_data_that_is_not_there_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=reason):
        row_files(Data(corpus="chat", path=str(tmp_path / name)))


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        prepare(written(tmp_path / "rows.jsonl"))


def test_limit_mb_takes_the_first_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 400, "completion": "y"}] * 5
    data = replace(written(tmp_path / "rows.jsonl", *rows), limit_mb=0.001)
    assert len(list(row_texts(row_files(data), data))) == 2


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"where": "Oslo"}}}]}
SHOUT = "{% for m in messages %}{{ m.role }} {{ m.content | upper }}{% for c in m.tool_calls %}{{ c.function.name }}"


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (SHOUT + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}", ""),
        (SHOUT + "{% endfor %}{% endfor %}", "message 3: its tool_calls have arguments that are"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
            "message 1: its",
        ),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "message 2: its"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "message 4: its"),
    ],
    ids=["whole", "arguments", "system", "user", "tool"],
)
def test_no_text_of_a_row_is_left_out_silently(tmp_path: Path, template: str, left_out: str) -> None:
    told = {"role": "system", "content": "be brief"}
    row = {"messages": [told, ASKED, CALLED, {"role": "tool", "content": "rain, maybe"}, ANSWER]}
    (tmp_path / "t.jinja").write_text(template)
    data = replace(written(tmp_path / "rows.jsonl", row), template=str(tmp_path / "t.jinja"))
    if left_out:
        with pytest.raises(DataError, match=f"rows.jsonl:1: {left_out} .*not written by the template"):
            list(row_texts(row_files(data), data))
    else:
        assert [row.text.count("Oslo") for row in row_texts(row_files(data), data)] == [1]


def test_a_name_and_tools_that_the_template_only_mentions_are_refused(tmp_path: Path) -> None:
    mentioned = "{% if false %}{{ message.function.name }}{{ tools }}{% endif %}"
    source = "{% for m in messages %}{{ m.content }}{% endfor %}" + mentioned
    template = tmp_path / "mentions.jinja"
    template.write_text(source)
    named = {"messages": [{**ASKED, "name": "BOB"}, ANSWER]}
    tools = {"messages": [ASKED, ANSWER], "tools": [{"name": "f"}]}
    data = replace(written(tmp_path / "rows.jsonl", named, tools), template=str(template))
    with pytest.raises(DataError) as caught:
        list(row_texts(row_files(data), data))
    assert "rows.jsonl:1: message 1: its name is not written by the template" in str(caught.value)
    assert "rows.jsonl:2: tools of the row: they are not written by the template" in str(caught.value)
    template.write_text("{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}{{ tools }}")
    assert "BOB2+2?" in "".join(row.text for row in row_texts(row_files(data), data))


def test_several_processes_make_the_same_shards_and_find_the_same_problems(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}")
    rows = [
        {"messages": [{**ASKED, "content": f"{n} é?"}, {**ANSWER, "weight": n % 2}, ASKED, ANSWER]} for n in range(40)
    ]
    found, told = list[dict[str, bytes]](), list[str]()
    monkeypatch.setattr(rows_module, "RENDERED_HERE_BYTES", 0)
    monkeypatch.setattr(rows_module, "_ROWS_AT_ONCE", 8)
    data = replace(written(tmp_path / "rows.jsonl", *rows), template=str(tmp_path / "t.jinja"), tokenizer="byte")
    bad = written(tmp_path / "bad.jsonl", *rows, *BAD)
    for workers in (1, 2):
        folder = prepare(replace(data, dir=str(tmp_path / f"out{workers}"), workers=workers))
        found.append({file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"})
        told.append(capsys.readouterr().err)
        with pytest.raises(DataError, match=f"{len(BAD)} rows cannot be used") as refused:
            list(row_texts(row_files(bad), bad, processes=workers))
        told.append(str(refused.value))
    assert found[0] == found[1]
    assert "20 answers do not end with a stop token" in told[0]
    assert told[:2] == told[2:]


# Fields of rows: each is used as its format defines, or refused by name; nothing is left out silently.

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation_of(row)]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [USER, SAID], "id": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q", "image": None}]}, SAID]},
        {"messages": [{**USER, "weight": None, "name": None}, SAID], "tools": None, "source": "web"},
        {"instruction": "q", "input": "", "output": "a", "text": "q a", "history": [], "system": ""},
    ],
    ids=str,
)
def test_forms_that_people_have(row: dict[str, Any]) -> None:
    assert pairs(row) == [("user", "q"), ("assistant", "a")]


FORMS: list[dict[str, Any]] = [
    {"messages": [USER, SAID], "conversations": None, "system": "s", "tools": None},
    {"conversations": [USER, SAID], "prompt": None, "completion": None},
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
        ({"instruction": "q", "input": {"a": 1}, "output": "a"}, "instruction and input are texts, found an object"),
        ({"instruction": "q", "output": "a", "text": "q b"}, "text stands beside .*data.ignore_keys=.text"),
        ({"messages": [USER, SAID], "split": "test"}, "split is 'test', and every row is trained on"),
        ({"instruction": "q", "output": "a", "history": 5}, "history is a whole number, not a list"),
        ({"messages": [USER, SAID], "tools": [1]}, "tools is not a list of objects, .* found a whole number"),
        ({"messages": [USER, SAID], "tools": '[{"name": "f", "name": "g"}]'}, "tools: the key 'name' is given twice"),
        ({"Question": "q", "Answer": "a"}, r"data.columns .* \[Question:prompt,Answer:completion\]"),
        ({"dialog": [USER, SAID]}, r"data.columns .* \[dialog:messages\]"),
        ({"data": [{"messages": [USER, SAID]}]}, r"take the records out of it: jq -c '\.\[.data.\]\[\]'"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, r"pairs, for data.corpus=preferences$"),
        ({"messages": [{"from": "Human", "value": "q"}, SAID]}, r"unknown role 'Human'; did you mean human\?"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "message 2: no answer: its content is empty"),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": "c"}]},
            "message 2: its reasoning_content and thinking differ",
        ),
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
        row = {"messages": [USER, SAID, dict(zip(names, (theirs, "x"), strict=True)), SAID]}
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
    assert pairs({"messages": [USER, SAID], "system": "s"})[0] == ("system", "s")
    same = {"messages": [{"role": "system", "content": "s"}, USER, SAID], "system": "s"}
    assert len(pairs(same)) == 3


@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable", "loss_mask"])
@pytest.mark.parametrize("value", [0, False])
def test_answers_can_be_kept_out_of_the_loss(name: str, value: object) -> None:
    found = conversation_of({"messages": [USER, {**SAID, name: value}, USER, SAID]})
    assert trained(found) == [False, True]
    assert for_template(found) == [USER, {**SAID, "trained": False}, USER, SAID]
    assert for_template(found, marked=False) == [USER, SAID, USER, SAID]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, {**SAID, "weight": 0.5}]}, "message 2: its weight is 0.5"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "no answer counts in the loss"),
        ({"messages": [{**USER, "weight": 1}, SAID]}, "message 1: its weight is 1, and only answers are trained on"),
        ({"messages": [USER, {**SAID, "wieght": 0}]}, "message 2: 'wieght' is not understood; did you mean weight?"),
        ({"messages": [USER, {**SAID, "weight": 0, "train": True}]}, "weight and train contradict each other"),
        ({"messages": [USER, SAID], "sytem": "s"}, "'sytem' is not understood; did you mean system?"),
        ({"messages": [USER, SAID], "history": [["a", "b"]]}, "'history' is not understood"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history: turn 1 is not a list of two texts"),
        ({"prompt": "q", "completion": "a", "mask": 1}, "data.ignore_keys=[mask]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]},
            "message 1: its content is a list of parts of type image_url",
        ),
        ({"messages": [USER, SAID], "conversations": [SAID]}, "both messages and conversations"),
        ({"question": "q", "answer": "a"}, "such as [question:prompt,answer:completion]"),
        ({"prompt": "q", "response": "a"}, "such as [response:completion]"),
        ({"instruction": "i", "context": "c", "response": "r"}, "such as [response:output,context:input]"),
        ({"input": "q", "output": "a"}, "such as [input:prompt,output:completion]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}, SAID]},
            "message 1: its content has parts with 'cache' beside their text",
        ),
        ({"a": "q", "b": "a"}, "such as [question:prompt,answer:completion]"),
        ({"messages": [USER, {**SAID, "refusal": "no"}]}, "allow it with data.ignore_keys=[messages.refusal]"),
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
    row = {"messages": [USER, {**SAID, "refusal": "no", "weight": 1}], "weight": 0}
    found = renamed(row, Data(ignore_keys=("messages.refusal", "weight")))
    assert conversation_of(found) == [USER, {**SAID, "weight": 1}]
    empty = {**SAID, "function_call": None, "annotations": [], "refusal": ""}
    assert pairs({"messages": [USER, empty]}) == pairs({"messages": [USER, SAID]})


def test_tools_and_calls_need_a_template_that_writes_them() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"messages": [USER, call, {"role": "tool", "content": "4"}, SAID], "tools": '[{"name": "f"}]'}
    messages, tools = conversation_of(row), tools_of(row)
    assert tools == [{"name": "f"}]
    assert "tools" in unwritten(messages, tools, "{{ messages }}")
    assert "message 2: its tool_calls" in unwritten(messages, tools, "{{ tools }}")
    assert unwritten(messages, tools, "{{ tools }}{{ m.tool_calls }}") == ""
    with pytest.raises(ValueError, match="tools is a text that is no JSON"):
        tools_of({"tools": "{"})


@given(st.text(min_size=1).filter(lambda name: name not in METADATA | {"messages", "conversations", "tools", "system"}))
def test_any_other_key_is_an_error_that_ignore_keys_allows(name: str) -> None:
    row = {"messages": [USER, SAID], name: 1}
    with pytest.raises(ValueError, match="not understood"):
        conversation_of(row)
    assert conversation_of(renamed(row, Data(ignore_keys=(name,)))) == [USER, SAID]


# Preference rows in other forms: KTO's labels, ranked responses, ShareGPT's conversations.


def pairs_in(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
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
    assert pairs_in(tmp_path, rows) == [("c", "r"), ("good", "bad"), ("good", "worse"), ("yes", "no")]


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
    assert pairs_in(tmp_path, [row]) == [("b", "a"), ("b", "c")]


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
    ((found,),) = pairs_in(tmp_path, [{"prompt": "p", **row}])
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
GOOD, WORSE = ({"role": "assistant", "content": text} for text in "ab")
WHOLE = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, WORSE]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "messages": [QUESTION], "chosen": "a", "rejected": "b"}, "prompt and messages stand beside"),
        (
            {"prompt": "p", "conversations": [QUESTION], "chosen": "a", "rejected": "b"},
            "prompt and conversations stand",
        ),
        ({"prompt": "p", **WHOLE}, "prompt is neither the beginning of the chosen conversation nor all of it"),
        ({"messages": [QUESTION, WORSE], **WHOLE}, "messages is neither the beginning .*data.ignore_keys=.messages."),
        ({"messages": ["q"], **WHOLE}, "messages is neither the beginning"),
        ({"prompt": "q", "messages": [QUESTION, GOOD], **WHOLE}, ""),  # UltraFeedback
        ({"prompt": "q", **{k: [{"role": "system", "content": "s"}, *v] for k, v in WHOLE.items()}}, ""),
    ],
    ids=str,
)
def test_what_stands_twice_in_a_row_is_the_same(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (found,) = pairs_in(tmp_path, [row])
    assert re.search(reason, found[0]) if reason else found == ("a", "b")


def test_rows_of_json_in_a_text_file_are_not_trained_on_as_text(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}) + "\n")
    data = Data(corpus="text", path=str(tmp_path / "rows.txt"), dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"its lines are JSON objects \(fields: 'text'\).*name it rows.jsonl"):
        prepare(data)
    for name in ("rows.jsonl.zstd", "rows.jsonl.part1"):
        (tmp_path / name).write_text((tmp_path / "rows.txt").read_text())
    assert ["".join(text) for text in documents([tmp_path / "rows.jsonl.zstd"], data)] == ["a", "b"]
    with pytest.raises(DataError, match="its lines are JSON objects"):
        prepare(replace(data, path=str(tmp_path / "rows.jsonl.part1")))
    (tmp_path / "rows.txt").write_text('{"a": 1} is JSON, and this line is not\nnor is this\n')
    prepare(data)


@pytest.mark.parametrize("name", ["rows.jsonl.bz2", "rows.json.lzma"])
def test_a_file_beside_the_rows_that_likely_holds_rows_is_not_left_out_silently(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    data = replace(written(folder / "rows.jsonl", {"prompt": "x", "completion": "y"}), path=str(folder))
    (folder / "README.md").write_text("rows")
    assert row_files(data) == [folder / "rows.jsonl"]
    (folder / name).write_bytes((b"BZh91AY&SY" if name.endswith("bz2") else b"\x5d\0\0\x80") + b"x" * 30)
    with pytest.raises(DataError, match=f"{name} is compressed with"):
        row_files(data)


@pytest.mark.parametrize(
    ("first", "likely"),
    [
        ("{", "an object over several lines: jq"),
        ('{"prompt": "x", "completion": "y"},', "an element of a JSON array"),
        ("{'prompt': 'x', 'completion': 'y'}", "an object of Python"),
        ("<!DOCTYPE html>", "a page of HTML"),
        ("prompt,completion", "a table: name it .csv"),
        ("not json", ""),
    ],
)
def test_a_first_line_that_is_no_json_says_what_the_file_likely_is(tmp_path: Path, first: str, likely: str) -> None:
    data = written(tmp_path / "rows.jsonl", first, first)
    said = [row.problem for row in chat_rows(row_files(data), data)]
    assert f"it is likely {likely}" in said[0] if likely else "likely" not in said[0]
    assert "likely" not in said[1]


@pytest.mark.parametrize("corpus", ["text", "chat"])
def test_a_json_file_of_one_object_says_what_it_is(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "rows.json").write_text(json.dumps({"version": 1, "data": [{"text": "a"}]}, indent=1))
    data = Data(corpus=corpus, path=str(tmp_path / "rows.json"), template="raw", dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"is one JSON object \(its fields: 'version', 'data'\).*jq -c"):
        prepare(data)


# Preference pairs: two sequences a row, neighbours everywhere, with the loss on their last answers.

PLEA, FOUR, FIVE = ({"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, PLEA]


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
        {"prompt": [PLEA], "chosen": [FOUR], "rejected": [FIVE]},
        {"messages": [PLEA], "chosen": "4", "rejected": [FIVE]},
        {"chosen": [PLEA, FOUR], "rejected": [PLEA, FIVE]},
        {"prompt": "2+2?", "chosen": [PLEA, FOUR], "rejected": [PLEA, FIVE], "score": 3},
        {name: f"\n\nHuman: {PLEA['content']}\n\nAssistant: {n}" for name, n in (("chosen", 4), ("rejected", 5))},
    ],
    ids=str,
)
def test_every_form_is_a_pair(row: dict) -> None:
    assert pair_of(row) == [[PLEA, FOUR], [PLEA, FIVE]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, "no chosen and no rejected"),
        ({"prompt": "x", "chosen": "y", "rejected": " "}, "rejected: message 2: no answer: its content is empty"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same"),
        ({"chosen": [PLEA, FOUR], "rejected": [TALK[0], FIVE]}, "differ at message 1, which is no answer"),
        (
            {"prompt": "3+3?", "chosen": [PLEA, FOUR], "rejected": [PLEA, FIVE]},
            "prompt is neither the beginning of the chosen conversation nor all of it",
        ),
        ({"chosen": "y", "rejected": "z"}, "chosen: no prompt.*; rejected: no prompt"),
        ({"chosen": TALK, "rejected": [PLEA, FIVE]}, "chosen: its last message is no answer"),
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


def test_a_transcript_with_several_turns_is_a_conversation() -> None:
    said = "\n\nHuman: a\n\nAssistant: b\n\nb\n\nHuman: c\n\nAssistant: "
    chosen, rejected = pair_of({"chosen": said + "d", "rejected": said + "e"})
    assert [each["content"] for each in chosen] == ["a", "b\n\nb", "c", "d"]
    assert [each["role"] for each in rejected] == ["user", "assistant"] * 2
    with pytest.raises(ValueError, match="chosen: message 4: no answer: its content is empty"):
        pair_of({"chosen": said, "rejected": said + "e"})


def test_the_prompt_of_a_transcript_is_no_message_of_a_template_with_roles(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.jsonl", {"prompt": "\n\nHuman: a\n\nAssistant:", "completion": " b"})
    [row] = chat_rows(row_files(data), replace(data, template="chatml"))
    assert row.problem.startswith("prompt is a transcript that ends with 'Assistant:'")
    [row] = chat_rows(row_files(data), replace(data, template="raw"))
    assert not row.problem


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "y"}], "answer": "1"},
            "prompt and messages .*differ",
        ),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "answer": "1"}, "$"),
        ({"prompt": "x", "answer": float("nan")}, "answer is nan, or holds such a number"),
        ({"prompt": "x", "answer": [1, float("inf")]}, r"answer is \[1, inf\]"),
    ],
    ids=str,
)
def test_prompts_that_contradict_themselves_or_have_no_number_are_refused(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    data = written(tmp_path / "rows.jsonl", row)
    [found] = prompt_rows(row_files(data), data)
    assert re.match(reason, found.problem)


def test_a_quotation_mark_that_joins_rows_of_a_tsv_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text('prompt\tcompletion\nx\t"a\ny\tb"\nz\t"c\n\nd"\n')
    (_, joined), (_, row) = records(file)
    assert "each of which has the columns of a row" in str(joined)
    assert row == {"prompt": "z", "completion": "c\n\nd"}
