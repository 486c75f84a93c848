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
"""A callback for progress: the activity, the amount done, and the total."""
MOST_REASONS = 4
"""Most reasons in the message if no layout is legal."""


def choose(
    job: Job, fixed: Collection[str], vocab: int, worlds: tuple[int, ...] = (), progress: Progress | None = None
) -> Plan:
    """Returns the plan of a job with `layout: auto`; its best candidate exists.

    `fixed` are the names of the layout's fields that keep the job's values, `vocab` is the size of the vocabulary,
    `worlds` are the numbers of devices that may be used (empty: all of the cluster's). Raises JobError if the devices
    are unknown or no legal layout has the fixed fields, and DoesNotFitError if no legal layout fits.
    """
    fixed_values = {name: getattr(job.layout, name) for name in fixed}
    request = replace(plan_request(job, vocab, fixed_values), worlds=worlds)
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
