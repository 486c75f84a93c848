"""Solar Open's case: sharding over all of 480 GPUs against groups of ten nodes, predictions beside published figures.

    python -m benchmarks.solar

Published: 5,500 tokens per second per device at 16 nodes and 4,267 at 60 with FSDP over all devices, 5,400 at 60 with
six groups of ten nodes (HSDP). The model's shape is the release's (config/presets.py), the machine eight B200 per node,
the framework torchtitan. Assumptions without a published source: four sequences of 4,096 tokens per device and step,
whole blocks recomputed in bf16; the batch was chosen to match 16 nodes, and other batches stand beside it.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.truth.report import markdown
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import calibrated
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.partition import derived as batch

PUBLISHED = ((16, 1, 5500), (60, 1, 4267), (60, 6, 5400))
"""Nodes, groups, tokens per second per device."""
MICRO_BATCH, SEQ_LEN = 4, 4096
OTHERS = ((1, 4096), (2, 4096), (4, 4096), (8, 4096), (2, 8192), (4, 8192))
"""Other possible micro-batches and sequence lengths."""


def predicted(nodes: int, groups: int, micro_batch: int = MICRO_BATCH, seq_len: int = SEQ_LEN) -> Prediction:
    """Returns a step on `nodes` nodes, sharded inside each of `groups` groups, one micro-batch per device."""
    cluster = cluster_of(f"dgx-b200:{nodes}")
    layout = Layout(dp_replicate=groups, dp_shard=cluster.devices // groups, micro_batch=micro_batch, recompute="full")
    model = replace(PRESETS["solar-open-100b"], seq_len=seq_len)
    framework = calibrated("torchtitan-2025", cluster.accelerator)
    return predict(
        StepSpec(model, cluster, layout, batch.solve(micro_batch * cluster.devices, layout), framework=framework)
    )


def solar() -> tuple[list[dict[str, float]], list[tuple[str, ...]]]:
    """Returns figures and the table."""
    table: list[tuple[str, ...]] = [
        ("nodes", "sharded over", "replicas", "published", "predicted", "error", "step, s", "exposed, s")
    ]
    rows = []
    for nodes, groups, published in PUBLISHED:
        found = predicted(nodes, groups)
        rate = found.tokens_per_s_per_device
        exposed = sum(found.parts.exposed.values())
        figures = (f"{published:,}", f"{rate:,.0f}", f"{rate / published - 1:+.1%}")
        shape = (str(nodes), f"{8 * nodes // groups} GPUs", str(groups))
        table.append((*shape, *figures, f"{found.step_time_s:.2f}", f"{exposed:.2f}"))
        rows.append({"nodes": nodes, "groups": groups, "published": published, "predicted": rate})
    return rows, table


def assumptions() -> list[tuple[str, ...]]:
    """Returns the same with other batches: the loss of 60 nodes against 16, and the gain of groups there."""
    table = [
        ("a device and step", "16 nodes", "60 nodes", "60 nodes, 6 groups", "60 against 16", "groups against flat")
    ]
    rates = [float(published) for _, _, published in PUBLISHED]
    table.append(("published", *_compared(rates)))
    for micro_batch, seq_len in OTHERS:
        rates = [
            predicted(nodes, groups, micro_batch, seq_len).tokens_per_s_per_device for nodes, groups, _ in PUBLISHED
        ]
        table.append((f"{micro_batch} × {seq_len:,} tokens", *_compared(rates)))
    return table


def _compared(rates: list[float]) -> tuple[str, ...]:
    small, large, grouped = rates
    return (*(f"{rate:,.0f}" for rate in rates), f"{large / small - 1:+.1%}", f"{grouped / large - 1:+.1%}")


def main() -> None:
    print(markdown(solar()[1]), markdown(assumptions()), sep="\n\n")


if __name__ == "__main__":
    main()
