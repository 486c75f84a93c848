"""The table of techniques: the project's own in the order in which they compose, and those of packages after them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.blocks.kinds import HALVES, TABLES, block_kinds
from phalanx.blocks.operator import Half, Place
from phalanx.blocks.residual import EVERY, can_adapt, is_target, layer_of, names_of
from phalanx.config import clusters
from phalanx.config.added import TECHNIQUE_OPTIONS, OptionsTable, Techniques
from phalanx.config.cluster import DEVICE_WORDS, Cluster
from phalanx.config.corpora import PAIR, has_pairs, has_prompts
from phalanx.config.fields import get, leaves
from phalanx.config.job import DpoOptions, GrpoOptions, Job
from phalanx.config.model import ModelConfig
from phalanx.config.precision import FP8_UNITS, SCALED, Precision
from phalanx.errors import JobError
from phalanx.facts import CodePlace
from phalanx.nearest import Misfit, did_you_mean, multiples
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.optimizers.entry import UpdateCosts
from phalanx.partition import derived as batch
from phalanx.partition.derived import (
    PARAMETER_BYTES,
    flushes,
    is_offloaded,
    modes,
    overlaps,
    stashes,
    written,
)
from phalanx.registry import package_code
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.techniques.experts import DISPATCH, REDUNDANCY
from phalanx.techniques.memory import COMPILE, OFFLOAD, QUANTISATION, SECOND_COPY, TILING
from phalanx.techniques.replicas import COMPRESSION, ELASTIC, INDEPENDENT_REPLICAS, THREADS
from phalanx.techniques.technique import Condition, Effect, Problem, Technique, above, is_one_of, problems

WORTH = 1.25
"""Least rate of products in bf16 over that in fp32 with which precision=auto is bf16: a step does other things, too."""
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def fastest_precision(cluster: Cluster) -> tuple[Precision, str]:
    """Returns what train.precision=auto is on a cluster, or, if it does not describe its devices, on this machine; and
    why."""
    described = cluster
    if not cluster.accelerator.name:
        with suppress(JobError):  # not measured
            described = clusters.read_local_partly(clusters.default_path())
    device = described.accelerator
    if device.bf16_tflops and device.fp32_tflops and cluster.device in ("auto", described.device):
        rates = f"{device.name} multiplies bf16 at {device.bf16_tflops:.3g} TFLOP/s, fp32 at {device.fp32_tflops:.3g}"
        return ("bf16" if device.bf16_tflops >= WORTH * device.fp32_tflops else "fp32"), rates
    if cluster.device in DEVICE_WORDS or (cluster.device == "auto" and os.path.exists("/dev/nvidia0")):
        return "bf16", "accelerators multiply it faster than fp32"
    information = Path("/proc/cpuinfo")
    flags = information.read_text(encoding="utf-8").split() if information.exists() else []
    found = [name for name in BF16_INSTRUCTIONS if name in flags]
    return ("bf16", f"this processor has {found[0]}") if found else ("fp32", "this processor multiplies no bf16")


def _problems(job: Job) -> Iterator[Problem]:
    """Yields what a format cannot be combined with."""
    train, device = job.train, job.cluster.accelerator
    if train.cpu_linear == "onednn" and (
        train.precision != "fp32" or train.compile is True or job.cluster.device in DEVICE_WORDS
    ):
        yield "train.cpu_linear", "onednn needs precision fp32 on a CPU, without compile; auto uses it where it can"
    if train.precision == "auto":
        chosen, why = fastest_precision(job.cluster)
        yield "train.precision", f"auto is for jobs that are loaded; nearest legal: {chosen}, {why}"
    if train.precision != "fp8":
        return
    if device.name and not device.fp8_tflops:
        yield (
            "train.precision",
            f"fp8 needs matrix products in 8 bits, and {device.name} has none (cluster.accelerator.fp8_tflops is 0); "
            "nearest legal: bf16",
        )
    unit = FP8_UNITS[train.fp8_scaling]
    if train.fp8_scaling == "mxfp8" and device.fp8_tflops and not device.fp4_tflops:
        yield (
            "train.fp8_scaling",
            f"mxfp8 needs products whose blocks of {unit} have scales (Blackwell), and {device.name} has none "
            "(cluster.accelerator.fp4_tflops is 0); nearest legal: rowwise",
        )
    if device.fp8_tflops and job.model.d_model % unit:
        yield (
            "model.d_model",
            Misfit(
                f"d_model {job.model.d_model} is not a multiple of {unit}, so that train.precision=fp8 would "
                "leave every matrix in bf16",
                job.model.d_model,
                {"model.d_model": multiples(unit, job.model.d_model)},
            ),
        )
    if job.model.lora.rank:
        yield "train.precision", "fp8 is for training whole weights, not adapters (model.lora); nearest legal: bf16"


def _layout_problems(job: Job) -> Iterator[Problem]:
    """Yields what cannot skip a step."""
    layout = job.layout
    if job.train.precision != SCALED:
        return
    if overlaps(layout):
        yield (
            "train.precision",
            f"{layout.schedule} cannot skip a step whose fp16 gradients overflow; nearest legal: precision=bf16, or "
            "schedule=1f1b",
        )
    if layout.sync != "bsp":
        yield (
            "layout.sync",
            f"{layout.sync} does not work with fp16, whose loss scale all replicas would share in every step; nearest "
            "legal: precision=bf16, or sync=bsp",
        )


def _effect(job: Job) -> Effect:
    train, framework, profile = job.train, {}, {}
    if train.precision == "fp8":
        experts = job.cluster.accelerator.fp8_experts
        framework = {
            "narrow_experts": experts,
            "narrow_unit": FP8_UNITS[train.fp8_scaling],
            "offers_fp8_gathers": experts or not job.model.moe.n_experts,
        }
    if train.gradients != "same":
        profile = {"gradient_bytes": 4, "unbuffered_gradient_bytes": PARAMETER_BYTES[train.precision]}
    return Effect(framework=framework, profile=profile)


PRECISION = Technique(
    "the number format of products, gradients and parameters",
    "Micikevicius et al. 2018 and 2022",
    is_on=lambda job: job.train.precision != "fp32",
    fields=("train.precision", "train.gradients", "train.fp8_scaling", "train.cpu_linear"),
    problems=_problems,
    layout_problems=_layout_problems,
    conditions={
        "train.fp8_scaling": is_one_of("train.precision", "fp8"),
        "train.gradients": is_one_of("train.precision", "bf16", "fp16", "fp8", "fp64"),
    },
    effect=_effect,
    stage="layers",
    apply="phalanx.parallel.apply:apply_number_format",
)


_OF_PAIRS = {
    "layout.sync": ("bsp", "the loss of pairs needs sync=bsp"),
    "layout.data_parallel": ("ddp", "threads would cut pairs"),
}
_OF_REWARDS = {
    "model.tied": (False, "a reward model has a head of its own"),
    "layout.loss_chunk": (0, "a reward model has no logits to save"),
    "model.lora.rank": (0, "adapters leave the head of the reward as it begins"),
    "model.mtp": (0, "a reward model predicts no tokens"),
    "model.logit_softcap": (0.0, "a reward model has no logits"),
    "model.logit_divisor": (1.0, "a reward model has no logits"),
}
_OF_COMPLETIONS = {
    "model.dropout": (0.0, "makes training differ from generation"),
    "layout.sync": ("bsp", "replicas must train on completions of one policy"),
    "layout.data_parallel": ("ddp", "threads cannot generate"),
    "model.mtp": (0, "the loss of completions has no part for further tokens"),
    "model.reward": (False, "a reward model generates nothing"),
    "train.label_smoothing": (0.0, "the loss of completions has no labels"),
    "train.neftune_alpha": (0.0, "makes training differ from generation"),
    "train.batch_ramp": ("", "every batch of completions has the same size"),
    "train.seq_ramp": ("", "completions are sequences of their own"),
    "data.readers": (0, "each rank reads the prompts that it generates for"),
    "layout.tiles": (1, "generation computes whole matrices"),
    "layout.quantise_weights": ("none", "generation computes with the weights themselves"),
}
"""The values that fields must have with preference pairs, reward models and completions (GRPO), and why."""


def _must_be(job: Job, values: Mapping[str, tuple[Any, str]]) -> Iterator[Problem]:
    """Yields every field that has another value than it must have."""
    for path, (legal, why) in values.items():
        if (found := get(job, path)) != legal:
            shown, needed = (str(each).lower() if isinstance(each, bool) else each for each in (found, legal))
            yield path, f"is {shown}: {why}; nearest legal: {path.rpartition('.')[2]}={needed}"


def preference_problems(job: Job) -> Iterator[Problem]:
    """Yields what does not suit pairs, and options of pairs where there are none."""
    if not has_pairs(job.data):
        if job.train.dpo != DpoOptions():
            changed = next(name for name, value in vars(job.train.dpo).items() if value != getattr(DpoOptions(), name))
            where = f"train.dpo.{changed}"
            of_tokens = ", or train.label_smoothing" if changed == "label_smoothing" else ""
            why = f"is for pairs, corpus {job.data.corpus} has none; nearest legal: corpus=preferences{of_tokens}"
            yield where, why
        return
    if job.model.reward and job.train.dpo.beta != DpoOptions().beta:
        yield "train.dpo.beta", "ties to a reference, which a reward model does not have; leave it out"
    if job.train.label_smoothing:
        yield "train.label_smoothing", "is for tokens, this job's loss is of pairs: set train.dpo.label_smoothing"
    if modules := job.model.mtp:
        yield (
            "model.mtp",
            f"the loss of pairs has no part for further tokens, mtp is {modules}; nearest legal: mtp=0 with "
            f"n_layers={job.model.main.n_layers}, as `phalanx import hf` reads it with --layers",
        )
    layout = job.layout
    yield from _must_be(job, _OF_PAIRS)
    if layout.pp > 1 and (not flushes(layout) or stashes(layout)):
        yield "layout.schedule", f"{layout.schedule} does not end a step's pairs with it; nearest legal: schedule=1f1b"


def pair_batch_problems(job: Job) -> Iterator[Problem]:
    """Yields why the micro-batches of a whole layout would cut pairs."""
    if not has_pairs(job.data):
        return
    try:
        micro = batch.solve(job.train.global_batch, job.layout).micro_batch
    except ValueError:
        return  # reported with the layout
    if micro % PAIR:
        yield (
            "layout.micro_batch",
            f"is {micro} sequences, which cuts a pair of {PAIR}; nearest legal: {micro + 1}"
            + (f" or {micro - 1}" if micro > 1 else ""),
        )


def reward_problems(job: Job) -> Iterator[Problem]:
    """Yields what a reward model cannot be combined with."""
    if not job.model.reward:
        return
    if not has_pairs(job.data):
        yield "data.corpus", f"{job.data.corpus} has no pairs, of which model.reward learns; nearest legal: preferences"
    yield from _must_be(job, _OF_REWARDS)


REWARD = Technique(
    "reward models of pairs",
    "Ouyang et al. 2022, section 3.5",
    is_on=lambda job: job.model.reward,
    fields=("model.reward",),
    problems=reward_problems,
)
REWARDS = ("exact", "number", "regex")
"""The built-in rewards (generate/rollouts.py)."""


def policy_problems(job: Job) -> Iterator[Problem]:
    """Yields what does not suit completions, and options of completions where there are none."""
    options = job.train.grpo
    if not has_prompts(job.data):
        if changed := [name for name, value in vars(options).items() if value != getattr(GrpoOptions(), name)]:
            yield (
                f"train.grpo.{changed[0]}",
                f"is for completions, corpus {job.data.corpus} has none; nearest legal: corpus=prompts",
            )
        return
    yield from _option_problems(options, job.model.logit_softcap)
    if GrpoOptions().max_new_tokens != options.max_new_tokens > (most := job.model.seq_len):
        yield (
            "train.grpo.max_new_tokens",
            f"is {options.max_new_tokens}, and a completion ends at model.seq_len {most}; nearest legal: {most}",
        )
    yield from _must_be(job, _OF_COMPLETIONS)
    if job.train.precision == "fp8":
        yield "train.precision", "generation does not multiply in 8 bits (GRPO); nearest legal: bf16"
    if is_offloaded(job.layout, "parameters"):
        yield "layout.offload", "generation needs the parameters on the device; nearest legal: offload=optimizer"
    if job.layout.pp > 1 and (not flushes(job.layout) or stashes(job.layout)):
        yield (
            "layout.schedule",
            f"{job.layout.schedule} has no one policy to generate with; nearest legal: schedule=1f1b",
        )
    for name in ("on_spike", "on_nan"):
        if getattr(job.guard, name) == "rewind":
            yield (
                f"guard.{name}",
                f"completions follow from the step, and come again (GRPO); nearest legal: {name}=stop",
            )
    for path in ("train.steps", "checkpoint.every", "checkpoint.memory_every"):
        if rest := get(job, path) % options.updates:
            yield (
                path,
                f"is {get(job, path)}, but checkpoints lie between batches of completions, each of train.grpo.updates "
                f"{options.updates}; nearest legal: {get(job, path) + options.updates - rest}",
            )


def _option_problems(options: GrpoOptions, softcap: float) -> Iterator[Problem]:
    if options.reward not in REWARDS and not CodePlace.form.fullmatch(options.reward):
        yield (
            "train.grpo.reward",
            f"no reward {options.reward!r}{did_you_mean(options.reward, REWARDS)} (known: {', '.join(REWARDS)}; your "
            "own: MODULE:FUNCTION)",
        )
    if bool(options.pattern) != (options.reward == "regex"):
        yield "train.grpo.pattern", "states what train.grpo.reward=regex looks for; give both, or neither"
    try:
        re.compile(options.pattern)
    except re.error as error:
        yield "train.grpo.pattern", f"{options.pattern!r} is no regular expression: {error}"
    if options.temperature != 1 and softcap:
        yield "train.grpo.temperature", "would divide what model.logit_softcap has bounded; nearest legal: 1"
    if options.clip_high and options.clip_high < options.clip:
        yield "train.grpo.clip_high", f"is below clip {options.clip:g}; nearest legal: clip_high={options.clip:g}, or 0"


def policy_batch_problems(job: Job) -> Iterator[Problem]:
    """Yields why groups do not fill the batch of a whole layout."""
    if not has_prompts(job.data):
        return
    try:
        size = batch.solve(job.train.global_batch, job.layout).global_batch
    except ValueError:
        return  # reported with the layout
    if rest := size % (group := job.train.grpo.group):
        yield (
            "train.global_batch",
            f"is {size} completions, which is no multiple of train.grpo.group {group}; nearest legal: "
            f"{size + group - rest}" + (f" or {size - rest}" if size > group else ""),
        )


PREFERENCE = Technique(
    "preference tuning of pairs (DPO)",
    "Rafailov et al. 2023",
    is_on=lambda job: has_pairs(job.data),
    fields=("train.dpo.beta", "train.dpo.label_smoothing"),
    problems=preference_problems,
    layout_problems=pair_batch_problems,
)
POLICY = Technique(
    "group relative policy optimisation of completions (GRPO)",
    "Shao et al. 2024 (DeepSeekMath), section 4.1",
    is_on=lambda job: has_prompts(job.data),
    fields=tuple(f"train.grpo.{name}" for name in vars(GrpoOptions())),
    problems=policy_problems,
    layout_problems=policy_batch_problems,
    samples="phalanx.generate.rollouts:Rollouts",
)
SMOOTHING = Technique(
    "label smoothing",
    "Szegedy et al. 2016, section 7",
    is_on=lambda job: job.train.label_smoothing > 0,
    fields=("train.label_smoothing",),
)
NOISE = Technique(
    "noise on embeddings (NEFTune)",
    "Jain et al. 2023, section 3",
    is_on=lambda job: job.train.neftune_alpha > 0,
    fields=("train.neftune_alpha",),
)
LOSS_CHUNK = Technique(
    "logits of some tokens at a time",
    "docs/techniques/recompute.md",
    is_on=lambda job: job.layout.loss_chunk != 0,
    fields=("layout.loss_chunk",),
    combined=("loss_chunk=24",),
)


def adapter_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yields targets that are no layer of the model, and kinds of layers without any. The model is legal otherwise."""
    if not model.lora.rank:
        return
    known: dict[str, None] = dict.fromkeys((EVERY, *HALVES))
    more = dict[str, None]()
    without = dict[str, list[str]]()
    for kind in dict.fromkeys(kind._replace(window=0) for kind in block_kinds(model)):
        layers: dict[str, Half] = {
            layer_of(weight.name): half
            for half in HALVES
            for operator in TABLES[half][getattr(kind, half)].operators(Place(model))
            for weight in operator.weights
            if can_adapt(weight)
        }
        for layer in layers:
            *longer, shortest = names_of(layer)
            known[shortest] = None
            more |= dict.fromkeys(longer)
        if not any(is_target(model.lora, half, layer) for layer, half in layers.items()):
            without[f"{kind.attention}, {kind.feed_forward}"] = list(layers)
    unknown = [name for name in model.lora.names if name not in known | more]
    for name in unknown:
        hint = did_you_mean(name, known | more)
        yield (
            "model.lora.targets",
            f"no matrix {name!r}{hint} (this model's: {', '.join(known)}, or longer, such as {next(iter(more))})",
        )
    for kinds, legal in without.items() if not unknown else ():
        yield (
            "model.lora.targets",
            f"{model.lora.targets} leaves blocks of {kinds} without an adapter, so that nothing in them is trained; "
            f"nearest legal: {model.lora.targets},{legal[0]}, or all",
        )


def freezing(model: ModelConfig) -> tuple[str, str]:
    """Returns the field by which a model's weights are frozen, and the value with which they are not."""
    if model.lora.rank:
        return "model.lora.rank", "lora.rank=0"
    return "model.sparse.dense_warmup", "sparse.dense_warmup=false"


def lora_problems(job: Job) -> Iterator[Problem]:
    """Yields what cannot leave weights frozen."""
    if not job.model.freezes:
        return
    path, legal = freezing(job.model)
    why = f"with {path.removeprefix('model.')} {str(get(job, path)).lower()} most are frozen"
    layout, name = job.layout, job.optimizer.name
    if layout.sync != "bsp":
        yield (
            "layout.sync",
            f"{layout.sync} averages all parameters between replicas, and {why}; nearest legal: sync=bsp, or {legal}",
        )
    if layout.pp > 1 and layout.schedule in SCHEDULES and (not flushes(layout) or stashes(layout)):
        yield (
            "layout.schedule",
            f"{layout.schedule} keeps several versions of all weights, and {why}; nearest legal: schedule=1f1b, or "
            f"{legal}",
        )
    if job.model.lora.rank and name in OPTIMIZERS and OPTIMIZERS[name].needs_whole_matrices:
        yield (
            "optimizer.name",
            f"{name} makes a matrix's update orthogonal, which is meant for whole weights, not for the two factors of "
            f"an adapter (lora.rank {job.model.lora.rank}); nearest legal: optimizer=adamw, or lora.rank=0",
        )


_LORA, _FIELDS = (
    above("model.lora.rank", what="adapters: "),
    [path for path in leaves() if path.startswith("model.lora.")],
)
ADAPTERS = Technique(
    "low-rank adapters",
    "Hu et al. 2022",
    is_on=lambda job: job.model.lora.rank > 0,
    fields=tuple(_FIELDS),
    problems=lora_problems,
    conditions={path: _LORA for path in _FIELDS if path != "model.lora.rank"},
)


def _recompute_problems(job: Job) -> Iterator[Problem]:
    """Yields the problems of recomputation that is stated per layer."""
    layout = job.layout
    if layout.tiles > 1 and "mlp" in (layout.recompute, *re.findall(r"[a-z]+", layout.recompute_cut)):
        yield (
            "layout.recompute_cut" if layout.recompute_cut else "layout.recompute",
            f"mlp would gather the {layout.tiles} tiles of MLPs again and keep them whole; nearest legal: "
            "recompute=products, recompute=full, or tiles=1",
        )
    if not layout.recompute_cut:
        return
    if layout.recompute != "none":
        yield (
            "layout.recompute_cut",
            f"sets recomputation per layer, recompute={layout.recompute} for all layers; nearest legal: "
            "recompute=none, or no recompute_cut",
        )
    try:
        modes(layout.recompute_cut, job.model.n_layers)
    except JobError as error:
        yield from (("layout.recompute_cut", problem) for problem in error.problems)


RECOMPUTE = Technique(
    "activations recomputed in the backward pass",
    "Chen et al. 2016; Korthikanti et al. 2022, section 5",
    is_on=lambda job: written(job.layout) != "none",
    fields=("layout.recompute", "layout.recompute_cut"),
    layout_problems=_recompute_problems,
    apply="phalanx.parallel.apply:apply_recompute",
    layouts=(
        "accumulation=2,recompute=full,loss_chunk=24",
        "recompute_cut=1*full+1*selective+1*products+1*none",
        "recompute=0.4,tp=2,sp=true",
    ),
    combined=("recompute=products", "recompute=mlp", "recompute=selective", "recompute=full"),
)


OWN: Mapping[str, Technique] = MappingProxyType(
    {
        "tiles": TILING,
        "hpz": SECOND_COPY,
        "quantisation": QUANTISATION,
        "precision": PRECISION,
        "recompute": RECOMPUTE,
        "compile": COMPILE,
        "offload": OFFLOAD,
        "sync": INDEPENDENT_REPLICAS,
        "elastic": ELASTIC,
        "threads": THREADS,
        "compression": COMPRESSION,
        "dispatch": DISPATCH,
        "redundancy": REDUNDANCY,
        "lora": ADAPTERS,
        "loss_chunk": LOSS_CHUNK,
        "preference": PREFERENCE,
        "policy": POLICY,
        "reward": REWARD,
        "label_smoothing": SMOOTHING,
        "neftune": NOISE,
    }
)
"""The project's own techniques, in the order in which they compose."""


TECHNIQUES = OptionsTable("technique", dict(OWN), problems, TECHNIQUE_OPTIONS)


def techniques_of(job: Job) -> Mapping[str, Technique]:
    """Returns the techniques that a job may have by name: the project's own, and the packages' whose options it sets.
    Packages that it does not name are not loaded."""
    return _known(job.techniques)


@lru_cache(256)
def _known(chosen: Techniques) -> Mapping[str, Technique]:
    return OWN if not chosen.chosen else {**OWN, **{name: TECHNIQUES[name] for name, _ in chosen.chosen}}


def technique_problems(job: Job) -> Iterator[Problem]:
    """Yields what techniques cannot be combined with, whatever the planner chooses."""
    for name, technique in techniques_of(job).items():
        yield from technique.problems(job)
        if technique.update is not None and technique.is_on(job):
            yield from _beside_update(name, job)


def _beside_update(name: str, job: Job) -> Iterator[Problem]:
    """Yields the updates after which a technique does not come."""
    layout = job.layout
    if is_offloaded(layout, "optimizer"):
        yield (
            "layout.offload",
            f"technique {name} changes parameters on the device after each update, and an offloaded optimizer updates "
            f"them on the host; nearest legal: offload=none, or techniques without {name}",
        )
    if layout.sync == "asp":
        yield (
            "layout.sync",
            f"technique {name} changes parameters after each update, which a parameter server makes for asp; nearest "
            f"legal: sync=bsp, or techniques without {name}",
        )


def updates_of(job: Job) -> list[Callable[..., None]]:
    """Returns what the techniques of a job do to a parameter's shard after each update, in their order. Raises
    ExtensionError, naming the package, if one fails."""
    found = []
    for name, technique in techniques_of(job).items():
        if technique.update is not None and technique.is_on(job):
            with package_code(f"technique {name!r} of {TECHNIQUES.owner(name)} failed"):
                found.append(TECHNIQUES.code(name, "update")(job))
    return found


def conditions_of(job: Job) -> Mapping[str, Condition]:
    """Returns the fields of packages' techniques that have an effect only sometimes, with their conditions."""
    chosen = (technique for name, technique in techniques_of(job).items() if name not in OWN)
    return {path: each for technique in chosen for path, each in technique.conditions.items()}


def update_costs(job: Job) -> UpdateCosts:
    """Returns what techniques add to the optimizer's step."""
    each = [technique.effect(job).update for technique in techniques_of(job).values()]
    return UpdateCosts(
        sum(costs.moved for costs in each),
        sum(costs.flops for costs in each),
        max(costs.transient for costs in each),
    )
