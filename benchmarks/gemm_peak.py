"""What one thread can do at most on this machine: FLOP/s of an fp32 matrix product, on all ranks at once.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gemm_peak

Ranks of one machine share its memory and, it may be, its cores, so each is slower than one alone. Uses the faster of
torch's matrix libraries, whatever the contender that is compared with it uses. Prints the mean over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.train.device import peak_flops

REPEATS = 4
"""Quarters of a second that are measured; the best counts, as neighbours on the machine only ever take away."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    best = max(peak_flops(0.0, torch.device("cpu"), torch.float32)[0] for _ in range(REPEATS))
    total = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(total.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
