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
from itertools import chain
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

    def imported(self, package: str) -> RecipeModule | None:
        """Returns the module of a package that lies beside this file, or None."""
        found = beside(self.path, package)
        return _module(found) if found else None

    def function(self, name: str, depth: int = 0) -> tuple[RecipeModule, str] | None:
        """Returns the function of a name, in this file or in one that it is imported from."""
        if name in self.functions or name not in self.imports or depth > 4:
            return (self, name) if name in self.functions else None
        package, inner = self.imports[name]
        other = self.imported(package)
        return other.function(inner, depth + 1) if other else None


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

    def call(self, module: RecipeModule, name: str, given: Sequence[Any], named: Mapping[str, Any], depth: int) -> Any:
        """Returns what a function of a module returns."""
        function = module.functions[name]
        rules = function.args
        names = [each.arg for each in (*rules.posonlyargs, *rules.args)]
        only = [each.arg for each in rules.kwonlyargs]
        frame = _Evaluation(self, module, {each: _unknown(each, f"an argument of {name}") for each in (*only, *names)})
        frame.depth, env = depth, frame.env
        last = names[len(names) - len(rules.defaults) :]
        for each, default in (*zip(last, rules.defaults, strict=True), *zip(only, rules.kw_defaults, strict=True)):
            env |= {each: frame.value(default)} if default is not None else {}
        env |= dict(zip(names, given, strict=False)) | {key: value for key, value in named.items() if key in env}
        found = None
        try:
            frame.block(function.body)
        except _ReturnedError as returned:
            found = returned.value
        return found if found is not None or not frame.unsure else _unknown(f"{name}(…)", frame.unsure)


def _unknown(text: str, why: str) -> Unresolved:
    return Unresolved(text[:200], why)


def _together(several: list[Any]) -> Any:
    """Returns a list, or what of it is unknown."""
    return next((each for each in several if isinstance(each, Unresolved)), several)


@dataclass
class _Evaluation:
    reader: RecipeReader
    module: RecipeModule
    env: dict[str, Any]
    depth: int = 0
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
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value:
            value = self.value(each.value)
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                self._store(target, value, each.value)
        elif isinstance(each, ast.AugAssign):
            self._store(each.target, _unknown(ast.unparse(each), "it is changed in place"), each.value)
        elif isinstance(each, ast.Expr):
            self.discards = isinstance(each.value, ast.Call)
            self.value(each.value)
        elif isinstance(each, ast.If):
            held, why = self.value(each.test), f"the condition on line {each.lineno} does not follow from the file"
            if _is_unsure(held):
                self._lose([*each.body, *each.orelse], why)
            else:
                self.block(each.body if held else each.orelse)
        elif isinstance(each, ast.With | ast.Try):
            self.block(each.body)
        elif isinstance(each, ast.For | ast.While):
            self._lose(each.body, "it is set in a loop")

    def _lose(self, statements: Sequence[ast.stmt], why: str) -> None:
        """Takes what statements would set as unknown."""
        for inner in chain.from_iterable(map(ast.walk, statements)):
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
        elif isinstance(target, ast.Attribute) and (owner := self._owner(target.value)) is not None:
            owner.fields[target.attr] = value
            owner.places[target.attr] = self.module.path, source.lineno, self._source(source)

    def _source(self, node: ast.expr) -> str:
        """Returns the text of an expression of one line."""
        if node.lineno != node.end_lineno or node.lineno > len(self.module.lines):
            return ""
        line = self.module.lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset].decode(errors="replace")

    def _owner(self, node: ast.expr) -> Built | None:
        """Returns the object whose attribute is set; one that is not known is made."""
        if isinstance(node, ast.Name):
            found = self.env.get(node.id)
            return found if isinstance(found, Built) else None
        owner = self._owner(node.value) if isinstance(node, ast.Attribute) else None
        if owner is None or not isinstance(node, ast.Attribute):
            return None
        found = owner.fields.get(node.attr)
        if not isinstance(found, Built):
            owner.fields |= {f"{node.attr}.{TARGET}": found} if found is not None else {}
            found = owner.fields[node.attr] = Built()
        return found

    def value(self, node: ast.expr) -> Any:
        text = ast.unparse(node) if not isinstance(node, ast.Constant) else ""
        try:
            return self._value(node, text)
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError):
            return _unknown(text, "it does not follow from literals")

    def _inside(self, module: RecipeModule, node: ast.expr, **env: Any) -> Any:
        return _Evaluation(self.reader, module, env, self.depth + 1).value(node)

    def _value(self, node: ast.expr, text: str) -> Any:
        """Returns the value of an expression. Raises ValueError and its like if it does not follow from literals."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return _together([self.value(each) for each in node.elts])
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            (each,) = node.generators
            items = self.value(each.iter)
            if not isinstance(items, list) or not isinstance(each.target, ast.Name):
                raise ValueError
            name = each.target.id
            return _together([self._inside(self.module, node.elt, **{**self.env, name: item}) for item in items])
        if isinstance(node, ast.Dict):
            pairs = [(self.value(key), each) for key, each in zip(node.keys, node.values, strict=True) if key]
            return Built("dict", {str(key): self.value(each) for key, each in pairs if key is not None})
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, Built):
                return owner.fields.get(node.attr, _unknown(text, "it is not set in the file"))
            known = isinstance(owner, ImportedName)
            return ImportedName(f"{owner}.{node.attr}") if known else _unknown(text, "it is not known here")
        if isinstance(node, ast.Call):
            return self._call(node, text)
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand)
            if isinstance(value, Unresolved | Built | ImportedName):
                return value
            return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            one, other = self.value(node.left), self.value(node.right)
            sizes = [abs(each) if isinstance(each, int | float) else len(each) * 2**48 for each in (one, other)]
            if max(sizes) >= 2**62 or (isinstance(node.op, ast.Mult) and min(sizes) * max(sizes) >= 2**62):
                raise ValueError
            return _BINARY[type(node.op)](one, other)
        if isinstance(node, ast.BoolOp):
            value: Any = None
            for each in node.values:
                value = self.value(each)
                if _is_unsure(value) or bool(value) == isinstance(node.op, ast.Or):
                    break
            return value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            one, other = self.value(node.left), self.value(node.comparators[0])
            if _is_unsure(one) or (_is_unsure(other) and getattr(other, "target", "") != "dict"):
                raise ValueError
            if isinstance(other, Built) and isinstance(node.ops[0], ast.In | ast.NotIn):
                one, other = str(one), other.fields
            return _COMPARED[type(node.ops[0])](one, other)
        if isinstance(node, ast.IfExp):
            held = self.value(node.test)
            unknown = _unknown(text, "the condition does not follow from literals")
            return unknown if _is_unsure(held) else self.value(node.body if held else node.orelse)
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value), self.value(node.slice)
            if not isinstance(owner, Built | list):
                raise ValueError
            return owner.fields[str(key)] if isinstance(owner, Built) else owner[key]
        return _unknown(text, "it is an expression")

    def _name(self, name: str) -> Any:
        module, shallow = self.module, self.depth < MOST_DEPTH
        if name in self.env:
            return self.env[name]
        if name in module.constants and shallow:
            return self._inside(module, module.constants[name])
        if name in module.imports:
            package, inner = module.imports[name]
            if inner and shallow and (other := module.imported(package)) and inner in other.constants:
                return self._inside(other, other.constants[inner])
            return ImportedName(inner or package)
        known = name in module.functions or name in module.classes
        return ImportedName(name) if known else _unknown(name, "it is not defined in the file")

    def _call(self, node: ast.Call, text: str) -> Any:
        least, self.discards = (0 if self.discards else 5), False
        name, opaque = ast.unparse(node.func), self.reader.opaque
        last = name.rpartition(".")[2]
        positional = [self.value(each) for each in node.args if not isinstance(each, ast.Starred)]
        words = {each.arg: each.value for each in node.keywords if each.arg}
        named = {key: self.value(each) for key, each in words.items()}
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Built):
            if owner.target == "dict" and last == "get" and positional:
                return owner.fields.get(str(positional[0]), positional[1] if len(positional) > 1 else None)
            if owner.target == "Path":
                return _unknown(text, "it is a file")
            return owner if last.startswith(("to_", "get_")) else self._not_followed(node, text, [owner])
        if isinstance(owner, str) and last in _OF_TEXT and all(isinstance(each, str) for each in positional):
            return _OF_TEXT[last](owner, *positional)
        if name in _PLAIN_CALLS and all(isinstance(each, int | float | str | list) for each in positional):
            return _PLAIN_CALLS[name](*positional)
        if last in self.reader.known and positional and isinstance(positional[0], Built):
            return self.reader.known[last](*positional)
        if name in ("getattr", "hasattr", "isinstance") and len(positional) > 1:
            return self._asked(name, text, *positional)
        if last not in opaque and self.depth < MOST_DEPTH and (found := self.module.function(name)):
            return self.reader.call(*found, positional, named, self.depth + 1)
        target = last
        if last in ("Config", "Partial") and positional:  # nemo_run's
            target, positional = str(positional[0]).rpartition(".")[2], positional[1:]
        whole = [each for each in positional if isinstance(each, Built) and len(each.fields) > least]
        if last[:1].islower() and last not in opaque and whole:
            return self._not_followed(node, text, whole)
        places = {key: (self.module.path, each.lineno, self._source(each)) for key, each in words.items()}
        held = {f"{number}": each for number, each in enumerate(positional)} | named
        return Built(target, held, places, (self.module.path, node.lineno))

    def _asked(self, name: str, text: str, owner: Any, key: Any, *default: Any) -> Any:
        """Returns what getattr, hasattr or isinstance say of an object that is built."""
        if name == "isinstance":
            if isinstance(owner, str):
                return "str" in (map(str, key) if isinstance(key, list) else [str(key)])
            return False if isinstance(owner, Built) and str(key) == "str" else _unknown(text, "it asks for a type")
        if not isinstance(owner, Built) or not isinstance(key, str):
            return _unknown(text, "it is not known here")
        unset = default[0] if default else _unknown(text, "it is not set")
        return key in owner.fields if name == "hasattr" else owner.fields.get(key, unset)

    def _not_followed(self, node: ast.Call, text: str, changed: Sequence[Built]) -> Any:
        self.reader.calls.append((self.module.path, node.lineno, text[:120]))
        return changed[0]


def _is_unsure(value: Any) -> bool:
    """Returns whether a value is unknown, or what a function that is not read returns."""
    return isinstance(value, Unresolved) or (isinstance(value, Built) and value.target[:1].islower())


def stated(built: Built, path: Path, prefix: str = "", depth: int = 0) -> Iterator[Stated]:
    """Yields the values of an object, with dotted names."""
    if built.target and built.target != "dict":
        yield Stated(f"{prefix}{TARGET}", built.target, built.origin[1] if built.origin else 0)
    for name, value in built.fields.items():
        file, line, text = built.places.get(name, (path, 0, ""))
        inner = {f"{name}.{n}": each for n, each in enumerate(value)} if isinstance(value, list) else {name: value}
        if several := {key: each for key, each in inner.items() if isinstance(each, Built)}:
            for key, each in several.items() if depth < MOST_DEPTH or isinstance(value, list) else ():
                yield from stated(each, path, f"{prefix}{key}.", depth + 1)
            continue
        plain = [str(each) if isinstance(each, ImportedName) else each for each in inner.values()]
        yield Stated(
            f"{prefix}{name}",
            plain if isinstance(value, list) else plain[0],
            line,
            text,
            None if file == path else file,
        )


def literal(text: str) -> Any:
    """Returns the value of an expression of literals; Unresolved for all else."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _unknown(text, "it is no expression")
    return _Evaluation(RecipeReader(), RecipeModule(Path(), ""), {}).value(node)
