"""Verbs about this installation: `phalanx docs [PAGE]`, `phalanx examples [NAME ...]`, `phalanx extensions`; `phalanx
schema`, the fields of a job for editors, or as a page; `phalanx completion SHELL`, a script with every verb, option and
field, so that a Tab starts no program.

Pages and example jobs lie in the wheel within the package, in a clone beside it. The scripts of all shells do the same:
first the verb; then its commands, options and job files, and `key=` of a job's fields; behind the = the names that the
field knows, or files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import phalanx
from phalanx.check.schema import known_names, schema
from phalanx.cli.files import OutputFiles, write
from phalanx.cli.main import VERBS, description_of
from phalanx.cli.verb import WHOLE, Command, Option, Verb, Words, alone, flag_of
from phalanx.config import reference
from phalanx.config.fields import SECTION_SHORTHAND, short_names
from phalanx.config.layout_line import AUTO, SECTION
from phalanx.echo import echo
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
    alone(("[PAGE]",)),
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
    alone(("[NAME]",), {"out": Option("folder to write to", "examples", value="DIR")}, more=True),
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
    (("extensions list", "by package"), ("extensions names --json", "by table, for programs")),
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


SCRIPTS = Path(__file__).with_name("shells")
SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Returns the completion of a shell: its file, with the words in place of @NAMES@."""
    found = words()
    verbs = [(verb, what.replace("'", "’").replace(":", ";")) for verb, what in VERBS.items()]
    form = {"bash": "{}", "zsh": "'{}:{}'", "fish": "complete -c phalanx -n __fish_use_subcommand -a {} -d '{}'"}[shell]
    texts = {
        "VERBS": ("\n" if shell == "fish" else " ").join(form.format(*each) for each in verbs),
        "OF_JOBS": " ".join(verb for verb in VERBS if description_of(verb).takes_job),
        "SETTINGS": " ".join(f"{key}=" for key in _keys()),
    }
    for name, known in found.items():
        if shell == "fish":
            line = {"arguments": "string split ' ' -- '{}'", "values": "set values {}"}[name]
            cases = [f"    case {key}\n      {line.format(' '.join(each))}" for key, each in known.items()]
            texts[name.upper()] = "\n".join(cases)
        else:
            cases = "\n".join(f"{key}) echo '{' '.join(each)}' ;;" for key, each in known.items())
            texts[name.upper()] = f'_phalanx_{name}() {{ case "$1" in\n{cases}\nesac; }}'
    text = (SCRIPTS / f"phalanx.{shell}").read_text(encoding="utf-8")
    return re.sub("@([A-Z_]+)@", lambda name: texts[name[1]], text).rstrip()


COMPLETION = Verb(
    "completion",
    "Prints a script that completes verbs, options, fields (layout.tp=) and their names in a shell. Write it once, and "
    "again after an update or a new package.",
    {
        "bash": Command(switches={}, about="for bash 4 or later: ~/.bashrc has `source ~/.phalanx.bash`"),
        "zsh": Command(switches={}, about="for zsh: ~/.zshrc has `source ~/.phalanx.zsh` after compinit"),
        "fish": Command(switches={}, about="for fish, which reads its folder of completions by itself"),
    },
    (
        ("completion bash > ~/.phalanx.bash", "for bash"),
        ("completion fish > ~/.config/fish/completions/phalanx.fish", "for fish"),
    ),
)


@COMPLETION.runs
def completion(parsed: Words) -> None:
    echo(script(parsed.command))


def words() -> dict[str, dict[str, list[str]]]:
    """Returns the commands and options of every verb, and the values of every field that has a list of them."""
    return {"arguments": {verb: [*_arguments(description_of(verb))] for verb in VERBS}, "values": _values()}


def _arguments(verb: Verb) -> Iterator[str]:
    yield from (*verb.name.split()[1:], *filter(None, verb.commands))
    yield from (flag_of(option.name) for option in verb.options)
    yield "--help"


def _keys() -> Iterator[str]:
    yield from (SECTION, *SECTION_SHORTHAND)
    fields = [field for field in reference.fields().values() if not field.path.startswith(reference.MEASURED)]
    yield from dict.fromkeys(name for field in fields for name in (field.short, field.path))


def _values() -> dict[str, list[str]]:
    known, found = known_names(), {SECTION: [AUTO]}
    for field in reference.fields().values():
        choices = known.get(field.path) or field.named
        if choices and not field.path.startswith(reference.MEASURED):
            found.update(dict.fromkeys((field.path, field.short), choices))
            if field.name not in short_names():  # the value decides: schedule=zb_v, schedule=cosine
                found[field.name] = [*found.get(field.name, []), *choices]
    return {**found, **{section: found[path] for section, path in SECTION_SHORTHAND.items() if path in found}}


SCHEMA = Verb(
    "schema",
    "Prints every field of a job, with type, default, range and meaning: as JSON schema, with which an editor "
    "completes and checks job files, or as a page.",
    alone(
        (),
        {"out": Option("file to write instead of standard output", value="FILE")},
        switches={"markdown": "as a page (docs/reference/job.md)", "json": "as JSON schema, the default"},
    ),
    (("schema --out phalanx.schema.json", "for an editor"), ("schema --markdown --out job.md", "for a reader")),
    (
        "An editor with the YAML language server reads the schema that a job file names in its first line, as those of "
        "`phalanx init` do: # yaml-language-server: $schema=phalanx.schema.json",
    ),
    default=WHOLE,
)


@SCHEMA.runs
def run_schema(words: Words) -> None:
    out = OutputFiles.of(words, "out").paths.get("out", "")
    if "markdown" in words.switches:
        from phalanx.check.schema import page

        text = page()
    else:
        text = schema_text()
    if out:
        write(out, text)
        echo(f"written: {out}")
    else:
        echo(text.rstrip())


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
