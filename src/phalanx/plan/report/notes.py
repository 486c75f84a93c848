"""Why a layout was chosen, in sentences with figures: which axis lies on which links, what it would cost elsewhere or
what goes wrong without it, what bounds the step, and how near the next layout is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import duration
from phalanx.cost.predict import predict
from phalanx.cost.prediction import Prediction
from phalanx.cost.time.communication import group
from phalanx.cost.time.link import RankGroup
from phalanx.plan.plan import Alternative, Candidate
from phalanx.plan.report.alternatives import roomy, with_room, without
from phalanx.plan.report.explain import explain
from phalanx.plan.report.families import AXES
from phalanx.units import gib

TELLING = 0.005
"""Share of a step from which on a part is told."""
NEAR = 0.01
"""Layouts whose times are so near are as good as each other."""
NO_ROOM = "That leaves no room"
"""How the note begins that an error of the memory model would make the layout fail."""
SENDS = {
    "tp": "sums the hidden states of every block",
    "cp": "passes keys and values on, or exchanges heads for tokens, in every block",
    "ep": "sends every token to its experts and back in every block",
}


def notes(best: Sequence[Candidate], found: Sequence[Alternative]) -> tuple[str, ...]:
    """Why the first of the best: from the cost model's figures for it and for the same elsewhere, and from what was
    weighed against it."""
    first = best[0]
    sentences = [
        _bound(first.prediction),
        _fabric(first.spec.cluster, first.layout.world),
        *(_inner(first, axis) for axis in SENDS if getattr(first.layout, axis) > 1),
        _pipeline(first) if first.layout.pp > 1 else "",
        _data(first) if first.layout.data_ranks * first.layout.cp > 1 else "",
        *_ablations(first, found),
        *_unused(first, found),
        _memory(first),
        _room(first, found),
        _next(best),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _bound(prediction: Prediction) -> str:
    """What a step waits for."""
    step, parts = prediction.step_time_s, prediction.parts
    shares = {
        "computing": parts.products + parts.streams + parts.recompute + parts.host + parts.optimizer,
        "waiting for links": sum(parts.exposed.values()),
        "waiting for other pipeline ranks": parts.bubble,
    }
    told = [f"{spent / step:.1%} is {name}" for name, spent in shares.items() if spent >= TELLING * step]
    again = f" (a {parts.recompute / step:.0%} of it again)" if parts.recompute > TELLING * step else ""
    return f"Of a step {_listed(told).replace('computing', f'computing{again}')}."


def _fabric(cluster: Cluster, world: int) -> str:
    """The links, in figures of one device."""
    fast, slow, joined, node = cluster.intra.gbs, cluster.inter.gbs, cluster.joined, cluster.devices_per_node
    if world == 1 or not fast:
        return ""
    among = f"links of {fast:.3g} GB/s a device among them"
    if world <= joined:
        return f"All {world} devices have {among}."
    who = f"The {joined} devices of a {'rack' if joined > node else 'node'} have"
    if joined < node:
        who = f"Of a node's {node} devices only {joined} neighbours have"
    ratio = f", {fast / slow:.2g} times less" if slow and 1.5 * slow < fast < 99 * slow else ""
    return f"{who} {among}; beyond, a device has {slow:.3g} GB/s{ratio}."


def _inner(first: Candidate, axis: str) -> str:
    """An axis that sends in every block: where it lies, what that takes and would take elsewhere."""
    spec, layout = first.spec, first.layout
    spent = first.prediction.parts.exposed.get(axis, 0.0)
    ranks = group(layout, axis) if axis != "cp" else RankGroup(layout.cp, layout.tp)
    text = f"{axis} {ranks.ranks} lies {_place(spec.cluster, ranks, layout.world)}: it {SENDS[axis]}, {_shown(spent)}"
    if spec.cluster.joined >= layout.world or not spec.cluster.inter.gbs:
        return f"{text}."
    inside = _inside(spec.cluster, ranks)
    # Every device a node of its own: all links are the network's. Or all of them one node.
    other = predict(replace(spec, cluster=replace(spec.cluster, domain=1 if inside else layout.world)))
    elsewhere = other.parts.exposed.get(axis, 0.0)
    if abs(elsewhere - spent) > TELLING * first.prediction.step_time_s:
        text += f" ({duration(elsewhere)} {'across the network' if inside else 'if fast links joined all'})"
    return f"{text}."


def _pipeline(first: Candidate) -> str:
    layout, parts = first.layout, first.prediction.parts
    where = _place(first.spec.cluster, group(layout, "pp"), layout.world)
    return (
        f"pp {layout.pp} lies {where}: a boundary passes the hidden states of a micro-batch once each way, "
        f"{_shown(parts.exposed.get('pp', 0.0))}; waiting for other ranks takes {duration(parts.bubble)}."
    )


def _ablations(first: Candidate, found: Sequence[Alternative]) -> Iterator[str]:
    """What goes wrong without each axis; those whose absence leads to the same layout together."""
    others = dict[Layout, tuple[list[str], Candidate]]()
    for axis, name in AXES.items():
        other = without(axis, found)
        if getattr(first.layout, axis) > 1 and other and other.candidate:
            others.setdefault(other.candidate.layout, ([], other.candidate))[0].append(name)
    for names, other in others.values():
        which = f"without {' and '.join(names)} parallelism"
        if other.prediction.fits:
            told = explain(first.prediction, other.prediction, other.seconds / first.seconds)
            yield f"Beside the best that was found {which} the step is {told}."
        else:
            needed, limit = gib(other.prediction.fullest.needed), gib(other.prediction.memory_limit)
            yield f"Nothing that fits was found {which}: it needs {needed} of {limit}."


def _data(first: Candidate) -> str:
    """Ranks that share the state, and replicas."""
    spec, layout = first.spec, first.layout
    cluster, parts = spec.cluster, first.prediction.parts
    spent = parts.exposed.get("dp_shard", 0.0) + parts.exposed.get("dp_replicate", 0.0)
    alone = predict(replace(spec, framework=replace(spec.framework, dp_overlaps=False))).parts.exposed
    whole = alone.get("dp_shard", 0.0) + alone.get("dp_replicate", 0.0)
    shared, replicas = layout.shard_ranks > 1, layout.dp_replicate > 1
    kind = f"{'FSDP' if layout.zero == 3 else f'ZeRO-{layout.zero}'} over {_degrees(layout)}"
    told = []
    if shared:
        told.append(f"{kind} lies {_place(cluster, group(layout, 'shard'), layout.world)}")
    if replicas:
        told.append(f"{layout.dp_replicate} replicas lie {_place(cluster, group(layout, 'replicate'), layout.world)}")
    rest = f" but {duration(spent)}" if spent > 1e-4 else ""
    hidden = f"of {duration(whole)} of traffic computing hides all{rest}"
    text = f"{_listed(told)}: {hidden if whole > spent else f'traffic takes {duration(spent)}'}."
    if shared and replicas:
        flat = replace(layout, dp_replicate=1, dp_shard=layout.data_ranks)
        other = predict(replace(spec, layout=flat))
        factor = other.step_time_s / first.prediction.step_time_s
        if factor > 1 + TELLING:
            text += f" The same sharded over all of them takes {factor:.2f} times as long."
    return text


def _degrees(layout: Layout) -> str:
    if layout.cp == 1:
        return f"{layout.dp_shard} ranks"
    shard = f"dp_shard {layout.dp_shard} × " if layout.dp_shard > 1 else ""
    return f"the {layout.shard_ranks} ranks of {shard}cp {layout.cp}"


def _unused(first: Candidate, found: Sequence[Alternative]) -> Iterator[str]:
    """What tensor parallelism would cost where there is none."""
    if first.layout.tp > 1:
        return
    for other in found:
        if not (other.candidate and other.candidate.prediction.fits and other.candidate.layout.tp > 1):
            continue
        layout = other.candidate.layout
        spent = other.candidate.prediction.parts.exposed.get("tp", 0.0)
        ranks = _place(first.spec.cluster, group(layout, "tp"), layout.world)
        if spent > TELLING * first.prediction.step_time_s:
            yield f"No tensor parallelism: tp {layout.tp} {ranks} would take {duration(spent)} of a step."
            return


def _memory(first: Candidate) -> str:
    prediction, layout = first.prediction, first.layout
    share = prediction.fullest.peak / prediction.memory_limit
    text = f"A device holds {gib(prediction.fullest.peak)} of {gib(prediction.memory_limit)} ({share:.0%})"
    if layout.recompute == "none" and not layout.recompute_cut:
        return f"{text} with nothing recomputed."
    kept = predict(replace(first.spec, layout=replace(layout, recompute="none", recompute_cut="")))
    if kept.fits:
        return f"{text}."
    how = f"{layout.recompute} recomputation" if not layout.recompute_cut else "recomputation in some layers"
    return f"{text} with {how}, and would need {gib(kept.fullest.needed)} without."


def _room(first: Candidate, found: Sequence[Alternative]) -> str:
    """That it would not fit if it needed as much more than predicted as one step in ten does, and what would."""
    if roomy(first):
        return ""
    high, safe = first.prediction.memory_spread[1], with_room(found)
    more = gib(first.prediction.fullest.needed * high)
    text = f"{NO_ROOM}: one step in ten needs {high - 1:.0%} more than predicted, {more} here"
    if safe is None:
        return f"{text}."
    slower = safe.seconds / first.seconds - 1
    line = replace(safe.layout, micro_batch=0, accumulation=0).line().replace(",", " ")
    return f"{text}; the fastest with room for that is {line}, {slower:.1%} slower."


def _next(best: Sequence[Candidate]) -> str:
    """How far the next mesh is."""
    first, *others = best
    if not others:
        return "No other mesh comes within a hundredth of it."
    near = [one for one in others if one.seconds <= first.seconds * (1 + NEAR)]
    low, high = first.prediction.spread
    second = min(others, key=lambda one: one.seconds)
    line = replace(second.layout, micro_batch=0, accumulation=0, pp_cut="").line().replace(",", " ")
    behind = second.seconds / first.seconds - 1
    beside = "as fast" if abs(behind) < 5e-4 else f"{abs(behind):.1%} {'slower' if behind > 0 else 'faster'}"
    text = f"The next mesh ({line}) is {beside}"
    if near:
        text += (
            f"; {len(near)} {'is' if len(near) == 1 else 'are'} within {NEAR:.0%}, far less than the prediction's own "
            f"range ({low - 1:+.0%} to {high - 1:+.0%}): of equals the simpler wins"
        )
    return f"{text}."


def _inside(cluster: Cluster, ranks: RankGroup) -> bool:
    """Whether fast links join all ranks of a group."""
    return ranks.ranks * ranks.stride <= cluster.joined


def _place(cluster: Cluster, ranks: RankGroup, world: int) -> str:
    """Where a group lies."""
    if world <= cluster.joined or _inside(cluster, ranks):
        return f"on the fast links ({cluster.intra.gbs:.3g} GB/s)"
    near = ranks.near(cluster.joined)
    partly = f", {near} ranks of each group side by side" if near > 1 else ""
    return f"across the network ({cluster.inter.gbs:.3g} GB/s a device{partly})"


def _shown(seconds: float) -> str:
    return f"which takes {duration(seconds)} of a step" if seconds > 1e-4 else "which computing hides"


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)
