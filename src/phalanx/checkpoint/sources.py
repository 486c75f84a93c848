"""Opens whatever holds the tensors of a checkpoint: a run, a folder of checkpoints, a checkpoint, consolidated
safetensors, or a checkpoint of torch's DCP."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint import consolidated
from phalanx.checkpoint.inventory import checkpoint_at, form_of
from phalanx.checkpoint.reader import Reader
from phalanx.checkpoint.validity import check
from phalanx.errors import JobError


def open_source(path: Path, step: int = 0, trusted: bool = False) -> Reader:
    """Returns the tensors at `path`, whose manifest has the step and metadata of a checkpoint that Phalanx wrote or
    converted, and otherwise 0 and none. A run's checkpoint is that of `step`, or the newest whole one; digests are not
    checked. `trusted` allows to read DCP's metadata, which are pickle.

    Raises CheckpointError if there is none, or a damaged one; JobError for DCP without `trusted`, and for a step where
    there is only one."""
    form = form_of(path)
    if form == "checkpoint":
        return Reader(check(checkpoint_at(path, step), verify=False))
    if step:
        raise JobError(f"--step {step}: {path} is no run, and holds one state only")
    if form == "dcp":
        from phalanx.checkpoint.dcp import DcpReader  # imported here, because it takes long

        return DcpReader(path, trusted)
    return Reader(consolidated.describe(path))
