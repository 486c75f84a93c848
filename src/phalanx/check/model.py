"""The problems of a model: its kinds of layers with the fields and rules of each, windows, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.kinds import HALVES, TABLES, Half, attention_models, chosen_kinds
from phalanx.check.lora import adapter_problems
from phalanx.config.fields import get
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, did_you_mean, divisors, multiples


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
    if model.full_every and not model.window:
        yield (
            "model.full_every",
            f"every layer attends to all keys without a window, is {model.full_every}; nearest legal: full_every=0, or "
            "a window above 0",
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
    for name in names:
        yield from table[name].problems(model)
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
    for own in attention_models(model):
        yield from _rotary_size(own)
    scaling = model.rope_scaling
    if scaling.kind == "yarn" and scaling.factor > 1 and scaling.beta_fast < scaling.beta_slow:
        yield (
            "model.rope_scaling.beta_fast",
            f"must be at least beta_slow {scaling.beta_slow:g}, is {scaling.beta_fast:g}; nearest legal: the usual "
            "beta_fast=32, beta_slow=1",
        )
    if scaling.kind == "yarn" and scaling.factor > 1 and model.rope_theta <= 1:
        yield (
            "model.rope_theta",
            f"yarn needs frequencies that fall from pair to pair: must be above 1, is {model.rope_theta:g}",
        )


def _rotary_size(model: ModelConfig) -> Iterator[tuple[str, str]]:
    size, head = model.rotary_size, model.head_size
    if not model.mla.kv_rank and (size % 2 or not size):
        if model.rotary_fraction == 1:
            yield (
                "model.head_dim",
                Misfit(
                    f"rotary positions turn pairs: head_size must be even, is {head}",
                    head,
                    {
                        "model.head_dim": range(max(2, head - 1), head + 2, 2),
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
    if model.sinks:
        yield "model.sinks", "latent attention has no sinks; nearest legal: sinks=false"
    if model.rotary_fraction != 1:
        yield (
            "model.rotary_fraction",
            f"latent attention turns rope_head_dim elements of a head, is {model.rotary_fraction:g}; nearest legal: 1",
        )
