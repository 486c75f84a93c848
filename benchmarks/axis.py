"""Gloo's own collectives against those of phalanx.comm.axis with the same result, interleaved.

    python -m benchmarks.axis [--ranks 2] [--rounds 15]

Marks: none; the figures are why comm/axis.py does not call the backend's reduce-scatter and all-gather on a CPU, nor
its all-reduce for a few bytes.
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
    axis = Axis("all", ranks.world, ranks.rank, group)
    return {name: _one_size(axis, size, rounds) for name, size in SIZES.items()}


def _one_size(axis: Axis, size: int, rounds: int) -> dict[str, float]:
    n = size // 4 // axis.size * axis.size
    whole, part = torch.ones(n), torch.ones(n // axis.size)
    ways: dict[str, Callable[[], Any]] = {
        "all-reduce, gloo": lambda: dist.all_reduce(whole),
        "all-reduce, here": lambda: axis.all_reduce(whole).wait(),
        "reduce-scatter, gloo": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce-scatter, here": lambda: axis.reduce_scatter(part, whole).wait(),
        "all-gather, gloo": lambda: dist.all_gather_into_tensor(whole, part),
        "all-gather, here": lambda: axis.all_gather(whole, part).wait(),
    }
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
    save("axis", result, table, f"Collectives on gloo, {options.ranks} ranks: the backend's and ours")


if __name__ == "__main__":
    sys.exit(main())
