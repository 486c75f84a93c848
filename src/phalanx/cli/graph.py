"""`phalanx plan --graph FILE|MODULE:FACTORY`: the fastest way to spread any operator graph over a cluster."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.cluster import Cluster
from phalanx.errors import JobError
from phalanx.gc import gc_paused
from phalanx.graph.operators import OperatorGraph, read_graph
from phalanx.graph.solve import GraphPlan, GraphTooLargeError, baselines, by_hand, read_splits, solve
from phalanx.graph.stages import PipelinePlan, pipeline
from phalanx.graph.strategies import GraphMesh, meshes
from phalanx.nearest import nearest_divisors
from phalanx.pictures.plan_page import parts_picture
from phalanx.units import aligned, duration, gib

if TYPE_CHECKING:
    from phalanx.cli.files import OutputFiles
    from phalanx.cli.verb import Words
    from phalanx.graph.export import ExportedModule

MOST_PROCESSES = 8


def run(words: Words, cluster: Cluster, files: OutputFiles) -> int:
    options = words.options
    graph, exported = _graph(options["graph"])
    if options["graph_out"]:
        try:
            Path(options["graph_out"]).write_text(json.dumps(graph.as_json(), indent=1), "utf-8")
        except OSError as error:
            raise JobError(f"--graph-out {options['graph_out']}: {error.strerror}") from None
    checks = "check" in words.switches
    splits = read_splits(Path(os.path.expanduser(options["splits"]))) if options["splits"] else {}
    problems = [f"--{name} says nothing about a graph" for name in ("html", "from") if name in words.stated]
    if checks and exported is None:
        problems.append("--check runs a module: give --graph MODULE:FUNCTION, not a file")
    if checks and cluster.devices > MOST_PROCESSES:
        problems.append(f"--check starts one process per device, at most {MOST_PROCESSES}, not {cluster.devices}")
    if checks and options["micro_batches"]:
        problems.append("--check runs the plan of one mesh: leave out --micro-batches")
    limit = cluster.accelerator.memory_gib * 2**30 or inf
    # DTensor gathers where an all-to-all would do on CPUs, on which --check runs.
    candidates = _meshes(options["mesh"], cluster, direct=not checks, problems=problems)
    if problems:
        raise JobError(problems)
    begun = time.monotonic()
    plan, failures = None, list[GraphTooLargeError]()
    for mesh in candidates:
        try:
            found = solve(graph, mesh, limit)
        except GraphTooLargeError as error:
            failures.append(error)
            continue
        plan = found if plan is None or found.cost.seconds < plan.cost.seconds else plan
    stages = None
    if options["micro_batches"]:
        stages = pipeline(graph, cluster, cluster.devices, limit, options["micro_batches"])
    if plan is None and stages is None:
        raise min(failures, key=lambda each: each.needed)
    spent = time.monotonic() - begun
    known = compared(graph, plan.mesh, limit, splits) if plan else {}
    checked = None
    if checks and plan is not None:
        from phalanx.graph.execute import check_plan

        checked = check_plan(options["graph"], plan)
    if plan is not None:
        drawn = {name: each for name, each in {"this plan": plan, **known}.items() if not isinstance(each, str)}
        files.write({"svg": lambda: _picture(graph, drawn)})
    words.show(document(graph, plan, stages, known, spent, checked), text(graph, plan, stages, known, spent, checked))
    files.tell()
    return 0 if checked is None or checked["ok"] else 1


def _graph(said: str) -> tuple[OperatorGraph, ExportedModule | None]:
    """Returns the graph of a file, or of a function that the user names, whose module is imported."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", said) or os.path.exists(said):
        return read_graph(Path(os.path.expanduser(said))), None
    from phalanx.graph.export import export_graph, module_of

    with gc_paused():
        return (exported := export_graph(*module_of(said), name=said)).graph, exported


def _meshes(said: str, cluster: Cluster, *, direct: bool, problems: list[str]) -> list[GraphMesh]:
    if not said:
        return [*meshes(cluster, cluster.devices, direct)]
    sizes = tuple(int(size) for size in re.findall(r"\d{1,9}", said))
    count = prod(sizes)
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})?", said) or not count:
        problems.append(f"--mesh {said}: expected one or two numbers of devices, such as 8 or 8x8")
    elif count != cluster.devices:
        equation = " × ".join(map(str, sizes))
        legal = nearest_divisors(cluster.devices, sizes[-1])
        has = f"the cluster has {cluster.devices} devices; numbers that divide them: {legal}"
        problems.append(f"--mesh {said}: {equation} = {count}, {has}")
    return [] if problems else [GraphMesh(cluster, sizes, direct)]


def _picture(graph: OperatorGraph, plans: Mapping[str, GraphPlan]) -> str:
    """Returns the time of every plan by part, as an SVG document."""
    parts = {
        name: {"compute": each.compute.seconds, "communication exposed": each.cost.seconds - each.compute.seconds}
        for name, each in plans.items()
    }
    devices = next(iter(plans.values())).mesh.devices
    return parts_picture(f"{graph.name} on {devices} devices: time of a step, in ms", parts)


def compared(
    graph: OperatorGraph, mesh: GraphMesh, limit: float, splits: Mapping[str, Sequence[str | None]]
) -> dict[str, GraphPlan | str]:
    """Returns data parallelism and ZeRO-2 on the same devices in one row, and the plan by hand on the same mesh, or why
    they are not possible. Raises JobError if the plan by hand is illegal."""
    found: dict[str, GraphPlan | str] = {}
    row = GraphMesh(mesh.cluster, (mesh.devices,), mesh.direct)
    sizes = {
        each.sizes[letter] for each in graph.operators if each.kind == "input" and (letter := graph.batch[each.name])
    }
    for name, allowed in baselines(graph).items():
        if any(size % mesh.devices for size in sizes):
            found[name] = f"a batch of {min(sizes)} on {mesh.devices} devices"
            continue
        found[name] = _within(solve(graph, row, inf, allowed), limit)
    if splits:
        found["by hand"] = _within(solve(graph, mesh, inf, by_hand(graph, mesh, splits)), limit)
    return found


def _within(plan: GraphPlan, limit: float) -> GraphPlan | str:
    return plan if plan.cost.memory <= limit else f"needs {gib(int(plan.cost.memory))} of {gib(int(limit))}"


def document(
    graph: OperatorGraph,
    plan: GraphPlan | None,
    stages: PipelinePlan | None,
    known: dict[str, GraphPlan | str],
    spent: float,
    checked: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns the document of `--json` (docs/guides/graph.md)."""
    about = {"graph": graph.name, "operators": len(graph.operators), "parameters": graph.parameters}
    found: dict[str, Any] = {**about, "notes": [*graph.notes], "seconds": spent, "best": plan and _plan_json(plan)}
    found["compared"] = {name: each if isinstance(each, str) else _cost_json(each) for name, each in known.items()}
    if stages is not None:
        found["pipeline"] = {
            "step_time_s": stages.seconds,
            "micro_batches": stages.micro_batches,
            "stages": [
                {**_plan_json(each), "stage_s": own}
                for each, own in zip(stages.stages, stages.stage_seconds, strict=True)
            ],
        }
    return found if checked is None else {**found, "check": checked}


def _cost_json(plan: GraphPlan) -> dict[str, Any]:
    return {
        "step_time_s": plan.cost.seconds,
        "compute_s": plan.compute.seconds,
        "communication_s": plan.communication.seconds,
        "overlapped_s": _overlapped(plan),
        "sent_bytes": plan.cost.sent,
        "memory_bytes": plan.cost.memory,
    }


def _overlapped(plan: GraphPlan) -> float:
    return max(0.0, plan.compute.seconds + plan.communication.seconds - plan.cost.seconds)


def _plan_json(plan: GraphPlan) -> dict[str, Any]:
    operators = {name: [*strategy.split] for name, strategy in plan.chosen.items()}
    moved = [
        {"tensor": each.name, "for": [*names], "sent_bytes": cost.sent, "seconds": cost.seconds}
        for each, _, names, cost in plan.edges
        if cost.sent
    ]
    return {"mesh": [*plan.mesh.sizes], **_cost_json(plan), "split": operators, "communication": moved}


def text(
    graph: OperatorGraph,
    plan: GraphPlan | None,
    stages: PipelinePlan | None,
    known: dict[str, GraphPlan | str],
    spent: float,
    checked: dict[str, Any] | None,
) -> str:
    lines = [
        f"{graph.name}: {len(graph.operators):,} operators, {graph.parameters:,} parameters; planned in {spent:.1f} s"
    ]
    lines += [f"note: {note}" for note in graph.notes]
    if plan is not None:
        lines += ["", f"on {plan.mesh} devices, a split of each axis (P: partial sums, -: replicated):"]
        lines += aligned([("operator", "letters", "split", "sends", "seconds"), *_rows(plan)], "lllrr")
        rows: list[tuple[str, ...]] = [("", "step time", "compute", "communication", "overlapped", "sent", "memory")]
        for name, each in {"this plan": plan, **known}.items():
            if isinstance(each, str):
                rows.append((name, f"not possible: {each}", "", "", "", "", ""))
            else:
                times = each.cost.seconds, each.compute.seconds, each.communication.seconds, _overlapped(each)
                rows.append((name, *map(duration, times), gib(int(each.cost.sent)), gib(int(each.cost.memory))))
        lines += ["", *aligned(rows, "lllllll")]
    if stages is not None:
        count = f"{len(stages.stages)} stages, {stages.micro_batches} micro-batches"
        lines += ["", f"pipeline of {count}: step time {duration(stages.seconds)}"]
        rows = [("stage", "devices", "operators", "per micro-batch", "memory")]
        for number, (each, own) in enumerate(zip(stages.stages, stages.stage_seconds, strict=True)):
            names = [one.name for one in each.graph.operators if one.kind != "input"]
            rows.append(
                (str(number), str(each.mesh), f"{names[0]} … {names[-1]}", duration(own), gib(int(each.cost.memory)))
            )
        lines += aligned(rows, "lllrr")
    if checked is not None:
        said = "equal to one process" if checked["ok"] else "NOT equal to one process"
        sent, expected = (f"{checked[name]:,.0f} bytes" for name in ("sent_bytes", "expected_bytes"))
        lines += [
            "",
            f"check: {checked['processes']} gloo processes in float64, {said}: loss {checked['loss_max_rel']:.1e}, "
            f"gradients {checked['grad_max_rel']:.1e}; {sent} sent by each, {expected} expected",
        ]
    return "\n".join(lines)


def _rows(plan: GraphPlan) -> list[tuple[str, ...]]:
    """Returns a row per kind of operator that computes, or that is split."""
    same = plan.graph.representatives
    count = Counter(same.values())
    sent, spent = defaultdict[str, float](float), defaultdict[str, float](float)
    for each, _, _, cost in plan.edges:
        sent[same[each.name]] += cost.sent
        spent[same[each.name]] += cost.seconds
    found = list[tuple[str, ...]]()
    for name, times in count.items():
        each = plan.graph.by_name[name]
        strategy = plan.chosen[name]
        if each.kind == "view" or (each.kind != "compute" and not any(strategy.split) and not sent[name]):
            continue
        letters = each.written().get("einsum") or f"{each.kind} {' × '.join(map(str, each.shape))}"
        seconds = strategy.cost.seconds * times + spent[name]
        many = f" (× {times})" if times > 1 else ""
        shown = duration(seconds) if seconds else ""
        found.append(
            (f"{name}{many}", letters, strategy.words(each), gib(int(sent[name])) if sent[name] else "", shown)
        )
    return found
