"""Measures one device: matrix products, attention, streams and tiny kernels, on every rank at the same time.

Ranks of one machine share its memory bandwidth and, on a CPU, its cores: a process alone is faster than in training.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.calibrate import cpu, host, shapes
from phalanx.calibrate.clock import WINDOW, Clock, Timings
from phalanx.calibrate.shapes import Shape
from phalanx.config.calibration import ComputeCalibration, FitQuality, processor
from phalanx.config.cluster import Accelerator, HostShare, Sharing
from phalanx.config.model import ModelConfig
from phalanx.cost.fit import (
    TINY_PRODUCT,
    UNCACHED_BYTES,
    AttentionTiming,
    FitRow,
    Precision,
    ProductTiming,
    StreamTiming,
    device_rows,
    fit_device,
    fit_host,
    fit_sharing,
    median_error,
    product_call_us,
)
from phalanx.data.files import Progress
from phalanx.parallel.linear import linear, onednn_is_faster
from phalanx.train.device import data_sheet_flops, keep_freed_memory

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_HEADS = {shapes.CPU_UNIT: (8, 64), shapes.ACCELERATOR_UNIT: (32, 128)}
"""Heads and head dimension of the measured attention, by unit: those of a small GPT and of Llama 3 8B."""
SUSTAINED_PRODUCTS = 8
"""Number of the largest products, as many as in a transformer block, that run in turns to measure the sustained
rate."""
SUSTAINED_REPEAT_S = {True: 0.3, False: 1.5}
"""Shortest repeat of that in seconds, by --quick: long enough for the clock frequency to settle."""

Call = Callable[[], Any]


@dataclass
class Measured:
    """Times on one device."""

    base: Accelerator
    """Values that were looked up: name, memory, cores."""
    precision: Precision
    known: float
    """Peak of the data sheet in TFLOP/s; 0 if there is none."""
    products: list[ProductTiming] = field(default_factory=list)
    attentions: list[AttentionTiming] = field(default_factory=list)
    streams: list[StreamTiming] = field(default_factory=list)
    tiny_block: tuple[ModelConfig, float] | None = None
    """On a CPU a launch-bound model, and the seconds of one of its blocks, forward and backward."""
    sharing: Sharing = field(default_factory=Sharing)
    host: HostShare = field(default_factory=HostShare)
    folder: str = ""
    """The folder whose disk was measured."""
    small_block: tuple[float, float] = (0.0, 0.0)
    """Seconds of a block of cpu.SMALL_MODEL in one of the processes that share the cores, and in one alone."""
    timings: dict[str, list[Timings]] = field(default_factory=lambda: defaultdict(list))
    """All timings, by part of ComputeCalibration."""

    def fit(self) -> tuple[Accelerator, list[FitRow]]:
        """Returns the device as the cost model sees it, and every measurement beside its prediction."""
        device = fit_device(self.base, self.precision, self.products, self.attentions, self.streams, self.known)
        if self.tiny_block:
            device = fit_host(device, self.precision, *self.tiny_block)
        return device, device_rows(device, self.precision, self.products, self.attentions, self.streams)

    def fit_sharing(self, device: Accelerator) -> Sharing:
        """Returns how processes share the cores, where `device`, from `fit`, is what one of them has."""
        if not all(self.small_block):
            return self.sharing
        return fit_sharing(device, self.precision, self.sharing, cpu.SMALL_MODEL, cpu.SEQUENCES, *self.small_block)

    def calibration(self, rows: Sequence[FitRow]) -> ComputeCalibration:
        """Returns the quality of each part; `rows` are those of `fit`."""

        def quality(part: str, kind: str = "") -> FitQuality:
            timings = self.timings[part]
            if not timings:
                return FitQuality()
            spread = statistics.median(spread for one in timings for spread in one.spreads)
            return FitQuality(
                median_error(row for row in rows if row.kind == kind), spread, max(one.rounds for one in timings)
            )

        return ComputeCalibration(
            products=quality("products", "product"),
            attention=quality("attention", "attention"),
            streams=quality("streams", "stream"),
            blocks=quality("blocks"),
        )


def measure(
    device: torch.device, precision: Precision, processes: int, quick: bool, ceiling: float, progress: Progress
) -> Measured:
    """Measures everything on this rank and, in a process group, on all of its `processes` together.

    `ceiling` is the one that peaks of other precisions in the file were fitted with, 1 where there are none. Returns
    means over the ranks, the same on each."""
    keep_freed_memory()  # as in training: outputs are not faulted in again for every call
    clock = Clock.for_device(device, quick)
    unit = shapes.CPU_UNIT if device.type == "cpu" else shapes.ACCELERATOR_UNIT
    base = replace(look_up(device, processes), ceiling=ceiling)
    measured = Measured(base, precision, _data_sheet_tflops(device, precision))
    product_shapes = shapes.products(unit, quick)
    lengths = shapes.lengths(unit, quick)
    kernels = {**_tiny_kernels(device, precision), **_streams(device, precision, quick)}
    on_cpu = device.type == "cpu"
    by_work = sorted(
        range(len(product_shapes)), key=lambda i: product_shapes[i].m * product_shapes[i].n * product_shapes[i].k
    )
    middle_third = by_work[len(by_work) // 3 : len(by_work) - len(by_work) // 3]
    uncached = [(name, moved) for name, moved in kernels if moved >= UNCACHED_BYTES]
    largest = by_work[-SUSTAINED_PRODUCTS:]
    disk = host.disk(quick)
    calls = len(product_shapes) + 2 * len(lengths) + len(kernels) + 3 + (disk is not None) + len(largest)
    if on_cpu:
        calls += 2 + 2 * (2 + len(middle_third) + len(uncached)) * dist.is_initialized()
    total = WINDOW * clock.repeats * calls
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(f"measuring {precision} on {device.type}", done, total)

    def timed(part: str, calls: Sequence[Call], clock: Clock = clock) -> Timings:
        def tell(spread: float) -> None:
            progress(f"{part}: rounds differ by {spread:.0%}; measuring again for {clock.budget_s:.2g} s at most", 0, 0)

        timings = clock.measure(calls, tick, tell)
        measured.timings[part].append(timings)
        return timings

    def means(part: str, calls: Sequence[Call], clock: Clock = clock) -> list[float]:
        return [statistics.mean(seconds) for seconds in timed(part, calls, clock).seconds]

    multiply = [_product(shape, device, precision) for shape in product_shapes]
    for shape, seconds in zip(product_shapes, means("products", multiply), strict=True):
        measured.products.append(ProductTiming(*shape, seconds))
    heads, head = ATTENTION_HEADS[unit]
    attend = [call for length in lengths for call in _attention(length, heads, head, device, precision)]
    for place, seconds in enumerate(means("attention", attend) if attend else []):
        measured.attentions.append(AttentionTiming(lengths[place // 2], heads, head, bool(place % 2), seconds))
    one_stream = replace(clock, budget_s=clock.budget_s / len(kernels))  # one after the other: they need much memory
    for (name, moved), make in kernels.items():
        measured.streams.append(StreamTiming(name, moved, *means("streams", [make()], one_stream)))
    copy_s, update_s = means("host", host.calls(device, quick=quick), one_stream)
    disk_s, free = 0.0, 0.0
    if disk is not None:
        file, call = disk
        (disk_s,), free = means("disk", [call], one_stream), host.free_space()
        measured.folder = str(file.folder)
    sizes = (each / processes / 2**30 for each in (usable_memory(), free))
    measured.host = host.share(copy_s, update_s, disk_s, *sizes, quick=quick)
    if on_cpu:
        measured.base = replace(measured.base, product_us=product_call_us(measured.streams))
        measured.tiny_block = cpu.TINY_MODEL, cpu.block_seconds(*means("blocks", cpu.block_calls(precision)))
        blocks = cpu.block_calls(precision, cpu.SMALL_MODEL, cpu.SEQUENCES)
        products, streams = [multiply[i] for i in middle_third], [kernels[key]() for key in uncached]
        measured.sharing, measured.small_block = cpu.sharing(timed, processes, products, streams, blocks)
    large = [multiply[i] for i in largest]
    long_clock = replace(clock, min_repeat_s=SUSTAINED_REPEAT_S[quick])
    (together,) = means("products", [lambda: [call() for call in large]], long_clock)
    # Each alone once more, right after, so that clock frequency and other programs are the same for both.
    measured.base = replace(measured.base, sustained=min(1.0, sum(means("products", large)) / together))
    return measured


def look_up(device: torch.device, processes: int) -> Accelerator:
    """Looks up name, memory and cores of the device that each of `processes` has."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        name, cores, memory = facts.name, facts.multi_processor_count, facts.total_memory
    else:
        # One core: CPU libraries tile a product so that no wave of tiles is left half empty.
        name, cores, memory = processor(), 1, usable_memory() // processes
    return Accelerator(name, cores=cores, memory_gib=memory / 2**30)


def usable_memory() -> int:
    """Returns the bytes of memory of this machine, or of the container that this process is in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return whole


def _data_sheet_tflops(device: torch.device, precision: Precision) -> float:
    if device.type != "cuda" or precision == "fp32":
        return 0.0
    return data_sheet_flops(device, DTYPES[precision]) / 1e12


def _product(shape: Shape, device: torch.device, precision: Precision) -> Call:
    """Returns the product of activations (m, k) and a weight (n, k), through the library that training uses."""
    dtype = DTYPES[precision]
    x = torch.randn(shape.m, shape.k, device=device).to(dtype)
    weight = torch.randn(shape.n, shape.k, device=device).to(dtype)
    multiply = linear if onednn_is_faster(device, dtype) else F.linear
    return partial(multiply, x, weight)


def _attention(length: int, heads: int, head: int, device: torch.device, precision: Precision) -> tuple[Call, Call]:
    """Returns the forward pass and the backward pass alone of torch's fused causal attention."""
    make = partial(torch.randn, 1, heads, length, head, device=device)
    q, k, v = (make().to(DTYPES[precision]).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    forward = partial(F.scaled_dot_product_attention, q.detach(), k.detach(), v.detach(), is_causal=True)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _tiny_kernels(device: torch.device, precision: Precision) -> dict[tuple[str, int], Callable[[], Call]]:
    """Returns launch-bound kernels by name and bytes moved: their time is the launch overhead."""
    size = DTYPES[precision].itemsize
    n = 16
    make = partial(torch.ones, n, n, device=device, dtype=DTYPES[precision])
    return {
        ("tiny add", 3 * n * n * size): lambda: partial(torch.add, make(), make(), out=make()),
        ("tiny softmax", 2 * n * n * size): lambda: partial(torch.softmax, make(), -1),
        ("tiny norm", 2 * n * n * size): lambda: partial(F.rms_norm, make(), (n,)),
        (TINY_PRODUCT, 3 * n * n * size): lambda: _product(Shape("", n, n, n), device, precision),
    }


def _streams(device: torch.device, precision: Precision, quick: bool) -> dict[tuple[str, int], Callable[[], Call]]:
    """Returns copies (a read, a write) and additions (two reads, a write) by name and bytes moved."""
    kernels: dict[tuple[str, int], Callable[[], Call]] = {}
    for n in shapes.streams(quick):
        make = partial(torch.ones, n, device=device, dtype=DTYPES[precision])
        size = n * DTYPES[precision].itemsize
        kernels["copy", 2 * size] = lambda make=make: partial(make().copy_, make())
        kernels["add", 3 * size] = lambda make=make: partial(torch.add, make(), make(), out=make())
    return kernels
