"""A whole measurement on one rank, and its result: as text, as JSON, as a picture, and as the fields of a cluster.

The file of `cluster=local` is a job file with a `cluster` section and nothing else, so it can be given to any verb, or
pasted into a job.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

import phalanx
from phalanx.blocks.operator import Collective
from phalanx.comm.agree import Facts, on_every_rank, on_rank_zero
from phalanx.config import calibration
from phalanx.config.calibration import (
    Assessment,
    Calibration,
    ComputeCalibration,
    FitQuality,
    LinkCalibration,
    Measurement,
    Provenance,
    assess,
    processor,
)
from phalanx.config.cluster import Accelerator, Cluster, HostShare, Link, Sharing
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost import fit
from phalanx.cost.fit import median_error
from phalanx.data.files import Progress, silent, stderr_progress
from phalanx.data.loader import MicroBatch
from phalanx.errors import JobError, OffloadError
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.machine import links as comm
from phalanx.machine.checks import CheckedMachine
from phalanx.machine.clock import WINDOW, Clock, Timings, counter, quality, unstable
from phalanx.machine.links import Fitted, chosen
from phalanx.machine.system import memory_bytes
from phalanx.optimizers.catalogue import optimizer_costs
from phalanx.parallel import mesh as meshes
from phalanx.parallel.linear import linear, onednn_is_faster
from phalanx.parallel.offload import StateFile
from phalanx.partition.derived import BUFFER_BYTES
from phalanx.pictures.panels import device_svg, link_svg
from phalanx.train.agreement import agree
from phalanx.train.device import data_sheet_flops, keep_freed_memory
from phalanx.train.optimizers.rule import adamw
from phalanx.train.step import Stepper
from phalanx.units import aligned, counted, duration

TINY_MODEL = ModelConfig(
    n_layers=2,
    d_model=32,
    d_ff=64,
    seq_len=16,
    vocab_size=64,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
)
"""A launch-bound model: nearly all of its time is dispatching operations."""
SMALL_MODEL = replace(TINY_MODEL, d_model=128, d_ff=384, seq_len=128)
"""A model with enough work per operation that several threads share it."""
SEQUENCES = 8
"""Micro-batch of SMALL_MODEL."""
DEEP_LAYERS = 8
"""Blocks of the deep variant of a model: its time less that of the shallow one is the time of blocks alone."""

Call = Callable[[], Any]
TimeCalls = Callable[[str, Sequence[Call]], Timings]
"""Measures calls as a part of ComputeCalibration."""


def block_calls(precision: fit.Precision, model: ModelConfig = TINY_MODEL, sequences: int = 1) -> tuple[Call, Call]:
    """Returns forward and backward passes of `sequences` sequences, as training runs them, through the model's own
    blocks and through DEEP_LAYERS of them."""
    shallow, deep = (
        _gradients(replace(model, n_layers=layers), sequences, precision)
        for layers in (TINY_MODEL.n_layers, DEEP_LAYERS)
    )
    return shallow, deep


def block_seconds(shallow: float, deep: float) -> float:
    """Returns the seconds of one block, from those of both models of `block_calls`."""
    return (deep - shallow) / (DEEP_LAYERS - TINY_MODEL.n_layers)


def _gradients(model: ModelConfig, sequences: int, precision: fit.Precision) -> Call:
    job = Job(model=model, layout=Layout(micro_batch=sequences), train=Train(precision=precision))
    stepper = Stepper(job, meshes.alone(), torch.device("cpu"), model.vocab_size)
    tokens = np.arange(sequences * (model.seq_len + 1)).reshape(sequences, -1) % model.vocab_size
    micro_batch = MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(sequences))

    def call() -> None:
        stepper.replica.clear()
        stepper.gradients([micro_batch], 0, sequences * model.seq_len)

    return call


def core_sharing(
    timed: TimeCalls, processes: int, products: Sequence[Call], streams: Sequence[Call], blocks: tuple[Call, Call]
) -> tuple[Sharing, tuple[float, float]]:
    """Measures the gain of one process with all cores, while the others wait, over all processes together with a share
    of the cores each.

    Returns the gains, and the seconds of a block of SMALL_MODEL (`blocks`, from block_calls) in one of the processes
    together, and in one alone; (0, 0) where there is one process."""
    cores = len(os.sched_getaffinity(0))
    if not dist.is_initialized():
        return Sharing(cores, processes, 0, 1.0, 1.0), (0.0, 0.0)
    product_gains, stream_gains = (
        [together / alone for together, alone in _together_and_alone(timed, part, calls, cores)]
        for part, calls in (("products", products), ("streams", streams))
    )
    # Measured apart from the streams, which would leave cold caches.
    shallow, deep = _together_and_alone(timed, "blocks", blocks, cores)
    together, alone = map(block_seconds, shallow, deep)
    return Sharing(cores, processes, 0, geometric_mean(product_gains), geometric_mean(stream_gains)), (together, alone)


def _together_and_alone(timed: TimeCalls, part: str, calls: Sequence[Call], cores: int) -> list[tuple[float, float]]:
    """Returns the seconds of each call on all processes together, and on the first with all cores while the others
    wait."""
    together = [mean(seconds) for seconds in timed(part, calls).seconds]
    threads, is_first = torch.get_num_threads(), dist.get_rank() == 0
    torch.set_num_threads(cores if is_first else threads)
    try:
        alone = [seconds[0] for seconds in timed(part, [call if is_first else _wait for call in calls]).seconds]
    finally:
        torch.set_num_threads(threads)
    return list(zip(together, alone, strict=True))


def _wait() -> None:
    """Stands for the call on processes that leave their cores to the first."""


CPU_UNIT, ACCELERATOR_UNIT = 1, 8
"""Factors of all dimensions. A GPU has about a thousand times the FLOP/s of a CPU core, and so gets eight times the
dimensions, 512 times the work."""
QUICK_STEP = 3
"""--quick measures every third size of a family, up to the last."""
QUICK_FLOPS = 5e9
"""Most FLOPs of a product with --quick, for a unit of 1: 50 ms at 0.1 TFLOP/s. Grows with the cube of the unit."""
VOCABULARIES = (4096, 16384, 32768, 50257)
"""Vocabulary sizes; the last is GPT-2's, which is odd."""


class Shape(NamedTuple):
    """A product of (m × k) and (k × n) matrices, and the family of shapes that it belongs to."""

    family: str
    m: int
    n: int
    k: int


def products_of(unit: int, quick: bool) -> list[Shape]:
    """Returns the products to measure, in families: squares; more and more tokens through one weight; slices of
    weights, as tensor-parallel ranks have them; gradients of a weight, whose inner dimension is the tokens; output
    heads over vocabularies."""
    d = 512 * unit
    tokens = [64 * unit * 2**step for step in range(7)]
    slices = [4 * d // parts for parts in (32, 16, 8, 4, 2)]
    squares = [64 * unit * size for size in (1, 2, 4, 6, 8, 12, 16, 24, 32)]
    some = 1024 * unit
    families = [
        [Shape("n × n × n", n, n, n) for n in squares],
        [Shape(f"tokens × {4 * d} × {d}", m, 4 * d, d) for m in tokens],
        [Shape(f"{some} × slice × {d}", some, n, d) for n in slices],
        [Shape(f"{some} × {d} × slice", some, d, k) for k in slices],
        [Shape(f"{4 * d} × {d} × tokens", 4 * d, d, k) for k in tokens],
        [Shape(f"{d} × vocabulary × {d}", d, n, d) for n in VOCABULARIES],
    ]
    if quick:
        families = [
            [s for s in family if 2 * s.m * s.n * s.k <= QUICK_FLOPS * unit**3][::-1][::QUICK_STEP][::-1]
            for family in families
        ]
    return [shape for family in families for shape in family]


def sequence_lengths(unit: int, quick: bool) -> list[int]:
    """Returns the sequence lengths that attention is measured at, in tokens."""
    return [256 * unit, 1024 * unit] if quick else [128 * unit * 2**step for step in range(5)]


def stream_sizes(quick: bool) -> list[int]:
    """Returns numbers of elements that are copied and added, from a cache's size to far above it."""
    return [2**22, 2**25] if quick else [2**18, 2**20, 2**22, 2**24, 2**26]


DISK_BYTES = {True: 2**24, False: BUFFER_BYTES}
"""Bytes that are written, and read, at a time, by --quick."""
ELEMENTS = {True: 2**20, False: 2**23}
"""Parameters of the measured update, by --quick: 16 and 128 MiB of state."""


def host_calls(device: torch.device, *, quick: bool) -> tuple[Call, Call]:
    """Returns a copy of fp32 parameters from the device to host memory, and AdamW's update of as many on the host."""
    elements, pinned = ELEMENTS[quick], device.type != "cpu"
    there, here = torch.ones(elements, device=device), torch.empty(elements, pin_memory=pinned)
    parameter = torch.zeros(elements).requires_grad_()
    parameter.grad = torch.ones(elements)
    rule = adamw([{"params": [parameter], "shards": [None], "weight_decay": 0.0}], Optimizer())
    return partial(here.copy_, there, non_blocking=pinned), rule.step


def disk_calls(quick: bool) -> tuple[StateFile, Call] | None:
    """Returns a file in the folder of temporary files ($TMPDIR), and a call that writes DISK_BYTES there and reads as
    many, as an update with `offload_to` does; None on all ranks if one of them cannot have the file. A collective of
    all ranks."""
    try:
        file = on_every_rank(lambda: StateFile(Path(tempfile.gettempdir()), 2 * DISK_BYTES[quick]))
    except OffloadError:
        return None
    memory = mmap.mmap(-1, DISK_BYTES[quick])  # begins with a page, as direct I/O needs it
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    file.write(buffer, 0)
    file.write(buffer, DISK_BYTES[quick])

    def call() -> None:
        file.write(buffer, 0)
        file.read(buffer, DISK_BYTES[quick])

    return file, call


def host_share(
    copy_s: float, update_s: float, disk_s: float, memory_gib: float, disk_gib: float, *, quick: bool
) -> HostShare:
    """Returns the host's figures from the seconds of the calls; `memory_gib` and `disk_gib` are the host's memory and
    the disk's free space per device. Without a disk its figures are 0."""
    moved = optimizer_costs(Optimizer(), ModelConfig(vocab_size=1), 4).moved
    return HostShare(
        memory_gib=memory_gib,
        link_gbs=4 * ELEMENTS[quick] / copy_s / 1e9,
        update_gbs=moved * ELEMENTS[quick] / update_s / 1e9,
        disk_gbs=2 * DISK_BYTES[quick] / disk_s / 1e9 if disk_s else 0.0,
        disk_gib=disk_gib,
    )


DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION_HEADS = {CPU_UNIT: (8, 64), ACCELERATOR_UNIT: (32, 128)}
"""Heads and head dimension of the measured attention, by unit: those of a small GPT and of Llama 3 8B."""
SUSTAINED_PRODUCTS = 8
"""Number of the largest products, as many as in a transformer block, that run in turns to measure the sustained
rate."""
SUSTAINED_REPEAT_S = {True: 0.3, False: 1.5}
"""Shortest repeat of that in seconds, by --quick: long enough for the clock frequency to settle."""


@dataclass
class Measured:
    """Times on one device."""

    base: Accelerator
    """Values that were looked up: name, memory, cores."""
    precision: fit.Precision
    known: float
    """Peak of the data sheet in TFLOP/s; 0 if there is none."""
    products: list[fit.ProductTiming] = field(default_factory=list)
    attentions: list[fit.AttentionTiming] = field(default_factory=list)
    streams: list[fit.StreamTiming] = field(default_factory=list)
    tiny_block: tuple[ModelConfig, float] | None = None
    """On a CPU a launch-bound model, and the seconds of one of its blocks, forward and backward."""
    sharing: Sharing = field(default_factory=Sharing)
    host: HostShare = field(default_factory=HostShare)
    folder: str = ""
    """The folder whose disk was measured."""
    small_block: tuple[float, float] = (0.0, 0.0)
    """Seconds of a block of SMALL_MODEL in one of the processes that share the cores, and in one alone."""
    timings: dict[str, list[Timings]] = field(default_factory=lambda: defaultdict(list))
    """All timings, by part of ComputeCalibration."""

    def fitted(self) -> tuple[Accelerator, list[fit.FitRow]]:
        """Returns the device as the cost model sees it, and every measurement beside its prediction."""
        device = fit.fit_device(self.base, self.precision, self.products, self.attentions, self.streams, self.known)
        if self.tiny_block:
            device = fit.fit_host(device, self.precision, *self.tiny_block)
        return device, fit.device_rows(device, self.precision, self.products, self.attentions, self.streams)

    def fit_sharing(self, device: Accelerator) -> Sharing:
        """Returns how processes share the cores, where `device`, from `fitted`, is what one of them has."""
        if min(self.small_block) <= 0:  # one process, or a deep model that seemed faster on a busy machine
            return self.sharing
        return fit.fit_sharing(device, self.precision, self.sharing, SMALL_MODEL, SEQUENCES, *self.small_block)

    def calibration(self, rows: Sequence[fit.FitRow]) -> ComputeCalibration:
        """Returns the quality of each part; `rows` are those of `fitted`."""

        def of(part: str, kind: str = "") -> FitQuality:
            return quality(self.timings[part], (row for row in rows if row.kind == kind))

        return ComputeCalibration(
            products=of("products", "product"),
            attention=of("attention", "attention"),
            streams=of("streams", "stream"),
            blocks=of("blocks"),
        )


def measure(
    device: torch.device, precision: fit.Precision, processes: int, quick: bool, ceiling: float, progress: Progress
) -> Measured:
    """Measures everything on this rank and, in a process group, on all of its `processes` together.

    `ceiling` is the one that peaks of other precisions in the file were fitted with, 1 where there are none. Returns
    means over the ranks, the same on each."""
    keep_freed_memory()  # as in training: outputs are not faulted in again for every call
    clock = Clock.for_device(device, quick)
    unit = CPU_UNIT if device.type == "cpu" else ACCELERATOR_UNIT
    base = replace(look_up(device, processes), ceiling=ceiling)
    on_cpu = device.type == "cpu"
    # The peak of the data sheet in TFLOP/s, which has none of fp32.
    known = 0.0 if on_cpu or precision == "fp32" else data_sheet_flops(device, DTYPES[precision]) / 1e12
    measured = Measured(base, precision, known)
    product_shapes = products_of(unit, quick)
    lengths = sequence_lengths(unit, quick)
    kernels = _kernels(device, precision, quick)
    by_work = sorted(
        range(len(product_shapes)), key=lambda i: product_shapes[i].m * product_shapes[i].n * product_shapes[i].k
    )
    middle_third = by_work[len(by_work) // 3 : len(by_work) - len(by_work) // 3]
    uncached = [(name, moved) for name, moved in kernels if moved >= fit.UNCACHED_BYTES]
    largest = by_work[-SUSTAINED_PRODUCTS:]
    disk = disk_calls(quick)
    calls = len(product_shapes) + 2 * len(lengths) + len(kernels) + 3 + (disk is not None) + len(largest)
    if on_cpu:
        calls += 2 + 2 * (2 + len(middle_third) + len(uncached)) * dist.is_initialized()
    total = WINDOW * clock.repeats * calls
    tick = counter(progress, f"measuring {precision} on {device.type}", total)

    def timed(part: str, calls: Sequence[Call], clock: Clock = clock) -> Timings:
        timings = clock.measure(calls, tick, unstable(progress, part, clock.budget_s))
        measured.timings[part].append(timings)
        return timings

    def means(part: str, calls: Sequence[Call], clock: Clock = clock) -> list[float]:
        return [statistics.mean(seconds) for seconds in timed(part, calls, clock).seconds]

    multiply = [_product(shape, device, precision) for shape in product_shapes]
    for shape, seconds in zip(product_shapes, means("products", multiply), strict=True):
        measured.products.append(fit.ProductTiming(*shape, seconds))
    heads, head = ATTENTION_HEADS[unit]
    attend = [call for length in lengths for call in _attention(length, heads, head, device, precision)]
    for place, seconds in enumerate(means("attention", attend) if attend else []):
        measured.attentions.append(fit.AttentionTiming(lengths[place // 2], heads, head, bool(place % 2), seconds))
    one_stream = replace(clock, budget_s=clock.budget_s / len(kernels))  # one after the other: they need much memory
    for (name, moved), make in kernels.items():
        measured.streams.append(fit.StreamTiming(name, moved, *means("streams", [make()], one_stream)))
    copy_s, update_s = means("host", host_calls(device, quick=quick), one_stream)
    disk_s, free = 0.0, 0
    if disk is not None:
        file, call = disk
        (disk_s,) = means("disk", [call], one_stream)
        free = on_rank_zero(lambda: shutil.disk_usage(tempfile.gettempdir()).free)
        measured.folder = str(file.folder)
    sizes = (each / processes / 2**30 for each in (memory_bytes(CheckedMachine())[0], free))
    measured.host = host_share(copy_s, update_s, disk_s, *sizes, quick=quick)
    if on_cpu:
        measured.base = replace(measured.base, product_us=fit.product_call_us(measured.streams))
        measured.tiny_block = TINY_MODEL, block_seconds(*means("blocks", block_calls(precision)))
        blocks = block_calls(precision, SMALL_MODEL, SEQUENCES)
        products, streams = [multiply[i] for i in middle_third], [kernels[key]() for key in uncached]
        measured.sharing, measured.small_block = core_sharing(timed, processes, products, streams, blocks)
    large = [multiply[i] for i in largest]
    long_clock = replace(clock, min_repeat_s=SUSTAINED_REPEAT_S[quick])
    (together,) = means("products", [lambda: [call() for call in large]], long_clock)
    # Each alone once more, right after, so that clock frequency and other programs are the same for both.
    measured.base = replace(measured.base, sustained=min(1.0, sum(means("products", large)) / together))
    return measured


def look_up(device: torch.device, processes: int) -> Accelerator:
    """Looks up name, memory and cores of the device that each of `processes` has."""
    if device.type != "cpu":
        facts = torch.get_device_module(device).get_device_properties(device)
        name, memory = facts.name, facts.total_memory
        cores = facts.gpu_subslice_count if device.type == "xpu" else facts.multi_processor_count
    else:
        # One core: CPU libraries tile a product so that no wave of tiles is left half empty.
        name, cores, memory = processor(), 1, memory_bytes(CheckedMachine())[0] // processes
    return Accelerator(name, cores=cores, memory_gib=memory / 2**30)


def _product(shape: Shape, device: torch.device, precision: fit.Precision) -> Call:
    """Returns the product of activations (m, k) and a weight (n, k), through the library that training uses."""
    dtype = DTYPES[precision]
    x = torch.randn(shape.m, shape.k, device=device).to(dtype)
    weight = torch.randn(shape.n, shape.k, device=device).to(dtype)
    multiply = linear if onednn_is_faster(device, dtype) else F.linear
    return partial(multiply, x, weight)


def _attention(length: int, heads: int, head: int, device: torch.device, precision: fit.Precision) -> tuple[Call, Call]:
    """Returns the forward pass and the backward pass alone of torch's fused causal attention."""
    make = partial(torch.randn, 1, heads, length, head, device=device)
    q, k, v = (make().to(DTYPES[precision]).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    forward = partial(F.scaled_dot_product_attention, q.detach(), k.detach(), v.detach(), is_causal=True)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _kernels(device: torch.device, precision: fit.Precision, quick: bool) -> dict[tuple[str, int], Callable[[], Call]]:
    """Returns launch-bound kernels, whose time is the launch overhead, copies (a read, a write) and additions (two
    reads, a write), by name and bytes moved."""
    dtype, n = DTYPES[precision], 16
    size = dtype.itemsize
    make = partial(torch.ones, n, n, device=device, dtype=dtype)
    kernels: dict[tuple[str, int], Callable[[], Call]] = {
        ("tiny add", 3 * n * n * size): lambda: partial(torch.add, make(), make(), out=make()),
        ("tiny softmax", 2 * n * n * size): lambda: partial(torch.softmax, make(), -1),
        ("tiny norm", 2 * n * n * size): lambda: partial(F.rms_norm, make(), (n,)),
        (fit.TINY_PRODUCT, 3 * n * n * size): lambda: _product(Shape("", n, n, n), device, precision),
    }
    for length in stream_sizes(quick):
        vector = partial(torch.ones, length, device=device, dtype=dtype)
        kernels["copy", 2 * length * size] = lambda make=vector: partial(make().copy_, make())
        kernels["add", 3 * length * size] = lambda make=vector: partial(torch.add, make(), make(), out=make())
    return kernels


HEADER = "# This machine as `phalanx bench` measured it: the cluster that `cluster=local` means."
MEASURED = ("accelerator.", "host.", "intra.", "inter.", "sharing.", "calibration.", "devices_per_node")
"""Prefixes of the fields that belong to the device they were measured on."""


def of_device(known: Mapping[str, Any], device: str, name: str = "") -> dict[str, Any]:
    """Returns the fields without those measured on another kind of device, or on an accelerator of another name."""
    if known.get("device", device) != device:
        return {key: value for key, value in known.items() if not key.startswith(MEASURED)}
    if name and known.get("accelerator.name", name) != name:
        return {
            k: value
            for k, value in known.items()
            if not k.startswith(("accelerator.", "host.", "calibration.compute."))
        }
    return dict(known)


def write(path: Path, fields: Mapping[str, Any], what: str, fact: str) -> None:
    """Replaces the file by these fields, under the facts of this measurement (`what`: compute or comm) and those of the
    other one. Raises JobError where it cannot be written."""
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    comments = (line.removeprefix("# ").partition(": ") for line in known if line.startswith("# "))
    facts = {name: text for name, _, text in comments if name in ("compute", "comm")} | {what: fact}
    lines = [HEADER, *(f"# {name}: {text}" for name, text in sorted(facts.items()))]
    nested: dict[str, Any] = {}
    for field_path in sorted(fields, key=list(leaves(Cluster)).index):
        *sections, name = field_path.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = fields[field_path]
    body = yaml.safe_dump({"cluster": nested}, sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("\n".join(lines) + "\n" + body, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from None


def provenance() -> Provenance:
    """Returns today's date, this machine and the versions of phalanx, torch and Python."""
    torch = importlib.metadata.version("torch")
    return Provenance(
        date=time.strftime("%Y-%m-%d"),
        host=calibration.host_name(),
        processor=calibration.processor(),
        cores=calibration.core_count(),
        versions=f"phalanx {phalanx.__version__}, torch {torch}, python {platform.python_version()}",
    )


DIGITS = 4
"""Significant digits of fitted figures; the fit errors leave one or two of them."""


@dataclass(frozen=True)
class CalibrationReport:
    """One measurement and its fit."""

    what: Measurement
    """The command, compute or comm."""
    setting: str
    """Processes, threads and backend."""
    fields: dict[str, Any]
    """Fields of the cluster by dotted path, with the calibration's."""
    rows: list[fit.FitRow]
    lines: list[str]
    """The fit in words."""
    svg: str
    assessment: Assessment
    """The reliability of predictions, given its fit errors and spreads."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON document."""

    @property
    def error(self) -> float:
        return median_error(self.rows)

    def text(self) -> str:
        """Returns a table of every measurement, and the fit."""
        table = [("", "", "measured", "fitted", "error", "")]
        for row in self.rows:
            figures = duration(row.measured, DIGITS), duration(row.fitted, DIGITS), f"{row.error:+.1%}"
            table.append((row.kind.replace("_", "-"), row.shape, *figures, "" if row.used else "not fitted"))
        quality = self.assessment.line(), f"median error of the fit: {self.error:.1%}"
        return "\n".join([self.setting, "", *aligned(table, "llrrrl"), "", *self.lines, *quality])

    def as_dict(self) -> dict[str, Any]:
        """Returns the document of `--json`, but for the paths of the files."""
        points = [{**asdict(row), "error": row.error} for row in self.rows]
        return {
            "bench": self.what,
            "setting": self.setting,
            "cluster": self.fields,
            "median_error": self.error,
            "calibration": self.assessment.as_dict(),
            **self.more,
            "points": points,
        }


def of_compute(measured: Measured, known: Mapping[str, Any], device: str, setting: str) -> CalibrationReport:
    """Reports `bench compute`. `known` are the fields that the file already has for this device."""
    found, rows = measured.fitted()
    shared = measured.fit_sharing(found)
    quality = replace(measured.calibration(rows), provenance=provenance())
    peak = f"{measured.precision}_tflops"
    names = ("name", peak, "ceiling", "memory_gib", "bandwidth_gbs", "cores", "sustained", "older", "launch_us")
    if device == "cpu":
        names = (*names, "product_us", "host_us")
    fields: dict[str, Any] = {"device": device, "devices_per_node": known.get("devices_per_node", 1)}
    fields |= {f"accelerator.{name}": _short(getattr(found, name)) for name in names}
    if shared.processes:
        fields |= {f"sharing.{name}": _short(value) for name, value in asdict(shared).items() if name != "linked"}
    fields |= {f"host.{name}": _short(value) for name, value in asdict(measured.host).items() if value}
    fields |= _calibration_fields("compute", quality)
    if (other := known.get("accelerator.fp32_tflops", 0.0)) and peak != "fp32_tflops":
        # One ceiling serves all precisions, so that fp32's rate stays only if its peak changes.
        before = known.get("accelerator.ceiling", Accelerator.ceiling)
        fields["accelerator.fp32_tflops"] = _short(other * before / fields["accelerator.ceiling"])
    lines = [
        f"peak in {measured.precision}: {getattr(found, peak):.4g} TFLOP/s "
        + ("(data sheet)" if measured.known else "(reached)")
        + f"; the best product reaches {found.ceiling:.1%} of it, and sustains {found.sustained:.1%} of that",
        f"fused attention: {found.older:.1%} of the rate on the device that its kernel was written for",
        f"memory bandwidth: {found.bandwidth_gbs:.4g} GB/s, of which the cost model lets streams reach 85%",
        f"launch overhead: {found.launch_us:.3g} µs per kernel",
        f"host: copies of {measured.host.link_gbs:.4g} GB/s, AdamW's update at {measured.host.update_gbs:.4g} GB/s",
        f"disk of {measured.folder}: {measured.host.disk_gbs:.4g} GB/s, read and written by turns, "
        f"{measured.host.disk_gib:,.4g} GiB free"
        if measured.folder
        else "disk: not measured: no file could be made in the folder of temporary files",
    ]
    if shared.processes:
        lines += [
            f"dispatch: {found.host_us:.3g} µs per operation, {found.product_us:.3g} µs more per matrix product",
            f"one process with all {shared.node_cores} cores, in training: {shared.alone_products:.2f} × the product "
            f"rate of one of {shared.processes}, {shared.alone_streams:.2f} × its memory bandwidth",
        ]
    title = f"{found.name}, {measured.precision}: {setting}"
    svg = device_svg(title, measured.products, measured.attentions, measured.streams, rows)
    assessment = assess(Calibration(compute=quality), ("compute",), here=False)
    return CalibrationReport(
        "compute", setting, fields, rows, lines, svg, assessment, {"precision": measured.precision}
    )


def of_comm(groups: Sequence[Fitted], per_node: int, device: str, name: str, setting: str) -> CalibrationReport:
    """Reports `bench comm`, from the fits of all group sizes; `name` is the device's."""
    fields: dict[str, Any] = {"device": device, "devices_per_node": per_node}
    if device == "cpu":
        fields["sharing.linked"] = per_node
    lines = []
    qualities: dict[str, Any] = {}
    for place in ("intra", "inter"):
        if one := chosen(groups, place):
            fields |= {f"{place}.{name}": _short(getattr(one.link, name)) for name in ("gbs", "latency_us", "reached")}
            qualities[place] = one.quality
    quality = LinkCalibration(provenance=provenance(), **qualities)
    fields |= _calibration_fields("comm", quality)
    for one in groups:
        of = "one per node" if one.place == "inter" else "of a node"
        target = f" → cluster.{one.place}" if one is chosen(groups, one.place) else ""
        lines.append(
            f"{one.group.ranks} ranks, {of}: latency {one.link.latency_us:.4g} µs, {one.link.gbs:.4g} GB/s, "
            f"median error {one.quality.error:.1%}, spread {one.quality.spread:.1%}{target}"
        )
    rows = [row for one in groups for row in one.rows]
    more = {"groups": [_as_dict(one) for one in groups]}
    svg = link_svg(f"{name}: {setting}", [(one.machine, one.transfers) for one in groups])
    assessment = assess(Calibration(comm=quality), ("comm",), here=False)
    return CalibrationReport("comm", setting, fields, rows, lines, svg, assessment, more)


def _calibration_fields(measurement: Measurement, quality: ComputeCalibration | LinkCalibration) -> dict[str, Any]:
    """Returns a calibration as fields of a cluster, by dotted path, without parts that were not measured."""
    measured = [path for path in leaves(type(quality)) if getattr(get(quality, path.split(".")[0]), "rounds", 1)]
    return {f"calibration.{measurement}.{path}": _short(get(quality, path)) for path in measured}


def _as_dict(one: Fitted) -> dict[str, Any]:
    link: Link = one.link
    return {
        "ranks": one.group.ranks,
        "stride": one.group.stride,
        "place": one.place,
        "latency_us": link.latency_us,
        "gbs": link.gbs,
        "median_error": one.quality.error,
        "spread": one.quality.spread,
        "rounds": one.quality.rounds,
    }


def _short(value: Any) -> Any:
    """Returns a figure rounded to DIGITS, a name as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


TIMEOUT_S = 120.0
"""Seconds that a collective may wait for a peer. The longest call, a product of one thread, takes a few."""


def compute_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    precision: fit.Precision,
    quick: bool,
    known: Mapping[str, Any],
    store: Store | None = None,
) -> CalibrationReport:
    """Measures one device while all ranks do the same. `known` are the fields of the cluster's file; `store` is that of
    ranks that have met."""
    on_node = ranks.local_world or 1
    known = of_device(known, device.type, look_up(device, on_node).name)
    ceiling = known.get("accelerator.ceiling", 1.0)
    options = {"--precision": precision, "--quick": quick}
    with _measuring(ranks, device, threads, options, store) as progress:
        measured = measure(device, precision, on_node, quick, ceiling, progress)
    return of_compute(measured, known, device.type, f"{_processes(ranks, threads)}, {precision} on {device.type}")


def comm_report(
    ranks: Ranks,
    device: torch.device,
    threads: int,
    *,
    collectives: Sequence[Collective],
    quick: bool,
    store: Store | None = None,
) -> CalibrationReport:
    """Measures the links between the ranks. Raises JobError where there is one rank (comm.per_node_of)."""
    per_node = comm.per_node_of(ranks)
    options = {"--collectives": list(collectives), "--quick": quick}
    with _measuring(ranks, device, threads, options, store) as progress:
        fits = comm.measure(ranks, device, collectives, quick, progress)
    backend = dist.get_default_backend_for_device(device)
    name, setting = look_up(device, per_node).name, f"collectives of {backend}, {_processes(ranks, threads)}"
    return of_comm(fits, per_node, device.type, name, setting)


@contextmanager
def _measuring(
    ranks: Ranks, device: torch.device, threads: int, options: Facts, store: Store | None
) -> Iterator[Progress]:
    """Sets the threads and joins the process group for the block, and gives its progress, which rank 0 shows. Raises
    JobError if ranks differ in the `options`, RunError if they differ in versions or settings."""
    progress_of_rank = stderr_progress() if ranks.rank == 0 else nullcontext(silent)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        group = process_group(ranks, device=device, timeout_s=TIMEOUT_S, store=store)
        with group if ranks.world > 1 else nullcontext(), progress_of_rank as progress:
            agree(options, device)
            yield progress
    finally:
        torch.set_num_threads(before)


def _processes(ranks: Ranks, threads: int) -> str:
    return f"{ranks.world} process{'' if ranks.world == 1 else 'es'} of {counted(threads, 'thread')}"
