"""Corpora and the files that they are read from."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import struct
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.main import main
from phalanx.config.job import Data, MixSource
from phalanx.data import corpus
from phalanx.data.corpus import Segment, find_shakespeare, scan, segments, sources, stamp, text_files
from phalanx.data.files import locked, write_atomic
from phalanx.data.formats import form_of, pair_of, records
from phalanx.data.index import open_shards, read_index
from phalanx.data.megatron import open_megatron
from phalanx.data.mixture import MixedData, open_split
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import DataError, JobError, NotFoundError
from phalanx.evaluate.text import ScoredText, read_text

# Corpora: order, separators, limits, cuts, and errors that name file and line.


def read(path: Path, **settings: object) -> list[Segment]:
    data = Data(corpus="text", path=str(path), **settings)
    return list(segments(sources(data), data))


def test_a_folder_is_read_in_order_with_separators_between_documents(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.md").write_text("second")
    (tmp_path / "a.txt").write_text("\ufefffirst\r\n")
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
        ("x.jsonl", b'{"text": 5}\n', r"x\.jsonl:1: the field 'text' holds a whole number, not text"),
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


# Forms of data files: the same rows whatever they are written as, and a foreign file named as what it is.

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
        ("a.json", b"[1]", "record 1: expected a JSON object, found a whole number"),
        ("a.csv", b"id,name\n1,x\n", "no field 'text' (its fields: 'id', 'name'); name it with data.text_field"),
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
        ("a.parquet", b"<html>not found</html>", "is no Parquet file"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
        ("a.jsonl", b"\x80\x04\x95" + b"a" * 50, "is a pickle of Python"),
        ("a.csv", b"\xd0\xcf\x11\xe0" + b"a" * 50, "is an old Office file"),
    ],
)
def test_what_holds_no_text_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(records(tmp_path / name))
    assert said in str(caught.value)


# Files are whole or absent; the lock lets one in at a time and never outlives its holder.


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"old")
    write_atomic(tmp_path / "x", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"new")]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "x", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    waits: list[str] = []
    inside = threading.Event()
    order: list[str] = []

    def waiting(pid: str) -> None:
        waits.append(pid)
        inside.set()

    def second() -> None:
        with locked(tmp_path / "lock", waiting):
            order.append("second")

    with locked(tmp_path / "lock", waits.append):
        thread = threading.Thread(target=second)
        thread.start()
        assert inside.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert len(waits) == 1
    assert waits[0].isdigit()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib; from phalanx.data.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), print): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
    waits: list[str] = []
    with locked(tmp_path / "lock", waits.append):
        assert not waits


# Tiny Shakespeare is found or downloaded, and nothing else passes for it.


def test_a_local_copy_is_checked(shakespeare: Path, tmp_path: Path) -> None:
    assert find_shakespeare(str(shakespeare), tmp_path) == shakespeare
    other = tmp_path / "other.txt"
    other.write_bytes(shakespeare.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match=r"other\.txt is not tiny Shakespeare: expected 1,115,394 bytes with sha256"):
        find_shakespeare(str(other), tmp_path)


def test_a_missing_copy_is_not_downloaded_instead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=nowhere\.txt: there is no such file"):
        find_shakespeare("nowhere.txt", tmp_path)


def test_download_is_kept(shakespeare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append((url, timeout))
        return io.BytesIO(shakespeare.read_bytes())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    first = find_shakespeare("", tmp_path)
    assert first == tmp_path / "downloads" / "tinyshakespeare.txt" == find_shakespeare("", tmp_path)
    assert first.read_bytes() == shakespeare.read_bytes()
    [(url, timeout)] = asked
    assert url.startswith("https://")
    assert timeout > 0


def test_a_wrong_download_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>log in first</html>"))
    with pytest.raises(DataError, match="is not tiny Shakespeare"):
        find_shakespeare("", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(DataError, match=r"Name or service not known.*set data\.path.*data\.corpus=stdlib"):
        find_shakespeare("", tmp_path)


# Megatron's indexed data sets: read where they lie, as they are, and refused where they are not whole.

LENGTHS = np.arange(5, 45)
TOKENS = (np.arange(LENGTHS.sum()) * 7 % 256).astype(np.int64)


def write(folder: Path, *, version: int = 1, code: int = 8, dtype: str = "<u2", tokens: np.ndarray = TOKENS) -> Path:
    content = tokens.astype(dtype)
    (folder / "set.bin").write_bytes(content.tobytes())
    starts = LENGTHS.cumsum() - LENGTHS
    parts = [LENGTHS.astype("<i4"), (starts * content.itemsize).astype("<i8"), np.arange(41, dtype="<i8")]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, LENGTHS.size, 41)
    (folder / "set.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return folder / "set"


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(corpus="text", path=str(write(tmp_path)), tokenizer="byte", dir=str(tmp_path / "data"))


@pytest.mark.parametrize(("version", "code", "dtype"), [(1, 8, "<u2"), (2, 4, "<i4"), (1, 5, "<i8"), (1, 1, "u1")])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_tokens_are_read_where_they_lie(tmp_path, data, version, code, dtype, ending):
    write(tmp_path, version=version, code=code, dtype=dtype)
    data = replace(data, path=data.path + ending)
    folder = prepare(data)
    assert not list(folder.glob("*.bin"))
    index = open_shards(folder, verify=True)
    cut = int(len(TOKENS) * 0.9)
    assert (index.tokens("train"), index.tokens("val")) == (cut, len(TOKENS) - cut)
    for split, expected in (("train", TOKENS[:cut]), ("val", TOKENS[cut:])):
        found = open_split(folder, split, 8, data)
        assert (found.read(0, found.tokens) == expected).all()
        micro = found.micro_batch(np.array([1]), np.array([0]))
        assert micro.tokens.tolist() == [expected[8:16].tolist()]
        assert micro.targets.tolist() == [expected[9:17].tolist()]
        assert (read_text(data, ByteTokenizer(), split, 8).tokens == expected).all()


def test_documents_are_those_of_the_index(data):
    data = replace(data, document_mask=True)
    folder = prepare(data)
    of_token = np.repeat(np.arange(LENGTHS.size), LENGTHS)
    for split, first in (("train", 0), ("val", int(len(TOKENS) * 0.9))):
        found = open_split(folder, split, 16, data)
        ids = np.arange(found.sample_count)
        expected = np.array([of_token[first + i * 16 : first + (i + 1) * 16] for i in ids])
        micro = found.micro_batch(ids, ids)
        assert micro.documents is not None
        assert (micro.documents == expected - expected[:, :1]).all()
        scored = read_text(data, ByteTokenizer(), split, 16)
        assert isinstance(scored, ScoredText)
        assert scored.documents is not None
        assert (np.diff(scored.documents) == np.diff(of_token[first : first + len(scored.tokens)])).all()


def test_a_data_set_is_a_source_of_a_mixture(tmp_path, data):
    (tmp_path / "a.txt").write_text("plain text. " * 100)
    sources = (MixSource(str(tmp_path / "a.txt"), 1), MixSource(data.path, 3))
    mixed = Data(corpus="mix", mix=sources, tokenizer="byte", dir=data.dir)
    found = open_split(prepare(mixed), "train", 8, mixed)
    assert isinstance(found, MixedData)
    assert list(found.source_tokens(400, 0).values()) == [800, 2400]
    assert found.sources[1].tokens == int(len(TOKENS) * 0.9)
    with pytest.raises(JobError, match="data.tokenizer=char is made of a text, and .*set holds tokens of another"):
        prepare(replace(mixed, tokenizer="char"))


def test_what_does_not_fit_the_tokenizer_or_the_settings_is_refused(tmp_path, data):
    with pytest.raises(JobError, match="set data.tokenizer to its tokenizer.json"):
        prepare(replace(data, tokenizer="bpe"))
    with pytest.raises(JobError, match="limits text"):
        prepare(replace(data, limit_mb=1.0))
    write(tmp_path, tokens=TOKENS + 1)
    with pytest.raises(DataError, match=r"holds token 256, expected 0 to 255 \(the vocabulary of data.tokenizer\)"):
        prepare(data)
    write(tmp_path, code=3, dtype="<i2", tokens=TOKENS - 1)
    with pytest.raises(DataError, match="holds token 65535, expected"):
        prepare(data)


def test_what_is_damaged_is_refused(tmp_path, data):
    stem = write(tmp_path)
    (tmp_path / "set.bin").write_bytes(b"\0" * 12)
    with pytest.raises(DataError, match="by its index, found 12: the file is truncated"):
        open_megatron(str(stem))
    for options, message in (({"version": 3}, "version 3"), ({"code": 6}, "dtype code 6")):
        with pytest.raises(DataError, match=message):
            open_megatron(str(write(tmp_path, **options)))
    index = tmp_path / "set.idx"
    write(tmp_path)
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(DataError, match="for 40 sequences, found"):
        open_megatron(str(stem))
    index.unlink()
    assert pair_of(str(stem)) is None
    (tmp_path / "set.idx").write_text("no index")
    with pytest.raises(DataError, match="begins with MMIDIDX"):
        open_megatron(str(stem))


def test_a_change_after_indexing_is_found(tmp_path, data):
    folder = prepare(data)
    assert prepare(data) == folder
    content = bytearray((tmp_path / "set.bin").read_bytes())
    content[20] ^= 1
    (tmp_path / "set.bin").write_bytes(content)
    with pytest.raises(DataError, match="it changed since it was indexed"):
        prepare(data)
    found = open_split(folder, "train", 8, data)
    with pytest.raises(DataError, match=r"set.bin: block 0 \(from byte 0 on\) is damaged"):
        found.read(0, 20)
    before = read_index(folder).fingerprint
    assert read_index(prepare(data, force=True)).fingerprint != before


def test_inspect_says_what_it_is(tmp_path, data, capsys):
    assert main(["data", "inspect", data.path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["form"] == "Megatron indexed data set, version 1, uint16"
    assert (found["tokens"], found["documents"], found["corpus"]) == ("980", "40", "text")
    assert found["largest_id"].startswith("255 of")


def test_folders_that_links_name_are_read_once_and_what_is_left_out_is_said(tmp_path):
    for name in ("in/a.txt", "in/own/b.txt", "in/noext", "in/y.bin", "in/.hidden", "out/c.txt", "out/deep/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\n" * 99)
    for name, to in {"link": "../out", "again": "../out/deep", "up": "..", "round": "own"}.items():
        (tmp_path / "in" / name).symlink_to(to)
    data = Data(corpus="text", path=str(tmp_path / "in"), tokenizer="byte", dir=str(tmp_path / "data"))
    files = corpus.sources(data)
    assert sorted(file.name for file in files) == ["a.txt", "b.txt", "c.txt", "d.txt"]
    said: list[str] = []
    shards = prepare(data, progress=lambda what, done, total: said.append(what))
    with pytest.raises(DataError, match="it holds prepared tokens"):
        corpus.sources(replace(data, path=str(shards)))
    assert f"{tmp_path / 'in'}: 4 files are read, chosen by their endings; left out: noext, y.bin" in said


@pytest.mark.parametrize(("name", "said"), [("dead.txt", "a link to nowhere"), ("*.txt", "wildcards")])
def test_a_path_that_is_not_there_says_why(tmp_path, name: str, said: str):
    (tmp_path / "dead.txt").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match=said):
        corpus.sources(Data(corpus="text", path=str(tmp_path / name)))


def test_plain_text_has_no_field(tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    data = Data(corpus="text", path=str(tmp_path), text_field="body")
    with pytest.raises(JobError, match="is plain text, which has no fields"):
        text_files(data)
    (tmp_path / "b.jsonl").write_text('{"body": "text"}\n')
    assert len(text_files(data)) == 2


def test_a_file_of_zstd_that_was_cut_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(1000))
    frame, file = zstandard.compress(lines.encode()), tmp_path / "a.jsonl.zst"
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 3) + b"abc"
    file.write_bytes(frame + skippable + frame)
    assert texts(file) == [f"{n}" for n in range(1000)] * 2
    for cut in (1, 4, len(frame) // 2):
        file.write_bytes(frame + frame[:-cut])
        with pytest.raises(DataError, match="the file is damaged or cut: it ends within a frame of zstd"):
            texts(file)
