"""The alternatives to the best layout: the fastest of each common kind, from its own search, and why it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd, inf
from typing import Any, NamedTuple

import numpy as np

from phalanx.blocks.kinds import attention_models
from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import MOMENTS
from phalanx.cost.prediction import Prediction
from phalanx.cost.rank_memory import needed_bytes
from phalanx.errors import JobError
from phalanx.partition.derived import named, tier_of
from phalanx.plan.bounds import ROUNDING
from phalanx.plan.branch import Found, Portion, Search
from phalanx.plan.plan import Alternative, Candidate
from phalanx.plan.simplicity import recompute_in_words
from phalanx.plan.space import (
    OPEN,
    RECOMPUTE,
    STATES,
    MeshDegrees,
    PlanRequest,
    Scheduled,
    Space,
    StateSharding,
    divisors,
)
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.techniques.memory import offloads
from phalanx.units import gib

MENTIONED = 0.01
"""Smallest difference of a part that is mentioned, as a share of the slower step."""
MOST_PARTS = 3
"""Most parts that are mentioned in each direction."""
PART_NAMES = {
    "matrix products": "matrix products",
    "memory-bound": "memory-bound work",
    "recompute": "recomputation",
    "host": "host overhead",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "tp exposed": "tensor-parallel communication",
    "cp exposed": "context-parallel communication",
    "ep exposed": "the experts' all-to-alls",
    "pp exposed": "pipeline communication",
    "dp_shard exposed": "dp_shard communication",
    "dp_replicate exposed": "dp_replicate communication",
}
"""Names of a prediction's parts in sentences."""
OMITTED_FIELDS = ("micro_batch", "accumulation", "pp_cut")
"""Fields of a layout that follow from others or are too long for a line; the micro-batch is mentioned if it differs."""


def explain(prediction: Prediction, other: Prediction, factor: float = 0.0) -> str:
    """Compares two predictions of the same step: "1.20 × as fast: recomputation 0 instead of 2.1 s; but pipeline bubble
    0.8 instead of 0.5 s". The largest differences come first, a memory excess last. `factor` is the speed-up if it is
    known better than by the predictions, for instance by simulation."""
    mine, theirs = dict(prediction.parts.items()), dict(other.parts.items())
    slower = max(prediction.step_time_s, other.step_time_s)
    names = sorted({*mine, *theirs}, key=lambda name: -abs(mine.get(name, 0.0) - theirs.get(name, 0.0)))
    gains, losses = list[str](), list[str]()
    for name in names:
        less = theirs.get(name, 0.0) - mine.get(name, 0.0)
        own, others = _short(mine.get(name, 0.0)), _short(theirs.get(name, 0.0))
        if abs(less) >= MENTIONED * slower and own != others:
            (gains if less > 0 else losses).append(f"{PART_NAMES.get(name, name)} {own} instead of {others} s")
    ratio = factor or other.step_time_s / prediction.step_time_s
    if ratio < 1:
        gains, losses = losses, gains
    text = "as fast" if abs(ratio - 1) < MENTIONED / 2 else f"{ratio:.2f} × as fast"
    if gains:
        text += f": {', '.join(gains[:MOST_PARTS])}"
    if losses:
        text += f"; but {', '.join(losses[:MOST_PARTS])}"
    if prediction.fits != other.fits:
        which, fullest = ("it", prediction.fullest) if other.fits else ("the other", other.fullest)
        text += f"; {which} does not fit, {gib(fullest.needed)} of {gib(prediction.memory_limit)}"
    return text


def differences(one: Layout, other: Layout) -> str:
    """Lists the settings of `one` that differ from `other`: "tp 4 instead of 8, recompute none instead of full"."""
    fields = [name for name in vars(one) if name not in OMITTED_FIELDS and getattr(one, name) != getattr(other, name)]
    if one.micro_batch != other.micro_batch:
        fields.append("micro_batch")
    return ", ".join(f"{name} {_value(one, name)} instead of {_value(other, name)}" for name in fields)


def _short(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _value(layout: Layout, name: str) -> str:
    value = getattr(layout, name)
    if name == "recompute_cut":
        return f"({recompute_in_words(layout)})" if value else "none"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


MODEL_AXES = ("tp", "cp", "pp", "ep")
AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
"""Names of the axes that cut the model."""
WITHOUT = "without "


class Family(NamedTuple):
    """A common kind of layouts."""

    name: str
    meshes: Callable[[Any], Any]
    """Returns whether a mesh with its micro-batch belongs to the family; takes a layout or the columns of a space."""
    options: Callable[[Scheduled, StateSharding, str], bool]
    """Returns whether a schedule, a state sharding and a recomputation belong to the family."""
    example: Layout
    """A layout of the family, whose problems are reported if the space has none."""

    def has(self, layout: Layout) -> bool:
        """Returns whether a layout belongs to this kind."""
        state = StateSharding(layout.zero, layout.reshard, layout.accumulate)
        scheduled = Scheduled(layout.schedule, layout.pp_chunks)
        return bool(self.meshes(layout)) and self.options(scheduled, state, layout.mode)


def families(space: Space, cluster: Cluster, best: Layout | None) -> Iterator[Family]:
    """Yields the kinds for a machine; the last ones are the best layout with one feature removed."""
    world = space.meshes[0]
    devices = world.tp * world.cp * world.pp * world.dp_shard * world.dp_replicate
    if devices == 1:
        return
    yield Family(
        "DDP: a whole copy per device", _flat(lambda c: c.dp_shard == 1), lambda *_: True, Layout(dp_replicate=devices)
    )
    flat = _flat(lambda c: c.dp_shard == devices)
    yield Family("ZeRO-1: optimizer state sharded", flat, _zero(1), Layout(dp_shard=devices, zero=1))
    yield Family("FSDP over all devices (zero 3)", flat, _zero(3), Layout(dp_shard=devices))
    node, where = neighbours(cluster)
    if devices > node:
        yield from _in_nodes(space, devices, node, where, min(node, cluster.joined))
    two = replace(Layout(), pp=min(divisors(devices)[1:]))
    yield Family(
        "pipeline and data parallel",
        lambda c: (c.pp > 1) & (c.tp == 1) & (c.cp == 1) & (c.ep == 1),
        _common(best),
        replace(two, dp_shard=devices // two.pp, zero=1),
    )
    if best:
        yield from _without(best)


def neighbours(cluster: Cluster) -> tuple[int, str]:
    """Returns the number of closely joined devices and their name: a node, or a rack with fast links throughout."""
    node = cluster.devices_per_node or 1
    return (cluster.joined, "rack") if cluster.joined > node else (node, "node")


def _in_nodes(space: Space, devices: int, node: int, where: str, joined: int) -> Iterator[Family]:
    """Yields the families that cut the model inside a node, or between nodes."""
    shard = max(divisors(devices, node))
    yield Family(
        f"HSDP: FSDP inside a {where}, replicas across",
        _flat(lambda c: c.dp_shard == shard),
        _zero(3),
        Layout(dp_shard=shard, dp_replicate=devices // shard),
    )
    for most, which in {joined: f"group of {joined} neighbours", node: where}.items():
        tp = max((mesh.tp for mesh in space.meshes if mesh.tp <= most), default=1)
        if tp > 1:
            yield from _tensor(devices, tp, which)


def _tensor(devices: int, tp: int, where: str) -> Iterator[Family]:
    """Yields the families of tensor parallelism inside a node, with what is usually combined with it."""
    yield Family(
        f"tensor parallel inside a {where} (tp {tp}), FSDP across",
        lambda c: (c.tp == tp) & (c.pp == 1) & (c.cp == 1) & (c.dp_shard == devices // tp),
        _zero(3),
        Layout(tp=tp, dp_shard=devices // tp),
    )
    yield Family(
        f"Megatron-LM: tensor parallel inside a {where} (tp {tp}), pipeline across, data parallel, 1F1B",
        lambda c: (c.tp == tp) & (c.pp > 1) & (c.cp == 1) & ((c.dp_replicate == 1) | (c.dp_shard == 1)),
        lambda scheduled, state, _: scheduled.schedule == Layout.schedule and state in (STATES[0], STATES[-1]),
        Layout(tp=tp, pp=2, dp_shard=devices // tp // 2, zero=1),
    )


def _without(best: Layout) -> Iterator[Family]:
    """Yields the best layout's meshes without one of its axes, and itself with another schedule or recomputation."""
    for axis, name in AXES.items():
        if getattr(best, axis) > 1:
            # All other axes stay open, used or not, so that they may take over.
            yield Family(
                f"{WITHOUT}{name} parallelism",
                partial(_same, layout=Layout(), names=(axis,)),
                _common(best),
                Layout(dp_shard=best.world),
            )
    same = replace(best, micro_batch=0, accumulation=0, pp_cut="")
    if best.pp > 1 and best.schedule != Layout.schedule:
        yield Family(
            f"{Layout.schedule.upper()} instead of {best.schedule}",
            lambda c: _same(c, best, MeshDegrees._fields),
            lambda scheduled, *_: scheduled.schedule == Layout.schedule,
            replace(same, schedule=Layout.schedule, pp_chunks=0),
        )
    if best.recompute != "full":
        yield Family(
            "full recomputation",
            lambda c: _same(c, best, (*MeshDegrees._fields, "micro_batch")),
            lambda scheduled, state, mode: (
                mode == "full" and scheduled.schedule == best.schedule and state.zero == best.zero
            ),
            replace(same, recompute="full"),
        )


def _flat(condition: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the condition for data parallelism alone that also meets `condition`."""
    return lambda c: _same(c, Layout(), MODEL_AXES) & condition(c)


def _same(c: Any, layout: Layout, names: tuple[str, ...]) -> Any:
    """Returns whether the named degrees are those of a layout."""
    found = getattr(c, names[0]) == getattr(layout, names[0])
    for name in names[1:]:
        found = found & (getattr(c, name) == getattr(layout, name))
    return found


def _zero(stage: int) -> Callable[[Scheduled, StateSharding, str], bool]:
    return lambda _, state, __: state.zero == stage


def _common(best: Layout | None) -> Callable[[Scheduled, StateSharding, str], bool]:
    """Returns the condition for schedules that are common practice, or the best layout's."""
    common = {
        Scheduled(name, entry.chunks[0] if entry.takes_chunks else 0)
        for name, entry in SCHEDULES.items()
        if entry.usual
    }
    common |= {Scheduled(best.schedule, best.pp_chunks)} if best else set()
    return lambda scheduled, *_: scheduled in common


FAST_LINKS = 100
"""Fewest GB/s per device of fast links inside a node: NVLink of every generation is close to that or above, a PCIe bus
(32 and 64) is not."""
TILES = 4, 16
"""Tiles of a layer that are tried where nothing fits otherwise."""
FAST_NETWORK = 25
"""Fewest GB/s per device of a fast network: a card of 200 Gb/s for every device, as in DGX machines from the A100 on.
"""


def rule(request: PlanRequest) -> tuple[str, Layout]:
    """Returns the reasons and the layout of the rules of thumb, for the first number of devices of a request. The
    layout does not fit if none of the rules' layouts does."""
    world = request.devices[0]
    if world == 1:
        return _one_device(request)
    return _one_node(request, world) if world <= node_of(request) else _many_nodes(request, world)


def node_of(request: PlanRequest) -> int:
    """Returns the number of devices that the rules treat as a node: all of a rack with fast links throughout."""
    return neighbours(request.cluster)[0]


def fitted(request: PlanRequest, layout: Layout) -> Layout | None:
    """Returns the layout with the least recomputation and, without a pipeline, the largest micro-batch with which it
    fits; None if it is illegal or does not fit."""
    fixed = {name: value for name, value in request.fixed.items() if name not in OPEN}
    layout = replace(layout, **fixed, micro_batch=1)
    if layout.pp > 1:
        layout = replace(layout, **{name: request.fixed[name] for name in _PIPELINE if name in request.fixed})
    if request.problems(layout):
        return None
    several = request.global_batch > layout.data_ranks and layout.shard_ranks > 1 and layout.zero > 1
    for mode, accumulate in product(RECOMPUTE, ("local", "sharded") if several else ("local",)):
        found = replace(layout, recompute=request.fixed.get("recompute", mode), accumulate=accumulate)  # pyrefly: ignore[bad-argument-type]
        if _fits(request, found):
            return found if layout.pp > 1 else _with_larger_batches(request, found)
    return None


_PIPELINE = ("schedule", "pp_chunks")


def _fits(request: PlanRequest, layout: Layout) -> bool:
    return needed_bytes(request.spec(layout), request.limit) <= request.limit


def _with_larger_batches(request: PlanRequest, layout: Layout) -> Layout:
    share = request.global_batch // layout.data_ranks
    while share % (2 * layout.micro_batch) == 0:
        larger = replace(layout, micro_batch=2 * layout.micro_batch)
        if not _fits(request, larger):
            break
        layout = larger
    # A single micro-batch needs no accumulation.
    return replace(layout, accumulate="local") if layout.micro_batch == share else layout


def on_host(layout: Layout) -> str:
    """Says what a layout offloads: "optimizer state and its update and activations on the host"."""
    update, files = "optimizer state and its update", ""
    if tier_of(layout, "optimizer") == "disk":
        update, files = "the optimizer's update", f", its state in files of {layout.offload_to}"
    words = {"optimizer": update}
    return f"{' and '.join(words.get(part, part) for part in named(layout))} on the host{files}"


def _one_device(request: PlanRequest) -> tuple[str, Layout]:
    if found := fitted(request, Layout()):
        how = "plain" if found.offload == "none" else on_host(found)
        return _explained(request, "one device, and the model fits", how, found)
    why = "one device, and the model does not fit"
    most = Layout()
    for most in offloads(Layout(), request.optimizer, request.cluster):
        if found := fitted(request, most):
            return _explained(request, why, f"{on_host(most)} (offload={most.offload})", found)
    why += f", nor with offload={most.offload}" if named(most) else ""
    block = replace(request.model, n_layers=1)
    if fitted(replace(request, model=block), Layout()) is None:
        why += "; not even one layer fits without tiling"
    return why, Layout(micro_batch=1, recompute="full")


def _one_node(request: PlanRequest, world: int) -> tuple[str, Layout]:
    fast, where = _links(request.cluster.intra.gbs, FAST_LINKS, "one node")
    if found := fitted(request, Layout(dp_replicate=world)):
        return _explained(request, f"{where}, a whole copy fits on a device", "DDP", found)
    sharded = [(f"ZeRO-{zero}", _with_experts(request, Layout(dp_shard=world, zero=zero))) for zero in (1, 2, 3)]
    pipelines = [(_name(layout), layout) for layout in _combinations(request, world, most_tp=1) if layout.pp > 1]
    tensor = [(_name(layout), layout) for layout in _combinations(request, world)]
    # On slow links pipelines come first: a stage's hidden states are the least traffic.
    tried = [*sharded, *tensor, *pipelines] if fast else [*pipelines, *sharded, *tensor]
    tried += _tiled(sharded[-1][1])
    return _first(request, f"{where}, a whole copy does not fit on a device", tried)


def _many_nodes(request: PlanRequest, world: int) -> tuple[str, Layout]:
    fast, where = _links(request.cluster.inter.gbs, FAST_NETWORK, "many nodes")
    combined = [(_name(layout), layout) for layout in _combinations(request, world)]
    whole = [("FSDP over all devices", _with_experts(request, Layout(dp_shard=world)))]
    if not fast:
        return _first(request, where, combined or whole)
    whole += _tiled(whole[0][1])
    if fitted(request, whole[0][1]) is None:
        problems = request.problems(replace(whole[0][1], micro_batch=1))
        where += f", FSDP over all devices {'is not legal' if problems else 'does not fit'}"
    return _first(request, where, [whole[0], *combined, *whole[1:]])


def _tiled(layout: Layout) -> list[tuple[str, Layout]]:
    """Returns ZeRO-3 for a block that does not fit while it is gathered whole."""
    return [(f"ZeRO-3, large layers in {tiles} tiles", replace(layout, tiles=tiles, tile="all")) for tiles in TILES]


def _links(gbs: float, fast: float, where: str) -> tuple[bool, str]:
    kind = "fast" if gbs >= fast else "slow"
    links = "network" if where == "many nodes" else "links"
    return gbs >= fast, f"{where}, {kind} {links} ({gbs:.3g} GB/s per device)"


def _combinations(request: PlanRequest, world: int, most_tp: int = 0) -> Iterator[Layout]:
    """Yields layouts with tensor ranks in a node, ever longer pipelines, and context parallelism for long sequences."""
    tp = _tensor_ranks(request, world, most_tp or node_of(request))
    model = request.model
    for cp, pp in product(divisors(world // tp, max(1, model.seq_len // 8192)), divisors(world // tp, model.n_layers)):
        if world // tp % (cp * pp) == 0:
            shard = world // (tp * cp * pp)
            layout = Layout(tp=tp, cp=cp, pp=pp, dp_shard=shard, zero=1 if shard * cp > 1 else 3)
            for parts in [True, False] if tp > 1 else [False]:
                chosen = _with_experts(request, replace(layout, sp=parts, sp_regather=parts and request.regathers))
                if not request.problems(chosen):
                    yield chosen
                    break


def _name(layout: Layout) -> str:
    parts = [
        (layout.tp, f"tensor parallel inside a node (tp {layout.tp})"),
        (layout.cp, f"context parallel (cp {layout.cp})"),
        (layout.pp, f"the shortest pipeline that fits (pp {layout.pp})"),
        (layout.shard_ranks, "ZeRO-1"),
    ]
    return ", ".join(name for degree, name in parts if degree > 1)


def _tensor_ranks(request: PlanRequest, world: int, most: int) -> int:
    """Returns the most tensor ranks that the heads allow."""
    heads = [n for own in attention_models(request.model) for n in (own.n_heads, own.kv_heads)]
    return max(tp for tp in divisors(world, most) if not any(n % tp for n in heads))


def _with_experts(request: PlanRequest, layout: Layout) -> Layout:
    """Returns the layout with its experts over the devices of a node that tensor ranks leave."""
    experts = request.model.moe.n_experts or 1
    free = max(1, node_of(request) // layout.tp)
    return replace(layout, ep=max(divisors(gcd(experts, layout.shard_ranks), free)))


def _first(request: PlanRequest, where: str, tried: Iterable[tuple[str, Layout]]) -> tuple[str, Layout]:
    """Returns the first layout that fits; else the last."""
    name, layout = "", Layout()
    for name, layout in tried:
        if found := fitted(request, layout):
            return _explained(request, where, name, found)
    return f"{where}: no layout of the rules fits, not even {name}", replace(layout, micro_batch=1, recompute="full")


def _explained(request: PlanRequest, where: str, name: str, layout: Layout) -> tuple[str, Layout]:
    accumulation = request.global_batch // (layout.data_ranks * layout.micro_batch)
    rest = f", {accumulation} micro-batches accumulated" if accumulation > 1 and layout.pp == 1 else ""
    again = {mode: f", {mode} recomputation" for mode in RECOMPUTE} | {"none": ""}
    again["products"] = ", recomputation of all but products"
    return f"{where}: {name}{again[layout.mode]}{rest}", layout


RULE, FILLS, FASTEST = "rule of thumb", "fills the device", "--exotic: the fastest"


def alternatives(
    search: Search, found: Found, best: Candidate | None, fastest: Candidate | None
) -> tuple[Alternative, ...]:
    """Returns the rule of thumb first, then the alternatives that fit, fastest first, then the others. A kind that
    contains the best layout is omitted, and so is one whose layout was listed before. `found` are the results of the
    search, `fastest` is the fastest layout, of which the best is a simpler equal."""
    first = _rule(search, best)
    listed = {_key(candidate.layout) for candidate in (best, first.candidate) if candidate}
    others, weighed = list[Alternative](), [first.candidate] if first.candidate else []
    for family in families(search.space, search.request.cluster, best.layout if best else None):
        if best and family.has(best.layout):
            continue
        alternative = _fastest_of(search, family, found, weighed, best)
        if alternative.candidate:
            weighed.append(alternative.candidate)
            # An ablation is listed for each axis, even if its layout was listed before.
            if _key(alternative.candidate.layout) in listed and not family.name.startswith(WITHOUT):
                continue
            listed.add(_key(alternative.candidate.layout))
        others.append(alternative)
    if best and fastest and fastest is not best and fastest.seconds < best.seconds:
        others.append(Alternative(FASTEST, fastest, _why(search, fastest, best)))
    if best and search.request.headroom is not None and (filling := _filling(search, best)):
        others.append(filling)
    return (first, *sorted(others, key=_order))


def without(axis: str, found: Sequence[Alternative]) -> Alternative | None:
    """Returns the alternative without an axis of families.AXES, or None."""
    return next((one for one in found if one.name == f"{WITHOUT}{AXES[axis]} parallelism"), None)


def _filling(search: Search, best: Candidate) -> Alternative | None:
    """Returns the fastest plain layout that fills the device, if it is faster than the best, which leaves headroom."""
    candidate = search.leaving(None).one(search.parts[0] if search.parts else None, below=best.seconds)
    if candidate is None or candidate.seconds >= best.seconds:
        return None
    share = candidate.prediction.fullest.needed / candidate.prediction.memory_limit
    return Alternative(f"{FILLS} to {share:.0%}", candidate, _why(search, candidate, best))


def _rule(search: Search, best: Candidate | None) -> Alternative:
    request = search.request
    words, layout = rule(request)
    broken = [name for name, value in request.fixed.items() if getattr(layout, name) != value]
    if broken:
        return Alternative(RULE, None, f"{words}; it breaks the fixed fields: {_fixed(request.fixed, broken)}")
    if problems := request.problems(layout):
        return Alternative(RULE, None, f"{words}; {problems[0]}")
    one = Candidate.of(request.spec(layout))
    if best and _key(one.layout) == _key(best.layout):
        return Alternative(RULE, one, f"{words}; the search found nothing faster")
    return Alternative(RULE, one, f"{words}; {_why(search, one, best)}")


def _fastest_of(
    search: Search, family: Family, found: Found, weighed: Sequence[Candidate], best: Candidate | None
) -> Alternative:
    """Returns the fastest layout of a family, from a search or among those weighed before; if none fits, the one that
    needs the least memory."""
    part = part_of(search, family)
    known = [one for one in weighed if one.prediction.fullest.needed <= search.limit and family.has(one.layout)]
    # What the search of all of the space has predicted of the family bounds that of its fastest.
    below = min((seconds for spec, seconds in found.predicted if family.has(spec.layout)), default=inf)
    fastest = [candidate for candidate in (*known, search.one(part, below * (1 + ROUNDING))) if candidate]
    candidate = min(fastest, key=lambda candidate: candidate.seconds) if fastest else search.least(part)
    if candidate is None:
        return Alternative(family.name, None, _not_legal(search, family))
    return Alternative(family.name, candidate, _why(search, candidate, best))


def part_of(search: Search, family: Family) -> Portion:
    """Returns the part of a space that is a family."""
    space = search.space
    belongs = np.array(
        [
            [[family.options(scheduled, state, mode) for mode in RECOMPUTE] for state in STATES]
            for scheduled in space.schedules
        ]
    )
    return Portion(
        family.meshes(search.columns), lambda rows: belongs[rows.scheduled, rows.state, rows.recompute], space.sizes
    )


def _why(search: Search, candidate: Candidate, best: Candidate | None) -> str:
    """Returns why a layout is not the best: its memory excess, or the parts that make it slower."""
    prediction = candidate.prediction
    if not prediction.fits:
        fullest = prediction.fullest
        largest, size = max(fullest.parts(), key=lambda part: part[1])
        over = fullest.needed - prediction.memory_limit
        return f"exceeds memory by {gib(over)} {MOMENTS[fullest.moment]}; the largest part is {largest}, {gib(size)}"
    if best is None:
        return "fits"
    full = ""
    if prediction.fullest.needed > search.limit:
        full = f"leaves no headroom, {gib(prediction.fullest.needed)} of {gib(prediction.memory_limit)}; "
    return f"{full}the best is {explain(best.prediction, prediction, candidate.seconds / best.seconds)}"


def _not_legal(search: Search, family: Family) -> str:
    """Returns why the space contains no layout of a family."""
    request = search.request
    broken = [name for name, value in request.fixed.items() if getattr(family.example, name) != value]
    if broken:
        return f"excluded by the fixed fields: {_fixed(request.fixed, broken)}"
    try:
        problems = request.problems(family.example)
    except JobError as error:
        problems = error.problems
    return problems[0] if problems else "not in the search space"


def _fixed(fixed: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {fixed[name]}" for name in names)


def _key(layout: Layout) -> Layout:
    """Returns a layout without the fields that follow from the others."""
    return replace(layout, pp_cut="", accumulation=0)


def _order(alternative: Alternative) -> tuple[int, float]:
    candidate = alternative.candidate
    if candidate is None:
        return 2, 0.0
    if not candidate.prediction.fits:
        return 1, float(candidate.prediction.fullest.needed)
    return 0, candidate.seconds
