"""Number formats: their names in jobs, in torch and in files of weights, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "auto"]
"""Formats of training (`train.precision`); auto is one of the others as soon as a job is loaded."""
WeightFormat = Literal["fp64", "fp32", "bf16", "fp16"]
"""Formats of weights in files."""
MeasuredPrecision = Literal["fp32", "bf16", "fp16"]
"""Formats of products that `phalanx bench` measures."""
Products = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
"""Formats of matrix products, by which a device has peaks."""
Fp8Scaling = Literal["rowwise", "tensorwise", "mxfp8"]
FP8_UNITS: Mapping[Fp8Scaling, int] = {"rowwise": 16, "tensorwise": 16, "mxfp8": 32}
"""Elements: torch multiplies matrices in 8 bits whose inner dimension and whose columns are multiples of it. Each 32
elements of a row have a scale with mxfp8."""
HALF = ("bf16", "fp16")
SCALED = "fp16"
"""The format whose gradients underflow and overflow: its loss is scaled, and a step that overflows is skipped."""


@dataclass(frozen=True)
class NumberFormat:
    """The format in which parameters are kept while they train."""

    bytes: int
    """Per element."""
    torch: str
    """The name of torch's type."""
    stored: str
    """The name in files of safetensors."""


FORMATS: Mapping[Precision, NumberFormat] = {
    "fp64": NumberFormat(8, "float64", "F64"),
    "fp32": NumberFormat(4, "float32", "F32"),
    "bf16": NumberFormat(2, "bfloat16", "BF16"),
    "fp16": NumberFormat(2, "float16", "F16"),
    "fp8": NumberFormat(2, "bfloat16", "BF16"),
}
"""Formats by `train.precision`; with fp8 only products are in 8 bits."""
STORED: Mapping[str, str] = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Formats of weights in files by their names in jobs."""
PRODUCT_BYTES: Mapping[str, float] = {"fp4": 0.5, "fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of an operand, narrowest formats first."""
