"""Verifiable rewards of completions: built-in ones, and functions of the user. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from phalanx.config.job import GrpoOptions
from phalanx.errors import JobError
from phalanx.registry import function_of, package_code

Reward = Callable[[str, str, str], float]
"""Returns the reward of a completion, from prompt, completion and answer."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:/\d+)?")


def reward_of(options: GrpoOptions) -> Reward:
    """Returns the reward that a job asks for. Raises JobError if a function of the user cannot be imported; what it
    returns later must be a finite number, or its call raises JobError."""
    match options.reward:
        case "exact":
            return lambda _, completion, answer: float(completion.strip() == answer.strip())
        case "number":
            return lambda _, completion, answer: float(same_number(completion, answer))
        case "regex":
            pattern = re.compile(options.pattern)
            return lambda _, completion, answer: float(found_last(pattern, completion) == answer.strip())
        case place:
            function = function_of(place, "train.grpo.reward")
            return lambda *texts: _finite(place, function, texts)


def same_number(completion: str, answer: str) -> bool:
    """Returns whether the last number of a completion equals the last one of the answer, exactly: 1,000 is 1000, and
    1/2 is 0.5."""
    found, right = (_NUMBER.findall(text) for text in (completion, answer))
    return bool(found and right) and _value(found[-1]) == _value(right[-1])


def _value(text: str) -> Fraction | None:
    try:
        top, _, bottom = text.replace(",", "").partition("/")
        return Fraction(top) / Fraction(bottom or 1)
    except ZeroDivisionError:
        return None


def found_last(pattern: re.Pattern[str], completion: str) -> str | None:
    """Returns the first group of a pattern's last match, or all of that without groups; None without a match."""
    found = [*pattern.finditer(completion)]
    return (found[-1][1 if pattern.groups else 0] or "").strip() if found else None


def _finite(place: str, function: Callable[..., Any], texts: tuple[str, ...]) -> float:
    with package_code(f"train.grpo.reward {place}", raising=JobError):
        found = function(*texts)
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise JobError(f"train.grpo.reward {place} returned {found!r:.80} for {texts[1]!r:.80}, not a finite number")
    return float(found)
