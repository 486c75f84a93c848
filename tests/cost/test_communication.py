"""Seconds of a block's collectives agree with what the runtime sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks.known import MEGATRON_CORE, PHALANX
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.communication import block_traffic
from phalanx.cost.traffic.blocks import Micro, balanced_rows
from phalanx.partition import batch


@pytest.mark.parametrize(("framework", "share"), [(PHALANX, 1), (MEGATRON_CORE, 2)])
def test_each_tensor_rank_dispatches_all_tokens_unless_it_holds_whole_experts(framework, share):
    model = PRESETS["mixtral-8x7b"]
    layout = Layout(tp=2, ep=4, dp_shard=4, sp=True, micro_batch=1)
    spec = StepSpec(model, cluster_of("dgx-h100"), layout, batch.solve(8, layout), framework=framework)
    plain = replace(layout, sp=False)
    assert balanced_rows(Micro(model, layout, 1, 2)) == balanced_rows(Micro(model, plain, 1, 2))
    parted, whole = (block_traffic(replace(spec, layout=each), moe=True).ep_forward for each in (layout, plain))
    assert parted == pytest.approx(whole / share, rel=0.1)
