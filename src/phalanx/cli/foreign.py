"""`--from FILE` of predict, plan and verify: the job that a configuration of another framework means, what each of its
fields became, and the lines of it that a better layout changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.clusters import CLUSTERS
from phalanx.config.fields import get
from phalanx.config.overrides import CommandLine
from phalanx.config.yaml_file import Setting
from phalanx.cost.frameworks import as_recipe, calibrated
from phalanx.errors import JobError
from phalanx.units import duration, gib, listed

if TYPE_CHECKING:
    from phalanx.check.load import LoadedJob
    from phalanx.foreign.frame import ChangedLine, ForeignJob, Leftover
    from phalanx.plan.plan import Candidate

ALL = "all"
_OF_MACHINE = ("cluster.*", "layout", "layout.dp_*", "train.global_batch")
"""Fields that are compared with the number of devices."""


def put_below(path: Path, ignored: Sequence[str], line: CommandLine, *, needs_cluster: bool) -> ForeignJob:
    """Reads a file of another framework, and puts its fields below those of the command line. Everything in it that is
    not understood is a problem of the command line, unless it is ignored or the command line sets its field."""
    if path.is_dir():
        raise JobError(f"--from {path}: takes a file of another framework; the weights of a run are model.from={path}")
    from phalanx.foreign.read import read  # here and below: most commands read no such file

    theirs = read(path, line.problems)
    given = {setting.path for setting in line.settings}
    unknown = [each for each in theirs.unknown if ALL not in ignored and not _is_settled(each, ignored, given)]
    problems, wrong = line.problems, {problem.partition(": ")[0] for problem in line.problems}
    needed = {field: what for field, what in theirs.needed.items() if given.isdisjoint(field.split(" or "))}
    problems += [f"{path}: {what} is missing: set {field}" for field, what in needed.items()]
    line.missing += tuple(part for field in needed for part in field.split(" or "))
    line.missing += ("model.*", "layout*") if "model.preset" in needed else ()
    names = {_plainly(each.name) for each in (*theirs.unknown, *theirs.without_counterpart, *theirs.became)}
    names |= {ALL, *map(_plainly, theirs.stated), *(_plainly(each.shown) for each in theirs.stated.values())}
    names |= {_plainly(each.origin.rpartition(" ")[2]) for each in theirs.settings}
    problems += [
        f"--ignore {name}: {path} has no such name{'; key=value goes before --ignore' if '=' in name else ''}"
        for name in ignored
        if _plainly(name) not in names
    ]
    problems += [f"{path}: {each.name} {_short(each.value)}: not understood: {_with_field(each)}" for each in unknown]
    if unknown:
        problems[-1] += "\n  set the fields that are meant, or read the names as if they were absent: --ignore NAME …"
    settings = [each for each in theirs.settings if not _is_ignored(each, ignored) and each.origin not in wrong]
    cluster = [each for each in settings if each.path.startswith("cluster.")]
    settings = [each for each in settings if each not in cluster]
    nodes, devices = (_size(cluster, name) for name in ("nodes", "devices_per_node"))
    preset = next((each for each in reversed(line.settings) if each.path == "cluster.preset"), None)
    describes = any(field.startswith("cluster.accelerator") for field in given) or any(
        each.path == "cluster.preset" for each in cluster
    )
    if preset is not None:
        if isinstance(preset.text, str) and ":" not in preset.text and preset.text in CLUSTERS:
            settings += _sized(preset.text, nodes * devices, cluster)
    elif not line.files:
        settings += cluster
        if needs_cluster and not describes:
            size = f"cluster=dgx-h100:{-(-nodes * devices // 8)}" if devices else "cluster=dgx-h100:NODES"
            known = f" for its {nodes * devices} devices" if devices else ""
            line.missing += _OF_MACHINE
            problems.append(f"{path}: does not say which machine it runs on: name one, such as {size}{known}")
    line.base = settings
    return theirs


def _plainly(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _is_settled(each: Leftover, ignored: Sequence[str], given: set[str]) -> bool:
    return _plainly(each.name) in map(_plainly, ignored) or (bool(each.path) and each.path in given)


def _is_ignored(setting: Setting, ignored: Sequence[str]) -> bool:
    name = setting.origin.rpartition(" ")[2]
    return _plainly(name) in map(_plainly, ignored)


def _with_field(each: Leftover) -> str:
    return f"{each.why} (here {each.path})" if each.path else each.why


def _size(settings: Sequence[Setting], name: str) -> int:
    found = next((str(each.text) for each in settings if each.path == f"cluster.{name}"), "")
    return int(found) if found.isdigit() else 1 if name == "nodes" else 0


def _sized(machine: str, devices: int, stated: Sequence[Setting]) -> list[Setting]:
    """Returns the nodes of a machine that have the file's number of devices."""
    if not devices:
        return []
    each = CLUSTERS[machine].devices_per_node or 1
    nodes, rest = divmod(devices, each)
    if rest and nodes:
        nodes, each = next((n, devices // n) for n in range(nodes + 1, devices + 1) if devices % n == 0)
    elif not nodes:
        nodes, each = 1, devices
    origins = {setting.path: setting.origin for setting in stated}
    found = {"cluster.nodes": nodes, "cluster.devices_per_node": each}
    return [
        Setting(path, str(value), origins.get(path, stated[0].origin), foreign=True) for path, value in found.items()
    ]


def changes(about: Any, theirs: ForeignJob) -> dict[str, Any]:
    """Returns the framework of a file on the devices of a spec or of a plan's request, and its number format."""
    framework = as_recipe(calibrated(theirs.framework, about.cluster.accelerator), theirs.recipe)
    return {"framework": framework, "products": theirs.recipe.get("products", about.products)}


def choices(theirs: ForeignJob, before: LoadedJob, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the fixed fields of every search for a better layout that the framework can run."""
    from phalanx.foreign.read import format_named

    found = format_named(theirs.kind)
    kept = {**{name: getattr(before.job.layout, name) for name in ("zero", *found.keeps)}, **found.fixed}
    if before.job.layout.zero == 3:
        kept["zero"] = 3
    several = {name: values for name, values in found.chooses.items() if name not in fixed}
    for chosen in itertools.product(*several.values()):
        yield {**kept, **dict(zip(several, chosen, strict=True)), **fixed}


@dataclass(frozen=True)
class Beside:
    """The layout of a file beside a better one."""

    theirs: ForeignJob
    before: Candidate
    best: Candidate
    changed: Sequence[ChangedLine]

    @classmethod
    def of(cls, theirs: ForeignJob, before: Candidate, best: Candidate) -> Beside:
        from phalanx.foreign.read import write_back

        batch = before.spec.batch
        layout = replace(before.layout, micro_batch=batch.micro_batch, accumulation=batch.accumulation)
        return cls(theirs, before, best, write_back(theirs, layout, best.layout))

    def lines(self) -> Iterator[str]:
        predicted, seconds = self.before.prediction, self.before.seconds
        peak = gib(predicted.fullest.peak)
        yield f"their layout: {self.before.layout.line()}"
        yield f"  {duration(seconds)} per step, peak memory {peak}{'' if predicted.fits else ': does not fit'}"
        yield f"the best above: {self.best.layout.line()}"
        beside = f"{seconds / self.best.seconds:.2f} × as fast" if predicted.fits else "theirs does not fit"
        yield f"  {duration(self.best.seconds)} per step, {beside}"
        if self.changed:
            yield ""
            yield f"changed lines of {self.theirs.path}:"
        for each in self.changed:
            if each.note:
                yield f"  ? {each.note}"
                continue
            at = f"{each.line:>5}" if each.line else "  new"
            if each.before:
                yield f"{at} - {each.before.strip()}"
            if each.after:
                yield f"{at if not each.before else '     '} + {each.after.strip()}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": self.before.layout.line(),
            "step_time_s": self.before.seconds,
            "fits": self.before.prediction.fits,
            "best_step_time_s": self.best.seconds,
            "changed": [vars(each) for each in self.changed],
        }


def lines(theirs: ForeignJob, framework: str, loaded: LoadedJob) -> Iterator[str]:
    """Yields what each field of a file became in the job, and what has no counterpart."""
    version = f" {theirs.version}" if theirs.version else ""
    yield f"{theirs.path}: read as {theirs.kind}{version}, predicted as {framework}"
    origins = {each.path: each.origin for each in theirs.settings}
    rows = list[tuple[str, str, str]]()
    for each in theirs.became:
        value, how = get(loaded.job, each.path), each.how
        now = loaded.origins.get(each.path, "default")
        if not now.startswith(origins.get(each.path, now)):
            how = f"overridden by {now}"
        shown = str(value).lower() if isinstance(value, bool) else _short(value)
        rows.append((f"{each.name} {_short(each.value)}".strip(), f"{each.path}={shown}", how))
    width = min(46, max((len(name) for name, _, _ in rows), default=0))
    for name, field, how in rows:
        yield f"  {name:<{width}}  {field}{f'  ({how})' if how else ''}"
    if theirs.recipe:
        said = (f"{name} {_short(value)}".strip() for name, value in _facts(theirs))
        yield f"  how it runs: {', '.join(said)}"
    costly = [each for each in theirs.without_counterpart if each.affects]
    if costly:
        yield "no counterpart, and it would change the prediction:"
    for each in costly:
        yield f"  {each.name} {_short(each.value)}".rstrip() + f": {each.why}"
    rest = [each for each in theirs.without_counterpart if not each.affects]
    if rest:
        yield f"no counterpart, and no figure changes: {listed([each.name for each in rest], 12)}"
    if theirs.unknown:
        yield f"not understood, and read as if absent: {listed([each.name for each in theirs.unknown], 12)}"


def _facts(theirs: ForeignJob) -> Iterator[tuple[str, Any]]:
    for name, value in theirs.recipe.items():
        yield from (value.items() if isinstance(value, Mapping) else [(name, value)])


def document(theirs: ForeignJob, framework: str) -> dict[str, Any]:
    """Returns the entry `from` of --json."""
    leftovers = {"without_counterpart": theirs.without_counterpart, "unknown": theirs.unknown}
    return {
        "file": str(theirs.path),
        "kind": theirs.kind,
        "version": theirs.version,
        "framework": framework,
        "recipe": dict(theirs.recipe),
        "became": [
            {"name": each.name, "value": _plain(each.value), "field": each.path, "to": _plain(each.to), "how": each.how}
            for each in theirs.became
        ],
        **{
            name: [
                {"name": each.name, "value": _plain(each.value), "why": each.why, "affects": each.affects}
                for each in found
            ]
            for name, found in leftovers.items()
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _short(value: Any) -> str:
    """Returns a value as one line shows it; nothing for a switch."""
    if value is True or value is None:
        return ""
    if value is False:
        return "false"
    text = (
        ",".join(map(str, value))
        if isinstance(value, list | tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return text if len(text) <= 60 else f"{text[:59]}…"
