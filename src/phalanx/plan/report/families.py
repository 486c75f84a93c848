"""The common kinds of layouts, as conditions on a search space, each with an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.plan.search.space import STATES, MeshDegrees, Scheduled, Space, StateSharding, divisors
from phalanx.schedule.catalogue import SCHEDULES

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
        return bool(self.meshes(layout)) and self.options(scheduled, state, layout.recompute)


def families(space: Space, cluster: Cluster, best: Layout | None) -> Iterator[Family]:
    """Yields the kinds for a machine; the last ones are the best layout with one feature removed."""
    world = space.meshes[0]
    devices = world.tp * world.cp * world.pp * world.dp_shard * world.dp_replicate
    if devices == 1:
        return
    yield Family("DDP: a whole copy per device", _flat(lambda c: c.dp_shard == 1), _any, Layout(dp_replicate=devices))
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
            yield Family(f"{WITHOUT}{name} parallelism", _one(axis), _common(best), Layout(dp_shard=best.world))
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


def _one(axis: str) -> Callable[[Any], Any]:
    return lambda c: getattr(c, axis) == 1


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


def _any(*_: object) -> bool:
    return True
