"""The simulated and the predicted time of a step, for layouts drawn at random from a space."""

from __future__ import annotations

import random
from statistics import median

import numpy as np

from phalanx.config.clusters import cluster_of
from phalanx.config.presets import PRESETS
from phalanx.cost.prediction import predict
from phalanx.plan.branch import Search
from phalanx.plan.space import PlanRequest
from phalanx.simulate.step import step_seconds

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
