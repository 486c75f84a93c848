"""Gloo's own collectives against those of phalanx.comm.axis with the same result, over sockets and through memory that
ranks share, interleaved.

    python -m benchmarks.axis [--ranks 2] [--rounds 15]

Marks: shared memory is the fastest at every size. The others are why comm/axis.py does not call the backend's
reduce-scatter and all-gather on a CPU, nor its all-reduce for a few bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import machine, save
from phalanx.comm.axis import Axis
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.train.device import keep_freed_memory

SIZES = {"43 MiB": 43 * 2**20, "1.5 MiB": 3 * 2**19, "4 KiB": 4096}


def measure(ranks: Ranks, rounds: int) -> dict[str, dict[str, float]]:
    """Returns median seconds by size and implementation, on one rank of the default group."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup), "the pool has made the group"
    keep_freed_memory()  # as in training: buffers are not faulted in again for every call
    axes = {"sockets": Axis("all", ranks.world, ranks.rank, group)}
    axes["shared"] = Axis("all", ranks.world, ranks.rank, group).share()
    return {name: _one_size(axes, size, rounds) for name, size in SIZES.items()}


def _one_size(axes: dict[str, Axis], size: int, rounds: int) -> dict[str, float]:
    ranks = axes["shared"].size
    n = size // 4 // ranks * ranks
    whole, part = torch.ones(n), torch.ones(n // ranks)
    ways: dict[str, Callable[[], Any]] = {
        "all-reduce, gloo": lambda: dist.all_reduce(whole),
        "reduce-scatter, gloo": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-gather, gloo": lambda: dist.all_gather_into_tensor(whole, part),
    }
    for name, axis in axes.items():
        ways |= {
            f"all-reduce, {name}": lambda axis=axis: axis.all_reduce(whole).wait(),
            f"reduce-scatter, {name}": lambda axis=axis: axis.reduce_scatter(part, whole).wait(),
            f"all-gather, {name}": lambda axis=axis: axis.all_gather(whole, part).wait(),
        }
    ways = dict(sorted(ways.items()))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way, call in ways.items():
            whole.fill_(1)
            dist.barrier()
            began = time.perf_counter()
            call()
            if number >= 2:
                seconds[way].append(time.perf_counter() - began)
    return {way: statistics.median(values) for way, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options, _ = parser.parse_known_args()
    with Pool(options.ranks) as pool:
        found = pool.run(measure, options.ranks, options.rounds, timeout=300)[0]
    ways = list(next(iter(found.values())))
    table = [("ms", *found)]
    table += [(way, *(f"{1000 * found[size][way]:.2f}" for size in found)) for way in ways]
    result = {"benchmark": "axis", "machine": machine(), "ranks": options.ranks, "seconds": found}
    save(
        "axis",
        result,
        table,
        f"Collectives of {options.ranks} ranks: gloo's own, ours over its sockets, and through shared memory",
    )


if __name__ == "__main__":
    sys.exit(main())
