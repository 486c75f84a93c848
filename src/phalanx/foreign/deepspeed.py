"""DeepSpeed's JSON configuration, alone or under the trainers that read it. The model is not in it."""

from __future__ import annotations

import json
from typing import Any

from phalanx.config.layout import Layout
from phalanx.foreign.frame import Fields, ForeignFormat, ForeignJob, Source
from phalanx.foreign.shared import AUTO, KEPT, deepspeed_values, no_model

ZERO = "zero_optimization."
_MARKS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"}


def recognises(source: Source) -> bool:
    """Returns whether a file has DeepSpeed's sections."""
    return source.text.lstrip().startswith("{") and len(_MARKS & source.keys) > 0


def set_deepspeed(fields: Fields) -> None:
    """Sets what DeepSpeed's names say."""
    for name, found in fields.stated.items():
        meaning = fields.table.meaning_of(name)
        if found.text.strip("\"'") == AUTO and found.value is None and meaning and not meaning.why:
            fields.leave(name, "the trainer fills it in; give it here", affects=True)
    _precision(fields)
    top, lr = fields.take("scheduler.params.warmup_max_lr", float, 0.0), fields.settings.get("optimizer.lr")
    if lr is None:
        fields.put("optimizer.lr", "scheduler.params.warmup_max_lr", 0.0)
    elif top and top != fields.take("optimizer.params.lr", float, top):
        why = "optimizer.params.lr says otherwise, and the scheduler sets the learning rate: keep one of them"
        fields.refuse("scheduler.params.warmup_max_lr", why, "optimizer.lr")
    fields.put("train.global_batch", "train_batch_size", 0)
    if (printed := fields.take("steps_per_print", float, 0.0)) >= 1 and printed < 2**31:
        fields.set("train.log_every", int(printed), "steps_per_print")
    _zero(fields)
    _offload(fields)
    if (sp := fields.put("layout.cp", "sequence_parallel_size", 1)) > 1:
        fields.set("layout.cp_ulysses", sp, "sequence_parallel_size", "Ulysses")


def finish(fields: Fields) -> None:
    """Sets what a file alone says."""
    set_deepspeed(fields)
    if "train.precision" not in fields.settings:
        fields.need("train.precision", 'the precision, which is "auto",')
    no_model(fields)


def _precision(fields: Fields) -> None:
    narrow = [*filter(fields.on, ("bf16.enabled", "bfloat16.enabled"))]
    half, cast = fields.on("fp16.enabled"), fields.on("torch_autocast.enabled")
    kinds = {"": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "torch.float16": "fp16"}
    kind = fields.choice("torch_autocast.dtype", "", kinds, "train.precision")
    auto = any(name in fields.stated and fields.stated[name].value is None for name in ("bf16.enabled", "fp16.enabled"))
    fields.exclude(*((name, "fp16.enabled") for name in narrow))
    if narrow or half:
        fields.set("train.precision", "bf16" if narrow else "fp16", narrow or "fp16.enabled")
    elif cast:
        fields.set("train.precision", kinds[kind], ["torch_autocast.enabled", "torch_autocast.dtype"])
    elif not auto and "train.precision" not in fields.settings:
        fields.set("train.precision", "fp32", ["bf16.enabled", "fp16.enabled"])
    names = ["bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"]
    masters, states = map(fields.on, names)
    if masters or states:
        fields.set("optimizer.state", "bf16", names)
        fields.set("optimizer.master", "none" if masters else "fp32", names)


def _zero(fields: Fields) -> None:
    stage = f"{ZERO}stage"
    level = fields.take(stage, int, 0)
    shard = fields.take(f"{ZERO}mics_shard_size", int, -1)
    if level not in (0, 1, 2, 3):
        fields.unknown_value(stage, ["0", "1", "2", "3"], "layout.zero")
    elif level == 0:
        fields.set("layout.dp_replicate", -1, stage, "every rank holds a whole copy")
    else:
        fields.set("layout.zero", level, stage)
        if shard > 0:
            fields.set("layout.dp_shard", shard, f"{ZERO}mics_shard_size")
            fields.set("layout.dp_replicate", -1, f"{ZERO}mics_shard_size")
        else:
            fields.set("layout.dp_shard", -1, stage)
        if level > 1:
            fields.set("layout.accumulate", "sharded", stage, "gradients are sent after every micro-batch")
    fields.framework = "fsdp1"  # Hugging Face's models in eager mode, with fused attention
    narrow = "train.precision" in fields.settings and fields.settings["train.precision"].text != "fp32"
    fields.recipe["parameter_bytes"] = 2 if narrow else 4
    fields.put("layout.hpz", f"{ZERO}zero_hpz_partition_size", 1)
    if (size := fields.take(f"{ZERO}reduce_bucket_size", float, 0.0)) > 0 and level < 3:
        wide = 2 if narrow else 4
        fields.set("layout.bucket_mb", size * wide / 2**20, f"{ZERO}reduce_bucket_size", f"{wide} bytes per element")
    elif f"{ZERO}reduce_bucket_size" in fields.stated and size > 0:
        fields.leave(f"{ZERO}reduce_bucket_size", "gradients are reduced per block with ZeRO-3", affects=False)


def _offload(fields: Fields) -> None:
    places = {part: f"{ZERO}offload_{part}.device" for part in ("optimizer", "param")}
    old = {"optimizer": [f"{ZERO}cpu_offload"], "param": [f"{ZERO}cpu_offload_param", f"{ZERO}cpu_offload_params"]}
    parts, names = list[str](), list[str]()
    for part, name in places.items():
        word = fields.take(name, str, "none").lower()
        said = [*filter(fields.on, old[part])]
        if word not in ("none", "cpu", "nvme"):
            fields.unknown_value(name, ["none", "cpu", "nvme"], "layout.offload")
        elif word != "none" or said:
            parts.append("optimizer" if part == "optimizer" else "parameters")
            names += said or [name]
    folder = fields.take(f"{ZERO}offload_optimizer.nvme_path", str, "")
    if parts:
        fields.set("layout.offload", "+".join(parts), names)
    if fields.take(places["optimizer"], str, "none").lower() == "nvme":
        names = [places["optimizer"], f"{ZERO}offload_optimizer.nvme_path"]
        fields.set("layout.offload_to", folder or "/local_nvme", names)
    if fields.take(places["param"], str, "none").lower() == "nvme":
        why = "parameters leave for the host's memory here, not for a disk; set offload_param.device to cpu"
        fields.refuse(places["param"], why, "layout.offload")


def written(theirs: ForeignJob, layout: Layout) -> dict[str, Any]:
    """Returns the values that give a layout."""
    parts = layout.offload.replace("all", "optimizer+parameters").split("+")
    sharded = layout.dp_shard > 1
    found: dict[str, Any] = {
        f"{ZERO}stage": layout.zero if sharded else 0,
        f"{ZERO}offload_optimizer.device": "cpu" if "optimizer" in parts else "none",
        f"{ZERO}offload_param.device": "cpu" if "parameters" in parts else "none",
        f"{ZERO}mics_shard_size": layout.dp_shard if sharded and layout.dp_replicate > 1 else None,
        f"{ZERO}zero_hpz_partition_size": layout.hpz if layout.hpz > 1 else None,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
    }
    if theirs.value("train_batch_size") is not None:
        found["train_batch_size"] = layout.micro_batch * layout.accumulation * layout.data_ranks
    return found


def json_line(name: str, value: Any) -> str:
    """Returns a line of JSON that states a value, with the sections around it."""
    section, _, key = name.rpartition(".")
    return f'{f"in {section}: " if section else ""}"{key}": {json.dumps(value)}'


FORMAT = ForeignFormat(
    kind="DeepSpeed",
    table="deepspeed",
    recognises=recognises,
    parse=deepspeed_values,
    finish=finish,
    written=written,
    covers=frozenset(("zero", "dp_shard", "dp_replicate", "offload", "hpz", "micro_batch", "accumulation")),
    new_line=json_line,
    spelled=json.dumps,
    fixed={"pp": 1, "etp": 0},
    keeps=(*KEPT, "recompute", "recompute_cut", "tp", "cp", "ep", "accumulate"),
    marks="JSON with zero_optimization or train_micro_batch_size_per_gpu",
)
