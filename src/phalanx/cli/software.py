"""The options that ask the cost model about another program than this, or another number format than the job's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from phalanx.cli.job_words import Option
from phalanx.cost.calibration import calibrated
from phalanx.cost.case import Case
from phalanx.cost.programs import PHALANX, SOFTWARE
from phalanx.errors import JobError
from phalanx.nearest import nearest
from phalanx.plan.question import Question

OPTIONS = {
    "products": Option(
        Literal["job", "bf16", "fp8", "fp4"], "job", "number format of the blocks' matrix products; the job's own"
    ),
    "program": Option(str, "phalanx", f"predict another program: {', '.join(SOFTWARE)}"),
}
Asked = TypeVar("Asked", Case, Question)


def asked(about: Asked, options: Mapping[str, Any]) -> Asked:
    """A case or a question with what the options ask for besides the job. Raises JobError for a program that is not
    known."""
    program, products = options["program"], options["products"]
    if program not in SOFTWARE:
        meant = nearest(program, SOFTWARE)
        hint = f"; did you mean {meant}?" if meant else ""
        raise JobError(f"--program: {program!r} is not known{hint} (known: {', '.join(SOFTWARE)})")
    software = calibrated(program, about.cluster.accelerator) if program != PHALANX.name else about.software
    return replace(about, software=software, products=about.products if products == "job" else products)
