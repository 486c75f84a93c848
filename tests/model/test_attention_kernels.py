"""Which kernels compute attention on a GPU: by a table, with windows, documents and heads of two sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from model.kinds import MOE_AND_MLA
from phalanx.model import documents as documents_of_batches
from phalanx.model.attention import CoreAttention, Reach, blocked_attention
from phalanx.model.attention_blocks import kernel_order, kernels_text, ordered_kernels
from phalanx.model.documents import Documents
from rehearsed_cuda import CUDA, Rehearsal, rehearsal, values

SEQ, WINDOW = 12, 5
NUMBERS = torch.tensor([[0] * 3 + [1] * 9, [0] * 7 + [1] * 5])


@pytest.mark.parametrize(
    ("capability", "first"), [((8, 0), "FLASH"), ((9, 0), "CUDNN"), ((10, 0), "CUDNN"), ((12, 0), "FLASH")], ids=str
)
def test_the_table_ranks_torch_s_kernels_and_the_log_says_so(monkeypatch, capability, first):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    order = kernel_order(CUDA)
    assert order[0].name == f"{first}_ATTENTION"
    assert order[-1] == SDPBackend.MATH
    assert kernels_text(CUDA).startswith(f"kernels by rank {first.lower()}, ")
    with ordered_kernels(CUDA):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order
    with ordered_kernels(torch.device("cpu")):
        assert set(_cur_sdpa_kernel_backends()) > {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}


def run(q: Tensor, k: Tensor, v: Tensor, given: Tensor, attend, documents: Documents | None) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]


def check(gpu: Rehearsal, attend, width: int, documents: bool, heads: int = 2) -> None:
    """Compares a GPU in bf16 with a CPU in float64, both from the same numbers."""
    torch.manual_seed(3)
    shapes = [(2, 4, SEQ, 16), (2, heads, SEQ, 16), (2, heads, SEQ, width), (2, 4, SEQ, width)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    numbers = Documents(NUMBERS) if documents else None
    expected = run(*(x.double() for x in inputs), attend, numbers)
    found = run(*(x.to(CUDA) for x in inputs), attend, numbers and numbers.to(CUDA))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [0, WINDOW], ids=["all keys", "window"])
def test_flash_attention_computes_windows_and_documents_at_once(monkeypatch, window, documents):
    """No mask is made: the kernel gets the window, and the documents as runs of tokens."""
    monkeypatch.setattr(documents_of_batches, "ROWS_PER_DOCUMENT", 1)
    with rehearsal(monkeypatch) as gpu:
        check(gpu, lambda q, k, v, d: blocked_attention(q, k, v, Reach(window, d)), 16, documents)
    assert [name for name, *_ in gpu.launched] == ["_flash_attention_forward", "_flash_attention_backward"]
    asked = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    for _, arguments, options in gpu.launched:
        assert {key: value for key, value in options.items() if key.startswith("window")} == asked
        bounds = [values(x).tolist() for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int32]
        assert bounds == ([[0, 3, 12, 19, 24]] * 2 if documents else [])


@pytest.mark.parametrize(("capability", "pads"), [((8, 0), True), ((9, 0), False)], ids=str)
def test_values_are_padded_for_flash_attention_and_not_for_cudnn(monkeypatch, capability, pads):
    core = CoreAttention(replace(MOE_AND_MLA["deepseek"], seq_len=SEQ), 0)
    with rehearsal(monkeypatch) as gpu:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        check(gpu, lambda q, k, v, d: core(q, k, v, None, d), 8, False, heads=4)
    assert bool(gpu.launched) == pads
    assert all({x.shape[-1] for x in arguments[:3]} == {16} for _, arguments, _ in gpu.launched)
