"""What is not there is said with what would be taken, before any weights are read."""

from __future__ import annotations

import pytest

from phalanx.cli.main import main


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("owner/model", 2, "owner/model: no such file; a model on the Hugging Face hub is hub:owner/model"),
        ("nosuch", 2, "nosuch: no such file; give one folder, or files"),
        ("empty.gguf", 4, "empty.gguf cannot be read: the file is empty"),
    ],
)
def test_an_import_of_nothing(tmp_path, monkeypatch, capsys, name, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.gguf").touch()
    assert main(["import", "hf", name, "--out", "run"]) == code
    assert said in capsys.readouterr().err
