"""What all ranks must have in common and can be told without torch: the job's fields and the program's source files."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import phalanx
from phalanx.check.show import as_dict
from phalanx.config.fields import leaves
from phalanx.config.job import Job

MAY_DIFFER = (
    "run.threads",  # the number of threads itself is compared, where results depend on it
    "run.log_level",
    "run.all_ranks",
    # cluster=local reads these from the measurements of each machine; only predictions depend on them.
    "cluster.accelerator.",
    "cluster.intra.",
    "cluster.inter.",
    "cluster.sharing.",
    "cluster.calibration.",
)
"""Fields of a job, or their beginnings, that may differ between ranks."""


def job_facts(job: Job) -> dict[str, Any]:
    """Returns every field of the job that must be the same on all ranks, by dotted path."""
    document = as_dict(job)
    return {
        path: functools.reduce(lambda values, name: values[name], path.split("."), document)
        for path in leaves()
        if not path.startswith(MAY_DIFFER)
    }


@functools.cache
def source_digest() -> str:
    """Returns a digest (sha256, 16 hexadecimal digits) of the program's own source files, by relative path and content:
    what a version number does not tell while somebody edits a working copy."""
    root = Path(phalanx.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(json.dumps([str(path.relative_to(root)), len(content)]).encode() + content)
    return digest.hexdigest()[:16]
