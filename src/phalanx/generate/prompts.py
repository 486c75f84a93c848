"""Reads a file of prompts: one per line, or JSON lines."""

from __future__ import annotations

from pathlib import Path

from phalanx.bounded import parse_json, read_bytes
from phalanx.errors import DataError, NotFoundError
from phalanx.nearest import near_file


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file. In a .jsonl file each line is a JSON string, or an object with a `prompt`; in any
    other each line that is not blank is a prompt. Raises DataError with every line that is not one."""
    try:
        lines = read_bytes(path).decode().splitlines()
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
        if path.suffix != ".jsonl":
            prompts.append(line)
            continue
        try:
            prompts.append(_prompt_of(parse_json(line)))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        raise DataError("; ".join(problems[:10]) + more)
    if not prompts:
        raise NotFoundError(f"{path} has no prompts: give one per line, or JSON lines in a .jsonl file")
    return prompts


def _prompt_of(row: object) -> str:
    if isinstance(row, dict):
        row = row.get("prompt")
    if not isinstance(row, str) or not row:
        raise ValueError('expected a JSON string, or an object with a "prompt" that is one')
    return row
