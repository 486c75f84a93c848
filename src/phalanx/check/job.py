"""The problems of a resolved job: all at once, each with its equation and the nearest legal values; and one message per
cause: of the problems that one number causes, only that number's is said, with values legal in the whole job."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from phalanx.axes.catalogue import added_problems, axis_problems, tensor_problems
from phalanx.blocks.kinds import attention_models
from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.model import model_problems, size_problems, unusable_kinds
from phalanx.config.added import once
from phalanx.config.cluster import DEVICE_TYPES, DEVICE_WORDS, Cause, Cluster
from phalanx.config.clusters import ACCELERATORS, maker_of
from phalanx.config.constraints import Constraint
from phalanx.config.corpora import CORPORA, TOKENIZERS, number_of, vocabulary_of
from phalanx.config.fields import constraints, get, replace
from phalanx.config.job import MOST_STEPS, Data, Job, RunOptions
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import states_no_rows
from phalanx.config.trackers import TRACKERS
from phalanx.errors import JobError
from phalanx.nearest import Misfit, did_you_mean, divisors, misfit, multiples, nearest_divisors, nearest_of
from phalanx.optimizers.catalogue import OPTIMIZERS, entry_of, extra_options, granularity_of, unread
from phalanx.optimizers.entry import block_of
from phalanx.partition import derived as batch
from phalanx.partition.derived import overlaps
from phalanx.partition.ramp import phase_jobs, runs
from phalanx.partition.tensor_slices import first_rank_tiles
from phalanx.techniques.catalogue import technique_problems, techniques_of
from phalanx.techniques.technique import Problem


def layout_problems(job: Job) -> Iterator[Problem]:
    """Yields each problem with its equation and the nearest legal choice."""
    layout = job.layout
    yield from axis_problems(job)
    yield from block_problems(job)
    for technique in techniques_of(job).values():
        yield from technique.layout_problems(job)
    yield from _world(layout, job.cluster.nodes, job.cluster.devices_per_node)
    yield from _batch(job)


def _world(layout: Layout, nodes: int, devices_per_node: int) -> Iterator[Problem]:
    outside = "".join(f"{name} {size} × " for name, size in layout.axes.sizes.items())
    product = (
        f"{outside}dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} × cp {layout.cp} × tp {layout.tp} × "
        f"pp {layout.pp} = {layout.world}"
    )
    if not devices_per_node:
        if layout.world % nodes:
            yield "cluster.nodes", f"{product} devices are not divisible by nodes {nodes}"
        return
    devices = nodes * devices_per_node
    if layout.world != devices:
        others = layout.world // layout.dp_replicate
        fits = devices // others
        legal = (
            f"dp_replicate={fits} makes it {devices}"
            if fits and devices % others == 0
            else f"the axes without dp_replicate make {others}, which must divide {devices}"
        )
        yield (
            "layout",
            f"{product}, but the cluster has nodes {nodes} × devices {devices_per_node} = {devices}; {legal}; "
            "`phalanx plan` finds the best layout, layout=auto uses it",
        )


def _batch(job: Job) -> Iterator[Problem]:
    try:
        batch.solve(job.train.global_batch, job.layout)
    except ValueError as error:
        yield "train.global_batch", str(error)


def block_problems(job: Job) -> Iterator[Problem]:
    """Yields the tensor ranks, or the tiles, that cut the blocks over which an optimizer's state has a scale."""
    layout, model = job.layout, job.model
    if job.optimizer.name not in OPTIMIZERS or granularity_of(job.optimizer) != "block":
        return
    shapes = parameter_shapes(model, model.vocab_size or 1)
    for field, of_ranks in (("tp", Layout(tp=layout.tp)), ("tiles", layout)):
        parts = getattr(layout, field)
        for weight, _, held in first_rank_tiles(shapes, of_ranks, model) if parts > 1 else ():
            whole = held.whole
            block = block_of(whole)
            if block and held.dim == len(whole) - 1 and held.size % block:
                rest = whole[-1] // (layout.tp if field == "tiles" else 1)
                legal = [n for n in divisors(max(1, rest // block)) if n < parts]
                yield (
                    f"layout.{field}",
                    Misfit(
                        f"the optimizer's state has a scale per {block} elements of a row, and {field} {parts} cuts "
                        f"the rows of {weight} ({whole[-1]}) into parts of {held.size}",
                        parts,
                        {f"layout.{field}": legal},
                        ", or optimizer.state=bf16",
                    ),
                )
                break


def profile_problems(job: Job) -> Iterator[Problem]:
    """Yields what is wrong with train.profile. Ranks are compared with the layout once it is chosen."""
    profile, layout = job.train.profile, job.layout
    if not profile.is_on:
        if profile.memory or profile.python or profile.ranks != "all":
            yield "train.profile.steps", "no step is profiled; name the first and the last, such as steps=[10, 12]"
        return
    (first, last), steps = profile.steps, job.train.steps
    if first > last:
        yield "train.profile.steps", f"the first is {first}, the last {last}; nearest legal: [{last or 1}, {first}]"
    elif first < 1 or last > steps:
        legal = f"[{min(max(1, first), steps)}, {min(last, steps)}]"
        yield "train.profile.steps", f"[{first}, {last}] lies outside of steps 1 to {steps}; nearest legal: {legal}"
    elif last - first >= MOST_STEPS:
        yield (
            "train.profile.steps",
            f"{last - first + 1} steps, but a trace of one step takes megabytes per rank: at most {MOST_STEPS}; "
            f"nearest legal: [{first}, {first + MOST_STEPS - 1}]",
        )
    if layout.sync == "asp":
        yield "train.profile.steps", "sync=asp has no steps that all ranks take together; nearest legal: sync=bsp"
    if layout.data_parallel == "threads":
        yield (
            "train.profile.steps",
            "the replicas of data_parallel=threads share one interpreter; nearest legal: data_parallel=ddp",
        )
    if profile.ranks == "all":
        return
    world = layout.processes
    if len(set(profile.ranks)) < len(profile.ranks):
        yield "train.profile.ranks", f"each once: {sorted(set(profile.ranks))}"
    elif min(profile.ranks) < 0 or (not layout.auto and max(profile.ranks) >= world):
        legal = sorted({min(max(0, rank), world - 1) for rank in profile.ranks})
        yield (
            "train.profile.ranks",
            f"are {list(profile.ranks)}, but there are ranks 0 to {world - 1}; nearest legal: {legal}",
        )


def guard_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    if not (reason := unguarded(job)):
        return
    for name, legal in (("on_spike", "off"), ("on_nan", "stop")):
        if (policy := getattr(job.guard, name)) not in (legal, "stop"):
            yield (
                f"guard.{name}",
                f"{policy} needs the loss and norm of all ranks before the optimizer writes, and {reason}; nearest "
                f"legal: {name}={legal}",
            )
    if job.guard.on_spike == "stop":
        yield "guard.on_spike", f"no step is compared with earlier ones: {reason}; nearest legal: on_spike=off"
    if job.guard.repeat_every:
        yield "guard.repeat_every", f"no step is computed again: {reason}; nearest legal: repeat_every=0"


def unguarded(job: Job) -> str:
    """Returns why no step of a job can be judged before the optimizer writes; nothing if it can be."""
    if job.layout.sync != "bsp":
        return f"replicas train independently (sync={job.layout.sync})"
    if job.layout.independent_replicas > 1:
        return f"replicas train independently (axis {job.layout.replica_axis})"
    if job.layout.compression == "powersgd":
        return "PowerSGD's error feedback takes the gradients of a step once (compression=powersgd)"
    return f"steps overlap (schedule={job.layout.schedule})" if overlaps(job.layout) else ""


def _without_masters(job: Job) -> str:
    """Returns why parameters need a copy in fp32, with the nearest legal choice, or nothing."""
    precision, layout = job.train.precision, job.layout
    if precision == "fp32":  # in fp64, in which layouts are verified, parameters get bf16's values
        return "parameters in fp32 have no copy; nearest legal: fp32, or train.precision=bf16"
    if precision == "fp16":
        return "in fp16 updates below 6e-8 underflow; nearest legal: train.precision=bf16, or fp32"
    if layout.sync != "bsp":
        return f"sync={layout.sync} averages parameters, which bf16 would round; nearest legal: sync=bsp, or fp32"
    if job.model.moe.bias_balanced:
        return (
            "balancing biases change by model.moe.bias_rate, which bf16 would round away; nearest legal: fp32, "
            "or model.moe.bias_balanced=false"
        )
    return ""


def optimizer_problems(job: Job) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    config = job.optimizer
    try:
        entry = entry_of(config.name)
    except JobError as error:
        yield "optimizer.name", str(error)
        return
    for option in unread(config):
        readers = [name for name, other in OPTIMIZERS.items() if option in other.options]
        yield (
            f"optimizer.{option}",
            f"{config.name} does not read it, {' and '.join(readers) or 'no optimizer'} "
            f"{'do' if len(readers) > 1 else 'does'}; its own options: {', '.join(entry.options) or 'none'}",
        )
    try:
        extra_options(config)
    except ValueError as error:
        yield "optimizer.options", str(error)
    if "nesterov" in entry.options and config.nesterov and not config.momentum:
        yield "optimizer.nesterov", "Nesterov's momentum needs a momentum above 0; nearest legal: nesterov=false"
    layout = job.layout
    if config.master == "none":
        if problem := _without_masters(job):
            yield "optimizer.master", problem
    elif config.rounding == "kahan":
        yield (
            "optimizer.rounding",
            "kahan is for parameters without a copy in fp32; nearest legal: stochastic, or optimizer.master=none",
        )
    if entry.needs_whole_matrices and layout.sync == "asp" and layout.tp * layout.shard_ranks > 1:
        yield (
            "layout.sync",
            f"with asp each rank's server updates by itself, but {config.name} needs whole matrices of all "
            f"{layout.tp * layout.shard_ranks} ranks that share them; nearest legal: sync=bsp, or tp=1 and dp_shard=1",
        )


def problems_of(job: Job) -> list[Problem]:
    """Returns every problem of a job; empty if it is legal. If the layout is left to the planner (layout.auto), only
    problems that no choice of the other fields could solve."""
    found = [*out_of_range(job), *size_problems(job), *_sources(job.data), *unusable_kinds(job.model)]
    if found:
        return found  # the equations below would only repeat them, or never end
    return [
        *_model(job.model),
        *((*tensor_problems(job), *added_problems(job)) if job.layout.auto else _whole_layout(job)),
        *technique_problems(job),
        *ramp_problems(job),
        *_data(job),
        *_vocabulary(job),
        *profile_problems(job),
        *_checkpoint(job),
        *_optimizer(job),
        *_device(job.cluster),
        *_run(job.run),
        *_nodes(job),
    ]


def ramp_problems(job: Job) -> Iterator[Problem]:
    """Yields what ramps cannot be combined with, whatever the planner chooses."""
    train, seq_len = job.train, job.model.seq_len
    for path in ("batch_ramp", "seq_ramp"):
        if (found := runs(getattr(train, path))) and found[-1][0] >= train.steps:
            yield (
                f"train.{path}",
                f"has {found[-1][0]} steps, train.steps is {train.steps}: no step is whole; nearest legal: "
                f"train.steps={found[-1][0] + 1}",
            )
    for _, length in runs(train.seq_ramp):
        if seq_len % length:
            near = nearest_of(divisors(seq_len), length)
            yield "train.seq_ramp", f"model.seq_len {seq_len} / {length} is not an integer; nearest legal: {near}"
    if train.seq_ramp and (CORPORA[job.data.corpus].rows is not None or job.data.packing):
        yield "train.seq_ramp", "would cut conversations and packed documents; nearest legal: leave it out"


def _phases(job: Job) -> Iterator[Problem]:
    """Yields the problems of a layout with the sizes of a ramp's phases, that it has not with whole steps."""
    train = job.train
    if any(job.model.seq_len % length for _, length in runs(train.seq_ramp)):
        train = dataclasses.replace(train, seq_ramp="")
    if not (train.batch_ramp or train.seq_ramp) or any(layout_problems(job)):
        return
    said = set[str]()
    for words, phase in phase_jobs(dataclasses.replace(job, train=train)):
        for _, problem in layout_problems(phase):
            path = "train.seq_ramp" if phase.train.global_batch == train.global_batch else "train.batch_ramp"
            if problem not in said:
                yield path, f"{words}: {problem}"
            said.add(problem)


def _whole_layout(job: Job) -> Iterator[Problem]:
    """Yields problems that depend on the whole layout, and so wait for the planner's choice."""
    yield from layout_problems(job)
    yield from guard_problems(job)
    yield from _phases(job)


def out_of_range(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Yields the path of every field of a (nested) dataclass that violates its stated range, and the message; `prefix`
    is put before the paths. Of a job most sections are those of the last, which are not looked through again."""
    for section, paths in _paths(type(config)).items():
        for path, ranges in paths.items() if not section or not _in_range(get(config, section)) else ():
            value = get(config, path)
            yield from ((f"{prefix}{path}", problem) for each in ranges if (problem := each.problem(value)))


@once
def _paths(cls: type) -> dict[str, dict[str, tuple[Constraint, ...]]]:
    """Returns the constraints of a dataclass by section, and by path; those of its own fields under ""."""
    found: dict[str, dict[str, tuple[Constraint, ...]]] = {}
    for path, ranges in constraints(cls).items():
        found.setdefault(path.rpartition(".")[0].partition(".")[0], {})[path] = ranges
    return found


def _in_range(section: Any) -> bool:
    """Returns whether nothing need be said of a section, as was found before; not if a program gave it a list, which
    has no hash."""
    try:
        hash(section)
    except TypeError:
        return False
    return _is_in_range(section)


@lru_cache(1 << 10)
def _is_in_range(section: Any) -> bool:
    return not any(out_of_range(section))


def cause_problems(causes: Sequence[Cause], places: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with causes of failures; `places` say where each stands."""
    first: dict[str, str] = {}
    for cause, place in zip(causes, places, strict=True):
        yield from (f"{place}: {name} {problem}" for name, problem in out_of_range(cause))
        if not cause.cause:
            yield f"{place}: the cause has no name"
        elif (before := first.setdefault(cause.cause, place)) != place:
            yield f"{place}: {cause.cause!r} is there twice (first: {before})"


def shape_problems(model: ModelConfig) -> list[Problem]:
    """Returns the problems of a model alone."""
    return [*out_of_range(model, "model."), *unusable_kinds(model)] or [*_model(model)]


def _model(model: ModelConfig) -> Iterator[Problem]:
    of_heads = [own for own in attention_models(model) if not own.mla.kv_rank]
    if of_heads and not model.head_dim and model.d_model % model.n_heads:
        yield (
            "model.n_heads",
            Misfit(
                f"d_model {model.d_model} / n_heads {model.n_heads} is not an integer",
                model.n_heads,
                {
                    "model.n_heads": divisors(model.d_model),
                    "model.d_model": multiples(model.n_heads, model.d_model),
                },
                " (or set head_dim)",
            ),
        )
    for path, keys in (("model.n_kv_heads", model.kv_heads), ("model.wide.n_kv_heads", model.wide.n_kv_heads or 1)):
        if model.n_heads % keys:
            legal = {path: divisors(model.n_heads), "model.n_heads": multiples(keys, model.n_heads)}
            name = path.removeprefix("model.")
            yield path, Misfit(f"n_heads {model.n_heads} / {name} {keys} is not an integer", keys, legal)
    yield from model_problems(model)


def data_problems(data: Data) -> Iterator[Problem]:
    """Yields the problems of data settings alone, for which `phalanx.data` also refuses them."""
    yield from out_of_range(data, "data.")
    yield from _sources(data)


def _sources(data: Data) -> Iterator[Problem]:
    entry = CORPORA.get(data.corpus)
    if entry is None:
        hint = did_you_mean(data.corpus, CORPORA)
        yield (
            "data.corpus",
            f"no corpus {data.corpus!r}{hint} (known: {', '.join(CORPORA)}; your own: corpus text and path)",
        )
    for number, source in enumerate(data.mix, start=1):
        for name, problem in out_of_range(source):
            yield "data.mix", f"item {number} ({source.path}): {name} {problem}"
    if data.mix and entry is not None and "mix" not in entry.settings:
        yield "data.mix", f"stands beside data.corpus={data.corpus}; leave one of the two out"
    for name in ("path", "dir", "tokenizer"):
        if "\0" in getattr(data, name):
            yield f"data.{name}", f"is {getattr(data, name)!r}: no file name holds a NUL byte"
    if entry is not None:
        yield from entry.rules(data)
    if data.tokenizer in TOKENIZERS:
        yield from TOKENIZERS[data.tokenizer].rules(data)
    if data.packing and not data.document_mask and entry is not None and entry.tokens is None:
        yield (
            "data.packing",
            f"{'documents' if entry.rows is None else 'conversations'} that share a sample would attend to each other; "
            "nearest legal: document_mask=true, or packing=false",
        )
    if data.document_mask and entry is not None and entry.tokens is not None:
        yield (
            "data.document_mask",
            f"corpus {data.corpus} has no documents; nearest legal: document_mask=false, or corpus=stdlib",
        )


def _data(job: Job) -> Iterator[Problem]:
    if job.train.eval_samples and not job.data.val_fraction:
        yield (
            "data.val_fraction",
            f"is 0, but train.eval_samples is {job.train.eval_samples}: set one above 0 or the other to 0",
        )
    corpus = CORPORA[job.data.corpus]
    if corpus.rows is not None and job.data.packing and job.model.positions == "learned":
        yield (
            "data.packing",
            "learned positions count through the sample, so the conversations after the first would begin at other "
            "positions than alone; nearest legal: packing=false, or positions=rope",
        )
    if (corpus.rows is not None or job.data.packing) and job.data.on_corruption == "skip":
        what = f"corpus {job.data.corpus} has conversations" if corpus.rows is not None else "documents are packed"
        yield "data.on_corruption", f"skip replaces samples of a text; {what}; nearest legal: stop"
    if corpus.tokens is not None and 0 < job.model.vocab_size < (vocab := number_of(corpus.vocab, job.data)):
        yield (
            f"data.{corpus.vocab if isinstance(corpus.vocab, str) else 'corpus'}",
            f"is {vocab}, but the model's vocabulary has {job.model.vocab_size}",
        )


def _vocabulary(job: Job) -> Iterator[Problem]:
    """Yields the problem of an embedding with fewer rows than the tokenizer has tokens, where its settings tell."""
    if states_no_rows(job.model) or CORPORA[job.data.corpus].tokens is not None:
        return
    rows, stated = job.model.vocab_size, vocabulary_of(job.data)
    if rows < stated and job.model.from_:
        yield (
            "data.tokenizer",
            f"{job.data.tokenizer} has {stated:,} tokens, and the embedding of model.from={job.model.from_} has "
            f"{rows:,} rows: set it to the tokenizer.json of those weights, or leave it out",
        )
    elif rows < stated:
        yield (
            "model.vocab_size",
            f"is {rows:,}, and data.tokenizer={job.data.tokenizer} has {stated:,} tokens: leave it out, or set at "
            f"least {stated:,}; more rows are padding",
        )


def _checkpoint(job: Job) -> Iterator[Problem]:
    every, validated = job.checkpoint.every, job.train.eval_every
    if not job.checkpoint.keep_best:
        return
    if not job.train.eval_samples:
        yield "checkpoint.keep_best", "the best checkpoint has the lowest validation loss, and eval_samples is 0"
    elif every and (not validated or every % validated):
        yield (
            "checkpoint.keep_best",
            Misfit(
                "a checkpoint can be the best only if the model is validated when it is saved: checkpoint.every "
                f"{every} is not a multiple of train.eval_every {validated}",
                validated or every,
                {
                    "train.eval_every": divisors(every),
                    "checkpoint.every": multiples(validated, every) if validated else [],
                },
            ),
        )


def _device(cluster: Cluster) -> Iterator[Problem]:
    """Yields that the job names GPUs of another maker than the cluster's (to torch AMD's are cuda), and problems of
    its failures."""
    wanted, name = cluster.device, cluster.accelerator.name
    maker = maker_of(name) if name in ACCELERATORS else ""
    if maker and wanted in DEVICE_WORDS and wanted not in (maker, DEVICE_TYPES[maker]):
        yield "cluster.device", f"is {wanted}, but cluster.accelerator is {name}; nearest legal: {maker}"
    places = [f"item {number}" for number in range(1, len(cluster.failures) + 1)]
    yield from (("cluster.failures", problem) for problem in cause_problems(cluster.failures, places))


def _run(run: RunOptions) -> Iterator[Problem]:
    for name in dict.fromkeys(run.trackers):
        if name not in TRACKERS:
            yield "run.trackers", f"no tracker {name!r}{did_you_mean(name, TRACKERS)} (known: {', '.join(TRACKERS)})"
        elif run.trackers.count(name) > 1:
            yield "run.trackers", f"names {name} {run.trackers.count(name)} times; nearest legal: once"
    if run.hang_s >= run.timeout_s:
        yield (
            "run.hang_s",
            f"is {run.hang_s:g}, but must be below run.timeout_s {run.timeout_s:g}, after which ranks give up without "
            f"a diagnosis; nearest legal: hang_s=0, which is at most {run.timeout_s / 2:g}",
        )


def _nodes(job: Job) -> Iterator[Problem]:
    run = job.run
    if bool(run.nnodes) != bool(run.rdzv_endpoint):
        given, missing = ("nnodes", "rdzv_endpoint") if run.nnodes else ("rdzv_endpoint", "nnodes")
        yield f"run.{missing}", f"run.{given} is set: nodes need both, such as nnodes=2 rdzv_endpoint=HOST:29400"
    if run.least_nodes > run.most_nodes:
        yield "run.nnodes", f"is {run.nnodes}; nearest legal: {run.most_nodes}:{run.least_nodes}"
    elif not job.layout.auto and job.layout.processes % run.most_nodes:
        yield (
            "run.nnodes",
            f"the layout's {job.layout.processes} ranks are not divisible by {run.most_nodes} nodes; nearest legal: "
            f"{nearest_divisors(job.layout.processes, run.most_nodes)}",
        )


def _optimizer(job: Job) -> Iterator[Problem]:
    yield from optimizer_problems(job)
    optimizer = job.optimizer
    if optimizer.warmup_steps > job.train.steps:
        yield (
            "optimizer.warmup_steps",
            f"warmup_steps {optimizer.warmup_steps} is more than train.steps {job.train.steps}; nearest legal: "
            f"{job.train.steps}",
        )
    if optimizer.batch_scaling != "none" and not optimizer.base_batch:
        yield (
            "optimizer.base_batch",
            f"batch_scaling {optimizer.batch_scaling} needs the global batch for which lr was chosen",
        )


_MOST_TRIED = 24
"""Most values of a field that are tried."""
_MOST_SAID = 3
"""Most values of a field that a message names."""
_NO_INTEGER = " is not an integer"
Check = Callable[[Job], Sequence[Problem]]


class _Pending(NamedTuple):
    """A problem that is not said yet."""

    place: int
    """Its place among all problems."""
    written: Problem
    """The problem in the user's job."""
    now: Problem
    """The problem in the job in which the causes that are said are mended."""


class _Change(NamedTuple):
    """Another value of one field."""

    path: str
    value: int
    job: Job
    problems: Sequence[Problem]
    """Those of the changed job."""
    beside: str
    """The change of another field that goes with it, in words."""


def by_cause(
    job: Job, found: Sequence[Problem], given: Set[str] = frozenset(), check: Check = problems_of
) -> list[Problem]:
    """Returns the problems `found` of a job with one message per cause.

    Numbers that do not fit each other (`Misfit`) are the cause of every problem that goes if one of them changes. Of
    these fields the one is named whose change solves most, and one that the user set (`given`: dotted paths) rather
    than another. Its values are tried by `check`, which returns the problems of a job.
    """
    pending = [_Pending(place, problem, problem) for place, problem in enumerate(found)]
    said: list[tuple[int, Problem]] = []
    while first := next((each for each in pending if isinstance(each.now[1], Misfit)), None):
        changes = _best_changes(job, first.now, [each.now for each in pending], given, check)
        if not changes:
            said.append((first.place, first.written))
            pending.remove(first)
            continue
        left = list(_still(pending, changes[0].problems))
        places = {each.place for each in left}
        solved = [each for each in pending if each.place not in places]
        said.append((first.place, (changes[0].path, _message(changes, solved, {path for path, _ in found}))))
        pending, job = left, changes[0].job
    said += [(each.place, each.written) for each in pending]
    return [problem for _, problem in sorted(said)]


def _best_changes(job: Job, problem: Problem, now: Sequence[Problem], given: Set[str], check: Check) -> list[_Change]:
    """Returns the nearest of the changes of one field that solve `problem` and as many others as possible; empty if no
    change solves it without causing more."""
    at, message = problem
    assert isinstance(message, Misfit)
    before = Counter(path for path, _ in now)
    best: list[_Change] = []
    best_cost: tuple[object, ...] = (True, len(now))
    for order, (path, values) in enumerate(message.choices.items()):
        wanted = get(job, path) if order else message.wanted
        by_cost: dict[tuple[object, ...], list[_Change]] = {}
        tried = sorted({*values} - {wanted}, key=lambda value: (abs(value - wanted), value))[:_MOST_TRIED]
        for change in (_changed(job, path, value, given, check) for value in tried):
            after = Counter(path for path, _ in change.problems)
            if after[at] < before[at] and len(change.problems) <= len(now):
                breaks_layout = "layout" in after.keys() - before.keys()
                cost = path not in given, len(change.problems), breaks_layout, order
                by_cost.setdefault(cost, []).append(change)
        if by_cost and (cost := min(by_cost)) < best_cost:
            best, best_cost = by_cost[cost][:_MOST_SAID], cost
    return best


def _changed(job: Job, path: str, value: int, given: Set[str], check: Check) -> _Change:
    """Returns the change of one field. Replicas that the user did not set become as many as the devices allow."""
    job, beside = replace(job, path, value), ""
    layout, devices = job.layout, job.cluster.devices
    if path.startswith("layout.") and devices and layout.world != devices and not layout.auto:
        others = layout.world // layout.dp_replicate
        if devices % others == 0 and "layout.dp_replicate" not in given:
            layout = dataclasses.replace(layout, dp_replicate=devices // others)
            job, beside = replace(job, "layout", layout), f" with dp_replicate={layout.dp_replicate}"
    return _Change(path, value, job, check(job), beside)


def _still(pending: Sequence[_Pending], problems: Sequence[Problem]) -> Iterator[_Pending]:
    """Yields the pending problems that a changed job has, too, as they are there."""
    waiting = list(pending)
    for problem in problems:
        same = [each for each in waiting if each.now == problem] or [
            each for each in waiting if each.now[0] == problem[0]
        ]
        if same:
            waiting.remove(same[0])
            yield same[0]._replace(now=problem)


def _message(changes: Sequence[_Change], solved: Sequence[_Pending], known: Set[str]) -> str:
    """Returns the equations that a change of a field solves, and the nearest values."""
    path = changes[0].path
    misfits = [message for each in solved if isinstance(message := each.written[1], Misfit) and path in message.choices]
    values = ", ".join(f"{each.value}{each.beside}" for each in sorted(changes, key=lambda each: each.value))
    after = misfits[0].after if len(misfits) == 1 and path == next(iter(misfits[0].choices)) else ""
    new = sorted({other for other, _ in changes[0].problems} - known)
    after += f" (with another {' and '.join(new)})" if new else ""
    return misfit(_joined([each.equation for each in misfits]), path, values) + after


def _joined(equations: Sequence[str]) -> str:
    stems = [each.removesuffix(_NO_INTEGER) for each in equations]
    if len(stems) > 1 and all(stem + _NO_INTEGER == each for stem, each in zip(stems, equations, strict=True)):
        return " and ".join(stems) + " are not integers"
    return ", and ".join(equations)


def require_cut(model: ModelConfig, tp: int, pp: int) -> None:
    """Raises JobError, with everything that is in the way, unless tp × pp ranks can share a model that only computes
    forward."""
    problems = []
    if not 1 <= pp <= model.n_layers:
        problems.append(
            f"1 ≤ pp {pp} ≤ n_layers {model.n_layers} does not hold: each rank of a pipeline has at least one layer; "
            f"nearest legal: pp {min(max(pp, 1), model.n_layers)}"
        )
    if tp < 1:
        problems.append(f"tp {tp}: at least 1")
    else:
        problems += [message for _, message in tensor_problems(Job(model=model, layout=Layout(tp=tp)))]
    if problems:
        raise JobError(problems)
