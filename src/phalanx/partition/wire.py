"""Bytes of parameters and gradients that are quantised to be sent (ZeRO++'s qwZ and qgZ: Wang et al. 2023, sections 3.1
and 3.3).

Each rank's share of a matrix is sent as blocks of BLOCK consecutive elements, the last one shorter: a code per element
and a scale per block. A block never spans two parameters. Vectors (norms, biases) are sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

BLOCK = 256
"""Elements that share a scale."""
SCALE_BYTES = 4
"""Bytes of a scale, in fp32."""
Format = Literal["none", "int8", "int4"]
"""Codes of 8 bits, -127 to 127; of 4 bits, -7 to 7; none: numbers as they are."""
BITS = {"int8": 8, "int4": 4}
LARGEST = {"int8": 127, "int4": 7}
"""The largest code: a block's scale is its largest magnitude over this, so an element's error is at most half a scale.
"""


def sent_as(shape: Sequence[int], format: Format) -> Format:
    """Returns the format of a parameter of this shape: vectors are not quantised."""
    return format if len(shape) > 1 else "none"


def wire_bytes(elements: int, format: Format, width: int) -> int:
    """Returns the bytes in which a rank's share of a parameter is sent, `width` per element if it is not quantised."""
    if format == "none":
        return elements * width
    return -(-elements * BITS[format] // 8) + -(-elements // BLOCK) * SCALE_BYTES


def wire_width(format: Format, width: Any) -> Any:
    """Returns the bytes per element of large matrices."""
    return width if format == "none" else BITS[format] / 8 + SCALE_BYTES / BLOCK
