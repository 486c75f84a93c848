"""A row of a table of measured runs, as a prediction request and its measurement.

Tables are written for readers: columns are missing, models and devices have many names, and sources count FLOPs and
memory in their own ways. Missing values are filled in if possible, and `Reading.assumed` lists each of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cost.frameworks.calibration import calibrated
from phalanx.cost.spec import StepSpec, as_used_by
from phalanx.errors import JobError
from phalanx.validation import row_layout, row_machine, row_shape
from phalanx.validation.convention import Convention, convention_of, flops_per_step, peak_tflops
from phalanx.validation.row_cells import Cells

MemoryKind = Literal["allocated", "reserved", "device"]

LORA_SHARE = 2 / 3
"""Share of a step's FLOPs if only adapters train: without the gradients of weights, two of three products."""


@dataclass(frozen=True)
class Reading:
    """The contents of a row."""

    spec: StepSpec
    measured_s: float | None
    """Seconds of a step, measured or derived from measured tokens, TFLOP/s or MFU."""
    measured_from: str
    """The column that it is from; empty if nothing was measured."""
    measured_memory: float | None
    """Bytes of the fullest device."""
    memory_means: MemoryKind
    """Meaning of these bytes: allocated by tensors (torch's max_memory_allocated), reserved by the allocator
    (max_memory_reserved), or taken on the device (nvidia-smi)."""
    memory_unit: float
    """Bytes in the source's GB."""
    oom: bool
    """Whether it ran out of memory."""
    framework: str
    """Family of the framework."""
    source: str
    """Short name of the source."""
    convention: Convention
    parameters: float
    """Number of parameters as printed; 0 if it is not."""
    share: float
    """Share of a training step's time that this row measures; less than 1 if weights are frozen."""
    assumptions: tuple[str, ...]
    """Values that were filled in, and approximations."""

    @property
    def devices(self) -> int:
        return self.spec.layout.world

    @property
    def peak_tflops(self) -> float:
        """Peak in TFLOP/s per device of the source's MFU."""
        return peak_tflops(self.convention, self.spec.cluster.accelerator, self.spec.products)

    def tflops(self, seconds: float) -> float:
        """Returns TFLOP/s per device of a step that takes `seconds`, as the source counts."""
        sequences = self.spec.batch.global_batch
        flops = flops_per_step(self.convention.counts, self.spec.model, sequences, self.parameters)
        return self.share * flops / seconds / self.devices / 1e12

    def mfu_pct(self, seconds: float) -> float:
        """Returns MFU in percent: `tflops` over the peak that the source divides by."""
        return 100 * self.tflops(seconds) / self.peak_tflops

    def tokens_per_s(self, seconds: float) -> float:
        """Returns tokens per second per device."""
        return self.spec.batch.global_batch * self.spec.model.seq_len / seconds / self.devices


def read(row: Mapping[str, str]) -> Reading:
    """Reads a row. Raises JobError with every reason why it cannot be expressed."""
    cells = Cells(row)
    cells.check()
    framework = row_machine.framework_of(cells)
    cluster = row_machine.cluster_of_row(cells)
    model = row_shape.model_of(cells, framework, row_layout.degree(cells, "pp") or 1)
    if cells.problems or not model or not cluster:
        raise JobError(cells.problems)
    found = row_layout.layout_of(cells, model, cluster, framework)
    products = row_machine.products_of(cells, cluster, framework)
    if not found:
        raise JobError(cells.problems)
    layout, batch = found
    width = 4 if products == "fp32" else 2
    cluster, program = as_used_by(layout.world, cluster, calibrated(framework, cluster.accelerator))
    spec = StepSpec(model, cluster, layout, batch, products, width, program)
    reading = _measured(cells, _unmeasured(cells, spec, framework))
    if cells.problems:
        raise JobError(cells.problems)
    return replace(reading, assumptions=tuple(cells.assumed))


def _unmeasured(cells: Cells, spec: StepSpec, framework: str) -> Reading:
    share = 1.0
    if re.search("(?<![a-z])lora(?![a-z])", cells.description):
        share = LORA_SHARE
        cells.assume(
            "LoRA: a training step without the gradients of weights, two thirds of it; memory is not predicted"
        )
    means, unit = _memory(cells.description)
    return Reading(
        spec=spec,
        measured_s=None,
        measured_from="",
        measured_memory=None,
        memory_means=means,
        memory_unit=unit,
        oom=False,
        framework=framework,
        source=source_of(cells),
        convention=convention_of(cells.description),
        parameters=(cells.number("n_params_b") or 0) * 1e9,
        share=share,
        assumptions=(),
    )


def _measured(cells: Cells, reading: Reading) -> Reading:
    """Returns the reading with its measurements: seconds, or figures that determine them."""
    seconds: dict[str, float] = {}
    for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"):
        if (value := cells.number(name)) is not None:
            seconds[name] = _seconds(reading, name, value)
    if seconds:
        first = next(iter(seconds))
        reading = replace(reading, measured_s=seconds[first], measured_from=first)
        for name, other in seconds.items():
            if not 1 / 1.5 < other / seconds[first] < 1.5:
                cells.assume(f"{first} and {name} do not agree: by a factor of {other / seconds[first]:.2g}")
    gigabytes = cells.number("peak_mem_gb")
    oom = re.search(r"\boom", f"{cells.description} {cells.text('peak_mem_gb').lower()}")
    near = re.search(r"(close to|near|almost|before) oom", cells.description)
    return replace(
        reading,
        measured_memory=None if gigabytes is None else gigabytes * reading.memory_unit,
        oom=bool(oom) and not near and reading.measured_s is None,
    )


def _seconds(reading: Reading, name: str, value: float) -> float:
    """Returns the seconds of a step that correspond to a measured figure."""
    if name == "step_time_s":
        return value
    if name == "tokens_per_s_per_gpu":
        return reading.tokens_per_s(1.0) / value
    return (reading.tflops(1.0) if name == "tflops_per_gpu" else reading.mfu_pct(1.0)) / value


def source_of(cells: Cells) -> str:
    """Returns a short name of the source: the prefix of the row's id, else the first word of its source."""
    named = re.sub(r"[-_]?[0-9]+$", "", cells.text("row_id"))
    return named or re.split(r"[ @,;]", cells.text("source"))[0] or "unnamed"


def _memory(description: str) -> tuple[MemoryKind, float]:
    """Returns the meaning of a source's memory, and the bytes in its GB: GiB for nvidia-smi and torch's summaries."""
    if "nvidia-smi" in description or "bigscience" in description:
        return "device", 2**30
    if "max allocated" in description or "max_memory_allocated" in description:
        return "allocated", 2**30
    if "reserved" in description or "torchtitan" in description:
        return "reserved", 2**30
    if "zero bubble" in description or "2401.10241" in description:
        # State and activations by formula are within 3 % of its table 4 when its GB are 10^9 bytes.
        return "allocated", 1e9
    return "reserved", 2**30
