"""The formulas of memory give the same for arrays, element by element, as for numbers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.job import Optimizer
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks import PROFILES
from phalanx.cost.held import GatheredParameters, expert_ranks
from phalanx.cost.state_formulas import MemoryFormulas
from phalanx.optimizers.catalogue import OptimizerCosts, optimizer_costs

FSDP1, MEGATRON_DEEPSPEED, NEMO, PHALANX, TORCHTITAN = (
    PROFILES["fsdp1"],
    PROFILES["megatron-deepspeed"],
    PROFILES["nemo"],
    PROFILES["phalanx"],
    PROFILES["torchtitan"],
)

FP32_GRADIENTS = replace(PHALANX, gradient_bytes=4, unbuffered_gradient_bytes=2)
PROFILES = [PHALANX, FP32_GRADIENTS, FSDP1, TORCHTITAN, NEMO, MEGATRON_DEEPSPEED]
CASE = st.tuples(*(st.integers(1, 64) for _ in range(5)))


def results(formulas: MemoryFormulas, zero: int, case: Any) -> list[Any]:
    """Every formula, of five numbers or of five arrays."""
    dense, experts, ranks, micro_batches, ep = case
    shards = (1e6 * dense, 1e3 * ep, ranks), (1e5 * experts, 1e4 * experts, expert_ranks(ranks, ep))
    state = formulas.state(shards, ranks * ep, zero, "local", micro_batches, flushes=False)
    early = state.early(formulas.stays(micro_batches, ep), 1e5 * ep)
    held = GatheredParameters(1e6 * dense, 1e6 * ep, 1e5 * ep)
    whole = formulas.passing(held, waits=False) + formulas.buffer(ranks)
    most = state.fullest(early, 1e6 * ep, whole)
    context = formulas.context(ranks, micro_batches, ep)
    return [*state, early, whole, most, context]


def costs(stored: int) -> OptimizerCosts:
    return optimizer_costs(Optimizer(), ModelConfig(), stored)


@given(st.sampled_from(PROFILES), st.sampled_from([2, 4]), st.integers(0, 3), st.lists(CASE, min_size=1, max_size=8))
def test_arrays_give_what_numbers_give(profile, width, zero, cases):
    formulas = MemoryFormulas(profile, width, costs)
    together = results(formulas, zero, np.array(cases).T)
    alone = zip(*(results(formulas, zero, case) for case in cases), strict=True)
    for several, each in zip(together, alone, strict=True):
        assert np.broadcast_to(several, len(cases)) == pytest.approx(np.array(each), rel=1e-12)


def test_formulas_of_numbers_are_plain_numbers():
    """numpy's scalars would make `predict` slower."""
    for profile in PROFILES:
        for zero in range(4):
            found = results(MemoryFormulas(profile, 2, costs), zero, (1, 2, 4, 8, 2))
            assert all(type(number) in (int, float) for number in found)
