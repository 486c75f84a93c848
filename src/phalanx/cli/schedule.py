"""`phalanx schedule list | show | check`: the pipeline schedules, drawn, measured and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phalanx.cli.commands import JSON, Command, CommandVerb, CommandWords
from phalanx.cli.files import DARK, check_folders, wants_dark, write
from phalanx.cli.option import Option
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.partition.derived import is_file
from phalanx.pictures import schedule as schedule_picture
from phalanx.pictures import schedule_text
from phalanx.registry import OWN
from phalanx.schedule import catalogue, file, timing, trace
from phalanx.schedule.blocking import blocked
from phalanx.schedule.check import in_flight
from phalanx.schedule.schedule import Schedule

SIZES = {
    "stages": Option(int, 4, "ranks of the pipeline (also --ranks, --pp)", at_least=1),
    "microbatches": Option(int, 8, "micro-batches per optimizer step (also --micro-batches)", at_least=1),
    "chunks": Option(int, None, "stages per rank (default: the schedule's own)", at_least=1),
    "slices": Option(int, None, "parts of each sequence (default: the schedule's own)", at_least=1),
    "steps": Option(int, None, "optimizer steps without a flush in between (default: the schedule's own)", at_least=1),
}
FILES = {
    "svg": Option(str, "", "write the picture", value="FILE"),
    "trace": Option(str, "", "write trace events for ui.perfetto.dev", value="FILE"),
    "csv": Option(str, "", "write the schedule as CSV, in the format of torch.distributed.pipelining", value="FILE"),
}
VERB = CommandVerb(
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


def run(argv: Sequence[str]) -> int:
    words = VERB.parse(argv)
    if words is None:
        return 0
    if words.command == "list":
        _list(words.as_json)
    elif words.command == "check":
        _check(words)
    else:
        _show(words)
    return 0


def _list(as_json: bool) -> None:
    if as_json:
        echo(json.dumps([_entry(name) for name in catalogue.SCHEDULES], indent=1))
        return
    width = max(map(len, catalogue.SCHEDULES))
    titles = max(len(entry.title) for entry in catalogue.SCHEDULES.values())
    for name, entry in catalogue.SCHEDULES.items():
        package = catalogue.SCHEDULES.package(name)
        from_outside = "" if package == OWN else f"  ({package or 'this process'})"
        echo(f"{name:<{width}}  {entry.title:<{titles}}  {entry.source}{from_outside}", wrap=True)


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


def _check(words: CommandWords) -> None:
    schedule = file.read(words.subject)
    if words.as_json:
        echo(json.dumps({"ok": True, **_figures(timing.time(schedule))}))
    else:
        echo(f"{words.subject}: valid\n{_report(timing.time(schedule))}", wrap=True)


def _show(words: CommandWords) -> None:
    written = words.given(FILES)
    check_folders(written, *written)
    schedule = _schedule(words.subject, words.given(SIZES))
    timed = timing.time(schedule)
    dark = wants_dark(words.switches, written, "svg")
    contents = {"svg": schedule_picture.svg, "trace": trace.text, "csv": lambda timed: file.text(timed.schedule)}
    for name, path in written.items():
        write(path, contents[name](timed), dark)
    if words.as_json:
        programs = [[str(action) for action in program] for program in schedule.programs]
        echo(json.dumps({**_figures(timed), "programs": programs, "written": written}))
        return
    echo(_report(timed), wrap=True)
    echo()
    schedule_text.show(timed)
    for path in written.values():
        echo(f"\nwritten: {path}")


def _schedule(subject: str, sizes: dict[str, int]) -> Schedule:
    if not is_file(subject):
        chosen: dict[str, Any] = {"stages": SIZES["stages"].default, "microbatches": SIZES["microbatches"].default}
        chosen.update(sizes)
        return catalogue.build(subject, chosen.pop("stages"), chosen.pop("microbatches"), **chosen)
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
