"""The seconds between a signal to stop and the end."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONGEST_S = 3600.0
"""A job that has more time left was not signalled because its time ends."""


def grace_left(stated_s: float, env: Mapping[str, str], now: float) -> float:
    """Returns the seconds that ranks have from a signal at `now` (seconds since the epoch): those that the job states,
    or, if it is more, the time until Slurm ends the allocation.

    Slurm does not tell a job what its `--signal` or the partition's GraceTime is. It tells when the job ends
    (SLURM_JOB_END_TIME), which is what a signal announces that comes within the last hour.
    """
    end = env.get("SLURM_JOB_END_TIME", "")
    left = int(end) - now if re.fullmatch(r"[0-9]{1,12}", end) else 0.0
    return max(stated_s, left) if left <= LONGEST_S else stated_s
