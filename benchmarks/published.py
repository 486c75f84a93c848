"""Megatron-LM's ten weak-scaling results and Llama 3's three: predictions beside the published figures.

    python -m benchmarks.published

Nothing runs on this machine: the figures are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.report import machine, save
from phalanx.blocks.parameters import train_flops_per_step
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import calibrated
from phalanx.cost.prediction import Prediction, hardware_flops_per_step, predict
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived as batch


@dataclass(frozen=True)
class Published:
    """One result: the job, and the TFLOP/s per GPU that the paper prints."""

    name: str
    cluster: str
    program: str
    layout: Layout
    sequences: int
    tflops: float
    seq_len: int = 0
    """Tokens per sequence if different from the preset's."""
    counts: str = "model"
    """The FLOPs in the paper's TFLOP/s: model FLOPs with causal attention, or `hardware`, everything computed."""


def _megatron(
    preset: str, tp: int, pp: int, dp: int, micro: int, chunks: int, sequences: int, tflops: float
) -> Published:
    """Returns a row of Narayanan et al. 2021, table 1; micro-batches and chunks are those of the authors' own scripts
    (Megatron-LM, examples/academic_paper_scripts/sc21)."""
    layout = Layout(tp=tp, pp=pp, dp_replicate=dp, micro_batch=micro, recompute="full")
    if chunks > 1:
        layout = replace(layout, schedule="interleaved_1f1b", pp_chunks=chunks)
    return Published(
        preset, f"selene:{tp * pp * dp // 8}", "megatron-2021", layout, sequences, tflops, counts="hardware"
    )


MEGATRON = (
    _megatron("megatron-1.7b", 1, 1, 32, 16, 1, 512, 137),
    _megatron("megatron-3.6b", 2, 1, 32, 16, 1, 512, 138),
    _megatron("megatron-7.5b", 4, 1, 32, 16, 1, 512, 142),
    _megatron("megatron-18.4b", 8, 1, 32, 8, 1, 1024, 135),
    _megatron("megatron-39.1b", 8, 2, 32, 4, 1, 1536, 138),
    _megatron("megatron-76.1b", 8, 4, 32, 2, 3, 1792, 140),
    _megatron("megatron-145.6b", 8, 8, 24, 2, 2, 2304, 148),
    _megatron("megatron-310.1b", 8, 16, 15, 1, 2, 2160, 155),
    _megatron("megatron-529.6b", 8, 35, 9, 1, 3, 2520, 163),
    _megatron("megatron-1008b", 8, 64, 6, 1, 1, 3072, 163),
)


def _llama3(cp: int, dp: int, sequences: int, seq_len: int, tflops: float) -> Published:
    """Returns a row of Llama Team 2024, table 4: FSDP of optimizer and gradients, parameters kept after the forward
    pass. The paper does not print the number of chunks per rank; with four, 126 blocks are two per chunk except for the
    first and last, which have one and the embedding or the head."""
    layout = Layout(tp=8, pp=16, cp=cp, dp_shard=dp, zero=2, sp=True, sp_regather=True, micro_batch=1)
    cut = "+".join(["1", *["2"] * 62, "1"])
    layout = replace(layout, schedule="interleaved_1f1b", pp_chunks=4, pp_cut=cut)
    world = 8 * 16 * cp * dp
    return Published("llama3-405b", f"meta-h100:{world // 8}", "llama3", layout, sequences, tflops, seq_len)


LLAMA3 = (
    _llama3(1, 64, 2048, 8192, 430),
    _llama3(1, 128, 2048, 8192, 400),
    _llama3(16, 8, 128, 131072, 380),
)


def published_case(row: Published) -> StepSpec:
    """Returns the step of a paper's result."""
    model = PRESETS[row.name]
    model = replace(model, seq_len=row.seq_len or model.seq_len, dropout=0.1 if row.counts == "hardware" else 0.0)
    cluster = cluster_of(row.cluster)
    framework = calibrated(row.program, cluster.accelerator)
    solved = batch.solve(row.sequences, row.layout)
    return StepSpec(model, cluster, row.layout, solved, "bf16", 2, framework)


def predict_published(row: Published) -> Prediction:
    """Returns the prediction for a published result."""
    return predict(published_case(row))


def predicted(row: Published) -> float:
    """Returns TFLOP/s per GPU, counted as the paper counts."""
    found = predict_published(row)
    model = replace(PRESETS[row.name], seq_len=row.seq_len or PRESETS[row.name].seq_len)
    if row.counts == "hardware":
        flops = hardware_flops_per_step(model, row.layout, row.sequences)
    else:
        flops = train_flops_per_step(model, row.sequences, attention="causal")
    return flops / found.step_time_s / found.devices / 1e12


def main() -> None:
    table = [("model", "GPUs", "layout", "published TFLOP/s", "predicted", "error", "step, s")]
    rows = []
    for row in (*MEGATRON, *LLAMA3):
        found, value = predict_published(row), predicted(row)
        error = value / row.tflops - 1
        shape = f"tp {row.layout.tp} pp {row.layout.pp} cp {row.layout.cp} dp {row.layout.data_ranks}"
        step = f"{found.step_time_s:.3g}"
        table.append((row.name, str(found.devices), shape, f"{row.tflops:g}", f"{value:.0f}", f"{error:+.1%}", step))
        rows.append({"model": row.name, "devices": found.devices, "published": row.tflops, "predicted": value})
    save("published", {"machine": machine(), "rows": rows}, table, "Published results, predicted")


if __name__ == "__main__":
    main()
