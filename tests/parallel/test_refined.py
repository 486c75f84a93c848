"""What the planner refines is what the trainer runs: stages cut by seconds and layers that recompute by what is left of
the memory, on the ranks of a CPU, equal one process in float64 to 1e-9."""

from dataclasses import replace

import pytest

from parallel.steps import steps
from parallel.test_composition import compare, job_of
from phalanx.check.job import problems_of
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.cost.frameworks import PHALANX_CPU
from phalanx.cost.rank_memory import needed_bytes
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import even
from phalanx.plan.refine import refinement
from phalanx.plan.space import PlanRequest

VOCAB = 499
"""So large beside 24 numbers of width that the head costs as much as several blocks."""
GPT = ModelConfig(n_layers=7, d_model=24, n_heads=4, seq_len=8, bias=True)
EXPERTS = replace(
    GPT,
    n_layers=6,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tied=False,
    d_ff=96,
    moe=MoE(n_experts=4, top_k=2, d_ff=40, n_shared=1, n_dense_layers=2, aux_loss=0.01),
)
"""Dense layers first, as DeepSeek has them."""


def cluster(processes: int) -> Cluster:
    """A CPU, about as `phalanx bench` measures one."""
    device = Accelerator(
        name="cpu",
        fp32_tflops=0.1,
        ceiling=1.0,
        sustained=1.0,
        memory_gib=4.0,
        bandwidth_gbs=10.0,
        launch_us=1.0,
        product_us=2.0,
        host_us=5.0,
    )
    link = Link(gbs=2.0, latency_us=40.0)
    return Cluster(devices_per_node=processes, device="cpu", accelerator=device, intra=link, inter=link)


def refined(model: ModelConfig, layout: Layout) -> StepSpec:
    """The layout's refinement where all layers keeping everything is a little too much for a device."""
    asked = PlanRequest(replace(model, vocab_size=VOCAB), cluster(layout.world), 12, "fp32", 8, PHALANX_CPU)
    least, most = (needed_bytes(asked.spec(replace(layout, recompute=mode))) for mode in ("full", "none"))
    memory = (least + 0.4 * (most - least)) / 2**30
    small = replace(asked.cluster, accelerator=replace(asked.cluster.accelerator, memory_gib=memory))
    asked = replace(asked, cluster=small)
    found = refinement(asked, asked.spec(replace(layout, recompute="full")))
    assert found is not None
    assert needed_bytes(found) <= memory * 2**30
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, Layout(pp=2, accumulation=6)),
        (GPT, Layout(pp=4, accumulation=6)),
        (GPT, Layout(pp=2, dp_shard=2, schedule="interleaved_1f1b", pp_chunks=2, accumulation=3)),
        (EXPERTS, Layout(pp=2, accumulation=4)),
        (EXPERTS, Layout(pp=4, accumulation=6)),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else f"experts={value.moe.n_experts}",
)
def test_a_refined_layout_equals_one_process(ranks, model, layout):
    found = refined(model, layout).layout
    assert found.recompute_cut
    # What the trainer does with micro-batches is settled by the layout.
    job = job_of(model, replace(found, micro_batch=0))
    assert not problems_of(job)
    compare(ranks(steps, layout.world, job, VOCAB), ranks(steps, 1, job_of(model, Layout()), VOCAB)[0])


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    found = refined(GPT, Layout(pp=4, accumulation=6))
    sizes = [len(stage) for stage in found.stages]
    assert sizes[-1] < len(even(GPT.n_layers, 4)[-1])
