"""Elementwise functions of numbers or arrays: a formula written with them prices one layout for `predict` and many at
once for the planner's bounds."""

from __future__ import annotations

from typing import Any

import numpy as np


def larger(first: Any, second: Any) -> Any:
    """Returns the larger of two numbers, or of each pair of elements."""
    return np.maximum(first, second) if _has_array(first, second) else max(first, second)


def smaller(first: Any, second: Any) -> Any:
    """Returns the smaller of two numbers, or of each pair of elements."""
    return np.minimum(first, second) if _has_array(first, second) else min(first, second)


def rounded(number: Any) -> Any:
    """Returns the nearest whole number of a number, or of each element; halves go to even ones."""
    return np.round(number) if _has_array(number) else round(number)


def quotient(dividend: Any, divisor: Any) -> Any:
    """Returns one number divided by another, or element by element; 0 where the divisor is 0."""
    if not _has_array(dividend, divisor):
        return dividend / divisor if divisor else 0.0
    return np.divide(dividend, divisor, out=np.zeros(np.broadcast(dividend, divisor).shape), where=divisor != 0)


def _has_array(*numbers: Any) -> bool:
    return any(isinstance(number, np.ndarray) for number in numbers)
