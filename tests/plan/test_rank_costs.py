"""What ranks would take with other layers: against the cost model, which says it of a whole layout."""

from dataclasses import replace

import pytest

from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX
from phalanx.cost.held import contents
from phalanx.cost.rank_memory import step_memory
from phalanx.cost.rank_time import rank_time
from phalanx.plan.refine import Filling, PipelineRanks
from phalanx.plan.space import PlanRequest

MEGATRON_2021, MEGATRON_DEEPSPEED = FRAMEWORKS["megatron-2021"], FRAMEWORKS["megatron-deepspeed"]

LAYOUTS = [
    Layout(pp=4, dp_shard=4, zero=1, micro_batch=1, recompute="full"),
    Layout(pp=4, dp_shard=4, zero=2, micro_batch=1, recompute_cut="8*full+4*selective+20*none"),
    Layout(pp=2, dp_shard=8, schedule="interleaved_1f1b", pp_chunks=4, micro_batch=1),
    Layout(pp=4, dp_shard=2, tp=2, sp=True, schedule="zb_v", micro_batch=1, recompute="selective"),
    Layout(pp=4, dp_shard=4, schedule="dualpipe", micro_batch=1),
    Layout(dp_shard=16, micro_batch=1, recompute_cut="30*full+2*none"),
]


def request(model: str) -> PlanRequest:
    shape = replace(PRESETS[model], n_layers=32)
    return PlanRequest(shape, cluster_of("dgx-h200:2"), 256, framework=PHALANX)


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.line)
def test_seconds_of_a_layout_are_the_cost_models(model, layout):
    spec = request(model).spec(layout)
    expected = [rank_time(spec, content).total for content in contents(spec)]
    # Added up block by block, without the sum of gradients over micro-batches.
    assert PipelineRanks(spec).times(spec) == pytest.approx(expected, rel=0.02)


def repeated(filling: Filling) -> int:
    """How much a rank recomputes: 1 for each layer that repeats what is cheap, 2 if MLPs too, 3 for all of it."""
    _, products, mlp, _, full = filling.numbers[0]
    return products + 2 * mlp + 3 * full


def test_more_layers_take_more_bytes_and_other_recomputation_makes_room():
    asked = request("llama3-8b")
    asked = replace(asked, model=replace(asked.model, vocab_size=256))
    layout = replace(LAYOUTS[0], pp_cut="8+8+8+8")
    needed = step_memory(asked.spec(layout))[0].needed
    device = replace(asked.cluster.accelerator, memory_gib=2 * needed / 2**30)
    full = replace(asked, cluster=replace(asked.cluster, accelerator=device)).spec(layout)
    ranks = PipelineRanks(full)
    assert ranks.calibrated(full)
    fillings = [ranks.filling(rank, ((8,),)) for rank in range(4)]
    recomputed = [repeated(filling) for filling in fillings if filling]
    # The fewer are in flight the more layers keep what twice the memory has room for.
    assert 24 > recomputed[0] > recomputed[1] > recomputed[2] > recomputed[3]
    more, less = ranks.filling(0, ((9,),)), ranks.filling(0, ((7,),))
    assert less is not None
    assert more is None or repeated(more) > recomputed[0]
    assert repeated(less) < recomputed[0]


@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=Layout.line)
def test_bytes_are_near_the_exact_ones_one_layer_further(layout):
    """A rank that is as full as a device lets it be, with a layer more than where the line was put right."""
    asked = request("llama3-8b")
    spec = asked.spec(replace(layout, recompute="full", recompute_cut=""))
    ranks = PipelineRanks(spec)
    ranks.calibrated(spec)
    before = list(ranks.around)
    sizes = [len(stage) for stage in spec.stages]
    sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    other = asked.spec(replace(spec.layout, pp_cut="+".join(map(str, sizes))))
    ranks.calibrated(other)
    assert [a / 2**30 for a in ranks.around] == pytest.approx([b / 2**30 for b in before], abs=1.0)


@pytest.mark.parametrize(
    ("model", "framework", "zero", "ep"),
    [("llama3-8b", MEGATRON_DEEPSPEED, 1, 1), ("mixtral-8x7b", MEGATRON_2021, 2, 8), ("mixtral-8x7b", PHALANX, 3, 8)],
)
def test_state_of_a_block_is_the_cost_models(model, framework, zero, ep):
    """Gradients in two types, and experts that no other rank has."""
    layout = Layout(pp=4, dp_shard=8, zero=zero, ep=ep, micro_batch=1, recompute="full")
    asked = replace(request(model), cluster=cluster_of("dgx-h100:4"), framework=framework)
    asked = replace(asked, cluster=replace(asked.cluster, accelerator=replace(asked.cluster.accelerator, memory_gib=0)))
    ranks = PipelineRanks(asked.spec(layout))
    around = []
    for cut in ("8+8+8+8", "10+8+8+6"):
        ranks.calibrated(asked.spec(replace(layout, pp_cut=cut)))
        around.append(list(ranks.around))
    assert around[0] == pytest.approx(around[1], abs=2)
