"""Forms of data files: the same rows whatever they are written as, and a foreign file named as what it is."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
from pathlib import Path

import pytest

from phalanx.config.job import Data
from phalanx.data.corpus import segments, text_files
from phalanx.data.formats import form_of, records
from phalanx.errors import DataError, JobError, NotFoundError

ROWS = [{"text": "one, two"}, {"text": "three\nfour"}, {"text": "fünf"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def texts(path: Path) -> list[str]:
    data = Data(corpus="text", path=str(path))
    return [segment.text for segment in segments(text_files(data), data)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES.encode()),
        ("a.json", LINES.encode()),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("a.jsonl.gz", gzip.compress(LINES.encode())),
        ("a.jsonl", gzip.compress(LINES.encode())),  # by its bytes, whatever its name
        ("a.json.xz", lzma.compress(json.dumps(ROWS).encode())),
        ("a.csv", 'id,text\n1,"one, two"\n2,"three\nfour"\n3,fünf\n'.encode()),
        ("a.tsv", 'text\tid\none, two\t1\n"three\nfour"\t2\nfünf\t3\n'.encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_same_texts_in_every_form(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == [row["text"] for row in ROWS]
    if ".json." not in f"{name}.":  # beside a text, .json is usually a setting
        assert texts(tmp_path) == [row["text"] for row in ROWS]


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="pyarrow is not installed")
def test_tables_of_arrow(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    saved = tmp_path / "saved"  # as datasets.save_to_disk writes it
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (saved / "dataset_info.json").write_text("{}")
    name = str(saved / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(name, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for path in (tmp_path / "a.parquet", tmp_path / "file.arrow", saved):
        assert texts(path) == [row["text"] for row in ROWS]
    twice = pyarrow.table([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="the column 'text' is there twice"):
        texts(tmp_path / "twice.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1\x15\x04\x80", "Parquet file"),
        ("a.txt", b"PAR1\x15\x04\x80", "Parquet file"),
        ("a.jsonl.gz", gzip.compress(LINES.encode())[:-9], "damaged or cut"),
        ("a.json", b'[{"text": "x"}', "it begins as a JSON array and is none"),
        ("a.json", b'[{"text": "x", "text": "y"}]', "a.json: the key 'text' is given twice, as 'x' and as 'y'"),
        ("a.json", b"[1]", "record 1: expected a JSON object, found int"),
        ("a.csv", b"id,name\n1,x\n", "no field 'text' (its fields: 'id', 'name'); set data.text_field"),
        ("a.csv", b"text,text\n1,x\n", "must name every column once"),
        ("a.csv", b"id,text\n1\n", "1 columns, where the header names 2"),
        ("a.txt", "naïve".encode("latin-1"), "likely Windows-1252 or Latin-1: iconv -f WINDOWS-1252 -t UTF-8"),
        ("a.txt", "text".encode("utf-16"), "likely UTF-16: iconv -f UTF-16 -t UTF-8"),
        ("a.txt", b"\x7fELF\x00\x01\xff", "is a program"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, JobError)) as caught:
        texts(tmp_path / name)
    assert message in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("zstandard") is not None, reason="the reader of zstd is installed")
def test_a_compression_without_a_reader_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x88")
    with pytest.raises(JobError, match="compressed with zstd: pip install 'phalanx\\[formats\\]'"):
        form_of(tmp_path / "a.jsonl.zst")


def test_a_path_that_is_mistyped_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("x")
    with pytest.raises(NotFoundError, match=r"did you mean .*book\.txt") as caught:
        texts(tmp_path / "bok.txt")
    assert caught.value.exit_code == 2


def test_places_are_lines_or_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + LINES)
    assert [where.rpartition(":")[2] for where, _ in records(tmp_path / "a.jsonl")] == ["2", "3", "4"]


def test_a_damaged_block_of_gzip_is_named_and_a_long_cell_is_read(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINES.encode()))
    packed[10:30] = b"\xff" * 20  # no block of deflate begins so
    for name in ("a.jsonl.gz", "a.csv.gz", "a.txt.gz"):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(DataError, match="damaged or cut"):
            texts(tmp_path / name)
    (tmp_path / "long.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert texts(tmp_path / "long.csv") == ["x" * 200_000]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"PK\x03\x04" + b"a" * 50, "is a ZIP archive"),
        ("a.txt", b"%PDF-1.4 text", "is a PDF: pdftotext"),
        ("a.jsonl", b"BZh91AY&SY", "is compressed with bzip2"),
        ("a.txt", b"a" * 257 + b"ustar" + b"a" * 99, "is a tar archive"),
        ("a.txt", "hello world".encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("a.txt", "hello world".encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("a.txt", b"\0\0ab\0\0cd" * 9, "is not text"),
        ("a.csv", b"text;id\na;1\n", "here it is likely ';'"),
    ],
)
def test_what_holds_no_text_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(records(tmp_path / name))
    assert said in str(caught.value)
