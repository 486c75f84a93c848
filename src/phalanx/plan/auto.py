"""`layout: auto`: the planner's choice for a job, among the layouts that keep what the job says itself."""

from __future__ import annotations

from collections.abc import Callable, Collection

from phalanx.errors import DoesNotFitError, JobError
from phalanx.job.job import Job
from phalanx.job.layout import Layout
from phalanx.plan.advice import shortfall
from phalanx.plan.plan import Plan
from phalanx.plan.question import question_of
from phalanx.plan.search import search

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def choose(job: Job, fixed: Collection[str], vocab: int, progress: Progress | None = None) -> Plan:
    """The plan whose best candidate (there is one) is the layout of a job with `layout: auto`. `fixed` are the names of
    the fields of the layout that stay as the job has them, `vocab` is the number of tokens of the vocabulary.

    Raises JobError where nothing is known about the devices, or where no legal layout has the fixed fields, and
    DoesNotFitError where none of those that are legal fits.
    """
    layout = job.layout
    kept = {name: getattr(layout, name) for name in fixed}
    plan = search(question_of(job, vocab, kept), progress)
    if plan.best:
        return plan
    if plan.nearest is None:
        raise JobError(_nothing_legal(plan, kept))
    nearest = plan.nearest.case
    raise DoesNotFitError(
        f"layout auto: none of {plan.searched:,} layouts fits. The one that needs least, {nearest.layout.line()}, "
        f"{shortfall(nearest)}"
    )


def open_line(fixed: dict[str, object]) -> str:
    """`auto` with the fields that are fixed, those too that are fixed to what is the default."""
    shown = (f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in fixed.items())
    return ",".join([Layout(auto=True).line(), *shown])


def _nothing_legal(plan: Plan, kept: dict[str, object]) -> str:
    reasons = sorted(plan.rejected.items(), key=lambda item: -item[1])
    lines = [f"\n  {count:,} layouts: {reason}" for reason, count in reasons]
    cluster = plan.question.cluster
    return (
        f"layout {open_line(kept)}: no such layout is legal for this model and batch on {cluster.devices} devices; "
        "leave more to the planner, or change the number of devices (cluster.devices_per_node)" + "".join(lines)
    )
