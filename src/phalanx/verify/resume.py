"""Proves that a run resumes in any layout: some steps in one, a checkpoint, the rest in another, as if it were one run.

Each pair of layouts is compared with one process that is never interrupted, in float64: what the checkpoint holds, the
loss of every step, and parameters and optimizer state after the last one. Between them, what the second layout has
loaded is saved again at once and must be the checkpoint to the bit. Checkpoints are written and read as a run does.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.diff import compare, in_model_order
from phalanx.checkpoint.inventory import check, directory_of
from phalanx.checkpoint.manifest import kind_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.errors import CheckpointError
from phalanx.launch.process_group import device_of
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.partition.ramp import ramp_of
from phalanx.train.agreement import agree_on_job
from phalanx.train.requests import StopRequest
from phalanx.train.saving import Saving
from phalanx.train.state import TrainState
from phalanx.train.step import StepInputs, Stepper
from phalanx.units import counted, seconds
from phalanx.verify.cases import CaseReport, VerifyCase, guarded, started
from phalanx.verify.measure import ROUNDING, TOLERANCE, difference, micro_batches, relative
from phalanx.verify.run import FirstDifference, worst
from phalanx.verify.select import Pair, Selection

_DATA = "random tokens of phalanx verify"
"""The fingerprint of the data of all runs."""


@dataclass(frozen=True, kw_only=True)
class ResumeCase(VerifyCase):
    """A run that changes its layout. Differences are None if it failed before."""

    before: str
    """The layout until the checkpoint."""
    after: str
    """The layout that resumes from it."""
    ranks: tuple[int, int]
    saved_max_rel: float | None = None
    """Largest difference of a tensor of the checkpoint."""
    restored: bool | None = None
    """Whether the second layout's state after loading is the checkpoint, to the bit."""
    loss_max_rel: float | None = None
    """Largest difference of a loss, before and after."""
    param_max_rel: float | None = None
    """Largest difference of a parameter after the last step."""
    optimizer_max_rel: float | None = None
    """Largest difference of a tensor of the optimizer after the last step."""
    first_difference: FirstDifference | None = None
    """The first tensor, or loss, that exceeds the tolerance, and the step."""

    @property
    def title(self) -> str:
        return f"{self.before} → {self.after}"

    def complaint(self) -> str:
        if self.error:
            return self.error
        match self.first_difference:
            case FirstDifference("restored", name, _, _):
                return f"what is loaded is not the checkpoint: {name}"
            case FirstDifference("loss", _, step, rel):
                return f"the loss of step {step} differs by {rel:.1e}"
            case FirstDifference(what, name, step, rel):
                return f"{name}: the {what} after step {step} differs by {rel:.1e}"
        return ""


@dataclass
class ResumeReport(CaseReport[ResumeCase]):
    """All pairs, in order, with `steps` steps before the checkpoint, and as many after it."""

    noun = "pair"
    names = 2

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `phalanx verify --resume --json`."""
        document, names = super().as_dict(), {"before": "from", "after": "to"}
        pairs = [{names.get(name, name): value for name, value in case.items()} for case in document.pop("cases")]
        return {"pairs": pairs, **document, "tolerance": TOLERANCE}

    def rows(self) -> Iterator[Sequence[str]]:
        yield "from", "to", "ranks", "saved", "restored", "loss", "parameters", "optimizer"
        for case in self.cases:
            rels = (case.saved_max_rel, case.loss_max_rel, case.param_max_rel, case.optimizer_max_rel)
            saved, *others = ("-" if rel is None else f"{rel:.1e}" for rel in rels)
            bits = "-" if case.restored is None else "to the bit" if case.restored else "no"
            yield case.before, case.after, f"{case.ranks[0]} → {case.ranks[1]}", saved, bits, *others

    def verdict(self, failed: int, how_many: str) -> str:
        measure = f"tolerance {TOLERANCE:g}, {self.steps} + {counted(self.steps, 'step')}, {seconds(self.seconds)}"
        verdict = "Not equal" if failed else "Equal"
        return f"{verdict} to one process without interruption: {how_many} of layouts ({measure})"


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
    report, vocab = ResumeReport(selection, steps), selection.compared.vocab_size
    with started(report, "phalanx.verify.resume") as (ranks, folder):

        @cache
        def until(job: Job, step: int, start: Path | None = None) -> _Saved:
            """Returns a run until a step, from the beginning once only."""
            root = Path(tempfile.mkdtemp(dir=folder))
            call = job.layout.processes, job, vocab, step, root, start
            return _Saved(root, guarded(ranks)(train_until, *call, timeout=job.run.timeout_s)[0])

        for pair in pairs:
            a, b = (job.layout for job in pair)
            case = ResumeCase(before=a.line(), after=b.line(), ranks=(a.world, b.world))
            on_case(report.add(case, partial(_measured, pair, steps, until)))
    return report


def _measured(pair: Pair, steps: int, until: Callable[..., _Saved]) -> dict[str, Any]:
    """Returns what a case has after its ranks ran."""
    first, second = pair
    alone = replace(first, layout=Layout(bucket_mb=first.layout.bucket_mb))
    whole, half = until(alone, 2 * steps), until(alone, steps)
    before = until(first, steps)
    checkpoint = directory_of(before.path, steps)
    after = until(second, 2 * steps, checkpoint)
    saved = _differences(checkpoint, directory_of(half.path, steps), first)
    with Reader(check(checkpoint)) as a, Reader(check(directory_of(after.path / RESTORED, steps))) as b:
        apart = compare(a, b)
        changed = [each.name for each in (*apart.tensors, *apart.fields) if not each.name.startswith("job.")]
    losses = [relative(*both) for both in zip([*before.losses, *after.losses], whole.losses, strict=True)]
    end = directory_of(after.path, 2 * steps), directory_of(whole.path, 2 * steps)
    found = _differences(*end, second)
    wrong = [
        *_wrong(saved, steps),
        *(FirstDifference("restored", name, steps, math.inf) for name in changed),
        *(FirstDifference("loss", None, step, rel) for step, rel in enumerate(losses, 1) if not rel <= TOLERANCE),
        *_wrong(found, 2 * steps),
    ]
    return {
        "saved_max_rel": worst(saved.values()),
        "restored": not changed,
        "loss_max_rel": worst(losses),
        "param_max_rel": worst(rel for name, rel in found.items() if not kind_of(name)),
        "optimizer_max_rel": worst(rel for name, rel in found.items() if kind_of(name)),
        "first_difference": wrong[0] if wrong else None,
        "ok": not wrong,
    }


def _wrong(found: Mapping[str, float], step: int) -> list[FirstDifference]:
    """Returns the tensors that differ, in the order of `found`."""
    return [
        FirstDifference(kind_of(name) or "parameter", name.rpartition("/")[2], step, rel)
        for name, rel in found.items()
        if not rel <= TOLERANCE
    ]


def _differences(mine: Path, other: Path, job: Job) -> dict[str, float]:
    """Returns the difference of every tensor of two checkpoints, in the model's order, parameters first. A tensor that
    one of them lacks differs by infinity.

    The scales are those of `measure.compare`: for moments, like gradients, at least ROUNDING of the largest of their
    kind, and its square for squares."""
    found: dict[str, float] = {}
    with Reader(check(mine)) as a, Reader(check(other)) as b:
        largest: dict[str, float] = {}
        for name in b.names():
            kind = kind_of(name)
            largest[kind] = max(largest.get(kind, 0.0), float(b.read(name).double().abs().max()))
        for name in in_model_order(dict.fromkeys((*b.names(), *a.names())), job.model):
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
        state.advance(step + 1, ramp_of(job))
    _save(state, root)
    return losses


def _save(state: TrainState, root: Path) -> None:
    with Saving(state, root, StopRequest()) as saving:
        saving.save(last=True)
