"""Rows of a mixture of experts move by gathers alone, both ways, and the host waits for no count of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config.model import ModelConfig, MoE
from phalanx.model import moe
from phalanx.model.documents import Conversations
from phalanx.model.moe import MixtureOfExperts, Routing
from train.measured_memory import tensors_in

D_MODEL, TOKENS, TOP_K = 16, 32, 3
MODEL = ModelConfig(
    n_layers=1,
    d_model=D_MODEL,
    n_heads=2,
    seq_len=TOKENS // 2,
    activation="swiglu",
    bias=True,
    moe=MoE(n_experts=6, top_k=TOP_K, d_ff=24, n_shared=1, aux_loss=0.1, z_loss=0.1),
)
CAPACITY = replace(MODEL, moe=replace(MODEL.moe, capacity=1.0))


def backward_of(model: ModelConfig, dtype: torch.dtype, *, padded: bool) -> None:
    """Runs a layer forward and backward, with padding or without."""
    moe._capacities.cache_clear()
    torch.set_default_dtype(dtype)  # fake parameters cannot be converted
    try:
        layer = MixtureOfExperts(model, 0, Routing(factor=1.0))
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.randn(2, TOKENS // 2, D_MODEL, dtype=dtype, requires_grad=True)
    layer(x, Conversations(torch.zeros(2, TOKENS // 2).long(), 2) if padded else None).sum().backward()
    moe._capacities.cache_clear()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model", [MODEL, CAPACITY], ids=["dropless", "capacity"])
def test_the_host_reads_no_number_of_the_device(model, padded):
    """Tensors without values: whatever the host would read raises, as fp64's products do."""
    with FakeTensorMode():
        backward_of(model, torch.bfloat16, padded=padded)
    if not model.moe.capacity:
        with FakeTensorMode(), pytest.raises(DataDependentOutputException):
            backward_of(model, torch.float64, padded=padded)


class Moved(TorchDispatchMode):
    """Numbers that operations on rows of d_model read and write; a gather reads no more than it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tensors_in(each) if _is_rows(t)] for each in ((args, kwargs), result))
        if not func.is_view and (read or written):
            name = func._schema.name.removeprefix("aten::")
            self.names.add(name)
            taken = {
                "index_select": getattr(result, "numel", int),
                "_embedding_bag_forward_only": lambda: args[1].numel() * D_MODEL,
                "_embedding_bag_per_sample_weights_backward": lambda: 2 * args[2].numel() * D_MODEL,
            }
            self.numbers += taken.get(name, lambda: sum(t.numel() for t in read))() + sum(t.numel() for t in written)
        return result


def _is_rows(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[-1] == D_MODEL


def test_rows_are_gathered_both_ways():
    """Forward each row is read and written, and then read for its token's sum. Backward the sum's gradient is read
    for each row and written times its gate, both are read for the gate, and the rows' gradients are read for their
    tokens'."""
    layer = MixtureOfExperts(MODEL, 0, Routing(factor=1.0))
    tokens, gates = torch.randn(TOKENS, D_MODEL, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    chosen = torch.rand(2, TOKENS // 2, MODEL.moe.n_experts).topk(TOP_K).indices
    row, token = TOKENS * TOP_K * D_MODEL, TOKENS * D_MODEL
    with Moved() as moved:
        slots = layer.slots(chosen)
        rows = moe._Dispatch.apply(tokens, slots.choices, slots.rows, slots.kept)
        out = moe._Combine.apply(rows, gates, slots.choices, slots.rows)
    assert moved.numbers == 2 * row + row + token
    gradient = torch.ones_like(out)
    with Moved() as moved:
        torch.autograd.grad(out, (tokens, gates), gradient)
    assert moved.numbers == 2 * row + 2 * row + row + token


@pytest.mark.parametrize("model", [MODEL, CAPACITY], ids=["dropless", "capacity"])
def test_nothing_is_added_to_rows_by_index(model):
    with Moved() as moved:
        backward_of(model, torch.float32, padded=True)
    assert "index_select" in moved.names
    assert not any(word in name for name in moved.names for word in ("scatter", "index_add", "index_put"))
