"""Axolotl's YAML: fine-tuning of a model of the Hugging Face hub, with FSDP or DeepSpeed."""

from __future__ import annotations

import functools
from typing import Any

from phalanx.config.layout import Layout
from phalanx.foreign import deepspeed
from phalanx.foreign.frame import Fields, ForeignFormat, ForeignJob, Source, Stated, yaml_values
from phalanx.foreign.shared import KEPT, WHOLE, fsdp_option, hub_model, included, lora_targets, set_fsdp

_MARKS = {"base_model", "sequence_len", "micro_batch_size"}
_FUSED = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")
_F = "fsdp_config."
_EXCLUSIVE = (
    *(("warmup_steps", "warmup_ratio"), ("batch_size", "gradient_accumulation_steps")),
    *(("load_in_4bit", "load_in_8bit"), ("deepspeed", "fsdp"), ("sample_packing", "batch_flattening")),
)
"""Names of which Axolotl refuses two together (utils/schemas/validation.py)."""


def recognises(source: Source) -> bool:
    """Returns whether a file names a base model and its batch."""
    return "base_model" in source.keys and len(_MARKS & source.keys) > 1


def parse(source: Source) -> list[Stated]:
    """Returns the values of a file, and of the DeepSpeed file that it names."""
    return included(source, yaml_values(source), "deepspeed")


def finish(fields: Fields) -> None:
    """Sets what depends on several names."""
    if "base_model" in fields.stated:
        hub_model(fields, "base_model", fields.take("base_model", str, ""))
    _layout(fields)
    words = {"fp8": "fp8", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    switches = {name: fields.choice(name, "", ("true", "auto", "full", "false"), "train.precision") for name in words}
    on = [name for name, word in switches.items() if word not in ("", "false")]
    half = [name for name in on if words[name] == "fp16"]
    if half and switches["bf16"] == "auto":  # Axolotl's rule: bf16 is then off
        on.remove("bf16")
    fields.exclude(*((name, half[0]) for name in on if half and words[name] == "bf16"))
    how = "bf16 on devices that have it" if "bf16" in on and switches["bf16"] == "auto" else ""
    fields.set("train.precision", words[on[0]] if on else "fp32", on or [*words], how)
    if "fp8" in on:
        fields.set("train.fp8_scaling", "tensorwise", "fp8")
    betas = ["adam_beta1", "adam_beta2"]
    if any(name in fields.stated for name in betas):
        fields.set("optimizer.betas", [fields.take(betas[0], float, 0.9), fields.take(betas[1], float, 0.999)], betas)
    ratio, steps = fields.take("warmup_ratio", float, 0.0), fields.take("warmup_steps", float, 0.0)
    total = fields.take("max_steps", int, 0)
    fields.exclude(*_EXCLUSIVE)
    if steps >= 1:
        fields.set("optimizer.warmup_steps", int(steps), "warmup_steps")
    elif share := ratio or steps:
        names = ["warmup_ratio", "warmup_steps", "max_steps"]
        if total > 0:
            fields.set("optimizer.warmup_steps", int(share * total), names)
        else:
            fields.leave(names[:2], "its share of the steps needs max_steps", affects=False)
    _recompute(fields)
    _adapter(fields)
    _loss(fields)
    wide = fields.settings["train.precision"].text == "fp32"
    if not wide and ("layout.zero" not in fields.settings or "model.lora.rank" in fields.settings):
        fields.recipe["parameter_bytes"] = 2  # weights loaded in 16 bits, without FSDP's shards
        if "model.lora.rank" not in fields.settings:
            fields.recipe["state_bytes"] = 2 if "optimizer.state" in fields.settings else 4
    if fields.on("sample_packing"):
        why = "samples fill a sequence; attention within them is priced as attention to the whole sequence"
        fields.leave("sample_packing", why)
    if fields.has("rl"):
        fields.leave("rl", "only the passes of supervised training are priced, without a reference model")


def _layout(fields: Fields) -> None:
    fields.put("layout.dp_replicate", "dp_replicate_size", 0)
    shard = fields.put("layout.dp_shard", "dp_shard_size", 0)
    fsdp = [name for name in ("fsdp", "fsdp_config") if fields.has(name) and fields.stated[name].value]
    fsdp += [name for name in fields.stated if name.startswith(_F)]
    version = max(fields.take("fsdp_version", int, 1), fields.take(f"{_F}fsdp_version", int, 1))
    known = ("full_shard", "shard_grad_op", "auto_wrap", "offload")
    words = [str(word).lower() for word in fields.take("fsdp", list, [])]
    if fields.has("deepspeed") and fields.take("deepspeed", str, ""):
        deepspeed.set_deepspeed(fields)
        fields.leave(fsdp, "deepspeed is set", affects=False)
    elif fsdp:
        set_fsdp(fields, _F, version)
        if set(words) - {*known}:
            fields.unknown_value("fsdp", known, "layout.zero")
        if "shard_grad_op" in words:
            fields.set("layout.reshard", False, "fsdp")
        if "offload" in words:
            fields.set("layout.offload", "optimizer+parameters", "fsdp")
    else:
        if shard > 1:
            fields.set("layout.zero", 3, "dp_shard_size")
        else:
            fields.settings.pop("layout.dp_shard", None)
            fields.set("layout.dp_replicate", -1, ["fsdp", "deepspeed", "dp_replicate_size", "dp_shard_size"], "DDP")
        fields.framework = "torchtitan" if shard > 1 else "fsdp1"
    if (backend := fields.take("expert_parallel_backend", str, "")).lower() in ("deepep", "hybridep"):
        fields.recipe["dispatcher"] = backend.lower()
    if (total := fields.take("batch_size", int, 0)) > 0 and "layout.accumulation" not in fields.settings:
        fields.set("layout.accumulation", max(1, total // fields.take("micro_batch_size", int, 1)), "batch_size")


def _switch(fields: Fields, name: str) -> str:
    """Returns a value that is a switch or a word, as a word in lower case."""
    return str(fields.take(name, object, "")).lower()


def _recompute(fields: Fields) -> None:
    word, moved = _switch(fields, "gradient_checkpointing"), _switch(fields, "activation_offloading")
    if word in ("true", "offload", "offload_disk"):
        fields.set("layout.recompute", "full", "gradient_checkpointing")
    elif word not in ("", "false"):
        fields.unknown_value("gradient_checkpointing", ["true", "false", "offload"], "layout.recompute")
    on = {"gradient_checkpointing": word.startswith("offload"), "activation_offloading": moved not in ("", "false")}
    if any(on.values()):
        before = fields.settings.get("layout.offload")
        parts = [str(before.text)] if before else []
        fields.set("layout.offload", "+".join([*parts, "activations"]), [name for name in on if on[name]])


def _adapter(fields: Fields) -> None:
    kind = fields.take("adapter", str, "").lower()
    names = ["adapter", "lora_r", "lora_alpha"]
    rank, alpha = fields.take("lora_r", int, 0), fields.take("lora_alpha", float, 0.0)
    linear, targets = fields.on("lora_target_linear"), fields.take("lora_target_modules", object, None)
    if kind in ("lora", "qlora"):
        if not rank:
            fields.problems.append(f"{fields.origin('adapter')}: {kind} needs lora_r")
        fields.set("model.lora.rank", rank, names[:2])
        if alpha:
            fields.set("model.lora.alpha", alpha, "lora_alpha")
        if kind == "qlora" and not fields.on("load_in_4bit"):
            fields.problems.append(f"{fields.origin('adapter')}: qlora needs load_in_4bit: true, or is meant as lora")
        lora_targets(fields, "lora_target_modules", targets, everything=linear or targets is None)
    elif kind:
        fields.unknown_value("adapter", ["lora", "qlora"], "model.lora.rank")
    for name in filter(fields.on, ("load_in_4bit", "load_in_8bit")):
        fields.leave(name, "frozen weights in fewer bits are not priced; they count 2 bytes each")
    if not kind:
        names = ("lora_r", "lora_alpha", "lora_target_linear", "lora_target_modules")
        fields.leave(names, "adapter is not set", affects=False)


def _loss(fields: Fields) -> None:
    plugins = [str(each) for each in fields.take("plugins", list, [])]
    fused = [*filter(fields.on, _FUSED)]
    if any("CutCrossEntropy" in each for each in plugins):
        fused.append("plugins")
    else:
        fields.leave("plugins", "kernels of other libraries are not priced", affects=bool(plugins))
    if fused:
        fields.set("layout.loss_chunk", "auto", fused, "the loss is computed in parts")
    tiles = max(2, fields.take("tiled_mlp_num_shards", int, 4))
    if fields.on("tiled_mlp"):
        fields.set("layout.tiles", tiles, ["tiled_mlp", "tiled_mlp_num_shards"])
    for name in ("flash_attention", "flash_optimum", "attn_implementation", "eager_attention"):
        eager = _switch(fields, name) == ("true" if name == "eager_attention" else "eager")
        fields.leave(name, "attention in fused kernels is priced", affects=eager)


def written(theirs: ForeignJob, layout: Layout) -> dict[str, Any]:
    """Returns the values that give a layout."""
    option = functools.partial(fsdp_option, theirs.stated, _F)
    parts = layout.offload.replace("all", "optimizer+parameters+activations").split("+")
    recomputes = layout.recompute == "full" and not layout.recompute_cut
    found: dict[str, Any] = {
        "gradient_checkpointing": recomputes,
        "activation_offloading": True if "activations" in parts else None,
    }
    if theirs.value("deepspeed"):
        return found
    sharded = layout.dp_shard * layout.cp > 1
    found["dp_shard_size"] = layout.dp_shard if sharded else None
    found["dp_replicate_size"] = layout.dp_replicate if sharded and layout.dp_replicate > 1 else None
    found |= {name: theirs.value(name) for name in theirs.stated if name.startswith("fsdp")}
    if not sharded:
        found |= {name: None for name in theirs.stated if name.startswith("fsdp")}
    else:
        offload = option("offload_params") or f"{_F}offload_params"
        again = option("reshard_after_forward") or f"{_F}reshard_after_forward"
        found |= {"fsdp_version": 2, again: layout.reshard, offload: "parameters" in parts}
        if wraps := option("activation_checkpointing"):  # FSDP's own takes the place of the trainer's
            del found["gradient_checkpointing"]
            found[wraps] = recomputes
    return found


FORMAT = ForeignFormat(
    kind="Axolotl",
    table="axolotl",
    recognises=recognises,
    parse=parse,
    finish=finish,
    written=written,
    covers=frozenset(("loss_chunk", "recompute", "offload", "dp_shard", "dp_replicate", "reshard", "zero")),
    fixed={"pp": 1, "etp": 0},
    keeps=(*KEPT, "ep", "accumulate", "sp", "sp_regather"),
    chooses=WHOLE,
    marks="YAML with base_model and sequence_len or micro_batch_size",
)
