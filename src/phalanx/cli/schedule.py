"""`phalanx schedule list | show | check`: the pipeline schedules, drawn, measured and checked."""

from __future__ import annotations

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.option import Option
from phalanx.cli.verb import JSON, Command, Verb, Words
from phalanx.errors import JobError
from phalanx.partition.derived import is_file
from phalanx.pictures import schedule as schedule_picture
from phalanx.registry import OWN
from phalanx.schedule import catalogue, file, timing, trace
from phalanx.schedule.check import blocked, in_flight
from phalanx.schedule.schedule import Schedule
from phalanx.units import aligned

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
VERB = Verb(
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


@VERB.runs
def run(words: Words) -> None:
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
