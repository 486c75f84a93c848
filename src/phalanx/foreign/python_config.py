"""Reads a Python file that builds a configuration, as far as its values follow from literals, without executing it.

Followed are assignments of attributes, calls of functions of the same file or of a file of the same package that lies
beside it, keyword arguments of classes, constants, sums and conditions of known values. All else is unresolved.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.bounded import read_text
from phalanx.foreign.frame import MOST_BYTES, Stated, Unresolved

MOST_DEPTH, MOST_STEPS = 40, 50_000
TARGET = "_target_"


@dataclass
class Built:
    """An object that a configuration builds: the name of its class or function, and its fields."""

    target: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    places: dict[str, tuple[Path, int, str]] = field(default_factory=dict)
    """File, line and text of every field."""
    origin: tuple[Path, int] | None = None


@dataclass(frozen=True)
class ImportedName:
    """A dotted name of something that is imported, such as torch.bfloat16."""

    name: str

    def __str__(self) -> str:
        return self.name


class RecipeModule:
    """A parsed file: its functions, constants and imports."""

    def __init__(self, path: Path, text: str):
        self.path, self.lines = path, text.splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            self.tree = ast.parse(text)
        self.functions = {each.name: each for each in self.tree.body if isinstance(each, ast.FunctionDef)}
        self.classes = {each.name for each in self.tree.body if isinstance(each, ast.ClassDef)}
        self.constants: dict[str, ast.expr] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for each in self.tree.body:
            if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
                self.constants[each.targets[0].id] = each.value
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
                self.constants[each.target.id] = each.value
        for each in ast.walk(self.tree):
            if isinstance(each, ast.ImportFrom):
                package = "." * each.level + (each.module or "")
                self.imports |= {name.asname or name.name: (package, name.name) for name in each.names}
            elif isinstance(each, ast.Import):
                self.imports |= {(name.asname or name.name).partition(".")[0]: (name.name, "") for name in each.names}


@cache
def _module(path: Path) -> RecipeModule | None:
    try:
        return RecipeModule(path, read_text(path, MOST_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def beside(path: Path, package: str) -> Path | None:
    """Returns the file of a module that is imported by a file of the same tree of folders, or None."""
    level = len(package) - len(package.lstrip("."))
    parts = package.lstrip(".").split(".") if package.strip(".") else []
    folders = [path.resolve().parents[level - 1]] if level else list(path.resolve().parents)[:10]
    for folder in folders:
        for found in (
            folder.joinpath(*parts).with_suffix(".py") if parts else None,
            folder.joinpath(*parts, "__init__.py"),
        ):
            if found is not None and found.is_file() and found != path.resolve():
                return found
    return None


_PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (int, float, str, bool, len, list, max, min)
}
_OF_TEXT: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (str.lower, str.upper, str.strip, str.startswith, str.endswith, str.removeprefix)
}
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class _ReturnedError(Exception):
    """Ends a function with the value that it returns."""

    def __init__(self, value: Any):
        self.value = value


class RecipeReader:
    """Follows functions. `opaque` are names of functions that stay calls, whatever they do."""

    def __init__(self, opaque: Sequence[str] = (), known: Mapping[str, Callable[..., None]] = {}):
        self.opaque, self.known = tuple(opaque), known
        """`known` are functions of the framework that change an object, with what they do."""
        self.calls, self.steps = list[tuple[Path, int, str]](), 0
        """Calls that were not followed, though they may change what is built."""

    def call(
        self,
        module: RecipeModule,
        name: str,
        positional: Sequence[Any] = (),
        named: Mapping[str, Any] = {},
        depth: int = 0,
    ) -> Any:
        """Returns what a function of a module returns."""
        function = module.functions[name]
        arguments = function.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        env: dict[str, Any] = {each.arg: _unknown(each.arg, f"an argument of {name}") for each in arguments.kwonlyargs}
        env |= {each: _unknown(each, f"an argument of {name}") for each in names}
        frame = _Evaluation(self, module, env, depth)
        for each, default in zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True):
            env[each] = frame.value(default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                env[each.arg] = frame.value(default)
        env |= dict(zip(names, positional, strict=False))
        env |= {key: value for key, value in named.items() if key in env}
        found = None
        try:
            frame.block(function.body)
        except _ReturnedError as returned:
            found = returned.value
        return found if found is not None or not frame.unsure else _unknown(f"{name}(…)", frame.unsure)


def _unknown(text: str, why: str) -> Unresolved:
    return Unresolved(text[:200], why)


@dataclass
class _Evaluation:
    reader: RecipeReader
    module: RecipeModule
    env: dict[str, Any]
    depth: int
    discards: bool = False
    """Whether the next call is a statement, which is made for what it changes."""
    unsure: str = ""
    """Why it is not known whether the function returns sooner; empty if it does not."""

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for each in statements:
            self.reader.steps += 1
            if self.reader.steps > MOST_STEPS:
                raise RecursionError
            self._statement(each)

    def _statement(self, each: ast.stmt) -> None:
        if isinstance(each, ast.Return):
            raise _ReturnedError(self.value(each.value) if each.value else None)
        if isinstance(each, ast.Assign):
            value = self.value(each.value)
            for target in each.targets:
                self._store(target, value, each.value)
        elif isinstance(each, ast.AnnAssign) and each.value:
            self._store(each.target, self.value(each.value), each.value)
        elif isinstance(each, ast.AugAssign):
            self._store(each.target, _unknown(ast.unparse(each), "it is changed in place"), each.value)
        elif isinstance(each, ast.Expr):
            self.discards = isinstance(each.value, ast.Call)
            self.value(each.value)
        elif isinstance(each, ast.If):
            held = self.value(each.test)
            if _is_unsure(held):
                self._lose(
                    [*each.body, *each.orelse], f"the condition on line {each.lineno} does not follow from the file"
                )
            else:
                self.block(each.body if held else each.orelse)
        elif isinstance(each, ast.With | ast.Try):
            self.block(each.body)
        elif isinstance(each, ast.For | ast.While):
            self._lose(each.body, "it is set in a loop")

    def _lose(self, statements: Sequence[ast.stmt], why: str) -> None:
        """Takes what statements would set as unknown."""
        for each in statements:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Return):
                    self.unsure = self.unsure or why
                elif isinstance(inner, ast.Assign):
                    for target in inner.targets:
                        self._store(target, _unknown(ast.unparse(inner.value), why), inner.value)

    def _store(self, target: ast.expr, value: Any, source: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values = value if isinstance(value, list) else []
            for number, each in enumerate(target.elts):
                lost = _unknown(ast.unparse(each), "it is one of several values of a call")
                self._store(each, values[number] if number < len(values) else lost, source)
        elif isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._owner(target.value)
            if owner is not None:
                text = self._source(source)
                owner.fields[target.attr] = value
                owner.places[target.attr] = self.module.path, source.lineno, text

    def _source(self, node: ast.expr) -> str:
        """Returns the text of an expression of one line."""
        if node.lineno != node.end_lineno or node.lineno > len(self.module.lines):
            return ""
        return (
            self.module.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode(errors="replace")
        )

    def _owner(self, node: ast.expr) -> Built | None:
        """Returns the object whose attribute is set; one that is not known is made."""
        if isinstance(node, ast.Name):
            found = self.env.get(node.id)
            return found if isinstance(found, Built) else None
        if isinstance(node, ast.Attribute) and (owner := self._owner(node.value)) is not None:
            found = owner.fields.get(node.attr)
            if not isinstance(found, Built):
                if found is not None:
                    owner.fields[f"{node.attr}.{TARGET}"] = found
                found = owner.fields[node.attr] = Built()
            return found
        return None

    def value(self, node: ast.expr) -> Any:
        text = ast.unparse(node) if not isinstance(node, ast.Constant) else ""
        try:
            return self._value(node, text)
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError):
            return _unknown(text, "it does not follow from literals")

    def _value(self, node: ast.expr, text: str) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            found = [self.value(each) for each in node.elts]
            return next((each for each in found if isinstance(each, Unresolved)), found)
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            (each,) = node.generators
            items = self.value(each.iter)
            if not isinstance(items, list) or not isinstance(each.target, ast.Name):
                return _unknown(text, "it does not follow from literals")
            inner = [
                _Evaluation(self.reader, self.module, {**self.env, each.target.id: item}, self.depth + 1).value(
                    node.elt
                )
                for item in items
            ]
            return next((item for item in inner if isinstance(item, Unresolved)), inner)
        if isinstance(node, ast.Dict):
            keys = [self.value(key) if key else None for key in node.keys]
            return Built(
                "dict", {str(k): self.value(v) for k, v in zip(keys, node.values, strict=True) if k is not None}
            )
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, Built):
                default = _unknown(text, "it is not set in the file")
                return owner.fields.get(node.attr, default)
            return (
                ImportedName(f"{owner}.{node.attr}")
                if isinstance(owner, ImportedName)
                else _unknown(text, "it is not known here")
            )
        if isinstance(node, ast.Call):
            return self._call(node, text)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand)
            if isinstance(value, Unresolved | Built | ImportedName):
                return value
            return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            one, other = self.value(node.left), self.value(node.right)
            if not all(_is_small(each) for each in (one, other)):
                return _unknown(text, "it does not follow from literals")
            return _BINARY[type(node.op)](one, other)
        if isinstance(node, ast.BoolOp):
            is_or = isinstance(node.op, ast.Or)
            value: Any = None
            for each in node.values:
                value = self.value(each)
                if _is_unsure(value) or bool(value) == is_or:
                    return value
            return value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            one, other = self.value(node.left), self.value(node.comparators[0])
            if _is_unsure(one) or (_is_unsure(other) and getattr(other, "target", "") != "dict"):
                return _unknown(text, "it does not follow from literals")
            if isinstance(other, Built) and isinstance(node.ops[0], ast.In | ast.NotIn):
                one, other = str(one), other.fields
            return _COMPARED[type(node.ops[0])](one, other)
        if isinstance(node, ast.IfExp):
            held = self.value(node.test)
            if _is_unsure(held):
                return _unknown(text, "the condition does not follow from literals")
            return self.value(node.body if held else node.orelse)
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value), self.value(node.slice)
            if isinstance(owner, Built):
                return owner.fields[str(key)]
            return owner[key] if isinstance(owner, list) else _unknown(text, "it does not follow from literals")
        return _unknown(text, "it is an expression")

    def _name(self, name: str) -> Any:
        if name in self.env:
            return self.env[name]
        if name in self.module.constants and self.depth < MOST_DEPTH:
            return _Evaluation(self.reader, self.module, {}, self.depth + 1).value(self.module.constants[name])
        if name in self.module.imports:
            package, inner = self.module.imports[name]
            if inner and (other := self._imported(package)) and inner in other.constants and self.depth < MOST_DEPTH:
                return _Evaluation(self.reader, other, {}, self.depth + 1).value(other.constants[inner])
            return ImportedName(inner or package)
        if name in self.module.functions or name in self.module.classes:
            return ImportedName(name)
        return _unknown(name, "it is not defined in the file")

    def _imported(self, package: str) -> RecipeModule | None:
        found = beside(self.module.path, package)
        return _module(found) if found else None

    def _call(self, node: ast.Call, text: str) -> Any:
        least, self.discards = (0 if self.discards else 5), False
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        positional = [self.value(each) for each in node.args if not isinstance(each, ast.Starred)]
        named = {each.arg: self.value(each.value) for each in node.keywords if each.arg}
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, Built) and owner.target == "dict" and last == "get" and positional:
                return owner.fields.get(str(positional[0]), positional[1] if len(positional) > 1 else None)
            if isinstance(owner, Built) and owner.target == "Path":
                return _unknown(text, "it is a file")
            if isinstance(owner, Built):
                return owner if last.startswith(("to_", "get_")) else self._not_followed(node, text, [owner])
            if isinstance(owner, str) and last in _OF_TEXT and all(isinstance(each, str) for each in positional):
                return _OF_TEXT[last](owner, *positional)
        if name in _PLAIN_CALLS and all(isinstance(each, int | float | str | list) for each in positional):
            return _PLAIN_CALLS[name](*positional)
        if last in self.reader.known and positional and isinstance(positional[0], Built):
            return self.reader.known[last](*positional)
        opaque = self.reader.opaque
        if name in ("getattr", "hasattr", "isinstance") and len(node.args) > 1:
            return self._asked(node, text, name)
        if last not in opaque and self.depth < MOST_DEPTH and (found := self._function(name)):
            return self.reader.call(*found, positional, named, self.depth + 1)
        target = last
        if last in ("Config", "Partial") and positional:  # nemo_run's
            target, positional = str(positional[0]).rpartition(".")[2], positional[1:]
        whole = [each for each in positional if isinstance(each, Built) and len(each.fields) > least]
        if last[:1].islower() and last not in opaque and whole:
            return self._not_followed(node, text, whole)
        built = Built(target, {}, {}, (self.module.path, node.lineno))
        for number, each in enumerate(positional):
            built.fields[f"{number}"] = each
        for each in node.keywords:
            if each.arg:
                built.fields[each.arg] = named[each.arg]
                built.places[each.arg] = self.module.path, each.value.lineno, self._source(each.value)
        return built

    def _asked(self, node: ast.Call, text: str, name: str) -> Any:
        """Returns what getattr, hasattr or isinstance say of an object that is built."""
        owner, key = self.value(node.args[0]), self.value(node.args[1])
        if name == "isinstance":
            if isinstance(owner, str):
                return "str" in (map(str, key) if isinstance(key, list) else [str(key)])
            return False if isinstance(owner, Built) and str(key) == "str" else _unknown(text, "it asks for a type")
        if not isinstance(owner, Built) or not isinstance(key, str):
            return _unknown(text, "it is not known here")
        if name == "hasattr":
            return key in owner.fields
        return owner.fields.get(
            key, self.value(node.args[2]) if len(node.args) > 2 else _unknown(text, "it is not set")
        )

    def _not_followed(self, node: ast.Call, text: str, changed: Sequence[Any]) -> Any:
        self.reader.calls.append((self.module.path, node.lineno, text[:120]))
        return next((each for each in changed if isinstance(each, Built)), _unknown(text, "this function is not read"))

    def _function(
        self, name: str, module: RecipeModule | None = None, depth: int = 0
    ) -> tuple[RecipeModule, str] | None:
        """Returns the function of a name, in this file or in one that it is imported from."""
        module = module or self.module
        if name in module.functions:
            return module, name
        if name in module.imports and depth < 5:
            package, inner = module.imports[name]
            found = beside(module.path, package)
            other = _module(found) if found else None
            return self._function(inner, other, depth + 1) if other else None
        return None


def _is_unsure(value: Any) -> bool:
    """Returns whether a value is unknown, or what a function that is not read returns."""
    return isinstance(value, Unresolved) or (isinstance(value, Built) and value.target[:1].islower())


def _is_small(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) < 2**62
    return isinstance(value, str | list) and len(value) < 10_000


def stated(built: Built, path: Path, prefix: str = "", depth: int = 0) -> Iterator[Stated]:
    """Yields the values of an object, with dotted names."""
    if built.target and built.target != "dict":
        yield Stated(f"{prefix}{TARGET}", built.target, built.origin[1] if built.origin else 0)
    for name, value in built.fields.items():
        file, line, text = built.places.get(name, (path, 0, ""))
        other = None if file == path else file
        if isinstance(value, Built):
            if depth < MOST_DEPTH:
                yield from stated(value, path, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, list) and any(isinstance(each, Built) for each in value):
            for number, each in enumerate(value):
                if isinstance(each, Built):
                    yield from stated(each, path, f"{prefix}{name}.{number}.", depth + 1)
        else:
            plain = str(value) if isinstance(value, ImportedName) else value
            plain = (
                [str(each) if isinstance(each, ImportedName) else each for each in plain]
                if isinstance(plain, list)
                else plain
            )
            yield Stated(f"{prefix}{name}", plain, line, text, other)
