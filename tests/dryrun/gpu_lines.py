"""The statements of src that only a GPU reaches, and which of them ran."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import phalanx

ROOT = Path(phalanx.__file__).parent
ROOMS = ("comm", "checkpoint", "model", "optimizers", "parallel", "train")
"""The rooms that a step runs in."""
Place = tuple[str, str]
"""A file below src/phalanx, and a function in it."""


def statements() -> dict[str, dict[int, str]]:
    """The statements behind a condition that only tensors on a GPU meet, by file and line, with their functions."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if lines := dict(_within(ast.parse(path.read_text(encoding="utf-8")).body, "", gpu=False)):
                found[str(path.relative_to(ROOT))] = lines
    return found


def _within(block: list[ast.stmt], function: str, *, gpu: bool) -> Iterator[tuple[int, str]]:
    for each in block:
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            yield from _within(each.body, f"{function}.{each.name}".strip("."), gpu=gpu)
            continue
        is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if gpu and not is_text and not isinstance(each, (ast.Import, ast.ImportFrom)):
            yield each.lineno, function
        sign = _sign(each.test) if isinstance(each, ast.If) else 0
        for name in ("body", "orelse", "finalbody"):
            there = gpu or (name == "body" and sign > 0) or (name == "orelse" and sign < 0)
            yield from _within(getattr(each, name, None) or [], function, gpu=there)
        for part in (*getattr(each, "handlers", ()), *getattr(each, "cases", ())):
            yield from _within(part.body, function, gpu=gpu)
        if isinstance(each, ast.If) and sign < 0 and isinstance(each.body[-1], (ast.Return, ast.Raise, ast.Continue)):
            gpu = True  # what comes after it


def _sign(test: ast.expr) -> int:
    """1 if only a GPU meets a condition, -1 if only a CPU does, 0 if either may."""
    match test:
        case ast.UnaryOp(ast.Not(), inside):
            return -_sign(inside)
        case ast.BoolOp(operator, parts):
            signs, one = {_sign(part) for part in parts}, 1 if isinstance(operator, ast.And) else -1
            return one if one in signs else -one if signs == {-one} else 0
        case ast.Compare(_, [ast.Eq() | ast.NotEq() as operator], [ast.Constant("cuda" | "xpu" | "cpu" as device)]):
            return 1 if isinstance(operator, ast.Eq) == (device != "cpu") else -1
        case ast.Compare(ast.Attribute(_, "stream"), [operator], [ast.Constant(None)]):
            return -1 if isinstance(operator, ast.Is) else 1
        case ast.Attribute(_, name):
            return {"is_cpu": -1, "hip": 1, "gloo": -1}.get(name, 0)
        case ast.Call(ast.Name("has_triton" | "is_flash" | "is_cudnn")):
            return 1
        case ast.Call(ast.Name("compiles"), [ast.Name("parameter")]):  # one kernel of its update
            return 1
    return 0


@contextmanager
def running(wanted: dict[str, dict[int, str]]) -> Iterator[set[tuple[str, int]]]:
    """Yields the wanted statements that run in the `with` block, as files and lines."""
    ran = set[tuple[str, int]]()
    files: dict[CodeType, str] = {}

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            ran.add((files[frame.f_code], frame.f_lineno))
        return lines

    def calls(frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        if code not in files:
            path = code.co_filename
            name = path.removeprefix(f"{ROOT}/") if path.startswith(str(ROOT)) else ""
            last = max((line or 0 for _, _, line in code.co_lines()), default=0)
            has = any(code.co_firstlineno <= line <= last for line in wanted.get(name, ()))
            files[code] = name if has else ""
        return lines if files[code] else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield ran
    finally:
        sys.settrace(before)
