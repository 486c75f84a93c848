"""Fits the cost model's figures to measured times: an Accelerator to matrix products, attention and streams, a Link to
collectives.

It fits the cost model's own functions (kernels.py, communication.py), so that a prediction with the result is as close
to the measurements as the model allows. Residuals are relative: the logarithm of predicted over measured time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.blocks.kinds import block, block_kinds
from phalanx.blocks.operator import Place
from phalanx.config.cluster import Accelerator, Cluster, Link, Sharing, with_processes
from phalanx.config.model import ModelConfig
from phalanx.config.precision import MeasuredPrecision as Precision
from phalanx.cost import communication
from phalanx.cost.communication import Collective, sent_bytes
from phalanx.cost.frameworks import PHALANX_CPU
from phalanx.cost.kernels import attention_seconds, operator_seconds, product_seconds, stream_seconds
from phalanx.cost.spec import Framework
from phalanx.units import gib

HUBER_DELTA = 0.1
"""Relative error up to which its square counts; above, its size (Huber 1964), so that outliers do not bend the fit."""
MAX_ITERATIONS = 200
"""Most iterations: about ten are usual."""
MAX_DAMPING, CONVERGED_STEP, LITTLE = 1e9, 1e-9, 1e-5
"""Damping at which the fit gives up, the relative step below which it has converged, and that of derivatives."""


def least_squares(errors: Callable[..., list[float]], start: Sequence[float]) -> list[float]:
    """Returns the positive parameters that minimise `errors(*parameters)`, logarithms of predicted over measured
    values: Levenberg-Marquardt steps on the logarithms of the parameters, each at most a factor of e, with derivatives
    by differences and Huber's weights."""

    def errors_at(place: NDArray[Any]) -> NDArray[np.float64]:
        return np.array(errors(*map(float, np.exp(place))))

    def loss(residuals: NDArray[Any]) -> float:
        size = np.abs(residuals)
        return np.where(size <= HUBER_DELTA, size**2 / 2, HUBER_DELTA * (size - HUBER_DELTA / 2)).sum()

    at = np.log(start)
    residuals, damping = errors_at(at), 1e-3
    for _ in range(MAX_ITERATIONS):
        moved = [errors_at(at + LITTLE * one) for one in np.eye(len(at))]
        slopes = (np.array(moved) - residuals) / LITTLE
        weighted = slopes * (HUBER_DELTA / np.maximum(np.abs(residuals), HUBER_DELTA))
        square, right = weighted @ slopes.T, -weighted @ residuals
        while damping < MAX_DAMPING:
            raised = square + np.diag(damping * np.diag(square) + 1e-12)  # a parameter without influence stays
            step = np.clip(np.linalg.solve(raised, right), -1.0, 1.0)
            tried = errors_at(at + step)
            if loss(tried) < loss(residuals):
                break
            damping *= 5
        else:
            break  # no smaller step is better either
        at, residuals, damping = at + step, tried, max(damping / 5, 1e-9)
        if np.abs(step).max() < CONVERGED_STEP:
            break
    return [float(value) for value in np.exp(at)]


UNCACHED_BYTES = 100e6
"""Bytes moved from which on a stream runs at the bandwidth of memory: more than the last-level caches of CPUs (32 MB
per core complex of AMD EPYC Milan) and GPUs (50 MB on H100), from their data sheets."""
TINY_BYTES = 8192
"""Bytes moved up to which a kernel is launch-bound: they fit in any first-level cache."""
TORCHS_KERNEL = Framework().flash
"""The kernel that `older` is relative to where fused attention, torch's own, is measured."""
TINY_PRODUCT = "tiny product"
"""Name of the launch-bound matrix product."""
MIN_TRAINING_SHARE, BISECTIONS = 0.1, 30
"""Least share of its gain in single operations that a process with all cores keeps in training; bisections that find
the share, to 0.9 / 2^30."""
MIN_HOST_US = 0.1
"""Least time to dispatch an operation: 0 stands for a host that runs ahead of its device (Accelerator.host_us)."""
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
"""Collectives that a link is fitted to."""


@dataclass(frozen=True)
class ProductTiming:
    """Seconds of one product of (m × k) and (k × n) matrices."""

    family: str
    """Shapes that differ in one dimension, such as "tokens × 2048 × 512"."""
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionTiming:
    """Seconds of one causal self-attention."""

    length: int
    """Tokens per sequence."""
    heads: int
    """Heads of all sequences together."""
    head: int
    """Head dimension."""
    backward: bool
    seconds: float

    @property
    def flops(self) -> float:
        """FLOPs of the pairs that the causal mask leaves: two products forward, five backward (FlashAttention-2, Dao
        2023, section 4.1)."""
        return 2.0 * self.length**2 * self.heads * self.head * (2.5 if self.backward else 1)


@dataclass(frozen=True)
class StreamTiming:
    """Seconds of one memory-bound or launch-bound kernel, which reads and writes `moved` bytes."""

    kernel: str
    moved: float
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """Seconds of one collective over a tensor of `payload` bytes (as in communication.seconds)."""

    collective: Collective
    payload: int
    group: communication.RankGroup
    seconds: float

    @property
    def bus(self) -> float:
        """Bytes per second that each rank sends: the bus bandwidth, which does not depend on the group's size."""
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
    """Whether the fit minimised this error; otherwise it is only shown."""

    @property
    def error(self) -> float:
        """The fitted over the measured time, minus one."""
        return self.fitted / self.measured - 1


def fit_device(
    base: Accelerator,
    precision: Precision,
    products: Sequence[ProductTiming],
    attentions: Sequence[AttentionTiming],
    streams: Sequence[StreamTiming],
    known: float = 0.0,
) -> Accelerator:
    """Returns `base` with the bandwidth, launch overhead, peak in `precision` and rate of attention under which the
    cost model comes closest to the measurements.

    Args:
        base: looked-up facts: name, cores, memory, and the ceiling that an unknown peak is divided by.
        products: at least one that is neither launch-bound nor memory-bound.
        attentions: measurements of the rate of attention relative to that of products (`older`), which stays without
            any.
        streams: at least one from UNCACHED_BYTES on, and one up to TINY_BYTES.
        known: peak of the data sheet in TFLOP/s; the fit then gives the ceiling, the share of it that the best product
            reaches. 0: the peak is the rate that was reached.
    """
    device = _with_memory(base, streams)

    def with_rate(flops: float) -> Accelerator:
        tflops = flops / 1e12
        if known:
            figures = {f"{precision}_tflops": known, "ceiling": tflops / known}
        else:
            figures: dict[str, Any] = {f"{precision}_tflops": tflops / device.ceiling}
        return replace(device, **figures)

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
    """Fits the bandwidth to large streams and the launch overhead to tiny kernels."""
    fitted = [one for one in streams if _is_fitted(one) and not (base.product_us and _is_tiny_product(one))]

    def machine(launch: float, bytes_per_s: float) -> Accelerator:
        return replace(base, launch_us=launch * 1e6, bandwidth_gbs=bytes_per_s / 1e9)

    start = min(stream.seconds for stream in fitted), max(stream.moved / stream.seconds for stream in fitted)
    solution = least_squares(
        lambda *values: [log(stream_seconds(machine(*values), one.moved) / one.seconds) for one in fitted], start
    )
    return machine(*solution)


def product_call_us(streams: Sequence[StreamTiming]) -> float:
    """Returns the microseconds by which the call of a product exceeds that of another kernel if the host does not run
    ahead (a CPU)."""
    tiny = [stream for stream in streams if stream.moved <= TINY_BYTES]
    others = statistics.median(stream.seconds for stream in tiny if not _is_tiny_product(stream))
    return max([0.0, *((stream.seconds - others) * 1e6 for stream in tiny if _is_tiny_product(stream))])


def fit_host(device: Accelerator, precision: Precision, model: ModelConfig, seconds: float) -> Accelerator:
    """Returns the device with the dispatch time per operation under which a block of `model`, forward and backward of
    one sequence, takes `seconds`. The block's time is linear in it, so two evaluations give it."""
    at_one, at_two = (_block_seconds(replace(device, host_us=host), precision, model, 1) for host in (1.0, 2.0))
    return replace(device, host_us=max(MIN_HOST_US, 1.0 + (seconds - at_one) / (at_two - at_one)))


def fit_sharing(
    device: Accelerator,
    precision: Precision,
    gains: Sharing,
    model: ModelConfig,
    sequences: int,
    together: float,
    single: float,
) -> Sharing:
    """Returns the gains of one process with all cores in training, a share of its `gains` in single operations:
    threads synchronize after every operation, and the next one's input lies in another core's cache.

    Args:
        device: one of the processes that share the cores.
        model, sequences: a block of this model, forward and backward, was measured with this micro-batch.
        together, single: its seconds in each of the processes that share the cores, and in one alone.
    """
    shared = _block_seconds(device, precision, model, sequences)

    def scaled(share: float) -> Sharing:
        # Further threads do not slow a process down: where they seem to, something else had the cores.
        products, streams = (max(1.0, gain * share) for gain in (gains.alone_products, gains.alone_streams))
        return replace(gains, alone_products=products, alone_streams=streams)

    def surplus(share: float) -> float:
        one = with_processes(Cluster(accelerator=device, sharing=scaled(share)), 1).accelerator
        return _block_seconds(one, precision, model, sequences) / shared - single / together

    low, high = MIN_TRAINING_SHARE, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(middle) > 0 else (low, middle)
    return scaled(high)


def _block_seconds(device: Accelerator, precision: Precision, model: ModelConfig, sequences: int) -> float:
    """Returns the seconds of a block, forward and backward, in a loop of nothing else."""
    operators = block(Place(model, sequences=sequences, width=4), block_kinds(model)[0])
    parts = operator_seconds(alone(device), operators, PHALANX_CPU, precision)
    return parts.forward + parts.backward


def alone(device: Accelerator) -> Accelerator:
    """Returns the device at its best instead of its sustained rate, as in a loop of one kernel."""
    return replace(device, sustained=1.0)


def device_rows(
    device: Accelerator,
    precision: Precision,
    products: Iterable[ProductTiming],
    attentions: Iterable[AttentionTiming],
    streams: Iterable[StreamTiming],
) -> list[FitRow]:
    """Returns every measurement on a device beside its prediction, in the order of the arguments."""
    rows = [FitRow("product", f"{p.m}×{p.n}×{p.k}", p.seconds, _product_alone(device, precision, p)) for p in products]
    for a in attentions:
        name = f"{a.length}, {a.heads} heads of {a.head}, {'backward' if a.backward else 'forward'}"
        rows.append(FitRow("attention", name, a.seconds, _attention_alone(device, precision, a)))
    for s in streams:
        shape = f"{s.kernel}, {gib(s.moved)}"
        call = device.product_us * 1e-6 if _is_tiny_product(s) else 0.0
        rows.append(FitRow("stream", shape, s.seconds, stream_seconds(device, s.moved) + call, _is_fitted(s)))
    return rows


def fit_link(transfers: Sequence[Transfer], devices_per_node: int) -> Link:
    """Fits latency and bandwidth of one class of links to collectives in groups that use no other class: groups inside
    a node of `devices_per_node`, or groups with one rank per node.

    `gbs` is the bandwidth that large messages reach, so that `reached` is 1."""
    fastest = min(transfer.seconds for transfer in transfers)
    widest = max(transfer.bus for transfer in transfers)

    def with_link(latency: float, bytes_per_s: float) -> Cluster:
        both = Link(gbs=bytes_per_s / 1e9, latency_us=latency * 1e6, reached=1.0)
        return Cluster(devices_per_node=devices_per_node, intra=both, inter=both)  # the groups use only one of them

    machine = with_link(
        *least_squares(
            lambda latency, speed: [
                log(predicted(with_link(latency, speed), transfer).seconds / transfer.seconds) for transfer in transfers
            ],
            (fastest, widest),
        )
    )
    return machine.intra


def predicted(machine: Cluster, transfer: Transfer) -> Transfer:
    """Returns the collective with its predicted seconds."""
    return replace(
        transfer, seconds=communication.seconds(machine, transfer.collective, transfer.payload, transfer.group)
    )


def link_rows(machine: Cluster, transfers: Iterable[Transfer]) -> list[FitRow]:
    """Returns every collective beside its prediction."""
    return [
        FitRow(t.collective, f"{t.group.ranks} ranks, {gib(t.payload)}", t.seconds, predicted(machine, t).seconds)
        for t in transfers
    ]


def median_error(rows: Iterable[FitRow]) -> float:
    """Returns the median absolute relative error of the rows that the fit used; 0 where there is none."""
    errors = [abs(row.error) for row in rows if row.used]
    return statistics.median(errors) if errors else 0.0


def _is_tiny_product(stream: StreamTiming) -> bool:
    return stream.kernel == TINY_PRODUCT


def _is_fitted(stream: StreamTiming) -> bool:
    return stream.moved >= UNCACHED_BYTES or stream.moved <= TINY_BYTES


def _product_alone(device: Accelerator, precision: Precision, product: ProductTiming) -> float:
    return product_seconds(alone(device), precision, product.m, product.n, product.k)


def _attention_alone(device: Accelerator, precision: Precision, one: AttentionTiming) -> float:
    shape = (one.length, one.length, one.heads, one.heads, one.head, one.head)
    return attention_seconds(alone(device), precision, *shape, backward=one.backward, kernel=TORCHS_KERNEL)
