"""The samples that a run with data.on_corruption=skip does not read, the same on all ranks and in any layout.

A rank that replaced a sample on its own would compute with other tokens than the ranks that share the sample (tensor,
pipeline and context parallelism), and unlike a run in another layout. So before the first step the ranks of each host
check all blocks that the host reads, and a sample that is damaged on any host is replaced on all.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from phalanx.comm.agree import gather_json, on_every_rank
from phalanx.config.job import Job
from phalanx.data.index import Index, read_index, repair_command
from phalanx.data.loader import SplitReader, split_blocks
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError

log = logging.getLogger(__name__)

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
