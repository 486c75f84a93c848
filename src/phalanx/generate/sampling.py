"""How the tokens of a text are chosen. Imports no torch, so that wrong values are refused at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bounded import parse_json, read_text
from phalanx.data.formats import JSONL_SUFFIXES, rows_in_text
from phalanx.errors import DataError, NotFoundError
from phalanx.nearest import near_file


@dataclass(frozen=True)
class Sampling:
    """How many tokens are generated, and how each is chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keeps that many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keeps the fewest of the likeliest tokens whose probabilities reach it; 1: all (Holtzman et al. 2020)."""
    seed: int = 1337
    """The same seed gives the same text."""
    sample: int = 0
    """Number of the text among several of the same prompt and seed."""

    def problems(self) -> Iterator[str]:
        """Yields every value that makes no sense."""
        if self.max_new_tokens < 0:
            yield f"max_new_tokens={self.max_new_tokens}: it must be 0 or more"
        if not 0 <= self.temperature < float("inf"):
            yield f"temperature={self.temperature}: it must be 0 (the likeliest token) or more"
        if self.top_k < 0:
            yield f"top_k={self.top_k}: it must be 0 (all tokens) or more"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p}: it must be above 0 and at most 1 (all tokens)"


SETTINGS = {"max_new_tokens", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "n"}
"""Keys of requests to servers; in a file of prompts they would have no effect."""


def prompt_problems(prompt: Sequence[int], vocab: int) -> Iterator[str]:
    """Yields what is wrong with a prompt's tokens."""
    if not len(prompt):
        yield "the prompt is empty; give at least one token"
    elif min(prompt) < 0 or max(prompt) >= vocab:
        yield (
            f"the prompt contains tokens {min(prompt)} to {max(prompt)}, but the model's are 0 to {vocab - 1}: encode "
            "it with the tokenizer that the model was trained with"
        )


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file. In a .jsonl file each line is a JSON string, or an object with a `prompt`; in any
    other each line that is not blank is a prompt. Raises DataError with every line that is not one, and for JSON under
    another ending, which would be the prompts as it stands."""
    try:
        lines = re.split(r"\r\n?|\n", read_text(path))  # other ends of lines may stand in a prompt
    except FileNotFoundError:
        raise NotFoundError(f"--prompts {path}: there is no such file{near_file(path)}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the prompts {path}: {error}") from error
    prompts: list[str] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix.lower() not in JSONL_SUFFIXES:
            json_file = path.suffix.lower() == ".json" and line.lstrip()[0] in "{["
            if not prompts and (json_file or "prompt" in rows_in_text(path)):
                raise DataError(f"--prompts {path} is JSON: write one prompt per line into a .jsonl file")
            prompts.append(line)
            continue
        try:
            row = parse_json(line)
            if isinstance(row, dict):
                if own := [name for name in row if name in SETTINGS]:
                    raise ValueError(f"{', '.join(own)}: options set these, for all prompts")
                if lost := [name for name in ("system", "messages", "tools", "suffix") if row.get(name)]:
                    raise ValueError(f"{', '.join(lost)}: a prompt is a text alone; phalanx serve answers messages")
                row = row.get("prompt")
            if not isinstance(row, str) or not row:
                raise ValueError('expected a JSON string, or an object with a "prompt" that is one')
            prompts.append(row)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        raise DataError("; ".join(problems[:10]) + more)
    if not prompts:
        raise NotFoundError(f"{path} has no prompts: give one per line, or JSON lines in a .jsonl file")
    return prompts
