"""Likely meanings of a wrong value or path and nearest legal values, for error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from math import isqrt
from pathlib import Path

_MOST_RUNS = 8
"""Most runs that a message lists."""
_FEWEST_LETTERS = 3
"""Shorter names are no slips of others."""
_FEWEST_STRICTLY = 4
"""A name has more letters for a slip in it to be sure."""
_ENDING = 3
"""Most letters of an ending (`training` is `train`)."""
_LONGEST = 500
"""Longer names mean none of ours, and comparing them takes seconds."""
_SURE_LETTERS = 8
"""Shorter names have the first letter of what they mean."""


def nearest(name: str, choices: Iterable[str], *, strictly: bool = False) -> str | None:
    """Returns the choice that a mistyped name means, or None if none is close: one with the same numbers (`h100` is no
    slip of `h800`) and few slips of the pen, one per four letters, or, unless `strictly`, one of which it is a part at
    a word's boundary (`qwen3-30b` of `qwen3-30b-a3b`). Strictly, one slip is allowed."""
    if len(name) > _LONGEST:
        return None
    ranked = [(rank, choice) for choice in choices if (rank := _rank(name, choice, strictly)) is not None]
    return min(ranked, key=lambda each: each[0])[1] if ranked else None


def _rank(name: str, choice: str, strictly: bool) -> tuple[int, int, bool] | None:
    """Returns the order among the choices that a name may mean, or None if it does not mean this one."""
    typed, known = _letters(name), _letters(choice)
    if typed == known:
        return 0, 0, False
    (words, numbers), (known_words, known_numbers) = _parts(name), _parts(choice)
    same = all(a == b for a, b in zip(numbers, known_numbers, strict=False)) or (
        known.startswith(typed) and len(typed) > _FEWEST_STRICTLY
    )
    if not typed or not known or not same:
        return None
    most = max(1, len(typed) // 4) if len(words) >= _FEWEST_LETTERS else 0
    most = int(len(typed) > _FEWEST_STRICTLY) if strictly else most
    comparable = len(numbers) == len(known_numbers) or words == known_words
    first = len(typed) >= _SURE_LETTERS or typed[0] == known[0]
    if comparable and first and abs(len(typed) - len(known)) <= most and (slips := _slips(typed, known)) <= most:
        return 0, slips, not choice.startswith(name)
    return None if strictly or not _is_part(name, choice) else (1, abs(len(known) - len(typed)), False)


def _parts(name: str) -> tuple[str, list[str]]:
    """Returns the letters of a name without its digits, and its numbers."""
    return re.sub("[^a-z]", "", name.lower()), re.findall(r"[0-9]+(?:[.][0-9]+)?", name)


def _is_part(name: str, choice: str) -> bool:
    """Returns whether a choice begins with a name, has its words in a row, or is it without numbers at the end."""
    words, known = re.findall(r"[a-z0-9.]+", name.lower()), re.findall(r"[a-z0-9.]+", choice.lower())
    typed, meant = _letters(name), _letters(choice)
    if min(len(typed), len(meant)) < _FEWEST_LETTERS:
        return len(meant) == len(typed) + 1 > 2 and meant[0] == typed[0] and _slips(typed, meant) == 1
    rows = (known[start : start + len(words)] for start in range(len(known)))
    rest = words[len(known) :]
    return (
        meant.startswith(typed)
        or (typed.startswith(meant) and len(meant) > _FEWEST_STRICTLY and len(typed) - len(meant) <= _ENDING)
        or (len(name) > 3 and words in rows)
        or (words[: len(known)] == known and all(any(map(str.isdigit, word)) for word in rest))
    )


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _slips(one: str, other: str) -> int:
    """Returns the letters that are wrong, missing, too many or exchanged with the next one (the distance of Damerau and
    Levenshtein)."""
    before, last = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, known in enumerate(other, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != known)))
            if i > 1 and j > 1 and letter == other[j - 2] and known == one[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of a message about a mistyped name, "; did you mean gpt2?", or nothing if no choice is close."""
    meant = nearest(name, choices)
    return f"; did you mean {meant}?" if meant else ""


def nearest_divisors(n: int, wanted: int) -> str:
    """Returns the divisors of n that are nearest to `wanted`, as text: "2, 4, 8"."""
    return nearest_of(divisors(n), wanted)


def divisors(n: int) -> list[int]:
    """Returns every divisor of n >= 1 in ascending order, in sqrt(n) steps."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def nearest_of(legal: Iterable[int], wanted: int, count: int = 3) -> str:
    """Returns the numbers that are nearest to `wanted`, as text."""
    near = sorted(sorted(legal, key=lambda d: (abs(d - wanted), d))[:count])
    return ", ".join(map(str, near))


def multiples(n: int, near: int, count: int = 4) -> list[int]:
    """Returns up to 2 × `count` positive multiples of n >= 1 around `near`."""
    low = near // n
    return [n * factor for factor in range(max(1, low - count + 1), low + count + 1)]


class Misfit(str):
    """A message about numbers that do not fit each other: their equation, and the nearest values of a field that fit
    it. `check/job.py` narrows the values to those that are legal in the whole job."""

    equation: str
    choices: dict[str, list[int]]
    """Values by the dotted path of each field whose change alone makes the equation hold, the field at fault first."""
    after: str
    wanted: int

    def __new__(cls, equation: str, wanted: int, choices: Mapping[str, Iterable[int]], after: str = "") -> Misfit:
        """Returns the message. `wanted` is the value of the first field; `after` is said behind its nearest values."""
        listed = {path: list(values) for path, values in choices.items()}
        path, values = next(iter(listed.items()))
        found = super().__new__(cls, misfit(equation, path, nearest_of(values, wanted)) + after)
        found.equation, found.choices, found.after, found.wanted = equation, listed, after, wanted
        return found

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Travels between processes, in an error, as its text."""
        return str, (str(self),)


def misfit(equation: str, path: str, values: str) -> str:
    """Returns the words about an equation that does not hold, and values of the field at `path` with which it does."""
    return f"{equation}; nearest {path.rpartition('.')[2]}: {values}"


def near_file(path: Path) -> str:
    """Returns the end of a message about a file that is not there, "; did you mean data/train.txt?", or nothing."""
    if os.path.islink(path):
        return f": it is a link to {os.readlink(path)}, which is not there"
    if set(path.name) & set("*?["):
        return "; wildcards are not expanded: name one file or folder"
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        if path.parent == Path("examples"):
            return "; `phalanx examples all` writes the example jobs"
        return f": there is no folder {path.parent}"
    meant = nearest(path.name, names)
    return f"; did you mean {path.parent / meant}?" if meant else ""


def no_run(path: Path, lacks: str) -> str:
    """Returns the message about a path that is no run's directory, since it has no such files, with the nearest run
    beside it or in runs/."""
    known = sorted({str(config.parent) for at in (path.parent, Path("runs")) for config in at.glob("*/config.yaml")})
    by_name = {Path(run).name: run for run in known}
    meant = nearest(path.name, by_name)
    more = f" and {len(known) - _MOST_RUNS} more" if len(known) > _MOST_RUNS else ""
    hint = f"; did you mean {by_name[meant]}?" if meant else ""
    hint = hint or (f"; there are: {', '.join(known[:_MOST_RUNS])}{more}" if known else "")
    what = f"it has {lacks}" if os.path.isdir(path) else "there is no such folder"
    what = "it is a file" if os.path.isfile(path) else what
    run, step = path.parent.parent, re.fullmatch("step-0*([0-9]+)", path.name)
    if step and os.path.exists(run / "config.yaml"):
        what, hint = "it is a checkpoint", f": give {run}, and --step {step[1]}"
    return f"no run in {path}: {what}{hint}"
