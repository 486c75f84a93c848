"""Questions for the tests of the search: models, machines and programs of many kinds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing
from phalanx.config.clusters import cluster_of
from phalanx.config.model import LoRA, ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, PHALANX_CPU
from phalanx.cost.spec import Framework
from phalanx.partition.document_sample import DocumentSample
from phalanx.plan.space import PlanRequest

MEGATRON_2021, MEGATRON_CORE, TORCHTITAN = (
    FRAMEWORKS["megatron-2021"],
    FRAMEWORKS["megatron-core"],
    FRAMEWORKS["torchtitan"],
)

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


def model(name: str, **fields: Any) -> ModelConfig:
    """A known model, its vocabulary written out."""
    return replace(PRESETS[name], **{"vocab_size": PRESETS[name].vocab_size or 512, **fields})


def request(
    name: str, cluster: str, global_batch: int, framework: Framework = PHALANX, products: Any = "bf16", **fixed: Any
) -> PlanRequest:
    """What is the fastest layout of a known model on a known machine?"""
    return PlanRequest(model(name), cluster_of(cluster), global_batch, products, 2, framework, fixed)


def on_laptop(global_batch: int, worlds: tuple[int, ...] = (), **fixed: Any) -> PlanRequest:
    """The same for a small GPT on a processor."""
    return PlanRequest(model("baby"), LAPTOP, global_batch, "fp32", 4, PHALANX_CPU, fixed, worlds)


FP32_GRADIENTS = replace(
    PHALANX, memory_profile=replace(PHALANX.memory_profile, gradient_bytes=4, unbuffered_gradient_bytes=2)
)

QUESTIONS = {
    "llama, this program": request("llama3-8b", "dgx-h100:2", 64),
    "llama, nothing overlaps": request("llama3-8b", "dgx-a100:2", 48, MEGATRON_2021),
    "llama 70b": request("llama3-70b", "dgx-h100:8", 128, MEGATRON_CORE),
    "long sequences": replace(
        request("llama3-70b", "dgx-h100:8", 16, TORCHTITAN), model=model("llama3-70b", seq_len=65536)
    ),
    "windows": replace(
        request("llama3-8b", "dgx-h100:2", 16, PHALANX),
        model=model("llama3-8b", seq_len=32768, window=4096, full_every=2, qk_norm="width", attention_softcap=50.0),
    ),
    "documents": replace(
        request("llama3-8b", "dgx-h100:2", 16),
        model=model("llama3-8b", seq_len=16384, window=4096, full_every=2),
        documents=DocumentSample.example(16384, 1024),
    ),
    "experts": request("mixtral-8x7b", "dgx-h100:4", 64, MEGATRON_CORE, tp=1),
    "experts and latent attention": request("deepseek-v3", "h800:16", 256, PHALANX, sp=False, cp=1),
    "experts, nothing overlaps": request("mixtral-8x7b", "dgx-a100:2", 16, MEGATRON_2021, cp=1),
    "a small model on slow links": request("gpt2", "dgx-v100:2", 48, MEGATRON_2021),
    "a laptop": on_laptop(16, worlds=(1, 2, 4)),
    "8 bits": request("llama3-8b", "dgx-h100:2", 32, TORCHTITAN, "fp8"),
    "gradients in fp32": request("llama3-8b", "dgx-h100:2", 32, FP32_GRADIENTS),
    "adapters": replace(request("llama3-8b", "dgx-h100:2", 64), model=model("llama3-8b", lora=LoRA(rank=16))),
    "adapters of experts": replace(
        request("mixtral-8x7b", "dgx-h100:4", 64, MEGATRON_CORE, tp=1),
        model=model("mixtral-8x7b", lora=LoRA(rank=8, targets="attention")),
    ),
    "schedules of ones own choice": request("llama3-8b", "dgx-h100:1", 32, schedule="gpipe"),
}
