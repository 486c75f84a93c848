"""The model in a GGUF file, under the names of our parameters.

llama.cpp has one name for a parameter of every architecture, so one table serves all. What its converters change is
undone: rows of queries and keys of llama are permuted for rotary pairs of neighbours (ours are half a head apart),
GPT's queries, keys and values are one matrix, and DeepSeek's keys and values from the latent are two. Gemma's norms
hold 1 + w there, as here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.errors import CheckpointError
from phalanx.exchange.conversions import AbsorbedKeys, Conversion, RotaryRows, Same
from phalanx.exchange.gguf import GgufFile
from phalanx.exchange.gguf_config import architecture_of, model_of
from phalanx.exchange.slice import first_layers, layer_of
from phalanx.model.layers import rotary_frequencies

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
    "llama": {"attn.wq": RotaryRows("queries"), "attn.wk": RotaryRows("keys")},
    "deepseek2": {
        **dict.fromkeys(("attn.wq", "attn.wq_b"), RotaryRows("queries")),
        "attn.wkv_a": RotaryRows("shared"),
    },
}
"""Conversions of parameters that are not equal to theirs, by architecture."""
_SAME = Same()
_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class _GgufSource:
    """Where the values of a parameter lie, and the function between them."""

    tensors: tuple[str, ...]
    rows: tuple[int, int] | None = None
    """The first row of the tensor, and the one after the last; None: all."""
    conversion: Conversion = _SAME


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
            return _GgufSource(halves, conversion=AbsorbedKeys())
        theirs = _NAMES.get(self.architecture, {}).get(f"{part}.{suffix}", f"{_IN_BLOCK[part]}.{suffix}")
        conversion = _CONVERSIONS.get(self.architecture, {}).get(part, _SAME)
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
