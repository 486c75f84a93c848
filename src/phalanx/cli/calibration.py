"""Prints the quality of the measurements that predictions rest on, and refuses predictions from unreliable ones."""

from __future__ import annotations

import sys
from typing import Any

from phalanx.config.calibration import Assessment, assess
from phalanx.config.cluster import Cluster
from phalanx.config.clusters import LOCAL
from phalanx.echo import echo
from phalanx.errors import JobError


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
