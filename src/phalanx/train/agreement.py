"""All ranks agree on the job, the program and the data before anything is built on them.

A rank with another learning rate, seed, version or shard would train to the end, with weights that no job describes.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import phalanx
from phalanx.comm.agree import Disagreement, Facts, clock_skew, disagreements, on_every_rank
from phalanx.config.data import Data
from phalanx.config.job import Job
from phalanx.data.index import Index, read_index, repair_command
from phalanx.data.prepare import prepare
from phalanx.data.shards import open_shards
from phalanx.errors import DataError, JobError, RunError
from phalanx.train.facts import extension_facts, job_facts, source_digest

log = logging.getLogger(__name__)

VERIFIED_BYTES = 2**30
"""Bytes of token shards (about a second's reading) up to which their digests are checked at every start. Larger ones
are checked block by block while they are read (data/blocks.py)."""

MAY_DIFFER_WITH_WARNING = ("processor capability", "accelerator")
"""Facts about a rank's machine that change rounding, but that a user cannot always make equal."""

ROUNDING_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Environment variables that change the rounding of products on a GPU."""
MAX_CLOCK_SKEW_S = 5.0
SHOWN_DIFFERENCES = 20


def agree_on_job(job: Job, device: torch.device) -> None:
    """Raises JobError or RunError on every rank, as `agree`, unless all ranks run the same job in the same way."""
    agree(job_facts(job), device)


def agree(chosen: Facts, device: torch.device) -> None:
    """Raises an error on every rank unless all ranks have the same `chosen` facts, the same program and the same
    settings of torch. A warning is logged where clocks, processors or accelerators differ.

    The first collective after joining the process group. Raises JobError if a chosen fact differs, and RunError if only
    other facts differ. The message names the ranks that differ from the majority, their hosts, and both values.
    """
    program = program_facts(device)
    found = disagreements({**program, **chosen})
    warned = [each for each in found if each.name in MAY_DIFFER_WITH_WARNING]
    refused = [each for each in found if each.name not in MAY_DIFFER_WITH_WARNING]
    if refused:
        of_job = any(each.name not in program for each in refused)
        raise (JobError if of_job else RunError)(_message(refused, program))
    for each in warned:
        log.warning("%s: results are not reproducible to the bit, and replicas may differ by rounding", each.text)
    if skew := clock_skew(MAX_CLOCK_SKEW_S):
        log.warning("%s", skew)


def find_shards(data: Data) -> Path:
    """Returns the folder of a job's token shards, built if missing, with their digests checked. Raises DataError."""
    shards = prepare(data)
    folders = read_index(shards).folders(shards)
    size = sum(shard.bytes for folder in folders for shard in read_index(folder).shards)
    open_shards(shards, verify=size <= VERIFIED_BYTES and data.on_corruption == "stop")
    return shards


def open_same_shards(folder: Path) -> Index:
    """Returns the index of a folder of token shards, as `open_shards`, once all ranks have opened it and found the same
    data.

    Raises on every rank: DataError if a rank cannot open it, RunError if ranks found different tokens under the same
    path, as on nodes with a disk of their own."""

    def opened() -> Index:
        try:
            return open_shards(folder)
        except DataError as error:
            who = f"Rank {dist.get_rank()} on host {platform.node()}"
            raise DataError(f"{who} has no data it can use: {error}") from None

    several = dist.is_initialized() and dist.get_world_size() > 1
    index = on_every_rank(opened) if several else open_shards(folder)
    if found := disagreements({"data fingerprint": index.fingerprint[:16]}):
        raise RunError(
            f"The ranks read different data in {folder}:\n  {found[0].text}\nMake {folder} the same on every host, or "
            "set data.dir to a folder that all of them share."
        )
    if not index.block_bytes and not (several and dist.get_rank()):
        log.warning(
            "%s: these shards, of version 1, have no digests of blocks: tokens are not checked while they are read. "
            "Add them with: %s",
            folder,
            repair_command(folder, index, switch="--verify"),
        )
    return index


def program_facts(device: torch.device) -> dict[str, Any]:
    """Returns the versions and settings of this process that must be the same on all ranks, by name."""
    facts: dict[str, Any] = {
        "phalanx version": phalanx.__version__,
        "phalanx source": source_digest(),
        "extensions": extension_facts(),
        "Python version": platform.python_version(),
        "torch version": torch.__version__,
        "device": device.type,
        "default dtype": str(torch.get_default_dtype()),
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        # A sum is cut among the threads: their number and the width of a vector change its rounding.
        return facts | {
            "threads": torch.get_num_threads(),
            "processor capability": torch.backends.cpu.get_cpu_capability(),
        }
    return facts | {
        "accelerator": torch.cuda.get_device_name(device),
        "CUDA version": torch.version.cuda,
        "NCCL version": list(nccl.version()) if dist.is_nccl_available() else None,
        "cuDNN": [torch.backends.cudnn.version(), torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "rounding variables": {name: os.environ.get(name) for name in ROUNDING_VARIABLES},
    }


def _message(found: list[Disagreement], program: Facts) -> str:
    of_job = [each for each in found if each.name not in program]
    lines = [f"The ranks do not run the same {'job' if of_job else 'program'}:"]
    lines += [f"  {each.text}" for each in found[:SHOWN_DIFFERENCES]]
    if len(found) > SHOWN_DIFFERENCES:
        lines.append(f"  ... and {len(found) - SHOWN_DIFFERENCES} more")
    if of_job:
        lines.append("Start every rank with the same job file and the same overrides.")
    if len(of_job) < len(found):
        lines.append(
            "Install the same versions on every host, and give all ranks the same settings (threads: run.threads, "
            "--threads, or OMP_NUM_THREADS)."
        )
    return "\n".join(lines)
