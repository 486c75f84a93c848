"""`phalanx data prepare` says what it made, to people and to programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data.inspect import prepare_and_report
from phalanx.errors import DataError


def test_json_is_one_document(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_and_report(data, 16, force=False, verify=True, as_json=True) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["path"].startswith(data.dir + "/text-char-")
    assert told["splits"]["train"]["tokens"] + told["splits"]["val"]["tokens"] == told["characters"]
    assert told["splits"]["val"]["bytes"] == 2 * told["splits"]["val"]["tokens"]
    assert told["begins"] == ("poem 0\n" + "the sea, the sea; " * 13)[:60]
    assert told["verified"] is True
    assert "tokenizing: 100%" in err


def test_text(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=False, as_json=False)
    out = capsys.readouterr().out
    assert re.search(r"^train: [\d,]+ tokens  shards: \d+  bytes: [\d,]+$", out, re.MULTILINE)
    assert r"begins: 'poem 0\nthe sea" in out
    assert "dtype: uint16" in out


def test_verify_finds_a_flipped_bit_and_force_repairs_it(data: Data, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    shard = Path(json.loads(capsys.readouterr().out)["path"]) / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 4
    shard.write_bytes(content)
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    with pytest.raises(DataError, match=r"train-00000\.bin: expected sha256 .* phalanx data prepare --force"):
        prepare_and_report(data, 16, force=False, verify=True, as_json=True)
    prepare_and_report(data, 16, force=True, verify=True, as_json=True)


def test_stopping_says_how_to_go_on(
    data: Data, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object, **options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.data.inspect.prepare", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    assert "finished shards are kept" in capsys.readouterr().err


def test_of_conversations_it_says_what_samples_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q" * (n % 5 + 1), "completion": "a" * 4} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out")
    data = Data(corpus="chat", path=path, template="raw", dir=out, packing=True, document_mask=True, val_fraction=0.25)
    prepare_and_report(data, 16, force=False, verify=True, as_json=False)
    printed = capsys.readouterr().out
    assert f"corpus: {path}  rows: 20  characters: 160" in printed
    # Fifteen prompts of 1 to 5, answers of 5 with the newline, the last token only a target.
    line = "conversations: 15  samples: 7  truncated: 0  dropped: 0  used: 93.8% of positions  counted: 71.4% of used"
    assert line in printed
    prepare_and_report(data, 16, force=False, verify=False, as_json=True)
    train = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert (train["used"], train["counted"], train["positions"]) == (105, 75, 112)
    assert train["efficiency"] == 105 / 112
