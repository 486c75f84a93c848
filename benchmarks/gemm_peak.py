"""The peak of one thread on this machine: FLOP/s of an fp32 matrix product, on all ranks at once.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gemm_peak

Ranks of one machine share its memory and possibly its cores, so each is slower than one alone. Uses the faster of
torch's matrix libraries, whichever the compared contender uses. Prints the mean over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.train.device import measured_peak

REPEATS = 2
"""Measurements of half a second; the best counts, since other programs can only slow it down."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    best = max(measured_peak(torch.device("cpu"), torch.float32).flops for _ in range(REPEATS))
    total = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(total.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
