"""The problems of a model: its kinds of layers with the fields and rules of each, windows, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import Any

from phalanx.blocks.kinds import HALVES, TABLES, attention_models, chosen_kinds
from phalanx.blocks.operator import Half
from phalanx.config.added import once
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.config.layout import AXES
from phalanx.config.model import ModelConfig
from phalanx.config.values import yaml_data
from phalanx.nearest import Misfit, did_you_mean, divisors, multiples
from phalanx.techniques.catalogue import adapter_problems
from phalanx.techniques.technique import Problem

MOST_DEVICES = 1 << 20
SMALLEST = 1e-30
"""Smallest number other than 0: quotients by smaller ones, and their powers, exceed the range of floating point."""
BOUNDS: dict[str, tuple[int, str]] = {
    path: (each["most"], each["why"]) for each in yaml_data(__file__, "bounds.yaml") for path in each["fields"]
}
"""Upper bounds with their reasons, by path."""


def size_problems(job: Job) -> Iterator[Problem]:
    """Yields each number that is too large or too small by itself, and a product of axes that is too large."""
    for section in _numbers():
        values = getattr(job, section)
        try:
            yield from _beyond(section, values)
        except TypeError:  # a program gave it a list, which has no hash
            yield from _beyond.__wrapped__(section, values)
    if (world := job.layout.world) > MOST_DEVICES >= max(getattr(job.layout, axis) for axis in AXES):
        product = " × ".join(f"{axis} {getattr(job.layout, axis)}" for axis in AXES)
        yield "layout", f"{product} = {world:,} devices, at most {MOST_DEVICES:,}"


@once
def _numbers() -> dict[str, list[tuple[str, float, str]]]:
    """Returns the names of each section's numbers that are bounded, or fractions, with bounds and reasons."""
    found: dict[str, list[tuple[str, float, str]]] = {}
    for path, kind in leaves().items():
        if path in BOUNDS or kind is float:
            section, _, name = path.partition(".")
            most, reason = BOUNDS.get(path, (inf, ""))
            found.setdefault(section, []).append((name, most, reason))
    return found


@lru_cache(1 << 10)
def _beyond(section: str, values: Any) -> list[Problem]:
    """Returns the problems of a section's numbers. Most sections of a job are those of the last."""
    found = list[Problem]()
    for name, most, reason in _numbers()[section]:
        if isinstance(value := get(values, name), str):
            continue
        if value > most:
            found.append((f"{section}.{name}", f"must be at most {most:,}, is {value:,}: {reason}"))
        if 0 < abs(value) < SMALLEST:
            found.append((f"{section}.{name}", f"must be 0 or at least {SMALLEST:g}, is {value:g}"))
    return found


def model_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message."""
    found = list(_shape_problems(model))
    yield from found or adapter_problems(model)


def _shape_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields those of the model without adapters."""
    if model.parallel_block and model.norms_outputs:
        yield (
            "model.norm_place",
            "a parallel block adds the outputs of attention and MLP before one sum over tensor ranks, so neither can "
            f"be normalised by itself: must be before, is {model.norm_place}; nearest legal: before, or "
            "parallel_block=false",
        )
    if unknown := list(unusable_kinds(model)):
        yield from unknown
        return
    for half in HALVES:
        yield from _kinds(model, half)
    if model.mla.kv_rank:
        yield from _beside_latent_attention(model)
    if model.positions == "rope":
        yield from _rotary(model)
    if model.mtp >= model.n_layers:
        yield (
            "model.mtp",
            f"must leave a layer before the modules for further tokens: n_layers is {model.n_layers}, mtp {model.mtp}",
        )
    if model.layer_embedding:
        yield from _layer_embedding(model)
    if model.full_every and not model.window:
        yield (
            "model.full_every",
            f"every layer attends to all keys without a window, is {model.full_every}; nearest legal: full_every=0, or "
            "a window above 0",
        )
    if model.window_pattern:
        yield from _window_pattern(model)
    if model.query_growth.rate:
        yield from _query_growth(model)
    if model.qk_norm == "unit" and model.positions != "rope":
        yield (
            "model.qk_norm",
            f"unit is for layers with rotary positions, positions is {model.positions}; nearest legal: none",
        )
    if model.window_rope_theta and not model.window:
        yield (
            "model.window_rope_theta",
            f"is that of layers with a window, and there are none, is {model.window_rope_theta:g}; nearest legal: 0, "
            "or a window above 0",
        )
    if model.qk_norm == "width" and model.norm != "rmsnorm":
        yield (
            "model.qk_norm",
            f"norms over all heads are RMS norms, norm is {model.norm}; nearest legal: norm=rmsnorm, or qk_norm=head",
        )


def _layer_embedding(model: ModelConfig) -> Iterator[tuple[str, str]]:
    needed = {
        "vocab_size is above 0 (those of all layers' tables)": model.vocab_size > 0,
        "activation is swiglu or geglu": model.activation in ("swiglu", "geglu"),
        "parallel_block is false": not model.parallel_block,
        "residual_multiplier is 1": model.residual_multiplier == 1,
        "mtp is 0": not model.mtp,
    }
    if wrong := [text for text, holds in needed.items() if not holds]:
        yield "model.layer_embedding", f"needs that {', '.join(wrong)}; nearest legal: that, or layer_embedding=0"


def _window_pattern(model: ModelConfig) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name.strip() for name in model.window_pattern.split(",")):
        if name not in ("full", "window"):
            known = ("full", "window")
            yield "model.window_pattern", f"holds {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
    if not model.window:
        yield (
            "model.window_pattern",
            f"every layer attends to all keys without a window, is {model.window_pattern!r}; nearest legal: a window "
            "above 0, or no pattern",
        )
    if model.full_every:
        yield (
            "model.full_every",
            f"window_pattern says which layers have a window, is {model.full_every}; nearest legal: 0",
        )


def _query_growth(model: ModelConfig) -> Iterator[tuple[str, str]]:
    path = "model.query_growth.rate"
    if model.positions == "learned" or model.mla.kv_rank:
        found = "latent attention" if model.mla.kv_rank else "learned positions"
        yield path, f"queries do not grow with {found}, is {model.query_growth.rate:g}; nearest legal: 0"
    elif model.positions == "rope" and not model.nope_every and model.qk_norm == "unit":
        yield path, f"qk_norm=unit takes it away, is {model.query_growth.rate:g}; nearest legal: 0, or qk_norm=none"
    elif model.positions == "rope" and not model.nope_every and model.rotary_fraction != 1:
        yield (
            path,
            f"whole queries turn where they grow, rotary_fraction is {model.rotary_fraction:g}; nearest legal: 0, or "
            "rotary_fraction=1",
        )


def unusable_kinds(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the path and the message of each kind of layer that is in no table, or without the sizes that it needs."""
    for half, table in TABLES.items():
        for name in dict.fromkeys(chosen_kinds(model, half)):
            if name not in table:
                known = ", ".join(table)
                yield f"model.{half}", f"no {table.kind} {name!r}{did_you_mean(name, table)} (known: {known})"
                continue
            for path in table[name].needs:
                if not get(model, path):
                    yield f"model.{path}", f"{table.kind} {name} needs it above 0, is {get(model, path)}"


def _kinds(model: ModelConfig, half: Half) -> Iterator[tuple[str, str]]:
    """Yields the problems of the kinds of one half of the blocks."""
    table, names = TABLES[half], tuple(dict.fromkeys(chosen_kinds(model, half)))
    for problems in dict.fromkeys(table[name].problems for name in names):
        yield from problems(model)
    if not getattr(model, half):
        return  # chosen by the very fields that they need
    needed = {path for name in names for path in table[name].needs}
    for other, kind in table.items():
        for path in kind.needs:
            if get(model, path) and path not in needed:
                yield (
                    f"model.{half}",
                    f"{table.kind} {', '.join(names)} does not use model.{path} {get(model, path)}; nearest legal: "
                    f"{half}={other}, or {path}=0",
                )


def _rotary(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of rotary positions, except those of latent attention's own size."""
    scaling = model.rope_scaling
    for own in attention_models(model):
        yield from _rotary_size(own, "model.head_dim" if own.head_dim == model.head_dim else "model.wide.head_dim")
        if scaling.kind == "longrope" and scaling.factor > 1:
            yield from _longrope(own)
    if scaling.kind == "yarn" and scaling.factor > 1 and scaling.beta_fast < scaling.beta_slow:
        yield (
            "model.rope_scaling.beta_fast",
            f"must be at least beta_slow {scaling.beta_slow:g}, is {scaling.beta_fast:g}; nearest legal: the usual "
            "beta_fast=32, beta_slow=1",
        )
    if scaling.kind == "llama3" and scaling.factor > 1 and scaling.low_freq_factor > scaling.high_freq_factor:
        yield (
            "model.rope_scaling.low_freq_factor",
            f"must be at most high_freq_factor {scaling.high_freq_factor:g}, is {scaling.low_freq_factor:g}; nearest "
            f"legal: {scaling.high_freq_factor:g}",
        )
    if scaling.kind == "yarn" and scaling.factor > 1 and model.rope_theta <= 1:
        yield (
            "model.rope_theta",
            f"yarn needs frequencies that fall from pair to pair: must be above 1, is {model.rope_theta:g}",
        )


def _longrope(model: ModelConfig) -> Iterator[tuple[str, str]]:
    scaling, pairs = model.rope_scaling, model.rotary_size // 2
    for name in ("short", "long"):
        divisors = getattr(scaling, name)
        if len(divisors) != pairs or min(divisors) <= 0:
            yield (
                f"model.rope_scaling.{name}",
                f"must have a number above 0 for each of {pairs} pairs of a head, has {len(divisors)} numbers",
            )
    if scaling.original_seq_len < 2:
        yield "model.rope_scaling.original_seq_len", "must be at least 2 with longrope, is 1"


def _rotary_size(model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
    size, head = model.rotary_size, model.head_size
    if not model.mla.kv_rank and (size % 2 or not size):
        if model.rotary_fraction == 1:
            yield (
                path,
                Misfit(
                    f"rotary positions turn pairs: head_size must be even, is {head}",
                    head,
                    {
                        path: range(max(2, head - 1), head + 2, 2),
                        "model.n_heads": divisors(model.d_model),
                        "model.d_model": multiples(2 * model.n_heads, model.d_model),
                    },
                ),
            )
        else:
            near = (number for number in (size // 2 * 2, size // 2 * 2 + 2) if 0 < number <= head)
            yield (
                "model.rotary_fraction",
                f"rotary positions turn pairs: head_size {head} × {model.rotary_fraction:g} = {size} must be even and "
                f"above 0; nearest: {', '.join(f'{number / head:g}' for number in near)}",
            )


def _beside_latent_attention(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the parts that latent attention does not have."""
    if model.qk_norm != "none":
        yield "model.qk_norm", f"latent attention has norms of its own, is {model.qk_norm}; nearest legal: none"
    for name in ("v_norm", "values_are_keys"):
        if getattr(model, name):
            yield f"model.{name}", f"latent attention makes values from latents; nearest legal: {name}=false"
    if model.wide.head_dim and not model.attention:
        yield (
            "model.wide.head_dim",
            f"latent attention has sizes of its own, is {model.wide.head_dim}; nearest legal: 0",
        )
    if model.sinks:
        yield "model.sinks", "latent attention has no sinks; nearest legal: sinks=false"
    if model.shared_keys:
        yield "model.shared_keys", "latent attention makes keys in every layer; nearest legal: shared_keys=0"
    if model.nope_every:
        yield "model.nope_every", f"latent attention needs rotary positions, is {model.nope_every}; nearest legal: 0"
    if model.rotary_fraction != 1:
        yield (
            "model.rotary_fraction",
            f"latent attention turns rope_head_dim elements of a head, is {model.rotary_fraction:g}; nearest legal: 1",
        )
