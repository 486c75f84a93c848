"""`phalanx verify JOB`: proves that a job's model computes the same under every layout as on one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.cli.files import DARK, OutputFiles
from phalanx.cli.verb import FROM, Option, Words, flag_of, job_verb
from phalanx.data.files import stderr_progress
from phalanx.echo import echo, visible
from phalanx.errors import JobError
from phalanx.units import counted
from phalanx.verify.select import resumed_pairs, select

if TYPE_CHECKING:
    from phalanx.config.layout import Layout
    from phalanx.dryrun.sums import SumProof
    from phalanx.verify.cases import CaseReport, VerifyCase
    from phalanx.verify.select import Selection

VERB = job_verb(
    "verify",
    "Proves that a job's model computes the same under every layout as on one process: a few steps in float64 on "
    "processes of this machine (CPU, or with cluster.device=cuda its GPUs), comparing loss, gradients and parameters, "
    "and names the first module that differs. By default the job's own layout, each technique alone, and a small set "
    "in which every two features meet. A large model is compared as a small one of the same kind.",
    (
        ("verify examples/main.yaml", "every technique against one process, minutes"),
        ("verify job.yaml --precision bf16", "is the difference in bf16 normal?"),
    ),
    {
        "full": "Also compare every product of dp_replicate, dp_shard, cp (1, 2) and tp, with every sp, zero and "
        "recompute, and every pipeline schedule.",
        "schedules": "Compare only the job's own layout and every pipeline schedule, on 2 to 4 ranks with 2 to 8 "
        "micro-batches.",
        "as_is": "Compare the job's model at full size.",
        "static": "Prove instead, by rehearsing every rank in this process, that no sum over ranks is missing or made "
        "twice: no values, no other processes.",
        "resume": "Prove instead that runs resume in other layouts: from the job's own to others, back, and between "
        "them, as if never interrupted.",
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
        "steps": Option("Optimizer steps to compare.", 2, at_least=1, rare=True),
        **FROM,
        "max_ranks": Option("Maximum number of processes to start at once.", 8, at_least=1, rare=True),
        "precision": Option(
            "Compare in this precision instead of float64: whether each layout's difference is normal, by the "
            "rounding of one process's own sums in other orders.",
            "",
            Literal["bf16", "fp16", "fp8"],
        ),
        "exchange": Option(
            "Prove instead that weights survive import and export: those of a run, or of a Hugging Face folder, to the "
            "bit, with transformers' logits in float64.",
            value="RUN|DIR",
        ),
        "against": Option(
            "Compare two runs instead: in `phalanx verify RUN_A --against RUN_B`, when and where their curves and "
            "checkpoints part, and why.",
            value="RUN_B",
        ),
        "svg": Option(
            "Write a picture of the first layout that differs: modules by ranks; with --against of both curves and "
            "their difference.",
            value="FILE",
            rare=True,
        ),
    },
    exits={1: "a layout, a tensor or a run differs", 2: "a layout cannot be compared, or bad usage"},
)


OF_FILES = {"exchange", "against"}
"""Options that are about files instead of a job."""


@VERB.starts
def run(argv: Sequence[str]) -> int:
    asked, problems = VERB.read(argv)
    if asked.stated & OF_FILES and not VERB.answers_help(argv):
        return _of_files(asked, problems)
    words = VERB.parse(argv)
    return 0 if words is None else _of_job(words)


def _of_files(words: Words, problems: list[str]) -> int:
    """Proves what lies on the disk, which needs no job."""
    subjects = [word for word in words.subjects if word not in ("--json", "--dark")]
    switches = frozenset(word.removeprefix("--") for word in words.subjects if word not in subjects)
    words = replace(words, subjects=tuple(subjects), switches=switches)
    against, asked = "against" in words.stated, " and ".join(map(flag_of, sorted(words.stated & OF_FILES)))
    problems += [f"{flag_of(name)} is for layouts of a job" for name in sorted(words.stated - OF_FILES - {"svg"})]
    if len(words.stated & OF_FILES) > 1:
        problems.append(f"{asked}: give one of them")
    elif not against:
        problems += [f"{word}: --exchange takes one path, and no job" for word in subjects]
        problems += ["--svg is for --against"] if "svg" in words.stated else []
    elif len(subjects) != 1:
        problems.append(f"--against takes one run before it: phalanx verify RUN --against {words.options['against']}")
    if problems:
        raise JobError(problems)
    return _against(words) if against else _exchange(words)


def _against(words: Words) -> int:
    files = OutputFiles.of(words, "svg")
    from phalanx.verify.against import compare_runs

    with stderr_progress() as progress:
        found = compare_runs(Path(words.subject), Path(words.options["against"]), progress)
    words.show(found.as_dict(), found.text())
    files.write({"svg": found.svg})
    files.tell()
    return 0 if found.ok else 1


def _exchange(words: Words) -> int:
    from phalanx.exchange import folder as hub
    from phalanx.verify.exchange import prove

    asked = words.options["exchange"]
    path = hub.downloaded(asked) if asked.startswith(hub.PREFIX) else Path(asked)
    with stderr_progress() as progress:
        report = prove(path, progress)
    words.show(report.as_dict(), report.text())
    return 0 if report.ok else 1


def _of_job(words: Words) -> int:
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
    if "resume" in words.switches:
        clashing = [flag_of(name) for name in ("full", "schedules", "static") if name in words.switches]
        clashing += [flag_of(name) for name in ("precision", "svg") if words.options[name]]
        if clashing:
            raise JobError(f"--resume has its own layouts, or those of --layouts: leave {', '.join(clashing)} out")
        return _resume(words)
    if "static" in words.switches and (clashing := [flag_of(n) for n in ("precision", "svg") if words.options[n]]):
        raise JobError(f"--static compares no values: leave {', '.join(clashing)} out")
    alone = words.theirs is not None and not (full or schedules)
    precision, files = words.options["precision"] or None, OutputFiles.of(words, "svg")
    if precision and files.paths:
        raise JobError(
            "--svg draws the module that differs, for which --precision does not look: give one of them; without "
            "--precision layouts are compared in float64"
        )
    chosen: dict[str, Any] = {"lines": lines, "full": full, "schedules": schedules, "max_ranks": max_ranks}
    chosen |= {"as_is": as_is, "precision": precision, "alone": alone, "values": "static" not in words.switches}
    selection = select(words.job, **chosen)
    if "static" in words.switches:
        return _static(words, selection)
    from phalanx.verify import rounding, run  # here, because they import torch, which --help and errors do not need

    _announce(selection, *run.introduction(selection, steps, own_precision=bool(precision)))
    with _progress(len(selection.layouts)) as (on_start, on_case):
        verify = rounding.run_in_precision if precision else run.run
        report = verify(selection, steps, on_case, on_start)
    words.show(report.as_dict(), report.text())
    if isinstance(report, run.VerifyReport) and (drawn := run.picture(report)):
        files.write({"svg": lambda: drawn})
        files.tell()
    elif files.paths:
        echo(f"no layout was found to differ: {files.paths['svg']} is not written", file=sys.stderr)
    return _exit_code(report, selection)


def _static(words: Words, selection: Selection) -> int:
    from phalanx.dryrun.sums import prove_sums

    proofs: list[SumProof] = []
    with stderr_progress() as progress:
        for done, layout in enumerate(selection.layouts):
            progress("rehearsing layouts", done, len(selection.layouts))
            proofs.append(prove_sums(selection.case(layout), selection.compared.vocab_size))
    failed, left = sum(bool(each.findings) for each in proofs), sum(bool(each.not_judged) for each in proofs)
    last = f"Sums over ranks: {counted(len(proofs) - failed - left, 'layout')} ok, {failed} failed, {left} not judged"
    lines = [*(each.text() for each in proofs), *selection.not_compared(), "", last]
    asked = bool(selection.refused) or bool(left and (words.options["layouts"] or left == len(proofs)))
    code = 1 if failed else JobError.exit_code if asked else 0
    words.show({"ok": code == 0, "cases": [each.as_dict() for each in proofs]}, "\n".join(lines))
    return code


def _announce(selection: Selection, *lines: str) -> None:
    """Reports on standard error what is compared, and refuses a device that this machine lacks."""
    from phalanx.verify.run import refuse_missing_device

    refuse_missing_device(selection)
    for problem in selection.refused:
        echo(f"phalanx: {problem}; the other layouts are compared", file=sys.stderr, flush=True)
    echo("\n".join(lines), file=sys.stderr, flush=True, wrap=True)


def _exit_code(report: CaseReport[Any], selection: Selection) -> int:
    return 1 if not report.ok else JobError.exit_code if selection.refused else 0


def _resume(words: Words) -> int:
    steps, max_ranks, lines = (words.options[name] for name in ("steps", "max_ranks", "layouts"))
    selection, pairs = resumed_pairs(words.job, lines=lines, max_ranks=max_ranks, as_is="as_is" in words.switches)
    from phalanx.verify.resume import resume_all
    from phalanx.verify.run import introduction

    _, *facts = introduction(selection, steps)
    lead = f"resuming {len(pairs)} pairs of layouts, {steps} steps before and {steps} after, in fp64"
    _announce(selection, lead, *facts)
    report = resume_all(selection, pairs, steps, lambda case: echo(case.progress(), file=sys.stderr, flush=True))
    words.show(report.as_dict(), report.text())
    return _exit_code(report, selection)


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[Layout], None], Callable[[VerifyCase], None]]]:
    """Provides the callbacks before and after each case: a live bar on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda _: None, lambda case: echo(case.progress(), file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def on_case(case: VerifyCase) -> None:
            bar.advance(task)
            if not case.ok:
                console.print(visible(case.progress()), markup=False)

        yield lambda layout: bar.update(task, description=visible(layout.line())), on_case
