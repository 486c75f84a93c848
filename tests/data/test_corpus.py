"""Corpora: order, separators, limits, cuts, and errors that name file and line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Data
from phalanx.data import corpus
from phalanx.data.corpus import Segment, scan, segments, sources, stamp
from phalanx.errors import DataError


def read(path: Path, **settings: object) -> list[Segment]:
    data = Data(corpus="text", path=str(path), **settings)  # pyright: ignore[reportArgumentType]
    return list(segments(sources(data), data))


def test_a_folder_is_read_in_order_with_separators_between_documents(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.md").write_text("second")
    (tmp_path / "a.txt").write_text("first\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": "third"}\n\n{"text": ""}\n{"text": "fourth é"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("no")
    assert read(tmp_path) == [
        Segment("first\r\n", False),
        Segment("third", True),
        Segment("fourth é", True),
        Segment("second", True),
    ]


def test_text_field(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"story": "a", "text": 1}\n{"story": "b"}')
    assert [s.text for s in read(tmp_path / "x.jsonl", text_field="story")] == ["a", "b"]


def test_scan_measures_everything(tmp_path: Path) -> None:
    parts = [Segment("aé", False), Segment("b", False), Segment("aa", True)]
    found = scan(parts)
    assert (found.documents, found.characters, found.bytes) == (2, 6, 6)
    assert found.sha256 == hashlib.sha256("aéb".encode() + b"\xff" + b"aa").hexdigest()
    assert {chr(c): int(found.counts[c]) for c in np.flatnonzero(found.counts)} == {"a": 3, "b": 1, "é": 1}


@given(text=st.text("ab\né", max_size=60), reads=st.integers(1, 9), limit=st.integers(1, 12))
def test_cuts_depend_on_the_text_alone(text: str, reads: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SEGMENT_CHARACTERS", limit)
        pieces = list(corpus._cut(text[i : i + reads] for i in range(0, len(text), reads)))
        assert pieces == list(corpus._cut([text]))
    assert "".join(pieces) == text
    for piece in pieces[:-1]:
        assert 0 < len(piece) <= limit
        assert piece.endswith("\n") or ("\n" not in piece and len(piece) == limit)


def test_a_long_file_is_cut_without_new_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SEGMENT_CHARACTERS", 7)
    monkeypatch.setattr(corpus, "READ_BYTES", 3)
    (tmp_path / "1.txt").write_text("ab\ncdé\nf")
    (tmp_path / "2.txt").write_text("g")
    assert read(tmp_path) == [Segment("ab\ncdé\n", False), Segment("f", False), Segment("g", True)]


@given(limit=st.integers(1, 30))
def test_limit_counts_bytes_and_cuts_no_character(limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("limit")
    (folder / "1.txt").write_text("aéb€")
    (folder / "2.txt").write_text("ééé")
    texts = [s.text for s in read(folder, limit_mb=limit / 1e6)]
    whole = "aéb€ééé"
    assert "".join(texts) == whole.encode()[:limit].decode(errors="ignore")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"one\ntwo\nth\xe9ree\n", r"x\.txt:3: byte 0xe9 is not UTF-8"),
        ("x.txt", b"one\n\xc3", r"x\.txt:2: byte 0xc3 is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl:2: not a line of JSON"),
        (
            "x.jsonl",
            b'{"text": "a"}\n\n["a"]\n',
            r"x\.jsonl:3: expected a JSON object with the field 'text', found",
        ),
        ("x.jsonl", b'{"txt": "a", "id": 1}\n', r"x\.jsonl:1: no field 'text' \(its fields: 'txt', 'id'\)"),
        ("x.jsonl", b'{"a": 1, "a": 2, "text": "x", "text": ""}\n', r"x\.jsonl:1: the key 'text' is given twice"),
        ("x.jsonl", b'{"text": 5}\n', r"x\.jsonl:1: the field 'text' holds int, not text"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r"x\.jsonl:1: .* half a surrogate pair"),
        ("x.jsonl", b'{"text": "\xff"}\n', r"x\.jsonl:1: byte 0xff is not UTF-8"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl: nested deeper than"),
    ],
)
def test_bad_text_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_the_line_of_bad_utf8_is_right_across_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "READ_BYTES", 5)
    (tmp_path / "x.txt").write_bytes("aé\nbbbb\né\n".encode() + b"ok\n\xc3(")
    with pytest.raises(DataError, match=r"x\.txt:5: byte 0xc3"):
        read(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*nowhere: there is no such file or folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"none of its 1 files is text; .* \.jsonl .* \.txt"):
        read(tmp_path)


def test_stdlib_is_the_library_without_tests_and_machine_paths() -> None:
    files = sources(Data())
    assert files == sources(Data())
    names = {file.name for file in files}
    assert {"topics.py", "argparse.py", "_pydecimal.py"} <= names
    assert len(files) > 300
    assert not [f for f in files if {"site-packages", "test", "tests", "idle_test"} & set(f.parts)]
    assert not [n for n in names if n.startswith("_sysconfigdata")]
    assert [f.name for f in files] != sorted(f.name for f in files)


def test_stdlib_limit_reads_only_what_it_needs() -> None:
    data = Data(limit_mb=0.1)
    assert scan(segments(sources(data), data)).bytes == 100_000


def test_stamp_changes_with_the_files(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("a")
    before = stamp([file])
    assert stamp([file]) == before
    file.write_text(json.dumps("longer"))
    assert stamp([file]) != before
