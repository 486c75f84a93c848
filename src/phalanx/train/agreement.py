"""All ranks agree on the job, the program and the data before anything is built on them.

A rank with another learning rate, seed, version or shard would train to the end, with weights that no job describes.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import phalanx
from phalanx.comm.agree import Disagreement, Facts, clock_skew, disagreements, gather_json, on_every_rank, on_rank_zero
from phalanx.config.job import Data, Job
from phalanx.data.index import INDEX, Index, open_shards, read_index, repair_command
from phalanx.data.loader import ShardData, SplitReader, split_blocks
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError, JobError, RunError
from phalanx.launch.ranks import Ranks
from phalanx.partition.ramp import ramp_of
from phalanx.train.run_directory import RunDirectory, extension_facts, job_facts, source_digest

log = logging.getLogger(__name__)

VERIFIED_BYTES = 2**30
"""Bytes of token shards (about a second's reading) up to which their digests are checked at every start. Larger ones
are checked block by block while they are read (data/loader.py)."""

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
        "accelerator": torch.get_device_module(device).get_device_name(device),
        "CUDA version": torch.version.cuda,
        "ROCm version": torch.version.hip,
        "XPU version": torch.version.xpu,
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


VISIBLE_S = 10.0
"""Seconds after which a file that another node has written must be visible: NFS caches directories."""
_SHOWN = 4


def require_shared(directory: RunDirectory, shards: Path, ranks: Ranks) -> None:
    """Raises RunError on every rank, naming ranks and hosts, if a rank does not see the run directory or the token
    shards that rank 0 sees. Ranks of one node are not asked. A collective; the path `shards` is rank 0's."""
    if ranks.one_node:
        return
    token = directory.path / on_rank_zero(lambda: write_token(directory))
    paths = {"run.dir": token, "data.dir": shards / INDEX}
    deadline = time.monotonic() + VISIBLE_S
    hidden = {field: str(path.parent.absolute()) for field, path in paths.items() if not sees(path, deadline)}
    answers = gather_json({"host": platform.node(), "hidden": hidden})
    if ranks.rank == 0:
        token.unlink(missing_ok=True)
    problems = [problem for field in paths if (problem := _problem(field, answers))]
    if problems:
        raise RunError("\n".join(problems))


def write_token(directory: RunDirectory) -> str:
    """Creates an empty file in the directory, and returns its name. Raises RunError if that fails."""
    name = f".seen-{secrets.token_hex(8)}"
    with directory.writing():
        directory.path.mkdir(parents=True, exist_ok=True)
        os.close(os.open(directory.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return name


def sees(path: Path, deadline: float) -> bool:
    """Returns whether a file that another node has written is seen before `deadline`, by time.monotonic()."""
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent.parent)  # makes an NFS client ask its server again
            os.listdir(path.parent)
        time.sleep(0.1)
    return True


def _problem(field: str, answers: list[Mapping[str, Mapping[str, str]]]) -> str:
    blind = [
        f"rank {rank} on {answer['host']} does not see {answer['hidden'][field]}"
        for rank, answer in enumerate(answers)
        if field in answer["hidden"]
    ]
    if not blind:
        return ""
    more = f", and {len(blind) - _SHOWN} more ranks" if len(blind) > _SHOWN else ""
    remedy = " (or prepare the data on every node)" if field == "data.dir" else ""
    return (
        f"{field} is not shared: {'; '.join(blind[:_SHOWN])}{more}, as rank 0 on {answers[0]['host']} does; set it to "
        f"a folder on a filesystem that every node mounts{remedy}"
    )


SHOWN_BLOCKS = 10

_Found = tuple[str, int, int, str]
"""Split, shard, block, and what is wrong with it."""


def damaged_samples(job: Job, folder: Path) -> dict[str, frozenset[int]]:
    """Returns the damaged samples of each split of a folder of shards; nothing unless the job skips them.

    A collective; each block is read once per host. Raises DataError on every rank if the shards have no block digests,
    if there are more damaged samples than data.skip_quota, or if a shard cannot be read.
    """
    if job.data.on_corruption == "stop":
        return {}
    index = read_index(folder)
    if not index.block_bytes:
        raise DataError(
            f"{folder}: data.on_corruption=skip needs digests of blocks, which version 1 has not. "
            f"Add them with: {repair_command(folder, index, switch='--verify')}"
        )
    readers = {
        split: SplitReader(folder, index, split, job.model.seq_len)
        for split in (["train", "val"] if job.train.eval_samples else ["train"])
    }
    hosts = gather_json(platform.node())
    found = on_every_rank(lambda: _scan(readers, *_place(hosts)))
    every = sorted({tuple(each) for theirs in gather_json(found) for each in theirs})
    before = len(Tokenizer.load(folder).separator) if job.data.document_mask else 0
    damaged: dict[str, set[int]] = {split: set() for split in readers}
    for split, shard, block, _ in every:
        damaged[split].update(readers[split].samples_of(shard, block, before))
    _report(job, folder, index, every, damaged)
    return {split: frozenset(samples) for split, samples in damaged.items()}


def _place(hosts: list[str]) -> tuple[int, int]:
    """Returns this rank's place among the ranks of its host, and their number."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def _scan(readers: Mapping[str, SplitReader], place: int, places: int) -> list[_Found]:
    """Returns the damaged blocks of the `place`-th of `places` equal parts of all blocks."""
    found = []
    for split, reader in readers.items():
        blocks = split_blocks(reader.shards, reader.index.block_bytes)
        for shard, block in blocks[len(blocks) * place // places : len(blocks) * (place + 1) // places]:
            if problem := reader.problem(shard, block):
                found.append((split, shard, block, problem))
    return found


def _report(job: Job, folder: Path, index: Index, found: list[_Found], damaged: Mapping[str, set[int]]) -> None:
    """Logs on rank 0 what is replaced. Raises DataError if it is more than the quota."""
    shown = "".join(
        f"\n  {folder / index.splits[split][shard].file}: block {block}: {problem}"
        for split, shard, block, problem in found[:SHOWN_BLOCKS]
    )
    if len(found) > SHOWN_BLOCKS:
        shown += f"\n  ... and {len(found) - SHOWN_BLOCKS} more"
    for split, samples in damaged.items():
        if len(samples) > job.data.skip_quota:
            raise DataError(
                f"{len(samples):,} samples of split {split} are damaged, more than data.skip_quota "
                f"{job.data.skip_quota:,}. Restore the shards, or make them again with: "
                f"{repair_command(folder, index)}{shown}"
            )
    if found and not (dist.is_initialized() and dist.get_rank()):
        counts = " and ".join(f"{len(samples):,} samples of {split}" for split, samples in damaged.items())
        log.warning("data: %s are damaged and replaced by others (data.on_corruption=skip):%s", counts, shown)


def open_data(job: Job, directory: RunDirectory, ranks: Ranks) -> tuple[ShardData, ShardData | None]:
    """Returns the training samples, and those of the validation if there is one. A collective.

    Raises DataError for data that cannot be made or read, RunError if the ranks see different data, and JobError if the
    run reads a source of a mixture more often than the job allows."""
    shards = Path(on_rank_zero(lambda: str(find_shards(job.data))))
    require_shared(directory, shards, ranks)
    index = open_same_shards(shards)
    damaged = {folder: damaged_samples(job, folder) for folder in index.folders(shards)}

    def opened(split: str) -> ShardData:
        of_split = {folder: samples.get(split, ()) for folder, samples in damaged.items()}
        return open_split(shards, split, job.model.seq_len, job.data, of_split, scored=job.model.reward)

    train = opened("train")
    if problems := train.epoch_problems(ramp_of(job).samples(job.train.steps)):
        raise JobError(problems)
    return train, opened("val") if job.train.eval_samples else None
