"""The loss: preference pairs (DPO, rewards), rewarded completions (GRPO), label smoothing, noise on embeddings, and
logits of some tokens at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.config.corpora import PAIR, has_pairs, has_prompts
from phalanx.config.fields import get
from phalanx.config.job import DpoOptions, GrpoOptions, Job
from phalanx.facts import CodePlace
from phalanx.nearest import did_you_mean
from phalanx.partition import derived as batch
from phalanx.partition.derived import flushes, is_offloaded, stashes
from phalanx.techniques.technique import Problem, Technique

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
