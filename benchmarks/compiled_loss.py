"""Head and loss in torch's eager mode, compiled, in chunks of tokens, and by torch's linear_cross_entropy in as large
chunks: memory at the peak, and time of a forward and a backward pass.

    python -m benchmarks.compiled_loss

Head and loss of 4,096 tokens over a vocabulary of 50,304. Every measurement is a process of its own, because it reads
the process's largest memory; processes alternate, and times are medians over all steps of a kind.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional

from benchmarks.report import machine, save
from phalanx.comm.axis import Axis
from phalanx.parallel.vocabulary import ChunkedLoss, CrossEntropy, losses_and_slopes

TOKENS, VOCABULARY, WIDTH, CHUNK = 4096, 50304, 256, 512
ROUNDS, STEPS, THREADS = 2, 2, 2
MODES = ("eager", "compiled", "in chunks", "torch in chunks")


def measure(precision: str, mode: str) -> dict[str, object]:
    """Returns the bytes per logit that a step adds to the process's largest memory, and the seconds of each step."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    dtype = getattr(torch, precision)
    head = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    compute = torch.compile(losses_and_slopes) if mode == "compiled" else losses_and_slopes
    loss = CrossEntropy(Axis("tp"), VOCABULARY, compute=compute)
    chunked = ChunkedLoss(loss, CHUNK)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK) if mode == "torch in chunks" else None

    def of_hidden(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if options is not None:
            return functional.linear_cross_entropy(x, head, target, reduction="sum", options=options)
        if mode == "in chunks":
            return chunked(x, functional.linear, head, target, shared=False)
        return loss(functional.linear(x, head), target).sum()

    def step(tokens: int) -> float:
        began = time.perf_counter()
        of_hidden(hidden[:tokens], targets[:tokens]).backward()
        head.grad = hidden.grad = None
        return time.perf_counter() - began

    step(TOKENS // 32)  # compiles and allocates what does not depend on the number of tokens
    step(TOKENS // 16)
    before = largest_memory()
    seconds = [step(TOKENS) for _ in range(1 + STEPS)][1:]
    return {"bytes_per_logit": (largest_memory() - before) / (TOKENS * VOCABULARY), "seconds": seconds}


def largest_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    rows = [("precision and mode", "bytes per logit", "ms per step")]
    for precision in ("bfloat16", "float32"):
        measured: dict[str, list[dict]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode in MODES:
                argv = [sys.executable, "-m", "benchmarks.compiled_loss", precision, mode]
                answer = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
                measured[mode].append(json.loads(answer))
        for mode, each in measured.items():
            size = max(one["bytes_per_logit"] for one in each)
            seconds = statistics.median(second for one in each for second in one["seconds"])
            found[f"{precision}, {mode}"] = {"bytes_per_logit": size, "seconds": seconds}
            rows.append((f"{precision}, {mode}", f"{size:.2f}", f"{seconds * 1e3:,.0f}"))
    save("compiled_loss", {"machine": machine(), "cases": found}, rows, "The loss, compiled and in eager mode")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
