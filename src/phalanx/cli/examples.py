"""`phalanx examples [NAME ...]`: writes the example jobs, or lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli import shipped
from phalanx.cli.commands import WHOLE, Command, CommandVerb
from phalanx.cli.option import Option
from phalanx.echo import echo
from phalanx.errors import JobError

VERB = CommandVerb(
    "examples",
    "Lists the example jobs, or writes those that are named into a folder. They run as they are.",
    {WHOLE: Command(("[NAME]",), {"out": Option(str, "examples", "folder to write to", value="DIR")}, more=True)},
    (
        ("examples main pipeline", "write examples/main.yaml and examples/pipeline.yaml"),
        ("examples all --out jobs", "all of them, into jobs/"),
    ),
    ("A file that is there and differs is not overwritten.",),
    default=WHOLE,
)


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    known = shipped.files("examples", ".yaml")
    if not words.subjects:
        abouts = {name: _about(path) for name, path in known.items()}
        how = "write one with `phalanx examples NAME`, then `phalanx train examples/NAME.yaml`"
        shipped.listed(abouts, words.as_json, how)
        return 0
    named = known if words.subjects == ("all",) else words.subjects
    jobs = [shipped.pick(name, known, "examples") for name in named]
    chosen = [*dict.fromkeys(jobs), *_data(jobs)]
    folder = Path(words.options.get("out", "examples"))
    texts = {folder / path.name: path.read_bytes() for path in chosen}
    if taken := [str(path) for path, text in texts.items() if path.exists() and path.read_bytes() != text]:
        raise JobError([f"{path} is there and differs: choose another folder with --out" for path in taken])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_bytes(text)
    except OSError as error:
        raise JobError(f"{folder}: cannot be written: {error.strerror}") from None
    written = [str(path) for path in texts]
    echo(json.dumps(written) if words.as_json else "\n".join(f"written: {path}" for path in written))
    return 0


def _data(jobs: Sequence[Path]) -> list[Path]:
    """Returns the files of rows that jobs read beside them."""
    rows = sorted(shipped.folder("examples").glob("*.jsonl"))
    return [path for path in rows if any(f"examples/{path.name}" in job.read_text() for job in jobs)]


def _about(path: Path) -> str:
    """Returns the first comment of a file."""
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
