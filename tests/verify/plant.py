"""Plants a bug: edits the source of one function or method, in this process, for the time of a `with` block.

Only the code object is exchanged, so that every name under which a function was imported calls the edited one. A bug
whose function, or whose line in it, is no longer there raises NoTargetError: it must be written anew, never skipped.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class NoTargetError(LookupError):
    """A bug that cannot be planted: the code that it was written for has changed."""


class Bug(NamedTuple):
    """A bug, where it shows, and what should be named."""

    what: str
    """The mistake, as a person would report it."""
    layout: str
    """A layout in which it shows."""
    target: str
    """The function or method, module:name, in src/phalanx."""
    edits: tuple[tuple[str, str], ...]
    """Text of its source, each there once, and what replaces it."""
    named: str
    """The module, parameter, collective or look that should be named."""
    job: str = ""
    """Settings of the job with which it shows, as words of the command line after those of its model."""
    model: str = "gpt"
    """Name of the model."""
    parts: bool = False
    """Whether ranks that hold the same are left with different values, such as parts of a sum."""


def function_of(target: str) -> FunctionType:
    """Returns the function that a target names, without its decorators. Raises NoTargetError."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(f"phalanx.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
        if found is None:
            raise NoTargetError(f"{target}: there is no {part}")
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, staticmethod | classmethod):
            found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise NoTargetError(f"{target}: is no function")
    return found


def edited(bug: Bug) -> CodeType:
    """Returns the code of a bug's function with its edits. Raises NoTargetError."""
    function = function_of(bug.target)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in bug.edits:
        if (times := source.count(old)) != 1:
            raise NoTargetError(f"{bug.what}: {bug.target} has {old!r} {times} times")
        source = source.replace(old, new)
    tree = ast.parse(source)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    if "__class__" in function.__code__.co_freevars:  # for super()
        around = ast.parse("class Around: pass")
        around.body[0].body = [definition]
        tree = around
    code = _named(compile(tree, f"planted in {bug.target}", "exec"), function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise NoTargetError(f"{bug.target}: an edit must not change which outer names are used")
    return code


def _named(code: CodeType, name: str) -> CodeType:
    """Returns the code of the function `name` that is defined in `code`."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    here = [each for each in inner if each.co_name == name]
    return here[0] if here else _named(inner[0], name)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Has the bug in this process in the `with` block."""
    function, code = function_of(bug.target), edited(bug)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


class WithBug(NamedTuple):
    """A function that ranks run with a bug in their processes."""

    bug: Bug
    function: Callable[..., Any]

    def __call__(self, ranks: Any, *args: Any) -> Any:
        with planted(self.bug):
            return self.function(ranks, *args)
