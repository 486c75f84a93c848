"""Questions for the tests of the search: models, machines and programs of many kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.cost.programs import MEGATRON_2021, MEGATRON_CORE, PHALANX, PHALANX_CPU, TORCHTITAN
from phalanx.cost.software import Software
from phalanx.job.cluster import Accelerator, Cluster, Link, Sharing
from phalanx.job.clusters import cluster_of
from phalanx.job.model import Model
from phalanx.job.presets import PRESETS
from phalanx.plan.question import Question

LAPTOP = Cluster(
    devices_per_node=4,
    device="cpu",
    accelerator=Accelerator(
        name="cpu",
        bf16_tflops=0.1,
        fp16_tflops=0.1,
        fp32_tflops=0.2,
        memory_gib=1.0,
        bandwidth_gbs=20,
        launch_us=2.0,
        host_us=8.0,
    ),
    intra=Link(2, 50, 0.8),
    inter=Link(2, 50, 0.8),
    sharing=Sharing(node_cores=4, processes=4, linked=2, alone_products=2.5, alone_streams=1.5),
)
"""Four processes that share the cores of one processor."""


def model(name: str, **fields: Any) -> Model:
    """A known model, its vocabulary written out."""
    return replace(PRESETS[name], **{"vocab_size": PRESETS[name].vocab_size or 512, **fields})


def question(
    name: str, cluster: str, global_batch: int, software: Software = PHALANX, products: Any = "bf16", **fixed: Any
) -> Question:
    """What is the fastest layout of a known model on a known machine?"""
    return Question(model(name), cluster_of(cluster), global_batch, products, 2, software, fixed)


def on_laptop(global_batch: int, worlds: tuple[int, ...] = (), **fixed: Any) -> Question:
    """The same for a small GPT on a processor."""
    return Question(model("baby"), LAPTOP, global_batch, "fp32", 4, PHALANX_CPU, fixed, worlds)


QUESTIONS = {
    "llama, this program": question("llama3-8b", "dgx-h100:2", 64),
    "llama, nothing overlaps": question("llama3-8b", "dgx-a100:2", 48, MEGATRON_2021),
    "llama 70b": question("llama3-70b", "dgx-h100:8", 128, MEGATRON_CORE),
    "long sequences": replace(
        question("llama3-70b", "dgx-h100:8", 16, TORCHTITAN), model=model("llama3-70b", seq_len=65536)
    ),
    "experts": question("mixtral-8x7b", "dgx-h100:4", 64, MEGATRON_CORE, tp=1),
    "experts and latent attention": question("deepseek-v3", "h800:16", 256, PHALANX, sp=False, cp=1),
    "experts, nothing overlaps": question("mixtral-8x7b", "dgx-a100:2", 16, MEGATRON_2021, cp=1),
    "a small model on slow links": question("gpt2", "dgx-v100:2", 48, MEGATRON_2021),
    "a laptop": on_laptop(16, worlds=(1, 2, 4)),
    "8 bits": question("llama3-8b", "dgx-h100:2", 32, TORCHTITAN, "fp8"),
    "schedules of ones own choice": question("llama3-8b", "dgx-h100:1", 32, schedule="gpipe"),
}
