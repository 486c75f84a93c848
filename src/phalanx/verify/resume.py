"""Proves that a run resumes in any layout: some steps in one, a checkpoint, the rest in another, as if it were one run.

Each pair of layouts is compared with one process that is never interrupted, in float64: what the checkpoint holds, the
loss of every step, and parameters and optimizer state after the last one. Between them, what the second layout has
loaded is saved again at once and must be the checkpoint to the bit. Checkpoints are written and read as a run does.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.checkpoint.diff import compare
from phalanx.checkpoint.inventory import check, directory_of
from phalanx.checkpoint.manifest import kind_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.launch.pool import Pool
from phalanx.launch.process_group import device_of
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.agreement import agree_on_job
from phalanx.train.requests import StopRequest
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import StepInputs, Stepper
from phalanx.units import aligned, counted, seconds
from phalanx.verify.measure import ROUNDING, TOLERANCE, difference, micro_batches, nothing
from phalanx.verify.run import PRELOAD, START_S, FirstDifference
from phalanx.verify.select import Pair, Selection

_DATA = "random tokens of phalanx verify"
"""The fingerprint of the data of all runs."""
_WARM = (*PRELOAD, "phalanx.verify.resume")


@dataclass(frozen=True)
class ResumeCase:
    """A run that changes its layout. Differences are None if it failed before."""

    before: str
    """The layout until the checkpoint."""
    after: str
    """The layout that resumes from it."""
    ranks: tuple[int, int]
    saved_max_rel: float | None = None
    """Largest difference of a tensor of the checkpoint."""
    restored: bool | None = None
    """What the second layout has loaded is the checkpoint, to the bit."""
    loss_max_rel: float | None = None
    """Largest difference of a loss, before and after."""
    param_max_rel: float | None = None
    """Largest difference of a parameter after the last step."""
    optimizer_max_rel: float | None = None
    """Largest difference of a tensor of the optimizer after the last step."""
    first_difference: FirstDifference | None = None
    """The first tensor, or loss, that exceeds the tolerance, and the step."""
    error: str | None = None
    ok: bool = False
    seconds: float = 0.0


@dataclass
class ResumeReport:
    """All pairs, in order."""

    selection: Selection
    steps: int
    """Steps before the checkpoint, and as many after it."""
    cases: list[ResumeCase] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases)

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --resume --json`."""

        def finite(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        names = {"before": "from", "after": "to"}
        return {
            "pairs": [
                {names.get(name, name): finite(value) for name, value in asdict(case).items()} for case in self.cases
            ],
            "ok": self.ok,
            "tolerance": TOLERANCE,
            "steps": self.steps,
            "shrunk": {path: list(pair) for path, pair in self.selection.compared.changes.items()},
            "skipped": [asdict(skipped) for skipped in self.selection.skipped],
            "refused": self.selection.refused,
            "notes": self.selection.notes,
            "seconds": round(self.seconds, 3),
        }

    def text(self) -> str:
        head = ("from", "to", "ranks", "saved", "restored", "loss", "parameters", "optimizer", "", "time")
        rows: list[tuple[str, ...]] = [head]
        for case in self.cases:
            rels = (case.saved_max_rel, case.loss_max_rel, case.param_max_rel, case.optimizer_max_rel)
            saved, *others = ("-" if rel is None else f"{rel:.1e}" for rel in rels)
            bits = "-" if case.restored is None else "to the bit" if case.restored else "no"
            ranks = f"{case.ranks[0]} → {case.ranks[1]}"
            state = "ok" if case.ok else "FAIL"
            rows.append((case.before, case.after, ranks, saved, bits, *others, state, seconds(case.seconds)))
        lines = aligned(rows, "llrrrrrrrr")
        failed = [case for case in self.cases if not case.ok]
        if failed:
            lines += ["", "Differences:", *(f"  {case.before} → {case.after}: {complaint(case)}" for case in failed)]
        if self.selection.skipped:
            lines += ["", "Not compared:"]
            lines += [f"  {skipped.layout}: {skipped.reason}" for skipped in self.selection.skipped]
        if self.selection.refused:
            lines += ["", "Refused:", *(f"  {problem}" for problem in self.selection.refused)]
        how_many = f"{f'{len(failed)} of ' if failed else ''}{counted(len(self.cases), 'pair')} of layouts"
        verdict = "Not equal" if failed else "Equal"
        measure = f"tolerance {TOLERANCE:g}, {self.steps} + {counted(self.steps, 'step')}, {seconds(self.seconds)}"
        return "\n".join([*lines, "", f"{verdict} to one process without interruption: {how_many} ({measure})"])


def complaint(case: ResumeCase) -> str:
    """Returns why a case failed."""
    if case.error:
        return case.error
    if case.restored is False:
        return f"what is loaded is not the checkpoint: {case.first_difference and case.first_difference.name}"
    match case.first_difference:
        case FirstDifference("loss", _, step, rel):
            return f"the loss of step {step} differs by {rel:.1e}"
        case FirstDifference(what, name, step, rel):
            return f"{name}: the {what} after step {step} differs by {rel:.1e}"
    return ""


def progress(case: ResumeCase) -> str:
    """Returns one line about a finished pair."""
    failed = "" if case.ok else f": {complaint(case)}"
    return f"{'ok  ' if case.ok else 'FAIL'}  {case.before} → {case.after} ({seconds(case.seconds)}){failed}"


@dataclass(frozen=True)
class _Saved:
    """A run until its checkpoint."""

    path: Path
    losses: list[float]


def resume_all(
    selection: Selection, pairs: list[Pair], steps: int, on_case: Callable[[ResumeCase], None]
) -> ResumeReport:
    """Runs every pair of layouts, with a checkpoint after `steps` steps and as many steps after it. An error on the
    ranks makes its pair fail with the message, and the others continue."""
    began = time.perf_counter()
    report = ResumeReport(selection, steps)
    processes = max((job.layout.processes for pair in pairs for job in pair), default=1)
    device, vocab = selection.compared.job.cluster.device, selection.compared.vocab_size
    with tempfile.TemporaryDirectory(prefix="phalanx_resume_") as folder, Pool(processes, _WARM, device) as pool:
        pool.run(nothing, processes, timeout=START_S)
        runs: dict[tuple[Job, int], _Saved] = {}

        def until(job: Job, step: int, start: Path | None = None) -> _Saved:
            """Returns a run until a step, from the beginning once only."""
            key = job, step
            if start is None and key in runs:
                return runs[key]
            root = Path(tempfile.mkdtemp(dir=folder))
            ranks = job.layout.processes
            losses = pool.run(train_until, ranks, job, vocab, step, root, start, timeout=job.run.timeout_s)[0]
            saved = _Saved(root, losses)
            if start is None:
                runs[key] = saved
            return saved

        for pair in pairs:
            case_began = time.perf_counter()
            try:
                case = _case(pair, steps, vocab, until)
            except Exception as raised:  # an error on a rank is this pair's result and does not end the others
                kind = "" if isinstance(raised, PhalanxError) else f"{type(raised).__name__}: "
                case = replace(_empty(pair), error=kind + (str(raised).strip().splitlines() or [""])[0])
            report.cases.append(replace(case, seconds=round(time.perf_counter() - case_began, 3)))
            on_case(report.cases[-1])
    report.seconds = time.perf_counter() - began
    return report


def _empty(pair: Pair) -> ResumeCase:
    a, b = pair[0].layout, pair[1].layout
    return ResumeCase(a.line(), b.line(), (a.world, b.world))


def _case(pair: Pair, steps: int, vocab: int, until: Callable[..., _Saved]) -> ResumeCase:
    first, second = pair
    alone = replace(first, layout=Layout(bucket_mb=first.layout.bucket_mb))
    whole, half = until(alone, 2 * steps), until(alone, steps)
    before = until(first, steps)
    checkpoint = directory_of(before.path, steps)
    after = until(second, 2 * steps, checkpoint)
    tensors = _differences(checkpoint, directory_of(half.path, steps), first, vocab)
    with Reader(check(checkpoint)) as a, Reader(check(directory_of(after.path / RESTORED, steps))) as b:
        apart = compare(a, b)
        changed = [each.name for each in (*apart.tensors, *apart.fields) if not each.name.startswith("job.")]
    losses = [
        abs(mine - other) / (abs(other) or 1.0)
        for mine, other in zip([*before.losses, *after.losses], whole.losses, strict=True)
    ]
    end = directory_of(after.path, 2 * steps), directory_of(whole.path, 2 * steps)
    found = _differences(*end, second, vocab)
    moments = [rel for name, rel in found.items() if kind_of(name)]
    parameters = [rel for name, rel in found.items() if not kind_of(name)]
    wrong = _first(tensors, steps) or (FirstDifference("restored", changed[0], steps, math.inf) if changed else None)
    wrong = wrong or next(
        (FirstDifference("loss", None, at, rel) for at, rel in enumerate(losses, 1) if not rel <= TOLERANCE), None
    )
    wrong = wrong or _first(found, 2 * steps)
    return replace(
        _empty(pair),
        saved_max_rel=_worst(tensors.values()),
        restored=not changed,
        loss_max_rel=_worst(losses),
        param_max_rel=_worst(parameters),
        optimizer_max_rel=_worst(moments),
        first_difference=wrong,
        ok=wrong is None,
    )


def _worst(found: Any) -> float:
    return max((math.inf if math.isnan(rel) else rel for rel in found), default=0.0)


def _first(found: Mapping[str, float], step: int) -> FirstDifference | None:
    """Returns the first tensor in the model's order that differs, parameters first."""
    for name, rel in found.items():
        if not rel <= TOLERANCE:
            return FirstDifference(kind_of(name) or "parameter", name.rpartition("/")[2], step, rel)
    return None


def _differences(mine: Path, other: Path, job: Job, vocab: int) -> dict[str, float]:
    """Returns the difference of every tensor of two checkpoints, in the model's order, parameters first. A tensor that
    one of them lacks differs by infinity.

    The scales are those of `measure.compare`: for moments, like gradients, at least ROUNDING of the largest of their
    kind, and its square for squares."""
    found: dict[str, float] = {}
    with Reader(check(mine)) as a, Reader(check(other)) as b:
        order = {name: at for at, name in enumerate(parameter_shapes(job.model, vocab))}
        names = dict.fromkeys((*b.names(), *a.names()))
        kinds = list(dict.fromkeys(map(kind_of, names)))
        largest = dict.fromkeys(kinds, 0.0)
        for name in b.names():
            largest[kind_of(name)] = max(largest[kind_of(name)], float(b.read(name).double().abs().max()))
        for name in sorted(
            names, key=lambda n: (kind_of(n) != "", kinds.index(kind_of(n)), order[n.rpartition("/")[2]])
        ):
            kind = kind_of(name)
            if name not in a.manifest.tensors or name not in b.manifest.tensors:
                found[name] = math.inf
                continue
            part = ROUNDING**2 if kind.endswith("_sq") else ROUNDING
            least = part * largest[kind] if kind else job.optimizer.lr
            found[name] = difference(a.read(name).double(), b.read(name).double(), least)
    return found


RESTORED = "restored"
"""The folder of what a resumed run saves at once."""


def train_until(ranks: Ranks, job: Job, vocab: int, until: int, root: Path, start: Path | None) -> list[float]:
    """Runs on the ranks of a layout: trains until a step, from the checkpoint at `start` if there is one, and saves the
    state in `root`. What was loaded is saved in `root`/restored first. Returns the losses."""
    device = device_of(ranks, job.cluster.device)
    agree_on_job(job, device)
    mesh = meshes.build(job.layout, device.type)
    state = TrainState(Stepper(job, mesh, device, vocab, torch.float64), _DATA, vocab)
    if start is not None:
        state.load(start)
        if (step := check(start, verify=False).step) != state.step:
            raise CheckpointError(f"the checkpoint of step {step} resumes at step {state.step}")
        _save(state, root / RESTORED)
    losses = []
    for step in range(state.step, until):
        batches, valid = micro_batches(job, vocab, mesh, step)
        losses.append(state.stepper.step(StepInputs(batches, step, valid, job.optimizer.lr)).loss)
        state.advance(step + 1, job.train.global_batch)
    _save(state, root)
    return losses


def _save(state: TrainState, root: Path) -> None:
    with Saving(state, root, StopRequest()) as saving:
        saving.save(last=True)
