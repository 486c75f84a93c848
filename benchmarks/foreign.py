"""What other frameworks publish for their own configurations, beside what `phalanx predict --from` says of these files.

    python -m benchmarks.foreign CLONES [--only TEXT]

CLONES is a folder with a git clone of every repository of foreign.yaml, under its last name. Each file is taken from
the commit that is named, so that what is read is what was measured, and written nowhere else. A row holds the layout
that its page prints: a field that was read as something else is shown, and fails the command. Nothing runs on this
machine: the figures are the same everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import machine, save
from phalanx.cli.main import main as phalanx
from phalanx.config.values import read_as

PRINTED = {
    "gbs": "train.global_batch",
    "mbs": "layout.micro_batch",
    "seq": "model.seq_len",
    "tp": "layout.tp",
    "pp": "layout.pp",
    "cp": "layout.cp",
    "vp": "layout.pp_chunks",
    "ep": "layout.ep",
}
"""Columns of published tables, and the fields that they are."""


@dataclass(frozen=True)
class PublishedFile:
    """A configuration of a repository, and what its project measured with it."""

    repository: str
    commit: str
    folders: tuple[str, ...]
    """The folders of the repository that reading the file needs."""
    page: str
    """The page of the repository that publishes the figure."""
    file: str
    """The file, or FILE:FUNCTION."""
    tokens: float
    """Published tokens per second per device."""
    printed: str
    """The layout as the page prints it, such as "gbs=512 mbs=2 tp=1"."""
    words: str = ""
    """Words of the command line: the machine, and fields that the page gives."""
    changes: tuple[tuple[str, str], ...] = ()
    """Texts of the file that the published run had otherwise, and what it had."""
    note: str = ""


def published_files() -> list[PublishedFile]:
    """Returns the rows of foreign.yaml."""
    found = list[PublishedFile]()
    for group in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
        rows = group.pop("rows")
        start = group.pop("start", "")
        for row in rows:
            stored = {**group, **row, "file": f"{start}{row['file']}"}
            found.append(read_as(PublishedFile, stored, row["file"]))
    return found


def predicted(row: PublishedFile, clones: Path, folder: Path) -> dict[str, Any]:
    """Returns the document of `phalanx predict --from FILE --json`. Raises RuntimeError with the verb's message."""
    clone = clones / row.repository.rpartition("/")[2]
    tree = folder / f"{clone.name}-{row.commit[:10]}"
    if not tree.exists():
        command = ["git", "-C", str(clone), "archive", row.commit, "--", *row.folders]
        with tarfile.open(
            fileobj=io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)
        ) as packed:
            packed.extractall(tree, filter="data")
    path, colon, part = (tree / row.file).as_posix().partition(".py:")
    path = Path(path + colon.rstrip(":"))
    if row.changes:
        text = path.read_text(encoding="utf-8")
        for before, after in row.changes:
            if text.count(before) != 1:
                raise RuntimeError(f"{row.file}: {text.count(before)} places hold {before!r}")
            text = text.replace(before, after)
        path = path.with_stem(f"{path.stem}_as_published")
        path.write_text(text, encoding="utf-8")
    words = ["predict", *row.words.split(), "--from", f"{path}{':' if part else ''}{part}", "--json"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = phalanx(words)
    if not out.getvalue().startswith("{"):
        raise RuntimeError(f"exit code {code}: {err.getvalue()}".replace(str(folder), ""))
    return json.loads(out.getvalue())


def misread(row: PublishedFile, document: dict[str, Any]) -> list[str]:
    """Returns the fields that were read as something else than the page prints."""
    became = {each["field"]: each["to"] for each in document["from"]["became"]}
    given, wanted = (
        {word.partition("=")[0]: word.partition("=")[2] for word in words.split()} for words in (row.words, row.printed)
    )
    found: dict[str, Any] = {name: given.get(path, became.get(path, 1)) for name, path in PRINTED.items()}
    found["ep"] = f"{found['ep']}" if wanted.get("ep") != f"{found['ep'] * found['tp']}" else wanted["ep"]
    return [f"{name} {found[name]}, printed {value}" for name, value in wanted.items() if str(found[name]) != value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--only", default="", help="only rows with this text in repository or file; write nothing")
    options = parser.parse_args()
    asked = [row for row in published_files() if options.only in f"{row.repository} {row.file}"]
    names = {row.repository: options.clones / row.repository.rpartition("/")[2] for row in asked}
    if absent := [f"{path}: clone https://github.com/{name}" for name, path in names.items() if not path.is_dir()]:
        print(*absent, sep="\n", file=sys.stderr)
        return 2
    if not asked:
        print(f"--only {options.only}: no such row", file=sys.stderr)
        return 2
    table = [("framework", "configuration", "tokens/s/device, published", "predicted", "error", "remark")]
    rows, errors, wrong = list[dict[str, Any]](), dict[str, list[float]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="phalanx_foreign_") as folder:
        for row in asked:
            project, name = row.repository.rpartition("/")[2], row.file.rpartition("/")[2].rpartition(":")[2]
            try:
                document = predicted(row, options.clones, Path(folder))
            except RuntimeError as error:
                wrong.append(f"{row.file}: {error}")
                continue
            differing = misread(row, document)
            wrong += [f"{row.file}: {each}" for each in differing]
            tokens = document["tokens_per_s_per_device"]
            error = tokens / row.tokens - 1
            errors.setdefault(project, []).append(abs(error))
            remark = "; ".join(filter(None, [*differing, "" if document["fits"] else "does not fit", row.note]))
            table.append((project, f"`{name}`", f"{row.tokens:,.0f}", f"{tokens:,.0f}", f"{error:+.1%}", remark))
            found = {"published": row.tokens, "predicted": tokens, "fits": document["fits"], "error": error}
            rows.append(
                {"repository": row.repository, "commit": row.commit, "file": row.file, "page": row.page} | found
            )
    every = [each for several in errors.values() for each in several]
    if not every:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    medians = ", ".join(f"{name} {statistics.median(each):.1%} of {len(each)}" for name, each in errors.items())
    seen = f"Median error {statistics.median(every):.1%} of {len(every)} rows: {medians}. Largest {max(every):.1%}."
    if not options.only and not wrong:
        save("foreign", {"machine": machine(), "rows": rows}, table, "Configurations of other frameworks", seen)
    else:
        print("\n".join(" | ".join(row) for row in table), seen, *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
