"""Finds the first module in which a layout differs from one process, from what the ranks recorded (trace.py).

The order is that of the forward pass, then of the backward pass, then the gradients of parameters: what flows is right
by then, so that a reduction, or a weight's own product, is wrong. Before them come the parameters at the start of the
step, which an earlier update left.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from phalanx.blocks.operator import is_expert
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.layout import Layout
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import AxisGeometry
from phalanx.parallel.parameter_shards import BALANCING_BIAS
from phalanx.units import counted, gib
from phalanx.verify.cases import RunRanks
from phalanx.verify.measure import MIN_STEPS, ROUNDING, TOLERANCE
from phalanx.verify.select import Selection
from phalanx.verify.trace import trace_step

Direction = Literal["forward", "backward", "gradient", "update"]
CONSTANT = 1e-6
"""Relative spread of found / expected up to which it is one factor."""
MOST_RANGES = 4
FLOWING = ("tp", "cp", "ulysses", "ring", "ep", "pp")
"""The axes that activations travel along, which are tried first."""
REDUCING = ("tp", "dp_replicate", "shard", "edp", "pp")
"""The axes over which gradients of parameters are summed."""
Axes = dict[str, AxisGeometry]


@dataclass(frozen=True)
class Divergence:
    """The first difference between a layout and one process."""

    module: str
    """The module, by its name in the plain model ("blocks.0.attn.wo"); "loss"; or a parameter, by `direction`."""
    direction: Direction
    """Where it differs: in the module's output, in the gradient of its output, in a parameter's gradient alone, or in a
    parameter after an update."""
    step: int
    """From 1."""
    ranks: tuple[int, ...]
    """The ranks that have a wrong value."""
    rel: float
    """The largest relative difference; NaN and infinity count as infinity."""
    what: str
    """The part of the tensor that differs, and what it looks like."""
    collective: str | None
    """The collective that the first of the ranks issued last before it, with its axis and bytes."""
    axis: str | None = None
    """The axis whose reduction is wrong, where the values tell it."""
    between: tuple[str, ...] = ()
    """The collectives that this rank issued after the module before this one."""
    unknown: tuple[str, ...] = ()
    """Modules that could not be compared, and why."""
    table: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    """Relative differences by direction ("forward", "backward"), module and rank; None where a rank has no part."""


def locate(
    run: RunRanks,
    selection: Selection,
    layout: Layout,
    step: int,
    trace: Callable[..., None] = trace_step,
    timeout: float = 600.0,
) -> Divergence | None:
    """Runs a layout of a selection, and one process, up to `step` (from 1) again, and returns the first difference in
    that step; None if nothing differs that is recorded. `trace` runs on the layout's ranks."""
    job, vocab = selection.case(layout), selection.compared.vocab_size
    stale = selection.stale(layout)
    steps = max(step, MIN_STEPS) if stale else step
    with tempfile.TemporaryDirectory(prefix="phalanx_trace_") as folder:
        one, many = Path(folder, "one"), Path(folder, "many")
        one.mkdir()
        many.mkdir()
        run(trace_step, 1, selection.alone(layout), vocab, steps, step - 1, one, stale, timeout=timeout)
        run(trace, layout.processes, job, vocab, steps, step - 1, many, timeout=timeout)
        whole = _read(one / "rank_0.safetensors", 0)
        ranks = [_read(many / f"rank_{rank}.safetensors", rank) for rank in range(layout.processes)]
    names = list(parameter_shapes(job.model, vocab))
    return Comparison(whole, ranks, layout, job.model.seq_len, names, step, lr=job.optimizer.lr, stale=stale).first()


@dataclass
class RankTrace:
    """The record of one rank."""

    rank: int
    coordinates: dict[str, int]
    tensors: dict[str, Tensor]
    records: dict[tuple[str, str], list[dict[str, Any]]]
    """Its records by direction ("output", "gradient") and module, in order of time."""
    order: list[str]
    """Modules in the order of the forward pass."""
    shards: list[dict[str, Any]]
    unknown: dict[str, str]
    calls: list[tuple[str, str, int]]

    def collective(self, number: int) -> str | None:
        """Returns the last call before call `number`."""
        if not 0 < number <= len(self.calls):
            return None
        axis, collective, sent = self.calls[number - 1]
        return f"{axis} {collective} of {gib(sent)}"


def _read(path: Path, rank: int) -> RankTrace:
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    records: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in facts["records"]:
        records[record["direction"], record["module"]].append(record)
    order = list(dict.fromkeys(each["module"] for each in facts["records"] if each["direction"] == "output"))
    of_rank = facts["coordinates"], load_file(path), dict(records), order, facts["shards"], facts["unknown"]
    return RankTrace(rank, *of_rank, [tuple(call) for call in facts["calls"]])


@dataclass
class RankPart:
    """One rank's part of a tensor, beside the values that it should have."""

    trace: RankTrace
    found: Tensor
    expected: Tensor
    scale: float
    call: int
    places: Tensor | None = None
    """The token of each row: row of the batch × seq_len + position; None for a parameter."""
    columns: range = range(0)
    unit: tuple[str, int] = ("element", 1)

    @cached_property
    def part(self) -> tuple[Any, range]:
        """Its tokens and columns, by which the same parts of several ranks are found."""
        return None if self.places is None else tuple(self.places.tolist()), self.columns

    @cached_property
    def bad(self) -> Tensor:
        """True for each element that differs."""
        return ~((self.found - self.expected).abs() <= TOLERANCE * self.scale)

    @property
    def rel(self) -> float:
        """The relative difference; infinity for what is no number."""
        if self.found.shape != self.expected.shape:
            return math.inf
        if not self.found.numel():
            return 0.0
        absolute = float((self.found - self.expected).abs().max())
        rel = absolute / self.scale if self.scale else absolute
        return math.inf if math.isnan(rel) else rel


class Comparison:
    """The comparison of one step of a layout's ranks with that of one process."""

    def __init__(
        self,
        whole: RankTrace,
        ranks: Sequence[RankTrace],
        layout: Layout,
        seq_len: int,
        names: Sequence[str],
        step: int,
        *,
        lr: float = 0.0,
        stale: Layout | None = None,
    ):
        self.whole, self.ranks, self.layout, self.seq_len, self.lr = whole, ranks, layout, seq_len, lr
        self.names, self.step, self.stale = names, step, stale
        self._known: dict[tuple[str, str], Tensor] = {}
        self.axes = _axes(layout, FLOWING)
        self.reducing = _axes(layout, REDUCING)
        self.largest = {
            direction: max(
                (float(self._assembled(direction, module).abs().max()) for module in whole.order), default=0.0
            )
            for direction in ("output", "gradient")
        }

    def first(self) -> Divergence | None:
        """Returns the first difference."""
        flows = [("output", module) for module in self.whole.order]
        flows += [("gradient", module) for module in reversed(self.whole.order)]
        if not self.stale and (found := self._parameters("before")):
            return found
        for direction, module in flows:
            if direction == "output" and (missing := self._missing(module)):
                return missing
            wrong = [each for each in self._flow(direction, module) if not each.rel <= TOLERANCE]
            if wrong:
                return self._of_flow(direction, module, wrong)
        return self._parameters("gradient") or self._parameters("after")

    # What flows.

    def _assembled(self, direction: str, module: str) -> Tensor:
        """Returns one process's tensor, (tokens of the batch, features), NaN where it has none."""
        if (direction, module) in self._known:
            return self._known[direction, module]
        records = self.whole.records.get((direction, module), [])
        parts = [(self.whole.tensors[f"places/{each['key']}"], self.whole.tensors[each["key"]]) for each in records]
        if not parts:
            return torch.zeros(1, 1)
        tokens = 1 + max(int(places.max()) for places, _ in parts)
        found = parts[0][1].new_full((tokens, parts[0][1].shape[1]), math.nan)
        for places, part in parts:
            found[places] = part
        self._known[direction, module] = found
        return found

    def _flow(self, direction: str, module: str) -> Iterator[RankPart]:
        """Yields what every rank has of a module's output, or of its gradient. Summands are added first."""
        expected = self._assembled(direction, module)
        if (direction, module) not in self.whole.records:
            return
        scale = float(expected.abs().max())
        scale = max(scale, ROUNDING * self.largest[direction]) if direction == "gradient" else scale
        together: dict[Any, list[tuple[RankTrace, dict[str, Any], Tensor]]] = defaultdict(list)
        for trace in self.ranks:
            for record in trace.records.get((direction, module), ()):
                places = trace.tensors[f"places/{record['key']}"]
                of = tuple(place for name, place in trace.coordinates.items() if name != "tp")
                alone = () if record["partial"] else (trace.rank,)
                together[of, alone, tuple(places.tolist())].append((trace, record, places))
        replicas = self.layout.independent_replicas if direction == "gradient" else 1
        for several in together.values():
            places, total = several[0][2], None
            parts = [trace.tensors[record["key"]] / replicas for trace, record, _ in several]
            columns = [self._columns(part, expected, t) for part, (t, *_) in zip(parts, several, strict=True)]
            if several[0][1]["partial"]:
                total = expected.new_zeros(len(places), expected.shape[1])
                for part, cut in zip(parts, columns, strict=True):
                    total[:, cut.start : cut.stop] += part[:, : len(cut)]
            for part, cut, (trace, record, _) in zip(parts, columns, several, strict=True):
                mine = slice(cut.start, cut.stop)
                found = part[:, : len(cut)] if total is None else total[:, mine]
                right = expected[places, mine]
                if record["unit"][0] == "sum":  # of losses, whose gradients are all the same
                    right = (right.sum() if direction == "output" else right.mean()).view(1, 1)
                    scaled = max(scale, float(right.abs()))
                    yield RankPart(trace, found, right, scaled, record["call"])
                    continue
                yield RankPart(trace, found, right, scale, record["call"], places, cut, tuple(record["unit"]))

    def _columns(self, part: Tensor, expected: Tensor, trace: RankTrace) -> range:
        """Returns the features of the whole that a tensor rank's part should be: equal runs, which several neighbours
        share if there are fewer; beyond the whole there is padding."""
        width, here, tp = expected.shape[1], part.shape[1], self.layout.tp
        if here >= width:
            return range(width)
        start = trace.coordinates["tp"] // max(1, tp * here // width) * here
        return range(start, min(start + here, width))

    def _missing(self, module: str) -> Divergence | None:
        """Returns the difference that no rank has computed a module for some tokens."""
        expected = self._assembled("output", module)
        computed = torch.zeros(len(expected), dtype=torch.bool)
        traces = [trace for trace in self.ranks if ("output", module) in trace.records]
        for trace in traces:
            for record in trace.records["output", module]:
                computed[trace.tensors[f"places/{record['key']}"]] = True
        if not traces or computed.all():
            return None
        missing = (~computed).nonzero().flatten()
        last = max(record["call"] for record in traces[0].records["output", module])
        return self._divergence(
            *(traces[0], last, module, "forward"),
            ranks=tuple(trace.rank for trace in traces),
            rel=math.inf,
            what=f"no rank computed it for {self._tokens(missing, None)}",
        )

    def _of_flow(self, direction: str, module: str, wrong: list[RankPart]) -> Divergence:
        words, axis = self._looks(direction, module, wrong)
        first = wrong[0]
        before = self._before(direction, module, first)
        return self._divergence(
            *(first.trace, first.call, module, "forward" if direction == "output" else "backward"),
            ranks=tuple(dict.fromkeys(each.trace.rank for each in wrong)),
            rel=max(each.rel for each in wrong),
            what="; ".join([*self._parts(module, wrong), *words]),
            axis=axis,
            between=tuple(str(first.trace.collective(number)) for number in range(before + 1, first.call + 1)),
        )

    def _before(self, direction: str, module: str, of: RankPart) -> int:
        """Returns the number of calls that a rank had issued when it recorded the module before this one."""
        order, at = self.whole.order, self.whole.order.index(module)
        records = of.trace.records
        calls = [
            record["call"]
            for other in (order[:at] if direction == "output" else order[at + 1 :])
            for record in records.get((direction, other), ())
        ]
        return max((call for call in calls if call <= of.call), default=of.call)

    # What it looks like.

    def _parts(self, module: str, wrong: list[RankPart]) -> list[str]:
        """Returns which tokens, heads, columns or experts differ, of which ranks."""
        of_rank: dict[int, list[RankPart]] = defaultdict(list)
        by_words: dict[str, list[int]] = defaultdict(list)
        for each in wrong:
            of_rank[each.trace.rank].append(each)
        for rank, several in of_rank.items():
            by_words[self._part(module, several)].append(rank)
        return [f"{words} of {_ranks(ranks)}" if words else _ranks(ranks) for words, ranks in by_words.items()]

    def _part(self, module: str, several: list[RankPart]) -> str:
        first = several[0]
        if first.found.shape != first.expected.shape:
            return f"shape {tuple(first.found.shape)} instead of {tuple(first.expected.shape)}"
        if first.places is None:
            return "the sum over a micro-batch" if first.found.numel() == 1 else ""
        rows = torch.cat([each.places[each.bad.any(1)] for each in several if each.places is not None])
        every = torch.cat([each.places for each in several if each.places is not None])
        words = [self._tokens(rows, every)]
        columns = torch.stack([each.bad.any(0) for each in several]).any(0).nonzero().flatten()
        name, width = first.unit
        if name == "choice":
            words += self._experts(module, several) if module.endswith(".experts") else []
        elif len(columns) < len(first.columns) or (name == "head" and len(first.columns) > width):
            units = sorted({(first.columns.start + int(column)) // width for column in columns})
            whole = len(units) * width >= len(first.columns)
            words.append(f"all {name}s" if whole and self.layout.tp == 1 else _named(name, units))
        return ", ".join(words)

    def _tokens(self, places: Tensor, every: Tensor | None) -> str:
        """Returns places in words: rows of the batch and tokens by position. `every`: the places that were compared."""
        rows, tokens = places // self.seq_len, places % self.seq_len
        if every is not None and len(places.unique()) == len(every.unique()):
            positions = sorted({int(token) for token in tokens})
            of_all = len(positions) == self.seq_len
            return "all tokens" if of_all else _named("token", positions)
        found = [_named("token", sorted({int(token) for token in tokens}))]
        known = {int(row) for row in (rows if every is None else every // self.seq_len)}
        if every is None or {int(row) for row in rows} != known:
            found.insert(0, _named("row", sorted({int(row) for row in rows})))
        return ", ".join(found)

    def _experts(self, module: str, several: list[RankPart]) -> list[str]:
        """Returns the experts that the tokens which differ chose."""
        chosen, found = self._assembled("output", f"{module.rpartition('.')[0]}.router.choice"), set[int]()
        for each in several:
            assert each.places is not None, "choices are those of tokens"
            bad = each.bad.unflatten(1, (chosen.shape[1], -1)).any(2)
            found |= {int(expert) for expert in chosen[each.places][bad]}
        return [_named("expert", sorted(found))] if found else []

    def _looks(self, direction: str, module: str, wrong: list[RankPart]) -> tuple[list[str], str | None]:
        """Returns what the wrong values look like, and the axis that they tell."""
        words = list[str]()
        if any(each.found.shape != each.expected.shape for each in wrong):
            return words, None
        if direction == "output" and (weight := self._weight(module, wrong)):
            words.append(weight)
        told, axis = self._factor(wrong, self.axes)
        words += told
        if axis is None and (axis := self._unsummed([*self._flow(direction, module)], self.axes)) is not None:
            words.append(f"the {axis} ranks' values add up to the expected ones: they are not summed over {axis}")
        if not told and axis is None and direction == "output":
            if moved := self._moved(module, wrong):
                words.append(moved)
            elif module.endswith((".q", ".k")) and _only_turned(wrong):
                words.append("every head has the right length: it is turned to another position")
        if direction == "output" and (before := self._later_block(module, wrong[0].trace)):
            words.append(f"rank {wrong[0].trace.rank} ran it after {before}")
        elif direction == "output" and not any("weight" in word for word in words) and self._weights_of(module):
            words.append("its input and weights agree")
        return words, axis

    def _later_block(self, module: str, trace: RankTrace) -> str | None:
        """Returns the last block that a rank ran before a module of an earlier one."""
        if not module.startswith("blocks."):
            return None
        before = trace.order[: trace.order.index(module)]
        blocks = [name for name in before if name.startswith("blocks.") and name.count(".") == 1]
        later = [name for name in blocks if int(name.split(".")[1]) > int(module.split(".")[1])]
        return later[-1] if later else None

    def _factor(self, wrong: list[RankPart], of: Axes) -> tuple[list[str], str | None]:
        """Returns the constant factor between found and expected values, if there is one, and the axis of that size."""
        found = torch.cat([each.found[each.bad] for each in wrong]).double()
        expected = torch.cat([each.expected[each.bad] for each in wrong]).double()
        if not found.isfinite().all():
            return ["not a number"], None
        if not found.any():
            return ["all zeros"], None
        whole = torch.cat([each.found.flatten() for each in wrong]).double()
        right = torch.cat([each.expected.flatten() for each in wrong]).double()
        factor = float((whole * right).sum() / (right * right).sum()) if right.any() else 0.0
        scale = max(float(right.abs().max()), 1e-300)
        if (
            not factor
            or not right.isfinite().all()
            or float((whole - factor * right).abs().max()) > CONSTANT * scale
            or not expected.any()
        ):
            return [], None
        if abs(factor - 1) < CONSTANT:
            return [f"all within {CONSTANT:g} of the expected values: rounded to a lower precision?"], None
        axes = [name for name, line in of.items() if abs(factor * line.size - 1) < CONSTANT]
        over = [name for name, line in of.items() if abs(factor / line.size - 1) < CONSTANT]
        where = f"{factor:.6g} × the expected values"
        if axes:
            return [f"{where}: divided by the size of {' or '.join(axes)} once too often?"], axes[0]
        if over:
            return [f"{where}: summed twice, or not divided, over {' or '.join(over)}?"], over[0]
        return [f"{where}{': summed twice?' if abs(factor - 2) < CONSTANT else ''}"], None

    def _unsummed(self, every: list[RankPart], axes: Axes) -> str | None:
        """Returns the axis whose ranks hold summands of the expected values."""
        for name, line in axes.items():
            groups = _along(line, every)
            if groups and all(
                len(group) == line.size
                and float((sum(each.found for each in group) - group[0].expected).abs().max())
                <= CONSTANT * max(group[0].scale, 1e-300)
                for group in groups
            ):
                return name
        return None

    def _moved(self, module: str, wrong: list[RankPart]) -> str:
        """Returns which other tokens', or columns', values a rank has in place of its own."""
        expected = self._assembled("output", module)
        for each in wrong:
            if each.places is None or not expected.isfinite().all():
                return ""
            mine = slice(each.columns.start, each.columns.stop)
            for words, found, every, own in (
                ("token", each.found[each.bad.any(1)], expected[:, mine], each.places[each.bad.any(1)]),
                ("column", each.found[:, each.bad.any(0)].t(), expected[each.places].t(), None),
            ):
                if not len(found) or len(found) * len(every) > 1_000_000:
                    continue
                away, nearest = torch.cdist(found.double(), every.double()).min(1)
                if float(away.max()) > CONSTANT * each.scale or len(nearest.unique()) < min(2, len(found)):
                    continue
                if own is None:
                    return f"they are the whole's {_named(words, sorted({int(x) for x in nearest}))}"
                rows = [module != "positions" and set((place // self.seq_len).tolist()) for place in (nearest, own)]
                theirs = sorted({int(token) for token in nearest % self.seq_len})
                where = _named("token", theirs) if rows[0] == rows[1] else self._tokens(nearest, None)
                return f"rank {each.trace.rank} has the values of {where}"
        return ""

    def _weights_of(self, module: str) -> list[str]:
        return [
            key
            for key in self.whole.tensors
            if key.startswith(f"weight/{module}.") and key.count(".") == module.count(".") + 1
        ]

    def _weight(self, module: str, wrong: list[RankPart]) -> str:
        """Returns which of the weights that a module used is not the part of one process's that the rank should
        have."""
        for key in self._weights_of(module):
            ranks = list[int]()
            for each in wrong:
                mine, whole = each.trace.tensors.get(key), self.whole.tensors[key]
                if mine is None or mine.dim() != whole.dim():
                    continue
                expected = whole
                for dim in range(whole.dim()):
                    cut = self._columns(
                        mine.movedim(dim, -1).reshape(-1, mine.shape[dim])[:1],
                        whole.movedim(dim, -1).reshape(-1, whole.shape[dim])[:1],
                        each.trace,
                    )
                    expected = expected.narrow(dim, cut.start, len(cut))
                if mine.shape == expected.shape and not torch.allclose(mine, expected, rtol=TOLERANCE, atol=0):
                    ranks.append(each.trace.rank)
            if ranks:
                stale = f": the update of step {self.step - 1} has not reached it" if self.step > 1 else ""
                return f"its {key.rpartition('.')[2]} differs from one process's on {_ranks(ranks)}{stale}"
        return ""

    # Parameters.

    def _parameters(self, when: str) -> Divergence | None:
        """Returns the first parameter that differs before or after the step, or whose gradient does."""
        every = {name: self._shards(when, name) for name in self.names}
        wrong = {name: bad for name, found in every.items() if (bad := [d for d in found if not d.rel <= TOLERANCE])}
        if not wrong:
            return None
        name, several = next(iter(wrong.items()))
        axes = _axes(self.layout, ("ep", *REDUCING)) if is_expert(name) else self.reducing
        words, axis = self._factor(several, axes)
        if axis is None and (axis := self._unsummed(every[name], axes)) is not None:
            words.append(f"the {axis} ranks' values add up to the expected ones: they are not summed over {axis}")
        words = words or self._disagreement(every[name], axes)
        if (others := len(wrong) - 1) > 0:
            words = [*words, f"so {'does' if others == 1 else 'do'} {counted(others, 'other parameter')}"]
        found = self._divergence(
            *(several[0].trace, several[0].call, name, "gradient" if when == "gradient" else "update"),
            ranks=tuple(dict.fromkeys(each.trace.rank for each in several)),
            rel=max(each.rel for each in several),
            what="; ".join([*self._parts(name, several), *words]),
            axis=axis,
        )
        return replace(found, step=self.step - 1) if when == "before" else found

    def _disagreement(self, every: list[RankPart], axes: Axes) -> list[str]:
        """Returns the first axis along which ranks that should hold equal values do not."""
        for name, line in axes.items():
            if any(
                not torch.allclose(each.found, group[0].found, rtol=1e-6, atol=TOLERANCE * each.scale)
                for group in _along(line, every)
                for each in group[1:]
            ):
                return [f"ranks along {name} have different values of the same elements"]
        return []

    def _shards(self, when: str, name: str) -> list[RankPart]:
        whole = next((s for s in self.whole.shards if s["when"] == when and s["name"] == name), None)
        if whole is None:
            return []
        every = self.whole.tensors[whole["key"]].view(whole["whole"])
        scale = float(every.abs().max()) if every.numel() else 0.0
        scale = max(scale, ROUNDING * self._largest_gradient if when == "gradient" else self.lr)
        found = list[RankPart]()
        for trace in self.ranks:
            for shard in trace.shards:
                if shard["when"] != when or shard["name"] != name:
                    continue
                mine, expected = trace.tensors[shard["key"]], every
                if shard["dim"] is not None:
                    dim, first, length = shard["dim"], shard["first"], shard["size"]
                    padding = max(0, first + length - every.shape[dim])
                    expected = every.narrow(dim, min(first, every.shape[dim]), max(0, length - padding))
                    if padding:
                        shape = list(expected.shape)
                        shape[dim] = padding
                        expected = torch.cat((expected, expected.new_zeros(shape)), dim)
                expected = expected.reshape(-1)[shard["start"] : shard["start"] + mine.numel()]
                if mine.numel():
                    cut = range(shard["start"], shard["start"] + mine.numel())
                    found.append(RankPart(trace, mine, expected, scale, shard["call"], columns=cut))
        return found

    @cached_property
    def _largest_gradient(self) -> float:
        return max(
            (
                float(self.whole.tensors[shard["key"]].abs().max())
                for shard in self.whole.shards
                if shard["when"] == "gradient" and not shard["name"].endswith(BALANCING_BIAS)
            ),
            default=0.0,
        )

    # The answer.

    def _divergence(self, trace: RankTrace, call: int, module: str, way: Direction, **facts: Any) -> Divergence:
        """Returns the difference in a module after so many calls of a rank, with the table of all others."""
        ways = {"forward": "output", "backward": "gradient"}
        table = {way: {name: self._row(of, name) for name in self.whole.order} for way, of in ways.items()}
        facts |= {"collective": trace.collective(call), "unknown": tuple(self._unknown()), "table": table}
        return Divergence(module, way, self.step, **facts)

    def _row(self, direction: str, module: str) -> list[float | None]:
        row: list[float | None] = [None] * len(self.ranks)
        for each in self._flow(direction, module):
            row[each.trace.rank] = max(row[each.trace.rank] or 0.0, each.rel)
        return row

    def _unknown(self) -> Iterator[str]:
        """Yields what was not compared: no module is left out in silence."""
        for trace in (self.whole, *self.ranks):
            for module, why in trace.unknown.items():
                yield f"{module}: {why}"
                return
        for direction, title in (("output", "output"), ("gradient", "gradient of the output")):
            modules = [module for way, module in self.whole.records if way == direction]
            missing = [
                module for module in modules if not any((direction, module) in trace.records for trace in self.ranks)
            ]
            if missing:
                yield f"no rank has the {title} of {', '.join(missing)} as a tensor of its own"


def _axes(layout: Layout, order: Sequence[str]) -> Axes:
    """Returns the axes of more than one rank, by their names in the ledger; of those with the same ranks the first."""
    shown = {"shard": "dp_shard" if layout.cp == 1 else "dp_shard_cp", "ring": "cp", "ulysses": "cp"}
    lines, found = meshes.lines(layout), dict[str, AxisGeometry]()
    for name in dict.fromkeys((*order, *lines)):
        if name in lines and lines[name].size > 1 and lines[name] not in found.values():
            found.setdefault(shown.get(name, name), lines[name])
    return found


def _along(line: AxisGeometry, every: Iterable[RankPart]) -> list[list[RankPart]]:
    """Returns the same parts of ranks along an axis."""
    groups: dict[Any, list[RankPart]] = defaultdict(list)
    for each in every:
        rank = each.trace.rank
        groups[rank - line.place(rank) * line.stride, each.part].append(each)
    return [*groups.values()]


def _only_turned(wrong: list[RankPart]) -> bool:
    """Returns whether heads differ and their lengths do not."""
    for each in wrong:
        found, right = (x.unflatten(1, (-1, each.unit[1])).norm(dim=2) for x in (each.found, each.expected))
        if not torch.allclose(found, right, rtol=CONSTANT):
            return False
    return True


def _named(name: str, numbers: Sequence[int]) -> str:
    """Returns numbers in order as ranges, such as "tokens 0–7, 16"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [str(a) if a == b else f"{a}–{b}" for a, b in ranges]
    if len(words) > MOST_RANGES:
        words = [*words[:MOST_RANGES], f"… ({len(numbers)} in all)"]
    plural = "entries" if name.endswith("entry") else f"{name}s"
    word = name if len(numbers) == 1 else name.replace("entry", plural) if plural == "entries" else plural
    return f"{word} {', '.join(words)}"


def _ranks(ranks: Iterable[int]) -> str:
    return _named("rank", sorted(set(ranks)))


def explained(found: Divergence) -> list[str]:
    """Returns the difference as lines: what is first, what it looks like, and the collectives before it."""
    how = {
        "forward": "is the first module whose output differs",
        "backward": "is the first module, from the loss on, whose output's gradient differs; all outputs agree",
        "gradient": "has a wrong gradient; all outputs and their gradients agree",
        "update": "is wrong after the update",
    }[found.direction]
    lines = [f"step {found.step}: {found.module} {how}", found.what]
    if found.between:
        lines.append(f"collectives since the module before, on rank {found.ranks[0]}: {', '.join(found.between)}")
    elif found.collective:
        none = "no collective since the module before; " if found.direction in ("forward", "backward") else ""
        lines.append(f"{none}the last collective of rank {found.ranks[0]}: {found.collective}")
    return lines
