"""Loads one checked Job from job files and overrides. Later wins: default < preset < files in order < command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from phalanx.blocks.kinds import not_trained
from phalanx.bounded import kind_of
from phalanx.check.effect import effect_problems, never_reached
from phalanx.check.job import by_cause, problems_of
from phalanx.check.start import start_problems, starting_point
from phalanx.config import foreign_names, overrides, values, yaml_file
from phalanx.config.added import TECHNIQUES, load_for
from phalanx.config.cluster import DEVICE_TYPES
from phalanx.config.clusters import ACCELERATORS, CLUSTERS, cluster_of, describe
from phalanx.config.corpora import CORPORA, mixture_of, vocabulary_of
from phalanx.config.fields import get, leaves, name_of, replace
from phalanx.config.foreign_names import ALIASES, Derived
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.config.presets import FROM_FILE, preset_of, states_no_rows
from phalanx.config.values import row_of
from phalanx.config.yaml_file import SET_FIELDS, Setting
from phalanx.errors import JobError
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.partition.derived import solve
from phalanx.schedule import catalogue
from phalanx.techniques.catalogue import fastest_precision


@dataclass(frozen=True)
class _Around:
    """The job around a field, which the field's rule may read."""

    job: Job
    """The job with every other setting."""
    given: Mapping[str, str]
    """Fields that the command line sets itself, with their origins."""
    origins: Mapping[str, str]
    derived: Mapping[str, str]
    """The values of all names with a rule."""


def apply(
    job: Job, asked: Sequence[Derived], given: Mapping[str, str], origins: dict[str, str]
) -> tuple[Job, list[str], list[str]]:
    """Returns the job with the fields that names with a rule set, answers for the user, and problems. `given` are the
    fields that the command line sets itself, with their origins: a name with a rule that would change one is a problem.
    `origins` gets those of the new values."""
    answers: list[str] = []
    problems: list[str] = []
    for name, rule in RULES.items():
        one = next((each for each in reversed(asked) if each.name == name), None)
        if one is None:
            continue
        try:
            found = rule(one.text, _Around(job, given, origins, {each.name: each.text for each in asked}))
            changed = {path: values.convert(text, leaves()[path]) for path, text in found.items()}
        except ValueError as error:
            problems.append(f"{one.origin}: {error}")
            continue
        except (OverflowError, ZeroDivisionError):
            problems.append(f"{one.origin}: gives no legal value with the job's other fields")
            continue
        clashes = [path for path in changed if path in given and get(job, path) != changed[path]]
        problems += [
            f"{one.origin} and {_word(given[path])} contradict each other; give one of them: {path} {found[path]} and "
            f"{get(job, path)}"
            for path in clashes
        ]
        for path, value in changed.items():
            job = replace(job, path, value)
            origins[path] = one.origin
        answers.append(f"{_word(one.origin)}: taken as {', '.join(f'{path}={text}' for path, text in found.items())}")
    return job, answers, problems


def equation(job: Job, asked: Sequence[Derived]) -> str:
    """Returns the batch equation of a checked job, if a name that changes the batch was given, or nothing."""
    changes = any(ALIASES[each.name].path in ("layout.micro_batch", "layout.accumulation") for each in asked)
    return solve(job.train.global_batch, job.layout).equation() if changes and not job.layout.auto else ""


def _word(origin: str) -> str:
    return origin.removeprefix("command line: ")


def _backend(text: str, around: _Around) -> dict[str, str]:
    """DDP replicates over all data ranks, FSDP and DeepSpeed shard over them (wordplay and `ezpz test`)."""
    layout, name = around.job.layout, text.lower()
    if name not in ("ddp", "fsdp", "deepspeed", "ds"):
        raise ValueError(
            f"expected DDP, FSDP or deepspeed, found {text!r}; the communication library follows from cluster.device "
            "(gloo on a CPU, NCCL on a GPU)"
        )
    # With layout=auto the planner chooses the number of ranks, and gets only the axis.
    ranks = "" if layout.auto else str(layout.data_ranks)
    mine, other = ("dp_replicate", "dp_shard") if name == "ddp" else ("dp_shard", "dp_replicate")
    found = {f"layout.{mine}": ranks, f"layout.{other}": "1"}
    if name == "fsdp" and layout.zero == 1:
        found["layout.zero"] = "3"
    elif name in ("deepspeed", "ds") and around.origins["layout.zero"] == "default":
        found["layout.zero"] = "1"  # as in wordplay's ds_config.yaml
    return {path: value for path, value in found.items() if value}


def _accumulation(text: str, around: _Around) -> dict[str, str]:
    """nanoGPT and wordplay divide the number by the ranks; DeepSpeed and transformers count each rank's."""
    count, ranks = values.convert(text, int), around.job.layout.data_ranks
    if count != 1 and (ranks != 1 or around.job.layout.auto):
        raise ValueError(
            f"{count} micro-batches of all ranks (nanoGPT, wordplay) or of each (DeepSpeed, transformers)? Set "
            f"layout.accumulation, which counts each data rank's (here {ranks} data ranks), or train.global_batch"
        )
    return {"layout.accumulation": str(count)}


def _accumulation_of_all(text: str, around: _Around) -> dict[str, str]:
    """Wordplay's optimizer.gradient_accumulation_steps: 1 means one per rank, more are divided by the ranks."""
    count, ranks = values.convert(text, int), around.job.layout.data_ranks
    if around.job.layout.auto and count != 1:
        raise ValueError("counts all data ranks, whose number the planner chooses; set train.global_batch instead")
    if count != 1 and (count < ranks or count % ranks):
        raise ValueError(
            f"{count} micro-batches of all ranks / data ranks {ranks} is not an integer; nearest legal: "
            f"{max(1, round(count / ranks)) * ranks}, or set layout.accumulation, which counts each data rank's"
        )
    return {"layout.accumulation": str(count if count == 1 else count // ranks)}


def _batch_size(text: str, around: _Around) -> dict[str, str]:
    """Sequences in one forward pass of a data rank; the global batch follows, unless the command line sets it."""
    found = {"layout.micro_batch": text}
    if "train.global_batch" not in around.given and not around.job.layout.auto:
        found["train.global_batch"] = "0"
    return found


def _min_lr(text: str, around: _Around) -> dict[str, str]:
    least, lr = values.convert(text, float), around.job.optimizer.lr
    if not 0 <= least <= lr:
        raise ValueError(f"must lie between 0 and optimizer.lr {lr:g}, is {least:g}")
    return {"optimizer.min_lr_ratio": f"{least / lr:.12g}"}


def _feed_forward(_: str, around: _Around) -> dict[str, str]:
    """The hidden width of Llama's reference code (model.py, FeedForward): 2/3 of 4 d_model, times the multiplier,
    rounded up to a multiple. Ezpz rounds to multiples of 360 by default."""
    width = 2 * 4 * around.job.model.d_model // 3
    if multiplier := around.derived.get("ffn_dim_multiplier"):
        width = int(values.convert(multiplier, float) * width)
    multiple = values.convert(around.derived.get("multiple_of", "360"), int)
    if multiple < 1 or width < 1:
        raise ValueError("must be positive")
    return {"model.d_ff": str(-(-width // multiple) * multiple)}


def _loss(text: str, around: _Around) -> dict[str, str]:
    if text == "eager":
        return {"layout.loss_chunk": "0"}
    if text in ("chunked", "chunked-backward"):
        return {"layout.loss_chunk": str(around.job.layout.loss_chunk or 1024)}  # ezpz's default chunk
    raise ValueError(
        f"expected eager or chunked, found {text!r}: with tp the loss is always computed on shards of the vocabulary, "
        "train.compile compiles the loss, too, and there is no other fused one; nearest legal: chunked"
    )


RULES: dict[str, Callable[[str, _Around], dict[str, str]]] = {
    "backend": _backend,  # first: the next ones count its data ranks
    "gradient_accumulation_steps": _accumulation,
    "optimizer.gradient_accumulation_steps": _accumulation_of_all,
    "batch_size": _batch_size,
    "min_lr": _min_lr,
    "beta1": lambda text, around: {"optimizer.betas": f"{text},{around.job.optimizer.betas[1]}"},
    "beta2": lambda text, around: {"optimizer.betas": f"{around.job.optimizer.betas[0]},{text}"},
    "ffn_dim_multiplier": _feed_forward,
    "multiple_of": _feed_forward,
    "loss_impl": _loss,
}
"""The rules by name, in the order in which they apply: fields and texts of values from the value that was given."""


RESOLVED = ("default", "preset ", "model.from ", "resolved", "the job file's name", "measured")
"""Beginnings of the origins of values that nobody set."""
_STARTS = {
    "model.preset": ("model.",),
    "model.from": ("model.", "data.tokenizer"),
    "cluster.preset": ("cluster.",),
    "optimizer.name": ("optimizer.",),
}
"""Fields that give others their values, with the beginnings of those."""


@dataclass(frozen=True)
class LoadedJob:
    """A resolved job with the origin of each value, such as "job.yaml:12", "preset gpt2" or "default"."""

    job: Job
    origins: dict[str, str]
    answers: list[str] = field(default_factory=list)
    """A line for every other name or value that was taken for the field's own."""


def load_words(words: overrides.CommandLine, opens: str = "") -> LoadedJob:
    """Returns the job of a command line.

    If `opens` is set (the name of the command that asks for it), the layout is left to the planner except for the
    fields set on the command line, unless a job file says itself what is open. Raises JobError with every problem of
    files, overrides and values.
    """
    problems: list[str] = []
    settings = [*words.base]
    for path in words.files:
        found, wrong = yaml_file.read(path)
        settings = _over(settings, found)
        problems += wrong
    command_line = [*words.groups, *words.settings]
    if opens and not _leaves_layout([*settings, *command_line]):
        command_line = [Setting("layout.auto", "true", opens), *command_line]
    settings = _over(settings, command_line)
    problems += [*words.problems, *_contradictions(words.settings)]
    name = words.files[-1].stem if words.files else "job"
    given = {setting.path: setting.origin for setting in words.settings if not setting.implied}
    loaded = resolve(settings, problems, name, derived=words.derived, given=given, missing=words.missing)
    return dataclasses.replace(loaded, answers=[*words.answers, *loaded.answers])


def _contradictions(settings: Sequence[Setting]) -> Iterator[str]:
    """Yields fields that an alias and another name on the command line set to different values. For programs the same
    name given twice is none: the later one wins; `repeated` refuses it on command lines."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        if setting.implied:
            continue
        first = seen.setdefault(setting.path, setting)
        if first.alias != setting.alias and _meant(first) != _meant(setting):
            word = setting.origin.removeprefix("command line: ")
            yield f"{first.origin} and {word} both set {setting.path}; give one of them"


def repeated(settings: Sequence[Setting]) -> Iterator[str]:
    """Yields fields that two words of a command line, under the same name, set to different values: the first would
    have no effect."""
    seen: dict[str, Setting] = {}
    for setting in settings:
        if setting.implied:
            continue
        first = seen.get(setting.path, setting)
        if not setting.replaces and first.alias == setting.alias and _meant(first) != _meant(setting):
            word = setting.origin.removeprefix("command line: ")
            yield (
                f"{first.origin} and {word} both set {setting.path}; give one of them, or ++{setting.path}=VALUE, "
                "which replaces what stands before it"
            )
        seen[setting.path] = setting


def _two_sizes(settings: Sequence[Setting]) -> Iterator[str]:
    """Yields that one file, or one command line, gives a machine's number of nodes twice: beside its name (dgx-h100:4)
    and as cluster.nodes."""
    named = {each.origin.partition(":")[0]: str(each.text) for each in settings if each.path == "cluster.preset"}
    for setting in settings:
        preset = named.get(setting.origin.partition(":")[0], "") if setting.path == "cluster.nodes" else ""
        if (nodes := preset.partition(":")[2]).isdecimal() and _meant(setting) != int(nodes):
            yield _placed(setting.origin, "cluster.nodes", f"is {setting.text}, and cluster={preset} says {nodes}")


def _meant(setting: Setting) -> Any:
    """Returns the value of a setting, or its text if it is none."""
    text = setting.text if isinstance(setting.text, list) else spelled(setting.path, setting.text)
    try:
        return values.convert(text, leaves()[setting.path])
    except ValueError:
        return setting.text


def spelled(path: str, text: str) -> str:
    """Returns the text of a field's value, or the value that it names by another word."""
    return catalogue.named(text) if path == "layout.schedule" else foreign_names.value(path, text, leaves()[path])


def _over(earlier: list[Setting], later: list[Setting]) -> list[Setting]:
    """Returns the settings of all job files so far with those of the next file or the command line. `layout.auto`
    restarts the layout: earlier settings of it are dropped. A preset replaces what was resolved from an earlier one."""
    if _leaves_layout(later):
        earlier = [setting for setting in earlier if not setting.path.startswith("layout.")]
    replaced = tuple(start for setting in later for start in _STARTS.get(setting.path, ()) if not setting.resolved)
    earlier = [setting for setting in earlier if not (setting.resolved and setting.path.startswith(replaced))]
    return [*earlier, *later]


def _leaves_layout(settings: list[Setting]) -> bool:
    return any(setting.path == "layout.auto" and str(setting.text).lower() in values.TRUE for setting in settings)


def load_file(path: Path, argv: Sequence[str] = ()) -> LoadedJob:
    """Returns the job of a file with overrides such as ["train.steps=10"]. Raises JobError."""
    words = overrides.parse(argv)
    words.files.insert(0, path)
    return load_words(words)


def resolve(
    settings: Sequence[Setting],
    problems: Sequence[str] = (),
    default_name: str = "job",
    *,
    presets: bool = True,
    derived: Sequence[Derived] = (),
    given: Mapping[str, str] = MappingProxyType({}),
    missing: Sequence[str] = (),
) -> LoadedJob:
    """Applies settings in order to the default job, then names whose value depends on others (`derived`; `given` are
    the fields that the command line sets itself, with their origins), then checks the result. Without `presets`, the
    names of presets are plain values. Raises JobError with all problems, without those of fields that match one of
    `missing`: they follow from what is missing, which `problems` say."""

    def told(path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in missing)

    found = [*problems, *_two_sizes(settings)]
    settings, answers = _taken(settings, found, written=presets)
    job, origins = _start(settings, found) if presets else (Job(), _Origins.fromkeys(leaves(), "default"))
    filed: Job | None = None
    is_size_unread = False
    for setting in settings:
        if filed is None and setting.origin in given.values():
            filed = job  # as the files have it
        kind = leaves()[setting.path]
        try:
            value = values.convert(setting.text, kind)
        except ValueError as error:
            found.append(_placed(setting.origin, setting.path, str(error)))
            is_size_unread |= setting.path.startswith(("cluster.", "layout."))
            continue
        if presets and not setting.resolved and value == () and row_of(kind):
            found.append(_placed(setting.origin, setting.path, "is an empty list; name something, or leave it out"))
        if not presets or setting.path not in ("model.preset", "cluster.preset"):  # these two are already applied
            job = replace(job, setting.path, value)
        origins[setting.path] = setting.origin
    before = job
    if not job.run.name:
        job = replace(job, "run.name", default_name)
        origins["run.name"] = "the job file's name"
    if job.data.mix and origins["data.corpus"] == "default":
        job, origins["data.corpus"] = replace(job, "data.corpus", mixture_of(job.data.mix)), "resolved: data.mix is set"
    if presets and not _states_all("cluster", settings):
        job = _described(job, found, origins, answers)
    job = _fill_rest(job, [] if told("layout") else found, origins)
    if job.train.precision == "auto":
        chosen, why = fastest_precision(job.cluster)
        job = replace(job, "train.precision", chosen)
        origins["train.precision"] += f" (auto: {why})"
        answers.append(f"train.precision: auto is {chosen}: {why}")
    job = _with_defaults_of_optimizer(job, origins)
    job, more, wrong = apply(job, derived, given, origins)
    answers += more
    found += wrong
    problems_found = by_cause(job, problems_of(job), {setting.path for setting in settings if not setting.implied})
    if is_size_unread:  # the devices would be compared with another number than was meant
        problems_found = [(path, message) for path, message in problems_found if path != "layout"]
    if presets and job.data.corpus in CORPORA:  # a run's own job was checked when it began
        whole = tuple(f"{name}." for name in vars(job) if name != TECHNIQUES and _states_all(name, settings))
        by_rule = {ALIASES[one.name].path for one in derived}
        own = (setting for setting in settings if not setting.foreign and not setting.path.startswith(whole))
        given_here = {setting.path for setting in own} | by_rule
        named = {path for path, _ in problems_found}
        filed = _fill_rest(filed or before, [], dict(origins))
        idle_before = (
            {path for path, _ in effect_problems(filed, given_here)} if filed.data.corpus in CORPORA else set()
        )
        problems_found += start_problems(job, given_here) if not problems_found else []
        shorter = "train.steps" in given and job.train.steps < filed.train.steps  # a try of a job, not its intervals
        answers += [] if shorter else [_at(*late, origins) for late in never_reached(job, given_here)]
        for path, message in effect_problems(job, given_here):
            if (given or derived) and path not in given.keys() | idle_before | by_rule:
                answers.append(f"{_at(path, message, origins)}; the command line changes that")
            elif path not in named:
                problems_found.append((path, message))
    found += [_at(path, message, origins) for path, message in problems_found if not told(path)]
    if found:
        raise JobError(found)
    answers += filter(None, (not_trained(job.model), _readers(job)))
    if presets and not _states_all("model", settings) and (rows := _rows_that_give_way(job)):
        answers.append(rows)
    if batch := equation(job, derived):
        answers.append(batch)
    for setting in settings:
        if setting.resolved and origins[setting.path] == setting.origin:
            is_default = get(job, setting.path) == get(Job(), setting.path)
            origins[setting.path] = "default" if is_default else f"resolved in {setting.origin}"
    return LoadedJob(job, origins, answers)


def _readers(job: Job) -> str:
    """Returns a word on ranks that read for others, where they are measured or fewer than data.readers; or nothing."""
    most, ranks = job.data.readers, job.layout.data_ranks
    if most == "auto":
        return "data.readers=auto: chosen by measuring when a run starts; predictions take data for read ahead"
    if most <= ranks or job.layout.auto:
        return ""
    one = "the one data rank reads" if ranks == 1 else f"each of the {ranks} data ranks reads"
    return f"data.readers={most}: {one} its own samples, and more cannot"


def _rows_that_give_way(job: Job) -> str:
    """Returns a word on a preset whose vocabulary is not that of the job's data, or nothing."""
    model, data, tokens = job.model, job.data, vocabulary_of(job.data)
    if model.vocab_size in (0, tokens) or not tokens or not states_no_rows(model):
        return ""
    what = f"tokenizer={data.tokenizer}" if CORPORA[data.corpus].tokens is None else f"corpus={data.corpus}"
    return f"model.vocab_size: {model.vocab_size:,} rows of {model.preset} give way to the {tokens:,} of data.{what}"


def origins_of(job: Job, origin: str) -> dict[str, str]:
    """Returns the origins of a job that no file states: those of the defaults and presets for values that equal them,
    and `origin` for all others."""
    presets = [Setting(path, str(get(job, path)), origin) for path in ("model.preset", "cluster.preset")]
    base, origins = _start(presets, [])
    same = {path for path in leaves() if get(job, path) == get(base, path)} - {
        each.path for each in presets if each.text
    }
    return {path: origins[path] if path in same else origin for path in leaves()}


def _taken(settings: Sequence[Setting], problems: list[str], *, written: bool) -> tuple[list[Setting], list[str]]:
    """Returns the settings with their fields' own values, and an answer for every alias and every value that another
    word named. `written`: by a user, not by a run."""
    taken: list[Setting] = []
    answers: list[str] = []
    for setting in settings:
        if isinstance(setting.text, list):
            taken.append(setting)
            continue
        text = spelled(setting.path, setting.text)
        if setting.path in ("run.dir", "model.from") and text.startswith(
            "~/"
        ):  # data's are replaced where they are read
            taken.append(dataclasses.replace(setting, text=os.path.expanduser(text)))
            continue
        if reason := (
            _machine_for_type(setting.path, text)
            or (written and _unresolved(setting.path, text))
            or foreign_names.refusal(setting.path, text)
        ):
            problems.append(_placed(setting.origin, setting.path, reason))
            if setting.path == "data.path":  # another rule would miss it
                taken.append(setting)
            continue
        if setting.alias or text != setting.text:
            word = setting.origin.removeprefix("command line: ")
            answers.append(f"{word}: taken as {setting.path}={overrides.shown(text)}")
        taken.append(dataclasses.replace(setting, text=text))
    return taken, answers


def _unresolved(path: str, text: str) -> str:
    """Returns why a name or a path is refused that was written for another reader, or nothing: a folder of that very
    name would be made. A path that exists is one."""
    is_path = path in ("run.dir", "run.name", "model.from", "data.path", "data.dir", "data.tokenizer")
    if not (is_path or path == "layout.offload_to") or os.path.exists(text):
        return ""
    if re.match(r"(.*/)?[$][{]?[A-Za-z_]", text):
        return f"{text}: variables are not replaced here; write it out"
    if text in ("null", "None", "~"):
        return f"{text} would be a name; leave the field out, or give the empty text"
    if re.fullmatch(r"""(["']).*\1|\[.*]""", text):
        return f"{text}: expected one text; quotes and brackets would be part of it"
    return ""


def _machine_for_type(path: str, text: str) -> str:
    """Returns why a device or a machine is refused where a type of device is expected, or nothing."""
    if path != "cluster.device" or not (text in ACCELERATORS or text.partition(":")[0] in CLUSTERS):
        return ""
    field = "cluster.accelerator" if text in ACCELERATORS else "cluster"
    return f"expected one of {', '.join(DEVICE_TYPES)}, found {text!r}; did you mean {field}={text}?"


class _Origins(dict[str, str]):
    """Where each value comes from; a field of a package that is loaded only now has its default."""

    def __missing__(self, path: str) -> str:
        return "default"


def _start(settings: Sequence[Setting], problems: list[str]) -> tuple[Job, dict[str, str]]:
    """Returns the default job with the last presets of model.preset and cluster.preset, and the origins."""
    job = default = Job()
    origins = _Origins.fromkeys(leaves(), "default")
    job = _started(job, settings, origins, problems)
    ignored = _ignored(settings)
    for section, shape_of in (("model", partial(_model_of, ignored=ignored)), ("cluster", cluster_of)):
        path = f"{section}.preset"
        chosen = next((setting for setting in reversed(settings) if setting.path == path), None)
        if chosen is None or chosen.text == "":
            continue
        if str(chosen.text).startswith(FROM_FILE) and _states_all(section, settings):
            job = replace(job, path, str(chosen.text))  # a run resumes without the file
            continue
        try:
            job = replace(job, section, shape_of(str(chosen.text)))
        except JobError as error:
            problems += [f"{chosen.origin}: {problem}" for problem in error.problems]
            continue
        for leaf in leaves():
            if leaf.startswith(f"{section}.") and get(job, leaf) != get(default, leaf):
                origins[leaf] = f"preset {chosen.text}"
    return job, origins


def _started(job: Job, settings: Sequence[Setting], origins: dict[str, str], problems: list[str]) -> Job:
    """Returns the job with the shape and the tokenizer of the last `model.from`, which settings override."""
    chosen = next((setting for setting in reversed(settings) if setting.path == "model.from"), None)
    if chosen is None or chosen.text == "" or _states_all("model", settings):
        return job
    try:
        start = starting_point(str(chosen.text), _ignored(settings))
    except JobError as error:
        problems += [f"{chosen.origin}: model.from: {problem}" for problem in error.problems]
        return job
    began = replace(replace(job, "model", start.model), "data.tokenizer", start.tokenizer or job.data.tokenizer)
    origins.update({leaf: f"model.from {chosen.text}" for leaf in leaves() if get(began, leaf) != get(job, leaf)})
    return began


def _states_all(section: str, settings: Sequence[Setting]) -> bool:
    """Returns whether settings state every field of a section, as those of a run's config.yaml do."""
    stated = {setting.path for setting in settings}
    return all(path in stated for path in leaves() if path.startswith(f"{section}."))


def _model_of(preset: str, ignored: tuple[str, ...] = ()) -> ModelConfig:
    """Returns the model of `model.preset`. Raises JobError with the nearest name if it is unknown."""
    return dataclasses.replace(preset_of(preset, ignored).model, preset=preset, ignore_config=ignored)


def _ignored(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Returns the last model.ignore_config, which presets and model.from need before the other settings."""
    path = "model.ignore_config"
    chosen = [setting.text for setting in settings if setting.path == path]
    with suppress(ValueError):  # said where the other settings are converted
        return values.convert(chosen[-1], leaves()[path]) if chosen else ()
    return ()


def _described(job: Job, problems: list[str], origins: dict[str, str], answers: list[str]) -> Job:
    """Returns the job with every figure of a machine that the user describes (config/clusters.py)."""
    given = {path for path in leaves() if not origins[path].startswith(RESOLVED)}
    machine = describe(job.cluster, {path.removeprefix("cluster.") for path in given if path.startswith("cluster.")})
    if not any("cluster.accelerator." in problem for problem in problems):  # a figure that could not be read
        problems += [_at(f"cluster.{path}", message, origins) for path, message in machine.problems]
    origins.update({f"cluster.{path}": origin for path, origin in machine.filled.items()})
    answers += [machine.note] if machine.note else []
    return dataclasses.replace(job, cluster=machine.cluster)


def _fill_rest(job: Job, problems: list[str], origins: dict[str, str]) -> Job:
    """Replaces a -1 ("the rest of the devices") in dp_replicate or dp_shard; the planner finds that rest by itself."""
    open_axes = [axis for axis in ("dp_replicate", "dp_shard") if getattr(job.layout, axis) == -1]
    if not open_axes:
        return job
    devices = job.cluster.devices
    ones: dict[str, Any] = dict.fromkeys(open_axes, 1)
    closed = dataclasses.replace(job.layout, **ones)
    if job.layout.auto:
        origins.update({f"layout.{axis}": "default" for axis in open_axes})
        return dataclasses.replace(job, layout=closed)
    known = closed.world
    if len(open_axes) == 2:
        problems.append("layout: only one of dp_replicate and dp_shard can be -1 (the rest of the devices)")
    elif not devices:
        problems.append(f"layout.{open_axes[0]}: -1 means the rest of the devices; set cluster.devices_per_node")
    elif known < 1 or devices % known:
        problems.append(
            f"layout.{open_axes[0]}: -1 means the rest of the devices, but {devices} devices are not divisible by the "
            f"product of the other axes, {known}"
        )
    else:
        ones[open_axes[0]] = devices // known
        closed = dataclasses.replace(closed, **ones)
        origins[f"layout.{open_axes[0]}"] += f" (-1: {devices} devices / {known})"
    return dataclasses.replace(job, layout=closed)


def _with_defaults_of_optimizer(job: Job, origins: dict[str, str]) -> Job:
    """Returns the job with the values that its optimizer has for fields that nothing has set."""
    name = job.optimizer.name
    for field_name, value in (OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}).items():
        path = f"optimizer.{field_name}"
        if origins[path] == "default":
            job, origins[path] = replace(job, path, value), f"default of {name}"
    return job


def _at(path: str, message: str, origins: dict[str, str]) -> str:
    """Returns a problem with the place where its value was written, if it was."""
    origin = origins.get(path, "default")
    if origin == "default" or not path:
        return f"{path}: {message}" if path else message
    return _placed(origin, path, message)


def _placed(origin: str, path: str, message: str) -> str:
    """Returns a problem of a field that was written at `origin`. Where the user's word has the whole path, or both it
    and the message name the field, the path is not said again."""
    word, name = origin.removeprefix("command line: "), path.rpartition(".")[2]
    typed = re.split(r"[=\s]", word.lstrip("-+"), maxsplit=1)[0].replace("-", "_")
    is_named = word != origin and (typed == path or (typed == name and message.startswith(f"{name} ")))
    return f"{origin}: {message}" if is_named else f"{origin}: {path}: {message}"


def from_dict(values: Mapping[str, Any], origin: str) -> Job:
    """Returns the job of nested plain values, the inverse of `show.as_dict`. All values are present, so no preset is
    looked up, and a run trained on `cluster=local` can be read on a machine that was never measured. Raises
    JobError."""
    if not isinstance(values, Mapping):
        raise JobError(f"{origin}: expected a job with its sections, found {kind_of(values)}")
    return resolve(list(_flatten(values, "", origin)), presets=False).job


def _flatten(values: Mapping[str, Any], prefix: str, origin: str) -> Iterator[Setting]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        load_for(path)
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.", origin)
        elif path not in leaves():
            raise JobError(f"{origin}: unknown key {path}")
        else:
            yield Setting(path, _text_of(value), origin)


def _text_of(value: Any) -> str | list[str]:
    """Returns a plain value as the text of a setting; a list of mappings as JSON, which is YAML."""
    if not isinstance(value, list):
        return str(value)
    return json.dumps(value) if any(isinstance(item, Mapping) for item in value) else [str(item) for item in value]


def as_dict(job: Job) -> dict[str, Any]:
    """Returns the job as nested plain values, with tuples as lists, for JSON and YAML."""
    document = json.loads(json.dumps(job, default=_fields_by_name))
    for place, name in ((document, TECHNIQUES), (document["layout"], "axes")):
        if chosen := dict(place.pop(name)["chosen"]):
            place[name] = chosen
    return document


def _fields_by_name(section: Any) -> dict[str, Any]:
    return {name_of(each.name): getattr(section, each.name) for each in dataclasses.fields(section)}


def as_yaml(loaded: LoadedJob) -> str:
    """Returns every value of the job as YAML with its origin as a comment. Reading it back gives the same job. A layout
    that is left to the planner has only the fields that are set; a cluster that was not measured has no calibration."""
    job, document = loaded.job, as_dict(loaded.job)
    if not job.cluster.calibration.is_known:
        del document["cluster"]["calibration"]  # two dozen empty values
    if job.layout.auto:
        lines = []
        document["layout"] = {
            name: v for name, v in document["layout"].items() if loaded.origins[f"layout.{name}"] != "default"
        }
    else:
        lines = [f"# {solve(job.train.global_batch, job.layout).equation()}"]
    was_set = [path for path, origin in loaded.origins.items() if not origin.startswith(RESOLVED)]
    lines.append(f"{SET_FIELDS}: [{', '.join(was_set)}]  # all other values were resolved")
    _section(document, "", loaded.origins, lines)
    return "\n".join(lines) + "\n"


def _section(values: dict[str, Any], prefix: str, origins: dict[str, str], lines: list[str]) -> None:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:")
            _section(value, f"{prefix}{name}.", origins, lines)
        else:
            text = (
                yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
                .removesuffix("...\n")
                .strip()
            )
            origin = origins.get(f"{prefix}{name}", "default").replace("\n", " ")
            lines.append(f"{indent}{name}: {text}  # {origin}")
