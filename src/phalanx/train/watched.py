"""Puts ranks that another launcher started under a watchdog on each node (launch/watchdog)."""

from __future__ import annotations

import os
import platform
import secrets
from pathlib import Path

from phalanx.comm import calls
from phalanx.comm.agree import gather_json, on_rank_zero
from phalanx.config.job import Job
from phalanx.launch.environment import HEARTBEATS
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.join import join
from phalanx.train.run_directory import RunDirectory


def watch(job: Job, ranks: Ranks, log_file: Path | None) -> None:
    """Starts this rank's heartbeat, and the watchdog of its node, unless our own launcher did. All ranks call it.

    `log_file` is rank 0's: reports go to the folder of its attempt."""
    calls.record()
    if HEARTBEATS in os.environ or ranks.world == 1:
        return
    reports = Path(on_rank_zero(lambda: str(log_file.parents[1] if log_file else RunDirectory.of(job).logs)))
    limits = Limits(job.run.hang_limit_s, job.run.timeout_s, follows=not job.run.hang_s)
    token = on_rank_zero(lambda: secrets.token_hex(8))
    join(ranks, gather_json(platform.node()), token, limits, reports, RunDirectory.of(job).metrics)
