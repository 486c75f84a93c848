"""Selects the comparison of `phalanx verify`: the small job, the layouts, and those that are skipped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, lcm
from typing import Any

from phalanx.axes.catalogue import OWN as OWN_AXES
from phalanx.axes.catalogue import axes_of
from phalanx.blocks.kinds import HALVES, alike, model_kinds
from phalanx.blocks.parameters import count
from phalanx.check.effect import effect_problems
from phalanx.check.job import by_cause, out_of_range, problems_of
from phalanx.check.load import spelled
from phalanx.check.model import size_problems
from phalanx.config import fields, layout_line
from phalanx.config.cluster import Cluster
from phalanx.config.corpora import PAIR, has_answers, has_pairs, has_prompts
from phalanx.config.job import Checkpoint, Job
from phalanx.config.layout import AXES, Layout
from phalanx.config.model import ModelConfig, MoE
from phalanx.config.precision import Precision
from phalanx.errors import JobError
from phalanx.nearest import divisors
from phalanx.partition import derived as batch
from phalanx.partition.derived import MODES, flushes, is_file, legal_hpz, parse, parse_cut, schedule_of, stashes
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.schedule import Schedule
from phalanx.techniques.catalogue import OWN, techniques_of
from phalanx.techniques.technique import Problem
from phalanx.units import counted, listed

FEATURES = (
    *(axis.combined for axis in OWN_AXES.values()),
    *(technique.combined for technique in OWN.values() if technique.combined),
)
"""The features: those of the axes and of the techniques; a layout has at most one entry of each row."""
ENTRIES = tuple(itertools.chain(*FEATURES))


@dataclass(frozen=True)
class _Combination:
    layout: Layout
    pairs: int
    """The pairs of entries that meet in it, as a bit set with one bit per pair."""


def pairs(max_ranks: int, legal: Callable[[Layout], bool] = lambda _: True) -> tuple[Layout, ...]:
    """Returns layouts of at most `max_ranks` ranks that cover every pair of entries of different rows that any `legal`
    layout can have."""
    allowed, missing, found = cache(legal), -1, list[Layout]()
    left = _combinations(max_ranks)
    while left:
        ordered = sorted(left, key=lambda each: (each.pairs & missing).bit_count(), reverse=True)
        best = next((each for each in ordered if allowed(each.layout)), None)
        if best is None:
            break
        found.append(best.layout)
        missing &= ~best.pairs
        left = [each for each in left if each.pairs & missing]
    return tuple(found)


@cache
def _combinations(max_ranks: int) -> list[_Combination]:
    found = []
    for entries in itertools.product(*(("", *row) for row in FEATURES)):
        chosen = [entry for entry in entries if entry]
        layout = Layout(**{name: value for entry in chosen for name, value in _settings(entry).items()})
        if layout.world <= max_ranks and layout.shard_ranks % layout.ep == 0:
            found.append(_Combination(layout, sum(_bit(*pair) for pair in itertools.combinations(chosen, 2))))
    return sorted(found, key=lambda each: each.layout.world)  # among equally many new pairs, fewer ranks are faster


@cache
def _settings(entry: str) -> dict[str, Any]:
    changed = vars(layout_line.parse(entry))
    return {name: value for name, value in changed.items() if value != getattr(Layout(), name)}


@cache
def _bit(first: str, second: str) -> int:
    return 1 << (ENTRIES.index(first) * len(ENTRIES) + ENTRIES.index(second))


MATRIX = (
    "accumulation=2",
    *(line for axis in OWN_AXES.values() for line in axis.layouts),
    # combined forms that the covering set does not have
    "dp_shard=2,pp=2,zero=2,schedule=interleaved_1f1b,accumulation=4,accumulate=sharded",
    "dp_shard=2,tp=2,zero=3,sp=true,sp_regather=true,reshard=false",
    *(line for technique in OWN.values() for line in technique.layouts),
)
"""Each axis and technique alone, in all its forms, in lines of at most 8 ranks; the covering set combines them."""

CONTEXTS = (1, 2)
"""Context-parallel ranks in `full`."""

PIPELINES = (2, 3, 4)
"""Pipeline ranks for which every schedule is compared."""


def products(max_ranks: int) -> Iterator[Layout]:
    """Yields every product dp_replicate × dp_shard × cp × tp of 2 to `max_ranks` ranks, with and without sequence
    parallelism, in every stage of ZeRO and every mode of recomputation."""
    degrees = range(1, max_ranks + 1)
    for replicate, shard, cp, tp in itertools.product(degrees, degrees, CONTEXTS, degrees):
        if not 2 <= replicate * shard * cp * tp <= max_ranks:
            continue
        for sp, zero, recompute in itertools.product((False, True), (1, 2, 3), MODES):
            if (sp and tp == 1) or (zero < 3 and shard * cp == 1):
                continue  # the same as without
            yield Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, sp=sp, zero=zero, recompute=recompute)  # pyrefly: ignore[bad-argument-type]


def every_schedule(max_ranks: int) -> Iterator[Layout]:
    """Yields every schedule on pipelines of P = 2, 3, 4 ranks, with P, 2 P and P + 1 micro-batches."""
    for name in SCHEDULES:
        for pp in (ranks for ranks in PIPELINES if ranks <= max_ranks):
            for micro_batches in (pp, 2 * pp, pp + 1):
                yield Layout(pp=pp, schedule=name, accumulation=micro_batches)


def reduced(layout: Layout, max_ranks: int) -> Layout:
    """Returns the same techniques on fewer ranks: the largest degree is divided by its smallest factor until it fits.

    Every axis keeps at least 2 ranks while that is possible. Of equal degrees the one that comes first in the mesh is
    reduced first. A pipeline whose schedule is a file keeps its ranks; a smaller pipeline loses the settings written
    for its stages. Degrees that subdivide other axes (cp_ulysses, ep) shrink with them.
    """
    fixed, wanted = {"pp"} if layout.pp > 1 and is_file(layout.schedule) else set[str](), layout
    while layout.processes > max_ranks:
        axis = max((name for name in AXES if name not in fixed), key=lambda name: getattr(layout, name))
        degree = getattr(layout, axis)
        if degree == 1:
            break
        factor = next(f for f in range(2, degree + 1) if degree % f == 0)
        layout = replace(layout, **{axis: degree // factor})
        if axis == "pp":
            layout = replace(layout, pp_cut="")
    # What subdivides an axis fits it, and settings of absent techniques go.
    ep = gcd(wanted.ep_shard, layout.shard_ranks) * (layout.tp if wanted.folds else 1)
    layout = replace(layout, cp_ulysses=gcd(layout.cp_ulysses, layout.cp), ep=ep)
    layout = replace(layout, hpz=max(ranks for ranks in legal_hpz(layout) if ranks <= layout.hpz))
    without = ["cp_inner"] if layout.cp == 1 else []
    without += ["schedule", "pp_chunks", "pp_slices", "pp_cut"] if layout.pp == 1 else []
    without += ["accumulate"] if layout.shard_ranks == 1 else []
    without += ["etp"] if layout.tp == 1 else []
    without += ["dispatch", "ep_overlap", "redundant_experts"] if layout.ep == 1 else []
    without += ["ep_node"] if layout.ep % layout.ep_node or layout.ep_node == layout.ep else []
    return replace(layout, **{name: getattr(Layout(), name) for name in without})


EXPERTS = MoE(n_experts=8, top_k=2, n_shared=1, aux_loss=0.01, z_loss=0.001, bias_balanced=True)
"""The experts added to a model without any: they exercise every part of a router."""


def deep_enough(job: Job, layout: Layout) -> Job:
    """Returns the job with a model for a layout's stages: as many layers as `recompute_cut` or `pp_cut` has, else at
    least one per stage and one more, so that the order of the layers of a stage matters.

    If the layout is not legal, the job is returned unchanged."""
    if layout.pp == 1 and not layout.recompute_cut:
        return job
    try:
        if layout.recompute_cut:
            layers = sum(run.layers for run in parse(layout.recompute_cut))
        elif layout.pp_cut:
            layers = sum(parse_cut(layout.pp_cut))
        else:
            layers = max(job.model.n_layers, _schedule(layout).stages + job.model.together)
    except JobError:
        return job
    return replace(job, model=replace(job.model, n_layers=layers))


def with_experts(job: Job, layout: Layout) -> Job:
    """Returns the job with experts in its model if the layout uses expert parallelism and the model has none.

    They are narrow, and their width is divisible by the same numbers of ranks as that of the MLP. They have no
    load-balancing loss if the layout slices sequences, which excludes it."""
    model = job.model
    if layout.ep == 1 or model.moe.n_experts:
        return job
    moe = replace(EXPERTS, d_ff=alike(model.ff_size, min(model.ff_size, max(8, model.d_model // 2)), max(8, layout.tp)))
    try:
        if layout.pp > 1 and _schedule(layout).slices > 1:
            moe = replace(moe, aux_loss=0.0)
    except JobError:
        pass  # the layout is not legal, with experts or without
    return replace(job, model=replace(model, moe=moe))


def _schedule(layout: Layout) -> Schedule:
    """Returns a pipeline's schedule, whose stages do not depend on the number of micro-batches. Raises JobError if
    there is none."""
    return schedule_of(layout, max(layout.pp, layout.accumulation))


CHEAP_PARAMETERS = 3_000_000
CHEAP_SEQ_LEN = 128
SMALL_LAYERS, SMALL_HEAD, SMALL_WIDTH, SMALL_SEQ_LEN, SMALL_VOCAB, SMALL_WINDOW = 2, 8, 256, 32, 251, 5
"""The vocabulary is a prime: no number of tensor ranks divides it, so that its padding is at work."""
BUCKETS = 4
"""Gradient buckets of the compared model: a real one has many, and their order matters."""
MOST_CLIP = 0.01
"""The clip at most, which the norm of a small model's gradients exceeds in every step: so that clipping is at work."""
MIN_EPS = 1e-8
"""Adam's eps at least: a smaller one would amplify the rounding of gradients that are zero."""

Changes = dict[str, tuple[Any, Any]]
"""The job's value and the compared value, by dotted path."""


@dataclass(frozen=True)
class ComparedJob:
    """The job that is compared, and what it has in place of the original."""

    job: Job
    """The compared job, with a layout of one process; in float64."""
    vocab_size: int
    changes: Changes
    """The differences between both jobs; empty if the job is compared as it is."""


def compared_job(job: Job, as_is: bool, max_ranks: int, own: Precision | None = None) -> ComparedJob:
    """Returns the job to compare in place of `job`: smaller if the original takes too long, unless `as_is`. It trains
    in precision `own`, by default in float64.

    A small model has the same parts, heads and key/value heads, and its widths and experts are divisible by the same
    numbers of ranks up to `max_ranks`: the same layouts are legal for it. It runs on CPU processes unless the job asks
    for `cluster.device=cuda`.
    """
    vocab = job.model.vocab_size or SMALL_VOCAB
    small = job
    if not as_is:
        model = _small_model(job.model, vocab, max_ranks)
        vocab = model.vocab_size or SMALL_VOCAB
        bucket_mb = min(job.layout.bucket_mb, float(f"{count(model, vocab) * 8 / BUCKETS / 2**20:.3g}"))
        optimizer = replace(job.optimizer, eps=max(job.optimizer.eps, MIN_EPS), clip=min(job.optimizer.clip, MOST_CLIP))
        small = replace(job, model=model, optimizer=optimizer, layout=replace(job.layout, bucket_mb=bucket_mb))
    changes = {
        path: (fields.get(job, path), fields.get(small, path))
        for path in fields.leaves()
        if fields.get(job, path) != fields.get(small, path)
    }
    precision = own or ("fp8" if job.train.precision == "fp8" else "fp64")
    gradients = small.train.gradients if own else "same"
    train = replace(
        small.train, precision=precision, gradients=gradients, compile=False, cpu_linear="auto", global_batch=0
    )
    if train.seq_ramp:
        train = replace(train, seq_ramp=f"1*{small.model.seq_len // divisors(small.model.seq_len)[1]}")
    layout = Layout(bucket_mb=small.layout.bucket_mb)
    cluster = Cluster(device="cpu" if job.cluster.device == "auto" else job.cluster.device)
    return ComparedJob(replace(small, train=train, layout=layout, cluster=cluster), vocab, changes)


def _small_model(model: ModelConfig, vocab: int, max_ranks: int) -> ModelConfig:
    seq_len = model.seq_len
    if seq_len > CHEAP_SEQ_LEN:
        seq_len = alike(seq_len, SMALL_SEQ_LEN, max_ranks)
    # As large a part of the sequence, but enough keys for a softmax; never 0, which is no window.
    window = max(-(-model.window * seq_len // model.seq_len), min(model.window, SMALL_WINDOW))
    model = replace(model, seq_len=seq_len, window=window)
    if count(model, vocab) <= CHEAP_PARAMETERS:
        return model
    # At least one layer of each kind in turn.
    halves = {half: tuple(dict.fromkeys(getattr(model, half).split(","))) for half in HALVES}
    windows = tuple(dict.fromkeys(model.window_pattern.split(",")))
    kinds = max(SMALL_LAYERS, len(windows), *map(len, halves.values()))
    # Of layers that share keys as many again.
    n_layers = min(model.n_layers, model.mtp + kinds * (1 + (model.shared_keys > 0)))
    # Of layers with and without a window at least one each.
    full_every = min(model.full_every, kinds) if model.full_every <= model.n_layers else 0
    head = min(model.head_size, SMALL_HEAD)
    turned = model.rotary_fraction
    width = min(model.d_model, model.n_heads * head, SMALL_WIDTH)
    fraction = 1 if turned == 1 else max(2, 2 * round(head * turned / 2)) / head
    pairs, stretched = int(head * fraction) // 2, model.rope_scaling
    small = replace(
        model,
        n_layers=n_layers,
        **{half: ",".join(kinds) for half, kinds in halves.items()},
        full_every=full_every,
        window_pattern=",".join(windows),
        nope_every=min(model.nope_every, n_layers),
        query_growth=replace(model.query_growth, length=min(model.query_growth.length, max(1, seq_len // 4))),
        d_model=width,
        # About as large a part of a small head turns, of whole pairs.
        rotary_fraction=fraction,
        rope_scaling=replace(stretched, short=stretched.short[:pairs], long=stretched.long[:pairs]),
        head_dim=head
        if not model.mla.kv_rank and (model.head_dim or width != model.n_heads * head)
        else model.head_dim,
        d_ff=alike(model.ff_size, min(model.ff_size, 2 * width), max_ranks),
        vocab_size=min(vocab, SMALL_VOCAB) if model.vocab_size else 0,
    )
    for kind in model_kinds(model):
        small = kind.shrink(model, small, max_ranks)
    return small


GLOBAL_BATCHES = (8, 24)
"""Sequences per step: the first one divisible by a layout's data ranks × accumulation, else that product."""
PIPELINE_BATCHES = (8,)
"""Sequences per step for pipelines, whose micro-batches may be one sequence each: 5 of them take 5."""
UNEQUAL = ("layout.sync", "layout.compression", "layout.quantise_weights", "layout.quantise_gradients")
"""Fields by which values differ from one process, with which sums over ranks are proven all the same."""
PAIR_RANKS = 8
"""Maximum ranks of a layout of the covering set: more would make layouts larger, not different."""


@dataclass(frozen=True)
class Skipped:
    """A layout that is not compared."""

    layout: str
    reason: str


@dataclass
class Selection:
    """The layouts to compare with one process, and their job."""

    compared: ComparedJob
    as_is: bool = False
    """Whether the model is compared as it is."""
    values: bool = True
    """Whether values are compared, which independent replicas have of their own, and codes round."""
    layouts: list[Layout] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on how compared layouts differ from the job's own."""
    refused: list[str] = field(default_factory=list)
    """Problems of layouts that were named and cannot be compared, while others can."""

    def suited(self, job: Job, layout: Layout) -> Job:
        """Returns a job with a model for a layout; stashed weights take no clipping, and a head of its own."""
        if self.as_is:
            return job
        if stashes(layout):
            changed = {"optimizer": replace(job.optimizer, clip=0.0), "model": replace(job.model, tied=False)}
            job = replace(job, **changed)
        return deep_enough(with_experts(job, layout), layout)

    def case(self, layout: Layout) -> Job:
        """Returns the job of one case: the same model and optimizer, with the layout and a global batch divisible by
        it. Unless it is compared as it is, the model has more layers than stages, and experts if the layout uses expert
        parallelism."""
        return _with(self.suited(self.compared.job, layout), layout)

    def alone(self, layout: Layout) -> Job:
        """Returns the job of one process that the layout's case is compared with."""
        return replace(self.case(layout), layout=self.compared.job.layout)

    def stale(self, layout: Layout) -> Layout | None:
        """Returns a layout whose gradients are late by design (a pipeline without a flush, or with stashed weights),
        None for others. It is compared with one process whose gradients are equally late."""
        return layout if stashes(layout) or not flushes(layout) else None

    def not_compared(self) -> list[str]:
        """Returns lines about layouts that are not compared, by reason, and about those that were refused."""
        by_reason: dict[str, list[str]] = {}
        for skipped in self.skipped:
            by_reason.setdefault(skipped.reason, []).append(skipped.layout)
        lines = ["", "Not compared:"] if by_reason else []
        lines += [f"  {listed(layouts, 1)}: {reason}" for reason, layouts in by_reason.items()]
        return [*lines, "", "Refused:", *(f"  {each}" for each in self.refused)] if self.refused else lines


def select(
    job: Job,
    *,
    lines: Sequence[str] = (),
    full: bool = False,
    schedules: bool = False,
    max_ranks: int = 8,
    as_is: bool = False,
    alone: bool = False,
    precision: Precision | None = None,
    values: bool = True,
) -> Selection:
    """Selects the layouts of `lines`, or the job's own with the matrix and the covering set, with every layout
    (`full`), with every pipeline schedule alone (`schedules`), or by itself (`alone`).

    A layout of the matrix that is not legal for the model, or larger than `max_ranks`, is skipped. Unless `as_is`, a
    model with no more layers than stages gets more, and one without experts gets some for layouts with expert
    parallelism. `precision`: that of the comparison, by default float64. Without `values`, layouts with UNEQUAL may be
    selected, too. A named layout that cannot be compared does not stop the others. Raises JobError with every problem
    if none of the named layouts can be compared.
    """
    if precision:  # what is legal for a layout depends on it
        job = replace(job, train=replace(job.train, precision=precision))
    selection, problems = Selection(compared_job(job, as_is, max_ranks, precision), as_is, values), list[str]()
    for line in lines:
        try:
            layout = layout_line.parse(line)
            named, _ = layout_line.settings_of(line)
        except JobError as error:
            problems += error.problems
            continue
        layout = replace(layout, schedule=spelled("layout.schedule", layout.schedule))
        if any(spelled(path, text) != text for path, text in named.items()):
            selection.notes.append(f"layout {line!r}: taken as {layout.line()}")
        if layout.auto:
            problems.append(f"layout {line!r}: verify compares layouts, not the planner's choice; name its fields")
            continue
        asked = replace(job, layout=layout)
        if wrong := [*out_of_range(asked), *size_problems(asked)]:
            problems += [f"layout {line!r}: {path}: {message}" for path, message in wrong]
            continue
        fit = job if as_is else with_experts(job, layout)
        if reasons := _reasons(fit, selection, layout, max_ranks, named.keys()):
            problems += [f"layout {line!r}: {reason}" for reason in reasons]
            continue
        _add(selection, layout)
    if problems and not selection.layouts:
        raise JobError(problems)
    selection.refused = problems
    if not lines:
        _own(selection, job, max_ranks)
    if not (lines or alone):
        _rest(selection, job, full, schedules, max_ranks)
    selection.notes += _notes(selection, job)
    return selection


RESUMED = (
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=4,zero=3",
    "dp_shard=2,zero=2,offload=optimizer",
    "tp=2,sp=true",
    "pp=2,schedule=interleaved_1f1b",
    "pp=2,tp=2",
    "cp=2",
    "dp_shard=2,ep=2",
)
"""Layouts whose runs go on in each other's: every axis, every ZeRO stage, and the optimizer on the host."""

Pair = tuple[Job, Job]
"""The job in the layout until its checkpoint, and in the layout that resumes from it."""


def resumed_pairs(
    job: Job, *, lines: Sequence[str] = (), max_ranks: int = 8, as_is: bool = False
) -> tuple[Selection, list[Pair]]:
    """Selects the pairs of layouts between which a run changes: from the job's own to each of RESUMED and back, and
    from each of these to the next; of `lines`, every two of them, or one and one process.

    Raises JobError with every problem if none of the named layouts can be compared."""
    selection = select(job, lines=lines, max_ranks=max_ranks, as_is=as_is) if lines else None
    if selection is None:
        selection = Selection(compared_job(job, as_is, max_ranks), as_is)
        _own(selection, job, max_ranks)
        for layout in map(layout_line.parse, RESUMED):
            if why := _reasons(selection.suited(job, layout), selection, layout, max_ranks):
                selection.skipped.append(Skipped(layout.line(), "; ".join(why)))
            else:
                _add(selection, layout)
    alone = selection.compared.job.layout
    layouts = [layout for layout in selection.layouts if flushes(layout)]
    selection.skipped += [
        Skipped(layout.line(), "a pipeline without a flush drains before a checkpoint, which changes its steps")
        for layout in selection.layouts
        if not flushes(layout)
    ]
    if lines and len(layouts) > 1:
        wanted = list(itertools.permutations(layouts, 2))
    else:
        own, *others = layouts if len(layouts) > 1 and not lines else [alone, *layouts]
        wanted = [*((own, other) for other in others), *((other, own) for other in others)]
        wanted += itertools.pairwise(others)
    pairs: list[Pair] = []
    for first, second in wanted:
        pair = _pair(selection, first, second)
        if wrong := [message for each in pair for _, message in problems_of(each)]:
            selection.skipped.append(Skipped(f"{first.line()} → {second.line()}", "; ".join(dict.fromkeys(wrong))))
        else:
            pairs.append(pair)
    return selection, pairs


def _pair(selection: Selection, first: Layout, second: Layout) -> Pair:
    """Returns the jobs of a pair: one model and one global batch for both layouts."""
    job = replace(selection.compared.job, checkpoint=Checkpoint(verify=True))
    for layout in (first, second):
        job = selection.suited(job, layout)
    jobs = [_with(job, layout) for layout in (first, second)]
    both = lcm(*(each.train.global_batch for each in jobs))
    a, b = (replace(each, train=replace(each.train, global_batch=both)) for each in jobs)
    return a, b


def _rest(selection: Selection, job: Job, full: bool, schedules: bool, max_ranks: int) -> None:
    """Adds the layouts that are compared by default besides the job's own."""

    def reasons(layout: Layout) -> list[str]:
        return _reasons(selection.suited(job, layout), selection, layout, max_ranks)

    candidates = list[Layout]()
    if full or not schedules:
        more = [each for name, each in techniques_of(job).items() if name not in OWN]
        more += [each for name, each in axes_of(job.layout).items() if name not in OWN_AXES]
        candidates += map(layout_line.parse, (*MATRIX, *(line for each in more for line in each.layouts)))
        candidates += pairs(min(max_ranks, PAIR_RANKS), lambda layout: not reasons(layout))
    if full:
        candidates += products(max_ranks)
    if full or schedules:
        candidates += every_schedule(max_ranks)
    for layout in candidates:
        if why := reasons(layout):
            selection.skipped.append(Skipped(layout.line(), "; ".join(why)))
        else:
            _add(selection, layout)


def _notes(selection: Selection, job: Job) -> Iterator[str]:
    if any(map(selection.stale, selection.layouts)):
        yield (
            "pipelines without a flush, or with stashed weights, are compared with one process whose gradients are as "
            "late as theirs"
        )
    if any(map(stashes, selection.layouts)) and not selection.as_is and (job.optimizer.clip or job.model.tied):
        yield "optimizer.clip: 0, and model.tied: false, in layouts with stashed weights"
    models = [selection.case(layout).model for layout in selection.layouts]
    written = [bool(layout.recompute_cut) for layout in selection.layouts]
    if cut := sum(mine and job.model.n_layers != model.n_layers for mine, model in zip(written, models, strict=True)):
        yield f"model.n_layers: {job.model.n_layers} in the job, those of recompute_cut in {counted(cut, 'layout')}"
    stages = (model.n_layers for mine, model in zip(written, models, strict=True) if not mine)
    if deepened := sum(n_layers > job.model.n_layers for n_layers in stages):
        yield (
            f"model.n_layers: {job.model.n_layers} in the job, one more than there are stages in "
            f"{counted(deepened, 'layout')}"
        )
    if not job.model.moe.n_experts and (mixed := [model.moe for model in models if model.moe.n_experts]):
        cut = sum(not moe.aux_loss for moe in mixed)
        without = f", without aux_loss in {cut} with slices of sequences" if cut else ""
        yield (
            f"model.moe: no experts in the job, {mixed[0].n_experts} of width {mixed[0].d_ff} in "
            f"{counted(len(mixed), 'layout')} with ep above 1{without}"
        )
    if job.data.document_mask:
        yield "data.document_mask: the random sequences are cut into documents at random places"
    if job.train.batch_ramp or job.train.seq_ramp:
        yield "train.batch_ramp, train.seq_ramp: the first step is half as large, or of shorter sequences"
    if has_pairs(job.data):
        yield f"data.corpus: pairs of random sequences, compared by {'rewards' if job.model.reward else 'DPO'}"
    elif has_prompts(job.data):
        yield "data.corpus: random completions with random rewards and log-probabilities; nothing is generated"
    elif has_answers(job.data):
        yield "data.loss_on: only random parts of the random sequences count in the loss, as answers do"


def _own(selection: Selection, job: Job, max_ranks: int) -> None:
    """Adds the job's own layout first, on fewer ranks if necessary."""
    own = job.layout
    if own.world == 1 and own == replace(Layout(), bucket_mb=own.bucket_mb):
        return
    accumulation = batch.solve(job.train.global_batch, own).accumulation
    layout = reduced(own, max_ranks)
    layout = _comparable(selection, layout)
    if not (layout.pp > 1 and is_file(layout.schedule)):  # a schedule file has its own
        accumulation = min(accumulation, 2 * layout.pp)
        accumulation = accumulation if accumulation > 1 else 0
    is_whole = selection.compared.job.model.n_layers == job.model.n_layers
    layout = replace(
        layout,
        micro_batch=0,
        accumulation=accumulation,
        pp_cut=layout.pp_cut if is_whole else "",
        recompute_cut=layout.recompute_cut if is_whole else "",
        loss_chunk=min(layout.logits_of(1 << 20), max(1, selection.compared.job.model.seq_len // 2)),
        bucket_mb=Layout.bucket_mb,
    )
    if reasons := _reasons(job, selection, layout, max_ranks):
        selection.skipped.append(Skipped(layout.line(), "the job's own layout, reduced: " + "; ".join(reasons)))
        return
    _add(selection, layout)
    if layout.line() == own.line():
        selection.notes.append(f"the first layout is the job's own: {own.line()}")
    else:
        selection.notes.append(
            f"the job's own layout, {own.line()} ({own.world} ranks), is compared as {layout.line()}"
        )


def _comparable(selection: Selection, layout: Layout) -> Layout:
    """Returns a layout without the techniques with which it differs from one process and which can be left out."""
    for name, technique in techniques_of(selection.compared.job).items():
        if technique.compared_without and (found := list(technique.differs(selection.case(layout)))):
            selection.notes += [
                f"the job's own layout is compared without {name}: {path}: {why}" for path, why in found
            ]
            names = [path.removeprefix("layout.") for path in technique.fields]
            layout = replace(layout, **{name: getattr(Layout(), name) for name in names})
    return layout


def _add(selection: Selection, layout: Layout) -> None:
    if layout.bucket_mb == Layout.bucket_mb:
        layout = replace(layout, bucket_mb=selection.compared.job.layout.bucket_mb)
    if layout not in selection.layouts:
        selection.layouts.append(layout)


def _reasons(
    job: Job, selection: Selection, layout: Layout, max_ranks: int, named: Set[str] | None = None
) -> list[str]:
    """Returns why a layout cannot be compared: it is illegal for the job's model, or too large. For a layout that the
    user named, with the fields `named`, a cause is said once, with values that can be compared."""

    def check(job: Job) -> list[Problem]:
        return _problems(job, selection, max_ranks) or [*effect_problems(job, named or set())]

    asked = replace(job, layout=layout, cluster=replace(job.cluster, nodes=1, devices_per_node=0))
    found = check(asked)
    found = found if named is None else by_cause(asked, found, named, check)
    return [f"{path}: {message}" if path else message for path, message in found]


def _problems(job: Job, selection: Selection, max_ranks: int) -> list[Problem]:
    """Returns the problems of a job's layout, with the paths of fields, for the comparison."""
    layout = job.layout
    # The small model may have fewer divisors than the job's own.
    found = problems_of(_with(job, layout)) or problems_of(selection.case(layout))
    if not found and layout.processes > max_ranks:
        found.append(("", f"needs {layout.processes} processes, more than --max-ranks {max_ranks}"))
    case = selection.case(layout)
    for each in (*techniques_of(job).values(), *axes_of(layout).values()):
        found += (wrong for wrong in each.differs(case) if selection.values or wrong[0] not in UNEQUAL)
    return found


def _with(job: Job, layout: Layout) -> Job:
    """Returns the job with a layout and the smallest global batch that suits it."""
    group = PAIR if has_pairs(job.data) else 1
    known = max(1, layout.data_ranks * max(1, layout.micro_batch) * max(1, layout.accumulation))
    if layout.micro_batch and layout.accumulation:
        global_batch = known
    else:
        known *= group if not layout.micro_batch else 1
        sizes = [group * size for size in (GLOBAL_BATCHES if layout.pp == 1 else PIPELINE_BATCHES)]
        global_batch = next((size for size in sizes if size % known == 0), known)
        if group > 1 and layout.pp > 1 and not layout.micro_batch and not layout.accumulation:
            layout = replace(layout, micro_batch=group)
    train = replace(job.train, global_batch=global_batch)
    if train.batch_ramp:
        train = replace(train, global_batch=2 * global_batch, batch_ramp=f"1*{global_batch}")
    if has_prompts(job.data):  # what is compared does not depend on groups
        train = replace(train, grpo=replace(train.grpo, group=max(2, global_batch), updates=1))
    return replace(job, layout=layout, train=train)
