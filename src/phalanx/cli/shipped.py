"""Verbs that list the installation: `phalanx docs [PAGE]`, `phalanx examples [NAME ...]`, `phalanx extensions`.

Pages and example jobs lie in the wheel within the package, in a clone beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import phalanx
from phalanx.cli.option import Option
from phalanx.cli.verb import WHOLE, Command, Verb, Words
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean
from phalanx.registry import GROUP, OWN, installed
from phalanx.units import aligned

_PACKAGE = Path(phalanx.__file__).parent


def folder(name: str) -> Path:
    """Returns the folder `examples` or `docs`. Raises JobError if this installation has none."""
    for place in (_PACKAGE / "shipped" / name, _PACKAGE.parents[1] / name):
        if place.is_dir():
            return place
    raise JobError(f"this installation has no {name}: install the wheel again, or see the clone's folder {name}/")


def files(name: str, ending: str) -> dict[str, Path]:
    """Returns the files of a shipped folder and its folders with this ending, by path without it."""
    top = folder(name)
    found = sorted(path for path in top.rglob(f"*{ending}") if not path.is_dir())
    return {str(path.relative_to(top).with_suffix("")): path for path in found}


def pick(word: str, known: dict[str, Path], what: str) -> Path:
    """Returns the file that a word names, with or without folder and ending. Raises JobError with near names."""
    plain = word.removeprefix(f"{what}/")
    plain = plain.removesuffix(Path(plain).suffix) if Path(plain).suffix else plain
    named = [path for name, path in known.items() if plain in (name, name.rpartition("/")[2])]
    if len(named) == 1:
        return named[0]
    raise JobError(f"no page or file {word!r}{did_you_mean(plain, known)} (known: {', '.join(known)})")


DOCS = Verb(
    "docs",
    "Prints a page of the documentation as Markdown, or lists the pages. Messages and help name pages by these names.",
    {WHOLE: Command(("[PAGE]",))},
    (("docs job", "every field of a job"), ("docs tutorials/first-run", "a tutorial")),
    default=WHOLE,
)


@DOCS.runs
def docs(words: Words) -> None:
    known = files("docs", ".md")
    if not words.subjects:
        titles = {name: path.read_text().partition("\n")[0].lstrip("# ") for name, path in known.items()}
        words.show(titles, "\n".join(aligned(titles.items())))
        return
    text = pick(words.subject, known, "docs").read_text()
    words.show({"page": words.subject, "text": text}, text.rstrip("\n"), indent=None, wrap=False)


EXAMPLES = Verb(
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


@EXAMPLES.runs
def examples(words: Words) -> None:
    known = files("examples", ".yaml")
    if not words.subjects:
        firsts = {name: path.read_text().partition("\n")[0] for name, path in known.items()}
        abouts = {name: line.removeprefix("#").strip() * line.startswith("#") for name, line in firsts.items()}
        how = "write one with `phalanx examples NAME`, then `phalanx train examples/NAME.yaml`"
        words.show(abouts, "\n".join([*aligned(abouts.items()), how]))
        return
    named = known if words.subjects == ("all",) else words.subjects
    jobs = [pick(name, known, "examples") for name in named]
    chosen = [*dict.fromkeys(jobs), *_data(jobs)]
    target = Path(words.options["out"])
    texts = {target / path.name: path.read_bytes() for path in chosen}
    if taken := [str(path) for path, text in texts.items() if path.exists() and path.read_bytes() != text]:
        raise JobError([f"{path} is there and differs: choose another folder with --out" for path in taken])
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_bytes(text)
    except OSError as error:
        raise JobError(f"{target}: cannot be written: {error.strerror}") from None
    written = [str(path) for path in texts]
    words.show(written, "\n".join(f"written: {path}" for path in written), indent=None, wrap=False)


def _data(jobs: Sequence[Path]) -> list[Path]:
    """Returns the files of rows that jobs read beside them."""
    rows = sorted(folder("examples").glob("*.jsonl"))
    return [path for path in rows if any(f"examples/{path.name}" in job.read_text() for job in jobs)]


EXTENSIONS = Verb(
    "extensions",
    "Lists what installed packages add. A package adds entries through an entry point of the group "
    f"{GROUP} (`phalanx docs extending`).",
    {
        "list": Command(about="list every package and its entries; this is done without a command, too"),
        "names": Command(about="list all names of every table, the project's own too"),
    },
    (
        ("extensions list", "by package"),
        ("extensions names --json", "by table, for programs"),
    ),
    default="list",
)


@EXTENSIONS.runs
def extensions(words: Words) -> None:
    from phalanx.extend import TABLES  # imported here, because it imports every table

    packages = {kind: {name: table.package(name) for name in table} for kind, table in TABLES.items()}
    if words.command == "names":
        lines = [
            f"{kind}: {', '.join(name if package == OWN else f'{name} ({package})' for name, package in names.items())}"
            for kind, names in packages.items()
        ]
        words.show(packages, "\n".join(lines), wrap=False)
        return
    added: dict[str, dict[str, list[str]]] = {}
    for package in map(str, installed()):
        mine = {kind: [name for name, its in names.items() if its == package] for kind, names in packages.items()}
        added[package] = {kind: names for kind, names in mine.items() if names}
    lines = [f"no installed package has an entry point of the group {GROUP}"] if not added else []
    for package, entries in added.items():
        lines += [package, *(f"  {kind}: {', '.join(names)}" for kind, names in entries.items())]
    words.show(added, "\n".join(lines), wrap=False)
