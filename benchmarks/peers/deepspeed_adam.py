"""The update alone: DeepSpeed's CPUAdam and torch's fused AdamW, which an offloaded optimizer of ours runs, in turns.

Prints one line of JSON: the seconds of every update of `--elements` fp32 numbers by each.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    made = {}
    for name in ("DeepSpeed CPUAdam", "torch fused AdamW"):
        parameter = torch.nn.Parameter(torch.randn(options.elements))
        parameter.grad = torch.randn(options.elements)
        kind = DeepSpeedCPUAdam if name.startswith("DeepSpeed") else torch.optim.AdamW
        more = {"adamw_mode": True} if kind is DeepSpeedCPUAdam else {"fused": True}
        made[name] = kind([parameter], lr=1e-3, weight_decay=0.1, **more)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(options.rounds + 1):
        for name, optimizer in made.items():
            began = time.perf_counter()
            optimizer.step()
            if number:  # the first one makes the state
                seconds[name].append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
