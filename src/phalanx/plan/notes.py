"""Explains why a layout was chosen, in sentences with figures: the links under each axis and its cost on other links or
without it, what bounds the step, and how close the next layout is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.cost.breakdown import completions_line, duration, slow_format
from phalanx.cost.communication import RankGroup, group
from phalanx.cost.prediction import Prediction, predict
from phalanx.cost.spec import StepSpec
from phalanx.plan.alternatives import AXES, explain, without
from phalanx.plan.plan import Alternative, Candidate
from phalanx.plan.simplicity import TieBand, brief, recompute_in_words, simpler_because, simplicity, stages_in_words
from phalanx.units import gib

MENTIONED = 0.005
"""Smallest share of a step from which a part is mentioned."""
NO_HEADROOM = "No memory headroom"
"""Beginning of the note that a memory error would make the layout fail."""
TRAFFIC = {
    "tp": "reduces the hidden states in every block",
    "cp": "passes keys and values on, or exchanges heads for tokens, in every block",
    "ep": "sends every token to its experts and back in every block",
}


def notes(
    best: Sequence[Candidate], fastest: Candidate, found: Sequence[Alternative], band: TieBand
) -> tuple[str, ...]:
    """Returns the reasons for the best layout, from its figures, those on other links, and the alternatives: the tie
    with the fastest layout, to which `band` belongs, first."""
    first = best[0]
    sentences = [
        _tie(first, fastest, band),
        _bound(first.prediction),
        _format(first.spec),
        _fabric(first.spec.cluster, first.layout.world),
        *(_inner(first, axis) for axis in TRAFFIC if getattr(first.layout, axis) > 1),
        _pipeline(first) if first.layout.pp > 1 else "",
        _data(first) if first.layout.data_ranks * first.layout.cp > 1 else "",
        *_ablations(first, found),
        *_unused(first, found),
        _memory(first),
        _next(best, band),
        f"Interval of the step time: {first.prediction.sure}.",
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _bound(prediction: Prediction) -> str:
    """Says what a step spends its time on."""
    step, parts = prediction.step_time_s, prediction.parts
    shares = {
        "computing": parts.products + parts.streams + parts.recompute + parts.host + parts.optimizer,
        "exposed communication": sum(parts.exposed.values()),
        "pipeline bubble": parts.bubble,
    }
    listed = _listed([f"{spent / step:.1%} {name}" for name, spent in shares.items() if spent >= MENTIONED * step])
    again = f" ({parts.recompute / step:.0%} of the step recomputes)" if parts.recompute > MENTIONED * step else ""
    return f"Step time: {listed.replace('computing', f'computing{again}')}."


def _format(spec: StepSpec) -> str:
    found = [*filter(None, [slow_format(spec), completions_line(spec)])]
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in found)


def _fabric(cluster: Cluster, world: int) -> str:
    """Names the links, in GB/s per device."""
    fast, slow, joined, node = cluster.intra.gbs, cluster.inter.gbs, cluster.joined, cluster.devices_per_node
    if world == 1 or not fast:
        return ""
    speed = f"{fast:.3g} GB/s per device"
    if world <= joined:
        return f"Links of {speed} join all {world} devices."
    who = f"the {joined} devices of a {'rack' if joined > node else 'node'}"
    if joined < node:
        who = f"only {joined} neighbours of the {node} devices of a node"
    ratio = f", {fast / slow:.2g} times less" if slow and 1.5 * slow < fast < 99 * slow else ""
    return f"Links of {speed} join {who}; beyond, there are {slow:.3g} GB/s per device{ratio}."


def _inner(first: Candidate, axis: str) -> str:
    """Describes an axis that communicates in every block: its links, its exposed time, and that on other links."""
    spec, layout = first.spec, first.layout
    spent = first.prediction.parts.exposed.get(axis, 0.0)
    ranks = group(layout, axis) if axis != "cp" else RankGroup(layout.cp, layout.tp)
    text = f"{axis} {ranks.ranks} runs {_place(spec.cluster, ranks, layout.world)}: it {TRAFFIC[axis]}, {_shown(spent)}"
    if spec.cluster.joined >= layout.world or not spec.cluster.inter.gbs:
        return f"{text}."
    inside = _inside(spec.cluster, ranks)
    # With one device per node all links are the network's; with one node for all, none is.
    other = predict(replace(spec, cluster=replace(spec.cluster, domain=1 if inside else layout.world)))
    elsewhere = other.parts.exposed.get(axis, 0.0)
    if abs(elsewhere - spent) > MENTIONED * first.prediction.step_time_s:
        text += f" ({duration(elsewhere)} {'across the network' if inside else 'if fast links joined all devices'})"
    return f"{text}."


def _pipeline(first: Candidate) -> str:
    layout, parts = first.layout, first.prediction.parts
    where = _place(first.spec.cluster, group(layout, "pp"), layout.world)
    cut = f" {stages_in_words(layout).capitalize()}." if layout.pp_cut else ""
    return (
        f"pp {layout.pp} runs {where}: each stage boundary sends the hidden states of a micro-batch once each way, "
        f"{_shown(parts.exposed.get('pp', 0.0))}; the bubble takes {duration(parts.bubble)}.{cut}"
    )


def _ablations(first: Candidate, found: Sequence[Alternative]) -> Iterator[str]:
    """Compares with the best layout without each axis; axes whose absence leads to the same layout share a sentence."""
    others = dict[Layout, tuple[list[str], Candidate]]()
    for axis, name in AXES.items():
        other = without(axis, found)
        if getattr(first.layout, axis) > 1 and other and other.candidate:
            others.setdefault(other.candidate.layout, ([], other.candidate))[0].append(name)
    for names, other in others.values():
        which = f"without {' and '.join(names)} parallelism"
        if other.prediction.fits:
            comparison = explain(first.prediction, other.prediction, other.seconds / first.seconds)
            yield f"Compared with the best layout found {which}, the step is {comparison}."
        else:
            needed, limit = gib(other.prediction.fullest.needed), gib(other.prediction.memory_limit)
            yield f"No layout found {which} fits: the smallest needs {needed} of {limit}."


def _data(first: Candidate) -> str:
    """Describes the sharding of the state, and the replicas."""
    spec, layout = first.spec, first.layout
    cluster, parts = spec.cluster, first.prediction.parts
    spent = parts.exposed.get("dp_shard", 0.0) + parts.exposed.get("dp_replicate", 0.0)
    alone = predict(replace(spec, framework=replace(spec.framework, dp_overlaps=False))).parts.exposed
    whole = alone.get("dp_shard", 0.0) + alone.get("dp_replicate", 0.0)
    shared, replicas = layout.shard_ranks > 1, layout.dp_replicate > 1
    kind = f"{'FSDP' if layout.zero == 3 else f'ZeRO-{layout.zero}'} over {_degrees(layout)}"
    groups = []
    if shared:
        groups.append(f"{kind} runs {_place(cluster, group(layout, 'shard'), layout.world)}")
    if replicas:
        groups.append(f"{layout.dp_replicate} replicas run {_place(cluster, group(layout, 'replicate'), layout.world)}")
    rest = f", {duration(spent)} stays exposed" if spent > 1e-4 else ""
    hidden = f"{duration(whole)} of communication overlaps with computation{rest}"
    text = f"{_listed(groups)}: {hidden if whole > spent else f'communication takes {duration(spent)}'}."
    if shared and replicas:
        flat = replace(layout, dp_replicate=1, dp_shard=layout.data_ranks)
        other = predict(replace(spec, layout=flat))
        factor = other.step_time_s / first.prediction.step_time_s
        if factor > 1 + MENTIONED:
            text += f" Sharding over all of them takes {factor:.2f} times as long."
    return text


def _degrees(layout: Layout) -> str:
    if layout.cp == 1:
        return f"{layout.dp_shard} ranks"
    shard = f"dp_shard {layout.dp_shard} × " if layout.dp_shard > 1 else ""
    return f"the {layout.shard_ranks} ranks of {shard}cp {layout.cp}"


def _unused(first: Candidate, found: Sequence[Alternative]) -> Iterator[str]:
    """Says what tensor parallelism would cost, for a layout without it."""
    if first.layout.tp > 1:
        return
    for other in found:
        if not (other.candidate and other.candidate.prediction.fits and other.candidate.layout.tp > 1):
            continue
        layout = other.candidate.layout
        spent = other.candidate.prediction.parts.exposed.get("tp", 0.0)
        ranks = _place(first.spec.cluster, group(layout, "tp"), layout.world)
        if spent > MENTIONED * first.prediction.step_time_s:
            yield f"No tensor parallelism: tp {layout.tp} {ranks} would take {duration(spent)} per step."
            return


def _memory(first: Candidate) -> str:
    prediction, layout = first.prediction, first.layout
    share = prediction.fullest.peak / prediction.memory_limit
    text = f"Peak memory is {gib(prediction.fullest.peak)} of {gib(prediction.memory_limit)} ({share:.0%})"
    if layout.recompute == "none" and not layout.recompute_cut:
        return f"{text} with nothing recomputed."
    stored = predict(replace(first.spec, layout=replace(layout, recompute="none", recompute_cut="")))
    if layout.recompute == "selective" and stored.fullest.needed <= prediction.fullest.needed:
        return (
            f"{text}. recompute=selective saves nothing here: attention is fused and keeps no scores; "
            "recompute=products does."
        )
    how = f"{layout.recompute} recomputation"
    if layout.recompute_cut:
        how = f"recomputation in some layers ({recompute_in_words(layout)})"
    if stored.fits:
        return f"{text} with {how}." if layout.recompute_cut else f"{text}."
    return f"{text} with {how}; without recomputation it would be {gib(stored.fullest.needed)}."


def _tie(first: Candidate, fastest: Candidate, band: TieBand) -> str:
    """Says why a simpler layout was taken than the fastest."""
    reason = simpler_because(first.spec, fastest.spec)
    if fastest.seconds >= first.seconds or not reason:
        return ""
    steps = simplicity(fastest.spec).steps - simplicity(first.spec).steps
    least = (1 + band.kinds) ** steps - 1 if steps > 0 else band.alike
    named = brief(fastest.layout)
    return (
        f"The fastest layout found ({named}) is {1 - fastest.seconds / first.seconds:.1%} faster, less than the "
        f"{least:.0%} by which predictions of such layouts err against each other: the simpler one was taken, {reason} "
        "(--exotic takes the fastest)."
    )


def _next(best: Sequence[Candidate], band: TieBand) -> str:
    """Compares with the next mesh."""
    first, *others = best
    if not others:
        return "No other mesh comes near it."
    near = [candidate for candidate in others if candidate.seconds <= first.seconds * (1 + band.alike)]
    low, high = first.prediction.spread
    second = min(others, key=lambda candidate: candidate.seconds)
    behind = second.seconds / first.seconds - 1
    beside = "as fast" if abs(behind) < 5e-4 else f"{abs(behind):.1%} {'slower' if behind > 0 else 'faster'}"
    text = f"The next mesh ({brief(second.layout)}) is {beside}"
    if near:
        text += (
            f"; {len(near)} {'is' if len(near) == 1 else 'are'} within {band.alike:.1%}, well inside the prediction's "
            f"interval ({low - 1:+.0%} to {high - 1:+.0%}): among equals the simpler layout wins"
        )
    return f"{text}."


def _inside(cluster: Cluster, ranks: RankGroup) -> bool:
    """Returns whether fast links join all ranks of a group."""
    return ranks.ranks * ranks.stride <= cluster.joined


def _place(cluster: Cluster, ranks: RankGroup, world: int) -> str:
    """Names the links that a group communicates over."""
    if world <= cluster.joined or _inside(cluster, ranks):
        return f"on the fast links ({cluster.intra.gbs:.3g} GB/s)"
    near = ranks.near(cluster.joined)
    partly = f", {near} ranks of each group side by side" if near > 1 else ""
    return f"across the network ({cluster.inter.gbs:.3g} GB/s per device{partly})"


def _shown(seconds: float) -> str:
    return f"{duration(seconds)} exposed per step" if seconds > 1e-4 else "hidden behind computation"


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)
