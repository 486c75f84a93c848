"""The simulated and the predicted time of a step, for layouts drawn at random from a space."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import numpy as np

from covering import WHOLE
from phalanx.config.clusters import cluster_of
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.branch import Search
from phalanx.plan.space import PlanRequest
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.simulate.step import step_seconds
from simulate.specs import spec

MEGATRON_CORE = FRAMEWORKS["megatron-core"]

LAYOUTS = 40
LARGEST = 1000
"""Micro-batches of all ranks of a pipeline together, so that the test is short."""


def test_the_two_agree():
    search = Search(PlanRequest(PRESETS["llama3-8b"], cluster_of("dgx-h100:2"), global_batch=32))
    pipelines = np.flatnonzero((search.pair_bytes <= search.limit) & (search.bounds.pp > 1))
    chosen = random.Random(7)
    apart = []
    while len(apart) < LAYOUTS:
        rows = search.space.rows(np.array([chosen.choice(pipelines)]))
        spec = search.request.spec(search.space.layout(rows, chosen.randrange(len(rows))))
        if spec.batch.accumulation * spec.layout.pp <= LARGEST:
            apart.append(abs(step_seconds(spec) / predict(spec).step_time_s - 1))
    assert median(apart) < 0.02
    assert max(apart) < 0.2


PIPELINES = 200 if WHOLE else 80


def test_they_agree_over_slow_links():
    """Links of 0.03 to 100 GB/s: of the slowest the bytes alone take longer than the computation."""
    names = sorted(name for name, schedule in SCHEDULES.items() if schedule.steps == 1 and not schedule.stashes)
    apart = differences(pipelines(random.Random(0), names, PIPELINES))
    assert apart[PIPELINES // 2] < 0.005
    assert apart[-1] < 0.05


def test_they_agree_where_each_micro_batch_is_an_update():
    assert differences(pipelines(random.Random(0), ["pipedream_stash"], PIPELINES // 4))[-1] < 0.05


def differences(steps: list[StepSpec]) -> list[float]:
    return sorted(abs(predict(one).step_time_s / step_seconds(one) - 1) for one in steps)


def pipelines(chosen: random.Random, names: list[str], count: int) -> list[StepSpec]:
    found: list[StepSpec] = []
    while len(found) < count:
        pp, tp, model = chosen.choice([2, 4, 8, 16]), chosen.choice([2, 8]), chosen.choice(["llama3-8b", "llama3-70b"])
        line = f"pp={pp},tp={tp},sp=true,schedule={chosen.choice(names)},recompute={chosen.choice(['none', 'full'])}"
        try:
            one = spec(
                line, pp * chosen.choice([1, 2, 4, 6, 8]), model, framework=chosen.choice([PHALANX, MEGATRON_CORE])
            )
            inter = replace(
                one.cluster.inter, gbs=10 ** chosen.uniform(-1.5, 2), latency_us=chosen.choice([5, 50, 500])
            )
            predict(one)
        except JobError:  # the schedule does not go with the micro-batches or the layers
            continue
        found.append(replace(one, cluster=replace(one.cluster, inter=inter)))
    return found
