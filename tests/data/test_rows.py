"""Rows of conversations: the forms that are read, and every problem named with file and line, all at once."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data.corpus import text_files
from phalanx.data.prepare import prepare
from phalanx.data.rows import chat_rows, conversation_of, row_files, row_texts
from phalanx.errors import DataError

ASKED = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


def written(path: Path, *rows: object) -> Data:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Data(corpus="chat", path=str(path), template="alpaca", dir=str(path.parent / "out"))


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
    "[1]": "expected a JSON object, found list",
    '{"text": "x"}': "no messages, no prompt with completion, and no instruction with output (its fields: 'text')",
    '{"messages": []}': "messages is empty",
    '{"messages": 3}': "messages is int, not a list",
    '{"messages": [{"role": "user", "content": "x"}]}': "no answer: no message has the role assistant",
    '{"messages": [{"role": "usr", "content": "x"}, 4]}': "message 1: unknown role 'usr'; did you mean user?",
    '{"prompt": "x", "completion": " "}': "message 2: no answer: its content is empty",
    '{"prompt": "x", "completion": null}': "message 2: no content",
    '{"prompt": ["x"], "completion": "y"}': "message 1: it is str, not an object with role and content",
    '{"instruction": ["x"], "output": "y"}': "instruction and input are texts, found list",
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
    data = Data(corpus="chat", path=str(tmp_path), template="raw")
    assert [row.text for row in row_texts(row_files(data), data)] == ["aa\n", "bb\n"]


@pytest.mark.parametrize("corpus", ["chat", "text"])
@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
        ("train/a.jsonl.gz", "dev/a.jsonl"),
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
    assert len(files(data)) == 2


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
