"""Coalesced loads: memory moves in cache lines, so a load of every s-th number moves up to 16 times the bytes it uses.

    python examples/coalesced.py [PICTURE.svg]

Copies the same count of fp32 numbers that lie s apart, on the GPU if there is one. A line of a CPU has 64 bytes, and a
warp of an NVIDIA GPU loads sectors of 32 bytes: neighbouring threads with neighbouring addresses share them. Below one
line per number the useful bandwidth falls as 1/s; beyond, every number costs a line, and a CPU's prefetcher and pages
(4 KiB: 1,024 numbers) what is left. Interleaved rounds and the fastest of them: other programs only make a copy slower.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from phalanx.data.files import write_atomic
from phalanx.pictures.panels import Panel, panels_svg

STRIDES = (1, 2, 4, 8, 16, 32, 64)
NUMBERS, ROUNDS = 1 << 20, 15
LINE = 64


def useful_bandwidths(numbers: int = NUMBERS, rounds: int = ROUNDS) -> dict[int, float]:
    """Returns the bytes per second that a copy of `numbers` fp32 numbers reads and uses, by the distance between
    them."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    source = torch.ones(numbers * STRIDES[-1], device=device)  # larger than the caches
    target, best = torch.empty(numbers, device=device), dict.fromkeys(STRIDES, float("inf"))
    for _ in range(rounds):
        for stride in STRIDES:
            every = source[: numbers * stride : stride]
            began = time.perf_counter()
            target.copy_(every)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best[stride] = min(best[stride], time.perf_counter() - began)
    return {stride: 4 * numbers / seconds for stride, seconds in best.items()}


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    found = useful_bandwidths()
    print("stride  useful GB/s  of stride 1  useful bytes per line")
    for stride, bandwidth in found.items():
        print(f"{stride:6} {bandwidth / 1e9:12.2f} {bandwidth / found[1]:12.0%} {max(4, LINE // stride):22}")
    if arguments:
        lines = [(stride, found[1] / 1e9 / min(stride, LINE // 4)) for stride in found]
        dots = [(stride, bandwidth / 1e9) for stride, bandwidth in found.items()]
        name = f"measured (dots), and if lines of {LINE} bytes were all (line)"
        panel = Panel("", "stride in fp32 numbers", "useful GB/s", {name: lines}, dots={name: dots}, log=2)
        write_atomic(Path(arguments[0]), panels_svg("Loads of every s-th number", [panel]).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
