"""The problems of a model: its kinds of layers with the fields and rules of each, windows, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.kinds import HALVES, TABLES, attention_models, chosen_kinds
from phalanx.blocks.operator import Half
from phalanx.config.fields import get, leaves
from phalanx.config.job import Job
from phalanx.config.layout import AXES
from phalanx.config.model import ModelConfig
from phalanx.config.precision import HALF
from phalanx.nearest import Misfit, did_you_mean, divisors, multiples
from phalanx.techniques.adapters import adapter_problems
from phalanx.techniques.technique import Problem

MOST_STAGES = 1024
"""Most stages, and most layers of a model."""
MOST_DEVICES = 1 << 20
AT_MOST: list[tuple[int, str, list[str]]] = [
    (
        MOST_STAGES,
        "the deepest published transformer has 1,000 layers (DeepNet, Wang et al. 2022)",
        [
            *("model.n_layers", "model.full_every", "model.nope_every", "model.moe.n_dense_layers", "model.mtp"),
            "model.shared_keys",
            *("layout.pp", "layout.pp_chunks", "layout.offload_blocks"),
        ],
    ),
    (
        1 << 20,
        "forty times the widest published transformer, 25,600 (Megatron-LM's 1T)",
        [
            *(f"model.{name}" for name in ("d_model", "d_ff", "head_dim", "moe.d_ff", "wide.head_dim")),
            "model.layer_embedding",
            *(f"model.mla.{name}" for name in ("q_rank", "kv_rank", "rope_head_dim", "nope_head_dim", "v_head_dim")),
            *("model.lora.rank", "model.moe.latent", "model.sparse.index_head_dim"),
            *("model.delta.key_head_dim", "model.delta.head_dim", "model.mamba.head_dim", "model.mamba.state"),
            *("model.delta.conv", "model.mamba.conv", "model.mamba.chunk"),
        ],
    ),
    (
        1 << 14,
        "a hundred times the heads of the widest published transformer, 160",
        [
            *("model.n_heads", "model.n_kv_heads", "model.wide.n_kv_heads", "model.sparse.index_heads"),
            *("model.delta.n_heads", "model.delta.key_heads", "model.mamba.n_heads", "model.mamba.groups"),
        ],
    ),
    (
        1 << 14,
        "eight times the most experts of a published transformer, 2,048 (Switch-C, Fedus et al. 2021)",
        [f"model.moe.{name}" for name in ("n_experts", "top_k", "n_shared", "n_groups", "top_groups", "capacity")],
    ),
    (1 << 24, "sixty times the largest published vocabulary, 256,000 tokens", ["model.vocab_size"]),
    (
        1 << 27,
        "the longest published context has 100 million tokens",
        [
            *(
                "model.seq_len",
                "model.window",
                "model.rope_scaling.original_seq_len",
                "model.query_growth.length",
                "model.sparse.top_k",
            ),
            *("layout.loss_chunk", "layout.compression_rank", "run.sample_tokens"),
        ],
    ),
    (
        MOST_DEVICES,
        "ten times the largest cluster that trained one model",
        [
            *("cluster.nodes", "cluster.domain", "cluster.pod"),
            *(
                f"layout.{name}"
                for name in ("dp_replicate", "dp_shard", "cp", "cp_ulysses", "tp", "ep", "etp", "ep_node", "hpz")
            ),
        ],
    ),
    (
        4096,
        "no node has so many devices or processors",
        [
            *("cluster.devices_per_node", "cluster.accelerator.cores", "run.threads", "data.workers"),
            *(f"cluster.sharing.{name}" for name in ("node_cores", "processes", "linked")),
        ],
    ),
    (
        1 << 20,
        "sixteen times the largest published batch, 65,536 sequences (LAMB, You et al. 2020)",
        ["train.global_batch", "optimizer.base_batch", "layout.micro_batch", "layout.accumulation"],
    ),
    (
        1 << 20,
        "more would be kept in memory at once than any host has",
        ["layout.pp_slices", "layout.tiles", "layout.prefetch", "layout.bucket_mb", "data.prefetch", "data.bpe_vocab"],
    ),
    (
        10**9,
        "a year of steps of 30 ms",
        [
            *("train.steps", "train.log_every", "train.eval_every", "train.eval_samples", "checkpoint.every"),
            "checkpoint.memory_every",
            *(
                "checkpoint.keep",
                "checkpoint.keep_every",
                "optimizer.warmup_steps",
                "optimizer.decay_steps",
                "layout.sync_every",
                "layout.compression_start",
            ),
        ],
    ),
    (10**12, "a prepared corpus of random tokens lies on disk whole", ["data.random_tokens"]),
    (1 << 63, "it has to be a number of 63 bits", ["train.seed"]),
    (
        10**12,
        "nothing that is measured or set is so large",
        [
            *(f"cluster.{name}" for name in ("peak_tflops", "oversubscription")),
            *(f"cluster.{name}" for name in ("price_per_device_hour", "power_w", "carbon_g_per_kwh")),
            *(f"cluster.accelerator.{name}_tflops" for name in (*HALF, "fp8", "fp4", "fp32")),
            *(f"cluster.accelerator.{name}" for name in ("memory_gib", "bandwidth_gbs", "sustained", "alone", "older")),
            *(f"cluster.accelerator.{name}_us" for name in ("launch", "product", "host")),
            *(f"cluster.sharing.{name}" for name in ("alone_products", "alone_streams")),
            *(f"cluster.host.{name}" for name in ("memory_gib", "link_gbs", "update_gbs", "disk_gbs", "disk_gib")),
            *(f"cluster.{link}.{name}" for link in ("intra", "inter") for name in ("gbs", "latency_us", "pair_gbs")),
            *(f"model.rope_scaling.{name}" for name in ("factor", "low_freq_factor", "high_freq_factor", "magnitude")),
            *("model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow"),
            *(f"model.moe.{name}" for name in ("route_scale", "aux_loss", "z_loss", "bias_rate")),
            *(f"model.{name}" for name in ("norm_eps", "rope_theta", "window_rope_theta", "init_std")),
            *("model.lora.alpha", "model.mla.norm_eps", "model.sparse.index_loss"),
            *(f"model.{name}" for name in ("attention_scale", "attention_softcap", "logit_softcap", "logit_divisor")),
            *(f"model.{name}_multiplier" for name in ("embedding", "residual")),
            "model.query_growth.rate",
            *(f"optimizer.{name}" for name in ("lr", "eps", "weight_decay", "clip", "outer_lr")),
            *(f"cluster.calibration.{command}.provenance.cores" for command in ("compute", "comm")),
            *(
                f"cluster.calibration.{part}.{figure}"
                for part in (
                    *("compute.products", "compute.attention", "compute.streams", "compute.blocks"),
                    *("comm.intra", "comm.inter"),
                )
                for figure in ("error", "spread", "rounds")
            ),
            "run.timeout_s",
        ],
    ),
]
"""Upper bounds, each with its reason: beyond them a typing error is more likely than a job, and answers would take
minutes or all memory."""
SMALLEST = 1e-30
"""Smallest number other than 0: quotients by smaller ones, and their powers, exceed the range of floating point."""
BOUNDS = {path: (most, reason) for most, reason, paths in AT_MOST for path in paths}
"""Upper bounds with their reasons, by path."""


def size_problems(job: Job) -> Iterator[Problem]:
    """Yields each number that is too large or too small by itself, and a product of axes that is too large."""
    for path, (most, reason) in BOUNDS.items():
        if not isinstance(value := get(job, path), str) and value > most:
            yield path, f"must be at most {most:,}, is {value:,}: {reason}"
    for path in (path for path, kind in leaves().items() if kind is float):
        if 0 < abs(value := get(job, path)) < SMALLEST:
            yield path, f"must be 0 or at least {SMALLEST:g}, is {value:g}"
    if (world := job.layout.world) > MOST_DEVICES >= max(getattr(job.layout, axis) for axis in AXES):
        product = " × ".join(f"{axis} {getattr(job.layout, axis)}" for axis in AXES)
        yield "layout", f"{product} = {world:,} devices, at most {MOST_DEVICES:,}"


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
