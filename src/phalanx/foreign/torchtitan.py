"""torchtitan's job files, in TOML or as the JSON that its configurations in Python are saved as."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.config.layout import Layout
from phalanx.config.values import yaml_data
from phalanx.errors import JobError
from phalanx.foreign import shared
from phalanx.foreign.frame import Fields, ForeignFormat, ForeignJob, Source, Stated, once, yaml_values
from phalanx.nearest import did_you_mean

_SECTIONS = {"job", "model", "training", "parallelism", "optimizer", "lr_scheduler", "activation_checkpoint"}
_LLAMA = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False, "tied": False}
"""Fields of every shape in `flavors` that does not say otherwise."""
_P, _T, _AC, _LR = "parallelism.", "training.", "activation_checkpoint.", "lr_scheduler."
_QUANTIZE = ("quantize.linear.float8.", "float8.")


def recognises(source: Source) -> bool:
    """Returns whether a file has torchtitan's sections."""
    if source.text.lstrip().startswith("{"):
        return {"training", "parallelism"} <= source.keys and bool({"model_spec", "job"} & source.keys)
    headers = re.findall(r"(?m)^\s*\[([a-z_0-9]+)[\].]", source.text)
    return len(_SECTIONS & {*headers}) > 1


def parse(source: Source) -> Sequence[Stated]:
    """Returns the values of a job file."""
    if source.text.lstrip().startswith("{"):
        return yaml_values(source)
    try:
        content = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source.path}: not valid TOML: {error}") from None
    lines = _lines(source)
    found = list[Stated]()
    for old, value in _leaves(content, ""):
        name = _WARMUP.sub("lr_scheduler.", _DEGREE.sub(_P, old))
        found.append(Stated(name, value, *lines.get(old, (0, "")), label=old if old != name else ""))
    return once(source, found)


_DEGREE = re.compile(r"^(?:training|experimental)\.(?=[a-z]+_parallel_|enable_async_tensor_parallel)")
_WARMUP = re.compile(r"^training\.(?=warmup_steps)")
"""Sections of names before v0.1.0."""


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_PAIR = re.compile(r"""\s*([A-Za-z0-9_.-]+)\s*=\s*("[^"]*"|'[^']*'|[^#]*?)\s*(#.*)?$""")


def _lines(source: Source) -> dict[str, tuple[int, str]]:
    """Returns the line and the text of values of TOML by their names."""
    found = dict[str, tuple[int, str]]()
    section = ""
    for number, line in enumerate(source.lines, 1):
        if header := _HEADER.match(line):
            section = f"{header[1]}."
        elif pair := _PAIR.match(line):
            found.setdefault(f"{section}{pair[1]}", (number, pair[2]))
    return found


@functools.cache
def _flavors() -> dict[str, dict[str, Any]]:
    return yaml_data(__file__, "torchtitan.yaml")["flavors"]


def finish(fields: Fields) -> None:
    """Sets what depends on several names."""
    saved = "model_spec.name" in fields.stated
    fields.version = "0.3" if saved else "0.1" if fields.has("checkpoint.enable_checkpoint") else ""
    _model(fields, "model_spec." if saved else "model.")
    _optimizer(fields)
    _degrees(fields)
    _batch(fields)
    _pipeline(fields)
    _recompute(fields)
    fields.framework = _compiled(fields)
    _precision(fields)


def _model(fields: Fields, section: str) -> None:
    names = [f"{section}name", f"{section}flavor"]
    name, flavor = fields.take(names[0], str, "llama3"), fields.take(names[1], str, "debugmodel")
    if "hf_transformers.model" in fields.stated:
        shared.hub_model(fields, "hf_transformers.model", fields.take("hf_transformers.model", str, ""))
        return
    fields.model = f"{name} {flavor}"
    known = _flavors().get(name)
    plain = re.sub("_(flex|varlen)(_attn)?$", "", flavor)
    if known is None:
        if names[0] in fields.stated:
            why = f"no model of torchtitan with this name has a shape here{did_you_mean(name, _flavors())}"
            shared.unknown_model(fields, names[0], f"{why}; known: {', '.join(_flavors())}")
    elif plain not in known:
        if names[1] in fields.stated:
            shared.unknown_model(
                fields, names[1], f"no flavor of {name} here{did_you_mean(plain, known)}; known: {', '.join(known)}"
            )
    elif isinstance(shape := known[plain], str):
        fields.set("model.preset", shape, names)
    else:
        for key, value in (_LLAMA | shape).items():
            fields.set(f"model.{key}", value, names)
    if plain != flavor:
        fields.leave(names[1], "attention within documents is priced as attention to the whole sequence")


def _optimizer(fields: Fields) -> None:
    names, usual = ["optimizer.beta1", "optimizer.beta2"], (0.9, 0.95)
    betas = [fields.take(name, float, default) for name, default in zip(names, usual, strict=True)]
    if any(name in fields.stated for name in names):
        fields.set("optimizer.betas", betas, names)
    _default(fields, "optimizer.lr", 8e-4)
    ratio, kind = f"{_LR}decay_ratio", f"{_LR}decay_type"
    word = fields.choice(kind, "linear", ("linear", "cosine", "sqrt"), "optimizer.schedule")
    share = fields.take(ratio, float, 0.0)
    if ratio not in fields.stated or fields.stated[ratio].value is None:
        how = "not its sqrt form" if word == "sqrt" else ""
        fields.set("optimizer.schedule", "cosine" if word == "cosine" else "linear", kind, how)
    elif share == 0:
        fields.set("optimizer.schedule", "constant", [ratio, kind])
    else:
        fields.set("optimizer.schedule", "wsd", [ratio, kind], "" if word == "linear" else f"not its {word} form")
        fields.set("optimizer.decay_fraction", share, ratio)
    _default(fields, "optimizer.warmup_steps", 200)
    _default(fields, "optimizer.min_lr_ratio", 0.0)
    _default(fields, "train.steps", 10_000)
    steps = shared.whole(fields, "optimizer.decay_steps", shared.whole(fields, "train.steps"))
    if shared.whole(fields, "optimizer.warmup_steps") > steps:
        fields.set("optimizer.warmup_steps", steps, f"{_LR}warmup_steps", "no more than there are steps")


def _default(fields: Fields, path: str, value: Any) -> None:
    """Sets a field that the file does not state to torchtitan's default."""
    if path not in fields.settings:
        fields.set(path, value, ())


def _degrees(fields: Fields) -> None:
    tp = fields.take(f"{_P}tensor_parallel_degree", int, 1)
    sequence = fields.take(f"{_P}enable_sequence_parallel", bool, True)
    fields.set("layout.tp", tp, f"{_P}tensor_parallel_degree")
    if tp > 1:
        fields.set("layout.sp", sequence, [f"{_P}tensor_parallel_degree", f"{_P}enable_sequence_parallel"])
    _default(fields, "layout.dp_shard", -1)
    ep, etp = f"{_P}expert_parallel_degree", f"{_P}expert_tensor_parallel_degree"
    experts, inner = fields.take(ep, int, 1), fields.take(etp, int, 1)
    if experts > 1:
        # Without expert tensor parallelism its expert ranks are those of dp, cp and tp together.
        folds = inner == 1 < tp and experts % tp == 0
        how = (
            f"its {tp} tensor-parallel ranks hold different experts, here parts of one"
            if folds and not sequence
            else ""
        )
        fields.set("layout.ep", experts // tp if how else experts, [ep, etp], how)
        if folds and sequence:
            fields.set("layout.etp", 1, [etp])
    known = ("standard", "deepep", "hybridep")
    backend = fields.choice(f"{_P}expert_parallel_comm_backend", "standard", known)
    fields.recipe |= {"dispatcher": backend} if backend in ("deepep", "hybridep") else {}
    policy = f"{_P}fsdp_reshard_after_forward"
    word = fields.take(policy, str, "default")
    pp = shared.whole(fields, "layout.pp")
    if word not in ("default", "always", "never"):
        fields.unknown_value(policy, ["default", "always", "never"], "layout.reshard")
    else:
        fields.set("layout.reshard", word == "always" or (word == "default" and pp == 1), policy)


def _batch(fields: Fields) -> None:
    """Sets micro-batch and batch: torchtitan's local batch is that of one forward pass, or in a pipeline of as many
    micro-batches as it holds."""
    pipelined = shared.whole(fields, "layout.pp") > 1
    size, several, some = (
        f"{_P}{name}"
        for name in ("pipeline_parallel_microbatch_size", "num_pp_microbatches", "pipeline_parallel_microbatches")
    )
    tokens = f"{_T}num_tokens_per_microbatch_per_dp_rank"
    if tokens in fields.stated or "model_spec.name" in fields.stated:
        step, context = f"{_T}num_tokens_per_train_step", f"{_T}max_context_length"
        length = max(1, fields.take(context, int, 2048))
        held, batch = fields.take(tokens, int, 16_384), fields.take(step, int, -1)
        count = fields.take(several, int, 1)
        fields.set("model.seq_len", length, context)
        if held % length or (batch > 0 and batch % length):
            text = f"{held} tokens are no whole number of sequences of {length}"
            fields.problems.append(f"{fields.origin(tokens)}: {text}")
            return
        fields.set("layout.micro_batch", held // length, [tokens, context])
        if batch > 0:
            fields.set("train.global_batch", batch // length, [step, context])
        else:
            fields.set("layout.accumulation", count if pipelined else 1, several)
        return
    local_name = f"{_T}batch_size" if f"{_T}batch_size" in fields.stated else f"{_T}local_batch_size"
    local, batch = fields.take(local_name, int, 8), fields.take(f"{_T}global_batch_size", int, -1)
    degree = fields.stated.get(f"{_P}pipeline_parallel_degree")
    old = degree is not None and degree.label.startswith("experimental.")  # as many micro-batches as stages
    count = fields.take(some, int, shared.whole(fields, "layout.pp") if old else 0)
    micro = fields.take(size, int, local // count if count else 1)
    if not pipelined:
        micro = local
    if micro < 1 or local % micro:
        fields.no_multiple(local_name, local, micro)
        return
    fields.set("layout.micro_batch", micro, [local_name, size] if pipelined else local_name)
    if batch > 0:
        how = "its gradient accumulation empties the pipeline each time" if pipelined else ""
        fields.set("train.global_batch", batch, f"{_T}global_batch_size", how)
    else:
        fields.set("layout.accumulation", local // micro, [local_name, size])
    _default(fields, "model.seq_len", 2048)


def _pipeline(fields: Fields) -> None:
    per, name = f"{_P}pipeline_parallel_layers_per_stage", f"{_P}pipeline_parallel_schedule"
    ends = [f"{_P}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    first, last = (fields.take(end, int, 1) for end in ends)
    each = fields.take(per, int, 0)
    pp = shared.whole(fields, "layout.pp")
    if pp < 2:
        fields.take(name, str, "")
        return
    word = shared.schedule_of(fields, name)
    layers = shared.whole(fields, "model.n_layers", 0)
    chunks = 1 if word in (*shared.ONE_STAGE, "") else 2
    if each and layers:
        chunks = max(1, -(-(layers + first + last) // each) // pp)
    if chunks > 1:
        fields.set("layout.pp_chunks", chunks, [per, name])
    cut = shared.cut_of(layers, pp * chunks, first, last) if layers else ""
    if cut and word in (*shared.ONE_STAGE, "interleaved_1f1b", "looped_bfs"):
        fields.set("layout.pp_cut", cut, ends)


def _recompute(fields: Fields) -> None:
    mode, option, budget = f"{_AC}mode", f"{_AC}selective_ac_option", f"{_AC}memory_budget"
    mms = [f"{_AC}{name}force_recompute_mm_shapes_by_fqns" for name in ("", "per_op_sac_")]
    saved = "model_spec.name" in fields.stated
    if saved:  # the class is not written; its fields tell it
        keys = {name for name in fields.stated if name.startswith("activation_checkpoint")}
        word = "memory_budget" if budget in keys else "selective" if mms[0] in keys else "full"
        word = "none" if "activation_checkpoint" in keys else word if keys else "selective"
        which = "op"
    else:
        word, which = fields.take(mode, str, "selective"), fields.take(option, str, "2")
    share = fields.take(budget, float, 0.5)
    for name in (*mms, f"{_AC}preserve_rng_state", "activation_checkpoint"):
        fields.take(name, object, None)
    names = [mode, option] if not saved else [mms[0], "activation_checkpoint"]
    layers = shared.whole(fields, "model.n_layers", 0)
    if word == "memory_budget":
        fields.set("layout.recompute", {0.0: "full", 1.0: "none"}.get(share, share), [mode, budget])
    elif word in ("none", "full"):
        fields.set("layout.recompute", word, names[:1] if not saved else names)
    elif word != "selective":
        fields.unknown_value(mode, ["none", "selective", "full", "memory_budget"], "layout.recompute")
    elif which == "op":
        fields.set("layout.recompute", "selective", names, "torchtitan keeps attention and every second product")
    elif not which.isdigit():
        fields.unknown_value(option, ["op", "a number"], "layout.recompute")
    elif int(which) < 2 or not layers:
        fields.set("layout.recompute", "full", names)
    else:
        every = int(which)
        runs = [f"{every - 1}*none", "1*full"] * (layers // every) + [f"{layers % every}*none"] * bool(layers % every)
        fields.set("layout.recompute_cut", "+".join(runs), names, f"every {every}. layer")


def _compiled(fields: Fields) -> str:
    """Sets train.compile, and returns the framework with these kernels."""
    enable = next((n for n in ("compile.enable", "training.compile") if n in fields.stated), "compile.enable")
    on = fields.take(enable, bool, False)
    parts = fields.take("compile.components", list, ["model", "loss"])
    names = [f"{_P}enable_async_tensor_parallel", "compile.enable_async_tensor_parallel"]
    hidden = fields.on(*names)
    fields.set("train.compile", on and "model" in parts, [enable, "compile.components"])
    why = "it is in how torchtitan is predicted" if on else "it has no effect without compile.enable"
    fields.leave(names, why if hidden else "it is off", affects=False)
    if not on or "model" not in parts:
        return "torchtitan"
    return "torchtitan-async" if hidden else "torchtitan-2025" if "loss" in parts else "torchtitan-compile"


def _precision(fields: Fields) -> None:
    dtype, mixed = f"{_T}dtype", f"{_T}mixed_precision_param"
    known = ("float32", "bfloat16")
    stored, computed = (
        fields.choice(n, default, known, "train.precision") for n, default in zip((dtype, mixed), known, strict=True)
    )
    converters = fields.take("model.converters", list, [])
    eight, scaled = (
        [each for each in converters if str(each) in (kind, f"quantize.linear.{kind}")] for kind in ("float8", "mx")
    )
    old = fields.on("float8.enable_float8_linear")
    recipe = next((f"{p}recipe_name" for p in _QUANTIZE if f"{p}recipe_name" in fields.stated), "")
    gathers = [f"{p}enable_fsdp_float8_all_gather" for p in _QUANTIZE]
    gathered = [*filter(fields.on, gathers)]
    word = fields.take(recipe, str, "tensorwise") if recipe else "tensorwise"
    known = ("model.converters", "float8.enable_float8_linear")
    if eight or scaled or old:
        fields.set("train.precision", "fp8", known)
        fields.set("train.fp8_scaling", "mxfp8" if scaled else word.partition("_")[0], [recipe] if recipe else known)
        if gathered:
            fields.set("layout.quantise_weights", "fp8", gathered)
        if rest := [str(each) for each in converters if each not in (*eight, *scaled)]:
            fields.leave("model.converters", f"not followed: {', '.join(rest)}")
    else:
        fields.set("train.precision", "bf16" if "bfloat16" in (stored, computed) else "fp32", [dtype, mixed])
        if converters:
            fields.leave("model.converters", "no counterpart of these converters")
        fields.leave((*gathers, recipe), "it has no effect without float8 in model.converters", affects=False)
    if stored == "bfloat16":
        fields.recipe |= {"parameter_bytes": 2, "state_bytes": 4, "gradient_bytes": 2}
    if "loss.num_chunks" in fields.stated:
        chunks = max(1, fields.take("loss.num_chunks", int, 8))
        tokens = shared.whole(fields, "layout.micro_batch") * shared.whole(fields, "model.seq_len", 0)
        if tokens:
            fields.set("layout.loss_chunk", -(-tokens // chunks), "loss.num_chunks")


def written(theirs: ForeignJob, layout: Layout) -> dict[str, Any]:
    """Returns the values that give a layout."""
    saved = "model_spec.name" in theirs.stated
    micro, several = layout.micro_batch, layout.accumulation
    accumulates = layout.pp == 1 and several > 1
    found: dict[str, Any] = {f"{_P}tensor_parallel_degree": layout.tp, f"{_P}expert_parallel_degree": layout.ep}
    if not saved and layout.ep > 1 and layout.tp > 1:
        found[f"{_P}expert_tensor_parallel_degree"] = 1 if layout.folds else layout.tp
    if layout.tp > 1 and not layout.sp:
        found["?sp=false"] = "torchtitan shards activations by tokens wherever it shards matrices"
    found[f"{_P}fsdp_reshard_after_forward"] = "always" if layout.reshard else "never"
    if layout.pp > 1:
        found[f"{_P}pipeline_parallel_schedule"] = shared.torch_schedule(layout.schedule)
        layers, stages = shared.number_of(theirs.settings, "model.n_layers"), layout.pp * max(1, layout.pp_chunks)
        if layout.pp_chunks > 2 and layers:
            found[f"{_P}pipeline_parallel_layers_per_stage"] = -(-(layers + 2) // stages)
    if saved:
        length = theirs.value(f"{_T}max_context_length", 2048)
        found[f"{_T}num_tokens_per_microbatch_per_dp_rank"] = micro * length
        found[f"{_P}num_pp_microbatches"] = several if layout.pp > 1 else 1
        tokens = micro * several * layout.data_ranks * length
        found[f"{_T}num_tokens_per_train_step"] = tokens if accumulates else None
    else:
        found[f"{_T}local_batch_size"] = micro * several if layout.pp > 1 else micro
        found[f"{_P}pipeline_parallel_microbatch_size"] = micro if layout.pp > 1 else None
        found[f"{_T}global_batch_size"] = micro * several * layout.data_ranks if accumulates else None
    if saved:
        classes = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
        found["?activation_checkpoint"] = classes.get(str(layout.recompute), "")
    elif isinstance(layout.recompute, str) and not layout.recompute_cut:
        found[f"{_AC}mode"] = layout.recompute if layout.recompute in ("none", "full") else "selective"
        found[f"{_AC}selective_ac_option"] = "op" if found[f"{_AC}mode"] == "selective" else None
    elif not layout.recompute_cut:
        found |= {f"{_AC}mode": "memory_budget", f"{_AC}memory_budget": layout.recompute}
    return found


def _new_line(name: str, value: Any) -> str:
    section, _, key = name.rpartition(".")
    return f"[{section}] {key} = {json.dumps(value)}"


FORMAT = ForeignFormat(
    kind="torchtitan",
    table="torchtitan",
    recognises=recognises,
    parse=parse,
    finish=finish,
    written=written,
    covers=shared.TORCH | {"tp", "recompute_cut"},
    new_line=_new_line,
    spelled=json.dumps,
    fixed={"zero": 3, "pp_cut": "", "sp_regather": False},
    keeps=shared.KEPT,
    chooses=shared.RECOMPUTES | shared.PIPELINES,
    marks="TOML with [model], [training] and [parallelism], or JSON with model_spec",
)
