"""Reads a config.json as a ModelConfig, and writes one from a ModelConfig."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any, TypeVar

from phalanx import bounded
from phalanx.config.hugging_face import families
from phalanx.config.hugging_face.families import HARMLESS, READ, REFUSED, TRAINED, ConfigFamily
from phalanx.config.hugging_face.terms import (
    ConfigReader,
    Fields,
    refuse_unknown,
    shown,
    value_of,
    window_rule,
    written,
)
from phalanx.config.model import (
    MLA,
    DeltaNet,
    Mamba,
    ModelConfig,
    MoE,
    QueryGrowth,
    RopeScaling,
    SparseAttention,
    WideHeads,
)
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean, nearest

FIELD = "model.ignore_config"
Described = TypeVar("Described")


def read_without(
    values: Mapping[str, Any], ignored: Sequence[str], read: Callable[[Mapping[str, Any]], Described]
) -> Described:
    """Returns what `read` makes of a configuration without some of its fields, named as in "rope_scaling.factor".

    Raises JobError for names that it does not have, or that it does not refuse; and for what is still refused."""
    names = dict.fromkeys(ignored)
    problems = []
    for name in names:
        if not _removed(copy.deepcopy(dict(values)), name):
            problems.append(f"{FIELD} names {name}, which the file does not have{did_you_mean(name, _names(values))}")
        elif name not in _refused(_without(values, names.keys() - {name}), read):
            problems.append(f"{FIELD} names {name}, which is not refused: remove it from the list")
    if problems:
        raise JobError(problems)
    return read(_without(values, names))


def _without(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    left = copy.deepcopy(dict(values))
    for name in names:
        _removed(left, name)
    return left


def _refused(values: Mapping[str, Any], read: Callable[[Mapping[str, Any]], object]) -> set[str]:
    """Returns the names of the fields that are refused."""
    try:
        read(values)
    except JobError as error:
        return {problem.partition(" ")[0] for problem in error.problems}
    return set()


def _removed(values: dict[str, Any], name: str) -> bool:
    """Removes a field; returns whether it was there."""
    *outer, last = name.split(".")
    for each in outer:
        values = values.get(each, {})
        if not isinstance(values, dict):
            return False
    return values.pop(last, None) is not None


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


_TOKEN = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"(?P<colon>\s*:)?|[{}\n]')


def lines_of(text: str) -> dict[str, int]:
    """Returns the line of every field of valid JSON, from 1, by dotted path such as "rope_scaling.factor"."""
    lines: dict[str, int] = {}
    around: list[str] = []
    line, field = 1, ""
    for token in _TOKEN.finditer(text):
        if token["colon"] is not None:
            field = token["text"]
            lines[".".join((*around, field))] = line
        elif token[0] == "{":
            around += [field] if lines else []
        elif token[0] == "}":
            del around[-1:]
        line += token[0].count("\n")
    return lines


MOST_BYTES = 4 * 2**20
"""Most bytes of a config.json; published ones have a few kB, with labels of classes some more."""
_TOP = frozenset({"text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index"}) | {
    *("image_token_index", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index"),
    *("eoi_token_id", "vision_soft_tokens_per_image"),
}
_QUANTISED = "quantization_config"
_DROPOUT = (
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob"),
    *("embedding_dropout", "attn_dropout", "residual_dropout", "attention_probs_dropout_prob"),
)
_TRAINING_ONLY = ("preset", "from_", "ignore_config", "seq_len", "dropout", "init_std", "lora")
_PARTS: dict[str, type[Any]] = {
    "query_growth": QueryGrowth,
    "moe": MoE,
    "mla": MLA,
    "sparse": SparseAttention,
    "delta": DeltaNet,
    "mamba": Mamba,
    "wide": WideHeads,
}
"""The parts of a model with fields of their own."""
_MOE_TRAINING_ONLY = ("aux_loss", "z_loss", "bias_rate", "capacity")


@dataclass(frozen=True)
class HuggingFaceModel:
    """The model that a config.json describes."""

    family: ConfigFamily
    model: ModelConfig
    notes: tuple[str, ...] = ()
    """Facts about the model that its shape does not express."""
    in_images: bool = False
    """The language model is a part of a model that reads images."""
    quantised: bool = False
    """The weights are quantised: the shape is that of the model, but its weights cannot be read as they are."""

    def with_modules(self, names: Iterable[str]) -> HuggingFaceModel:
        """Returns it with the modules for further tokens whose tensors are among `names`, those of its files."""
        family, n = self.family, self.model.n_layers
        found, modules = set(names), 0
        while family.mtp_join and family.mtp_join.format(n + modules) in found and modules < family.most_modules:
            modules += 1
        if not modules:
            return self
        notes = tuple(note for note in self.notes if note != families.NO_MTP)
        return replace(self, model=replace(self.model, n_layers=n + modules, mtp=modules), notes=notes)

    @property
    def note(self) -> str:
        """All notes in one text."""
        return "; ".join((*self.notes, *(("its weights are quantised",) if self.quantised else ())))


def read_file(path: Path, ignored: Sequence[str] = ()) -> HuggingFaceModel:
    """Returns the model of a config.json, as `read` does. Raises JobError with every problem, each with file, line and
    field."""
    try:
        text = bounded.read_text(path, MOST_BYTES)
        values = bounded.parse_json(text)
    except FileNotFoundError:
        raise JobError(f"{path}: no such file; a Hugging Face folder has a config.json") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise JobError(f"{path}: no JSON: {error}") from None
    try:
        return read(values, ignored)
    except JobError as error:
        lines = lines_of(text)
        places = [lines.get(problem.partition(" ")[0]) for problem in error.problems]
        raise JobError(
            [
                f"{path}:{line}: {problem}" if line else f"{path}: {problem}"
                for line, problem in zip(places, error.problems, strict=True)
            ]
        ) from None


def read(values: Any, ignored: Sequence[str] = ()) -> HuggingFaceModel:
    """Returns the model of a configuration. Raises JobError with every problem.

    Args:
        values: the content of a config.json.
        ignored: dotted names of fields that are read as if they were absent. Each must be one that is refused."""
    if not isinstance(values, dict):
        raise JobError(f"expected an object with model_type, found {bounded.kind_of(values)}")
    if not ignored:
        return _read(values)
    described = read_without(values, ignored, _read)
    said = tuple(f"{name} is read as if it were absent (model.ignore_config)" for name in ignored)
    return replace(described, notes=(*described.notes, *said))


def _read(values: Mapping[str, Any]) -> HuggingFaceModel:
    family = _family(values)
    source = ConfigReader(values)
    classes, rewards = values.get("architectures"), False
    for name in classes if isinstance(classes, list) else ():
        labels = values.get("id2label", values.get("num_labels", 2))
        rewards |= (
            isinstance(name, str)
            and name.endswith("ForSequenceClassification")
            and (len(labels) if isinstance(labels, dict) else labels) == 1
        )
        if not isinstance(name, str):
            continue
        if not rewards and re.search("For(?!(CausalLM|ConditionalGeneration)$)[A-Z]|RewardModel", name):
            source.problem("architectures", f"names {shown(name)}, whose head is not that of a language model")
        elif _stem(name).removesuffix("text") != _stem(family.architecture):
            source.problem(
                "architectures",
                f"names {shown(name)}, and model_type {values['model_type']} is {family.architecture}: programs differ "
                f"in which of the two they take; {FIELD}=[architectures] takes the model_type",
            )
    outer, harmless = None, HARMLESS | family.harmless
    quantised = source.holds(_QUANTISED)
    source.seen.add(_QUANTISED)
    if family.inside and values.get("model_type") == family.inside_of:
        outer = source
        source = outer.inside(family.inside)
        if source.holds("model_type") and READ.get(str(source.raw("model_type"))) is not family:
            source.problem("model_type", f"is {shown(source.raw('model_type'))}, supported: {family.model_type}")
    ours: Fields = dict(family.kind)
    for term in family.terms:
        term.read(source, ours)
    if outer and outer.holds("tie_word_embeddings"):
        tied = outer.take("tie_word_embeddings", bool, False)
        if source.holds("tie_word_embeddings") and ours["tied"] != tied:
            outer.problem(
                "tie_word_embeddings",
                f"is {shown(tied)}, and that of {family.inside} {shown(ours['tied'])}: programs differ in which of the "
                f"two they take; {FIELD}=[tie_word_embeddings] takes the latter",
            )
        ours["tied"] = tied
    ours["init_std"] = source.take("initializer_range", float, ModelConfig.init_std)
    if ours["init_std"] < 0:
        source.problem("initializer_range", f"is {ours['init_std']:g}, expected at least 0")
    if rewards:
        ours |= {"reward": True, "tied": False}
    model = _model(ours)
    for part in [source, *([outer] if outer else [])]:
        without_effect = harmless if part is source else HARMLESS | _TOP
        if part.states("use_sliding_window", False):
            without_effect |= {"sliding_window", "max_window_layers"}
        _refuse_other_values(part, without_effect, family, model)
        refuse_unknown(part, without_effect, f" for model_type {family.model_type}")
    if source.problems:
        raise JobError(source.problems)
    notes = (*family.notes, *source.notes, *_not_taken(source))
    if outer:
        notes += ("the language model, without the encoder of images",)
    return HuggingFaceModel(family, model, notes, outer is not None, quantised)


WITHOUT_REWARD = ("olmoe", "granite", "granitemoehybrid", "minimax_m2", "glm4_moe", "solar_open", "glm_moe_dsa")
"""Model types whose models transformers has not for the classification of sequences."""


def _stem(architecture: str) -> str:
    """Returns the part of a class's name that says the kind: llama of LlamaForCausalLM and LlamaModel."""
    return re.split("For[A-Z]|LMHead|Model$", architecture)[0].casefold()


def _not_taken(source: ConfigReader) -> Iterator[str]:
    """Yields what transformers would do with the model, and this program does not."""
    rates = [f"{name} {rate:g}" for name in _DROPOUT if isinstance(rate := source.raw(name), int | float) and rate > 0]
    if rates:
        yield f"{', '.join(rates)}: not taken; training has no dropout unless model.dropout is set"
    if source.raw("auto_map"):
        yield "auto_map: the folder's own code is not run; the model is that of its model_type"


def write(model: ModelConfig, model_type: str = "", *, first: str = "") -> tuple[ConfigFamily, Fields]:
    """Returns the family that says all of a model, and its config.json without types of numbers and tokens: that of
    `model_type` if given, else the first, of which that of model type `first` is tried before the others.

    Raises JobError if no family does: it names the fields that the nearest one cannot express."""
    nearest: tuple[bool, list[str], str] | None = None
    main, modules = model.main, f"mtp {model.mtp} would be 0: it has no names for modules for further tokens"
    every = sorted(families.TRAINED_FAMILIES, key=lambda family: family.model_type != first)
    for family in (TRAINED[model_type],) if model_type else every:
        values = {"architectures": [family.architecture], "model_type": family.model_type}
        values |= written(family.terms, main)
        if model.reward:
            if family.model_type in WITHOUT_REWARD:
                continue
            stem = re.split("For[A-Z]|LMHead|Model$", family.architecture)[0]
            stem += "Text" if family.model_type == "gemma3_text" else ""
            labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "tie_word_embeddings": False}
            values |= {"architectures": [f"{stem}ForSequenceClassification"], **labels}
        refused = False
        try:
            wrong = differences(read(json.loads(json.dumps(values))).model, main)
        except JobError as error:  # its first problems only, which say less than how shapes differ
            wrong, refused = error.problems, True
        if model.mtp and not family.mtp_field:
            wrong.append(modules)
        if not wrong:
            return family, values | ({family.mtp_field: model.mtp} if model.mtp else {})
        if nearest is None or (refused, len(wrong)) < (nearest[0], len(nearest[1])):
            nearest = refused, wrong, family.model_type
    assert nearest
    raise JobError(f"no model_type of transformers is this model; {nearest[2]} comes nearest: {'; '.join(nearest[1])}")


def differences(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """Returns how a model would differ as theirs in what a forward pass computes, a text per field."""
    return [f"{path} {shown(mine)} would be {shown(other)}" for path, other, mine in differing(theirs, ours)]


def differing(first: ModelConfig, second: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields every field in which two shapes differ in what a forward pass computes, with both values."""
    first, second = plain(first), plain(second)
    for path in _paths(first):
        a, b = value_of(first, path), value_of(second, path)
        same = isclose(a, b, rel_tol=1e-12) if isinstance(a, float) and isinstance(b, float) else a == b
        if not same:
            yield path, a, b


def plain(model: ModelConfig) -> ModelConfig:
    """Returns the shape with every default written out, and without what only training uses."""
    wide, kinds = model.wide, model.attention
    if (wide.head_dim or model.shared_keys) and not (kinds or model.mla.kv_rank):
        kinds = ",".join(model.heads_by_layer)
    if wide.head_dim and set(kinds.split(",")) == {"wide_heads"}:
        own = wide.n_kv_heads or model.kv_heads
        model, kinds = replace(model, head_dim=wide.head_dim, n_kv_heads=own, attention=""), ""
    has_wide = "wide_heads" in kinds
    default, moe = ModelConfig(), model.moe
    if moe.n_experts:
        moe = replace(moe, d_ff=model.expert_ff_size, **{name: getattr(MoE(), name) for name in _MOE_TRAINING_ONLY})
    only_experts = model.moe.n_experts > 0 and not moe.n_dense_layers and "dense" not in model.feed_forward.split(",")
    windows = [model.window_of(layer) for layer in range(model.n_layers)]
    every, pattern = window_rule([each > 0 for each in windows])
    rope = model.positions == "rope"
    mla = replace(model.mla, norm_eps=model.mla.norm_eps or model.norm_eps) if model.mla.kv_rank else MLA()
    return replace(
        model,
        n_kv_heads=model.n_heads if mla.kv_rank else model.kv_heads,
        head_dim=0 if mla.kv_rank else model.head_size,
        d_ff=0 if only_experts else model.ff_size,
        wide=replace(wide, n_kv_heads=wide.n_kv_heads or model.kv_heads) if has_wide else WideHeads(),
        attention=_of_layers(model, kinds, "heads" if not mla.kv_rank else "latent"),
        feed_forward=_of_layers(model, model.feed_forward, "experts" if moe.n_experts else "dense"),
        moe=replace(moe, shared_gate=moe.shared_gate and moe.n_shared > 0) if moe.n_experts else MoE(),
        mla=mla,
        # Whether it is trained, and how, is none of the file's.
        sparse=replace(model.sparse, dense_warmup=False, index_loss=default.sparse.index_loss)
        if model.sparse.top_k
        else default.sparse,
        double_mlp=model.double_mlp and model.shared_keys > 0,
        delta=model.delta if "delta" in model.attention.split(",") else DeltaNet(),
        attention_scale=0.0
        if isclose(model.attention_scale, model.head_size**-0.5, rel_tol=1e-12)
        else model.attention_scale,
        window=max(windows),
        window_kind=model.window_kind if any(windows) else "sliding",
        full_every=every,
        window_pattern=pattern,
        # With nope_every beyond the last layer no queries grow.
        query_growth=model.query_growth
        if model.query_growth.rate and model.nope_every <= model.n_layers
        else QueryGrowth(),
        nope_every=model.nope_every if rope and 0 < model.nope_every <= model.n_layers else 0,
        window_rope_theta=model.window_rope_theta if any(windows) else 0.0,
        qkv_bias=model.bias or model.qkv_bias,
        rope_theta=model.rope_theta if rope else default.rope_theta,
        rotary_fraction=model.rotary_fraction if rope else 1.0,
        rotary_pairs=model.rotary_pairs if rope and not (model.window_rope_theta and all(windows)) else 1.0,
        rope_scaling=_plain_scaling(model.rope_scaling) if rope else RopeScaling(),
        **{
            name: getattr(default, name) for name in _TRAINING_ONLY if name != "seq_len" or model.positions != "learned"
        },
    )


def _of_layers(model: ModelConfig, kinds: str, usual: str) -> str:
    """Returns the kind of each layer; nothing where all have the `usual` one, which other fields say."""
    names = kinds.split(",") if kinds and kinds != "sparse" else [usual]
    every = [model.kind_of(names, layer) for layer in range(model.n_layers)]
    return "" if set(every) == {usual} else ",".join(every)


def _plain_scaling(scaling: RopeScaling) -> RopeScaling:
    """Returns a stretching without the values that its kind does not use."""
    default = RopeScaling()
    used = {
        "linear": {"kind", "factor"},
        "llama3": {"kind", "factor", "low_freq_factor", "high_freq_factor", "original_seq_len"},
        "longrope": {"kind", "factor", "original_seq_len", "magnitude", "short", "long"},
        "yarn": {"kind", "factor", "original_seq_len", "beta_fast", "beta_slow", "truncate", "magnitude"},
    }[scaling.kind]
    if scaling.factor == 1:
        return default
    return replace(default, **{name: getattr(scaling, name) for name in used})


def _paths(value: Any, prefix: str = "") -> list[str]:
    found: list[str] = []
    for field in fields(value):
        inner = getattr(value, field.name)
        path = f"{prefix}{field.name}"
        found += _paths(inner, f"{path}.") if is_dataclass(inner) else [path]
    return found


def model_type_of(values: Mapping[str, Any]) -> str:
    """Returns the model type of the language model that a config.json describes; nothing if none is read."""
    with suppress(JobError):
        return _family(values).model_type
    return ""


def _family(values: Mapping[str, Any]) -> ConfigFamily:
    name = values.get("model_type")
    if isinstance(name, str) and name in READ:
        inner = values.get(READ[name].inside) if name == READ[name].inside_of else None
        own = READ.get(str(inner.get("model_type"))) if isinstance(inner, dict) else None
        return own if own and own.inside_of == name else READ[name]
    known = ", ".join(READ)
    if not isinstance(name, str):
        raise JobError(f"model_type is {'missing' if name is None else shown(name)} (supported: {known})")
    why = REFUSED.get(name)
    end = f": {why}" if why else _slip(name)
    raise JobError(f"model_type {shown(name)} is not supported{end} (supported: {known})")


def _slip(name: str) -> str:
    meant = nearest(name, READ)
    return f"; did you mean {meant}?" if meant else ""


def _refuse_other_values(
    source: ConfigReader, harmless: frozenset[str], family: ConfigFamily, model: ModelConfig
) -> None:
    """Notes fields of other kinds whose value is not that of this one. With that value they change nothing."""
    for name in [name for name in source.left() if name in families.OWN_VALUES and name not in harmless]:
        own, value = families.OWN_VALUES[name](model), source.raw(name)
        if value != own or isinstance(value, bool) != isinstance(own, bool):
            source.problem(name, f"is {shown(value)}, supported for model_type {family.model_type}: {shown(own)}")


def _model(ours: Fields) -> ModelConfig:
    """Returns the shape of dotted fields."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    top: Fields = {}
    for path, value in ours.items():
        section, _, name = path.rpartition(".")
        (parts[section] if section else top)[name] = value
    return ModelConfig(**top, **{name: _PARTS[name](**parts[name]) for name in _PARTS})
