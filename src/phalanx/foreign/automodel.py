"""NeMo AutoModel's YAML recipes for language models."""

from __future__ import annotations

from typing import Any

from phalanx.config import presets
from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.foreign import shared
from phalanx.foreign.frame import Fields, ForeignFormat, ForeignJob, Source, yaml_values

_D, _S, _C = "distributed.", "step_scheduler.", "model.config."
_PATHS = ("pretrained_model_name_or_path", "name_or_path")
_MARKS = {"step_scheduler", "distributed", "loss_fn", "dist_env", "recipe"}


def recognises(source: Source) -> bool:
    """Returns whether a file has AutoModel's sections."""
    return "model" in source.keys and len(_MARKS & source.keys) > 1


def finish(fields: Fields) -> None:
    """Sets what depends on several names."""
    _model(fields)
    packed = fields.take("packed_sequence.packed_sequence_size", int, 0)
    names = [name for name in ("dataset.seq_len", "dataset.seq_length") if fields.has(name)]
    if packed > 0:
        name = "packed_sequence.packed_sequence_size"
        fields.set("model.seq_len", packed, name, "attention is priced to the whole sequence, not within samples")
        fields.leave(names, "samples are packed", affects=False)
    elif names:
        fields.set("model.seq_len", fields.take(names[0], int, 1), names[0])
    else:
        fields.need("model.seq_len", "the length of a sample in tokens")
    _degrees(fields)
    _pipeline(fields)
    _precision(fields)
    least = fields.take("lr_scheduler.min_lr", float, 0.0)
    peak = fields.settings.get("optimizer.lr")
    if peak and "lr_scheduler.min_lr" in fields.stated:
        top = fields.take("optimizer.lr", float, 0.0)
        fields.set(
            "optimizer.min_lr_ratio", min(1.0, least / top) if top else 0.0, ["lr_scheduler.min_lr", "optimizer.lr"]
        )
    if "optimizer.schedule" not in fields.settings:
        fields.set("optimizer.schedule", "constant", "lr_scheduler.lr_decay_style")
    if fields.has("rng.seed") and "seed" not in fields.stated:
        fields.set("train.seed", fields.take("rng.seed", int, 42), "rng.seed")
    fields.leave("rng.seed", "seed is set", affects=False)
    fields.leave(f"{_S}ckpt_every_steps", "a checkpoint is no part of a step", affects=False)
    if fields.has("peft.dim") or "peft.target_modules" in fields.stated:
        found, everything = fields.take("peft.target_modules", object, None), fields.on("peft.match_all_linear")
        shared.lora_targets(fields, "peft.target_modules", found, everything=everything)


def _model(fields: Fields) -> None:
    from phalanx.config.hugging_face import config_json

    several = ("model.pretrained_model_name_or_path", *(f"{_C}{each}" for each in _PATHS), "model.config")
    names = [name for name in several if name in fields.stated]
    shape = {n.removeprefix(_C): each.value for n, each in fields.stated.items() if n.startswith(_C)}
    changed = [f"{_C}{key}" for key in shape if key not in (*_PATHS, "_target_", "trust_remote_code", "use_cache")]
    if {"hidden_size", "num_hidden_layers", "num_attention_heads", "architectures"} <= {*shape}:
        try:
            described = config_json.read(shape)
        except JobError as error:
            shared.unknown_model(fields, f"{_C}architectures", f"no shape here: {error}")
        else:
            for path, _, ours in config_json.differing(presets.PRESETS["tiny"], described.model):
                fields.set(f"model.{path}", ours, [f"{_C}{key}" for key in shape])
    elif names and isinstance(fields.stated[names[0]].value, str):
        shared.hub_model(fields, names[0], fields.take(names[0], str, ""))
        pairs = {"num_hidden_layers": "model.n_layers", "vocab_size": "model.vocab_size"}
        pairs |= {"index_topk": "model.sparse.top_k", "index_n_heads": "model.sparse.index_heads"}
        pairs |= {"index_head_dim": "model.sparse.index_head_dim"}
        for key, path in pairs.items():
            if isinstance(shape.get(key), int):
                fields.set(path, shape[key], f"{_C}{key}")
    elif "model._target_" in fields.stated:
        shared.unknown_model(fields, "model._target_", "the file names no model of the hub")
    left = (*names, *changed, f"{_C}trust_remote_code", f"{_C}use_cache")
    fields.leave(left, "the shape is that of the model", affects=False)
    fields.leave("model.num_nextn_predict_layers", "more than one token is predicted with model.mtp", affects=False)
    dispatcher = fields.take("model.backend.dispatcher", str, "")
    kinds = {"torch": "all-to-all", "deepep": "deepep", "hybridep": "hybridep"}
    fields.recipe |= {"dispatcher": kinds[dispatcher]} if dispatcher in kinds else {}
    if dispatcher not in kinds:
        fields.leave("model.backend.dispatcher", "the traffic of this dispatcher is not priced")
    attention = fields.take("model.backend.attn", str, "te")
    fields.leave("model.backend.attn", "attention in fused kernels is priced", affects=attention == "eager")


def _degrees(fields: Fields) -> None:
    strategy = fields.take(f"{_D}strategy", str, "fsdp2").lower()
    replicate, data = _whole(fields, f"{_D}dp_replicate_size", 1), _whole(fields, f"{_D}dp_size", 0)
    tp = shared.whole(fields, "layout.tp")
    pp = shared.whole(fields, "layout.pp")
    names = [f"{_D}dp_size", f"{_D}dp_replicate_size"]
    zero = int(fields.choice(f"{_D}zero_dp_strategy", "3", ("1", "2", "3"), "layout.zero"))
    if strategy == "ddp":
        fields.set("layout.dp_replicate", data or -1, [f"{_D}strategy", *names])
    elif strategy in ("fsdp2", "megatron_fsdp"):
        fields.set("layout.zero", zero, [f"{_D}strategy", f"{_D}zero_dp_strategy"])
        fields.set("layout.dp_replicate", replicate, names[1])
        fields.set("layout.dp_shard", data // max(1, replicate) if data else -1, names)
    else:
        fields.unknown_value(f"{_D}strategy", ["fsdp2", "megatron_fsdp", "ddp"], "layout.zero")
    names = (f"{_D}sequence_parallel", f"{_D}enable_async_tensor_parallel")
    if tp > 1:
        hidden = fields.on(names[1])
        fields.set("layout.sp", hidden or fields.on(names[0]), names[0])
        fields.leave(names[1], "overlap of tensor-parallel traffic is not priced here", affects=hidden)
    fields.leave(names, "there is no tensor parallelism", affects=False)
    experts = _whole(fields, f"{_D}ep_size", 1)
    if experts > 1:
        fields.set("layout.ep", experts, f"{_D}ep_size")
    names = (f"{_D}reshard_after_forward", f"{_D}moe.reshard_after_forward")
    again = [name for name in names if fields.has(name)]
    again = again if len(again) < 2 or experts > 1 else again[:1]
    if again:
        fields.set("layout.reshard", fields.take(again[-1], bool, True), again[-1])
    elif pp > 1:
        fields.set("layout.reshard", False, names[0], "in a pipeline")
    fields.leave(names, "that of experts' blocks counts", affects=False)
    names = (f"{_D}offload_policy", f"{_D}offload_policy._target_")
    if offload := [name for name in names if fields.has(name) and fields.take(name, object, None)]:
        fields.set("layout.offload", "optimizer+parameters", offload)


def _whole(fields: Fields, name: str, default: int) -> int:
    """Returns a degree, which may be "none"."""
    found = fields.stated.get(name)
    if found is not None and str(found.value).lower() in ("none", "null", ""):
        fields.take(name, object, None)
        return default
    return fields.take(name, int, default)


def _pipeline(fields: Fields) -> None:
    section = "autopipeline." if any(name.startswith("autopipeline.") for name in fields.stated) else f"{_D}pipeline."
    rounds = f"{section}round_virtual_stages_to_pp_multiple"
    names = [*(f"{section}{n}" for n in ("pp_schedule", "pp_microbatch_size", "layers_per_stage")), rounds]
    local_name = f"{_S}local_batch_size"
    local = fields.take(local_name, int, 1)
    pp = shared.whole(fields, "layout.pp")
    if pp < 2:
        fields.set("layout.micro_batch", local, local_name)
        fields.leave(names, "there is no pipeline", affects=False)
        return
    micro, each, rounds = fields.take(names[1], int, 1), fields.take(names[2], int, 0), fields.take(names[3], str, "")
    if local % micro:
        fields.no_multiple(local_name, local, micro)
    how = f"{local // micro} of them pass the pipeline before it is empty" if local > micro else ""
    fields.set("layout.micro_batch", micro, [names[1], local_name], how)
    word, layers = shared.schedule_of(fields, names[0], "1f1b"), shared.whole(fields, "model.n_layers", 0)
    chunks = 1 if word in (*shared.ONE_STAGE, "") else 2
    if each and layers and chunks > 1:
        stages = -(-layers // each)
        stages += (-stages % pp) if rounds == "up" else -(stages % pp)
        chunks = max(1, stages // pp)
    if chunks > 1:
        fields.set("layout.pp_chunks", chunks, names[2:])
    if layers >= pp * chunks and word in (*shared.ONE_STAGE, "interleaved_1f1b", "looped_bfs"):
        fields.set("layout.pp_cut", shared.cut_of(layers, pp * chunks, 0, 0), names[2])


def _precision(fields: Fields) -> None:
    known = [f"{p}{n}" for n in ("auto", "bfloat16", "bf16", "float32", "fp32") for p in ("", "torch.")]
    dtype = fields.choice("model.torch_dtype", "auto", known, "train.precision").removeprefix("torch.")
    eight, recipe = fields.on("fp8.enabled"), fields.take("fp8.recipe_name", str, "tensorwise")
    gathers = fields.on("fp8.enable_fsdp_float8_all_gather")
    scaling = {"": "", "mxfp8": "mxfp8", "current": "tensorwise", "block": "rowwise"}
    engine = fields.choice("model.backend.te_fp8.recipe", "", scaling, "train.fp8_scaling")
    if eight:
        fields.set("train.precision", "fp8", "fp8.enabled")
        fields.set("train.fp8_scaling", recipe.partition("_")[0], "fp8.recipe_name")
        if gathers:
            fields.set("layout.quantise_weights", "fp8", "fp8.enable_fsdp_float8_all_gather")
    elif engine:
        fields.set("train.precision", "fp8", "model.backend.te_fp8.recipe")
        near = "blocks of 128; rows are near" if engine == "block" else ""
        fields.set("train.fp8_scaling", scaling[engine], "model.backend.te_fp8.recipe", near)
    else:
        fields.set("train.precision", "bf16", "model.torch_dtype", "passes in bf16, FSDP2's default")
    fields.leave(("fp8.recipe_name", "fp8.enable_fsdp_float8_all_gather"), "fp8.enabled is not set", affects=False)
    compiled = ["compile.enabled", f"{_D}enable_compile"]
    fields.set("train.compile", fields.on(*compiled), compiled)
    masters = [fields.on("optimizer.master_weights"), fields.take("optimizer.master_weight_bits", int, 0) > 0]
    moments = fields.take("optimizer.exp_avg_dtype", str, "").lower().removeprefix("torch.")
    wide = dtype in ("float32", "fp32") or any(masters)
    # Else the framework's memory has parameters and moments in the type of the checkpoint.
    state = 4 if moments.startswith("bf") or not wide else 8
    fields.recipe |= {"parameter_bytes": 4 if wide else 2, "state_bytes": state}
    fields.framework = "automodel"
    loss = fields.take("loss_fn._target_", str, "")
    if "FusedLinear" in loss:
        fields.set("layout.loss_chunk", "auto", "loss_fn._target_", "the loss is computed in parts")
    else:
        fields.leave("loss_fn._target_", "the loss of all logits", affects=False)


def written(theirs: ForeignJob, layout: Layout) -> dict[str, Any]:
    """Returns the values that give a layout."""
    old = any(name.startswith("autopipeline.") for name in theirs.stated)
    section = "autopipeline." if old else f"{_D}pipeline."
    piped = layout.pp > 1
    found: dict[str, Any] = {
        f"{_D}dp_replicate_size": layout.dp_replicate if layout.dp_replicate > 1 else None,
        f"{_D}ep_size": layout.ep,
        f"{_D}reshard_after_forward": layout.reshard,
        f"{_D}sequence_parallel": layout.sp,
        f"{_D}activation_checkpointing": "selective" if layout.recompute == "selective" else layout.recompute == "full",
        f"{_S}local_batch_size": layout.micro_batch * (layout.accumulation if piped else 1),
        f"{section}pp_microbatch_size": layout.micro_batch if piped else None,
        f"{section}pp_schedule": (shared.torch_schedule(layout.schedule) or "").lower() or None if piped else None,
    }
    if piped and (layers := shared.number_of(theirs.settings, "model.n_layers")):
        found[f"{section}layers_per_stage"] = -(-layers // (layout.pp * max(1, layout.pp_chunks)))
    if isinstance(theirs.value(f"{_D}dp_size"), int):
        found[f"{_D}dp_size"] = layout.dp_replicate * layout.dp_shard
    return found


FORMAT = ForeignFormat(
    kind="NeMo AutoModel",
    table="automodel",
    recognises=recognises,
    parse=yaml_values,
    finish=finish,
    written=written,
    covers=shared.TORCH | {"dp_replicate", "dp_shard"},
    fixed={"pp_cut": "", "sp_regather": False, "etp": 0},
    keeps=shared.KEPT,
    chooses=shared.RECOMPUTES | shared.PIPELINES,
    marks="YAML with model, step_scheduler and distributed",
)
