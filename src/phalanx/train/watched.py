"""Puts ranks that another launcher started under a watchdog on each node (launch/watchdog)."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from phalanx.comm import blocking
from phalanx.comm.agree import on_rank_zero
from phalanx.config.job import Job
from phalanx.launch.environment import HEARTBEATS
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.join import join
from phalanx.train.run_directory import RunDirectory

_HOST_BYTES = 64  # the longest host name that Linux knows


def watch(job: Job, ranks: Ranks, log_file: Path | None) -> None:
    """Starts this rank's heartbeat, and the watchdog of its node, unless our own launcher did. All ranks call it.

    `log_file` is rank 0's: reports go to the folder of its attempt."""
    if HEARTBEATS in os.environ or ranks.world == 1:
        return
    reports = Path(on_rank_zero(lambda: str(log_file.parents[1] if log_file else RunDirectory.of(job).logs)))
    limits = Limits(job.run.hang_limit_s, job.run.timeout_s)
    join(ranks, _hosts(ranks.world), limits, reports, RunDirectory.of(job).metrics)


def _hosts(world: int) -> list[str]:
    """Returns the host of every rank."""
    name = platform.node().encode()[:_HOST_BYTES]
    mine = torch.zeros(_HOST_BYTES, dtype=torch.uint8)
    mine[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(world)]
    blocking.all_gather(every, mine)
    return [host.numpy().tobytes().rstrip(b"\0").decode() for host in every]
