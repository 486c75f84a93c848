"""`phalanx data inspect`: what a file is, how it would be read, and what of it is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

CHAT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": 3}


@pytest.mark.parametrize(
    ("name", "content", "corpus", "form"),
    [
        ("a.json", json.dumps([CHAT]), "chat", "a JSON array"),
        ("a.jsonl", json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}), "preferences", "JSON lines"),
        ("a.csv", "text,id\nsome words,1\n", "text", "CSV"),
        ("a.txt", "some words", "text", "text"),
    ],
)
def test_a_file_is_known(tmp_path: Path, capsys, name: str, content: str, corpus: str, form: str) -> None:
    (tmp_path / name).write_text(content)
    assert main(["data", "inspect", str(tmp_path / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["corpus"], found["form"]) == (corpus, form)
    trained = "".join(part["text"] for part in found["sample"] if part["trained"])
    assert trained.startswith({"chat": "hello", "preferences": "a", "text": "some words"}[corpus])
    assert "hi" not in trained


def test_a_folder_shows_its_first_file_and_answers_are_marked(tmp_path: Path, capsys) -> None:
    (tmp_path / "b.jsonl").write_text("not read")
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    assert main(["data", "inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a.jsonl" in out
    assert "«hello<|im_end|>" in out


def test_rows_that_cannot_be_used_are_listed_with_the_exit_code_of_prepare(tmp_path: Path, capsys) -> None:
    kto = {"prompt": "q", "completion": "bad", "label": False}
    (tmp_path / "a.jsonl").write_text(json.dumps(kto) + "\n" + json.dumps({"question": "q"}) + "\n")
    assert main(["data", "inspect", str(tmp_path / "a.jsonl")]) == 4
    out = capsys.readouterr().out
    assert "2 rows cannot be used" in out
    assert "'label' is that of KTO" in out
    assert "ignore_keys" not in out  # it would train the answers that are marked as bad
