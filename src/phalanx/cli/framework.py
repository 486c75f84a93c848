"""The options that ask the cost model about another training framework or number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from phalanx.cli.option import Option
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, calibrated
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean
from phalanx.plan.space import PlanRequest

OPTIONS = {
    "products": Option(
        Literal["job", "bf16", "fp8", "fp4"],
        "job",
        "number format of the matrix products in blocks; job: that of train.precision",
    ),
    "framework": Option(str, "phalanx", f"predict another training framework: {', '.join(FRAMEWORKS)}"),
}
Asked = TypeVar("Asked", StepSpec, PlanRequest)


def asked(about: Asked, options: Mapping[str, Any]) -> Asked:
    """Returns the spec or request with the changes of the options. Raises JobError for an unknown framework."""
    name, products = options["framework"], options["products"]
    if name not in FRAMEWORKS:
        raise JobError(
            f"--framework: {name!r} is not known{did_you_mean(name, FRAMEWORKS)} (known: {', '.join(FRAMEWORKS)})"
        )
    framework = calibrated(name, about.cluster.accelerator) if name != PHALANX.name else about.framework
    return replace(about, framework=framework, products=about.products if products == "job" else products)
