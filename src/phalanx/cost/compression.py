"""Gradients that replicas sum in a compressed form (parallel/compression.py): their bytes on the way and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from phalanx.blocks.parameters import trained_shapes
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.derived import Format, bucket_bytes, codes_of, gathers_parameters, has_factors, wire_width


class CompressedGradients(NamedTuple):
    """A model's gradients in a compressed form; with tp, whose parts of matrices have factors that are larger in
    proportion, as without."""

    sent: float
    """Bytes sent over those of the numbers."""
    kept: float
    """Elements of PowerSGD's errors and factors per gradient."""
    largest: float
    """Share of the gradients that the largest compressed matrix has."""


def compressed(model: ModelConfig, layout: Layout, width: int) -> CompressedGradients:
    """Returns the form of the gradients, of `width` bytes, of a model."""
    return _compressed(model, codes_of(layout), layout.compression_rank, width)


@lru_cache(256)
def _compressed(model: ModelConfig, codes: Format, rank: int, width: int) -> CompressedGradients:
    whole, sent, kept, largest = 0, 0.0, 0, 0
    for shape in trained_shapes(model).values():
        numbers, columns = prod(shape), shape[-1]
        rows, each = numbers // columns, float(width)
        if len(shape) > 1 and codes == "none" and has_factors(rows, columns, rank, width):
            each = (rows + columns) * rank * max(4, width) / numbers
            kept += numbers + columns * rank
        elif len(shape) > 1:
            each = wire_width(codes, width)
        largest = max(largest, numbers if each != width else 0)
        whole, sent = whole + numbers, sent + numbers * each
    return CompressedGradients(sent / whole / width, kept / whole, largest / whole)


def compression_bytes(
    model: ModelConfig, layout: Layout, shards: Sequence[tuple[Any, Any, Any]], width: int
) -> tuple[float, float]:
    """Returns the bytes that a rank keeps from step to step for the compression of its gradients, of `width` bytes per
    element, those of `shards` (cost/rank_memory.py), and those that it uses at the end of the backward pass."""
    if layout.compression == "none" or layout.summed_replicas == 1:
        return 0.0, 0.0
    own, wide = sum(trained / ranks for _, trained, ranks in shards), max(4, width)
    form = compressed(model, layout, width)
    if layout.compression == "powersgd":
        # Beside the state one matrix with its error, and a product of its size.
        return own * form.kept * wide, own * 2 * form.largest * wide
    # Codes of all buckets wait for the end of the backward pass, ZeRO-3's only for their own; the last one's are
    # made, or become numbers: three passes of its size in fp32.
    bucket = min(own, max(own * form.largest, bucket_bytes(layout) / width))
    waiting = bucket if gathers_parameters(layout) else own
    return 0.0, waiting * wire_width(codes_of(layout), width) + 3 * bucket * wide
