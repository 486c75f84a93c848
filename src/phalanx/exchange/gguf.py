"""Reads GGUF files, llama.cpp's format: metadata, and tensors one at a time, dequantised.

A file is magic and version, two counts, the metadata (key, type, value), the tensors' names, shapes, types and offsets,
and their elements (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Header and bounds are read here, since
the `gguf` package trusts every count that a file states; it dequantises the elements.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import open_regular
from phalanx.check.job import problems_of
from phalanx.checkpoint.convert import as_type
from phalanx.checkpoint.manifest import StoredTensor
from phalanx.checkpoint.new_target import target_problems
from phalanx.config.hugging_face import config_json
from phalanx.config.hugging_face.families import BY_TYPE
from phalanx.config.job import Job
from phalanx.config.model import MLA, ModelConfig, MoE, RopeScaling
from phalanx.config.precision import STORED
from phalanx.data.files import Progress, silent
from phalanx.data.token_table import definition_of, settings_of, token_ids_of
from phalanx.data.tokenizer import LibraryTokenizer, Tokenizer
from phalanx.errors import CheckpointError, DamagedCheckpointError, DataError, JobError, NotFoundError
from phalanx.exchange.import_run import Imported, Incoming, first_layers, layer_of, write_import
from phalanx.exchange.links import ABSORBED_KEYS, SAME, Conversion, rotary_rows
from phalanx.model.layers import rotary_frequencies
from phalanx.nearest import did_you_mean, near_file

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 256 * 2**20
"""Most bytes before the tensors. The largest published vocabulary takes 15 MB."""
_MOST_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of values, as `struct` writes them; 8 is a string, 9 an array."""
_F32, _F16 = 0, 1
_PLAIN = {_F32: (1, 4), _F16: (1, 2)}
"""Elements and bytes of a block, of the types that need no package."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file states the reverse."""
    type: int
    """ggml's number of the type."""
    start: int
    """The first byte in the file."""
    nbytes: int


class GgufFile:
    """An open GGUF file. Strings of its metadata are str, numbers int and float, arrays lists.

    Raises NotFoundError if there is no such file; DamagedCheckpointError, naming the file, if it is not GGUF or
    incomplete; CheckpointError for versions and types that are not read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open_regular(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFoundError(f"{path}: there is no such file{near_file(path)}") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DamagedCheckpointError(f"{path} cannot be read: {_reason(error)}") from None
        try:
            self.metadata, self.tensors = _Header(self._bytes).read()
        except (ValueError, struct.error) as error:
            raise DamagedCheckpointError(f"{path} is no whole GGUF file: {error}") from None
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from None

    def same_bytes(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same shape, type and stored bytes."""
        a, b = self.tensors[name], self.tensors[other]
        same = (a.shape, a.type) == (b.shape, b.type)
        return same and bytes(self._stored(a)) == bytes(self._stored(b))

    def read(self, name: str) -> Tensor:
        """Returns a tensor's values in float32. Raises CheckpointError for a type that cannot be dequantised."""
        tensor = self.tensors[name]
        stored = self._stored(tensor)
        if tensor.type == _F32:
            values = stored.view("<f4").copy()
        elif tensor.type == _F16:
            values = stored.view("<f2").astype(np.float32)
        else:
            values = _dequantise(stored, tensor.type, f"{self.path}: {name}")
        return torch.from_numpy(values.reshape(tensor.shape))

    def _stored(self, tensor: GgufTensor) -> np.ndarray:
        return np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.start)


class _Header:
    """Reads a header. Raises ValueError and struct.error, whose text goes behind "no whole GGUF file: "."""

    def __init__(self, content: mmap.mmap):
        self.content, self.at, self.end = content, 0, min(len(content), _MOST_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            what = "big-endian numbers" if version % 65536 == 0 else f"version {version}"
            raise CheckpointError(f"GGUF with {what}; versions 2 and 3, little-endian, are read")
        n_tensors, n_values = self._count("tensors", 24), self._count("values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            if key in metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._number("I"), key)
        if (parts := metadata.get("split.count", 1)) not in (0, 1):
            raise CheckpointError(f"it is one of {parts} parts; merge them first: llama-gguf-split --merge FIRST OUT")
        if (what := metadata.get("general.type", "model")) != "model":
            raise CheckpointError(f"general.type is {what!r}, and a model is read")
        return metadata, self._tensors(n_tensors, metadata.get("general.alignment", 32))

    def _tensors(self, count: int, alignment: object) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, no power of two")
        entries = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))))
            entries.append((name, shape, self._number("I"), self._number("Q")))
        first = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            block, block_bytes = _block(kind, name)
            if name in tensors or offset % alignment or math.prod(shape) == 0 or shape[-1] % block:
                raise ValueError(f"tensor {name!r} occurs twice, or its shape {list(shape)} or offset is not valid")
            nbytes = math.prod(shape) // block * block_bytes
            if first + offset + nbytes > len(self.content):
                missing = first + offset + nbytes - len(self.content)
                raise ValueError(f"tensor {name!r} ends {missing:,} bytes after the file")
            tensors[name] = GgufTensor(shape, kind, first + offset, nbytes)
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"the value of {key!r} has the unknown type {kind}")
        item = self._number("I")
        if item == _STRING:
            return [self._string() for _ in range(self._count(f"texts of {key!r}", 8))]
        if item not in _SCALARS:
            raise ValueError(f"{key!r} is a list of the unknown type {item}")
        size = struct.calcsize(f"<{_SCALARS[item]}")
        count = self._count(f"numbers of {key!r}", size)
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._take(count * size)))

    def _count(self, what: str, least_bytes: int) -> int:
        """Reads a number of things, each of which takes at least `least_bytes`."""
        count = self._number("Q")
        if count * least_bytes > self.end - self.at:
            raise ValueError(f"it states {count:,} {what}, more than it has room for")
        return count

    def _number(self, kind: str) -> Any:
        [value] = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))
        return value

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"it ends within its header, at byte {self.end:,}")
        self.at += count
        return self.content[self.at - count : self.at]


def exact_decimal(value: float) -> float:
    """Returns the shortest decimal that rounds to the same float32: 1e-05 of 9.999999747378752e-06. Metadata hold
    float32, whose author meant the decimal."""
    return float(str(np.float32(value)))


def _block(kind: int, name: str) -> tuple[int, int]:
    """Returns elements and bytes of a type's block."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    quantisation = _library(name)
    try:
        return quantisation.GGML_QUANT_SIZES[quantisation.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"tensor {name!r} has type {kind}, which the installed gguf package does not know"
        ) from None


def _dequantise(stored: np.ndarray, kind: int, whose: str) -> np.ndarray:
    quantisation = _library(whose)
    dequantise: Callable[..., np.ndarray] = quantisation.dequantize
    wanted = quantisation.GGMLQuantizationType(kind)
    _, block_bytes = quantisation.GGML_QUANT_SIZES[wanted]
    try:
        return dequantise(stored.reshape(-1, block_bytes), wanted)
    except (NotImplementedError, AttributeError) as error:
        raise CheckpointError(f"{whose} has type {wanted.name}, which cannot be dequantised: {error}") from None


def _library(whose: str) -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{whose} is quantised, and dequantising needs the gguf package: pip install 'phalanx[gguf]'"
        ) from None
    return gguf


def _reason(error: OSError | ValueError) -> str:
    return str(error) if isinstance(error, OSError) else "the file is empty"


ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    theirs: {**BY_TYPE[model_type].kind, **more}
    for theirs, model_type, more in (
        ("llama", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("qwen3moe", "qwen3_moe", {}),
        ("gemma", "gemma", {}),
        ("gemma2", "gemma2", {"full_every": 2}),
        ("gemma3", "gemma3_text", {"full_every": 6, "window_rope_theta": 10000.0}),
        ("gpt2", "gpt2", {"activation": "gelu_tanh"}),
        ("gptneox", "gpt_neox", {"activation": "gelu", "parallel_block": True}),
        ("olmo2", "olmo2", {}),
        ("deepseek2", "llama", {}),  # what differs is in its metadata
    )
}
"""Fields of the model that llama.cpp's architectures fix: those of a model type of transformers, and its defaults.
Mistral and Mixtral are llama."""
_LATENT = ("deepseek2",)
"""Architectures with latent attention."""
_OWN_SCALE = {("gemma2", 46), ("gemma3", 62)}
"""Architectures with the layers whose scores are divided by √(d_model / n_heads): the 27B models."""
_IGNORED = {"tensor_data_layout", "rope.scaling.finetuned", "attention.causal"}
"""Keys that say nothing that the tensors do not."""
_GATES: Mapping[int, Literal["softmax", "sigmoid"]] = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""Functions of routers by their numbers; 0 is not stated."""


class _Values:
    """The numbers of an architecture. Every key that is used is noted, and every problem collected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        prefix = f"{architecture}."
        self.left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self.prefix, self.problems = prefix, list[str]()

    def take(self, key: str, default: Any = None) -> Any:
        """Returns a value, or the one value that a list repeats for every layer. Without a `default` its absence is a
        problem, and so is another type than that of the default: without one it is a whole number."""
        stated, kind = key in self.left, int if default is None else type(default)
        value = self.left.pop(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if kind is bool and value in (0, 1):
            value = bool(value)
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            found = f"is {str(value)[:60]}, expected one {kind.__name__} for all layers"
            self.problems.append(f"{self.prefix}{key} {found if stated else 'is missing'}")
            return 1 if default is None else default
        return exact_decimal(value) if isinstance(value, float) else value


def architecture_of(file: GgufFile) -> str:
    """Returns a file's architecture. Raises CheckpointError for one that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = did_you_mean(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not read{hint}; known: {', '.join(ARCHITECTURES)}"
        )
    return name


def model_of(file: GgufFile) -> ModelConfig:
    """Returns the shape of a file's model. `rope_freqs` is not in it: `gguf.py` compares that tensor.

    Raises CheckpointError with every key that is missing, or that is not understood."""
    architecture = architecture_of(file)
    kind = dict(ARCHITECTURES[architecture])
    values = _Values(file.metadata, architecture)
    heads = values.take("attention.head_count")
    width, layers = values.take("embedding_length"), values.take("block_count")
    experts, latent = values.take("expert_count", 0), architecture in _LATENT
    if latent:
        fields = kind | {"mla": _latent(values), "n_kv_heads": heads}
        head = fields["mla"].nope_head_dim + fields["mla"].rope_head_dim
    else:
        head = values.take("attention.key_length", width // max(heads, 1))
        value_head = values.take("attention.value_length", head)
        if head != value_head:
            values.problems.append(f"keys have {head} elements per head and values {value_head}; they must be equal")
        fields = kind | {
            "n_kv_heads": values.take("attention.head_count_kv", heads),
            "head_dim": 0 if head * heads == width else head,
        }
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 1
    of_norm = "attention.layer_norm_rms_epsilon" if kind["norm"] == "rmsnorm" else "attention.layer_norm_epsilon"
    fields |= {
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "d_ff": values.take("feed_forward_length", 0 if experts else None),
        "vocab_size": rows,
        "seq_len": values.take("context_length"),
        "norm_eps": values.take(of_norm, math.nan),
        "tied": is_tied(file),
        "attention_softcap": values.take("attn_logit_softcapping", 0.0),
        "logit_softcap": values.take("final_logit_softcapping", 0.0),
        "attention_scale": values.take("attention.scale", 0.0),
        "qkv_bias": kind.get("qkv_bias", False) or (not kind["bias"] and "blk.0.attn_q.bias" in file.tensors),
    }
    if (stated := values.take("vocab_size", rows)) != rows:
        values.problems.append(f"{values.prefix}vocab_size is {stated}, and token_embd.weight has {rows} rows")
    if (architecture, layers) in _OWN_SCALE:
        fields["attention_scale"] = (width / max(heads, 1)) ** -0.5
    if "parallel_block" in kind:
        fields["parallel_block"] = bool(values.take("use_parallel_residual", True))
    fields |= _windows(values, kind) | _experts(values, experts, file, latent=latent)
    if kind["positions"] == "rope":
        fields |= _rotary(values, head, latent=latent)
    unknown = [f"{values.prefix}{key} is not understood" for key in values.left if key not in _IGNORED]
    model = ModelConfig(**fields)
    shape = problems_of(Job(model=model))
    wrong = values.problems or [f"{path}: {message}" for path, message in shape if path.startswith("model.")]
    if problems := [*wrong, *unknown]:
        raise CheckpointError(f"{file.path} does not describe a model that is read: {'; '.join(problems)}")
    return model


def is_tied(file: GgufFile) -> bool:
    """Returns whether the head is the embedding: it is not stored, or, as by old converters of GPT-2, stored twice."""
    head, embedding = "output.weight", "token_embd.weight"
    return head not in file.tensors or (embedding in file.tensors and file.same_bytes(head, embedding))


def _windows(values: _Values, kind: Mapping[str, Any]) -> dict[str, Any]:
    window = values.take("attention.sliding_window", 0)
    pattern = values.left.pop("attention.sliding_window_pattern", kind.get("full_every", 0))
    if isinstance(pattern, list):  # for each layer, whether it has a window
        every = pattern.index(False) + 1 if False in pattern else 0
        full = [bool(every and (layer + 1) % every == 0) for layer in range(len(pattern))]
        if full != [not each for each in pattern]:
            name = "attention.sliding_window_pattern"
            values.problems.append(f"{values.prefix}{name}: the layers without window are not every n-th")
        pattern = every
    base = values.take("rope.freq_base_swa", kind.get("window_rope_theta", 0.0))
    return {"window": window, "full_every": pattern if window else 0, "window_rope_theta": base if window else 0.0}


def _latent(values: _Values) -> MLA:
    """Returns the sizes of latent attention. Files that store keys and values from the latent apart (`_mla` keys) state
    key_length and value_length as they are in the latent."""
    rotated, rank = values.take("rope.dimension_count"), values.take("attention.kv_lora_rank")
    key, value = (values.take(f"attention.{name}_length") for name in ("key", "value"))
    key = values.take("attention.key_length_mla", key)
    values.left.pop("attention.head_count_kv", None)  # 1 for the latent, or that of the heads
    if key <= rotated:
        values.problems.append(f"keys have {key} elements per head, of which {rotated} are rotated: none is left")
    return MLA(
        q_rank=values.take("attention.q_lora_rank", 0),
        kv_rank=rank,
        rope_head_dim=rotated,
        nope_head_dim=max(key - rotated, 1),
        v_head_dim=values.take("attention.value_length_mla", value),
    )


def _experts(values: _Values, experts: int, file: GgufFile, *, latent: bool) -> dict[str, Any]:
    if not experts:
        values.left.pop("expert_used_count", None)
        return {}
    gate, groups = values.take("expert_gating_func", 0), values.take("expert_group_count", 1)
    if gate not in _GATES:
        values.problems.append(f"{values.prefix}expert_gating_func is {gate}; known: {', '.join(map(str, _GATES))}")
    elif groups > 1 and _GATES[gate] == "softmax":
        values.problems.append(
            f"{values.prefix}expert_group_count is {groups}: routers that choose groups by softmax "
            "scores (DeepSeek-V2) are not read"
        )
    moe = MoE(
        n_experts=experts,
        top_k=values.take("expert_used_count"),
        d_ff=values.take("expert_feed_forward_length", 0),
        n_shared=values.take("expert_shared_count", 0),
        n_dense_layers=values.take("leading_dense_block_count", 0),
        router=_GATES.get(gate, "softmax"),
        renormalise=values.take("expert_weights_norm", not latent),
        route_scale=values.take("expert_weights_scale", 1.0) or 1.0,
        n_groups=groups,
        top_groups=values.take("expert_group_used_count", 1),
        bias_balanced=any(name.endswith(".exp_probs_b.bias") for name in file.tensors),
    )
    return {"moe": moe}


def _rotary(values: _Values, head: int, *, latent: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": values.take("rope.freq_base", 10000.0)}
    if not latent:
        rotated = values.take("rope.dimension_count", head)
        fields["rotary_fraction"] = rotated / head if head else 1.0
    kind = values.take("rope.scaling.type", "linear")  # as in llama.cpp; older files state a factor alone
    factor = values.take("rope.scaling.factor", values.take("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return fields
    if kind not in ("linear", "yarn"):
        values.problems.append(f"{values.prefix}rope.scaling.type is {kind!r}; known: none, linear, yarn")
        return fields
    scaling = RopeScaling(kind=kind, factor=factor)
    if kind == "yarn":
        scaling = dataclasses.replace(
            scaling,
            original_seq_len=values.take("rope.scaling.original_context_length"),
            beta_fast=values.take("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.take("rope.scaling.yarn_beta_slow", 1.0),
        )
        # A tenth of mscale_all_dim, which enlarges the scores; mscale is the same, so rotated parts keep their size.
        if latent and (growth := values.take("rope.scaling.yarn_log_multiplier", 0.0)):
            scaling = dataclasses.replace(scaling, magnitude=1.0)
            fields["attention_scale"] = (growth * math.log(factor) + 1) ** 2 / head**0.5
    values.left.pop("rope.scaling.original_context_length", None)
    return fields | {"rope_scaling": scaling}


_OUTSIDE = {"embed": "token_embd", "positions": "position_embd", "final_norm": "output_norm", "head": "output"}
_IN_BLOCK = {
    "attn_norm": "attn_norm",
    "attn.wq": "attn_q",
    "attn.wk": "attn_k",
    "attn.wv": "attn_v",
    "attn.wo": "attn_output",
    "attn.wq_a": "attn_q_a",
    "attn.wq_b": "attn_q_b",
    "attn.wkv_a": "attn_kv_a_mqa",
    "attn.wkv_b": "attn_kv_b",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.up": "ffn_up",
    "mlp.gate": "ffn_gate",
    "mlp.down": "ffn_down",
    "moe.router": "ffn_gate_inp",
    "moe.experts.up": "ffn_up_exps",
    "moe.experts.gate": "ffn_gate_exps",
    "moe.experts.down": "ffn_down_exps",
    "moe.shared.up": "ffn_up_shexp",
    "moe.shared.gate": "ffn_gate_shexp",
    "moe.shared.down": "ffn_down_shexp",
    "mlp_post_norm": "post_ffw_norm",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "deepseek2": {"attn.q_norm.weight": "attn_q_a_norm.weight", "moe.router.bias": "exp_probs_b.bias"}
}
"""Names of parameters that differ from the table, by architecture."""
_CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {
    "llama": {"attn.wq": rotary_rows("queries"), "attn.wk": rotary_rows("keys")},
    "deepseek2": {
        **dict.fromkeys(("attn.wq", "attn.wq_b"), rotary_rows("queries")),
        "attn.wkv_a": rotary_rows("shared"),
    },
}
"""Conversions of parameters that are not equal to theirs, by architecture."""
_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class _GgufSource:
    """Where the values of a parameter lie, and the function between them."""

    tensors: tuple[str, ...]
    rows: tuple[int, int] | None = None
    """The first row of the tensor, and the one after the last; None: all."""
    conversion: Conversion = SAME


class GgufModel:
    """The model of a GGUF file: its shape, and its parameters by our names, in float32.

    Raises CheckpointError, with every problem, if the file is damaged, or holds what is not understood."""

    def __init__(self, path: Path, layers: int = 0):
        """Opens a file; of its model the first `layers` layers, or all (0)."""
        self.file = GgufFile(path)
        self.architecture = architecture_of(self.file)
        whole = self._with_frequencies(model_of(self.file))
        self._left_out = range(layers or whole.n_layers, whole.n_layers)
        self.model = first_layers(whole, layers, path)
        self.shapes = parameter_shapes(self.model)
        self._require_all()

    def read(self, name: str) -> Tensor:
        """Returns the values of one of our parameters, on the CPU in float32."""
        source = self._source(name)
        rows = slice(*source.rows) if source.rows else slice(None)
        theirs = [self.file.read(tensor)[rows] for tensor in source.tensors]
        return source.conversion.ours(theirs, self.model)[0].contiguous()

    @property
    def notes(self) -> list[str]:
        """Notes on the file for the user."""
        if self.model.moe.router == "sigmoid" and self.model.moe.n_groups == 1:
            return [
                f"{self.architecture}.expert_group_count is 1 or missing: tokens choose among all experts, as in "
                "llama.cpp; DeepSeek-V3 itself limits them to groups"
            ]
        return []

    def _source(self, name: str) -> _GgufSource:
        stem, _, suffix = name.rpartition(".")
        if not stem.startswith("blocks."):
            return _GgufSource((f"{_OUTSIDE[stem]}.{suffix}",))
        _, layer, part = stem.split(".", 2)
        block, fused = f"blk.{layer}", f"blk.{layer}.attn_qkv.{suffix}"
        if part in self._rows and fused in self.file.tensors:
            return _GgufSource((fused,), self._rows[part])
        halves = tuple(f"{block}.attn_{each}_b.{suffix}" for each in "kv")
        if part == "attn.wkv_b" and halves[0] in self.file.tensors:
            return _GgufSource(halves, conversion=ABSORBED_KEYS)
        theirs = _NAMES.get(self.architecture, {}).get(f"{part}.{suffix}", f"{_IN_BLOCK[part]}.{suffix}")
        conversion = _CONVERSIONS.get(self.architecture, {}).get(part, SAME)
        return _GgufSource((f"{block}.{theirs}",), conversion=conversion)

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """Rows of a matrix that holds queries, keys and values."""
        queries, keys = (heads * self.model.head_size for heads in (self.model.n_heads, self.model.kv_heads))
        return {
            "attn.wq": (0, queries),
            "attn.wk": (queries, queries + keys),
            "attn.wv": (queries + keys, queries + 2 * keys),
        }

    def _require_all(self) -> None:
        """Raises CheckpointError with every tensor that is missing, extra or of another shape."""
        problems, used = [], dict[str, int]()
        for name, shape in self.shapes.items():
            source = self._source(name)
            expected = source.conversion.theirs([torch.empty(shape, device="meta")], self.model)
            for each, wanted in zip(source.tensors, expected, strict=True):
                tensor = self.file.tensors.get(each)
                if tensor is None:
                    problems.append(f"{each} is missing")
                    continue
                first, last = source.rows or (0, tensor.shape[0])
                rows = min(last, tensor.shape[0]) - min(first, tensor.shape[0])
                used[each] = used.get(each, 0) + rows
                if (rows, *tensor.shape[1:]) != wanted.shape:
                    problems.append(f"{each} is {list(tensor.shape)}, and {name} needs {list(wanted.shape)}")
        problems += [
            f"{name} has {self.file.tensors[name].shape[0]} rows, of which {rows} are known"
            for name, rows in used.items()
            if rows != self.file.tensors[name].shape[0]
        ]
        problems += [f"{name} is not understood" for name in self._unused(used)]
        if problems:
            shown = problems[:20] + [f"and {len(problems) - 20} more"] * (len(problems) > 20)
            raise CheckpointError(f"{self.file.path} does not hold the model it describes: {'; '.join(shown)}")

    def _unused(self, used: dict[str, int]) -> Iterator[str]:
        known = {_FREQUENCIES, *(["output.weight"] if self.model.tied else [])}
        for name in self.file.tensors:
            if name not in used and name not in known and layer_of(name) not in self._left_out:
                yield name

    def _with_frequencies(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with Llama 3.1's stretched positions if the file holds their divisors: llama.cpp stores no
        other trace of them. Raises CheckpointError for divisors of another kind."""
        if _FREQUENCIES not in self.file.tensors:
            return model
        if model.rope_scaling.factor != 1:
            raise CheckpointError(f"{self.file.path}: rope.scaling and {_FREQUENCIES} both stretch its positions")
        divisors = self.file.read(_FREQUENCIES).double()
        factor = float(divisors.max())
        if not (math.isfinite(factor) and factor >= 1) or divisors.shape != (model.rotary_size // 2,):
            raise CheckpointError(f"{self.file.path}: {_FREQUENCIES} {list(divisors.shape)} divides no frequencies")
        stretched = dataclasses.replace(model, rope_scaling=RopeScaling(kind="llama3", factor=factor))
        device = torch.device("cpu")
        ours = rotary_frequencies(model, device) / rotary_frequencies(stretched, device)
        if not torch.allclose(ours, divisors, rtol=1e-4):
            raise CheckpointError(
                f"{self.file.path}: {_FREQUENCIES} are not those of Llama 3.1 (factor {factor:g} from 8,192 tokens)"
            )
        return stretched


def import_gguf(
    path: Path, target: Path, *, precision: str = "", layers: int = 0, progress: Progress = silent
) -> Imported:
    """Writes a new run at `target` from a GGUF file.

    Args:
        path: the file.
        target: the run's directory, which must not exist.
        precision: fp64, fp32, bf16 or fp16; fp32 if it is empty.
        layers: the first layers only; 0 means all.
        progress: gets the bytes done.

    Raises JobError if the target exists; CheckpointError for a file that is damaged or holds what is not understood;
    RunError if the target cannot be written. Nothing half written is left.
    """
    if problems := list(target_problems(target)):
        raise JobError(problems)
    source, kind = GgufModel(path, layers), STORED[precision or "fp32"]
    metadata, notes = source.file.metadata, source.notes

    def read(name: str) -> Tensor:
        return as_type(source.read(name), kind, f"{path}: {name}")

    try:
        definition, end = definition_of(metadata, path), settings_of(metadata).get("eos_token", "")
        tokenizer: Tokenizer | None = LibraryTokenizer(definition, str(path), end)
    except DataError as error:  # the weights are of use without it
        tokenizer = None
        notes.append(str(error))
    small = {"tokenizer_config.json": settings_of(metadata), "generation_config.json": token_ids_of(metadata)}
    with suppress(JobError):  # what transformers cannot express is of use here all the same
        small["config.json"] = config_json.write(source.model)[1] | token_ids_of(metadata)
    incoming = Incoming(
        path,
        source.architecture,
        source.model,
        {name: StoredTensor(shape, kind, ()) for name, shape in source.shapes.items()},
        read,
        tokenizer,
        path,
        {name: json.dumps(content, indent=2, ensure_ascii=False).encode() for name, content in small.items()},
    )
    return write_import(incoming, target, notes, progress)
