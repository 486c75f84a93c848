"""Positive parameters of a model, fitted to measurements by their relative errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, log

HUBER_DELTA = 0.1
"""Relative error up to which its square counts; above, its size (Huber 1964), so that outliers do not bend the fit."""
MAX_ITERATIONS = 200
"""Most iterations: about ten are usual."""
MAX_DAMPING, CONVERGED_STEP = 1e9, 1e-9
"""Damping at which the fit gives up, and the relative step below which it has converged."""


def least_squares(errors: Callable[..., list[float]], start: Sequence[float]) -> list[float]:
    """Returns the positive parameters that minimise `errors(*parameters)`, logarithms of predicted over measured
    values: Levenberg-Marquardt steps on the logarithms of the parameters, with derivatives by differences and Huber's
    weights."""
    at = [log(value) for value in start]
    residuals = errors(*map(exp, at))
    damping = 1e-3
    for _ in range(MAX_ITERATIONS):
        slopes = [_derivative(errors, at, residuals, place) for place in range(len(at))]
        while damping < MAX_DAMPING:
            step = _step(slopes, residuals, damping)
            trial = [value + move for value, move in zip(at, step, strict=True)]
            tried = errors(*map(exp, trial))
            if _loss(tried) < _loss(residuals):
                break
            damping *= 5
        else:
            break  # no smaller step is better either
        at, residuals, damping = trial, tried, max(damping / 5, 1e-9)
        if max(map(abs, step)) < CONVERGED_STEP:
            break
    return [exp(value) for value in at]


def _step(slopes: Sequence[Sequence[float]], residuals: Sequence[float], damping: float) -> list[float]:
    """Returns the step that solves the normal equations with damping on their diagonal, clipped to a factor of e."""
    weights = [min(1.0, HUBER_DELTA / abs(error)) if error else 1.0 for error in residuals]
    square = [[_weighted(a, b, weights) for b in slopes] for a in slopes]
    for place, row in enumerate(square):
        row[place] += damping * row[place] + 1e-12  # a parameter without influence stays
    step = _solve(square, [-_weighted(slope, residuals, weights) for slope in slopes])
    return [max(-1.0, min(1.0, value)) for value in step]


def _derivative(
    errors: Callable[..., list[float]], at: Sequence[float], residuals: Sequence[float], place: int
) -> list[float]:
    """Returns the derivative of every error by the logarithm of one parameter."""
    little = 1e-5
    moved = [value + (little if other == place else 0) for other, value in enumerate(at)]
    return [(b - a) / little for a, b in zip(residuals, errors(*map(exp, moved)), strict=True)]


def _loss(errors: Iterable[float]) -> float:
    return sum(e * e / 2 if abs(e) <= HUBER_DELTA else HUBER_DELTA * (abs(e) - HUBER_DELTA / 2) for e in errors)


def _weighted(a: Sequence[float], b: Sequence[float], weights: Sequence[float]) -> float:
    return sum(x * y * weight for x, y, weight in zip(a, b, weights, strict=True))


def _solve(square: list[list[float]], right: list[float]) -> list[float]:
    """Solves a few equations by Gaussian elimination without pivoting: the matrix is positive definite."""
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
