"""`layout: auto`: the planner's choice for a job, among the layouts that keep what the job says itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from phalanx.config.job import Job
from phalanx.errors import DoesNotFitError, JobError
from phalanx.plan.plan import Plan
from phalanx.plan.planner import search
from phalanx.plan.report.advice import shortfall
from phalanx.plan.search.request import PlanRequest, plan_request

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""
MOST_REASONS = 4
"""That are told where nothing is legal."""


def choose(
    job: Job, fixed: Collection[str], vocab: int, worlds: tuple[int, ...] = (), progress: Progress | None = None
) -> Plan:
    """The plan whose best candidate (there is one) is the layout of a job with `layout: auto`. `fixed` are the names of
    the fields of the layout that stay as the job has them, `vocab` is the number of tokens of the vocabulary, `worlds`
    are the numbers of devices that may be used (empty: all of the cluster's).

    Raises JobError where nothing is known about the devices, or where no legal layout has the fixed fields, and
    DoesNotFitError where none of those that are legal fits.
    """
    kept = {name: getattr(job.layout, name) for name in fixed}
    request = replace(plan_request(job, vocab, kept), worlds=worlds)
    plan = search(request, progress)
    if plan.best:
        return plan
    if plan.nearest is None:
        raise JobError(_nothing_legal(plan, request))
    nearest = plan.nearest.spec
    raise DoesNotFitError(
        f"layout auto: none of {plan.searched:,} layouts fits. The one that needs the least memory, "
        f"{nearest.layout.line()}, " + "\n  ".join([shortfall(nearest), *plan.notes])
    )


def _nothing_legal(plan: Plan, request: PlanRequest) -> str:
    settled = "".join(
        f",{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in request.fixed.items()
    )
    reasons = sorted(plan.rejected.items(), key=lambda item: -item[1])[:MOST_REASONS]
    return (
        f"layout auto{settled}: no such layout is legal for this model, global batch {request.global_batch} and "
        f"{' or '.join(map(str, request.devices))} devices; fix fewer fields, or change the number of devices "
        "(cluster.devices_per_node)" + "".join(f"\n  {count:,} layouts: {reason}" for reason, count in reasons)
    )
