"""Reading samples from slow storage: every rank its own, or few readers that send the others theirs (data.readers).

    python -m benchmarks.readers [--mb-per-s 16] [--steps 24] [--rounds 3] [--dir FOLDER]

Four ranks stand for four nodes: each has a copy of the token shards of its own, so that none finds in the page cache
what another has read, as on four machines that mount one storage. The copies lie on one disk, whose speed is limited
for all ranks together by a cgroup (blkio.throttle.read_bps_device of version 1, for which this must be root). Before
each turn the copies are evicted from the page cache. A turn takes the micro-batches of some steps, and nothing else, as
a run's loop does (train/feed.py); ranks wait for one another after each step. Once more without limit and with the
copies in the page cache: what handing out costs where storage is fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.report import machine, save
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.partition.ramp import ramp_of
from phalanx.train.feed import Feed, readers_of
from phalanx.train.metrics import Meter

WORLD = 4
CGROUPS = Path("/sys/fs/cgroup/blkio")
LAYOUTS = (Layout(tp=4), Layout(dp_replicate=2, tp=2), Layout(dp_replicate=4))
TOKENS = 40_000_000


@contextmanager
def limited(folder: Path, mb_per_s: float) -> Iterator[Path]:
    """A cgroup in which the disk of a folder is read with at most so many MB/s. Yields its list of processes."""
    group, device = CGROUPS / f"phalanx-readers-{os.getpid()}", folder.stat().st_dev
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {mb_per_s * 1e6:.0f}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group / "cgroup.procs"
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


def turn(ranks: Ranks, job: Job, copies: Path, steps: int, procs: Path | None) -> float:
    """Takes the micro-batches of some steps as one of the ranks. Returns the seconds."""
    (procs or CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
    mesh = meshes.build(job.layout, "cpu")
    files = [path for path in (copies / str(ranks.rank)).rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            if procs:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                file.read()
    [folder] = (copies / str(ranks.rank)).iterdir()
    data = open_split(folder, "train", job.model.seq_len, job.data)
    ramp, meter = ramp_of(job), cast(Meter, SimpleNamespace(waited=0.0))
    run = {"first_step": 0, "first_sample": 0}
    readers, _ = readers_of(job, data, ramp, mesh, torch.device("cpu"), **run)
    with Feed(job, data, ramp, mesh, meter, **run, readers=readers) as feed:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            feed.take()
            dist.barrier()
        return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.readers", description=__doc__)
    parser.add_argument("--mb-per-s", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="folder on the disk whose speed is limited")
    options = parser.parse_args(arguments)
    shape, train = ModelConfig(seq_len=2048, vocab_size=50304), Train(global_batch=16)
    cases = [(layout, readers) for layout in LAYOUTS for readers in sorted({0, 1, layout.data_ranks})]
    seconds: dict[tuple[int, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as name, Pool(WORLD) as pool:
        copies = Path(name)
        data = Data(corpus="random", random_tokens=TOKENS, random_vocab=50304, dir=str(copies / "0"))
        prepare(data)
        for rank in range(1, WORLD):
            shutil.copytree(copies / "0", copies / str(rank))
        os.sync()
        with limited(copies, options.mb_per_s) as procs:
            for _ in range(options.rounds):
                for slow in (True, False):
                    for number, (layout, readers) in enumerate(cases):
                        job = Job(model=shape, layout=layout, train=train, data=replace(data, readers=readers))
                        took = pool.run(turn, WORLD, job, copies, options.steps, procs if slow else None, timeout=600.0)
                        seconds.setdefault((number, slow), []).append(max(took) / options.steps)
    rows: list[dict[str, Any]] = [
        {
            "layout": layout.line(),
            "readers": readers,
            "slow_s": statistics.median(seconds[number, True]),
            "cached_s": statistics.median(seconds[number, False]),
        }
        for number, (layout, readers) in enumerate(cases)
    ]
    table = [("layout", "data.readers", "ms per step, slow storage", "ms per step, in the page cache")]
    table += [(r["layout"], str(r["readers"]), f"{1e3 * r['slow_s']:.0f}", f"{1e3 * r['cached_s']:.1f}") for r in rows]
    seen = (
        f"{WORLD} ranks with a copy of the shards each, {train.global_batch} samples of {shape.seq_len} tokens per "
        f"step; storage limited to {options.mb_per_s:g} MB/s for all ranks together by a cgroup; medians of "
        f"{options.rounds} rounds; load of the machine {os.getloadavg()[1]:.1f}."
    )
    facts = {"machine": machine(), "mb_per_s": options.mb_per_s, "rows": rows}
    save("readers", facts, table, "Reading from slow storage: every rank, or few readers", seen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
