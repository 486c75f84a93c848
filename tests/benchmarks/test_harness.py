"""A peer measures what it is named after."""

from __future__ import annotations

import pytest
from benchmarks.peers import harness
from torch import nn
from torch.distributed.fsdp import FSDPModule


def test_another_parallel_module_than_asked_for_is_not_measured():
    harness.require(nn.Linear(2, 2), nn.Module)
    with pytest.raises(RuntimeError, match="asked for FSDPModule, the library made Linear: not measured"):
        harness.require(nn.Linear(2, 2), FSDPModule)
