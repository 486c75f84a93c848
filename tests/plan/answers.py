"""Questions that several tests ask."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from phalanx.config.cluster import Cluster, Link
from phalanx.config.clusters import cluster_of
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.plan.plan import Plan
from phalanx.plan.planner import search
from phalanx.plan.space import PlanRequest


def request(model: str, cluster: str | Cluster, sequences: int, **fixed: Any) -> PlanRequest:
    machine = cluster_of(cluster) if isinstance(cluster, str) else cluster
    return PlanRequest(PRESETS[model], machine, sequences, framework=PHALANX, fixed=fixed)


def slow_network(nodes: int) -> Cluster:
    """Nodes of eight H100 with one 100 Gb/s Ethernet card each."""
    return replace(cluster_of(f"dgx-h100:{nodes}"), preset="", inter=Link(100 / 8 / 8, 30, 0.8))


@cache
def planned(model: str, cluster: str | Cluster, sequences: int, schedule: str = "1f1b", sample: int = 0) -> Plan:
    return search(request(model, cluster, sequences, schedule=schedule), sample=sample)
