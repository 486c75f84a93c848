"""The step of every optimizer on one CPU thread, beside what the cost model says of its kernels.

    python -m benchmarks.optimizers [ROUNDS]

The parameters are those of `model=baby` in fp32. Optimizers, a sum in place and a matrix product run in turns; the
best of all rounds counts, since other programs can only slow them down. The prediction is that of
cost/step_state.py on a device with the measured bandwidth and rate. The sum is in place, as updates are: a copy
would be slower per byte, for a processor also reads the lines that it is about to overwrite. Prints a table in
Markdown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Optimizer
from phalanx.config.presets import PRESETS
from phalanx.optimizers.catalogue import OPTIMIZERS, optimizer_costs
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.device import keep_freed_memory
from phalanx.train.optimizer import ShardedOptimizer

VOCAB = 65
MODEL = replace(PRESETS["baby"], vocab_size=VOCAB)
SUMMED, SIDE = 2**24, 1024
"""Elements of the sum, and rows of the square matrices."""


CASES = {name: Optimizer(name=name) for name in OPTIMIZERS} | {
    f"adamw, state={state}": Optimizer(state=state) for state in ("bf16", "8bit")
}
"""Optimizers by their words in the table."""


def steps(config: Optimizer) -> Callable[[], float]:
    """Returns a function that takes a step of an optimizer and returns its seconds, without the gradients'."""
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(MODEL, VOCAB)
    drawn = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    shards = [
        ParameterShard(key, (TensorSlice(shapes[key]),), 0, 0, (0.02 * value).requires_grad_())
        for key, value in drawn.items()
    ]
    optimizer = ShardedOptimizer(shards, config)

    def step() -> float:
        for shard in shards:
            shard.value.grad = drawn[shard.name].clone()  # a rule may write into it
        start = time.perf_counter()
        optimizer.rule.step()
        return time.perf_counter() - start

    return step


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rows(rounds: int) -> Iterator[str]:
    """Yields the lines of the table."""
    total, added = torch.randn(SUMMED), torch.randn(SUMMED)
    square = torch.randn(SIDE, SIDE)
    every = {name: steps(config) for name, config in CASES.items()}
    every |= {
        "sum": lambda: seconds(lambda: total.add_(added)),
        "product": lambda: seconds(lambda: square @ square),
    }
    best = dict.fromkeys(every, float("inf"))
    for _ in range(rounds):
        for name, take in every.items():
            best[name] = min(best[name], take())
    bandwidth, rate = 12 * SUMMED / best["sum"], 2 * SIDE**3 / best["product"]
    count = sum(torch.Size(shape).numel() for shape in parameter_shapes(MODEL, VOCAB).values())
    machine = f"sum in place {bandwidth / 1e9:.1f} GB/s, product {rate / 1e9:.0f} GFLOP/s"
    yield f"{count:,} parameters; {machine}, {rounds} rounds"
    yield "| optimizer | state, bytes | moved, bytes | measured, ns | predicted, ns | |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, config in CASES.items():
        costs = optimizer_costs(config, MODEL, 4)
        predicted = costs.moved_on_cpu / bandwidth + costs.flops / rate
        measured = best[name] / count
        yield (
            f"| {name} | {costs.state:.2f} | {costs.moved_on_cpu:.0f} | {measured * 1e9:.2f} | {predicted * 1e9:.2f} | "
            f"{predicted / measured - 1:+.0%} |"
        )


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    print("\n".join(rows(int(sys.argv[1]) if sys.argv[1:] else 10)))


if __name__ == "__main__":
    main()
