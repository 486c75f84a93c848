"""Recipes of Megatron-Bridge and NeMo 2: Python files, of which literals are followed, and YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.errors import JobError
from phalanx.foreign.frame import Fields, Leftover, Source, Stated, Unresolved, yaml_values
from phalanx.foreign.megatron import SCRIPT, launched
from phalanx.foreign.megatron_core import core, start_from
from phalanx.foreign.python_config import TARGET, Built, RecipeModule, RecipeReader, stated
from phalanx.foreign.shared import lora_targets

SECTIONS = (
    *("model.config", "model.language_transformer_config", "model", "train", "optimizer.config", "optimizer", "ddp"),
    *("optim.config", "scheduler", "tokenizer", "mixed_precision", "comm_overlap", "trainer.strategy.ddp"),
    *("trainer.strategy", "trainer.plugins", "trainer", "data", "strategy"),
)
"""Sections whose names are those of Megatron Core's arguments."""
KEPT = ("data.seq_length", "dataset.seq_length", "dataset.sequence_length", "tokenizer.vocab_size")
"""Names that keep their section."""
INNER = ("config", "plugins", "strategy", "ddp", "tp_comm_overlap_cfg", "logger")
"""Values of sections that are sections themselves."""
PRECISIONS = ("get_mixed_precision_config", "_lookup_or_none")
"""Functions that stay calls: what they return follows from their names and arguments."""
KNOWN = {
    "set_cuda_graph_modules": lambda model, modules=(): model.fields.update(cuda_graph_modules=[*modules]),
    "clear_cuda_graph_modules": lambda model: model.fields.update(cuda_graph_modules=[], cuda_graph_scope=[]),
    "set_full_iteration_cuda_graph": lambda model: model.fields.update(cuda_graph_impl="full_iteration"),
}
"""Functions of Megatron-Bridge that change an object, with what they do."""
_DEVICES = {
    **{name: (f"dgx-{name}", 8) for name in ("h100", "h200", "a100", "b200", "b300")},
    **{name: (f"{name}-nvl72", 4) for name in ("gb200", "gb300", "vr200")},
}
"""Devices in the names of recipes, with machines of them."""


def is_recipe(source: Source) -> bool:
    return source.path.suffix == ".py" and bool(re.search(r"\bmegatron\.bridge\b|ConfigContainer", source.text))


def is_nemo(source: Source) -> bool:
    return source.path.suffix == ".py" and bool(re.search(r"\bnemo_run\b|\bnemo\.collections\b", source.text))


def parse(source: Source) -> Sequence[Stated]:
    """Returns the values of a function that builds a configuration."""
    try:
        module = RecipeModule(source.path, source.text)
    except (SyntaxError, ValueError, MemoryError) as error:
        raise JobError(f"{source.path}: not valid Python: {error}") from None
    names = [name for name in module.functions if re.search(r"_config$|recipe$", name) and name[0] != "_"]
    name = source.part or (names[0] if len(names) == 1 else "")
    if name not in module.functions:
        known = ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
        what = f"has no function {name}" if name else f"has {len(names)} configurations"
        raise JobError(f"{source.path}: {what}; name one, --from {source.path}:NAME: {known or 'there is none'}")
    reader = RecipeReader(PRECISIONS, KNOWN)
    built = reader.call(module, name, (), {}, 0)
    if not isinstance(built, Built):
        raise JobError(f"{source.path}: {name} returns no configuration that follows from the file")
    line = module.functions[name].lineno
    found = [Stated("recipe", name, line, "", label="recipe")]
    found += _named(stated(built, source.path))
    for path, number, text in reader.calls:
        if not _HARMLESS.search(text):
            other = None if path == source.path else path
            found.append(Stated(f"call {text}", Unresolved(text, "this call is not followed"), number, "", other))
    return found


_HARMLESS = re.compile(r"callbacks\.|\.append\(|\.extend\(|determinism|env_vars|\.update\(")
"""Calls that change no figure."""


def _named(values: Any) -> list[Stated]:
    """Returns values under the names of Megatron Core, without their sections."""
    found, unread = list[Stated](), list[str]()
    for each in values:
        name = each.name
        if name.startswith(tuple(unread)) and unread:
            continue
        section = next((prefix for prefix in SECTIONS if name.startswith(f"{prefix}.")), "")
        last = name.removeprefix(f"{section}.")
        owner = last.removesuffix(f".{TARGET}")
        plain = section and "." not in last and not last.endswith(TARGET) and not last.isdigit() and name not in KEPT
        if section and owner != last and "." not in owner and owner not in INNER and str(each.value)[:1].islower():
            unread.append(f"{section}.{owner}.")
            what = Unresolved(f"{each.value}(…)", "this function is not read")
            found.append(replace(each, name=owner, value=what, label=f"{section}.{owner}"))
        else:
            found.append(replace(each, name=last, label=name) if plain else each)
    return found


def parse_yaml(source: Source) -> Sequence[Stated]:
    """Returns the values of YAML."""
    return _named(yaml_values(source))


def is_yaml(source: Source) -> bool:
    sections = {
        "model",
        "train",
        "optimizer",
        "ddp",
        "scheduler",
        "dataset",
        "checkpoint",
        "mixed_precision",
        "tokenizer",
    }
    inner = re.search(r"tensor_model_parallel_size|global_batch_size|micro_batch_size", source.text)
    is_ours = "megatron.bridge" in source.text or (
        len(source.keys & sections) >= 2 and not {"trainer", "parallelism"} & source.keys  # NeMo, nanotron
    )
    return bool(inner and is_ours and "model" in source.keys)


def is_nemo_yaml(source: Source) -> bool:
    return "trainer" in source.keys and bool(source.keys & {"model", "strategy"}) and "parallel_size" in source.text


def finish(fields: Fields) -> None:
    """Sets what a recipe's values mean together."""
    recipe, base = fields.take("recipe", str, ""), fields.take(TARGET, str, "")
    is_whole = base in ("", "ConfigContainer", "pretrain", "finetune") or base[0].isupper()
    for name in ("model.0", "model.config._target_", "model._target_", "model"):
        value = fields.take(name, str, "")
        if value and value != "from_hf_pretrained" and start_from(fields, name, value):
            break
    else:
        name = "recipe" if is_whole else TARGET
        if "num_layers" not in fields.stated and not start_from(fields, name, recipe if is_whole else base):
            fields.need("model.preset", "the shape of the model, which is imported")
    if not is_whole:
        why = "this recipe is imported, and its file does not lie beside this one"
        fields.unknown.append(Leftover(f"{base}()", None, why))
    _machine(fields)
    _precision(fields)
    names = ("dataset.seq_length", "dataset.sequence_length")
    if (length := fields.first(*names)) and "seq_length" not in fields.stated:
        fields.set("model.seq_len", length, names)
    elif length and length != fields.take("seq_length", int, 0):
        model = fields.stated["seq_length"]
        fields.leave(names, f"{model.shown} {model.value} is predicted")
    kind = fields.word("peft._target_", "peft")
    if rank := fields.take("peft.dim", int, 32 if kind == "LoRA" else 0):
        fields.set("model.lora.rank", rank, ("peft.dim", "peft._target_"))
        fields.set("model.lora.alpha", fields.take("peft.alpha", float, 32.0), "peft.alpha")
        targets = fields.take("peft.target_modules", object, None)
        lora_targets(fields, "peft.target_modules", targets, everything=targets is None)
    elif kind and kind.lower() not in ("none", "null"):
        fields.need("model.lora.rank", f"the rank of the adapters ({kind})")
    tokens = fields.take("tokenizer.vocab_size", int, 0)
    if tokens and "vocab_size" not in fields.stated and fields.take("use_tokenizer_vocab_size", bool, True):
        fields.stated["vocab_size"] = replace(fields.stated["tokenizer.vocab_size"], name="vocab_size")
    core(fields)
    fsdp = fields.take("fsdp", str, "")
    if fsdp and fsdp.lower() not in ("none", "null"):
        fields.set("layout.dp_shard", -1, "fsdp", "world size / (tp × pp × cp)")
        fields.set("layout.zero", 3, "fsdp")
        fields.settings.pop("layout.dp_replicate", None)
    fields.framework = "nemo"


def _machine(fields: Fields) -> None:
    """Sets the cluster by the trainer's nodes and devices, or by the name of the recipe: …_64gpu_h100_…"""
    for name, path in (("num_nodes", "cluster.nodes"), ("devices", "cluster.devices_per_node")):
        if fields.has(name) and str(fields.stated[name].value).isdigit():
            fields.set(path, int(fields.stated[name].value), name)
    launched(fields)
    named = re.search(r"_([0-9]{1,6})gpu_([a-z]+[0-9]+)_", fields.take("recipe", str, ""))
    if named and named[2] in _DEVICES:
        machine, each = _DEVICES[named[2]]
        devices = int(named[1])
        fields.set("cluster.preset", f"{machine}:{-(-devices // each)}", "recipe", "by its name")
        if devices < each:
            fields.set("cluster.devices_per_node", devices, "recipe", "by its name")


_FORMATS = (
    (r"nvfp4|fp4", {"fp4": "e2m1", "bf16": True}),
    (r"mxfp8|fp8_mx", {"fp8": "hybrid", "fp8_recipe": "mxfp8"}),
    (r"subchannel|blockwise|fp8_sc", {"fp8": "hybrid", "fp8_recipe": "blockwise"}),
    (r"current|fp8_cs", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    (r"fp8", {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    (r"bf16", {"bf16": True}),
    (r"fp16|16-mixed", {"fp16": True}),
)
"""Patterns of the names of mixed precisions, with the arguments of Megatron Core that they stand for."""


def _precision(fields: Fields) -> None:
    """States the arguments that a named precision stands for."""
    first = "mixed_precision"
    names = (first, f"{first}.0", f"{first}._target_", "precision", "trainer.plugins._target_")
    said = next((text for name in names if (text := fields.take(name, str, "")) and re.search("16|fp8|fp4", text)), "")
    meant: Mapping[str, Any] = next((each for pattern, each in _FORMATS if re.search(pattern, said)), {})
    for name in (first, "precision"):
        if not said and fields.take(name, str, "").removesuffix("-true") not in ("", "none", "32", "fp32"):
            fields.unknown_value(name, ("bf16_mixed", "fp16_mixed", "fp32", "bf16_with_fp8_…"), "train.precision")
    for name, value in meant.items():
        if name not in fields.stated:
            fields.stated[name] = Stated(name, value, label=said)


def _python_line(name: str, value: Any) -> str:
    section = "ddp" if name in ("use_distributed_optimizer", "num_distributed_optimizer_instances") else "model"
    section = "train" if name in ("micro_batch_size", "global_batch_size") else section
    return f"    cfg.{section}.{name} = {value!r}"


RECIPE = replace(
    SCRIPT,
    kind="Megatron-Bridge",
    table="bridge",
    recognises=is_recipe,
    parse=parse,
    finish=finish,
    new_line=_python_line,
    spelled=repr,
    absent="None",
    marks="a Python file that builds a ConfigContainer; FILE:FUNCTION of several",
)
YAML = replace(
    RECIPE,
    kind="Megatron-Bridge (YAML)",
    recognises=is_yaml,
    parse=parse_yaml,
    new_line=lambda name, value: _python_line(name, value)[8:].replace(" = ", ": ").replace("'", ""),
    spelled=lambda value: str(value).lower() if isinstance(value, bool) else str(value),
    absent="null",
    marks="YAML with model, train, ddp, …",
)
NEMO = replace(
    RECIPE,
    kind="NeMo",
    recognises=is_nemo,
    new_line=lambda name, value: f"    recipe.trainer.strategy.{name} = {value!r}",
    marks="a Python file that imports nemo_run; FILE:FUNCTION of several",
)
NEMO_YAML = replace(
    YAML,
    kind="NeMo (YAML)",
    recognises=is_nemo_yaml,
    new_line=lambda name, value: f"trainer.strategy.{name}: {value}",
    marks="YAML with trainer and model or strategy",
)
