"""Two runs compared step by step, from their files: when and where they part, and why if that can be known.

Curves come from metrics.jsonl, tensors from the checkpoints of the steps that both have, in whatever layouts. A
difference is none (equal to the bit), rounding, or more. Rounding grows from step to step, so a curve that leaves its
bounds by and by is told from one that parts at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import read_text
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.diff import compare, in_model_order, leaves
from phalanx.checkpoint.inventory import check_digests
from phalanx.checkpoint.manifest import job_of, kind_of
from phalanx.data.files import Progress, silent
from phalanx.errors import JobError, NotFoundError
from phalanx.pictures import curves
from phalanx.pictures.curves import Chart, Curve
from phalanx.report.run import Metrics, RunRecord, read_run, require_run
from phalanx.report.write import differences, name_apart
from phalanx.units import aligned, counted, finite

COLUMNS = ("loss", "grad_norm", "lr")
ROUNDING = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 4e-3, "fp16": 1e-3, "fp8": 3e-2}
"""Largest relative difference of a step that counts as rounding, by precision: some 100 times the rounding of fp32, and
once that of the narrow types, since loss and norm are sums over many elements."""
AT_ONCE = 30.0
"""Rounding that grows does so by a smaller factor from a step to the next."""
_EQUAL = 1e-16
"""Stands for no difference in the picture, whose axis is logarithmic."""
_UNSEEN = ("run.", "checkpoint.", "guard.", "train.log_every", "train.eval_", "train.profile")
"""Begin fields that change no number of a run that goes well."""
_ORDERS = ("layout.", "cluster.", "train.compile", "train.deterministic", "train.cpu_linear", "axes.")
"""Begin fields that only change the order of sums."""
_NUMBERS = ("layout.sync", "layout.quantise_", "layout.compression", "layout.schedule")
"""Begin fields of layouts that may change more."""
_STARTS = ("model.", "data.", "train.seed", "train.global_batch", "train.precision", "train.gradients")
"""Begin fields that show in the first step; others show after the first update."""
_WORDS = {
    "train.seed": "another seed: other initial weights and another order of samples",
    "data.seed": "another order of samples",
    "train.global_batch": "another batch size: other samples per step",
    "train.precision": "another precision",
    "optimizer.lr": "another learning rate",
}


@dataclass(frozen=True)
class ComparedCurve:
    """One column of both runs over their common steps."""

    name: str
    steps: int
    """Common steps with a value in both."""
    different: int | None
    """The first step whose values differ in any bit; None if none does."""
    parts: int | None
    """The first step whose values differ by more than rounding."""
    rel: float
    """The relative difference there; where only bits differ that of the first such step."""
    at_once: bool
    """It parts from one step to the next, and does not grow out of rounding."""
    max_rel: float
    """The largest relative difference of all steps."""
    max_at: int | None
    """The step of it."""


@dataclass
class ComparedKind:
    """The tensors of one kind (parameter, exp_avg, …) in the checkpoints of a step."""

    tensors: int = 0
    """Number of them in either run."""
    different: int = 0
    """Number that differs in any bit, or is in one run only."""
    max_rel: float = 0.0
    """Largest |a - b| of any of them, relative to the largest |b| of its tensor. That counts as at least what Adam
    moves a parameter by in so many steps, and of other kinds as the rounding of the kind's largest element."""
    worst: str = ""
    """The tensor of it."""
    only: str = ""
    """The run that has such tensors if the other has none."""

    def __str__(self) -> str:
        return f"only in {self.only}" if self.only else f"{self.max_rel:.1e}" if self.different else "equal"


@dataclass
class ComparedCheckpoints:
    """The checkpoints of one step."""

    step: int
    first: str = ""
    """The first tensor in the model's order that differs; empty if none does."""
    kinds: dict[str, ComparedKind] = field(default_factory=dict)
    meta: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Facts beside tensors that differ: samples read, updates, loss scale, the data."""

    @property
    def tensors(self) -> int:
        return sum(kind.tensors for kind in self.kinds.values())

    @property
    def different(self) -> int:
        return sum(kind.different for kind in self.kinds.values())


@dataclass
class RunComparison:
    """All that was compared of two runs."""

    runs: tuple[RunRecord, RunRecord]
    tolerance: float
    """Largest relative difference that counts as rounding."""
    curves: list[ComparedCurve]
    checkpoints: list[ComparedCheckpoints]
    fields: dict[str, list[tuple[str, str]]]
    """Fields in which the jobs differ: value and origin of each run."""
    environment: dict[str, tuple[Any, Any]]
    """Facts of env.json that differ."""
    history: list[str]
    """Restarts and interventions of the guard."""

    @cached_property
    def telling_fields(self) -> list[str]:
        """Fields that may change a number."""
        return [path for path in self.fields if not path.startswith(_UNSEEN)]

    @cached_property
    def numeric_fields(self) -> list[str]:
        """Fields that change more than the order of sums."""
        return [path for path in self.telling_fields if path.startswith(_NUMBERS) or not path.startswith(_ORDERS)]

    @cached_property
    def parted(self) -> list[ComparedCurve]:
        return [curve for curve in self.curves if curve.parts is not None]

    @cached_property
    def verdict(self) -> str:
        """equal (to the bit), rounding, or parts."""
        differ = any(curve.different for curve in self.curves)
        if not differ and not any(each.first for each in self.checkpoints):
            return "equal"
        # Tensors that differ where no curve does, and nothing in the jobs that would change them, are no rounding.
        changed = not self.curves or not (self.telling_fields or differ)
        beyond = self.parted and (self.numeric_fields or any(curve.at_once for curve in self.parted))
        return "parts" if changed or beyond else "rounding"

    @cached_property
    def cause(self) -> str:
        """The likely cause, if one can be known."""
        if self.verdict == "equal":
            return ""
        if self.numeric_fields:
            return self._cause_in_fields()
        if any("data" in each.meta for each in self.checkpoints):
            return "other data: the token shards of the checkpoints differ, though the jobs name the same"
        if fields := self.telling_fields:
            what = ", ".join(f"{path} {self._sides(path)}" for path in fields[:3])
            if any(curve.at_once for curve in self.parted):
                return (
                    f"only the layout or the device differs ({what}), but that is more than rounding: `phalanx verify` "
                    "compares this layout with one process in fp64"
                )
            return f"rounding: only the layout or the device differs ({what}), so sums have another order"
        programs = [name for name in self.environment if name.startswith(("packages.", "phalanx", "git", "python"))]
        if programs:
            what = ", ".join(f"{name} {_pair(self.environment[name])}" for name in programs[:3])
            return f"the same job with other programs: {what}"
        if self.curves and not any(curve.different for curve in self.curves):
            return "the curves are equal to the bit and the tensors are not: a checkpoint was changed after its run"
        if any("went on from" in words or "guard" in words for words in self.history):
            return "the same job, of which one was interrupted, or its guard intervened"
        if self.environment:
            what = ", ".join(f"{name} {_pair(pair)}" for name, pair in [*self.environment.items()][:3])
            return f"the same job on another machine: {what}"
        return "nothing recorded differs: kernels that are not deterministic (train.deterministic=true), or damage"

    def _cause_in_fields(self) -> str:
        """Returns the fields that explain the step at which the losses part: data and model show in the first step."""
        loss = next((curve for curve in self.curves if curve.name == "loss"), None)
        at_first = loss is None or loss.parts == next(iter(self.metrics[0].steps), None)
        early = [path for path in self.numeric_fields if path.startswith(_STARTS)]
        late = [path for path in self.numeric_fields if path not in early]
        chosen = (early or late) if at_first else (late or early)
        said = [
            f"{_WORDS[path]} ({path} {self._sides(path)})" if path in _WORDS else f"{path} {self._sides(path)}"
            for path in sorted(chosen, key=lambda path: [*_WORDS, path].index(path))[:3]
        ]
        if late and "optimizer.lr" not in chosen and any(curve.name == "lr" for curve in self.parted):
            said.append("the learning rate parts with it")
        return "; ".join(said)

    def _sides(self, path: str) -> str:
        return _pair([value for value, _ in self.fields[path]])

    @property
    def ok(self) -> bool:
        return self.verdict != "parts"

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --against --json`."""
        return {
            "runs": [str(run.path) for run in self.runs],
            "verdict": self.verdict,
            "ok": self.ok,
            "summary": self.summary(),
            "cause": self.cause,
            "tolerance": self.tolerance,
            "curves": {curve.name: finite(asdict(curve)) for curve in self.curves},
            "checkpoints": [
                {**finite(asdict(each)), "tensors": each.tensors, "different": each.different}
                for each in self.checkpoints
            ],
            "fields": {
                path: [{"value": value, "origin": origin} for value, origin in sides]
                for path, sides in self.fields.items()
            },
            "environment": finite(self.environment),
            "history": self.history,
        }

    def summary(self) -> str:
        """Returns in a sentence when and where the runs part."""
        firsts = [curve.different for curve in self.curves if curve.different is not None]
        tensors = next((each for each in self.checkpoints if each.first), None)
        if not firsts and tensors is None:
            steps = max((curve.steps for curve in self.curves), default=0)
            return f"equal to the bit: {counted(steps, 'step')} and {counted(len(self.checkpoints), 'checkpoint')}"
        begin = self.metrics[0].steps[0] if self.curves else 0
        whole = min(firsts, default=0)
        said = [f"equal to the bit until step {whole - 1}" if whole > begin else ""]
        for curve in sorted(self.parted, key=lambda curve: (curve.parts or 0, COLUMNS.index(curve.name)))[:2]:
            how = "parts at" if curve.at_once else "grows out of rounding at"
            said.append(f"{curve.name} {how} step {curve.parts} (rel {curve.rel:.1e})")
        if not self.parted and firsts:
            largest = max(curve.max_rel for curve in self.curves)
            said.append(f"from step {whole} on they differ by rounding, at most {largest:.1e}")
        if tensors:
            said.append(
                f"first tensor: {tensors.first} at step {tensors.step}, where {tensors.different} of "
                f"{tensors.tensors} differ"
            )
        return "; ".join(filter(None, said))

    @property
    def metrics(self) -> tuple[Metrics, Metrics]:
        return self.runs[0].metrics, self.runs[1].metrics

    def text(self) -> str:
        first, second = (run.name for run in self.runs)
        lines = [f"{self.runs[0].path} and {self.runs[1].path}"]
        if self.curves:
            rows = [["curve", "steps", "bits differ from", f"beyond {self.tolerance:g} from", "largest difference"]]
            for each in self.curves:
                largest = f"{each.max_rel:.1e} at step {each.max_at:,}" if each.max_at is not None else "0"
                rows.append([each.name, f"{each.steps:,}", _step(each.different), _step(each.parts), largest])
            lines += ["", *aligned(rows, "lrrrr")]
        if self.checkpoints:
            kinds = list(dict.fromkeys(kind for each in self.checkpoints for kind in each.kinds))
            rows = [["checkpoint", "tensors", "differ", *kinds, "first"]]
            for each in self.checkpoints:
                of_kinds = (str(each.kinds.get(kind, "-")) for kind in kinds)
                sizes = f"{each.tensors:,}", f"{each.different:,}"
                rows.append([f"step {each.step:,}", *sizes, *of_kinds, each.first or "-"])
            lines += ["", *aligned(rows, f"lrr{'r' * len(kinds)}l")]
            last = self.checkpoints[-1]
            if worst := [kind.worst for kind in last.kinds.values() if kind.worst]:
                lines.append(f"largest at step {last.step:,}: {', '.join(worst)}")
        if meta := [(each.step, *item) for each in self.checkpoints for item in each.meta.items()][:8]:
            lines += ["", "Checkpoints differ beside their tensors:"]
            lines += [f"  step {step:,}: {name}: {a} in {first}, {b} in {second}" for step, name, (a, b) in meta]
        jobless = [run.name for run in self.runs if run.loaded is None]
        compared = "Fields that differ:" if self.fields else "No field of the jobs differs."
        lines += ["", f"Jobs were not compared: no config.yaml of {' and '.join(jobless)}." if jobless else compared]
        for path, sides in self.fields.items():
            lines.append(f"  {path}: " + ", ".join(f"{value} ({origin})" for value, origin in sides))
        if self.environment:
            lines += ["", "Environments differ:"]
            lines += [f"  {name}: {a}, {b}" for name, (a, b) in self.environment.items()]
        lines += [] if self.curves else ["", "Curves were not compared: metrics.jsonl has no step in both."]
        lines += [] if self.checkpoints else ["", "Tensors were not compared: no step has a checkpoint in both."]
        lines += ["", *self.history] if self.history else []
        summary = self.summary()
        lines += ["", f"{summary[0].upper()}{summary[1:]}."]
        return "\n".join([*lines, f"Likely cause: {self.cause}."] if self.cause else lines)

    def svg(self) -> str:
        """Returns the curves of both runs, and below them the differences of loss and gradient norm."""
        steps = {curve.parts: f"step {curve.parts}: {curve.name} parts" for curve in self.curves if curve.parts}
        marks = {float(step): words for step, words in steps.items() if step is not None}
        lines = [Curve(run.name, run.metrics.points("loss"), at) for at, run in enumerate(self.runs)]
        parts = [Chart("Loss of both runs", lines, "{:.4f}".format, marks=marks)]
        exponents = [
            Curve(name, [(step, math.log10(rel or _EQUAL)) for step, rel in _relative(self.metrics, name)], at)
            for at, name in enumerate(COLUMNS[:2])
        ]
        title = f"Relative difference; rounding is below {self.tolerance:g}, and {_EQUAL:g} is none"
        parts.append(
            Chart(
                title, exponents, lambda v: f"{10**v:.0e}" if 10**v > _EQUAL else "0", lambda v: f"1e{v:g}", marks=marks
            )
        )
        drawn = [curves.svg(each, alone=True) for each in parts if any(curve.points for curve in each.curves)]
        if not drawn:
            raise JobError("--svg: the runs have no curves: metrics.jsonl has no step in both")
        return _stacked(drawn)


def _stacked(pictures: Sequence[str]) -> str:
    """Returns pictures of one width, one below the other."""
    parts, y = [], 0
    for picture in pictures:
        parts.append(picture.replace("<svg ", f"<svg y='{y}' ", 1))
        y += int(re.findall(r" height='(\d+)'", picture)[0])
    size = f"viewBox='0 0 {curves.WIDTH} {y}' width='{curves.WIDTH}' height='{y}'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' class='curves' {size}>", *parts, "</svg>\n"])


def _step(step: int | None) -> str:
    return "never" if step is None else f"step {step:,}"


def compare_runs(a: Path, b: Path, progress: Progress = silent) -> RunComparison:
    """Compares two runs by their directories.

    Raises NotFoundError if one is no run, or if they have no step in common; JobError, naming the tensors, for runs of
    different models; CheckpointError for a damaged checkpoint."""
    if a.resolve() == b.resolve():
        raise JobError(f"--against {b}: both are the same run")
    problems = list[str]()
    for path in (a, b):
        try:
            require_run(path)
        except NotFoundError as error:
            problems.append(str(error))
    if problems:
        raise NotFoundError("\n".join(problems))
    runs = read_run(a), read_run(b)
    name_apart(runs)
    saved = sorted({each.step for each in runs[0].checkpoints} & {each.step for each in runs[1].checkpoints})
    common = set(runs[0].metrics.steps) & set(runs[1].metrics.steps)
    if not saved and not common:
        raise NotFoundError(f"no common step: {_span(runs[0])}, and {_span(runs[1])}")
    _require_one_model(runs)
    precisions = [run.loaded.job.train.precision for run in runs if run.loaded] or ["fp32"]
    tolerance = max(ROUNDING[each] for each in precisions)
    compared = [_curve(name, _relative((runs[0].metrics, runs[1].metrics), name), tolerance) for name in COLUMNS]
    return RunComparison(
        runs,
        tolerance,
        [curve for curve in compared if curve.steps],
        [_checkpoints(runs, step, tolerance, progress) for step in saved],
        {
            path: [(value, _origin(run, path)) for run, value in zip(runs, values, strict=True)]
            for path, values in differences(runs).items()
        },
        _different(*(leaves(run.environment) for run in runs)),
        [f"{run.name}: {words}" for run in runs for words in _history(run)],
    )


def _span(run: RunRecord) -> str:
    steps = run.metrics.steps
    if steps:
        return f"{run.path} has steps {steps[0]:,} to {steps[-1]:,}"
    saved = ", ".join(f"{each.step:,}" for each in run.checkpoints)
    return f"{run.path} has {f'checkpoints of step {saved}' if saved else 'no step yet'}"


def _relative(metrics: tuple[Metrics, Metrics], name: str) -> list[tuple[int, float]]:
    """Returns the relative difference of a column by step, where both have a value."""
    other = dict(metrics[1].points(name))
    return [
        (int(step), abs(value - other[step]) / (max(abs(value), abs(other[step])) or 1.0))
        for step, value in metrics[0].points(name)
        if step in other
    ]


def _curve(name: str, found: Sequence[tuple[int, float]], tolerance: float) -> ComparedCurve:
    never = None, 0.0
    different, first_rel = next((each for each in found if each[1]), never)
    place = next((at for at, (_, rel) in enumerate(found) if rel > tolerance), len(found))
    parts, rel = found[place] if place < len(found) else (None, first_rel)
    before = max((rel for _, rel in found[max(0, place - 8) : place]), default=0.0)
    at_once = parts is not None and rel > AT_ONCE * before
    largest = max(found, key=lambda each: each[1], default=never)
    max_at, max_rel = largest if largest[1] else never
    return ComparedCurve(name, len(found), different, parts, rel, at_once, max_rel, max_at)


def _require_one_model(runs: tuple[RunRecord, RunRecord]) -> None:
    """Raises JobError with the parameters that only one of the models has, or has in another shape."""
    sizes = [(run.metrics.last("start") or {}).get("vocab_size") for run in runs]
    sizes = sizes if all(isinstance(each, int) for each in sizes) else [1, 1]
    jobs = [run.loaded.job for run in runs if run.loaded]
    if len(jobs) < len(runs):
        return
    a, b = (parameter_shapes(job.model, size) for job, size in zip(jobs, sizes, strict=True))
    wrong = [f"{name} {shape} is {b.get(name) or 'missing'}" for name, shape in a.items() if b.get(name) != shape]
    wrong += [f"{name} {shape} is missing in the first" for name, shape in b.items() if name not in a]
    if not wrong:
        return
    fields = [f"{path} {a} and {b}" for path, (a, b) in differences(runs).items() if path.startswith("model.")]
    why = f" ({', '.join(fields[:4])})" if fields else ""
    rest = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
    raise JobError(
        f"{runs[0].path} and {runs[1].path} have different models{why}: {wrong[0]}{rest}; `phalanx report --compare` "
        "shows the curves of any runs"
    )


def _checkpoints(
    runs: tuple[RunRecord, RunRecord], step: int, tolerance: float, progress: Progress
) -> ComparedCheckpoints:
    found = ComparedCheckpoints(step)
    with open_source(runs[0].path, step) as a, open_source(runs[1].path, step) as b:
        left, right = a.manifest, b.manifest
        for manifest in (left, right):
            check_digests(manifest, manifest.files)
        for name in dict.fromkeys((*left.tensors, *right.tensors)):
            found.kinds.setdefault(kind_of(name) or "parameter", ComparedKind()).tensors += 1
        different = compare(a, b, fields=False, progress=progress).tensors
        apart: dict[str, list[tuple[str, float, float]]] = {}
        for each in different:
            name = kind_of(each.name) or "parameter"
            found.kinds[name].different += 1
            if each.a is None or each.b is None:
                found.kinds[name].only = runs[0].name if each.a else runs[1].name
            elif each.values:
                size = float(b.read(each.name).double().abs().max())
                apart.setdefault(name, []).append((each.name, each.values.max_abs, size))
        least = {name: tolerance * max(size for *_, size in of_kind) for name, of_kind in apart.items()}
        least["parameter"] = job_of(right).optimizer.lr * right.meta.get("updates", step)
        for name, of_kind in apart.items():
            scaled = [(away / (max(size, least[name]) or 1.0), tensor) for tensor, away, size in of_kind]
            found.kinds[name].max_rel, found.kinds[name].worst = max(scaled)
        found.first = next(iter(in_model_order((each.name for each in different), job_of(left).model)), "")
        facts = ("data", "samples", "updates", "vocab_size", "loss_scale")
        found.meta = _different(*({name: each.meta.get(name) for name in facts} for each in (left, right)))
    return found


def _origin(run: RunRecord, path: str) -> str:
    """Returns where a value of a run's job came from, which config.yaml states behind it."""
    origin = run.loaded.origins.get(path, "default") if run.loaded else "unknown"
    file, _, line = origin.rpartition(":")
    if file and line.isdigit():
        try:
            words = read_text(Path(file)).splitlines()[int(line) - 1].partition("  # ")[2]
        except (OSError, ValueError, IndexError):
            return origin
        return words or origin
    return origin


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the values that differ, by name."""
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _history(run: RunRecord) -> Iterator[str]:
    """Yields restarts, and what the guard did."""
    for row in run.metrics.events:
        if row["event"] == "start" and row["step"]:
            yield f"went on from step {row['step']:,}, {row.get('layout')}"
        elif row["event"] == "guard":
            yield f"step {row['step']:,}: guard: {row.get('text')}"


def _pair(pair: Sequence[Any]) -> str:
    return f"{pair[0]} and {pair[1]}"
