"""`phalanx verify JOB`: proves that a job's model computes the same under every layout as on one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import FROM, Option, Words, job_verb
from phalanx.echo import echo, visible
from phalanx.errors import JobError
from phalanx.verify.select import select

if TYPE_CHECKING:
    from phalanx.config.layout import Layout
    from phalanx.verify.rounding import RoundingCase
    from phalanx.verify.run import LayoutCase
    from phalanx.verify.select import Selection

VERB = job_verb(
    "verify",
    "Proves that a job's model computes the same under every layout as on one process: a few steps in float64 on "
    "processes of this machine, comparing the loss, every gradient and every parameter, and names the first module "
    "that differs. They compute on the CPU, or, with cluster.device=cuda, on its GPUs, which they may share. By "
    "default the job's own "
    "layout, each technique alone, and a small set of layouts in which every two features meet (data, tensor, "
    "sequence, context, expert and pipeline parallelism, recomputation). A large model is compared as a small one of "
    "the same kind; one without experts gets some where a layout has ep above 1.",
    (
        ("verify examples/main.yaml", "every technique against one process, about a minute"),
        ("verify job.yaml --precision bf16", "is the difference in bf16 normal?"),
    ),
    {
        "full": "Also compare every product of dp_replicate, dp_shard, cp (1, 2) and tp, with every sp, zero and "
        "recompute, and every pipeline schedule.",
        "schedules": "Compare only the job's own layout and every pipeline schedule, on 2 to 4 ranks with 2 to 8 "
        "micro-batches.",
        "as_is": "Compare the job's model at full size.",
        **DARK,
    },
    {
        "layouts": Option(
            "Layouts to compare instead, each as one word, such as tp=2,sp=true or cp=4,cp_ulysses=2 or "
            "dp_shard=2,ep=2. The list ends at the next --option or job file.",
            (),
            str,
            many=True,
        ),
        "steps": Option("Optimizer steps to compare.", 2, at_least=1),
        **FROM,
        "max_ranks": Option("Maximum number of processes to start at once.", 8, at_least=1),
        "precision": Option(
            "Compare in this precision instead of float64: whether each layout's difference is normal, by the "
            "rounding of one process's own sums in other orders.",
            "",
            Literal["bf16", "fp16", "fp8"],
        ),
        "svg": Option("write a picture of the first layout that differs: modules by ranks", value="FILE", rare=True),
    },
    exits={1: "a layout differs", 2: "a layout cannot be compared, or bad usage"},
)


@VERB.runs
def run(words: Words) -> int:
    steps, max_ranks, lines = (words.options[name] for name in ("steps", "max_ranks", "layouts"))
    full, schedules, as_is = (name in words.switches for name in ("full", "schedules", "as_is"))
    if lines and full:
        raise JobError(
            "--full and --layouts exclude each other: --full compares all layouts, --layouts those that it names"
        )
    if schedules and (lines or full):
        raise JobError(
            "--schedules excludes --full, which includes it, and --layouts, which names the layouts to compare"
        )
    alone = words.theirs is not None and not (full or schedules)
    precision, files = words.options["precision"] or None, OutputFiles.of(words, "svg")
    if precision and files.paths:
        raise JobError(
            "--svg draws the module that differs, for which --precision does not look: give one of them; without "
            "--precision layouts are compared in float64"
        )
    chosen: dict[str, Any] = {"lines": lines, "full": full, "schedules": schedules, "max_ranks": max_ranks}
    selection = select(words.job, **chosen, as_is=as_is, precision=precision, alone=alone)
    # Imported here, because it imports torch, which --help and errors do not need.
    from phalanx.verify import run as verify
    from phalanx.verify.rounding import rounding_table
    from phalanx.verify.run import introduction, table

    verify.refuse_missing_device(selection)
    for problem in selection.refused:
        echo(f"phalanx: {problem}; the other layouts are compared", file=sys.stderr, flush=True)
    lines = introduction(selection, steps, own_precision=bool(precision))
    echo("\n".join(lines), file=sys.stderr, flush=True, wrap=True)
    with _progress(len(selection.layouts)) as (on_start, on_case):
        if precision:
            report = verify.run_in_precision(selection, steps, on_case, on_start)
            words.show(report.as_dict(), rounding_table(report))
            return _exit_code(report.ok, selection)
        report = verify.run(selection, steps, on_case, on_start)
    words.show(report.as_dict(), table(report))
    if drawn := verify.picture(report):
        files.write({"svg": lambda: drawn})
        files.tell()
    elif files.paths:
        echo(f"no layout was found to differ: {files.paths['svg']} is not written", file=sys.stderr)
    return _exit_code(report.ok, selection)


def _exit_code(ok: bool, selection: Selection) -> int:
    return 1 if not ok else JobError.exit_code if selection.refused else 0


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[Layout], None], Callable[[LayoutCase | RoundingCase], None]]]:
    """Provides the callbacks before and after each case: a live bar on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from phalanx.verify.run import progress

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda _: None, lambda case: echo(progress(case), file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def on_case(case: LayoutCase | RoundingCase) -> None:
            bar.advance(task)
            if not case.ok:
                console.print(visible(progress(case)), markup=False)

        yield lambda layout: bar.update(task, description=visible(layout.line())), on_case
