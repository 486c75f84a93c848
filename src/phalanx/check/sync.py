"""The problems of `layout.sync`: how replicas synchronise."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.fields import get
from phalanx.config.job import Job


def sync_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    layout, sync = job.layout, job.layout.sync
    if sync == "bsp":
        return
    if layout.dp_replicate < 2:
        yield (
            "layout.sync",
            f"{sync} synchronises replicas, dp_replicate is {layout.dp_replicate}; nearest "
            "legal: dp_replicate=2, or sync=bsp",
        )
    if layout.data_parallel == "threads":
        yield (
            "layout.sync",
            f"{sync} needs replicas with their own parameters, threads share them; nearest legal: "
            "data_parallel=ddp, or sync=bsp",
        )
    if job.train.precision == "fp16":
        yield (
            "layout.sync",
            f"{sync} does not work with fp16, whose loss scale all replicas would share in every step; nearest "
            "legal: precision=bf16, or sync=bsp",
        )
    if sync != "asp":
        for path in ("train.eval_every", "checkpoint.every"):
            every = get(job, path)
            if every % layout.sync_every:
                below = every // layout.sync_every * layout.sync_every
                legal = f"{below} or {below + layout.sync_every}" if below else f"{layout.sync_every}"
                yield (
                    path,
                    f"replicas synchronise every sync_every {layout.sync_every} steps and differ in between; {every} "
                    "is not a "
                    f"multiple of it, nearest: {legal}",
                )
