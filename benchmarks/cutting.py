"""Uneven stages: the gain of cutting a model by seconds and memory over equal numbers of layers.

    python -m benchmarks.cutting

Models whose layers do not make equal stages: a vocabulary of 250,880 (BLOOM), dense layers before those with experts
(DeepSeek-V3), 126 layers on 16 stages (Llama 3 405B), each on the machine it was trained on; and a V-shape, whose ranks
have two stages each. Every cut is simulated event by event; nothing runs on this machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.report import machine, save
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.rank_memory import needed_bytes
from phalanx.partition.derived import even
from phalanx.plan.plan import Candidate
from phalanx.plan.refine import refined
from phalanx.plan.space import PlanRequest
from phalanx.schedule import catalogue

BLOOM = ModelConfig(
    n_layers=70,
    d_model=14336,
    n_heads=112,
    seq_len=2048,
    vocab_size=250_880,
    bias=True,
    qkv_bias=True,
)
"""BigScience 2022 (arXiv 2211.05100), Table 3; with learned positions in place of ALiBi."""


@dataclass(frozen=True)
class Awkward:
    """A model that equal stages do not suit, on its machine."""

    name: str
    request: PlanRequest
    layout: Layout


def awkward(name: str, model: ModelConfig, cluster: str, global_batch: int, layout: Layout) -> Awkward:
    return Awkward(name, PlanRequest(model, cluster_of(cluster), global_batch, framework=PHALANX), layout)


BLOOM_LAYOUT = Layout(dp_shard=8, tp=4, pp=12, zero=1, micro_batch=2, recompute="full")
DEEPSEEK = Layout(dp_shard=128, pp=16, ep=64, zero=1, micro_batch=1, recompute="full")
LLAMA = Layout(dp_shard=128, tp=8, pp=16, sp=True, zero=1, micro_batch=1, recompute="full")
THREE = Layout(cp=2, tp=4, pp=3, zero=2, accumulate="sharded", sp=True, schedule="v_half", micro_batch=1)
CASES = (
    awkward("BLOOM 176B, vocabulary 250,880", BLOOM, "jean-zay:48", 2048, BLOOM_LAYOUT),
    awkward("DeepSeek-V3, 3 dense layers first", PRESETS["deepseek-v3"], "h800:256", 15360, DEEPSEEK),
    awkward("Llama 3 405B, 126 layers", PRESETS["llama3-405b"], "dgx-h100:2048", 8192, LLAMA),
    awkward(
        "Llama 3 405B, 126 layers",
        PRESETS["llama3-405b"],
        "dgx-h100:2048",
        8192,
        replace(LLAMA, schedule="interleaved_1f1b", pp_chunks=2),
    ),
    awkward("Llama 3 70B, 6 stages of 3 ranks", PRESETS["llama3-70b"], "dgx-h100:3", 96, THREE),
)


@dataclass(frozen=True)
class Cuts:
    """Seconds of a step, by cut."""

    name: str
    layout: str
    even: float
    """Seconds with equal numbers of layers."""
    flops: float
    """Seconds when cut by FLOPs, the default of `phalanx train`."""
    seconds: float
    """Seconds when cut by seconds and memory, with the same recomputation in all layers."""
    mixed: float
    """Seconds with the same cut, and recomputation per layer as its rank requires."""
    pp_cut: str
    mixed_cut: str
    recompute_cut: str
    even_fits: bool


def compared(spec: Awkward) -> Cuts:
    """Returns one model's cuts."""
    request, layout = spec.request, spec.layout
    stages = catalogue.stages(layout.schedule, layout.pp, layout.pp_chunks)
    equal = "+".join(str(len(stage)) for stage in even(request.model.n_layers, stages))
    dealt = Candidate.of(request.spec(replace(layout, pp_cut=equal)))
    default = Candidate.of(request.spec(layout))
    same = refined(replace(request, fixed={"recompute": layout.recompute}), default)
    mixed = refined(request, default)
    limit = request.cluster.accelerator.memory_gib * 2**30
    assert all(needed_bytes(one.spec) <= limit for one in (same, mixed))
    return Cuts(
        spec.name,
        layout.line(),
        dealt.seconds,
        default.seconds,
        same.seconds,
        mixed.seconds,
        same.layout.pp_cut or "+".join(str(len(stage)) for stage in same.spec.stages),
        mixed.layout.pp_cut,
        mixed.layout.recompute_cut,
        needed_bytes(dealt.spec) <= limit,
    )


def main() -> None:
    found = [compared(spec) for spec in CASES]
    head = ("model", "layout", "even", "by FLOPs", "by seconds, in memory", "and recomputation by layer", "the cut")
    table: list[tuple[str, ...]] = [head]
    for one in found:
        times = [f"{seconds:.2f} s, {one.even / seconds:.3f} ×" for seconds in (one.flops, one.seconds, one.mixed)]
        table.append((one.name, one.layout.replace(",", " "), f"{one.even:.2f} s", *times, one.pp_cut))
    result: dict[str, Any] = {"machine": machine(), "cuts": [asdict(one) for one in found]}
    seen = (
        "Seconds of a step, simulated, and how many times as fast as equal numbers of layers. The last but one column "
        "has each rank recompute only what it has no room for; its cut is in the JSON file."
    )
    save("cutting", result, table, "Uneven stages", seen)


if __name__ == "__main__":
    main()
