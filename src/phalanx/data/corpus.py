"""Corpora: the source of the text, cut into segments that can be tokenized independently.

The text of a corpus is its documents in order, with one separator between consecutive documents. The tokenizer defines
the separator; in lengths and limits it counts as one character.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bounded import kind_of, parse_json, read_bytes
from phalanx.config.corpora import CORPORA
from phalanx.config.job import Data
from phalanx.data import formats
from phalanx.data.files import SPLITS, TOKEN_SHARD_TOKENS, write_atomic
from phalanx.data.formats import not_utf8, records_inside
from phalanx.errors import DataError, ExtensionError, JobError, NotFoundError

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BYTES = 1_115_394
TIMEOUT_S = 30


def find_shakespeare(path: str, data_dir: Path) -> Path:
    """Returns the verified file: `path` if given, else `data_dir/downloads/tinyshakespeare.txt`, downloaded if absent.

    Raises DataError if it is not available or its text differs.
    """
    file = Path(path).expanduser() if path else data_dir / "downloads" / "tinyshakespeare.txt"
    if os.path.isfile(file):
        _check(_content(file), str(file))
    elif path:
        raise DataError(f"data.path={path}: there is no such file (corpus shakespeare_char)")
    else:
        content = _download()
        _check(content, URL)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)
    return file


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, 2 * BYTES)
    except OSError as error:
        raise DataError(f"cannot read {file} (corpus shakespeare_char): {error.strerror}") from None


def _download() -> bytes:
    import urllib.request  # http and ssl, a tenth of all imports of a verb that plans

    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as response:
            return response.read(BYTES + 1)
    except OSError as error:
        raise DataError(
            f"could not download tiny Shakespeare from {URL}: {error}. Fetch it on a machine with a network and set "
            "data.path to it, or use data.corpus=stdlib, which needs no network"
        ) from error


def _check(content: bytes, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"{where} is not tiny Shakespeare: expected {BYTES:,} bytes with sha256 {SHA256}, found {len(content):,} "
            f"with {digest}. For your own text set data.corpus=text; remove a damaged download to fetch it again"
        )


def random_tokens(data: Data, split: str, start: int, size: int) -> np.ndarray:
    """Returns the tokens of a shard of corpus random, which begins at `start`: (size,) int64."""
    generator = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), start // TOKEN_SHARD_TOKENS]))
    return generator.integers(0, data.random_vocab, size)


SEGMENT_CHARACTERS = 1 << 20
"""Characters of the longest text tokenized at once; longer documents are cut after a line (which affects the
tokens)."""
READ_BYTES = 1 << 20
NAMES_SHOWN = 20
_OTHER_ROWS = {
    "preferences": {"chosen", "rejected"},
    "chat": {"messages", "conversations", "completion", "instruction"},
}
"""Fields of rows that are no text, by the corpus that reads them."""
SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval"}
"""Names of the splits of a data set, as its files or folders have them: test.jsonl, train-00000-of-00002.parquet."""
SAVED_FACTS = {"state.json", "dataset_info.json", "dataset_dict.json"}
"""Files beside the data in a folder that Hugging Face datasets saved."""
_CACHED = re.compile(r"cache-.*\.arrow")
"""Names of files in which datasets keeps the results of map and filter beside the data that they were made of."""
TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py", ".c", ".h", ".cc", ".cpp"}
TEXT_SUFFIXES |= {".rs", ".go", ".java", ".js", ".ts", ".sh"}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
"""Installed packages, tests, and code-point tables: not the library's own prose and code."""
STDLIB_OF_THIS_MACHINE = ("_sysconfigdata", "config-")
"""Prefixes of modules that contain paths of the machine that built Python."""


@dataclass(frozen=True)
class Segment:
    """A document or a part of one. `separated`: another document ends before it, so a separator comes first."""

    text: str
    separated: bool

    def __len__(self) -> int:
        return len(self.text) + self.separated


@dataclass(frozen=True)
class Scan:
    """The result of reading the whole corpus once."""

    documents: int
    characters: int
    """Characters of the text; each separator counts as one."""
    bytes: int
    """Bytes of the documents in UTF-8, without separators."""
    sha256: str
    """Digest of the documents in UTF-8, with a byte 0xFF (never part of UTF-8) between documents."""
    counts: np.ndarray
    """Occurrences of each code point: (0x110000,) int64."""


def sources(data: Data) -> list[Path]:
    """Returns the files of a text corpus in reading order; none if the text is computed. Raises DataError if they are
    not there."""
    if CORPORA[data.corpus].files is None:
        return []
    files = CORPORA.code(data.corpus, "files")(data)
    if not (isinstance(files, list) and all(isinstance(file, Path) for file in files)):
        raise ExtensionError(f"{_whose(data)}: files returned {type(files).__name__}, not a list of paths")
    return files


def describe(data: Data) -> str:
    """Returns a one-line description of the corpus."""
    if data.mix:
        return " + ".join(source.path for source in data.mix)
    if CORPORA[data.corpus].describe is None:
        return CORPORA[data.corpus].title
    return CORPORA.code(data.corpus, "describe")(data)


def stamp(files: list[Path]) -> str:
    """Returns a digest of the files' names, sizes and modification times, which tells whether to read them again."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        status = file.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def segments(files: list[Path], data: Data) -> Iterator[Segment]:
    """Yields the corpus's text in order, at most data.limit_mb megabytes of it.

    Raises DataError, with file and line, for text that is not UTF-8, not JSON, or lacks data.text_field.
    """
    left = round(data.limit_mb * 1e6) or sys.maxsize
    first = True
    for document in CORPORA.code(data.corpus, "documents")(files, data):
        starts = True
        for text in _cut(_texts(document, data)):
            content = text.encode()[:left]
            left -= len(content)
            kept = content.decode(errors="ignore")  # the limit may fall inside a character
            if kept:
                yield Segment(kept, separated=starts and not first)
                first = starts = False
            if left == 0:
                return


def _texts(document: Iterable[str], data: Data) -> Iterator[str]:
    for text in document:
        if not isinstance(text, str):
            raise ExtensionError(f"{_whose(data)}: documents yielded a part of type {type(text).__name__}, not text")
        yield text


def _whose(data: Data) -> str:
    return f"corpus {data.corpus!r} of {CORPORA.owner(data.corpus)}"


def scan(parts: Iterable[Segment]) -> Scan:
    """Reads everything once: validates it, measures it and counts its characters."""
    digest = hashlib.sha256()
    counts = np.zeros(0x110000, dtype=np.int64)
    documents = characters = size = 0
    for part in parts:
        encoded = part.text.encode()
        if part.separated:
            digest.update(b"\xff")
        digest.update(encoded)
        found = np.bincount(code_points(part.text))
        counts[: found.size] += found
        documents += part.separated or characters == 0
        characters += len(part)
        size += len(encoded)
    return Scan(documents, characters, size, digest.hexdigest(), counts)


def code_points(text: str) -> np.ndarray:
    """Returns the text's Unicode code points: (characters,) uint32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def stdlib_files(data: Data) -> list[Path]:
    """Returns the files of corpus stdlib. Raises DataError if Python was installed without them."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk(root, lambda name: name in STDLIB_SKIPPED or name.startswith(STDLIB_OF_THIS_MACHINE))
    names = [file.relative_to(root).as_posix() for file in files if file.suffix == ".py"]
    if not names:
        raise DataError(f"corpus stdlib: {root} holds no .py files (Python without its source); use data.corpus=text")
    # In alphabetical order the validation split, the last tenth, would be only turtledemo to zoneinfo. The order of
    # the names' digests is equally fixed, and mixes every part.
    return [root / name for name in sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest())]


def stdlib_description(data: Data) -> str:
    """Returns the description of corpus stdlib."""
    return f"the standard library of {platform.python_implementation()} {platform.python_version()}"


def stdlib_identity(data: Data) -> dict[str, object]:
    """Returns what determines the text of corpus stdlib."""
    return {"python": [platform.python_implementation(), platform.python_version()]}


def shakespeare_files(data: Data) -> list[Path]:
    """Returns the file of corpus shakespeare_char, downloaded if need be. Raises DataError if its text differs."""
    return [find_shakespeare(data.path, Path(data.dir))]


def text_description(data: Data) -> str:
    """Returns the description of a corpus in files: the path, and how a single file is compressed."""
    path = Path(data.path).expanduser()
    compressed = formats.compression_of(path) if os.path.isfile(path) else ""
    return f"{data.path} (compressed with {compressed})" if compressed else data.path


def text_files(data: Data) -> list[Path]:
    """Returns the files of corpus text: data.path, or those in it that are text. Raises DataError if there are none;
    JobError for a data.text_field that none of them has, since they are plain text."""
    if pair := formats.pair_of(data.path):
        return [*pair]
    path = Path(data.path).expanduser()
    if os.path.isfile(path):  # unlike Path.is_file also for a name that is too long for a file
        files = [path]
    elif os.path.isdir(path):
        chosen = TEXT_SUFFIXES | (formats.ROW_SUFFIXES - {".json"})  # beside a text, .json is usually a setting
        files = in_order(chosen_files(path, chosen, "is text"), path)
    else:
        raise formats.missing(path, "text")
    if data.text_field != Data.text_field and all(formats.form_of(file) == "text" for file in files):
        raise JobError(f"data.text_field={data.text_field}: {data.path} is plain text, which has no fields")
    return files


def chosen_files(folder: Path, suffixes: Collection[str], what: str, left_out: Collection[str] = ()) -> list[Path]:
    """Returns the files of a folder with one of these endings. Raises DataError if there are none (none "is text"), and
    for files that are left out and likely data, such as rows.jsonl.bz2, whose compression is not read."""
    found = [file for file in visible(folder) if file.name not in left_out]
    if not found:
        known = " ".join(sorted(suffixes))
        raise NotFoundError(f"data.path={folder}: the folder has no files; it needs files that end in {known}")
    files = [each for each in found if formats.suffix_of(each) in suffixes and not _CACHED.fullmatch(each.name)]
    for file in found:
        if formats.suffix_of(file) not in suffixes and {each.lower() for each in file.suffixes} & {*suffixes}:
            formats.form_of(file)  # says what it is, and how it is read
    if {folder / "index.json", folder / "train-00000.bin"} <= {*found}:
        raise DataError(
            f"data.path={folder}: it holds prepared tokens, which the job that made them finds by itself; data.path "
            "names what they were made of"
        )
    if not files:
        sets = [file for file in found if file.suffix == ".idx"]
        hint = f"; a Megatron data set is named by itself, such as {sets[0]}, several in data.mix" if sets else ""
        known = " ".join(sorted(suffixes))
        raise DataError(f"data.path={folder}: none of its {len(found)} files {what}; files are chosen by {known}{hint}")
    return files


def in_order(files: list[Path], folder: Path) -> list[Path]:
    """Returns the files of a folder in reading order. Raises DataError if they are the splits of one data set: the
    files that are for tests would be trained on."""
    sets: dict[tuple[str, ...], dict[str, Path]] = {}
    for file in files:
        parts = file.relative_to(folder).parts
        if formats.suffix_of(file) not in formats.ROW_SUFFIXES | {".txt"}:
            continue
        if (first := parts[0].lower()) in SPLIT_NAMES:
            sets.setdefault((), {}).setdefault(first, folder / parts[0])
            continue
        words = [word for word in re.split(r"[-._]", file.name.lower()) if not word.isdigit()]
        for place, word in enumerate(words):  # of en-train.txt and en-dev.txt, and not of to-train.txt and a-test.txt
            if word in SPLIT_NAMES:
                others = () if not place else (*parts[:-1], *words[:place], "", *words[place + 1 :])
                sets.setdefault(others, {}).setdefault(word, file)
    if splits := next((each for each in sets.values() if len(each) > 1 and "train" in each), None):
        raise DataError(
            f"data.path={folder}: holds the splits {', '.join(sorted(splits))} of a data set, all of which would be "
            f"trained on: name one, such as data.path={splits['train']}, or give the files of one a folder of their own"
        )
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


def walk(root: Path, skipped: Callable[[str], bool], *, links: bool = False) -> list[Path]:
    """Returns all files below `root`, except those whose name, or a parent folder's name, is skipped. With `links`,
    folders that links name are read too, each once, unless `root` lies in them."""
    found, seen = list[Path](), {os.path.realpath(root), *map(str, Path(os.path.realpath(root)).parents)}
    for folder, subfolders, names in os.walk(root, followlinks=links):
        subfolders[:] = [name for name in subfolders if not skipped(name)]
        if links:
            places = {os.path.realpath(os.path.join(folder, name)): name for name in sorted(subfolders)}
            subfolders[:] = [name for real, name in places.items() if real not in seen]
            seen.update(places)
        found += [Path(folder) / name for name in names if not skipped(name)]
    return found


def visible(folder: Path) -> list[Path]:
    """Returns the files of a folder of data, those in folders that links name too, without hidden ones."""
    return walk(folder, lambda name: name.startswith("."), links=True)


def left_out(data: Data, files: Collection[Path]) -> str:
    """Returns a word on the files of the folder data.path that are none of `files`, by their endings; or nothing."""
    folder = Path(data.path).expanduser()
    chosen = data.corpus == "text" or CORPORA[data.corpus].rows is not None
    if not (chosen and data.path and os.path.isdir(folder)):
        return ""
    others = {f"{file.relative_to(folder)}" for file in {*visible(folder)} - {*files} if file.name not in SAVED_FACTS}
    more = f" and {len(others) - NAMES_SHOWN:,} more" if len(others) > NAMES_SHOWN else ""
    named = ", ".join(sorted(others)[:NAMES_SHOWN]) + more
    return named and f"{folder}: {len(files):,} files are read, chosen by their endings; left out: {named}"


def documents(files: Iterable[Path], data: Data) -> Iterator[Iterable[str]]:
    """Yields each document of files as a series of texts: a JSONL file has one per line, any other file is one. Raises
    DataError, with file and line, for text that is not UTF-8, not JSON, or lacks data.text_field."""
    for file in files:
        yield from _documents(file, data.text_field)


def _documents(file: Path, field: str) -> Iterator[Iterable[str]]:
    form = formats.form_of(file)
    if form == "text":
        if formats.suffix_of(file) not in TEXT_SUFFIXES - {".txt", ".text"} and (names := formats.rows_in_text(file)):
            raise DataError(
                f"{file}: its lines are JSON objects (fields: {', '.join(map(repr, names[:NAMES_SHOWN]))}), which "
                f"would be trained on as they stand: name it {file.stem}.jsonl to read a field "
                f"(data.text_field={field}) or conversations (data.corpus=chat), or {file.stem}.md to train on the JSON"
            )
        yield _read_text(file)
        return
    if form == "lines":  # of a line only one field is used, so the rest of it is read leniently
        formats.refuse_one_object(file)
        for number, line in formats.numbered_lines(file):
            yield [_json_text(line, field, f"{file}:{number}")]
        return
    for where, record in formats.records(file, form):
        if isinstance(record, ValueError):
            raise DataError(f"{where}: {record}")
        yield [_field_text(record, field, where)]


def _read_text(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a mark of Windows's editors is no text
    line = 1
    with formats.open_data(file) as stream:
        while True:
            content = formats.read_some(file, stream, READ_BYTES)
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise _not_utf8(f"{file}:{line}", error) from error
            line += text.count("\n")
            yield text
            if not content:
                return


def _json_text(line: bytes, field: str, where: str) -> str:
    try:
        record = parse_json(line, lenient=True, once=field)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except ValueError as error:
        what = "not a line of JSON: " if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{where}: {what}{error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object with the field {field!r}, found {kind_of(record)}")
    return _field_text(record, field, where)


def _field_text(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        names = ", ".join(map(repr, islice(record, NAMES_SHOWN))) or "none"
        names += f" and {len(record) - NAMES_SHOWN:,} more" if len(record) > NAMES_SHOWN else ""
        found = f"{where}: no field {field!r} (its fields: {names})"
        if corpus := next((name for name, keys in _OTHER_ROWS.items() if keys & record.keys()), ""):
            raise DataError(f"{found}; such rows are read by data.corpus={corpus}, also with data.mix")
        raise DataError(f"{found}; name it with data.text_field (evaluate: --text-field){records_inside(record)}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} holds {kind_of(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is legal JSON but a lone surrogate
        raise DataError(f"{where}: the field {field!r} holds half a surrogate pair at {error.start}") from error
    return text


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{where}: {not_utf8(error)}")


def _cut(document: Iterable[str]) -> Iterator[str]:
    """Yields the document in texts of at most SEGMENT_CHARACTERS, which end with a line if they contain a whole one.

    The cuts depend on the text alone, not on how it was read.
    """
    rest = ""
    for text in document:
        rest += text
        while len(rest) > SEGMENT_CHARACTERS:
            end = rest.rfind("\n", 0, SEGMENT_CHARACTERS) + 1 or SEGMENT_CHARACTERS
            yield rest[:end]
            rest = rest[end:]
    yield rest
