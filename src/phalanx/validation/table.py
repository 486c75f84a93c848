"""`phalanx predict --table IN.csv --out OUT.csv`: adds a prediction to every row of a table of configurations.

Rows are read and written one at a time, so a table may be larger than memory. Input columns are copied byte for byte,
unknown ones too. Added cells never begin with a character that a spreadsheet would take for a formula.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from phalanx.bounded import open_regular
from phalanx.cost import prediction as whole
from phalanx.cost.money import Prices
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.echo import VisibleStream, echo
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.validation.row import Reading, read
from phalanx.validation.row_layout import COLUMNS

ADDED = (
    *("pred_step_time_s", "pred_step_time_low_s", "pred_step_time_high_s"),
    *("pred_tflops_per_gpu", "pred_mfu_pct", "pred_tokens_per_s_per_gpu"),
    *("pred_peak_mem_gb", "pred_peak_mem_low_gb", "pred_peak_mem_high_gb"),
    *("pred_fits", "pred_verdict", "pred_note"),
)
COSTS = ("pred_run_device_hours", "pred_run_price", "pred_run_kwh", "pred_run_co2_kg")
"""The columns of the cost of a run, which --tokens adds."""
Predict = Callable[[StepSpec], Prediction]
Progress = Callable[[str, int, int], None]
"""A callback for progress: the activity, the amount done, and the total."""
MOST_ROWS = 100_000
"""Most rows of a table: they take twenty minutes."""
MOST_COLUMNS = 1000
LONGEST_LINE = 2**20
"""Most characters of a line, and of a cell, which may hold several lines."""
MOST_PARTS, MOST_SHOWN, LONGEST_PART = 1000, 4, 60
"""Parts of notes that are counted, those that are shown, and the characters of each."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass
class Summary:
    """The outcomes of a table's rows."""

    rows: int = 0
    predicted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Rows without a prediction, by the field at fault."""
    missing: tuple[str, ...] = ()
    """Known columns that the table does not have."""
    unread: tuple[str, ...] = ()
    """Columns that the table has and nothing reads."""
    noted: int = 0
    """Predicted rows with notes of which a part was not understood."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Such parts, at most MOST_PARTS different ones."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures of --json."""
        tables = {"refused": dict(self.refused), "ignored": dict(self.ignored.most_common(MOST_SHOWN))}
        return {**vars(self), **tables, "missing": list(self.missing), "unread": list(self.unread)}

    def note(self, parts: Iterable[str]) -> None:
        """Counts the parts of a row's notes that were not understood."""
        found = {*parts}
        self.noted += bool(found)
        self.ignored.update(part for part in found if part in self.ignored or len(self.ignored) < MOST_PARTS)

    def __str__(self) -> str:
        lines = [f"{self.predicted} of {self.rows} rows predicted in {self.seconds:.1f} s"]
        lines += [f"  {count} refused for {reason}" for reason, count in self.refused.most_common()]
        if self.missing:
            lines.append(f"columns that are not there: {', '.join(self.missing)}")
        if self.unread:
            meant = (f"{name} ({near}?)" if (near := nearest(name, self.missing)) else name for name in self.unread)
            lines.append(f"columns that are not read: {', '.join(meant)}")
        if self.noted:
            often = ", ".join(f"{part[:LONGEST_PART]!r} ({n})" for part, n in self.ignored.most_common(MOST_SHOWN))
            lines.append(f"notes: parts of {self.noted} rows are not understood and ignored: {often}")
        return "\n".join(lines)


def silent(activity: str, done: int, total: int) -> None:
    """Shows no progress."""


def run(
    source: str,
    out: str,
    prices: Prices | None = None,
    *,
    as_json: bool = False,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(silent),
) -> int:
    """Predicts `source` row by row into `out` (standard output if empty), and prints a summary on standard error, or as
    JSON on standard output. `progress` is called meanwhile. Returns the exit code: 2 if there are rows and none is
    predicted, as for a job that is refused. Raises JobError if the table does not exist."""
    if as_json and not out:
        raise JobError("--json prints one document and nothing else: name a file for the table, such as --out OUT.csv")
    with _opened(source) as file, progress() as callback, _written(out) as target:
        summary = write(file, target, whole.predict, callback, prices)
    echo(json.dumps(summary.as_dict(), indent=1) if as_json else summary, file=sys.stdout if as_json else sys.stderr)
    return JobError.exit_code if summary.rows and not summary.predicted else 0


def write(
    file: BinaryIO,
    target: TextIO | VisibleStream,
    predict: Predict,
    progress: Progress = silent,
    prices: Prices | None = None,
) -> Summary:
    """Copies the table in `file` to `target` with the columns ADDED, and with `prices` of some tokens those of COSTS.
    Raises JobError if it is not a table."""
    costs = prices if prices and prices.tokens else None
    added_names = (*ADDED, *(COSTS if costs else ()))
    size = file.seek(0, os.SEEK_END) if file.seekable() else 0
    if size:
        file.seek(0)
        _check_length(file)
    # Bytes that are not UTF-8 are copied unchanged.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(LONGEST_LINE)
    began = time.monotonic()
    rows = _rows(_lines(text))
    header = next(rows, [])
    if len(header) > MOST_COLUMNS:
        raise JobError(f"the table has {len(header):,} columns; at most {MOST_COLUMNS:,}")
    names, known = [name.strip().lower() for name in header], {*COLUMNS, *ADDED, *COSTS}
    copied = [place for place, name in enumerate(names) if name not in added_names]
    if not set(names) & set(COLUMNS):
        other = next((mark for mark in ";\t" if {*header[0].lower().split(mark)} & {*COLUMNS}), "") if header else ""
        hint = f": cells are separated by {other!r}, not by commas" if other else ""
        raise JobError(f"the table's first line names no column that is known{hint} (known: {', '.join(COLUMNS)})")
    if twice := [name for name, number in Counter(names).items() if number > 1 and name in COLUMNS]:
        raise JobError(f"the table's first line names columns twice: {', '.join(twice)}")
    missing, unread = (
        [name for name in some if name not in others] for some, others in ((COLUMNS, names), (names, known))
    )
    summary = Summary(missing=tuple(missing), unread=tuple(name for name in unread if name))
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow([*(header[place] for place in copied), *added_names])
    reported = -1
    for cells in rows:
        if summary.rows == MOST_ROWS:  # a pipe, whose length is not known before
            raise JobError(f"the table has more than {MOST_ROWS:,} rows; divide it")
        row = dict(zip(names, [*cells, *[""] * (len(names) - len(cells))], strict=False))
        added = _predicted(row, len(cells) - len(names), predict, summary, costs)
        padded = [*cells, *[""] * (len(names) - len(cells))]
        writer.writerow([*(padded[place] for place in copied), *added])
        if size and (percent := 100 * file.tell() // size) > reported:
            reported = percent
            progress("predicting", percent, 100)
    summary.seconds = time.monotonic() - began
    text.detach()
    return summary


def _predicted(
    row: dict[str, str], surplus: int, predict: Predict, summary: Summary, costs: Prices | None
) -> list[str]:
    """Returns the added cells of one row; for a row that cannot be expressed, the reason."""
    summary.rows += 1
    try:
        if surplus > 0:
            raise JobError(f"row: {surplus} cells more than the first line has columns; is a text not in quotes?")
        reading = read(row)
        prediction = predict(reading.spec)
        added = [*predicted_cells(reading, prediction), *(_cost_cells(reading, prediction, costs) if costs else ())]
    except JobError as error:
        summary.refused[error.problems[0].split(":")[0]] += 1
        return [*[""] * (len(ADDED) - 1), _harmless("; ".join(error.problems)), *([""] * len(COSTS) if costs else ())]
    summary.predicted += 1
    summary.note(reading.ignored)
    return added


def predicted_cells(reading: Reading, prediction: Prediction) -> list[str]:
    """Returns the values of ADDED in the conventions of the row's source."""
    seconds = prediction.step_time_s
    memory = memory_bytes(reading, prediction)
    sizes = (
        [""] * 3
        if memory is None
        else [f"{factor * memory / reading.memory_unit:.4g}" for factor in (1, *prediction.memory_spread)]
    )
    unit = "GiB" if reading.memory_unit == 2**30 else "GB"
    memory_note = () if memory is None else (f"memory: {reading.memory_means}, {unit}",)
    return [
        *(f"{factor * seconds:.6g}" for factor in (1, *prediction.spread)),
        f"{reading.tflops(seconds):.5g}",
        f"{reading.mfu_pct(seconds):.4g}",
        f"{reading.tokens_per_s(seconds):.6g}",
        *sizes,
        *(["", ""] if memory is None else [str(prediction.fits).lower(), prediction.verdict]),
        _harmless("; ".join([*memory_note, *reading.assumptions])),
    ]


def _cost_cells(reading: Reading, prediction: Prediction, costs: Prices) -> list[str]:
    """Returns the values of COSTS, blank where a figure is not known."""
    speed = prediction.tokens_per_s
    cost = costs.of(reading.spec.cluster, prediction.devices, speed)
    figures = (cost.device_hours, cost.price, cost.kwh, cost.co2_kg)
    return ["" if figure is None else f"{figure:.6g}" for figure in figures]


def memory_bytes(reading: Reading, prediction: Prediction) -> float | None:
    """Returns the bytes of the fullest device in the convention of the row's source; None if only adapters
    train, since programs store the frozen weights in many formats."""
    if reading.spec.model.lora.rank:
        return None
    if reading.memory_means == "allocated":
        return max(rank.allocated for rank in prediction.memory)
    if reading.memory_means == "reserved":
        return max(rank.held for rank in prediction.memory)
    # nvidia-smi shows at most what the device has: there the allocator has given back what no tensor uses.
    return max(min(rank.peak, max(rank.needed, prediction.memory_limit)) for rank in prediction.memory)


def _harmless(text: str) -> str:
    """Returns the text as one line that no spreadsheet takes for a formula."""
    line = " ".join(text.split())
    return f"'{line}" if line.startswith(_FORMULA) else line


def _check_length(file: BinaryIO) -> None:
    """Raises JobError at once if a file has so many lines that its rows would take hours."""
    lines = 0
    while content := file.read(LONGEST_LINE):
        lines += max(content.count(b"\n"), content.count(b"\r"))
        if lines > MOST_ROWS + 1:
            raise JobError(f"the table has more than {MOST_ROWS:,} rows; divide it")
    file.seek(0)


def _lines(text: TextIO) -> Iterator[str]:
    """Yields the lines of the table. Raises JobError for one that is too long."""
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise JobError(f"a line of the table has more than {LONGEST_LINE:,} characters")
        yield line


def _rows(text: Iterable[str]) -> Iterator[Sequence[str]]:
    """Yields the table's rows without empty lines. Raises JobError with the line that is not CSV."""
    reader = csv.reader(text)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise JobError(f"line {reader.line_num} of the table is not CSV: {error}") from None
        if row is None:
            return
        if row:
            yield row


@contextlib.contextmanager
def _opened(source: str) -> Iterator[BinaryIO]:
    """Opens a regular file, or a pipe that the shell has opened: standard input or `<(command)`."""
    pipe = re.fullmatch("/dev/(?:fd/([0-9]{1,9})|stdin)", source)
    with contextlib.ExitStack() as stack:
        try:
            if pipe:
                file: BinaryIO = stack.enter_context(open(int(pipe[1] or 0), "rb", closefd=False))
            else:
                file = stack.enter_context(open_regular(Path(source)))
        except OSError as error:
            raise JobError(f"table: {source!r} cannot be read: {error.strerror}") from None
        yield file


@contextlib.contextmanager
def _written(out: str) -> Iterator[TextIO | VisibleStream]:
    """Opens standard output, or a file that appears only when it is complete, because it may be the table itself."""
    if not out and sys.stdout.isatty():
        yield VisibleStream(sys.stdout)
        return
    if not out:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8 leave as they came
        yield sys.stdout
        return
    folder = Path(out).resolve().parent
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".table-")
    except OSError as error:
        raise JobError(f"out: {out!r} cannot be written: {error.strerror}") from None
    try:
        with open(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, out)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
