"""Steps of mixtures of experts beside a dense model of the same active FLOPs, in turn in the same processes.

    python -m benchmarks.experts [--rounds 25] [--seconds 240] [--quick] [--json]

A small Llama, with 8 routed experts of which a token visits 2, and a shared one, or with an MLP as wide as the experts
of a token together: blocks/parameters.py says how close the two are (the router is the difference). Forward and
backward of one global batch, without the optimizer, fp32, 1 thread per process; as in benchmarks/pipeline.py every
contender takes its turn in every round, ratios are taken round by round, and their medians count. In two processes the
state is sharded by FSDP2 on both; with ep the experts are cut over the ranks, and rows are exchanged. Routers are as
initialised. Every model's layouts must agree on loss and gradient norm before anything is measured.

Dropless experts compute the rows that were routed to them; with a capacity each computes equally many, filled or not,
so more than 1.0 computes more than the model's FLOPs, and surplus tokens are dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import JOB, ROOT
from benchmarks.report import machine, save
from benchmarks.turns import MIN_ROUNDS, Turns, agree, alone, lasted, prepare, ratio, take_turns
from phalanx.blocks.parameters import train_flops_per_token
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.train.step import StepInputs, Stepper

MODEL = (
    *("model.n_layers=4", "model.d_model=256", "model.n_heads=4", "model.norm=rmsnorm", "model.positions=rope"),
    *("model.activation=swiglu", "model.tied=false", "layout.micro_batch=4", "train.cpu_linear=mkl"),
)
QUICK = ("++model.n_layers=2", "++model.seq_len=64")
EXPERTS = ("model.moe.n_experts=8", "model.moe.top_k=2", "model.moe.n_shared=1", "model.moe.d_ff=256")
DENSE, DROPLESS = "dense", "experts, dropless"
MODELS = {
    DENSE: ("model.d_ff=768",),
    DROPLESS: EXPERTS,
    "experts, capacity 1.0": (*EXPERTS, "model.moe.capacity=1.0"),
    "experts, capacity 1.25": (*EXPERTS, "model.moe.capacity=1.25"),
}
ONE, SHARDED, DEALT = "1 process", "2 processes", "2 processes, ep 2"
LAYOUTS = {
    ONE: ("layout.accumulation=2",),
    SHARDED: ("layout.dp_shard=2",),
    DEALT: ("layout.dp_shard=2", "layout.ep=2"),
}
BATCHES = 2
"""Micro-batches per step, over all ranks."""
TOLERANCE = 1e-4
"""Allowed relative difference of losses and gradient norms of the same step."""


def load(model: str, layout: str, words: Sequence[str]) -> Job:
    return load_file(ROOT / JOB, [*MODEL, *MODELS[model], *LAYOUTS[layout], *words]).job


def contenders() -> list[tuple[str, str]]:
    """Returns every model with every layout that it supports."""
    return [(model, layout) for model in MODELS for layout in LAYOUTS if model != DENSE or layout != DEALT]


def measure(ranks: Ranks, rounds: int, seconds: float, words: Sequence[str]) -> tuple[Turns, dict[str, float]]:
    """Returns this rank's turns, and the load of the fullest expert of any layer relative to the mean, by model. Raises
    AssertionError if layouts differ."""
    prepare()
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, tuple[float, float]]] = {model: {} for model in MODELS}
    fullest: dict[str, float] = {}
    for model, layout in contenders():
        name = f"{model}, {layout}"
        if layout == ONE and ranks.rank > 0:
            steps[name] = lambda: None
            continue
        job = load(model, layout, words)
        stepper = alone(job) if layout == ONE else _spread(job)
        every = batches(job)
        total = sum(micro.targets.size for micro in every)
        mine = every if layout == ONE else [every[stepper.mesh.data_rank]]
        shown = stepper.step(StepInputs(mine, 0, total, 0.0))  # a learning rate of 0 changes nothing
        found[model][name] = shown.loss, shown.grad_norm
        steps[name] = partial(gradients, stepper, mine, total)
        steps[name]()
        if layout == ONE and stepper.routing.loads:
            loads = torch.stack(list(stepper.routing.loads.values())).double()
            fullest[model] = (loads.amax(1) / loads.mean(1)).max().item()
    for shown in found.values():
        agree(shown, TOLERANCE)
    return take_turns(steps, rounds, seconds), fullest


def batches(job: Job) -> list[MicroBatch]:
    """Returns a step's micro-batches of random tokens, the same for all contenders."""
    size, length = job.layout.micro_batch, job.model.seq_len
    drawn = np.random.default_rng(0).integers(job.model.vocab_size, size=(BATCHES, size, length + 1))
    return [MicroBatch(t[:, :-1].copy(), t[:, 1:].copy(), np.arange(size) + size * i) for i, t in enumerate(drawn)]


def gradients(stepper: Stepper, micros: Sequence[MicroBatch], total: int) -> None:
    """Computes the gradients of a training step, without the optimizer."""
    stepper.replica.clear()
    stepper.routing.clear()
    stepper.gradients(micros, 0, total)


def flops(job: Job) -> dict[str, float]:
    """Returns the FLOPs of a step: of the model, and those computed with the rows that a capacity sets."""
    model, moe = job.model, job.model.moe
    active = train_flops_per_token(model)
    more = 0.0
    if moe.n_experts and moe.capacity:
        of_expert = train_flops_per_token(_visiting(model, moe.top_k + 1)) - active
        more = of_expert * (moe.n_experts * moe.most_tokens(model.seq_len) / model.seq_len - moe.top_k)
    tokens = BATCHES * job.layout.micro_batch * model.seq_len
    return {"model": tokens * active, "computed": tokens * (active + more)}


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    head = ("model", "processes", "time", "GFLOP of the model", "GFLOP computed", "time / dense", "time / without ep")
    rows: list[tuple[str, ...]] = [head]
    for model, layout in contenders():
        counted, time_s = result["flops"][model], result["median_s"][f"{model}, {layout}"]
        ratios = [result["ratios"][model, layout].get(kind) for kind in ("dense", "without ep")]
        shown = [f"**{value:.3f} ×**" if value is not None else "" for value in ratios]
        giga = [f"{counted[kind] / 1e9:,.2f}" for kind in ("model", "computed")]
        rows.append((model, layout, f"{1000 * time_s:,.0f} ms", *giga, *shown))
    return rows


def seen(result: dict[str, Any]) -> str:
    """Returns a summary of the figures in words."""
    counted, ratios = result["flops"], result["ratios"]
    dense = counted[DENSE]["model"]
    names = {model: model.removeprefix("experts, ") for model in MODELS if model != DENSE}
    off, computed = counted[DROPLESS]["model"] / dense - 1, {m: counted[m]["computed"] / dense for m in names}
    said = [
        f"The FLOPs of the model with experts are {100 * off:+.2f} % beside the dense one's; those computed are "
        f"{_list({names[model]: value for model, value in computed.items()})} the dense one's."
    ]
    for layout in LAYOUTS:
        each = _list({name: ratios[model, layout]["dense"] for model, name in names.items()})
        said.append(f"With {layout}, time beside that of dense on as many processes: {each}.")
    dealt = _list({name: ratios[model, DEALT]["without ep"] for model, name in names.items()})
    said.append(f"Experts dealt out to ranks, beside experts gathered by FSDP2: {dealt} the time.")
    fullest = max(result["fullest"].values())
    said.append(f"The fullest expert of any layer has {fullest:.2f} × its even share of tokens.")
    return " ".join(said)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="at most")
    parser.add_argument("--seconds", type=float, default=240, help=f"in which rounds begin, after {MIN_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="2 rounds of a tiny model; prints JSON, writes nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    words, rounds = (QUICK, 2) if options.quick else ((), options.rounds)
    with Pool(2, ["torch.distributed.tensor", "torch.distributed.fsdp"]) as pool:
        answers = pool.run(measure, 2, rounds, options.seconds, words, timeout=1200)
    seconds = lasted([turns for turns, _ in answers])
    result = {"benchmark": "experts", "machine": machine(), "model": [*MODEL, *words], "models": MODELS}
    result |= {"flops": {model: flops(load(model, ONE, words)) for model in MODELS}, "fullest": answers[0][1]}
    result |= {"median_s": {name: statistics.median(values) for name, values in seconds.items()}}
    result |= {"ratios": {pair: _ratios(seconds, *pair) for pair in contenders()}}
    said = seen(result), table(result)
    result["ratios"] = {f"{model}, {layout}": found for (model, layout), found in result["ratios"].items()}
    result["seconds"] = seconds
    if not options.quick:
        quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
        with quiet:
            title = "Mixtures of experts beside a dense model of the same active FLOPs"
            save("experts", result, said[1], title, said[0])
    if options.quick or options.json:
        print(json.dumps(result, indent=1))


def _list(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} ×" for name, value in values.items())


def _spread(job: Job) -> Stepper:
    return Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), job.model.vocab_size)


def _visiting(model: ModelConfig, experts: int) -> ModelConfig:
    """Returns the model with another number of routed experts per token."""
    return replace(model, moe=replace(model.moe, top_k=experts))


def _ratios(seconds: Mapping[str, Sequence[float]], model: str, layout: str) -> dict[str, float]:
    """Returns the ratios of one contender's time to others'."""
    if model == DENSE:
        return {}
    dense = f"{DENSE}, {ONE if layout == ONE else SHARDED}"
    found = {"dense": ratio(seconds, f"{model}, {layout}", dense)}
    if layout == DEALT:
        found["without ep"] = ratio(seconds, f"{model}, {layout}", f"{model}, {SHARDED}")
    return found


if __name__ == "__main__":
    sys.exit(main())
