"""The axes dp_replicate and dp_shard: other samples on every rank, with whole copies of the state or parts of it."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.axes.axis import AxisEntry
from phalanx.config.job import Job
from phalanx.techniques.technique import Problem


def _problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if layout.accumulate == "sharded" and layout.zero == 1:
        yield (
            "layout.accumulate",
            "sharded accumulation needs zero 2 or 3, zero is 1; nearest legal: accumulate=local, or zero=2",
        )
    if layout.accumulate == "sharded" and layout.shard_ranks == 1:
        yield (
            "layout.accumulate",
            f"dp_shard {layout.dp_shard} × cp {layout.cp} = 1 rank cannot shard gradients; nearest legal: "
            "accumulate=local, or dp_shard=2",
        )


REPLICATE = AxisEntry(
    "data-parallel replicas with whole copies",
    "Li et al. 2020",
    "samples",
    layouts=("dp_replicate=2", "dp_replicate=4,accumulation=2"),
    combined=("dp_replicate=2",),
)
SHARD = AxisEntry(
    "data-parallel ranks that share the state",
    "Rajbhandari et al. 2020; Zhao et al. 2023",
    "state",
    problems=_problems,
    layouts=(
        "dp_shard=2,zero=1,accumulation=2",
        "dp_shard=4,zero=2",
        "dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_shard=4,zero=3",
        "dp_shard=2,zero=3,reshard=false,accumulation=2",
        "dp_shard=2,zero=3,accumulate=sharded,accumulation=2,recompute=full",
        "dp_replicate=2,dp_shard=2,zero=1",
        "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "dp_replicate=2,dp_shard=2,zero=3,accumulation=2",
    ),
    combined=("dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"),
)
