"""Small models, and every layout in which 1, 2 or 4 processes can train them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from phalanx.check.job import problems_of
from phalanx.config.job import Data, Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE

LLAMA: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False}
SMALL = ModelConfig(n_layers=4, d_model=128, n_heads=4, d_ff=384, vocab_size=96, seq_len=128, **LLAMA)
WIDE = ModelConfig(n_layers=4, d_model=384, n_heads=8, d_ff=1024, vocab_size=8192, seq_len=128, **LLAMA)
EXPERTS = replace(SMALL, seq_len=256, moe=MoE(n_experts=8, top_k=2, d_ff=256))
MODELS: dict[str, tuple[ModelConfig, int]] = {
    "small": (SMALL, 16),
    "wide": (WIDE, 8),
    "experts": (EXPERTS, 8),
}
"""By name: the shape, and the sequences per step, the same for all layouts. `small` is the model of examples/main.yaml,
of 0.8 million parameters; `wide` has 10, and a vocabulary; `experts` is a mixture of eight."""
WORLDS = (1, 2, 4)
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")
SHARES = {1: (1, 2, 4), 2: (1, 2, 4), 4: (1, 4)}
"""By processes, the numbers of micro-batches into which a data rank's sequences are divided."""


def job_of(name: str, layout: Layout) -> Job:
    """Returns the job of a step of a model under a layout."""
    model, sequences = MODELS[name]
    data = Data(corpus="random", random_vocab=model.vocab_size)
    return Job(model=model, layout=layout, data=data, train=Train(global_batch=sequences))


def layouts(name: str, world: int) -> list[Layout]:
    """Returns all layouts in which `world` processes can train a model: products of the axes, ZeRO's stages, sequence
    parallelism, rings and Ulysses, schedules, and micro-batches (SHARES), those with the fewest set fields first."""
    sequences = MODELS[name][1]
    found = []
    for degrees in _degrees(world):
        for layout in _variants(degrees, MODELS[name][0].moe.n_experts):
            for share in SHARES[world]:
                micro, rest = divmod(sequences, layout.data_ranks * share)
                one = replace(layout, micro_batch=micro, accumulation=share)
                if micro and not rest and not problems_of(job_of(name, one)):
                    found.append(one)
    return sorted(found, key=lambda layout: layout.line().count("="))


def _degrees(world: int) -> Iterator[Layout]:
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for replicas, shard, cp, tp, pp in product(sizes, repeat=5):
        layout = Layout(dp_replicate=replicas, dp_shard=shard, cp=cp, tp=tp, pp=pp)
        if layout.world == world:
            yield layout


def _variants(layout: Layout, experts: int) -> Iterator[Layout]:
    """Yields the variants with the same degrees."""
    divisors = [n for n in range(1, layout.shard_ranks + 1) if layout.shard_ranks % n == 0]
    for zero, sp, schedule, ulysses, ep in product(
        (1, 2, 3) if layout.shard_ranks > 1 else (layout.zero,),
        (False, True) if layout.tp > 1 else (False,),
        SCHEDULES if layout.pp > 1 else (layout.schedule,),
        [n for n in range(1, layout.cp + 1) if layout.cp % n == 0],
        divisors if experts else (1,),
    ):
        yield replace(layout, zero=zero, sp=sp, schedule=schedule, cp_ulysses=ulysses, ep=ep)


def family(layout: Layout) -> str:
    """Returns which axes of a layout cut the model, such as "cp + tp"; with expert parallelism "ep"."""
    if layout.ep > 1:
        return "ep"
    return " + ".join(axis for axis in ("cp", "tp", "pp") if getattr(layout, axis) > 1) or "data parallel, or one"
