"""From measured times to the figures of the cost model: an Accelerator from matrix products and streams, a Link from
collectives.

The model's own functions (kernel.py, link.py) are what is fitted, so that a prediction with the result is as near to
the measurements as the model can come. Errors are relative: the logarithm of predicted over measured time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Literal

from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.place import Place
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing
from phalanx.config.cpu_node import with_processes
from phalanx.config.model import ModelConfig
from phalanx.cost.frameworks.framework import Framework
from phalanx.cost.frameworks.known import PHALANX_CPU
from phalanx.cost.least_squares import least_squares
from phalanx.cost.time import link
from phalanx.cost.time.kernel import attention_seconds, product_seconds, stream_seconds
from phalanx.cost.time.layer import operator_seconds
from phalanx.cost.traffic.collectives import Collective, sent_bytes
from phalanx.units import gib

UNCACHED = 100e6
"""Bytes moved from which on a stream tells the memory's bandwidth and not that of a cache."""
TINY = 8192
"""Bytes moved up to which a kernel tells the time to start one."""
GENERATION = Framework().flash
"""Of the fused attention that is measured, torch's own: that of training here."""
TINY_PRODUCT = "tiny product"
"""The kernel that tells what a product's call takes."""
LEAST_SHARE, BISECTIONS = 0.1, 30
"""Of its gain in single operations that a process with all cores has at least in training; and steps in which the
share is found."""
LEAST_US = 0.1
"""That an operation takes to start: 0 would say that something else starts it."""
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
"""Those that a link is fitted to."""

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ProductTiming:
    """(m × k) by (k × n), and how long it took."""

    family: str
    """Which of its dimensions goes through a range of sizes, such as "tokens × 2048 × 512"."""
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionTiming:
    """Causal attention of a sequence with itself."""

    length: int
    heads: int
    """Of all sequences together."""
    head: int
    backward: bool
    seconds: float

    @property
    def flops(self) -> float:
        """Of the pairs that the mask leaves: two products forward, five backward."""
        return 2.0 * self.length**2 * self.heads * self.head * (2.5 if self.backward else 1)


@dataclass(frozen=True)
class StreamTiming:
    """A kernel that does hardly more than read and write `moved` bytes."""

    kernel: str
    moved: float
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """A collective over a tensor of `payload` bytes (as in link.seconds)."""

    collective: Collective
    payload: int
    group: link.RankGroup
    seconds: float

    @property
    def bus(self) -> float:
        """Bytes a second that each rank sends: what a link carries, whatever the size of the group."""
        return sent_bytes(self.collective, self.payload, self.group.ranks) / self.seconds


@dataclass(frozen=True)
class FitRow:
    """One measurement beside the fit."""

    kind: str
    shape: str
    measured: float
    """Seconds."""
    fitted: float
    """Seconds."""
    used: bool = True
    """Whether the fit minimised this error, or only shows it."""

    @property
    def error(self) -> float:
        return self.fitted / self.measured - 1


def fit_device(
    base: Accelerator,
    precision: Precision,
    products: Sequence[ProductTiming],
    attentions: Sequence[AttentionTiming],
    streams: Sequence[StreamTiming],
    known: float = 0.0,
) -> Accelerator:
    """`base` with the bandwidth, launch time, peak in `precision` and rate of attention under which the model comes
    nearest.

    Args:
        base: what is known besides: name, cores, memory, and the ceiling of an unknown peak.
        products: one at least that is neither too small nor bound by memory.
        attentions: how attention's rate beside that of products (`older`) is found; without any it stays.
        streams: one at least above UNCACHED, and one up to TINY.
        known: peak of the data sheet in TFLOP/s; the best product is then a share of it, the ceiling. 0: the peak is
            what was reached.
    """
    device = _with_memory(base, streams)

    def with_rate(flops: float) -> Accelerator:
        tflops = flops / 1e12
        if known:
            return replace(device, **{f"{precision}_tflops": known, "ceiling": tflops / known})
        return replace(device, **{f"{precision}_tflops": tflops / device.ceiling})

    best = max(product.flops / product.seconds for product in products)
    (flops,) = least_squares(
        lambda flops: [log(_product_alone(with_rate(flops), precision, one) / one.seconds) for one in products],
        (best,),
    )
    device = with_rate(flops)
    if not attentions:
        return device
    (older,) = least_squares(
        lambda older: [
            log(_attention_alone(replace(device, older=older), precision, one) / one.seconds) for one in attentions
        ],
        (1.0,),
    )
    return replace(device, older=older)


def _with_memory(base: Accelerator, streams: Sequence[StreamTiming]) -> Accelerator:
    """With the bandwidth and launch time that large streams and tiny kernels tell."""
    telling = [stream for stream in streams if _tells(stream) and not (base.product_us and _calls(stream))]

    def machine(launch: float, bytes_a_second: float) -> Accelerator:
        return replace(base, launch_us=launch * 1e6, bandwidth_gbs=bytes_a_second / 1e9)

    start = min(stream.seconds for stream in telling), max(stream.moved / stream.seconds for stream in telling)
    found = least_squares(
        lambda *values: [log(stream_seconds(machine(*values), one.moved) / one.seconds) for one in telling], start
    )
    return machine(*found)


def product_call_us(streams: Sequence[StreamTiming]) -> float:
    """What the call of a product takes more than that of another kernel, in microseconds, where none is done ahead."""
    tiny = [stream for stream in streams if stream.moved <= TINY]
    others = statistics.median(stream.seconds for stream in tiny if not _calls(stream))
    return max([0.0, *((stream.seconds - others) * 1e6 for stream in tiny if _calls(stream))])


def fit_host(device: Accelerator, precision: Precision, model: ModelConfig, seconds: float) -> Accelerator:
    """The device with the time to start an operation under which a block of `model`, both passes of one sequence, takes
    so many seconds."""
    quick, slow = (_block_alone(replace(device, host_us=host), precision, model, 1) for host in (1.0, 2.0))
    return replace(device, host_us=max(LEAST_US, 1.0 + (seconds - quick) / (slow - quick)))


def fit_sharing(
    device: Accelerator,
    precision: Precision,
    gains: Sharing,
    model: ModelConfig,
    sequences: int,
    together: float,
    single: float,
) -> Sharing:
    """What one process with all cores gains when it trains, from what it gains in single operations, and from the
    seconds of a block of `model`, both passes of so many sequences: in each of the processes that share the cores, and
    in one alone. It is less: threads wait for each other after every operation, and what the next one needs lies in
    another core's cache."""
    shared = _block_alone(device, precision, model, sequences)

    def scaled(share: float) -> Sharing:
        return replace(gains, alone_products=gains.alone_products * share, alone_streams=gains.alone_streams * share)

    def surplus(share: float) -> float:
        one = with_processes(Cluster(accelerator=device, sharing=scaled(share)), 1).accelerator
        return _block_alone(one, precision, model, sequences) / shared - single / together

    low, high = LEAST_SHARE, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(middle) > 0 else (low, middle)
    return scaled(high)


def _block_alone(device: Accelerator, precision: Precision, model: ModelConfig, sequences: int) -> float:
    """Seconds of a block, both passes of so many sequences, again and again."""
    operators = block(Place(model, sequences=sequences, width=4), block_kinds(model)[0])
    parts = operator_seconds(alone(device), operators, PHALANX_CPU, precision)
    return parts.forward + parts.backward


def alone(device: Accelerator) -> Accelerator:
    """The device while it runs one kernel again and again, as a benchmark does, and not a long mixture of them."""
    return replace(device, sustained=1.0)


def device_rows(
    device: Accelerator,
    precision: Precision,
    products: Iterable[ProductTiming],
    attentions: Iterable[AttentionTiming],
    streams: Iterable[StreamTiming],
) -> list[FitRow]:
    """Every measurement on a device beside the fit."""
    rows = [FitRow("product", f"{p.m}×{p.n}×{p.k}", p.seconds, _product_alone(device, precision, p)) for p in products]
    for a in attentions:
        name = f"{a.length}, {a.heads} heads of {a.head}, {'backward' if a.backward else 'forward'}"
        rows.append(FitRow("attention", name, a.seconds, _attention_alone(device, precision, a)))
    for s in streams:
        shape = f"{s.kernel}, {gib(s.moved)}"
        call = device.product_us * 1e-6 if _calls(s) else 0.0
        rows.append(FitRow("stream", shape, s.seconds, stream_seconds(device, s.moved) + call, _tells(s)))
    return rows


def fit_link(transfers: Sequence[Transfer], devices_per_node: int) -> Link:
    """Latency and bandwidth of the links of one class, from collectives of groups that use no other: those inside a
    node of so many devices, or those with one rank on each node.

    `gbs` is what large messages reach, so that `reached` is 1."""
    quickest = min(transfer.seconds for transfer in transfers)
    widest = max(transfer.bus for transfer in transfers)

    def with_link(latency: float, bytes_a_second: float) -> Cluster:
        found = Link(gbs=bytes_a_second / 1e9, latency_us=latency * 1e6, reached=1.0)
        return Cluster(devices_per_node=devices_per_node, intra=found, inter=found)  # only one of them is used

    machine = with_link(
        *least_squares(
            lambda latency, speed: [
                log(predicted(with_link(latency, speed), transfer).seconds / transfer.seconds) for transfer in transfers
            ],
            (quickest, widest),
        )
    )
    return machine.intra


def predicted(machine: Cluster, transfer: Transfer) -> Transfer:
    """The same collective as the model sees it."""
    return replace(transfer, seconds=link.seconds(machine, transfer.collective, transfer.payload, transfer.group))


def link_rows(machine: Cluster, transfers: Iterable[Transfer]) -> list[FitRow]:
    """Every collective beside the fit."""
    return [
        FitRow(t.collective, f"{t.group.ranks} ranks, {gib(t.payload)}", t.seconds, predicted(machine, t).seconds)
        for t in transfers
    ]


def median_error(rows: Iterable[FitRow]) -> float:
    """Of the rows that the fit used, the median of the sizes of their relative errors; 0 where there is none."""
    errors = [abs(row.error) for row in rows if row.used]
    return statistics.median(errors) if errors else 0.0


def _calls(stream: StreamTiming) -> bool:
    return stream.kernel == TINY_PRODUCT


def _tells(stream: StreamTiming) -> bool:
    return stream.moved >= UNCACHED or stream.moved <= TINY


def _product_alone(device: Accelerator, precision: Precision, product: ProductTiming) -> float:
    return product_seconds(alone(device), precision, product.m, product.n, product.k)


def _attention_alone(device: Accelerator, precision: Precision, one: AttentionTiming) -> float:
    shape = (one.length, one.length, one.heads, one.heads, one.head, one.head)
    return attention_seconds(alone(device), precision, *shape, backward=one.backward, generation=GENERATION)
