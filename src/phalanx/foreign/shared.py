"""Reads values that several formats share: models by their names on the Hugging Face hub, torch's pipeline schedules,
FSDP as accelerate names its options, DeepSpeed's files, and degrees of parallelism."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phalanx.bounded import read_text
from phalanx.config import presets
from phalanx.config.fields import get
from phalanx.config.yaml_file import Setting
from phalanx.errors import JobError
from phalanx.foreign.frame import MOST_BYTES, Fields, Leftover, Source, Stated, Unresolved, converted, yaml_values

KEPT = (
    *("hpz", "quantise_weights", "quantise_gradients", "tiles", "tile", "cp_ulysses", "cp_inner", "sync", "loss_chunk"),
    *("data_parallel", "compression", "offload_to", "offload_blocks"),
)
"""Fields of a layout that torch's frameworks do not choose, or that are kept as the file has them."""
TORCH = frozenset(
    (
        *("sp", "ep", "etp", "reshard", "schedule", "pp_chunks", "pp_cut", "micro_batch", "accumulation"),
        *("recompute", "loss_chunk"),
    )
)
"""Fields of a layout that torchtitan's and AutoModel's rules give."""
RECOMPUTES = {"recompute": ("none", "selective", "full")}
WHOLE = {"recompute": ("none", "full")}
PIPELINES = {"schedule": ("1f1b", "interleaved_1f1b")}
"""The values of fields of which they have only some."""
MOST_STAGES = 10_000
"""Most stages of a cut."""
AUTO = "auto"
"""A value of DeepSpeed's files that the Hugging Face Trainer fills in."""
_THEIRS = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
_OURS = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zb_v", "dualpipe_v")
SCHEDULES = dict(zip(_THEIRS, _OURS, strict=True))
"""Schedules of torch.distributed.pipelining, whose names may have any case, and ours."""
ONE_STAGE = ("1f1b", "gpipe")
"""Those of ours with one stage per rank."""
_VARIANT = re.compile(r"-(instruct|base|chat|it|pt|hf|bf16|[0-9]{4})$", re.IGNORECASE)
"""Ends of names of repositories whose model has the shape of the one without."""


def hub_model(fields: Fields, name: str, text: str) -> None:
    """Sets the model to what a repository on the Hugging Face hub, or a folder with a config.json, is. A name without
    a preset is listed as not understood."""
    fields.model = text
    known, short = presets.named(text), text
    while known not in presets.CATALOGUE and (shorter := _VARIANT.sub("", short)) != short:
        known, short = presets.named(shorter), shorter
    folder = fields.source.path.parent / text
    if known in presets.CATALOGUE:
        fields.set("model.preset", known, name, "" if short == text else f"the shape of {short.rpartition('/')[2]}")
    elif (folder / "config.json").is_file():
        fields.set("model.preset", f"{presets.FROM_FILE}{folder}", name)
    else:
        unknown_model(fields, name, f"no preset has this shape{presets.unknown(text)}")


def unknown_model(fields: Fields, name: str, why: str) -> None:
    """Lists a model that is not known. A field `model` of the command line answers it."""
    fields.take(name, object, None)
    fields.refuse(
        name, f"{why}; or give the shape: model=PRESET, or model=hf:FOLDER with its config.json", "model.preset"
    )


def no_model(fields: Fields) -> None:
    """Asks for the model and its samples, which the file does not have."""
    fields.need("model.preset", "the model (PRESET, or hf:FOLDER with its config.json)")
    if "layout.accumulation" in fields.settings and not {"layout.micro_batch", "train.global_batch"} & {
        *fields.settings
    }:
        fields.need("layout.micro_batch or train.global_batch", "the batch that is accumulated")
    absent = {"model.seq_len": "the model's sequence length", "layout.micro_batch": "a micro-batch that fits the batch"}
    for path, what in absent.items():
        if path not in fields.settings:
            why = f"it is not in the file; {what} is taken unless it is set"
            fields.leftovers.append(Leftover(path, None, why, affects=True))


def number_of(settings: Iterable[Setting], path: str, default: int = 0) -> int:
    """Returns the whole number that a field of the job has, by itself or by the model's preset, or the default."""
    found = {each.path: str(each.text) for each in settings}
    if path.startswith("model.") and (preset := presets.PRESETS.get(found.get("model.preset", ""))):
        default = get(preset, path.removeprefix("model."))
    try:
        return converted(found.get(path, default), int)
    except ValueError:
        return default


def whole(fields: Fields, path: str, default: int = 1) -> int:
    return number_of(fields.settings.values(), path, default)


def schedule_of(fields: Fields, name: str, default: str = "1F1B") -> str:
    """Sets the schedule of a pipeline to torch's of that name, and returns ours; empty if there is none."""
    word = fields.take(name, str, default).lower()
    ours = next((ours for theirs, ours in SCHEDULES.items() if theirs.lower() == word), "")
    if ours:
        fields.set("layout.schedule", ours, name)
    elif name in fields.stated:
        fields.unknown_value(name, [*SCHEDULES], "layout.schedule")
    return ours


def torch_schedule(ours: str) -> str | None:
    """Returns torch's name of a schedule of ours, or None."""
    return next((theirs for theirs, each in SCHEDULES.items() if each == ours), None)


def cut_of(layers: int, stages: int, first: int, last: int) -> str:
    """Returns the layers of each stage, as torchtitan and AutoModel cut them: stages share layers evenly, early ones
    take what is left over, with the embedding as `first` layers of the first one, and the head as `last` of the last
    (torchtitan/distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part)."""
    if not 0 < stages <= layers + first + last or stages > MOST_STAGES:
        return ""
    each, more = divmod(layers + first + last, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return "+".join(map(str, sizes)) if min(sizes) > 0 else ""


def fsdp_option(stated: Mapping[str, Stated], prefix: str, name: str) -> str:
    """Returns the name of an option of FSDP as a file has it, with `fsdp_` before it or without; "" without it."""
    return next((key for key in (f"{prefix}fsdp_{name}", f"{prefix}{name}") if key in stated), "")


def set_fsdp(fields: Fields, prefix: str, version: int) -> None:
    """Sets the layout to FSDP as the options under `prefix` configure it: accelerate's, which Axolotl takes too, with
    `fsdp_` before them or without."""
    option = functools.partial(fsdp_option, fields.stated, prefix)
    strategy, reshard = option("sharding_strategy"), option("reshard_after_forward")
    words = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
    given = fields.take(strategy, str, "FULL_SHARD") if strategy else "FULL_SHARD"
    word = words.get(given, given).lower().lstrip("_")
    words_of = {"": None, "true": False, "full_shard": False, "false": True, "shard_grad_op": True, "no_shard": True}
    keeps = words_of[fields.choice(reshard, "", words_of, "layout.reshard") if reshard else ""]
    stated = [name for name in (strategy, reshard) if name]
    if word not in words.values():
        fields.unknown_value(strategy, [each.upper() for each in words.values()], "layout.zero")
    if word == "no_shard":
        fields.set("layout.dp_replicate", -1, stated)
    else:
        if "layout.dp_shard" not in fields.settings:
            how = "one replica per node is not known without devices_per_node" if word.startswith("hybrid") else ""
            fields.set("layout.dp_shard", -1, stated, how)
        fields.set("layout.zero", 3, stated)
        grad_op = word.endswith(("grad_op", "zero2"))
        if strategy and keeps not in (None, grad_op):
            fields.refuse(reshard, f"{strategy} {given} says otherwise: keep one of them", "layout.reshard")
        fields.set("layout.reshard", not (grad_op if keeps is None else keeps), stated)
        if word.startswith("hybrid") and strategy and "layout.dp_replicate" not in fields.settings:
            why = "replicas of a group that shards inside a node: set dp_replicate and dp_shard"
            fields.unknown.append(Leftover(strategy, given, why, path="layout.dp_replicate"))
    if (offload := option("offload_params")) and fields.on(offload):
        fields.set("layout.offload", "optimizer+parameters", offload)
    if (again := option("activation_checkpointing")) and fields.on(again):
        fields.set("layout.recompute", "full", again)
    fields.framework = "torchtitan" if version == 2 else "fsdp1"


def included(source: Source, stated: Sequence[Stated], name: str) -> list[Stated]:
    """Returns the values of a file with those of the DeepSpeed file that `name` states the path of; its own come first.
    A path that leads nowhere becomes Unresolved."""
    found = next((each for each in stated if each.name == name and isinstance(each.value, str) and each.value), None)
    if found is None:
        return [*stated]
    folders = [source.path.parent, *source.path.resolve().parent.parents]
    path = next((each / found.value for each in folders if (each / found.value).is_file()), None)
    if path is None or path.resolve() == source.path.resolve():
        why = "it is this file itself" if path else "there is no such file beside this one, or in a folder above it"
        return [replace(each, value=Unresolved(found.value, why)) if each is found else each for each in stated]
    try:
        inner = deepspeed_values(Source(path, read_text(path, MOST_BYTES)))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from None
    own = {each.name: each for each in stated}
    if wrong := [each for each in inner if each.value not in (None, own.get(each.name, each).value)]:
        both = (
            f"{path}:{each.line} {each.name} {each.value}: {source.path} has {own[each.name].value}" for each in wrong
        )
        raise JobError([f"{each}; transformers refuses such a pair" for each in both])
    return [*stated, *(replace(each, path=path) for each in inner if each.name not in own)]


def deepspeed_values(source: Source) -> list[Stated]:
    """Returns the values of a DeepSpeed file. Those that the Trainer fills in, "auto", are None."""
    return [replace(each, value=None) if each.value == AUTO else each for each in yaml_values(source)]


_NAMES = (
    "q_proj=wq k_proj=wk v_proj=wv o_proj=wo gate_proj=gate up_proj=up down_proj=down "
    "linear_qkv=wq+wk+wv linear_proj=wo linear_fc1=gate+up linear_fc2=down linear_q=wq linear_kv=wk+wv"
)
_MATRICES = {word.partition("=")[0]: word.partition("=")[2].split("+") for word in _NAMES.split()}
"""Hugging Face's and Megatron Core's names of matrices, and ours."""


def lora_targets(fields: Fields, name: str, targets: object, *, everything: bool) -> None:
    """Sets the matrices that have adapters to those of a list of names of modules, or all of them."""
    several = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    short = [str(each).lstrip("*").rpartition(".")[2] for each in several]
    ours = list(dict.fromkeys(each for theirs in short for each in _MATRICES.get(theirs, ())))
    whole = everything or any(str(each) in ("all-linear", "*", "*_proj") for each in several)
    if whole or len(ours) == 7 or not ours:
        how = "" if whole or ours else "these names are not known one by one"
        fields.set("model.lora.targets", "all", name, how)
    else:
        rest = [each for each in short if each not in _MATRICES]
        fields.set("model.lora.targets", ",".join(ours), name, f"without {', '.join(rest)}" if rest else "")
