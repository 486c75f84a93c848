"""Reads the records of data files in the forms that people have: JSON lines, a JSON array, CSV, TSV, Parquet, Arrow,
and folders that Hugging Face datasets saved; plain or compressed. The first bytes tell the form, not only the name."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from phalanx.bounded import kind_of, open_regular, parse_json
from phalanx.errors import DataError, JobError, NotFoundError
from phalanx.nearest import near_file
from phalanx.units import gib

LINE_BYTES = 1 << 28
"""Most bytes of a line of JSON, or of a JSON array, which are parsed whole."""
JSONL_SUFFIXES = {".jsonl", ".ndjson"}
ROW_SUFFIXES = JSONL_SUFFIXES | {".json", ".csv", ".tsv", ".parquet", ".arrow"}
"""Endings of files that hold records, before that of a compression."""
COMPRESSED = {".gz", ".gzip", ".xz", ".zst", ".zstd"}
_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_TABLES: dict[bytes, Form] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
"""Beginnings of tables; the last is that of a stream, as datasets saves it."""
_NO_TEXT = {
    b"PK\x03\x04": "a ZIP archive (also .docx, .xlsx, .npz and .pt are): unpack it",
    b"PK\x05\x06": "an empty ZIP archive",
    b"%PDF-": "a PDF: pdftotext FILE gives its text",
    b"BZh": "compressed with bzip2: bunzip2 it, or compress it with gzip, xz or zstd",
    b"\x04\x22\x4d\x18": "compressed with lz4: lz4 -d it, or compress it with gzip, xz or zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"Rar!": "a RAR archive: unpack it",
    b"SQLite format 3\0": "a database of SQLite: export its table as CSV",
    b"\x89HDF": "an HDF5 file: export it as Parquet or JSON lines",
    b"Obj\x01": "an Avro file: export it as Parquet or JSON lines",
    b"GGUF": "a GGUF model: `phalanx import hf FILE --out RUN` makes a run of it",
    b"\x93NUMPY": "an array of NumPy: tokens are read as a Megatron data set (.bin and .idx)",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\x7fELF": "a program",
    b"\x5d\0\0": "compressed with lzma: xz -d --format=lzma it, or compress it with gzip, xz or zstd",
    b"\xff\x06\0\0sNaPpY": "compressed with snappy: unpack it, or compress it with gzip, xz or zstd",
    b"\xd0\xcf\x11\xe0": "an old Office file (.xls, .doc): save it as CSV or text",
    **{b"\x80%c" % version: "a pickle of Python: save its rows as JSON lines" for version in (2, 3, 4, 5)},
}
"""Beginnings of files that hold no text or no rows, with what they are. Some of them could be read as text."""
_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}

Form = Literal["lines", "array", "csv", "tsv", "parquet", "arrow", "text"]
_ZSTD_BYTES = 4096
"""Bytes of a file of zstd that are decompressed at once, to at most 32,768 times as many."""
IN_WORDS: dict[Form, str] = {
    "lines": "JSON lines",
    "array": "a JSON array",
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "text": "text",
}


def suffix_of(file: Path) -> str:
    """Returns the ending of a file's name in lower case, without that of a compression: .jsonl of rows.jsonl.gz."""
    name = Path(file.name.lower())
    return (Path(name.stem) if name.suffix in COMPRESSED else name).suffix


def _lines_of(file: Path) -> str:
    """Returns a name for a file's records as JSON lines, which is not the file's own."""
    stem = file.name.removesuffix(file.suffix)
    return f"{stem}.jsonl" if file.suffix.lower() != ".jsonl" else f"{stem}.rows.jsonl"


def missing(path: Path, corpus: str, item: int = 0) -> NotFoundError:
    """Returns the error about a data.path that does not exist, or about that of an item of data.mix, from 1."""
    where = f"data.mix: item {item}: {path}" if item else f"data.path={path}"
    if os.path.exists(path):
        return NotFoundError(f"{where}: it is neither a file nor a folder (corpus {corpus})")
    return NotFoundError(f"{where}: there is no such file or folder (corpus {corpus}){near_file(path)}")


def pair_of(path: str) -> tuple[Path, Path] | None:
    """Returns the .bin and the .idx of a Megatron data set that a path names: either of them, or the name without an
    ending. None if it names none."""
    place = Path(os.path.abspath(Path(path).expanduser()))
    if place.suffix in (".bin", ".idx"):
        stem = place.with_suffix("")
    elif os.path.exists(place):
        return None
    else:
        stem = place
    pair = stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")
    return pair if place.suffix == ".idx" or os.path.exists(pair[1]) else None


def compression_of(file: Path) -> str:
    """Returns what a file is compressed with, by its first bytes: gzip, xz, zstd, or nothing. Raises OSError."""
    with open_regular(file) as raw:
        head = raw.read(6)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def open_data(file: Path) -> IO[bytes]:
    """Opens a data file, decompressed if its first bytes say so. Raises OSError; JobError if the reader of a
    compression is not installed."""
    kind = compression_of(file)
    if kind == "gzip":
        return cast(IO[bytes], gzip.open(file))
    if kind == "xz":
        return lzma.open(file)
    if kind == "zstd":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise JobError(
                f"{file} is compressed with zstd: pip install 'phalanx[formats]' for its reader, or unpack it: "
                f"zstd -dc {file} > NAME"
            ) from None
        return io.BufferedReader(_Zstandard(zstandard.ZstdDecompressor(), open_regular(file)))
    return open_regular(file)


class _Zstandard(io.RawIOBase):
    """The content of a file of zstd. Raises EOFError where it ends within a frame, at which the package's own stream
    ends as if it were whole."""

    def __init__(self, decompressor: Any, file: IO[bytes]):
        self._decompressor, self._file = decompressor, file
        self._frame: Any = None
        self._next, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not (content := self._next or self._file.read(_ZSTD_BYTES)):
                if self._frame is not None:
                    raise EOFError("it ends within a frame of zstd")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready, self._next = memoryview(self._frame.decompress(content)), b""
            if self._frame.eof:
                self._next, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def form_of(file: Path) -> Form:
    """Returns the form of a file, by its first bytes and, for text, by its name. Raises DataError if it cannot be
    decompressed."""
    with _readable(file) as stream:
        head = read_some(file, stream, 4096)
    for magic, name in _TABLES.items():
        if head.startswith(magic):
            return name
    if what := _no_text(head):
        raise DataError(f"{file} {what}")
    if suffix_of(file) == ".arrow":
        return "arrow"
    if suffix_of(file) == ".parquet":
        raise DataError(f"{file} is no Parquet file: it does not begin with PAR1")
    suffix, first = suffix_of(file), head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if suffix in (".csv", ".tsv"):
        return "csv" if suffix == ".csv" else "tsv"
    if suffix == ".json":
        return "array" if first == b"[" else "lines"
    return ("array" if first == b"[" else "lines") if suffix in JSONL_SUFFIXES else "text"


def _no_text(head: bytes) -> str:
    """Returns what a file is that begins so and holds no text, or nothing."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    if what := next((what for magic, what in _NO_TEXT.items() if head.startswith(magic)), ""):
        return f"is {what}"
    if head.startswith(tuple(_ENCODINGS)):
        return ""  # `not_utf8` says what
    if head[257:262] == b"ustar":
        return "is a tar archive: unpack it"
    if max(even, odd) * 3 > len(head) > min(even, odd) * 8:
        return f"is likely UTF-16 without a mark: iconv -f UTF-16{'BE' if even > odd else 'LE'} -t UTF-8"
    return "is not text: more than a tenth of its first bytes are 0" if (even + odd) * 10 > len(head) else ""


def records(file: Path, form: Form | None = None) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """Yields the place and the object of every record of a file, or what is wrong with it. Places are lines, and in
    forms without lines the numbers of records. Raises DataError for a file that cannot be read as a whole."""
    form = form or form_of(file)
    if form == "array":
        yield from _array(file)
    elif form in ("csv", "tsv"):
        yield from _separated(file, "," if form == "csv" else "\t")
    elif form in ("parquet", "arrow"):
        yield from _table(file, form)
    else:
        refuse_one_object(file)
        for number, line in numbered_lines(file):
            yield f"{file}:{number}", record_of(line, first=number == 1)


def refuse_one_object(file: Path) -> None:
    """Raises DataError if a file holds one object over several lines, which is no list of records."""
    with _readable(file) as stream:
        lines = iter(lambda: read_some(file, stream, LINE_BYTES, line=True), b"")
        first = next((line for line in lines if line.strip()), b"")
        if isinstance(record_of(first), dict):
            return
        content = first + read_some(file, stream, LINE_BYTES)
    found = record_of(content)
    if not isinstance(found, dict):
        return
    names = ", ".join(map(repr, [*found][:20])) or "none"
    raise DataError(f"{file}: is one JSON object (its fields: {names}), not a list of records{records_inside(found)}")


def records_inside(record: Mapping[str, Any]) -> str:
    """Returns how to take the records out of an object that holds a list of them, or nothing."""
    lists = (name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict))
    name = next(lists, "")
    return f"; take the records out of it: jq -c '.[\"{name}\"][]' FILE > ROWS.jsonl" if name else ""


def rows_in_text(file: Path) -> list[str]:
    """Returns the fields of the first record of a text file whose first lines are JSON objects; nothing of others."""
    with _readable(file) as stream:
        head = [read_some(file, stream, 1 << 20, line=True) for _ in range(2)]
    found = [record_of(line) for line in head if line.strip()]
    objects = [each for each in found if isinstance(each, dict)]
    return [*objects[0]] if objects and len(objects) == len(found) else []


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file of JSON that are not blank, each with its number. Raises DataError for one that is too
    long."""
    with _readable(file) as stream:
        for number, line in enumerate(iter(lambda: read_some(file, stream, LINE_BYTES + 1, line=True), b""), start=1):
            if len(line) > LINE_BYTES:
                raise DataError(f"{file}:{number}: the line is longer than {gib(LINE_BYTES)}, the most for JSON")
            if line.strip():
                yield number, line


_FIRST_LINES = {
    r"\s*\{\s*'": "an object of Python: write it with json.dumps",
    r".*\},\s*$": "an element of a JSON array, without its [ and ]",
    r"\s*\{(.*[\[{,])?\s*$": "an object over several lines: jq -c . FILE > ROWS.jsonl",
    r"\s*<": "a page of HTML or XML, as a download that failed leaves one",
    r"[\w\s\"-]+([,\t;][\w\s\"-]+)+\s*$": "a table: name it .csv or .tsv",
}
"""What files begin with that are taken for lines of JSON, and what they are."""


def record_of(line: bytes, *, first: bool = False) -> dict[str, Any] | ValueError:
    """Returns the object of a line of JSON, or what is wrong with it: of a file's `first` line, what it likely is."""
    try:
        record = parse_json(line.rstrip())
    except UnicodeDecodeError as error:
        return ValueError(not_utf8(error))
    except json.JSONDecodeError as error:
        text = line.decode(errors="replace")
        likely = next((what for form, what in _FIRST_LINES.items() if first and re.match(form, text)), "")
        return ValueError(f"not a line of JSON: {error}{likely and f'; it is likely {likely}'}")
    except ValueError as error:
        return error
    return record if isinstance(record, dict) else ValueError(f"expected a JSON object, found {kind_of(record)}")


def _array(file: Path) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    with _readable(file) as stream:
        content = read_some(file, stream, LINE_BYTES + 1)
    if len(content) > LINE_BYTES:
        raise DataError(
            f"{file}: a JSON array of more than {gib(LINE_BYTES)}, which is read whole; make lines of it: "
            f"jq -c '.[]' {file} > {_lines_of(file)}"
        )
    try:
        found = parse_json(content)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: {not_utf8(error)}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: it begins as a JSON array and is none: {error}") from None
    except ValueError as error:
        raise DataError(f"{file}: {error}") from None
    if not isinstance(found, list):
        raise DataError(f"{file}: expected a JSON array of records, found {kind_of(found)}")
    for number, record in enumerate(found, start=1):
        wrong = ValueError(f"expected a JSON object, found {kind_of(record)}")
        yield f"{file}: record {number}", record if isinstance(record, dict) else wrong


def _separated(file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    csv.field_size_limit(LINE_BYTES)
    lines: list[str] = []
    """Those of one row."""

    def noted(stream: Iterable[str]) -> Iterator[str]:
        for line in stream:
            lines.append(line)
            yield line

    with _readable(file) as stream:
        try:
            text = noted(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
            rows = csv.reader(text, delimiter=delimiter, strict=True)
            header = next(rows, [])
            if len(set(header)) < len(header) or not all(header):
                raise DataError(f"{file}:1: the first line must name every column once, is {header}")
            other = next((each for each in ";\t|," if len(header) == 1 and each in header[0]), "")
            if other:
                raise DataError(
                    f"{file}:1: one column, {header[0]!r}: {file.suffix} has {delimiter!r} between columns, here it is "
                    f"likely {other!r}"
                )
            lines.clear()
            for row in rows:
                several = len(lines) > 1 and {line.count("\t") for line in lines} == {len(header) - 1}
                lines.clear()
                if several and delimiter == "\t" and len(header) > 1:
                    yield (
                        f"{file}:{rows.line_num}",
                        ValueError(
                            "a quotation mark opens a text of several lines, each of which has the columns of a row: "
                            "write JSON lines, or every quotation mark twice and texts with one between two"
                        ),
                    )
                elif row and len(row) != len(header):
                    yield (
                        f"{file}:{rows.line_num}",
                        ValueError(f"{len(row)} columns, where the header names {len(header)}"),
                    )
                elif row:
                    yield f"{file}:{rows.line_num}", dict(zip(header, row, strict=True))
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: {not_utf8(error)}") from None
        except _damages() as error:
            raise DataError(f"{file}: the file is damaged or cut: {error}") from None
        except csv.Error as error:
            raise DataError(f"{file}: not a table of separated columns: {error}") from None


def _table(file: Path, form: Form) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        kind, reader = ("a Parquet", "parquet") if form == "parquet" else ("an Arrow", "feather")
        raise JobError(
            f"{file} is {kind} file: pip install 'phalanx[formats]' for its reader, or make JSON lines of it: python "
            f"-c \"import pandas; pandas.read_{reader}('{file}').to_json('{_lines_of(file)}', orient='records', "
            'lines=True)"'
        ) from None
    number = 0
    try:
        with _batches(pyarrow, parquet, file, form) as batches:
            for batch in batches:
                if twice := next((name for name, n in Counter(batch.schema.names).items() if n > 1), ""):
                    raise DataError(f"{file}: the column {twice!r} is there twice")
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}: record {number}", {name: _stated(value) for name, value in record.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a whole {IN_WORDS[form]} file: {str(error)[:200]}") from None


def _stated(value: Any) -> Any:
    """Returns a value of a table without the nulls of objects in it: a table gives each object the fields of all, as to
    the arguments of a call those of every other function. Templates may ask whether a content is null."""
    if isinstance(value, dict):
        return {key: _stated(each) for key, each in value.items() if each is not None or key == "content"}
    return [_stated(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _batches(pyarrow: Any, parquet: Any, file: Path, form: Form) -> Iterator[Iterator[Any]]:
    """Opens the record batches of a Parquet file, or of an Arrow file or stream (which datasets saves)."""
    with open_regular(file) as opened:
        if form == "parquet":
            yield parquet.ParquetFile(opened).iter_batches(1024)
            return
        is_stream = opened.read(6) != b"ARROW1"
        opened.seek(0)
        if is_stream:
            yield iter(pyarrow.ipc.open_stream(opened))
            return
        reader = pyarrow.ipc.open_file(opened)
        yield (reader.get_batch(n) for n in range(reader.num_record_batches))


def _readable(file: Path) -> IO[bytes]:
    try:
        return open_data(file)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}") from None


def read_some(file: Path, stream: IO[bytes], size: int, *, line: bool = False) -> bytes:
    """Reads at most `size` bytes of an open data file, with `line` to the end of a line. Raises DataError if the file
    is damaged."""
    try:
        return stream.readline(size) if line else stream.read(size)
    except _damages() as error:
        raise DataError(f"{file}: the file is damaged or cut: {error}") from None


def _damages() -> tuple[type[Exception], ...]:
    """Returns what the readers raise about damaged files."""
    zstandard = sys.modules.get("zstandard")  # imported where such a file is open
    return (EOFError, OSError, lzma.LZMAError, zlib.error, *((zstandard.ZstdError,) if zstandard else ()))


def not_utf8(error: UnicodeDecodeError) -> str:
    """Returns what is wrong with bytes that are not UTF-8, and what they likely are."""
    content = bytes(error.object)
    likely = next((name for mark, name in _ENCODINGS.items() if content.startswith(mark)), "")
    if not likely and b"\0" in content[:4096]:
        return f"byte 0x{content[error.start]:02x} is not UTF-8: the file is not text"
    likely = likely or "Windows-1252 or Latin-1"
    name = "UTF-16" if likely == "UTF-16" else "WINDOWS-1252"
    return (
        f"byte 0x{content[error.start]:02x} is not UTF-8 ({error.reason}); the text is likely {likely}: "
        f"iconv -f {name} -t UTF-8"
    )
