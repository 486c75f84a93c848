"""The operator graph of a torch module, from torch.export with example inputs.

Each aten operator is described by the letters of its dimensions, and those of them that cannot be split are marked. An
operator that is not known here gets its inputs whole, and is named in the graph's notes.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from phalanx.errors import JobError
from phalanx.graph.operators import GraphOperator, OperatorGraph, Term, source
from phalanx.registry import function_of, package_code

Example = tuple[nn.Module, tuple[Any, ...]]

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words(
    "abs add bitwise_and bitwise_not bitwise_or clamp clone contiguous cos detach detach_ div dropout elu eq exp "
    "ge gelu gt hardswish leaky_relu le log logical_and logical_not logical_or lt masked_fill maximum minimum "
    "mish mul ne neg pow reciprocal relu relu6 rsqrt rsub sigmoid silu sin softplus sqrt sub tanh to type_as "
    "where zeros_like ones_like _to_copy alias lift_fresh_copy "
)
VIEWS = _words("view reshape _unsafe_view flatten unflatten squeeze unsqueeze transpose permute t expand movedim ")
RESHAPES = _words("view reshape _unsafe_view flatten unflatten squeeze unsqueeze ")
CREATES = _words("arange zeros ones full scalar_tensor empty eye tril_indices linspace ")
PARTS = _words("chunk split split_with_sizes unbind topk sort max min tensor_split ")
"""Operators of several outputs, of which getitem takes one."""
POOLS = _words("max_pool2d avg_pool2d adaptive_avg_pool2d max_pool1d avg_pool1d adaptive_avg_pool1d ")
REDUCED = {"mse_loss": 2, "l1_loss": 2, "cross_entropy_loss": 3, "binary_cross_entropy_with_logits": 4}
"""Losses, and where their arguments say how they are reduced."""


@dataclass(frozen=True)
class ExportedModule:
    """A module as a graph, with what is needed to run it."""

    graph: OperatorGraph
    program: Any
    """torch's exported program."""
    nodes: dict[str, Node]
    """The node of each operator but inputs and parameters; that of a bias is its product's."""
    sources: dict[str, tuple[str, str]]
    """For each placeholder its kind (parameter, buffer, constant, input) and its name in the module."""
    names: dict[str, str]
    """The operator that has the value of each node."""


def module_of(place: str) -> Example:
    """Returns the module and the example inputs of a function that the user names (`function_of`). Raises JobError."""
    make = function_of(place, "--graph")
    with package_code(f"--graph {place}", passing=(JobError,), raising=JobError):
        made = make()
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not isinstance(made[0], nn.Module)
        or not isinstance(made[1], tuple)
    ):
        raise JobError(
            f"--graph {place} must return (module, inputs), the inputs as a tuple; it returns {type(made).__name__}"
        )
    return made


def export_graph(module: nn.Module, args: tuple[Any, ...], name: str = "") -> ExportedModule:
    """Returns the graph of a module. Raises JobError if torch cannot export it."""
    try:
        program = torch.export.export(module, args)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise JobError(f"torch.export cannot read {name or type(module).__name__}: {said[0]:.200}") from error
    return _Reader(module, program, name or type(module).__name__).read()


class _Letters:
    """New letters with their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def new(self, size: int) -> str:
        if len(self.sizes) == len(string.ascii_letters):
            raise JobError(
                "--graph: an operator has more than 52 different dimensions, such as a cat of so many tensors"
            )
        letter = string.ascii_letters[len(self.sizes)]
        self.sizes[letter] = size
        return letter

    def term(self, shape: Iterable[int]) -> Term:
        return tuple(self.new(size) for size in shape)

    def beside(self, shape: Sequence[int], output: Term) -> Term:
        """Returns the letters of a tensor that is broadcast to `output`."""
        last = output[len(output) - len(shape) :]
        return tuple(
            group if size == prod(self.sizes[one] for one in group) else self.new(size)
            for size, group in zip(shape, last, strict=True)
        )


Described = tuple[list[Term], Term, dict[str, Any]]
"""The letters of each input and of the output, and further fields of the operator."""


class _Reader:
    def __init__(self, module: nn.Module, program: Any, name: str):
        self.module, self.program, self.name = module, program, name
        self.operators = list[GraphOperator]()
        self.names = dict[str, str]()
        self.nodes = dict[str, Node]()
        self.sources = dict[str, tuple[str, str]]()
        self.unknown: dict[str, int] = {}
        self.whole_modules = {path for path, each in module.named_modules() if any(True for _ in each.children())}

    def read(self) -> ExportedModule:
        specs = {each.arg.name: each for each in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                self._source(node, specs[node.name])
            elif node.op == "call_function":
                self._call(node)
        notes = [
            f"{target} is not known: its inputs and outputs stay whole on every rank ({count} ×)"
            for target, count in self.unknown.items()
        ]
        graph = OperatorGraph(self.name, tuple(self.operators), tuple(notes))
        return ExportedModule(graph, self.program, self.nodes, self.sources, self.names)

    def _source(self, node: Node, spec: Any) -> None:
        kind = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.USER_INPUT: "input"}
        what, target = kind.get(spec.kind, "constant"), spec.target or node.name
        value = node.meta["val"]
        trained = what == "parameter" and self.module.get_parameter(target).requires_grad
        self.names[node.name] = target
        self.sources[node.name] = (what, target)
        self._add(
            source(
                target,
                "parameter" if trained else "input",
                value.shape,
                dtype=TYPES.get(value.dtype, "fp32"),
                block=self._block([*_prefixes(target)]) if what != "input" else "",
            )
        )

    def _add(self, each: GraphOperator, node: Node | None = None) -> None:
        self.operators.append(each)
        if node is not None:
            self.nodes[each.name] = node

    def _block(self, paths: Iterable[str]) -> str:
        """Returns the outermost module of several parts with a number as its name, of those that something is in."""
        return next((path for path in paths if re.search(r"(^|\.)\d+$", path) and path in self.whole_modules), "")

    def _call(self, node: Node) -> None:
        name = plain(node)
        if not isinstance(node.meta.get("val"), Tensor):
            return  # a check, or several outputs: computed where a part is taken
        if name == "getitem" and plain(whole := cast(Node, node.args[0])) == "broadcast_tensors":
            taken = tensors_of(whole)[cast(int, node.args[1])]
            if taken.meta["val"].shape == node.meta["val"].shape:
                self.names[node.name] = self.names[taken.name]
                return
        tensors = tensors_of(cast(Node, node.args[0]) if name == "getitem" else node)
        letters = _Letters()
        value = node.meta["val"]
        described = self._described(name, node, tensors, value, letters)
        if described is None:
            named = plain(cast(Node, node.args[0])) if name == "getitem" else name
            self.unknown[named] = self.unknown.get(named, 0) + 1
            terms = [letters.term(each.meta["val"].shape) for each in tensors]
            described = terms, letters.term(value.shape), {"whole": frozenset(letters.sizes)}
        terms, output, more = described
        stack = node.meta.get("nn_module_stack") or {}
        block = self._block([str(path).removeprefix("L['self'].") for path, *_ in stack.values()])
        bias = None
        if name in ("linear", "conv1d", "conv2d") and len(tensors) == 3:
            bias = tensors.pop()
        common: dict[str, Any] = {"block": block, "dtype": TYPES.get(value.dtype, "fp32")}
        facts: dict[str, Any] = {**more, **common}
        inputs = tuple(self.names[each.name] for each in tensors)
        kind = "input" if name in CREATES and not inputs else "view" if name in VIEWS else "compute"
        given = GraphOperator(node.name, kind, inputs, tuple(terms[: len(inputs)]), output, letters.sizes, **facts)
        self._add(given, node)
        self.names[node.name] = node.name
        if bias is not None:
            place = len(output) - 1 if name == "linear" else 1
            sizes = dict(zip(output, value.shape, strict=True))
            terms, total = (output, (output[place],)), f"{node.name}.bias"
            added = (node.name, self.names[bias.name])
            self._add(GraphOperator(total, "compute", added, terms, output, sizes, **common), node)
            self.names[node.name] = total

    def _described(self, name: str, node: Node, tensors: list[Node], value: Any, letters: _Letters) -> Described | None:
        shapes = [tuple(each.meta["val"].shape) for each in tensors]
        if name == "getitem":
            return self._part(node, shapes, value, letters)
        if name in ELEMENTWISE:
            output = letters.term(value.shape)
            return [letters.beside(shape, output) for shape in shapes], output, {}
        if name in CREATES and not shapes:
            return [], letters.term(value.shape), {}
        if name in RESHAPES:
            return _reshaped(shapes[0], tuple(value.shape), letters)
        if name in POOLS:
            first = letters.term(shapes[0])
            kept = first[:2] if len(shapes[0]) > 2 else first[:1]
            output = (*kept, *letters.term(value.shape[len(kept) :]))
            return [first], output, {"whole": frozenset(letters.sizes) - {*kept}}
        read: Callable[..., Described | None] | None = getattr(self, f"_{name}", None)
        return read(node, shapes, value, letters) if read else None

    def _part(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described | None:
        whole: Any = node.args[0]
        if plain(whole) not in PARTS:
            return None
        if plain(whole) == "unbind":
            return _selected(whole, shapes, value, letters)
        term = letters.term(shapes[0])
        dim = _argument(
            whole, 1 if plain(whole) in ("max", "min") else 2, "dim", -1 if plain(whole) in ("topk", "sort") else 0
        )
        if len(value.shape) != len(term):
            return None
        place = dim % len(term)
        output = (*term[:place], letters.new(value.shape[place]), *term[place + 1 :])
        return [term], output, {"whole": frozenset((term[place], output[place]))}

    def _linear(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        first = letters.term(shapes[0])
        out = letters.new(shapes[1][0])
        return [first, (out, first[-1])], (*first[:-1], out), {}

    def _matmul(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described | None:
        first, second = shapes
        if len(first) < 2 or len(second) < 2:
            return None
        *batch, m, n = value.shape
        output = letters.term((*batch, m, n))
        inner = letters.new(first[-1])
        return (
            [
                (*letters.beside(first[:-2], output[:-2]), output[-2], inner),
                (*letters.beside(second[:-2], output[:-2]), inner, output[-1]),
            ],
            output,
            {},
        )

    def _einsum(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described | None:
        left, arrow, right = str(node.args[0]).replace(" ", "").partition("->")
        if not arrow or "." in left:
            return None
        known: dict[str, str] = {}
        terms = [
            tuple(
                known.setdefault(one, "") or known.update({one: letters.new(size)}) or known[one]
                for one, size in zip(text, shape, strict=True)
            )
            for text, shape in zip(left.split(","), shapes, strict=True)
        ]
        if any(len({*term}) < len(term) for term in terms):
            return None
        return terms, tuple(known[one] for one in right), {}

    def _layer_norm(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        last = output[len(output) - len(node.args[1]) :]  # pyrefly: ignore[bad-argument-type]
        return [letters.beside(shape, output) for shape in shapes], output, {"whole": frozenset(last)}

    _rms_norm = _layer_norm

    def _group_norm(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        return [output, *((output[1],) for _ in shapes[1:])], output, {"whole": frozenset(output[1:])}

    def _batch_norm(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        whole = frozenset((output[0], *output[2:])) if node.args[5] else frozenset[str]()
        return [output, *((output[1],) for _ in shapes[1:])], output, {"whole": whole}

    def _softmax(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        return [output], output, {"whole": frozenset(output[int(node.args[1])])}  # pyrefly: ignore[bad-argument-type]

    _log_softmax = _cumsum = _softmax

    def _scaled_dot_product_attention(
        self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters
    ) -> Described | None:
        query, key, val = shapes[:3]
        heads = letters.term(key[:-2])
        outer = (*heads[:-1], heads[-1] + letters.new(query[-3] // key[-3])) if query[:-2] != key[:-2] else heads
        q, k, d, e = (letters.new(size) for size in (query[-2], key[-2], query[-1], val[-1]))
        output = (*outer, q, e)
        causal = bool(_argument(node, 5, "is_causal", False))
        more = [letters.beside(shape, (*output[:-1], k)) for shape in shapes[3:]]
        flops = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + val[-1]) / (2 if causal else 1)
        moved = float(sum(prod(shape) for shape in (*shapes, tuple(value.shape))) * value.element_size())
        whole = frozenset((k, d, e, *([q] if causal else [])))
        return (
            [(*outer, q, d), (*heads, k, d), (*heads, k, e), *more],
            output,
            {"whole": whole, "flops": flops, "moved": moved},
        )

    def _embedding(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        rows, width = letters.term(shapes[0])
        ids = letters.term(shapes[1])
        moved = 2.0 * value.numel() * value.element_size()
        padded = int(_argument(node, 2, "padding_idx", -1)) >= 0
        return (
            [(rows, width), ids],
            (*ids, width),
            {"flops": 0.0, "moved": moved, "whole": frozenset(rows if padded else "")},
        )

    def _cross_entropy_loss(
        self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters
    ) -> Described | None:
        if (
            len(shapes) != 2
            or shapes[0][:1] + shapes[0][2:] != shapes[1]
            or int(_argument(node, 3, "reduction", 1)) == 0
        ):
            return None
        first = letters.term(shapes[0])
        return [first, (first[0], *first[2:])], (), {"whole": frozenset(first[1])}

    def _mse_loss(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described | None:
        if shapes[0] != shapes[1] or value.shape:
            return None
        first = letters.term(shapes[0])
        return [first, first], (), {"flops": 0.0}

    _l1_loss = _binary_cross_entropy_with_logits = _mse_loss

    def _mean(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        term = letters.term(shapes[0])
        over = node.args[1] if len(node.args) > 1 else None
        dims = range(len(term)) if not over else [over] if isinstance(over, int) else over
        gone = {int(dim) % len(term) for dim in dims}  # pyrefly: ignore[bad-argument-type, not-iterable]
        kept = len(value.shape) == len(term)
        output = tuple(
            letters.new(1) if place in gone else one for place, one in enumerate(term) if kept or place not in gone
        )
        return [term], output, {"flops": 0.0}

    _sum = _mean

    def _reduced_whole(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        terms, output, _ = self._mean(node, shapes, value, letters)
        return terms, output, {"whole": frozenset(terms[0]) - {*output}}

    _amax = _amin = _argmax = _all = _any = _logsumexp = _var = _reduced_whole

    def _transpose(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        term = [*letters.term(shapes[0])]
        a, b = (int(each) for each in node.args[1:3]) if len(node.args) > 1 else (0, -1)  # pyrefly: ignore[bad-argument-type]
        output = [*term]
        output[a], output[b] = term[b], term[a]
        return [tuple(term)], tuple(output), {}

    _t = _transpose

    def _permute(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        term = letters.term(shapes[0])
        return [term], tuple(term[int(place)] for place in node.args[1]), {}  # pyrefly: ignore[bad-argument-type, not-iterable]

    def _expand(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        return [letters.beside(shapes[0], output)], output, {}

    def _cat(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        place = int(_argument(node, 1, "dim", 0)) % len(output)
        own = [letters.new(shape[place]) for shape in shapes]
        terms = [(*output[:place], one, *output[place + 1 :]) for one in own]
        return terms, output, {"whole": frozenset((*own, output[place]))}

    def _stack(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        output = letters.term(value.shape)
        place = int(_argument(node, 1, "dim", 0)) % len(output)
        return [output[:place] + output[place + 1 :]] * len(shapes), output, {"whole": frozenset(output[place])}

    def _select(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        return _selected(node, shapes, value, letters)

    def _slice(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        term = letters.term(shapes[0])
        place = int(_argument(node, 1, "dim", 0)) % len(term)
        output = (*term[:place], letters.new(value.shape[place]), *term[place + 1 :])
        whole = frozenset((term[place], output[place]))
        return [term], output if value.shape[place] != shapes[0][place] else term, {"whole": whole & {*letters.sizes}}

    def _one_hot(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        term = letters.term(shapes[0])
        added = letters.new(value.shape[-1])
        return [term], (*term, added), {"whole": frozenset(added), "flops": 0.0}

    def _conv2d(self, node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
        groups = int(_argument(node, 6, "groups", 1))
        batch, channels, *space = letters.term(shapes[0])
        single = groups == shapes[0][1] == shapes[1][0]
        out = channels if single else letters.new(shapes[1][0])
        inner = channels if groups == 1 else letters.new(shapes[1][1])
        window = [letters.new(size) for size in shapes[1][2:]]
        output = (batch, out, *(letters.new(size) for size in value.shape[2:]))
        whole = {*space, *window, *output[2:], *([] if groups == 1 or single else [channels, out, inner])}
        flops = 2.0 * value.numel() * prod(shapes[1][1:])
        moved = float(value.element_size() * (sum(map(prod, shapes[:2])) + value.numel()))
        more = {"whole": frozenset(whole), "flops": flops, "moved": moved}
        return [(batch, channels, *space), (out, inner, *window)], output, more

    _conv1d = _conv2d


def _selected(node: Node, shapes: list[tuple[int, ...]], value: Any, letters: _Letters) -> Described:
    term = letters.term(shapes[0])
    place = int(_argument(node, 1, "dim", 0)) % len(term)
    return [term], term[:place] + term[place + 1 :], {"whole": frozenset(term[place])}


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], letters: _Letters) -> Described:
    """Returns the letters of a tensor that is read in another shape: dimensions of both sides whose products agree."""
    terms: tuple[list[str], list[str]] = ([], [])
    shapes, at = (before, after), [0, 0]
    whole = set[str]()
    while at[0] < len(before) or at[1] < len(after):
        sides: list[list[int]] = [[], []]
        for side in (0, 1):
            if at[side] < len(shapes[side]):
                sides[side].append(shapes[side][at[side]])
                at[side] += 1
        while prod(sides[0]) != prod(sides[1]):
            side = 0 if prod(sides[0]) < prod(sides[1]) else 1
            sides[side].append(shapes[side][at[side]])
            at[side] += 1
        many, few = (0, 1) if len(sides[0]) >= len(sides[1]) else (1, 0)
        if len(sides[few]) <= 1:
            group = "".join(letters.new(size) for size in sides[many])
            terms[many].extend(group)
            terms[few].extend([group] * len(sides[few]))
        else:
            for side in (0, 1):
                found = letters.term(sides[side])
                terms[side].extend(found)
                whole |= {*found}
    return [tuple(terms[0])], tuple(terms[1]), {"whole": frozenset(whole)}


def tensors_of(node: Node) -> list[Node]:
    """Returns the tensors that a node takes, in their order."""
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]


def plain(node: Node) -> str:
    """Returns the name of an aten operator without its overload: `_softmax` is `softmax`, `add_` is `add`."""
    name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
    return name.rstrip("_") if name not in ("_to_copy",) else name


def is_mean(node: Node) -> bool:
    """Returns whether an operator takes the mean, which a part's must be weighted for."""
    name = plain(node)
    return name == "mean" or (name in REDUCED and int(_argument(node, REDUCED[name], "reduction", 1)) == 1)


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))
