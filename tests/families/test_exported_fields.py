"""Every field of a model, in every family, with odd values: transformers computes the same logits from the config.json
that is written, or the field is refused by name. A field that is absent has the value that transformers takes.

By default fields of different PARTS are compared in one model; each by itself with `make test-families`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from families.counterparts import COUNTERPARTS, small_model
from families.test_transformers import close, weights
from phalanx.check.job import problems_of
from phalanx.config.fields import get
from phalanx.config.hugging_face import config_json
from phalanx.config.job import Job
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.errors import JobError
from phalanx.model.transformer import Transformer
from phalanx.verify.exchange import InFloat64

WHOLE = "PHALANX_FAMILIES" in os.environ
NO_SHAPE = {"preset", "from_", "ignore_config", "lora.rank", "lora.alpha", "lora.targets"}
"""Where a model comes from, and adapters, which an export merges."""
PRICED = ("mtp", "reward", "moe.latent", "mamba.")
"""Begin fields of layers that are predicted and not trained (tests/blocks/test_predicted_kinds.py), and of modules for
further tokens and heads for rewards, whose files have tests of their own."""
SWITCHES = (False, True)
VALUES: dict[str, tuple[Any, ...]] = {
    "n_layers": (1, 5),
    "d_model": (40,),
    "n_heads": (2, 8),
    "n_kv_heads": (0, 1, 4),
    "head_dim": (0, 6, 10),
    "d_ff": (0, 37),
    "vocab_size": (53,),
    "seq_len": (19,),
    "window": (0, 5),
    "full_every": (0, 1, 2, 3),
    "window_pattern": ("", "full,window", "window,full,full"),
    "window_kind": ("sliding", "chunks"),
    "query_growth.rate": (0.0, 0.7),
    "query_growth.length": (5,),
    "query_growth.first": (0, 1),
    "attention": ("heads", "latent", "gated_heads", "delta", "delta,gated_heads"),
    "feed_forward": ("dense", "experts", "dense,experts"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_place": ("before", "after", "both"),
    "parallel_block": SWITCHES,
    "positions": ("learned", "rope", "none"),
    "nope_every": (0, 2, 3),
    "embedding_multiplier": (1.7,),
    "residual_multiplier": (0.3,),
    "logit_divisor": (3.0,),
    "activation": ("gelu", "gelu_tanh", "swiglu", "geglu", "swiglu_clamped"),
    "bias": SWITCHES,
    "qkv_bias": SWITCHES,
    "qk_norm": ("none", "head", "width", "unit"),
    "v_norm": SWITCHES,
    "values_are_keys": SWITCHES,
    "layer_scale": SWITCHES,
    "sinks": SWITCHES,
    "attention_scale": (0.0, 0.3),
    "attention_softcap": (0.0, 1.5),
    "logit_softcap": (0.0, 1.7),
    "scaled_embedding": SWITCHES,
    "tied": SWITCHES,
    "dropout": (0.1,),
    "norm_eps": (0.013,),
    "rope_theta": (777.0,),
    "window_rope_theta": (0.0, 555.0),
    "rotary_fraction": (0.5, 0.75, 1.0),
    "rotary_pairs": (0.5, 1.0),
    "init_std": (0.1,),
    **{
        f"rope_scaling.{name}": values
        for name, values in {
            "kind": ("linear", "llama3", "yarn"),
            "factor": (1.0, 3.0),
            "low_freq_factor": (2.0,),
            "high_freq_factor": (3.0,),
            "original_seq_len": (13,),
            "beta_fast": (5.0,),
            "beta_slow": (0.3,),
            "truncate": SWITCHES,
            "magnitude": (1.3,),
            "short": ((1.0, 1.5, 2.0, 2.5),),
            "long": ((1.0, 1.9, 2.9, 3.9),),
        }.items()
    },
    **{
        f"moe.{name}": values
        for name, values in {
            "n_experts": (0, 4, 6),
            "top_k": (1, 2),
            "d_ff": (0, 20),
            "n_shared": (0, 1, 2),
            "n_dense_layers": (0, 1, 2),
            "router": ("softmax", "sigmoid"),
            "renormalise": SWITCHES,
            "route_scale": (1.9,),
            "n_groups": (1, 2),
            "top_groups": (1, 2),
            "aux_loss": (0.1,),
            "z_loss": (0.1,),
            "router_bias": SWITCHES,
            "shared_gate": SWITCHES,
            "scale_inputs": SWITCHES,
            "own_norms": SWITCHES,
            "bias_balanced": SWITCHES,
            "bias_rate": (0.1,),
            "capacity": (1.5,),
        }.items()
    },
    "delta.n_heads": (0, 2, 6),
    "delta.key_heads": (1, 4),
    "delta.key_head_dim": (4,),
    "delta.head_dim": (7,),
    "delta.conv": (1, 3),
    "shared_keys": (0, 1, 2),
    "double_mlp": SWITCHES,
    "layer_embedding": (0, 6),
    "wide.head_dim": (0, 8, 12),
    "wide.n_kv_heads": (0, 2, 4),
    "mla.q_rank": (0, 5),
    "mla.kv_rank": (0, 6),
    "mla.rope_head_dim": (4,),
    "mla.nope_head_dim": (6,),
    "mla.v_head_dim": (5,),
    "mla.norm_eps": (0.0, 0.02),
    "sparse.top_k": (0, 5),
    "sparse.index_heads": (11,),
    "sparse.index_head_dim": (8,),
    "sparse.dense_warmup": SWITCHES,
    "sparse.index_loss": (0.1,),
}
TOLD = {"moe.capacity", "sparse.dense_warmup"}
"""They belong to training: an export says that transformers drops no tokens, and attends to chosen keys."""

NAMED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (path for path in VALUES if path.startswith("rope_scaling.")),
        ("attention_scale", "rope_scaling.", "query_growth.length", "rotary_pairs"),
    ),
    **dict.fromkeys(("rotary_fraction", "attention_scale"), ("rope_scaling.", "rotary_pairs")),
    **dict.fromkeys(("full_every", "window_pattern"), ("layer_types", "window")),
    "moe.n_experts": ("experts is 0", "intermediate_size"),
    "mla.kv_rank": ("kv_lora_rank is 0",),
    "mla.q_rank": ("q_lora_rank is 0",),
    "n_heads": ("n_kv_heads",),
    "wide.head_dim": ("head_dim",),
    "n_layers": ("moe_layers", "layer_types"),
    "nope_every": ("query_growth.rate",),
    "sparse.top_k": ("index_topk is 0",),
}
"""The fields that a refusal may name for another: one that depends on it, or theirs."""


PARTS = (
    *(
        tuple(names.split())
        for names in (
            "rope rotary nope query window full_every positions attention n_kv n_layers seq_len",
            "n_heads head_dim d_model q v_norm values sinks delta wide mla sparse shared",
            "d_ff activation feed_forward moe double_mlp layer_embedding",
        )
    ),
    ("",),
)
"""How the names of fields begin that may hide each other: those of places, of heads, of feed-forwards, and the rest."""


def with_value(model: ModelConfig, path: str, value: Any) -> ModelConfig:
    part, _, name = path.rpartition(".")
    return replace(model, **{part: replace(getattr(model, part), **{name: value})} if part else {name: value})


def odd(model: ModelConfig, turn: int) -> Iterator[tuple[str, ModelConfig]]:
    """Yields models that differ in one field, by its path, and stretched positions of every kind with it.

    A field has one of its values that this model does not have, another in each `turn`; every one, with
    `make test-families`."""
    for path, values in VALUES.items():
        others = [value for value in values if with_value(model, path, value) != model]
        for value in others if WHOLE or not others else [others[turn % len(others)]]:
            changed = with_value(model, path, value)
            yield path, changed
            if path.startswith("rope_scaling.") or path in ("rotary_fraction", "attention_scale"):
                kinds = ("linear", "llama3", "yarn")
                for kind in kinds if WHOLE else [kinds[turn % len(kinds)]]:
                    scaling = replace(changed.rope_scaling, factor=2.5, original_seq_len=11)
                    yield path, replace(changed, rope_scaling=replace(scaling, kind=kind))


def together(
    small: ModelConfig, fields: Iterable[tuple[str, ModelConfig]], writes: Callable[[ModelConfig], bool]
) -> Iterator[tuple[list[str], ModelConfig]]:
    """Yields models with a field of each part, as many of them as can be written together, and what these are."""
    made = list[tuple[set[int], list[str], ModelConfig]]()
    for path, model in fields:
        part = next(number for number, names in enumerate(PARTS) if path.startswith(names))
        changes = {each: get(model, each) for each in config_json._paths(model)}
        changes = {each: value for each, value in changes.items() if get(small, each) != value}
        for number, (parts, paths, other) in enumerate(made):
            if part in parts or WHOLE or any(get(other, each) != get(small, each) for each in changes):
                continue
            both = other
            for each, value in changes.items():
                both = with_value(both, each, value)
            if writes(both):
                made[number] = ({*parts, part}, [*paths, path], both)
                break
        else:
            made.append(({part}, [path], model))
    for _, paths, model in made:
        yield paths, model


def test_every_field_has_values() -> None:
    trained = {path for path in config_json._paths(ModelConfig()) if not path.startswith(PRICED)}
    assert VALUES.keys() | NO_SHAPE == trained


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_field_is_computed_by_transformers_or_refused_by_name(name: str) -> None:
    counterpart, turn = COUNTERPARTS[name], [*COUNTERPARTS].index(name)
    small, equal = small_model(PRESETS[name], counterpart.small), list[tuple[str, ModelConfig]]()
    for number, (path, model) in enumerate(odd(small, turn)):
        if problems_of(Job(model=model)) or path in TOLD:
            continue
        try:
            config_json.write(model, counterpart.model_type)
        except JobError as error:
            assert any(each in str(error) for each in (path, *NAMED_BY.get(path, ()))), (path, str(error))
            continue
        # A field that this family leaves as it is by default is computed in every fourth family.
        if WHOLE or (turn + number) % 4 == 3 or with_value(small, path, get(ModelConfig(), path)) != small:
            equal.append((path, model))
    assert len(equal) > (30 if WHOLE else 15)

    def writes(model: ModelConfig) -> bool:
        with suppress(JobError):
            return not problems_of(Job(model=model)) and bool(config_json.write(model, counterpart.model_type))
        return False

    for paths, model in together(small, equal, writes):
        compare(counterpart, model, ", ".join(paths))


ROPE = {"rope_theta": 500.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
ROPES: tuple[dict[str, Any], ...] = (
    {},
    ROPE,
    ROPE | {"factor": 2.0},
    ROPE | {"rope_type": "default", "factor": 2.0},
    ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5},
    ROPE | {"rope_type": "linear", "factor": 2.0},
    ROPE | {"type": "linear", "factor": 2.0},
    ROPE | {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    YARN | {"factor": 1.0},
    YARN | {"factor": 1.0, "attention_factor": 1.5},
    YARN | {"attention_factor": 0.7},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"mscale_all_dim": 0.7},
    YARN | {"beta_fast": 0, "beta_slow": 0},
    YARN | {"partial_rotary_factor": 0.5},
)
GROWTH = "llama_4_scaling_beta"
"""A field of positions that is about queries, and that no kind may leave out that has it."""
ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
ELSEWHERE: dict[str, Any] = {
    "rotary_emb_base": 77,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 4,
    "attention_bias": True,
    "mlp_bias": True,
    "use_sliding_window": True,
    "sliding_window": 3,
    "head_dim": 8,
    "sliding_window_pattern": 2,
    "max_window_layers": 1,
    "attn_logit_softcapping": 2.0,
    "use_qk_norm": True,
    "final_logit_softcapping": 2.0,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
    "rope_interleaved": True,
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "layer_norm_eps": 1e-2,
    "rms_norm_eps": 1e-2,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
    "mlp_layer_types": ["sparse"],
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "is_causal": False,
    "pretraining_tp": 2,
}
"""Fields that other kinds read."""
TEXTS = ("relu", "gelu", "silu", "gelu_new", "gelu_pytorch_tanh")


def edited(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a config.json with an odd value in one field, with a field of other kinds, and with other positions."""
    for name, value in values.items():
        others: list[Any] = [None]
        if isinstance(value, bool):
            others.append(not value)
        elif isinstance(value, int | float):
            others += [0 * value, type(value)(value / 2), 2 * value]
        elif isinstance(value, list):
            others += [[], value[::-1]]
        elif isinstance(value, str):
            others += TEXTS
        if name not in ("architectures", "model_type"):
            yield from ((f"{name} {other}", {**values, name: other}) for other in others if other != value)
    yield from ((f"{name} {value}", {**values, name: value}) for name, value in ELSEWHERE.items() if name not in values)
    yield "no layer_types", {name: value for name, value in values.items() if name != "layer_types"}
    plain = {name: value for name, value in values.items() if name not in ROPE_NAMES}
    growth = {name: value for name, value in values.get("rope_parameters", {}).items() if name == GROWTH}
    for rope in (each | growth for each in ROPES):
        older = {name: value for name, value in rope.items() if name != "rope_theta"}
        yield f"rope_parameters {rope}", {**plain, "rope_parameters": rope}
        yield f"rope_scaling {older}", {**plain, "rope_theta": 777.0, "rope_scaling": older}
        yield f"both {older}", {**values, "rope_scaling": older}


@pytest.mark.timeout(1200 if WHOLE else 240)
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_file_that_is_read_is_what_transformers_computes(name: str) -> None:
    """Or it is refused. Every eighth change that is read, in each family others; all with `make test-families`."""
    counterpart, number, equal = COUNTERPARTS[name], [*COUNTERPARTS].index(name), 0
    small = small_model(PRESETS[name], counterpart.small)
    values = config_json.write(small, counterpart.model_type)[1]
    assert compare(counterpart, small, "as it is", values)  # later transformers may refuse
    for what, other in edited(json.loads(json.dumps(values))):
        try:
            model = config_json.read(json.loads(json.dumps(other))).model
        except JobError:
            continue
        if problems_of(Job(model=model)):
            continue
        number += 1
        if WHOLE or number % 8 == 0:
            equal += compare(counterpart, model, what, other)
    assert equal >= (20 if WHOLE else 2)


def compare(counterpart: Any, model: ModelConfig, what: str, values: dict[str, Any] | None = None) -> bool:
    """Compares the logits of both implementations with the same random weights. Returns whether transformers has such a
    model, which it may refuse of the `values` of a config.json."""
    tokens = torch.randint(model.vocab_size, (2, model.seq_len), generator=torch.Generator().manual_seed(1))
    if values:  # an indexer's scores have ties, where rounding decides which keys are chosen
        tokens = tokens[:, : model.sparse.top_k or 64]
    try:
        theirs = counterpart.in_float64(model, values)
        drawn = weights(theirs)
        with InFloat64(), torch.no_grad():
            expected = theirs(input_ids=tokens).logits
    except Exception:
        if values is None:
            raise
        return False
    values = counterpart.take(counterpart.stored(theirs, drawn), model)
    with torch.device("meta"):
        ours = Transformer(model).double()
    ours = ours.to_empty(device="cpu").eval()
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(values[key])
        close(ours(tokens), expected, what)
    return True


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_field_that_is_absent_is_what_transformers_takes(name: str) -> None:
    from huggingface_hub.errors import StrictDataclassClassValidationError
    from transformers import AutoConfig

    counterpart = COUNTERPARTS[name]
    for model in (PRESETS[name], small_model(PRESETS[name], counterpart.small)):
        values = config_json.write(model, counterpart.model_type)[1]
        for key in values.keys() - {"model_type", "architectures"}:
            less = {field: value for field, value in values.items() if field != key}
            try:
                ours = config_json.read(less).model
            except JobError:
                continue
            try:
                filled = json.loads(json.dumps(AutoConfig.for_model(**less).to_dict()))
            except StrictDataclassClassValidationError:  # transformers refuses the file without it
                continue
            assert not config_json.differences(config_json.read(filled).model, ours), key
