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
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.validation import row_layout, row_machine, row_shape
from phalanx.validation.convention import Convention, convention_of, flops_per_step, peak_tflops
from phalanx.validation.row_cells import Cells

Means = Literal["allocated", "reserved", "device"]

LORA = 2 / 3
"""Of a step's FLOPs what is left where only adapters train: no gradients of the weights, one of three products."""


@dataclass(frozen=True)
class Reading:
    """The contents of a row."""

    spec: StepSpec
    measured_s: float | None
    """Seconds of a step: measured, or from the tokens, TFLOP/s or MFU that were."""
    measured_from: str
    """The column that it is from; empty where nothing was measured."""
    measured_memory: float | None
    """Bytes of the fullest device."""
    memory_means: Means
    """What these bytes are: what the program's tensors took (torch's max_memory_allocated), what its allocator held
    (max_memory_reserved), or what the device said was taken (nvidia-smi)."""
    memory_unit: float
    """Bytes of the source's GB."""
    oom: bool
    """It ran out of memory."""
    framework: str
    """The family of the program."""
    source: str
    """A short name of the source."""
    convention: Convention
    parameters: float
    """Parameters as printed, 0 where they are not."""
    share: float
    """Of a training step's time what this is: less than 1 where weights are frozen."""
    assumptions: tuple[str, ...]
    """What was filled in, or stands for something else."""

    @property
    def devices(self) -> int:
        return self.spec.layout.world

    @property
    def peak_tflops(self) -> float:
        """Peak of a device in TFLOP/s that the source's MFU is against."""
        return peak_tflops(self.convention, self.spec.cluster.accelerator, self.spec.products)

    def tflops(self, seconds: float) -> float:
        """TFLOP/s per device of a step that takes `seconds`, as the source counts."""
        sequences = self.spec.batch.global_batch
        flops = flops_per_step(self.convention.counts, self.spec.model, sequences, self.parameters)
        return self.share * flops / seconds / self.devices / 1e12

    def mfu_pct(self, seconds: float) -> float:
        """MFU in percent: `tflops` over the peak that the source divides by."""
        return 100 * self.tflops(seconds) / self.peak_tflops

    def tokens_per_s(self, seconds: float) -> float:
        """Returns tokens per second and device."""
        return self.spec.batch.global_batch * self.spec.model.seq_len / seconds / self.devices


def read(row: Mapping[str, str]) -> Reading:
    """Reads a row. Raises JobError with every reason why it cannot be expressed."""
    cells = Cells(row)
    cells.check()
    program = row_machine.program_of(cells)
    cluster = row_machine.cluster_of_row(cells)
    model = row_shape.model_of(cells, program, row_layout.degree(cells, "pp") or 1)
    if cells.problems or not model or not cluster:
        raise JobError(cells.problems)
    found = row_layout.layout_of(cells, model, cluster, program)
    products = row_machine.products_of(cells, cluster, program)
    if not found:
        raise JobError(cells.problems)
    layout, batch = found
    width = 4 if products == "fp32" else 2
    spec = StepSpec(model, cluster, layout, batch, products, width, calibrated(program, cluster.accelerator))
    reading = _measured(cells, _unmeasured(cells, spec, program))
    if cells.problems:
        raise JobError(cells.problems)
    return replace(reading, assumptions=tuple(cells.assumed))


def _unmeasured(cells: Cells, spec: StepSpec, program: str) -> Reading:
    share = 1.0
    if re.search("(?<![a-z])lora(?![a-z])", cells.told):
        share = LORA
        cells.assume("LoRA: a training step without the gradients of weights, two thirds of it; memory is not told")
    means, unit = _memory(cells.told)
    return Reading(
        spec=spec,
        measured_s=None,
        measured_from="",
        measured_memory=None,
        memory_means=means,
        memory_unit=unit,
        oom=False,
        framework=program,
        source=source_of(cells),
        convention=convention_of(cells.told),
        parameters=(cells.number("n_params_b") or 0) * 1e9,
        share=share,
        assumptions=(),
    )


def _measured(cells: Cells, reading: Reading) -> Reading:
    """With what was measured: seconds, or what they follow from."""
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
    said = re.search(r"\boom", f"{cells.told} {cells.text('peak_mem_gb').lower()}")
    near = re.search(r"(close to|near|almost|before) oom", cells.told)
    return replace(
        reading,
        measured_memory=None if gigabytes is None else gigabytes * reading.memory_unit,
        oom=bool(said) and not near and reading.measured_s is None,
    )


def _seconds(reading: Reading, name: str, value: float) -> float:
    """Seconds of a step that a measured figure means."""
    if name == "step_time_s":
        return value
    if name == "tokens_per_s_per_gpu":
        return reading.tokens_per_s(1.0) / value
    return (reading.tflops(1.0) if name == "tflops_per_gpu" else reading.mfu_pct(1.0)) / value


def source_of(cells: Cells) -> str:
    """Returns a short name of the source: the prefix of the row's id, else the first word of its source."""
    named = re.sub(r"[-_]?[0-9]+$", "", cells.text("row_id"))
    return named or re.split(r"[ @,;]", cells.text("source"))[0] or "unnamed"


def _memory(told: str) -> tuple[Means, float]:
    """What a source's memory is, and the bytes of its GB. nvidia-smi and torch's own summaries count in GiB."""
    if "nvidia-smi" in told or "bigscience" in told:
        return "device", 2**30
    if "max allocated" in told or "max_memory_allocated" in told:
        return "allocated", 2**30
    if "reserved" in told or "torchtitan" in told:
        return "reserved", 2**30
    if "zero bubble" in told or "2401.10241" in told:
        # State and activations by formula are within 3 % of its table 4 when its GB are 10^9 bytes.
        return "allocated", 1e9
    return "reserved", 2**30
