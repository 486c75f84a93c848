"""Verbs about programs that are data: `phalanx schedule list | show | check`, pipeline schedules, drawn, measured and
checked; `phalanx collectives list | show | check`, the algorithms of collectives, drawn, counted and run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import JSON, Command, Option, Verb, Words
from phalanx.comm.algorithms.program import ALGORITHMS, CollectiveProgram, build, counts, full_name, svg, table
from phalanx.echo import echo
from phalanx.errors import JobError, RunError
from phalanx.partition.derived import is_file
from phalanx.pictures import schedule as schedule_picture
from phalanx.registry import OWN
from phalanx.schedule import catalogue, file, timing, trace
from phalanx.schedule.check import blocked, in_flight
from phalanx.schedule.schedule import Schedule
from phalanx.units import aligned, gib

SIZES = {
    "stages": Option("ranks of the pipeline (also --ranks, --pp)", 4, at_least=1),
    "microbatches": Option("micro-batches per optimizer step (also --micro-batches)", 8, at_least=1),
    "chunks": Option("stages per rank (default: the schedule's own)", None, int, at_least=1),
    "slices": Option("parts of each sequence (default: the schedule's own)", None, int, at_least=1),
    "steps": Option("optimizer steps without a flush in between (default: the schedule's own)", None, int, at_least=1),
}
FILES = {
    "svg": Option("write the picture", value="FILE"),
    "trace": Option("write trace events for ui.perfetto.dev", value="FILE"),
    "csv": Option("write the schedule as CSV, in the format of torch.distributed.pipelining", value="FILE"),
}
SCHEDULE = Verb(
    "schedule",
    "Pipeline schedules, as the order of actions on each rank: lists, draws, measures and checks them.",
    {
        "list": Command(about="list all schedules"),
        "show": Command(
            ("NAME|FILE",),
            SIZES | FILES,
            aliases={"ranks": "stages", "pp": "stages", "micro_batches": "microbatches"},
            switches=DARK | JSON,
            about="draw one and print its figures",
        ),
        "check": Command(("FILE",), about="validate a schedule in a file of your own"),
    },
    (
        ("schedule show 1f1b --stages 4 --microbatches 8", "in the terminal"),
        ("schedule show zb_v --svg zb_v.svg --csv mine.csv", "a picture, and a file to change"),
    ),
    (
        "A FILE is CSV with one row per rank and cells such as 0F3 (stage 0, forward pass, micro-batch 3). B is a "
        "backward pass; I and W are its input-gradient and weight-gradient halves. The file states its ranks, "
        "micro-batches and slices.",
    ),
    hint=lambda word: (
        f"put the command first: `phalanx schedule show {word}`"
        if catalogue.likely(word) or word.endswith(".csv")
        else ""
    ),
)


@SCHEDULE.runs
def run_schedule(words: Words) -> None:
    {"list": _list, "check": _check, "show": _show}[words.command](words)


def _list(words: Words) -> None:
    rows = []
    for name, entry in catalogue.SCHEDULES.items():
        package = catalogue.SCHEDULES.package(name)
        from_outside = "" if package == OWN else f"  ({package or 'this process'})"
        rows.append((name, entry.title, f"{entry.source}{from_outside}"))
    words.show([_entry(name) for name in catalogue.SCHEDULES], "\n".join(aligned(rows)))


def _entry(name: str) -> dict[str, object]:
    entry = catalogue.SCHEDULES[name]
    least, most = entry.chunks
    return {
        "name": name,
        "title": entry.title,
        "source": entry.source,
        "chunks": {"least": least, "most": most if most < catalogue.UNBOUNDED_CHUNKS else None},
        "sliced": entry.sliced,
        "splits": entry.splits,
        "package": catalogue.SCHEDULES.package(name),
    }


def _check(words: Words) -> None:
    timed = timing.time(file.read(words.subject))
    words.show({"ok": True, **_figures(timed)}, f"{words.subject}: valid\n{_report(timed)}", indent=None)


def _show(words: Words) -> None:
    files = OutputFiles.of(words, *FILES)
    schedule = _schedule(words.subject, words.given(SIZES))
    timed = timing.time(schedule)
    files.write(
        {
            "svg": lambda: schedule_picture.svg(timed),
            "trace": lambda: trace.text(timed),
            "csv": lambda: file.text(schedule),
        }
    )
    programs = [[str(action) for action in program] for program in schedule.programs]
    words.show({**_figures(timed), "programs": programs, "written": files.paths}, f"{_report(timed)}\n", indent=None)
    if not words.as_json:
        schedule_picture.print_grid(timed)
    files.tell()


def _schedule(subject: str, sizes: dict[str, int]) -> Schedule:
    if not is_file(subject):
        stages, microbatches = (sizes.pop(name, SIZES[name].default) for name in ("stages", "microbatches"))
        return catalogue.build(subject, stages, microbatches, **sizes)
    if sizes:
        given = ", ".join(f"--{name}" for name in sizes)
        raise JobError(f"{given}: a file states the size of its schedule; omit the option, or name a schedule")
    return file.read(subject)


def _figures(timed: timing.Timing) -> dict[str, object]:
    schedule = timed.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "chunks": len(schedule.stages_on(0)),
        "slices": schedule.slices,
        "steps": schedule.steps,
        "bubble": timed.bubble,
        "bubble_without_flush": timed.bubble_without_flush,
        "duration": timed.duration,
        "idle": [timed.idle(rank) for rank in range(schedule.ranks)],
        "in_flight": list(in_flight(schedule)),
        "sends_may_block": not blocked(schedule),
    }


def _report(timed: timing.Timing) -> str:
    schedule = timed.schedule
    waits = blocked(schedule)
    return "\n".join(
        [
            f"{schedule.name}: {schedule_picture.size(schedule)}",
            schedule_picture.summary(timed),
            f"idle time per rank: {', '.join(f'{timed.idle(rank):g}' for rank in range(schedule.ranks))}",
            f"peak live activations per rank: {', '.join(map(str, in_flight(schedule)))}",
            "sends: " + ("must be asynchronous; blocking sends would deadlock" if waits else "may block"),
        ]
    )


TENSOR = {
    "ranks": Option("ranks of the group", 4, at_least=1),
    "elements": Option("elements of the tensor", 2**20, int, at_least=0),
    "element_bytes": Option("bytes of an element", 4, at_least=1),
}
SETTINGS = {
    "root": Option("the rank that sends or receives all, if there is one (default 0)", None, int, at_least=0),
    "group": Option("hierarchical: ranks per group (default: their largest proper divisor)", None, int, at_least=1),
}
PICTURE = {"svg": Option("write the picture", value="FILE")}
CHECKED = {"ranks": TENSOR["ranks"], "elements": TENSOR["elements"]} | SETTINGS
MAX_PROCESSES = 16
"""Maximum ranks of `check`: each is a process of this machine, with about 200 MB of torch."""
COLLECTIVES = Verb(
    "collectives",
    "Algorithms of collectives, as messages from one rank to another, step by step: lists, draws, counts and checks "
    "them. Training uses the backend's own collectives (gloo, NCCL).",
    {
        "list": Command(about="the algorithms there are"),
        "show": Command(
            ("NAME",), TENSOR | SETTINGS | PICTURE, switches=DARK | JSON, about="one of them, drawn and counted"
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


@COLLECTIVES.runs
def run_collectives(words: Words) -> None:
    {"list": _list_algorithms, "check": _check_algorithm, "show": _show_algorithm}[words.command](words)


def _list_algorithms(words: Words) -> None:
    entries = [
        {"name": name, "steps": entry.steps, "source": entry.source, "takes": entry.takes or None}
        for name, entry in ALGORITHMS.items()
    ]
    rows = [(name, entry.steps, entry.source) for name, entry in ALGORITHMS.items()]
    words.show(entries, "\n".join(aligned(rows)))


def _show_algorithm(words: Words) -> None:
    ranks, elements, size = (words.options[name] for name in TENSOR)
    files = OutputFiles.of(words, "svg")
    program = build(words.subject, ranks, elements, **words.given(SETTINGS))
    files.write({"svg": lambda: svg(program)})
    tensor = f"{elements:,} elements of {size} bytes ({gib(elements * size)})"
    title = f"{program.name}: {program.ranks} ranks, {tensor}"
    words.show(algorithm_document(program, size), "\n".join([title, *counts(program, size), ""]), indent=None)
    if not words.as_json:
        echo("\n".join(table(program)))
    files.tell()


def _check_algorithm(words: Words) -> None:
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


def algorithm_document(program: CollectiveProgram, element_bytes: int) -> dict[str, Any]:
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
