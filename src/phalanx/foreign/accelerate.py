"""accelerate's YAML: a launch with FSDP, DeepSpeed or Megatron-LM, without the model and the batch."""

from __future__ import annotations

from typing import Any

from phalanx.config.layout import Layout
from phalanx.foreign import deepspeed
from phalanx.foreign.frame import Fields, ForeignFormat, ForeignJob, Source, Stated, yaml_values
from phalanx.foreign.shared import KEPT, WHOLE, included, no_model, set_fsdp, whole

_DS, _P, _M, _F = "deepspeed_config.", "parallelism_config.parallelism_config_", "megatron_lm_config.", "fsdp_config."
_KEYS = {"mixed_precision", "fp8_config", "fsdp_config", "deepspeed_config", "parallelism_config", "num_processes"}
_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")


def recognises(source: Source) -> bool:
    """Returns whether a file has keys that `accelerate config` writes."""
    return bool({"distributed_type", "compute_environment"} & source.keys) or {"mixed_precision"} < source.keys <= _KEYS


def parse(source: Source) -> list[Stated]:
    """Returns the values of a file, and of the DeepSpeed file that it names."""
    return included(source, yaml_values(source), f"{_DS}deepspeed_config_file")


def finish(fields: Fields) -> None:
    """Sets what depends on several names."""
    _devices(fields)
    word = fields.take("mixed_precision", str, "no").lower()
    known = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    if word in known:
        fields.set("train.precision", known[word], "mixed_precision")
    else:
        fields.unknown_value("mixed_precision", [*known], "train.precision")
    if fields.take("fp8_config.backend", str, "") and word == "fp8":
        fields.set("train.fp8_scaling", "tensorwise", "fp8_config.backend")
    name = "dynamo_config.dynamo_backend"
    compiled = fields.choice(name, "no", ("no", "false", "inductor"), "train.compile")  # NO is false in YAML
    fields.set("train.compile", compiled == "inductor", name)
    kind = str(fields.take("distributed_type", object, "NO")).upper().replace("FALSE", "NO")  # NO is false in YAML
    version = fields.take(f"{_F}fsdp_version", int, 1)
    if version not in (1, 2):
        fields.unknown_value(f"{_F}fsdp_version", ("1", "2"))
    replicas = kind == "NO" or kind.startswith("MULTI_")
    fields.put("layout.dp_replicate", f"{_P}dp_replicate_size", 0)
    shard = fields.take(f"{_P}dp_shard_size", int, 0)
    if shard > 0 and not (replicas and shard == 1):
        fields.set("layout.dp_shard", shard, f"{_P}dp_shard_size")
    if (sp := fields.put("layout.cp", f"{_P}sp_size", 1)) > 1:
        fields.set("layout.cp_ulysses", sp, f"{_P}sp_size", "Ulysses")
    if kind == "FSDP":
        set_fsdp(fields, _F, version)
    elif kind == "DEEPSPEED":
        _deepspeed(fields)
        precision = fields.settings["train.precision"]
        if word in ("bf16", "fp16") and precision.text in ("bf16", "fp16") and precision.text != word:
            fields.problems.append(f"{precision.origin}: mixed_precision {word} says otherwise: keep one of them")
    elif kind == "MEGATRON_LM":
        name = f"{_M}megatron_lm_use_distributed_optimizer"
        fields.set("layout.zero", 1, name)
        fields.set("layout.dp_shard" if fields.on(name) else "layout.dp_replicate", -1, name)
        fields.framework = "megatron-core"
    else:
        if "layout.dp_shard" not in fields.settings and "layout.dp_replicate" not in fields.settings:
            fields.set("layout.dp_replicate", -1, "distributed_type", "DDP")
        fields.framework = "fsdp1"
        if kind not in _KINDS and not kind.startswith("MULTI_"):
            fields.unknown_value("distributed_type", _KINDS, "layout.dp_shard")
    for name in [name for name in fields.stated if name.startswith((_F, _DS, _M))]:
        meaning = fields.table.meaning_of(name)
        if meaning and meaning.rule:
            fields.leave(name, f"distributed_type is {kind}", affects=False)
    no_model(fields)


def _devices(fields: Fields) -> None:
    """Sets the devices of a node: accelerate states those of all machines."""
    where = fields.take("compute_environment", str, "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        fields.refuse("compute_environment", "only LOCAL_MACHINE is known")
    machines = whole(fields, "cluster.nodes")
    total = fields.take("num_processes", int, -1)
    if total > 0 and machines > 0:
        if total % machines:
            text = f"{total} processes on {machines} machines are not the same number on each"
            fields.problems.append(f"{fields.origin('num_processes')}: {text}")
        fields.set("cluster.devices_per_node", total // machines, ["num_processes", "num_machines"])
    if fields.on("use_cpu"):
        fields.set("cluster.device", "cpu", "use_cpu")


def _deepspeed(fields: Fields) -> None:
    """Sets what the DeepSpeed section says; what a file says that it names wins."""
    fields.take(f"{_DS}deepspeed_config_file", str, "")
    pairs = {"zero_stage": "stage", "offload_optimizer_nvme_path": "offload_optimizer.nvme_path"}
    pairs |= {f"offload_{part}_device": f"offload_{part}.device" for part in ("optimizer", "param")}
    for short, name in pairs.items():
        fields.take(f"{_DS}{short}", object, None)
        if found := fields.stated.get(f"{_DS}{short}"):
            fields.stated.setdefault(f"{deepspeed.ZERO}{name}", found)
    fields.stated.setdefault(f"{deepspeed.ZERO}stage", Stated(f"{deepspeed.ZERO}stage", 2))
    deepspeed.set_deepspeed(fields)


def written(theirs: ForeignJob, layout: Layout) -> dict[str, Any]:
    """Returns the values that give a layout."""
    kind = str(theirs.value("distributed_type", "NO")).upper()
    parts = layout.offload.replace("all", "optimizer+parameters").split("+")
    found: dict[str, Any] = {}
    if kind == "DEEPSPEED":
        found[f"{_DS}zero_stage"] = layout.zero if layout.dp_shard > 1 else 0
        found[f"{_DS}offload_optimizer_device"] = "cpu" if "optimizer" in parts else "none"
        found[f"{_DS}offload_param_device"] = "cpu" if "parameters" in parts else "none"
        found[f"{_DS}gradient_accumulation_steps"] = layout.accumulation
        return found
    found["?micro-batch"] = f"{layout.micro_batch}, which the training program sets"
    if kind == "MEGATRON_LM":
        found[f"{_M}megatron_lm_num_micro_batches"] = layout.accumulation
    else:
        found["gradient_accumulation_steps"] = layout.accumulation
        found["distributed_type"] = "FSDP" if layout.dp_shard * layout.cp > 1 else "MULTI_GPU"
        found[f"{_P}dp_replicate_size"] = layout.dp_replicate if layout.dp_replicate > 1 else None
        found[f"{_P}dp_shard_size"] = layout.dp_shard if layout.dp_shard > 1 else None
        if found["distributed_type"] == "FSDP":
            found[f"{_F}fsdp_reshard_after_forward"] = layout.reshard
            found[f"{_F}fsdp_offload_params"] = "parameters" in parts
            found[f"{_F}fsdp_activation_checkpointing"] = layout.recompute == "full"
    return found


FORMAT = ForeignFormat(
    kind="accelerate",
    table="accelerate",
    recognises=recognises,
    parse=parse,
    finish=finish,
    written=written,
    covers=deepspeed.FORMAT.covers - {"hpz"} | {"reshard", "recompute"},
    keeps=(*KEPT, "pp", "ep", "sp", "sp_regather"),
    chooses=WHOLE,
    marks="YAML with distributed_type",
)
