"""Attention over blocks of keys in half precision, by the device's fused kernel, against float64 on the CPU.

    python -m benchmarks.gpu.attention_blocks --device cuda

`phalanx verify` compares in float64, which a GPU's flash attention does not compute: this covers the kernel that ring
attention calls in training, and layers with windows or documents. On a CPU the same code runs in fp32. Prints one JSON
document.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from phalanx.model.attention import Reach, blocked_attention
from phalanx.model.attention_blocks import Seen, attend, gradients
from phalanx.model.documents import Documents

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5}
"""Allowed difference relative to the largest element: bf16 has 8 bits, and the output's gradient passes through three
products."""
NAMES = "output", "gradient of q", "gradient of k", "gradient of v"
SHAPES = [(2, 4, 4, 256, 256, 64), (1, 8, 2, 128, 384, 128), (1, 4, 4, 64, 64, 20)]
"""batch, heads, key/value heads, queries, keys, head size: the last one is no multiple of 8."""


WINDOW = 40
"""Keys that the last query of a block sees in which a window ends, as on a ring."""


def seen(causal: bool, window: int, queries: int, keys: int, q: Tensor) -> Seen:
    """Returns what queries see: with a window by a kernel's arguments on a GPU, by a mask on a CPU."""
    if not window or q.device.type == "cuda":
        return Seen(causal, window=window)
    last, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    return Seen(mask=((key > last - window) & (key <= last + keys * (not causal)))[None, None])


def largest_difference(
    shape: tuple[int, ...], causal: bool, window: int, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Returns the largest difference of output and gradients, relative to the largest element of each."""
    batch, heads, kv_heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(0)
    rows = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    q, k, v, given = (torch.randn(batch, n, length, size, generator=generator).to(dtype) for n, length in rows)

    def both_passes(*inputs: Tensor) -> tuple[Tensor, ...]:
        *qkv, gradient = inputs
        sees = seen(causal, window, queries, keys, qkv[0])
        o, lse = attend(qkv[0], qkv[1], qkv[2], sees)
        return o, *gradients(gradient, qkv[0], qkv[1], qkv[2], o, lse, sees)

    found = both_passes(*(x.to(device) for x in (q, k, v, given)))
    expected = both_passes(*(x.double() for x in (q, k, v, given)))
    return {
        name: float((a.cpu().double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(NAMES, found, expected, strict=True)
    }


REACHES = [(100, False), (0, True), (100, True)]
"""Window and whether there are documents, of one layer."""


def difference_of_layers(window: int, documents: bool, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Returns the same of a whole layer's attention, which the kernel computes in one call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 512, 64) for heads in (4, 2, 2, 4)]
    *qkv, given = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    numbers = Documents((torch.rand(2, 512, generator=generator) < 0.02).long().cumsum(1)) if documents else None

    def both_passes(place: str, wide: torch.dtype) -> list[Tensor]:
        inputs = [x.to(place, wide).requires_grad_() for x in qkv]
        o = blocked_attention(*inputs, Reach(window, numbers and numbers.to(torch.device(place))))
        return [x.detach().cpu().double() for x in (o, *torch.autograd.grad(o, inputs, given.to(place, wide)))]

    pairs = zip(both_passes(device, dtype), both_passes("cpu", torch.float64), strict=True)
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in zip(NAMES, pairs, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    worst: dict[str, float] = {}
    found = [
        largest_difference(shape, causal, window, device, dtype)
        for shape in SHAPES
        for window in (0, WINDOW)
        for causal in ((False, True) if window or shape[3] == shape[4] else (False,))
    ]
    for figures in (*found, *(difference_of_layers(*reach, device, dtype) for reach in REACHES)):
        for name, value in figures.items():
            worst[name] = max(worst.get(name, 0.0), value)
    gradient = max(value for name, value in worst.items() if name != "output")
    figures = {"loss_max_rel": worst["output"], "grad_max_rel": gradient, "tolerance": TOLERANCE[dtype], "ranks": 1}
    print(json.dumps({"ok": max(worst.values()) <= TOLERANCE[dtype], **figures, "worst": worst, "dtype": str(dtype)}))


if __name__ == "__main__":
    main()
