"""Positive parameters of a model, fitted to measurements by their relative errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, log

TOLERATED = 0.1
"""Relative error up to which its square counts; above, its size (Huber 1964), so that a measurement which the model
does not understand does not bend the rest."""
STEPS = 200
"""At most: about ten are usual."""
STIFF, CLOSE = 1e9, 1e-9
"""Damping at which there is no step left to try, and the relative step below which the next one changes nothing."""


def least_squares(errors: Callable[..., list[float]], start: Sequence[float]) -> list[float]:
    """Positive parameters for which `errors(*parameters)`, logarithms of predicted over measured values, are least:
    Levenberg and Marquardt's steps on the logarithms of the parameters, with derivatives by differences and Huber's
    weights."""
    at = [log(value) for value in start]
    found = errors(*map(exp, at))
    damping = 1e-3
    for _ in range(STEPS):
        slopes = [_slope(errors, at, found, place) for place in range(len(at))]
        while damping < STIFF:
            step = _step(slopes, found, damping)
            trial = [value + move for value, move in zip(at, step, strict=True)]
            tried = errors(*map(exp, trial))
            if _loss(tried) < _loss(found):
                break
            damping *= 5
        else:
            break  # no step, however small, is better
        at, found, damping = trial, tried, max(damping / 5, 1e-9)
        if max(map(abs, step)) < CLOSE:
            break
    return [exp(value) for value in at]


def _step(slopes: Sequence[Sequence[float]], found: Sequence[float], damping: float) -> list[float]:
    """From the normal equations, their diagonal made larger by the damping; at most a factor of e."""
    weights = [min(1.0, TOLERATED / abs(error)) if error else 1.0 for error in found]
    square = [[_weighted(a, b, weights) for b in slopes] for a in slopes]
    for place, row in enumerate(square):
        row[place] += damping * row[place] + 1e-12  # a parameter on which nothing depends stays
    step = _solve(square, [-_weighted(slope, found, weights) for slope in slopes])
    return [max(-1.0, min(1.0, value)) for value in step]


def _slope(errors: Callable[..., list[float]], at: Sequence[float], found: Sequence[float], place: int) -> list[float]:
    """Of every error, by the logarithm of one parameter."""
    little = 1e-5
    moved = [value + (little if other == place else 0) for other, value in enumerate(at)]
    return [(b - a) / little for a, b in zip(found, errors(*map(exp, moved)), strict=True)]


def _loss(errors: Iterable[float]) -> float:
    return sum(e * e / 2 if abs(e) <= TOLERATED else TOLERATED * (abs(e) - TOLERATED / 2) for e in errors)


def _weighted(a: Sequence[float], b: Sequence[float], weights: Sequence[float]) -> float:
    return sum(x * y * weight for x, y, weight in zip(a, b, weights, strict=True))


def _solve(square: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination of a few equations, positive on the diagonal."""
    rows = [[*values, value] for values, value in zip(square, right, strict=True)]
    for pivot, row in enumerate(rows):
        for other in rows[pivot + 1 :]:
            factor = other[pivot] / row[pivot]
            other[:] = [a - factor * b for a, b in zip(other, row, strict=True)]
    solution: list[float] = []
    for pivot in reversed(range(len(rows))):
        known = sum(a * b for a, b in zip(rows[pivot][pivot + 1 : -1], solution, strict=True))
        solution.insert(0, (rows[pivot][-1] - known) / rows[pivot][pivot])
    return solution
