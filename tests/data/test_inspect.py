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
    assert "its prompt has only answers with label false" in out
    assert "ignore_keys" not in out  # it would train the answers that are marked as bad


def test_a_job_file_shows_what_it_draws_of_each_source(tmp_path: Path, capsys) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 300)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{seq_len: 16}}\ndata:\n  dir: {tmp_path}/data\n  mix:\n    - {{path: {tmp_path}/a.txt, weight: 3}}\n"
        f"    - {{path: {tmp_path}/b.txt, weight: 1, epochs: 1}}\ntrain: {{steps: 40, global_batch: 20}}\n"
    )
    assert main(["data", "inspect", str(job)]) == 0
    assert "a.txt (text): 75.00% of the samples: 600, not prepared yet" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "prepare", str(job)]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(job), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert [source["samples"] for source in found["sources"]] == [600, 200]
    assert found["sources"][1]["epochs"] == pytest.approx(200 / 118)
    assert "epochs is 1" in found["problems"][0]


def test_a_job_says_how_its_rows_are_read(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "q", "say": "a", "why": "x"}))
    job = tmp_path / "job.yaml"
    chat = "corpus: chat, template: chatml, columns: [ask:prompt, say:completion], ignore_keys: [why]"
    for settings in (chat, "corpus: text, text_field: say"):
        job.write_text(f"data: {{path: {tmp_path}/a.jsonl, {settings}}}\n")
        assert main(["data", "inspect", str(job)]) == 0
        assert "«a" in capsys.readouterr().out


def test_a_template_that_is_not_there_is_bad_usage(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    assert main(["data", "inspect", str(tmp_path / "a.jsonl"), "--template", "chatlm"]) == 2
    assert "did you mean chatml?" in capsys.readouterr().err
