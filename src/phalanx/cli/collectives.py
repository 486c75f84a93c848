"""`phalanx collectives list | show | check`: the algorithms of collectives, drawn, counted and run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.option import Option
from phalanx.cli.verb import JSON, Command, Verb, Words
from phalanx.comm.algorithms import draw
from phalanx.comm.algorithms.program import ALGORITHMS, CollectiveProgram, build, full_name
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.units import aligned, gib

SIZES = {
    "ranks": Option(int, 4, "ranks of the group", at_least=1),
    "elements": Option(int, 2**20, "elements of the tensor", at_least=0),
    "element_bytes": Option(int, 4, "bytes of an element", at_least=1),
}
SETTINGS = {
    "root": Option(int, None, "the rank that sends or receives all, if there is one (default 0)", at_least=0),
    "group": Option(int, None, "hierarchical: ranks per group (default: their largest proper divisor)", at_least=1),
}
FILES = {"svg": Option(str, "", "write the picture", value="FILE")}
CHECKED = {"ranks": SIZES["ranks"], "elements": SIZES["elements"]} | SETTINGS
MAX_PROCESSES = 16
"""Maximum ranks of `check`: each is a process of this machine, with about 200 MB of torch."""
VERB = Verb(
    "collectives",
    "Algorithms of collectives, as messages from one rank to another, step by step: lists, draws, counts and checks "
    "them. Training uses the backend's own collectives (gloo, NCCL).",
    {
        "list": Command(about="the algorithms there are"),
        "show": Command(
            ("NAME",), SIZES | SETTINGS | FILES, switches=DARK | JSON, about="one of them, drawn and counted"
        ),
        "check": Command(
            ("NAME",),
            CHECKED,
            about="one of them, run on CPU processes; its result is compared with the definition of the collective "
            f"(at most {MAX_PROCESSES} ranks)",
        ),
    },
    (
        ("collectives show ring-all-reduce --ranks 4", "a ring of four"),
        ("collectives show hierarchical-all-reduce --ranks 8 --group 4 --svg hierarchical.svg", "as a picture"),
    ),
    exits={1: "check: the result is wrong"},
    hint=lambda word: f"put the command first: `phalanx collectives show {word}`" if word in ALGORITHMS else "",
)


@VERB.runs
def run(words: Words) -> None:
    {"list": _list, "check": _check, "show": _show}[words.command](words)


def _list(words: Words) -> None:
    entries = [
        {"name": name, "steps": entry.steps, "source": entry.source, "takes": entry.takes or None}
        for name, entry in ALGORITHMS.items()
    ]
    rows = [(name, entry.steps, entry.source) for name, entry in ALGORITHMS.items()]
    words.show(entries, "\n".join(aligned(rows)))


def _show(words: Words) -> None:
    ranks, elements, size = (words.options[name] for name in SIZES)
    files = OutputFiles.of(words, "svg")
    program = build(words.subject, ranks, elements, **words.given(SETTINGS))
    files.write({"svg": lambda: draw.svg(program)})
    tensor = f"{elements:,} elements of {size} bytes ({gib(elements * size)})"
    title = f"{program.name}: {program.ranks} ranks, {tensor}"
    words.show(as_json(program, size), "\n".join([title, *draw.counts(program, size), ""]), indent=None)
    if not words.as_json:
        echo("\n".join(draw.table(program)))
    files.tell()


def _check(words: Words) -> None:
    """Runs an algorithm. Raises RunError if the result of a rank is not that of the collective."""
    ranks, elements = (words.options[name] for name in ("ranks", "elements"))
    name, settings = full_name(words.subject), words.given(SETTINGS)
    if ranks > MAX_PROCESSES:
        raise JobError(f"ranks {ranks}: check starts a process per rank, at most {MAX_PROCESSES}")
    build(name, ranks, elements, **settings)
    from phalanx.comm.algorithms.execute import matches_definition  # imported here, because they import torch
    from phalanx.launch.pool import Pool

    with Pool(ranks, [matches_definition.__module__]) as pool:
        matches = pool.run(matches_definition, ranks, name, elements, settings)
    if wrong := [str(rank) for rank, matched in enumerate(matches) if not matched]:
        raise RunError(f"{name}: wrong result on ranks {', '.join(wrong)} of {ranks}, with {elements:,} elements")
    said = f"{name}: correct result on each of {ranks} ranks, with {elements:,} elements"
    words.show({"name": name, "ranks": ranks, "elements": elements, "ok": True}, said, indent=None, wrap=False)


def as_json(program: CollectiveProgram, element_bytes: int) -> dict[str, Any]:
    """Returns the document of `show --json` (docs/techniques/collectives.md)."""
    return {
        "name": program.name,
        "ranks": program.ranks,
        "chunks": [[chunk.start, chunk.stop] for chunk in program.chunks],
        "messages_sent": program.messages_sent(),
        "bytes_sent": [elements * element_bytes for elements in program.elements_sent()],
        "critical_bytes": program.critical_elements() * element_bytes,
        "steps": [
            {
                "phase": step.phase,
                "messages": [
                    {**asdict(message), "span": [message.span.start, message.span.stop]} for message in step.messages
                ],
            }
            for step in program.steps
        ],
    }
