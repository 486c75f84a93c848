"""Runs the cases of `phalanx verify` on warm ranks of this machine, and reports them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import PhalanxError
from phalanx.launch.pool import Pool
from phalanx.notebook import ShownInNotebooks
from phalanx.pictures.page import html_page, table
from phalanx.units import aligned, counted, finite, seconds
from phalanx.verify.measure import MIN_STEPS, Differences, compare, nothing, record
from phalanx.verify.select import Selection

PRELOAD = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "phalanx.verify.trace")
START_S = 300.0
"""Maximum seconds for processes to start."""
RunRanks = Callable[..., list[Any]]
"""Runs a function on ranks: (function, ranks, *arguments, timeout=seconds), as Pool.run."""


@dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """One comparison. What it measures is None if it failed to run."""

    ok: bool = False
    """Whether all differences are within the tolerance."""
    error: str | None = None
    """The message of what failed on the ranks; None if they ran."""
    seconds: float = 0.0
    """Seconds of the case."""

    @property
    def title(self) -> str:
        """The layouts in a line."""
        raise NotImplementedError

    def complaint(self) -> str:
        """Returns the cause of a failed case."""
        raise NotImplementedError

    def progress(self) -> str:
        """Returns one line about the finished case."""
        failed = "" if self.ok else f": {self.complaint()}"
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.title} ({seconds(self.seconds)}){failed}"


AnyCase = TypeVar("AnyCase", bound=VerifyCase)


@dataclass
class CaseReport(ShownInNotebooks, Generic[AnyCase]):
    """All cases, in order."""

    page = "phalanx.verify.cases:html"

    selection: Selection
    steps: int
    cases: list[AnyCase] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of all cases."""

    names: ClassVar[int] = 1
    """Columns of the table that are names of layouts."""
    noun: ClassVar[str] = "layout"
    heading: ClassVar[str] = "Differences:"
    """The line above the failed cases."""

    @property
    def ok(self) -> bool:
        """Whether no case failed."""
        return all(case.ok for case in self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of --json. A difference that is not a number (NaN) is null."""
        selection = self.selection
        return {
            "cases": [finite(asdict(case)) for case in self.cases],
            "ok": self.ok,
            "steps": self.steps,
            "shrunk": {path: list(pair) for path, pair in selection.compared.changes.items()},
            "skipped": [asdict(skipped) for skipped in selection.skipped],
            "refused": selection.refused,
            "notes": selection.notes,
            "seconds": round(self.seconds, 3),
        }

    def rows(self) -> Iterator[Sequence[str]]:
        """Yields the table: the names of the columns, then a row per case, without verdict and time."""
        raise NotImplementedError

    def failures(self, failed: Sequence[AnyCase]) -> Iterator[str]:
        """Yields lines about the failed cases."""
        for case in failed:
            yield f"  {case.title}: {case.complaint()}"

    def verdict(self, failed: int, how_many: str) -> str:
        """Returns the last line. `how_many`: how many of the cases failed, if any, and how many there are."""
        raise NotImplementedError

    def text(self) -> str:
        """Returns the table, failures, skipped layouts, and the verdict."""
        rows, more, verdict = self.parts()
        return "\n".join([*aligned(rows, ("l" * self.names).ljust(len(rows[0]), "r")), *more, "", verdict])

    def parts(self) -> tuple[Sequence[Sequence[str]], list[str], str]:
        """Returns the table, the lines about failures and skipped layouts, and the verdict."""
        ends = [("", "time"), *(("ok" if case.ok else "FAIL", seconds(case.seconds)) for case in self.cases)]
        rows = [(*row, *end) for row, end in zip(self.rows(), ends, strict=True)]
        failed = [case for case in self.cases if not case.ok]
        lines = ["", self.heading, *self.failures(failed)] if failed else []
        how_many = f"{f'{len(failed)} of ' if failed else ''}{counted(len(self.cases), self.noun)}"
        return rows, [*lines, *self.selection.not_compared()], self.verdict(len(failed), how_many)

    def add(self, case: AnyCase, measure: Callable[[], Mapping[str, Any]]) -> AnyCase:
        """Adds a case with what `measure` returns of its fields, or with the error of its ranks, and returns it."""
        began = time.perf_counter()
        try:
            found = measure()
        except PhalanxError as error:
            found = {"error": message_of(error)}
        self.cases.append(replace(case, **found, seconds=round(time.perf_counter() - began, 3)))
        return self.cases[-1]


def html(report: CaseReport[Any]) -> str:
    """Returns a report as a page."""
    (heads, *rows), more, verdict = report.parts()
    cells = [[(text, None) for text in row] for row in rows]
    parts = [
        *table(heads, cells, words=range(report.names)),
        *([f"<pre>{escape(chr(10).join(more))}</pre>"] * bool(more)),
    ]
    return html_page("Verification", verdict, "", parts)


class FailedRanksError(PhalanxError):
    """Says in a line what failed on the ranks of a case. The other cases go on."""


def message_of(error: Exception) -> str:
    """Returns the first line of an error, with its kind unless it is of this package."""
    kind = "" if isinstance(error, PhalanxError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or [""])[0]


def guarded(run: RunRanks) -> RunRanks:
    """Returns `run` with every error of ranks as FailedRanksError."""

    def guard(*call: Any, **options: Any) -> list[Any]:
        try:
            return run(*call, **options)
        except Exception as raised:  # code under test on a rank may raise anything
            raise FailedRanksError(message_of(raised)) from raised

    return guard


@contextmanager
def started(report: CaseReport[Any], *preload: str) -> Iterator[tuple[RunRanks, Path]]:
    """Starts as many processes as the largest layout of a report needs, makes a temporary folder for their files, and
    measures the report's seconds."""
    selection = report.selection
    processes = max((layout.processes for layout in selection.layouts), default=1)
    with (
        tempfile.TemporaryDirectory(prefix="phalanx_verify_") as folder,
        Pool(processes, (*PRELOAD, *preload), selection.compared.job.cluster.device) as pool,
    ):
        pool.run(nothing, processes, timeout=START_S)
        began = time.perf_counter()
        yield pool.run, Path(folder)
        report.seconds = time.perf_counter() - began


class LayoutRun(NamedTuple):
    """Steps of a layout, and those of one process that they are compared with."""

    ranks: RunRanks
    layout: Layout
    job: Job
    alone: Job
    stale: Layout | None
    vocab: int
    steps: int
    path: Path
    """The record of one process, which all layouts with the same model and batch share."""

    def record(self, job: Job) -> None:
        """Records the steps of a job of one process. Raises its errors."""
        self.ranks(record, 1, job, self.vocab, self.steps, self.path, self.stale, timeout=job.run.timeout_s)

    def compare(self, run: RunRanks, job: Job, **options: Any) -> Differences:
        """Returns how a job's steps differ from the record."""
        call = job, self.vocab, self.steps, self.path
        return run(compare, job.layout.processes, *call, timeout=job.run.timeout_s, **options)[0]


def layout_runs(
    report: CaseReport[Any], ranks: RunRanks, folder: Path, on_start: Callable[[Layout], None]
) -> Iterator[LayoutRun]:
    """Yields every selected layout of a report."""
    selection, paths = report.selection, dict[Any, Path]()
    for layout in selection.layouts:
        on_start(layout)
        job, stale = selection.case(layout), selection.stale(layout)
        path = folder / f"record_{len(paths)}.safetensors"
        path = paths.setdefault((job.model, job.train.global_batch, stale), path)
        steps = max(report.steps, MIN_STEPS) if stale else report.steps
        vocab = selection.compared.vocab_size
        yield LayoutRun(ranks, layout, job, selection.alone(layout), stale, vocab, steps, path)
