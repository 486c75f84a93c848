"""The state of a model by itself: its parameters drawn, and an optimizer's update beside a sum in place.

    python -m benchmarks.gpu.state draw --model llama3-8b
    python -m benchmarks.gpu.state adamw --model llama3-8b --layers 6

Prints JSON: the number of parameters and the seconds; of an update with the norm of the gradients before it, also the
bytes that it moves, and bytes per second of the sum.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import commands
from benchmarks.gpu.part import Case, Part
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.job import Optimizer
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.model.seeding import initialise_part
from phalanx.optimizers.catalogue import optimizer_costs
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.tensor_slices import TensorSlice
from phalanx.train.optimizer import ShardedOptimizer

LIMIT_S = 300.0
SUMMED = 2**28
"""Elements of the sum in place."""
ROUNDS = 10


def cases(setting: Setting) -> list[Case]:
    if setting.quick:
        words = {"tiny drawn": ["draw", "--model", "tiny"], "tiny, update of adamw": ["adamw", "--model", "tiny"]}
    else:
        words = {"llama3-8b drawn": ["draw", "--model", "llama3-8b"]}
        for name in ("adamw", "lion", "sgd"):
            words[f"llama3-8b, 6 layers, update of {name}"] = [name, "--model", "llama3-8b", "--layers", "6"]
    return [Case(name, partial(measure, setting, each)) for name, each in words.items()]


def measure(setting: Setting, words: list[str]) -> dict[str, Any]:
    """Returns what this program prints. Raises CaseError if it fails."""
    argv = commands.program("state", *words, "--device", setting.device)
    return {**commands.answer(argv, limit_s=LIMIT_S), "command": commands.shown(argv)}


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    rows: list[Row] = [("", "parameters", "ms", "bytes moved per parameter", "GB/s", "of a sum in place")]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        row = (name, f"{found['parameters']:,}", f"{found['seconds'] * 1e3:.1f}")
        if "moved" in found:
            rate = found["moved"] / found["seconds"]
            row += (f"{found['moved'] / found['parameters']:.0f}", f"{rate / 1e9:,.0f}", f"{rate / found['sum']:.0%}")
        rows.append(row)
    return rows


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Returns the seconds of a call until the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def draw(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Returns the seconds in which a device draws the parameters of a model in bf16, without its first call."""
    shapes = parameter_shapes(model, model.vocab_size)
    values = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}

    def every() -> None:
        for name, shape in shapes.items():
            initialise_part(values[name], name, shape, model, seed=1)

    smallest = min(shapes, key=lambda name: values[name].numel())
    initialise_part(values[smallest], smallest, shapes[smallest], model, seed=1)
    return {"parameters": sum(value.numel() for value in values.values()), "seconds": seconds(device, every)}


def update(name: str, model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Returns the seconds of an update of bf16 parameters with their masters and state, after two."""
    shapes, config = parameter_shapes(model, model.vocab_size), Optimizer(name=name)
    shards = [
        ParameterShard(
            *(key, (TensorSlice(shape),), 0, 0),
            torch.full(shape, 0.01, dtype=torch.bfloat16, device=device).requires_grad_(),
        )
        for key, shape in shapes.items()
    ]
    optimizer, bad = ShardedOptimizer(shards, config), torch.zeros((), dtype=torch.bool, device=device)
    gradients = [torch.full_like(shard.value, 1e-3).detach() for shard in shards]

    def step() -> None:
        optimizer.step(1e-4, optimizer.square_norm().sqrt(), bad)

    taken = list[float]()
    for _ in range(2 + ROUNDS):
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.gradient = gradient
        taken.append(seconds(device, step))
    parameters = sum(gradient.numel() for gradient in gradients)
    moved = (optimizer_costs(config, model, 2).moved + 2) * parameters  # the norm reads the gradients
    elements = SUMMED if device.type != "cpu" else 2**20
    one, other = (torch.ones(elements, device=device) for _ in range(2))
    summed = median(seconds(device, lambda: one.add_(other)) for _ in range(ROUNDS))
    return {"parameters": parameters, "seconds": median(taken[2:]), "moved": moved, "sum": 12 * elements / summed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="draw, or the name of an optimizer")
    parser.add_argument("--model", required=True, help="a preset")
    parser.add_argument("--layers", type=int, help="fewer layers than it has")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    model, device = PRESETS[options.model], torch.device(options.device)
    model = replace(model, n_layers=options.layers or model.n_layers, vocab_size=model.vocab_size or 64)
    call = draw if options.what == "draw" else partial(update, options.what)
    print(json.dumps(call(model, device)))


PART = Part("state", "State: parameters drawn, and updates", cases, table)

if __name__ == "__main__":
    main()
