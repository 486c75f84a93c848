"""Options of every verb that predicts: the training framework, and the quality of the measurements beneath.

Predictions from measurements that are too noisy are refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from phalanx.cli.option import Option
from phalanx.config.calibration import Assessment, assess
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import LOCAL
from phalanx.config.job import Job
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, calibrated
from phalanx.cost.money import RunCost, amount, is_asked, run_cost, tokens_of
from phalanx.echo import echo
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean

if TYPE_CHECKING:
    from phalanx.cost.spec import StepSpec
    from phalanx.plan.space import PlanRequest

OPTIONS = {
    "products": Option(
        Literal["job", "bf16", "fp8", "fp4"],
        "job",
        "number format of the matrix products in blocks; job: that of train.precision",
    ),
    "framework": Option(str, "phalanx", f"predict another training framework: {', '.join(FRAMEWORKS)}"),
}
TOKENS = Option(
    float,
    0.0,
    "print what a run of so many tokens costs, such as 15T or 300B: device hours, and price, kWh and kg CO2 where "
    "cluster.price_per_device_hour, power_w and carbon_g_per_kwh are known (0: those of train.steps, if one is set)",
    read=amount,
)
Asked = TypeVar("Asked", "StepSpec", "PlanRequest")


def asked_cost(job: Job, devices: int, tokens_per_s: float, tokens: float) -> RunCost | None:
    """Returns the cost of the run of `tokens` (0: of train.steps), or None if nothing asks for it."""
    if not is_asked(job.cluster, tokens):
        return None
    return run_cost(job.cluster, devices, tokens_of(job, tokens), tokens_per_s)


def assessment_of(cluster: Cluster, world: int) -> Assessment | None:
    """Assesses the measurements that predictions for `world` devices (0: not known yet) of the cluster need; None for a
    cluster that was not measured by `phalanx bench`."""
    is_local = cluster.preset.partition(":")[0] == LOCAL
    if not (is_local or cluster.calibration.is_known):
        return None
    name = cluster.accelerator.name if cluster.device == "cpu" else ""
    return assess(cluster.calibration, ("compute",) if world == 1 else ("compute", "comm"), here=is_local, cpu=name)


def check_calibration(cluster: Cluster, world: int, *, prints: bool = True) -> None:
    """Prints fit error and spread of a measured cluster as one line on standard error.

    Raises JobError where they exceed the bounds above which predictions are refused, unless cluster.allow_unreliable.
    """
    assessment = assessment_of(cluster, world)
    if assessment is None:
        return
    name = f"cluster={cluster.preset}" if cluster.preset else "cluster"
    if assessment.status == "refused" and not cluster.allow_unreliable:
        raise JobError(
            f"predictions on {name} are refused, because its measurements are too noisy ({assessment.problem}): "
            f"{assessment.remedy}, or predict with them anyway: cluster.allow_unreliable=true"
        )
    if prints:
        echo(f"{name}: {assessment.line()}", file=sys.stderr, wrap=True)


def calibration_document(cluster: Cluster, world: int) -> dict[str, Any] | None:
    """Returns the entry `calibration` of `--json`: None for a cluster that was not measured."""
    assessment = assessment_of(cluster, world)
    return assessment.as_dict() if assessment else None


def asked(about: Asked, options: Mapping[str, Any]) -> Asked:
    """Returns the spec or request with the changes of the options. Raises JobError for an unknown framework."""
    name, products = options["framework"], options["products"]
    if name not in FRAMEWORKS:
        raise JobError(
            f"--framework: {name!r} is not known{did_you_mean(name, FRAMEWORKS)} (known: {', '.join(FRAMEWORKS)})"
        )
    framework = calibrated(name, about.cluster.accelerator) if name != PHALANX.name else about.framework
    return replace(about, framework=framework, products=about.products if products == "job" else products)
