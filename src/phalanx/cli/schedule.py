"""`phalanx schedule list | show | check`: the pipeline schedules, drawn, measured and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cli.job_words import Option
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.partition.pipeline import is_file
from phalanx.pictures import schedule as schedule_picture
from phalanx.pictures import schedule_text
from phalanx.schedule import catalogue, file, timing, trace
from phalanx.schedule.blocking import blocked
from phalanx.schedule.check import in_flight
from phalanx.schedule.schedule import Schedule

PAGE = """\
phalanx schedule: pipeline schedules, as the order of actions on each rank

usage: phalanx schedule list [--json]                     list all schedules
       phalanx schedule show NAME|FILE [--option value]   draw one and print its figures
       phalanx schedule check FILE [--json]               validate a schedule in a file of your own

options of show:
{options}
  --json              print one JSON document on standard output and nothing else

A FILE is CSV with one row per rank and cells such as 0F3 (stage 0, forward pass, micro-batch 3). B is a backward pass;
I and W are its input-gradient and weight-gradient halves. The file states its ranks, micro-batches and slices.

examples:
  phalanx schedule show 1f1b --stages 4 --microbatches 8
  phalanx schedule show zb_v --stages 4 --microbatches 8 --svg zb_v.svg --csv mine.csv
  phalanx schedule check mine.csv\
"""

SIZES = {
    "stages": Option(int, 4, "ranks of the pipeline (also --ranks, --pp)", at_least=1),
    "microbatches": Option(int, 8, "micro-batches per optimizer step (also --micro-batches)", at_least=1),
    "chunks": Option(int, None, "stages per rank (default: the schedule's own)", at_least=1),
    "slices": Option(int, None, "parts of each sequence (default: the schedule's own)", at_least=1),
    "steps": Option(int, None, "optimizer steps without a flush in between (default: the schedule's own)", at_least=1),
}
FILES = {
    "svg": Option(str, "", "write the picture to a file"),
    "trace": Option(str, "", "write trace events to a file, for ui.perfetto.dev"),
    "csv": Option(str, "", "write the schedule as CSV, in the format of torch.distributed.pipelining"),
}
COMMANDS: dict[str, dict[str, Option]] = {"list": {}, "show": SIZES | FILES, "check": {}}
ALIASES = {"ranks": "stages", "pp": "stages", "micro_batches": "microbatches"}


@dataclass(frozen=True)
class ScheduleArguments:
    """The command line, understood."""

    command: str
    subject: str
    """The NAME or FILE; empty for list."""
    options: dict[str, Any]
    """Those that were given."""
    as_json: bool


def run(argv: Sequence[str]) -> int:
    if not argv or {"-h", "--help", "help"} & set(argv):
        print(PAGE.format(options="\n".join(map(_help, COMMANDS["show"]))))
        return 0
    words = _parse(argv)
    if words.command == "list":
        _list(words.as_json)
    elif words.command == "check":
        _check(words)
    else:
        _show(words)
    return 0


def _help(name: str) -> str:
    option = COMMANDS["show"][name]
    value = "FILE" if option.kind is str else "N"
    default = f" (default {option.default})" if option.default else ""
    return f"  {f'--{name} {value}':<18}  {option.about}{default}"


def _parse(argv: Sequence[str]) -> ScheduleArguments:
    """Raises JobError with every problem of the words."""
    command, *left = argv
    if command not in COMMANDS:
        meant = nearest(command, COMMANDS)
        hint = f"did you mean `phalanx schedule {meant}`?" if meant else f"there are: {', '.join(COMMANDS)}"
        if catalogue.likely(command) or command.endswith(".csv"):
            hint = f"a command comes first: `phalanx schedule show {command}`"
        raise JobError(f"phalanx schedule has no command {command!r}; {hint}")
    known = COMMANDS[command]
    subjects: list[str] = []
    options: dict[str, Any] = {}
    problems: list[str] = []
    as_json = False
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        name = ALIASES.get(name, name)
        if word == "--json":
            as_json = True
        elif not word.startswith("-") or word == "-":
            subjects.append(word)
        elif name not in known:
            meant = nearest(name, [*known, *(ALIASES if command == "show" else ()), "json"])
            problems.append(
                f"unknown option {flag}" + (f"; did you mean --{meant.replace('_', '-')}?" if meant else "")
            )
            if not equals and left and not left[0].startswith("-"):
                left.pop(0)  # its value: one mistake is one message
        else:
            if not equals and left and not left[0].startswith("--"):
                equals, value = "=", left.pop(0)
            try:
                options[name] = known[name].convert([value] if equals and value else [])[0]
            except ValueError as error:
                problems.append(f"{flag}: {error}")
    needed = {"list": "", "show": "a schedule's name or a file", "check": "a file"}[command]
    if len(subjects) != bool(needed):
        takes = needed or "no name"
        found = " ".join(subjects) or "nothing"
        problems.append(f"phalanx schedule {command} takes {takes}, found {found}")
    if problems:
        raise JobError(problems)
    return ScheduleArguments(command, subjects[0] if subjects else "", options, as_json)


def _list(as_json: bool) -> None:
    if as_json:
        print(json.dumps([_entry(name) for name in catalogue.SCHEDULES], indent=1))
        return
    width = max(map(len, catalogue.SCHEDULES))
    titles = max(len(entry.title) for entry in catalogue.SCHEDULES.values())
    for name, entry in catalogue.SCHEDULES.items():
        print(f"{name:<{width}}  {entry.title:<{titles}}  {entry.source}")


def _entry(name: str) -> dict[str, object]:
    entry = catalogue.SCHEDULES[name]
    least, most = entry.chunks
    return {
        "name": name,
        "title": entry.title,
        "source": entry.source,
        "chunks": {"least": least, "most": most if most < catalogue.MANY else None},
        "sliced": entry.sliced,
        "splits": entry.splits,
    }


def _check(words: ScheduleArguments) -> None:
    schedule = file.read(words.subject)
    if words.as_json:
        print(json.dumps({"ok": True, **_figures(timing.time(schedule))}))
    else:
        print(f"{words.subject}: valid\n{_report(timing.time(schedule))}")


def _show(words: ScheduleArguments) -> None:
    schedule = _schedule(words.subject, {name: words.options[name] for name in SIZES if name in words.options})
    timed = timing.time(schedule)
    written = {name: words.options[name] for name in FILES if name in words.options}
    contents = {"svg": schedule_picture.svg, "trace": trace.text, "csv": lambda timed: file.text(timed.schedule)}
    for name, path in written.items():
        file.save(contents[name](timed), path)
    if words.as_json:
        programs = [[str(action) for action in program] for program in schedule.programs]
        print(json.dumps({**_figures(timed), "programs": programs, "written": written}))
        return
    print(_report(timed))
    print()
    schedule_text.show(timed)
    for path in written.values():
        print(f"\nwritten: {path}")


def _schedule(subject: str, sizes: dict[str, int]) -> Schedule:
    """The schedule of that name or in that file."""
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
        "chunks": len(schedule.held(0)),
        "slices": schedule.slices,
        "steps": schedule.steps,
        "bubble": timed.bubble,
        "duration": timed.duration,
        "idle": [timed.idle(rank) for rank in range(schedule.ranks)],
        "in_flight": list(in_flight(schedule)),
        "sends_may_block": not blocked(schedule),
    }


def _report(timed: timing.Timing) -> str:
    """The figures for a person."""
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
