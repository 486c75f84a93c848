"""An operator graph, and its JSON format (docs/guides/graph.md): operators whose dimensions are named by letters, as
einsum names them, with shapes, FLOPs and bytes. Reading one needs no torch.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from phalanx.bounded import parse_json, read_bytes
from phalanx.errors import JobError, NotFoundError
from phalanx.nearest import did_you_mean

FORMAT = "phalanx-graph-1"
KINDS = ("compute", "view", "input", "parameter")
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of an element by the name of its type."""
FIELDS = ("name", "kind", "einsum", "inputs", "shape", "sizes", "whole", "flops", "bytes", "dtype", "block")
MOST_OPERATORS = 200_000

Term = tuple[str, ...]
"""The dimensions of a tensor, each a letter, or several of which the first is outermost: `bs(nd)`."""


@dataclass(frozen=True)
class GraphOperator:
    """One operator and its output."""

    name: str
    kind: str
    """`view`: moves and computes nothing."""
    inputs: tuple[str, ...]
    terms: tuple[Term, ...]
    """The dimensions of each input."""
    output: Term
    sizes: Mapping[str, int] = field(compare=False)
    """The size of each letter."""
    whole: frozenset[str] = frozenset()
    """Letters that cannot be split, such as the dimension of a softmax."""
    flops: float | None = None
    """FLOPs of the forward pass; None: those of its product, if it contracts a letter over two inputs."""
    moved: float | None = None
    """Bytes read and written in the forward pass; None: all inputs and the output."""
    dtype: str = "bf16"
    block: str = ""
    """The block of the model that it belongs to, such as `layers.3`: equal consecutive blocks get one plan."""

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """All letters, in the order of first use."""
        return tuple(dict.fromkeys("".join(group for term in (*self.terms, self.output) for group in term)))

    @property
    def summed(self) -> frozenset[str]:
        """Letters that the output lacks: split ones leave partial sums."""
        return frozenset(self.letters) - frozenset("".join(self.output))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(self.sizes[letter] for letter in group) for group in self.output)

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]

    @property
    def form(self) -> tuple[Any, ...]:
        """All but its name, its block and the names of its inputs."""
        sizes = tuple(self.sizes.items())
        return self.kind, self.terms, self.output, sizes, self.whole, self.flops, self.moved, self.dtype

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("fp", "bf"))

    def dimension(self, term: Term, letter: str) -> int | None:
        """Returns the dimension of a tensor that a split of the letter splits, or None if it has no such dimension.
        Raises ValueError if a split of it is none of any dimension: it is not the outermost of its group."""
        for place, group in enumerate(term):
            if letter in group:
                if _inner(self, group, letter):
                    raise ValueError(letter)
                return place
        return None

    def written(self) -> dict[str, Any]:
        """Returns the operator as the JSON file has it."""
        entry: dict[str, Any] = {"name": self.name}
        if self.kind != "compute":
            entry["kind"] = self.kind
        if self.kind in ("input", "parameter"):
            entry["shape"] = [*self.shape]
        else:
            entry |= {"einsum": ",".join(map(_text, self.terms)) + "->" + _text(self.output), "inputs": [*self.inputs]}
            grouped = {
                letter for term in (*self.terms, self.output) for group in term if len(group) > 1 for letter in group
            }
            single = {group for term in self.terms for group in term if len(group) == 1}
            if needed := {each: self.sizes[each] for each in self.letters if each in grouped or each not in single}:
                entry["sizes"] = needed
        entry |= {"whole": "".join(sorted(self.whole))} if self.whole else {}
        entry |= {"flops": self.flops} if self.flops is not None else {}
        entry |= {"bytes": self.moved} if self.moved is not None else {}
        return {**entry, "dtype": self.dtype, **({"block": self.block} if self.block else {})}


def _inner(each: GraphOperator, group: str, letter: str) -> bool:
    """Returns whether a letter is not the outermost of its group."""
    return any(each.sizes[before] > 1 for before in group[: group.index(letter)])


def _text(term: Term) -> str:
    return "".join(group if len(group) == 1 else f"({group})" for group in term)


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in an order in which each comes after its inputs."""

    name: str
    operators: tuple[GraphOperator, ...]
    notes: tuple[str, ...] = ()
    """Notes for the reader, such as operators that were not recognised."""
    received: frozenset[str] = frozenset()
    """Inputs that come from another stage of a pipeline, to which gradients go back."""

    @cached_property
    def by_name(self) -> dict[str, GraphOperator]:
        return {each.name: each for each in self.operators}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[GraphOperator, int]]]:
        """The operators that use each output, with the number of the input."""
        found: dict[str, list[tuple[GraphOperator, int]]] = defaultdict(list)
        for each in self.operators:
            for place, name in enumerate(each.inputs):
                found[name].append((each, place))
        return found

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """The operators whose outputs have gradients."""
        found = set[str]()
        for each in self.operators:
            begins = each.kind == "parameter" or each.name in self.received
            if each.floating and (begins or any(name in found for name in each.inputs)):
                found.add(each.name)
        return frozenset(found)

    @cached_property
    def batch(self) -> dict[str, str]:
        """The letter of each operator that is the batch: the first dimension of inputs, and what comes of it."""
        found: dict[str, str] = {}
        for each in self.operators:
            if each.kind == "input":
                found[each.name] = each.output[0][0] if each.output else ""
            for name, term in zip(each.inputs, each.terms, strict=True):
                source = self.by_name[name]
                letter = found.get(name, "")
                place = next((at for at, group in enumerate(source.output) if letter and letter in group), None)
                if place is not None:
                    # Of a group that the batch is not the outermost of, no split is one of the batch.
                    group = term[place] if not _inner(source, source.output[place], letter) else ""
                    first = next((one for one in group if each.sizes[one] > 1), "")
                    found.setdefault(each.name, first if first in each.letters else "")
        return found

    @cached_property
    def representatives(self) -> dict[str, str]:
        """For each operator the one whose strategy it shares: that at its place in the first of equal blocks."""
        blocks: dict[str, list[GraphOperator]] = defaultdict(list)
        for each in self.operators:
            blocks[each.block].append(each)
        first: dict[Any, str] = {}
        found: dict[str, str] = {}
        for block, members in blocks.items():
            places = {each.name: place for place, each in enumerate(members)}
            signature = tuple(
                (*each.form, tuple(places.get(name, self._signature(name)) for name in each.inputs)) for each in members
            )
            model = blocks[first.setdefault(signature, block)] if block else members
            found |= {each.name: same.name for each, same in zip(members, model, strict=True)}
        return found

    def _signature(self, name: str) -> Any:
        source = self.by_name[name]
        # What comes from another block is alike if it has the same form; what all share must be the same.
        return name if source.kind in ("input", "parameter") else (source.shape, source.dtype)

    @property
    def parameters(self) -> int:
        return sum(prod(each.shape) for each in self.operators if each.kind == "parameter")

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "name": self.name, "operators": [each.written() for each in self.operators]}


def json_of(option: str, path: Path) -> Any:
    """Returns the document of an option's JSON file. Raises NotFoundError, and JobError if it is none."""
    try:
        return parse_json(read_bytes(path, 256 * 2**20))
    except FileNotFoundError:
        raise NotFoundError(f"--{option} {path}: there is no such file") from None
    except (OSError, ValueError) as error:
        said = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error
        raise JobError(f"--{option} {path}: cannot be read as JSON: {said}") from None


def read_graph(path: Path) -> OperatorGraph:
    """Reads a graph file. Raises NotFoundError, and JobError with every problem."""
    graph, problems = parse_graph(json_of("graph", path))
    if problems:
        raise JobError([f"--graph {path}: {problem}" for problem in problems])
    return graph


def parse_graph(document: Any) -> tuple[OperatorGraph, list[str]]:
    """Returns the graph of a JSON document, and every problem of it."""
    empty = OperatorGraph("", ())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        stated = document.get("format") if isinstance(document, dict) else None
        return empty, [f'expected an object with "format": "{FORMAT}"' + (f", found {stated!r:.60}" if stated else "")]
    problems = [
        f"unknown key {key!r}{did_you_mean(key, ('format', 'name', 'operators'))}"
        for key in document
        if key not in ("format", "name", "operators")
    ]
    entries = document.get("operators")
    if not isinstance(entries, list) or not entries or len(entries) > MOST_OPERATORS:
        return empty, [*problems, f'"operators" must be a list of 1 to {MOST_OPERATORS:,} operators']
    named: dict[str, Any] = {}
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
            problems.append(f'operator {place}: expected an object with a "name"')
        elif entry["name"] in named:
            problems.append(f"operator {entry['name']!r} stands twice")
        else:
            named[entry["name"]] = entry
    for name, entry in named.items():
        problems += [f"operator {name!r}: {problem}" for problem in _wrong_types(entry, named)]
    if problems:
        return empty, problems
    order, cycle = _sorted(named)
    if cycle:
        return empty, [f"operators depend on each other in a circle: {' -> '.join(cycle)}"]
    read: dict[str, GraphOperator] = {}
    for name in order:
        if all(each in read for each in named[name].get("inputs", ())):
            found, wrong = _operator(named[name], read)
            problems += [f"operator {name!r}: {problem}" for problem in wrong]
            if found:
                read[name] = found
    if not problems and all(each.kind in ("input", "parameter") for each in read.values()):
        problems.append("no operator computes anything: all are inputs and parameters")
    return OperatorGraph(str(document.get("name", "")), tuple(read.values())), problems


def _wrong_types(entry: dict[str, Any], named: Mapping[str, Any]) -> Iterator[str]:
    for key, value in entry.items():
        if key not in FIELDS:
            yield f"unknown key {key!r}{did_you_mean(key, FIELDS)} (known: {', '.join(FIELDS)})"
        elif key in ("einsum", "whole", "block") and not isinstance(value, str):
            yield f"{key!r} must be a text, is {value!r:.60}"
        elif key in ("flops", "bytes") and not _is_count(value):
            yield f"{key!r} must be a number of at least 0, is {value!r:.60}"
        elif key == "kind" and value not in KINDS:
            yield f"kind {value!r:.60} is none of {', '.join(KINDS)}"
        elif key == "dtype" and (not isinstance(value, str) or value not in WIDTHS):
            yield f"dtype {value!r:.60} is none of {', '.join(WIDTHS)}"
        elif key == "shape" and not (isinstance(value, list) and all(type(each) is int and each > 0 for each in value)):
            yield f"'shape' must be a list of whole numbers above 0, is {value!r:.60}"
        elif key == "sizes" and not (
            isinstance(value, dict) and all(type(each) is int and each > 0 for each in value.values())
        ):
            yield f"'sizes' must give letters whole numbers above 0, is {value!r:.60}"
        elif key == "inputs":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                yield f"'inputs' must be a list of operators' names, is {value!r:.60}"
            else:
                yield from (
                    f"its input {each!r} is no operator{did_you_mean(each, named)}"
                    for each in value
                    if each not in named
                )
    source = entry.get("kind") in ("input", "parameter")
    if source and ("shape" not in entry or "einsum" in entry or "inputs" in entry):
        yield f"{'an' if entry['kind'] == 'input' else 'a'} {entry['kind']} has a shape, and neither einsum nor inputs"
    if not source and ("einsum" not in entry or "inputs" not in entry or "shape" in entry):
        yield "an operator has einsum and inputs, and no shape (its einsum and its inputs give it)"


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e30


def _sorted(named: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the operators after their inputs, in the order of the file as far as possible, and a circle if there is
    one."""
    order, done = list[str](), dict[str, bool]()
    for start in named:
        stack = [(start, iter(named[start].get("inputs", ())))] if start not in done else []
        done.setdefault(start, False)
        while stack:
            name, rest = stack[-1]
            for each in rest:
                if each not in done:
                    done[each] = False
                    stack.append((each, iter(named[each].get("inputs", ()))))
                    break
                if not done[each]:
                    path = [one for one, _ in stack]
                    return [], [*path[path.index(each) :], each]
            else:
                stack.pop()
                done[name] = True
                order.append(name)
    return order, []


def _operator(entry: Mapping[str, Any], read: Mapping[str, GraphOperator]) -> tuple[GraphOperator | None, list[str]]:
    common: dict[str, Any] = {
        "name": entry["name"],
        "kind": entry.get("kind", "compute"),
        "flops": entry.get("flops"),
        "moved": entry.get("bytes"),
        "dtype": entry.get("dtype", "bf16"),
        "block": entry.get("block", ""),
        "whole": frozenset(entry.get("whole", "")),
    }
    if "shape" in entry:
        return source(**common, shape=entry["shape"]), []
    inputs = [read[name] for name in entry["inputs"]]
    left, arrow, right = entry["einsum"].replace(" ", "").partition("->")
    texts = left.split(",") if left or inputs else []
    form = r"([a-zA-Z]|\([a-zA-Z]+\))*"
    if not arrow or not all(re.fullmatch(form, text) for text in (*texts, right)):
        return None, [f"einsum {entry['einsum']!r:.80} is not of the form bsh,hf->bsf, with groups as bs(nd)"]
    terms, output = [_term(text) for text in texts], _term(right)
    if len(terms) != len(inputs):
        return None, [f"einsum {entry['einsum']!r:.80} has {len(terms)} inputs, 'inputs' names {len(inputs)}"]
    problems, sizes = list[str](), dict[str, int](entry.get("sizes", {}))
    for each, term in zip(inputs, terms, strict=True):
        if len(term) != len(each.shape):
            problems.append(
                f"{_text(term)} names {len(term)} dimensions, its input {each.name!r} has {len(each.shape)}"
            )
            continue
        for group, size in zip(term, each.shape, strict=True):
            if len(group) == 1 and sizes.setdefault(group, size) != size:
                problems.append(f"{group} is {sizes[group]} and, as a dimension of {each.name!r}, {size}")
        for group, size in zip(term, each.shape, strict=True):
            if len(group) > 1 and all(letter in sizes for letter in group):
                found = prod(sizes[letter] for letter in group)
                if found != size:
                    product = " × ".join(f"{letter}={sizes[letter]}" for letter in group)
                    problems.append(f"({group}): {product} = {found}, the dimension of {each.name!r} is {size}")
    letters = dict.fromkeys("".join(group for term in (*terms, output) for group in term))
    problems += [f"the size of {each} is not known: state it in 'sizes'" for each in letters if each not in sizes]
    problems += [
        f"{key} names {each!r}, which einsum lacks"
        for key in ("sizes", "whole")
        for each in entry.get(key, ())
        if each not in letters
    ]
    problems += [
        f"{_text(term)} names a letter twice" for term in (*terms, output) if len({*"".join(term)}) < len("".join(term))
    ]
    if problems:
        return None, problems
    return GraphOperator(**common, inputs=tuple(entry["inputs"]), terms=tuple(terms), output=output, sizes=sizes), []


def _term(text: str) -> Term:
    return tuple(group.strip("()") for group in re.findall(r"[a-zA-Z]|\([a-zA-Z]+\)", text))


def source(name: str, kind: str, shape: Sequence[int], **more: Any) -> GraphOperator:
    """Returns an input or a parameter."""
    letters = "abcdefghijklmnop"[: len(shape)]
    sizes = dict[str, int](zip(letters, shape, strict=False))
    return GraphOperator(name, kind, (), (), tuple(letters), sizes, **more)
