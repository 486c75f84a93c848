"""What one device does: matrix products, attention, streams and tiny kernels, measured on every rank at the same time.

Ranks of one machine share its memory and, it may be, its cores: a process alone would be faster than one in training.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.calibrate import cpu, shapes
from phalanx.calibrate.clock import Clock
from phalanx.calibrate.machine import processor
from phalanx.calibrate.shapes import Shape
from phalanx.config.cluster import Accelerator, Sharing
from phalanx.config.model import ModelConfig
from phalanx.cost.fit import (
    UNCACHED,
    AttentionTiming,
    FitRow,
    Precision,
    ProductTiming,
    StreamTiming,
    device_rows,
    fit_device,
    fit_host,
    fit_sharing,
    product_call_us,
)
from phalanx.data.progress import Progress
from phalanx.parallel.linear import linear, onednn_is_faster
from phalanx.train.device import data_sheet_flops, keep_freed_memory

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {shapes.CPU: (8, 64), shapes.ACCELERATOR: (32, 128)}
"""Heads and their size, for attention."""
IN_TURNS = 8
"""Products, the largest ones, that run in turns to see what a long run keeps of their rate."""
LONG_S = {True: 0.3, False: 1.5}
"""Seconds of each repeat of that, by --quick."""

Call = Callable[[], Any]


@dataclass
class Measured:
    """Times on one device."""

    base: Accelerator
    """What was looked up."""
    precision: Precision
    known: float
    """TFLOP/s of the data sheet; 0 where there is none."""
    products: list[ProductTiming] = field(default_factory=list)
    attentions: list[AttentionTiming] = field(default_factory=list)
    streams: list[StreamTiming] = field(default_factory=list)
    tiny: tuple[ModelConfig, float] | None = None
    """On a CPU a model of little work, and the seconds that one of its blocks takes, both passes."""
    sharing: Sharing = field(default_factory=Sharing)
    middling: tuple[float, float] = (0.0, 0.0)
    """Seconds of a block of cpu.MIDDLING in one of the processes that share the cores, and in one alone."""

    def fit(self) -> tuple[Accelerator, list[FitRow]]:
        """The device as the cost model sees it, and every measurement beside that."""
        device = fit_device(self.base, self.precision, self.products, self.attentions, self.streams, self.known)
        if self.tiny:
            device = fit_host(device, self.precision, *self.tiny)
        return device, device_rows(device, self.precision, self.products, self.attentions, self.streams)

    def shared(self, device: Accelerator) -> Sharing:
        """How processes share the cores, where `device`, from `fit`, is what one of them has."""
        if not all(self.middling):
            return self.sharing
        return fit_sharing(device, self.precision, self.sharing, cpu.MIDDLING, cpu.SEQUENCES, *self.middling)


def measure(
    device: torch.device, precision: Precision, processes: int, quick: bool, ceiling: float, progress: Progress
) -> Measured:
    """Everything, on this rank and, in a process group, on all of its `processes` together.

    `ceiling` is that under which peaks of other precisions are known already, 1 where there are none. Returns the means
    over the ranks; the same on each."""
    keep_freed_memory()  # as training does: an output is then not faulted in again for every call
    clock = Clock.of(device, quick)
    unit = shapes.CPU if device.type == "cpu" else shapes.ACCELERATOR
    base = replace(look_up(device, processes), ceiling=ceiling)
    found = Measured(base, precision, _known_tflops(device, precision))
    wanted = shapes.products(unit, quick)
    lengths = shapes.lengths(unit, quick)
    kernels = {**_tiny_kernels(device, precision), **_streams(device, precision, quick)}
    on_cpu = device.type == "cpu"
    by_work = sorted(range(len(wanted)), key=lambda place: wanted[place].m * wanted[place].n * wanted[place].k)
    usual = by_work[len(wanted) // 3 : len(wanted) - len(wanted) // 3]
    telling = [(name, moved) for name, moved in kernels if moved >= UNCACHED]
    calls = len(wanted) + 2 * len(lengths) + len(kernels) + 1 + min(IN_TURNS, len(wanted))
    if on_cpu:
        calls += 2 + 2 * (2 + len(usual) + len(telling)) * dist.is_initialized()
    total = clock.repeats * calls
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(f"measuring {precision} on {device.type}", done, total)

    def timed(calls: Sequence[Call], clock: Clock = clock) -> list[float]:
        return [statistics.mean(seconds) for seconds in clock.turns(calls, tick)]

    multiply = [_product(shape, device, precision) for shape in wanted]
    for shape, seconds in zip(wanted, timed(multiply), strict=True):
        found.products.append(ProductTiming(*shape, seconds))
    heads, head = HEADS[unit]
    attend = [call for length in lengths for call in _attention(length, heads, head, device, precision)]
    for place, seconds in enumerate(timed(attend)):
        found.attentions.append(AttentionTiming(lengths[place // 2], heads, head, bool(place % 2), seconds))
    for (name, moved), make in kernels.items():
        found.streams.append(StreamTiming(name, moved, *timed([make()])))
    if on_cpu:
        found.base = replace(found.base, product_us=product_call_us(found.streams))
        found.tiny = cpu.FEW, cpu.block_seconds(*timed(cpu.block_calls(precision)))
        blocks = cpu.block_calls(precision, cpu.MIDDLING, cpu.SEQUENCES)
        products, streams = [multiply[place] for place in usual], [kernels[key]() for key in telling]
        found.sharing, found.middling = cpu.sharing(clock, processes, products, streams, blocks, tick)
    by_size = sorted(zip(found.products, multiply, strict=True), key=lambda pair: pair[0].flops)
    large = [call for _, call in by_size[-IN_TURNS:]]
    (together,) = timed([lambda: [call() for call in large]], replace(clock, least_s=LONG_S[quick]))
    # Each alone once more, right after: the machine is then the same one, whatever its neighbours do.
    found.base = replace(found.base, sustained=min(1.0, sum(timed(large)) / together))
    return found


def look_up(device: torch.device, processes: int) -> Accelerator:
    """Name, memory and cores of the device that one of so many processes has."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        name, cores, memory = facts.name, facts.multi_processor_count, facts.total_memory
    else:
        # One core: a library cuts products on a CPU as it likes, and no wave of tiles is left half empty.
        name, cores, memory = processor(), 1, _usable_memory() // processes
    return Accelerator(name, cores=cores, memory_gib=memory / 2**30)


def _usable_memory() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return whole


def _known_tflops(device: torch.device, precision: Precision) -> float:
    if device.type != "cuda" or precision == "fp32":
        return 0.0
    return data_sheet_flops(device, DTYPES[precision]) / 1e12


def _product(shape: Shape, device: torch.device, precision: Precision) -> Call:
    """As training multiplies: (m, k) by a weight (n, k)."""
    dtype = DTYPES[precision]
    x = torch.randn(shape.m, shape.k, device=device).to(dtype)
    weight = torch.randn(shape.n, shape.k, device=device).to(dtype)
    multiply = linear if onednn_is_faster(device, dtype) else F.linear
    return partial(multiply, x, weight)


def _attention(length: int, heads: int, head: int, device: torch.device, precision: Precision) -> tuple[Call, Call]:
    """The forward pass, and the backward pass alone."""
    make = partial(torch.randn, 1, heads, length, head, device=device)
    q, k, v = (make().to(DTYPES[precision]).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    forward = partial(F.scaled_dot_product_attention, q.detach(), k.detach(), v.detach(), is_causal=True)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _tiny_kernels(device: torch.device, precision: Precision) -> dict[tuple[str, int], Callable[[], Call]]:
    """Kernels with next to nothing to do, by name and bytes moved: what they take is the time to start one."""
    size = DTYPES[precision].itemsize
    n = 16
    make = partial(torch.ones, n, n, device=device, dtype=DTYPES[precision])
    return {
        ("tiny add", 3 * n * n * size): lambda: partial(torch.add, make(), make(), out=make()),
        ("tiny softmax", 2 * n * n * size): lambda: partial(torch.softmax, make(), -1),
        ("tiny norm", 2 * n * n * size): lambda: partial(F.rms_norm, make(), (n,)),
        ("tiny product", 3 * n * n * size): lambda: _product(Shape("", n, n, n), device, precision),
    }


def _streams(device: torch.device, precision: Precision, quick: bool) -> dict[tuple[str, int], Callable[[], Call]]:
    """A copy (a read, a write) and an addition (two reads, a write) by bytes moved."""
    found: dict[tuple[str, int], Callable[[], Call]] = {}
    for n in shapes.streams(quick):
        make = partial(torch.ones, n, device=device, dtype=DTYPES[precision])
        size = n * DTYPES[precision].itemsize
        found["copy", 2 * size] = lambda make=make: partial(make().copy_, make())
        found["add", 3 * size] = lambda make=make: partial(torch.add, make(), make(), out=make())
    return found
